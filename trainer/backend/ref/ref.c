/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/ref/ref.h"

#include "trainer/backend/arena.h"
#include "trainer/backend/bn_exchange.h"
#include "trainer/optim/optim.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ps_backend {
    const struct ps_model *model;
    struct ps_backend_config config;
    size_t real; /* bytes of an element */
    bool input_grad;

    /* Of the last forward. */
    int count, resolution;
    enum ps_mode mode;
    bool ran, forward_trained; /* a forward has run; backward may follow */
    bool went_back;            /* value gradients are there */
    bool has_loss;

    void *params, *grads, *moment1, *moment2; /* [param_elements] */
    void *buffers;                            /* [buffer_elements] */
    void *values, *value_grads;
    size_t values_capacity, grads_capacity; /* elements */
    size_t value_elements; /* of the last training forward: all values, one after the other */
    size_t *value_at;      /* [value_count] offset of each value, in elements */
    int *extents;          /* [value_count] */
    int *last_use;         /* [value_count] op that reads the value last */
    void *stats;           /* per BN op [2, c] */
    size_t *stats_at;      /* [op_count] */
    int32_t *chosen;       /* per max pool op, see kernels.h */
    size_t *chosen_at;     /* [op_count] */
    size_t chosen_capacity;
    void *columns; /* im2col of one image, of the largest convolution */
    size_t columns_capacity;
    void *loss_grad; /* [count, classes] */
    double *own;     /* one BN op's message: [1 + 2 * c] */
    struct ps_bn_exchange exchange;
    struct ps_metrics metrics;
};

static size_t ps_ref_value_elements(const struct ps_backend *b, int v)
{
    return (size_t)b->count * (size_t)b->model->values[v].channels * (size_t)b->extents[v] *
           (size_t)b->extents[v];
}

#define REAL float
#define K(name) name##_f32
#include "trainer/backend/ref/kernels.h"

#include "trainer/backend/ref/engine.h"
#undef REAL
#undef K
#define REAL double
#define K(name) name##_f64
#include "trainer/backend/ref/kernels.h"

#include "trainer/backend/ref/engine.h"
#undef REAL
#undef K

static bool is_double(const struct ps_backend *b)
{
    return b->config.precision == PS_FP64;
}

/* Gives every value its place for b->count images with b->extents: one after the other for training, memory
 * reused as soon as a value was read for the last time for evaluation. Returns the elements needed. */
static size_t place_values(struct ps_backend *b, bool training, size_t *ret_chosen, size_t *ret_columns)
{
    const struct ps_model *m = b->model;
    struct ps_arena arena = {0};
    size_t total = 0, chosen = 0, columns = 0;
    for (int i = -1; i < m->op_count; i++) {
        int out = i < 0 ? m->input : m->ops[i].out;
        size_t elements = ps_ref_value_elements(b, out);
        if (training) {
            b->value_at[out] = total;
            total += elements;
        } else {
            size_t at = ps_arena_take(&arena, elements * b->real);
            if (at == SIZE_MAX)
                return SIZE_MAX;
            b->value_at[out] = at / b->real;
        }
        if (i < 0)
            continue;
        const struct ps_op *op = &m->ops[i];
        if (op->kind == PS_OP_MAX_POOL) {
            b->chosen_at[i] = chosen;
            chosen += elements;
        }
        if (op->kind == PS_OP_CONV) {
            size_t c = m->params[op->param[0]].count / (size_t)m->values[out].channels *
                       (size_t)b->extents[out] * (size_t)b->extents[out];
            columns = c > columns ? c : columns;
        }
        if (!training)
            for (int k = 0; k < 2; k++)
                if (op->in[k] != PS_NONE && b->last_use[op->in[k]] == i && (k == 0 || op->in[1] != op->in[0]))
                    ps_arena_give(&arena, b->value_at[op->in[k]] * b->real);
    }
    *ret_chosen = chosen;
    *ret_columns = columns;
    return training ? total : arena.peak / b->real;
}

static void ref_destroy(struct ps_backend *b)
{
    if (!b)
        return;
    void *const owned[] = {b->params,      b->grads,     b->moment1, b->moment2,  b->buffers, b->values,
                           b->value_grads, b->value_at,  b->extents, b->last_use, b->stats,   b->stats_at,
                           b->chosen,      b->chosen_at, b->columns, b->loss_grad};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
    free(b->own);
    ps_bn_exchange_done(&b->exchange);
    free(b);
}

static int ref_probe(int *ret_device_count, char *ret_description, size_t size, struct ps_error *err)
{
    (void)err;
    if (ret_device_count)
        *ret_device_count = 1;
    if (ret_description)
        snprintf(ret_description, size, "plain C, one thread (reference)");
    return 0;
}

