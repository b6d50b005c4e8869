/* SPDX-License-Identifier: Apache-2.0
 * The CUDA backend's sources on the stand-ins of tests/fakegpu, which compute on the host, against the
 * reference backend in double: output, every parameter's gradient, the input's gradient and the running
 * statistics, for nets around each op and for the whole net. PS_FAKE_GPU_STRICT makes races, accesses out of
 * bounds, leaks and wrong descriptors fail the test. */
#include "tests/unit/backend_nets.h"

#include <stdio.h>

static const struct ps_backend_ops *cuda;

struct order {
    int ids[80], count;
};

static void note_ready(void *context, int param)
{
    struct order *o = context;
    assert_in_range(o->count, 0, 79);
    o->ids[o->count++] = param;
}

struct result {
    float *output, *grads, *dx, *buffers;
    struct ps_metrics metrics;
    struct order order;
};

static void result_done(struct result *r)
{
    free(r->output);
    free(r->grads);
    free(r->dx);
    free(r->buffers);
}

static void run(const struct bench *t, const struct ps_backend_ops *ops, struct ps_backend *b,
                enum ps_mode mode, const float *cotangent, struct result *r)
{
    struct ps_error err = {0};
    const struct ps_model *m = t->model;
    const struct ps_loss_config loss = {0.1f, 1.0f / (float)t->batch.count};
    memset(r, 0, sizeof *r);
    r->output = calloc(t->output_elements, sizeof(float));
    r->grads = calloc(m->param_elements + 1, sizeof(float));
    r->dx = calloc(t->image_elements, sizeof(float));
    r->buffers = calloc(m->buffer_elements + 1, sizeof(float));
    if (ops->forward(b, &t->batch, mode, &loss, &err) != 0)
        fail_msg("forward: %s", err.message);
    assert_int_equal(ops->read_value(b, m->output, false, r->output, &err), 0);
    assert_int_equal(ops->read(b, PS_STATE_BUFFERS, 0, m->buffer_elements, r->buffers, &err), 0);
    assert_int_equal(ops->metrics(b, &r->metrics, &err), 0);
    if (mode == PS_EVAL)
        return;
    if (ops->backward(b, false, cotangent, note_ready, &r->order, &err) != 0)
        fail_msg("backward: %s", err.message);
    assert_int_equal(ops->read(b, PS_STATE_GRADS, 0, m->param_elements, r->grads, &err), 0);
    assert_int_equal(ops->read_value(b, m->input, true, r->dx, &err), 0);
}

static void compare(const struct bench *t, const char *name, const struct result *a, const struct result *b,
                    double tolerance)
{
    const struct ps_model *m = t->model;
    double e = relative(a->output, b->output, t->output_elements);
    if (!(e < tolerance))
        fail_msg("%s: output differs by %.2e", name, e);
    for (int i = 0; i < m->param_count; i++) {
        e = relative(a->grads + m->params[i].offset, b->grads + m->params[i].offset, m->params[i].count);
        if (!(e < tolerance))
            fail_msg("%s: gradient of %s differs by %.2e", name, m->params[i].name, e);
    }
    e = relative(a->dx, b->dx, t->image_elements);
    if (!(e < tolerance))
        fail_msg("%s: gradient of the input differs by %.2e", name, e);
    e = relative(a->buffers, b->buffers, m->buffer_elements);
    if (!(e < tolerance))
        fail_msg("%s: running statistics differ by %.2e", name, e);
    assert_true(fabs(a->metrics.loss_sum - b->metrics.loss_sum) <= 1e-5 * fabs(b->metrics.loss_sum));
    assert_int_equal(a->metrics.count, b->metrics.count);
    assert_int_equal(a->order.count, b->order.count);
    assert_memory_equal(a->order.ids, b->order.ids, sizeof(int) * (size_t)b->order.count);
}

