/* SPDX-License-Identifier: Apache-2.0
 * One way to check calls of the CUDA libraries: PS_CUDA(call), PS_CUDNN(call), PS_CUBLAS(call) and
 * PS_NCCL(call) give 0 or a negative ps_code with the call and the library's text in `err`; PS_TRY returns
 * from the function where that, or a call of our own, fails. */
#ifndef PARAMSYNC_BACKEND_CUDA_CHECK_H
#define PARAMSYNC_BACKEND_CUDA_CHECK_H

#include "services/base/error.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

#define PS_TRY(expression)                                                                                   \
    do {                                                                                                     \
        const int try_code = (expression);                                                                   \
        if (try_code < 0)                                                                                    \
            return try_code;                                                                                 \
    } while (0)

#define PS_CUDA(call) ps_cuda_result((call), #call, err)
#define PS_CUDNN(call) ps_cudnn_result((call), #call, err)
#define PS_CUBLAS(call) ps_cublas_result((call), #call, err)

int ps_cuda_result(cudaError_t result, const char *call, struct ps_error *err);
int ps_cudnn_result(cudnnStatus_t result, const char *call, struct ps_error *err);
int ps_cublas_result(cublasStatus_t result, const char *call, struct ps_error *err);

#endif
