/* SPDX-License-Identifier: Apache-2.0
 * The backend on NVIDIA GPUs: all of a step's work is queued on one stream, and the host waits only where it
 * reads something. Parameters, gradients and moments are flat float32 vectors; convolution weights lie in
 * them as [out, kh, kw, in], which is what NHWC convolutions take. With bf16 the layers read a rounded copy
 * of the weights, which the optimizer writes along. */
#include "trainer/backend/backend.h"
#include "trainer/backend/bn_exchange.h"
#include "trainer/backend/cuda/check.h"
#include "trainer/backend/cuda/conv.h"
#include "trainer/backend/cuda/kernels.h"
#include "trainer/backend/cuda/memory.h"
#include "trainer/backend/cuda/plan.h"
#include "trainer/optim/optim.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GRAPHS = 8, GIVEN = 64, RECORDED = 4, KEY = 64, STATE_PIECE = 1 << 20, ALIGN = 256 };
static const size_t gemm_workspace = 8u << 20, conv_workspace_most = 1u << 30;

/* A step of one shape: seen once, then recorded as a CUDA graph. */
struct recorded {
    struct ps_batch batch; /* without its pointers */
    enum ps_cuda_rule rule;
    unsigned char key[KEY];
    size_t key_size;
    bool seen;
    unsigned generation; /* of the addresses that it was made with */
    uint64_t used;
    cudaGraphExec_t exec;
};

struct ps_backend {
    const struct ps_model *model;
    struct ps_backend_config config;
    enum ps_cuda_type type; /* of activations */
    bool tf32, input_grad;
    cudaStream_t stream;
    cudnnHandle_t cudnn;
    cublasHandle_t cublas;
    struct ps_cuda_plan plan;
    struct ps_cuda_param *params_host, *params_device; /* [param_count] */
    struct ps_graph *graphs[GRAPHS];
    uint64_t clock;
    unsigned generation; /* of addresses and graphs */

    struct ps_memory state; /* the vectors below */
    float *params, *grads, *moment1, *moment2, *buffers;
    struct ps_memory copy; /* of weights as the layers read them */
    struct ps_memory activations, gradients, workspace, partials, gemm, weight_grad;
    struct ps_memory small; /* the places below */
    float *stats, *per_image, *loss_grad;
    void *loss_grad_half; /* bf16 */
    double *message, *shared;
    struct ps_cuda_metrics *metrics;
    struct ps_cuda_rates *rates;
    struct ps_memory input; /* images and labels as the host sent them */
    size_t labels_at;
    struct ps_upload batch_upload, rates_upload;
    struct ps_memory piece; /* of a state vector, in the host's order */
    void *given[GIVEN];     /* what allocate gave; freed at the end, see cuda_release */
    double *own;            /* with SyncBN: a message on the host */
    struct ps_bn_exchange exchange;

    struct recorded recorded[RECORDED], *step; /* step: between begin and end */
    bool recording;

    /* Of the last forward. */
    struct ps_graph *last;
    enum ps_mode mode;
    bool has_loss, went_back;
    bool copy_stale;
};

/* ---- places ---- */

static size_t size_of(enum ps_cuda_type type)
{
    return type == PS_CUDA_BF16 ? 2 : 4;
}

static void *place(const struct ps_memory *m, size_t at)
{
    return at == SIZE_MAX ? NULL : (char *)m->start + at;
}

static void *value(const struct ps_backend *b, const struct ps_graph *g, int v)
{
    return v == PS_NONE ? NULL : place(&b->activations, g->value_at[v]);
}

static const void *weight(const struct ps_backend *b, int id)
{
    const struct ps_cuda_param *p = &b->params_host[id];
    return p->copy_at == SIZE_MAX ? (const void *)(b->params + p->offset)
                                  : place(&b->copy, p->copy_at * size_of(b->type));
}

static float *param(const struct ps_backend *b, int id)
{
    return b->params + b->model->params[id].offset;
}

static float *grad(const struct ps_backend *b, int id)
{
    return b->grads + b->model->params[id].offset;
}

static float *buffer(const struct ps_backend *b, int id)
{
    return b->buffers + b->model->buffers[id].offset;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* Any thread may use a backend, one at a time: the device is the thread's. */
static int enter(const struct ps_backend *b, struct ps_error *err)
{
    return PS_CUDA(cudaSetDevice(b->config.device));
}

/* ---- creation ---- */

static int cuda_probe(int *ret_device_count, char *ret_description, size_t size, struct ps_error *err)
{
    int count = 0;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count < 1) {
        (void)cudaGetLastError();
        return ps_fail(err, PS_UNAVAILABLE, "there is no GPU that CUDA can use here: %s",
                       e == cudaSuccess ? "no device" : cudaGetErrorString(e));
    }
    struct cudaDeviceProp p;
    PS_TRY(PS_CUDA(cudaGetDeviceProperties(&p, 0)));
    if (p.major < 8)
        return ps_fail(err, PS_UNAVAILABLE,
                       "the GPU, %.80s, is of compute capability %d.%d, and 8.0 is needed", p.name, p.major,
                       p.minor);
    if (ret_device_count)
        *ret_device_count = count;
    if (ret_description)
        snprintf(ret_description, size, "%.60s%s, cuDNN %zu", p.name, count > 1 ? " and others" : "",
                 cudnnGetVersion());
    return 0;
}

static bool cuda_supports(enum ps_precision precision)
{
    return precision == PS_FP32 || precision == PS_BF16;
}

static void cuda_destroy(struct ps_backend *b)
{
    if (!b)
        return;
    if (cudaSetDevice(b->config.device) != cudaSuccess)
        (void)cudaGetLastError(); /* not to be found by somebody else's next launch */
    if (b->stream)
        cudaStreamSynchronize(b->stream);
    for (int i = 0; i < RECORDED; i++)
        if (b->recorded[i].exec)
            cudaGraphExecDestroy(b->recorded[i].exec);
    for (int i = 0; i < GRAPHS; i++)
        ps_graph_free(b->graphs[i], &b->plan);
    struct ps_memory *const all[] = {&b->state,     &b->copy,  &b->activations, &b->gradients,
                                     &b->workspace, &b->gemm,  &b->partials,    &b->weight_grad,
                                     &b->small,     &b->input, &b->piece};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ps_memory_free(all[i]);
    for (int i = 0; i < GIVEN; i++)
        if (b->given[i])
            cudaFree(b->given[i]);
    ps_upload_free(&b->batch_upload);
    ps_upload_free(&b->rates_upload);
    if (b->params_device)
        cudaFree(b->params_device);
    if (b->cudnn)
        cudnnDestroy(b->cudnn);
    if (b->cublas)
        cublasDestroy(b->cublas);
    if (b->stream)
        cudaStreamDestroy(b->stream);
    ps_cuda_plan_done(&b->plan);
    ps_bn_exchange_done(&b->exchange);
    free(b->own);
    free(b->params_host);
    free(b);
}

