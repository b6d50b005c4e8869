/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/backend_nets.h"

#include "trainer/backend/arena.h"

#include <stdio.h>

static void gradients_of_every_op(void **state)
{
    (void)state;
    for (int i = 0; i < NET_COUNT; i++)
        for (int frozen = 0; frozen < 2; frozen++) {
            struct bench t;
            ps_mt19937_seed(&net_random, (uint32_t)(100 + i));
            bench_net(&t, &nets[i]);
            double error = gradient_error(&t, frozen ? PS_TRAIN_FROZEN_BN : PS_TRAIN, NULL);
            if (!(error < 1e-6))
                fail_msg("%s%s: backward differs from central differences by %.2e", nets[i].name,
                         frozen ? ", frozen BN" : "", error);
            bench_done(&t);
        }
}

static void gradient_of_the_loss(void **state)
{
    (void)state;
    for (int i = 0; i < NET_COUNT; i++) {
        if (nets[i].build != net_dense && nets[i].build != net_pooled_tail)
            continue;
        for (int smooth = 0; smooth < 2; smooth++) {
            struct bench t;
            ps_mt19937_seed(&net_random, 7);
            bench_net(&t, &nets[i]);
            const struct ps_loss_config loss = {smooth ? 0.1f : 0, 0.25f};
            assert_true(gradient_error(&t, PS_TRAIN, &loss) < 1e-6);
            bench_done(&t);
        }
    }
}

static void gradients_of_the_whole_net(void **state)
{
    (void)state;
    struct bench t;
    struct ps_model *m = NULL;
    struct ps_error err = {0};
    ps_mt19937_seed(&net_random, 5);
    assert_int_equal(ps_model_create("resnet18", 2, 10, &m, &err), 0);
    bench_start(&t, m, 3, 8);
    const struct ps_loss_config loss = {0.1f, 1.0f / 3};
    assert_true(gradient_error(&t, PS_TRAIN_FROZEN_BN, &loss) < 1e-6);
    bench_done(&t);
}

static void loss_by_hand(void **state)
{
    (void)state;
    /* Logits are the biases: a dense layer with zero weights. */
    struct ps_error err = {0};
    struct ps_model *m = ps_model_new("t", 1, 3, 1);
    assert_true(ps_model_dense(m, "d", m->input, 3) > 0);
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_backend *b = NULL;
    struct ps_backend_config config = {.model = m,
                                       .precision = PS_FP32,
                                       .threads = 1,
                                       .max_batch = 2,
                                       .max_eval_batch = 2,
                                       .max_resolution = 1,
                                       .training = true};
    assert_int_equal(ops->create(&config, &b, &err), 0);
    float params[6] = {0, 0, 0, 1, 2, 4}, images[2] = {1, 1};
    int32_t labels[2] = {2, 0};
    struct ps_batch batch = {.pixel = PS_PIXEL_F32,
                             .images = images,
                             .labels = labels,
                             .count = 2,
                             .resolution = 1,
                             .scale = {1, 1, 1}};
    assert_int_equal(ops->write(b, PS_STATE_PARAMS, 0, 6, params, &err), 0);
    for (int smooth = 0; smooth < 2; smooth++) {
        double s = smooth ? 0.3 : 0, log_sum = log(exp(1) + exp(2) + exp(4)), expected = 0;
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 3; k++)
                expected -= ((k == labels[i] ? 1 - s : 0) + s / 3) * ((double)params[3 + k] - log_sum);
        const struct ps_loss_config loss = {(float)s, 0.5f};
        assert_int_equal(ops->forward(b, &batch, PS_TRAIN, &loss, &err), 0);
        struct ps_metrics metrics;
        assert_int_equal(ops->metrics(b, &metrics, &err), 0);
        assert_true(fabs(metrics.loss_sum - expected) < 1e-6);
        assert_int_equal(metrics.correct, 1);
        assert_int_equal(metrics.count, 2);
        assert_int_equal(ops->metrics(b, &metrics, &err), 0);
        assert_true(metrics.loss_sum == 0 && metrics.count == 0 && metrics.correct == 0);
    }
    ops->destroy(b);
    ps_model_free(m);
}

