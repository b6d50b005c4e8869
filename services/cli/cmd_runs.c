/* SPDX-License-Identifier: Apache-2.0
 * paramsync runs, paramsync show. */
#include "services/cli/cli.h"

#include "services/base/clock.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- runs ---- */

struct runs_settings {
    struct cli_common common;
    int64_t limit;
    const char *name;
};

static const struct ps_option runs_rows[] = {
    {.name = "limit",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct runs_settings, limit),
     .value = "N",
     .fallback = "25",
     .min = 0,
     .max = 1000000,
     .help = "the newest N; 0 means all",
     .group = "Options"},
    {.name = "name",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct runs_settings, name),
     .value = "TEXT",
     .help = "only runs whose name contains this"},
    CLI_JSON_ROW(struct runs_settings, "print a JSON array"),
    CLI_CONNECTION_ROWS(struct runs_settings),
};
static const struct ps_options runs_table = {
    .program = "paramsync runs",
    .usage = "[--limit N] [--name TEXT] [--json]",
    .example = "paramsync runs --limit 10 --name cifar",
    .about = "Lists runs, newest first. Times are UTC, accuracies those of the test images.",
    .rows = runs_rows,
    .count = PS_OPTIONS_COUNT(runs_rows),
};

static int print_runs(const struct paramsync_runs *runs, struct ps_error *err)
{
    static const struct cli_column columns[] = {
        {"NAME", CLI_LEFT, CLI_CUT},     {"STATE", CLI_LEFT, CLI_KEEP}, {"RANKS", CLI_RIGHT, CLI_KEEP},
        {"EPOCH", CLI_RIGHT, CLI_KEEP},  {"BEST", CLI_RIGHT, CLI_KEEP}, {"TIME", CLI_RIGHT, CLI_KEEP},
        {"STARTED", CLI_LEFT, CLI_KEEP},
    };
    struct cli_table table;
    struct ps_buf out = PS_BUF_INIT(64 << 20);
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < runs->count; i++) {
        const struct paramsync_run *r = &runs->runs[i];
        char text[64];
        cli_table_add(&table, CLI_PLAIN, r->name);
        cli_table_add(&table, cli_state_colour(r->state), paramsync_run_state_name(r->state));
        cli_table_printf(&table, CLI_PLAIN, "%u", r->world_size);
        if (r->epochs_planned)
            cli_table_printf(&table, CLI_PLAIN, "%u/%u", r->has_epochs ? r->last_epoch : 0,
                             r->epochs_planned);
        else
            cli_table_printf(&table, CLI_PLAIN, "%u", r->has_epochs ? r->last_epoch : 0);
        if (r->best_epoch)
            ps_compare_format_share(r->best_accuracy, -1, text, sizeof text);
        else
            snprintf(text, sizeof text, "-");
        cli_table_add(&table, CLI_PLAIN, text);
        ps_format_duration(r->elapsed_s, text, sizeof text);
        cli_table_add(&table, CLI_PLAIN, text);
        cli_format_time(r->created_ns, text, sizeof text);
        cli_table_add(&table, CLI_PLAIN, text);
    }
    if (runs->count)
        cli_table_render(&table, cli_columns(), cli_colours(STDOUT_FILENO), &out);
    else
        ps_buf_puts(&out, "no runs\n");
    int code = table.failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : cli_write(&out, err);
    cli_table_done(&table);
    ps_buf_done(&out);
    return code;
}

static int runs_main(int argc, char **argv, struct ps_error *err)
{
    struct runs_settings settings = {0};
    struct paramsync_client *client = NULL;
    struct paramsync_runs *runs = NULL;
    struct paramsync_error outer = {0};
    int words;
    int code = cli_parse(&runs_table, &settings.common, argc, argv, 0, 0, &words, err);
    if (code)
        return code > 0 ? 0 : code;
    code = cli_connect(&settings.common, &client, err);
    if (!code && paramsync_list_runs(client, settings.name, (size_t)settings.limit, &runs, &outer))
        code = cli_error(err, &outer);
    if (!code && settings.common.json) {
        json_t *array = json_array();
        for (size_t i = 0; i < runs->count; i++)
            json_array_append_new(array, cli_run_json(&runs->runs[i], false));
        code = cli_write_json(array, err);
    } else if (!code) {
        code = print_runs(runs, err);
    }
    paramsync_runs_free(runs);
    paramsync_disconnect(client);
    return code;
}

int cli_runs(int argc, char **argv)
{
    struct ps_error err = {0};
    return runs_main(argc, argv, &err) ? cli_complain("runs", &err) : 0;
}

/* ---- show ---- */

struct show_settings {
    struct cli_common common;
};

