/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cuda/plan.h"

#include "trainer/backend/arena.h"

#include <stdlib.h>
#include <string.h>

/* The op that alone reads value v, if it is of this kind; else NULL. The model's output is read from outside
 * too. */
static const struct ps_op *only_reader(const struct ps_model *m, int v, enum ps_op_kind kind)
{
    const struct ps_op *found = NULL;
    if (v == m->output)
        return NULL;
    for (int i = 0; i < m->op_count; i++)
        for (int k = 0; k < 2; k++)
            if (m->ops[i].in[k] == v) {
                if (found)
                    return NULL;
                found = &m->ops[i];
            }
    return found && found->kind == kind ? found : NULL;
}

static enum ps_step_kind plain_kind(enum ps_op_kind kind)
{
    static const enum ps_step_kind kinds[] = {
        [PS_OP_CONV] = PS_STEP_CONV,         [PS_OP_BN] = PS_STEP_NORM,
        [PS_OP_RELU] = PS_STEP_RELU,         [PS_OP_ADD] = PS_STEP_ADD,
        [PS_OP_MAX_POOL] = PS_STEP_MAX_POOL, [PS_OP_AVG_POOL] = PS_STEP_AVG_POOL,
        [PS_OP_DENSE] = PS_STEP_DENSE};
    return kinds[kind];
}

/* Takes the residual sum and the ReLU behind a norm into its step. */
static void fuse_norm(struct ps_step *s, const struct ps_model *m, bool *taken)
{
    const struct ps_op *sum = only_reader(m, s->out, PS_OP_ADD);
    if (sum) {
        int other = sum->in[0] == s->out ? sum->in[1] : sum->in[0];
        if (m->values[other].producer < s->op) { /* it is there by now */
            taken[sum - m->ops] = true;
            s->in[1] = other;
            s->out = sum->out;
        }
    }
    const struct ps_op *relu = only_reader(m, s->out, PS_OP_RELU);
    if (relu) {
        taken[relu - m->ops] = true;
        s->relu = true;
        s->out = relu->out;
    }
}

/* Types: everything is of the plan's type, but a dense layer's output is float. */
static int check_types(const struct ps_cuda_plan *plan, enum ps_cuda_type type, struct ps_error *err)
{
    for (int i = 0; i < plan->step_count; i++)
        for (int k = 0; k < 2; k++) {
            int v = plan->steps[i].in[k];
            if (v != PS_NONE && plan->type[v] != type)
                return ps_fail(err, PS_UNIMPLEMENTED,
                               "backend cuda: op %d of model %s reads a dense layer's output, which bf16 has "
                               "not: use fp32",
                               plan->steps[i].op, plan->model->name);
        }
    return 0;
}

static int fill_plan(struct ps_cuda_plan *plan, enum ps_cuda_type type, int input_multiple, bool *taken,
                     struct ps_error *err)
{
    const struct ps_model *m = plan->model;
    bool convs_only = true;
    for (int v = 0; v < m->value_count; v++) {
        plan->last_use[v] = -1;
        plan->channels[v] = m->values[v].channels;
        plan->type[v] = type;
    }
    for (int i = 0; i < m->op_count; i++) {
        if (taken[i])
            continue;
        const struct ps_op *op = &m->ops[i];
        struct ps_step *s = &plan->steps[plan->step_count++];
        *s = (struct ps_step){
            .kind = plain_kind(op->kind), .op = i, .in = {op->in[0], op->in[1]}, .out = op->out};
        if (s->kind == PS_STEP_NORM) {
            const int c = m->values[op->out].channels;
            fuse_norm(s, m, taken);
            s->stats_at = plan->stats;
            plan->stats += ps_norm_stats((unsigned)c);
            plan->widest = c > plan->widest ? c : plan->widest;
        }
        if (s->kind == PS_STEP_DENSE)
            plan->type[s->out] = PS_CUDA_F32;
        plan->stored[s->out] = true;
        for (int k = 0; k < 2; k++)
            if (s->in[k] != PS_NONE) {
                plan->last_use[s->in[k]] = plan->step_count - 1;
                convs_only = convs_only && (s->in[k] != m->input || s->kind == PS_STEP_CONV);
            }
    }
    plan->stored[m->input] = true;
    for (int v = 0; v < m->value_count; v++)
        if (plan->stored[v] && plan->last_use[v] < 0 && v != m->output)
            return ps_fail(err, PS_INVALID_ARGUMENT, "model %s: nothing reads value %d", m->name, v);
    plan->last_use[m->output] = plan->step_count;
    if (convs_only)
        plan->channels[m->input] =
            (plan->channels[m->input] + input_multiple - 1) / input_multiple * input_multiple;
    return check_types(plan, type, err);
}

