/* SPDX-License-Identifier: Apache-2.0
 * Device memory that grows, and pinned memory through which the host sends without waiting. */
#ifndef PARAMSYNC_BACKEND_CUDA_MEMORY_H
#define PARAMSYNC_BACKEND_CUDA_MEMORY_H

#include "services/base/error.h"

#include <cuda_runtime_api.h>
#include <stddef.h>

struct ps_memory { /* zero-initialise */
    void *start;
    size_t size;
};

/* At least `bytes`; what was in it is lost when it grows. Waits for the stream then. *generation counts the
 * times that something moved; may be NULL. */
int ps_memory_need(struct ps_memory *memory, size_t bytes, cudaStream_t stream, unsigned *generation,
                   struct ps_error *err);
void ps_memory_free(struct ps_memory *memory);

enum { PS_UPLOAD_SLOTS = 3 };

/* The host may be that many uploads ahead of the device. */
struct ps_upload { /* zero-initialise */
    void *host[PS_UPLOAD_SLOTS];
    cudaEvent_t sent[PS_UPLOAD_SLOTS];
    size_t size;
    int next;
};

int ps_upload_make(struct ps_upload *upload, size_t bytes, struct ps_error *err);
void ps_upload_free(struct ps_upload *upload);
/* Memory to be filled by the host; waits for the device only when it is PS_UPLOAD_SLOTS behind. */
int ps_upload_begin(struct ps_upload *upload, void **ret_host, struct ps_error *err);
int ps_upload_end(struct ps_upload *upload, void *device, size_t bytes, cudaStream_t stream,
                  struct ps_error *err);

#endif
