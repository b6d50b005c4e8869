/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/service.h"

#include "services/base/log.h"
#include "services/base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MAX_WORLD = 65536,
    MAX_LABEL = 1024,
    MAX_NOTES = 65536,
    MAX_REASON = 4096,
    MAX_TAGS = 64,
    MAX_TAG = 128,
    MAX_CONFIG = 1000,
    MAX_CONFIG_VALUE = 65536,
    MAX_CONFIG_BYTES = 1 << 20, /* the answers that hold a run must fit into what clients receive */
    MAX_REQUEST_ID = 128,
    MAX_EPOCH = 10000000,
    MAX_POINTS = 100000,
    MAX_NAME = 128,
    MAX_LOG_LINE = 1000,
    MAX_PATH = 4096,
};

static int no_memory(struct ps_error *err)
{
    return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
}

/* ---- Liveness ---- */

struct live_run {
    char id[PS_RUN_ID_SIZE];
    uint32_t attempt;
    bool running;     /* else created: it has a longer grace */
    int64_t heard_ns; /* by the service's clock */
};

struct ps_live {
    pthread_mutex_t lock; /* guards everything here */
    const struct ps_clock *clock;
    struct live_run *runs;
    size_t count, capacity;
};

static struct ps_live *live_new(const struct ps_clock *clock)
{
    struct ps_live *live = calloc(1, sizeof *live);
    if (live) {
        pthread_mutex_init(&live->lock, NULL);
        live->clock = clock;
    }
    return live;
}

static void live_free(struct ps_live *live)
{
    if (!live)
        return;
    pthread_mutex_destroy(&live->lock);
    free(live->runs);
    free(live);
}

static struct live_run *live_find(struct ps_live *live, const char *id)
{
    for (size_t i = 0; i < live->count; i++)
        if (strcmp(live->runs[i].id, id) == 0)
            return &live->runs[i];
    return NULL;
}

/* Notes a sign of life, for a run that is not known yet too. */
static int live_touch(struct ps_live *live, const char *id, uint32_t attempt, bool running)
{
    int code = 0;
    pthread_mutex_lock(&live->lock);
    struct live_run *run = live_find(live, id);
    if (!run && live->count == live->capacity) {
        size_t capacity = live->capacity ? live->capacity * 2 : 16;
        struct live_run *larger = realloc(live->runs, capacity * sizeof *larger);
        if (larger) {
            live->runs = larger;
            live->capacity = capacity;
        } else {
            code = PS_RESOURCE_EXHAUSTED;
        }
    }
    if (!run && !code) {
        run = &live->runs[live->count++];
        snprintf(run->id, sizeof run->id, "%s", id);
    }
    if (run) {
        run->attempt = attempt;
        run->running = running;
        run->heard_ns = live->clock->now_ns(live->clock->context);
    }
    pthread_mutex_unlock(&live->lock);
    return code;
}

static void live_remove(struct ps_live *live, const char *id)
{
    pthread_mutex_lock(&live->lock);
    struct live_run *run = live_find(live, id);
    if (run)
        *run = live->runs[--live->count];
    pthread_mutex_unlock(&live->lock);
}

/* Runs on the writer thread, in the order of the events. */
static void on_event(void *context, const struct ps_event *event)
{
    struct ps_service *service = context;
    const char *kind = event->kind;
    int state = ps_run_state_from_name(kind);
    if (strcmp(kind, "attempt") == 0 || state == PS_RUN_CREATED)
        live_touch(service->live, event->run_id, event->attempt, false);
    else if (strcmp(kind, "recovered") == 0 ||
             (strcmp(kind, "updated") == 0 && strcmp(event->detail, "running") == 0))
        live_touch(service->live, event->run_id, event->attempt, true);
    else if (state || strcmp(kind, "deleted") == 0)
        live_remove(service->live, event->run_id);
    ps_log_debug("run %s, attempt %u: %s: %s", event->run_id, event->attempt, kind, event->detail);
    ps_hub_publish(service->hub, event);
}

static void on_sign_of_life(void *context, const char *run_id, uint32_t attempt)
{
    struct ps_service *service = context;
    pthread_mutex_lock(&service->live->lock);
    struct live_run *run = live_find(service->live, run_id);
    if (run && run->attempt == attempt)
        run->heard_ns = service->clock->now_ns(service->clock->context);
    pthread_mutex_unlock(&service->live->lock);
}

struct suspect {
    struct ps_service *service;
    struct live_run run;
};

static bool overdue(const struct ps_service *service, const struct live_run *run, int64_t now_ns)
{
    double limit = run->running ? service->lost_after_s : service->abandoned_after_s;
    return (double)(now_ns - run->heard_ns) / PS_NS_PER_S >= limit;
}

/* Asked by the writer thread, after every report that came before. */
static bool still_silent(void *context)
{
    struct suspect *suspect = context;
    struct ps_service *service = suspect->service;
    pthread_mutex_lock(&service->live->lock);
    const struct live_run *run = live_find(service->live, suspect->run.id);
    bool silent = run && run->attempt == suspect->run.attempt &&
                  overdue(service, run, service->clock->now_ns(service->clock->context));
    pthread_mutex_unlock(&service->live->lock);
    return silent;
}

