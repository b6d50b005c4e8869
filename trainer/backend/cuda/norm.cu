/* SPDX-License-Identifier: Apache-2.0
 * BatchNorm over NHWC rows. One block of 256 threads takes TX groups of channels and 256 / TX rows at a time,
 * so that a warp reads whole lines; per-channel sums go through partial sums of fixed pieces of rows, which
 * one more kernel adds in double. Sums of squares are taken around the first row, which keeps them exact
 * where the mean is large. */
#include "trainer/backend/cuda/launch.h"

#include "trainer/backend/cuda/kernels.h"

namespace
{

struct Tile {
    unsigned tx, ty, columns, pieces, piece; /* blocks: columns x pieces; rows of a piece */
};

unsigned width(const ps_norm_shape *s)
{
    const unsigned wide = s->type == PS_CUDA_BF16 ? 8 : 4;
    return s->c % wide ? 1 : wide;
}

/* at_least: rows a thread has, so that what it reads first is worth it. The same on every device. */
Tile tile_of(const ps_norm_shape *s, unsigned at_least, unsigned blocks)
{
    Tile t;
    const unsigned groups = s->c / width(s);
    for (t.tx = 1; t.tx < groups && t.tx < 64; t.tx *= 2) {
    }
    t.ty = PS_THREADS / t.tx;
    t.columns = (groups + t.tx - 1) / t.tx;
    unsigned most = (s->rows + t.ty * at_least - 1) / (t.ty * at_least);
    const unsigned wanted = (blocks + t.columns - 1) / t.columns;
    t.pieces = most < wanted ? most : wanted;
    t.piece = (s->rows + t.pieces - 1) / t.pieces;
    t.pieces = (s->rows + t.piece - 1) / t.piece;
    return t;
}

Tile sum_tile(const ps_norm_shape *s)
{
    return tile_of(s, 8, 1024);
}

Tile apply_tile(const ps_norm_shape *s)
{
    return tile_of(s, 4, 65535);
}

/* Adds v over the block's rows; the sums are right in row 0. */
template <int V> __device__ void add_rows(float *v, float *shared)
{
    float *mine = shared + (threadIdx.y * blockDim.x + threadIdx.x) * V;
    for (int k = 0; k < V; k++)
        mine[k] = v[k];
    for (unsigned half = blockDim.y / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half)
            for (int k = 0; k < V; k++)
                mine[k] += mine[half * blockDim.x * V + k];
    }
    for (int k = 0; k < V; k++)
        v[k] = mine[k];
    __syncthreads();
}

/* partials: [pieces, 2, c], then the row that deviations are taken from, [c]. */
template <typename T, int V>
__global__ void __launch_bounds__(PS_THREADS)
    moment_pieces(unsigned rows, unsigned c, unsigned piece, const T *x, float *partials)
{
    PS_DYNAMIC_SHARED(float, shared);
    const unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    const unsigned first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    float pivot[V] = {0}, sum[V] = {0}, squares[V] = {0};
    if (at < c) {
        ps_load<T, V>(x + at, pivot);
        for (unsigned row = first + threadIdx.y; row < end; row += blockDim.y) {
            float v[V];
            ps_load<T, V>(x + (size_t)row * c + at, v);
            for (int k = 0; k < V; k++) {
                const float d = v[k] - pivot[k];
                sum[k] += d;
                squares[k] = fmaf(d, d, squares[k]);
            }
        }
    }
    add_rows<V>(sum, shared);
    add_rows<V>(squares, shared);
    if (threadIdx.y == 0 && at < c) {
        float *mine = partials + (size_t)blockIdx.y * 2 * c + at;
        for (int k = 0; k < V; k++) {
            mine[k] = sum[k];
            mine[c + k] = squares[k];
            if (blockIdx.y == 0)
                partials[(size_t)gridDim.y * 2 * c + at + k] = pivot[k];
        }
    }
}

enum { LANES = 32, GANGS = 16 };

