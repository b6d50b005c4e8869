/* SPDX-License-Identifier: Apache-2.0
 * Models as tables.
 *
 * To add a model: write a function that calls the builders below in forward order and name it in
 * ps_model_create. A builder given a negative id returns it, so that a chain of calls needs one check at its
 * end. Parameters, buffers and entries get their places in the order of the calls, which for PyTorch's
 * state_dict() is the order in which the modules were registered. Gradients become final in the reverse order
 * of the ops: a residual block's shortcut is therefore built after its main branch, as PyTorch evaluates it.
 */
#include "trainer/model/model.h"

#include "services/base/digest.h"
#include "services/base/mt19937.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CHANNELS = 1 << 20 };

/* One more element; capacities are powers of two, so that the count says when to grow. NULL: out of memory.
 */
static void *grow(void *array, int count, size_t size)
{
    if (count & (count - 1))
        return array;
    return realloc(array, (count ? 2 * (size_t)count : 1) * size);
}

#define APPEND(array, count)                                                                                 \
    (__extension__({                                                                                         \
        void *grown_ = grow((array), (count), sizeof *(array));                                              \
        if (grown_) {                                                                                        \
            (array) = grown_;                                                                                \
            memset(&(array)[(count)], 0, sizeof *(array));                                                   \
        }                                                                                                    \
        grown_ ? (count)++ : PS_RESOURCE_EXHAUSTED;                                                          \
    }))

static int make_name(char out[PS_NAME_MAX], const char *prefix, const char *suffix)
{
    int n = snprintf(out, PS_NAME_MAX, "%s%s%s", prefix, *prefix ? "." : "", suffix);
    return n < 0 || n >= PS_NAME_MAX ? PS_INVALID_ARGUMENT : 0;
}

static int add_entry(struct ps_model *m, enum ps_entry_kind kind, int index, const char *name)
{
    int id = APPEND(m->entries, m->entry_count);
    if (id < 0)
        return id;
    m->entries[id].kind = kind;
    m->entries[id].index = index;
    memcpy(m->entries[id].name, name, PS_NAME_MAX);
    return id;
}

static int add_param(struct ps_model *m, const char *prefix, const char *suffix, int ndim, const int *shape,
                     int fan_in, float fill, bool decay)
{
    char name[PS_NAME_MAX] = {0};
    int r = make_name(name, prefix, suffix);
    if (r < 0)
        return r;
    int id = APPEND(m->params, m->param_count);
    if (id < 0)
        return id;
    struct ps_param *p = &m->params[id];
    memcpy(p->name, name, PS_NAME_MAX);
    p->ndim = ndim;
    p->count = 1;
    for (int i = 0; i < ndim; i++) {
        p->shape[i] = shape[i];
        p->count *= (size_t)shape[i];
    }
    p->offset = m->param_elements;
    p->fan_in = fan_in;
    p->fill = fill;
    p->decay = decay;
    m->param_elements += p->count;
    r = add_entry(m, PS_ENTRY_PARAM, id, name);
    return r < 0 ? r : id;
}

static int add_buffer(struct ps_model *m, const char *prefix, const char *suffix, int count, float fill)
{
    char name[PS_NAME_MAX] = {0};
    int r = make_name(name, prefix, suffix);
    if (r < 0)
        return r;
    int id = APPEND(m->buffers, m->buffer_count);
    if (id < 0)
        return id;
    struct ps_buffer *b = &m->buffers[id];
    memcpy(b->name, name, PS_NAME_MAX);
    b->count = (size_t)count;
    b->offset = m->buffer_elements;
    b->fill = fill;
    m->buffer_elements += b->count;
    r = add_entry(m, PS_ENTRY_BUFFER, id, name);
    return r < 0 ? r : id;
}