int ps_service_sweep(struct ps_service *service, struct ps_error *err)
{
    struct ps_live *live = service->live;
    struct suspect *suspects = NULL;
    size_t count = 0;
    pthread_mutex_lock(&live->lock);
    int64_t now_ns = live->clock->now_ns(live->clock->context);
    for (size_t i = 0; i < live->count; i++)
        if (overdue(service, &live->runs[i], now_ns)) {
            struct suspect *larger = realloc(suspects, (count + 1) * sizeof *larger);
            if (!larger)
                break; /* those found are dealt with now, the others next time */
            suspects = larger;
            suspects[count++] = (struct suspect){service, live->runs[i]};
        }
    pthread_mutex_unlock(&live->lock);
    int result = 0;
    for (size_t i = 0; i < count; i++) {
        const struct live_run *run = &suspects[i].run;
        char reason[128], silence[40];
        ps_format_duration((double)(now_ns - run->heard_ns) / PS_NS_PER_S, silence, sizeof silence);
        snprintf(reason, sizeof reason,
                 run->running ? "not heard of for %s" : "created %s ago and never heard of", silence);
        bool marked;
        int code = ps_store_mark_lost(service->store, run->id, run->attempt, reason, still_silent,
                                      &suspects[i], &marked, err);
        if (code == PS_NOT_FOUND)
            live_remove(live, run->id);
        else if (code)
            result = code; /* such as a full disk: tried again next time */
    }
    free(suspects);
    return result;
}

int ps_service_roll_up(struct ps_service *service, bool *ret_more, struct ps_error *err)
{
    char id[PS_RUN_ID_SIZE];
    uint64_t dropped = 0;
    *ret_more = false;
    if (!(service->roll_up_after_s > 0))
        return 0;
    int64_t before = ps_wall_ns() - (int64_t)(service->roll_up_after_s * 1e9);
    int code = ps_store_next_to_roll_up(service->store, before, id, err);
    if (code || !*id)
        return code;
    code = ps_store_roll_up(service->store, id, &dropped, err);
    if (code == PS_NOT_FOUND || code == PS_FAILED_PRECONDITION) /* deleted or gone on meanwhile */
        code = 0;
    else if (!code)
        ps_log_info("run %s: rolled up, %llu step points fewer", id, (unsigned long long)dropped);
    *ret_more = code == 0;
    return code;
}

/* Every run that is alive by the store gets its full grace from now. */
static int load_live(struct ps_service *service, struct ps_error *err)
{
    static const int states[] = {PS_RUN_CREATED, PS_RUN_RUNNING};
    char token[32] = "";
    do {
        struct ps_run_query query = {
            .page_size = 1000, .page_token = token, .states = states, .state_count = 2};
        struct ps_run_list list;
        int code = ps_store_list_runs(service->store, &query, &list, err);
        if (code)
            return code;
        for (size_t i = 0; !code && i < list.count; i++)
            code = live_touch(service->live, list.runs[i].id, list.runs[i].attempt,
                              list.runs[i].state == PS_RUN_RUNNING);
        memcpy(token, list.next_page_token, sizeof token);
        ps_run_list_done(&list);
        if (code)
            return no_memory(err);
    } while (*token);
    return 0;
}

/* ---- Opening ---- */

/* In doubt a file stays. */
static bool in_catalogue(void *store, const char *sha256)
{
    struct ps_blob blob;
    return ps_store_get_blob(store, sha256, &blob, NULL, NULL) != PS_NOT_FOUND;
}

