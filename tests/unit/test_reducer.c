/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/clock.h"
#include "tests/unit/fake_backend.h"
#include "tests/unit/fake_comm.h"
#include "trainer/dist/reducer.h"
#include <math.h>

static struct ps_model *make_model(int width)
{
    struct ps_error err = {0};
    struct ps_model *model;
    if (ps_model_create("resnet18", width, 10, &model, &err) < 0)
        fail_msg("%s", err.message);
    return model;
}

/* The order in which a backward over the ops meets the parameters: dense bias before weight, BN scale before
 * shift. */
static void backward_order(const struct ps_model *m, int *order)
{
    int n = 0;
    for (int i = m->op_count - 1; i >= 0; i--) {
        const struct ps_op *op = &m->ops[i];
        if (op->kind == PS_OP_DENSE) {
            order[n++] = op->param[1];
            order[n++] = op->param[0];
        } else {
            for (int k = 0; k < 2; k++)
                if (op->param[k] != PS_NONE)
                    order[n++] = op->param[k];
        }
    }
    assert_int_equal(n, m->param_count);
}

/* Golden vector B5: measured on PyTorch 1.13.1 with the sample's net. */
static void test_buckets_of_resnet18(void **state)
{
    (void)state;
    struct ps_model *m = make_model(64);
    struct ps_backend *b = fake_backend_new(m);
    struct fake_room room;
    fake_room_init(&room, 1);
    struct fake_comm comm = fake_comm_in(&room, 0);
    struct ps_reducer_config config = {&fake_backend_ops, b, m, &comm.comm, 0, 0, NULL, NULL};
    struct ps_reducer *r;
    struct ps_error err = {0};
    size_t bytes;
    int params, order[62];
    assert_int_equal(m->param_count, 62);
    backward_order(m, order);
    assert_int_equal(ps_reducer_create(&config, &r, &err), 0);
    assert_int_equal(ps_reducer_bucket(r, 0, &bytes, &params), 1);
    assert_int_equal(bytes, 44695848);
    assert_int_equal(params, 62);
    for (int step = 0; step < 3; step++) { /* rebuilt once: a later step's order changes nothing */
        ps_reducer_begin(r, 1);
        for (int i = 0; i < 62; i++)
            ps_reducer_ready(r, order[step == 0 ? i : 61 - i]);
        assert_int_equal(ps_reducer_finish(r, NULL, &err), 0);
        static const size_t want_bytes[] = {9461800, 26494976, 8739072};
        static const int want_params[] = {5, 15, 42};
        for (int i = 0; i < 3; i++) {
            assert_int_equal(ps_reducer_bucket(r, i, &bytes, &params), 3);
            assert_int_equal(bytes, want_bytes[i]);
            assert_int_equal(params, want_params[i]);
        }
    }
    assert_int_equal(b->copies, 0); /* alone: nothing to average */
    ps_reducer_free(r);
    fake_backend_free(b);
    fake_room_done(&room);
    ps_model_free(m);
}

/* One rank of a run over several steps, on its own thread. */
struct rank_run {
    struct fake_room *room;
    const struct ps_model *model;
    int rank, steps;
    const double *shares;                  /* by rank */
    int skip_param, twice_param, bad_step; /* on rank 1 */
    double compute_s;                      /* of each parameter's backward */
    /* results: */
    int code, failed_step;
    struct ps_error err;
    double worst, computed_s;
    struct ps_reducer_times times;
    int buckets;
    size_t bucket_elements[64];
};

static float gradient(int rank, int step, size_t i)
{
    return (float)sin((double)(i + 1) * 0.37 + rank * 1.7 + step * 0.91);
}

