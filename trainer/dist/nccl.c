/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/nccl.h"

#include "services/base/clock.h"
#include "services/base/module.h"
#include "trainer/dist/nccl_module.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE = 600 };
static const double verdict_s = 2.0;   /* rank 0 says who died a moment after it is felt */
static const long watch_ns = 50000000; /* between two looks */

struct nccl_comm {
    struct ps_comm comm;
    const struct ps_nccl_ops *ops;
    struct ps_nccl *nccl;
    struct ps_rendezvous *rendezvous;
    pthread_t watcher;
    bool watched;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    bool stop;
    int failed_code;
    char reason[MESSAGE];
};

/* The first reason stays. */
static void keep_reason(struct nccl_comm *c, int code, const char *reason)
{
    pthread_mutex_lock(&c->lock);
    if (!c->failed_code) {
        c->failed_code = code;
        snprintf(c->reason, sizeof c->reason, "%s", reason);
    }
    pthread_mutex_unlock(&c->lock);
}

static int failed(struct nccl_comm *c, struct ps_error *err)
{
    pthread_mutex_lock(&c->lock);
    int code = c->failed_code ? ps_fail(err, c->failed_code, "%s", c->reason) : 0;
    pthread_mutex_unlock(&c->lock);
    return code;
}

/* A call's end: its own error becomes the job's reason, unless that is known or comes within a moment. */
static int leave(struct nccl_comm *c, const char *what, int code, struct ps_error *err)
{
    char reason[MESSAGE] = "", text[MESSAGE];
    struct ps_error first = {0};
    if (code == 0)
        return 0;
    if (failed(c, &first) < 0)
        return ps_fail(err, first.code, "%s", first.message);
    if (ps_rendezvous_failed(c->rendezvous, code == PS_DEADLINE_EXCEEDED ? 0.0 : verdict_s, reason,
                             sizeof reason)) {
        keep_reason(c, PS_ABORTED, reason);
    } else {
        snprintf(text, sizeof text, "%s: %.500s", what, err ? err->message : "failed");
        keep_reason(c, code, text);
        ps_rendezvous_fail(c->rendezvous, text); /* nobody else knows: the others should not wait for us */
    }
    return failed(c, err);
}

static int nccl_all_reduce(struct ps_comm *comm, void *data, size_t count, enum ps_dtype type,
                           struct ps_error *err)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    int code = failed(c, err);
    return code ? code : leave(c, "all-reduce", c->ops->all_reduce(c->nccl, data, count, type, err), err);
}

static int nccl_broadcast(struct ps_comm *comm, void *data, size_t bytes, int root, struct ps_error *err)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    int code = failed(c, err);
    return code ? code : leave(c, "broadcast", c->ops->broadcast(c->nccl, data, bytes, root, err), err);
}

static int nccl_all_gather(struct ps_comm *comm, const void *data, size_t bytes, void *out,
                           struct ps_error *err)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    int code = failed(c, err);
    return code ? code : leave(c, "all-gather", c->ops->all_gather(c->nccl, data, bytes, out, err), err);
}

static int nccl_barrier(struct ps_comm *comm, struct ps_error *err)
{
    int64_t here = 1;
    return nccl_all_reduce(comm, &here, 1, PS_I64, err);
}

static int nccl_queue_sum(struct ps_comm *comm, float *data, size_t count, struct ps_error *err)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    int code = failed(c, err);
    return code ? code : leave(c, "all-reduce", c->ops->queue_sum(c->nccl, data, count, err), err);
}

static int nccl_queue_join(struct ps_comm *comm, struct ps_error *err)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    int code = failed(c, err);
    return code ? code : leave(c, "all-reduce", c->ops->queue_join(c->nccl, err), err);
}

static int nccl_queue_mark(struct ps_comm *comm, struct ps_error *err)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    int code = failed(c, err);
    return code ? code : leave(c, "step", c->ops->queue_mark(c->nccl, err), err);
}

static void nccl_abort(struct ps_comm *comm, const char *reason)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    keep_reason(c, PS_ABORTED, reason);
    c->ops->abort(c->nccl);
}

static void nccl_destroy(struct ps_comm *comm)
{
    struct nccl_comm *c = (struct nccl_comm *)comm;
    if (!c)
        return;
    if (c->watched) {
        pthread_mutex_lock(&c->lock);
        c->stop = true;
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->watcher, NULL);
    }
    (void)c->ops->destroy(c->nccl); /* what does not end is the process's to end */
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static const struct ps_comm_ops nccl_ops = {.name = "nccl",
                                            .all_reduce = nccl_all_reduce,
                                            .broadcast = nccl_broadcast,
                                            .all_gather = nccl_all_gather,
                                            .barrier = nccl_barrier,
                                            .abort = nccl_abort,
                                            .destroy = nccl_destroy,
                                            .queue_sum = nccl_queue_sum,
                                            .queue_join = nccl_queue_join,
                                            .queue_mark = nccl_queue_mark};

