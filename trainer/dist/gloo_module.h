/* SPDX-License-Identifier: Apache-2.0
 * The C face of libparamsync-gloo.so. Internal to dist: gloo.c is the only user. */
#ifndef PARAMSYNC_DIST_GLOO_MODULE_H
#define PARAMSYNC_DIST_GLOO_MODULE_H

#include "services/base/error.h"
#include "trainer/dist/comm.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PS_GLOO_ABI = 1 };

/* Errors are texts: the module links nothing of ours. Both return 0 or a ps_code. */
struct ps_gloo_store {
    int (*set)(void *context, const char *key, const void *data, size_t size, char *message,
               size_t message_size);
    /* *ret_data is free()d by the caller. */
    int (*get)(void *context, const char *key, double deadline_s, char **ret_data, size_t *ret_size,
               char *message, size_t message_size);
    void *context;
};

struct ps_gloo_config {
    int rank, world_size;
    const char *address; /* numeric, of this machine: where other ranks connect to */
    double connect_s, collective_s;
    struct ps_gloo_store store;
};

struct ps_gloo;

/* All fill message (one line, NUL-terminated) when they fail. One thread at a time but for abort. */
struct ps_gloo_ops {
    uint32_t abi;
    int (*create)(const struct ps_gloo_config *config, struct ps_gloo **ret, char *message,
                  size_t message_size);
    void (*destroy)(struct ps_gloo *gloo);
    int (*all_reduce)(struct ps_gloo *gloo, void *data, size_t count, enum ps_dtype type, char *message,
                      size_t message_size);
    int (*broadcast)(struct ps_gloo *gloo, void *data, size_t bytes, int root, char *message,
                     size_t message_size);
    int (*all_gather)(struct ps_gloo *gloo, const void *data, size_t bytes, void *out, char *message,
                      size_t message_size);
    /* From any thread: the call in progress returns PS_ABORTED soon, and so do all to come. */
    void (*abort)(struct ps_gloo *gloo);
};

const struct ps_gloo_ops *ps_gloo_module(void);

#ifdef __cplusplus
}
#endif
#endif
