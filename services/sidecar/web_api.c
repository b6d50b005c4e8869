/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_api.h"

#include "paramsync_version.h"
#include "services/base/clock.h"
#include "services/base/text.h"
#include "services/compare/compare.h"
#include "services/sidecar/web_ranks.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { COMPARE_MAX = 32, CACHE_SLOTS = 4096 };

/* Time to target of a run as it stood at updated_ns: it is read for every row of a list, and finished runs,
 * which most are, never change. */
struct cached {
    char id[PS_RUN_ID_SIZE];
    int64_t updated_ns;
    double target, seconds; /* seconds NaN: not reached */
};

struct ps_web_api {
    struct ps_service *service;
    int grpc_port;
    pthread_mutex_t lock; /* guards cache */
    struct cached cache[CACHE_SLOTS];
};

struct ps_web_api *ps_web_api_new(struct ps_service *service, int grpc_port)
{
    struct ps_web_api *api = calloc(1, sizeof *api);
    if (!api)
        return NULL;
    api->service = service;
    api->grpc_port = grpc_port;
    pthread_mutex_init(&api->lock, NULL);
    return api;
}

struct ps_web_api *ps_web_api_free(struct ps_web_api *api)
{
    if (api) {
        pthread_mutex_destroy(&api->lock);
        free(api);
    }
    return NULL;
}

/* ---- Values ---- */

json_t *ps_web_number(double value)
{
    if (isnan(value))
        return json_string("NaN");
    if (isinf(value))
        return json_string(value > 0 ? "Infinity" : "-Infinity");
    return json_real(value);
}

static json_t *maybe(bool present, double value)
{
    return present ? ps_web_number(value) : json_null();
}

