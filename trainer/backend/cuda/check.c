/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cuda/check.h"

#include <string.h>

/* "cudaMemcpyAsync(to, from, ...)": the function's name is enough for a message. */
static int name_of(const char *call)
{
    return (int)strcspn(call, "(");
}

int ps_cuda_result(cudaError_t result, const char *call, struct ps_error *err)
{
    if (result == cudaSuccess)
        return 0;
    (void)cudaGetLastError(); /* said here: not once more by the next launch */
    if (result == cudaErrorMemoryAllocation)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "the GPU is out of memory (%.*s): a smaller --batch needs less", name_of(call), call);
    return ps_fail(err, PS_INTERNAL, "%.*s: %s", name_of(call), call, cudaGetErrorString(result));
}

int ps_cudnn_result(cudnnStatus_t result, const char *call, struct ps_error *err)
{
    if (result == CUDNN_STATUS_SUCCESS)
        return 0;
    return ps_fail(err, result == CUDNN_STATUS_NOT_SUPPORTED ? PS_UNIMPLEMENTED : PS_INTERNAL, "%.*s: %s",
                   name_of(call), call, cudnnGetErrorString(result));
}

int ps_cublas_result(cublasStatus_t result, const char *call, struct ps_error *err)
{
    if (result == CUBLAS_STATUS_SUCCESS)
        return 0;
    return ps_fail(err, PS_INTERNAL, "%.*s: %s", name_of(call), call, cublasGetStatusString(result));
}
