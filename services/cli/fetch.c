/* SPDX-License-Identifier: Apache-2.0
 * Runs for comparison: from the sidecar, a store, a file, a run directory, or built in. */
#include "services/cli/cli.h"

#include "db/store.h"
#include "services/base/fs.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void cli_run_done(struct cli_run *run)
{
    paramsync_run_free(run->owner);
    paramsync_metrics_free(run->metrics);
    if (run->stored)
        ps_run_done(run->stored);
    free(run->stored);
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

/* ---- A store, beside or instead of its sidecar ---- */

static int open_store(struct cli_source *source, struct ps_error *err)
{
    struct stat st;
    const char *slash = strrchr(source->store, '/');
    if (stat(source->store, &st))
        return ps_fail_errno(err, errno, "--store %s", source->store);
    if (S_ISDIR(st.st_mode)) {
        struct ps_store_config config = {.dir = source->store, .read_only = true, .readers = 1};
        return ps_store_open(&config, &source->db, err);
    }
    char *dir = slash ? strndup(source->store, (size_t)(slash - source->store) + 1) : strdup(".");
    struct ps_store_config config = {
        .dir = dir, .file = slash ? slash + 1 : source->store, .read_only = true, .readers = 1};
    int code =
        dir ? ps_store_open(&config, &source->db, err) : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    free(dir);
    return code;
}

static int from_store(struct ps_store *db, const char *word, struct cli_run *r, struct ps_error *err)
{
    struct ps_epoch_list list = {0};
    r->stored = calloc(1, sizeof *r->stored);
    if (!r->stored)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = ps_store_get_run(db, word, r->stored, err);
    if (!code)
        code = ps_store_query_epochs(db, r->stored->id, false, &list, err);
    if (code)
        return code;
    const struct ps_run *run = r->stored;
    r->epochs = calloc(list.count + 1, sizeof *r->epochs);
    r->config = calloc(run->config_count + 1, sizeof *r->config);
    if (!r->epochs || !r->config)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < list.count && !code; i++) {
        const struct ps_epoch *e = &list.epochs[i];
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
    for (size_t i = 0; i < run->config_count && !code; i++)
        r->config[i] = (struct ps_compare_pair){run->config[i].key, run->config[i].value};
    size_t epochs = code ? 0 : ps_compare_sort_epochs(r->epochs, list.count);
    ps_epoch_list_done(&list);
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
                                     .epoch_count = epochs,
                                     .total_s = run->elapsed_s,
                                     .reason = run->reason};
    return code;
}

