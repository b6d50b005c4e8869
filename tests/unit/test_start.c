/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/fake_backend.h"
#include "tests/unit/fake_comm.h"
#include "trainer/dist/start.h"

struct rank_run {
    struct fake_room *room;
    int rank, width;
    const struct ps_model *model; /* instead of width */
    struct ps_start_pair pairs[2];
    uint64_t hash_change;
    int code;
    struct ps_error err;
    float param, buffer, grad;
};

static struct ps_model *make_model(int width)
{
    struct ps_error err = {0};
    struct ps_model *model;
    if (ps_model_create("resnet18", width, 10, &model, &err) < 0)
        fail_msg("%s", err.message);
    return model;
}

static void *run_check(void *context)
{
    struct rank_run *run = context;
    struct fake_comm comm = fake_comm_in(run->room, run->rank);
    struct ps_model *made = run->model ? NULL : make_model(run->width);
    run->code = ps_start_check(&comm.comm, run->model ? run->model : made, run->pairs, 2, &run->err);
    ps_model_free(made);
    return NULL;
}

static void run_all(void *(*function)(void *), struct rank_run *runs, int world_size)
{
    struct fake_room room;
    pthread_t threads[FAKE_RANKS];
    fake_room_init(&room, world_size);
    for (int i = 0; i < world_size; i++) {
        runs[i].room = &room;
        runs[i].rank = i;
        assert_int_equal(pthread_create(&threads[i], NULL, function, &runs[i]), 0);
    }
    for (int i = 0; i < world_size; i++)
        pthread_join(threads[i], NULL);
    fake_room_done(&room);
}

static void expect_all(const struct rank_run *runs, int world_size, const char *const *says)
{
    for (int i = 0; i < world_size; i++) {
        assert_int_equal(runs[i].code, PS_FAILED_PRECONDITION);
        for (const char *const *s = says; *s; s++)
            if (!strstr(runs[i].err.message, *s))
                fail_msg("rank %d says: %s; not: %s", i, runs[i].err.message, *s);
        assert_string_equal(runs[i].err.message, runs[0].err.message);
    }
}

#define RUN(w, epochs, lr)                                                                                   \
    {                                                                                                        \
        .width = (w), .pairs = { {"epochs", epochs}, {"lr", lr} }                                            \
    }

static void test_same_everywhere(void **state)
{
    (void)state;
    struct rank_run runs[3] = {RUN(2, "3", "0.1"), RUN(2, "3", "0.1"), RUN(2, "3", "0.1")};
    run_all(run_check, runs, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(runs[i].code, 0);
}

static void test_models_differ(void **state)
{
    (void)state;
    struct rank_run runs[3] = {RUN(2, "3", "0.1"), RUN(2, "3", "0.1"), RUN(3, "3", "0.1")};
    run_all(run_check, runs, 3);
    expect_all(runs, 3,
               (const char *const[]){"rank 2 differs from rank 0", "width 3", "width 2",
                                     "conv1.0.weight [3, 3, 3, 3] against conv1.0.weight [2, 3, 3, 3]",
                                     NULL});

    struct rank_run odd[3] = {RUN(2, "3", "0.1"), RUN(4, "3", "0.1"), RUN(4, "3", "0.1")};
    run_all(run_check, odd, 3);
    expect_all(odd, 3, (const char *const[]){"rank 1 and 2 differ from rank 0", NULL});
}

static void test_attributes_differ(void **state)
{
    (void)state;
    struct ps_model *a = make_model(2), *b = make_model(2);
    for (int i = 0; i < b->op_count; i++)
        if (b->ops[i].kind == PS_OP_BN)
            b->ops[i].eps = 1e-3f;
    struct rank_run runs[2] = {RUN(2, "3", "0.1"), RUN(2, "3", "0.1")};
    runs[0].model = a;
    runs[1].model = b;
    run_all(run_check, runs, 2);
    expect_all(runs, 2, (const char *const[]){"rank 1 differs from rank 0 in ops or attributes", NULL});
    ps_model_free(a);
    ps_model_free(b);
}

static void test_settings_differ(void **state)
{
    (void)state;
    struct rank_run runs[3] = {RUN(2, "3", "0.1"), RUN(2, "3", "0.2"), RUN(2, "3", "0.1")};
    run_all(run_check, runs, 3);
    expect_all(runs, 3, (const char *const[]){"lr is 0.2 on rank 1, 0.1 on rank 0", "rank 1 differs", NULL});
}

static void *run_broadcast(void *context)
{
    struct rank_run *run = context;
    struct fake_comm comm = fake_comm_in(run->room, run->rank);
    struct ps_model *m = make_model(2);
    struct ps_backend *b = fake_backend_new(m);
    for (size_t i = 0; i < m->param_elements; i++)
        b->params[i] = b->grads[i] = (float)(run->rank + 1) * (float)i;
    for (size_t i = 0; i < m->buffer_elements; i++)
        b->buffers[i] = (float)(run->rank + 7) * (float)i;
    run->code = ps_start_broadcast(&comm.comm, &fake_backend_ops, b, m, &run->err);
    run->param = b->params[m->param_elements - 1] / (float)(m->param_elements - 1);
    run->buffer = b->buffers[m->buffer_elements - 1] / (float)(m->buffer_elements - 1);
    run->grad = b->grads[1];
    uint64_t hash = 0;
    if (run->code == 0)
        run->code = ps_state_hash(&fake_backend_ops, b, m, PS_STATE_PARAMS, 0, &hash, &run->err);
    if (run->code == 0)
        run->code = ps_compare_hash(&comm.comm, "parameters", hash + run->hash_change, &run->err);
    fake_backend_free(b);
    ps_model_free(m);
    return NULL;
}

static void test_rank_0s_state_is_everybodys(void **state)
{
    (void)state;
    struct rank_run runs[3] = {{0}};
    run_all(run_broadcast, runs, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(runs[i].code, 0);
        assert_true(runs[i].param == 1.0f && runs[i].buffer == 7.0f);
        assert_true(runs[i].grad == (float)(i + 1)); /* gradients stay */
    }
}

static void test_drifted_replica_is_named(void **state)
{
    (void)state;
    struct rank_run runs[3] = {{0}};
    runs[2].hash_change = 1;
    run_all(run_broadcast, runs, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(runs[i].code, PS_DATA_LOSS);
        assert_non_null(strstr(runs[i].err.message, "the parameters of rank 2 are not those of rank 0"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_everywhere),
        cmocka_unit_test(test_models_differ),
        cmocka_unit_test(test_attributes_differ),
        cmocka_unit_test(test_settings_differ),
        cmocka_unit_test(test_rank_0s_state_is_everybodys),
        cmocka_unit_test(test_drifted_replica_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