/* Where each parameter lies, and which of them the layers read from a copy: all weights with bf16, else those
 * of convolutions that are not where cuDNN wants them. Returns the copy's elements. */
static size_t place_params(struct ps_backend *b, size_t *ret_largest)
{
    const struct ps_model *m = b->model;
    size_t end = 0;
    *ret_largest = 0;
    for (int i = 0; i < m->param_count; i++)
        b->params_host[i] = (struct ps_cuda_param){.offset = m->params[i].offset,
                                                   .count = m->params[i].count,
                                                   .copy_at = SIZE_MAX,
                                                   .in = 1,
                                                   .padded = 1,
                                                   .window = 1,
                                                   .decay = m->params[i].decay ? 1 : 0};
    for (int i = 0; i < m->op_count; i++) {
        const struct ps_op *op = &m->ops[i];
        if (op->kind != PS_OP_CONV && op->kind != PS_OP_DENSE)
            continue;
        struct ps_cuda_param *p = &b->params_host[op->param[0]];
        if (op->kind == PS_OP_CONV) {
            p->in = m->values[op->in[0]].channels;
            p->padded = b->plan.channels[op->in[0]];
            p->window = op->kernel * op->kernel;
        }
        const bool copied =
            b->type == PS_CUDA_BF16 || (op->kind == PS_OP_CONV && (p->in != p->padded || p->offset % 4 != 0));
        if (!copied)
            continue;
        const size_t elements = p->count / (size_t)p->in * (size_t)p->padded;
        p->copy_at = end;
        end += (elements + ALIGN - 1) / ALIGN * ALIGN;
        *ret_largest = elements > *ret_largest ? elements : *ret_largest;
    }
    return end;
}

static int make_state(struct ps_backend *b, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    const size_t flat = aligned(m->param_elements * sizeof(float) + 1),
                 buffers = aligned(m->buffer_elements * sizeof(float) + 1),
                 vectors = b->config.training ? 4 : 1;
    size_t largest = 0, copied = place_params(b, &largest);
    PS_TRY(ps_memory_need(&b->state, vectors * flat + buffers, b->stream, NULL, err));
    PS_TRY(PS_CUDA(cudaMemsetAsync(b->state.start, 0, b->state.size, b->stream)));
    char *at = b->state.start;
    float **const places[] = {&b->params, &b->grads, &b->moment1, &b->moment2};
    for (size_t i = 0; i < vectors; i++, at += flat)
        *places[i] = (float *)at;
    b->buffers = (float *)at;
    if (copied) {
        PS_TRY(ps_memory_need(&b->copy, copied * size_of(b->type), b->stream, NULL, err));
        PS_TRY(PS_CUDA(cudaMemsetAsync(b->copy.start, 0, b->copy.size, b->stream)));
        if (b->config.training)
            PS_TRY(ps_memory_need(&b->weight_grad, largest * size_of(b->type), b->stream, NULL, err));
    }
    if (m->param_count) {
        const size_t bytes = (size_t)m->param_count * sizeof *b->params_device;
        PS_TRY(PS_CUDA(cudaMalloc((void **)&b->params_device, bytes)));
        PS_TRY(PS_CUDA(
            cudaMemcpyAsync(b->params_device, b->params_host, bytes, cudaMemcpyHostToDevice, b->stream)));
    }
    const size_t piece = m->param_elements < STATE_PIECE ? m->param_elements : STATE_PIECE;
    return ps_memory_need(&b->piece, piece * sizeof(float), b->stream, NULL, err);
}

static int make_small(struct ps_backend *b, int images, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    const size_t logits = (size_t)images * (size_t)m->values[m->output].channels,
                 message = ps_norm_message((unsigned)b->plan.widest) * sizeof(double);
    struct {
        void **to;
        size_t bytes;
    } const parts[] = {
        {(void **)&b->stats, b->plan.stats * sizeof(float) + 1},
        {(void **)&b->per_image, 2 * (size_t)images * sizeof(float)},
        {(void **)&b->loss_grad, logits * sizeof(float)},
        {&b->loss_grad_half, logits * 2},
        {(void **)&b->message, message},
        {(void **)&b->shared, message},
        {(void **)&b->metrics, sizeof *b->metrics},
        {(void **)&b->rates, sizeof *b->rates},
    };
    size_t total = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        total += aligned(parts[i].bytes);
    PS_TRY(ps_memory_need(&b->small, total, b->stream, NULL, err));
    PS_TRY(PS_CUDA(cudaMemsetAsync(b->small.start, 0, total, b->stream)));
    char *at = b->small.start;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].to = at;
        at += aligned(parts[i].bytes);
    }
    return 0;
}

static int make_input(struct ps_backend *b, int images, struct ps_error *err)
{
    const size_t side = (size_t)b->config.max_resolution,
                 channels = (size_t)b->model->values[b->model->input].channels;
    b->labels_at = aligned((size_t)images * channels * side * side * sizeof(float));
    const size_t bytes = b->labels_at + (size_t)images * sizeof(int32_t);
    PS_TRY(ps_memory_need(&b->input, bytes, b->stream, NULL, err));
    PS_TRY(ps_upload_make(&b->batch_upload, bytes, err));
    return ps_upload_make(&b->rates_upload, sizeof(struct ps_cuda_rates), err);
}

static struct ps_conv_context conv_context(const struct ps_backend *b)
{
    return (struct ps_conv_context){.cudnn = b->cudnn,
                                    .type = b->type,
                                    .tf32 = b->tf32,
                                    .deterministic = b->config.deterministic,
                                    .workspace_most = conv_workspace_most};
}

static int need_memory(struct ps_backend *b, const struct ps_graph *g, struct ps_error *err)
{
    PS_TRY(ps_memory_need(&b->activations, g->activations, b->stream, &b->generation, err));
    PS_TRY(ps_memory_need(&b->gradients, g->gradients, b->stream, &b->generation, err));
    PS_TRY(ps_memory_need(&b->workspace, g->workspace, b->stream, &b->generation, err));
    return ps_memory_need(&b->partials, g->partials * sizeof(float), b->stream, &b->generation, err);
}

