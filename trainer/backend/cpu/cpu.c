/* SPDX-License-Identifier: Apache-2.0
 * The CPU backend: convolutions and matrix products by oneDNN, everything else by kernels.c. Activations keep
 * one channel-blocked layout from the first convolution to the pooling; weights are packed once after each
 * change.
 *
 * Memory: one allocation each for activations, gradients of activations (reused as the backward pass goes),
 * parameters with their gradients and moments, packed weights, and workspace. */
#include "trainer/backend/backend.h"

#include "services/base/clock.h"
#include "trainer/backend/cpu/dnnl_api.h"
#include "trainer/backend/cpu/kernels.h"
#include "trainer/backend/cpu/layers.h"
#include "trainer/backend/cpu/parallel.h"
#include "trainer/backend/cpu/plan.h"
#include "trainer/optim/optim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_GRAPHS = 8, HUGE_PAGE = 2 << 20, LINE_FLOATS = 16 };

struct region {
    void *base;
    size_t size;
};

struct conv_state {                         /* of a convolution, for all graphs */
    size_t packed_forward, packed_backward; /* bytes from the start of the packed weights */
    struct ps_dnnl_call pack_forward, pack_backward, unpack, unpack_add;
};

/* Parts of a step that are no step of the plan; their profile rows come after those. */
enum { PART_IMAGES, PART_LOSS, PART_PACK, PART_UPDATE, PARTS };

struct part_time {
    double forward_s, backward_s;
    int64_t calls;
};

struct ps_backend {
    const struct ps_model *model;
    struct ps_backend_config config;
    struct ps_dnnl dnnl;
    struct ps_plan plan;
    bool input_grad;

    struct ps_conv_layouts *layouts; /* [step_count] */
    struct conv_state *convs;        /* [step_count] */
    float **stats;                   /* [step_count] of a norm: PS_NORM_STATS arrays of padded channels */

    struct region activations, gradients, packed, workspace;
    struct region state; /* params, grads, moments, buffers, stats */
    size_t
        scratchpad; /* bytes of workspace for primitives; the rest is for one convolution's weight gradient */
    size_t weight_gradient;
    float *params, *grads, *moment1, *moment2, *buffers;
    double *partial; /* for norms that are cut into slices */
    double *own;     /* one norm's message to the other ranks */
    struct ps_bn_exchange exchange;
    float *loss_grad;                   /* [max_batch, outputs] */
    bool forward_stale, backward_stale; /* packed weights are older than params */

    struct ps_graph *graphs[MAX_GRAPHS];
    uint64_t clock;
    struct ps_graph *last; /* of the last forward; NULL: none */
    enum ps_mode mode;
    bool went_back, has_loss;
    struct ps_metrics metrics;
    float *gathered; /* for product_gradient(): pixels of the source, then of the destination */
    size_t gathered_floats;
    struct part_time *profile; /* [step_count + PARTS]; NULL: not wanted */
};

static int take_region(struct region *r, size_t size, struct ps_error *err)
{
    if (size == 0)
        size = 1;
    size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *base = aligned_alloc(HUGE_PAGE, size);
    if (!base)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "backend cpu: out of memory (%zu MiB wanted): a smaller batch needs less", size >> 20);
#ifdef MADV_HUGEPAGE
    madvise(base, size, MADV_HUGEPAGE);
#endif
    r->base = base;
    r->size = size;
    return 0;
}

static void drop_region(struct region *r)
{
    free(r->base);
    *r = (struct region){0};
}

static void *at(const struct region *r, size_t offset)
{
    return (char *)r->base + offset;
}

static float *value(const struct ps_backend *b, const struct ps_graph *g, int v)
{
    return at(&b->activations, g->value_at[v]);
}

static float *gradient(const struct ps_backend *b, size_t offset)
{
    return offset == SIZE_MAX ? NULL : at(&b->gradients, offset);
}

static struct ps_shape shape_of(const struct ps_backend *b, const struct ps_graph *g, int v)
{
    return (struct ps_shape){.count = g->count,
                             .channels = b->model->values[v].channels,
                             .extent = g->extents[v],
                             .block = b->plan.block[v]};
}

/* --- profile --- */

static double tick(const struct ps_backend *b)
{
    return b->profile ? ps_monotonic_s() : 0;
}

/* row: a step of the plan, or step_count + PART_... */
static void tock(struct ps_backend *b, int row, bool backward, double since)
{
    if (!b->profile)
        return;
    struct part_time *t = &b->profile[row];
    *(backward ? &t->backward_s : &t->forward_s) += ps_monotonic_s() - since;
    t->calls += !backward || row >= b->plan.step_count;
}

/* --- creation --- */

static void drop_reorders(struct ps_backend *b)
{
    for (int i = 0; b->convs && i < b->plan.step_count; i++) {
        ps_dnnl_call_done(&b->convs[i].pack_forward);
        ps_dnnl_call_done(&b->convs[i].pack_backward);
        ps_dnnl_call_done(&b->convs[i].unpack);
        ps_dnnl_call_done(&b->convs[i].unpack_add);
    }
}

static void cpu_destroy(struct ps_backend *b)
{
    if (!b)
        return;
    for (int i = 0; i < MAX_GRAPHS; i++)
        ps_graph_free(b->graphs[i], &b->plan);
    drop_reorders(b);
    drop_region(&b->activations);
    drop_region(&b->gradients);
    drop_region(&b->packed);
    drop_region(&b->workspace);
    drop_region(&b->state);
    free(b->layouts);
    free(b->convs);
    free(b->stats);
    free(b->partial);
    free(b->own);
    ps_bn_exchange_done(&b->exchange);
    free(b->loss_grad);
    free(b->profile);
    free(b->gathered);
    ps_plan_done(&b->plan);
    ps_dnnl_close(&b->dnnl);
    free(b);
}

