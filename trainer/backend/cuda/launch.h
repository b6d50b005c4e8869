/* SPDX-License-Identifier: Apache-2.0
 * What a kernel source includes first. All launches go through PS_LAUNCH, so that the same source compiles as
 * device code, and under PS_FAKE_GPU as host code for the stand-ins of tests/fakegpu. */
#ifndef PARAMSYNC_BACKEND_CUDA_LAUNCH_H
#define PARAMSYNC_BACKEND_CUDA_LAUNCH_H

#ifdef PS_FAKE_GPU
#include "tests/fakegpu/fake_launch.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define PS_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                            \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define PS_DYNAMIC_SHARED(type, name)                                                                        \
    extern __shared__ __align__(16) unsigned char ps_dynamic_shared[];                                       \
    type *name = reinterpret_cast<type *>(ps_dynamic_shared)
#endif

/* V neighbours as one access. p is aligned to their size. */
template <typename T, int V> struct alignas(sizeof(T) * V) ps_pack {
    T v[V];
};

__device__ inline float ps_float(float v)
{
    return v;
}
__device__ inline float ps_float(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}
template <typename T> __device__ inline T ps_round(float v);
template <> __device__ inline float ps_round<float>(float v)
{
    return v;
}
template <> __device__ inline __nv_bfloat16 ps_round<__nv_bfloat16>(float v)
{
    return __float2bfloat16_rn(v);
}

template <typename T, int V> __device__ inline void ps_load(const T *p, float *out)
{
    const ps_pack<T, V> all = *reinterpret_cast<const ps_pack<T, V> *>(p);
    for (int k = 0; k < V; k++)
        out[k] = ps_float(all.v[k]);
}
template <typename T, int V> __device__ inline void ps_store(T *p, const float *in)
{
    ps_pack<T, V> all;
    for (int k = 0; k < V; k++)
        all.v[k] = ps_round<T>(in[k]);
    *reinterpret_cast<ps_pack<T, V> *>(p) = all;
}

/* Calls name<T, V>(arguments) for the type and the widest access (16 bytes) that divides c. */
#define PS_BY_TYPE(type, c, name, ...)                                                                       \
    ((type) == PS_CUDA_BF16                                                                                  \
         ? ((c) % 8 == 0 ? name<__nv_bfloat16, 8>(__VA_ARGS__) : name<__nv_bfloat16, 1>(__VA_ARGS__))        \
         : ((c) % 4 == 0 ? name<float, 4>(__VA_ARGS__) : name<float, 1>(__VA_ARGS__)))

enum { PS_THREADS = 256 };

static inline unsigned ps_blocks(size_t items)
{
    return (unsigned)((items + PS_THREADS - 1) / PS_THREADS);
}

#endif