/* What the largest batches need, before the first of them. */
static int make_largest(struct ps_backend *b, struct ps_error *err)
{
    for (int training = 0; training < 2; training++) {
        struct ps_graph *g = NULL;
        const int count = training ? b->config.max_batch : b->config.max_eval_batch;
        if (count < 1 || (training && !b->config.training))
            continue;
        int code =
            ps_graph_make(&g, &b->plan, NULL, count, b->config.max_resolution, training, b->input_grad, err);
        if (!code)
            code = need_memory(b, g, err);
        ps_graph_free(g, &b->plan);
        if (code)
            return code;
    }
    return 0;
}

static int build(struct ps_backend *b, struct ps_error *err)
{
    const struct ps_backend_config *c = &b->config;
    int devices = 0;
    PS_TRY(PS_CUDA(cudaGetDeviceCount(&devices)));
    if (c->device < 0 || c->device >= devices)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "process %d of this machine needs a GPU of its own, and there %s %d: start at most %d "
                       "here",
                       c->device, devices == 1 ? "is" : "are", devices, devices);
    PS_TRY(enter(b, err));
    PS_TRY(PS_CUDA(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking)));
    PS_TRY(PS_CUDNN(cudnnCreate(&b->cudnn)));
    PS_TRY(PS_CUDNN(cudnnSetStream(b->cudnn, b->stream)));
    PS_TRY(PS_CUBLAS(cublasCreate(&b->cublas)));
    PS_TRY(PS_CUBLAS(cublasSetStream(b->cublas, b->stream)));
    PS_TRY(ps_memory_need(&b->gemm, gemm_workspace, b->stream, NULL, err));
    PS_TRY(PS_CUBLAS(cublasSetWorkspace(b->cublas, b->gemm.start, b->gemm.size)));
    /* Tensor cores want multiples of 8 (bf16) and 4 (TF32) channels: the images' three are filled up. */
    PS_TRY(ps_cuda_plan_make(&b->plan, b->model, b->type,
                             b->type == PS_CUDA_BF16 ? 8
                             : b->tf32               ? 4
                                                     : 1,
                             err));
    b->params_host = calloc((size_t)b->model->param_count + 1, sizeof *b->params_host);
    b->own = calloc(ps_norm_message((unsigned)b->plan.widest), sizeof *b->own);
    if (!b->params_host || !b->own || ps_bn_exchange_init(&b->exchange, c->bn_sync, b->plan.widest) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    const int images = c->max_batch > c->max_eval_batch ? c->max_batch : c->max_eval_batch;
    PS_TRY(make_state(b, err));
    PS_TRY(make_small(b, images, err));
    PS_TRY(make_input(b, images, err));
    PS_TRY(make_largest(b, err));
    return PS_CUDA(cudaStreamSynchronize(b->stream));
}

static int cuda_create(const struct ps_backend_config *config, struct ps_backend **ret, struct ps_error *err)
{
    if (!cuda_supports(config->precision))
        return ps_fail(err, PS_UNIMPLEMENTED, "backend cuda has no fp64: use fp32 or bf16");
    if (config->max_batch < 1 && config->max_eval_batch < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: the largest batch must be at least 1");
    struct ps_backend *b = calloc(1, sizeof *b);
    if (!b)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    b->model = config->model;
    b->config = *config;
    b->type = config->precision == PS_BF16 ? PS_CUDA_BF16 : PS_CUDA_F32;
    b->tf32 = config->tf32 && b->type == PS_CUDA_F32;
    b->input_grad = getenv("PARAMSYNC_INPUT_GRAD") != NULL;
    int code = build(b, err);
    if (code) {
        cuda_destroy(b);
        return code;
    }
    *ret = b;
    return 0;
}

/* ---- state ---- */

static int find_state(const struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count,
                      float **ret, struct ps_error *err)
{
    const size_t length = what == PS_STATE_BUFFERS ? b->model->buffer_elements : b->model->param_elements;
    float *const all[] = {[PS_STATE_PARAMS] = b->params,
                          [PS_STATE_GRADS] = b->grads,
                          [PS_STATE_BUFFERS] = b->buffers,
                          [PS_STATE_MOMENT_1] = b->moment1,
                          [PS_STATE_MOMENT_2] = b->moment2};
    if ((unsigned)what >= sizeof all / sizeof *all || offset > length || count > length - offset)
        return ps_fail(err, PS_OUT_OF_RANGE, "backend: elements %zu to %zu of a state of %zu", offset,
                       offset + count, length);
    if (!all[what])
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "backend: created without training, it has no such state");
    *ret = all[what];
    return 0;
}

static int cuda_read(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count, float *host,
                     struct ps_error *err)
{
    float *state = NULL, *piece = b->piece.start;
    PS_TRY(enter(b, err));
    PS_TRY(find_state(b, what, offset, count, &state, err));
    for (size_t at = 0; at < count; at += STATE_PIECE) {
        const size_t n = count - at < STATE_PIECE ? count - at : STATE_PIECE;
        const float *from = state + offset + at;
        if (what != PS_STATE_BUFFERS) {
            PS_TRY(PS_CUDA(ps_state_gather(b->stream, b->params_device, b->model->param_count, state,
                                           offset + at, n, piece)));
            from = piece;
        }
        PS_TRY(
            PS_CUDA(cudaMemcpyAsync(host + at, from, n * sizeof *host, cudaMemcpyDeviceToHost, b->stream)));
    }
    return PS_CUDA(cudaStreamSynchronize(b->stream));
}

static int cuda_write(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count,
                      const float *host, struct ps_error *err)
{
    float *state = NULL, *piece = b->piece.start;
    PS_TRY(enter(b, err));
    PS_TRY(find_state(b, what, offset, count, &state, err));
    for (size_t at = 0; at < count; at += STATE_PIECE) {
        const size_t n = count - at < STATE_PIECE ? count - at : STATE_PIECE;
        float *to = what == PS_STATE_BUFFERS ? state + offset + at : piece;
        PS_TRY(PS_CUDA(cudaMemcpyAsync(to, host + at, n * sizeof *host, cudaMemcpyHostToDevice, b->stream)));
        if (what != PS_STATE_BUFFERS)
            PS_TRY(PS_CUDA(ps_state_scatter(b->stream, b->params_device, b->model->param_count, state,
                                            offset + at, n, piece)));
    }
    b->copy_stale = b->copy_stale || what == PS_STATE_PARAMS;
    return PS_CUDA(cudaStreamSynchronize(b->stream));
}

