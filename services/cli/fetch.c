/* SPDX-License-Identifier: Apache-2.0
 * Runs for comparison: from the sidecar, from a file, or built in. */
#include "services/cli/cli.h"

#include "services/base/fs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void cli_run_done(struct cli_run *run)
{
    paramsync_run_free(run->owner);
    paramsync_metrics_free(run->metrics);
    json_decref(run->file);
    free(run->epochs);
    free(run->config);
    memset(run, 0, sizeof *run);
}

static int from_sidecar(struct paramsync_client *client, const char *word, struct cli_run *r,
                        struct ps_error *err)
{
    struct paramsync_error outer = {0};
    int code = paramsync_get_run(client, word, &r->owner, &outer);
    if (!code)
        code = paramsync_query(client, r->owner->id, NULL, -1, 0, &r->metrics, &outer);
    if (code)
        return cli_error(err, &outer);
    const struct paramsync_run *run = r->owner;
    const struct paramsync_metrics *m = r->metrics;
    r->epochs = calloc(m->epoch_count + 1, sizeof *r->epochs);
    r->config = calloc(run->config_count + 1, sizeof *r->config);
    if (!r->epochs || !r->config)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < m->epoch_count; i++) {
        const struct paramsync_epoch *e = &m->epochs[i];
        r->epochs[i] = (struct ps_compare_epoch){.attempt = e->attempt,
                                                 .epoch = e->epoch,
                                                 .elapsed_s = e->elapsed_s,
                                                 .train_loss = e->train_loss,
                                                 .val_loss = e->val_loss,
                                                 .accuracy = e->accuracy,
                                                 .samples_per_s = e->samples_per_s,
                                                 .train_s = e->train_s,
                                                 .eval_s = e->eval_s,
                                                 .no_eval = e->no_eval};
    }
    for (size_t i = 0; i < run->config_count; i++)
        r->config[i] = (struct ps_compare_pair){run->config[i].key, run->config[i].value};
    r->run = (struct ps_compare_run){.id = run->id,
                                     .name = run->name,
                                     .state = run->state,
                                     .world_size = run->world_size,
                                     .batch_per_rank = run->batch_per_rank,
                                     .epochs_planned = run->epochs_planned,
                                     .model = run->model,
                                     .dataset = run->dataset,
                                     .dataset_hash = run->dataset_hash,
                                     .device = run->device,
                                     .commit = run->commit,
                                     .config = r->config,
                                     .config_count = run->config_count,
                                     .epochs = r->epochs,
                                     .epoch_count = ps_compare_sort_epochs(r->epochs, m->epoch_count),
                                     .total_s = run->elapsed_s,
                                     .reason = run->reason};
    return 0;
}

/* ---- Files written by `paramsync export` ---- */

enum { file_format = 1, file_max = 256 << 20 };

json_t *cli_export_json(const struct paramsync_run *run, const struct paramsync_metrics *metrics)
{
    json_t *epochs = json_array(), *series = json_array();
    for (size_t i = 0; i < metrics->epoch_count; i++)
        json_array_append_new(epochs, cli_epoch_json(&metrics->epochs[i]));
    for (size_t i = 0; i < metrics->series_count; i++) {
        const struct paramsync_series *s = &metrics->series[i];
        json_t *steps = json_array(), *values = json_array(), *elapsed = json_array(),
               *attempts = json_array();
        for (size_t k = 0; k < s->count; k++) {
            json_array_append_new(steps, json_integer((json_int_t)s->steps[k]));
            json_array_append_new(values, cli_json_number(s->values[k]));
            json_array_append_new(elapsed, cli_json_number(s->elapsed_s[k]));
            json_array_append_new(attempts, json_integer(s->attempts[k]));
        }
        json_array_append_new(series,
                              json_pack("{s:s, s:i, s:I, s:o, s:o, s:o, s:o}", "name", s->name, "rank",
                                        (int)s->rank, "total_points", (json_int_t)s->total_points, "attempts",
                                        attempts, "steps", steps, "values", values, "elapsed_s", elapsed));
    }
    return json_pack("{s:i, s:o, s:o, s:o}", "paramsync_export", (int)file_format, "run",
                     cli_run_json(run, true), "epochs", epochs, "series", series);
}

