/* SPDX-License-Identifier: Apache-2.0
 * A communicator between threads of one process: a room in which all ranks meet. Sums are added in rank
 * order. Each all-reduce takes latency_s longer, as a slow network would; the order of calls is recorded. */
#ifndef PARAMSYNC_TESTS_FAKE_COMM_H
#define PARAMSYNC_TESTS_FAKE_COMM_H

#include "trainer/dist/comm.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FAKE_RANKS = 8, FAKE_CALLS = 256 };

struct fake_room {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int world_size, arrived;
    unsigned long round;
    const void *given[FAKE_RANKS];
    void *result; /* of the last round */
    int broken;
    char reason[300];
    double latency_s;
    size_t counts[FAKE_CALLS]; /* elements of the all-reduces */
    int calls;
};

struct fake_comm {
    struct ps_comm comm;
    struct fake_room *room;
};

static inline void fake_room_init(struct fake_room *room, int world_size)
{
    *room = (struct fake_room){.world_size = world_size};
    pthread_mutex_init(&room->lock, NULL);
    pthread_cond_init(&room->changed, NULL);
}

static inline void fake_room_done(struct fake_room *room)
{
    free(room->result);
    pthread_mutex_destroy(&room->lock);
    pthread_cond_destroy(&room->changed);
}

/* The last to arrive calls combine (with the lock held), which returns the result in new memory. */
static inline int fake_meet(struct fake_comm *c, const void *mine, void *out, size_t bytes,
                            void *(*combine)(struct fake_room *room, size_t bytes, int more), int more,
                            struct ps_error *err)
{
    struct fake_room *room = c->room;
    pthread_mutex_lock(&room->lock);
    unsigned long round = room->round;
    if (!room->broken) {
        room->given[c->comm.rank] = mine;
        if (++room->arrived == room->world_size) {
            free(room->result);
            room->result = combine(room, bytes, more);
            room->arrived = 0;
            room->round++;
            pthread_cond_broadcast(&room->changed);
        }
        while (room->round == round && !room->broken)
            pthread_cond_wait(&room->changed, &room->lock);
    }
    int code = room->round == round ? ps_fail(err, PS_ABORTED, "%s", room->reason) : 0;
    if (code == 0 && bytes)
        memcpy(out, room->result, bytes);
    /* Nobody starts the next round before all have their result. */
    if (code == 0) {
        room->arrived++;
        round = room->round;
        if (room->arrived == room->world_size) {
            room->arrived = 0;
            room->round++;
            pthread_cond_broadcast(&room->changed);
        }
        while (room->round == round && !room->broken)
            pthread_cond_wait(&room->changed, &room->lock);
    }
    pthread_mutex_unlock(&room->lock);
    return code;
}

static inline void *fake_sum(struct fake_room *room, size_t bytes, int more)
{
    (void)more;
    float *sum = malloc(bytes + 1);
    memcpy(sum, room->given[0], bytes);
    for (int rank = 1; rank < room->world_size; rank++)
        for (size_t i = 0; i < bytes / sizeof(float); i++)
            sum[i] += ((const float *)room->given[rank])[i];
    if (room->calls < FAKE_CALLS)
        room->counts[room->calls++] = bytes / sizeof(float);
    return sum;
}

static inline void *fake_copy(struct fake_room *room, size_t bytes, int root)
{
    void *copy = malloc(bytes + 1);
    if (bytes)
        memcpy(copy, room->given[root], bytes);
    return copy;
}

static inline void *fake_join(struct fake_room *room, size_t bytes, int more)
{
    (void)more;
    char *all = malloc(bytes + 1);
    size_t each = bytes / (size_t)room->world_size;
    for (int rank = 0; rank < room->world_size; rank++)
        memcpy(all + (size_t)rank * each, room->given[rank], each);
    return all;
}

static inline int fake_all_reduce(struct ps_comm *comm, void *data, size_t count, enum ps_dtype type,
                                  struct ps_error *err)
{
    struct fake_comm *c = (struct fake_comm *)comm;
    if (type != PS_F32)
        return ps_fail(err, PS_UNIMPLEMENTED, "the room sums floats");
    int code = fake_meet(c, data, data, count * sizeof(float), fake_sum, 0, err);
    double s = c->room->latency_s;
    if (code == 0 && s > 0) {
        struct timespec ts = {.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)};
        nanosleep(&ts, NULL);
    }
    return code;
}

static inline int fake_broadcast(struct ps_comm *comm, void *data, size_t bytes, int root,
                                 struct ps_error *err)
{
    return fake_meet((struct fake_comm *)comm, data, data, bytes, fake_copy, root, err);
}

static inline int fake_all_gather(struct ps_comm *comm, const void *data, size_t bytes, void *out,
                                  struct ps_error *err)
{
    return fake_meet((struct fake_comm *)comm, data, out, bytes * (size_t)comm->world_size, fake_join, 0,
                     err);
}

static inline int fake_barrier(struct ps_comm *comm, struct ps_error *err)
{
    return fake_meet((struct fake_comm *)comm, NULL, NULL, 0, fake_copy, 0, err);
}

static inline void fake_abort(struct ps_comm *comm, const char *reason)
{
    struct fake_room *room = ((struct fake_comm *)comm)->room;
    pthread_mutex_lock(&room->lock);
    if (!room->broken) {
        room->broken = 1;
        snprintf(room->reason, sizeof room->reason, "%s", reason);
        pthread_cond_broadcast(&room->changed);
    }
    pthread_mutex_unlock(&room->lock);
}

static inline void fake_destroy(struct ps_comm *comm)
{
    (void)comm; /* on the caller's stack */
}

static const struct ps_comm_ops fake_comm_ops = {.name = "fake",
                                                 .all_reduce = fake_all_reduce,
                                                 .broadcast = fake_broadcast,
                                                 .all_gather = fake_all_gather,
                                                 .barrier = fake_barrier,
                                                 .abort = fake_abort,
                                                 .destroy = fake_destroy};

static inline struct fake_comm fake_comm_in(struct fake_room *room, int rank)
{
    return (struct fake_comm){{&fake_comm_ops, rank, room->world_size}, room};
}

#endif
