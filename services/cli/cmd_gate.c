/* SPDX-License-Identifier: Apache-2.0
 * paramsync gate: exit 0 pass, 1 fail, 2 cannot decide; whatever goes wrong on the way is 2 as well. */
#include "services/cli/cli.h"

#include "services/base/fs.h"

#include <stdio.h>
#include <unistd.h>

enum { most_runs = 64 };

struct gate_settings {
    struct cli_common common;
    const char *min_accuracy, *baseline, *junit, *markdown, *time_tolerance, *accuracy_tolerance;
    double max_time, max_total_time;
};

static const struct ps_option rows[] = {
    {.name = "min-accuracy",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, min_accuracy),
     .value = "A",
     .help = "test accuracy that the best evaluation must reach, 0.8 or 80%; without it, that of sample-1 or "
             "sample-16",
     .group = "Limits"},
    {.name = "max-time",
     .type = PS_TYPE_DURATION,
     .offset = offsetof(struct gate_settings, max_time),
     .value = "T",
     .min = 0.001,
     .max = 1e9,
     .help = "most time from the run's start to the end of the first evaluation at that accuracy, for "
             "example 20min"},
    {.name = "max-total-time",
     .type = PS_TYPE_DURATION,
     .offset = offsetof(struct gate_settings, max_total_time),
     .value = "T",
     .min = 0.001,
     .max = 1e9,
     .help = "most time for the whole run"},
    {.name = "baseline",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, baseline),
     .value = "RUN",
     .help = "a run, a file written by paramsync export (ending in .json, or a path that begins with / or "
             ".), sample-1 or sample-16"},
    {.name = "time-tolerance",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, time_tolerance),
     .value = "P",
     .fallback = "10%",
     .help = "how much slower than a baseline run is allowed"},
    {.name = "accuracy-tolerance",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, accuracy_tolerance),
     .value = "P",
     .fallback = "1%",
     .help = "how many points of accuracy below a baseline run are allowed"},
    {.name = "junit",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, junit),
     .value = "FILE",
     .help = "write a JUnit report too",
     .group = "Output"},
    {.name = "markdown",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, markdown),
     .value = "FILE",
     .help = "write a Markdown table too"},
    CLI_JSON_ROW(struct gate_settings, "print a JSON object instead of the table"),
    CLI_CONNECTION_ROWS(struct gate_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync gate",
    .usage = "RUN... --min-accuracy A [--max-time T] [--max-total-time T] [--baseline "
             "RUN|FILE|sample-1|sample-16] "
             "[--junit FILE] [--markdown FILE] [--json]",
    .example = "paramsync gate nightly --min-accuracy 80% --max-time 20min\n"
               "paramsync gate a b c --min-accuracy 0.8 --baseline release-1\n"
               "paramsync gate nightly --baseline sample-16",
    .about =
        "Judges a run, or the median of several that repeat one job. Exit status 0: pass; 1: fail; 2: cannot "
        "decide (a run that has not finished, missing metrics, a baseline with other data or another model, "
        "an "
        "unknown run, no sidecar, bad usage). NaN in the metrics fails.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

static int limits_of(const struct gate_settings *settings, struct ps_gate_limits *ret, struct ps_error *err)
{
    struct ps_gate_limits limits = {.max_time_s = settings->max_time,
                                    .max_total_time_s = settings->max_total_time};
    if (settings->min_accuracy &&
        (ps_compare_parse_share(settings->min_accuracy, &limits.min_accuracy) || limits.min_accuracy <= 0))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--min-accuracy %.40s: must be an accuracy such as 0.8 or 80%%",
                       settings->min_accuracy);
    if (!settings->min_accuracy && !(settings->baseline && ps_compare_builtin(settings->baseline)))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--min-accuracy A is missing, for example --min-accuracy 80%%");
    if (ps_compare_parse_share(settings->time_tolerance, &limits.time_tolerance))
        return ps_fail(err, PS_INVALID_ARGUMENT, "--time-tolerance %.40s: must be a share such as 10%%",
                       settings->time_tolerance);
    if (ps_compare_parse_share(settings->accuracy_tolerance, &limits.accuracy_tolerance))
        return ps_fail(err, PS_INVALID_ARGUMENT, "--accuracy-tolerance %.40s: must be a share such as 1%%",
                       settings->accuracy_tolerance);
    *ret = limits;
    return 0;
}

static int write_report(const char *path, int (*make)(const struct cli_gate_report *, struct ps_buf *),
                        const struct cli_gate_report *report, struct ps_error *err)
{
    struct ps_buf out = PS_BUF_INIT(16 << 20);
    int code;
    if (!path)
        return 0;
    if (make(report, &out))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    else
        code = ps_write_file_atomic(path, out.data, out.size, err);
    ps_buf_done(&out);
    return code;
}

static int print_report(const struct gate_settings *settings, const struct cli_gate_report *report,
                        struct ps_error *err)
{
    struct ps_buf out = PS_BUF_INIT(16 << 20);
    int code;
    if (settings->common.json)
        return cli_write_json(cli_gate_json(report), err);
    if (cli_gate_text(report, cli_columns(), cli_colours(STDOUT_FILENO), &out))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    else
        code = cli_write(&out, err);
    ps_buf_done(&out);
    return code;
}

static const char *subject_of(const struct ps_compare_run *runs, size_t count, char *out, size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < count && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%.200s", i ? ", " : "",
                              runs[i].name ? runs[i].name : runs[i].id);
    return out;
}

static int judge(const struct gate_settings *settings, char **words, size_t count, int *ret_verdict,
                 struct ps_error *err)
{
    struct ps_gate_limits limits;
    struct cli_run fetched[most_runs], baseline = {0};
    struct ps_compare_run runs[most_runs];
    struct ps_gate_result *result = NULL;
    struct paramsync_client *client = NULL;
    char subject[1024];
    size_t n = 0;
    int code = limits_of(settings, &limits, err);
    if (code)
        return code;
    if (settings->baseline)
        code = cli_fetch(&settings->common, &client, settings->baseline, true, &baseline, err);
    if (code)
        ps_error_prefix(err, "baseline %.100s", settings->baseline);
    for (; n < count && !code; n += !code)
        code = cli_fetch(&settings->common, &client, words[n], false, &fetched[n], err);
    for (size_t i = 0; i < n; i++)
        runs[i] = fetched[i].run;
    if (!code)
        code =
            ps_gate_evaluate(&limits, runs, count, settings->baseline ? &baseline.run : NULL, &result, err);
    if (!code) {
        struct cli_gate_report report = {.result = result,
                                         .subject = subject_of(runs, n, subject, sizeof subject),
                                         .baseline = settings->baseline};
        int written = write_report(settings->junit, cli_gate_junit, &report, err);
        if (!written)
            written = write_report(settings->markdown, cli_gate_markdown, &report, err);
        code = written ? written : print_report(settings, &report, err);
        *ret_verdict = result->verdict;
    }
    ps_gate_result_free(result);
    for (size_t i = 0; i < n; i++)
        cli_run_done(&fetched[i]);
    cli_run_done(&baseline);
    paramsync_disconnect(client);
    return code;
}

int cli_gate(int argc, char **argv)
{
    struct gate_settings settings = {0};
    struct ps_error err = {0};
    int words, verdict = PS_GATE_UNDECIDED;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 1, most_runs, &words, &err);
    if (code > 0)
        return 0;
    if (!code)
        code = judge(&settings, argv + 1, (size_t)words, &verdict, &err);
    if (code) {
        cli_complain("gate", &err);
        return 2;
    }
    return ps_gate_verdict_exit(verdict);
}