static json_t *number_u64(uint64_t value)
{
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

static json_t *instant(int64_t ns)
{
    char text[32];
    if (ns <= 0)
        return json_null();
    ps_format_utc(ns, text, sizeof text);
    return json_string(text);
}

static void put(json_t *object, const char *key, json_t *value)
{
    /* A value that could not be made is out of memory: leaving the field out would be read as something else.
     */
    if (!value || json_object_set_new(object, key, value))
        json_object_set_new(object, "incomplete", json_true());
}

static void put_text(json_t *object, const char *key, const char *value)
{
    /* Text was checked at the edge; should a stored file hold something else, the answer stays valid JSON. */
    json_t *text = json_string(value ? value : "");
    put(object, key, text ? text : json_string("?"));
}

/* ---- Time to target ---- */

static int run_epochs(struct ps_web_api *api, const char *id, struct ps_epoch_list *list,
                      struct ps_compare_epoch **ret_epochs, struct ps_error *err)
{
    int rc = ps_store_query_epochs(api->service->store, id, false, list, err);
    if (rc < 0)
        return rc;
    struct ps_compare_epoch *epochs = calloc(list->count ? list->count : 1, sizeof *epochs);
    if (!epochs) {
        ps_epoch_list_done(list);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    for (size_t i = 0; i < list->count; i++) {
        const struct ps_epoch *e = &list->epochs[i];
        epochs[i] = (struct ps_compare_epoch){
            .attempt = e->attempt,
            .epoch = e->epoch,
            .elapsed_s = e->elapsed_s,
            .train_loss = e->train_loss,
            .val_loss = e->val_loss,
            .accuracy = e->accuracy,
            .samples_per_s = e->samples_per_s,
            .train_s = e->train_s,
            .eval_s = e->eval_s,
            .no_eval = e->no_eval,
        };
    }
    *ret_epochs = epochs;
    return 0;
}

static size_t slot_of(const char *id)
{
    return ps_hash64(id, strlen(id), 0) % CACHE_SLOTS;
}

/* NaN: not reached, or it could not be found out. */
static double time_to_target(struct ps_web_api *api, const struct ps_run *run, double target)
{
    if (!(run->best_accuracy >= target))
        return NAN;
    size_t slot = slot_of(run->id);
    pthread_mutex_lock(&api->lock);
    const struct cached *known = &api->cache[slot];
    bool hit = known->updated_ns == run->updated_ns && known->target == target && !strcmp(known->id, run->id);
    double seconds = hit ? known->seconds : NAN;
    pthread_mutex_unlock(&api->lock);
    if (hit)
        return seconds;

    struct ps_epoch_list list = {0};
    struct ps_compare_epoch *epochs = NULL;
    if (run_epochs(api, run->id, &list, &epochs, NULL) < 0)
        return NAN;
    struct ps_compare_run one = {.id = run->id,
                                 .name = run->name,
                                 .state = run->state,
                                 .world_size = run->world_size,
                                 .epochs = epochs,
                                 .epoch_count = list.count};
    struct ps_compare_row row = {0};
    if (ps_compare(&one, 1, 0, target, &row, NULL) == 0 && row.has_time_to_target)
        seconds = row.time_to_target_s;
    free(epochs);
    ps_epoch_list_done(&list);

    pthread_mutex_lock(&api->lock);
    struct cached *entry = &api->cache[slot];
    memcpy(entry->id, run->id, sizeof entry->id);
    entry->updated_ns = run->updated_ns;
    entry->target = target;
    entry->seconds = seconds;
    pthread_mutex_unlock(&api->lock);
    return seconds;
}

/* ---- Parameters ---- */

static const char *parameter(const struct ps_web_request *request, const char *name)
{
    const char *value = request->parameter ? request->parameter(request->context, name) : NULL;
    return value && *value ? value : NULL;
}

static int whole(const struct ps_web_request *request, const char *name, int64_t min, int64_t max,
                 int64_t fallback, int64_t *ret_value, struct ps_error *err)
{
    const char *text = parameter(request, name);
    if (!text) {
        *ret_value = fallback;
        return 0;
    }
    if (ps_parse_int64(text, min, max, ret_value))
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s: a whole number from %lld to %lld is wanted", name,
                       (long long)min, (long long)max);
    return 0;
}

static int target_of(const struct ps_web_request *request, double *ret_target, struct ps_error *err)
{
    const char *text = parameter(request, "target");
    double target = PS_WEB_TARGET;
    if (text && (ps_parse_double(text, &target) || !(target > 0 && target <= 1)))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "target: an accuracy above 0 and up to 1 is wanted, such as 0.8");
    *ret_target = target;
    return 0;
}

/* ---- Runs ---- */

static json_t *run_json(struct ps_web_api *api, const struct ps_run *run, double target)
{
    json_t *o = json_object();
    put_text(o, "id", run->id);
    put_text(o, "name", run->name);
    put_text(o, "state", ps_run_state_name(run->state));
    put(o, "world_size", json_integer(run->world_size));
    put(o, "attempt", json_integer(run->attempt));
    put_text(o, "model", run->model);
    put_text(o, "dataset", run->dataset);
    put_text(o, "dataset_hash", run->dataset_hash);
    put_text(o, "device", run->device);
    put_text(o, "commit", run->commit);
    put(o, "epochs_planned", json_integer(run->epochs_planned));
    put(o, "batch_per_rank", json_integer(run->batch_per_rank));
    put(o, "created_at", instant(run->created_ns));
    put(o, "ended_at", instant(run->ended_ns));
    put(o, "updated_at", instant(run->updated_ns));
    put_text(o, "reason", run->reason);
    put_text(o, "notes", run->notes);
    json_t *tags = json_array();
    for (size_t i = 0; i < run->tag_count; i++)
        json_array_append_new(tags, json_string(run->tags[i]));
    put(o, "tags", tags);
    put(o, "has_epochs", json_boolean(run->has_epochs));
    put(o, "last_epoch", json_integer(run->last_epoch));
    put(o, "train_loss", maybe(run->has_epochs, run->train_loss));
    put(o, "val_loss", maybe(run->has_accuracy, run->val_loss));
    put(o, "accuracy", maybe(run->has_accuracy, run->accuracy));
    put(o, "best_accuracy", maybe(run->best_epoch > 0, run->best_accuracy));
    put(o, "best_epoch", json_integer(run->best_epoch));
    put(o, "samples_per_s", maybe(run->has_epochs, run->samples_per_s));
    put(o, "elapsed_s", ps_web_number(run->elapsed_s));
    put(o, "elapsed_with_gaps_s", ps_web_number(run->elapsed_with_gaps_s));
    double seconds = time_to_target(api, run, target);
    put(o, "time_to_target_s", maybe(!isnan(seconds), seconds));
    return o;
}

