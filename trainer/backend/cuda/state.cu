/* SPDX-License-Identifier: Apache-2.0
 * Work on the flat vectors: the host's and the device's order of elements, the layers' copy of the weights,
 * the optimizers, the reducer's copies. */
#include "trainer/backend/cuda/launch.h"

#include "trainer/backend/cuda/kernels.h"

namespace
{

/* The parameter that holds element i of the flat vector. */
__device__ int find_param(const ps_cuda_param *params, int count, size_t i)
{
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (params[middle].offset <= i)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Element i in the order [out, in, window] is element ... in the order [out, window, in]. */
__device__ size_t device_place(const ps_cuda_param &p, size_t i)
{
    const size_t plane = (size_t)p.in * p.window, out = i / plane, in = i % plane / p.window,
                 w = i % p.window;
    return out * plane + w * p.in + in;
}

/* Element i of the flat vector in the copy, where input channels may be filled up. */
__device__ size_t copy_place(const ps_cuda_param &p, size_t i)
{
    return p.copy_at + (p.in == p.padded ? i : i / p.in * p.padded + i % p.in);
}

enum { PER_BLOCK = 4096 }; /* elements */

/* A block has PER_BLOCK neighbours of [first, end) of the flat vector, whose parameter changes seldom. */
template <typename F>
__device__ void each(const ps_cuda_param *params, int param_count, size_t first, size_t end, F f)
{
    const size_t begin = first + (size_t)blockIdx.x * PER_BLOCK;
    end = begin + PER_BLOCK < end ? begin + PER_BLOCK : end;
    size_t i = begin + threadIdx.x;
    if (i >= end)
        return;
    int at = find_param(params, param_count, i);
    ps_cuda_param p = params[at];
    for (; i < end; i += PS_THREADS) {
        while (i - p.offset >= p.count)
            p = params[++at];
        f(p, i);
    }
}

__global__ void gather(const ps_cuda_param *params, int param_count, const float *state, size_t first,
                       size_t end, float *out)
{
    each(params, param_count, first, end, [=](const ps_cuda_param &p, size_t i) {
        out[i - first] = state[p.offset + device_place(p, i - p.offset)];
    });
}

__global__ void scatter(const ps_cuda_param *params, int param_count, float *state, size_t first, size_t end,
                        const float *in)
{
    each(params, param_count, first, end, [=](const ps_cuda_param &p, size_t i) {
        state[p.offset + device_place(p, i - p.offset)] = in[i - first];
    });
}

template <typename T>
__global__ void copy_params(const ps_cuda_param *params, int param_count, size_t elements, const float *flat,
                            T *copy)
{
    each(params, param_count, 0, elements, [=](const ps_cuda_param &p, size_t i) {
        if (p.copy_at != SIZE_MAX)
            copy[copy_place(p, i - p.offset)] = ps_round<T>(flat[i]);
    });
}

template <typename T>
__global__ void take_gradient(ps_cuda_param p, const T *copy, float *flat, bool accumulate)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count)
        return;
    const float v = ps_float(copy[copy_place(p, i)]);
    flat[p.offset + i] = accumulate ? flat[p.offset + i] + v : v;
}

template <typename T>
__global__ void __launch_bounds__(PS_THREADS)
    optimize(ps_cuda_rule rule, const ps_cuda_rates *rates, const ps_cuda_param *params, int param_count,
             size_t elements, float *weights, const float *g, float *m, float *v, T *copy)
{
    const ps_cuda_rates r = *rates;
    each(params, param_count, 0, elements, [=](const ps_cuda_param &p, size_t i) {
        float w = weights[i];
        const float d = fmaf(r.decay * p.decay, w, g[i]);
        if (rule == PS_RULE_ADAM) {
            const float first = r.beta1 * m[i] + r.rest1 * d, second = r.beta2 * v[i] + r.rest2 * d * d;
            m[i] = first;
            v[i] = second;
            w -= r.rate * first / (sqrtf(second) / r.root + r.eps);
        } else if (rule == PS_RULE_SGD) {
            w -= r.lr * d;
        } else {
            const float momentum = r.first ? d : fmaf(r.momentum, m[i], d);
            m[i] = momentum;
            w -= r.lr * (rule == PS_RULE_NESTEROV ? fmaf(r.momentum, momentum, d) : momentum);
        }
        weights[i] = w;
        if (copy && p.copy_at != SIZE_MAX)
            copy[copy_place(p, i - p.offset)] = ps_round<T>(w);
    });
}

