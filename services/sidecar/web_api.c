/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_api.h"

#include "paramsync_version.h"
#include "services/base/clock.h"
#include "services/base/text.h"
#include "services/compare/compare.h"
#include "services/sidecar/web_ranks.h"
#include "services/sidecar/web_status.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    COMPARE_MAX = 32,
    CACHE_SLOTS = 16384, /* runs of a long list */
    VERDICT_SLOTS = 4096,
    ANSWER_SLOTS = 16,
    ANSWER_KEY = 512,
    ANSWER_POINTS = 40000,  /* kept of one answer */
    SMOOTH_POINTS = 200000, /* read for one answer */
    SMOOTH_CHUNK = 10000,
    SMOOTH_REACH = 4000, /* 0.99 to this power is nothing to a double */
};

/* Time to target of a run as it stood at updated_ns: it is read for every row of a list, and finished runs,
 * which most are, never change. */
struct cached {
    char id[PS_RUN_ID_SIZE];
    int64_t updated_ns;
    double target, seconds; /* seconds NaN: not reached */
};

/* What a run is worth against the baseline, as both stood then. */
struct judged {
    char id[PS_RUN_ID_SIZE], baseline[PS_RUN_ID_SIZE];
    int64_t updated_ns, baseline_updated_ns;
    double target;
    int verdict; /* enum ps_gate_verdict */
    bool has_speedup, refused;
    double speedup, efficiency;
    char reason[256];
};

/* A step series that took long to read (millions of points), for the next dashboard that asks the same: as
 * long as nothing was reported since, or for a second. */
struct answer {
    char key[ANSWER_KEY];
    char id[PS_RUN_ID_SIZE];
    int64_t updated_ns, made_ns, used_ns;
    json_t *json;
};
static const double slow_s = 0.005, fresh_s = 1;

struct ps_web_api {
    struct answer answers[ANSWER_SLOTS]; /* under lock */
    struct ps_service *service;
    int grpc_port;
    pthread_mutex_t lock; /* guards the caches */
    struct cached cache[CACHE_SLOTS];
    struct judged judged[VERDICT_SLOTS];
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
        for (size_t i = 0; i < ANSWER_SLOTS; i++)
            json_decref(api->answers[i].json);
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

static int states_of(const struct ps_web_request *request, int states[8], size_t *ret_count,
                     struct ps_error *err)
{
    const char *text = parameter(request, "state");
    size_t count = 0;
    for (const char *at = text; at && *at;) {
        char name[16];
        size_t length = strcspn(at, ",");
        snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1), at);
        int state = length < sizeof name ? ps_run_state_from_name(name) : 0;
        if (!state || count == 8)
            return ps_fail(
                err, PS_INVALID_ARGUMENT,
                "state: one or more of created, running, finished, failed, killed, lost is wanted");
        states[count++] = state;
        at += length + (at[length] == ',');
    }
    *ret_count = count;
    return 0;
}

static const struct {
    const char *name;
    enum ps_run_order order;
} orders[] = {
    {"created", PS_ORDER_CREATED},    {"name", PS_ORDER_NAME},         {"state", PS_ORDER_STATE},
    {"model", PS_ORDER_MODEL},        {"device", PS_ORDER_DEVICE},     {"world", PS_ORDER_WORLD},
    {"epoch", PS_ORDER_EPOCH},        {"accuracy", PS_ORDER_ACCURACY}, {"best", PS_ORDER_BEST},
    {"loss", PS_ORDER_LOSS},          {"rate", PS_ORDER_RATE},         {"elapsed", PS_ORDER_ELAPSED},
    {"ttt", PS_ORDER_TIME_TO_TARGET}, {"tags", PS_ORDER_TAGS},
};

static int order_of(const struct ps_web_request *request, struct ps_run_window *window, struct ps_error *err)
{
    const char *text = parameter(request, "sort");
    if (!text)
        text = "-created";
    window->descending = *text == '-';
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        if (!strcmp(text + window->descending, orders[i].name)) {
            window->order = orders[i].order;
            return 0;
        }
    }
    return ps_fail(
        err, PS_INVALID_ARGUMENT,
        "sort: one of created, name, state, model, device, world, epoch, accuracy, best, loss, rate, "
        "elapsed, ttt, tags is wanted, with - before it for the highest first");
}