static int list_runs(struct ps_web_api *api, const struct ps_web_request *request, json_t **ret,
                     struct ps_error *err)
{
    double target;
    int64_t limit;
    int states[8];
    struct ps_run_query query = {.page_token = parameter(request, "page"),
                                 .name_contains = parameter(request, "q"),
                                 .tag = parameter(request, "tag"),
                                 .states = states};
    int rc = target_of(request, &target, err);
    if (rc == 0)
        rc = whole(request, "limit", 1, 1000, 100, &limit, err);
    if (rc < 0)
        return rc;
    query.page_size = (uint32_t)limit;
    const char *text = parameter(request, "state");
    for (const char *at = text; at && *at;) {
        char name[16];
        size_t length = strcspn(at, ",");
        snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1), at);
        int state = length < sizeof name ? ps_run_state_from_name(name) : 0;
        if (!state || query.state_count == sizeof states / sizeof *states)
            return ps_fail(
                err, PS_INVALID_ARGUMENT,
                "state: one or more of created, running, finished, failed, killed, lost is wanted");
        states[query.state_count++] = state;
        at += length + (at[length] == ',');
    }
    struct ps_run_list list = {0};
    rc = ps_store_list_runs(api->service->store, &query, &list, err);
    if (rc < 0)
        return rc;
    json_t *runs = json_array();
    for (size_t i = 0; i < list.count; i++)
        json_array_append_new(runs, run_json(api, &list.runs[i], target));
    json_t *o = json_object();
    put(o, "runs", runs);
    put(o, "next_page", *list.next_page_token ? json_string(list.next_page_token) : json_null());
    put(o, "target", ps_web_number(target));
    ps_run_list_done(&list);
    *ret = o;
    return 0;
}

static int get_run(struct ps_web_api *api, const char *id, const struct ps_web_request *request, json_t **ret,
                   struct ps_error *err)
{
    double target;
    int rc = target_of(request, &target, err);
    struct ps_run run = {0};
    struct ps_attempt_list attempts = {0};
    if (rc == 0)
        rc = ps_store_get_run(api->service->store, id, &run, err);
    if (rc < 0)
        return rc;
    rc = ps_store_list_attempts(api->service->store, run.id, &attempts, err);
    if (rc < 0) {
        ps_run_done(&run);
        return rc;
    }
    json_t *o = run_json(api, &run, target);
    put(o, "target", ps_web_number(target));
    json_t *config = json_array();
    for (size_t i = 0; i < run.config_count; i++) {
        json_t *pair = json_array();
        json_array_append_new(pair, json_string(run.config[i].key));
        json_array_append_new(pair, json_string(run.config[i].value));
        json_array_append_new(config, pair);
    }
    put(o, "config", config);
    json_t *array = json_array();
    for (size_t i = 0; i < attempts.count; i++) {
        const struct ps_attempt *a = &attempts.attempts[i];
        json_t *one = json_object();
        put(one, "attempt", json_integer(a->attempt));
        put(one, "world_size", json_integer(a->world_size));
        put_text(one, "device", a->device);
        put(one, "started_at", instant(a->started_ns));
        put(one, "ended_at", instant(a->ended_ns));
        put(one, "last_seen_at", instant(a->last_seen_ns));
        put(one, "elapsed_s", ps_web_number(a->elapsed_s));
        put(one, "offset_s", ps_web_number(a->offset_s));
        put(one, "gap_s", ps_web_number(a->gap_s));
        put_text(one, "reason", a->reason);
        json_array_append_new(array, one);
    }
    put(o, "attempts", array);
    ps_attempt_list_done(&attempts);
    ps_run_done(&run);
    *ret = o;
    return 0;
}

