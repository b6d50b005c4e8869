/* SPDX-License-Identifier: Apache-2.0
 * A safetensors file (https://huggingface.co/docs/safetensors: 8 bytes little-endian length N, N bytes of
 * JSON, the tensors' bytes) seen as another one: only some of its tensors, 32-bit floats rounded to bfloat16.
 * Nothing of it is ever held as a whole. */
#ifndef PARAMSYNC_SIDECAR_TENSORS_H
#define PARAMSYNC_SIDECAR_TENSORS_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_tensor_view;

struct ps_tensor_choice {
    const char *const *names; /* none: all of them */
    size_t count;
    bool bf16; /* F32 becomes BF16, to nearest, ties to even; NaN stays NaN. Other types stay as they are */
};

/* fd is a file of size bytes that stays open for as long as the view does. DATA_LOSS for a file that is no
 * safetensors; NOT_FOUND names a tensor that is not there. */
int ps_tensor_view_open(int fd, uint64_t size, const struct ps_tensor_choice *choice,
                        struct ps_tensor_view **ret_view, struct ps_error *err);
struct ps_tensor_view *ps_tensor_view_free(struct ps_tensor_view *view); /* takes NULL, returns NULL */

uint64_t ps_tensor_view_size(const struct ps_tensor_view *view);
/* Fills the buffer with the view's bytes from offset on; all of them must lie in it. */
int ps_tensor_view_read(const struct ps_tensor_view *view, uint64_t offset, void *buffer, size_t size,
                        struct ps_error *err);

#endif
