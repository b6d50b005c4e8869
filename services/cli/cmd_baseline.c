/* SPDX-License-Identifier: Apache-2.0
 * paramsync baseline: what the gate holds runs to, in a file for version control. */
#include "services/cli/cli.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct baseline_settings {
    struct cli_common common;
    const char *baselines, *free_fields, *store;
};

static const struct ps_option rows[] = {
    {.name = "baselines",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct baseline_settings, baselines),
     .value = "FILE",
     .fallback = CLI_BASELINES_FILE,
     .help = "the file with the baselines",
     .group = "Options"},
    {.name = "free",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct baseline_settings, free_fields),
     .value = "FIELDS",
     .help = "set: what a judged run need not share with this baseline, of commit,world-size,device"},
    CLI_JSON_ROW(struct baseline_settings, "list: print a JSON object"),
    CLI_STORE_ROW(struct baseline_settings),
    CLI_CONNECTION_ROWS(struct baseline_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync baseline",
    .usage = "set NAME RUN | remove NAME | list [--baselines FILE] [--free FIELDS]",
    .example = "paramsync baseline set release ./output_dir --free commit\n"
               "paramsync baseline list\n"
               "paramsync gate nightly --baselines baselines.json --baseline release",
    .about =
        "Pins a finished run as a baseline for `paramsync gate`: its figures and where they come from "
        "(commit, data hash, world size, device) go into a file to commit with the code. A run that is "
        "judged against it must have the same, except for what --free names; else the gate cannot decide. "
        "set replaces a baseline of that name. RUN is an id or name, a run directory or an exported file.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

static int set_baseline(const struct baseline_settings *settings, const char *name, const char *word,
                        struct ps_error *err)
{
    struct cli_source source = {.common = &settings->common, .store = settings->store};
    struct cli_run run = {0};
    struct ps_compare_row row;
    json_t *file = NULL;
    unsigned free_fields = 0;
    int code = ps_gate_parse_fields(settings->free_fields ? settings->free_fields : "", &free_fields, err);
    if (code)
        return ps_error_prefix(err, "--free");
    code = cli_baselines_read(settings->baselines, true, &file, err);
    if (!code)
        code = cli_fetch(&source, word, &run, err);
    if (!code && run.run.threshold_only)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is a published result: the gate knows it without a pin",
                       word);
    if (!code && run.run.state != PS_COMPARE_FINISHED)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%.100s is %s: only a finished run can be a baseline", word,
                       ps_compare_state_name(run.run.state));
    if (!code)
        code = ps_compare(&run.run, 1, 0, 0.5, &row, err);
    if (!code && (row.non_finite || !row.evaluated))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%.100s can't be a baseline: %s", word,
                       row.non_finite ? row.non_finite_what : "it was never evaluated");
    if (!code)
        code = cli_baselines_set(file, name, &run.run, free_fields, err);
    if (!code)
        code = cli_baselines_write(settings->baselines, file, err);
    if (!code) {
        char share[32];
        struct ps_buf out = PS_BUF_INIT(1 << 14);
        ps_compare_format_share(row.best_accuracy, -1, share, sizeof share);
        cli_escape(&out, settings->baselines);
        ps_buf_puts(&out, ": ");
        cli_escape(&out, name);
        ps_buf_printf(&out, " is now %s after %u epochs, world size %u\n", share, row.epochs,
                      run.run.world_size);
        code = cli_write(&out, err);
        ps_buf_done(&out);
    }
    json_decref(file);
    cli_run_done(&run);
    cli_source_done(&source);
    return code;
}

static int remove_baseline(const struct baseline_settings *settings, const char *name, struct ps_error *err)
{
    json_t *file = NULL;
    int code = cli_baselines_read(settings->baselines, false, &file, err);
    if (!code && json_object_del(json_object_get(file, "baselines"), name))
        code = ps_fail(err, PS_NOT_FOUND, "%s has no baseline %.100s", settings->baselines, name);
    if (!code)
        code = cli_baselines_write(settings->baselines, file, err);
    json_decref(file);
    return code;
}

static int list_baselines(const struct baseline_settings *settings, struct ps_error *err)
{
    static const struct cli_column columns[] = {
        {"NAME", CLI_LEFT, CLI_WRAP},   {"BEST", CLI_RIGHT, CLI_KEEP},  {"WORLD", CLI_RIGHT, CLI_KEEP},
        {"DEVICE", CLI_LEFT, CLI_WRAP}, {"COMMIT", CLI_LEFT, CLI_WRAP}, {"FREE", CLI_LEFT, CLI_WRAP},
        {"PINNED", CLI_LEFT, CLI_WRAP},
    };
    json_t *file = NULL, *pin;
    const char *name;
    int code = cli_baselines_read(settings->baselines, false, &file, err);
    if (code)
        return code;
    if (settings->common.json) {
        code = cli_write_json(json_incref(file), err);
        json_decref(file);
        return code;
    }
    struct cli_table table;
    struct ps_buf out = PS_BUF_INIT(16 << 20);
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    json_object_foreach(json_object_get(file, "baselines"), name, pin)
    {
        struct cli_run run = {0};
        struct ps_compare_row row;
        char share[32], free_fields[80];
        const char *at = json_string_value(json_object_get(pin, "pinned_at"));
        code = cli_baselines_get(file, settings->baselines, name, &run, err);
        if (!code)
            code = ps_compare(&run.run, 1, 0, 0.5, &row, err);
        if (code)
            break;
        ps_compare_format_share(row.best_accuracy, -1, share, sizeof share);
        ps_gate_format_fields(run.run.pin_free, free_fields, sizeof free_fields);
        cli_table_add(&table, CLI_PLAIN, name);
        cli_table_add(&table, CLI_PLAIN, share);
        cli_table_printf(&table, CLI_PLAIN, "%u", run.run.world_size);
        cli_table_printf(&table, CLI_PLAIN, "%.60s", *run.run.device ? run.run.device : "-");
        cli_table_printf(&table, CLI_PLAIN, "%.12s", *run.run.commit ? run.run.commit : "-");
        cli_table_add(&table, CLI_PLAIN, *free_fields ? free_fields : "-");
        cli_table_printf(&table, CLI_PLAIN, "%.10s", at ? at : "-");
        cli_run_done(&run);
    }
    if (!code)
        code = cli_table_render(&table, cli_columns(), cli_colours(STDOUT_FILENO), &out);
    if (!code)
        code = cli_write(&out, err);
    ps_buf_done(&out);
    cli_table_done(&table);
    json_decref(file);
    return code;
}

int cli_baseline(int argc, char **argv)
{
    struct baseline_settings settings = {0};
    struct ps_error err = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 1, 3, &words, &err);
    if (code > 0)
        return 0;
    if (!code && strcmp(argv[1], "set") == 0 && words == 3)
        code = set_baseline(&settings, argv[2], argv[3], &err);
    else if (!code && strcmp(argv[1], "remove") == 0 && words == 2)
        code = remove_baseline(&settings, argv[2], &err);
    else if (!code && strcmp(argv[1], "list") == 0 && words == 1)
        code = list_baselines(&settings, &err);
    else if (!code)
        code = ps_fail(&err, PS_INVALID_ARGUMENT, "what to do is missing; usage: %s %s",
                       table_of_options.program, table_of_options.usage);
    if (code)
        cli_complain("baseline", &err);
    return code ? 2 : 0;
}
