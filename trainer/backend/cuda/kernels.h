/* SPDX-License-Identifier: Apache-2.0
 * The kernels, called from C. Activations are NHWC, of float or bf16; `rows` are images times pixels. All
 * pointers but those named host_ are to device memory; each call queues work on the stream and gives the
 * launch's error. Sums are taken in a fixed order: twice the same call gives the same bits. */
#ifndef PARAMSYNC_BACKEND_CUDA_KERNELS_H
#define PARAMSYNC_BACKEND_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum ps_cuda_type { PS_CUDA_F32, PS_CUDA_BF16 };

/* ---- BatchNorm, with the ReLU and the residual sum behind it (norm.cu) ---- */

/* [rows, c] */
struct ps_norm_shape {
    enum ps_cuda_type type;
    unsigned rows, c;
};

/* Floats that the partial sums of a shape need. */
size_t ps_norm_partials(const struct ps_norm_shape *shape);
/* Floats of one layer's statistics: mean, 1 / deviation, scale / deviation and shift, by channel. */
size_t ps_norm_stats(unsigned c);
/* Doubles of a message: [count, first[c], second[c]]. */
size_t ps_norm_message(unsigned c);

/* message: count, means and sums of squared deviations. */
cudaError_t ps_norm_moments(cudaStream_t stream, const struct ps_norm_shape *shape, const void *x,
                            float *partials, double *message);
/* From the moments of all that share the statistics, or (message NULL) from the running ones; with moments
 * the running ones move, the variance unbiased. */
cudaError_t ps_norm_finish(cudaStream_t stream, unsigned c, const double *message, float eps, float momentum,
                           const float *scale, const float *shift, float *running_mean, float *running_var,
                           float *stats);
/* y = [relu](x normalised [+ z]) */
cudaError_t ps_norm_apply(cudaStream_t stream, const struct ps_norm_shape *shape, const float *stats,
                          const void *x, const void *z, bool relu, void *y);

/* message: count, sums of d and of d * normalised x, where d is dy behind the ReLU. y is the output where
 * there is a residual sum, NULL where the ReLU's sign follows from x alone. */
cudaError_t ps_norm_sums(cudaStream_t stream, const struct ps_norm_shape *shape, const float *stats,
                         const void *x, const void *y, const void *dy, bool relu, float *partials,
                         double *message);
/* The gradients of scale and shift from this batch's own sums. */
cudaError_t ps_norm_params(cudaStream_t stream, unsigned c, const double *own, bool accumulate, float *dscale,
                           float *dshift);
/* dx = gradient of x; dz = d. shared: sums of all that shared the statistics, NULL where those were the
 * running ones. Either of dx and dz may be NULL; add_...: add to what is there. */
cudaError_t ps_norm_back(cudaStream_t stream, const struct ps_norm_shape *shape, const float *stats,
                         const double *shared, const void *x, const void *y, const void *dy, bool relu,
                         void *dx, bool add_dx, void *dz, bool add_dz);

/* ---- layers (layers.cu) ---- */

struct ps_images {
    const void *pixels; /* [n, c, side, side] */
    bool floats;        /* else bytes */
    int n, c, padded, side;
    float scale[3], shift[3]; /* by channel modulo 3 */
};
/* To NHWC with `padded` channels, those beyond c zero. */
cudaError_t ps_images_in(cudaStream_t stream, const struct ps_images *images, enum ps_cuda_type type,
                         void *out);

cudaError_t ps_relu(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *x, void *y);
cudaError_t ps_relu_back(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *y, const void *dy,
                         void *dx, bool add);
cudaError_t ps_sum(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *x, const void *z,
                   void *y);
cudaError_t ps_copy(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *from, void *to,
                    bool add);

