/* SPDX-License-Identifier: Apache-2.0
 * The gate's report in its four forms; names are hostile. */
#include "services/cli/cli.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <string.h>

static const char evil[] = "a|b<c>&\"d\"\033[31m`e`";

static struct ps_gate_check checks[] = {
    {.what = "run has finished", .actual = "finished", .wanted = "finished", .verdict = PS_GATE_PASS},
    {.what = "time to 80.00 %",
     .actual = "20 min 00.1 s (epoch 2, 80.00 %; before: 10 min 00.0 s, 70.00 %)",
     .wanted = "at most 20 min 00.0 s",
     .verdict = PS_GATE_FAIL},
    {.what = "baseline is comparable",
     .actual = "other data",
     .wanted = "same",
     .verdict = PS_GATE_UNDECIDED},
};
static struct ps_gate_result result = {.verdict = PS_GATE_FAIL,
                                       .reason = "time to 80.00 %: 20 min 00.1 s",
                                       .checks = checks,
                                       .check_count = 3,
                                       .n = 1,
                                       .min_accuracy = 0.8};
static const struct cli_gate_report report = {.result = &result, .subject = evil, .baseline = "sample-16"};

static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < 3; i++)
        strcpy(checks[i].run, evil);
    return 0;
}

static void text(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    assert_int_equal(cli_gate_text(&report, 80, false, &out), 0);
    assert_string_equal(out.data,
                        "gate: a|b<c>&\"d\"\\x1B[31m`e`, n=1, against sample-16\n"
                        "\n"
                        "CHECK                 ACTUAL                WANTED                 VERDICT\n"
                        "run has finished      finished              finished               pass\n"
                        "time to 80.00 %       20 min 00.1 s (epoch  at most 20 min 00.0 s  fail\n"
                        "                      2, 80.00 %; before:\n"
                        "                      10 min 00.0 s, 70.00\n"
                        "                      %)\n"
                        "baseline is           other data            same                   cannot decide\n"
                        "comparable\n"
                        "\n"
                        "verdict: fail (exit 1): time to 80.00 %: 20 min 00.1 s\n");
    for (const char *line = out.data; line;) {
        const char *end = strchr(line, '\n');
        assert_true(!end || end - line <= 80);
        line = end ? end + 1 : NULL;
    }
    ps_buf_done(&out);
}

static void markdown(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    assert_int_equal(cli_gate_markdown(&report, &out), 0);
    assert_non_null(strstr(out.data, "## paramsync gate: fail\n"));
    assert_null(strchr(out.data, '<'));
    assert_null(strchr(out.data, '\033'));
    size_t bars = 0; /* 5 columns: 6 bars in each of header, rule and three rows */
    for (const char *p = out.data; *p; p++)
        bars += *p == '|';
    assert_int_equal(bars, 6 * 5);
    ps_buf_done(&out);
}

static void junit(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    assert_int_equal(cli_gate_junit(&report, &out), 0);
    assert_non_null(strstr(out.data, "tests=\"3\" failures=\"1\" errors=\"1\""));
    assert_non_null(strstr(out.data, "classname=\"a|b&lt;c&gt;&amp;&quot;d&quot;\\x1B[31m`e`\""));
    assert_non_null(strstr(out.data, "<failure message=\"20 min 00.1 s"));
    assert_non_null(strstr(out.data, "<error message=\"other data; wanted: same\"/>"));
    ps_buf_done(&out);
}

static void json(void **state)
{
    (void)state;
    json_t *o = cli_gate_json(&report);
    assert_non_null(o);
    assert_string_equal(json_string_value(json_object_get(o, "verdict")), "fail");
    assert_int_equal(json_integer_value(json_object_get(o, "exit")), 1);
    assert_string_equal(json_string_value(json_object_get(o, "subject")), evil);
    assert_int_equal(json_array_size(json_object_get(o, "checks")), 3);
    assert_true(json_is_null(json_object_get(o, "time_to_target_s")));
    json_decref(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text),
        cmocka_unit_test(markdown),
        cmocka_unit_test(junit),
        cmocka_unit_test(json),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