/* ---- forward ---- */

/* The graph of this shape; the one unused the longest gives way. */
static int find_graph(struct ps_backend *b, int count, int resolution, bool training, struct ps_graph **ret,
                      struct ps_error *err)
{
    int oldest = 0;
    for (int i = 0; i < GRAPHS; i++) {
        struct ps_graph *g = b->graphs[i];
        if (g && g->count == count && g->resolution == resolution && g->training == training) {
            g->used = ++b->clock;
            *ret = g;
            return 0;
        }
        if (!g || (b->graphs[oldest] && g->used < b->graphs[oldest]->used))
            oldest = i;
    }
    struct ps_graph *made = NULL;
    const struct ps_conv_context context = conv_context(b);
    PS_TRY(ps_graph_make(&made, &b->plan, &context, count, resolution, training, b->input_grad, err));
    int code = need_memory(b, made, err);
    if (code) {
        ps_graph_free(made, &b->plan);
        return code;
    }
    ps_graph_free(b->graphs[oldest], &b->plan);
    b->graphs[oldest] = made;
    b->generation++;
    made->used = ++b->clock;
    *ret = made;
    return 0;
}

static struct ps_norm_shape norm_shape(const struct ps_backend *b, const struct ps_graph *g,
                                       const struct ps_step *s)
{
    return (struct ps_norm_shape){b->type, ps_graph_rows(g, s->out), (unsigned)b->plan.channels[s->out]};
}

/* This rank's message becomes that of all ranks, by way of the host. The pair of copies waits for the device:
 * SyncBN is the one thing that does so inside a step. */
static int share(struct ps_backend *b, unsigned c, enum ps_bn_merge merge, double *to, struct ps_error *err)
{
    const size_t bytes = ps_norm_message(c) * sizeof(double);
    const double *all = NULL;
    PS_TRY(PS_CUDA(cudaMemcpyAsync(b->own, b->message, bytes, cudaMemcpyDeviceToHost, b->stream)));
    PS_TRY(PS_CUDA(cudaStreamSynchronize(b->stream)));
    PS_TRY(ps_bn_share(&b->exchange, b->own, (int)c, merge, &all, err));
    return PS_CUDA(cudaMemcpyAsync(to, all, bytes, cudaMemcpyHostToDevice, b->stream));
}

static int norm_forward(struct ps_backend *b, const struct ps_graph *g, const struct ps_step *s,
                        struct ps_error *err)
{
    const struct ps_op *op = &b->model->ops[s->op];
    const struct ps_norm_shape shape = norm_shape(b, g, s);
    const double *message = NULL;
    float *stats = b->stats + s->stats_at;
    const void *x = value(b, g, s->in[0]);
    if (b->mode == PS_TRAIN) {
        PS_TRY(PS_CUDA(ps_norm_moments(b->stream, &shape, x, b->partials.start, b->message)));
        if (b->exchange.sync)
            PS_TRY(share(b, shape.c, PS_BN_MOMENTS, b->message, err));
        message = b->message;
    }
    PS_TRY(PS_CUDA(ps_norm_finish(b->stream, shape.c, message, op->eps, op->momentum, param(b, op->param[0]),
                                  param(b, op->param[1]), buffer(b, op->buffer[0]), buffer(b, op->buffer[1]),
                                  stats)));
    return PS_CUDA(
        ps_norm_apply(b->stream, &shape, stats, x, value(b, g, s->in[1]), s->relu, value(b, g, s->out)));
}

static cublasComputeType_t compute_type(const struct ps_backend *b)
{
    return b->type == PS_CUDA_F32 && b->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

static cudaDataType data_type(enum ps_cuda_type type)
{
    return type == PS_CUDA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static const float one = 1, zero = 0;

/* Row-major matrices are cuBLAS's transposed ones: y [n, o] = x [n, c] w [o, c]^T + bias. */
static int dense_forward(struct ps_backend *b, const struct ps_graph *g, const struct ps_step *s,
                         struct ps_error *err)
{
    const struct ps_op *op = &b->model->ops[s->op];
    const int n = g->count, c = b->plan.channels[s->in[0]], o = b->plan.channels[s->out];
    const cudaDataType type = data_type(b->type);
    float *y = value(b, g, s->out);
    PS_TRY(PS_CUDA(ps_fill_rows(b->stream, n, o, param(b, op->param[1]), y)));
    return PS_CUBLAS(cublasGemmEx(b->cublas, CUBLAS_OP_T, CUBLAS_OP_N, o, n, c, &one, weight(b, op->param[0]),
                                  type, c, value(b, g, s->in[0]), type, c, &one, y, CUDA_R_32F, o,
                                  compute_type(b), CUBLAS_GEMM_DEFAULT));
}

static struct ps_pool pool_shape(const struct ps_backend *b, const struct ps_graph *g,
                                 const struct ps_step *s)
{
    const struct ps_op *op = &b->model->ops[s->op];
    return (struct ps_pool){.type = b->type,
                            .n = g->count,
                            .c = b->plan.channels[s->out],
                            .in = g->extents[s->in[0]],
                            .out = g->extents[s->out],
                            .kernel = op->kernel,
                            .stride = op->stride,
                            .pad = op->pad};
}

static int forward_step(struct ps_backend *b, const struct ps_graph *g, int i, struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const void *x = value(b, g, s->in[0]);
    void *y = value(b, g, s->out);
    const size_t elements = ps_graph_elements(g, &b->plan, s->out);
    const enum ps_cuda_type type = b->plan.type[s->out];
    const struct ps_pool pool = pool_shape(b, g, s);
    switch (s->kind) {
    case PS_STEP_CONV:
        return ps_conv_forward(g->steps[i].conv, b->cudnn, x, weight(b, op->param[0]), y, b->workspace.start,
                               b->workspace.size, err);
    case PS_STEP_NORM:
        return norm_forward(b, g, s, err);
    case PS_STEP_RELU:
        return PS_CUDA(ps_relu(b->stream, type, elements, x, y));
    case PS_STEP_ADD:
        return PS_CUDA(ps_sum(b->stream, type, elements, x, value(b, g, s->in[1]), y));
    case PS_STEP_MAX_POOL:
        return PS_CUDA(ps_max_pool(b->stream, &pool, x, y));
    case PS_STEP_AVG_POOL:
        return PS_CUDA(ps_avg_pool(b->stream, &pool, x, y));
    case PS_STEP_DENSE:
        return dense_forward(b, g, s, err);
    }
    return ps_fail(err, PS_INTERNAL, "backend cuda: step of unknown kind");
}

static int check_batch(const struct ps_backend *b, const struct ps_batch *batch, bool training,
                       struct ps_error *err)
{
    const int most = training ? b->config.max_batch : b->config.max_eval_batch;
    if (training && !b->config.training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: created without training");
    if (batch->count < 1 || batch->count > most)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: a batch of %d images; 1 to %d were planned for",
                       batch->count, most);
    if (batch->resolution > b->config.max_resolution)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: images of %d pixels; at most %d were planned for",
                       batch->resolution, b->config.max_resolution);
    return 0;
}

static int check_labels(const struct ps_batch *batch, int classes, struct ps_error *err)
{
    for (int i = 0; i < batch->count; i++)
        if (batch->labels[i] < 0 || batch->labels[i] >= classes)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "backend: label %d of image %d is out of range (0 to %d)", batch->labels[i], i,
                           classes - 1);
    return 0;
}