__global__ void copy_scaled(float *to, const float *from, size_t n, float scale)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = from[i] * scale;
}

unsigned pieces(size_t elements)
{
    return (unsigned)((elements + PER_BLOCK - 1) / PER_BLOCK);
}

} // namespace

cudaError_t ps_state_gather(cudaStream_t stream, const struct ps_cuda_param *params, int param_count,
                            const float *state, size_t offset, size_t count, float *out)
{
    PS_LAUNCH(gather, dim3(pieces(count)), dim3(PS_THREADS), 0, stream, params, param_count, state, offset,
              offset + count, out);
    return cudaGetLastError();
}

cudaError_t ps_state_scatter(cudaStream_t stream, const struct ps_cuda_param *params, int param_count,
                             float *state, size_t offset, size_t count, const float *in)
{
    PS_LAUNCH(scatter, dim3(pieces(count)), dim3(PS_THREADS), 0, stream, params, param_count, state, offset,
              offset + count, in);
    return cudaGetLastError();
}

cudaError_t ps_copy_params(cudaStream_t stream, const struct ps_cuda_param *params, int param_count,
                           size_t elements, const float *flat, enum ps_cuda_type type, void *copy)
{
    if (type == PS_CUDA_BF16)
        PS_LAUNCH(copy_params<__nv_bfloat16>, dim3(pieces(elements)), dim3(PS_THREADS), 0, stream, params,
                  param_count, elements, flat, (__nv_bfloat16 *)copy);
    else
        PS_LAUNCH(copy_params<float>, dim3(pieces(elements)), dim3(PS_THREADS), 0, stream, params,
                  param_count, elements, flat, (float *)copy);
    return cudaGetLastError();
}

cudaError_t ps_take_gradient(cudaStream_t stream, const struct ps_cuda_param *host_param,
                             enum ps_cuda_type type, const void *copy, float *flat, bool accumulate)
{
    const dim3 grid(ps_blocks(host_param->count)), block(PS_THREADS);
    if (type == PS_CUDA_BF16)
        PS_LAUNCH(take_gradient<__nv_bfloat16>, grid, block, 0, stream, *host_param,
                  (const __nv_bfloat16 *)copy, flat, accumulate);
    else
        PS_LAUNCH(take_gradient<float>, grid, block, 0, stream, *host_param, (const float *)copy, flat,
                  accumulate);
    return cudaGetLastError();
}

cudaError_t ps_optimize(cudaStream_t stream, enum ps_cuda_rule rule, const struct ps_cuda_rates *rates,
                        const struct ps_cuda_param *params, int param_count, size_t elements, float *p,
                        const float *g, float *m, float *v, enum ps_cuda_type type, void *copy)
{
    if (type == PS_CUDA_BF16)
        PS_LAUNCH(optimize<__nv_bfloat16>, dim3(pieces(elements)), dim3(PS_THREADS), 0, stream, rule, rates,
                  params, param_count, elements, p, g, m, v, (__nv_bfloat16 *)copy);
    else
        PS_LAUNCH(optimize<float>, dim3(pieces(elements)), dim3(PS_THREADS), 0, stream, rule, rates, params,
                  param_count, elements, p, g, m, v, (float *)copy);
    return cudaGetLastError();
}

cudaError_t ps_copy_scaled(cudaStream_t stream, float *to, const float *from, size_t n, float scale)
{
    PS_LAUNCH(copy_scaled, dim3(ps_blocks(n)), dim3(PS_THREADS), 0, stream, to, from, n, scale);
    return cudaGetLastError();
}
