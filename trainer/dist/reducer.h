/* SPDX-License-Identifier: Apache-2.0
 * Averages gradients over the ranks while backward is still running. Semantics of PyTorch's
 * DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp and compute_bucket_assignment_by_size,
 * torch >= 1.13):
 *   - parameters are put into buckets in order, each closed when its size reaches the limit: 1 MiB for the
 * first, 25 MiB after (so a bucket may exceed its limit);
 *   - the first step uses one bucket; after it the buckets are built once, in the order in which rank 0's
 * gradients arrived;
 *   - buckets are reduced strictly in index order, each as soon as it and all before it are full, on a thread
 * of the reducer's own;
 *   - a gradient is multiplied by this rank's share (1 / world size for equal shards) while copied into its
 * bucket, then summed over the ranks, then copied back to the flat gradients.
 *
 * A step, all on the loop's thread:
 *     ps_reducer_begin(r, share);
 *     ops->backward(backend, accumulate, NULL, ps_reducer_ready, r, &err);   (of the last micro-step)
 *     ps_reducer_finish(r, &times, &err);
 *
 * With a communicator for device memory (queue_sum) there is no thread: the sums are queued on its stream as
 * the buckets fill, and finish makes the backend's stream wait for them, not the host. Wait times are then 0.
 *
 * The reducer's thread uses the communicator between begin and finish, and only there: the loop's own
 * collectives (evaluation, hashes) come before begin or after finish, and what a backward itself exchanges
 * goes through ps_reducer_gather. That keeps the order of collectives the same everywhere. */
#ifndef PARAMSYNC_DIST_REDUCER_H
#define PARAMSYNC_DIST_REDUCER_H

#include "services/base/trace.h"
#include "trainer/backend/backend.h"
#include "trainer/dist/comm.h"

struct ps_reducer;

struct ps_reducer_config {
    const struct ps_backend_ops *ops; /* all outlive the reducer */
    struct ps_backend *backend;
    const struct ps_model *model;
    struct ps_comm *comm;      /* world size 1: no copy and no reduction, the checks remain */
    size_t first_bucket_bytes; /* 0: 1 MiB */
    size_t bucket_bytes;       /* 0: 25 MiB */
    /* Parameters in the order in which their gradients arrived in a training that goes on: its buckets are
     * built at once, so that sums over three or more ranks are added as they were (the ring's order of adding
     * depends on an element's place in its bucket). NULL: a first step in one bucket. Copied; the same on all
     * ranks. */
    const int *order;
    struct ps_trace *trace; /* NULL: none. Outlives the reducer */
};

struct ps_reducer_times {
    double wait_s;   /* from finish's call (backward done) to the end of the last bucket's reduction: what was
                        exposed */
    double reduce_s; /* inside the communicator, all buckets: what would be exposed without overlap */
    int buckets;
};

int ps_reducer_create(const struct ps_reducer_config *config, struct ps_reducer **ret, struct ps_error *err);
/* Between steps. Takes NULL, returns NULL. */
struct ps_reducer *ps_reducer_free(struct ps_reducer *reducer);

/* share: this rank's part of the step's samples (local count / global count), so that a short last batch
 * weighs what it holds; the gradient must be the mean over the local samples. Never fails: errors come from
 * finish. */
void ps_reducer_begin(struct ps_reducer *reducer, double share);
/* A ps_grad_ready with the reducer as context. */
void ps_reducer_ready(void *reducer, int param);
/* Waits for the reductions and copies back. PS_INTERNAL naming the parameter whose gradient came twice, or
 * never: the communicator is then aborted, because the other ranks would wait for this one. After a failure
 * all further steps fail with the first reason. ret_times may be NULL. */
int ps_reducer_finish(struct ps_reducer *reducer, struct ps_reducer_times *ret_times, struct ps_error *err);

/* An all-gather of host memory (bytes from each rank, to world_size * bytes by rank) from inside a backward,
 * on the loop's thread: it goes out behind the buckets that are launched, which is the same place on every
 * rank. Outside of begin .. finish it goes out at once. */
int ps_reducer_gather(struct ps_reducer *reducer, const void *mine, size_t bytes, void *all,
                      struct ps_error *err);

/* The order by which the buckets were built: param_count parameters. False before the first step has shown
 * it.
 */
bool ps_reducer_order(const struct ps_reducer *reducer, int *ret_order);

/* The present buckets, for --profile and tests: bytes and parameters of bucket i. Returns the number of
 * buckets. */
int ps_reducer_bucket(const struct ps_reducer *reducer, int bucket, size_t *ret_bytes, int *ret_params);

#endif
