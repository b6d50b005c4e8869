/* SPDX-License-Identifier: Apache-2.0
 * Optimizer steps over flat float32 vectors in host memory, for backends that keep their state there.
 * The formulas are those of torch.optim.SGD (dampening 0, no maximize) and torch.optim.Adam (no amsgrad):
 *
 *   SGD    g += weight_decay * p;  b = step 1 ? g : momentum * b + g;  p -= lr * (nesterov ? g + momentum * b
 * : b) Adam   g += weight_decay * p;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2 p
 * -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 *
 * weight_decay applies to the parameters whose `decay` is set in the model. Numbers of the step are worked
 * out in double, elements in float.
 */
#ifndef PARAMSYNC_OPTIM_OPTIM_H
#define PARAMSYNC_OPTIM_OPTIM_H

#include "trainer/backend/backend.h"

#include <stddef.h>

/* Checks a step's numbers: step >= 1, finite rates, betas in [0, 1), Nesterov only with momentum. */
int ps_optim_check(const struct ps_optimizer_step *step, struct ps_error *err);

/* Updates elements [begin, end) of the flat vectors, each of model->param_elements floats; ranges that do not
 * overlap may be done by different threads, and the result does not depend on how the vector is cut.
 * moment1: SGD's momentum buffer (may be NULL with momentum 0) or Adam's m; moment2: Adam's v (SGD: may be
 * NULL). */
void ps_optim_apply(const struct ps_model *model, const struct ps_optimizer_step *step, size_t begin,
                    size_t end, float *params, const float *grads, float *moment1, float *moment2);

#endif
