/* SPDX-License-Identifier: Apache-2.0
 * The walk over the ops, for one element type; included by ref.c after kernels.h, twice. */

static REAL *K(value)(const struct ps_backend *b, int v)
{
    return (REAL *)b->values + b->value_at[v];
}

static REAL *K(value_grad)(const struct ps_backend *b, int v)
{
    if (v == b->model->input && !b->input_grad)
        return NULL;
    return (REAL *)b->value_grads + b->value_at[v];
}

static REAL *K(param)(const struct ps_backend *b, int id)
{
    return (REAL *)b->params + b->model->params[id].offset;
}

static REAL *K(grad)(const struct ps_backend *b, int id)
{
    return (REAL *)b->grads + b->model->params[id].offset;
}

static void K(load_images)(struct ps_backend *b, const struct ps_batch *batch)
{
    int hw = batch->resolution * batch->resolution, channels = b->model->values[b->model->input].channels;
    REAL *x = K(value)(b, b->model->input);
    size_t at = 0;
    for (int i = 0; i < batch->count; i++)
        for (int c = 0; c < channels; c++) {
            REAL scale = (REAL)batch->scale[c % 3], shift = (REAL)batch->shift[c % 3];
            for (int j = 0; j < hw; j++, at++)
                x[at] = scale * (batch->pixel == PS_PIXEL_U8 ? (REAL)((const uint8_t *)batch->images)[at]
                                                             : (REAL)((const float *)batch->images)[at]) +
                        shift;
        }
}

static int K(forward_ops)(struct ps_backend *b, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    int n = b->count;
    for (int i = 0; i < m->op_count; i++) {
        const struct ps_op *op = &m->ops[i];
        int c = m->values[op->in[0]].channels, h = b->extents[op->in[0]];
        int oc = m->values[op->out].channels, oh = b->extents[op->out];
        const REAL *x = K(value)(b, op->in[0]);
        REAL *y = K(value)(b, op->out);
        size_t elements = (size_t)n * (size_t)oc * (size_t)(oh * oh);
        switch (op->kind) {
        case PS_OP_CONV:
            K(conv_forward)(n, c, h, oc, oh, op, x, K(param)(b, op->param[0]), y, (REAL *)b->columns);
            break;
        case PS_OP_BN: {
            const double *moments = NULL;
            if (b->mode == PS_TRAIN) {
                K(bn_moments)(n, c, h * h, x, b->own);
                int r = ps_bn_share(&b->exchange, b->own, c, PS_BN_MOMENTS, &moments, err);
                if (r < 0)
                    return r;
            }
            K(bn_forward)
            (n, c, h * h, op, moments, x, K(param)(b, op->param[0]), K(param)(b, op->param[1]),
             (REAL *)b->buffers + m->buffers[op->buffer[0]].offset,
             (REAL *)b->buffers + m->buffers[op->buffer[1]].offset, (REAL *)b->stats + b->stats_at[i], y);
            break;
        }
        case PS_OP_RELU:
            K(relu_forward)(elements, x, y);
            break;
        case PS_OP_ADD: {
            const REAL *z = K(value)(b, op->in[1]);
            for (size_t k = 0; k < elements; k++)
                y[k] = x[k] + z[k];
            break;
        }
        case PS_OP_MAX_POOL:
            K(max_pool_forward)(n * c, h, oh, op, x, y, b->chosen + b->chosen_at[i]);
            break;
        case PS_OP_AVG_POOL:
            K(avg_pool_forward)(n * c, h * h, x, y);
            break;
        case PS_OP_DENSE:
            K(dense_forward)(n, c, oc, x, K(param)(b, op->param[0]), K(param)(b, op->param[1]), y);
            break;
        }
    }
    return 0;
}

