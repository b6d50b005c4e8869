/* SPDX-License-Identifier: Apache-2.0
 * All that this backend asks of oneDNN, and the only place that includes its headers. Written against 2.6;
 * in 3.x the op descriptors are gone and memory descriptors are handles, which changes dnnl_api.c and struct
 * ps_dnnl_layout alone. */
#ifndef PARAMSYNC_BACKEND_CPU_DNNL_API_H
#define PARAMSYNC_BACKEND_CPU_DNNL_API_H

#include "services/base/error.h"

#include <dnnl.h>
#include <stdbool.h>
#include <stddef.h>

struct ps_dnnl {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
};

/* Shape, element type and order of a tensor in memory. */
struct ps_dnnl_layout {
    dnnl_memory_desc_t desc;
};

/* A primitive with its arguments: created first, which tells layouts and the scratchpad's size; bound to
 * memory when that is there; then run any number of times. Zero-initialise; one thread at a time. */
struct ps_dnnl_call {
    dnnl_primitive_t primitive;
    struct ps_dnnl_layout layout[3]; /* source, weights, destination (or their gradients) */
    size_t scratchpad;               /* bytes */
    int id[4];
    dnnl_memory_t memory[4];
    int count;
};

enum ps_dnnl_direction { PS_DNNL_FORWARD, PS_DNNL_BACKWARD_DATA, PS_DNNL_BACKWARD_WEIGHTS };

struct ps_dnnl_conv {
    int batch, in, in_extent, out, out_extent, kernel, stride, pad;
};

int ps_dnnl_open(struct ps_dnnl *ret, struct ps_error *err);
void ps_dnnl_close(struct ps_dnnl *dnnl);
const char *ps_dnnl_version(char out[16]);

/* Activations [n, c, e, e] as NCHW (block 1), nChw8c or nChw16c. */
struct ps_dnnl_layout ps_dnnl_activations(int n, int c, int extent, int block);
struct ps_dnnl_layout ps_dnnl_oihw(int out, int in, int kernel);
struct ps_dnnl_layout ps_dnnl_any_weights(int out, int in, int kernel);
size_t ps_dnnl_bytes(const struct ps_dnnl_layout *layout);
bool ps_dnnl_same(const struct ps_dnnl_layout *a, const struct ps_dnnl_layout *b);

/* The channel block (8 or 16) of the layout that oneDNN itself asks for around a convolution here; where it
 * asks for one without blocks, the block that fits the vectors of this processor. */
int ps_dnnl_preferred_block(struct ps_dnnl *dnnl);

/* weights may be an any-layout; the call's layout[1] tells the choice. */
int ps_dnnl_conv_create(struct ps_dnnl *dnnl, enum ps_dnnl_direction direction,
                        const struct ps_dnnl_conv *shape, const struct ps_dnnl_layout *source,
                        const struct ps_dnnl_layout *weights, const struct ps_dnnl_layout *destination,
                        struct ps_dnnl_call *ret, struct ps_error *err);
/* to = from, or with add: to += from. */
int ps_dnnl_reorder_create(struct ps_dnnl *dnnl, const struct ps_dnnl_layout *from,
                           const struct ps_dnnl_layout *to, bool add, struct ps_dnnl_call *ret,
                           struct ps_error *err);
/* source, weights (NULL for a reorder), destination and scratchpad (may be NULL if scratchpad is 0). */
int ps_dnnl_bind(struct ps_dnnl *dnnl, struct ps_dnnl_call *call, void *source, void *weights,
                 void *destination, void *scratchpad, struct ps_error *err);
int ps_dnnl_run(struct ps_dnnl *dnnl, const struct ps_dnnl_call *call, struct ps_error *err);
void ps_dnnl_call_done(struct ps_dnnl_call *call);
/* The implementation's name, for --profile: "jit:avx2" and the like; valid while the call is. */
const char *ps_dnnl_call_name(const struct ps_dnnl_call *call);

/* Row-major c [m, n] = op(a) * op(b) + beta * c. */
int ps_dnnl_sgemm(bool ta, bool tb, int m, int n, int k, const float *a, int lda, const float *b, int ldb,
                  float beta, float *c, int ldc, struct ps_error *err);

#endif
