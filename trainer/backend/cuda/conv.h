/* SPDX-License-Identifier: Apache-2.0
 * Convolutions by cuDNN's descriptors and find/execute calls, NHWC. The older interface and not the backend
 * (graph) one: it is a third of the code from C, captures into CUDA graphs the same, and what the graph
 * interface could fuse behind a convolution in training are BatchNorm's statistics only, whose engines fail
 * for some shapes and so need this path beside them anyway. */
#ifndef PARAMSYNC_BACKEND_CUDA_CONV_H
#define PARAMSYNC_BACKEND_CUDA_CONV_H

#include "services/base/error.h"
#include "trainer/backend/cuda/kernels.h"

#include <cudnn.h>
#include <stdbool.h>
#include <stddef.h>

enum ps_conv_pass { PS_CONV_FORWARD, PS_CONV_DATA, PS_CONV_FILTER, PS_CONV_PASSES };

struct ps_conv_shape {
    int batch, in, in_extent, out, out_extent, kernel, stride, pad;
};

struct ps_conv_context {
    cudnnHandle_t cudnn;
    enum ps_cuda_type type;
    bool tf32, deterministic;
    size_t workspace_most; /* algorithms that want more are passed over */
};

struct ps_conv;

/* data, filter: whether these passes are wanted. *workspace is raised to what the passes need. */
int ps_conv_make(struct ps_conv **ret, const struct ps_conv_context *context,
                 const struct ps_conv_shape *shape, bool data, bool filter, size_t *workspace,
                 struct ps_error *err);
struct ps_conv *ps_conv_free(struct ps_conv *conv); /* takes NULL, returns NULL */

int ps_conv_forward(const struct ps_conv *conv, cudnnHandle_t cudnn, const void *x, const void *w, void *y,
                    void *workspace, size_t bytes, struct ps_error *err);
int ps_conv_data(const struct ps_conv *conv, cudnnHandle_t cudnn, const void *w, const void *dy, void *dx,
                 bool add, void *workspace, size_t bytes, struct ps_error *err);
int ps_conv_filter(const struct ps_conv *conv, cudnnHandle_t cudnn, const void *x, const void *dy, void *dw,
                   bool add, void *workspace, size_t bytes, struct ps_error *err);
/* The algorithm's number, for --profile; -1 where the pass is not wanted. */
int ps_conv_algorithm(const struct ps_conv *conv, enum ps_conv_pass pass);

#endif