static int open_register_root(struct ps_service *service, const char *root, struct ps_error *err)
{
    service->register_root = realpath(root, NULL);
    if (!service->register_root)
        return ps_fail_errno(err, errno, "cannot use --register-root %s", root);
    service->register_fd = open(service->register_root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return service->register_fd < 0 ? ps_fail_errno(err, errno, "cannot use --register-root %s", root) : 0;
}

int ps_service_open(const struct ps_service_config *config, struct ps_service **ret_service,
                    struct ps_error *err)
{
    struct ps_service *service = calloc(1, sizeof *service);
    if (!service)
        return no_memory(err);
    pthread_mutex_init(&service->blobs_lock, NULL);
    pthread_mutex_init(&service->pulls_lock, NULL);
    service->keep_last = config->keep_last;
    service->keep_best = config->keep_best;
    service->roll_up_after_s = config->roll_up_after_s;
    service->clock = config->clock ? config->clock : &ps_clock_monotonic;
    service->lost_after_s = config->lost_after_s > 0 ? config->lost_after_s : 20;
    service->abandoned_after_s = config->abandoned_after_s > 0 ? config->abandoned_after_s : 600;
    service->started_ns = ps_wall_ns();
    service->register_fd = -1;
    service->live = live_new(service->clock);
    service->hub = ps_hub_new();
    service->meetings = ps_meetings_new(service->clock);
    service->access = ps_access_new();
    service->limits = ps_limits_new(service->clock, config->peer_calls_per_s, config->peer_bytes_per_s);
    int code = service->live && service->hub && service->meetings && service->access && service->limits
                   ? 0
                   : no_memory(err);
    if (!code)
        code = ps_access_load(service->access, config->token,
                              config->token_source ? config->token_source : "PARAMSYNC_TOKEN", err);
    struct ps_store_config store = config->store;
    store.dir = config->data_dir;
    store.on_event = on_event;
    store.on_sign_of_life = on_sign_of_life;
    store.context = service;
    if (!code)
        code = ps_store_open(&store, &service->store, err);
    /* After the store, whose lock says that nobody else is receiving into the folder that is emptied. */
    if (!code)
        code = ps_blobs_open(config->data_dir, &service->blobs, err);
    if (!code) {
        uint64_t bytes = 0;
        size_t swept = ps_blobs_sweep(service->blobs, in_catalogue, service->store, &bytes);
        if (swept)
            ps_log_notice("removed %zu checkpoint file%s (%llu bytes) that no run has", swept,
                          swept == 1 ? "" : "s", (unsigned long long)bytes);
    }
    if (!code && config->register_root)
        code = open_register_root(service, config->register_root, err);
    if (!code)
        code = load_live(service, err);
    if (code) {
        ps_service_free(service);
        return code;
    }
    *ret_service = service;
    return 0;
}

struct ps_service *ps_service_free(struct ps_service *service)
{
    if (!service)
        return NULL;
    ps_store_free(service->store);
    ps_blobs_free(service->blobs);
    ps_hub_free(service->hub);
    ps_meetings_free(service->meetings);
    live_free(service->live);
    pthread_mutex_destroy(&service->blobs_lock);
    pthread_mutex_destroy(&service->pulls_lock);
    ps_access_free(service->access);
    ps_limits_free(service->limits);
    if (service->register_fd >= 0)
        close(service->register_fd);
    free(service->register_root);
    free(service);
    return NULL;
}

int ps_service_ready(struct ps_service *service, struct ps_error *err)
{
    if (service->draining)
        return ps_fail(err, PS_UNAVAILABLE, "the sidecar is stopping");
    return ps_store_check(service->store, err);
}

/* ---- Checks ---- */

static int check_size(const char *text, size_t max, const char *field, struct ps_error *err)
{
    if (text && strlen(text) > max)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s: %zu bytes, at most %zu are allowed", field,
                       strlen(text), max);
    return 0;
}

static int check_run(const char *run, struct ps_error *err)
{
    return run && *run ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "run: must be a run's id or name");
}

static int check_elapsed(double elapsed_s, const char *field, struct ps_error *err)
{
    if (!isfinite(elapsed_s) || elapsed_s < 0 || elapsed_s > 1e10)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s: %g is no elapsed time in seconds", field, elapsed_s);
    return 0;
}

/* A share, or NaN, which is what a diverged run has to say. */
static int check_accuracy(double accuracy, struct ps_error *err)
{
    if (accuracy < 0 || accuracy > 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "accuracy: %g is not from 0 to 1", accuracy);
    return 0;
}

static int check_rank(uint32_t rank, struct ps_error *err)
{
    return rank < MAX_WORLD ? 0
                            : ps_fail(err, PS_INVALID_ARGUMENT, "rank: %u is above %d", rank, MAX_WORLD - 1);
}

static int check_epoch(uint32_t epoch, struct ps_error *err)
{
    if (epoch < 1 || epoch > MAX_EPOCH)
        return ps_fail(err, PS_INVALID_ARGUMENT, "epoch: %u is not from 1 to %d", epoch, MAX_EPOCH);
    return 0;
}

static int check_step(uint64_t step, const char *field, struct ps_error *err)
{
    return step <= INT64_MAX ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "%s: must be below 2^63", field);
}

static int check_tags(const char *const *tags, size_t count, struct ps_error *err)
{
    if (count > MAX_TAGS)
        return ps_fail(err, PS_INVALID_ARGUMENT, "tags: %zu, at most %d are allowed", count, MAX_TAGS);
    for (size_t i = 0; i < count; i++)
        if (!*tags[i] || strlen(tags[i]) > MAX_TAG)
            return ps_fail(err, PS_INVALID_ARGUMENT, "tags[%zu]: must have 1 to %d bytes", i, MAX_TAG);
    return 0;
}

static bool metric_name_ok(const char *name)
{
    size_t n = strlen(name);
    return n > 0 && n <= MAX_NAME &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./-") == n;
}

static int check_filename(const char *filename, struct ps_error *err)
{
    size_t n = filename ? strlen(filename) : 0;
    bool good = n > 0 && n <= 255 && strcmp(filename, ".") != 0 && strcmp(filename, "..") != 0;
    for (size_t i = 0; good && i < n; i++)
        good = filename[i] != '/' && filename[i] != '\\' && (unsigned char)filename[i] >= 0x20 &&
               filename[i] != 0x7f;
    return good ? 0
                : ps_fail(err, PS_INVALID_ARGUMENT,
                          "filename: must have 1 to 255 bytes without slashes and control characters");
}

static int check_format(const char *format, struct ps_error *err)
{
    static const char *const formats[] = {"safetensors", "pth", "state"};
    for (size_t i = 0; format && i < sizeof formats / sizeof *formats; i++)
        if (strcmp(format, formats[i]) == 0)
            return 0;
    return ps_fail(err, PS_INVALID_ARGUMENT, "format: must be safetensors, pth or state");
}

/* ---- Runs ---- */