/* ---- Series ---- */

static json_t *epochs_json(const struct ps_epoch_list *list)
{
    static const char *const names[] = {"attempt",  "epoch",   "step",          "train_loss", "val_loss",
                                        "accuracy", "lr",      "samples_per_s", "elapsed_s",  "train_s",
                                        "eval_s",   "correct", "counted"};
    enum { COLUMNS = sizeof names / sizeof *names };
    json_t *column[COLUMNS], *o = json_object();
    for (size_t c = 0; c < COLUMNS; c++)
        column[c] = json_array();
    for (size_t i = 0; i < list->count; i++) {
        const struct ps_epoch *e = &list->epochs[i];
        json_t *const values[COLUMNS] = {
            json_integer(e->attempt),     json_integer(e->epoch),          number_u64(e->step),
            ps_web_number(e->train_loss), maybe(!e->no_eval, e->val_loss), maybe(!e->no_eval, e->accuracy),
            ps_web_number(e->lr),         ps_web_number(e->samples_per_s), ps_web_number(e->elapsed_s),
            ps_web_number(e->train_s),    ps_web_number(e->eval_s),        json_integer(e->correct),
            json_integer(e->counted),
        };
        for (size_t c = 0; c < COLUMNS; c++)
            json_array_append_new(column[c], values[c]);
    }
    for (size_t c = 0; c < COLUMNS; c++)
        put(o, names[c], column[c]);
    return o;
}

static json_t *series_json(const struct ps_series *series)
{
    json_t *attempts = json_array(), *steps = json_array(), *values = json_array(), *elapsed = json_array();
    for (size_t i = 0; i < series->count; i++) {
        json_array_append_new(attempts, json_integer(series->attempts[i]));
        json_array_append_new(steps, number_u64(series->steps[i]));
        json_array_append_new(values, ps_web_number(series->values[i]));
        json_array_append_new(elapsed, ps_web_number(series->elapsed_s[i]));
    }
    json_t *o = json_object();
    put_text(o, "name", series->name);
    put(o, "rank", json_integer(series->rank));
    put(o, "total_points", number_u64(series->total_points));
    put(o, "attempts", attempts);
    put(o, "steps", steps);
    put(o, "values", values);
    put(o, "elapsed_s", elapsed);
    return o;
}

static int get_series(struct ps_web_api *api, const char *id, const struct ps_web_request *request,
                      json_t **ret, struct ps_error *err)
{
    const char *name = parameter(request, "name");
    int64_t rank, from, to, points, all;
    int rc = whole(request, "rank", -1, UINT32_MAX, -1, &rank, err);
    if (rc == 0)
        rc = whole(request, "from", 0, INT64_MAX, 0, &from, err);
    if (rc == 0)
        rc = whole(request, "to", 0, INT64_MAX, 0, &to, err);
    if (rc == 0)
        rc = whole(request, "max_points", 1, 10000, 2000, &points, err);
    if (rc == 0)
        rc = whole(request, "all_attempts", 0, 1, 0, &all, err);
    if (rc < 0)
        return rc;
    struct ps_series_query query = {.name = name,
                                    .rank = rank,
                                    .from_step = (uint64_t)from,
                                    .to_step = (uint64_t)to,
                                    .max_points = (uint32_t)points,
                                    .all_attempts = all != 0};
    struct ps_series_list list = {0};
    struct ps_epoch_list epochs = {0};
    rc = ps_store_query_series(api->service->store, id, &query, !name, &list, err);
    if (rc == 0 && !name)
        rc = ps_store_query_epochs(api->service->store, id, all != 0, &epochs, err);
    if (rc < 0) {
        ps_series_list_done(&list);
        return rc;
    }
    json_t *o = json_object(), *names = json_array(), *series = json_array();
    for (size_t i = 0; i < list.name_count; i++)
        json_array_append_new(names, json_string(list.names[i]));
    for (size_t i = 0; i < list.count; i++)
        json_array_append_new(series, series_json(&list.series[i]));
    if (!name)
        put(o, "epochs", epochs_json(&epochs));
    put(o, "names", names);
    put(o, "series", series);
    ps_epoch_list_done(&epochs);
    ps_series_list_done(&list);
    *ret = o;
    return 0;
}