static void against_reference(const struct bench *t, const char *name, enum ps_mode mode,
                              const float *cotangent, double tolerance)
{
    const struct ps_backend_ops *ref = ps_backend_ref();
    struct ps_backend *a = bench_create(t, cuda, PS_FP32, 1), *b = bench_create(t, ref, PS_FP64, 1);
    struct result x, y;
    run(t, cuda, a, mode, cotangent, &x);
    run(t, ref, b, mode, cotangent, &y);
    compare(t, name, &x, &y, tolerance);
    result_done(&x);
    result_done(&y);
    cuda->destroy(a);
    ref->destroy(b);
}

static void every_op(void **state)
{
    (void)state;
    for (int i = 0; i < NET_COUNT; i++)
        for (int mode = 0; mode < 3; mode++) {
            struct bench t;
            ps_mt19937_seed(&net_random, (uint32_t)(200 + i));
            bench_net(&t, &nets[i]);
            against_reference(&t, nets[i].name, (enum ps_mode)mode, t.cotangent, 1e-5);
            bench_done(&t);
        }
}

/* With TF32 the images' channels are filled up to four; the stand-in does not round. */
static void filled_up(void **state)
{
    (void)state;
    bench_tf32 = true;
    for (int mode = 1; mode < 3; mode++) {
        struct bench t;
        ps_mt19937_seed(&net_random, 77);
        bench_net(&t, &nets[NET_COUNT - 1]);
        against_reference(&t, "TF32", (enum ps_mode)mode, NULL, 1e-5);
        bench_done(&t);
    }
    bench_tf32 = false;
}

static double cosine(const float *a, const float *b, size_t count)
{
    double dot = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < count; i++) {
        dot += (double)a[i] * (double)b[i];
        aa += (double)a[i] * (double)a[i];
        bb += (double)b[i] * (double)b[i];
    }
    return aa > 0 && bb > 0 ? dot / sqrt(aa * bb) : aa == bb;
}

/* Op by op 0.999; behind several, ReLUs near the kink fall on the other side. */
static void close_in_bf16(const struct bench *t, const char *net, const char *what, const float *a,
                          const float *b, size_t count)
{
    const double c = cosine(a, b, count), size = relative(a, b, count);
    const struct ps_model *m = t->model;
    const bool alone = m->op_count == 1 || (m->op_count == 2 && m->ops[1].kind != PS_OP_RELU);
    if (!(c >= (alone ? 0.999 : 0.98) && size < (alone ? 0.05 : 0.2)))
        fail_msg("%s in bf16: %s has cosine %.5f, relative distance %.1e", net, what, c, size);
}

static void every_op_in_bf16(void **state)
{
    (void)state;
    const struct ps_backend_ops *ref = ps_backend_ref();
    for (int i = 0; i < NET_COUNT; i++)
        for (int mode = 0; mode < 3; mode++) {
            struct bench t;
            struct result x, y;
            ps_mt19937_seed(&net_random, (uint32_t)(300 + i));
            bench_net(&t, &nets[i]);
            struct ps_backend *a = bench_create(&t, cuda, PS_BF16, 1), *b = bench_create(&t, ref, PS_FP64, 1);
            run(&t, cuda, a, (enum ps_mode)mode, t.cotangent, &x);
            run(&t, ref, b, (enum ps_mode)mode, t.cotangent, &y);
            close_in_bf16(&t, nets[i].name, "output", x.output, y.output, t.output_elements);
            if (mode != PS_EVAL) {
                for (int k = 0; k < t.model->param_count; k++) {
                    const struct ps_param *p = &t.model->params[k];
                    close_in_bf16(&t, nets[i].name, p->name, x.grads + p->offset, y.grads + p->offset,
                                  p->count);
                }
                close_in_bf16(&t, nets[i].name, "input's gradient", x.dx, y.dx, t.image_elements);
            }
            if (t.model->buffer_elements)
                close_in_bf16(&t, nets[i].name, "statistics", x.buffers, y.buffers, t.model->buffer_elements);
            assert_int_equal(x.order.count, y.order.count);
            result_done(&x);
            result_done(&y);
            cuda->destroy(a);
            ref->destroy(b);
            bench_done(&t);
        }
}

