/* SPDX-License-Identifier: Apache-2.0
 * Layers that are not oneDNN's: they cut their work into threads' shares and call the kernels. */
#ifndef PARAMSYNC_BACKEND_CPU_LAYERS_H
#define PARAMSYNC_BACKEND_CPU_LAYERS_H

#include "trainer/backend/backend.h"
#include "trainer/backend/bn_exchange.h"
#include "trainer/backend/cpu/kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_shape {
    int count, channels, extent; /* [count, channels, extent, extent] */
    int block;                   /* channel block in memory, 1, 8 or 16 */
};

int ps_shape_blocks(const struct ps_shape *s);    /* channel blocks */
size_t ps_shape_floats(const struct ps_shape *s); /* with padding */
size_t ps_shape_image(const struct ps_shape *s);  /* floats of one image, with padding */

enum { PS_NORM_STATS = 6 };

struct ps_norm {
    const struct ps_kernels *kernels;
    int threads;
    struct ps_shape shape;
    float *stats; /* PS_NORM_STATS arrays of stats_length: kept from forward to backward; zeros at first */
    size_t stats_length;
    double *partial; /* ps_norm_partial(threads, blocks) doubles */
    double *own;     /* ps_bn_message(channels) doubles */
    struct ps_bn_exchange *exchange;
    const float *scale, *shift;
    float *running_mean, *running_var;
    float eps, momentum;
};

size_t ps_norm_partial(int threads, int blocks);
/* y = [relu](bn(x) [+ z]). batch: by the batch's statistics, and the running ones move. Fails only where the
 * exchange with other ranks does. */
int ps_norm_forward(const struct ps_norm *n, bool batch, const float *x, const float *z, bool relu, float *y,
                    struct ps_error *err);
/* The gradient is g0 (+ g1 unless NULL), where y > 0 if y is given. It is left in `masked` unless that is
 * NULL (then g0 is the gradient as it is); dx unless NULL gets x's gradient. dscale and dshift are added to
 * or replaced. */
int ps_norm_backward(const struct ps_norm *n, bool batch, const float *g0, const float *g1, const float *y,
                     const float *x, float *masked, float *dx, float *dscale, float *dshift, bool accumulate,
                     struct ps_error *err);

void ps_max_pool_forward(int threads, const struct ps_op *op, const struct ps_shape *in,
                         const struct ps_shape *out, const float *x, float *y);
/* To the first of equal maxima, as PyTorch does. */
void ps_max_pool_backward(int threads, const struct ps_op *op, const struct ps_shape *in,
                          const struct ps_shape *out, const float *x, const float *y, const float *dy,
                          float *dx);
void ps_avg_pool_forward(int threads, const struct ps_shape *in, const float *x,
                         float *y); /* y: [count, channels] */
void ps_avg_pool_backward(int threads, const struct ps_shape *in, const float *dy, float *dx);

void ps_load_images(int threads, const struct ps_batch *batch, int channels, float *out); /* NCHW */
void ps_to_nchw(const struct ps_shape *s, const float *from, float *to);
void ps_from_nchw(const struct ps_shape *s, const float *from, float *to);

/* Returns the sum of the losses; gradient [count, classes] may be NULL. */
double ps_softmax_loss(int count, int classes, const float *logits, const int32_t *labels,
                       const struct ps_loss_config *loss, float *gradient, int64_t *correct);

/* The element-wise kernels over threads. */
void ps_parallel_relu(int threads, size_t count, const float *x, float *y);
void ps_parallel_relu_back(int threads, size_t count, const float *y, const float *dy, float *dx);
void ps_parallel_add(int threads, size_t count, const float *a, const float *b, float *y);
void ps_parallel_copy(int threads, size_t count, const float *x, float *y);

#endif