int ps_service_create_run(struct ps_service *service, const struct ps_new_run *request,
                          struct ps_run *ret_run, bool *ret_resumed, struct ps_error *err)
{
    const struct {
        const char *text, *field;
        size_t max;
    } texts[] = {
        {request->model, "model", MAX_LABEL},
        {request->dataset, "dataset", MAX_LABEL},
        {request->dataset_hash, "dataset_hash", MAX_LABEL},
        {request->device, "device", MAX_LABEL},
        {request->commit, "commit", MAX_LABEL},
        {request->notes, "notes", MAX_NOTES},
        {request->request_id, "request_id", MAX_REQUEST_ID},
    };
    int code = ps_check_run_name(request->name, "name", err);
    if (!code && (request->world_size < 1 || request->world_size > MAX_WORLD))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "world_size: %u is not from 1 to %d", request->world_size,
                       MAX_WORLD);
    for (size_t i = 0; !code && i < sizeof texts / sizeof *texts; i++)
        code = check_size(texts[i].text, texts[i].max, texts[i].field, err);
    if (!code)
        code = check_tags(request->tags, request->tag_count, err);
    if (!code && request->config_count > MAX_CONFIG)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "config: %zu entries, at most %d are allowed",
                       request->config_count, MAX_CONFIG);
    size_t config_bytes = 0;
    for (size_t i = 0; !code && i < request->config_count; i++) {
        const struct ps_key_value *entry = &request->config[i];
        config_bytes += strlen(entry->key) + strlen(entry->value);
        if (!*entry->key || strlen(entry->key) > MAX_LABEL || strlen(entry->value) > MAX_CONFIG_VALUE)
            code = ps_fail(err, PS_INVALID_ARGUMENT,
                           "config[%zu]: the key must have 1 to %d bytes, the value at most %d", i, MAX_LABEL,
                           MAX_CONFIG_VALUE);
    }
    if (!code && config_bytes > MAX_CONFIG_BYTES)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "config: %zu bytes in all, at most %d are allowed",
                       config_bytes, MAX_CONFIG_BYTES);
    return code ? code : ps_store_create_run(service->store, request, ret_run, ret_resumed, err);
}

int ps_service_update_run(struct ps_service *service, const char *run, const char *notes, bool set_tags,
                          const char *const *tags, size_t tag_count, struct ps_run *ret_run,
                          struct ps_error *err)
{
    int code = check_run(run, err);
    if (!code)
        code = check_size(notes, MAX_NOTES, "notes", err);
    if (!code && set_tags)
        code = check_tags(tags, tag_count, err);
    return code ? code
                : ps_store_update_run(service->store, run, notes, set_tags, tags, tag_count, ret_run, err);
}

int ps_service_finish_run(struct ps_service *service, const char *run, uint32_t attempt, int state,
                          const char *reason, double elapsed_s, struct ps_run *ret_run, struct ps_error *err)
{
    int code = check_run(run, err);
    if (!code)
        code = check_size(reason, MAX_REASON, "reason", err);
    if (!code)
        code = check_elapsed(elapsed_s, "elapsed_s", err);
    return code ? code
                : ps_store_finish_run(service->store, run, attempt, state, reason, elapsed_s, ret_run, err);
}

int ps_service_heartbeat(struct ps_service *service, const char *run, const struct ps_heartbeat *beat,
                         int *ret_state, struct ps_error *err)
{
    int code = check_run(run, err);
    if (!code)
        code = check_rank(beat->rank, err);
    if (!code)
        code = check_elapsed(beat->elapsed_s, "elapsed_s", err);
    if (!code)
        code = check_step(beat->step, "step", err);
    if (!code)
        code = check_step(beat->points_sent, "points_sent", err);
    if (!code)
        code = check_step(beat->points_dropped, "points_dropped", err);
    if (!code)
        code = check_step(beat->spool_bytes, "spool_bytes", err);
    if (!code)
        code = check_step(beat->points_waiting, "points_waiting", err);
    if (!code)
        code = check_step(beat->points_replayed, "points_replayed", err);
    if (!code)
        code = check_step(beat->rss_bytes, "rss_bytes", err);
    if (!code && beat->has_clock_offset && !isfinite(beat->clock_offset_s))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "wall_s: %g is no time", beat->clock_offset_s);
    if (!code && beat->line_count > PS_LOG_KEPT)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "log: %zu lines, at most %d are allowed", beat->line_count,
                       PS_LOG_KEPT);
    if (!code && beat->line_count && (beat->first_line < 1 || beat->first_line > INT64_MAX / 2))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "first_line: counts from 1");
    for (size_t i = 0; !code && i < beat->line_count; i++)
        code = check_size(beat->lines[i], MAX_LOG_LINE, "log", err);
    return code ? code : ps_store_heartbeat(service->store, run, beat, ret_state, err);
}

/* ---- Metrics ---- */

static int check_confusion(const struct ps_epoch *e, struct ps_error *err)
{
    uint64_t all = 0, right = 0;
    if (!e->confusion)
        return 0;
    if (e->classes < 1 || e->classes > PS_MAX_CLASSES)
        return ps_fail(err, PS_INVALID_ARGUMENT, "confusion: of %u classes; 1 to %d can be kept", e->classes,
                       PS_MAX_CLASSES);
    for (uint32_t i = 0; i < e->classes; i++)
        for (uint32_t k = 0; k < e->classes; k++) {
            all += e->confusion[i * e->classes + k];
            right += i == k ? e->confusion[i * e->classes + k] : 0;
        }
    if (all != e->counted || right != e->correct)
        return ps_fail(
            err, PS_INVALID_ARGUMENT,
            "confusion: it holds %llu images, %llu of them right, but counted is %u and correct %u",
            (unsigned long long)all, (unsigned long long)right, e->counted, e->correct);
    return 0;
}