/* ---- Checkpoints, ranks, events ---- */

static int get_confusion(struct ps_web_api *api, const char *id, const struct ps_web_request *request,
                         json_t **ret, struct ps_error *err)
{
    const char *which = parameter(request, "epoch");
    int64_t epoch = 0;
    const bool latest = which && !strcmp(which, "latest");
    int rc = !which || latest || !strcmp(which, "best")
                 ? 0
                 : whole(request, "epoch", 1, UINT32_MAX, 0, &epoch, err);
    struct ps_confusion *found = rc < 0 ? NULL : malloc(sizeof *found);
    if (rc == 0)
        rc = found ? ps_store_get_confusion(api->service->store, id, (uint32_t)epoch, latest, found, err)
                   : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (rc == 0) {
        json_t *o = json_object(), *rows = json_array();
        for (uint32_t i = 0; i < found->classes; i++) {
            json_t *row = json_array();
            for (uint32_t k = 0; k < found->classes; k++)
                json_array_append_new(row, json_integer(found->counts[i * found->classes + k]));
            json_array_append_new(rows, row);
        }
        put(o, "epoch", json_integer(found->epoch));
        put(o, "attempt", json_integer(found->attempt));
        put(o, "classes", json_integer(found->classes));
        put(o, "counts", rows);
        *ret = o;
    }
    free(found);
    return rc;
}

static int get_checkpoints(struct ps_web_api *api, const char *id, json_t **ret, struct ps_error *err)
{
    struct ps_checkpoint_list list = {0};
    struct ps_checkpoint best = {0};
    int rc = ps_store_list_checkpoints(api->service->store, id, &list, err);
    if (rc < 0)
        return rc;
    struct ps_checkpoint_selector selector = {.which = PS_CHECKPOINT_BEST};
    bool has_best =
        list.count && ps_store_get_checkpoint(api->service->store, id, &selector, &best, NULL) == 0;
    json_t *o = json_object(), *array = json_array();
    for (size_t i = 0; i < list.count; i++) {
        const struct ps_checkpoint *c = &list.checkpoints[i];
        json_t *one = json_object();
        put(one, "attempt", json_integer(c->attempt));
        put(one, "epoch", json_integer(c->epoch));
        put(one, "step", number_u64(c->step));
        put_text(one, "filename", c->filename);
        put_text(one, "format", c->format);
        put(one, "size", number_u64(c->size));
        put_text(one, "sha256", c->sha256);
        put(one, "accuracy", maybe(c->has_accuracy, c->accuracy));
        put(one, "created_at", instant(c->created_ns));
        put(one, "best",
            json_boolean(has_best && c->epoch == best.epoch && c->attempt == best.attempt &&
                         !strcmp(c->sha256, best.sha256)));
        json_array_append_new(array, one);
    }
    put(o, "checkpoints", array);
    ps_checkpoint_done(&best);
    ps_checkpoint_list_done(&list);
    *ret = o;
    return 0;
}