static void running_statistics(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_model *m = ps_model_new("t", 1, 1, 1);
    assert_true(ps_model_bn(m, "b", m->input) > 0);
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_backend *b = NULL;
    struct ps_backend_config config = {.model = m,
                                       .precision = PS_FP64,
                                       .threads = 1,
                                       .max_batch = 4,
                                       .max_eval_batch = 4,
                                       .max_resolution = 1,
                                       .training = true};
    assert_int_equal(ops->create(&config, &b, &err), 0);
    float params[2] = {1, 0}, buffers[2] = {0, 1}, images[4] = {1, 2, 3, 6}, y[4];
    struct ps_batch batch = {
        .pixel = PS_PIXEL_F32, .images = images, .count = 4, .resolution = 1, .scale = {1, 1, 1}};
    assert_int_equal(ops->write(b, PS_STATE_PARAMS, 0, 2, params, &err), 0);
    assert_int_equal(ops->write(b, PS_STATE_BUFFERS, 0, 2, buffers, &err), 0);
    assert_int_equal(ops->forward(b, &batch, PS_TRAIN, &plain_loss, &err), 0);
    assert_int_equal(ops->read(b, PS_STATE_BUFFERS, 0, 2, buffers, &err), 0);
    assert_true(fabs((double)buffers[0] - 0.1 * 3) < 1e-7);                /* mean 3 */
    assert_true(fabs((double)buffers[1] - (0.9 + 0.1 * 14.0 / 3)) < 1e-6); /* squares 4 1 0 9, unbiased */
    assert_int_equal(ops->read_value(b, m->output, false, y, &err), 0);
    assert_true(fabs((double)y[3] - 3 / sqrt(3.5 + 1e-5)) < 1e-6);
    /* Evaluation and frozen statistics move nothing. */
    assert_int_equal(ops->forward(b, &batch, PS_EVAL, &plain_loss, &err), 0);
    assert_int_equal(ops->read_value(b, m->output, false, y, &err), 0);
    assert_true(fabs((double)y[3] - (6 - 0.3) / sqrt((double)buffers[1] + 1e-5)) < 1e-6);
    assert_int_equal(ops->forward(b, &batch, PS_TRAIN_FROZEN_BN, &plain_loss, &err), 0);
    float after[2];
    assert_int_equal(ops->read(b, PS_STATE_BUFFERS, 0, 2, after, &err), 0);
    assert_memory_equal(after, buffers, sizeof after);
    /* A single value has variance 0: no NaN. */
    batch.count = 1;
    assert_int_equal(ops->forward(b, &batch, PS_TRAIN, &plain_loss, &err), 0);
    assert_int_equal(ops->read_value(b, m->output, false, y, &err), 0);
    assert_int_equal(ops->read(b, PS_STATE_BUFFERS, 0, 2, after, &err), 0);
    assert_true(y[0] == 0 && isfinite(after[0]) && isfinite(after[1]));
    ops->destroy(b);
    ps_model_free(m);
}

struct order {
    int ids[64], count;
};

static void note_ready(void *context, int param)
{
    struct order *o = context;
    assert_in_range(o->count, 0, 63);
    o->ids[o->count++] = param;
}