int ps_service_report_epoch(struct ps_service *service, const char *run, const struct ps_epoch *epoch,
                            bool *ret_replaced, struct ps_error *err)
{
    int code = check_run(run, err);
    if (!code)
        code = check_epoch(epoch->epoch, err);
    if (!code && !epoch->no_eval)
        code = check_accuracy(epoch->accuracy, err);
    if (!code)
        code = check_elapsed(epoch->elapsed_s, "elapsed_s", err);
    if (!code)
        code = check_elapsed(epoch->train_s, "train_s", err);
    if (!code)
        code = check_elapsed(epoch->eval_s, "eval_s", err);
    if (!code)
        code = check_step(epoch->step, "step", err);
    if (!code && epoch->correct > epoch->counted)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "correct: %u of %u counted", epoch->correct, epoch->counted);
    if (!code)
        code = check_confusion(epoch, err);
    return code ? code : ps_store_report_epoch(service->store, run, epoch, ret_replaced, err);
}

int ps_service_append_steps(struct ps_service *service, const char *run, uint32_t rank, uint32_t attempt,
                            uint64_t seq, const struct ps_point *points, size_t count, uint32_t *ret_attempt,
                            struct ps_error *err)
{
    int code = check_run(run, err);
    if (!code)
        code = check_rank(rank, err);
    if (!code && count > MAX_POINTS)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "points: %zu in one batch, at most %d are allowed", count,
                       MAX_POINTS);
    for (size_t i = 0; !code && i < count; i++) {
        const struct ps_point *point = &points[i];
        if (!metric_name_ok(point->name))
            code = ps_fail(err, PS_INVALID_ARGUMENT,
                           "points[%zu].name \"%.128s\": must be 1 to %d letters, digits, _ . / -", i,
                           point->name, MAX_NAME);
        else if (!isfinite(point->elapsed_s) || point->elapsed_s < 0 || point->elapsed_s > 1e10)
            code = ps_fail(err, PS_INVALID_ARGUMENT,
                           "points[%zu].elapsed_s: %g is no elapsed time in seconds", i, point->elapsed_s);
    }
    return code ? code
                : ps_store_append_steps(service->store, run, rank, attempt, seq, points, count, NULL,
                                        ret_attempt, err);
}

/* ---- Checkpoints ---- */

static int delete_checkpoint(struct ps_service *service, const char *run, const char *sha256, bool announce,
                             uint64_t *ret_bytes, struct ps_error *err);

struct ps_upload {
    struct ps_service *service;
    char run_id[PS_RUN_ID_SIZE];
    struct ps_new_checkpoint header; /* its texts are the strings below */
    char *filename, *format;
    char sha256[PS_SHA256_HEX];
    uint64_t received;
    bool known; /* nothing needs to be received */
    struct ps_blob_writer *writer;
};

static int check_header(const struct ps_new_checkpoint *header, struct ps_error *err)
{
    int code = check_epoch(header->epoch, err);
    if (!code)
        code = check_filename(header->filename, err);
    if (!code)
        code = check_format(header->format, err);
    if (!code && header->has_accuracy)
        code = check_accuracy(header->accuracy, err);
    return code ? code : check_step(header->step, "step", err);
}

int ps_upload_begin(struct ps_service *service, const char *run, const struct ps_new_checkpoint *header,
                    struct ps_upload **ret_upload, struct ps_error *err)
{
    struct ps_run stored = {0};
    int code = check_run(run, err);
    if (!code)
        code = check_header(header, err);
    if (!code && (header->size < 1 || header->size > INT64_MAX))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "size: must be at least 1 byte and below 2^63");
    if (!code && (!header->sha256 || !ps_sha256_hex_valid(header->sha256)))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    if (!code)
        code = ps_store_get_run(service->store, run, &stored, err);
    if (!code && header->attempt > stored.attempt)
        code = ps_fail(err, PS_NOT_FOUND, "attempt: run \"%.200s\" has %u, not %u", run, stored.attempt,
                       header->attempt);
    struct ps_upload *upload = code ? NULL : calloc(1, sizeof *upload);
    if (!code && !upload)
        code = no_memory(err);
    if (!code) {
        upload->service = service;
        upload->header = *header;
        if (!header->attempt) /* the newest as of now, whatever is opened while the bytes come */
            upload->header.attempt = stored.attempt;
        memcpy(upload->run_id, stored.id, sizeof upload->run_id);
        memcpy(upload->sha256, header->sha256, sizeof upload->sha256);
        upload->filename = strdup(header->filename);
        upload->format = strdup(header->format);
        upload->header.filename = upload->filename;
        upload->header.format = upload->format;
        upload->header.sha256 = upload->sha256;
        if (!upload->filename || !upload->format)
            code = no_memory(err);
    }
    if (!code)
        code = ps_blob_writer_open(service->blobs, header->sha256, header->size, &upload->writer, err);
    ps_run_done(&stored);
    if (code) {
        ps_upload_free(upload);
        return code;
    }
    *ret_upload = upload;
    return 0;
}