static int send_batch(struct ps_backend *b, const struct ps_batch *batch, struct ps_error *err)
{
    const size_t one_image = (size_t)b->model->values[b->model->input].channels * (size_t)batch->resolution *
                             (size_t)batch->resolution,
                 bytes = (size_t)batch->count * one_image * (batch->pixel == PS_PIXEL_U8 ? 1 : sizeof(float));
    /* Labels behind the images, so that both go in one copy. */
    const size_t labels = (bytes + sizeof(int32_t) - 1) / sizeof(int32_t) * sizeof(int32_t);
    void *host = NULL;
    PS_TRY(ps_upload_begin(&b->batch_upload, &host, err));
    memcpy(host, batch->images, bytes);
    if (batch->labels)
        memcpy((char *)host + labels, batch->labels, (size_t)batch->count * sizeof(int32_t));
    b->labels_at = labels;
    return ps_upload_end(&b->batch_upload, b->input.start,
                         labels + (batch->labels ? (size_t)batch->count * sizeof(int32_t) : 0), b->stream,
                         err);
}

static int images_in(struct ps_backend *b, const struct ps_graph *g, const struct ps_batch *batch,
                     struct ps_error *err)
{
    const int input = b->model->input;
    struct ps_images images = {.pixels = b->input.start,
                               .floats = batch->pixel == PS_PIXEL_F32,
                               .n = g->count,
                               .c = b->model->values[input].channels,
                               .padded = b->plan.channels[input],
                               .side = g->resolution};
    memcpy(images.scale, batch->scale, sizeof images.scale);
    memcpy(images.shift, batch->shift, sizeof images.shift);
    return PS_CUDA(ps_images_in(b->stream, &images, b->type, value(b, g, input)));
}

/* The layers' copy of the weights, after something else than the optimizer has written them. */
static int refresh_copy(struct ps_backend *b, struct ps_error *err)
{
    if (!b->copy_stale || !b->copy.start)
        return 0;
    b->copy_stale = false;
    return PS_CUDA(ps_copy_params(b->stream, b->params_device, b->model->param_count,
                                  b->model->param_elements, b->params, b->type, b->copy.start));
}

static int compute_loss(struct ps_backend *b, const struct ps_graph *g, const struct ps_loss_config *config,
                        struct ps_error *err)
{
    const int output = b->model->output;
    const struct ps_loss loss = {.type = b->plan.type[output],
                                 .n = g->count,
                                 .classes = b->model->values[output].channels,
                                 .smoothing = config->label_smoothing,
                                 .grad_scale = config->grad_scale};
    return PS_CUDA(ps_cross_entropy(b->stream, &loss, value(b, g, output),
                                    (const int32_t *)place(&b->input, b->labels_at),
                                    g->training ? b->loss_grad : NULL, b->per_image, b->metrics));
}

static int cuda_forward(struct ps_backend *b, const struct ps_batch *batch, enum ps_mode mode,
                        const struct ps_loss_config *loss, struct ps_error *err)
{
    const bool training = mode != PS_EVAL;
    struct ps_graph *g = NULL;
    PS_TRY(enter(b, err));
    PS_TRY(check_batch(b, batch, training, err));
    b->last = NULL;
    b->went_back = false;
    PS_TRY(find_graph(b, batch->count, batch->resolution, training, &g, err));
    b->has_loss = g->extents[b->model->output] == 1 && batch->labels;
    if (b->has_loss)
        PS_TRY(check_labels(batch, b->model->values[b->model->output].channels, err));
    b->mode = mode;
    if (!b->step) { /* else begin has done both */
        PS_TRY(send_batch(b, batch, err));
        PS_TRY(refresh_copy(b, err));
    }
    PS_TRY(images_in(b, g, batch, err));
    for (int i = 0; i < b->plan.step_count; i++)
        PS_TRY(forward_step(b, g, i, err));
    if (b->has_loss)
        PS_TRY(compute_loss(b, g, loss, err));
    b->last = g;
    return 0;
}

/* ---- backward ---- */

struct arrivals {
    ps_grad_ready ready;
    void *context;
    bool accumulate;
};

static void arrived(const struct arrivals *a, int id)
{
    if (a->ready)
        a->ready(a->context, id);
}

static int conv_backward(struct ps_backend *b, const struct ps_graph *g, int i, const struct arrivals *a,
                         struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_graph_step *t = &g->steps[i];
    const int id = b->model->ops[s->op].param[0];
    const struct ps_cuda_param *p = &b->params_host[id];
    const void *x = value(b, g, s->in[0]), *dy = place(&b->gradients, t->grad);
    void *work = b->workspace.start;
    if (p->copy_at == SIZE_MAX) {
        PS_TRY(ps_conv_filter(t->conv, b->cudnn, x, dy, grad(b, id), a->accumulate, work, b->workspace.size,
                              err));
    } else {
        struct ps_cuda_param here = *p;
        here.copy_at = 0;
        PS_TRY(ps_conv_filter(t->conv, b->cudnn, x, dy, b->weight_grad.start, false, work, b->workspace.size,
                              err));
        PS_TRY(PS_CUDA(
            ps_take_gradient(b->stream, &here, b->type, b->weight_grad.start, b->grads, a->accumulate)));
    }
    arrived(a, id); /* before the gradient of the input: the reducer can start */
    if (t->to[0] == SIZE_MAX)
        return 0;
    return ps_conv_data(t->conv, b->cudnn, weight(b, id), dy, place(&b->gradients, t->to[0]), t->add[0], work,
                        b->workspace.size, err);
}

