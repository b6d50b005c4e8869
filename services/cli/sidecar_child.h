/* SPDX-License-Identifier: Apache-2.0
 * A paramsyncd of one's own: started before the ranks, stopped after them. */
#ifndef PARAMSYNC_CLI_SIDECAR_CHILD_H
#define PARAMSYNC_CLI_SIDECAR_CHILD_H

#include "services/base/error.h"

#include <stdbool.h>
#include <sys/types.h>

struct cli_sidecar {
    pid_t pid;               /* 0: none, or it has ended */
    int pipe;                /* its standard output, kept open */
    char grpc[64], http[64]; /* as it listens: 127.0.0.1:PORT */
};

/* data_dir is made if absent. everywhere: gRPC on all addresses, not on loopback alone; then with the token
 * in token_file. Waits until it is ready. */
int cli_sidecar_start(const char *data_dir, bool everywhere, const char *token_file, struct cli_sidecar *ret,
                      struct ps_error *err);
/* SIGTERM, a wait for what it still writes, then SIGKILL. Harmless if it is not there. */
void cli_sidecar_stop(struct cli_sidecar *sidecar);

#endif