bool ps_upload_is_known(struct ps_upload *upload)
{
    struct ps_blob blob;
    char now[PS_SHA256_HEX] = "";
    uint64_t size = 0;
    int fd;
    if (ps_store_get_blob(upload->service->store, upload->sha256, &blob, NULL, NULL) || blob.registered ||
        blob.size != upload->header.size ||
        ps_blobs_read(upload->service->blobs, upload->sha256, blob.size, &fd, NULL))
        return false;
    /* One that has rotted on the disk is put right by what comes now. */
    upload->known = !ps_sha256_file(fd, "the checkpoint", now, &size, NULL) && !strcmp(now, upload->sha256);
    close(fd);
    return upload->known;
}

int ps_upload_data(struct ps_upload *upload, uint64_t offset, const void *data, size_t size, uint32_t crc32c,
                   struct ps_error *err)
{
    if (offset != upload->received)
        return ps_fail(err, PS_INVALID_ARGUMENT, "chunk.offset: %llu, but %llu bytes have come",
                       (unsigned long long)offset, (unsigned long long)upload->received);
    if (size > 1 << 20)
        return ps_fail(err, PS_INVALID_ARGUMENT, "chunk.data: %zu bytes, at most 1 MiB is allowed", size);
    uint32_t have = ps_crc32c(0, data, size);
    if (have != crc32c)
        return ps_fail(err, PS_DATA_LOSS, "chunk.crc32c at offset %llu: %08x was sent, the data has %08x",
                       (unsigned long long)offset, crc32c, have);
    int code = ps_blob_writer_write(upload->writer, data, size, err);
    if (!code)
        upload->received += size;
    return code;
}

/* ---- Which checkpoints stay ---- */

/* A pull that is under way holds on to its content. */
struct pulled {
    struct pulled *next;
    char sha256[PS_SHA256_HEX];
    int count;
};

void ps_service_pulling(struct ps_service *service, const char *sha256, int change)
{
    pthread_mutex_lock(&service->pulls_lock);
    struct pulled **at = &service->pulls;
    while (*at && strcmp((*at)->sha256, sha256) != 0)
        at = &(*at)->next;
    if (!*at && change > 0 && (*at = calloc(1, sizeof **at))) /* without memory it is only less protected */
        memcpy((*at)->sha256, sha256, PS_SHA256_HEX);
    if (*at) {
        (*at)->count += change;
        if ((*at)->count <= 0) {
            struct pulled *over = *at;
            *at = over->next;
            free(over);
        }
    }
    pthread_mutex_unlock(&service->pulls_lock);
}

static bool is_pulled(struct ps_service *service, const char *sha256)
{
    pthread_mutex_lock(&service->pulls_lock);
    const struct pulled *at = service->pulls;
    while (at && strcmp(at->sha256, sha256) != 0)
        at = at->next;
    pthread_mutex_unlock(&service->pulls_lock);
    return at != NULL;
}

/* Whether a is older than b: of an earlier attempt, or an earlier epoch of the same. */
static bool older(const struct ps_checkpoint *a, const struct ps_checkpoint *b)
{
    return a->attempt != b->attempt ? a->attempt < b->attempt : a->epoch < b->epoch;
}

/* Whether a goes before b by accuracy: higher, then the earlier epoch. One without an accuracy is never
 * better. */
static bool better(const struct ps_checkpoint *a, const struct ps_checkpoint *b)
{
    bool has = a->has_accuracy && !isnan(a->accuracy), other = b->has_accuracy && !isnan(b->accuracy);
    if (!has || !other)
        return has;
    return a->accuracy != b->accuracy ? a->accuracy > b->accuracy : older(a, b);
}

/* Whether checkpoint i of the list may go, by the rules for its format. */
static bool may_go(const struct ps_service *service, const struct ps_checkpoint_list *list, size_t i)
{
    const struct ps_checkpoint *c = &list->checkpoints[i];
    const bool state = !strcmp(c->format, "state");
    /* What resuming needs is as large as the weights or larger, and only the newest is ever asked for: that
     * one and the one before it stay (the newest pair may not be whole yet). */
    const size_t last = state ? 2 : service->keep_last, best = state ? 0 : service->keep_best;
    if (!state && !last && !best)
        return false;
    size_t newer = 0, ahead = 0;
    for (size_t k = 0; k < list->count; k++)
        if (!strcmp(list->checkpoints[k].format, c->format)) {
            newer += older(c, &list->checkpoints[k]);
            ahead += better(&list->checkpoints[k], c);
        }
    bool is_best = !state && c->has_accuracy && !isnan(c->accuracy) && ahead < (best ? best : 1);
    return newer >= (last ? last : 1) && !is_best;
}

/* After a checkpoint has come: lets go of those that the rules do not keep. Not worth failing an upload for.
 */