static int get_ranks(struct ps_web_api *api, const char *id, const struct ps_web_request *request,
                     json_t **ret, struct ps_error *err)
{
    int64_t attempt, bins, from, to;
    struct ps_rank_list list = {0};
    int rc = whole(request, "attempt", 0, UINT32_MAX, 0, &attempt, err);
    if (rc == 0)
        rc = whole(request, "bins", 0, 1000, 0, &bins, err);
    if (rc == 0)
        rc = whole(request, "from", 0, INT64_MAX, 0, &from, err);
    if (rc == 0)
        rc = whole(request, "to", 0, INT64_MAX, 0, &to, err);
    if (rc == 0)
        rc = ps_store_list_ranks(api->service->store, id, (uint32_t)attempt, &list, err);
    if (rc < 0)
        return rc;
    json_t *o = json_object(), *array = json_array();
    for (size_t i = 0; i < list.count; i++) {
        const struct ps_rank *r = &list.ranks[i];
        json_t *one = json_object();
        put(one, "attempt", json_integer(r->attempt));
        put(one, "rank", json_integer(r->rank));
        put(one, "step", number_u64(r->step));
        put(one, "elapsed_s", ps_web_number(r->elapsed_s));
        put(one, "points_sent", number_u64(r->points_sent));
        put(one, "points_dropped", number_u64(r->points_dropped));
        put(one, "spool_bytes", number_u64(r->spool_bytes));
        put(one, "last_seq", number_u64(r->last_seq));
        put(one, "last_seen_at", instant(r->last_seen_ns));
        json_array_append_new(array, one);
    }
    put(o, "ranks", array);
    ps_rank_list_done(&list);
    if (bins) {
        rc = ps_web_ranks(api->service->store, id, (uint64_t)from, (uint64_t)to, (size_t)bins, o, err);
        if (rc < 0) {
            json_decref(o);
            return rc;
        }
    }
    *ret = o;
    return 0;
}

static json_t *event_json(const struct ps_event *event)
{
    json_t *o = json_object();
    put(o, "id", number_u64(event->id));
    put_text(o, "run_id", event->run_id);
    put_text(o, "kind", event->kind);
    put_text(o, "detail", event->detail);
    put(o, "at", instant(event->at_ns));
    put(o, "attempt", json_integer(event->attempt));
    return o;
}

static int get_events(struct ps_web_api *api, const char *id, const struct ps_web_request *request,
                      json_t **ret, struct ps_error *err)
{
    int64_t since, limit;
    struct ps_event_list list = {0};
    int rc = whole(request, "since", 0, INT64_MAX, 0, &since, err);
    if (rc == 0)
        rc = whole(request, "limit", 1, 10000, 1000, &limit, err);
    if (rc == 0)
        rc = since
                 ? ps_store_list_events(api->service->store, id, (uint64_t)since, (uint32_t)limit, &list, err)
                 : ps_store_newest_events(api->service->store, id, (uint32_t)limit, &list, err);
    if (rc < 0)
        return rc;
    json_t *o = json_object(), *array = json_array();
    for (size_t i = 0; i < list.count; i++)
        json_array_append_new(array, event_json(&list.events[i]));
    put(o, "events", array);
    ps_event_list_done(&list);
    *ret = o;
    return 0;
}

int ps_web_api_event(struct ps_web_api *api, const struct ps_event *event, bool with_run, struct ps_buf *out,
                     struct ps_error *err)
{
    json_t *o = event_json(event);
    struct ps_run run = {0};
    if (with_run && ps_store_get_run(api->service->store, event->run_id, &run, NULL) == 0)
        put(o, "run", run_json(api, &run, PS_WEB_TARGET));
    ps_run_done(&run);
    char *text = json_dumps(o, JSON_COMPACT);
    json_decref(o);
    if (!text)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    ps_buf_printf(out, "id: %llu\nevent: run\ndata: ", (unsigned long long)event->id);
    ps_buf_puts(out, text);
    int rc = ps_buf_puts(out, "\n\n");
    free(text);
    return rc < 0 ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "an event is too large to be sent") : 0;
}

/* ---- Compare ---- */

struct candidate {
    struct ps_run run;
    struct ps_epoch_list list;
    struct ps_compare_epoch *epochs;
    struct ps_compare_pair *config;
};

static void candidate_done(struct candidate *c)
{
    free(c->config);
    free(c->epochs);
    ps_epoch_list_done(&c->list);
    ps_run_done(&c->run);
}