/* message: moments: [rows, means, sums of squared deviations]; else [rows, first sums, second sums]. */
__global__ void add_pieces(unsigned pieces, unsigned c, double rows, bool moments, const float *partials,
                           double *message)
{
    __shared__ double first[GANGS][LANES], second[GANGS][LANES];
    const unsigned k = blockIdx.x * LANES + threadIdx.x;
    double a = 0, b = 0;
    if (k < c)
        for (unsigned i = threadIdx.y; i < pieces; i += GANGS) {
            a += (double)partials[(size_t)i * 2 * c + k];
            b += (double)partials[((size_t)i * 2 + 1) * c + k];
        }
    first[threadIdx.y][threadIdx.x] = a;
    second[threadIdx.y][threadIdx.x] = b;
    __syncthreads();
    if (threadIdx.y || k >= c)
        return;
    for (int i = 1; i < GANGS; i++) {
        a += first[i][threadIdx.x];
        b += second[i][threadIdx.x];
    }
    if (moments) {
        const double squares = b - a * a / rows;
        b = squares < 0 ? 0 : squares;
        a = (double)partials[(size_t)pieces * 2 * c + k] + a / rows;
    }
    if (k == 0)
        message[0] = rows;
    message[1 + k] = a;
    message[1 + c + k] = b;
}

__host__ __device__ inline unsigned stride_of(unsigned c)
{
    return (c + 7) / 8 * 8; /* each of the statistics can be read 16 bytes at a time */
}

__global__ void finish(unsigned c, const double *message, float eps, float momentum, const float *scale,
                       const float *shift, float *running_mean, float *running_var, float *stats)
{
    const unsigned k = blockIdx.x * blockDim.x + threadIdx.x, stride = stride_of(c);
    if (k >= c)
        return;
    double mean, var;
    if (message) {
        const double count = message[0], m = (double)momentum, squares = message[1 + c + k];
        mean = message[1 + k];
        var = squares / count;
        const double unbiased = count > 1 ? squares / (count - 1) : 0;
        running_mean[k] = (float)((1 - m) * (double)running_mean[k] + m * mean);
        running_var[k] = (float)((1 - m) * (double)running_var[k] + m * unbiased);
    } else {
        mean = (double)running_mean[k];
        var = (double)running_var[k];
    }
    const float inverse = (float)(1 / sqrt(var + (double)eps));
    stats[k] = (float)mean;
    stats[stride + k] = inverse;
    stats[2 * stride + k] = inverse * scale[k];
    stats[3 * stride + k] = shift[k];
}

/* Forward and backward take the same value, so the ReLU's sign is the same in both. */
__device__ inline float normalised(float x, float mean, float gain, float shift)
{
    return fmaf(x - mean, gain, shift);
}

template <int V>
__device__ void load_stats(const float *stats, unsigned row, unsigned c, unsigned at, float *out)
{
    const float *p = stats + (size_t)row * stride_of(c) + at;
    constexpr int step = V < 4 ? V : 4;
    for (int k = 0; k < V; k += step)
        ps_load<float, step>(p + k, out + k);
}

template <typename T, int V>
__global__ void __launch_bounds__(PS_THREADS)
    apply(unsigned rows, unsigned c, unsigned piece, const float *stats, const T *x, const T *z, bool relu,
          T *y)
{
    const unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    const unsigned first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    if (at >= c)
        return;
    float mean[V], gain[V], shift[V];
    load_stats<V>(stats, 0, c, at, mean);
    load_stats<V>(stats, 2, c, at, gain);
    load_stats<V>(stats, 3, c, at, shift);
    for (unsigned row = first + threadIdx.y; row < end; row += blockDim.y) {
        const size_t place = (size_t)row * c + at;
        float v[V], other[V];
        ps_load<T, V>(x + place, v);
        for (int k = 0; k < V; k++)
            v[k] = normalised(v[k], mean[k], gain[k], shift[k]);
        if (z) {
            ps_load<T, V>(z + place, other);
            for (int k = 0; k < V; k++)
                v[k] += other[k];
        }
        for (int k = 0; k < V; k++) /* NaN passes */
            v[k] = relu && v[k] < 0 ? 0 : v[k];
        ps_store<T, V>(y + place, v);
    }
}

/* dy behind the ReLU. */
template <typename T, int V>
__device__ void masked(const T *y, const T *dy, size_t place, bool relu, const float *x, const float *mean,
                       const float *gain, const float *shift, float *d)
{
    float out[V];
    ps_load<T, V>(dy + place, d);
    if (!relu)
        return;
    if (y)
        ps_load<T, V>(y + place, out);
    else
        for (int k = 0; k < V; k++)
            out[k] = normalised(x[k], mean[k], gain[k], shift[k]);
    for (int k = 0; k < V; k++)
        d[k] = out[k] <= 0 ? 0 : d[k];
}