int ps_cuda_plan_make(struct ps_cuda_plan *ret, const struct ps_model *model, enum ps_cuda_type type,
                      int input_multiple, struct ps_error *err)
{
    struct ps_cuda_plan plan = {.model = model};
    const size_t values = (size_t)model->value_count, ops = (size_t)model->op_count;
    bool *taken = calloc(ops + 1, sizeof *taken);
    plan.steps = calloc(ops + 1, sizeof *plan.steps);
    plan.stored = calloc(values, sizeof *plan.stored);
    plan.channels = calloc(values, sizeof *plan.channels);
    plan.last_use = calloc(values, sizeof *plan.last_use);
    plan.type = calloc(values, sizeof *plan.type);
    int code = taken && plan.steps && plan.stored && plan.channels && plan.last_use && plan.type
                   ? fill_plan(&plan, type, input_multiple, taken, err)
                   : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    free(taken);
    if (code)
        ps_cuda_plan_done(&plan);
    else
        *ret = plan;
    return code;
}

void ps_cuda_plan_done(struct ps_cuda_plan *plan)
{
    free(plan->steps);
    free(plan->stored);
    free(plan->channels);
    free(plan->last_use);
    free(plan->type);
    *plan = (struct ps_cuda_plan){0};
}

unsigned ps_graph_rows(const struct ps_graph *g, int v)
{
    return (unsigned)g->count * (unsigned)g->extents[v] * (unsigned)g->extents[v];
}

size_t ps_graph_elements(const struct ps_graph *g, const struct ps_cuda_plan *plan, int v)
{
    return (size_t)ps_graph_rows(g, v) * (size_t)plan->channels[v];
}

static size_t bytes_of(const struct ps_graph *g, const struct ps_cuda_plan *plan, int v)
{
    return ps_graph_elements(g, plan, v) * (plan->type[v] == PS_CUDA_BF16 ? 2 : 4);
}

struct ps_graph *ps_graph_free(struct ps_graph *g, const struct ps_cuda_plan *plan)
{
    if (!g)
        return NULL;
    for (int i = 0; g->steps && i < plan->step_count; i++)
        ps_conv_free(g->steps[i].conv);
    free(g->extents);
    free(g->value_at);
    free(g->steps);
    free(g);
    return NULL;
}

/* Training keeps every value; evaluation reuses a value's memory after its last reader, and works in place.
 */
static bool place_values(struct ps_graph *g, const struct ps_cuda_plan *plan, struct ps_arena *arena)
{
    const struct ps_model *m = plan->model;
    size_t end = 0; /* training: one behind the other, however many */
    bool ok = true;
    for (int v = 0; v < m->value_count; v++)
        g->value_at[v] = SIZE_MAX;
    for (int i = -1; i < plan->step_count; i++) {
        const struct ps_step *s = i < 0 ? NULL : &plan->steps[i];
        const int out = s ? s->out : m->input;
        const size_t bytes = bytes_of(g, plan, out);
        if (g->training) {
            g->value_at[out] = end;
            end += (bytes + PS_ARENA_ALIGN - 1) / PS_ARENA_ALIGN * PS_ARENA_ALIGN;
            continue;
        }
        const bool in_place = s && plan->last_use[s->in[0]] == i &&
                              (s->kind == PS_STEP_NORM || s->kind == PS_STEP_RELU || s->kind == PS_STEP_ADD);
        g->value_at[out] = in_place ? g->value_at[s->in[0]] : ps_arena_take(arena, bytes);
        ok = ok && g->value_at[out] != SIZE_MAX;
        for (int k = 0; s && k < 2; k++) {
            const int v = s->in[k];
            if (v != PS_NONE && plan->last_use[v] == i && !(k == 0 && in_place) && !(k == 1 && v == s->in[0]))
                ps_arena_give(arena, g->value_at[v]);
        }
    }
    g->activations = g->training ? end : arena->peak;
    return ok;
}