static int K(backward_ops)(struct ps_backend *b, ps_grad_ready ready, void *ready_context,
                           struct ps_error *err)
{
    const struct ps_model *m = b->model;
    int n = b->count;
    for (int i = m->op_count; i-- > 0;) {
        const struct ps_op *op = &m->ops[i];
        int c = m->values[op->in[0]].channels, h = b->extents[op->in[0]];
        int oc = m->values[op->out].channels, oh = b->extents[op->out];
        const REAL *x = K(value)(b, op->in[0]), *y = K(value)(b, op->out),
                   *dy = (REAL *)b->value_grads + b->value_at[op->out];
        REAL *dx = K(value_grad)(b, op->in[0]);
        size_t elements = (size_t)n * (size_t)oc * (size_t)(oh * oh);
        switch (op->kind) {
        case PS_OP_CONV:
            K(conv_backward)
            (n, c, h, oc, oh, op, x, K(param)(b, op->param[0]), dy, dx, K(grad)(b, op->param[0]),
             (REAL *)b->columns);
            break;
        case PS_OP_BN: {
            const REAL *stats = (REAL *)b->stats + b->stats_at[i];
            const double *shared = NULL;
            K(bn_sums)(n, c, h * h, x, stats, dy, b->own);
            if (b->mode == PS_TRAIN) {
                int r = ps_bn_share(&b->exchange, b->own, c, PS_BN_SUMS, &shared, err);
                if (r < 0)
                    return r;
            }
            K(bn_backward)
            (n, c, h * h, b->own, shared, x, K(param)(b, op->param[0]), stats, dy, dx,
             K(grad)(b, op->param[0]), K(grad)(b, op->param[1]));
            break;
        }
        case PS_OP_RELU:
            if (dx)
                K(relu_backward)(elements, y, dy, dx);
            break;
        case PS_OP_ADD: {
            REAL *dz = K(value_grad)(b, op->in[1]);
            for (size_t k = 0; dx && k < elements; k++)
                dx[k] += dy[k];
            for (size_t k = 0; dz && k < elements; k++)
                dz[k] += MUTATE(12, dy[k]);
            break;
        }
        case PS_OP_MAX_POOL:
            if (dx)
                K(max_pool_backward)(n * c, h, oh, b->chosen + b->chosen_at[i], dy, dx);
            break;
        case PS_OP_AVG_POOL:
            if (dx)
                K(avg_pool_backward)(n * c, h * h, dy, dx);
            break;
        case PS_OP_DENSE:
            K(dense_backward)
            (n, c, oc, x, K(param)(b, op->param[0]), dy, dx, K(grad)(b, op->param[0]),
             K(grad)(b, op->param[1]));
            break;
        }
        /* PyTorch's order: a BN's scale before its shift, a dense layer's bias before its weight. */
        bool bias_first = op->kind == PS_OP_DENSE;
        for (int k = 0; ready && k < 2; k++) {
            int id = op->param[bias_first ? 1 - k : k];
            if (id != PS_NONE)
                ready(ready_context, id);
        }
    }
    return 0;
}

static int K(backward_pass)(struct ps_backend *b, bool accumulate, const float *cotangent,
                            ps_grad_ready ready, void *ready_context, struct ps_error *err)
{
    const struct ps_model *m = b->model;
    size_t outputs = ps_ref_value_elements(b, m->output);
    REAL *seed = K(value_grad)(b, m->output);
    memset(b->value_grads, 0, b->value_elements * sizeof(REAL));
    if (cotangent)
        for (size_t i = 0; i < outputs; i++)
            seed[i] = (REAL)cotangent[i];
    else
        memcpy(seed, b->loss_grad, outputs * sizeof(REAL));
    if (!accumulate)
        memset(b->grads, 0, m->param_elements * sizeof(REAL));
    return K(backward_ops)(b, ready, ready_context, err);
}

static void K(step)(struct ps_backend *b, const struct ps_optimizer_step *s)
{
    for (int i = 0; i < b->model->param_count; i++) {
        const struct ps_param *p = &b->model->params[i];
        REAL *m1 = (REAL *)b->moment1 + p->offset, *m2 = (REAL *)b->moment2 + p->offset;
        if (s->kind == PS_ADAM)
            K(adam)(p, s, K(param)(b, i), K(grad)(b, i), m1, m2);
        else
            K(sgd)(p, s, K(param)(b, i), K(grad)(b, i), m1);
    }
}