template <typename T, int V>
__global__ void __launch_bounds__(PS_THREADS)
    sum_pieces(unsigned rows, unsigned c, unsigned piece, const float *stats, const T *x, const T *y,
               const T *dy, bool relu, float *partials)
{
    PS_DYNAMIC_SHARED(float, shared);
    const unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    const unsigned first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    float sum[V] = {0}, dot[V] = {0}, mean[V], inverse[V], gain[V], shift[V];
    if (at < c) {
        load_stats<V>(stats, 0, c, at, mean);
        load_stats<V>(stats, 1, c, at, inverse);
        load_stats<V>(stats, 2, c, at, gain);
        load_stats<V>(stats, 3, c, at, shift);
        for (unsigned row = first + threadIdx.y; row < end; row += blockDim.y) {
            const size_t place = (size_t)row * c + at;
            float v[V], d[V];
            ps_load<T, V>(x + place, v);
            masked<T, V>(y, dy, place, relu, v, mean, gain, shift, d);
            for (int k = 0; k < V; k++) {
                sum[k] += d[k];
                dot[k] = fmaf(d[k], (v[k] - mean[k]) * inverse[k], dot[k]);
            }
        }
    }
    add_rows<V>(sum, shared);
    add_rows<V>(dot, shared);
    if (threadIdx.y == 0 && at < c) {
        float *mine = partials + (size_t)blockIdx.y * 2 * c + at;
        for (int k = 0; k < V; k++) {
            mine[k] = sum[k];
            mine[c + k] = dot[k];
        }
    }
}

__global__ void param_gradients(unsigned c, const double *own, bool accumulate, float *dscale, float *dshift)
{
    const unsigned k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= c)
        return;
    dshift[k] = (accumulate ? dshift[k] : 0) + (float)own[1 + k];
    dscale[k] = (accumulate ? dscale[k] : 0) + (float)own[1 + c + k];
}

template <typename T, int V>
__global__ void __launch_bounds__(PS_THREADS)
    back(unsigned rows, unsigned c, unsigned piece, const float *stats, const double *shared, const T *x,
         const T *y, const T *dy, bool relu, T *dx, bool add_dx, T *dz, bool add_dz)
{
    const unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    const unsigned first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    if (at >= c)
        return;
    float mean[V], inverse[V], gain[V], shift[V], of_mean[V] = {0}, of_var[V] = {0};
    load_stats<V>(stats, 0, c, at, mean);
    load_stats<V>(stats, 1, c, at, inverse);
    load_stats<V>(stats, 2, c, at, gain);
    load_stats<V>(stats, 3, c, at, shift);
    for (int k = 0; shared && k < V; k++) { /* the batch's mean and variance depend on x too */
        of_mean[k] = (float)(shared[1 + at + k] / shared[0]);
        of_var[k] = (float)(shared[1 + c + at + k] / shared[0]);
    }
    for (unsigned row = first + threadIdx.y; row < end; row += blockDim.y) {
        const size_t place = (size_t)row * c + at;
        float v[V], d[V], out[V];
        ps_load<T, V>(x + place, v);
        masked<T, V>(y, dy, place, relu, v, mean, gain, shift, d);
        if (dx) {
            for (int k = 0; k < V; k++)
                v[k] = gain[k] * (d[k] - fmaf((v[k] - mean[k]) * inverse[k], of_var[k], of_mean[k]));
            if (add_dx) {
                ps_load<T, V>(dx + place, out);
                for (int k = 0; k < V; k++)
                    v[k] += out[k];
            }
            ps_store<T, V>(dx + place, v);
        }
        if (dz) { /* may be the same memory as dx, and then adds */
            if (add_dz) {
                ps_load<T, V>(dz + place, out);
                for (int k = 0; k < V; k++)
                    d[k] += out[k];
            }
            ps_store<T, V>(dz + place, d);
        }
    }
}

dim3 grid_of(const Tile &t)
{
    return dim3(t.columns, t.pieces);
}
dim3 block_of(const Tile &t)
{
    return dim3(t.tx, t.ty);
}
size_t shared_of(int v)
{
    return (size_t)PS_THREADS * (size_t)v * sizeof(float);
}

cudaError_t join_pieces(cudaStream_t stream, const ps_norm_shape *s, const Tile &t, bool moments,
                        const float *partials, double *message)
{
    PS_LAUNCH(add_pieces, dim3((s->c + LANES - 1) / LANES), dim3(LANES, GANGS), 0, stream, t.pieces, s->c,
              (double)s->rows, moments, partials, message);
    return cudaGetLastError();
}

