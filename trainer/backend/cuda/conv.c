/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cuda/conv.h"

#include "trainer/backend/cuda/check.h"

#include <stdlib.h>

struct ps_conv {
    cudnnTensorDescriptor_t x, y;
    cudnnFilterDescriptor_t w;
    cudnnConvolutionDescriptor_t pass[PS_CONV_PASSES]; /* apart: the math may differ */
    int algorithm[PS_CONV_PASSES];
};

static const char *const pass_names[] = {"forward", "gradient of the input", "gradient of the weights"};

struct ps_conv *ps_conv_free(struct ps_conv *c)
{
    if (!c)
        return NULL;
    if (c->x)
        cudnnDestroyTensorDescriptor(c->x);
    if (c->y)
        cudnnDestroyTensorDescriptor(c->y);
    if (c->w)
        cudnnDestroyFilterDescriptor(c->w);
    for (int k = 0; k < PS_CONV_PASSES; k++)
        if (c->pass[k])
            cudnnDestroyConvolutionDescriptor(c->pass[k]);
    free(c);
    return NULL;
}

static int describe(struct ps_conv *c, const struct ps_conv_context *o, const struct ps_conv_shape *s,
                    struct ps_error *err)
{
    const cudnnDataType_t type = o->type == PS_CUDA_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT;
    /* The default math takes TF32 where it can: float32 as such has to be asked for. */
    const cudnnMathType_t math = o->type == PS_CUDA_BF16 || o->tf32 ? CUDNN_TENSOR_OP_MATH : CUDNN_FMA_MATH;
    PS_TRY(PS_CUDNN(cudnnCreateTensorDescriptor(&c->x)));
    PS_TRY(PS_CUDNN(cudnnCreateTensorDescriptor(&c->y)));
    PS_TRY(PS_CUDNN(cudnnCreateFilterDescriptor(&c->w)));
    PS_TRY(PS_CUDNN(cudnnSetTensor4dDescriptor(c->x, CUDNN_TENSOR_NHWC, type, s->batch, s->in, s->in_extent,
                                               s->in_extent)));
    PS_TRY(PS_CUDNN(cudnnSetTensor4dDescriptor(c->y, CUDNN_TENSOR_NHWC, type, s->batch, s->out, s->out_extent,
                                               s->out_extent)));
    PS_TRY(PS_CUDNN(
        cudnnSetFilter4dDescriptor(c->w, type, CUDNN_TENSOR_NHWC, s->out, s->in, s->kernel, s->kernel)));
    for (int k = 0; k < PS_CONV_PASSES; k++) {
        PS_TRY(PS_CUDNN(cudnnCreateConvolutionDescriptor(&c->pass[k])));
        PS_TRY(PS_CUDNN(cudnnSetConvolution2dDescriptor(c->pass[k], s->pad, s->pad, s->stride, s->stride, 1,
                                                        1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT)));
        PS_TRY(PS_CUDNN(cudnnSetConvolutionMathType(c->pass[k], math)));
    }
    return 0;
}

enum { CANDIDATES = 16 };

struct candidate { /* what cuDNN's three kinds of answers have in common */
    int algorithm;
    cudnnStatus_t status;
    size_t memory;
    cudnnDeterminism_t determinism;
    cudnnMathType_t math;
};

#define TAKE(answers)                                                                                        \
    for (int i = 0; i < count; i++)                                                                          \
        ret[i] = (struct candidate)                                                                          \
        {                                                                                                    \
            (int)(answers)[i].algo, (answers)[i].status, (answers)[i].memory, (answers)[i].determinism,      \
                (answers)[i].mathType                                                                        \
        }

/* Best first, by cuDNN's heuristics. */
static int list(const struct ps_conv *c, cudnnHandle_t cudnn, enum ps_conv_pass pass, struct candidate *ret,
                int *ret_count, struct ps_error *err)
{
    int count = 0;
    if (pass == PS_CONV_FORWARD) {
        cudnnConvolutionFwdAlgoPerf_t perf[CANDIDATES];
        PS_TRY(PS_CUDNN(cudnnGetConvolutionForwardAlgorithm_v7(cudnn, c->x, c->w, c->pass[pass], c->y,
                                                               CANDIDATES, &count, perf)));
        TAKE(perf);
    } else if (pass == PS_CONV_DATA) {
        cudnnConvolutionBwdDataAlgoPerf_t perf[CANDIDATES];
        PS_TRY(PS_CUDNN(cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnn, c->w, c->y, c->pass[pass], c->x,
                                                                    CANDIDATES, &count, perf)));
        TAKE(perf);
    } else {
        cudnnConvolutionBwdFilterAlgoPerf_t perf[CANDIDATES];
        PS_TRY(PS_CUDNN(cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnn, c->x, c->y, c->pass[pass], c->w,
                                                                      CANDIDATES, &count, perf)));
        TAKE(perf);
    }
    *ret_count = count;
    return 0;
}