struct ps_pool {
    enum ps_cuda_type type;
    int n, c, in, out; /* extents */
    int kernel, stride, pad;
};
cudaError_t ps_max_pool(cudaStream_t stream, const struct ps_pool *pool, const void *x, void *y);
/* The first of equal maxima takes the gradient, as in the forward order of the window. */
cudaError_t ps_max_pool_back(cudaStream_t stream, const struct ps_pool *pool, const void *x, const void *dy,
                             void *dx, bool add);
cudaError_t ps_avg_pool(cudaStream_t stream, const struct ps_pool *pool, const void *x, void *y);
cudaError_t ps_avg_pool_back(cudaStream_t stream, const struct ps_pool *pool, const void *dy, void *dx,
                             bool add);

cudaError_t ps_fill_rows(cudaStream_t stream, int n, int c, const float *row, float *out);
cudaError_t ps_sum_rows(cudaStream_t stream, int n, int c, const float *in, float *row, bool accumulate);
cudaError_t ps_to_bf16(cudaStream_t stream, size_t n, const float *from, void *to);

/* Sums since they were last read. */
struct ps_cuda_metrics {
    double loss;
    int64_t correct, count;
};
struct ps_loss {
    enum ps_cuda_type type; /* of the logits */
    int n, classes;
    float smoothing, grad_scale;
};
/* per_image: [2 * n] floats of scratch. dlogits: float [n, classes] or NULL. */
cudaError_t ps_cross_entropy(cudaStream_t stream, const struct ps_loss *loss, const void *logits,
                             const int32_t *labels, float *dlogits, float *per_image,
                             struct ps_cuda_metrics *metrics);

/* ---- flat vectors (state.cu) ---- */

/* A parameter as the device holds it: convolution weights as [out, kh, kw, in], all others as they are.
 * The layers' copy, where there is one, has its own places and `padded` input channels. */
struct ps_cuda_param {
    size_t offset, count; /* in the flat vector */
    size_t copy_at;       /* in the layers' copy, elements; SIZE_MAX: the layers read the flat vector */
    int in, padded, window;
    float decay; /* 0 or 1: weight decay applies */
};

/* [offset, offset + count) in the order of the host (window innermost) from and to the device's. */
cudaError_t ps_state_gather(cudaStream_t stream, const struct ps_cuda_param *params, int param_count,
                            const float *state, size_t offset, size_t count, float *out);
cudaError_t ps_state_scatter(cudaStream_t stream, const struct ps_cuda_param *params, int param_count,
                             float *state, size_t offset, size_t count, const float *in);

/* The layers' copy of all parameters that have one. copy: elements of the type. */
cudaError_t ps_copy_params(cudaStream_t stream, const struct ps_cuda_param *params, int param_count,
                           size_t elements, const float *flat, enum ps_cuda_type type, void *copy);
/* One parameter's gradient from the layers' form to the flat vector. */
cudaError_t ps_take_gradient(cudaStream_t stream, const struct ps_cuda_param *host_param,
                             enum ps_cuda_type type, const void *copy, float *flat, bool accumulate);

/* Numbers of one optimizer step, in device memory: a captured step reads them anew each time. */
struct ps_cuda_rates {
    float lr, decay, momentum;
    float rate, root; /* Adam: lr / (1 - beta1^step), sqrt(1 - beta2^step) */
    float beta1, beta2, eps;
    float rest1, rest2; /* 1 - beta, rounded once */
    int first;          /* SGD: there is no momentum yet */
};
enum ps_cuda_rule { PS_RULE_SGD, PS_RULE_MOMENTUM, PS_RULE_NESTEROV, PS_RULE_ADAM };
cudaError_t ps_optimize(cudaStream_t stream, enum ps_cuda_rule rule, const struct ps_cuda_rates *rates,
                        const struct ps_cuda_param *params, int param_count, size_t elements, float *p,
                        const float *g, float *m, float *v, enum ps_cuda_type type, void *copy);

cudaError_t ps_copy_scaled(cudaStream_t stream, float *to, const float *from, size_t n, float scale);

#ifdef __cplusplus
}
#endif

#endif