static int norm_backward(struct ps_backend *b, const struct ps_graph *g, int i, const struct arrivals *a,
                         struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_graph_step *t = &g->steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const struct ps_norm_shape shape = norm_shape(b, g, s);
    const float *stats = b->stats + s->stats_at;
    const void *x = value(b, g, s->in[0]), *y = s->in[1] == PS_NONE ? NULL : value(b, g, s->out),
               *dy = place(&b->gradients, t->grad);
    const double *shared = b->mode == PS_TRAIN ? b->message : NULL;
    PS_TRY(PS_CUDA(ps_norm_sums(b->stream, &shape, stats, x, y, dy, s->relu, b->partials.start, b->message)));
    PS_TRY(PS_CUDA(ps_norm_params(b->stream, shape.c, b->message, a->accumulate, grad(b, op->param[0]),
                                  grad(b, op->param[1]))));
    arrived(a, op->param[0]);
    arrived(a, op->param[1]);
    if (shared && b->exchange.sync) {
        PS_TRY(share(b, shape.c, PS_BN_SUMS, b->shared, err));
        shared = b->shared;
    }
    return PS_CUDA(ps_norm_back(b->stream, &shape, stats, shared, x, y, dy, s->relu,
                                place(&b->gradients, t->to[0]), t->add[0], place(&b->gradients, t->to[1]),
                                t->add[1]));
}

static int dense_backward(struct ps_backend *b, const struct ps_graph *g, int i, const struct arrivals *a,
                          struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_graph_step *t = &g->steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const int n = g->count, c = b->plan.channels[s->in[0]], o = b->plan.channels[s->out];
    const cudaDataType type = data_type(b->type);
    const float *dy = place(&b->gradients, t->grad);
    const void *factor = dy;
    PS_TRY(PS_CUDA(ps_sum_rows(b->stream, n, o, dy, grad(b, op->param[1]), a->accumulate)));
    arrived(a, op->param[1]);
    if (b->type == PS_CUDA_BF16) {
        PS_TRY(PS_CUDA(ps_to_bf16(b->stream, (size_t)n * (size_t)o, dy, b->loss_grad_half)));
        factor = b->loss_grad_half;
    }
    /* dw [o, c] = dy [n, o]^T x [n, c] */
    PS_TRY(
        PS_CUBLAS(cublasGemmEx(b->cublas, CUBLAS_OP_N, CUBLAS_OP_T, c, o, n, &one, value(b, g, s->in[0]),
                               type, c, factor, type, o, a->accumulate ? &one : &zero, grad(b, op->param[0]),
                               CUDA_R_32F, c, compute_type(b), CUBLAS_GEMM_DEFAULT)));
    arrived(a, op->param[0]);
    if (t->to[0] == SIZE_MAX)
        return 0;
    /* dx [n, c] = dy [n, o] w [o, c] */
    return PS_CUBLAS(cublasGemmEx(b->cublas, CUBLAS_OP_N, CUBLAS_OP_N, c, n, o, &one, weight(b, op->param[0]),
                                  type, c, factor, type, o, t->add[0] ? &one : &zero,
                                  place(&b->gradients, t->to[0]), type, c, compute_type(b),
                                  CUBLAS_GEMM_DEFAULT));
}

static int backward_step(struct ps_backend *b, const struct ps_graph *g, int i, const struct arrivals *a,
                         struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_graph_step *t = &g->steps[i];
    const void *dy = place(&b->gradients, t->grad);
    void *dx = place(&b->gradients, t->to[0]), *dz = place(&b->gradients, t->to[1]);
    const size_t elements = ps_graph_elements(g, &b->plan, s->out);
    const enum ps_cuda_type type = b->plan.type[s->out];
    const struct ps_pool pool = pool_shape(b, g, s);
    switch (s->kind) {
    case PS_STEP_CONV:
        return conv_backward(b, g, i, a, err);
    case PS_STEP_NORM:
        return norm_backward(b, g, i, a, err);
    case PS_STEP_DENSE:
        return dense_backward(b, g, i, a, err);
    case PS_STEP_ADD:
        if (dx)
            PS_TRY(PS_CUDA(ps_copy(b->stream, type, elements, dy, dx, t->add[0])));
        return dz ? PS_CUDA(ps_copy(b->stream, type, elements, dy, dz, t->add[1])) : 0;
    case PS_STEP_RELU:
        return dx ? PS_CUDA(ps_relu_back(b->stream, type, elements, value(b, g, s->out), dy, dx, t->add[0]))
                  : 0;
    case PS_STEP_MAX_POOL:
        return dx ? PS_CUDA(ps_max_pool_back(b->stream, &pool, value(b, g, s->in[0]), dy, dx, t->add[0])) : 0;
    case PS_STEP_AVG_POOL:
        return dx ? PS_CUDA(ps_avg_pool_back(b->stream, &pool, dy, dx, t->add[0])) : 0;
    }
    return ps_fail(err, PS_INTERNAL, "backend cuda: step of unknown kind");
}

static float from_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float v;
    memcpy(&v, &wide, sizeof v);
    return v;
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
static uint16_t to_bf16(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    if (isnan(v))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct host_shape {
    int n, c, padded, area;
    enum ps_cuda_type type;
};

static struct host_shape host_shape(const struct ps_backend *b, const struct ps_graph *g, int v)
{
    return (struct host_shape){g->count, b->model->values[v].channels, b->plan.channels[v],
                               g->extents[v] * g->extents[v], b->plan.type[v]};
}

/* Element [n, c, p] of NCHW in the device's NHWC. */
static size_t nhwc(const struct host_shape *s, size_t i)
{
    const size_t area = (size_t)s->area, p = i % area, c = i / area % (size_t)s->c,
                 n = i / area / (size_t)s->c;
    return (n * area + p) * (size_t)s->padded + c;
}

static int send_cotangent(struct ps_backend *b, const struct ps_graph *g, const float *cotangent, void *to,
                          struct ps_error *err)
{
    const struct host_shape s = host_shape(b, g, b->model->output);
    const size_t n = (size_t)s.n * (size_t)s.c * (size_t)s.area, size = size_of(s.type);
    char *host = malloc(n * size);
    if (!host)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const size_t at = nhwc(&s, i);
        if (s.type == PS_CUDA_BF16)
            ((uint16_t *)host)[at] = to_bf16(cotangent[i]);
        else
            ((float *)host)[at] = cotangent[i];
    }
    int code = PS_CUDA(cudaMemcpyAsync(to, host, n * size, cudaMemcpyHostToDevice, b->stream));
    if (!code)
        code = PS_CUDA(cudaStreamSynchronize(b->stream));
    free(host);
    return code;
}