static void start_resnet(struct bench *t, int width, int count, int resolution)
{
    struct ps_model *m = NULL;
    struct ps_error err = {0};
    ps_mt19937_seed(&net_random, 17);
    assert_int_equal(ps_model_create("resnet18", width, 10, &m, &err), 0);
    bench_start(t, m, count, resolution);
}

/* The smallest |input| of any ReLU over its tensor's root mean square, with BN frozen, in double. */
static double kink_distance(const struct bench *t)
{
    const struct ps_backend_ops *ref = ps_backend_ref();
    struct ps_backend *b = bench_create(t, ref, PS_FP64, 1);
    struct ps_error err = {0};
    double smallest = INFINITY;
    assert_int_equal(ref->forward(b, &t->batch, PS_TRAIN_FROZEN_BN, &plain_loss, &err), 0);
    for (int i = 0; i < t->model->op_count; i++) {
        if (t->model->ops[i].kind != PS_OP_RELU)
            continue;
        int v = t->model->ops[i].in[0];
        size_t n = bench_elements(t, v);
        double *x = calloc(n, sizeof *x), least = INFINITY, squares = 0;
        assert_non_null(x);
        assert_int_equal(ps_ref_read_value64(b, v, false, x, &err), 0);
        for (size_t k = 0; k < n; k++) {
            least = fmin(least, fabs(x[k]));
            squares += x[k] * x[k];
        }
        smallest = fmin(smallest, least / sqrt(squares / (double)n));
        free(x);
    }
    ref->destroy(b);
    return smallest;
}

/* A ReLU whose input is nearer to 0 than float rounds falls on either side by chance, and the gradient with
 * it: other images until there is none. */
static void keep_off_the_kinks(struct bench *t)
{
    for (int i = 0; i < 200; i++) {
        if (kink_distance(t) > 5e-6)
            return;
        bench_inputs(t, t->batch.count, t->batch.resolution);
    }
    fail_msg("no images keep off the kinks");
}

static void whole_net(void **state)
{
    (void)state;
    static const int sizes[][3] = {
        {16, 6, 16}, {4, 3, 8}, {8, 2, 24}, {3, 2, 9}}; /* width, batch, resolution */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct bench t;
        start_resnet(&t, sizes[i][0], sizes[i][1], sizes[i][2]);
        keep_off_the_kinks(&t);
        against_reference(&t, "resnet18, frozen BN", PS_TRAIN_FROZEN_BN, NULL, 1e-5);
        against_reference(&t, "resnet18, evaluation", PS_EVAL, NULL, 1e-5);
        bench_done(&t);
    }
}

/* In training mode ReLUs near zero flip with the last bit of the statistics, and small batches make it worse:
 * the two float backends are as far from double as from each other. The parity tests against PyTorch look
 * closer. */
static void whole_net_in_training(void **state)
{
    (void)state;
    struct bench t;
    start_resnet(&t, 16, 8, 16);
    const struct ps_backend_ops *ref = ps_backend_ref();
    struct ps_backend *a = bench_create(&t, cuda, PS_FP32, 1), *b = bench_create(&t, ref, PS_FP64, 1);
    struct ps_backend *c = bench_create(&t, ref, PS_FP32, 1);
    struct result x, y, z;
    run(&t, cuda, a, PS_TRAIN, NULL, &x);
    run(&t, ref, b, PS_TRAIN, NULL, &y);
    run(&t, ref, c, PS_TRAIN, NULL, &z);
    double ours = relative(x.grads, y.grads, t.model->param_elements);
    double plain = relative(z.grads, y.grads, t.model->param_elements);
    if (!(ours < 1e-5 || ours < 4 * plain + 1e-2))
        fail_msg("gradients differ by %.2e from double (plain C in float: %.2e)", ours, plain);
    assert_true(relative(x.output, y.output, t.output_elements) < 1e-4);
    assert_true(relative(x.buffers, y.buffers, t.model->buffer_elements) < 1e-5);
    result_done(&x);
    result_done(&y);
    result_done(&z);
    cuda->destroy(a);
    ref->destroy(b);
    ref->destroy(c);
    bench_done(&t);
}

