/* SPDX-License-Identifier: Apache-2.0
 * Own loops over activations, memory-bound and so fused: BatchNorm with ReLU and the residual sum, pooling.
 * Compiled for several instruction sets; ps_cpu_kernels() picks the best that the processor has.
 *
 * A row is one image's [hw, block] of one channel block; rows of a channel block are `stride` floats apart
 * (NCHW is block 1). Blocks are 1, 8 or 16; per-channel arrays hold `block` floats, 64-byte aligned, with
 * zeros for channels that only pad the last block: so padding stays zero in every result. */
#ifndef PARAMSYNC_BACKEND_CPU_KERNELS_H
#define PARAMSYNC_BACKEND_CPU_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

struct ps_rows { /* what the rows of one channel block look like; shared by all tensors of one call */
    int rows;
    int hw;
    int block;
    size_t stride; /* floats */
};

struct ps_kernels {
    const char *name;
    /* Mean and sum of squared deviations of each channel: row by row in float, rows merged in double (T.
     * Chan, G. Golub and R. LeVeque, 1979), so that neither cancels. */
    void (*moments)(const struct ps_rows *s, const float *x, double *ret_mean, double *ret_m2);
    /* y = x * a + c, plus z where z is given, then max(0, .) if relu. y may be x or z. */
    void (*affine)(const struct ps_rows *s, const float *x, const float *a, const float *c, const float *z,
                   bool relu, float *y);
    /* d = (g0 + g1) where y > 0; g1 NULL: none; y NULL: everywhere. Writes d to `masked` unless NULL (may be
     * g0 or g1). Adds per channel: ret_sum += d, ret_dot += d * (x - mean). */
    void (*norm_sums)(const struct ps_rows *s, const float *g0, const float *g1, const float *y,
                      const float *x, const float *mean, float *masked, double *ret_sum, double *ret_dot);
    /* dx = a * (d - k0 - (x - mean) * k1); dx may be d. */
    void (*norm_input)(const struct ps_rows *s, const float *d, const float *x, const float *mean,
                       const float *a, const float *k0, const float *k1, float *dx);
    /* y = max(0, x) and dx = dy where y > 0, over whole tensors; in place allowed. NaN passes. */
    void (*relu)(size_t count, const float *x, float *y);
    void (*relu_back)(size_t count, const float *y, const float *dy, float *dx);
    void (*add)(size_t count, const float *a, const float *b, float *y);
    void (*scale)(size_t count, const float *x, float factor, float *y);
};

/* The same pointer on every call. */
const struct ps_kernels *ps_cpu_kernels(void);

extern const struct ps_kernels ps_kernels_base;
#ifdef PS_KERNELS_X86
extern const struct ps_kernels ps_kernels_avx2;   /* AVX2 and FMA */
extern const struct ps_kernels ps_kernels_avx512; /* AVX-512 F, BW, VL, DQ */
#endif

#endif