/* A new op and its value. Returns the value's id; *ret_op is good until the next builder call. */
static int add_op(struct ps_model *m, enum ps_op_kind kind, int in, int in2, int channels,
                  struct ps_op **ret_op)
{
    if (channels < 1 || channels > MAX_CHANNELS)
        return PS_INVALID_ARGUMENT;
    int value = APPEND(m->values, m->value_count);
    if (value < 0)
        return value;
    int op = APPEND(m->ops, m->op_count);
    if (op < 0) {
        m->value_count--;
        return op;
    }
    m->values[value].channels = channels;
    m->values[value].producer = op;
    m->ops[op] = (struct ps_op){.kind = kind,
                                .in = {in, in2},
                                .out = value,
                                .param = {PS_NONE, PS_NONE},
                                .buffer = {PS_NONE, PS_NONE}};
    m->output = value;
    *ret_op = &m->ops[op];
    return value;
}

static bool good_value(const struct ps_model *m, int value)
{
    return value >= 0 && value < m->value_count;
}

#define CHECK_VALUE(m, value)                                                                                \
    do {                                                                                                     \
        if ((value) < 0)                                                                                     \
            return (value);                                                                                  \
        if (!good_value((m), (value)))                                                                       \
            return PS_INVALID_ARGUMENT;                                                                      \
    } while (0)

struct ps_model *ps_model_new(const char *name, int width, int classes, int input_channels)
{
    if (strlen(name) >= sizeof((struct ps_model *)0)->name || input_channels < 1 ||
        input_channels > MAX_CHANNELS)
        return NULL;
    struct ps_model *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    memcpy(m->name, name, strlen(name) + 1);
    m->width = width;
    m->classes = classes;
    int value = APPEND(m->values, m->value_count);
    if (value < 0)
        return ps_model_free(m);
    m->values[value].channels = input_channels;
    m->values[value].producer = PS_NONE;
    m->input = m->output = value;
    return m;
}

struct ps_model *ps_model_free(struct ps_model *model)
{
    if (!model)
        return NULL;
    free(model->params);
    free(model->buffers);
    free(model->entries);
    free(model->values);
    free(model->ops);
    free(model);
    return NULL;
}

static bool good_window(int kernel, int stride, int pad)
{
    return kernel >= 1 && kernel <= 64 && stride >= 1 && stride <= 64 && pad >= 0 && pad < kernel;
}

int ps_model_conv(struct ps_model *m, const char *prefix, int in, int out_channels, int kernel, int stride,
                  int pad)
{
    CHECK_VALUE(m, in);
    if (!good_window(kernel, stride, pad) || out_channels < 1 || out_channels > MAX_CHANNELS)
        return PS_INVALID_ARGUMENT;
    int channels = m->values[in].channels;
    if (channels > INT_MAX / (kernel * kernel))
        return PS_INVALID_ARGUMENT;
    int weight = add_param(m, prefix, "weight", 4, (int[]){out_channels, channels, kernel, kernel},
                           channels * kernel * kernel, 0, true);
    if (weight < 0)
        return weight;
    struct ps_op *op;
    int out = add_op(m, PS_OP_CONV, in, PS_NONE, out_channels, &op);
    if (out < 0)
        return out;
    op->param[0] = weight;
    op->kernel = kernel;
    op->stride = stride;
    op->pad = pad;
    return out;
}

int ps_model_bn(struct ps_model *m, const char *prefix, int in)
{
    CHECK_VALUE(m, in);
    int channels = m->values[in].channels, ids[4];
    ids[0] = add_param(m, prefix, "weight", 1, &channels, 0, 1, false);
    ids[1] = ids[0] < 0 ? ids[0] : add_param(m, prefix, "bias", 1, &channels, 0, 0, false);
    ids[2] = ids[1] < 0 ? ids[1] : add_buffer(m, prefix, "running_mean", channels, 0);
    ids[3] = ids[2] < 0 ? ids[2] : add_buffer(m, prefix, "running_var", channels, 1);
    if (ids[3] < 0)
        return ids[3];
    char counter[PS_NAME_MAX] = {0};
    int r = make_name(counter, prefix, "num_batches_tracked");
    if (r == 0)
        r = add_entry(m, PS_ENTRY_COUNTER, PS_NONE, counter);
    if (r < 0)
        return r;
    struct ps_op *op;
    int out = add_op(m, PS_OP_BN, in, PS_NONE, channels, &op);
    if (out < 0)
        return out;
    op->param[0] = ids[0];
    op->param[1] = ids[1];
    op->buffer[0] = ids[2];
    op->buffer[1] = ids[3];
    op->eps = 1e-5f;
    op->momentum = 0.1f;
    return out;
}