static void *run_rank(void *context)
{
    struct rank_run *run = context;
    const struct ps_model *m = run->model;
    struct fake_comm comm = fake_comm_in(run->room, run->rank);
    struct ps_backend *b = fake_backend_new(m);
    struct ps_reducer_config config = {&fake_backend_ops, b, m, &comm.comm, 256, 1024, NULL, NULL};
    struct ps_reducer *r = NULL;
    int *order = calloc((size_t)m->param_count, sizeof *order);
    unsigned random = 12345u + (unsigned)run->rank;
    run->code = ps_reducer_create(&config, &r, &run->err);
    for (int step = 0; step < run->steps && run->code == 0; step++) {
        for (size_t i = 0; i < m->param_elements; i++)
            b->grads[i] = gradient(run->rank, step, i);
        for (int i = 0; i < m->param_count; i++)
            order[i] = i;
        for (int i = m->param_count - 1; i > 0; i--) { /* another order on each rank and in each step */
            random = random * 1664525u + 1013904223u;
            int j = (int)((random >> 8) % (unsigned)(i + 1)), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
        if (run->compute_s > 0) /* but in-order where the overlap is timed */
            for (int i = 0; i < m->param_count; i++)
                order[i] = m->param_count - 1 - i;
        ps_reducer_begin(r, run->shares[run->rank]);
        double start = ps_monotonic_s();
        bool bad = run->rank == 1 && step == run->bad_step;
        for (int i = 0; i < m->param_count; i++) {
            if (run->compute_s > 0) {
                struct timespec ts = {.tv_nsec = (long)(run->compute_s * 1e9)};
                nanosleep(&ts, NULL);
            }
            if (bad && order[i] == run->skip_param)
                continue;
            ps_reducer_ready(r, order[i]);
            if (bad && order[i] == run->twice_param)
                ps_reducer_ready(r, order[i]);
        }
        run->computed_s = ps_monotonic_s() - start;
        run->code = ps_reducer_finish(r, &run->times, &run->err);
        run->failed_step = step;
        for (size_t i = 0; i < m->param_elements && run->code == 0; i++) {
            double want = 0;
            for (int rank = 0; rank < run->room->world_size; rank++)
                want += run->shares[rank] * (double)gradient(rank, step, i);
            double off = fabs(want - (double)b->grads[i]);
            run->worst = off > run->worst ? off : run->worst;
        }
    }
    if (r && run->code < 0) { /* a failed reducer stays failed, with the same reason */
        struct ps_error again = {0};
        ps_reducer_begin(r, run->shares[run->rank]);
        for (int i = 0; i < m->param_count; i++)
            ps_reducer_ready(r, i);
        if (ps_reducer_finish(r, NULL, &again) != run->code || strcmp(again.message, run->err.message) != 0)
            run->code = 1;
    }
    if (r) {
        size_t bytes;
        int params;
        run->buckets = ps_reducer_bucket(r, -1, &bytes, &params);
        for (int i = 0; i < run->buckets && i < 64; i++) {
            ps_reducer_bucket(r, i, &bytes, &params);
            run->bucket_elements[i] = bytes / sizeof(float);
        }
    }
    ps_reducer_free(r);
    fake_backend_free(b);
    free(order);
    return NULL;
}

static void run_all(struct rank_run *runs, int world_size)
{
    pthread_t threads[FAKE_RANKS];
    for (int i = 0; i < world_size; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &runs[i]), 0);
    for (int i = 0; i < world_size; i++)
        pthread_join(threads[i], NULL);
}

static void prepare(struct rank_run *runs, int world_size, struct fake_room *room, const struct ps_model *m,
                    int steps, const double *shares)
{
    for (int i = 0; i < world_size; i++)
        runs[i] = (struct rank_run){.room = room,
                                    .model = m,
                                    .rank = i,
                                    .steps = steps,
                                    .shares = shares,
                                    .skip_param = -1,
                                    .twice_param = -1,
                                    .bad_step = -1};
}

static void check_average(int world_size, const double *shares)
{
    struct ps_model *m = make_model(1);
    struct fake_room room;
    struct rank_run runs[FAKE_RANKS];
    fake_room_init(&room, world_size);
    prepare(runs, world_size, &room, m, 4, shares);
    run_all(runs, world_size);
    for (int i = 0; i < world_size; i++) {
        if (runs[i].code != 0)
            fail_msg("rank %d: %s", i, runs[i].err.message);
        assert_true(runs[i].worst < 1e-6);
    }
    /* One bucket in the first step, then all buckets in index order in every step, though the ranks'
     * gradients arrive in different orders. */
    int buckets = runs[0].buckets;
    assert_true(buckets >= 5);
    assert_int_equal(room.calls, 1 + 3 * buckets);
    assert_int_equal(room.counts[0], m->param_elements);
    for (int rank = 0; rank < world_size; rank++) {
        assert_int_equal(runs[rank].buckets, buckets);
        for (int call = 1; call < room.calls; call++)
            assert_int_equal(room.counts[call], runs[rank].bucket_elements[(call - 1) % buckets]);
    }
    fake_room_done(&room);
    ps_model_free(m);
}