static json_t *verdict_json(struct ps_web_api *api, const struct ps_run *run, const char *baseline,
                            int64_t baseline_updated_ns, double target);

/* Whole lists in pages (page, the name contains q), or a window of an ordered one (sort, offset; q is looked
 * for in more than the name). */
static int list_runs(struct ps_web_api *api, const struct ps_web_request *request, json_t **ret,
                     struct ps_error *err)
{
    double target;
    int64_t limit, offset, verdict;
    int states[8];
    size_t state_count = 0;
    const bool windowed = parameter(request, "sort") || parameter(request, "offset");
    struct ps_run_window window = {.text = parameter(request, "q"), .tag = parameter(request, "tag")};
    int rc = target_of(request, &target, err);
    if (rc == 0)
        rc = whole(request, "limit", 1, 1000, 100, &limit, err);
    if (rc == 0)
        rc = whole(request, "offset", 0, UINT32_MAX, 0, &offset, err);
    if (rc == 0)
        rc = whole(request, "verdict", 0, 1, 0, &verdict, err);
    if (rc == 0)
        rc = states_of(request, states, &state_count, err);
    if (rc == 0)
        rc = order_of(request, &window, err);
    if (rc == 0 && windowed && parameter(request, "page"))
        rc = ps_fail(err, PS_INVALID_ARGUMENT, "page: does not go with sort or offset");
    if (rc < 0)
        return rc;
    struct ps_run_list list = {0};
    uint64_t total = 0;
    char baseline[PS_RUN_ID_SIZE] = "";
    if (windowed) {
        window.states = states;
        window.state_count = state_count;
        window.target = target;
        window.offset = (uint32_t)offset;
        window.limit = (uint32_t)limit;
        rc = ps_store_window_runs(api->service->store, &window, &list, &total, err);
    } else {
        struct ps_run_query query = {.page_size = (uint32_t)limit,
                                     .page_token = parameter(request, "page"),
                                     .name_contains = window.text,
                                     .tag = window.tag,
                                     .states = states,
                                     .state_count = state_count};
        rc = ps_store_list_runs(api->service->store, &query, &list, err);
    }
    if (rc == 0)
        rc = ps_store_get_baseline(api->service->store, baseline, err);
    struct ps_run pinned = {0};
    if (rc == 0 && verdict && *baseline && ps_store_get_run(api->service->store, baseline, &pinned, NULL) < 0)
        *baseline = '\0'; /* deleted just now */
    if (rc < 0) {
        ps_run_list_done(&list);
        return rc;
    }
    json_t *runs = json_array();
    for (size_t i = 0; i < list.count; i++) {
        json_t *one = run_json(api, &list.runs[i], target);
        if (verdict && *baseline)
            put(one, "verdict", verdict_json(api, &list.runs[i], baseline, pinned.updated_ns, target));
        json_array_append_new(runs, one);
    }
    json_t *o = json_object();
    put(o, "runs", runs);
    put(o, "next_page", *list.next_page_token ? json_string(list.next_page_token) : json_null());
    put(o, "target", ps_web_number(target));
    put(o, "baseline", *baseline ? json_string(baseline) : json_null());
    if (windowed)
        put(o, "total", number_u64(total));
    ps_run_done(&pinned);
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
    char baseline[PS_RUN_ID_SIZE];
    json_t *o = run_json(api, &run, target);
    put(o, "target", ps_web_number(target));
    put(o, "is_baseline",
        json_boolean(ps_store_get_baseline(api->service->store, baseline, NULL) == 0 &&
                     !strcmp(baseline, run.id)));
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

/* ---- Smoothing: over all points, not over those that are shown ---- */

struct smoothed {
    double weight;
    double average, mass; /* mass: what the weights so far add up to, the correction of the bias */
    size_t next;          /* of the series' shown points */
    double *values;       /* one for each shown point */
};

/* The same arithmetic as ps_compare_smooth, point by point. */
static double smooth_one(struct smoothed *s, double value)
{
    if (!isfinite(value))
        return value;
    s->average = s->weight * s->average + (1 - s->weight) * value;
    s->mass = s->weight * s->mass + (1 - s->weight);
    return s->average / s->mass;
}

/* Values for the shown points of one series, or NULL where there are more points than one answer reads. */
static int smooth_series(struct ps_web_api *api, const char *id, const struct ps_series_query *asked,
                         const struct ps_series *shown, double weight, double **ret_values,
                         struct ps_error *err)
{
    *ret_values = NULL;
    if (!shown->count || shown->total_points > SMOOTH_POINTS)
        return 0;
    struct smoothed s = {.weight = weight, .values = calloc(shown->count, sizeof(double))};
    if (!s.values)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    uint64_t last = shown->steps[shown->count - 1], width = SMOOTH_CHUNK;
    uint64_t from = shown->steps[0] > SMOOTH_REACH ? shown->steps[0] - SMOOTH_REACH : 0;
    for (int rc; s.next < shown->count && from <= last;) {
        uint64_t to = last - from < width ? last : from + width - 1;
        struct ps_series_query query = *asked;
        query.name = shown->name;
        query.rank = shown->rank;
        query.from_step = from;
        query.to_step = to ? to : 1; /* 0 would mean no bound */
        query.max_points = SMOOTH_CHUNK;
        struct ps_series_list list = {0};
        rc = ps_store_query_series(api->service->store, id, &query, false, &list, err);
        if (rc < 0) {
            free(s.values);
            return rc;
        }
        const struct ps_series *part = list.count ? &list.series[0] : NULL;
        if (part && part->total_points > part->count && width > 1) { /* several points to a step */
            width /= 2;
            ps_series_list_done(&list);
            continue;
        }
        for (size_t i = 0; part && i < part->count; i++) {
            double value = smooth_one(&s, part->values[i]);
            /* Shown points are some of these, in the same order. */
            if (s.next < shown->count && part->steps[i] == shown->steps[s.next] &&
                part->attempts[i] == shown->attempts[s.next] &&
                (part->values[i] == shown->values[s.next] ||
                 (isnan(part->values[i]) && isnan(shown->values[s.next]))))
                s.values[s.next++] = value;
        }
        if ((!part || part->count < SMOOTH_CHUNK / 8) && width < UINT64_MAX / 4)
            width *= 2;
        ps_series_list_done(&list);
        from = query.to_step + 1;
    }
    if (s.next < shown->count) { /* points came in between the two reads: the next answer has them */
        free(s.values);
        return 0;
    }
    *ret_values = s.values;
    return 0;
}

static json_t *series_json(const struct ps_series *series, bool smooth, const double *smoothed)
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
    if (smooth) {
        json_t *array = smoothed ? json_array() : json_null();
        for (size_t i = 0; smoothed && i < series->count; i++)
            json_array_append_new(array, ps_web_number(smoothed[i]));
        put(o, "smoothed", array);
    }
    return o;
}

