/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/optim/optim.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Four weights that decay and four biases that don't, all with the same gradients. */
static const float start[4] = {0.5f, -1.25f, 2.0f, 0.03125f};
static const float grad[5][4] = {{0.25f, -0.5f, 1.0f, 0.0625f},
                                 {-0.125f, 0.75f, 0.5f, -0.25f},
                                 {1.5f, 0.375f, -0.25f, 0.125f},
                                 {0.0625f, -1.0f, 0.875f, 0.5f},
                                 {-0.5f, 0.25f, 0.125f, -0.75f}};

/* After five steps with weight decay 0.01: torch.optim (1.13) in double precision. */
struct golden {
    struct ps_optimizer_step step;
    double expected[4];
};
static const struct golden goldens[] = {
    {{.kind = PS_SGD, .lr = 0.1, .weight_decay = 0.01},
     {0.37912348258997447, -1.2312624501311988, 1.765606755459898, 0.06236908718764997}},
    {{.kind = PS_SGD, .lr = 0.1, .weight_decay = 0.01, .momentum = 0.9},
     {0.06657066260177436, -1.223542167740699, 1.2834732055070976, 0.03732495153338747}},
    {{.kind = PS_SGD, .lr = 0.1, .weight_decay = 0.01, .momentum = 0.9, .nesterov = true},
     {-0.009954652265321894, -1.2075163411535812, 1.1227533491869226, 0.06784409834265623}},
    {{.kind = PS_ADAM, .lr = 0.01, .weight_decay = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
     {0.471761458031932, -1.2437196455024093, 1.9608075567717207, 0.02527201003533129}},
};

static void run(const struct ps_model *m, struct ps_optimizer_step s, float p[8], size_t cut)
{
    float m1[8] = {0}, m2[8] = {0};
    for (int i = 0; i < 8; i++)
        p[i] = start[i % 4];
    for (int t = 1; t <= 5; t++) {
        float g[8];
        for (int i = 0; i < 8; i++)
            g[i] = grad[t - 1][i % 4];
        s.step = t;
        ps_optim_apply(m, &s, 0, cut, p, g, m1, m2);
        ps_optim_apply(m, &s, cut, 8, p, g, m1, m2);
    }
}

static struct ps_model *four_and_four(void)
{
    struct ps_model *m = ps_model_new("t", 1, 4, 1);
    assert_non_null(m);
    assert_true(ps_model_dense(m, "d", m->input, 4) > 0);
    assert_int_equal(m->param_elements, 8);
    return m;
}

static void against_torch(void **state)
{
    (void)state;
    struct ps_model *m = four_and_four();
    for (size_t k = 0; k < sizeof goldens / sizeof *goldens; k++) {
        float p[8];
        run(m, goldens[k].step, p, 8);
        for (int i = 0; i < 4; i++)
            assert_true(fabs(p[i] - goldens[k].expected[i]) <= 1e-6 * fabs(goldens[k].expected[i]) + 1e-7);
        /* The biases go the way of weights without decay. */
        struct ps_optimizer_step none = goldens[k].step;
        none.weight_decay = 0;
        float q[8];
        run(m, none, q, 8);
        assert_memory_equal(p + 4, q + 4, 4 * sizeof *p);
        assert_memory_equal(q, q + 4, 4 * sizeof *q);
        assert_memory_not_equal(p, q, 4 * sizeof *p);
    }
    ps_model_free(m);
}

static void cuts_do_not_matter(void **state)
{
    (void)state;
    struct ps_model *m = four_and_four();
    for (size_t k = 0; k < sizeof goldens / sizeof *goldens; k++)
        for (size_t cut = 0; cut <= 8; cut++) {
            float p[8], q[8];
            run(m, goldens[k].step, p, 0);
            run(m, goldens[k].step, q, cut);
            assert_memory_equal(p, q, sizeof p);
        }
    ps_model_free(m);
}

static void bad_steps(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_optimizer_step s = {.kind = PS_SGD, .step = 1, .lr = 0.1};
    assert_int_equal(ps_optim_check(&s, &err), 0);
    s.nesterov = true;
    assert_int_equal(ps_optim_check(&s, &err), PS_INVALID_ARGUMENT);
    s = (struct ps_optimizer_step){.kind = PS_SGD, .step = 0, .lr = 0.1};
    assert_int_equal(ps_optim_check(&s, &err), PS_INVALID_ARGUMENT);
    s = (struct ps_optimizer_step){.kind = PS_SGD, .step = 1, .lr = NAN};
    assert_int_equal(ps_optim_check(&s, &err), PS_INVALID_ARGUMENT);
    s = (struct ps_optimizer_step){.kind = PS_ADAM, .step = 1, .lr = 0.1, .beta1 = 1, .beta2 = 0.9};
    assert_int_equal(ps_optim_check(&s, &err), PS_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_torch),
        cmocka_unit_test(cuts_do_not_matter),
        cmocka_unit_test(bad_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
