/* SPDX-License-Identifier: Apache-2.0
 * The face of libparamsync-nccl.so. Internal to dist: nccl.c is the only user. All functions fill err. One
 * thread at a time, but for abort and poll. */
#ifndef PARAMSYNC_DIST_NCCL_MODULE_H
#define PARAMSYNC_DIST_NCCL_MODULE_H

#include "services/base/error.h"
#include "trainer/dist/comm.h"

#include <stddef.h>
#include <stdint.h>

enum { PS_NCCL_ABI = 1, PS_NCCL_ID = 128, PS_NCCL_GPU = 96 };

struct ps_nccl_config {
    int rank, world_size, device;
    const void *id;              /* PS_NCCL_ID bytes, the same on all ranks */
    void *stream;                /* the backend's (cudaStream_t) */
    double init_s, collective_s; /* deadlines */
};

struct ps_nccl;

struct ps_nccl_ops {
    uint32_t abi;
    int (*unique_id)(void *ret_id, struct ps_error *err);
    /* A text that two processes have in common only if their device is the same GPU. */
    int (*gpu)(int device, char *ret_text, size_t size, struct ps_error *err);
    /* Memory and streams, without the other ranks; connect then waits for them until the deadline or an
     * abort. */
    int (*create)(const struct ps_nccl_config *config, struct ps_nccl **ret, struct ps_error *err);
    int (*connect)(struct ps_nccl *nccl, struct ps_error *err);
    /* Takes NULL. 0, or negative if NCCL did not come back from an abort: the device cannot be used any more,
     * and what belongs to the communicator is left to the end of the process. */
    int (*destroy)(struct ps_nccl *nccl);
    int (*all_reduce)(struct ps_nccl *nccl, void *data, size_t count, enum ps_dtype type,
                      struct ps_error *err);
    int (*broadcast)(struct ps_nccl *nccl, void *data, size_t bytes, int root, struct ps_error *err);
    int (*all_gather)(struct ps_nccl *nccl, const void *data, size_t bytes, void *out, struct ps_error *err);
    int (*queue_sum)(struct ps_nccl *nccl, float *data, size_t count, struct ps_error *err);
    int (*queue_join)(struct ps_nccl *nccl, struct ps_error *err);
    int (*queue_mark)(struct ps_nccl *nccl, struct ps_error *err);
    /* From any thread: what waits, and all to come, returns PS_ABORTED. Calls nothing of NCCL. */
    void (*abort)(struct ps_nccl *nccl);
    /* From the watching thread: 0, or the first of NCCL's asynchronous errors, or PS_DEADLINE_EXCEEDED for a
     * mark whose work is not done in time. */
    int (*poll)(struct ps_nccl *nccl, struct ps_error *err);
    /* From the watching thread: aborts, and lets NCCL drop what the device waits for, so that a host that
     * waits for the device goes on. */
    void (*break_off)(struct ps_nccl *nccl);
};

const struct ps_nccl_ops *ps_nccl_module(void);

#endif
