/* SPDX-License-Identifier: Apache-2.0
 * Collectives between the ranks of a job. The reducer and the loop know communicators through this table
 * only: gloo (host memory), nccl (device memory) or single (world size 1: nothing to do).
 *
 * Every rank calls the same functions in the same order with the same counts. One thread at a time. Each call
 * ends by success, by the collective deadline, or soon after abort; after the first failure all further calls
 * fail with the first reason.
 */
#ifndef PARAMSYNC_DIST_COMM_H
#define PARAMSYNC_DIST_COMM_H

#include "services/base/error.h"

#include <stddef.h>
#include <stdint.h>

struct ps_comm;

enum ps_dtype { PS_F32, PS_F64, PS_I64, PS_U8 };

struct ps_comm_ops {
    const char *name;
    /* Sum over ranks, in place. */
    int (*all_reduce)(struct ps_comm *comm, void *data, size_t count, enum ps_dtype type,
                      struct ps_error *err);
    int (*broadcast)(struct ps_comm *comm, void *data, size_t bytes, int root, struct ps_error *err);
    /* out: world_size * bytes, by rank. */
    int (*all_gather)(struct ps_comm *comm, const void *data, size_t bytes, void *out, struct ps_error *err);
    int (*barrier)(struct ps_comm *comm, struct ps_error *err);
    /* From any thread: makes calls in progress and to come fail with this reason. Idempotent, does not block.
     */
    void (*abort)(struct ps_comm *comm, const char *reason);
    void (*destroy)(struct ps_comm *comm); /* takes NULL */

    /* Communicators for device memory only, NULL in all others: those above take host memory there, too.
     * queue_sum: a float32 sum over ranks, in place, behind all that the backend's stream was given so far;
     * on a stream of its own, so that what comes later on the backend's runs beside it. queue_join: the
     * backend's stream waits for all sums queued. Both return at once, may be captured into a graph, and are
     * called by one thread. A failure on the way aborts the communicator. */
    int (*queue_sum)(struct ps_comm *comm, float *data, size_t count, struct ps_error *err);
    int (*queue_join)(struct ps_comm *comm, struct ps_error *err);
    /* After a step's work is queued, captured or not: from now on its collective deadline runs. */
    int (*queue_mark)(struct ps_comm *comm, struct ps_error *err);
};

/* First member of every communicator. */
struct ps_comm {
    const struct ps_comm_ops *ops;
    int rank, world_size;
};

/* World size 1; never fails but for memory. */
struct ps_comm *ps_comm_single(void);

#endif