static bool ref_supports(enum ps_precision precision)
{
    return precision == PS_FP32 || precision == PS_FP64;
}

static int ref_create(const struct ps_backend_config *config, struct ps_backend **ret, struct ps_error *err)
{
    const struct ps_model *m = config->model;
    if (!ref_supports(config->precision))
        return ps_fail(err, PS_UNIMPLEMENTED, "backend ref has no bf16: use fp32");
    if (config->max_batch < 1 && config->max_eval_batch < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: the largest batch must be at least 1");
    struct ps_backend *b = calloc(1, sizeof *b);
    if (!b)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    b->model = m;
    b->config = *config;
    b->real = config->precision == PS_FP64 ? sizeof(double) : sizeof(float);
    b->input_grad = getenv("PARAMSYNC_INPUT_GRAD") != NULL;

    size_t values = (size_t)m->value_count, ops = (size_t)m->op_count + 1;
    b->value_at = calloc(values, sizeof *b->value_at);
    b->extents = calloc(values, sizeof *b->extents);
    b->last_use = calloc(values, sizeof *b->last_use);
    b->stats_at = calloc(ops, sizeof *b->stats_at);
    b->chosen_at = calloc(ops, sizeof *b->chosen_at);
    if (!b->value_at || !b->extents || !b->last_use || !b->stats_at || !b->chosen_at) {
        ref_destroy(b);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    int r = ps_model_extents(m, config->max_resolution, b->extents, err);
    if (r < 0) {
        ref_destroy(b);
        return r;
    }
    size_t stats = 0;
    int widest = 0;
    for (int i = 0; i < m->op_count; i++) {
        const struct ps_op *op = &m->ops[i];
        for (int k = 0; k < 2; k++)
            if (op->in[k] != PS_NONE)
                b->last_use[op->in[k]] = i;
        if (op->kind == PS_OP_BN) {
            b->stats_at[i] = stats;
            stats += 2 * (size_t)m->values[op->out].channels;
            widest = m->values[op->out].channels > widest ? m->values[op->out].channels : widest;
        }
    }
    b->last_use[m->output] = m->op_count;

    for (int train = 0; train < 2; train++) {
        if (train && !config->training)
            break;
        b->count = train ? config->max_batch : config->max_eval_batch > 0 ? config->max_eval_batch : 1;
        size_t chosen = 0, columns = 0, need = place_values(b, train, &chosen, &columns);
        if (need == SIZE_MAX) {
            ref_destroy(b);
            return ps_fail(err, PS_UNIMPLEMENTED, "model %s has too many values alive at one time", m->name);
        }
        b->values_capacity = need > b->values_capacity ? need : b->values_capacity;
        b->chosen_capacity = chosen > b->chosen_capacity ? chosen : b->chosen_capacity;
        b->columns_capacity = columns > b->columns_capacity ? columns : b->columns_capacity;
        if (train)
            b->grads_capacity = need;
    }
    size_t logits =
        (size_t)(config->max_batch > 0 ? config->max_batch : 1) * (size_t)m->values[m->output].channels;
    b->params = calloc(m->param_elements + 1, b->real);
    b->buffers = calloc(m->buffer_elements + 1, b->real);
    b->values = calloc(b->values_capacity + 1, b->real);
    b->stats = calloc(stats + 1, b->real);
    b->chosen = calloc(b->chosen_capacity + 1, sizeof *b->chosen);
    b->columns = calloc(b->columns_capacity + 1, b->real);
    b->own = calloc(ps_bn_message(widest), sizeof *b->own);
    bool ok = b->params && b->buffers && b->values && b->stats && b->chosen && b->columns && b->own &&
              ps_bn_exchange_init(&b->exchange, config->bn_sync, widest) == 0;
    if (config->training) {
        b->grads = calloc(m->param_elements + 1, b->real);
        b->moment1 = calloc(m->param_elements + 1, b->real);
        b->moment2 = calloc(m->param_elements + 1, b->real);
        b->value_grads = calloc(b->grads_capacity + 1, b->real);
        b->loss_grad = calloc(logits, b->real);
        ok = ok && b->grads && b->moment1 && b->moment2 && b->value_grads && b->loss_grad;
    }
    if (!ok) {
        ref_destroy(b);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory: a smaller batch needs less");
    }
    *ret = b;
    return 0;
}

/* The vector behind a state kind and its length. */
static int find_state(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count, void **ret,
                      struct ps_error *err)
{
    size_t length = what == PS_STATE_BUFFERS ? b->model->buffer_elements : b->model->param_elements;
    void *all[] = {[PS_STATE_PARAMS] = b->params,
                   [PS_STATE_GRADS] = b->grads,
                   [PS_STATE_BUFFERS] = b->buffers,
                   [PS_STATE_MOMENT_1] = b->moment1,
                   [PS_STATE_MOMENT_2] = b->moment2};
    if ((unsigned)what >= sizeof all / sizeof *all || offset > length || count > length - offset)
        return ps_fail(err, PS_OUT_OF_RANGE, "backend: elements %zu to %zu of a state of %zu", offset,
                       offset + count, length);
    if (!all[what])
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "backend: created without training, it has no such state");
    *ret = (char *)all[what] + offset * b->real;
    return 0;
}

static void to_float(const struct ps_backend *b, const void *from, size_t count, float *to)
{
    if (!is_double(b))
        memcpy(to, from, count * sizeof *to);
    else
        for (size_t i = 0; i < count; i++)
            to[i] = (float)((const double *)from)[i];
}

static void to_double(const struct ps_backend *b, const void *from, size_t count, double *to)
{
    if (is_double(b))
        memcpy(to, from, count * sizeof *to);
    else
        for (size_t i = 0; i < count; i++)
            to[i] = (double)((const float *)from)[i];
}

static int ref_read(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count, float *host,
                    struct ps_error *err)
{
    void *state = NULL;
    int r = find_state(b, what, offset, count, &state, err);
    if (r == 0)
        to_float(b, state, count, host);
    return r;
}

static int ref_write(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count,
                     const float *host, struct ps_error *err)
{
    void *state = NULL;
    int r = find_state(b, what, offset, count, &state, err);
    if (r < 0)
        return r;
    if (!is_double(b))
        memcpy(state, host, count * sizeof *host);
    else
        for (size_t i = 0; i < count; i++)
            ((double *)state)[i] = (double)host[i];
    return 0;
}

static int ref_forward(struct ps_backend *b, const struct ps_batch *batch, enum ps_mode mode,
                       const struct ps_loss_config *loss, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    bool training = mode != PS_EVAL;
    int most = training ? b->config.max_batch : b->config.max_eval_batch;
    if (training && !b->config.training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: created without training");
    if (batch->count < 1 || batch->count > most)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: a batch of %d images; 1 to %d were planned for",
                       batch->count, most);
    if (batch->resolution > b->config.max_resolution)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: images of %d pixels; at most %d were planned for",
                       batch->resolution, b->config.max_resolution);
    b->ran = b->forward_trained = b->went_back = false;
    int r = ps_model_extents(m, batch->resolution, b->extents, err);
    if (r < 0)
        return r;
    int classes = m->values[m->output].channels;
    b->has_loss = b->extents[m->output] == 1 && batch->labels;
    for (int i = 0; b->has_loss && i < batch->count; i++)
        if (batch->labels[i] < 0 || batch->labels[i] >= classes)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "backend: label %d of image %d is out of range (0 to %d)", batch->labels[i], i,
                           classes - 1);
    b->count = batch->count;
    b->resolution = batch->resolution;
    b->mode = mode;
    size_t chosen = 0, columns = 0, need = place_values(b, training, &chosen, &columns);
    if (need == SIZE_MAX)
        return ps_fail(err, PS_UNIMPLEMENTED, "model %s has too many values alive at one time", m->name);
    /* Sizes were planned for the largest batch and resolution; how gaps fit may differ for smaller ones. */
    if (need > b->values_capacity) {
        void *more = calloc(need, b->real);
        if (!more)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory: a smaller batch needs less");
        free(b->values);
        b->values = more;
        b->values_capacity = need;
    }
    if (chosen > b->chosen_capacity || columns > b->columns_capacity)
        return ps_fail(err, PS_INTERNAL,
                       "backend: a batch of %d images of %d pixels needs more memory than planned",
                       batch->count, batch->resolution);
    b->value_elements = need;
    void *loss_grad = training ? b->loss_grad : NULL;
    double smoothing = (double)loss->label_smoothing, scale = (double)loss->grad_scale;
    if (is_double(b)) {
        load_images_f64(b, batch);
        r = forward_ops_f64(b, err);
        if (r == 0 && b->has_loss && batch->labels)
            b->metrics.loss_sum += loss_f64(b->count, classes, value_f64(b, m->output), batch->labels,
                                            smoothing, scale, loss_grad, &b->metrics.correct);
    } else {
        load_images_f32(b, batch);
        r = forward_ops_f32(b, err);
        if (r == 0 && b->has_loss && batch->labels)
            b->metrics.loss_sum += loss_f32(b->count, classes, value_f32(b, m->output), batch->labels,
                                            smoothing, scale, loss_grad, &b->metrics.correct);
    }
    if (r < 0)
        return r;
    b->metrics.count += b->has_loss ? b->count : 0;
    b->ran = true;
    b->forward_trained = training;
    return 0;
}

