/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/local.h"

#include "services/base/clock.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double default_collective_s = 600;

enum kind { ALL_REDUCE, BROADCAST, ALL_GATHER, BARRIER };
static const char *const kind_names[] = {"all-reduce", "broadcast", "all-gather", "barrier"};

struct call { /* what one rank wants */
    enum kind kind;
    enum ps_dtype type;
    int root;
    size_t count;         /* elements of an all-reduce, else bytes */
    void *data;           /* an all-gather's is read only */
    unsigned long number; /* of this rank's calls, from 1 */
};

struct group {
    pthread_mutex_t lock; /* guards all below; calls[] of a rank is read by others between the two meetings */
    pthread_cond_t changed;
    int world_size, users, arrived;
    int inside; /* ranks between the two meetings of a call: they use all ranks' memory */
    unsigned long meeting;
    double collective_s;
    struct ps_error error; /* the first; stays */
    struct call *calls;    /* [world_size] */
};

struct local_comm {
    struct ps_comm comm;
    struct group *group;
};

/* The lock is held. */
static void break_group(struct group *g, const struct ps_error *why)
{
    if (!g->error.code)
        g->error = *why;
    pthread_cond_broadcast(&g->changed);
}

/* The lock is held. The first rank's call against this one's. */
static void check_call(struct group *g, int rank)
{
    const struct call *first = NULL, *mine = &g->calls[rank];
    int other = 0;
    struct ps_error why = {0};
    for (int r = 0; r < g->world_size && !first; r++)
        if (r != rank && g->calls[r].number == mine->number) {
            first = &g->calls[r];
            other = r;
        }
    if (!first || (first->kind == mine->kind && first->type == mine->type && first->root == mine->root &&
                   first->count == mine->count))
        return;
    ps_fail(&why, PS_INTERNAL, "rank %d calls %s of %zu, rank %d %s of %zu: all ranks must call the same",
            rank, kind_names[mine->kind], mine->count, other, kind_names[first->kind], first->count);
    break_group(g, &why);
}

/* All ranks come here, or the group breaks. ends: the call's second meeting, which no rank leaves, not even
 * for a group that is broken, while another one still works on its memory (that takes no longer than a sum).
 */
static int meet(struct local_comm *c, bool ends, double deadline, struct ps_error *err)
{
    struct group *g = c->group;
    pthread_mutex_lock(&g->lock);
    const unsigned long meeting = g->meeting;
    if (ends && --g->inside == 0)
        pthread_cond_broadcast(&g->changed);
    if (!g->error.code && ++g->arrived == g->world_size) {
        g->arrived = 0;
        g->inside = ends ? 0 : g->world_size;
        g->meeting++;
        pthread_cond_broadcast(&g->changed);
    }
    const struct timespec until = {.tv_sec = (time_t)deadline,
                                   .tv_nsec = (long)((deadline - (double)(time_t)deadline) * 1e9)};
    while (g->meeting == meeting && !g->error.code) {
        if (pthread_cond_timedwait(&g->changed, &g->lock, &until) == ETIMEDOUT && g->meeting == meeting &&
            !g->error.code) {
            struct ps_error why = {0};
            ps_fail(&why, PS_DEADLINE_EXCEEDED, "a collective took longer than %g s: %d of %d ranks came",
                    g->collective_s, g->arrived, g->world_size);
            break_group(g, &why);
        }
    }
    while (ends && g->inside && g->meeting == meeting)
        pthread_cond_wait(&g->changed, &g->lock);
    int code = g->meeting == meeting ? ps_fail(err, g->error.code, "%s", g->error.message) : 0;
    pthread_mutex_unlock(&g->lock);
    return code;
}

#define SUM(T)                                                                                               \
    for (size_t i = first; i < end; i++) {                                                                   \
        T sum = ((const T *)calls[0].data)[i];                                                               \
        for (int r = 1; r < world; r++)                                                                      \
            sum += ((const T *)calls[r].data)[i];                                                            \
        for (int r = 0; r < world; r++)                                                                      \
            ((T *)calls[r].data)[i] = sum;                                                                   \
    }

/* Each rank sums its own part of the elements, for all. */
static void sum_part(const struct call *calls, int world, int rank)
{
    const size_t count = calls[0].count, w = (size_t)world, r0 = (size_t)rank;
    const size_t first = count / w * r0 + (count % w < r0 ? count % w : r0),
                 end = first + count / w + (r0 < count % w);
    switch (calls[0].type) {
    case PS_F32:
        SUM(float)
        break;
    case PS_F64:
        SUM(double)
        break;
    case PS_I64:
        SUM(int64_t)
        break;
    case PS_U8:
        SUM(uint8_t)
        break;
    }
}

