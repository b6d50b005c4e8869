/* SPDX-License-Identifier: Apache-2.0
 * Small nets around each op, and what the backends' tests do with them. Included by one file a test program.
 */
#ifndef PARAMSYNC_TESTS_BACKEND_NETS_H
#define PARAMSYNC_TESTS_BACKEND_NETS_H

#include "services/base/mt19937.h"
#include "trainer/backend/backend.h"
#include "trainer/backend/ref/ref.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct ps_mt19937 net_random;

static float uniform(void) /* -1..1 */
{
    return (float)(ps_mt19937_next(&net_random) & 0xffffff) * 0x1p-23f - 1;
}

static void fill_uniform(float *v, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++)
        v[i] = uniform() * scale;
}

struct net {
    const char *name;
    int channels, resolution, batch;
    int (*build)(struct ps_model *m); /* the last value's id */
};

static int net_conv3(struct ps_model *m)
{
    return ps_model_conv(m, "c", m->input, 12, 3, 1, 1);
}
static int net_conv3s2(struct ps_model *m)
{
    return ps_model_conv(m, "c", m->input, 8, 3, 2, 1);
}
static int net_conv1s2(struct ps_model *m)
{
    return ps_model_conv(m, "c", m->input, 16, 1, 2, 0);
}
static int net_bn(struct ps_model *m)
{
    return ps_model_bn(m, "b", m->input);
}
static int net_bn_relu(struct ps_model *m)
{
    return ps_model_relu(m, ps_model_bn(m, "b", ps_model_conv(m, "c", m->input, 8, 3, 1, 1)));
}
static int net_relu(struct ps_model *m)
{
    return ps_model_relu(m, m->input);
}
static int net_relu_conv(struct ps_model *m)
{
    return ps_model_relu(m, ps_model_conv(m, "c", m->input, 20, 3, 1, 1));
}
static int net_add(struct ps_model *m)
{
    return ps_model_add(m, ps_model_conv(m, "a", m->input, 8, 3, 1, 1),
                        ps_model_conv(m, "b", m->input, 8, 1, 1, 0));
}
static int net_add_self(struct ps_model *m)
{
    int v = ps_model_conv(m, "a", m->input, 8, 3, 1, 1);
    return ps_model_add(m, v, v);
}
/* Overlapping windows often have the same maximum: the second pool sees many equal ones. */
static int net_equal_maxima(struct ps_model *m)
{
    int v = ps_model_conv(m, "c", m->input, 8, 3, 1, 1);
    return ps_model_max_pool(m, ps_model_max_pool(m, v, 3, 1, 1), 2, 2, 0);
}
static int net_max_pool(struct ps_model *m)
{
    return ps_model_max_pool(m, ps_model_conv(m, "c", m->input, 8, 3, 1, 1), 3, 2, 1);
}
static int net_avg_pool(struct ps_model *m)
{
    return ps_model_avg_pool(m, ps_model_conv(m, "c", m->input, 12, 3, 1, 1));
}
static int net_dense(struct ps_model *m)
{
    return ps_model_dense(m, "d", ps_model_avg_pool(m, m->input), m->classes);
}
static int net_block(struct ps_model *m, int shortcut)
{
    int x = ps_model_relu(m, ps_model_bn(m, "s1", ps_model_conv(m, "s0", m->input, 8, 3, 1, 1)));
    int channels = shortcut ? 16 : 8, stride = shortcut ? 2 : 1;
    int v = ps_model_relu(m, ps_model_bn(m, "r1", ps_model_conv(m, "r0", x, channels, 3, stride, 1)));
    v = ps_model_bn(m, "r4", ps_model_conv(m, "r3", v, channels, 3, 1, 1));
    int s = shortcut ? ps_model_bn(m, "t1", ps_model_conv(m, "t0", x, channels, 1, stride, 0)) : x;
    return ps_model_relu(m, ps_model_add(m, v, s));
}
static int net_identity_block(struct ps_model *m)
{
    return net_block(m, 0);
}
static int net_shortcut_block(struct ps_model *m)
{
    return net_block(m, 1);
}
static int net_fan_out(struct ps_model *m) /* a value with three readers */
{
    int x = ps_model_relu(m, ps_model_conv(m, "s", m->input, 8, 3, 1, 1));
    int a = ps_model_conv(m, "a", x, 8, 3, 1, 1), b = ps_model_conv(m, "b", x, 8, 1, 1, 0);
    return ps_model_add(m, ps_model_add(m, a, b), x);
}
static int net_pooled_tail(struct ps_model *m)
{
    int x = ps_model_relu(m, ps_model_bn(m, "b", ps_model_conv(m, "c", m->input, 8, 3, 1, 1)));
    x = ps_model_max_pool(m, x, 2, 2, 0);
    return ps_model_dense(m, "d", ps_model_avg_pool(m, x), m->classes);
}

