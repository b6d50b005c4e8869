/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cuda/memory.h"

#include "trainer/backend/cuda/check.h"

int ps_memory_need(struct ps_memory *m, size_t bytes, cudaStream_t stream, unsigned *generation,
                   struct ps_error *err)
{
    if (bytes <= m->size)
        return 0;
    PS_TRY(PS_CUDA(cudaStreamSynchronize(stream)));
    ps_memory_free(m);
    PS_TRY(PS_CUDA(cudaMalloc(&m->start, bytes)));
    m->size = bytes;
    if (generation)
        ++*generation;
    return 0;
}

void ps_memory_free(struct ps_memory *m)
{
    if (m->start)
        cudaFree(m->start);
    *m = (struct ps_memory){0};
}

int ps_upload_make(struct ps_upload *u, size_t bytes, struct ps_error *err)
{
    u->size = bytes;
    for (int i = 0; i < PS_UPLOAD_SLOTS; i++) {
        PS_TRY(PS_CUDA(cudaMallocHost(&u->host[i], bytes)));
        PS_TRY(PS_CUDA(cudaEventCreateWithFlags(&u->sent[i], cudaEventDisableTiming)));
    }
    return 0;
}

void ps_upload_free(struct ps_upload *u)
{
    for (int i = 0; i < PS_UPLOAD_SLOTS; i++) {
        if (u->sent[i])
            cudaEventDestroy(u->sent[i]);
        if (u->host[i])
            cudaFreeHost(u->host[i]);
    }
    *u = (struct ps_upload){0};
}

int ps_upload_begin(struct ps_upload *u, void **ret_host, struct ps_error *err)
{
    PS_TRY(PS_CUDA(cudaEventSynchronize(u->sent[u->next])));
    *ret_host = u->host[u->next];
    return 0;
}

int ps_upload_end(struct ps_upload *u, void *device, size_t bytes, cudaStream_t stream, struct ps_error *err)
{
    PS_TRY(PS_CUDA(cudaMemcpyAsync(device, u->host[u->next], bytes, cudaMemcpyHostToDevice, stream)));
    PS_TRY(PS_CUDA(cudaEventRecord(u->sent[u->next], stream)));
    u->next = (u->next + 1) % PS_UPLOAD_SLOTS;
    return 0;
}