template <typename T, int V>
cudaError_t moments(cudaStream_t stream, const ps_norm_shape *s, const void *x, float *partials)
{
    const Tile t = sum_tile(s);
    PS_LAUNCH((moment_pieces<T, V>), grid_of(t), block_of(t), shared_of(V), stream, s->rows, s->c, t.piece,
              (const T *)x, partials);
    return cudaGetLastError();
}

template <typename T, int V>
cudaError_t apply_all(cudaStream_t stream, const ps_norm_shape *s, const float *stats, const void *x,
                      const void *z, bool relu, void *y)
{
    const Tile t = apply_tile(s);
    PS_LAUNCH((apply<T, V>), grid_of(t), block_of(t), 0, stream, s->rows, s->c, t.piece, stats, (const T *)x,
              (const T *)z, relu, (T *)y);
    return cudaGetLastError();
}

template <typename T, int V>
cudaError_t sums(cudaStream_t stream, const ps_norm_shape *s, const float *stats, const void *x,
                 const void *y, const void *dy, bool relu, float *partials)
{
    const Tile t = sum_tile(s);
    PS_LAUNCH((sum_pieces<T, V>), grid_of(t), block_of(t), shared_of(V), stream, s->rows, s->c, t.piece,
              stats, (const T *)x, (const T *)y, (const T *)dy, relu, partials);
    return cudaGetLastError();
}

template <typename T, int V>
cudaError_t back_all(cudaStream_t stream, const ps_norm_shape *s, const float *stats, const double *shared,
                     const void *x, const void *y, const void *dy, bool relu, void *dx, bool add_dx, void *dz,
                     bool add_dz)
{
    const Tile t = apply_tile(s);
    PS_LAUNCH((back<T, V>), grid_of(t), block_of(t), 0, stream, s->rows, s->c, t.piece, stats, shared,
              (const T *)x, (const T *)y, (const T *)dy, relu, (T *)dx, add_dx, (T *)dz, add_dz);
    return cudaGetLastError();
}

} // namespace

size_t ps_norm_partials(const struct ps_norm_shape *s)
{
    return ((size_t)sum_tile(s).pieces * 2 + 1) * s->c;
}

size_t ps_norm_stats(unsigned c)
{
    return 4 * (size_t)stride_of(c);
}

size_t ps_norm_message(unsigned c)
{
    return 1 + 2 * (size_t)c;
}

cudaError_t ps_norm_moments(cudaStream_t stream, const struct ps_norm_shape *s, const void *x,
                            float *partials, double *message)
{
    cudaError_t e = PS_BY_TYPE(s->type, s->c, moments, stream, s, x, partials);
    return e ? e : join_pieces(stream, s, sum_tile(s), true, partials, message);
}

cudaError_t ps_norm_finish(cudaStream_t stream, unsigned c, const double *message, float eps, float momentum,
                           const float *scale, const float *shift, float *running_mean, float *running_var,
                           float *stats)
{
    PS_LAUNCH(finish, dim3((c + 63) / 64), dim3(64), 0, stream, c, message, eps, momentum, scale, shift,
              running_mean, running_var, stats);
    return cudaGetLastError();
}

cudaError_t ps_norm_apply(cudaStream_t stream, const struct ps_norm_shape *s, const float *stats,
                          const void *x, const void *z, bool relu, void *y)
{
    return PS_BY_TYPE(s->type, s->c, apply_all, stream, s, stats, x, z, relu, y);
}

cudaError_t ps_norm_sums(cudaStream_t stream, const struct ps_norm_shape *s, const float *stats,
                         const void *x, const void *y, const void *dy, bool relu, float *partials,
                         double *message)
{
    cudaError_t e = PS_BY_TYPE(s->type, s->c, sums, stream, s, stats, x, y, dy, relu, partials);
    return e ? e : join_pieces(stream, s, sum_tile(s), false, partials, message);
}

cudaError_t ps_norm_params(cudaStream_t stream, unsigned c, const double *own, bool accumulate, float *dscale,
                           float *dshift)
{
    PS_LAUNCH(param_gradients, dim3((c + 63) / 64), dim3(64), 0, stream, c, own, accumulate, dscale, dshift);
    return cudaGetLastError();
}

cudaError_t ps_norm_back(cudaStream_t stream, const struct ps_norm_shape *s, const float *stats,
                         const double *shared, const void *x, const void *y, const void *dy, bool relu,
                         void *dx, bool add_dx, void *dz, bool add_dz)
{
    return PS_BY_TYPE(s->type, s->c, back_all, stream, s, stats, shared, x, y, dy, relu, dx, add_dx, dz,
                      add_dz);
}
