/* SPDX-License-Identifier: Apache-2.0
 * What a backend is: it executes a model's ops on one device. The trainer, the reducer, the checkpoints and
 * the tests know backends through this table only, and nothing here names one.
 *
 * A backend is a module (libparamsync-NAME.so in the module folder) that exports
 *     const struct ps_backend_ops *ps_backend_module(void);
 * "ref" is linked in. State is float32 on this interface whatever the precision inside: with bf16, the
 * float32 master weights are what is read and written. One thread at a time per backend, unless noted.
 */
#ifndef PARAMSYNC_BACKEND_BACKEND_H
#define PARAMSYNC_BACKEND_BACKEND_H

#include "services/base/error.h"
#include "trainer/model/model.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PS_BACKEND_ABI = 4 };

enum ps_precision { PS_FP32, PS_BF16, PS_FP64 /* ref only, for gradient checks */ };

/* Synchronised BatchNorm: the ranks normalise by the statistics of all their images together. Every rank
 * calls gather for the same layers in the same order: once for each BN op in a forward with PS_TRAIN, and
 * once in its backward, on the thread that called forward or backward. */
struct ps_bn_sync {
    int world_size;
    /* mine: `bytes` bytes; all: world_size * bytes, by rank. Both lie in host memory. */
    int (*gather)(void *context, const void *mine, size_t bytes, void *all, struct ps_error *err);
    void *context;
};

struct ps_backend_config {
    const struct ps_model *model; /* outlives the backend */
    enum ps_precision precision;
    int threads;        /* CPU threads; >= 1 */
    int device;         /* index on this node, for devices that have one */
    int max_batch;      /* samples of the largest training step */
    int max_eval_batch; /* samples of the largest evaluation batch */
    int max_resolution;
    bool deterministic;
    bool tf32; /* with PS_FP32: factors of products may be rounded to 10 bits, where the device is faster then
                */
    const struct ps_bn_sync *bn_sync; /* NULL: each rank's own statistics, as PyTorch's DDP has them; outlives
                                         the backend */
    bool training; /* false: no gradients or optimizer state are allocated, and backward is refused */
};

enum ps_pixel { PS_PIXEL_U8, PS_PIXEL_F32 };

struct ps_batch {
    enum ps_pixel pixel;
    const void *images;    /* host, [count, 3, resolution, resolution] */
    const int32_t *labels; /* host, [count]; 0..classes-1 */
    int count;             /* >= 1 */
    int resolution;
    float scale[3], shift[3]; /* per channel, applied to every pixel: x * scale + shift (normalisation) */
};

enum ps_mode {
    PS_EVAL,            /* BN uses running statistics, nothing is kept for backward */
    PS_TRAIN,           /* BN uses batch statistics and moves the running ones */
    PS_TRAIN_FROZEN_BN, /* BN uses running statistics, gradients flow (equivalence tests, fine-tuning) */
};

/* Softmax cross-entropy with label smoothing s: target = (1 - s) * onehot + s / classes. */
struct ps_loss_config {
    float label_smoothing;
    float grad_scale; /* d(logits) is grad_scale * (softmax - target) per sample: 1 / count gives the mean
                         loss's gradient */
};

/* Sums since the last read. The loss is the one whose gradient is taken, so with smoothing in the
 * configuration it is the cross-entropy with the smoothed target, as PyTorch's criterion reports it; evaluate
 * with smoothing 0. */
struct ps_metrics {
    double loss_sum;
    int64_t correct;
    int64_t count;
};

enum ps_state_kind {
    PS_STATE_PARAMS,   /* model->param_elements */
    PS_STATE_GRADS,    /* model->param_elements; valid after backward */
    PS_STATE_BUFFERS,  /* model->buffer_elements */
    PS_STATE_MOMENT_1, /* model->param_elements: Adam's m, SGD's momentum */
    PS_STATE_MOMENT_2, /* model->param_elements: Adam's v */
};

enum ps_optimizer_kind { PS_SGD, PS_ADAM };

/* PyTorch's torch.optim.SGD (dampening 0) and torch.optim.Adam (no amsgrad; decay is added to the gradient).
 */
struct ps_optimizer_step {
    enum ps_optimizer_kind kind;
    int64_t step; /* 1 for the first; SGD's momentum buffer is the gradient itself at step 1 */
    double lr, weight_decay;
    double momentum; /* SGD */
    bool nesterov;
    double beta1, beta2, eps; /* Adam */
};

/* Called during backward on the calling thread, when the gradient of params[param] is final in the flat
 * gradient vector (in stream order on devices that have streams). Each parameter exactly once. Must not block
 * for long. */
typedef void (*ps_grad_ready)(void *context, int param);

struct ps_backend; /* each backend's own */

/* Wall time that one part of a step took, summed since profiling was switched on or last read. */
struct ps_profile_row {
    char name[80];                /* "conv 64>128 3x3/2 at 32" */
    char detail[80];              /* the implementations chosen, where that is a choice */
    double forward_s, backward_s; /* backward: with the gradients of its parameters */
    int64_t calls;                /* forwards, or what it was called for */
};

