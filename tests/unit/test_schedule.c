/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/optim/schedule.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void constant(void **state)
{
    (void)state;
    const struct ps_schedule s = {PS_SCHEDULE_CONSTANT, 0.01, 0};
    for (int i = 0; i < 20; i++)
        assert_true(ps_schedule_rate(&s, i, 10) == 0.01);
}

static void triangle(void **state)
{
    (void)state;
    const struct ps_schedule s = {PS_SCHEDULE_ONECYCLE, 0.4, 0.25};
    assert_true(fabs(ps_schedule_rate(&s, 0, 100) - 0.4 * 0.005 / 0.25) < 1e-12);
    assert_true(fabs(ps_schedule_rate(&s, 24, 100) - 0.4 * 0.245 / 0.25) < 1e-12);
    assert_true(fabs(ps_schedule_rate(&s, 62, 100) - 0.4 * 0.5) < 1e-12);
    assert_true(fabs(ps_schedule_rate(&s, 99, 100) - 0.4 * 0.005 / 0.75) < 1e-12);
    double sum = 0, last = 0;
    for (int i = 0; i < 100; i++) {
        double lr = ps_schedule_rate(&s, i, 100);
        assert_true(lr > 0 && lr < 0.4);
        assert_true(i < 25 ? lr > last : i == 25 || lr < last);
        last = lr;
        sum += lr;
    }
    assert_true(fabs(sum - 0.4 * 100 / 2) < 1e-9); /* the area of a triangle */
    assert_true(ps_schedule_rate(&s, 100, 100) == 0);
}

static void cosine(void **state)
{
    (void)state;
    const struct ps_schedule s = {PS_SCHEDULE_COSINE, 1, 0.1};
    assert_true(fabs(ps_schedule_rate(&s, 4, 100) - 0.45) < 1e-12);
    double last = 2;
    for (int i = 10; i < 100; i++) {
        double lr = ps_schedule_rate(&s, i, 100);
        assert_true(lr > 0 && lr < last);
        last = lr;
    }
    assert_true(fabs(ps_schedule_rate(&s, 549, 1000) - 0.5) < 2e-3); /* half way down */
}

static void ends(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++)
        for (int rise = 0; rise <= 2; rise++) { /* no rise, some, nothing but rise */
            const struct ps_schedule s = {(enum ps_schedule_kind)kind, 1, rise / 2.0};
            for (int total = 0; total < 5; total++)
                for (int i = -1; i < 7; i++) {
                    double lr = ps_schedule_rate(&s, i, total);
                    assert_true(isfinite(lr) && lr >= 0 && lr <= 1);
                }
        }
}

static void names(void **state)
{
    (void)state;
    struct ps_error err = {0};
    for (int i = 0; i < 3; i++) {
        enum ps_schedule_kind kind = PS_SCHEDULE_CONSTANT;
        assert_int_equal(ps_schedule_kind_parse(ps_schedule_kind_name((enum ps_schedule_kind)i), &kind, &err),
                         0);
        assert_int_equal(kind, i);
    }
    enum ps_schedule_kind kind;
    assert_int_equal(ps_schedule_kind_parse("step", &kind, &err), PS_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constant), cmocka_unit_test(triangle), cmocka_unit_test(cosine),
        cmocka_unit_test(ends),     cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