void cli_source_done(struct cli_source *source)
{
    paramsync_disconnect(source->client);
    ps_store_free(source->db);
    source->client = NULL;
    source->db = NULL;
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

double cli_json_to_number(const json_t *value)
{
    const char *text = json_string_value(value);
    if (text)
        return strcmp(text, "Infinity") == 0 ? INFINITY : strcmp(text, "-Infinity") == 0 ? -INFINITY : NAN;
    return json_number_value(value);
}

static double number(const json_t *o, const char *key)
{
    return cli_json_to_number(json_object_get(o, key)); /* 0 where there is none */
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

int cli_state_from_name(const char *name)
{
    for (int state = PARAMSYNC_RUN_CREATED; state <= PARAMSYNC_RUN_LOST; state++)
        if (strcmp(name, paramsync_run_state_name(state)) == 0)
            return state;
    return PARAMSYNC_RUN_UNSPECIFIED;
}

static int read_export(struct cli_run *r, const char *path, struct ps_error *err)
{
    size_t i = 0;
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
                                .state = cli_state_from_name(string(run, "state")),
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

int cli_run_from_json(json_t *object, const char *path, struct cli_run *ret_run, struct ps_error *err)
{
    struct cli_run run = {.file = json_incref(object)}, *r = &run;
    int code = read_export(r, path, err);
    if (code) {
        cli_run_done(&run);
        return code;
    }
    *ret_run = run;
    return 0;
}

static int from_file(const char *path, struct cli_run *r, struct ps_error *err)
{
    char *text;
    size_t size;
    json_error_t where;
    struct stat st;
    if (!stat(path, &st) && S_ISDIR(st.st_mode))
        return cli_run_from_folder(path, r, err);
    int code = ps_read_file(path, file_max, &text, &size, err);
    if (code)
        return code;
    json_t *object = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);
    free(text);
    if (!object)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %d: %s", path, where.line, where.text);
    if (json_object_get(object, "paramsync_baselines")) {
        code = cli_baselines_get(object, path, NULL, r, err);
    } else {
        code = cli_run_from_json(object, path, r, err);
        r->run.pinned = !code; /* kept as a file, it is held on to */
    }
    json_decref(object);
    return code;
}

static json_t *text_or_empty(const char *text)
{
    return json_string(text ? text : "");
}

json_t *cli_run_to_json(const struct ps_compare_run *run)
{
    json_t *epochs = json_array(), *config = json_object(), *o = json_object();
    for (size_t i = 0; i < run->epoch_count; i++) {
        const struct ps_compare_epoch *e = &run->epochs[i];
        json_t *epoch = json_pack(
            "{s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o}", "attempt", (int)e->attempt, "epoch", (int)e->epoch,
            "train_loss", cli_json_number(e->train_loss), "samples_per_s", cli_json_number(e->samples_per_s),
            "elapsed_s", cli_json_number(e->elapsed_s), "train_s", cli_json_number(e->train_s), "eval_s",
            cli_json_number(e->eval_s), "evaluated", json_boolean(!e->no_eval));
        if (!e->no_eval) {
            json_object_set_new(epoch, "val_loss", cli_json_number(e->val_loss));
            json_object_set_new(epoch, "accuracy", cli_json_number(e->accuracy));
        }
        json_array_append_new(epochs, epoch);
    }
    for (size_t i = 0; i < run->config_count; i++)
        json_object_set_new(config, run->config[i].key, text_or_empty(run->config[i].value));
    json_object_set_new(o, "id", text_or_empty(run->id));
    json_object_set_new(o, "name", text_or_empty(run->name));
    json_object_set_new(o, "state", json_string(ps_compare_state_name(run->state)));
    json_object_set_new(o, "world_size", json_integer(run->world_size));
    json_object_set_new(o, "batch_per_rank", json_integer(run->batch_per_rank));
    json_object_set_new(o, "epochs_planned", json_integer(run->epochs_planned));
    json_object_set_new(o, "model", text_or_empty(run->model));
    json_object_set_new(o, "dataset", text_or_empty(run->dataset));
    json_object_set_new(o, "dataset_hash", text_or_empty(run->dataset_hash));
    json_object_set_new(o, "device", text_or_empty(run->device));
    json_object_set_new(o, "commit", text_or_empty(run->commit));
    json_object_set_new(o, "reason", text_or_empty(run->reason));
    json_object_set_new(o, "elapsed_s", cli_json_number(run->total_s));
    json_object_set_new(o, "config", config);
    return json_pack("{s:i, s:o, s:o}", "paramsync_export", (int)file_format, "run", o, "epochs", epochs);
}

bool cli_is_path(const char *word)
{
    size_t n = strlen(word);
    return *word == '/' || *word == '.' || (n && word[n - 1] == '/') ||
           (n > 5 && strcmp(word + n - 5, ".json") == 0);
}

int cli_fetch(struct cli_source *source, const char *word, struct cli_run *ret_run, struct ps_error *err)
{
    struct cli_run run = {0};
    const struct ps_compare_run *builtin = ps_compare_builtin(word);
    int code = 0;
    if (builtin) {
        run.run = *builtin;
    } else if (cli_is_path(word)) {
        code = from_file(word, &run, err);
    } else if (source->store) {
        if (!source->db)
            code = open_store(source, err);
        if (!code)
            code = from_store(source->db, word, &run, err);
    } else {
        if (!source->client)
            code = cli_connect(source->common, &source->client, err);
        if (!code)
            code = from_sidecar(source->client, word, &run, err);
    }
    if (code) {
        cli_run_done(&run);
        return code;
    }
    *ret_run = run;
    return 0;
}