/* Plays the backward pass through: the first reader behind a value writes its gradient, others add, and the
 * memory is free when the value's producer has gone back. */
static bool place_gradients(struct ps_graph *g, const struct ps_cuda_plan *plan, bool input_grad, size_t *at,
                            struct ps_arena *arena)
{
    const struct ps_model *m = plan->model;
    for (int v = 0; v < m->value_count; v++)
        at[v] = SIZE_MAX;
    at[m->output] = ps_arena_take(arena, bytes_of(g, plan, m->output));
    for (int i = plan->step_count; i-- > 0;) {
        const struct ps_step *s = &plan->steps[i];
        struct ps_graph_step *t = &g->steps[i];
        t->grad = at[s->out];
        for (int k = 0; k < 2; k++) {
            const int v = s->in[k];
            t->to[k] = SIZE_MAX;
            if (v == PS_NONE || (v == m->input && !input_grad))
                continue;
            t->add[k] = at[v] != SIZE_MAX;
            if (!t->add[k] && (at[v] = ps_arena_take(arena, bytes_of(g, plan, v))) == SIZE_MAX)
                return false;
            t->to[k] = at[v];
        }
        ps_arena_give(arena, t->grad);
    }
    g->input_grad = at[m->input];
    g->gradients = arena->peak;
    return true;
}

static int make_convs(struct ps_graph *g, const struct ps_cuda_plan *plan,
                      const struct ps_conv_context *context, struct ps_error *err)
{
    for (int i = 0; i < plan->step_count; i++) {
        const struct ps_step *s = &plan->steps[i];
        const struct ps_op *op = &plan->model->ops[s->op];
        if (s->kind != PS_STEP_CONV)
            continue;
        const struct ps_conv_shape shape = {.batch = g->count,
                                            .in = plan->channels[s->in[0]],
                                            .in_extent = g->extents[s->in[0]],
                                            .out = plan->channels[s->out],
                                            .out_extent = g->extents[s->out],
                                            .kernel = op->kernel,
                                            .stride = op->stride,
                                            .pad = op->pad};
        int code =
            ps_conv_make(&g->steps[i].conv, context, &shape, g->training && g->steps[i].to[0] != SIZE_MAX,
                         g->training, &g->workspace, err);
        if (code)
            return code;
    }
    return 0;
}

int ps_graph_make(struct ps_graph **ret, const struct ps_cuda_plan *plan, const struct ps_conv_context *convs,
                  int count, int resolution, bool training, bool input_grad, struct ps_error *err)
{
    const struct ps_model *m = plan->model;
    const size_t values = (size_t)m->value_count;
    struct ps_graph *g = calloc(1, sizeof *g);
    struct ps_arena *arenas = calloc(2, sizeof *arenas);
    size_t *at = calloc(values, sizeof *at);
    int code = 0;
    if (g) {
        *g = (struct ps_graph){
            .count = count, .resolution = resolution, .training = training, .input_grad = SIZE_MAX};
        g->extents = calloc(values, sizeof *g->extents);
        g->value_at = calloc(values, sizeof *g->value_at);
        g->steps = calloc((size_t)plan->step_count + 1, sizeof *g->steps);
    }
    if (!g || !arenas || !at || !g->extents || !g->value_at || !g->steps)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        code = ps_model_extents(m, resolution, g->extents, err);
    if (!code && (!place_values(g, plan, &arenas[0]) ||
                  (training && !place_gradients(g, plan, input_grad, at, &arenas[1]))))
        code = ps_fail(err, PS_UNIMPLEMENTED, "model %s has too many values alive at one time", m->name);
    for (int i = 0; !code && i < plan->step_count; i++)
        if (plan->steps[i].kind == PS_STEP_NORM) {
            const struct ps_step *s = &plan->steps[i];
            const struct ps_norm_shape shape = {plan->type[s->out], ps_graph_rows(g, s->out),
                                                (unsigned)plan->channels[s->out]};
            const size_t need = ps_norm_partials(&shape);
            g->partials = need > g->partials ? need : g->partials;
        }
    if (!code && convs)
        code = make_convs(g, plan, convs, err);
    free(arenas);
    free(at);
    if (code) {
        ps_graph_free(g, plan);
        return code;
    }
    *ret = g;
    return 0;
}
