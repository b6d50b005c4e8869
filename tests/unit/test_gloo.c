/* SPDX-License-Identifier: Apache-2.0
 * Ranks are threads of this process; the module is the real one. Whole processes:
 * tests/integration/dist_test.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/clock.h"
#include "services/base/module.h"
#include "trainer/dist/gloo.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int port, world_size;
    int stuck; /* ranks that have seen their failure */
};

struct member {
    struct job *job;
    int rank;
    double collective_s;
    const char *interface;
    int (*body)(struct member *m, struct ps_comm *comm);
    struct ps_rendezvous *r;
    pthread_t thread;
    int code;
    struct ps_error err;
    double took_s;
};

static int on_listening(void *context, int port, struct ps_error *err)
{
    (void)err;
    struct job *job = ((struct member *)context)->job;
    pthread_mutex_lock(&job->lock);
    job->port = port;
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    return 0;
}

static void *run_member(void *context)
{
    struct member *m = context;
    struct ps_rendezvous_config config = {.rank = m->rank,
                                          .world_size = m->job->world_size,
                                          .host = "127.0.0.1",
                                          .secret = "test_gloo",
                                          .join_s = 20,
                                          .on_listening = on_listening,
                                          .context = m};
    struct ps_gloo_options options = {
        .interface = m->interface, .connect_s = 20, .collective_s = m->collective_s};
    struct ps_comm *comm = NULL;
    pthread_mutex_lock(&m->job->lock);
    while (m->rank != 0 && !m->job->port)
        pthread_cond_wait(&m->job->changed, &m->job->lock);
    config.port = m->rank ? m->job->port : 0;
    pthread_mutex_unlock(&m->job->lock);
    m->code = ps_rendezvous_open(&config, &m->r, &m->err);
    if (m->code == 0)
        m->code = ps_comm_open(m->r, m->rank, m->job->world_size, &options, &comm, &m->err);
    double start = ps_monotonic_s();
    if (m->code == 0)
        m->code = m->body(m, comm);
    m->took_s = ps_monotonic_s() - start;
    ps_comm_close(m->r, comm);
    ps_rendezvous_close(m->r, 10);
    return NULL;
}

static void run_job(struct member *members, int count)
{
    struct job job = {.world_size = count};
    pthread_mutex_init(&job.lock, NULL);
    pthread_cond_init(&job.changed, NULL);
    for (int i = 0; i < count; i++) {
        members[i].job = &job;
        members[i].rank = i;
        assert_int_equal(pthread_create(&members[i].thread, NULL, run_member, &members[i]), 0);
    }
    for (int i = 0; i < count; i++)
        pthread_join(members[i].thread, NULL);
}