static void *watch(void *context)
{
    struct nccl_comm *c = context;
    struct ps_error err = {0};
    pthread_mutex_lock(&c->lock);
    while (!c->stop && !c->failed_code) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += watch_ns;
        until.tv_sec += until.tv_nsec / PS_NS_PER_S;
        until.tv_nsec %= PS_NS_PER_S;
        pthread_cond_timedwait(&c->changed, &c->lock, &until);
        if (c->stop || c->failed_code)
            break;
        pthread_mutex_unlock(&c->lock);
        int code = c->ops->poll(c->nccl, &err);
        if (code < 0) {
            (void)leave(c, "all-reduce", code, &err);
            c->ops->break_off(c->nccl);
        }
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static int load(const struct ps_nccl_ops **ret, struct ps_error *err)
{
    void *symbol;
    const struct ps_nccl_ops *(*module)(void);
    int code = ps_module_open("nccl", "ps_nccl_module", &symbol, err);
    if (code < 0) {
        ps_error_prefix(err, "several GPUs need NCCL");
        return code;
    }
    memcpy(&module, &symbol, sizeof module); /* an object pointer is not a function pointer in ISO C */
    const struct ps_nccl_ops *ops = module();
    if (ops->abi != PS_NCCL_ABI)
        return ps_fail(err, PS_FAILED_PRECONDITION, "module nccl has version %u, this program needs %d",
                       ops->abi, PS_NCCL_ABI);
    *ret = ops;
    return 0;
}

/* Rank 0: that every rank has a GPU of its own. NCCL would say "Duplicate GPU" without the remedy. */
static int check_gpus(const struct nccl_comm *c, int world_size, double deadline_s, struct ps_error *err)
{
    char(*gpus)[PS_NCCL_GPU] = calloc((size_t)world_size, sizeof *gpus), key[64];
    int code = gpus ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (int r = 0; r < world_size && !code; r++) {
        char *text = NULL;
        size_t size = 0;
        snprintf(key, sizeof key, "nccl.gpu.%d", r);
        code = ps_rendezvous_get(c->rendezvous, key, deadline_s, &text, &size, err);
        if (!code)
            snprintf(gpus[r], sizeof gpus[r], "%s", text);
        free(text);
        for (int other = 0; other < r && !code; other++)
            if (strcmp(gpus[other], gpus[r]) == 0)
                code =
                    ps_fail(err, PS_INVALID_ARGUMENT,
                            "rank %d and rank %d share one GPU (%.*s), and NCCL needs one for each: start "
                            "at most one process per GPU, and let CUDA_VISIBLE_DEVICES differ or be absent",
                            other, r, (int)strcspn(gpus[r], " "), gpus[r]);
    }
    free(gpus);
    return code;
}

/* Every rank's GPU to rank 0, and rank 0's unique id to every rank. */
static int meet(const struct nccl_comm *c, int device, double deadline_s, unsigned char *ret_id,
                struct ps_error *err)
{
    char gpu[PS_NCCL_GPU], key[64];
    int code = c->ops->gpu(device, gpu, sizeof gpu, err);
    snprintf(key, sizeof key, "nccl.gpu.%d", c->comm.rank);
    if (!code)
        code = ps_rendezvous_set(c->rendezvous, key, gpu, strlen(gpu), err);
    if (!code && c->comm.rank == 0) {
        code = check_gpus(c, c->comm.world_size, deadline_s, err);
        if (!code)
            code = c->ops->unique_id(ret_id, err);
        return code ? code : ps_rendezvous_set(c->rendezvous, "nccl.id", ret_id, PS_NCCL_ID, err);
    }
    char *id = NULL;
    size_t size = 0;
    if (!code)
        code = ps_rendezvous_get(c->rendezvous, "nccl.id", deadline_s, &id, &size, err);
    if (!code && size != PS_NCCL_ID)
        code = ps_fail(err, PS_INTERNAL, "rank 0's NCCL id has %zu bytes", size);
    if (!code)
        memcpy(ret_id, id, PS_NCCL_ID);
    free(id);
    return code;
}

int ps_comm_nccl(struct ps_rendezvous *rendezvous, int rank, int world_size,
                 const struct ps_nccl_options *options, struct ps_comm **ret, struct ps_error *err)
{
    const struct ps_nccl_ops *ops = NULL;
    unsigned char id[PS_NCCL_ID];
    const double init_s = options->init_s > 0 ? options->init_s : 120.0;
    int code = load(&ops, err);
    if (code < 0)
        return code;
    struct nccl_comm *c = calloc(1, sizeof *c);
    if (!c)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    c->comm = (struct ps_comm){&nccl_ops, rank, world_size};
    c->ops = ops;
    c->rendezvous = rendezvous;
    pthread_condattr_t attributes;
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attributes);
    pthread_condattr_destroy(&attributes);

    code = meet(c, options->device, init_s, id, err);
    const struct ps_nccl_config config = {
        .rank = rank,
        .world_size = world_size,
        .device = options->device,
        .id = id,
        .stream = options->stream,
        .init_s = init_s,
        .collective_s = options->collective_s > 0 ? options->collective_s : 600.0,
    };
    if (!code)
        code = ops->create(&config, &c->nccl, err);
    const bool attached = !code;
    if (attached) { /* a death while the ranks connect ends the wait */
        ps_rendezvous_attach(rendezvous, &c->comm);
        code = ops->connect(c->nccl, err);
    }
    if (!code) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int rc = pthread_create(&c->watcher, NULL, watch, c);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        c->watched = rc == 0;
        if (rc)
            code = ps_fail_errno(err, rc, "cannot start the thread that watches NCCL");
    }
    if (code) {
        code = leave(c, "NCCL", code, err);
        if (attached)
            ps_rendezvous_attach(rendezvous, NULL);
        nccl_destroy(&c->comm);
        return code;
    }
    *ret = &c->comm;
    return 0;
}
