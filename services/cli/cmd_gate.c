/* SPDX-License-Identifier: Apache-2.0
 * paramsync gate: exit 0 pass, 1 fail, 2 cannot decide; whatever goes wrong on the way is 2 as well. */
#include "services/cli/cli.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { most_runs = 64 };

struct gate_settings {
    struct cli_common common;
    const char *min_accuracy, *baseline, *baselines, *free_fields, *store, *junit, *markdown, *time_tolerance,
        *accuracy_tolerance;
    double max_time, max_total_time, timeout;
    int64_t min_runs;
    bool wait;
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
     .help = "a run, a run directory, a file written by paramsync export, sample-1 or sample-16; with "
             "--baselines a name in that file"},
    {.name = "baselines",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, baselines),
     .value = "FILE",
     .help = "file with pinned baselines, as paramsync baseline keeps it"},
    {.name = "free",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct gate_settings, free_fields),
     .value = "FIELDS",
     .help = "what runs need not share with a pinned baseline, beside what its pin says: of "
             "commit,world-size,device"},
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
    {.name = "min-runs",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct gate_settings, min_runs),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = most_runs,
     .help = "fewer runs cannot be decided"},
    {.name = "wait",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct gate_settings, wait),
     .help = "follow runs that still train; stop as soon as they can't pass any more",
     .group = "Live runs"},
    {.name = "timeout",
     .type = PS_TYPE_DURATION,
     .offset = offsetof(struct gate_settings, timeout),
     .value = "T",
     .min = 0.001,
     .max = 1e9,
     .help = "with --wait: how long to follow them; without it, to their end"},
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
    CLI_STORE_ROW(struct gate_settings),
    CLI_CONNECTION_ROWS(struct gate_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync gate",
    .usage = "RUN... --min-accuracy A [--max-time T] [--max-total-time T] [--baseline "
             "RUN|FILE|sample-1|sample-16] [--wait] [--junit FILE] [--markdown FILE] [--json]",
    .example = "paramsync gate nightly --min-accuracy 80% --max-time 20min\n"
               "paramsync gate ./output_dir --min-accuracy 80%\n"
               "paramsync gate a b c --min-runs 3 --min-accuracy 0.8 --baseline release-1\n"
               "paramsync gate nightly --baselines baselines.json --baseline release --wait\n"
               "paramsync gate nightly --store backup.db --baseline sample-16",
    .about =
        "Judges a run, or the median of several that repeat one job. Exit status 0: pass; 1: fail; 2: cannot "
        "decide (a run that has not finished, missing metrics, too few runs, a baseline with other data or "
        "another model, an unknown run, no sidecar, bad usage). NaN in the metrics fails. RUN is an id or a "
        "name "
        "at the sidecar or in --store, or a path that begins with . or / or ends with /: a run directory "
        "(the trainer's --output_dir) or an exported .json file; these two need no sidecar. A baseline from "
        "a file is pinned: commit, data hash, world size and device must be the same, or the gate cannot "
        "decide. Against a run, 1 process against 16 for example, nothing but the job must be the same. A "
        "pinned "
        "baseline's accuracy stands in for --min-accuracy.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

static int limits_of(const struct gate_settings *settings, struct ps_gate_limits *ret, struct ps_error *err)
{
    struct ps_gate_limits limits = {.max_time_s = settings->max_time,
                                    .max_total_time_s = settings->max_total_time,
                                    .min_runs = settings->min_runs > 1 ? (size_t)settings->min_runs : 0,
                                    .early = settings->wait};
    if (settings->timeout > 0 && !settings->wait)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--timeout goes with --wait");
    if (settings->baselines && !settings->baseline)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--baselines FILE needs --baseline NAME: one of those in it");
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

struct judged {
    struct cli_run fetched[most_runs], baseline;
    struct ps_compare_run runs[most_runs];
    size_t count;
};

static void forget_runs(struct judged *j)
{
    for (size_t i = 0; i < j->count; i++)
        cli_run_done(&j->fetched[i]);
    j->count = 0;
}

static int fetch_runs(struct cli_source *source, char **words, size_t count, struct judged *j,
                      struct ps_error *err)
{
    int code = 0;
    for (; j->count < count && !code; j->count += !code)
        code = cli_fetch(source, words[j->count], &j->fetched[j->count], err);
    for (size_t i = 0; i < j->count; i++)
        j->runs[i] = j->fetched[i].run;
    if (code)
        forget_runs(j);
    return code;
}

static int fetch_baseline(const struct gate_settings *settings, struct cli_source *source,
                          struct cli_run *ret, struct ps_error *err)
{
    unsigned free_fields = 0;
    int code = 0;
    if (settings->free_fields && ps_gate_parse_fields(settings->free_fields, &free_fields, err))
        return ps_error_prefix(err, "--free");
    if (settings->baseline && settings->baselines) {
        json_t *file;
        code = cli_baselines_read(settings->baselines, false, &file, err);
        if (code)
            return code;
        code = cli_baselines_get(file, settings->baselines, settings->baseline, ret, err);
        json_decref(file);
    } else if (settings->baseline) {
        code = cli_fetch(source, settings->baseline, ret, err);
        if (code)
            ps_error_prefix(err, "baseline %.100s", settings->baseline);
    }
    if (!code && free_fields && !ret->run.pinned)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--free speaks of a pinned baseline: one from a file");
    if (!code)
        ret->run.pin_free |= free_fields;
    return code;
}

static bool any_is_live(const struct judged *j)
{
    for (size_t i = 0; i < j->count; i++)
        if (j->runs[i].state == PS_COMPARE_CREATED || j->runs[i].state == PS_COMPARE_RUNNING)
            return true;
    return false;
}

static void look_again_after(double seconds)
{
    struct timespec pause = {.tv_sec = (time_t)seconds,
                             .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&pause, &pause) && errno == EINTR)
        ;
}

/* Fetches and judges; with --wait again and again, until the runs have ended or can't pass any more. For a
 * minute a run may not be there yet, or its sidecar be away. */
static int follow(const struct gate_settings *settings, struct cli_source *source, char **words, size_t count,
                  struct judged *j, struct ps_gate_result **ret_result, struct ps_error *err)
{
    static const double patience_s = 60, longest_s = 2;
    struct ps_gate_limits limits;
    double began = ps_monotonic_s(), seen = began, pause = 0.2;
    int code = limits_of(settings, &limits, err);
    while (!code) {
        code = fetch_runs(source, words, count, j, err);
        double now = ps_monotonic_s();
        bool waits = settings->wait && !(settings->timeout > 0 && now - began >= settings->timeout);
        if (code) {
            if (!waits || (code != PS_UNAVAILABLE && code != PS_NOT_FOUND) || now - seen > patience_s)
                return code;
            code = 0;
        } else {
            seen = now;
            code = ps_gate_evaluate(&limits, j->runs, count, settings->baseline ? &j->baseline.run : NULL,
                                    ret_result, err);
            if (code || !waits || (*ret_result)->verdict == PS_GATE_FAIL || !any_is_live(j))
                return code;
            *ret_result = ps_gate_result_free(*ret_result);
            forget_runs(j);
        }
        look_again_after(pause);
        pause = fmin(pause * 1.5, longest_s);
    }
    return code;
}

static int judge(const struct gate_settings *settings, char **words, size_t count, int *ret_verdict,
                 struct ps_error *err)
{
    struct cli_source source = {.common = &settings->common, .store = settings->store};
    struct judged *j = calloc(1, sizeof *j);
    struct ps_gate_result *result = NULL;
    struct gate_settings given = *settings;
    char subject[1024], own[48];
    if (!j)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = fetch_baseline(settings, &source, &j->baseline, err);
    struct ps_compare_row base;
    if (!code && j->baseline.run.pinned && !settings->min_accuracy) {
        code = ps_compare(&j->baseline.run, 1, 0, 1, &base, err);
        double ask = code || !base.has_accuracy ? 0 : base.best_accuracy;
        double slack = 0;
        ps_compare_parse_share(settings->accuracy_tolerance, &slack);
        snprintf(own, sizeof own, "%.17g", fmax(ask - slack, 0));
        given.min_accuracy = ask > slack ? own : NULL;
        if (!given.min_accuracy)
            code = code ? code
                        : ps_fail(err, PS_INVALID_ARGUMENT,
                                  "--min-accuracy A is missing: the baseline has none to stand in");
    }
    if (!code)
        code = follow(&given, &source, words, count, j, &result, err);
    if (!code) {
        bool own_base = settings->baseline && !j->baseline.run.threshold_only;
        struct cli_gate_report report = {.result = result,
                                         .subject = subject_of(j->runs, j->count, subject, sizeof subject),
                                         .baseline = settings->baseline,
                                         .runs = j->runs,
                                         .base = own_base ? &j->baseline.run : NULL};
        int written = write_report(settings->junit, cli_gate_junit, &report, err);
        if (!written)
            written = write_report(settings->markdown, cli_gate_markdown, &report, err);
        code = written ? written : print_report(settings, &report, err);
        *ret_verdict = result->verdict;
    }
    ps_gate_result_free(result);
    forget_runs(j);
    cli_run_done(&j->baseline);
    cli_source_done(&source);
    free(j);
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
