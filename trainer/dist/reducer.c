/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/reducer.h"

#include "services/base/clock.h"
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct bucket {
    size_t offset, count; /* elements, in the memory of all buckets */
    int first, params;    /* of the order */
    int pending;          /* gradients that have not arrived in this step; the loop's thread */
};

struct gather {
    const void *mine;
    size_t bytes;
    void *all;
    bool done;
};

struct ps_reducer {
    const struct ps_backend_ops *ops;
    struct ps_backend *backend;
    const struct ps_model *model;
    struct ps_comm *comm;
    struct ps_trace *trace;
    size_t first_bytes, bucket_bytes;

    /* The loop's thread alone: */
    float *memory; /* param_elements floats: bucket after bucket */
    float *grads;
    float share;
    int *order;            /* parameters, bucket after bucket */
    int *bucket_of;        /* by parameter */
    size_t *place;         /* by parameter: its elements' place in memory */
    int *arrival, arrived; /* parameters in this step's order of arrival */
    unsigned char *seen;
    bool rebuilt, in_step;
    bool queued; /* sums go to a stream, and there is no thread */
    int full;    /* buckets before this one are full and launched */
    struct ps_error step_error;

    pthread_t thread;
    bool thread_runs;
    pthread_mutex_t lock; /* guards all below; the table of buckets itself only changes between steps */
    pthread_cond_t changed;
    struct bucket *buckets;
    int bucket_count;
    int launched, reduced; /* buckets of this step: handed to the thread, and done */
    bool stop;
    struct gather *gather; /* the loop's thread waits for it; taken when all that is launched is reduced */
    struct ps_error error; /* the first of the communicator; stays */
    double reduce_s;
};

/* ---- the communication thread ---- */

/* The lock is held, and given up for the exchange. */
static void run_gather(struct ps_reducer *r)
{
    struct gather *g = r->gather;
    struct ps_error err = {0};
    pthread_mutex_unlock(&r->lock);
    double start = ps_monotonic_s();
    int code = r->comm->ops->all_gather(r->comm, g->mine, g->bytes, g->all, &err);
    ps_trace_span(r->trace, PS_TRACE_COMM, "all-gather", start, ps_monotonic_s(), NULL, 0);
    pthread_mutex_lock(&r->lock);
    if (code < 0 && !r->error.code)
        r->error = err;
    g->done = code == 0;
    r->gather = NULL;
    pthread_cond_broadcast(&r->changed);
}