static void arrival_order(void **state)
{
    (void)state;
    struct bench t;
    struct ps_model *m = NULL;
    struct ps_error err = {0};
    ps_mt19937_seed(&net_random, 5);
    assert_int_equal(ps_model_create("resnet18", 4, 10, &m, &err), 0);
    bench_start(&t, m, 2, 8);
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_backend *b = bench_create(&t, ops, PS_FP32, 1);
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), 0);
    struct order order = {.count = 0};
    assert_int_equal(ops->backward(b, false, NULL, note_ready, &order, &err), 0);
    assert_int_equal(order.count, m->param_count);
    static const char *const first[] = {"dense_layer.bias",
                                        "dense_layer.weight",
                                        "conv5.1.residual_function.4.weight",
                                        "conv5.1.residual_function.4.bias",
                                        "conv5.1.residual_function.3.weight",
                                        "conv5.1.residual_function.1.weight",
                                        "conv5.1.residual_function.1.bias",
                                        "conv5.1.residual_function.0.weight",
                                        "conv5.0.shortcut.1.weight",
                                        "conv5.0.shortcut.1.bias",
                                        "conv5.0.shortcut.0.weight",
                                        "conv5.0.residual_function.4.weight"};
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        assert_string_equal(m->params[order.ids[i]].name, first[i]);
    assert_string_equal(m->params[order.ids[61]].name, "conv1.0.weight");
    ops->destroy(b);
    bench_done(&t);
}

static void accumulation_and_precision(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    ps_mt19937_seed(&net_random, 9);
    bench_net(&t, &nets[NET_COUNT - 1]);
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_backend *b = bench_create(&t, ops, PS_FP32, 1), *d = bench_create(&t, ops, PS_FP64, 1);
    size_t n = t.model->param_elements;
    float *once = calloc(n, sizeof *once), *twice = calloc(n, sizeof *twice), *wide = calloc(n, sizeof *wide);
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), 0);
    assert_int_equal(ops->backward(b, false, NULL, NULL, NULL, &err), 0);
    memcpy(once, ops->gradients(b), n * sizeof *once);
    assert_int_equal(ops->backward(b, true, NULL, NULL, NULL, &err), 0);
    assert_int_equal(ops->read(b, PS_STATE_GRADS, 0, n, twice, &err), 0);
    for (size_t i = 0; i < n; i++)
        twice[i] /= 2;
    assert_true(relative(twice, once, n) < 1e-6);
    assert_int_equal(ops->forward(d, &t.batch, PS_TRAIN, &plain_loss, &err), 0);
    assert_int_equal(ops->backward(d, false, NULL, NULL, NULL, &err), 0);
    assert_int_equal(ops->read(d, PS_STATE_GRADS, 0, n, wide, &err), 0);
    assert_true(relative(once, wide, n) < 1e-5);
    assert_null(ops->gradients(d));
    free(once);
    free(twice);
    free(wide);
    ops->destroy(b);
    ops->destroy(d);
    bench_done(&t);
}

static void pixels_of_bytes(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    ps_mt19937_seed(&net_random, 9);
    bench_net(&t, &nets[4]);
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_backend *b = bench_create(&t, ops, PS_FP32, 1);
    uint8_t *bytes = malloc(t.image_elements);
    float *a = malloc(t.image_elements * sizeof *a), *c = malloc(t.image_elements * sizeof *c);
    size_t hw = (size_t)(t.batch.resolution * t.batch.resolution);
    for (int k = 0; k < 3; k++) {
        t.batch.scale[k] = 0.01f * (float)(k + 1);
        t.batch.shift[k] = (float)k - 1;
    }
    for (size_t i = 0; i < t.image_elements; i++) {
        bytes[i] = (uint8_t)ps_mt19937_next(&net_random);
        a[i] = (float)bytes[i] * t.batch.scale[i / hw % 3] + t.batch.shift[i / hw % 3];
    }
    t.batch.pixel = PS_PIXEL_U8;
    t.batch.images = bytes;
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), 0);
    assert_int_equal(ops->read_value(b, t.model->input, false, c, &err), 0);
    assert_true(relative(c, a, t.image_elements) < 1e-6);
    free(bytes);
    free(a);
    free(c);
    ops->destroy(b);
    bench_done(&t);
}