static void test_average_in_scrambled_order(void **state)
{
    (void)state;
    check_average(2, (double[]){0.5, 0.5});
    check_average(3, (double[]){1.0 / 3, 1.0 / 3, 1.0 / 3});
    check_average(2, (double[]){20.0 / 32, 12.0 / 32}); /* a short last batch weighs what it holds */
}

/* Rule B6: with L of latency per bucket and k buckets, less than k * L is exposed. */
static void test_reduction_overlaps_backward(void **state)
{
    (void)state;
    struct ps_model *m = make_model(1);
    double best = 1e9;
    for (int attempt = 0; attempt < 3 && best > 0.5; attempt++) { /* on a busy machine one may be unlucky */
        struct fake_room room;
        struct rank_run runs[2];
        fake_room_init(&room, 2);
        room.latency_s = 0.010;
        prepare(runs, 2, &room, m, 2, (double[]){0.5, 0.5});
        runs[0].compute_s = runs[1].compute_s = 0.002;
        run_all(runs, 2);
        for (int i = 0; i < 2; i++)
            assert_int_equal(runs[i].code, 0);
        assert_true(runs[0].times.buckets >= 5);
        assert_true(runs[0].times.reduce_s >= 0.010 * runs[0].times.buckets);
        double exposed = runs[0].times.wait_s / runs[0].times.reduce_s;
        best = exposed < best ? exposed : best;
        fake_room_done(&room);
    }
    if (best > 0.5)
        fail_msg("%.0f %% of the reduction was exposed", best * 100);
    ps_model_free(m);
}

static void check_bad_step(int step, int skip, int twice, const char *says)
{
    struct ps_model *m = make_model(1);
    struct fake_room room;
    struct rank_run runs[3];
    fake_room_init(&room, 3);
    prepare(runs, 3, &room, m, 3, (double[]){0.25, 0.25, 0.5});
    runs[1].bad_step = step;
    runs[1].skip_param = skip;
    runs[1].twice_param = twice;
    run_all(runs, 3);
    assert_int_equal(runs[1].code, PS_INTERNAL);
    assert_int_equal(runs[1].failed_step, step); /* in the same step */
    int named = skip >= 0 ? skip : twice;
    if (!strstr(runs[1].err.message, m->params[named].name) || !strstr(runs[1].err.message, says))
        fail_msg("%s", runs[1].err.message);
    for (int i = 0; i < 3; i += 2) { /* nobody waits for ever, and all know why */
        assert_int_equal(runs[i].code, PS_ABORTED);
        assert_non_null(strstr(runs[i].err.message, m->params[named].name));
    }
    fake_room_done(&room);
    ps_model_free(m);
}

static void test_gradient_missing_or_twice(void **state)
{
    (void)state;
    check_bad_step(0, 7, -1, "no gradient in this step");
    check_bad_step(2, 0, -1, "no gradient in this step");
    check_bad_step(0, -1, 3, "arrived twice");
    check_bad_step(1, -1, 61, "arrived twice");
}

/* A backward that exchanges something of its own in the middle: between the buckets, in one order everywhere.
 */
struct gathering {
    struct fake_room *room;
    const struct ps_model *model;
    int rank;
    bool good;
    int code;
    struct ps_error err;
    const int *order;
    bool known_order;
    int buckets_at_first;
};