/* One backend, many batch sizes and resolutions, more than it keeps graphs for; each result must be that of a
 * backend that never saw anything else. */
static void many_shapes(void **state)
{
    (void)state;
    struct bench t;
    start_resnet(&t, 4, 5, 9);
    struct ps_backend *kept = bench_create(&t, cuda, PS_FP32, 1);
    static const int shapes[][2] = {{5, 9}, {3, 8}, {1, 9}, {5, 8}, {4, 1},
                                    {2, 8}, {4, 9}, {3, 9}, {2, 9}, {1, 1}};
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (int mode = 0; mode < 3; mode += 2) {
                bench_inputs(&t, shapes[i][0], shapes[i][1]);
                struct ps_backend *fresh = bench_create(&t, cuda, PS_FP32, 1);
                struct result x, y;
                run(&t, cuda, kept, (enum ps_mode)mode, NULL, &x);
                run(&t, cuda, fresh, (enum ps_mode)mode, NULL, &y);
                compare(&t, "many shapes", &x, &y, 1e-7);
                result_done(&x);
                result_done(&y);
                cuda->destroy(fresh);
            }
    cuda->destroy(kept);
    bench_done(&t);
}

static void twice_the_same(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 8, 6, 16);
    float *params[2];
    for (int k = 0; k < 2; k++) {
        struct ps_backend *b = bench_create(&t, cuda, PS_FP32, 1);
        for (int step = 1; step <= 4; step++) {
            const struct ps_loss_config loss = {0, 1.0f / 6};
            const struct ps_optimizer_step sgd = {.kind = PS_SGD,
                                                  .step = step,
                                                  .lr = 0.05,
                                                  .weight_decay = 5e-4,
                                                  .momentum = 0.9,
                                                  .nesterov = true};
            assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN, &loss, &err), 0);
            assert_int_equal(cuda->backward(b, false, NULL, NULL, NULL, &err), 0);
            assert_int_equal(cuda->update(b, &sgd, &err), 0);
        }
        params[k] = calloc(t.model->param_elements, sizeof(float));
        assert_int_equal(cuda->read(b, PS_STATE_PARAMS, 0, t.model->param_elements, params[k], &err), 0);
        cuda->destroy(b);
    }
    assert_memory_equal(params[0], params[1], t.model->param_elements * sizeof(float));
    assert_memory_not_equal(params[0], t.params, t.model->param_elements * sizeof(float));
    free(params[0]);
    free(params[1]);
    bench_done(&t);
}

static void steps_like_the_reference(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct bench t;
        struct ps_error err = {0};
        ps_mt19937_seed(&net_random, 23);
        bench_net(&t, &nets[NET_COUNT - 1]);
        const struct ps_backend_ops *table[2] = {cuda, ps_backend_ref()};
        size_t n = t.model->param_elements;
        float *params[2];
        for (int k = 0; k < 2; k++) {
            struct ps_backend *b = bench_create(&t, table[k], k ? PS_FP64 : PS_FP32, 1);
            for (int step = 1; step <= 3; step++) {
                const struct ps_loss_config loss = {0, 0.25f};
                const struct ps_optimizer_step s = {.kind = kind ? PS_ADAM : PS_SGD,
                                                    .step = step,
                                                    .lr = kind ? 1e-3 : 0.02,
                                                    .weight_decay = 5e-4,
                                                    .momentum = 0.9,
                                                    .nesterov = true,
                                                    .beta1 = 0.9,
                                                    .beta2 = 0.999,
                                                    .eps = 1e-3};
                assert_int_equal(table[k]->forward(b, &t.batch, PS_TRAIN_FROZEN_BN, &loss, &err), 0);
                assert_int_equal(table[k]->backward(b, false, NULL, NULL, NULL, &err), 0);
                assert_int_equal(table[k]->update(b, &s, &err), 0);
            }
            params[k] = calloc(n, sizeof(float));
            assert_int_equal(table[k]->read(b, PS_STATE_PARAMS, 0, n, params[k], &err), 0);
            table[k]->destroy(b);
        }
        for (size_t i = 0; i < n; i++) { /* compare the ways gone, not the places reached */
            params[0][i] -= t.params[i];
            params[1][i] -= t.params[i];
        }
        double e = relative(params[0], params[1], n);
        if (!(e < 1e-4))
            fail_msg("after three steps of %s the parameters' ways differ by %.2e", kind ? "Adam" : "SGD", e);
        free(params[0]);
        free(params[1]);
        bench_done(&t);
    }
}

