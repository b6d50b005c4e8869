/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/cli.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

int cli_parse(const struct ps_options *table, struct cli_common *settings, int argc, char **argv, int least,
              int most, int *ret_positional, struct ps_error *err)
{
    struct ps_options with_sources = *table;
    unsigned char sources[64] = {0};
    int positional = 0;
    if (table->count > sizeof sources)
        return ps_fail(err, PS_INTERNAL, "too many options");
    with_sources.sources = sources;
    int code = ps_options_defaults(&with_sources, settings, err);
    if (!code)
        code = ps_options_parse(&with_sources, settings, argc, argv, &positional, false, NULL, err);
    if (!code && settings->help) {
        struct ps_buf out = PS_BUF_INIT(1 << 16);
        ps_options_help(table, &out);
        code = cli_write(&out, err);
        ps_buf_done(&out);
        return code ? code : 1;
    }
    if (!code)
        code = ps_options_environment(&with_sources, settings, err);
    if (code)
        return code;
    if (positional < least)
        return ps_fail(err, PS_INVALID_ARGUMENT, "something is missing; usage: %s %s", table->program,
                       table->usage);
    if (most >= 0 && positional > most)
        return ps_fail(err, PS_INVALID_ARGUMENT, "\"%.80s\" is one word too many; usage: %s %s",
                       argv[most + 1], table->program, table->usage);
    *ret_positional = positional;
    return 0;
}

int cli_error(struct ps_error *err, const struct paramsync_error *from)
{
    return ps_fail(err, from->code, "%s", from->message);
}

int cli_connect(const struct cli_common *settings, struct paramsync_client **ret_client, struct ps_error *err)
{
    struct paramsync_error outer = {0};
    struct paramsync_options options = {.address = settings->sidecar,
                                        .token_file = settings->token_file,
                                        .tls_ca = settings->tls_ca,
                                        .tls_cert = settings->tls_cert,
                                        .tls_key = settings->tls_key};
    return paramsync_connect(&options, ret_client, &outer) ? cli_error(err, &outer) : 0;
}

int cli_complain(const char *command, const struct ps_error *err)
{
    struct ps_buf text = PS_BUF_INIT(1 << 16);
    cli_escape(&text, err->message);
    fprintf(stderr, "paramsync %s: %s\n", command, text.data ? text.data : "out of memory");
    ps_buf_done(&text);
    return ps_code_to_exit(err->code);
}

bool cli_colours(int fd)
{
    const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
    return isatty(fd) && !(no && *no) && !(term && strcmp(term, "dumb") == 0);
}

size_t cli_columns(void)
{
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 80)
        return size.ws_col;
    return 80;
}

enum cli_colour cli_state_colour(int state)
{
    switch (state) {
    case PARAMSYNC_RUN_FINISHED:
        return CLI_GREEN;
    case PARAMSYNC_RUN_FAILED:
    case PARAMSYNC_RUN_LOST:
        return CLI_RED;
    case PARAMSYNC_RUN_KILLED:
        return CLI_YELLOW;
    case PARAMSYNC_RUN_RUNNING:
        return CLI_BOLD;
    default:
        return CLI_PLAIN;
    }
}

int cli_write(const struct ps_buf *text, struct ps_error *err)
{
    if (text->failed)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "the output is too large, or memory is short");
    if (text->size && fwrite(text->data, 1, text->size, stdout) != text->size)
        return ps_fail_errno(err, errno, "writing to standard output");
    if (fflush(stdout))
        return ps_fail_errno(err, errno, "writing to standard output");
    return 0;
}

int cli_write_json(json_t *value, struct ps_error *err)
{
    char *text = value ? json_dumps(value, JSON_INDENT(2) | JSON_ENCODE_ANY) : NULL;
    json_decref(value);
    if (!text)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    struct ps_buf out = {.data = text, .size = strlen(text), .max = SIZE_MAX};
    int code = cli_write(&out, err);
    free(text);
    if (!code && (putchar('\n') == EOF || fflush(stdout)))
        code = ps_fail_errno(err, errno, "writing to standard output");
    return code;
}

