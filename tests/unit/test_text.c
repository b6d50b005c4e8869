/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/text.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

static void test_utf8(void **state)
{
    (void)state;
    assert_true(ps_utf8_valid("r\xc3\xa9seau \xe7\xbd\x91\xe7\xbb\x9c \xf0\x9f\x98\x80", 19));
    assert_false(ps_utf8_valid("\xc0\x80", 2));         /* overlong */
    assert_false(ps_utf8_valid("\xed\xa0\x80", 3));     /* surrogate */
    assert_false(ps_utf8_valid("\xf4\x90\x80\x80", 4)); /* beyond U+10FFFF */
    assert_false(ps_utf8_valid("\xe7\xbd", 2));         /* cut */
    assert_false(ps_utf8_valid("a\0b", 3));
}

static void test_numbers(void **state)
{
    (void)state;
    int64_t n = 7;
    double d = 7;
    assert_int_equal(ps_parse_int64("-12", -100, 100, &n), 0);
    assert_int_equal(n, -12);
    assert_int_equal(ps_parse_int64("101", -100, 100, &n), -1);
    assert_int_equal(ps_parse_int64(" 1", -100, 100, &n), -1);
    assert_int_equal(ps_parse_int64("1x", -100, 100, &n), -1);
    assert_int_equal(ps_parse_int64("99999999999999999999", 0, INT64_MAX, &n), -1);
    assert_int_equal(n, -12);
    assert_int_equal(ps_parse_double("1e-3", &d), 0);
    assert_true(d == 1e-3);
    assert_int_equal(ps_parse_double("nan", &d), -1);
    assert_int_equal(ps_parse_double("1e999", &d), -1);
    assert_int_equal(ps_parse_double("", &d), -1);
}

static void test_run_names(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char longest[202];
    memset(longest, 'a', 201);
    longest[201] = '\0';
    assert_int_equal(ps_check_run_name("a/b \"c\" <d> '\xe5\x8d\x95\xe5\x8d\xa1'", "name", &err), 0);
    assert_int_equal(ps_check_run_name("", "name", &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_check_run_name(longest, "name", &err), PS_INVALID_ARGUMENT);
    longest[200] = '\0';
    assert_int_equal(ps_check_run_name(longest, "name", &err), 0);
    assert_int_equal(ps_check_run_name("a\nb", "name", &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_check_run_name(" a", "name", &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_check_run_name("\xff", "--run", &err), PS_INVALID_ARGUMENT);
    assert_int_equal(strncmp(err.message, "--run", 5), 0);
}

static void test_host_port(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char host[64];
    int port;
    assert_int_equal(ps_parse_host_port("[::1]:80", host, sizeof host, &port, &err), 0);
    assert_string_equal(host, "::1");
    assert_int_equal(port, 80);
    assert_int_equal(ps_parse_host_port("localhost:0", host, sizeof host, &port, &err), 0);
    assert_int_equal(ps_parse_host_port("::1:80", host, sizeof host, &port, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_parse_host_port("host", host, sizeof host, &port, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_parse_host_port("host:65536", host, sizeof host, &port, &err), PS_INVALID_ARGUMENT);
}

static void test_ids_sort_by_time_and_differ(void **state)
{
    (void)state;
    char a[27], b[27];
    ps_make_id(a);
    ps_make_id(b);
    assert_int_equal(strlen(a), 26);
    assert_string_not_equal(a, b);
    assert_true(strncmp(a, b, 10) <= 0);
}

static void test_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double bytes; /* negative: refused */
    } cases[] = {{"0", 0},          {"1000", 1000},       {"1k", 1024}, {"10M", 10485760},
                 {"1.5m", 1572864}, {"2G", 2147483648.0}, {"", -1},     {"M", -1},
                 {"-1", -1},        {"0x10", -1},         {"5MB", -1},  {"nan", -1},
                 {"inf", -1},       {"1e300", -1},        {"7 M", -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double bytes = -1;
        assert_int_equal(ps_parse_bytes(cases[i].text, &bytes), cases[i].bytes < 0 ? -1 : 0);
        assert_true(bytes == cases[i].bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),     cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_numbers),   cmocka_unit_test(test_run_names),
        cmocka_unit_test(test_host_port), cmocka_unit_test(test_ids_sort_by_time_and_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