int ps_model_relu(struct ps_model *m, int in)
{
    CHECK_VALUE(m, in);
    struct ps_op *op;
    return add_op(m, PS_OP_RELU, in, PS_NONE, m->values[in].channels, &op);
}

int ps_model_add(struct ps_model *m, int a, int b)
{
    CHECK_VALUE(m, a);
    CHECK_VALUE(m, b);
    if (m->values[a].channels != m->values[b].channels)
        return PS_INVALID_ARGUMENT;
    struct ps_op *op;
    return add_op(m, PS_OP_ADD, a, b, m->values[a].channels, &op);
}

int ps_model_max_pool(struct ps_model *m, int in, int kernel, int stride, int pad)
{
    CHECK_VALUE(m, in);
    if (!good_window(kernel, stride, pad) || 2 * pad > kernel)
        return PS_INVALID_ARGUMENT;
    struct ps_op *op;
    int out = add_op(m, PS_OP_MAX_POOL, in, PS_NONE, m->values[in].channels, &op);
    if (out < 0)
        return out;
    op->kernel = kernel;
    op->stride = stride;
    op->pad = pad;
    return out;
}

int ps_model_avg_pool(struct ps_model *m, int in)
{
    CHECK_VALUE(m, in);
    struct ps_op *op;
    return add_op(m, PS_OP_AVG_POOL, in, PS_NONE, m->values[in].channels, &op);
}

int ps_model_dense(struct ps_model *m, const char *prefix, int in, int out)
{
    CHECK_VALUE(m, in);
    if (out < 1 || out > MAX_CHANNELS)
        return PS_INVALID_ARGUMENT;
    int channels = m->values[in].channels;
    int weight = add_param(m, prefix, "weight", 2, (int[]){out, channels}, channels, 0, true);
    if (weight < 0)
        return weight;
    int bias = add_param(m, prefix, "bias", 1, &out, channels, 0, false);
    if (bias < 0)
        return bias;
    struct ps_op *op;
    int value = add_op(m, PS_OP_DENSE, in, PS_NONE, out, &op);
    if (value < 0)
        return value;
    op->param[0] = weight;
    op->param[1] = bias;
    return value;
}

/* x itself where the shape stays, else bn(conv1x1(x)). */
static int shortcut(struct ps_model *m, const char *prefix, int in, int channels, int stride)
{
    char name[PS_NAME_MAX];
    if (stride == 1 && m->values[in].channels == channels)
        return in;
    snprintf(name, sizeof name, "%s.shortcut.0", prefix);
    int v = ps_model_conv(m, name, in, channels, 1, stride, 0);
    snprintf(name, sizeof name, "%s.shortcut.1", prefix);
    return ps_model_bn(m, name, v);
}

/* relu(bn(conv3x3(relu(bn(conv3x3(x))))) + shortcut(x)) */
static int basic_block(struct ps_model *m, const char *prefix, int in, int channels, int stride)
{
    char name[PS_NAME_MAX];
    int v = in;
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s.residual_function.%d", prefix, 3 * i);
        v = ps_model_conv(m, name, v, channels, 3, i == 0 ? stride : 1, 1);
        snprintf(name, sizeof name, "%s.residual_function.%d", prefix, 3 * i + 1);
        v = ps_model_bn(m, name, v);
        if (i == 0)
            v = ps_model_relu(m, v);
    }
    if (v < 0)
        return v;
    return ps_model_relu(m, ps_model_add(m, v, shortcut(m, prefix, in, channels, stride)));
}