/* Steps recorded as a graph and repeated give the bits of steps that were queued one call after another, with
 * another rate, batch and step number each time, and when the shape changes in between. */
static void recorded_steps(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    float *params[2];
    int repeated = 0;
    start_resnet(&t, 4, 4, 8);
    size_t n = t.model->param_elements;
    for (int graph = 0; graph < 2; graph++) {
        struct ps_backend *b = bench_create(&t, cuda, PS_BF16, 1);
        double losses = 0;
        ps_mt19937_seed(&net_random, 5);
        for (int step = 1; step <= 12; step++) {
            const struct ps_optimizer_step s = {
                .kind = PS_ADAM, .step = step, .lr = 0.01 / step, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
            const struct ps_loss_config loss = {0.1f, 0.25f};
            struct ps_batch batch = t.batch;
            bool done = false;
            fill_uniform(t.images, t.image_elements, 2);
            if (step == 6 || step == 9)
                batch.count = 3;
            if (graph)
                assert_int_equal(cuda->step_begin(b, &batch, &s, &loss, sizeof loss, &done, &err), 0);
            repeated += done;
            if (!done) {
                assert_int_equal(cuda->forward(b, &batch, PS_TRAIN, &loss, &err), 0);
                assert_int_equal(cuda->backward(b, false, NULL, NULL, NULL, &err), 0);
                assert_int_equal(cuda->update(b, &s, &err), 0);
            }
            if (graph && cuda->step_end(b, &err) != 0)
                fail_msg("step_end: %s", err.message);
        }
        struct ps_metrics metrics;
        assert_int_equal(cuda->metrics(b, &metrics, &err), 0);
        assert_int_equal(metrics.count, 46);
        losses = metrics.loss_sum;
        assert_true(losses > 0);
        params[graph] = calloc(n, sizeof(float));
        assert_int_equal(cuda->read(b, PS_STATE_PARAMS, 0, n, params[graph], &err), 0);
        cuda->destroy(b);
    }
    assert_true(repeated >= 6);
    assert_memory_equal(params[0], params[1], n * sizeof(float));
    free(params[0]);
    free(params[1]);
    bench_done(&t);
}

/* The weights that the layers read are the rounded master weights, also after steps: a backend that is given
 * the master weights of another goes on as that one does. */
static void master_weights(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 4, 4, 8);
    size_t n = t.model->param_elements;
    const struct ps_loss_config loss = {0, 0.25f};
    struct ps_backend *a = bench_create(&t, cuda, PS_BF16, 1), *b = bench_create(&t, cuda, PS_BF16, 1);
    float *master = calloc(n, sizeof *master), *out[2];
    for (int step = 1; step <= 3; step++) {
        const struct ps_optimizer_step s = {.kind = PS_SGD, .step = step, .lr = 1e-3, .momentum = 0.9};
        assert_int_equal(cuda->forward(a, &t.batch, PS_TRAIN_FROZEN_BN, &loss, &err), 0);
        assert_int_equal(cuda->backward(a, false, NULL, NULL, NULL, &err), 0);
        assert_int_equal(cuda->update(a, &s, &err), 0);
    }
    assert_int_equal(cuda->read(a, PS_STATE_PARAMS, 0, n, master, &err), 0);
    assert_int_equal(cuda->write(b, PS_STATE_PARAMS, 0, n, master, &err), 0);
    for (int k = 0; k < 2; k++) {
        out[k] = calloc(t.output_elements, sizeof(float));
        assert_int_equal(cuda->forward(k ? b : a, &t.batch, PS_EVAL, &loss, &err), 0);
        assert_int_equal(cuda->read_value(k ? b : a, t.model->output, false, out[k], &err), 0);
    }
    assert_memory_equal(out[0], out[1], t.output_elements * sizeof(float));
    int finer = 0; /* steps far smaller than bf16's resolution are not lost */
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &master[i], sizeof bits);
        finer += (bits & 0xffff) != 0;
    }
    assert_true((size_t)finer > n / 2);
    free(master);
    free(out[0]);
    free(out[1]);
    cuda->destroy(a);
    cuda->destroy(b);
    bench_done(&t);
}

