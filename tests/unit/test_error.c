/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/error.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <string.h>

static void test_codes_map_to_every_status(void **state)
{
    (void)state;
    assert_int_equal(ps_code_to_grpc(PS_NOT_FOUND), 5);
    assert_int_equal(ps_code_from_grpc(16), PS_UNAUTHENTICATED);
    assert_int_equal(ps_code_from_grpc(99), PS_UNKNOWN);
    assert_int_equal(ps_code_from_grpc(-1), PS_UNKNOWN);
    assert_int_equal(ps_code_to_http(PS_INVALID_ARGUMENT), 400);
    assert_int_equal(ps_code_to_exit(PS_INVALID_ARGUMENT), 2);
    assert_int_equal(ps_code_to_exit(PS_DATA_LOSS), 1);
    assert_string_equal(ps_code_name(PS_DATA_LOSS), "DATA_LOSS");
    for (int code = 0; code >= PS_UNAUTHENTICATED; code--)
        assert_int_equal(ps_code_from_grpc(ps_code_to_grpc(code)), code);
}

static void test_message_stays_one_line_and_fits(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char big[4000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    assert_int_equal(ps_fail(&err, PS_INVALID_ARGUMENT, "name \"%s\"", "a\nb\tc"), PS_INVALID_ARGUMENT);
    assert_string_equal(err.message, "name \"a b c\"");
    ps_fail(&err, PS_INTERNAL, "%s", big);
    assert_int_equal(strlen(err.message), sizeof err.message - 1);
    ps_error_prefix(&err, "while testing");
    assert_int_equal(strncmp(err.message, "while testing: xxx", 18), 0);
    assert_int_equal(ps_fail(NULL, PS_INTERNAL, "nobody listens"), PS_INTERNAL);
}

static void test_errno_becomes_a_code(void **state)
{
    (void)state;
    struct ps_error err = {0};
    assert_int_equal(ps_fail_errno(&err, ENOSPC, "cannot write %s", "f"), PS_RESOURCE_EXHAUSTED);
    assert_string_equal(err.message, "cannot write f: No space left on device");
    assert_int_equal(ps_code_from_errno(EADDRINUSE), PS_UNAVAILABLE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes_map_to_every_status),
        cmocka_unit_test(test_message_stays_one_line_and_fits),
        cmocka_unit_test(test_errno_becomes_a_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