static double number(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    const char *text = json_string_value(v);
    if (text)
        return strcmp(text, "Infinity") == 0 ? INFINITY : strcmp(text, "-Infinity") == 0 ? -INFINITY : NAN;
    return json_number_value(v); /* 0 where there is none */
}

static uint32_t count(const json_t *o, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(o, key));
    return v < 0 || v > UINT32_MAX ? 0 : (uint32_t)v;
}

static const char *string(const json_t *o, const char *key)
{
    const char *text = json_string_value(json_object_get(o, key));
    return text ? text : "";
}

static int state_from_name(const char *name)
{
    for (int state = PARAMSYNC_RUN_CREATED; state <= PARAMSYNC_RUN_LOST; state++)
        if (strcmp(name, paramsync_run_state_name(state)) == 0)
            return state;
    return PARAMSYNC_RUN_UNSPECIFIED;
}

static int from_file(const char *path, struct cli_run *r, struct ps_error *err)
{
    char *text;
    size_t size, i = 0;
    json_error_t where;
    int code = ps_read_file(path, file_max, &text, &size, err);
    if (code)
        return code;
    r->file = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);
    free(text);
    if (!r->file)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %d: %s", path, where.line, where.text);
    const json_t *run = json_object_get(r->file, "run"), *epochs = json_object_get(r->file, "epochs"), *value;
    json_t *config = json_object_get(run, "config");
    if (json_integer_value(json_object_get(r->file, "paramsync_export")) != file_format ||
        !json_is_object(run) || !json_is_array(epochs))
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s was not written by `paramsync export RUN --format json`",
                       path);
    r->epochs = calloc(json_array_size(epochs) + 1, sizeof *r->epochs);
    r->config = calloc(json_object_size(config) + 1, sizeof *r->config);
    if (!r->epochs || !r->config)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    json_array_foreach(epochs, i, value)
    {
        if (!json_is_object(value) || !count(value, "epoch"))
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s: epochs[%zu] has no epoch", path, i);
        r->epochs[i] =
            (struct ps_compare_epoch){.attempt = count(value, "attempt"),
                                      .epoch = count(value, "epoch"),
                                      .elapsed_s = number(value, "elapsed_s"),
                                      .train_loss = number(value, "train_loss"),
                                      .val_loss = number(value, "val_loss"),
                                      .accuracy = number(value, "accuracy"),
                                      .samples_per_s = number(value, "samples_per_s"),
                                      .train_s = number(value, "train_s"),
                                      .eval_s = number(value, "eval_s"),
                                      .no_eval = !json_is_true(json_object_get(value, "evaluated"))};
    }
    size_t pairs = 0;
    const char *key;
    json_t *item;
    json_object_foreach(config, key, item) r->config[pairs++] =
        (struct ps_compare_pair){key, json_is_string(item) ? json_string_value(item) : ""};
    r->run =
        (struct ps_compare_run){.id = string(run, "id"),
                                .name = string(run, "name"),
                                .state = state_from_name(string(run, "state")),
                                .world_size = count(run, "world_size"),
                                .batch_per_rank = count(run, "batch_per_rank"),
                                .epochs_planned = count(run, "epochs_planned"),
                                .model = string(run, "model"),
                                .dataset = string(run, "dataset"),
                                .dataset_hash = string(run, "dataset_hash"),
                                .device = string(run, "device"),
                                .commit = string(run, "commit"),
                                .config = r->config,
                                .config_count = pairs,
                                .epochs = r->epochs,
                                .epoch_count = ps_compare_sort_epochs(r->epochs, json_array_size(epochs)),
                                .total_s = number(run, "elapsed_s"),
                                .reason = string(run, "reason")};
    return 0;
}

int cli_fetch(const struct cli_common *settings, struct paramsync_client **client, const char *word,
              bool files, struct cli_run *ret_run, struct ps_error *err)
{
    struct cli_run run = {0};
    const struct ps_compare_run *builtin = ps_compare_builtin(word);
    size_t n = strlen(word);
    int code = 0;
    if (builtin) {
        run.run = *builtin;
    } else if (files && (*word == '/' || *word == '.' || (n > 5 && strcmp(word + n - 5, ".json") == 0))) {
        code = from_file(word, &run, err);
    } else {
        if (!*client)
            code = cli_connect(settings, client, err);
        if (!code)
            code = from_sidecar(*client, word, &run, err);
    }
    if (code) {
        cli_run_done(&run);
        return code;
    }
    *ret_run = run;
    return 0;
}