static int ref_backward(struct ps_backend *b, bool accumulate, const float *cotangent, ps_grad_ready ready,
                        void *ready_context, struct ps_error *err)
{
    if (!b->forward_trained)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: backward follows a forward in a training mode");
    if (!cotangent && !b->has_loss)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: no loss was computed, a cotangent is needed");
    int r = is_double(b) ? backward_pass_f64(b, accumulate, cotangent, ready, ready_context, err)
                         : backward_pass_f32(b, accumulate, cotangent, ready, ready_context, err);
    b->went_back = r == 0;
    return r;
}

static int ref_update(struct ps_backend *b, const struct ps_optimizer_step *step, struct ps_error *err)
{
    if (!b->config.training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: created without training");
    int r = ps_optim_check(step, err);
    if (r < 0)
        return r;
    if (is_double(b))
        step_f64(b, step);
    else
        step_f32(b, step);
    return 0;
}

static int ref_metrics(struct ps_backend *b, struct ps_metrics *ret, struct ps_error *err)
{
    (void)err;
    *ret = b->metrics;
    b->metrics = (struct ps_metrics){0};
    return 0;
}

static float *ref_gradients(struct ps_backend *b)
{
    return is_double(b) ? NULL : b->grads;
}

static void *ref_allocate(struct ps_backend *b, size_t bytes)
{
    (void)b;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void ref_release(struct ps_backend *b, void *memory)
{
    (void)b;
    free(memory);
}

static int ref_copy_scaled(struct ps_backend *b, float *dst, const float *src, size_t count, float scale,
                           struct ps_error *err)
{
    (void)b;
    (void)err;
    for (size_t i = 0; i < count; i++)
        dst[i] = src[i] * scale;
    return 0;
}

static int find_value(struct ps_backend *b, int value, bool gradient, const void **ret, struct ps_error *err)
{
    if (value < 0 || value >= b->model->value_count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: model %s has no value %d", b->model->name, value);
    if (!b->ran)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: no forward has run");
    if (gradient && (!b->went_back || (value == b->model->input && !b->input_grad)))
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: this gradient was not computed");
    if (!gradient && b->mode == PS_EVAL && value != b->model->output)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: evaluation keeps the output only");
    *ret = (const char *)(gradient ? b->value_grads : b->values) + b->value_at[value] * b->real;
    return 0;
}

static int ref_read_value(struct ps_backend *b, int value, bool gradient, float *host, struct ps_error *err)
{
    const void *from = NULL;
    int r = find_value(b, value, gradient, &from, err);
    if (r == 0)
        to_float(b, from, ps_ref_value_elements(b, value), host);
    return r;
}

int ps_ref_read_value64(struct ps_backend *b, int value, bool gradient, double *host, struct ps_error *err)
{
    const void *from = NULL;
    int r = find_value(b, value, gradient, &from, err);
    if (r == 0)
        to_double(b, from, ps_ref_value_elements(b, value), host);
    return r;
}

int ps_ref_read_gradients64(struct ps_backend *b, double *host, struct ps_error *err)
{
    void *state = NULL;
    int r = find_state(b, PS_STATE_GRADS, 0, b->model->param_elements, &state, err);
    if (r == 0)
        to_double(b, state, b->model->param_elements, host);
    return r;
}

static void ref_memory(struct ps_backend *b, size_t *ret_activations, size_t *ret_params,
                       size_t *ret_workspace)
{
    *ret_activations = b->values_capacity * b->real + (b->value_grads ? b->grads_capacity * b->real : 0) +
                       b->chosen_capacity * sizeof *b->chosen;
    *ret_params =
        (b->model->param_elements * (b->config.training ? 4 : 1) + b->model->buffer_elements) * b->real;
    *ret_workspace = b->columns_capacity * b->real;
}

static const struct ps_backend_ops ops = {
    .abi = PS_BACKEND_ABI,
    .name = "ref",
    .probe = ref_probe,
    .supports = ref_supports,
    .create = ref_create,
    .destroy = ref_destroy,
    .read = ref_read,
    .write = ref_write,
    .forward = ref_forward,
    .backward = ref_backward,
    .update = ref_update,
    .metrics = ref_metrics,
    .gradients = ref_gradients,
    .allocate = ref_allocate,
    .release = ref_release,
    .copy_scaled = ref_copy_scaled,
    .read_value = ref_read_value,
    .memory = ref_memory,
};

const struct ps_backend_ops *ps_backend_ref(void)
{
    return &ops;
}
