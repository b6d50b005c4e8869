/* SPDX-License-Identifier: Apache-2.0
 * paramsync compare. */
#include "services/cli/cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { most_runs = 64 };

struct compare_settings {
    struct cli_common common;
    const char *target, *baseline, *store;
};

static const struct ps_option rows[] = {
    {.name = "target",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct compare_settings, target),
     .value = "A",
     .fallback = "80%",
     .help = "test accuracy to reach, 0.8 or 80%",
     .group = "Options"},
    {.name = "baseline",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct compare_settings, baseline),
     .value = "RUN",
     .help = "what speed-up and efficiency refer to; without it, the first run"},
    CLI_JSON_ROW(struct compare_settings, "print a JSON object"),
    CLI_STORE_ROW(struct compare_settings),
    CLI_CONNECTION_ROWS(struct compare_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync compare",
    .usage = "RUN... [--target A] [--baseline RUN] [--json]",
    .example = "paramsync compare single double\n"
               "paramsync compare single double sample-1 sample-16 --target 75%",
    .about =
        "Sets runs side by side. Time to target ends with the first evaluation at or above the target, "
        "nothing "
        "is interpolated. Speed-up is by images/s (median of the epochs, without the first of three or "
        "more), "
        "efficiency is speed-up * ranks of the reference / ranks. RUN may also be sample-1 or sample-16, the "
        "published results of the ModelArts sample: an end mark after 100 epochs, without a curve; or the "
        "path "
        "of a run directory or an exported .json file, as for `paramsync gate`.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

/* "8:30", "1:00:00": short, because nine columns stand beside one another. The remarks have the exact times.
 */
static void seconds_cell(struct cli_table *table, bool has, double seconds)
{
    long long whole = has && seconds < 1e12 ? llround(seconds) : 0;
    if (!has)
        cli_table_add(table, CLI_PLAIN, "-");
    else if (seconds < 60)
        cli_table_printf(table, CLI_PLAIN, "%.1f s", seconds);
    else if (whole < 3600)
        cli_table_printf(table, CLI_PLAIN, "%lld:%02lld", whole / 60, whole % 60);
    else
        cli_table_printf(table, CLI_PLAIN, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

static void add_row(struct cli_table *table, const struct ps_compare_run *run,
                    const struct ps_compare_row *row, bool reference)
{
    cli_table_printf(table, CLI_PLAIN, "%s%.200s", reference ? "*" : "",
                     run->name && *run->name ? run->name : run->id);
    cli_table_printf(table, CLI_PLAIN, "%u", run->world_size);
    cli_table_printf(table, CLI_PLAIN, "%u", row->epochs);
    if (row->threshold_only)
        cli_table_printf(table, CLI_PLAIN, ">=%g%%", row->best_accuracy * 100);
    else if (row->has_accuracy)
        cli_table_printf(table, CLI_PLAIN, "%.2f%%", row->best_accuracy * 100);
    else
        cli_table_add(table, CLI_PLAIN, "-");
    seconds_cell(table, row->has_total, row->total_s);
    seconds_cell(table, row->has_time_to_target, row->time_to_target_s);
    if (row->has_throughput)
        cli_table_printf(table, CLI_PLAIN, "%.1f", row->samples_per_s);
    else
        cli_table_add(table, CLI_PLAIN, "-");
    if (row->has_speedup) {
        cli_table_printf(table, CLI_PLAIN, "%.2fx", row->speedup);
        cli_table_printf(table, CLI_PLAIN, "%.0f%%", row->efficiency * 100);
    } else {
        cli_table_add(table, CLI_PLAIN, "-");
        cli_table_add(table, CLI_PLAIN, "-");
    }
}

static void remark(struct ps_buf *out, size_t width, const char *name, const char *text)
{
    char line[1024];
    snprintf(line, sizeof line, "%.200s%s%.700s", name, *name ? ": " : "", text);
    cli_wrap(out, width, line);
}

static void remarks(struct ps_buf *out, size_t width, const struct ps_compare_run *run,
                    const struct ps_compare_row *row, bool reference)
{
    const char *name = run->name && *run->name ? run->name : run->id;
    char text[600], share[32], before[48];
    if (row->has_time_to_target) {
        ps_compare_format_share(row->accuracy_at_target, NAN, share, sizeof share);
        size_t n = (size_t)snprintf(text, sizeof text, "target reached with epoch %u (%s)",
                                    row->epochs_to_target, share);
        if (row->has_before) {
            ps_compare_format_time(row->before_s, NAN, before, sizeof before);
            ps_compare_format_share(row->before_accuracy, NAN, share, sizeof share);
            n += (size_t)snprintf(text + n, sizeof text - n, "; the evaluation before, after %s, had %s",
                                  before, share);
        }
        if (row->has_time_speedup && !reference)
            snprintf(text + n, sizeof text - n, "; time to target %.2fx", row->time_speedup);
        remark(out, width, name, text);
    }
    if (run->state != PS_COMPARE_FINISHED && !row->threshold_only) {
        snprintf(text, sizeof text, "has not finished (%s): its total is the time so far",
                 ps_compare_state_name(run->state));
        remark(out, width, name, text);
    }
    if (row->non_finite)
        remark(out, width, name, row->non_finite_what);
    if (row->threshold_only)
        remark(out, width, name, "published totals of 100 epochs, not a time to target");
    else if (row->refusal[0])
        snprintf(text, sizeof text, "not compared: %s", row->refusal), remark(out, width, name, text);
    else if (row->time_refusal[0])
        snprintf(text, sizeof text, "no time speed-up: %s", row->time_refusal),
            remark(out, width, name, text);
    if (row->differs[0]) {
        snprintf(text, sizeof text, "differs from the reference (its value last): %s", row->differs);
        remark(out, width, name, text);
    }
}

static int print_text(const struct ps_compare_run *runs, const struct ps_compare_row *rows_of, size_t count,
                      size_t reference, double target, struct ps_error *err)
{
    char title[32];
    struct cli_column columns[] = {
        {"RUN", CLI_LEFT, CLI_CUT},     {"RANKS", CLI_RIGHT, CLI_KEEP}, {"EPOCHS", CLI_RIGHT, CLI_KEEP},
        {"BEST", CLI_RIGHT, CLI_KEEP},  {"TOTAL", CLI_RIGHT, CLI_KEEP}, {title, CLI_RIGHT, CLI_KEEP},
        {"IMG/S", CLI_RIGHT, CLI_KEEP}, {"SPEED", CLI_RIGHT, CLI_KEEP}, {"EFF.", CLI_RIGHT, CLI_KEEP},
    };
    size_t width = cli_columns();
    struct ps_buf out = PS_BUF_INIT(4 << 20);
    struct cli_table table;
    snprintf(title, sizeof title, "TO %g%%", target * 100);
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < count; i++)
        add_row(&table, &runs[i], &rows_of[i], i == reference);
    cli_table_render(&table, width, cli_colours(STDOUT_FILENO), &out);
    ps_buf_puts(&out, "\n");
    remark(&out, width, "", "* reference of speed-up (SPEED, by images/s) and efficiency (EFF.)");
    for (size_t i = 0; i < count; i++)
        remarks(&out, width, &runs[i], &rows_of[i], i == reference);
    int code = table.failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : cli_write(&out, err);
    cli_table_done(&table);
    ps_buf_done(&out);
    return code;
}

static json_t *maybe(bool has, double value)
{
    return has ? cli_json_number(value) : json_null();
}

static json_t *row_json(const struct ps_compare_run *run, const struct ps_compare_row *row)
{
    json_t *o = json_object();
    json_object_set_new(o, "id", json_string(run->id ? run->id : ""));
    json_object_set_new(o, "name", json_string(run->name ? run->name : ""));
    json_object_set_new(o, "state", json_string(ps_compare_state_name(run->state)));
    json_object_set_new(o, "threshold_only", json_boolean(row->threshold_only));
    json_object_set_new(o, "world_size", json_integer(run->world_size));
    json_object_set_new(o, "dataset", json_string(run->dataset ? run->dataset : ""));
    json_object_set_new(o, "epochs", json_integer(row->epochs));
    json_object_set_new(o, "best_accuracy", maybe(row->has_accuracy, row->best_accuracy));
    json_object_set_new(o, "final_accuracy", maybe(row->has_accuracy, row->final_accuracy));
    json_object_set_new(o, "total_s", maybe(row->has_total, row->total_s));
    json_object_set_new(o, "time_to_target_s", maybe(row->has_time_to_target, row->time_to_target_s));
    json_object_set_new(o, "epochs_to_target",
                        row->epochs_to_target ? json_integer(row->epochs_to_target) : json_null());
    json_object_set_new(o, "before_target_s", maybe(row->epochs_to_target && row->has_before, row->before_s));
    json_object_set_new(o, "before_target_accuracy",
                        maybe(row->epochs_to_target && row->has_before, row->before_accuracy));
    json_object_set_new(o, "samples_per_s", maybe(row->has_throughput, row->samples_per_s));
    json_object_set_new(o, "speedup", maybe(row->has_speedup, row->speedup));
    json_object_set_new(o, "efficiency", maybe(row->has_speedup, row->efficiency));
    json_object_set_new(o, "time_speedup", maybe(row->has_time_speedup, row->time_speedup));
    json_object_set_new(o, "refusal", json_string(row->refusal));
    json_object_set_new(o, "time_refusal", json_string(row->time_refusal));
    json_object_set_new(o, "differs", json_string(row->differs));
    return o;
}

static int print_json(const struct ps_compare_run *runs, const struct ps_compare_row *rows_of, size_t count,
                      size_t reference, double target, struct ps_error *err)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, row_json(&runs[i], &rows_of[i]));
    return cli_write_json(json_pack("{s:f, s:s, s:o}", "target", target, "reference",
                                    runs[reference].name ? runs[reference].name : "", "rows", array),
                          err);
}

