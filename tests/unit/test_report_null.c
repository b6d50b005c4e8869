/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/report.h"

#include <string.h>

static void test_nobody(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_report *report = NULL;
    const struct ps_report_config named = {.sidecar = "127.0.0.1:50051", .world_size = 1};
    assert_int_equal(ps_report_open(&named, &report, &err), PS_INVALID_ARGUMENT);
    assert_null(report);
    assert_non_null(strstr(err.message, "127.0.0.1:50051"));
    const struct ps_report_config none = {.world_size = 1};
    assert_int_equal(ps_report_open(&none, &report, &err), 0);
    char id[27] = "x", name[8] = "x";
    uint32_t attempt = 7;
    ps_report_run(report, id, &attempt, name, sizeof name);
    assert_string_equal(id, "");
    assert_string_equal(name, "");
    assert_int_equal(attempt, 0);
    ps_report_epoch(report, &(struct ps_report_epoch){.epoch = 1});
    ps_report_point(report, "loss", 1, 0.5, 0.1);
    ps_report_checkpoint(report, "/x", "safetensors", 1, 1, 0, false);
    ps_report_close(report, "finished", "", 1);
    ps_report_close(NULL, "failed", "", 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nobody)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