static const struct ps_option show_rows[] = {
    CLI_JSON_ROW(struct show_settings, "print a JSON object"),
    CLI_CONNECTION_ROWS(struct show_settings),
};
static const struct ps_options show_table = {
    .program = "paramsync show",
    .usage = "RUN [--json]",
    .example = "paramsync show single",
    .about = "Shows one run: what it is, its settings, its epochs and its checkpoints. Elapsed times count "
             "from the "
             "start of the run, with the gaps between attempts left out.",
    .rows = show_rows,
    .count = PS_OPTIONS_COUNT(show_rows),
};

static void fact(struct cli_table *table, const char *name, const char *value)
{
    if (!*value)
        return;
    cli_table_add(table, CLI_PLAIN, name);
    cli_table_add(table, CLI_PLAIN, value);
}

static int show_facts(const struct paramsync_run *r, struct ps_buf *out)
{
    static const struct cli_column columns[] = {{"", CLI_LEFT, CLI_KEEP}, {"", CLI_LEFT, CLI_WRAP}};
    struct cli_table table;
    char text[256], time[64];
    cli_table_init(&table, columns, 2);
    fact(&table, "name", r->name);
    fact(&table, "id", r->id);
    snprintf(text, sizeof text, "%s%s%.200s", paramsync_run_state_name(r->state), *r->reason ? ": " : "",
             r->reason);
    fact(&table, "state", text);
    int n = snprintf(text, sizeof text, "%u process%s", r->world_size, r->world_size == 1 ? "" : "es");
    if (r->batch_per_rank)
        snprintf(text + n, sizeof text - (size_t)n, ", batch %u each", r->batch_per_rank);
    fact(&table, "ranks", text);
    snprintf(text, sizeof text, "%u", r->attempt);
    fact(&table, "attempt", text);
    fact(&table, "model", r->model);
    fact(&table, "data", r->dataset);
    fact(&table, "data hash", r->dataset_hash);
    fact(&table, "device", r->device);
    fact(&table, "commit", r->commit);
    cli_format_time(r->created_ns, time, sizeof time);
    fact(&table, "started", time);
    if (r->ended_ns) {
        cli_format_time(r->ended_ns, time, sizeof time);
        fact(&table, "ended", time);
    }
    ps_format_duration(r->elapsed_s, time, sizeof time);
    snprintf(text, sizeof text, "%s", time);
    if (r->elapsed_with_gaps_s > r->elapsed_s + 0.5) {
        ps_format_duration(r->elapsed_with_gaps_s, time, sizeof time);
        snprintf(text + strlen(text), sizeof text - strlen(text), " (%s with the gaps between attempts)",
                 time);
    }
    fact(&table, "time", text);
    if (r->best_epoch) {
        ps_compare_format_share(r->best_accuracy, -1, time, sizeof time);
        snprintf(text, sizeof text, "%s (epoch %u)", time, r->best_epoch);
        fact(&table, "best", text);
    }
    for (size_t i = 0; i < r->tag_count; i++)
        fact(&table, "tag", r->tags[i]);
    fact(&table, "notes", r->notes);
    for (size_t i = 0; i < r->config_count; i++) {
        snprintf(text, sizeof text, "--%.100s", r->config[i].key);
        fact(&table, text, r->config[i].value);
    }
    struct ps_buf facts = PS_BUF_INIT(4 << 20);
    int code = cli_table_render(&table, cli_columns(), false, &facts);
    /* The columns have no titles: their line is left out. */
    const char *body = facts.data ? strchr(facts.data, '\n') : NULL;
    if (body)
        ps_buf_puts(out, body + 1);
    ps_buf_done(&facts);
    cli_table_done(&table);
    return code;
}

static int show_epochs(const struct paramsync_metrics *m, struct ps_buf *out)
{
    static const struct cli_column columns[] = {
        {"EPOCH", CLI_RIGHT, CLI_KEEP},     {"TRAIN LOSS", CLI_RIGHT, CLI_KEEP},
        {"VAL LOSS", CLI_RIGHT, CLI_KEEP},  {"ACCURACY", CLI_RIGHT, CLI_KEEP},
        {"SAMPLES/S", CLI_RIGHT, CLI_KEEP}, {"ELAPSED", CLI_RIGHT, CLI_KEEP},
    };
    struct cli_table table;
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < m->epoch_count; i++) {
        const struct paramsync_epoch *e = &m->epochs[i];
        char text[64];
        cli_table_printf(&table, CLI_PLAIN, "%u", e->epoch);
        cli_table_printf(&table, CLI_PLAIN, "%.4f", e->train_loss);
        if (e->no_eval) {
            cli_table_add(&table, CLI_PLAIN, "-");
            cli_table_add(&table, CLI_PLAIN, "-");
        } else {
            cli_table_printf(&table, CLI_PLAIN, "%.4f", e->val_loss);
            ps_compare_format_share(e->accuracy, -1, text, sizeof text);
            cli_table_add(&table, CLI_PLAIN, text);
        }
        if (e->samples_per_s == 0) /* not reported */
            cli_table_add(&table, CLI_PLAIN, "-");
        else
            cli_table_printf(&table, CLI_PLAIN, "%.1f", e->samples_per_s);
        ps_format_duration(e->elapsed_s, text, sizeof text);
        cli_table_add(&table, CLI_PLAIN, text);
    }
    int code = 0;
    if (m->epoch_count) {
        ps_buf_puts(out, "\n");
        code = cli_table_render(&table, cli_columns(), cli_colours(STDOUT_FILENO), out);
    }
    cli_table_done(&table);
    return code;
}