static int collective(struct ps_comm *comm, struct call call, void *out, struct ps_error *err)
{
    struct local_comm *c = (struct local_comm *)comm;
    struct group *g = c->group;
    const double deadline = ps_monotonic_s() + g->collective_s;
    pthread_mutex_lock(&g->lock);
    call.number = g->calls[comm->rank].number + 1;
    g->calls[comm->rank] = call;
    check_call(g, comm->rank);
    pthread_mutex_unlock(&g->lock);
    int code = meet(c, false, deadline, err);
    if (code)
        return code;
    switch (call.kind) {
    case ALL_REDUCE:
        sum_part(g->calls, g->world_size, comm->rank);
        break;
    case BROADCAST:
        if (comm->rank != call.root && call.count)
            memcpy(call.data, g->calls[call.root].data, call.count);
        break;
    case ALL_GATHER:
        for (int r = 0; r < g->world_size && call.count; r++)
            memcpy((char *)out + (size_t)r * call.count, g->calls[r].data, call.count);
        break;
    case BARRIER:
        break;
    }
    return meet(c, true, deadline, err);
}

static int local_all_reduce(struct ps_comm *comm, void *data, size_t count, enum ps_dtype type,
                            struct ps_error *err)
{
    return collective(comm, (struct call){.kind = ALL_REDUCE, .type = type, .count = count, .data = data},
                      NULL, err);
}

static int local_broadcast(struct ps_comm *comm, void *data, size_t bytes, int root, struct ps_error *err)
{
    if (root < 0 || root >= comm->world_size)
        return ps_fail(err, PS_INVALID_ARGUMENT, "rank %d is out of range: the world size is %d", root,
                       comm->world_size);
    return collective(comm, (struct call){.kind = BROADCAST, .root = root, .count = bytes, .data = data},
                      NULL, err);
}

static int local_all_gather(struct ps_comm *comm, const void *data, size_t bytes, void *out,
                            struct ps_error *err)
{
    return collective(comm, (struct call){.kind = ALL_GATHER, .count = bytes, .data = (void *)data}, out,
                      err);
}

static int local_barrier(struct ps_comm *comm, struct ps_error *err)
{
    return collective(comm, (struct call){.kind = BARRIER}, NULL, err);
}

static void local_abort(struct ps_comm *comm, const char *reason)
{
    struct group *g = ((struct local_comm *)comm)->group;
    struct ps_error why = {0};
    ps_fail(&why, PS_ABORTED, "%s", reason);
    pthread_mutex_lock(&g->lock);
    break_group(g, &why);
    pthread_mutex_unlock(&g->lock);
}

static void group_free(struct group *g)
{
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g->calls);
    free(g);
}

static void local_destroy(struct ps_comm *comm)
{
    if (!comm)
        return;
    struct group *g = ((struct local_comm *)comm)->group;
    pthread_mutex_lock(&g->lock);
    bool last = --g->users == 0;
    pthread_mutex_unlock(&g->lock);
    if (last)
        group_free(g);
    free(comm);
}

static const struct ps_comm_ops local_ops = {.name = "local",
                                             .all_reduce = local_all_reduce,
                                             .broadcast = local_broadcast,
                                             .all_gather = local_all_gather,
                                             .barrier = local_barrier,
                                             .abort = local_abort,
                                             .destroy = local_destroy};

int ps_comm_local(int world_size, double collective_s, struct ps_comm **ret_comms, struct ps_error *err)
{
    if (world_size < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "a group of %d replicas", world_size);
    struct group *g = calloc(1, sizeof *g);
    struct call *calls = calloc((size_t)world_size, sizeof *calls);
    struct local_comm **made = calloc((size_t)world_size, sizeof(void *));
    bool whole = g && calls && made;
    for (int r = 0; r < world_size && whole; r++)
        whole = (made[r] = calloc(1, sizeof **made)) != NULL;
    if (!whole) {
        for (int r = 0; r < world_size && made; r++)
            free(made[r]);
        free(made);
        free(calls);
        free(g);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for %d replicas", world_size);
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    g->world_size = g->users = world_size;
    g->collective_s = collective_s > 0 ? collective_s : default_collective_s;
    g->calls = calls;
    for (int r = 0; r < world_size; r++) {
        *made[r] = (struct local_comm){{&local_ops, r, world_size}, g};
        ret_comms[r] = &made[r]->comm;
    }
    free(made);
    return 0;
}