static int sums(struct member *m, struct ps_comm *comm)
{
    int code = 0, wrong = 0;
    /* Around the ring's boundaries: fewer elements than ranks, than segments, and not divisible. */
    static const size_t sizes[] = {1, 2, 3, 4, 5, 7, 31, 1021, 300007};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes && code == 0; s++) {
        size_t n = sizes[s];
        float *v = malloc(n * sizeof *v), *all = malloc(n * sizeof *all * (size_t)comm->world_size);
        for (size_t i = 0; i < n; i++)
            v[i] = (float)((i * 3 + (size_t)m->rank * 5) % 17);
        code = comm->ops->all_gather(comm, v, n * sizeof *v, all, &m->err);
        if (code == 0)
            code = comm->ops->all_reduce(comm, v, n, PS_F32, &m->err);
        for (size_t i = 0; i < n && code == 0; i++) {
            float want = 0;
            for (int rank = 0; rank < comm->world_size; rank++) {
                float one = (float)((i * 3 + (size_t)rank * 5) % 17);
                wrong += all[(size_t)rank * n + i] != one;
                want += one;
            }
            wrong += v[i] != want;
        }
        for (int root = 0; root < comm->world_size && code == 0; root++) {
            v[0] = v[n - 1] = (float)m->rank;
            code = comm->ops->broadcast(comm, v, n * sizeof *v, root, &m->err);
            wrong += v[0] != (float)root || v[n - 1] != (float)root;
        }
        free(v);
        free(all);
    }
    double d[2] = {0.5, 1e300};
    int64_t k = INT64_C(1) << 60;
    unsigned char u = 1;
    struct ps_error err = {0};
    if (code == 0)
        code = comm->ops->all_reduce(comm, d, 1, PS_F64, &m->err);
    if (code == 0)
        code = comm->ops->all_reduce(comm, &k, 1, PS_I64, &m->err);
    wrong += d[0] != 0.5 * comm->world_size || d[1] != 1e300 || k != (INT64_C(1) << 60) * comm->world_size;
    /* Refused on the spot, and no reason to stop. */
    wrong += comm->ops->all_reduce(comm, &u, 1, PS_U8, &err) != PS_INVALID_ARGUMENT;
    wrong += comm->ops->broadcast(comm, &u, 1, comm->world_size, &err) != PS_INVALID_ARGUMENT;
    if (code == 0)
        code = comm->ops->all_reduce(comm, d, 0, PS_F64, &m->err);
    if (code == 0)
        code = comm->ops->barrier(comm, &m->err);
    return code == 0 && wrong ? ps_fail(&m->err, PS_INTERNAL, "%d wrong values", wrong) : code;
}

static void test_sums(void **state)
{
    (void)state;
    for (int world_size = 2; world_size <= 5; world_size++) {
        struct member m[5] = {{0}};
        for (int i = 0; i < world_size; i++)
            m[i].body = sums;
        m[1].interface = "127.0.0.1";
        run_job(m, world_size);
        for (int i = 0; i < world_size; i++)
            if (m[i].code != 0)
                fail_msg("world size %d, rank %d: %s", world_size, i, m[i].err.message);
    }
}

/* A float sum depends on the order: the bits must be the same on all ranks, and in all runs. */
static int inexact(struct member *m, struct ps_comm *comm)
{
    enum { N = 4099 };
    static float all[3 * N];
    float v[N];
    unsigned random = 7u + 31u * (unsigned)m->rank;
    for (int i = 0; i < N; i++) {
        random = random * 1664525u + 1013904223u;
        v[i] = (float)(random >> 8) * 1e-7f;
    }
    int code = comm->ops->all_reduce(comm, v, N, PS_F32, &m->err);
    float *mine = malloc(sizeof all);
    if (code == 0)
        code = comm->ops->all_gather(comm, v, sizeof v, mine, &m->err);
    for (int rank = 1; rank < 3 && code == 0; rank++)
        if (memcmp(mine, mine + (size_t)rank * N, sizeof v) != 0)
            code = ps_fail(&m->err, PS_DATA_LOSS, "ranks 0 and %d have different bits", rank);
    if (code == 0 && m->rank == 0) {
        if (all[0] != 0 && memcmp(all, mine, sizeof all) != 0)
            code = ps_fail(&m->err, PS_DATA_LOSS, "two runs have different bits");
        memcpy(all, mine, sizeof all);
    }
    free(mine);
    return code;
}

static void test_same_bits_everywhere(void **state)
{
    (void)state;
    for (int run = 0; run < 2; run++) {
        struct member m[3] = {{.body = inexact}, {.body = inexact}, {.body = inexact}};
        run_job(m, 3);
        for (int i = 0; i < 3; i++)
            if (m[i].code != 0)
                fail_msg("rank %d: %s", i, m[i].err.message);
    }
}