/* A copy of what is kept for the key, or NULL. */
static json_t *kept_answer(struct ps_web_api *api, const char *key, const struct ps_run *run)
{
    json_t *copy = NULL;
    int64_t now = ps_monotonic_ns();
    pthread_mutex_lock(&api->lock);
    for (size_t i = 0; i < ANSWER_SLOTS && !copy; i++) {
        struct answer *a = &api->answers[i];
        if (!a->json || strcmp(a->key, key) != 0 || strcmp(a->id, run->id) != 0 ||
            (a->updated_ns != run->updated_ns && (double)(now - a->made_ns) > fresh_s * PS_NS_PER_S))
            continue;
        a->used_ns = now;
        copy = json_deep_copy(a->json);
    }
    pthread_mutex_unlock(&api->lock);
    return copy;
}

static void keep_answer(struct ps_web_api *api, const char *key, const struct ps_run *run, const json_t *json)
{
    json_t *copy = json_deep_copy(json), *old;
    if (!copy)
        return;
    pthread_mutex_lock(&api->lock);
    struct answer *slot = &api->answers[0];
    for (size_t i = 0; i < ANSWER_SLOTS; i++) {
        struct answer *a = &api->answers[i];
        if (a->json && !strcmp(a->key, key)) {
            slot = a;
            break;
        }
        if (a->used_ns < slot->used_ns)
            slot = a;
    }
    old = slot->json;
    snprintf(slot->key, sizeof slot->key, "%s", key);
    memcpy(slot->id, run->id, sizeof slot->id);
    slot->updated_ns = run->updated_ns;
    slot->made_ns = slot->used_ns = ps_monotonic_ns();
    slot->json = copy;
    pthread_mutex_unlock(&api->lock);
    json_decref(old);
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
    double weight = 0;
    const char *smooth = parameter(request, "smooth");
    if (rc == 0 && smooth && (ps_parse_double(smooth, &weight) || !(weight >= 0 && weight <= 0.99)))
        rc = ps_fail(err, PS_INVALID_ARGUMENT, "smooth: a weight from 0 to 0.99 is wanted");
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
    struct ps_run run = {0};
    char key[ANSWER_KEY] = "";
    int64_t began = ps_monotonic_ns();
    if (name) {
        rc = ps_store_get_run(api->service->store, id, &run, err);
        if (rc < 0)
            return rc;
        int size = snprintf(key, sizeof key, "%s %lld %lld %lld %lld %lld %.17g", name, (long long)rank,
                            (long long)from, (long long)to, (long long)points, (long long)all, weight);
        if (size >= (int)sizeof key)
            key[0] = '\0'; /* no series has such a name */
        json_t *kept = *key ? kept_answer(api, key, &run) : NULL;
        if (kept) {
            ps_run_done(&run);
            *ret = kept;
            return 0;
        }
    }
    rc = ps_store_query_series(api->service->store, id, &query, !name, &list, err);
    if (rc == 0 && !name)
        rc = ps_store_query_epochs(api->service->store, id, all != 0, &epochs, err);
    if (rc < 0) {
        ps_series_list_done(&list);
        ps_run_done(&run);
        return rc;
    }
    size_t shown = 0;
    for (size_t i = 0; i < list.count; i++)
        shown += list.series[i].count;
    json_t *o = json_object(), *names = json_array(), *series = json_array();
    for (size_t i = 0; i < list.name_count; i++)
        json_array_append_new(names, json_string(list.names[i]));
    for (size_t i = 0; rc == 0 && i < list.count; i++) {
        double *smoothed = NULL;
        if (weight > 0)
            rc = smooth_series(api, id, &query, &list.series[i], weight, &smoothed, err);
        if (rc == 0)
            json_array_append_new(series, series_json(&list.series[i], weight > 0, smoothed));
        free(smoothed);
    }
    if (rc < 0) {
        json_decref(o);
        json_decref(names);
        json_decref(series);
        ps_epoch_list_done(&epochs);
        ps_series_list_done(&list);
        ps_run_done(&run);
        return rc;
    }
    if (!name)
        put(o, "epochs", epochs_json(&epochs));
    put(o, "names", names);
    put(o, "series", series);
    if (name && *key && shown <= ANSWER_POINTS && (double)(ps_monotonic_ns() - began) > slow_s * PS_NS_PER_S)
        keep_answer(api, key, &run, o);
    ps_run_done(&run);
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
        put(one, "points_waiting", number_u64(r->points_waiting));
        put(one, "points_replayed", number_u64(r->points_replayed));
        put(one, "rss_bytes", number_u64(r->rss_bytes));
        put(one, "clock_offset_s", maybe(r->has_clock_offset, r->clock_offset_s));
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

static int get_log(struct ps_web_api *api, const char *id, const struct ps_web_request *request, json_t **ret,
                   struct ps_error *err)
{
    int64_t attempt, rank, lines;
    struct ps_log_list list = {0};
    int rc = whole(request, "attempt", 0, UINT32_MAX, 0, &attempt, err);
    if (rc == 0)
        rc = whole(request, "rank", -1, UINT32_MAX, -1, &rank, err);
    if (rc == 0)
        rc = whole(request, "lines", 1, PS_LOG_KEPT, PS_LOG_KEPT, &lines, err);
    if (rc == 0)
        rc = ps_store_list_log(api->service->store, id, (uint32_t)attempt, rank, (uint32_t)lines, &list, err);
    if (rc < 0)
        return rc;
    json_t *o = json_object(), *array = json_array();
    for (size_t i = 0; i < list.count; i++) {
        json_t *one = json_object();
        put(one, "attempt", json_integer(list.lines[i].attempt));
        put(one, "rank", json_integer(list.lines[i].rank));
        put(one, "seq", number_u64(list.lines[i].seq));
        put_text(one, "text", list.lines[i].text);
        json_array_append_new(array, one);
    }
    put(o, "lines", array);
    ps_log_list_done(&list);
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

/* Against the pinned baseline, by the gate's own rules. */
static void judge(struct ps_web_api *api, const struct ps_run *run, const char *baseline, double target,
                  struct judged *ret)
{
    struct candidate candidates[2] = {0};
    struct ps_compare_run runs[2] = {0};
    struct ps_compare_row rows[2] = {0};
    struct ps_gate_result *result = NULL;
    struct ps_error err = {0};
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    limits.min_accuracy = target;
    int rc = load(api, baseline, &candidates[0], &runs[0], &err);
    if (rc == 0)
        rc = load(api, run->id, &candidates[1], &runs[1], &err);
    if (rc == 0)
        rc = ps_compare(runs, 2, 0, target, rows, &err);
    if (rc == 0)
        rc = ps_gate_evaluate(&limits, &runs[1], 1, &runs[0], &result, &err);
    ret->verdict = rc == 0 ? result->verdict : PS_GATE_UNDECIDED;
    ret->has_speedup = rc == 0 && rows[1].has_speedup;
    char why[256];
    ret->refused = rc == 0 && !ps_compare_allowed(&runs[1], &runs[0], why, sizeof why);
    ret->speedup = rows[1].speedup;
    ret->efficiency = rows[1].efficiency;
    snprintf(ret->reason, sizeof ret->reason, "%.255s",
             rc < 0             ? err.message
             : *rows[1].refusal ? rows[1].refusal
                                : result->reason);
    ps_gate_result_free(result);
    candidate_done(&candidates[0]);
    candidate_done(&candidates[1]);
}

static json_t *verdict_json(struct ps_web_api *api, const struct ps_run *run, const char *baseline,
                            int64_t baseline_updated_ns, double target)
{
    if (!strcmp(run->id, baseline))
        return json_pack("{s:s,s:s,s:n,s:n}", "verdict", "baseline", "reason", "", "speedup", "efficiency");
    struct judged j;
    struct judged *slot = &api->judged[ps_hash64(run->id, strlen(run->id), 0) % VERDICT_SLOTS];
    pthread_mutex_lock(&api->lock);
    j = *slot;
    pthread_mutex_unlock(&api->lock);
    if (strcmp(j.id, run->id) != 0 || strcmp(j.baseline, baseline) != 0 || j.updated_ns != run->updated_ns ||
        j.baseline_updated_ns != baseline_updated_ns || j.target != target) {
        j = (struct judged){
            .updated_ns = run->updated_ns, .baseline_updated_ns = baseline_updated_ns, .target = target};
        memcpy(j.id, run->id, sizeof j.id);
        snprintf(j.baseline, sizeof j.baseline, "%s", baseline);
        judge(api, run, baseline, target, &j);
        pthread_mutex_lock(&api->lock);
        *slot = j;
        pthread_mutex_unlock(&api->lock);
    }
    const char *verdict = j.refused                   ? "refused"
                          : j.verdict == PS_GATE_PASS ? "pass"
                          : j.verdict == PS_GATE_FAIL ? "fail"
                                                      : "undecided";
    json_t *o = json_object();
    put_text(o, "verdict", verdict);
    put_text(o, "reason", j.reason);
    put(o, "speedup", maybe(j.has_speedup, j.speedup));
    put(o, "efficiency", maybe(j.has_speedup, j.efficiency));
    return o;
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
    if (!strcmp(path, "status"))
        return ps_web_status(api->service, request->streams, ret_json, err);
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
        if (!strcmp(what, "log"))
            return get_log(api, id, request, ret_json, err);
    }
    return ps_fail(err, PS_NOT_FOUND, "there is no such page");
}

/* ---- Changes ---- */

static int text_list(const json_t *array, const char ***ret_texts, size_t *ret_count, struct ps_error *err)
{
    if (!json_is_array(array))
        return ps_fail(err, PS_INVALID_ARGUMENT, "tags: a list of texts is wanted");
    size_t count = json_array_size(array);
    const char **texts = calloc(count + 1, sizeof *texts);
    if (!texts)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < count; i++) {
        texts[i] = json_string_value(json_array_get(array, i));
        if (!texts[i]) {
            free(texts);
            return ps_fail(err, PS_INVALID_ARGUMENT, "tags[%zu]: a text is wanted", i);
        }
    }
    *ret_texts = texts;
    *ret_count = count;
    return 0;
}

