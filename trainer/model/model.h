/* SPDX-License-Identifier: Apache-2.0
 * A model is data: tables of parameters, buffers, values (activations) and ops. A backend executes the ops in
 * order, and their gradients in reverse order; nothing is written per layer.
 *
 * Shapes are per sample; N is the batch. Layouts named here are those of the host side (what checkpoints and
 * the reducer see), which are PyTorch's: convolution weights are [out, in, kh, kw], dense weights [out, in].
 * A backend may keep any layout inside.
 */
#ifndef PARAMSYNC_MODEL_MODEL_H
#define PARAMSYNC_MODEL_MODEL_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ps_op_kind {
    PS_OP_CONV,     /* in[0] -> out; param[0] weight; kernel, stride, pad; no bias */
    PS_OP_BN,       /* in[0] -> out; param[0] scale, param[1] shift; buffer[0] running mean, buffer[1] running
                       variance */
    PS_OP_RELU,     /* in[0] -> out */
    PS_OP_ADD,      /* in[0] + in[1] -> out */
    PS_OP_MAX_POOL, /* in[0] -> out; kernel, stride, pad */
    PS_OP_AVG_POOL, /* global: [c, h, w] -> [c, 1, 1] */
    PS_OP_DENSE,    /* [c, 1, 1] -> [out, 1, 1]; param[0] weight [out, in], param[1] bias [out] */
};

enum { PS_NAME_MAX = 64, PS_NONE = -1 };

struct ps_param {
    char name[PS_NAME_MAX]; /* as in the sample's state_dict, for example "conv2.0.residual_function.0.weight"
                             */
    int ndim;
    int shape[4];
    size_t count;  /* elements */
    size_t offset; /* in the flat parameter vector, in elements */
    int fan_in;    /* for initialisation; 0: a BN scale (ones) or shift (zeros) */
    float fill;    /* initial value where fan_in is 0 */
    bool decay;    /* weight decay applies (not to BN and biases) */
};

struct ps_buffer { /* BN statistics, float32 */
    char name[PS_NAME_MAX];
    size_t count;
    size_t offset; /* in the flat buffer vector, in elements */
    float fill;    /* running mean 0, running variance 1 */
};

/* The state dictionary in PyTorch's order: parameters, buffers, and BN's int64 batch counters. */
enum ps_entry_kind { PS_ENTRY_PARAM, PS_ENTRY_BUFFER, PS_ENTRY_COUNTER };
struct ps_entry {
    enum ps_entry_kind kind;
    int index;              /* in params or buffers; PS_NONE for a counter */
    char name[PS_NAME_MAX]; /* the same as the parameter's or buffer's, or "...num_batches_tracked" */
};

struct ps_value {
    int channels;
    int producer; /* op id; PS_NONE for the input */
};

struct ps_op {
    enum ps_op_kind kind;
    int in[2];     /* value ids, PS_NONE */
    int out;       /* value id; each value is written by one op */
    int param[2];  /* PS_NONE */
    int buffer[2]; /* PS_NONE */
    int kernel, stride, pad;
    float eps, momentum; /* BN: 1e-5 and 0.1 as in PyTorch; the running variance is unbiased (n / (n - 1)) */
};

struct ps_model {
    char name[32]; /* "resnet18" */
    int width;     /* channels of the first stage */
    int classes;
    struct ps_param *params;
    int param_count;
    size_t param_elements; /* length of the flat parameter vector */
    struct ps_buffer *buffers;
    int buffer_count;
    size_t buffer_elements;
    struct ps_entry *entries;
    int entry_count;
    struct ps_value *values;
    int value_count;
    struct ps_op *ops;
    int op_count;
    int input, output; /* value ids: images [3, r, r] and logits [classes, 1, 1] */
};

/* name: "resnet18" (the sample's: 62 parameters, 11,173,962 elements and 122 entries at width 64, 10
 * classes), "resnet34" or "resnet50" (bottlenecks; the same stem and naming). width 1..1024, classes 1..1000.
 * Free with ps_model_free. */
int ps_model_create(const char *name, int width, int classes, struct ps_model **ret_model,
                    struct ps_error *err);
struct ps_model *ps_model_free(struct ps_model *model); /* takes NULL, returns NULL */

/* For one-op models in tests, and for those who add a model: see model.c. All return an id or a negative
 * code. */
struct ps_model *ps_model_new(const char *name, int width, int classes, int input_channels);
int ps_model_conv(struct ps_model *m, const char *prefix, int in, int out_channels, int kernel, int stride,
                  int pad);
int ps_model_bn(struct ps_model *m, const char *prefix, int in);
int ps_model_relu(struct ps_model *m, int in);
int ps_model_add(struct ps_model *m, int a, int b);
int ps_model_max_pool(struct ps_model *m, int in, int kernel, int stride, int pad);
int ps_model_avg_pool(struct ps_model *m, int in);
int ps_model_dense(struct ps_model *m, const char *prefix, int in, int out);

/* Height (= width) of each value for images of resolution x resolution; extents has value_count places.
 * PS_INVALID_ARGUMENT if the resolution is too small for the net. */
int ps_model_extents(const struct ps_model *model, int resolution, int *extents, struct ps_error *err);

/* PyTorch's default initialisation (kaiming_uniform with a = sqrt(5): bound 1/sqrt(fan_in), for weights and
 * the dense bias), drawn from MT19937(seed); the same on every machine. params: param_elements floats. */
void ps_model_init(const struct ps_model *model, uint64_t seed, float *params, float *buffers);

/* Changes with any name, shape, order, op or attribute: what ranks compare at the start. */
uint64_t ps_model_fingerprint(const struct ps_model *model);

#endif