static const struct net nets[] = {
    {"conv 3x3", 5, 6, 3, net_conv3},
    {"conv 3x3 stride 2", 8, 7, 2, net_conv3s2},
    {"conv 1x1 stride 2", 8, 6, 3, net_conv1s2},
    {"bn", 6, 4, 5, net_bn},
    {"conv bn relu", 3, 6, 4, net_bn_relu},
    {"relu", 4, 5, 2, net_relu},
    {"conv relu", 3, 5, 2, net_relu_conv},
    {"add", 4, 5, 2, net_add},
    {"add to itself", 4, 5, 2, net_add_self},
    {"max pool", 3, 9, 2, net_max_pool},
    {"equal maxima", 3, 8, 2, net_equal_maxima},
    {"avg pool", 5, 6, 3, net_avg_pool},
    {"dense", 7, 3, 5, net_dense},
    {"block with identity", 3, 6, 4, net_identity_block},
    {"block with shortcut", 3, 6, 4, net_shortcut_block},
    {"three readers", 3, 5, 2, net_fan_out},
    {"pool and dense", 3, 8, 4, net_pooled_tail},
};
enum { NET_COUNT = sizeof nets / sizeof *nets };

/* A net with random state and input, and a random cotangent of its output. */
struct bench {
    struct ps_model *model;
    int *extents;
    float *params, *buffers, *images, *cotangent;
    int32_t *labels;
    size_t image_elements, output_elements;
    struct ps_batch batch;
};

static size_t bench_elements(const struct bench *t, int value)
{
    return (size_t)t->batch.count * (size_t)t->model->values[value].channels * (size_t)t->extents[value] *
           (size_t)t->extents[value];
}

static void bench_inputs(struct bench *t, int count, int resolution)
{
    struct ps_error err = {0};
    const struct ps_model *m = t->model;
    free(t->images);
    free(t->cotangent);
    free(t->labels);
    assert_int_equal(ps_model_extents(m, resolution, t->extents, &err), 0);
    t->batch = (struct ps_batch){.pixel = PS_PIXEL_F32,
                                 .count = count,
                                 .resolution = resolution,
                                 .scale = {1, 1, 1},
                                 .shift = {0, 0, 0}};
    t->image_elements = bench_elements(t, m->input);
    t->output_elements = bench_elements(t, m->output);
    t->images = calloc(t->image_elements, sizeof *t->images);
    t->cotangent = calloc(t->output_elements, sizeof *t->cotangent);
    t->labels = calloc((size_t)count, sizeof *t->labels);
    assert_true(t->images && t->cotangent && t->labels);
    fill_uniform(t->images, t->image_elements, 2);
    fill_uniform(t->cotangent, t->output_elements, 1);
    for (int i = 0; i < count; i++)
        t->labels[i] = (int32_t)(ps_mt19937_next(&net_random) % (uint32_t)m->values[m->output].channels);
    t->batch.images = t->images;
    t->batch.labels = t->labels;
}

static void bench_start(struct bench *t, struct ps_model *model, int count, int resolution)
{
    memset(t, 0, sizeof *t);
    assert_non_null(model);
    t->model = model;
    t->extents = calloc((size_t)model->value_count, sizeof *t->extents);
    t->params = calloc(model->param_elements + 1, sizeof *t->params);
    t->buffers = calloc(model->buffer_elements + 1, sizeof *t->buffers);
    assert_true(t->extents && t->params && t->buffers);
    ps_model_init(model, ps_mt19937_next(&net_random), t->params, t->buffers);
    for (int i = 0; i < model->param_count; i++) /* BN: nothing at its start value */
        if (!model->params[i].fan_in)
            for (size_t k = 0; k < model->params[i].count; k++)
                t->params[model->params[i].offset + k] += uniform() * 0.5f;
    for (size_t i = 0; i < model->buffer_elements; i++)
        t->buffers[i] += uniform() * 0.5f;
    bench_inputs(t, count, resolution);
}

static void bench_net(struct bench *t, const struct net *net)
{
    struct ps_model *m = ps_model_new("net", 1, 4, net->channels);
    assert_non_null(m);
    int out = net->build(m);
    assert_true(out > 0);
    bench_start(t, m, net->batch, net->resolution);
}

static void bench_done(struct bench *t)
{
    ps_model_free(t->model);
    free(t->extents);
    free(t->params);
    free(t->buffers);
    free(t->images);
    free(t->cotangent);
    free(t->labels);
}

static bool bench_tf32; /* what bench_create asks for */

