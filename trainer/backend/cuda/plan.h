/* SPDX-License-Identifier: Apache-2.0
 * From a model's ops to the steps that this backend runs (BN takes the ReLU and the residual sum behind it
 * along), and where each value and gradient lies for one batch size, resolution and kind of pass. */
#ifndef PARAMSYNC_BACKEND_CUDA_PLAN_H
#define PARAMSYNC_BACKEND_CUDA_PLAN_H

#include "trainer/backend/cuda/conv.h"
#include "trainer/backend/cuda/kernels.h"
#include "trainer/model/model.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ps_step_kind {
    PS_STEP_CONV,
    PS_STEP_NORM, /* out = [relu](bn(in[0]) [+ in[1]]) */
    PS_STEP_RELU,
    PS_STEP_ADD,
    PS_STEP_MAX_POOL,
    PS_STEP_AVG_POOL,
    PS_STEP_DENSE,
};

struct ps_step {
    enum ps_step_kind kind;
    int op; /* where the attributes, parameters and buffers are; of a norm the BN */
    int in[2];
    int out;
    bool relu;
    size_t stats_at; /* of a norm: floats */
};

struct ps_cuda_plan {
    const struct ps_model *model;
    struct ps_step *steps;
    int step_count;
    bool *stored;            /* [value_count] false where the value is fused away */
    int *channels;           /* [value_count] with those that fill the input up */
    int *last_use;           /* [value_count] the last step that reads it; step_count for the output */
    enum ps_cuda_type *type; /* [value_count] a dense layer's output is float */
    size_t stats;            /* floats of all norms */
    int widest;              /* channels of the widest norm */
};

/* type: of the activations; input_multiple: to what the input's channels are filled up where only
 * convolutions read it. */
int ps_cuda_plan_make(struct ps_cuda_plan *ret, const struct ps_model *model, enum ps_cuda_type type,
                      int input_multiple, struct ps_error *err);
void ps_cuda_plan_done(struct ps_cuda_plan *plan);

struct ps_graph_step {
    struct ps_conv *conv;
    size_t grad;  /* where the out value's gradient is, bytes */
    size_t to[2]; /* where the gradients of in[] go; SIZE_MAX: not wanted */
    bool add[2];  /* to what is there, or in its place */
};

struct ps_graph {
    int count, resolution;
    bool training;
    uint64_t used;    /* for throwing out the one unused the longest */
    int *extents;     /* [value_count] */
    size_t *value_at; /* [value_count] bytes from the start of the activations; SIZE_MAX: fused away */
    struct ps_graph_step *steps;
    size_t activations, gradients, workspace; /* bytes needed */
    size_t partials;                          /* floats needed by norms */
    size_t input_grad;                        /* SIZE_MAX: not wanted */
};

/* convs: whether to make convolution descriptors; without, only the sizes are known. */
int ps_graph_make(struct ps_graph **ret, const struct ps_cuda_plan *plan, const struct ps_conv_context *convs,
                  int count, int resolution, bool training, bool input_grad, struct ps_error *err);
struct ps_graph *ps_graph_free(struct ps_graph *graph, const struct ps_cuda_plan *plan); /* takes NULL */

/* Elements of a value in memory. */
size_t ps_graph_elements(const struct ps_graph *graph, const struct ps_cuda_plan *plan, int value);
unsigned ps_graph_rows(const struct ps_graph *graph, int value);

#endif