static void accumulation(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 8, 6, 8);
    struct ps_backend *b = bench_create(&t, cuda, PS_FP32, 1);
    const struct ps_loss_config loss = {0, 1};
    size_t n = t.model->param_elements, image = t.image_elements / 6;
    float *whole = calloc(n, sizeof *whole), *parts = calloc(n, sizeof *parts);
    assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN_FROZEN_BN, &loss, &err), 0);
    assert_int_equal(cuda->backward(b, false, NULL, NULL, NULL, &err), 0);
    assert_int_equal(cuda->read(b, PS_STATE_GRADS, 0, n, whole, &err), 0);
    for (int k = 0; k < 2; k++) { /* 4 and 2 images */
        struct ps_batch part = t.batch;
        part.count = k ? 2 : 4;
        part.images = t.images + (k ? 4 * image : 0);
        part.labels = t.labels + (k ? 4 : 0);
        assert_int_equal(cuda->forward(b, &part, PS_TRAIN_FROZEN_BN, &loss, &err), 0);
        assert_int_equal(cuda->backward(b, k > 0, NULL, NULL, NULL, &err), 0);
    }
    assert_int_equal(cuda->read(b, PS_STATE_GRADS, 0, n, parts, &err), 0);
    assert_true(relative(parts, whole, n) < 1e-5);
    free(whole);
    free(parts);
    cuda->destroy(b);
    bench_done(&t);
}

static void arrival_order(void **state)
{
    (void)state;
    struct bench t;
    start_resnet(&t, 4, 2, 8);
    struct ps_backend *b = bench_create(&t, cuda, PS_FP32, 1);
    struct result r;
    run(&t, cuda, b, PS_TRAIN, NULL, &r);
    static const char *const first[] = {"dense_layer.bias",
                                        "dense_layer.weight",
                                        "conv5.1.residual_function.4.weight",
                                        "conv5.1.residual_function.4.bias",
                                        "conv5.1.residual_function.3.weight",
                                        "conv5.1.residual_function.1.weight"};
    assert_int_equal(r.order.count, 62);
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        assert_string_equal(t.model->params[r.order.ids[i]].name, first[i]);
    result_done(&r);
    cuda->destroy(b);
    bench_done(&t);
}

/* A gradient said to be final must not change after that. */
struct snapshot {
    const struct ps_model *model;
    struct ps_backend *b;
    float *seen;
};

static void take_snapshot(void *context, int param)
{
    struct snapshot *s = context;
    struct ps_error err = {0};
    const struct ps_param *p = &s->model->params[param];
    assert_int_equal(
        cuda->copy_scaled(s->b, s->seen + p->offset, cuda->gradients(s->b) + p->offset, p->count, 0.5f, &err),
        0);
}