static void prune(struct ps_service *service, const char *run, const char *format)
{
    if (strcmp(format, "state") != 0 && !service->keep_last && !service->keep_best)
        return; /* all stay: nothing to look at */
    struct ps_error err = {0};
    struct ps_checkpoint_list list;
    uint64_t bytes;
    if (ps_store_list_checkpoints(service->store, run, &list, &err)) {
        ps_log_debug("%s", err.message);
        return;
    }
    for (size_t i = 0; i < list.count; i++)
        if (may_go(service, &list, i) && !is_pulled(service, list.checkpoints[i].sha256) &&
            delete_checkpoint(service, run, list.checkpoints[i].sha256, false, &bytes, &err))
            ps_log_debug("%s", err.message);
    ps_checkpoint_list_done(&list);
}

int ps_upload_commit(struct ps_upload *upload, struct ps_checkpoint *ret_checkpoint, struct ps_error *err)
{
    struct ps_service *service = upload->service;
    int code = upload->known ? 0 : ps_blob_writer_seal(upload->writer, err);
    if (code)
        return code;
    pthread_mutex_lock(&service->blobs_lock);
    struct ps_blob there;
    if (!upload->known)
        code = ps_blob_writer_place(upload->writer, err);
    else if (ps_store_get_blob(service->store, upload->sha256, &there, NULL, NULL))
        code = ps_fail(err, PS_ABORTED, "the content was deleted just now; put it again");
    if (!code) {
        code = ps_store_add_checkpoint(service->store, upload->run_id, &upload->header, ret_checkpoint, err);
        struct ps_blob blob;
        /* No row, no file: unless another checkpoint has the same content. */
        if (code && ps_store_get_blob(service->store, upload->sha256, &blob, NULL, NULL) == PS_NOT_FOUND)
            ps_blobs_remove(service->blobs, upload->sha256, NULL);
    }
    pthread_mutex_unlock(&service->blobs_lock);
    if (!code)
        prune(service, upload->run_id, upload->header.format);
    return code;
}

struct ps_upload *ps_upload_free(struct ps_upload *upload)
{
    if (!upload)
        return NULL;
    ps_blob_writer_free(upload->writer);
    free(upload->filename);
    free(upload->format);
    free(upload);
    return NULL;
}

/* ---- Registered checkpoints ---- */

/* Opens what lies beneath the register root at path, whatever links and dots it holds: those that lead out of
 * it end in an error. */
static int open_beneath(const struct ps_service *service, const char *path, int *ret_fd, struct ps_error *err)
{
    struct open_how how = {.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    struct stat st;
    int fd = (int)syscall(SYS_openat2, service->register_fd, path, &how, sizeof how);
    if (fd < 0 && errno == EXDEV)
        return ps_fail(err, PS_INVALID_ARGUMENT, "path: %.500s leads out of the sidecar's --register-root",
                       path);
    if (fd < 0 && errno == ENOENT)
        return ps_fail(err, PS_NOT_FOUND, "path: there is no %.500s beneath the sidecar's --register-root",
                       path);
    if (fd < 0)
        return ps_fail_errno(err, errno, "path: cannot open %.500s", path);
    int code = fstat(fd, &st) ? ps_fail_errno(err, errno, "path: cannot read %.500s", path) : 0;
    if (!code && !S_ISREG(st.st_mode))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "path: %.500s is no regular file", path);
    if (code) {
        close(fd);
        return code;
    }
    *ret_fd = fd;
    return 0;
}

/* The path relative to the register root, of an absolute one that lies beneath it too. */
static int relative_path(const struct ps_service *service, const char *path, const char **ret_path,
                         struct ps_error *err)
{
    size_t root = strlen(service->register_root);
    if (!*path || strlen(path) > MAX_PATH)
        return ps_fail(err, PS_INVALID_ARGUMENT, "path: must have 1 to %d bytes", MAX_PATH);
    if (*path == '/') {
        if (strncmp(path, service->register_root, root) != 0 || path[root == 1 ? 0 : root] != '/')
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "path: %.500s does not lie beneath the sidecar's"
                           " --register-root %.200s",
                           path, service->register_root);
        path += root;
        path += strspn(path, "/");
    }
    *ret_path = path;
    return 0;
}

int ps_service_register(struct ps_service *service, const char *run, const char *path,
                        const struct ps_new_checkpoint *header, struct ps_checkpoint *ret_checkpoint,
                        struct ps_error *err)
{
    if (!service->register_root)
        return ps_fail(
            err, PS_FAILED_PRECONDITION,
            "this sidecar takes no checkpoints by their path: start it with --register-root DIR, or use"
            " PutCheckpoint");
    struct ps_new_checkpoint checkpoint = *header;
    const char *relative = NULL;
    int code = check_run(run, err);
    if (!code)
        code = relative_path(service, path, &relative, err);
    if (code)
        return code;
    const char *slash = strrchr(relative, '/');
    if (!checkpoint.filename || !*checkpoint.filename)
        checkpoint.filename = slash ? slash + 1 : relative;
    const char *dot = strrchr(checkpoint.filename, '.');
    if (!checkpoint.format || !*checkpoint.format)
        checkpoint.format = dot ? dot + 1 : "";
    if (checkpoint.sha256 && *checkpoint.sha256 && !ps_sha256_hex_valid(checkpoint.sha256))
        return ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    code = check_header(&checkpoint, err);
    struct ps_run stored;
    if (!code && !(code = ps_store_get_run(service->store, run, &stored, err))) /* before the file is read */
        ps_run_done(&stored);
    int fd = -1;
    char sha256[PS_SHA256_HEX];
    if (!code)
        code = open_beneath(service, relative, &fd, err);
    if (!code)
        code = ps_sha256_file(fd, "the checkpoint", sha256, &checkpoint.size, err);
    if (fd >= 0)
        close(fd);
    if (!code && !checkpoint.size)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "path: %.500s is empty", path);
    if (!code && checkpoint.sha256 && *checkpoint.sha256 && strcmp(checkpoint.sha256, sha256) != 0)
        code = ps_fail(err, PS_DATA_LOSS, "sha256: %.64s was announced, the file has %s", checkpoint.sha256,
                       sha256);
    if (code)
        return code;
    checkpoint.sha256 = sha256;
    checkpoint.path = relative;
    pthread_mutex_lock(&service->blobs_lock);
    code = ps_store_add_checkpoint(service->store, run, &checkpoint, ret_checkpoint, err);
    pthread_mutex_unlock(&service->blobs_lock);
    if (!code)
        prune(service, run, checkpoint.format);
    return code;
}

