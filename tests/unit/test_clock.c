/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/clock.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

static void test_durations_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double seconds;
    } good[] = {{"90", 90},     {"90s", 90},    {"20m", 1200},       {"20min", 1200}, {"1h30m", 5400},
                {"1.5h", 5400}, {"500ms", 0.5}, {"1 h 2 min", 3720}, {"0", 0},        {"2d", 172800}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        double seconds = -1;
        assert_int_equal(ps_parse_duration(good[i].text, &seconds), 0);
        assert_true(seconds == good[i].seconds);
    }
    static const char *const bad[] = {"",     "-1",   "abc",   "1x",   "nan", "inf",
                                      "1h30", "0x10", "1e999", "1h h", "."};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        double seconds = -1;
        assert_int_equal(ps_parse_duration(bad[i], &seconds), -1);
        assert_true(seconds == -1);
    }
}

static void test_formats(void **state)
{
    (void)state;
    char text[32];
    ps_format_utc(INT64_C(1769903999123000000), text, sizeof text);
    assert_string_equal(text, "2026-01-31T23:59:59.123Z");
    ps_format_duration(12.34, text, sizeof text);
    assert_string_equal(text, "12.3 s");
    ps_format_duration(59.97, text, sizeof text);
    assert_string_equal(text, "1 min 00 s");
    ps_format_duration(3720, text, sizeof text);
    assert_string_equal(text, "1 h 02 min");
    ps_format_duration(3599.7, text, sizeof text);
    assert_string_equal(text, "1 h 00 min");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_durations_are_read),
        cmocka_unit_test(test_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