static int cpu_probe(int *ret_device_count, char *ret_description, size_t size, struct ps_error *err)
{
    (void)err;
    char version[16];
    if (ret_device_count)
        *ret_device_count = 1;
    if (ret_description)
        snprintf(ret_description, size, "CPU: oneDNN %s, own kernels for %s", ps_dnnl_version(version),
                 ps_cpu_kernels()->name);
    return 0;
}

static bool cpu_supports(enum ps_precision precision)
{
    return precision == PS_FP32;
}

/* Gives a graph's primitives their memory. */
static int bind_graph(struct ps_backend *b, struct ps_graph *g, struct ps_error *err)
{
    void *scratchpad = b->workspace.base, *weight_gradient = at(&b->workspace, b->scratchpad);
    for (int i = 0; i < b->plan.step_count; i++) {
        const struct ps_step *s = &b->plan.steps[i];
        struct ps_graph_step *t = &g->steps[i];
        if (s->kind != PS_STEP_CONV)
            continue;
        float *x = value(b, g, s->in[0]), *y = value(b, g, s->out);
        int r = ps_dnnl_bind(&b->dnnl, &t->forward, x, at(&b->packed, b->convs[i].packed_forward), y,
                             scratchpad, err);
        if (r == 0 && t->backward_data.primitive && t->to[0] != SIZE_MAX)
            r = ps_dnnl_bind(&b->dnnl, &t->backward_data, gradient(b, t->to[0]),
                             at(&b->packed, b->convs[i].packed_backward), gradient(b, t->grad[0]), scratchpad,
                             err);
        if (r == 0 && t->backward_weights.primitive)
            r = ps_dnnl_bind(&b->dnnl, &t->backward_weights, t->wide_source ? t->wide_source : x,
                             weight_gradient, t->wide_source ? t->wide_destination : gradient(b, t->grad[0]),
                             scratchpad, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t round_floats(size_t count)
{
    return (count + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
}

static size_t stats_length(const struct ps_backend *b, int step)
{
    return round_floats((size_t)ps_plan_padded(&b->plan, b->plan.steps[step].in[0]));
}

/* Parameters, gradients, moments, buffers and norms' statistics: one allocation. */
static int take_state(struct ps_backend *b, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    size_t params = round_floats(m->param_elements), vectors = b->config.training ? 4 : 1;
    size_t total = params * vectors + round_floats(m->buffer_elements);
    for (int i = 0; i < b->plan.step_count; i++)
        if (b->plan.steps[i].kind == PS_STEP_NORM)
            total += PS_NORM_STATS * stats_length(b, i);
    int r = take_region(&b->state, total * sizeof(float), err);
    if (r < 0)
        return r;
    memset(b->state.base, 0, total * sizeof(float));
    float *next = b->state.base;
    b->params = next;
    if (b->config.training) {
        b->grads = next + params;
        b->moment1 = next + 2 * params;
        b->moment2 = next + 3 * params;
    }
    next += params * vectors;
    b->buffers = next;
    next += round_floats(m->buffer_elements);
    for (int i = 0; i < b->plan.step_count; i++)
        if (b->plan.steps[i].kind == PS_STEP_NORM) {
            b->stats[i] = next;
            next += PS_NORM_STATS * stats_length(b, i);
        }
    return 0;
}

static size_t pages(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

/* Places for packed weights, once the first graph has chosen their layouts. */
static int take_packed(struct ps_backend *b, struct ps_error *err)
{
    size_t total = 0;
    for (int i = 0; i < b->plan.step_count; i++) {
        if (b->plan.steps[i].kind != PS_STEP_CONV)
            continue;
        const struct ps_conv_layouts *l = &b->layouts[i];
        b->convs[i].packed_forward = total;
        total += pages(ps_dnnl_bytes(&l->forward));
        b->convs[i].packed_backward = total;
        if (l->has_backward)
            total += pages(ps_dnnl_bytes(&l->backward));
        if (l->has_gradient)
            b->weight_gradient = larger(b->weight_gradient, ps_dnnl_bytes(&l->gradient));
    }
    return take_region(&b->packed, total, err);
}

static int make_reorders(struct ps_backend *b, size_t *scratchpad, struct ps_error *err)
{
    for (int i = 0; i < b->plan.step_count; i++) {
        const struct ps_step *s = &b->plan.steps[i];
        if (s->kind != PS_STEP_CONV)
            continue;
        const struct ps_conv_layouts *l = &b->layouts[i];
        const struct ps_param *p = &b->model->params[b->model->ops[s->op].param[0]];
        struct conv_state *c = &b->convs[i];
        struct ps_dnnl_layout flat = ps_dnnl_oihw(p->shape[0], p->shape[1], p->shape[2]);
        int r = ps_dnnl_reorder_create(&b->dnnl, &flat, &l->forward, false, &c->pack_forward, err);
        if (r == 0 && l->has_backward)
            r = ps_dnnl_reorder_create(&b->dnnl, &flat, &l->backward, false, &c->pack_backward, err);
        if (r == 0 && l->has_gradient)
            r = ps_dnnl_reorder_create(&b->dnnl, &l->gradient, &flat, false, &c->unpack, err);
        if (r == 0 && l->has_gradient)
            r = ps_dnnl_reorder_create(&b->dnnl, &l->gradient, &flat, true, &c->unpack_add, err);
        if (r < 0)
            return r;
        const struct ps_dnnl_call *calls[] = {&c->pack_forward, &c->pack_backward, &c->unpack,
                                              &c->unpack_add};
        for (int k = 0; k < 4; k++)
            *scratchpad = larger(*scratchpad, calls[k]->scratchpad);
    }
    return 0;
}

static int bind_reorders(struct ps_backend *b, struct ps_error *err)
{
    void *scratchpad = b->workspace.base, *weight_gradient = at(&b->workspace, b->scratchpad);
    for (int i = 0; i < b->plan.step_count; i++) {
        const struct ps_step *s = &b->plan.steps[i];
        if (s->kind != PS_STEP_CONV)
            continue;
        size_t offset = b->model->params[b->model->ops[s->op].param[0]].offset;
        struct conv_state *c = &b->convs[i];
        int r = ps_dnnl_bind(&b->dnnl, &c->pack_forward, b->params + offset, NULL,
                             at(&b->packed, c->packed_forward), scratchpad, err);
        if (r == 0 && c->pack_backward.primitive)
            r = ps_dnnl_bind(&b->dnnl, &c->pack_backward, b->params + offset, NULL,
                             at(&b->packed, c->packed_backward), scratchpad, err);
        if (r == 0 && c->unpack.primitive)
            r = ps_dnnl_bind(&b->dnnl, &c->unpack, weight_gradient, NULL, b->grads + offset, scratchpad, err);
        if (r == 0 && c->unpack_add.primitive)
            r = ps_dnnl_bind(&b->dnnl, &c->unpack_add, weight_gradient, NULL, b->grads + offset, scratchpad,
                             err);
        if (r < 0)
            return r;
    }
    return 0;
}

/* Memory that depends on the graphs' sizes, and the primitives bound to it. All graphs that there are must be
 * unbound. */
static int settle(struct ps_backend *b, struct ps_error *err)
{
    size_t activations = 0, gradients = 0, scratchpad = 0;
    for (int i = 0; i < MAX_GRAPHS; i++)
        if (b->graphs[i]) {
            activations = larger(activations, b->graphs[i]->activations);
            gradients = larger(gradients, b->graphs[i]->gradients);
            scratchpad = larger(scratchpad, b->graphs[i]->scratchpad);
        }
    drop_reorders(b);
    int r = make_reorders(b, &scratchpad, err);
    activations = larger(activations, b->activations.size);
    gradients = larger(gradients, b->gradients.size);
    b->scratchpad = pages(larger(scratchpad, b->scratchpad));
    drop_region(&b->activations);
    drop_region(&b->gradients);
    drop_region(&b->workspace);
    if (r == 0)
        r = take_region(&b->activations, activations, err);
    if (r == 0 && b->config.training)
        r = take_region(&b->gradients, gradients, err);
    if (r == 0)
        r = take_region(&b->workspace, b->scratchpad + b->weight_gradient, err);
    if (r == 0)
        r = bind_reorders(b, err);
    for (int i = 0; i < MAX_GRAPHS && r == 0; i++)
        if (b->graphs[i])
            r = bind_graph(b, b->graphs[i], err);
    return r;
}

static int make_graph(struct ps_backend *b, int count, int resolution, bool training, struct ps_graph **ret,
                      struct ps_error *err)
{
    return ps_graph_make(ret, &b->plan, &b->dnnl, count, resolution, training, b->input_grad, b->layouts,
                         err);
}

static int create_all(struct ps_backend *b, struct ps_error *err)
{
    const struct ps_backend_config *c = &b->config;
    int r = ps_dnnl_open(&b->dnnl, err);
    if (r == 0)
        r = ps_plan_make(&b->plan, b->model, ps_dnnl_preferred_block(&b->dnnl), err);
    if (r < 0)
        return r;
    size_t steps = (size_t)b->plan.step_count + 1;
    b->layouts = calloc(steps, sizeof *b->layouts);
    b->convs = calloc(steps, sizeof *b->convs);
    b->stats = calloc(steps, sizeof *b->stats);
    int blocks = 1, widest = 1;
    for (int v = 0; v < b->model->value_count; v++)
        widest = b->model->values[v].channels > widest ? b->model->values[v].channels : widest;
    b->own = calloc(ps_bn_message(widest), sizeof *b->own);
    if (!b->own || ps_bn_exchange_init(&b->exchange, c->bn_sync, widest) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (int v = 0; v < b->model->value_count; v++)
        if (b->plan.block[v] && ps_plan_padded(&b->plan, v) / b->plan.block[v] > blocks)
            blocks = ps_plan_padded(&b->plan, v) / b->plan.block[v];
    b->partial = calloc(ps_norm_partial(c->threads, blocks), sizeof *b->partial);
    if (!b->layouts || !b->convs || !b->stats || !b->partial)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (c->training)
        r = make_graph(b, c->max_batch, c->max_resolution, true, &b->graphs[0], err);
    if (r == 0 && c->max_eval_batch > 0)
        r = make_graph(b, c->max_eval_batch, c->max_resolution, false, &b->graphs[1], err);
    if (r == 0)
        r = take_state(b, err);
    if (r == 0)
        r = take_packed(b, err);
    if (r == 0)
        r = settle(b, err);
    if (r == 0 && c->training) {
        size_t outputs = ps_graph_bytes(b->graphs[0], &b->plan, b->model->output);
        b->loss_grad = calloc(1, outputs);
        if (!b->loss_grad)
            r = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    return r;
}

static int cpu_create(const struct ps_backend_config *config, struct ps_backend **ret, struct ps_error *err)
{
    if (!cpu_supports(config->precision))
        return ps_fail(err, PS_UNIMPLEMENTED, "backend cpu computes in fp32 only: use --precision fp32");
    if (config->threads < 1 || config->threads > 1024)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: %d threads (1 to 1024)", config->threads);
    if (config->training ? config->max_batch < 1 : config->max_eval_batch < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: the largest batch must be at least 1");
    struct ps_backend *b = calloc(1, sizeof *b);
    if (!b)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    b->model = config->model;
    b->config = *config;
    b->input_grad = getenv("PARAMSYNC_INPUT_GRAD") != NULL;
    b->forward_stale = b->backward_stale = true;
    ps_parallel_threads(config->threads);
    int r = create_all(b, err);
    if (r < 0) {
        cpu_destroy(b);
        return r;
    }
    *ret = b;
    return 0;
}

/* The graph for a batch: found, or made in the place of the one unused the longest. */
static int find_graph(struct ps_backend *b, int count, int resolution, bool training, struct ps_graph **ret,
                      struct ps_error *err)
{
    int place = 0;
    for (int i = 0; i < MAX_GRAPHS; i++) {
        struct ps_graph *g = b->graphs[i];
        if (g && g->count == count && g->resolution == resolution && g->training == training) {
            g->used = ++b->clock;
            *ret = g;
            return 0;
        }
        if (b->graphs[place] && (!g || g->used < b->graphs[place]->used))
            place = i;
    }
    struct ps_graph *g;
    int r = make_graph(b, count, resolution, training, &g, err);
    if (r < 0)
        return r;
    b->last = NULL;
    bool fits = g->activations <= b->activations.size && g->gradients <= b->gradients.size &&
                g->scratchpad <= b->scratchpad;
    if (fits) {
        b->graphs[place] = ps_graph_free(b->graphs[place], &b->plan);
        b->graphs[place] = g;
        r = bind_graph(b, g, err);
    } else { /* sizes were planned for the largest batch; how gaps fit may differ for smaller ones */
        for (int i = 0; i < MAX_GRAPHS; i++)
            b->graphs[i] = ps_graph_free(b->graphs[i], &b->plan);
        b->graphs[place] = g;
        r = settle(b, err);
        b->forward_stale = b->backward_stale = true;
    }
    if (r < 0) {
        b->graphs[place] = ps_graph_free(g, &b->plan);
        return r;
    }
    g->used = ++b->clock;
    *ret = g;
    return 0;
}

/* --- state --- */

static int find_state(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count, float **ret,
                      struct ps_error *err)
{
    size_t length = what == PS_STATE_BUFFERS ? b->model->buffer_elements : b->model->param_elements;
    float *all[] = {[PS_STATE_PARAMS] = b->params,
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
    *ret = all[what] + offset;
    return 0;
}

static int cpu_read(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count, float *host,
                    struct ps_error *err)
{
    float *state = NULL;
    int r = find_state(b, what, offset, count, &state, err);
    if (r == 0 && count)
        memcpy(host, state, count * sizeof *host);
    return r;
}

static int cpu_write(struct ps_backend *b, enum ps_state_kind what, size_t offset, size_t count,
                     const float *host, struct ps_error *err)
{
    float *state = NULL;
    int r = find_state(b, what, offset, count, &state, err);
    if (r < 0)
        return r;
    if (count)
        memcpy(state, host, count * sizeof *host);
    if (what == PS_STATE_PARAMS)
        b->forward_stale = b->backward_stale = true;
    return 0;
}

/* --- forward --- */

static struct ps_norm norm_of(struct ps_backend *b, const struct ps_graph *g, int step)
{
    const struct ps_step *s = &b->plan.steps[step];
    const struct ps_op *op = &b->model->ops[s->op];
    return (struct ps_norm){
        .kernels = ps_cpu_kernels(),
        .threads = b->config.threads,
        .shape = shape_of(b, g, s->in[0]),
        .stats = b->stats[step],
        .stats_length = stats_length(b, step),
        .partial = b->partial,
        .own = b->own,
        .exchange = &b->exchange,
        .scale = b->params + b->model->params[op->param[0]].offset,
        .shift = b->params + b->model->params[op->param[1]].offset,
        .running_mean = b->buffers + b->model->buffers[op->buffer[0]].offset,
        .running_var = b->buffers + b->model->buffers[op->buffer[1]].offset,
        .eps = op->eps,
        .momentum = op->momentum,
    };
}

static int dense_forward(struct ps_backend *b, const struct ps_graph *g, const struct ps_step *s,
                         struct ps_error *err)
{
    const struct ps_op *op = &b->model->ops[s->op];
    int n = g->count, c = b->model->values[s->in[0]].channels, o = b->model->values[s->out].channels;
    const float *bias = b->params + b->model->params[op->param[1]].offset;
    float *y = value(b, g, s->out);
    for (int i = 0; i < n; i++)
        memcpy(y + (size_t)i * (size_t)o, bias, (size_t)o * sizeof *y);
    return ps_dnnl_sgemm(false, true, n, o, c, value(b, g, s->in[0]), ps_plan_padded(&b->plan, s->in[0]),
                         b->params + b->model->params[op->param[0]].offset, c, 1, y, o, err);
}

static int forward_step(struct ps_backend *b, struct ps_graph *g, int i, struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    struct ps_shape in = shape_of(b, g, s->in[0]), out = shape_of(b, g, s->out);
    int threads = b->config.threads;
    float *x = value(b, g, s->in[0]), *y = value(b, g, s->out),
          *z = s->in[1] != PS_NONE ? value(b, g, s->in[1]) : NULL;
    switch (s->kind) {
    case PS_STEP_CONV:
        return ps_dnnl_run(&b->dnnl, &g->steps[i].forward, err);
    case PS_STEP_NORM: {
        struct ps_norm n = norm_of(b, g, i);
        return ps_norm_forward(&n, b->mode == PS_TRAIN, x, z, s->relu, y, err);
    }
    case PS_STEP_RELU:
        ps_parallel_relu(threads, ps_shape_floats(&in), x, y);
        return 0;
    case PS_STEP_ADD:
        ps_parallel_add(threads, ps_shape_floats(&in), x, z, y);
        return 0;
    case PS_STEP_MAX_POOL:
        ps_max_pool_forward(threads, op, &in, &out, x, y);
        return 0;
    case PS_STEP_AVG_POOL:
        ps_avg_pool_forward(threads, &in, x, y);
        return 0;
    case PS_STEP_DENSE:
        return dense_forward(b, g, s, err);
    }
    return ps_fail(err, PS_INTERNAL, "backend cpu: step of unknown kind");
}

static int pack(struct ps_backend *b, bool backward, struct ps_error *err)
{
    bool *stale = backward ? &b->backward_stale : &b->forward_stale;
    if (!*stale)
        return 0;
    double since = tick(b);
    for (int i = 0; i < b->plan.step_count; i++) {
        const struct ps_dnnl_call *c = backward ? &b->convs[i].pack_backward : &b->convs[i].pack_forward;
        int r = c->primitive ? ps_dnnl_run(&b->dnnl, c, err) : 0;
        if (r < 0)
            return r;
    }
    *stale = false;
    tock(b, b->plan.step_count + PART_PACK, backward, since);
    return 0;
}

static int cpu_forward(struct ps_backend *b, const struct ps_batch *batch, enum ps_mode mode,
                       const struct ps_loss_config *loss, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    bool training = mode != PS_EVAL;
    int most = training ? b->config.max_batch : b->config.max_eval_batch;
    if (training && !b->config.training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: created without training");
    if (batch->count < 1 || batch->count > most)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: a batch of %d images; 1 to %d were planned for",
                       batch->count, most);
    if (batch->resolution > b->config.max_resolution)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: images of %d pixels; at most %d were planned for",
                       batch->resolution, b->config.max_resolution);
    int classes = m->values[m->output].channels;
    for (int i = 0; batch->labels && i < batch->count; i++)
        if (batch->labels[i] < 0 || batch->labels[i] >= classes)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "backend: label %d of image %d is out of range (0 to %d)", batch->labels[i], i,
                           classes - 1);
    ps_parallel_threads(b->config.threads);
    struct ps_graph *g;
    b->last = NULL;
    b->went_back = false;
    int r = find_graph(b, batch->count, batch->resolution, training, &g, err);
    if (r == 0)
        r = pack(b, false, err);
    if (r < 0)
        return r;
    b->mode = mode;
    double since = tick(b);
    ps_load_images(b->config.threads, batch, m->values[m->input].channels, value(b, g, m->input));
    tock(b, b->plan.step_count + PART_IMAGES, false, since);
    for (int i = 0; i < b->plan.step_count; i++) {
        since = tick(b);
        r = forward_step(b, g, i, err);
        tock(b, i, false, since);
        if (r < 0)
            return r;
    }
    since = tick(b);
    b->has_loss = batch->labels && g->extents[m->output] == 1 && b->plan.block[m->output] == 1;
    if (b->has_loss) {
        b->metrics.loss_sum += ps_softmax_loss(g->count, classes, value(b, g, m->output), batch->labels, loss,
                                               training ? b->loss_grad : NULL, &b->metrics.correct);
        b->metrics.count += g->count;
    }
    tock(b, b->plan.step_count + PART_LOSS, false, since);
    b->last = g;
    return 0;
}

/* --- backward --- */

static int dense_backward(struct ps_backend *b, const struct ps_graph *g, int i, bool accumulate,
                          ps_grad_ready ready, void *ready_context, struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const struct ps_param *weight = &b->model->params[op->param[0]], *bias = &b->model->params[op->param[1]];
    int n = g->count, c = b->model->values[s->in[0]].channels, o = b->model->values[s->out].channels;
    int padded = ps_plan_padded(&b->plan, s->in[0]);
    const float *dy = gradient(b, g->steps[i].grad[0]);
    float *db = b->grads + bias->offset, *dx = gradient(b, g->steps[i].to[0]);
    for (int k = 0; k < o; k++) {
        double sum = 0;
        for (int j = 0; j < n; j++)
            sum += (double)dy[(size_t)j * (size_t)o + (size_t)k];
        db[k] = (accumulate ? db[k] : 0) + (float)sum;
    }
    if (ready)
        ready(ready_context, op->param[1]);
    int r = ps_dnnl_sgemm(true, false, o, c, n, dy, o, value(b, g, s->in[0]), padded, accumulate ? 1 : 0,
                          b->grads + weight->offset, c, err);
    if (r < 0)
        return r;
    if (ready)
        ready(ready_context, op->param[0]);
    if (!dx)
        return 0;
    if (padded != c)
        memset(dx, 0, (size_t)n * (size_t)padded * sizeof *dx);
    return ps_dnnl_sgemm(false, false, n, c, o, dy, o, b->params + weight->offset, c, 0, dx, padded, err);
}

static int norm_backward(struct ps_backend *b, const struct ps_graph *g, int i, bool accumulate,
                         ps_grad_ready ready, void *ready_context, struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const struct ps_graph_step *t = &g->steps[i];
    struct ps_norm n = norm_of(b, g, i);
    float *g0 = gradient(b, t->grad[0]), *g1 = t->grad_count > 1 ? gradient(b, t->grad[1]) : NULL;
    int r = ps_norm_backward(&n, b->mode == PS_TRAIN, g0, g1, s->relu ? value(b, g, s->out) : NULL,
                             value(b, g, s->in[0]), s->relu || g1 ? g0 : NULL, gradient(b, t->to[0]),
                             b->grads + b->model->params[op->param[0]].offset,
                             b->grads + b->model->params[op->param[1]].offset, accumulate, err);
    if (r < 0)
        return r;
    /* The second input's gradient is what the step left in g0, unless that memory was not to be had. */
    if (s->in[1] != PS_NONE && t->to[1] != SIZE_MAX && t->to[1] != t->grad[0])
        ps_parallel_copy(b->config.threads, ps_shape_floats(&n.shape), g0, gradient(b, t->to[1]));
    for (int k = 0; ready && k < 2; k++)
        ready(ready_context, op->param[k]);
    return 0;
}

/* Images into the upper left corner of larger ones, whose other pixels stay zero. */
static void copy_wide(const struct ps_backend *b, const struct ps_graph *g, int v, const float *source,
                      float *wide, int extent)
{
    const size_t block = (size_t)b->plan.block[v], from = (size_t)g->extents[v], to = (size_t)extent;
    const size_t planes = (size_t)g->count * (size_t)ps_plan_padded(&b->plan, v) / block;
    for (size_t p = 0; p < planes; p++)
        for (size_t y = 0; y < from; y++)
            memcpy(wide + (p * to + y) * to * block, source + (p * from + y) * from * block,
                   from * block * sizeof(float));
}

/* Whether the gradient of a convolution's weights is taken as matrix products over pixels, one for each place
 * in the window. Products leave out what only meets padding (31 % of a 3x3 window on 4x4 pixels), and few
 * pixels with many channels suit them better than oneDNN's kernel for AVX2. A fixed rule: ranks and resumed
 * runs choose alike. */
static bool by_products(const struct ps_backend *b, const struct ps_graph *g, const struct ps_step *s)
{
    return b->plan.block[s->in[0]] == 8 && b->plan.block[s->out] == 8 && b->model->ops[s->op].kernel == 3 &&
           g->extents[s->out] <= 8 && b->model->values[s->in[0]].channels >= 128 &&
           b->model->values[s->in[0]].channels % 8 == 0 && b->model->values[s->out].channels % 8 == 0;
}

struct gather_job {
    const float *from;
    float *to;
    int channels, extent, begin_y, begin_x, rows, columns, stride;
};

/* Image `index`: every pixel of a window, [c/8, e, e, 8] to [rows * columns, c]. */
static void gather_image(void *context, int index)
{
    const struct gather_job *j = context;
    const size_t c = (size_t)j->channels, e = (size_t)j->extent,
                 pixels = (size_t)j->rows * (size_t)j->columns;
    const float *from = j->from + (size_t)index * c * e * e;
    float *to = j->to + (size_t)index * pixels * c;
    for (int y = 0; y < j->rows; y++)
        for (int x = 0; x < j->columns; x++, to += c) {
            const float *pixel =
                from + ((size_t)(j->begin_y + y * j->stride) * e + (size_t)(j->begin_x + x * j->stride)) * 8;
            for (size_t k = 0; k < c; k += 8, pixel += e * e * 8)
                memcpy(to + k, pixel, 8 * sizeof *to);
        }
}

struct interleave_job {
    const float *from; /* [window, out, in] */
    float *to;         /* [out, in, window] */
    int in, out, window;
    bool add;
};

static void interleave_output(void *context, int index)
{
    const struct interleave_job *j = context;
    const size_t in = (size_t)j->in, plane = in * (size_t)j->out, window = (size_t)j->window;
    const float *from = j->from + (size_t)index * in;
    float *to = j->to + (size_t)index * in * window;
    for (size_t i = 0; i < in; i++)
        for (size_t k = 0; k < window; k++, to++)
            *to = (j->add ? *to : 0) + from[k * plane + i];
}

/* First and number of output places at which window place k of one axis meets the image. */
static int meets(const struct ps_op *op, int k, int in, int out, int *ret_first)
{
    int first = 0, end = out;
    while (first < out && first * op->stride + k < op->pad)
        first++;
    while (end > first && (end - 1) * op->stride + k - op->pad >= in)
        end--;
    *ret_first = first;
    return end - first;
}

static int product_gradient(struct ps_backend *b, const struct ps_graph *g, int i, bool accumulate,
                            struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const int in = b->model->values[s->in[0]].channels, out = b->model->values[s->out].channels, n = g->count,
              e_in = g->extents[s->in[0]], e_out = g->extents[s->out], threads = b->config.threads;
    const size_t pixels = (size_t)n * (size_t)e_out * (size_t)e_out, plane = (size_t)in * (size_t)out,
                 floats = pixels * (size_t)(in + out);
    if (b->gathered_floats < floats) {
        free(b->gathered);
        b->gathered = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        b->gathered_floats = b->gathered ? floats : 0;
        if (!b->gathered)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    float *x = b->gathered, *dy = b->gathered + pixels * (size_t)in,
          *products = at(&b->workspace, b->scratchpad); /* as large as the weights' gradient */
    for (int ky = 0; ky < op->kernel; ky++)
        for (int kx = 0; kx < op->kernel; kx++) {
            int y0, x0, rows = meets(op, ky, e_in, e_out, &y0), columns = meets(op, kx, e_in, e_out, &x0);
            float *product = products + (size_t)(ky * op->kernel + kx) * plane;
            if (rows == 0 || columns == 0) {
                memset(product, 0, plane * sizeof *product);
                continue;
            }
            struct gather_job source = {value(b, g, s->in[0]),
                                        x,
                                        in,
                                        e_in,
                                        y0 * op->stride + ky - op->pad,
                                        x0 * op->stride + kx - op->pad,
                                        rows,
                                        columns,
                                        op->stride},
                              destination = {
                                  gradient(b, g->steps[i].grad[0]), dy, out, e_out, y0, x0, rows, columns, 1};
            ps_parallel_for(threads, n, gather_image, &source);
            ps_parallel_for(threads, n, gather_image, &destination);
            int r =
                ps_dnnl_sgemm(true, false, out, in, n * rows * columns, dy, out, x, in, 0, product, in, err);
            if (r < 0)
                return r;
        }
    struct interleave_job j = {
        products,  b->grads + b->model->params[op->param[0]].offset, in, out, op->kernel * op->kernel,
        accumulate};
    ps_parallel_for(threads, out, interleave_output, &j);
    return 0;
}

static int conv_backward(struct ps_backend *b, const struct ps_graph *g, int i, bool accumulate,
                         ps_grad_ready ready, void *ready_context, struct ps_error *err)
{
    const struct ps_graph_step *t = &g->steps[i];
    if (t->wide_source && !by_products(b, g, &b->plan.steps[i])) {
        const struct ps_step *s = &b->plan.steps[i];
        copy_wide(b, g, s->in[0], value(b, g, s->in[0]), t->wide_source, t->wide_in);
        copy_wide(b, g, s->out, gradient(b, t->grad[0]), t->wide_destination, t->wide_out);
    }
    const bool products = by_products(b, g, &b->plan.steps[i]);
    int r = products ? product_gradient(b, g, i, accumulate, err)
                     : ps_dnnl_run(&b->dnnl, &t->backward_weights, err);
    if (r == 0 && !products)
        r = ps_dnnl_run(&b->dnnl, accumulate ? &b->convs[i].unpack_add : &b->convs[i].unpack, err);
    if (r == 0 && ready) /* before the gradient of the input: the reducer can start */
        ready(ready_context, b->model->ops[b->plan.steps[i].op].param[0]);
    if (r == 0 && t->to[0] != SIZE_MAX)
        r = ps_dnnl_run(&b->dnnl, &t->backward_data, err);
    return r;
}

static int backward_step(struct ps_backend *b, const struct ps_graph *g, int i, bool accumulate,
                         ps_grad_ready ready, void *ready_context, struct ps_error *err)
{
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_graph_step *t = &g->steps[i];
    struct ps_shape in = shape_of(b, g, s->in[0]), out = shape_of(b, g, s->out);
    size_t floats = ps_shape_floats(&out);
    int threads = b->config.threads;
    float *dy = gradient(b, t->grad[0]), *dx = gradient(b, t->to[0]), *dz = gradient(b, t->to[1]);
    /* A norm takes two parts as they are; all others want their sum. */
    for (int k = t->grad_count; k-- > (s->kind == PS_STEP_NORM ? 2 : 1);)
        ps_parallel_add(threads, floats, dy, gradient(b, t->grad[k]), dy);
    switch (s->kind) {
    case PS_STEP_CONV:
        return conv_backward(b, g, i, accumulate, ready, ready_context, err);
    case PS_STEP_NORM:
        return norm_backward(b, g, i, accumulate, ready, ready_context, err);
    case PS_STEP_RELU:
        if (dx)
            ps_parallel_relu_back(threads, floats, value(b, g, s->out), dy, dx);
        return 0;
    case PS_STEP_ADD:
        if (dz && dz != dy)
            ps_parallel_copy(threads, floats, dy, dz);
        if (dx && dx != dy)
            ps_parallel_copy(threads, floats, dy, dx);
        return 0;
    case PS_STEP_MAX_POOL:
        if (dx)
            ps_max_pool_backward(threads, &b->model->ops[s->op], &in, &out, value(b, g, s->in[0]),
                                 value(b, g, s->out), dy, dx);
        return 0;
    case PS_STEP_AVG_POOL:
        if (dx)
            ps_avg_pool_backward(threads, &in, dy, dx);
        return 0;
    case PS_STEP_DENSE:
        return dense_backward(b, g, i, accumulate, ready, ready_context, err);
    }
    return ps_fail(err, PS_INTERNAL, "backend cpu: step of unknown kind");
}

static int cpu_backward(struct ps_backend *b, bool accumulate, const float *cotangent, ps_grad_ready ready,
                        void *ready_context, struct ps_error *err)
{
    struct ps_graph *g = b->last;
    if (!g || !g->training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: backward follows a forward in a training mode");
    if (!cotangent && !b->has_loss)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: no loss was computed, a cotangent is needed");
    ps_parallel_threads(b->config.threads);
    int r = pack(b, true, err);
    struct ps_shape out = shape_of(b, g, b->model->output);
    float *seed = gradient(b, g->steps[b->plan.step_count - 1].grad[0]);
    if (cotangent)
        ps_from_nchw(&out, cotangent, seed);
    else
        memcpy(seed, b->loss_grad, ps_shape_floats(&out) * sizeof *seed);
    for (int i = b->plan.step_count; r == 0 && i-- > 0;) {
        double since = tick(b);
        r = backward_step(b, g, i, accumulate, ready, ready_context, err);
        tock(b, i, true, since);
    }
    for (int k = 1; r == 0 && k < g->input_grad_count; k++) {
        struct ps_shape in = shape_of(b, g, b->model->input);
        float *sum = gradient(b, g->input_grad[0]);
        ps_parallel_add(b->config.threads, ps_shape_floats(&in), sum, gradient(b, g->input_grad[k]), sum);
    }
    b->went_back = r == 0;
    return r;
}

/* --- update, metrics, the rest --- */

enum { UPDATE_PIECE = 1 << 15 };

struct update_job {
    struct ps_backend *b;
    const struct ps_optimizer_step *step;
};

static void update_piece(void *context, int index)
{
    struct update_job *j = context;
    size_t begin = (size_t)index * UPDATE_PIECE, end = begin + UPDATE_PIECE;
    ps_optim_apply(j->b->model, j->step, begin, end, j->b->params, j->b->grads, j->b->moment1, j->b->moment2);
}

static int cpu_update(struct ps_backend *b, const struct ps_optimizer_step *step, struct ps_error *err)
{
    if (!b->config.training)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: created without training");
    int r = ps_optim_check(step, err);
    if (r < 0)
        return r;
    struct update_job j = {b, step};
    double since = tick(b);
    ps_parallel_threads(b->config.threads);
    ps_parallel_for(b->config.threads, (int)((b->model->param_elements + UPDATE_PIECE - 1) / UPDATE_PIECE),
                    update_piece, &j);
    tock(b, b->plan.step_count + PART_UPDATE, false, since);
    b->forward_stale = b->backward_stale = true;
    return 0;
}

static int cpu_metrics(struct ps_backend *b, struct ps_metrics *ret, struct ps_error *err)
{
    (void)err;
    *ret = b->metrics;
    b->metrics = (struct ps_metrics){0};
    return 0;
}

static float *cpu_gradients(struct ps_backend *b)
{
    return b->grads;
}

static void *cpu_allocate(struct ps_backend *b, size_t bytes)
{
    (void)b;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void cpu_release(struct ps_backend *b, void *memory)
{
    (void)b;
    free(memory);
}

struct copy_job {
    float *dst;
    const float *src;
    size_t count;
    float scale;
};

enum { COPY_PIECE = 1 << 16 };

static void copy_piece(void *context, int index)
{
    const struct copy_job *j = context;
    size_t at = (size_t)index * COPY_PIECE, n = j->count - at < COPY_PIECE ? j->count - at : COPY_PIECE;
    ps_cpu_kernels()->scale(n, j->src + at, j->scale, j->dst + at);
}

static int cpu_copy_scaled(struct ps_backend *b, float *dst, const float *src, size_t count, float scale,
                           struct ps_error *err)
{
    (void)err;
    struct copy_job j = {dst, src, count, scale};
    ps_parallel_for(b->config.threads, (int)((count + COPY_PIECE - 1) / COPY_PIECE), copy_piece, &j);
    return 0;
}

static int cpu_read_value(struct ps_backend *b, int v, bool of_gradient, float *host, struct ps_error *err)
{
    struct ps_graph *g = b->last;
    if (v < 0 || v >= b->model->value_count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "backend: model %s has no value %d", b->model->name, v);
    if (!g)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: no forward has run");
    struct ps_shape shape = shape_of(b, g, v);
    if (of_gradient) {
        if (!b->went_back || v != b->model->input || !g->input_grad_count)
            return ps_fail(err, PS_FAILED_PRECONDITION,
                           "backend cpu: only the input's gradient is kept (with PARAMSYNC_INPUT_GRAD set)");
        ps_to_nchw(&shape, gradient(b, g->input_grad[0]), host);
        return 0;
    }
    if (g->value_at[v] == SIZE_MAX)
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "backend cpu: value %d is fused into the next and never stored", v);
    if (!g->training && v != b->model->output)
        return ps_fail(err, PS_FAILED_PRECONDITION, "backend: evaluation keeps the output only");
    ps_to_nchw(&shape, value(b, g, v), host);
    return 0;
}

static void cpu_memory(struct ps_backend *b, size_t *ret_activations, size_t *ret_params,
                       size_t *ret_workspace)
{
    *ret_activations = b->activations.size + b->gradients.size;
    *ret_params = b->state.size + b->packed.size;
    *ret_workspace = b->workspace.size + b->gathered_floats * sizeof(float);
}

static void name_row(const struct ps_backend *b, int i, struct ps_profile_row *row)
{
    static const char *const parts[PARTS] = {"images in", "loss", "pack weights", "update"},
                             *const kinds[] = {[PS_STEP_RELU] = "relu",
                                               [PS_STEP_ADD] = "add",
                                               [PS_STEP_MAX_POOL] = "max pool",
                                               [PS_STEP_AVG_POOL] = "average pool",
                                               [PS_STEP_DENSE] = "dense"};
    if (i >= b->plan.step_count) {
        snprintf(row->name, sizeof row->name, "%s", parts[i - b->plan.step_count]);
        return;
    }
    const struct ps_step *s = &b->plan.steps[i];
    const struct ps_op *op = &b->model->ops[s->op];
    const struct ps_graph *g = b->last;
    int extent = g ? g->extents[s->in[0]] : 0, in = b->model->values[s->in[0]].channels,
        out = b->model->values[s->out].channels;
    if (s->kind == PS_STEP_CONV) {
        snprintf(row->name, sizeof row->name, "conv %d>%d %dx%d/%d at %d", in, out, op->kernel, op->kernel,
                 op->stride, extent);
        if (g)
            snprintf(row->detail, sizeof row->detail, "%.25s %.25s %.25s",
                     ps_dnnl_call_name(&g->steps[i].forward), ps_dnnl_call_name(&g->steps[i].backward_data),
                     by_products(b, g, s) ? "products" : ps_dnnl_call_name(&g->steps[i].backward_weights));
    } else if (s->kind == PS_STEP_NORM) {
        snprintf(row->name, sizeof row->name, "norm%s%s %d at %d", s->in[1] != PS_NONE ? "+add" : "",
                 s->relu ? "+relu" : "", in, extent);
    } else {
        snprintf(row->name, sizeof row->name, "%s %d at %d", kinds[s->kind], in, extent);
    }
}

static int cpu_profile(struct ps_backend *b, struct ps_profile_row *rows, int capacity)
{
    int count = b->plan.step_count + PARTS;
    if (!b->profile) {
        b->profile = calloc((size_t)count, sizeof *b->profile);
        return 0;
    }
    count = count < capacity ? count : capacity;
    for (int i = 0; i < count; i++) {
        const struct part_time *t = &b->profile[i];
        rows[i] = (struct ps_profile_row){
            .forward_s = t->forward_s, .backward_s = t->backward_s, .calls = t->calls};
        name_row(b, i, &rows[i]);
    }
    memset(b->profile, 0, (size_t)(b->plan.step_count + PARTS) * sizeof *b->profile);
    return count;
}

static const struct ps_backend_ops table = {
    .abi = PS_BACKEND_ABI,
    .name = "cpu",
    .probe = cpu_probe,
    .supports = cpu_supports,
    .create = cpu_create,
    .destroy = cpu_destroy,
    .read = cpu_read,
    .write = cpu_write,
    .forward = cpu_forward,
    .backward = cpu_backward,
    .update = cpu_update,
    .metrics = cpu_metrics,
    .gradients = cpu_gradients,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .copy_scaled = cpu_copy_scaled,
    .read_value = cpu_read_value,
    .memory = cpu_memory,
    .profile = cpu_profile,
};

__attribute__((visibility("default"))) const struct ps_backend_ops *ps_backend_module(void);

const struct ps_backend_ops *ps_backend_module(void)
{
    return &table;
}
