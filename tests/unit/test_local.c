/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/clock.h"
#include "trainer/dist/local.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 5, LENGTH = 1003 };

struct member {
    struct ps_comm *comm;
    pthread_t thread;
    void (*work)(struct member *m);
    int code;
    struct ps_error err;
    float sums[LENGTH], *large;
    bool good;
};

static void *run(void *context)
{
    struct member *m = context;
    m->work(m);
    return NULL;
}

static void run_group(struct member *members, int world, double collective_s, void (*work)(struct member *m))
{
    struct ps_comm *comms[MOST];
    struct ps_error err = {0};
    assert_int_equal(ps_comm_local(world, collective_s, comms, &err), 0);
    memset(members, 0, (size_t)world * sizeof *members);
    for (int r = 0; r < world; r++) {
        members[r].comm = comms[r];
        members[r].work = work;
        members[r].good = true;
        assert_int_equal(comms[r]->rank, r);
        assert_int_equal(comms[r]->world_size, world);
        assert_int_equal(pthread_create(&members[r].thread, NULL, run, &members[r]), 0);
    }
    for (int r = 0; r < world; r++)
        pthread_join(members[r].thread, NULL);
    for (int r = 0; r < world; r++)
        comms[r]->ops->destroy(comms[r]);
}

static float element(int rank, int i)
{
    return (float)(i + 1) * 0.37f + (float)rank * 1.7f;
}

static void all_kinds(struct member *m)
{
    struct ps_comm *c = m->comm;
    const int w = c->world_size;
    for (int round = 0; round < 20 && !m->code; round++) {
        double d[3] = {c->rank + 0.25, 1, round};
        int64_t k[2] = {(int64_t)1 << 40, c->rank};
        int32_t mine[2] = {c->rank, round}, all[2 * MOST] = {0};
        char text[8] = "";
        for (int i = 0; i < LENGTH; i++)
            m->sums[i] = element(c->rank, i);
        if (c->rank == round % w)
            memcpy(text, "hello", 6);
        m->code = c->ops->all_reduce(c, m->sums, LENGTH, PS_F32, &m->err);
        if (!m->code)
            m->code = c->ops->all_reduce(c, d, 3, PS_F64, &m->err);
        if (!m->code)
            m->code = c->ops->all_reduce(c, k, 2, PS_I64, &m->err);
        if (!m->code)
            m->code = c->ops->broadcast(c, text, sizeof text, round % w, &m->err);
        if (!m->code)
            m->code = c->ops->all_gather(c, mine, sizeof mine, all, &m->err);
        if (!m->code)
            m->code = c->ops->barrier(c, &m->err);
        const int ranks = w * (w - 1) / 2;
        m->good = m->good && d[0] == ranks + 0.25 * w && d[1] == w && d[2] == round * w;
        m->good = m->good && k[0] == ((int64_t)w << 40) && k[1] == ranks && !strcmp(text, "hello");
        for (int r = 0; r < w; r++)
            m->good = m->good && all[2 * r] == r && all[2 * r + 1] == round;
    }
}

static void test_collectives(void **state)
{
    (void)state;
    for (int world = 1; world <= MOST; world++) {
        struct member *members = calloc(MOST, sizeof *members);
        run_group(members, world, 60, all_kinds);
        for (int r = 0; r < world; r++) {
            assert_int_equal(members[r].code, 0);
            assert_true(members[r].good);
            /* in rank order, to the bit, on every rank */
            for (int i = 0; i < LENGTH; i++) {
                float sum = element(0, i);
                for (int k = 1; k < world; k++)
                    sum += element(k, i);
                assert_memory_equal(&members[r].sums[i], &sum, sizeof sum);
            }
        }
        free(members);
    }
}

static void disagree(struct member *m)
{
    float v[4] = {0};
    m->code = m->comm->ops->barrier(m->comm, &m->err);
    if (!m->code)
        m->code = m->comm->ops->all_reduce(m->comm, v, m->comm->rank == 1 ? 3 : 4, PS_F32, &m->err);
}

