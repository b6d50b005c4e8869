/* SPDX-License-Identifier: Apache-2.0
 * Images, ReLU, sums, pooling, the dense layer's bias, and the loss. */
#include "trainer/backend/cuda/launch.h"

#include "trainer/backend/cuda/kernels.h"

namespace
{

template <typename T, typename P> __global__ void images_in(ps_images im, const P *pixels, T *out)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t area = (size_t)im.side * im.side, total = (size_t)im.n * area * im.padded;
    if (i >= total)
        return;
    const int c = (int)(i % im.padded);
    const size_t pixel = i / im.padded, n = pixel / area;
    float v = 0;
    if (c < im.c) {
        const int k = c % 3;
        const float scale = k == 0   ? im.scale[0]
                            : k == 1 ? im.scale[1]
                                     : im.scale[2],
                    shift = k == 0   ? im.shift[0]
                            : k == 1 ? im.shift[1]
                                     : im.shift[2];
        v = scale * (float)pixels[(n * im.c + c) * area + pixel % area] + shift;
    }
    out[i] = ps_round<T>(v);
}

/* What is done to V neighbours of one or two tensors. */
enum Rule { RELU, RELU_BACK, SUM, COPY };

template <typename T, int V>
__global__ void elementwise(Rule rule, size_t n, const T *a, const T *b, T *out, bool add)
{
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (i >= n)
        return;
    float x[V], z[V] = {0};
    ps_load<T, V>(a + i, x);
    if (b)
        ps_load<T, V>(b + i, z);
    for (int k = 0; k < V; k++) {
        switch (rule) { /* NaN passes */
        case RELU:
            x[k] = x[k] < 0 ? 0 : x[k];
            break;
        case RELU_BACK: /* a: the output; b: its gradient */
            x[k] = x[k] <= 0 ? 0 : z[k];
            break;
        case SUM:
            x[k] += z[k];
            break;
        case COPY:
            break;
        }
    }
    if (add) {
        ps_load<T, V>(out + i, z);
        for (int k = 0; k < V; k++)
            x[k] += z[k];
    }
    ps_store<T, V>(out + i, x);
}

template <typename T, int V>
cudaError_t run_elementwise(cudaStream_t stream, Rule rule, size_t n, const void *a, const void *b, void *out,
                            bool add)
{
    PS_LAUNCH((elementwise<T, V>), dim3(ps_blocks(n / V)), dim3(PS_THREADS), 0, stream, rule, n, (const T *)a,
              (const T *)b, (T *)out, add);
    return cudaGetLastError();
}

/* The place of the window's maximum in x, NaN first, else the first of equals. */
template <typename T>
__device__ size_t find_maximum(const ps_pool &p, const T *x, int n, int oy, int ox, int c)
{
    size_t best = 0;
    float most = 0;
    bool any = false;
    for (int ky = 0; ky < p.kernel; ky++)
        for (int kx = 0; kx < p.kernel; kx++) {
            const int y = oy * p.stride + ky - p.pad, w = ox * p.stride + kx - p.pad;
            if (y < 0 || w < 0 || y >= p.in || w >= p.in)
                continue;
            const size_t at = (((size_t)n * p.in + y) * p.in + w) * p.c + c;
            const float v = ps_float(x[at]);
            if (!any || v > most || v != v) { /* NaN is not itself */
                most = v;
                best = at;
                any = true;
            }
        }
    return best;
}

template <typename T> __global__ void max_pool(ps_pool p, const T *x, T *y)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.n * p.out * p.out * p.c)
        return;
    const size_t row = i / p.c;
    y[i] = x[find_maximum(p, x, (int)(row / p.out / p.out), (int)(row / p.out % p.out), (int)(row % p.out),
                          (int)(i % p.c))];
}

/* Each input looks at the windows that it is in: no two threads write to one place. */
template <typename T> __global__ void max_pool_back(ps_pool p, const T *x, const T *dy, T *dx, bool add)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.n * p.in * p.in * p.c)
        return;
    const size_t row = i / p.c;
    const int n = (int)(row / p.in / p.in), y = (int)(row / p.in % p.in), w = (int)(row % p.in),
              c = (int)(i % p.c);
    float sum = add ? ps_float(dx[i]) : 0;
    const int low_y = y + p.pad - p.kernel + 1, low_x = w + p.pad - p.kernel + 1;
    for (int oy = low_y > 0 ? (low_y + p.stride - 1) / p.stride : 0; oy < p.out && oy * p.stride <= y + p.pad;
         oy++)
        for (int ox = low_x > 0 ? (low_x + p.stride - 1) / p.stride : 0;
             ox < p.out && ox * p.stride <= w + p.pad; ox++)
            if (find_maximum(p, x, n, oy, ox, c) == i)
                sum += ps_float(dy[(((size_t)n * p.out + oy) * p.out + ox) * p.c + c]);
    dx[i] = ps_round<T>(sum);
}