static struct ps_backend *bench_create(const struct bench *t, const struct ps_backend_ops *ops,
                                       enum ps_precision precision, int threads)
{
    struct ps_error err = {0};
    struct ps_backend *b = NULL;
    setenv("PARAMSYNC_INPUT_GRAD", "1", 1);
    struct ps_backend_config config = {.model = t->model,
                                       .precision = precision,
                                       .threads = threads,
                                       .max_batch = t->batch.count,
                                       .max_eval_batch = t->batch.count,
                                       .max_resolution = t->batch.resolution,
                                       .tf32 = bench_tf32,
                                       .training = true};
    if (ops->create(&config, &b, &err) != 0)
        fail_msg("create: %s", err.message);
    if (ops->write(b, PS_STATE_PARAMS, 0, t->model->param_elements, t->params, &err) != 0 ||
        ops->write(b, PS_STATE_BUFFERS, 0, t->model->buffer_elements, t->buffers, &err) != 0)
        fail_msg("write: %s", err.message);
    return b;
}

static const struct ps_loss_config plain_loss = {0, 1};

/* |a - b| / |b| in the L2 norm. */
static double __attribute__((unused)) relative(const float *a, const float *b, size_t count)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        double d = (double)a[i] - (double)b[i];
        difference += d * d;
        norm += (double)b[i] * (double)b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

/* sum(output * cotangent), or the loss, of the double backend as it stands. */
static double objective(const struct bench *t, const struct ps_backend_ops *ops, struct ps_backend *b,
                        enum ps_mode mode, const struct ps_loss_config *loss, double *scratch)
{
    struct ps_error err = {0};
    if (ops->forward(b, &t->batch, mode, loss ? loss : &plain_loss, &err) != 0)
        fail_msg("forward: %s", err.message);
    if (loss) {
        struct ps_metrics metrics;
        ops->metrics(b, &metrics, &err);
        return metrics.loss_sum * (double)loss->grad_scale;
    }
    double sum = 0;
    assert_int_equal(ps_ref_read_value64(b, t->model->output, false, scratch, &err), 0);
    for (size_t i = 0; i < t->output_elements; i++)
        sum += scratch[i] * (double)t->cotangent[i];
    return sum;
}

/* The largest relative error over the parameters and the input of the backward pass against central
 * differences of the double backend, with a random cotangent (loss NULL) or the loss. Some elements of each
 * tensor are tried. */
static double __attribute__((unused))
gradient_error(struct bench *t, enum ps_mode mode, const struct ps_loss_config *loss)
{
    enum { TRIES = 24 };
    const float h = 1e-5f;
    const struct ps_backend_ops *ops = ps_backend_ref();
    struct ps_error err = {0};
    struct ps_backend *b = bench_create(t, ops, PS_FP64, 1);
    const struct ps_model *m = t->model;
    double *grads = calloc(m->param_elements + 1, sizeof *grads), *dx = calloc(t->image_elements, sizeof *dx);
    double *scratch = calloc(t->output_elements, sizeof *scratch), worst = 0;
    assert_true(grads && dx && scratch);
    objective(t, ops, b, mode, loss, scratch);
    if (ops->backward(b, false, loss ? NULL : t->cotangent, NULL, NULL, &err) != 0)
        fail_msg("backward: %s", err.message);
    assert_int_equal(ps_ref_read_gradients64(b, grads, &err), 0);
    assert_int_equal(ps_ref_read_value64(b, m->input, true, dx, &err), 0);
    for (int i = 0; i <= m->param_count; i++) { /* the last is the input */
        bool input = i == m->param_count;
        size_t count = input ? t->image_elements : m->params[i].count,
               offset = input ? 0 : m->params[i].offset;
        double difference = 0, norm = 0;
        for (int k = 0; k < TRIES && (size_t)k < count; k++) {
            size_t at = offset + (count <= TRIES ? (size_t)k : ps_mt19937_next(&net_random) % count);
            float *place = input ? &t->images[at] : &t->params[at], kept = *place;
            double value[2], at_float[2];
            for (int side = 0; side < 2; side++) {
                *place = kept + (side ? h : -h);
                at_float[side] = (double)*place;
                if (!input)
                    assert_int_equal(ops->write(b, PS_STATE_PARAMS, at, 1, place, &err), 0);
                value[side] = objective(t, ops, b, mode, loss, scratch);
                /* The differences are of this state's objective, so running statistics must not have moved
                 * it. */
                assert_int_equal(ops->write(b, PS_STATE_BUFFERS, 0, m->buffer_elements, t->buffers, &err), 0);
            }
            *place = kept;
            if (!input)
                assert_int_equal(ops->write(b, PS_STATE_PARAMS, at, 1, place, &err), 0);
            double numeric = (value[1] - value[0]) / (at_float[1] - at_float[0]);
            double analytic = input ? dx[at] : grads[at];
            difference += (numeric - analytic) * (numeric - analytic);
            norm += numeric * numeric;
        }
        double error = sqrt(difference) / fmax(sqrt(norm), 1e-3);
        worst = fmax(worst, error);
    }
    free(grads);
    free(dx);
    free(scratch);
    ops->destroy(b);
    return worst;
}

#endif