/* As basic_block, narrow in the middle: 1x1, 3x3 (which has the stride), 1x1 to four times the channels. */
static int bottleneck(struct ps_model *m, const char *prefix, int in, int channels, int stride)
{
    static const int kernels[3] = {1, 3, 1}, pads[3] = {0, 1, 0};
    char name[PS_NAME_MAX];
    int v = in, out = 4 * channels;
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s.residual_function.%d", prefix, 3 * i);
        v = ps_model_conv(m, name, v, i == 2 ? out : channels, kernels[i], i == 1 ? stride : 1, pads[i]);
        snprintf(name, sizeof name, "%s.residual_function.%d", prefix, 3 * i + 1);
        v = ps_model_bn(m, name, v);
        if (i < 2)
            v = ps_model_relu(m, v);
    }
    if (v < 0)
        return v;
    return ps_model_relu(m, ps_model_add(m, v, shortcut(m, prefix, in, out, stride)));
}

struct net {
    const char *name;
    int (*block)(struct ps_model *m, const char *prefix, int in, int channels, int stride);
    int blocks[4]; /* of each stage */
};

static const struct net nets[] = {
    {"resnet18", basic_block, {2, 2, 2, 2}},
    {"resnet34", basic_block, {3, 4, 6, 3}},
    {"resnet50", bottleneck, {3, 4, 6, 3}},
};

/* K. He et al., "Deep Residual Learning for Image Recognition" (2016), with the stem for small images: one
 * 3x3 convolution of stride 1 and no pooling. Names are the sample's. */
static int build_resnet(struct ps_model *m, const struct net *net)
{
    int v = ps_model_conv(m, "conv1.0", m->input, m->width, 3, 1, 1);
    v = ps_model_relu(m, ps_model_bn(m, "conv1.1", v));
    for (int stage = 0; stage < 4; stage++)
        for (int block = 0; block < net->blocks[stage] && v >= 0; block++) {
            char prefix[32];
            snprintf(prefix, sizeof prefix, "conv%d.%d", stage + 2, block);
            v = net->block(m, prefix, v, m->width << stage, stage > 0 && block == 0 ? 2 : 1);
        }
    return ps_model_dense(m, "dense_layer", ps_model_avg_pool(m, v), m->classes);
}

int ps_model_create(const char *name, int width, int classes, struct ps_model **ret_model,
                    struct ps_error *err)
{
    const struct net *net = NULL;
    for (size_t i = 0; i < sizeof nets / sizeof *nets; i++)
        if (strcmp(name, nets[i].name) == 0)
            net = &nets[i];
    if (!net)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "model '%.40s' is not known (resnet18, resnet34 and resnet50 are)", name);
    if (width < 1 || width > 1024)
        return ps_fail(err, PS_INVALID_ARGUMENT, "model width %d is out of range (1 to 1024)", width);
    if (classes < 1 || classes > 1000)
        return ps_fail(err, PS_INVALID_ARGUMENT, "number of classes %d is out of range (1 to 1000)", classes);
    struct ps_model *m = ps_model_new(name, width, classes, 3);
    int r = m ? build_resnet(m, net) : PS_RESOURCE_EXHAUSTED;
    if (r < 0) {
        ps_model_free(m);
        return ps_fail(err, r, "cannot build model %s: %s", name,
                       r == PS_RESOURCE_EXHAUSTED ? "out of memory" : "a name or a shape is out of range");
    }
    *ret_model = m;
    return 0;
}

int ps_model_extents(const struct ps_model *model, int resolution, int *extents, struct ps_error *err)
{
    if (resolution < 1 || resolution > 4096)
        return ps_fail(err, PS_INVALID_ARGUMENT, "resolution %d is out of range (1 to 4096)", resolution);
    extents[model->input] = resolution;
    for (int i = 0; i < model->op_count; i++) {
        const struct ps_op *op = &model->ops[i];
        int e = extents[op->in[0]];
        switch (op->kind) {
        case PS_OP_CONV:
        case PS_OP_MAX_POOL:
            if (e + 2 * op->pad < op->kernel)
                return ps_fail(
                    err, PS_INVALID_ARGUMENT,
                    "resolution %d is too small for model %s: op %d sees %d x %d pixels and has a %d x "
                    "%d window",
                    resolution, model->name, i, e, e, op->kernel, op->kernel);
            e = (e + 2 * op->pad - op->kernel) / op->stride + 1;
            break;
        case PS_OP_ADD:
            if (e != extents[op->in[1]])
                return ps_fail(err, PS_INVALID_ARGUMENT,
                               "model %s cannot take resolution %d: op %d adds %d x %d to %d x %d pixels",
                               model->name, resolution, i, e, e, extents[op->in[1]], extents[op->in[1]]);
            break;
        case PS_OP_AVG_POOL:
            e = 1;
            break;
        case PS_OP_DENSE:
            if (e != 1)
                return ps_fail(
                    err, PS_INVALID_ARGUMENT,
                    "model %s cannot take resolution %d: op %d (dense) needs 1 x 1 pixels and gets %d x %d",
                    model->name, resolution, i, e, e);
            break;
        case PS_OP_BN:
        case PS_OP_RELU:
            break;
        }
        extents[op->out] = e;
    }
    return 0;
}