/* A registered file is what it was, or this fails. */
static int read_registered(struct ps_service *service, const char *path, const char *sha256, uint64_t size,
                           bool verify, int *ret_fd, struct ps_error *err)
{
    struct stat st;
    int fd = -1;
    if (!service->register_root)
        return ps_fail(
            err, PS_FAILED_PRECONDITION,
            "the checkpoint lies beside the store, at %.500s: start the sidecar with the --register-root"
            " that it was registered under",
            path);
    int code = open_beneath(service, path, &fd, err);
    if (code == PS_NOT_FOUND)
        return ps_fail(err, PS_DATA_LOSS, "the registered file %.500s is gone", path);
    if (code)
        return code;
    char now[PS_SHA256_HEX] = "";
    uint64_t bytes = 0;
    if (fstat(fd, &st))
        code = ps_fail_errno(err, errno, "cannot read the registered file %.500s", path);
    else if ((uint64_t)st.st_size != size)
        code = ps_fail(err, PS_DATA_LOSS,
                       "the registered file %.500s has changed: it has %lld bytes instead of %llu", path,
                       (long long)st.st_size, (unsigned long long)size);
    else if (verify && !(code = ps_sha256_file(fd, "the checkpoint", now, &bytes, err)) &&
             strcmp(now, sha256) != 0)
        code =
            ps_fail(err, PS_DATA_LOSS, "the registered file %.500s has changed: its sha256 is %s, not %.64s",
                    path, now, sha256);
    if (code) {
        close(fd);
        return code;
    }
    *ret_fd = fd;
    return 0;
}

int ps_service_read_blob(struct ps_service *service, const char *sha256, uint64_t size, bool verify,
                         int *ret_fd, struct ps_error *err)
{
    char *path = NULL;
    int code = ps_store_get_blob_path(service->store, sha256, &path, err);
    if (!code && path)
        code = read_registered(service, path, sha256, size, verify, ret_fd, err);
    else if (!code && (code = ps_blobs_read(service->blobs, sha256, size, ret_fd, err)) == PS_NOT_FOUND)
        code =
            ps_fail(err, PS_DATA_LOSS,
                    "the file of the checkpoint with sha256 %.64s is gone from the data directory", sha256);
    free(path);
    return code;
}

/* Called with the lock held. The rows are gone already, so a file that can't be removed is only worth a
 * warning. */
static uint64_t remove_files(struct ps_service *service, const struct ps_blob_list *orphans)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < orphans->count; i++) {
        struct ps_error err = {0};
        if (orphans->blobs[i].registered)
            continue;
        if (ps_blobs_remove(service->blobs, orphans->blobs[i].sha256, &err))
            ps_log_debug("%s", err.message);
        else
            bytes += orphans->blobs[i].size;
    }
    return bytes;
}

int ps_service_delete_run(struct ps_service *service, const char *run, uint64_t *ret_bytes,
                          struct ps_error *err)
{
    int code = check_run(run, err);
    if (code)
        return code;
    struct ps_blob_list orphans;
    pthread_mutex_lock(&service->blobs_lock);
    code = ps_store_delete_run(service->store, run, &orphans, err);
    if (!code) {
        *ret_bytes = remove_files(service, &orphans);
        ps_blob_list_done(&orphans);
    }
    pthread_mutex_unlock(&service->blobs_lock);
    return code;
}

static int delete_checkpoint(struct ps_service *service, const char *run, const char *sha256, bool announce,
                             uint64_t *ret_bytes, struct ps_error *err)
{
    int code = check_run(run, err);
    if (!code && !ps_sha256_hex_valid(sha256))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    if (code)
        return code;
    struct ps_blob_list orphans;
    pthread_mutex_lock(&service->blobs_lock);
    code = ps_store_delete_checkpoint(service->store, run, sha256, announce, &orphans, err);
    if (!code) {
        *ret_bytes = remove_files(service, &orphans);
        ps_blob_list_done(&orphans);
    }
    pthread_mutex_unlock(&service->blobs_lock);
    return code;
}

int ps_service_delete_checkpoint(struct ps_service *service, const char *run, const char *sha256,
                                 uint64_t *ret_bytes, struct ps_error *err)
{
    return delete_checkpoint(service, run, sha256, true, ret_bytes, err);
}
