/* SPDX-License-Identifier: Apache-2.0
 * Files in the safetensors layout (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON
 * header of names, types, shapes and offsets, then the tensors' bytes, little-endian, without gaps. */
#ifndef PARAMSYNC_CHECKPOINT_SAFETENSORS_H
#define PARAMSYNC_CHECKPOINT_SAFETENSORS_H

#include "services/base/digest.h"
#include "services/base/error.h"

#include <stddef.h>
#include <stdint.h>

enum {
    PS_TENSOR_NAME_MAX = 256, /* with the NUL */
    PS_TENSOR_DIMS = 8,
    PS_TENSORS_MAX = 65536,
    PS_TENSOR_HEADER_MAX = 32 << 20, /* bytes */
};

enum ps_tensor_type {
    PS_TENSOR_F32,
    PS_TENSOR_F64,
    PS_TENSOR_F16,
    PS_TENSOR_BF16,
    PS_TENSOR_I64,
    PS_TENSOR_I32,
    PS_TENSOR_I16,
    PS_TENSOR_I8,
    PS_TENSOR_U8,
    PS_TENSOR_BOOL,
    PS_TENSOR_TYPES,
};

struct ps_tensor {
    char name[PS_TENSOR_NAME_MAX];
    enum ps_tensor_type type;
    int ndim; /* 0: a scalar */
    size_t shape[PS_TENSOR_DIMS];
    size_t bytes;
    const void *data; /* [shape...]; after reading not necessarily aligned: copy it out */
};

struct ps_tensor_pair {
    const char *key, *value;
};

size_t ps_tensor_type_size(enum ps_tensor_type type);      /* bytes */
const char *ps_tensor_type_name(enum ps_tensor_type type); /* "F32" */
/* "[64, 3, 3, 3]", for messages. */
void ps_tensor_shape_text(const struct ps_tensor *tensor, char *out, size_t size);

/* Writes path whole or not at all (temporary file, fsync, rename, fsync of the folder). With path NULL
 * nothing is written and only the digest is computed: of the same bytes. ret_sha256 may be NULL. Tensors
 * follow each other in the order given; bytes must agree with type and shape. */
int ps_safetensors_write(const char *path, const struct ps_tensor *tensors, size_t count,
                         const struct ps_tensor_pair *metadata, size_t metadata_count,
                         char ret_sha256[PS_SHA256_HEX], struct ps_error *err);

struct ps_safetensors { /* a file that was read; read-only, so any number of threads may use it */
    struct ps_tensor *tensors;
    size_t count;
    struct ps_tensor_pair *metadata;
    size_t metadata_count;
    char *file; /* owned: what data and metadata point into */
    size_t size;
};

/* Reads and checks everything: lengths, types, shapes, offsets (no gap, no overlap, nothing past the end),
 * names (no duplicates). PS_DATA_LOSS or PS_INVALID_ARGUMENT with the file and what is wrong. */
int ps_safetensors_read(const char *path, struct ps_safetensors **ret, struct ps_error *err);
/* The same from memory, which it takes over (free()) in any case. name is for messages. */
int ps_safetensors_parse(char *file, size_t size, const char *name, struct ps_safetensors **ret,
                         struct ps_error *err);
struct ps_safetensors *ps_safetensors_free(struct ps_safetensors *file); /* takes NULL, returns NULL */

/* By name, or "module." before the name; NULL if it is not there. */
const struct ps_tensor *ps_safetensors_find(const struct ps_safetensors *file, const char *name);
const char *ps_safetensors_metadata(const struct ps_safetensors *file,
                                    const char *key); /* NULL if not there */

#endif
