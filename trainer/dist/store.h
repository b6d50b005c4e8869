/* SPDX-License-Identifier: Apache-2.0
 * Rank 0's side of the rendezvous: the key-value store, who is there, and who is not any more. Internal to
 * dist. */
#ifndef PARAMSYNC_DIST_STORE_H
#define PARAMSYNC_DIST_STORE_H

#include "services/base/error.h"

struct ps_store;

struct ps_store_config {
    int world_size;
    const char *host;
    int port;
    const char *secret; /* copied */
    double join_s, heartbeat_s;
};

/* Listens and starts the thread. local_fd: one end of a socket pair, rank 0's own connection; owned on
 * success. */
int ps_store_open(const struct ps_store_config *config, int local_fd, struct ps_store **ret, int *ret_port,
                  struct ps_error *err);
/* Ends the thread and closes all connections. Rank 0's own connection has said goodbye before. Takes NULL. */
void ps_store_close(struct ps_store *store);

#endif
