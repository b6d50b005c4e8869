/* SPDX-License-Identifier: Apache-2.0 */
#include "services/rpc/pool.h"

#include <stdlib.h>
#include <string.h>

/* Handlers use SQLite and file buffers of some 100 KiB at most; the sanitizers want more. */
enum { STACK_BYTES = 2 << 20 };

static void *work(void *arg)
{
    struct ps_rpc_pool *pool = arg;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->head && !pool->ending)
            pthread_cond_wait(&pool->work, &pool->lock);
        struct ps_rpc_job *job = pool->head;
        if (!job)
            break;
        pool->head = job->next;
        if (!pool->head)
            pool->tail = &pool->head;
        pool->queued--;
        pool->running++;
        pthread_mutex_unlock(&pool->lock);
        job->run(job); /* frees the job */
        pthread_mutex_lock(&pool->lock);
        pool->running--;
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

int ps_rpc_pool_init(struct ps_rpc_pool *pool, const char *name, size_t thread_max, size_t queue_max,
                     struct ps_error *err)
{
    memset(pool, 0, sizeof *pool);
    pthread_t *threads = calloc(thread_max, sizeof *threads);
    if (!threads)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    pthread_mutex_init(&pool->lock, NULL);
    ps_rpc_cond_init(&pool->work);
    pool->threads = threads;
    pool->thread_max = thread_max;
    pool->queue_max = queue_max;
    pool->name = name;
    pool->tail = &pool->head;
    return 0;
}

bool ps_rpc_pool_submit(struct ps_rpc_pool *pool, struct ps_rpc_job *job)
{
    pthread_mutex_lock(&pool->lock);
    size_t taken = pool->running + pool->queued;
    bool accepted = taken < pool->thread_count;
    if (!accepted && pool->thread_count < pool->thread_max &&
        !ps_rpc_thread(&pool->threads[pool->thread_count], STACK_BYTES, pool->name, work, pool)) {
        pool->thread_count++;
        accepted = true;
    }
    if (!accepted && pool->thread_count)
        accepted = taken - pool->thread_count < pool->queue_max;
    if (accepted) {
        job->next = NULL;
        *pool->tail = job;
        pool->tail = &job->next;
        pool->queued++;
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
    return accepted;
}

void ps_rpc_pool_done(struct ps_rpc_pool *pool)
{
    if (!pool->threads)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->ending = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (size_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    memset(pool, 0, sizeof *pool);
}