template <typename T> __global__ void avg_pool(ps_pool p, const T *x, T *y)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, area = (size_t)p.in * p.in;
    if (i >= (size_t)p.n * p.c)
        return;
    const T *mine = x + i / p.c * area * p.c + i % p.c;
    float sum = 0;
    for (size_t k = 0; k < area; k++)
        sum += ps_float(mine[k * p.c]);
    y[i] = ps_round<T>(sum / (float)area);
}

template <typename T> __global__ void avg_pool_back(ps_pool p, const T *dy, T *dx, bool add)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, area = (size_t)p.in * p.in;
    if (i >= (size_t)p.n * area * p.c)
        return;
    const size_t n = i / (area * p.c);
    dx[i] = ps_round<T>((add ? ps_float(dx[i]) : 0) + ps_float(dy[n * p.c + i % p.c]) / (float)area);
}

__global__ void fill_rows(size_t n, int c, const float *row, float *out)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = row[i % c];
}

__global__ void sum_rows(int n, int c, const float *in, float *row, bool accumulate)
{
    const int k = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= c)
        return;
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)in[(size_t)i * c + k];
    row[k] = (accumulate ? row[k] : 0) + (float)sum;
}

__global__ void to_bf16(size_t n, const float *from, __nv_bfloat16 *to)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = __float2bfloat16_rn(from[i]);
}

__device__ inline float warp_sum(float v)
{
    for (int m = 16; m; m /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

/* A warp an image. */
template <typename T>
__global__ void cross_entropy(ps_loss l, const T *logits, const int32_t *labels, float *dlogits,
                              float *per_image)
{
    const int image = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32),
              lane = (int)(threadIdx.x % 32);
    const bool mine = image < l.n; /* all lanes of a warp agree: shuffles stay whole */
    const T *row = logits + (size_t)(mine ? image : 0) * l.classes;
    float most = -INFINITY;
    int best = l.classes; /* the first of equal maxima */
    for (int k = lane; k < l.classes; k += 32) {
        const float v = ps_float(row[k]);
        if (v > most) {
            most = v;
            best = k;
        }
    }
    for (int m = 16; m; m /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, most, m);
        const int whose = __shfl_xor_sync(0xffffffffu, best, m);
        if (other > most || (other == most && whose < best)) {
            most = other;
            best = whose;
        }
    }
    float sum = 0, all = 0, at_label = 0;
    const int label = labels[mine ? image : 0];
    for (int k = lane; k < l.classes; k += 32) {
        const float d = ps_float(row[k]) - most;
        sum += expf(d);
        all += d;
        at_label += k == label ? d : 0;
    }
    sum = warp_sum(sum);
    all = warp_sum(all);
    at_label = warp_sum(at_label);
    const float log_sum = logf(sum), even = l.smoothing / (float)l.classes;
    if (!mine)
        return;
    if (lane == 0) { /* -sum of target * log p, where log p = d - log_sum and the targets add up to 1 */
        float loss = log_sum - (1 - l.smoothing) * at_label;
        if (l.smoothing > 0)
            loss -= even * all;
        per_image[image] = loss;
        per_image[l.n + image] = best == label;
    }
    for (int k = lane; dlogits && k < l.classes; k += 32) {
        const float p = expf(ps_float(row[k]) - most) / sum;
        dlogits[(size_t)image * l.classes + k] =
            l.grad_scale * (p - (k == label ? 1 - l.smoothing : 0) - even);
    }
}

__global__ void add_metrics(int n, const float *per_image, ps_cuda_metrics *metrics)
{
    __shared__ double losses[PS_THREADS];
    __shared__ int right[PS_THREADS];
    double loss = 0;
    int correct = 0;
    for (int i = (int)threadIdx.x; i < n; i += PS_THREADS) {
        loss += (double)per_image[i];
        correct += per_image[n + i] != 0;
    }
    losses[threadIdx.x] = loss;
    right[threadIdx.x] = correct;
    for (unsigned half = PS_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            losses[threadIdx.x] += losses[threadIdx.x + half];
            right[threadIdx.x] += right[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        metrics->loss += losses[0];
        metrics->correct += right[0];
        metrics->count += n;
    }
}

} // namespace

/* One thread an item of `count`; T by type. */
#define PS_FLAT(type, kernel, count, stream, ...)                                                            \
    do {                                                                                                     \
        if ((type) == PS_CUDA_BF16) {                                                                        \
            typedef __nv_bfloat16 T;                                                                         \
            PS_LAUNCH(kernel<T>, dim3(ps_blocks(count)), dim3(PS_THREADS), 0, stream, __VA_ARGS__);          \
        } else {                                                                                             \
            typedef float T;                                                                                 \
            PS_LAUNCH(kernel<T>, dim3(ps_blocks(count)), dim3(PS_THREADS), 0, stream, __VA_ARGS__);          \
        }                                                                                                    \
    } while (0)