void ps_model_init(const struct ps_model *model, uint64_t seed, float *params, float *buffers)
{
    struct ps_mt19937 mt;
    ps_mt19937_seed(&mt, (uint32_t)(seed ^ seed >> 32));
    for (int i = 0; i < model->param_count; i++) {
        const struct ps_param *p = &model->params[i];
        float *out = params + p->offset;
        /* torch.nn.init to the last bit: kaiming_uniform_(a = sqrt(5)) for weights and 1/sqrt(fan_in) for
         * biases, in double; then uniform_ on the CPU: 24 random bits to [0, 1), scaled in double by the
         * float range. */
        double root5 = sqrt(5), gain = sqrt(2 / (1 + root5 * root5)), root = sqrt((double)p->fan_in);
        float bound = p->fan_in == 0 ? 0 : (float)(p->ndim > 1 ? sqrt(3) * (gain / root) : 1 / root);
        double range = (double)(bound - -bound);
        for (size_t k = 0; k < p->count; k++) {
            if (p->fan_in) {
                double unit = (double)(ps_mt19937_next(&mt) & 0xffffffu) * 0x1p-24;
                out[k] = (float)(unit * range + (double)-bound);
            } else {
                out[k] = p->fill;
            }
        }
    }
    for (int i = 0; i < model->buffer_count; i++)
        for (size_t k = 0; k < model->buffers[i].count; k++)
            buffers[model->buffers[i].offset + k] = model->buffers[i].fill;
}

static uint64_t hash_text(const char *text, uint64_t h)
{
    return ps_hash64(text, strlen(text) + 1, h);
}

static uint64_t hash_ints(uint64_t h, const int32_t *v, size_t count)
{
    return ps_hash64(v, count * sizeof *v, h);
}

uint64_t ps_model_fingerprint(const struct ps_model *model)
{
    uint64_t h = hash_text(model->name, 0);
    h = hash_ints(h, (int32_t[]){model->width, model->classes, model->input, model->output}, 4);
    for (int i = 0; i < model->param_count; i++) {
        const struct ps_param *p = &model->params[i];
        h = hash_text(p->name, h);
        h = hash_ints(h, (int32_t[]){p->ndim, p->shape[0], p->shape[1], p->shape[2], p->shape[3], p->decay},
                      6);
    }
    for (int i = 0; i < model->buffer_count; i++) {
        h = hash_text(model->buffers[i].name, h);
        h = hash_ints(h, (int32_t[]){(int32_t)model->buffers[i].count}, 1);
    }
    for (int i = 0; i < model->entry_count; i++)
        h = hash_ints(h, (int32_t[]){(int32_t)model->entries[i].kind, model->entries[i].index}, 2);
    for (int i = 0; i < model->value_count; i++)
        h = hash_ints(h, (int32_t[]){model->values[i].channels}, 1);
    for (int i = 0; i < model->op_count; i++) {
        const struct ps_op *op = &model->ops[i];
        const float attributes[2] = {op->eps, op->momentum};
        h = hash_ints(h,
                      (int32_t[]){(int32_t)op->kind, op->in[0], op->in[1], op->out, op->param[0],
                                  op->param[1], op->buffer[0], op->buffer[1], op->kernel, op->stride,
                                  op->pad},
                      11);
        h = ps_hash64(attributes, sizeof attributes, h);
    }
    return h;
}
