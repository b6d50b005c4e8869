/* SPDX-License-Identifier: Apache-2.0
 * Are the gradient tests able to fail? The reference backend is compiled here with a switch that turns over
 * one sign of its backward formulas at a time (see kernels.h), and for each of them some net must show a
 * wrong gradient. */
#include "tests/unit/backend_nets.h"

int mutation;

static double worst_error(void)
{
    double worst = 0;
    const struct ps_loss_config loss = {0.1f, 1};
    for (int i = 0; i < NET_COUNT && worst < 1e-3; i++) {
        struct bench t;
        ps_mt19937_seed(&net_random, (uint32_t)(100 + i));
        bench_net(&t, &nets[i]);
        worst = fmax(worst, gradient_error(&t, PS_TRAIN, NULL));
        if (t.extents[t.model->output] == 1)
            worst = fmax(worst, gradient_error(&t, PS_TRAIN, &loss));
        bench_done(&t);
    }
    return worst;
}

static void every_mutation_is_noticed(void **state)
{
    (void)state;
    mutation = 0;
    assert_true(worst_error() < 1e-6);
    for (mutation = 1; mutation <= 12; mutation++)
        if (!(worst_error() > 1e-3))
            fail_msg("mutation %d passed unnoticed", mutation);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_mutation_is_noticed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