cudaError_t ps_images_in(cudaStream_t stream, const struct ps_images *im, enum ps_cuda_type type, void *out)
{
    const dim3 grid(ps_blocks((size_t)im->n * im->side * im->side * im->padded)), block(PS_THREADS);
    if (type == PS_CUDA_BF16 && im->floats)
        PS_LAUNCH((images_in<__nv_bfloat16, float>), grid, block, 0, stream, *im, (const float *)im->pixels,
                  (__nv_bfloat16 *)out);
    else if (type == PS_CUDA_BF16)
        PS_LAUNCH((images_in<__nv_bfloat16, uint8_t>), grid, block, 0, stream, *im,
                  (const uint8_t *)im->pixels, (__nv_bfloat16 *)out);
    else if (im->floats)
        PS_LAUNCH((images_in<float, float>), grid, block, 0, stream, *im, (const float *)im->pixels,
                  (float *)out);
    else
        PS_LAUNCH((images_in<float, uint8_t>), grid, block, 0, stream, *im, (const uint8_t *)im->pixels,
                  (float *)out);
    return cudaGetLastError();
}

cudaError_t ps_relu(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *x, void *y)
{
    return PS_BY_TYPE(type, n, run_elementwise, stream, RELU, n, x, nullptr, y, false);
}

cudaError_t ps_relu_back(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *y, const void *dy,
                         void *dx, bool add)
{
    return PS_BY_TYPE(type, n, run_elementwise, stream, RELU_BACK, n, y, dy, dx, add);
}

cudaError_t ps_sum(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *x, const void *z,
                   void *y)
{
    return PS_BY_TYPE(type, n, run_elementwise, stream, SUM, n, x, z, y, false);
}

cudaError_t ps_copy(cudaStream_t stream, enum ps_cuda_type type, size_t n, const void *from, void *to,
                    bool add)
{
    return PS_BY_TYPE(type, n, run_elementwise, stream, COPY, n, from, nullptr, to, add);
}

cudaError_t ps_max_pool(cudaStream_t stream, const struct ps_pool *p, const void *x, void *y)
{
    PS_FLAT(p->type, max_pool, (size_t)p->n * p->out * p->out * p->c, stream, *p, (const T *)x, (T *)y);
    return cudaGetLastError();
}

cudaError_t ps_max_pool_back(cudaStream_t stream, const struct ps_pool *p, const void *x, const void *dy,
                             void *dx, bool add)
{
    PS_FLAT(p->type, max_pool_back, (size_t)p->n * p->in * p->in * p->c, stream, *p, (const T *)x,
            (const T *)dy, (T *)dx, add);
    return cudaGetLastError();
}

cudaError_t ps_avg_pool(cudaStream_t stream, const struct ps_pool *p, const void *x, void *y)
{
    PS_FLAT(p->type, avg_pool, (size_t)p->n * p->c, stream, *p, (const T *)x, (T *)y);
    return cudaGetLastError();
}

cudaError_t ps_avg_pool_back(cudaStream_t stream, const struct ps_pool *p, const void *dy, void *dx, bool add)
{
    PS_FLAT(p->type, avg_pool_back, (size_t)p->n * p->in * p->in * p->c, stream, *p, (const T *)dy, (T *)dx,
            add);
    return cudaGetLastError();
}

cudaError_t ps_fill_rows(cudaStream_t stream, int n, int c, const float *row, float *out)
{
    PS_LAUNCH(fill_rows, dim3(ps_blocks((size_t)n * c)), dim3(PS_THREADS), 0, stream, (size_t)n * c, c, row,
              out);
    return cudaGetLastError();
}

cudaError_t ps_sum_rows(cudaStream_t stream, int n, int c, const float *in, float *row, bool accumulate)
{
    PS_LAUNCH(sum_rows, dim3((unsigned)(c + 31) / 32), dim3(32), 0, stream, n, c, in, row, accumulate);
    return cudaGetLastError();
}

cudaError_t ps_to_bf16(cudaStream_t stream, size_t n, const float *from, void *to)
{
    PS_LAUNCH(to_bf16, dim3(ps_blocks(n)), dim3(PS_THREADS), 0, stream, n, from, (__nv_bfloat16 *)to);
    return cudaGetLastError();
}

cudaError_t ps_cross_entropy(cudaStream_t stream, const struct ps_loss *l, const void *logits,
                             const int32_t *labels, float *dlogits, float *per_image,
                             struct ps_cuda_metrics *metrics)
{
    PS_FLAT(l->type, cross_entropy, (size_t)l->n * 32, stream, *l, (const T *)logits, labels, dlogits,
            per_image);
    cudaError_t e = cudaGetLastError();
    if (e)
        return e;
    PS_LAUNCH(add_metrics, dim3(1), dim3(PS_THREADS), 0, stream, l->n, per_image, metrics);
    return cudaGetLastError();
}