json_t *cli_json_number(double value)
{
    if (isnan(value))
        return json_string("NaN");
    if (isinf(value))
        return json_string(value > 0 ? "Infinity" : "-Infinity");
    return json_real(value);
}

void cli_format_bytes(uint64_t bytes, char *out, size_t size)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 999.95 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1000;
        unit++;
    }
    snprintf(out, size, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
}

void cli_format_time(int64_t wall_ns, char *out, size_t size)
{
    char full[32];
    if (!wall_ns) {
        snprintf(out, size, "-");
        return;
    }
    ps_format_utc(wall_ns, full, sizeof full);
    full[10] = ' ';
    snprintf(out, size, "%.19sZ", full);
}

static json_t *time_json(int64_t wall_ns)
{
    char full[32];
    if (!wall_ns)
        return json_null();
    ps_format_utc(wall_ns, full, sizeof full);
    return json_string(full);
}

json_t *cli_run_json(const struct paramsync_run *run, bool with_config)
{
    json_t *tags = json_array();
    for (size_t i = 0; i < run->tag_count; i++)
        json_array_append_new(tags, json_string(run->tags[i]));
    json_t *o =
        json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:o, s:o, s:o}",
                  "id", run->id, "name", run->name, "state", paramsync_run_state_name(run->state),
                  "world_size", (int)run->world_size, "attempt", (int)run->attempt, "batch_per_rank",
                  (int)run->batch_per_rank, "epochs_planned", (int)run->epochs_planned, "model", run->model,
                  "dataset", run->dataset, "dataset_hash", run->dataset_hash, "device", run->device, "commit",
                  run->commit, "reason", run->reason, "notes", run->notes, "created_at",
                  time_json(run->created_ns), "ended_at", time_json(run->ended_ns), "tags", tags);
    if (!o)
        return NULL;
    json_object_set_new(o, "elapsed_s", cli_json_number(run->elapsed_s));
    json_object_set_new(o, "elapsed_with_gaps_s", cli_json_number(run->elapsed_with_gaps_s));
    if (run->has_epochs) {
        json_object_set_new(o, "last_epoch", json_integer(run->last_epoch));
        json_object_set_new(o, "train_loss", cli_json_number(run->train_loss));
        json_object_set_new(o, "val_loss", cli_json_number(run->val_loss));
        json_object_set_new(o, "accuracy", cli_json_number(run->accuracy));
        json_object_set_new(o, "best_accuracy", cli_json_number(run->best_accuracy));
        json_object_set_new(o, "best_epoch", json_integer(run->best_epoch));
        json_object_set_new(o, "samples_per_s", cli_json_number(run->samples_per_s));
    }
    if (with_config) {
        json_t *config = json_object();
        for (size_t i = 0; i < run->config_count; i++)
            json_object_set_new(config, run->config[i].key, json_string(run->config[i].value));
        json_object_set_new(o, "config", config);
    }
    return o;
}

json_t *cli_epoch_json(const struct paramsync_epoch *e)
{
    json_t *o = json_pack("{s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I}", "attempt", (int)e->attempt,
                          "epoch", (int)e->epoch, "train_loss", cli_json_number(e->train_loss), "lr",
                          cli_json_number(e->lr), "samples_per_s", cli_json_number(e->samples_per_s),
                          "elapsed_s", cli_json_number(e->elapsed_s), "train_s", cli_json_number(e->train_s),
                          "eval_s", cli_json_number(e->eval_s), "evaluated", json_boolean(!e->no_eval),
                          "step", (json_int_t)e->step);
    if (!o || e->no_eval)
        return o;
    json_object_set_new(o, "val_loss", cli_json_number(e->val_loss));
    json_object_set_new(o, "accuracy", cli_json_number(e->accuracy));
    json_object_set_new(o, "correct", json_integer(e->correct));
    json_object_set_new(o, "counted", json_integer(e->counted));
    return o;
}
