/* SPDX-License-Identifier: Apache-2.0
 * From a model's ops to steps that this backend runs (BN takes the ReLU and the residual sum behind it
 * along), and from steps to a graph: primitives and places in memory for one batch size, resolution and kind
 * of pass. */
#ifndef PARAMSYNC_BACKEND_CPU_PLAN_H
#define PARAMSYNC_BACKEND_CPU_PLAN_H

#include "trainer/backend/cpu/dnnl_api.h"
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
};

struct ps_plan {
    const struct ps_model *model;
    struct ps_step *steps;
    int step_count;
    int *block;    /* [value_count] channel block in memory: 1 is NCHW; 0 where the value is fused away */
    int *last_use; /* [value_count] the last step that reads it; step_count for the output */
};

/* block: of everything around convolutions. */
int ps_plan_make(struct ps_plan *ret, const struct ps_model *model, int block, struct ps_error *err);
void ps_plan_done(struct ps_plan *plan);

/* Channels with those that fill up the last block. */
int ps_plan_padded(const struct ps_plan *plan, int value);

enum { PS_GRAD_SOURCES = 8 };

struct ps_graph_step {
    struct ps_dnnl_call forward, backward_data, backward_weights; /* of a convolution */
    /* Where the image is smaller than the kernel oneDNN has only its slow reference for the weights'
     * gradient. The same sums come from both sides filled up with zeros to the kernel's size; NULL where that
     * is not needed. */
    float *wide_source, *wide_destination;
    int wide_in, wide_out;        /* extents of these */
    size_t grad[PS_GRAD_SOURCES]; /* where the parts of the out value's gradient are; their sum is the
                                     gradient */
    int grad_count;
    size_t to[2]; /* where the gradients of in[] go (parts of them); SIZE_MAX: not wanted */
};

struct ps_graph {
    int count, resolution;
    bool training;
    uint64_t used;    /* for throwing out the one unused the longest */
    int *extents;     /* [value_count] */
    size_t *value_at; /* [value_count] bytes from the start of the activations; SIZE_MAX: fused away */
    struct ps_graph_step *steps;
    size_t activations, gradients, scratchpad; /* bytes needed */
    size_t input_grad[PS_GRAD_SOURCES]; /* places of the parts of the input's gradient, where it is wanted */
    int input_grad_count;
};

/* Weights in the layouts that the primitives ask for: chosen by the first graph, kept by the others. One a
 * step. */
struct ps_conv_layouts {
    bool known, has_backward,
        has_gradient; /* has: for training; the first layer needs no gradient of its input */
    struct ps_dnnl_layout forward, backward, gradient;
};

/* Chooses primitives and places; bind comes when the memory is there. layouts: [step_count]. */
int ps_graph_make(struct ps_graph **ret, const struct ps_plan *plan, struct ps_dnnl *dnnl, int count,
                  int resolution, bool training, bool input_grad, struct ps_conv_layouts *layouts,
                  struct ps_error *err);
struct ps_graph *ps_graph_free(struct ps_graph *graph,
                               const struct ps_plan *plan); /* takes NULL, returns NULL */

/* Bytes of a value in memory, and its shape as rows. */
size_t ps_graph_bytes(const struct ps_graph *graph, const struct ps_plan *plan, int value);

#endif