static int load(struct ps_web_api *api, const char *name, struct candidate *c, struct ps_compare_run *ret,
                struct ps_error *err)
{
    const struct ps_compare_run *builtin = ps_compare_builtin(name);
    if (builtin) {
        *ret = *builtin;
        return 0;
    }
    int rc = ps_store_get_run(api->service->store, name, &c->run, err);
    if (rc == 0)
        rc = run_epochs(api, c->run.id, &c->list, &c->epochs, err);
    if (rc < 0)
        return rc;
    const struct ps_run *r = &c->run;
    c->config = calloc(r->config_count ? r->config_count : 1, sizeof *c->config);
    if (!c->config)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < r->config_count; i++)
        c->config[i] = (struct ps_compare_pair){r->config[i].key, r->config[i].value};
    *ret = (struct ps_compare_run){
        .id = r->id,
        .name = r->name,
        .state = r->state,
        .world_size = r->world_size,
        .batch_per_rank = r->batch_per_rank,
        .epochs_planned = r->epochs_planned,
        .model = r->model,
        .dataset = r->dataset,
        .dataset_hash = r->dataset_hash,
        .device = r->device,
        .commit = r->commit,
        .config = c->config,
        .config_count = r->config_count,
        .epochs = c->epochs,
        .epoch_count = ps_compare_sort_epochs(c->epochs, c->list.count),
        .total_s = ps_run_is_live(r->state) ? 0 : r->elapsed_s,
        .reason = r->reason,
    };
    return 0;
}

static json_t *row_json(const struct ps_compare_run *run, const struct ps_compare_row *row)
{
    json_t *o = json_object();
    put_text(o, "run_id", run->id);
    put_text(o, "name", run->name);
    put_text(o, "state", run->threshold_only ? "published" : ps_compare_state_name(run->state));
    put_text(o, "dataset", run->dataset);
    put(o, "world_size", json_integer(run->world_size));
    put(o, "epochs", json_integer(run->threshold_only ? run->published_epochs : row->epochs));
    put(o, "best_accuracy", maybe(row->has_accuracy, row->best_accuracy));
    put(o, "final_accuracy", maybe(row->has_accuracy && !row->threshold_only, row->final_accuracy));
    put(o, "best_epoch", json_integer(row->best_epoch));
    put(o, "total_s", maybe(row->has_total, row->total_s));
    put(o, "time_to_target_s", maybe(row->has_time_to_target, row->time_to_target_s));
    put(o, "epochs_to_target", row->has_time_to_target ? json_integer(row->epochs_to_target) : json_null());
    put(o, "before_s", maybe(row->has_before, row->before_s));
    put(o, "before_accuracy", maybe(row->has_before, row->before_accuracy));
    put(o, "samples_per_s", maybe(row->has_throughput, row->samples_per_s));
    put(o, "speedup", maybe(row->has_speedup, row->speedup));
    put(o, "efficiency", maybe(row->has_speedup, row->efficiency));
    put(o, "time_speedup", maybe(row->has_time_speedup, row->time_speedup));
    put_text(o, "refusal", row->refusal);
    put_text(o, "time_refusal", row->time_refusal);
    put_text(o, "differs", row->differs);
    put(o, "non_finite", row->non_finite ? json_string(row->non_finite_what) : json_null());
    put(o, "threshold_only", json_boolean(row->threshold_only));
    return o;
}

