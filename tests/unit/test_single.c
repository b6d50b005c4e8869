/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/dist/comm.h"

static void test_alone(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_comm *c = ps_comm_single();
    assert_non_null(c);
    assert_int_equal(c->rank, 0);
    assert_int_equal(c->world_size, 1);
    float v[2] = {1.5f, -2}, out[2] = {0, 0};
    assert_int_equal(c->ops->all_reduce(c, v, 2, PS_F32, &err), 0);
    assert_int_equal(c->ops->broadcast(c, v, sizeof v, 0, &err), 0);
    assert_int_equal(c->ops->all_gather(c, v, sizeof v, out, &err), 0);
    assert_int_equal(c->ops->barrier(c, &err), 0);
    assert_true(v[0] == 1.5f && v[1] == -2 && out[0] == 1.5f && out[1] == -2);
    assert_int_equal(c->ops->broadcast(c, v, sizeof v, 1, &err), PS_INVALID_ARGUMENT);
    const struct ps_comm_ops *ops = c->ops;
    ops->destroy(c);
    ops->destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
