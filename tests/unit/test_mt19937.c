/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/mt19937.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void first_and_ten_thousandth(void **state)
{
    (void)state;
    /* The C++ standard fixes these for std::mt19937 ([rand.predef]: the 10000th output with the default
     * seed). */
    struct ps_mt19937 mt;
    ps_mt19937_seed(&mt, 5489);
    assert_int_equal(ps_mt19937_next(&mt), 3499211612u);
    for (int i = 2; i < 10000; i++)
        ps_mt19937_next(&mt);
    assert_int_equal(ps_mt19937_next(&mt), 4123659995u);
}

static void torch_permutation(void **state)
{
    (void)state;
    /* torch.randperm(10) of a CPU generator with seed 0: a forward shuffle that draws one number per place.
     */
    static const int expected[10] = {4, 1, 7, 5, 3, 9, 0, 8, 6, 2};
    struct ps_mt19937 mt;
    ps_mt19937_seed(&mt, 0);
    int p[10];
    for (int i = 0; i < 10; i++)
        p[i] = i;
    for (int i = 0; i < 9; i++) {
        int j = i + (int)(ps_mt19937_next(&mt) % (uint32_t)(10 - i)), t = p[i];
        p[i] = p[j];
        p[j] = t;
    }
    for (int i = 0; i < 10; i++)
        assert_int_equal(p[i], expected[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_and_ten_thousandth),
        cmocka_unit_test(torch_permutation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
