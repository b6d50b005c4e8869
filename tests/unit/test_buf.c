/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/buf.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

static void test_append_stops_at_the_maximum(void **state)
{
    (void)state;
    struct ps_buf buf = PS_BUF_INIT(10);
    assert_int_equal(ps_buf_puts(&buf, "12345"), 0);
    assert_int_equal(ps_buf_printf(&buf, "%d", 67890), 0);
    assert_string_equal(buf.data, "1234567890");
    assert_int_equal(ps_buf_puts(&buf, "x"), PS_RESOURCE_EXHAUSTED);
    assert_int_equal(ps_buf_append(&buf, NULL, 0), PS_RESOURCE_EXHAUSTED); /* sticky */
    assert_string_equal(buf.data, "1234567890");
    ps_buf_clear(&buf);
    assert_int_equal(ps_buf_puts(&buf, "again"), 0);
    ps_buf_done(&buf);
}

static void test_take_hands_over(void **state)
{
    (void)state;
    struct ps_buf buf = PS_BUF_INIT(1 << 20);
    size_t size;
    char *empty = ps_buf_take(&buf, &size);
    assert_non_null(empty);
    assert_int_equal(size, 0);
    free(empty);
    for (int i = 0; i < 1000; i++)
        ps_buf_printf(&buf, "%d,", i);
    char *text = ps_buf_take(&buf, &size);
    assert_int_equal(strlen(text), size);
    assert_null(buf.data);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_append_stops_at_the_maximum),
        cmocka_unit_test(test_take_hands_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
