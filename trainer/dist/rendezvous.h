/* SPDX-License-Identifier: Apache-2.0
 * Where the ranks of a job meet, and the line by which they know of each other's death.
 *
 * Rank 0 serves a small key-value store on tcp://HOST:PORT; every rank keeps one connection to it until the
 * end. Both ends prove that they know the job's secret (HMAC-SHA-256 over both sides' nonces); whoever does
 * not is dropped. Heartbeats run on a thread of its own in every rank, so that a long computation is no
 * silence:
 *   - a rank whose connection closes without goodbye is dead at once, a silent one after heartbeat_s;
 *   - rank 0 tells every rank which one died, and each rank's watchdog then (1) lets the attached
 * communicator fail with that reason, (2) calls on_failure. When rank 0 dies all others notice the same way.
 * A failed job never heals: start all ranks again.
 *
 * Thread-safe, except open and close. Threads made here block all signals. */
#ifndef PARAMSYNC_DIST_RENDEZVOUS_H
#define PARAMSYNC_DIST_RENDEZVOUS_H

#include "services/base/error.h"
#include "trainer/dist/comm.h"

#include <stddef.h>
#include <stdint.h>

struct ps_rendezvous;

enum {
    PS_RENDEZVOUS_KEY_MAX = 256,       /* bytes, without the NUL */
    PS_RENDEZVOUS_VALUE_MAX = 1 << 20, /* bytes */
};

struct ps_rendezvous_config {
    int rank, world_size;
    const char
        *host; /* of rank 0. A loopback name or address: it listens there alone, else on all addresses */
    int port;  /* 0: any free one, told to on_listening (rank 0 only) */
    const char *secret; /* the same on all ranks; at most 319 bytes */
    double join_s;      /* until all ranks must have joined; 0: 300 s */
    double heartbeat_s; /* 0: 5 s; at least 0.2 */
    /* Rank 0, on the calling thread, before it waits for the others; ranks may join meanwhile. A failure ends
     * open. May be NULL. */
    int (*on_listening)(void *context, int port, struct ps_error *err);
    /* Once, on the watchdog's thread, after the attached communicator was told. May end the process (_exit):
     * that is how a rank whose main thread computes is stopped. Not called once close has begun. May be NULL.
     */
    void (*on_failure)(void *context, const char *reason);
    void *context;
};

/* Returns when all ranks have joined. Fails, on every rank with the real reason, if they do not in time,
 * disagree on the world size, or two have the same rank. A busy port fails at once. */
int ps_rendezvous_open(const struct ps_rendezvous_config *config, struct ps_rendezvous **ret,
                       struct ps_error *err);

/* Says goodbye, so that the end is no alarm; rank 0 waits at most leave_s for the others' goodbye, because
 * they would take its end for a death. Then frees. Takes NULL. */
void ps_rendezvous_close(struct ps_rendezvous *rendezvous, double leave_s);

/* The store. Values are copied. get waits until the key is there (PS_DEADLINE_EXCEEDED after deadline_s) and
 * *ret_data is free()d by the caller, with a NUL after the bytes. add: a counter that begins at 0; returns
 * the sum. All fail with the job's reason once it has failed. */
int ps_rendezvous_set(struct ps_rendezvous *rendezvous, const char *key, const void *data, size_t size,
                      struct ps_error *err);
int ps_rendezvous_get(struct ps_rendezvous *rendezvous, const char *key, double deadline_s, char **ret_data,
                      size_t *ret_size, struct ps_error *err);
int ps_rendezvous_add(struct ps_rendezvous *rendezvous, const char *key, int64_t amount, int64_t *ret_sum,
                      struct ps_error *err);

/* This rank among those on the same host (by host name), and how many they are. */
void ps_rendezvous_locality(const struct ps_rendezvous *rendezvous, int *ret_local_rank, int *ret_local_size);
/* The numeric address of this machine by which the other ranks reach it: the one on the way to rank 0, and
 * never a loopback address when some rank is on another machine. */
const char *ps_rendezvous_address(const struct ps_rendezvous *rendezvous);

/* This rank fails for a reason of its own: tells all ranks ("rank 2 failed: REASON"). Returns at once. */
void ps_rendezvous_fail(struct ps_rendezvous *rendezvous, const char *reason);
/* 1 and the reason if the job has failed, waiting at most wait_s for the news; else 0. */
int ps_rendezvous_failed(struct ps_rendezvous *rendezvous, double wait_s, char *reason, size_t size);

/* The communicator to abort on failure; NULL detaches (before it is destroyed). One at a time. */
void ps_rendezvous_attach(struct ps_rendezvous *rendezvous, struct ps_comm *comm);

#endif
