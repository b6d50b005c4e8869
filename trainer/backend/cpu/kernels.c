/* SPDX-License-Identifier: Apache-2.0
 * Compiled once for each instruction set with another PS_KERNELS and PS_KERNELS_NAME; loops over vectors of
 * one channel block are written with GCC's vector extensions, which Clang shares. */
#include "trainer/backend/cpu/kernels.h"

#include <stdint.h>
#include <string.h>

typedef float vec8 __attribute__((vector_size(32)));
typedef int32_t mask8 __attribute__((vector_size(32)));
typedef float vec16 __attribute__((vector_size(64)));
typedef int32_t mask16 __attribute__((vector_size(64)));

#define BLOCK 8
#define VEC vec8
#define MASK mask8
#define F(name) name##_8
#include "trainer/backend/cpu/kernels_block.h"
#undef BLOCK
#undef VEC
#undef MASK
#undef F
#define BLOCK 16
#define VEC vec16
#define MASK mask16
#define F(name) name##_16
#include "trainer/backend/cpu/kernels_block.h"

/* Block 1: the pixels of one channel lie side by side. Only small tensors and tests come here. */

static void moments_1(const struct ps_rows *s, const float *x, double *ret_mean, double *ret_m2)
{
    double mean = 0, m2 = 0, count = 0;
    for (int i = 0; i < s->rows; i++, x += s->stride)
        for (int j = 0; j < s->hw; j++) {
            double d = (double)x[j] - mean;
            count++;
            mean += d / count;
            m2 += d * ((double)x[j] - mean);
        }
    *ret_mean = mean;
    *ret_m2 = m2;
}

static void affine_1(const struct ps_rows *s, const float *x, const float *a, const float *c, const float *z,
                     bool relu, float *y)
{
    for (int i = 0; i < s->rows; i++) {
        size_t at = (size_t)i * s->stride;
        for (int j = 0; j < s->hw; j++) {
            float v = x[at + (size_t)j] * a[0] + c[0] + (z ? z[at + (size_t)j] : 0);
            y[at + (size_t)j] = relu && v < 0 ? 0 : v;
        }
    }
}

static void norm_sums_1(const struct ps_rows *s, const float *g0, const float *g1, const float *y,
                        const float *x, const float *mean, float *masked, double *ret_sum, double *ret_dot)
{
    double sum = 0, dot = 0;
    for (int i = 0; i < s->rows; i++)
        for (size_t at = (size_t)i * s->stride, end = at + (size_t)s->hw; at < end; at++) {
            float d = g0[at] + (g1 ? g1[at] : 0);
            if (y && y[at] <= 0)
                d = 0;
            sum += (double)d;
            dot += (double)d * (double)(x[at] - mean[0]);
            if (masked)
                masked[at] = d;
        }
    *ret_sum += sum;
    *ret_dot += dot;
}

static void norm_input_1(const struct ps_rows *s, const float *d, const float *x, const float *mean,
                         const float *a, const float *k0, const float *k1, float *dx)
{
    for (int i = 0; i < s->rows; i++)
        for (size_t at = (size_t)i * s->stride, end = at + (size_t)s->hw; at < end; at++)
            dx[at] = a[0] * (d[at] - k0[0] - (x[at] - mean[0]) * k1[0]);
}

static void moments(const struct ps_rows *s, const float *x, double *ret_mean, double *ret_m2)
{
    (s->block == 16 ? moments_16 : s->block == 8 ? moments_8 : moments_1)(s, x, ret_mean, ret_m2);
}

static void affine(const struct ps_rows *s, const float *x, const float *a, const float *c, const float *z,
                   bool relu, float *y)
{
    (s->block == 16 ? affine_16 : s->block == 8 ? affine_8 : affine_1)(s, x, a, c, z, relu, y);
}

static void norm_sums(const struct ps_rows *s, const float *g0, const float *g1, const float *y,
                      const float *x, const float *mean, float *masked, double *ret_sum, double *ret_dot)
{
    (s->block == 16  ? norm_sums_16
     : s->block == 8 ? norm_sums_8
                     : norm_sums_1)(s, g0, g1, y, x, mean, masked, ret_sum, ret_dot);
}

static void norm_input(const struct ps_rows *s, const float *d, const float *x, const float *mean,
                       const float *a, const float *k0, const float *k1, float *dx)
{
    (s->block == 16  ? norm_input_16
     : s->block == 8 ? norm_input_8
                     : norm_input_1)(s, d, x, mean, a, k0, k1, dx);
}

static void relu(size_t count, const float *x, float *y)
{
    for (size_t i = 0; i < count; i++)
        y[i] = x[i] < 0 ? 0 : x[i];
}

static void relu_back(size_t count, const float *y, const float *dy, float *dx)
{
    for (size_t i = 0; i < count; i++)
        dx[i] = y[i] <= 0 ? 0 : dy[i];
}

static void add(size_t count, const float *a, const float *b, float *y)
{
    for (size_t i = 0; i < count; i++)
        y[i] = a[i] + b[i];
}

static void scale(size_t count, const float *x, float factor, float *y)
{
    for (size_t i = 0; i < count; i++)
        y[i] = x[i] * factor;
}

const struct ps_kernels PS_KERNELS = {
    .name = PS_KERNELS_NAME,
    .moments = moments,
    .affine = affine,
    .norm_sums = norm_sums,
    .norm_input = norm_input,
    .relu = relu,
    .relu_back = relu_back,
    .add = add,
    .scale = scale,
};
