/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/limits.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

static int64_t now_ns;

static int64_t read_clock(void *context)
{
    (void)context;
    return now_ns;
}
static const struct ps_clock test_clock = {read_clock, NULL};

static int calls(struct ps_limits *limits, const char *peer, int tries)
{
    double wait_s;
    int passed = 0;
    for (int i = 0; i < tries; i++)
        passed += ps_limits_call(limits, peer, &wait_s);
    return passed;
}

static void test_calls(void **state)
{
    (void)state;
    struct ps_limits *limits = ps_limits_new(&test_clock, 10, 0);
    double wait_s;
    assert_int_equal(calls(limits, "ipv4:10.0.0.1:1111", 25), 10);
    assert_int_equal(calls(limits, "ipv4:10.0.0.1:2222", 25), 0); /* another port is the same peer */
    assert_int_equal(calls(limits, "ipv4:10.0.0.2:1111", 25), 10);
    assert_int_equal(calls(limits, "ipv6:[::1]:1", 25), 10);
    assert_int_equal(calls(limits, "unix:", 6) + calls(limits, "unix:/tmp/x", 6), 10);
    assert_false(ps_limits_call(limits, "ipv4:10.0.0.1:1111", &wait_s));
    assert_true(wait_s > 0.09 && wait_s < 0.11);
    now_ns += 300000000;
    assert_int_equal(calls(limits, "ipv4:10.0.0.1:1111", 25), 3);
    now_ns += 3600 * INT64_C(1000000000); /* it holds one second's worth, not an hour's */
    assert_int_equal(calls(limits, "ipv4:10.0.0.1:1111", 25), 10);
    ps_limits_free(limits);
}

static void test_bytes(void **state)
{
    (void)state;
    struct ps_limits *limits = ps_limits_new(&test_clock, 0, 1000);
    assert_true(ps_limits_bytes(limits, "ipv4:1.1.1.1:1", 1000) == 0);
    double wait_s = ps_limits_bytes(limits, "ipv4:1.1.1.1:2", 500);
    assert_true(wait_s > 0.49 && wait_s < 0.51);
    assert_true(ps_limits_bytes(limits, "ipv4:2.2.2.2:2", 500) == 0);
    now_ns += 500000000;
    wait_s = ps_limits_bytes(limits, "ipv4:1.1.1.1:1", 2000);
    assert_true(wait_s > 1.99 && wait_s < 2.01);
    assert_int_equal(calls(limits, "ipv4:1.1.1.1:1", 1000), 1000); /* calls have no bound here */
    ps_limits_free(limits);
}

/* Very many peers: memory is bounded, and the one that is busy keeps its account. */
static void test_many_peers(void **state)
{
    (void)state;
    struct ps_limits *limits = ps_limits_new(&test_clock, 2, 0);
    char name[128];
    for (int i = 0; i < 5000; i++) {
        now_ns += 1000;
        snprintf(name, sizeof name, "ipv4:10.%d.%d.1:99", i / 250, i % 250);
        assert_int_equal(calls(limits, name, 3), 2);
        assert_int_equal(calls(limits, "ipv4:9.9.9.9:1", 1), i < 2);
    }
    snprintf(name, sizeof name, "ipv6:[%060d]:99", 1);
    assert_int_equal(calls(limits, name, 3), 2); /* a long name is cut, not overrun */
    ps_limits_free(limits);
    limits = ps_limits_new(&test_clock, 0, 0);
    assert_int_equal(calls(limits, "ipv4:1.1.1.1:1", 100), 100);
    assert_true(ps_limits_bytes(limits, "ipv4:1.1.1.1:1", SIZE_MAX) == 0);
    ps_limits_free(limits);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_many_peers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