static int show_checkpoints(const struct paramsync_checkpoints *list, struct ps_buf *out)
{
    static const struct cli_column columns[] = {
        {"CHECKPOINT", CLI_LEFT, CLI_CUT}, {"EPOCH", CLI_RIGHT, CLI_KEEP}, {"ACCURACY", CLI_RIGHT, CLI_KEEP},
        {"SIZE", CLI_RIGHT, CLI_KEEP},     {"SHA256", CLI_LEFT, CLI_KEEP},
    };
    struct cli_table table;
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < list->count; i++) {
        const struct paramsync_checkpoint *c = &list->checkpoints[i];
        char text[64] = "-";
        cli_table_add(&table, CLI_PLAIN, c->filename);
        cli_table_printf(&table, CLI_PLAIN, "%u", c->epoch);
        if (c->has_accuracy)
            ps_compare_format_share(c->accuracy, -1, text, sizeof text);
        cli_table_add(&table, CLI_PLAIN, text);
        cli_format_bytes(c->size, text, sizeof text);
        cli_table_add(&table, CLI_PLAIN, text);
        cli_table_printf(&table, CLI_PLAIN, "%.12s", c->sha256);
    }
    int code = 0;
    if (list->count) {
        ps_buf_puts(out, "\n");
        code = cli_table_render(&table, cli_columns(), cli_colours(STDOUT_FILENO), out);
    }
    cli_table_done(&table);
    return code;
}

static json_t *show_json(const struct paramsync_run *run, const struct paramsync_metrics *metrics,
                         const struct paramsync_checkpoints *list)
{
    json_t *o = cli_run_json(run, true), *epochs = json_array(), *checkpoints = json_array(),
           *names = json_array();
    for (size_t i = 0; i < metrics->epoch_count; i++)
        json_array_append_new(epochs, cli_epoch_json(&metrics->epochs[i]));
    for (size_t i = 0; i < metrics->name_count; i++)
        json_array_append_new(names, json_string(metrics->names[i]));
    for (size_t i = 0; i < list->count; i++) {
        const struct paramsync_checkpoint *c = &list->checkpoints[i];
        json_t *item = json_pack("{s:i, s:i, s:s, s:s, s:s, s:I, s:I}", "attempt", (int)c->attempt, "epoch",
                                 (int)c->epoch, "filename", c->filename, "format", c->format, "sha256",
                                 c->sha256, "size", (json_int_t)c->size, "step", (json_int_t)c->step);
        if (c->has_accuracy)
            json_object_set_new(item, "accuracy", cli_json_number(c->accuracy));
        json_array_append_new(checkpoints, item);
    }
    if (o) {
        json_object_set_new(o, "epochs", epochs);
        json_object_set_new(o, "series", names);
        json_object_set_new(o, "checkpoints", checkpoints);
    }
    return o;
}

static int show_main(int argc, char **argv, struct ps_error *err)
{
    struct show_settings settings = {0};
    struct paramsync_client *client = NULL;
    struct paramsync_run *run = NULL;
    struct paramsync_metrics *metrics = NULL;
    struct paramsync_checkpoints *list = NULL;
    struct paramsync_error outer = {0};
    int words;
    int code = cli_parse(&show_table, &settings.common, argc, argv, 1, 1, &words, err);
    if (code)
        return code > 0 ? 0 : code;
    code = cli_connect(&settings.common, &client, err);
    if (!code && (paramsync_get_run(client, argv[1], &run, &outer) ||
                  paramsync_query(client, run->id, NULL, -1, 0, &metrics, &outer) ||
                  paramsync_list_checkpoints(client, run->id, &list, &outer)))
        code = cli_error(err, &outer);
    if (!code && settings.common.json) {
        code = cli_write_json(show_json(run, metrics, list), err);
    } else if (!code) {
        struct ps_buf out = PS_BUF_INIT(64 << 20);
        if (show_facts(run, &out) || show_epochs(metrics, &out) || show_checkpoints(list, &out))
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        else
            code = cli_write(&out, err);
        ps_buf_done(&out);
    }
    paramsync_checkpoints_free(list);
    paramsync_metrics_free(metrics);
    paramsync_run_free(run);
    paramsync_disconnect(client);
    return code;
}

int cli_show(int argc, char **argv)
{
    struct ps_error err = {0};
    return show_main(argc, argv, &err) ? cli_complain("show", &err) : 0;
}