static int change_run(struct ps_web_api *api, const char *id, const json_t *body, json_t **ret,
                      struct ps_error *err)
{
    const json_t *notes = NULL, *tags = NULL, *baseline = NULL, *value;
    const char *key;
    json_object_foreach((json_t *)body, key, value)
    {
        if (!strcmp(key, "notes"))
            notes = value;
        else if (!strcmp(key, "tags"))
            tags = value;
        else if (!strcmp(key, "baseline"))
            baseline = value;
        else
            return ps_fail(err, PS_INVALID_ARGUMENT, "%.40s: can't be changed; notes, tags and baseline can",
                           key);
    }
    if (notes && !json_is_string(notes))
        return ps_fail(err, PS_INVALID_ARGUMENT, "notes: a text is wanted");
    if (baseline && !json_is_boolean(baseline))
        return ps_fail(err, PS_INVALID_ARGUMENT, "baseline: true or false is wanted");
    const char **list = NULL;
    size_t count = 0;
    int rc = tags ? text_list(tags, &list, &count, err) : 0;
    struct ps_run run = {0};
    if (rc == 0)
        rc = ps_service_update_run(api->service, id, notes ? json_string_value(notes) : NULL, tags != NULL,
                                   list, count, &run, err);
    free(list);
    if (rc == 0 && baseline)
        rc = ps_store_pin_baseline(api->service->store, run.id, json_is_true(baseline), err);
    if (rc == 0)
        *ret = run_json(api, &run, PS_WEB_TARGET);
    ps_run_done(&run);
    return rc;
}

