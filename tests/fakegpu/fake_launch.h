/* SPDX-License-Identifier: Apache-2.0
 * CUDA C++ as host code: with this header a .cu file compiles with g++ -x c++, and PS_LAUNCH queues the
 * kernel on the stand-in's stream, which runs every thread of every block. Threads of a block are fibers:
 * they change at __syncthreads and at warp functions only. Blocks run one after another, so __shared__ is one
 * static variable per stream thread.
 */
#ifndef PARAMSYNC_FAKEGPU_FAKE_LAUNCH_H
#define PARAMSYNC_FAKEGPU_FAKE_LAUNCH_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <functional>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __constant__ static
#define __launch_bounds__(...)

namespace fake
{
struct Index {
    unsigned x, y, z;
};
extern __thread Index thread_index, block_index, block_size, grid_size;
extern __thread unsigned char *dynamic_shared;
void sync_block();
void sync_warp();
/* Every lane gives a value and gets lane source's. */
uint64_t exchange(uint64_t value, int source_lane);
int lane();
void atomic_apply(const std::function<void()> &change, const void *p, size_t bytes);
cudaError_t launch(const char *name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> thread);
} // namespace fake

#define threadIdx (fake::thread_index)
#define blockIdx (fake::block_index)
#define blockDim (fake::block_size)
#define gridDim (fake::grid_size)
#define warpSize 32

#define PS_DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(fake::dynamic_shared)

/* The arguments are copied at the launch, as the real one does. */
#define PS_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                            \
    (void)fake::launch_kernel(#kernel, dim3(grid), dim3(block), shared_bytes, stream, kernel, ##__VA_ARGS__)

namespace fake
{
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const char *name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                          void (*kernel)(Parameters...), Arguments... arguments)
{
    return launch(name, grid, block, shared_bytes, stream, [=]() { kernel(arguments...); });
}

template <typename T> T shuffle(T value, int source)
{
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, source);
    memcpy(&value, &bits, sizeof value);
    return value;
}
} // namespace fake

static inline void __syncthreads()
{
    fake::sync_block();
}
static inline void __syncwarp(unsigned = 0xffffffffu)
{
    fake::sync_warp();
}
static inline void __threadfence()
{
}
template <typename T> T __shfl_sync(unsigned, T v, int source)
{
    return fake::shuffle(v, source);
}
template <typename T> T __shfl_xor_sync(unsigned, T v, int mask)
{
    return fake::shuffle(v, fake::lane() ^ mask);
}
template <typename T> T __shfl_down_sync(unsigned, T v, unsigned delta)
{
    int from = fake::lane() + (int)delta;
    return fake::shuffle(v, from < 32 ? from : fake::lane());
}
template <typename T> T __shfl_up_sync(unsigned, T v, unsigned delta)
{
    int from = fake::lane() - (int)delta;
    return fake::shuffle(v, from >= 0 ? from : fake::lane());
}
template <typename T> T atomicAdd(T *p, T v)
{
    T old{};
    fake::atomic_apply([&]() { old = *p, *p = (T)(old + v); }, p, sizeof *p);
    return old;
}
template <typename T> T atomicMax(T *p, T v)
{
    T old{};
    fake::atomic_apply([&]() { old = *p, *p = std::max(old, v); }, p, sizeof *p);
    return old;
}
template <typename T> T __ldg(const T *p)
{
    return *p;
}
/* The toolkit's headers declare these for the host without defining them. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define rsqrtf(x) (1.0f / sqrtf(x))
#define __fdividef(a, b) ((a) / (b))

#endif
