/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/sidecar/rendezvous.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t hand_ns;

static int64_t read_hand(void *context)
{
    (void)context;
    return hand_ns;
}

static const struct ps_clock hand = {read_hand, NULL};

static int get(struct ps_meetings *m, const char *run, const char *key, char *out, size_t size)
{
    struct ps_error err = {0};
    void *value;
    size_t n;
    int code = ps_meetings_get(m, run, key, &value, &n, &err);
    if (!code) {
        snprintf(out, size, "%.*s", (int)n, (const char *)value);
        free(value);
    }
    return code;
}

static void test_time_to_live(void **state)
{
    (void)state;
    struct ps_meetings *m = ps_meetings_new(&hand);
    struct ps_error err = {0};
    char text[64];
    int64_t sum;
    hand_ns = 5 * PS_NS_PER_S;
    assert_int_equal(ps_meetings_set(m, "r", "k", "v", 1, 2, &err), 0);
    assert_int_equal(ps_meetings_set(m, "r", "default", "v", 1, 0, &err), 0);
    assert_int_equal(ps_meetings_add(m, "r", "n", 7, 2, &sum, &err), 0);
    hand_ns += 2 * PS_NS_PER_S - 1;
    assert_int_equal(get(m, "r", "k", text, sizeof text), 0);
    assert_string_equal(text, "v");
    hand_ns += 1;
    assert_int_equal(get(m, "r", "k", text, sizeof text), PS_NOT_FOUND);
    assert_int_equal(ps_meetings_add(m, "r", "n", 1, 0, &sum, &err), 0);
    assert_int_equal(sum, 1); /* began anew */
    hand_ns += 597 * PS_NS_PER_S;
    assert_int_equal(get(m, "r", "default", text, sizeof text), 0);
    hand_ns += PS_NS_PER_S;
    assert_int_equal(get(m, "r", "default", text, sizeof text), PS_NOT_FOUND);
    ps_meetings_free(m);
}

/* The bounds hold, and what is forgotten makes room again. */
static void test_bounds(void **state)
{
    (void)state;
    struct ps_meetings *m = ps_meetings_new(&hand);
    struct ps_error err = {0};
    char *big = calloc(1, PS_MEETING_VALUE_MAX + 1), key[32];
    int code = 0, n = 0;
    for (; !code && n < 5000; n++) {
        snprintf(key, sizeof key, "big %d", n);
        code = ps_meetings_set(m, "r", key, big, PS_MEETING_VALUE_MAX, 60, &err);
    }
    assert_int_equal(code, PS_RESOURCE_EXHAUSTED);
    assert_true(n > 1000 && n < 1030); /* 64 MiB */
    assert_int_equal(ps_meetings_set(m, "r", "big 0", big, PS_MEETING_VALUE_MAX, 60, &err),
                     0); /* in its place */
    hand_ns += 61 * PS_NS_PER_S;
    assert_int_equal(ps_meetings_set(m, "r", "more", big, PS_MEETING_VALUE_MAX, 60, &err), 0);
    for (code = 0, n = 0; !code && n < 200000; n++) {
        snprintf(key, sizeof key, "%d", n);
        code = ps_meetings_set(m, "small", key, "", 0, 60, &err);
    }
    assert_int_equal(code, PS_RESOURCE_EXHAUSTED);
    assert_int_equal(n, 100000);
    free(big);
    ps_meetings_free(m);
}

static void test_wrong_use(void **state)
{
    (void)state;
    struct ps_meetings *m = ps_meetings_new(NULL);
    struct ps_error err = {0};
    int64_t sum = 3;
    char text[64];
    assert_int_equal(ps_meetings_set(m, "r", "k", "v", 1, NAN, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_meetings_set(m, "r", "k", "v", 1, 86401, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_meetings_add(m, "r", "n", INT64_MAX, 0, &sum, &err), 0);
    assert_int_equal(ps_meetings_add(m, "r", "n", 1, 0, &sum, &err), PS_OUT_OF_RANGE);
    assert_true(sum == INT64_MAX);
    assert_int_equal(get(m, "r", "n", text, sizeof text), 0);
    assert_string_equal(text, "9223372036854775807");
    assert_int_equal(ps_meetings_set(m, "r", "n", "v", 1, 0, &err), 0); /* a value may take its place */
    assert_int_equal(ps_meetings_add(m, "r", "n", 1, 0, &sum, &err), PS_FAILED_PRECONDITION);
    ps_meetings_free(m);
}

static void count(void *context)
{
    ++*(int *)context;
}

static void test_waiting(void **state)
{
    (void)state;
    struct ps_meetings *m = ps_meetings_new(NULL);
    struct ps_error err = {0};
    struct ps_meeting_wait *a, *b, *c;
    int woken[3] = {0};
    int64_t sum;
    assert_int_equal(ps_meetings_wait_begin(m, "r", "k", count, &woken[0], &a, &err), 0);
    assert_int_equal(ps_meetings_wait_begin(m, "r", "k", count, &woken[1], &b, &err), 0);
    assert_int_equal(ps_meetings_wait_begin(m, "r", "other", count, &woken[2], &c, &err), 0);
    assert_int_equal(ps_meetings_set(m, "r", "k", "", 0, 0, &err), 0);
    ps_meetings_wait_end(m, a);
    assert_int_equal(ps_meetings_add(m, "r", "other", 1, 0, &sum, &err), 0);
    assert_int_equal(ps_meetings_set(m, "r", "k", "", 0, 0, &err), 0);
    ps_meetings_wait_end(m, b);
    ps_meetings_wait_end(m, c);
    assert_int_equal(ps_meetings_set(m, "r", "k", "", 0, 0, &err), 0);
    assert_int_equal(woken[0], 1);
    assert_int_equal(woken[1], 2);
    assert_int_equal(woken[2], 1);
    ps_meetings_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_time_to_live),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_wrong_use),
        cmocka_unit_test(test_waiting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
