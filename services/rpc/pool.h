/* SPDX-License-Identifier: Apache-2.0
 * Threads that run calls. A pool starts a thread only when all it has are busy, and keeps it for the next
 * call. */
#ifndef PARAMSYNC_RPC_POOL_H
#define PARAMSYNC_RPC_POOL_H

#include "services/rpc/core.h"

struct ps_rpc_job { /* embedded in what is run */
    struct ps_rpc_job *next;
    void (*run)(struct ps_rpc_job *job);
};

struct ps_rpc_pool {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t work;
    struct ps_rpc_job *head, **tail;
    size_t queued, queue_max; /* jobs without a thread of their own that may wait */
    size_t running;
    pthread_t *threads;
    size_t thread_count, thread_max;
    const char *name;
    bool ending;
};

int ps_rpc_pool_init(struct ps_rpc_pool *pool, const char *name, size_t thread_max, size_t queue_max,
                     struct ps_error *err);
/* Never blocks. False when every thread is busy and the queue is full. Thread-safe. */
bool ps_rpc_pool_submit(struct ps_rpc_pool *pool, struct ps_rpc_job *job);
/* When no job is left and none will come. Harmless on a zeroed pool. */
void ps_rpc_pool_done(struct ps_rpc_pool *pool);

#endif