static void misuse_is_refused(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    ps_mt19937_seed(&net_random, 9);
    bench_net(&t, &nets[NET_COUNT - 1]);
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_backend *b = bench_create(&t, ops, PS_FP32, 1);
    float some[8];
    assert_int_equal(ops->backward(b, false, NULL, NULL, NULL, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(ops->forward(b, &t.batch, PS_EVAL, &plain_loss, &err), 0);
    assert_int_equal(ops->backward(b, false, NULL, NULL, NULL, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(ops->read_value(b, 2, false, some, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(ops->read(b, PS_STATE_PARAMS, t.model->param_elements - 3, 4, some, &err),
                     PS_OUT_OF_RANGE);
    assert_int_equal(ops->read(b, PS_STATE_PARAMS, SIZE_MAX, 4, some, &err), PS_OUT_OF_RANGE);
    t.labels[1] = t.model->values[t.model->output].channels;
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "label"));
    t.labels[1] = -1;
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    t.labels[1] = 0;
    t.batch.count++;
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    t.batch.count--;
    t.batch.resolution++;
    assert_int_equal(ops->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    struct ps_optimizer_step step = {.kind = PS_SGD, .step = 0};
    assert_int_equal(ops->update(b, &step, &err), PS_INVALID_ARGUMENT);
    ops->destroy(b);
    ops->destroy(NULL);
    struct ps_backend_config config = {
        .model = t.model, .precision = PS_BF16, .threads = 1, .max_batch = 1, .max_resolution = 8};
    assert_int_equal(ops->create(&config, &b, &err), PS_UNIMPLEMENTED);
    bench_done(&t);
}

static void loader(void **state)
{
    (void)state;
    struct ps_error err = {0};
    const struct ps_backend_ops *ops = NULL;
    assert_int_equal(ps_backend_load("ref", &ops, &err), 0);
    assert_string_equal(ops->name, "ref");
    assert_int_equal(ops->probe(NULL, NULL, 0, &err), 0);
    assert_int_equal(ps_backend_load("nosuch", &ops, &err), PS_UNAVAILABLE);
    assert_non_null(strstr(err.message, "nosuch"));
    assert_int_equal(ps_backend_load("../x", &ops, &err), PS_INVALID_ARGUMENT);
}

static void arena(void **state)
{
    (void)state;
    struct ps_arena a = {0};
    size_t x = ps_arena_take(&a, 1000), y = ps_arena_take(&a, 300), z = ps_arena_take(&a, 5000);
    assert_int_equal(x, 0);
    assert_int_equal(y, 1024);
    assert_int_equal(z, 1536);
    ps_arena_give(&a, x);
    assert_int_equal(ps_arena_take(&a, 2000), 1536 + 5120); /* does not fit the gap */
    assert_int_equal(ps_arena_take(&a, 512), 0);
    ps_arena_give(&a, y);
    assert_int_equal(ps_arena_take(&a, 1024), 512); /* gaps side by side are one */
    assert_int_equal(a.peak, 1536 + 5120 + 2048);
    /* Random play: blocks never overlap. */
    struct {
        size_t at, size;
    } live[40];
    int count = 0;
    memset(&a, 0, sizeof a);
    ps_mt19937_seed(&net_random, 3);
    for (int step = 0; step < 5000; step++) {
        if (count < 40 && (count == 0 || ps_mt19937_next(&net_random) % 2)) {
            size_t size = 1 + ps_mt19937_next(&net_random) % 5000, at = ps_arena_take(&a, size);
            assert_true(at % PS_ARENA_ALIGN == 0 && at + size <= a.peak);
            for (int i = 0; i < count; i++)
                assert_true(at + size <= live[i].at || live[i].at + live[i].size <= at);
            live[count].at = at;
            live[count++].size = size;
        } else {
            int i = (int)(ps_mt19937_next(&net_random) % (uint32_t)count);
            ps_arena_give(&a, live[i].at);
            live[i] = live[--count];
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_every_op),
        cmocka_unit_test(gradient_of_the_loss),
        cmocka_unit_test(gradients_of_the_whole_net),
        cmocka_unit_test(loss_by_hand),
        cmocka_unit_test(running_statistics),
        cmocka_unit_test(arrival_order),
        cmocka_unit_test(accumulation_and_precision),
        cmocka_unit_test(pixels_of_bytes),
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(loader),
        cmocka_unit_test(arena),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