/* The last rank does not come until the others have given up. */
static int late(struct member *m, struct ps_comm *comm)
{
    struct job *job = m->job;
    struct ps_error again = {0};
    int code = 0;
    if (m->rank == comm->world_size - 1) {
        pthread_mutex_lock(&job->lock);
        while (job->stuck < comm->world_size - 1)
            pthread_cond_wait(&job->changed, &job->lock);
        pthread_mutex_unlock(&job->lock);
    }
    code = comm->ops->barrier(comm, &m->err);
    if (comm->ops->barrier(comm, &again) != code || strcmp(again.message, m->err.message) != 0)
        code = 1; /* the first reason stays */
    pthread_mutex_lock(&job->lock);
    job->stuck++;
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    return code;
}

static void test_deadline(void **state)
{
    (void)state;
    struct member m[2] = {{.body = late, .collective_s = 0.5}, {.body = late, .collective_s = 30}};
    run_job(m, 2);
    assert_int_equal(m[0].code, PS_DEADLINE_EXCEEDED);
    assert_true(m[0].took_s > 0.4 && m[0].took_s < 15);
    assert_non_null(strstr(m[0].err.message, "barrier: not finished within 0.5 s"));
    /* Rank 0 gave up, and says so to all. */
    assert_int_equal(m[1].code, PS_ABORTED);
    assert_non_null(strstr(m[1].err.message, "rank 0 failed: barrier: not finished within 0.5 s"));
}

/* Every rank but the last waits inside of a collective; the last one gives up. */
static int gives_up(struct member *m, struct ps_comm *comm)
{
    float v[64] = {0};
    int code = 0;
    if (m->rank == comm->world_size - 1) {
        for (int i = 0; i < 20 && code == 0; i++)
            code = comm->ops->all_reduce(comm, v, 64, PS_F32, &m->err);
        ps_rendezvous_fail(m->r, "no more data");
        ps_rendezvous_failed(m->r, 10, NULL, 0);
        return code;
    }
    while (code == 0)
        code = comm->ops->all_reduce(comm, v, 64, PS_F32, &m->err);
    return code;
}

static void test_abort_ends_waits(void **state)
{
    (void)state;
    for (int round = 0; round < 5; round++) {
        struct member m[3] = {{.body = gives_up}, {.body = gives_up}, {.body = gives_up}};
        run_job(m, 3);
        assert_int_equal(m[2].code, 0);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(m[i].code, PS_ABORTED);
            if (strcmp(m[i].err.message, "rank 2 failed: no more data") != 0)
                fail_msg("rank %d: %s", i, m[i].err.message);
            assert_true(m[i].took_s < 15);
        }
    }
}

static int nothing(struct member *m, struct ps_comm *comm)
{
    (void)m;
    (void)comm;
    return 0;
}

static void test_unknown_interface(void **state)
{
    (void)state;
    struct member m[2] = {{.body = nothing, .interface = "nowhere0"},
                          {.body = nothing, .interface = "nowhere0"}};
    run_job(m, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(m[i].code, PS_INVALID_ARGUMENT);
        assert_non_null(strstr(m[i].err.message, "--interface nowhere0"));
        assert_non_null(strstr(m[i].err.message, "lo (127.0.0.1)"));
    }
}

static void test_no_module(void **state)
{
    (void)state;
    setenv("PARAMSYNC_MODULE_DIR", "/nowhere", 1);
    struct ps_comm *comm = NULL;
    struct ps_gloo_options options = {0};
    struct ps_error err = {0};
    assert_int_equal(ps_comm_open(NULL, 0, 2, &options, &comm, &err), PS_UNAVAILABLE);
    assert_non_null(strstr(err.message, "several processes on CPUs need Gloo"));
    unsetenv("PARAMSYNC_MODULE_DIR");
    assert_int_equal(ps_comm_open(NULL, 0, 1, &options, &comm, &err), 0); /* one rank needs none */
    ps_comm_close(NULL, comm);
    ps_comm_close(NULL, NULL);
}

int main(void)
{
    void *symbol;
    if (ps_module_open("gloo", "ps_gloo_module", &symbol, NULL) < 0)
        return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_same_bits_everywhere),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_abort_ends_waits),
        cmocka_unit_test(test_unknown_interface),
        cmocka_unit_test(test_no_module),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