int ps_web_api_change(struct ps_web_api *api, const char *method, const char *path, const char *body,
                      size_t size, json_t **ret_json, struct ps_error *err)
{
    const char *id = path + 5;
    if (strncmp(path, "runs/", 5) != 0 || !*id || strchr(id, '/'))
        return ps_fail(err, PS_UNIMPLEMENTED, "this cannot be changed");
    if (!ps_utf8_valid(id, strlen(id)))
        return ps_fail(err, PS_NOT_FOUND, "there is no such run");
    if (!strcmp(method, "DELETE")) {
        uint64_t bytes = 0;
        int rc = ps_service_delete_run(api->service, id, &bytes, err);
        if (rc == 0)
            *ret_json = json_pack("{s:I}", "bytes_freed", (json_int_t)bytes);
        return rc;
    }
    if (strcmp(method, "PATCH") != 0)
        return ps_fail(err, PS_UNIMPLEMENTED, "this cannot be changed");
    json_error_t why;
    json_t *json = json_loadb(body, size, JSON_REJECT_DUPLICATES, &why);
    if (!json || !json_is_object(json)) {
        json_decref(json);
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "the body must be a JSON object, such as {\"notes\": \"...\"}");
    }
    int rc = change_run(api, id, json, ret_json, err);
    json_decref(json);
    return rc;
}