static int compare(struct ps_web_api *api, const struct ps_web_request *request, json_t **ret,
                   struct ps_error *err)
{
    double target;
    int rc = target_of(request, &target, err);
    if (rc < 0)
        return rc;
    const char *text = parameter(request, "runs");
    if (!text)
        return ps_fail(err, PS_INVALID_ARGUMENT, "runs: two or more run ids are wanted, separated by commas");
    char *names = strdup(text);
    struct candidate *candidates = calloc(COMPARE_MAX, sizeof *candidates);
    struct ps_compare_run *runs = calloc(COMPARE_MAX, sizeof *runs);
    struct ps_compare_row *rows = calloc(COMPARE_MAX, sizeof *rows);
    size_t count = 0;
    if (!names || !candidates || !runs || !rows) {
        rc = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        goto done;
    }
    char *state = NULL;
    for (char *name = strtok_r(names, ",", &state); name; name = strtok_r(NULL, ",", &state)) {
        if (count == COMPARE_MAX) {
            rc = ps_fail(err, PS_INVALID_ARGUMENT, "runs: at most %d are compared at a time", COMPARE_MAX);
            goto done;
        }
        count++; /* counted first: candidate_done takes one that was loaded in part */
        rc = load(api, name, &candidates[count - 1], &runs[count - 1], err);
        if (rc < 0)
            goto done;
    }
    if (!count) {
        rc = ps_fail(err, PS_INVALID_ARGUMENT, "runs: two or more run ids are wanted, separated by commas");
        goto done;
    }
    /* The reference is the one asked for, else the first that was recorded: a published result measures
     * nothing. */
    const char *baseline = parameter(request, "baseline");
    size_t reference = count;
    for (size_t i = 0; i < count && reference == count; i++)
        if (baseline ? (!strcmp(baseline, runs[i].name) || (runs[i].id && !strcmp(baseline, runs[i].id)))
                     : !runs[i].threshold_only)
            reference = i;
    if (reference == count && baseline) {
        rc = ps_fail(err, PS_INVALID_ARGUMENT, "baseline: '%s' is not one of the runs", baseline);
        goto done;
    }
    if (reference == count)
        reference = 0;
    rc = ps_compare(runs, count, reference, target, rows, err);
    if (rc < 0)
        goto done;
    json_t *o = json_object(), *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, row_json(&runs[i], &rows[i]));
    put(o, "target", ps_web_number(target));
    put_text(o, "reference", runs[reference].threshold_only ? runs[reference].name : runs[reference].id);
    put(o, "rows", array);
    *ret = o;
    rc = 0;
done:
    for (size_t i = 0; candidates && i < count; i++)
        candidate_done(&candidates[i]);
    free(rows);
    free(runs);
    free(candidates);
    free(names);
    return rc;
}

static int info(const struct ps_web_api *api, json_t **ret)
{
    json_t *o = json_object();
    put_text(o, "version", PARAMSYNC_VERSION);
    put(o, "target", ps_web_number(PS_WEB_TARGET));
    put(o, "grpc_port", api->grpc_port ? json_integer(api->grpc_port) : json_null());
    *ret = o;
    return 0;
}

int ps_web_api_get(struct ps_web_api *api, const struct ps_web_request *request, json_t **ret_json,
                   struct ps_error *err)
{
    const char *path = request->path;
    if (!strcmp(path, "runs"))
        return list_runs(api, request, ret_json, err);
    if (!strcmp(path, "compare"))
        return compare(api, request, ret_json, err);
    if (!strcmp(path, "info"))
        return info(api, ret_json);
    if (!strncmp(path, "runs/", 5)) {
        const char *begin = path + 5, *end = strchr(begin, '/');
        const char *what = end ? end + 1 : "";
        char id[256];
        size_t length = end ? (size_t)(end - begin) : strlen(begin);
        if (length == 0 || length >= sizeof id || !ps_utf8_valid(begin, length))
            return ps_fail(err, PS_NOT_FOUND, "there is no such run");
        memcpy(id, begin, length);
        id[length] = '\0';
        if (!end)
            return get_run(api, id, request, ret_json, err);
        if (!strcmp(what, "series"))
            return get_series(api, id, request, ret_json, err);
        if (!strcmp(what, "checkpoints"))
            return get_checkpoints(api, id, ret_json, err);
        if (!strcmp(what, "confusion"))
            return get_confusion(api, id, request, ret_json, err);
        if (!strcmp(what, "ranks"))
            return get_ranks(api, id, request, ret_json, err);
        if (!strcmp(what, "events"))
            return get_events(api, id, request, ret_json, err);
    }
    return ps_fail(err, PS_NOT_FOUND, "there is no such page");
}