static int workspace_of(const struct ps_conv *c, cudnnHandle_t cudnn, enum ps_conv_pass pass, int algorithm,
                        size_t *ret, struct ps_error *err)
{
    if (pass == PS_CONV_FORWARD)
        return PS_CUDNN(cudnnGetConvolutionForwardWorkspaceSize(cudnn, c->x, c->w, c->pass[pass], c->y,
                                                                (cudnnConvolutionFwdAlgo_t)algorithm, ret));
    if (pass == PS_CONV_DATA)
        return PS_CUDNN(cudnnGetConvolutionBackwardDataWorkspaceSize(
            cudnn, c->w, c->y, c->pass[pass], c->x, (cudnnConvolutionBwdDataAlgo_t)algorithm, ret));
    return PS_CUDNN(cudnnGetConvolutionBackwardFilterWorkspaceSize(
        cudnn, c->x, c->y, c->pass[pass], c->w, (cudnnConvolutionBwdFilterAlgo_t)algorithm, ret));
}

static int choose(struct ps_conv *c, const struct ps_conv_context *o, const struct ps_conv_shape *s,
                  enum ps_conv_pass pass, size_t *workspace, struct ps_error *err)
{
    struct candidate all[CANDIDATES];
    int count = 0;
    const bool plain = o->type == PS_CUDA_F32 && !o->tf32;
    PS_TRY(list(c, o->cudnn, pass, all, &count, err));
    for (int i = 0; i < count; i++) {
        size_t bytes = 0;
        if (all[i].status != CUDNN_STATUS_SUCCESS ||
            (o->deterministic && all[i].determinism != CUDNN_DETERMINISTIC) ||
            (plain && all[i].math != CUDNN_FMA_MATH))
            continue;
        PS_TRY(PS_CUDNN(cudnnSetConvolutionMathType(c->pass[pass], all[i].math)));
        PS_TRY(workspace_of(c, o->cudnn, pass, all[i].algorithm, &bytes, err));
        if (bytes > o->workspace_most)
            continue;
        c->algorithm[pass] = all[i].algorithm;
        *workspace = bytes > *workspace ? bytes : *workspace;
        return 0;
    }
    return ps_fail(err, PS_UNIMPLEMENTED,
                   "cuDNN has no %salgorithm for the %s of a convolution %d>%d %dx%d/%d at %d, batch %d",
                   o->deterministic ? "deterministic " : "", pass_names[pass], s->in, s->out, s->kernel,
                   s->kernel, s->stride, s->in_extent, s->batch);
}

int ps_conv_make(struct ps_conv **ret, const struct ps_conv_context *context,
                 const struct ps_conv_shape *shape, bool data, bool filter, size_t *workspace,
                 struct ps_error *err)
{
    const bool wanted[] = {true, data, filter};
    struct ps_conv *c = calloc(1, sizeof *c);
    if (!c)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = describe(c, context, shape, err);
    for (int k = 0; k < PS_CONV_PASSES; k++) {
        c->algorithm[k] = -1;
        if (!code && wanted[k])
            code = choose(c, context, shape, (enum ps_conv_pass)k, workspace, err);
    }
    if (code) {
        ps_conv_free(c);
        return code;
    }
    *ret = c;
    return 0;
}

static const float one = 1, zero = 0;

int ps_conv_forward(const struct ps_conv *c, cudnnHandle_t cudnn, const void *x, const void *w, void *y,
                    void *workspace, size_t bytes, struct ps_error *err)
{
    return PS_CUDNN(cudnnConvolutionForward(cudnn, &one, c->x, x, c->w, w, c->pass[PS_CONV_FORWARD],
                                            (cudnnConvolutionFwdAlgo_t)c->algorithm[PS_CONV_FORWARD],
                                            workspace, bytes, &zero, c->y, y));
}

int ps_conv_data(const struct ps_conv *c, cudnnHandle_t cudnn, const void *w, const void *dy, void *dx,
                 bool add, void *workspace, size_t bytes, struct ps_error *err)
{
    return PS_CUDNN(cudnnConvolutionBackwardData(cudnn, &one, c->w, w, c->y, dy, c->pass[PS_CONV_DATA],
                                                 (cudnnConvolutionBwdDataAlgo_t)c->algorithm[PS_CONV_DATA],
                                                 workspace, bytes, add ? &one : &zero, c->x, dx));
}

int ps_conv_filter(const struct ps_conv *c, cudnnHandle_t cudnn, const void *x, const void *dy, void *dw,
                   bool add, void *workspace, size_t bytes, struct ps_error *err)
{
    return PS_CUDNN(
        cudnnConvolutionBackwardFilter(cudnn, &one, c->x, x, c->y, dy, c->pass[PS_CONV_FILTER],
                                       (cudnnConvolutionBwdFilterAlgo_t)c->algorithm[PS_CONV_FILTER],
                                       workspace, bytes, add ? &one : &zero, c->w, dw));
}

int ps_conv_algorithm(const struct ps_conv *c, enum ps_conv_pass pass)
{
    return c->algorithm[pass];
}
