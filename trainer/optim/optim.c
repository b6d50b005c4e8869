/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/optim/optim.h"

#include <math.h>

int ps_optim_check(const struct ps_optimizer_step *s, struct ps_error *err)
{
    if (s->step < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "optimizer step %lld: the first is 1", (long long)s->step);
    if (!isfinite(s->lr) || !isfinite(s->weight_decay) || s->weight_decay < 0)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "optimizer: learning rate %g and weight decay %g must be finite", s->lr,
                       s->weight_decay);
    if (s->kind == PS_SGD) {
        if (!(s->momentum >= 0) || !isfinite(s->momentum))
            return ps_fail(err, PS_INVALID_ARGUMENT, "optimizer: momentum %g must not be negative",
                           s->momentum);
        if (s->nesterov && s->momentum == 0)
            return ps_fail(err, PS_INVALID_ARGUMENT, "optimizer: Nesterov needs a momentum above 0");
    } else if (!(s->beta1 >= 0 && s->beta1 < 1 && s->beta2 >= 0 && s->beta2 < 1 && s->eps >= 0)) {
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "optimizer: Adam needs betas in [0, 1) and eps >= 0 (%g, %g, %g)", s->beta1, s->beta2,
                       s->eps);
    }
    return 0;
}

static void sgd_plain(size_t n, float *restrict p, const float *restrict g, float lr, float decay)
{
    for (size_t i = 0; i < n; i++)
        p[i] -= lr * (g[i] + decay * p[i]);
}

static void sgd_first(size_t n, float *restrict p, const float *restrict g, float *restrict b, float lr,
                      float decay, float gain)
{
    for (size_t i = 0; i < n; i++) {
        float d = g[i] + decay * p[i];
        b[i] = d;
        p[i] -= lr * (d * gain); /* gain is 1 + momentum with Nesterov, else 1 */
    }
}

static void sgd_momentum(size_t n, float *restrict p, const float *restrict g, float *restrict b, float lr,
                         float decay, float momentum)
{
    for (size_t i = 0; i < n; i++) {
        float d = g[i] + decay * p[i];
        b[i] = momentum * b[i] + d;
        p[i] -= lr * b[i];
    }
}

static void sgd_nesterov(size_t n, float *restrict p, const float *restrict g, float *restrict b, float lr,
                         float decay, float momentum)
{
    for (size_t i = 0; i < n; i++) {
        float d = g[i] + decay * p[i];
        b[i] = momentum * b[i] + d;
        p[i] -= lr * (d + momentum * b[i]);
    }
}

struct adam {
    float rate; /* lr / (1 - beta1^step) */
    float root; /* sqrt(1 - beta2^step) */
    float beta1, beta2, rest1, rest2, eps, decay;
};

static void adam(size_t n, float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                 const struct adam *a)
{
    const float rate = a->rate, root = a->root, beta1 = a->beta1, beta2 = a->beta2, rest1 = a->rest1,
                rest2 = a->rest2, eps = a->eps, decay = a->decay;
    for (size_t i = 0; i < n; i++) {
        float d = g[i] + decay * p[i];
        m[i] = beta1 * m[i] + rest1 * d;
        v[i] = beta2 * v[i] + rest2 * d * d;
        p[i] -= rate * m[i] / (sqrtf(v[i]) / root + eps);
    }
}

void ps_optim_apply(const struct ps_model *model, const struct ps_optimizer_step *s, size_t begin, size_t end,
                    float *params, const float *grads, float *moment1, float *moment2)
{
    struct adam a = {
        .rate = (float)(s->lr / (1 - pow(s->beta1, (double)s->step))),
        .root = (float)sqrt(1 - pow(s->beta2, (double)s->step)),
        .beta1 = (float)s->beta1,
        .beta2 = (float)s->beta2,
        .rest1 = (float)(1 - s->beta1),
        .rest2 = (float)(1 - s->beta2),
        .eps = (float)s->eps,
    };
    float lr = (float)s->lr, momentum = (float)s->momentum;
    for (int i = 0; i < model->param_count; i++) {
        const struct ps_param *q = &model->params[i];
        size_t from = q->offset > begin ? q->offset : begin;
        size_t to = q->offset + q->count < end ? q->offset + q->count : end;
        if (from >= to)
            continue;
        size_t n = to - from;
        float decay = q->decay ? (float)s->weight_decay : 0;
        float *p = params + from;
        const float *g = grads + from;
        if (s->kind == PS_ADAM) {
            a.decay = decay;
            adam(n, p, g, moment1 + from, moment2 + from, &a);
        } else if (s->momentum == 0) {
            sgd_plain(n, p, g, lr, decay);
        } else if (s->step == 1) {
            sgd_first(n, p, g, moment1 + from, lr, decay, s->nesterov ? 1 + momentum : 1);
        } else if (s->nesterov) {
            sgd_nesterov(n, p, g, moment1 + from, lr, decay, momentum);
        } else {
            sgd_momentum(n, p, g, moment1 + from, lr, decay, momentum);
        }
    }
}