static void ready_means_final(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 8, 3, 8);
    struct ps_backend *b = bench_create(&t, cuda, PS_FP32, 1);
    size_t n = t.model->param_elements;
    struct snapshot s = {t.model, b, cuda->allocate(b, n * sizeof(float))};
    assert_non_null(s.seen);
    assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), 0);
    assert_int_equal(cuda->backward(b, false, NULL, take_snapshot, &s, &err), 0);
    float *at_end = calloc(n, sizeof(float)), *at_ready = calloc(n, sizeof(float));
    assert_int_equal(cuda->read(b, PS_STATE_GRADS, 0, n, at_end, &err), 0);
    assert_int_equal(cuda->copy_scaled(b, cuda->gradients(b), s.seen, n, 1, &err), 0);
    assert_int_equal(cuda->read(b, PS_STATE_GRADS, 0, n, at_ready, &err), 0);
    for (size_t i = 0; i < n; i++)
        assert_true(at_ready[i] == at_end[i] * 0.5f);
    free(at_end);
    free(at_ready);
    cuda->release(b, s.seen);
    cuda->destroy(b);
    bench_done(&t);
}

static void nan_reaches_the_loss(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 8, 2, 8);
    t.params[t.model->params[3].offset] = NAN; /* a convolution's weight, with ReLUs behind it */
    const struct ps_backend_ops *table[2] = {cuda, ps_backend_ref()};
    for (int k = 0; k < 2; k++) {
        struct ps_backend *b = bench_create(&t, table[k], PS_FP32, 1);
        struct ps_metrics metrics;
        assert_int_equal(table[k]->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), 0);
        assert_int_equal(table[k]->metrics(b, &metrics, &err), 0);
        assert_true(isnan(metrics.loss_sum));
        table[k]->destroy(b);
    }
    bench_done(&t);
}