static void *run_gathering(void *context)
{
    struct gathering *g = context;
    const struct ps_model *m = g->model;
    struct fake_comm comm = fake_comm_in(g->room, g->rank);
    struct ps_backend *b = fake_backend_new(m);
    struct ps_reducer_config config = {&fake_backend_ops, b, m, &comm.comm, 256, 1024, g->order, NULL};
    struct ps_reducer *r = NULL;
    size_t bytes;
    int params;
    g->code = ps_reducer_create(&config, &r, &g->err);
    g->good = g->code == 0;
    g->buckets_at_first = g->good ? ps_reducer_bucket(r, 0, &bytes, &params) : 0;
    for (int step = 0; step < 3 && g->good; step++) {
        for (size_t i = 0; i < m->param_elements; i++)
            b->grads[i] = gradient(g->rank, step, i);
        int mine = 100 * step + g->rank, all[2] = {0};
        g->good = g->good && ps_reducer_gather(r, &mine, sizeof mine, all, &g->err) == 0;
        g->good = g->good && all[0] == 100 * step && all[1] == 100 * step + 1;
        ps_reducer_begin(r, 0.5);
        for (int i = m->param_count; i-- > 0;) {
            ps_reducer_ready(r, i);
            if (i % 7 == 0) {
                mine = 1000 * step + 10 * i + g->rank;
                g->good = g->good && ps_reducer_gather(r, &mine, sizeof mine, all, &g->err) == 0;
                g->good = g->good && all[0] == 1000 * step + 10 * i && all[1] == all[0] + 1;
            }
        }
        g->good = g->good && ps_reducer_finish(r, NULL, &g->err) == 0;
        for (size_t i = 0; i < m->param_elements && g->good; i++) {
            float want = gradient(0, step, i) * 0.5f + gradient(1, step, i) * 0.5f;
            g->good = fabsf(b->grads[i] - want) < 1e-6f;
        }
    }
    int order[62];
    g->known_order = g->good && ps_reducer_order(r, order);
    for (int i = 0; i < m->param_count && g->good; i++)
        g->good = order[i] == m->param_count - 1 - i;
    ps_reducer_free(r);
    fake_backend_free(b);
    return NULL;
}

static void test_gather_between_buckets(void **state)
{
    (void)state;
    struct ps_model *m = make_model(2);
    int order[62];
    for (int i = 0; i < 62; i++)
        order[i] = 61 - i;
    for (int given = 0; given < 2; given++) {
        struct fake_room room;
        fake_room_init(&room, 2);
        struct gathering ranks[2];
        pthread_t threads[2];
        for (int r = 0; r < 2; r++) {
            ranks[r] =
                (struct gathering){.room = &room, .model = m, .rank = r, .order = given ? order : NULL};
            assert_int_equal(pthread_create(&threads[r], NULL, run_gathering, &ranks[r]), 0);
        }
        for (int r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        for (int r = 0; r < 2; r++) {
            if (!ranks[r].good)
                fail_msg("%s", ranks[r].err.message);
            assert_true(ranks[r].known_order);
            if (given)
                assert_true(ranks[r].buckets_at_first > 1);
            else
                assert_int_equal(ranks[r].buckets_at_first, 1);
        }
        fake_room_done(&room);
    }
    ps_model_free(m);
}

static void test_order_of_another_model(void **state)
{
    (void)state;
    struct ps_model *m = make_model(1);
    struct ps_backend *b = fake_backend_new(m);
    struct fake_room room;
    fake_room_init(&room, 1);
    struct fake_comm comm = fake_comm_in(&room, 0);
    struct ps_error err = {0};
    struct ps_reducer *r = NULL;
    int order[62] = {0}; /* parameter 0 again and again */
    struct ps_reducer_config config = {&fake_backend_ops, b, m, &comm.comm, 0, 0, order, NULL};
    assert_int_equal(ps_reducer_create(&config, &r, &err), PS_INTERNAL);
    assert_non_null(strstr(err.message, "no order of this model"));
    fake_backend_free(b);
    fake_room_done(&room);
    ps_model_free(m);
}

static void test_wrong_use(void **state)
{
    (void)state;
    struct ps_model *m = make_model(1);
    struct ps_backend *b = fake_backend_new(m);
    struct fake_room room;
    fake_room_init(&room, 1);
    struct fake_comm comm = fake_comm_in(&room, 0);
    struct ps_reducer_config config = {&fake_backend_ops, b, m, &comm.comm, 0, 0, NULL, NULL};
    struct ps_reducer *r;
    struct ps_error err = {0};
    assert_int_equal(ps_reducer_create(&config, &r, &err), 0);
    assert_int_equal(ps_reducer_finish(r, NULL, &err), PS_FAILED_PRECONDITION);
    ps_reducer_begin(r, 1);
    ps_reducer_ready(r, 62);
    assert_int_equal(ps_reducer_finish(r, NULL, &err), PS_INTERNAL);
    assert_null(ps_reducer_free(r));
    assert_null(ps_reducer_free(NULL));
    fake_backend_free(b);
    fake_room_done(&room);
    ps_model_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets_of_resnet18),
        cmocka_unit_test(test_average_in_scrambled_order),
        cmocka_unit_test(test_reduction_overlaps_backward),
        cmocka_unit_test(test_gradient_missing_or_twice),
        cmocka_unit_test(test_gather_between_buckets),
        cmocka_unit_test(test_order_of_another_model),
        cmocka_unit_test(test_wrong_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