static void test_other_counts_are_named(void **state)
{
    (void)state;
    struct member *members = calloc(3, sizeof *members);
    run_group(members, 3, 60, disagree);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(members[r].code, PS_INTERNAL);
        assert_non_null(strstr(members[r].err.message, "rank 1"));
        assert_non_null(strstr(members[r].err.message, "all-reduce of 3"));
    }
    free(members);
}

static void stay_away(struct member *m)
{
    double start = ps_monotonic_s();
    if (m->comm->rank != 2)
        m->code = m->comm->ops->barrier(m->comm, &m->err);
    m->good = ps_monotonic_s() - start < 30;
}

static void test_deadline(void **state)
{
    (void)state;
    struct member *members = calloc(3, sizeof *members);
    run_group(members, 3, 0.2, stay_away);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(members[r].code, PS_DEADLINE_EXCEEDED);
        assert_true(members[r].good);
        assert_non_null(strstr(members[r].err.message, "2 of 3 ranks"));
    }
    free(members);
}

static void one_aborts(struct member *m)
{
    if (m->comm->rank == 0)
        m->comm->ops->abort(m->comm, "replica 0 has no data");
    m->code = m->comm->ops->barrier(m->comm, &m->err);
    if (m->code) /* the reason stays */
        m->code = m->comm->ops->barrier(m->comm, &m->err);
}

static void test_abort_ends_waits(void **state)
{
    (void)state;
    struct member *members = calloc(4, sizeof *members);
    run_group(members, 4, 600, one_aborts);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(members[r].code, PS_ABORTED);
        assert_string_equal(members[r].err.message, "replica 0 has no data");
    }
    free(members);
}

enum { LARGE = 3 << 20, MARK = 0x5a };

struct aborter {
    struct ps_comm *comm;
    double at_s;
};

static void *abort_later(void *context)
{
    struct aborter *a = context;
    while (ps_monotonic_s() < a->at_s)
        sched_yield();
    a->comm->ops->abort(a->comm, "given up in the middle of a sum");
    return NULL;
}

/* What a rank does with its memory once its call has failed is its own business. */
static void sum_and_reuse(struct member *m)
{
    m->code = m->comm->ops->all_reduce(m->comm, m->large, LARGE, PS_F32, &m->err);
    if (m->code)
        memset(m->large, MARK, LARGE * sizeof *m->large);
}

static void test_failed_call_leaves_the_memory_alone(void **state)
{
    (void)state;
    enum { WORLD = 4, ROUNDS = 24 };
    struct member *members = calloc(WORLD, sizeof *members);
    float *marked = malloc(LARGE * sizeof *marked);
    memset(marked, MARK, LARGE * sizeof *marked);
    for (int round = 0; round < ROUNDS; round++) { /* the abort falls before, into and behind the sum */
        struct ps_comm *comms[WORLD];
        struct ps_error err = {0};
        assert_int_equal(ps_comm_local(WORLD, 600, comms, &err), 0);
        for (int r = 0; r < WORLD; r++) {
            members[r] = (struct member){.comm = comms[r], .work = sum_and_reuse};
            members[r].large = calloc(LARGE, sizeof(float));
            assert_non_null(members[r].large);
        }
        struct aborter aborter = {comms[0], ps_monotonic_s() + round * 0.001};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, abort_later, &aborter), 0);
        for (int r = 0; r < WORLD; r++)
            assert_int_equal(pthread_create(&members[r].thread, NULL, run, &members[r]), 0);
        for (int r = 0; r < WORLD; r++)
            pthread_join(members[r].thread, NULL);
        pthread_join(thread, NULL);
        for (int r = 0; r < WORLD; r++) {
            if (members[r].code)
                assert_memory_equal(members[r].large, marked, LARGE * sizeof *marked);
            comms[r]->ops->destroy(comms[r]);
            free(members[r].large);
        }
    }
    free(marked);
    free(members);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_other_counts_are_named),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_abort_ends_waits),
        cmocka_unit_test(test_failed_call_leaves_the_memory_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