static int compare_runs(const struct compare_settings *settings, char **words, size_t count,
                        struct ps_error *err)
{
    struct cli_run fetched[most_runs + 1];
    struct ps_compare_run runs[most_runs + 1] = {0};
    struct ps_compare_row rows_of[most_runs + 1];
    struct cli_source source = {.common = &settings->common, .store = settings->store};
    size_t n = 0, reference = 0;
    double target;
    int code = 0;
    if (ps_compare_parse_share(settings->target, &target) || target <= 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--target %.40s: must be an accuracy such as 0.8 or 80%%",
                       settings->target);
    if (!count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "no run to compare");
    for (; n < count && !code; n += !code)
        code = cli_fetch(&source, words[n], &fetched[n], err);
    if (!code && settings->baseline) {
        for (reference = 0; reference < n && strcmp(words[reference], settings->baseline) != 0; reference++)
            ;
        if (reference == n) {
            code = cli_fetch(&source, settings->baseline, &fetched[n], err);
            n += !code;
        }
    }
    for (size_t i = 0; i < n; i++)
        runs[i] = fetched[i].run;
    if (!code)
        code = ps_compare(runs, n, reference, target, rows_of, err);
    if (!code)
        code = settings->common.json ? print_json(runs, rows_of, n, reference, target, err)
                                     : print_text(runs, rows_of, n, reference, target, err);
    for (size_t i = 0; i < n; i++)
        cli_run_done(&fetched[i]);
    cli_source_done(&source);
    return code;
}

int cli_compare(int argc, char **argv)
{
    struct compare_settings settings = {0};
    struct ps_error err = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 1, most_runs, &words, &err);
    if (code > 0)
        return 0;
    if (!code)
        code = compare_runs(&settings, argv + 1, (size_t)words, &err);
    return code ? cli_complain("compare", &err) : 0;
}