static void *reducer_thread(void *context)
{
    struct ps_reducer *r = context;
    pthread_mutex_lock(&r->lock);
    for (;;) {
        while (!r->stop && (r->error.code || (r->reduced == r->launched && !r->gather)))
            pthread_cond_wait(&r->changed, &r->lock);
        if (r->stop)
            break;
        if (r->reduced == r->launched) {
            run_gather(r);
            continue;
        }
        struct bucket *b = &r->buckets[r->reduced];
        float *data = r->memory + b->offset;
        size_t count = b->count;
        int number = r->reduced;
        pthread_mutex_unlock(&r->lock);
        struct ps_error err = {0};
        double start = ps_monotonic_s();
        int code = r->comm->ops->all_reduce(r->comm, data, count, PS_F32, &err);
        double took = ps_monotonic_s() - start;
        ps_trace_span(r->trace, PS_TRACE_COMM, "all-reduce", start, start + took, "bucket", number);
        pthread_mutex_lock(&r->lock);
        r->reduce_s += took;
        if (code < 0 && !r->error.code)
            r->error = err;
        else if (code == 0)
            r->reduced++;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- buckets ---- */

/* Appends in order; a bucket is closed when it has reached its limit, so it may exceed it by one parameter.
 */
static void build_buckets(struct ps_reducer *r, size_t first_limit, size_t limit)
{
    const struct ps_model *m = r->model;
    size_t offset = 0, bytes = 0;
    pthread_mutex_lock(&r->lock);
    r->bucket_count = 0;
    for (int i = 0; i < m->param_count; i++) {
        int param = r->order[i];
        if (bytes == 0)
            r->buckets[r->bucket_count] = (struct bucket){.offset = offset, .first = i};
        struct bucket *b = &r->buckets[r->bucket_count];
        r->bucket_of[param] = r->bucket_count;
        r->place[param] = offset;
        b->params++;
        b->count += m->params[param].count;
        offset += m->params[param].count;
        bytes += m->params[param].count * sizeof(float);
        if (bytes >= (r->bucket_count == 0 ? first_limit : limit) || i + 1 == m->param_count) {
            r->bucket_count++;
            bytes = 0;
        }
    }
    pthread_mutex_unlock(&r->lock);
}

static int build_in_order(struct ps_reducer *r, const int *order, const char *whose, struct ps_error *err)
{
    int count = r->model->param_count;
    memcpy(r->order, order, (size_t)count * sizeof *r->order);
    memset(r->seen, 0, (size_t)count);
    for (int i = 0; i < count; i++) {
        if (r->order[i] < 0 || r->order[i] >= count || r->seen[r->order[i]]++)
            return ps_fail(err, PS_INTERNAL, "%s order of gradients is no order of this model's parameters",
                           whose);
    }
    build_buckets(r, r->first_bytes, r->bucket_bytes);
    r->rebuilt = true;
    return 0;
}

/* Once, after the first step: rank 0's order of arrival is everybody's. */
static int rebuild_buckets(struct ps_reducer *r, struct ps_error *err)
{
    int code = r->comm->ops->broadcast(r->comm, r->arrival,
                                       (size_t)r->model->param_count * sizeof *r->arrival, 0, err);
    return code < 0 ? code : build_in_order(r, r->arrival, "rank 0's", err);
}

int ps_reducer_create(const struct ps_reducer_config *config, struct ps_reducer **ret, struct ps_error *err)
{
    struct ps_reducer *r = calloc(1, sizeof *r);
    if (!r)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int count = config->model->param_count, code = 0;
    *r = (struct ps_reducer){.ops = config->ops,
                             .backend = config->backend,
                             .model = config->model,
                             .comm = config->comm,
                             .trace = config->trace,
                             .first_bytes = config->first_bucket_bytes ? config->first_bucket_bytes : 1 << 20,
                             .bucket_bytes = config->bucket_bytes ? config->bucket_bytes : 25 << 20};
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    size_t n = (size_t)count + 1; /* calloc(0) may give NULL */
    r->order = calloc(n, sizeof *r->order);
    r->bucket_of = calloc(n, sizeof *r->bucket_of);
    r->place = calloc(n, sizeof *r->place);
    r->arrival = calloc(n, sizeof *r->arrival);
    r->seen = calloc(n, 1);
    r->buckets = calloc(n, sizeof *r->buckets);
    bool alone = r->comm->world_size == 1;
    r->queued = !alone && r->comm->ops->queue_sum && r->ops->stream;
    if (!alone)
        r->memory = r->ops->allocate(r->backend, r->model->param_elements * sizeof(float));
    if (!r->order || !r->bucket_of || !r->place || !r->arrival || !r->seen || !r->buckets ||
        (!alone && !r->memory))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for %zu bytes of gradient buckets",
                       r->model->param_elements * sizeof(float));
    else if (!alone && !(r->grads = r->ops->gradients(r->backend)))
        code = ps_fail(err, PS_FAILED_PRECONDITION,
                       "the backend has no gradients: it was not made for training");
    if (code == 0) {
        for (int i = 0; i < count; i++)
            r->order[i] = count - 1 - i;
        build_buckets(r, SIZE_MAX, SIZE_MAX);
        if (config->order)
            code = build_in_order(r, config->order, "the resumed training's", err);
        if (code == 0 && !alone && !r->queued) {
            sigset_t all, before;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            int rc = pthread_create(&r->thread, NULL, reducer_thread, r);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            r->thread_runs = rc == 0;
            if (rc)
                code = ps_fail_errno(err, rc, "cannot start the communication thread");
        }
    }
    if (code < 0) {
        ps_reducer_free(r);
        return code;
    }
    *ret = r;
    return 0;
}

struct ps_reducer *ps_reducer_free(struct ps_reducer *r)
{
    if (!r)
        return NULL;
    if (r->thread_runs) {
        pthread_mutex_lock(&r->lock);
        r->stop = true;
        pthread_cond_broadcast(&r->changed);
        pthread_mutex_unlock(&r->lock);
        pthread_join(r->thread, NULL);
    }
    if (r->memory)
        r->ops->release(r->backend, r->memory);
    free(r->order);
    free(r->bucket_of);
    free(r->place);
    free(r->arrival);
    free(r->seen);
    free(r->buckets);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
    free(r);
    return NULL;
}

/* ---- a step ---- */

void ps_reducer_begin(struct ps_reducer *r, double share)
{
    r->share = (float)share;
    r->arrived = 0;
    r->full = 0;
    r->in_step = true;
    memset(r->seen, 0, (size_t)r->model->param_count);
    pthread_mutex_lock(&r->lock);
    r->launched = r->reduced = 0;
    r->reduce_s = 0;
    for (int i = 0; i < r->bucket_count; i++)
        r->buckets[i].pending = r->buckets[i].params;
    r->step_error = r->error;
    pthread_mutex_unlock(&r->lock);
}

void ps_reducer_ready(void *reducer, int param)
{
    struct ps_reducer *r = reducer;
    if (r->step_error.code)
        return;
    if (!r->in_step || param < 0 || param >= r->model->param_count) {
        ps_fail(&r->step_error, PS_INTERNAL, "a gradient arrived %s: parameter %d",
                r->in_step ? "for no parameter of this model" : "outside of a step", param);
        return;
    }
    const struct ps_param *p = &r->model->params[param];
    if (r->seen[param]++) {
        ps_fail(&r->step_error, PS_INTERNAL, "the gradient of %s arrived twice in one step", p->name);
        return;
    }
    r->arrival[r->arrived++] = param;
    double start = r->trace ? ps_monotonic_s() : 0;
    if (r->trace) /* when and how large: `paramsync plan` makes any number of ranks of it */
        ps_trace_span(r->trace, PS_TRACE_LOOP, "gradient", start, start, "elements", (long)p->count);
    if (r->comm->world_size == 1)
        return;
    if (r->ops->copy_scaled(r->backend, r->memory + r->place[param], r->grads + p->offset, p->count, r->share,
                            &r->step_error) < 0)
        return;
    if (r->trace)
        ps_trace_span(r->trace, PS_TRACE_LOOP, "copy in", start, ps_monotonic_s(), "bucket",
                      r->bucket_of[param]);
    r->buckets[r->bucket_of[param]].pending--;
    int before = r->full;
    while (r->full < r->bucket_count && r->buckets[r->full].pending == 0)
        r->full++; /* a later bucket that is full waits for its turn: all ranks reduce in the same order */
    for (int i = before; r->queued && i < r->full && !r->step_error.code; i++)
        (void)r->comm->ops->queue_sum(r->comm, r->memory + r->buckets[i].offset, r->buckets[i].count,
                                      &r->step_error);
    if (r->full > before && !r->queued) {
        pthread_mutex_lock(&r->lock);
        r->launched = r->full;
        pthread_cond_broadcast(&r->changed);
        pthread_mutex_unlock(&r->lock);
    }
}

/* This rank cannot complete the step; the others would wait for it. */
static int give_up(struct ps_reducer *r, struct ps_error *err)
{
    pthread_mutex_lock(&r->lock);
    if (!r->error.code) /* before the reduction under way fails of the abort and gives that for the reason */
        r->error = r->step_error;
    int code = ps_fail(err, r->error.code, "%s", r->error.message);
    pthread_mutex_unlock(&r->lock);
    if (r->comm->world_size > 1)
        r->comm->ops->abort(r->comm, r->step_error.message);
    return code;
}

static int copy_back(struct ps_reducer *r, int bucket, struct ps_error *err)
{
    int code = 0;
    for (int k = 0; k < r->buckets[bucket].params && code == 0; k++) {
        const struct ps_param *p = &r->model->params[r->order[r->buckets[bucket].first + k]];
        code = r->ops->copy_scaled(r->backend, r->grads + p->offset,
                                   r->memory + r->place[p - r->model->params], p->count, 1.0f, err);
    }
    return code;
}

static int finish_queued(struct ps_reducer *r, struct ps_error *err)
{
    int code = r->comm->ops->queue_join(r->comm, err);
    for (int i = 0; i < r->bucket_count && code == 0; i++)
        code = copy_back(r, i, err);
    return code ? code : r->comm->ops->queue_mark(r->comm, err);
}

int ps_reducer_finish(struct ps_reducer *r, struct ps_reducer_times *ret_times, struct ps_error *err)
{
    double start = ps_monotonic_s(), end = start;
    int count = r->model->param_count;
    if (!r->in_step && !r->step_error.code)
        return ps_fail(err, PS_FAILED_PRECONDITION, "ps_reducer_finish without ps_reducer_begin");
    r->in_step = false;
    if (!r->step_error.code && r->arrived < count) {
        int missing = 0;
        while (r->seen[missing])
            missing++;
        ps_fail(&r->step_error, PS_INTERNAL,
                "%d of %d parameters got no gradient in this step; the first is %s", count - r->arrived,
                count, r->model->params[missing].name);
    }
    if (r->step_error.code)
        return give_up(r, err);
    if (r->queued) {
        int code = finish_queued(r, err);
        if (code < 0)
            return code;
    } else if (r->comm->world_size > 1) {
        for (int i = 0; i < r->bucket_count; i++) {
            double waiting = ps_monotonic_s();
            pthread_mutex_lock(&r->lock);
            while (r->reduced <= i && !r->error.code)
                pthread_cond_wait(&r->changed, &r->lock);
            int code = r->error.code ? ps_fail(err, r->error.code, "%s", r->error.message) : 0;
            pthread_mutex_unlock(&r->lock);
            end = ps_monotonic_s();
            ps_trace_span(r->trace, PS_TRACE_LOOP, "wait", waiting, end, "bucket", i);
            if (code < 0)
                return code;
            code = copy_back(r, i, err); /* while the next bucket is still under way */
            if (code < 0)
                return code;
            ps_trace_span(r->trace, PS_TRACE_LOOP, "copy out", end, ps_monotonic_s(), "bucket", i);
        }
    }
    struct ps_reducer_times times = {.wait_s = end - start, .buckets = r->bucket_count};
    pthread_mutex_lock(&r->lock);
    times.reduce_s = r->reduce_s;
    pthread_mutex_unlock(&r->lock);
    if (!r->rebuilt) {
        int code = rebuild_buckets(r, err);
        if (code < 0)
            return code;
    }
    if (ret_times)
        *ret_times = times;
    return 0;
}

int ps_reducer_gather(struct ps_reducer *r, const void *mine, size_t bytes, void *all, struct ps_error *err)
{
    if (!r->in_step || r->comm->world_size == 1 || r->queued) /* queued: one thread, one stream */
        return r->comm->ops->all_gather(r->comm, mine, bytes, all, err);
    struct gather g = {.mine = mine, .bytes = bytes, .all = all};
    pthread_mutex_lock(&r->lock);
    r->gather = &g;
    pthread_cond_broadcast(&r->changed);
    /* The thread alone sets the error here, and never while it works on this. */
    while (!g.done && !r->error.code)
        pthread_cond_wait(&r->changed, &r->lock);
    r->gather = NULL;
    int code = g.done ? 0 : ps_fail(err, r->error.code, "%s", r->error.message);
    pthread_mutex_unlock(&r->lock);
    return code;
}

bool ps_reducer_order(const struct ps_reducer *r, int *ret_order)
{
    if (r->rebuilt)
        memcpy(ret_order, r->order, (size_t)r->model->param_count * sizeof *r->order);
    return r->rebuilt;
}

int ps_reducer_bucket(const struct ps_reducer *r, int bucket, size_t *ret_bytes, int *ret_params)
{
    if (bucket >= 0 && bucket < r->bucket_count) {
        *ret_bytes = r->buckets[bucket].count * sizeof(float);
        *ret_params = r->buckets[bucket].params;
    }
    return r->bucket_count;
}