static void misuse_is_refused(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 4, 2, 8);
    struct ps_backend *b = bench_create(&t, cuda, PS_FP32, 1);
    float some[8];
    assert_int_equal(cuda->backward(b, false, NULL, NULL, NULL, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(cuda->forward(b, &t.batch, PS_EVAL, &plain_loss, &err), 0);
    assert_int_equal(cuda->backward(b, false, NULL, NULL, NULL, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(cuda->read_value(b, 2, false, some, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(cuda->read(b, PS_STATE_PARAMS, t.model->param_elements - 3, 4, some, &err),
                     PS_OUT_OF_RANGE);
    t.labels[1] = 10;
    assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    t.labels[1] = 0;
    t.batch.count++;
    assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    t.batch.count--;
    t.batch.resolution = 4096;
    assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_INVALID_ARGUMENT);
    cuda->destroy(b);
    cuda->destroy(NULL);
    struct ps_backend_config config = {.model = t.model,
                                       .precision = PS_FP64,
                                       .threads = 1,
                                       .max_batch = 1,
                                       .max_resolution = 8,
                                       .training = true};
    assert_int_equal(cuda->create(&config, &b, &err), PS_UNIMPLEMENTED);
    config.precision = PS_FP32;
    config.device = 1;
    assert_int_equal(cuda->create(&config, &b, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "there is 1: start at most 1 here"));
    config.device = 0;
    /* For evaluation alone there are no gradients, and backward is refused. */
    config.training = false;
    config.max_eval_batch = 2;
    assert_int_equal(cuda->create(&config, &b, &err), 0);
    assert_null(cuda->gradients(b));
    t.batch.resolution = 8;
    assert_int_equal(cuda->forward(b, &t.batch, PS_TRAIN, &plain_loss, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(cuda->read(b, PS_STATE_MOMENT_1, 0, 1, some, &err), PS_FAILED_PRECONDITION);
    cuda->destroy(b);
    bench_done(&t);
}

/* The sample's own net, as it is. */
static void real_net(void **state)
{
    (void)state;
    struct bench t;
    start_resnet(&t, 64, 2, 32);
    const struct ps_backend_ops *ref = ps_backend_ref();
    struct ps_backend *a = bench_create(&t, cuda, PS_FP32, 1), *b = bench_create(&t, ref, PS_FP64, 1);
    struct result x, y;
    run(&t, cuda, a, PS_TRAIN_FROZEN_BN, NULL, &x);
    run(&t, ref, b, PS_TRAIN_FROZEN_BN, NULL, &y);
    assert_true(relative(x.output, y.output, t.output_elements) < 1e-5);
    /* Some of 1.2 million ReLUs are on the kink. */
    double e = relative(x.grads, y.grads, t.model->param_elements);
    if (!(e < 1e-3))
        fail_msg("gradients of the real net differ by %.2e", e);
    result_done(&x);
    result_done(&y);
    const struct ps_optimizer_step adam = {
        .kind = PS_ADAM, .step = 1, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    struct ps_error err = {0};
    size_t n = t.model->param_elements;
    float *params[2];
    for (int k = 0; k < 2; k++) {
        params[k] = calloc(n, sizeof(float));
        assert_int_equal((k ? ref : cuda)->update(k ? b : a, &adam, &err), 0);
        assert_int_equal((k ? ref : cuda)->read(k ? b : a, PS_STATE_PARAMS, 0, n, params[k], &err), 0);
    }
    /* Adam's first step is the gradient's sign, times the rate. */
    e = relative(params[0], params[1], n);
    if (!(e < 1e-2))
        fail_msg("after a step the parameters differ by %.2e", e);
    free(params[0]);
    free(params[1]);
    cuda->destroy(a);
    ref->destroy(b);
    bench_done(&t);
}

static void evaluation_keeps_nothing(void **state)
{
    (void)state;
    struct bench t;
    struct ps_error err = {0};
    start_resnet(&t, 16, 16, 16);
    size_t bytes[2], params, workspace;
    for (int training = 0; training < 2; training++) {
        struct ps_backend *b = NULL;
        struct ps_backend_config config = {.model = t.model,
                                           .precision = PS_FP32,
                                           .threads = 1,
                                           .max_batch = 64,
                                           .max_eval_batch = training ? 0 : 64,
                                           .max_resolution = 32,
                                           .training = training};
        assert_int_equal(cuda->create(&config, &b, &err), 0);
        cuda->memory(b, &bytes[training], &params, &workspace);
        assert_true(params > t.model->param_elements * sizeof(float));
        cuda->destroy(b);
    }
    assert_true(bytes[0] * 4 < bytes[1]);
    bench_done(&t);
}

static int load(void **state)
{
    (void)state;
    struct ps_error err = {0};
    int r = ps_backend_load("cuda", &cuda, &err);
    if (r < 0) {
        fprintf(stderr, "%s\n", err.message);
        return -1;
    }
    char description[128];
    int devices = 0;
    r = cuda->probe(&devices, description, sizeof description, &err);
    fprintf(stderr, "%s\n", description);
    return r == 0 && devices == 1 && cuda->supports(PS_FP32) && !cuda->supports(PS_FP64) ? 0 : -1;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op),
        cmocka_unit_test(filled_up),
        cmocka_unit_test(every_op_in_bf16),
        cmocka_unit_test(whole_net),
        cmocka_unit_test(whole_net_in_training),
        cmocka_unit_test(many_shapes),
        cmocka_unit_test(twice_the_same),
        cmocka_unit_test(steps_like_the_reference),
        cmocka_unit_test(recorded_steps),
        cmocka_unit_test(master_weights),
        cmocka_unit_test(accumulation),
        cmocka_unit_test(arrival_order),
        cmocka_unit_test(ready_means_final),
        cmocka_unit_test(nan_reaches_the_loss),
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(evaluation_keeps_nothing),
        cmocka_unit_test(real_net),
    };
    return cmocka_run_group_tests(tests, load, NULL);
}