struct ps_backend_ops {
    uint32_t abi; /* PS_BACKEND_ABI */
    const char *name;
    /* Whether it can run here: 0, or PS_UNAVAILABLE with what is missing. device_count and description may be
     * NULL. */
    int (*probe)(int *ret_device_count, char *ret_description, size_t size, struct ps_error *err);
    bool (*supports)(enum ps_precision precision);

    int (*create)(const struct ps_backend_config *config, struct ps_backend **ret, struct ps_error *err);
    void (*destroy)(struct ps_backend *backend); /* takes NULL */

    /* Host <-> device, float32, [offset, offset + count) of the flat vector. Waits for the device. */
    int (*read)(struct ps_backend *backend, enum ps_state_kind what, size_t offset, size_t count, float *host,
                struct ps_error *err);
    int (*write)(struct ps_backend *backend, enum ps_state_kind what, size_t offset, size_t count,
                 const float *host, struct ps_error *err);

    /* Runs the ops forward and adds to the metrics. The batch may be reused when it returns. A model whose
     * output is not [classes, 1, 1] (tests of single ops), or a batch without labels, has no loss: nothing is
     * added, and backward needs a cotangent of the output's shape. */
    int (*forward)(struct ps_backend *backend, const struct ps_batch *batch, enum ps_mode mode,
                   const struct ps_loss_config *loss, struct ps_error *err);
    /* Gradients of the last training forward. accumulate: add to the gradients there are (micro-steps), else
     * replace. cotangent: NULL for the loss's, else host [count, classes] instead of it. ready may be NULL.
     */
    int (*backward)(struct ps_backend *backend, bool accumulate, const float *cotangent, ps_grad_ready ready,
                    void *ready_context, struct ps_error *err);
    int (*update)(struct ps_backend *backend, const struct ps_optimizer_step *step, struct ps_error *err);
    /* Reads the sums and sets them to zero. Waits for the device. */
    int (*metrics)(struct ps_backend *backend, struct ps_metrics *ret, struct ps_error *err);

    /* For the reducer: the flat gradient vector (param_elements floats) in device memory, and device memory
     * for buckets. copy_scaled: dst[i] = src[i] * scale, in stream order, callable from ready. */
    float *(*gradients)(struct ps_backend *backend);
    void *(*allocate)(struct ps_backend *backend, size_t bytes);
    void (*release)(struct ps_backend *backend, void *memory);
    int (*copy_scaled)(struct ps_backend *backend, float *dst, const float *src, size_t count, float scale,
                       struct ps_error *err);

    /* For tests and --profile. The value of the last forward as float32 [count, c, h, w] on the host;
     * gradient: of the last backward (PS_FAILED_PRECONDITION where the backend has reused its memory; the
     * input's gradient is only computed by backends created with PARAMSYNC_INPUT_GRAD in the environment).
     * logits are always there. */
    int (*read_value)(struct ps_backend *backend, int value, bool gradient, float *host,
                      struct ps_error *err);
    /* Bytes allocated, by use; for --profile and the memory benchmark. */
    void (*memory)(struct ps_backend *backend, size_t *ret_activations, size_t *ret_params,
                   size_t *ret_workspace);
    /* NULL where the backend's memory is the host's. The stream (cudaStream_t) on which all work is queued,
     * in order: what a communicator for device memory orders its own work by. */
    void *(*stream)(struct ps_backend *backend);
    /* A training step as one unit, whose work the device repeats by itself once it is known; NULL where a
     * backend has no such thing. Between begin and end the loop makes the step as ever: one forward and
     * backward with this batch, the reducer's part, update with these numbers; it reads nothing. The work is
     * recorded the second time that a step of one shape is made, and repeated from then on: *ret_done, and
     * only end is left to be called. Parameters are as without, to the bit. key: whatever else of the step
     * must be the same for a repetition; at most 64 bytes. After a failure in between the backend is only
     * destroyed. batch NULL: forgets what was recorded, which comes before the end of a communicator that it
     * uses. */
    int (*step_begin)(struct ps_backend *backend, const struct ps_batch *batch,
                      const struct ps_optimizer_step *step, const void *key, size_t key_size, bool *ret_done,
                      struct ps_error *err);
    int (*step_end)(struct ps_backend *backend, struct ps_error *err);

    /* NULL where the backend has none. The first call starts the clock; each gives the sums since the one
     * before (in ret_rows, at most `capacity`) and sets them to zero. Returns the number of rows, 0 at the
     * first call. */
    int (*profile)(struct ps_backend *backend, struct ps_profile_row *ret_rows, int capacity);
};

/* Finds a backend by name: "ref", or a module beside the program (../lib/paramsync/, or
 * PARAMSYNC_MODULE_DIR). PS_UNAVAILABLE with the reason if it cannot be loaded here. The table is never
 * unloaded. Thread-safe. OMP_* variables must be set before the first call (OpenMP reads them when the module
 * is loaded). */
int ps_backend_load(const char *name, const struct ps_backend_ops **ret_ops, struct ps_error *err);

#endif
