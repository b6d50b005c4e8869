/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/http_range.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void ranges(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        uint64_t size;
        enum ps_range kind;
        uint64_t first, count;
    } rows[] = {
        {NULL, 100, PS_RANGE_NONE, 0, 0},
        {"bytes=0-0", 100, PS_RANGE_ONE, 0, 1},
        {"bytes=0-", 100, PS_RANGE_ONE, 0, 100},
        {"bytes=99-", 100, PS_RANGE_ONE, 99, 1},
        {"bytes=10-19", 100, PS_RANGE_ONE, 10, 10},
        {"Bytes= 10-19 ", 100, PS_RANGE_ONE, 10, 10},
        {"bytes=90-1000", 100, PS_RANGE_ONE, 90, 10},
        {"bytes=-1", 100, PS_RANGE_ONE, 99, 1},
        {"bytes=-100", 100, PS_RANGE_ONE, 0, 100},
        {"bytes=-101", 100, PS_RANGE_ONE, 0, 100},
        {"bytes=-99999999999999999999999", 100, PS_RANGE_ONE, 0, 100},
        {"bytes=5-99999999999999999999999", 100, PS_RANGE_ONE, 5, 95},
        {"bytes=100-", 100, PS_RANGE_UNSATISFIABLE, 0, 0},
        {"bytes=100-200", 100, PS_RANGE_UNSATISFIABLE, 0, 0},
        {"bytes=99999999999999999999999-", 100, PS_RANGE_UNSATISFIABLE, 0, 0},
        {"bytes=-0", 100, PS_RANGE_UNSATISFIABLE, 0, 0},
        {"bytes=0-", 0, PS_RANGE_UNSATISFIABLE, 0, 0},
        {"bytes=-5", 0, PS_RANGE_UNSATISFIABLE, 0, 0},
        {"bytes=20-10", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=-", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=1", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=a-b", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=0-1,5-6", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=+1-2", 100, PS_RANGE_NONE, 0, 0},
        {"bytes=1-2x", 100, PS_RANGE_NONE, 0, 0},
        {"lines=0-1", 100, PS_RANGE_NONE, 0, 0},
        {"", 100, PS_RANGE_NONE, 0, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint64_t first = 0, count = 0;
        assert_int_equal(ps_http_range(rows[i].header, rows[i].size, &first, &count), rows[i].kind);
        assert_int_equal(first, rows[i].first);
        assert_int_equal(count, rows[i].count);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranges)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
