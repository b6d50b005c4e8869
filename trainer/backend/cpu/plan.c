/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cpu/plan.h"

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
    switch (kind) {
    case PS_OP_CONV:
        return PS_STEP_CONV;
    case PS_OP_BN:
        return PS_STEP_NORM;
    case PS_OP_RELU:
        return PS_STEP_RELU;
    case PS_OP_ADD:
        return PS_STEP_ADD;
    case PS_OP_MAX_POOL:
        return PS_STEP_MAX_POOL;
    case PS_OP_AVG_POOL:
        return PS_STEP_AVG_POOL;
    case PS_OP_DENSE:
        break;
    }
    return PS_STEP_DENSE;
}

/* Steps in the order of the ops; taken[i] says that op i went into an earlier step. */
static void make_steps(struct ps_plan *plan, bool *taken)
{
    const struct ps_model *m = plan->model;
    for (int i = 0; i < m->op_count; i++) {
        if (taken[i])
            continue;
        const struct ps_op *op = &m->ops[i];
        struct ps_step *s = &plan->steps[plan->step_count++];
        *s = (struct ps_step){
            .kind = plain_kind(op->kind), .op = i, .in = {op->in[0], op->in[1]}, .out = op->out};
        if (op->kind != PS_OP_BN)
            continue;
        const struct ps_op *sum = only_reader(m, s->out, PS_OP_ADD);
        if (sum) {
            int other = sum->in[0] == s->out ? sum->in[1] : sum->in[0];
            if (m->values[other].producer < i) { /* it is there by now */
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
}

int ps_plan_make(struct ps_plan *ret, const struct ps_model *model, int block, struct ps_error *err)
{
    struct ps_plan plan = {.model = model};
    size_t values = (size_t)model->value_count, ops = (size_t)model->op_count;
    bool *taken = calloc(ops + 1, sizeof *taken);
    plan.steps = calloc(ops + 1, sizeof *plan.steps);
    plan.block = calloc(values, sizeof *plan.block);
    plan.last_use = calloc(values, sizeof *plan.last_use);
    if (!taken || !plan.steps || !plan.block || !plan.last_use) {
        free(taken);
        ps_plan_done(&plan);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    make_steps(&plan, taken);
    free(taken);
    plan.block[model->input] = 1;
    for (int v = 0; v < model->value_count; v++)
        plan.last_use[v] = -1;
    for (int i = 0; i < plan.step_count; i++) {
        const struct ps_step *s = &plan.steps[i];
        int in = plan.block[s->in[0]];
        plan.block[s->out] = s->kind == PS_STEP_CONV                                   ? block
                             : s->kind == PS_STEP_AVG_POOL || s->kind == PS_STEP_DENSE ? 1
                                                                                       : in;
        for (int k = 0; k < 2; k++)
            if (s->in[k] != PS_NONE) {
                plan.last_use[s->in[k]] = i;
                if (s->kind != PS_STEP_CONV && plan.block[s->in[k]] != in) {
                    int op = s->op;
                    ps_plan_done(&plan);
                    return ps_fail(
                        err, PS_UNIMPLEMENTED,
                        "backend cpu: op %d of model %s adds a value that went through a convolution to "
                        "one that did not",
                        op, model->name);
                }
            }
    }
    for (int v = 0; v < model->value_count; v++)
        if (plan.block[v] && plan.last_use[v] < 0 && v != model->output) {
            ps_plan_done(&plan);
            return ps_fail(err, PS_INVALID_ARGUMENT, "model %s: nothing reads value %d", model->name, v);
        }
    plan.last_use[model->output] = plan.step_count;
    *ret = plan;
    return 0;
}

void ps_plan_done(struct ps_plan *plan)
{
    free(plan->steps);
    free(plan->block);
    free(plan->last_use);
    *plan = (struct ps_plan){0};
}

int ps_plan_padded(const struct ps_plan *plan, int value)
{
    int b = plan->block[value] ? plan->block[value] : 1;
    return (plan->model->values[value].channels + b - 1) / b * b;
}

size_t ps_graph_bytes(const struct ps_graph *g, const struct ps_plan *plan, int v)
{
    return (size_t)g->count * (size_t)ps_plan_padded(plan, v) * (size_t)g->extents[v] *
           (size_t)g->extents[v] * sizeof(float);
}

struct ps_graph *ps_graph_free(struct ps_graph *g, const struct ps_plan *plan)
{
    if (!g)
        return NULL;
    for (int i = 0; g->steps && i < plan->step_count; i++) {
        ps_dnnl_call_done(&g->steps[i].forward);
        ps_dnnl_call_done(&g->steps[i].backward_data);
        ps_dnnl_call_done(&g->steps[i].backward_weights);
        free(g->steps[i].wide_source);
        free(g->steps[i].wide_destination);
    }
    free(g->extents);
    free(g->value_at);
    free(g->steps);
    free(g);
    return NULL;
}

/* Replaces a reference implementation of the weights' gradient; see plan.h. */
static int widen_conv(struct ps_graph_step *t, struct ps_dnnl *dnnl, struct ps_dnnl_conv shape,
                      int source_block, int destination_block, const struct ps_dnnl_layout *weights,
                      struct ps_error *err)
{
    struct ps_dnnl_call wide = {0};
    if (shape.in_extent >= shape.kernel || strncmp(ps_dnnl_call_name(&t->backward_weights), "ref", 3) != 0)
        return 0;
    shape.in_extent = shape.kernel;
    shape.out_extent = 2 * shape.pad / shape.stride + 1;
    struct ps_dnnl_layout source = ps_dnnl_activations(shape.batch, shape.in, shape.in_extent, source_block);
    struct ps_dnnl_layout destination =
        ps_dnnl_activations(shape.batch, shape.out, shape.out_extent, destination_block);
    int r = ps_dnnl_conv_create(dnnl, PS_DNNL_BACKWARD_WEIGHTS, &shape, &source, weights, &destination, &wide,
                                err);
    if (r < 0)
        return r;
    if (strncmp(ps_dnnl_call_name(&wide), "ref", 3) == 0) {
        ps_dnnl_call_done(&wide);
        return 0;
    }
    ps_dnnl_call_done(&t->backward_weights);
    t->backward_weights = wide;
    t->wide_in = shape.in_extent;
    t->wide_out = shape.out_extent;
    t->wide_source = calloc(1, ps_dnnl_bytes(&source));
    t->wide_destination = calloc(1, ps_dnnl_bytes(&destination));
    return t->wide_source && t->wide_destination ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
}

static int choose_conv(struct ps_graph *g, const struct ps_plan *plan, struct ps_dnnl *dnnl, int i, bool data,
                       struct ps_conv_layouts *l, struct ps_error *err)
{
    const struct ps_step *s = &plan->steps[i];
    const struct ps_op *op = &plan->model->ops[s->op];
    const struct ps_dnnl_conv shape = {
        .batch = g->count,
        .in = plan->model->values[s->in[0]].channels,
        .in_extent = g->extents[s->in[0]],
        .out = plan->model->values[s->out].channels,
        .out_extent = g->extents[s->out],
        .kernel = op->kernel,
        .stride = op->stride,
        .pad = op->pad,
    };
    struct ps_graph_step *t = &g->steps[i];
    struct ps_dnnl_layout source =
        ps_dnnl_activations(g->count, shape.in, shape.in_extent, plan->block[s->in[0]]);
    struct ps_dnnl_layout destination =
        ps_dnnl_activations(g->count, shape.out, shape.out_extent, plan->block[s->out]);
    struct ps_dnnl_layout any = ps_dnnl_any_weights(shape.out, shape.in, shape.kernel);
    int r = ps_dnnl_conv_create(dnnl, PS_DNNL_FORWARD, &shape, &source, l->known ? &l->forward : &any,
                                &destination, &t->forward, err);
    if (r == 0 && g->training && data)
        r = ps_dnnl_conv_create(dnnl, PS_DNNL_BACKWARD_DATA, &shape, &source,
                                l->has_backward ? &l->backward : &any, &destination, &t->backward_data, err);
    if (r == 0 && g->training)
        r = ps_dnnl_conv_create(dnnl, PS_DNNL_BACKWARD_WEIGHTS, &shape, &source,
                                l->has_gradient ? &l->gradient : &any, &destination, &t->backward_weights,
                                err);
    if (r == 0 && g->training)
        r = widen_conv(t, dnnl, shape, plan->block[s->in[0]], plan->block[s->out],
                       l->has_gradient ? &l->gradient : &any, err);
    if (r < 0)
        return r;
    l->forward = t->forward.layout[1];
    l->known = true;
    if (g->training) {
        if (data) {
            l->backward = t->backward_data.layout[1];
            l->has_backward = true;
        }
        l->gradient = t->backward_weights.layout[1];
        l->has_gradient = true;
    }
    const size_t needs[] = {t->forward.scratchpad, t->backward_data.scratchpad,
                            t->backward_weights.scratchpad};
    for (int k = 0; k < 3; k++)
        g->scratchpad = needs[k] > g->scratchpad ? needs[k] : g->scratchpad;
    return 0;
}

/* Training keeps every value; evaluation reuses a value's memory after its last reader, and works in place.
 */
static void place_values(struct ps_graph *g, const struct ps_plan *plan, struct ps_arena *arena)
{
    const struct ps_model *m = plan->model;
    for (int v = 0; v < m->value_count; v++)
        g->value_at[v] = SIZE_MAX;
    g->value_at[m->input] = ps_arena_take(arena, ps_graph_bytes(g, plan, m->input));
    for (int i = 0; i < plan->step_count; i++) {
        const struct ps_step *s = &plan->steps[i];
        bool in_place = !g->training && plan->last_use[s->in[0]] == i &&
                        (s->kind == PS_STEP_NORM || s->kind == PS_STEP_RELU || s->kind == PS_STEP_ADD);
        g->value_at[s->out] =
            in_place ? g->value_at[s->in[0]] : ps_arena_take(arena, ps_graph_bytes(g, plan, s->out));
        for (int k = 0; k < 2 && !g->training; k++) {
            int v = s->in[k];
            if (v == PS_NONE || plan->last_use[v] != i || (k == 0 && in_place) || (k == 1 && v == s->in[0]))
                continue;
            ps_arena_give(arena, g->value_at[v]);
        }
    }
    g->activations = arena->peak;
}

struct parts { /* of a value's gradient */
    size_t at[PS_GRAD_SOURCES];
    int count;
};

static bool add_part(struct parts *p, size_t at)
{
    if (at == SIZE_MAX || p->count == PS_GRAD_SOURCES)
        return false;
    p->at[p->count++] = at;
    return true;
}

/* Plays the backward pass through: who makes which part of which gradient, and where it lies. */
static bool place_gradients(struct ps_graph *g, const struct ps_plan *plan, bool input_grad,
                            struct parts *parts, struct ps_arena *arena)
{
    const struct ps_model *m = plan->model;
    if (!add_part(&parts[m->output], ps_arena_take(arena, ps_graph_bytes(g, plan, m->output))))
        return false;
    for (int i = plan->step_count; i-- > 0;) {
        const struct ps_step *s = &plan->steps[i];
        struct ps_graph_step *t = &g->steps[i];
        struct parts *of = &parts[s->out];
        bool kept[PS_GRAD_SOURCES] = {false}; /* the memory lives on as a part of an input's gradient */
        t->to[0] = t->to[1] = SIZE_MAX;
        t->grad_count = of->count;
        memcpy(t->grad, of->at, sizeof t->grad);
        for (int k = 0; k < 2; k++) {
            int v = s->in[k];
            if (v == PS_NONE || (v == m->input && !input_grad))
                continue;
            bool in_place = s->kind == PS_STEP_NORM || s->kind == PS_STEP_RELU || s->kind == PS_STEP_ADD;
            /* A norm leaves the masked gradient in its first part: that is its second input's gradient as it
             * is. Its first input's takes another part's memory if there is one. */
            int part = s->kind == PS_STEP_NORM && s->in[1] != PS_NONE ? 1 - k : k;
            if (in_place && part < of->count && !kept[part]) {
                t->to[k] = of->at[part];
                kept[part] = true;
            } else {
                t->to[k] = ps_arena_take(arena, ps_graph_bytes(g, plan, v));
            }
            if (!add_part(&parts[v], t->to[k]))
                return false;
        }
        for (int k = 0; k < of->count; k++)
            if (!kept[k])
                ps_arena_give(arena, of->at[k]);
    }
    g->input_grad_count = parts[m->input].count; /* no step gives their memory back */
    memcpy(g->input_grad, parts[m->input].at, sizeof g->input_grad);
    g->gradients = arena->peak;
    return true;
}

int ps_graph_make(struct ps_graph **ret, const struct ps_plan *plan, struct ps_dnnl *dnnl, int count,
                  int resolution, bool training, bool input_grad, struct ps_conv_layouts *layouts,
                  struct ps_error *err)
{
    const struct ps_model *m = plan->model;
    struct ps_graph *g = calloc(1, sizeof *g);
    struct ps_arena *arena = calloc(1, sizeof *arena);
    struct parts *parts = calloc((size_t)m->value_count, sizeof *parts);
    int r = 0;
    if (g) {
        g->count = count;
        g->resolution = resolution;
        g->training = training;
        g->extents = calloc((size_t)m->value_count, sizeof *g->extents);
        g->value_at = calloc((size_t)m->value_count, sizeof *g->value_at);
        g->steps = calloc((size_t)plan->step_count + 1, sizeof *g->steps);
    }
    if (!g || !arena || !parts || !g->extents || !g->value_at || !g->steps)
        r = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (r == 0)
        r = ps_model_extents(m, resolution, g->extents, err);
    for (int i = 0; r == 0 && i < plan->step_count; i++)
        if (plan->steps[i].kind == PS_STEP_CONV)
            r = choose_conv(g, plan, dnnl, i, plan->steps[i].in[0] != m->input || input_grad, &layouts[i],
                            err);
    if (r == 0) {
        place_values(g, plan, arena);
        bool ok = true;
        for (int i = 0; i < plan->step_count; i++)
            ok = ok && g->value_at[plan->steps[i].out] != SIZE_MAX;
        if (training) {
            *arena = (struct ps_arena){0};
            ok = ok && place_gradients(g, plan, input_grad, parts, arena);
        }
        if (!ok)
            r = ps_fail(err, PS_UNIMPLEMENTED, "model %s has too many values alive at one time", m->name);
    }
    free(arena);
    free(parts);
    if (r < 0) {
        ps_graph_free(g, plan);
        return r;
    }
    *ret = g;
    return 0;
}