static int seed_gradient(struct ps_backend *b, const struct ps_graph *g, const float *cotangent,
                         struct ps_error *err)
{
    const int output = b->model->output;
    const size_t n = ps_graph_elements(g, &b->plan, output);
    void *seed = place(&b->gradients, g->steps[b->plan.step_count - 1].grad);
    if (cotangent)
        return send_cotangent(b, g, cotangent, seed, err);
    if (b->plan.type[output] == PS_CUDA_BF16)
        return PS_CUDA(ps_to_bf16(b->stream, n, b->loss_grad, seed));
    return PS_CUDA(ps_copy(b->stream, PS_CUDA_F32, n, b->loss_grad, seed, false));
}

static int cuda_backward(struct ps_backend *b, bool accumulate, const float *cotangent, ps_grad_ready ready,
                         void *ready_context, struct ps_error *err)
{
    const struct ps_graph *g = b->last;
    const struct arrivals a = {ready, ready_context, accumulate};
    if (!g || !g->training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: backward follows a forward in a training mode");
    if (!cotangent && !b->has_loss)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: no loss was computed, a cotangent is needed");
    PS_TRY(enter(b, err));
    PS_TRY(seed_gradient(b, g, cotangent, err));
    for (int i = b->plan.step_count; i-- > 0;)
        PS_TRY(backward_step(b, g, i, &a, err));
    b->went_back = true;
    return 0;
}

/* ---- update, metrics, the rest ---- */

static struct ps_cuda_rates rates_of(const struct ps_optimizer_step *s)
{
    return (struct ps_cuda_rates){.lr = (float)s->lr,
                                  .decay = (float)s->weight_decay,
                                  .momentum = (float)s->momentum,
                                  .rate = (float)(s->lr / (1 - pow(s->beta1, (double)s->step))),
                                  .root = (float)sqrt(1 - pow(s->beta2, (double)s->step)),
                                  .beta1 = (float)s->beta1,
                                  .beta2 = (float)s->beta2,
                                  .eps = (float)s->eps,
                                  .rest1 = (float)(1 - s->beta1),
                                  .rest2 = (float)(1 - s->beta2),
                                  .first = s->step == 1};
}

static enum ps_cuda_rule rule_of(const struct ps_optimizer_step *s)
{
    return s->kind == PS_ADAM ? PS_RULE_ADAM
           : s->momentum == 0 ? PS_RULE_SGD
           : s->nesterov      ? PS_RULE_NESTEROV
                              : PS_RULE_MOMENTUM;
}

static int send_rates(struct ps_backend *b, const struct ps_optimizer_step *step, struct ps_error *err)
{
    void *host = NULL;
    PS_TRY(ps_upload_begin(&b->rates_upload, &host, err));
    *(struct ps_cuda_rates *)host = rates_of(step);
    return ps_upload_end(&b->rates_upload, b->rates, sizeof *b->rates, b->stream, err);
}

static int cuda_update(struct ps_backend *b, const struct ps_optimizer_step *step, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    if (!b->config.training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: created without training");
    PS_TRY(ps_optim_check(step, err));
    PS_TRY(enter(b, err));
    if (!m->param_elements)
        return 0;
    if (!b->step) {
        PS_TRY(send_rates(b, step, err));
        PS_TRY(refresh_copy(b, err)); /* what the optimizer does not write stays right, too */
    }
    return PS_CUDA(ps_optimize(b->stream, rule_of(step), b->rates, b->params_device, m->param_count,
                               m->param_elements, b->params, b->grads, b->moment1, b->moment2, b->type,
                               b->copy.start));
}

/* ---- steps as CUDA graphs ---- */

static void forget(struct recorded *r)
{
    if (r->exec)
        cudaGraphExecDestroy(r->exec);
    *r = (struct recorded){0};
}

static bool same_step(const struct recorded *r, const struct recorded *asked)
{
    const struct ps_batch *x = &r->batch, *y = &asked->batch;
    bool same = r->seen && x->pixel == y->pixel && x->count == y->count && x->resolution == y->resolution &&
                r->rule == asked->rule && r->key_size == asked->key_size &&
                memcmp(r->key, asked->key, r->key_size) == 0;
    for (int k = 0; k < 3; k++)
        same = same && x->scale[k] == y->scale[k] && x->shift[k] == y->shift[k];
    return same;
}

/* The step's place, a new one where there is none. */
static struct recorded *find_recorded(struct ps_backend *b, const struct recorded *asked)
{
    struct recorded *oldest = &b->recorded[0];
    for (int i = 0; i < RECORDED; i++) {
        struct recorded *r = &b->recorded[i];
        if (same_step(r, asked))
            return r;
        oldest = r->used < oldest->used ? r : oldest;
    }
    forget(oldest);
    *oldest = *asked;
    return oldest;
}

static int cuda_step_begin(struct ps_backend *b, const struct ps_batch *batch,
                           const struct ps_optimizer_step *step, const void *key, size_t key_size,
                           bool *ret_done, struct ps_error *err)
{
    struct recorded asked;
    PS_TRY(enter(b, err));
    if (!batch) {
        PS_TRY(PS_CUDA(cudaStreamSynchronize(b->stream)));
        for (int i = 0; i < RECORDED; i++)
            forget(&b->recorded[i]);
        return 0;
    }
    if (key_size > KEY)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: a step's key of %zu bytes", key_size);
    PS_TRY(check_batch(b, batch, true, err));
    PS_TRY(check_labels(batch, b->model->values[b->model->output].channels, err));
    PS_TRY(ps_optim_check(step, err));
    memset(&asked, 0, sizeof asked);
    asked.batch.pixel = batch->pixel;
    asked.batch.count = batch->count;
    asked.batch.resolution = batch->resolution;
    memcpy(asked.batch.scale, batch->scale, sizeof asked.batch.scale);
    memcpy(asked.batch.shift, batch->shift, sizeof asked.batch.shift);
    asked.rule = rule_of(step);
    asked.key_size = key_size;
    memcpy(asked.key, key, key_size);
    struct recorded *r = find_recorded(b, &asked);
    r->used = ++b->clock;
    PS_TRY(send_batch(b, batch, err));
    PS_TRY(send_rates(b, step, err));
    PS_TRY(refresh_copy(b, err));
    *ret_done = false;
    b->step = r;
    if (!r->seen || r->generation != b->generation) {
        if (r->exec)
            PS_TRY(PS_CUDA(cudaGraphExecDestroy(r->exec)));
        r->exec = NULL;
        r->seen = true;
        return 0;
    }
    if (r->exec) {
        *ret_done = true;
        return PS_CUDA(cudaGraphLaunch(r->exec, b->stream));
    }
    /* This thread's calls only: others, as those that watch NCCL, go on with theirs. */
    PS_TRY(PS_CUDA(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal)));
    b->recording = true;
    return 0;
}

static int cuda_step_end(struct ps_backend *b, struct ps_error *err)
{
    struct recorded *r = b->step;
    PS_TRY(enter(b, err));
    b->step = NULL;
    if (!r || !b->recording) {
        if (r)
            r->generation = b->generation;
        return 0;
    }
    cudaGraph_t graph = NULL;
    b->recording = false;
    PS_TRY(PS_CUDA(cudaStreamEndCapture(b->stream, &graph)));
    int code = PS_CUDA(cudaGraphInstantiate(&r->exec, graph, 0));
    PS_TRY(PS_CUDA(cudaGraphDestroy(graph)));
    PS_TRY(code);
    return PS_CUDA(cudaGraphLaunch(r->exec, b->stream));
}

static int cuda_metrics(struct ps_backend *b, struct ps_metrics *ret, struct ps_error *err)
{
    struct ps_cuda_metrics m;
    PS_TRY(enter(b, err));
    PS_TRY(PS_CUDA(cudaMemcpyAsync(&m, b->metrics, sizeof m, cudaMemcpyDeviceToHost, b->stream)));
    PS_TRY(PS_CUDA(cudaMemsetAsync(b->metrics, 0, sizeof m, b->stream)));
    PS_TRY(PS_CUDA(cudaStreamSynchronize(b->stream)));
    *ret = (struct ps_metrics){.loss_sum = m.loss, .correct = m.correct, .count = m.count};
    return 0;
}

static float *cuda_gradients(struct ps_backend *b)
{
    return b->grads;
}

static void *cuda_allocate(struct ps_backend *b, size_t bytes)
{
    struct ps_memory m = {0};
    struct ps_error err = {0};
    int i = 0;
    while (i < GIVEN && b->given[i])
        i++;
    if (i == GIVEN || enter(b, &err) < 0 || ps_memory_need(&m, bytes ? bytes : 1, b->stream, NULL, &err) < 0)
        return NULL;
    return b->given[i] = m.start;
}

/* Freeing waits for the whole device, and after a rank's death that may be for ever: the memory is kept until
 * the backend's end, which is left out then. */
static void cuda_release(struct ps_backend *b, void *memory)
{
    (void)b;
    (void)memory;
}

static void *cuda_stream(struct ps_backend *b)
{
    return b->stream;
}

static int cuda_copy_scaled(struct ps_backend *b, float *dst, const float *src, size_t count, float scale,
                            struct ps_error *err)
{
    return count ? PS_CUDA(ps_copy_scaled(b->stream, dst, src, count, scale)) : 0;
}

static int read_tensor(struct ps_backend *b, const struct ps_graph *g, int v, const void *from, float *host,
                       struct ps_error *err)
{
    const struct host_shape s = host_shape(b, g, v);
    const size_t bytes = ps_graph_elements(g, &b->plan, v) * size_of(s.type),
                 n = (size_t)s.n * (size_t)s.c * (size_t)s.area;
    char *raw = malloc(bytes);
    if (!raw)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = PS_CUDA(cudaMemcpyAsync(raw, from, bytes, cudaMemcpyDeviceToHost, b->stream));
    if (!code)
        code = PS_CUDA(cudaStreamSynchronize(b->stream));
    for (size_t i = 0; !code && i < n; i++) {
        const size_t at = nhwc(&s, i);
        host[i] = s.type == PS_CUDA_BF16 ? from_bf16(((uint16_t *)raw)[at]) : ((float *)raw)[at];
    }
    free(raw);
    return code;
}

static int cuda_read_value(struct ps_backend *b, int v, bool of_gradient, float *host, struct ps_error *err)
{
    const struct ps_graph *g = b->last;
    if (v < 0 || v >= b->model->value_count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: model %s has no value %d", b->model->name, v);
    if (!g)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: no forward has run");
    PS_TRY(enter(b, err));
    if (of_gradient) {
        if (!b->went_back || v != b->model->input || g->input_grad == SIZE_MAX)
            return ps_fail(err, PS_FAILED_PRECONDITION,
                           "backend cuda: only the input's gradient is kept (with PARAMSYNC_INPUT_GRAD set)");
        return read_tensor(b, g, v, place(&b->gradients, g->input_grad), host, err);
    }
    if (g->value_at[v] == SIZE_MAX)
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "backend cuda: value %d is fused into the next and never stored", v);
    if (!g->training && v != b->model->output)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: evaluation keeps the output only");
    return read_tensor(b, g, v, value(b, g, v), host, err);
}

static void cuda_memory(struct ps_backend *b, size_t *ret_activations, size_t *ret_params,
                        size_t *ret_workspace)
{
    *ret_activations = b->activations.size + b->gradients.size;
    *ret_params = b->state.size + b->copy.size;
    *ret_workspace = b->workspace.size + b->partials.size + b->gemm.size + b->weight_grad.size +
                     b->small.size + b->input.size + b->piece.size;
}

static const struct ps_backend_ops table = {
    .abi = PS_BACKEND_ABI,
    .name = "cuda",
    .probe = cuda_probe,
    .supports = cuda_supports,
    .create = cuda_create,
    .destroy = cuda_destroy,
    .read = cuda_read,
    .write = cuda_write,
    .forward = cuda_forward,
    .backward = cuda_backward,
    .update = cuda_update,
    .metrics = cuda_metrics,
    .gradients = cuda_gradients,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .copy_scaled = cuda_copy_scaled,
    .read_value = cuda_read_value,
    .memory = cuda_memory,
    .stream = cuda_stream,
    .step_begin = cuda_step_begin,
    .step_end = cuda_step_end,
};

__attribute__((visibility("default"))) const struct ps_backend_ops *ps_backend_module(void);

const struct ps_backend_ops *ps_backend_module(void)
{
    return &table;
}
