/* SPDX-License-Identifier: Apache-2.0
 * As much of a backend as the reducer and the start need: flat vectors in host memory. */
#ifndef PARAMSYNC_TESTS_FAKE_BACKEND_H
#define PARAMSYNC_TESTS_FAKE_BACKEND_H

#include "trainer/backend/backend.h"
#include <stdlib.h>
#include <string.h>

struct ps_backend {
    const struct ps_model *model;
    float *params, *grads, *buffers;
    int copies;
};

static inline struct ps_backend *fake_backend_new(const struct ps_model *model)
{
    struct ps_backend *b = calloc(1, sizeof *b);
    b->model = model;
    b->params = calloc(model->param_elements + 1, sizeof(float));
    b->grads = calloc(model->param_elements + 1, sizeof(float));
    b->buffers = calloc(model->buffer_elements + 1, sizeof(float));
    return b;
}

static inline void fake_backend_free(struct ps_backend *b)
{
    free(b->params);
    free(b->grads);
    free(b->buffers);
    free(b);
}

static inline float *fake_state(struct ps_backend *b, enum ps_state_kind what)
{
    return what == PS_STATE_PARAMS ? b->params : what == PS_STATE_GRADS ? b->grads : b->buffers;
}

static inline int fake_read(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count,
                            float *host, struct ps_error *err)
{
    (void)err;
    memcpy(host, fake_state(b, what) + offset, count * sizeof *host);
    return 0;
}

static inline int fake_write(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count,
                             const float *host, struct ps_error *err)
{
    (void)err;
    memcpy(fake_state(b, what) + offset, host, count * sizeof *host);
    return 0;
}

static inline float *fake_gradients(struct ps_backend *b)
{
    return b->grads;
}

static inline void *fake_allocate(struct ps_backend *b, size_t bytes)
{
    (void)b;
    return malloc(bytes);
}

static inline void fake_release(struct ps_backend *b, void *memory)
{
    (void)b;
    free(memory);
}

static inline int fake_copy_scaled(struct ps_backend *b, float *dst, const float *src, size_t count,
                                   float scale, struct ps_error *err)
{
    (void)err;
    b->copies++;
    for (size_t i = 0; i < count; i++)
        dst[i] = src[i] * scale;
    return 0;
}

static const struct ps_backend_ops fake_backend_ops = {.abi = PS_BACKEND_ABI,
                                                       .name = "fake",
                                                       .read = fake_read,
                                                       .write = fake_write,
                                                       .gradients = fake_gradients,
                                                       .allocate = fake_allocate,
                                                       .release = fake_release,
                                                       .copy_scaled = fake_copy_scaled};

#endif
