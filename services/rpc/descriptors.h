/* SPDX-License-Identifier: Apache-2.0
 * The few fields of a FileDescriptorSet (google/protobuf/descriptor.proto) that a method table is checked
 * against and that reflection hands out. A closed reader: descriptor.proto itself is recursive, which
 * protobuf-c does not bound. */
#ifndef PARAMSYNC_RPC_DESCRIPTORS_H
#define PARAMSYNC_RPC_DESCRIPTORS_H

#include "services/rpc/rpc.h"

struct ps_rpc_file {
    const uint8_t *data; /* the FileDescriptorProto, inside the set */
    size_t size;
    char *name;
    char **imports;
    size_t import_count;
};

struct ps_rpc_symbol { /* package.Message, package.Service, package.Service.Method, ... */
    char *name;
    size_t file;
};

struct ps_rpc_described_method {
    char *path;           /* "/package.Service/Method" */
    char *input, *output; /* without the leading dot */
    enum ps_rpc_kind kind;
};

struct ps_rpc_descriptors {
    struct ps_rpc_file *files;
    size_t file_count;
    struct ps_rpc_symbol *symbols;
    size_t symbol_count;
    struct ps_rpc_described_method *methods;
    size_t method_count;
};

/* data must outlive the result. */
int ps_rpc_descriptors_read(const uint8_t *data, size_t size, struct ps_rpc_descriptors **ret,
                            struct ps_error *err);
struct ps_rpc_descriptors *ps_rpc_descriptors_free(struct ps_rpc_descriptors *descriptors); /* takes NULL */
/* INVALID_ARGUMENT when a method is absent from the set, or of another kind or other types there. */
int ps_rpc_descriptors_check(const struct ps_rpc_descriptors *descriptors,
                             const struct ps_rpc_method *methods, size_t count, struct ps_error *err);
const struct ps_rpc_file *ps_rpc_descriptors_file(const struct ps_rpc_descriptors *descriptors,
                                                  const char *name);
const struct ps_rpc_file *ps_rpc_descriptors_symbol(const struct ps_rpc_descriptors *descriptors,
                                                    const char *name);

#endif
