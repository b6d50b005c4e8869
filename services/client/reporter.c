/* SPDX-License-Identifier: Apache-2.0
 * The asynchronous reporter. Callers append under a lock that is only ever held for copying; one thread sends
 * runs, epochs, step points and heartbeats, another the checkpoint files (so that a long upload delays no
 * heartbeat).
 *
 * Exactly once: step points leave the ring in batches numbered per (run, rank, attempt); a batch stays here,
 * unchanged, until the sidecar has acknowledged it as durable, and is sent again under the same number after
 * an outage. Epochs and checkpoints are idempotent by themselves, the creation of the run by its request id.
 *
 * While the sidecar is away, batches move to the spool on the disk, so that neither a long outage nor the end
 * of this process loses them: whoever opens a reporter with the same folder next sends what was left there,
 * under its own numbers.
 */
#include "services/client/internal.h"

#include "services/base/clock.h"
#include "services/base/digest.h"
#include "services/base/text.h"
#include "services/client/spool.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    batch_points = 1024,
    window_batches = 16,
    name_slots = 2048, /* open addressing; at most half are used */
    queue_max = 1 << 20,
    damage_retries = 3,
    log_kept = 200, /* lines that wait for the next heartbeat */
    log_line_max = 1000,
};
static const uint64_t spool_default = 256 << 20;
static const double call_timeout_s = 5, retry_first_s = 0.25, retry_most_s = 5, retry_closing_s = 0.25;
/* What close waits for a sidecar that is not there at all, where one that is only slow gets all its time. */
static const double absent_s = 10;

struct point {
    const char *name; /* in names: lives as long as the reporter */
    uint64_t step;
    double value, elapsed_s;
};

struct batch {
    uint64_t seq;
    size_t count;
    bool spooled; /* it lies in the spool, too */
    unsigned sends;
    struct point points[batch_points];
};

struct epoch_item {
    struct epoch_item *next;
    struct paramsync_epoch epoch;
    uint32_t confusion[]; /* the epoch's, if it has one */
};

struct checkpoint_item {
    struct checkpoint_item *next;
    struct paramsync_put put; /* strings follow the struct */
};

struct paramsync_reporter {
    struct paramsync_client *client;
    uint32_t rank;
    double heartbeat_s, flush_s;
    void (*notice)(void *context, const char *line);
    void *context;
    char *strings; /* what request points to */
    Paramsync__V1__CreateRunRequest request;
    bool has_request;
    char request_id[27];
    pthread_t sender, uploader;
    bool has_sender, has_uploader;
    struct ps_control sender_call, uploader_call;

    /* Of the sender's thread alone. */
    struct batch *window[window_batches]; /* unacknowledged, oldest first */
    size_t window_count;
    uint64_t next_seq;
    double retry_s;
    int64_t next_beat, next_flush;
    bool away;
    struct ps_spool *spool;    /* this run's; NULL until it is needed */
    uint64_t spool_acked;      /* batches from the spool up to this number have arrived */
    bool spool_full;           /* told already */
    struct ps_spool *leftover; /* of an ended process, being sent */
    bool no_leftovers;         /* looked for, and none is there any more */
    uint64_t leftover_points;

    char *spool_dir; /* NULL: none */
    uint64_t spool_max;
    bool may_register; /* the uploader's: the sidecar may take files by their path */

    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t wake;  /* for both threads */
    pthread_cond_t told;  /* for open and close: created, dead, sender_done */
    struct point *ring;
    size_t ring_size, ring_first, ring_count;
    char *names[name_slots];
    size_t name_count;
    struct epoch_item *epochs, **epochs_end;
    struct checkpoint_item *checkpoints, **checkpoints_end;
    struct paramsync_reporter_stats stats;
    char *log[log_kept];         /* line n lies at n % log_kept */
    uint64_t log_next, log_sent; /* the number of the next line; up to which they have arrived */
    uint64_t last_step;
    double last_elapsed;  /* what the loop said last, ... */
    int64_t last_told_at; /* ... and when it did */
    bool created;
    char run_id[27];
    char run_name[256];
    uint32_t attempt;
    bool dead; /* refused for good: nothing more is sent */
    struct ps_error death;
    bool closing, sender_done;
    int64_t retry_at;  /* the sender's next try after a failed one */
    int64_t close_by;  /* monotonic */
    int64_t closed_at; /* when close was called */
    int64_t gone_at;   /* since when nobody has been there, 0: somebody is */
    int64_t finish_by; /* the run's end is sent by then, whatever still waits */
    int final_state;
    char *final_reason;
    double final_elapsed;
    bool finished; /* the end was delivered, or none was asked for */
};

/* What will not get better by trying again. */
static bool hopeless(int code)
{
    switch (code) {
    case PS_INVALID_ARGUMENT:
    case PS_NOT_FOUND:
    case PS_ALREADY_EXISTS:
    case PS_PERMISSION_DENIED:
    case PS_FAILED_PRECONDITION:
    case PS_OUT_OF_RANGE:
    case PS_UNIMPLEMENTED:
        return true;
    default:
        return false;
    }
}

static int64_t after(double seconds)
{
    return ps_monotonic_ns() + (int64_t)(seconds * 1e9);
}

__attribute__((format(printf, 2, 3))) static void tell(struct paramsync_reporter *r, const char *format, ...)
{
    char line[1024];
    va_list args;
    if (!r->notice)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    r->notice(r->context, line);
}

/* Waits on cond until deadline (monotonic ns; INT64_MAX: none). The lock is held. */
static void wait_until(struct paramsync_reporter *r, pthread_cond_t *cond, int64_t deadline)
{
    if (deadline == INT64_MAX) {
        pthread_cond_wait(cond, &r->lock);
        return;
    }
    struct timespec at = {.tv_sec = deadline / PS_NS_PER_S, .tv_nsec = deadline % PS_NS_PER_S};
    pthread_cond_timedwait(cond, &r->lock, &at);
}

static void die(struct paramsync_reporter *r, const struct ps_error *why)
{
    pthread_mutex_lock(&r->lock);
    r->dead = true;
    r->death = *why;
    pthread_cond_broadcast(&r->told);
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
}

/* After a call that did not get through: when to try again. */
static void back_off(struct paramsync_reporter *r, const struct ps_error *why)
{
    r->retry_s = r->retry_s > 0 ? fmin(r->retry_s * 2, retry_most_s) : retry_first_s;
    pthread_mutex_lock(&r->lock);
    r->stats.connected = false;
    r->stats.outages += !r->away;
    if (why->code != PS_UNAVAILABLE)
        r->gone_at = 0;
    else if (!r->gone_at)
        r->gone_at = ps_monotonic_ns();
    r->retry_at = after(r->closing ? retry_closing_s : r->retry_s);
    pthread_mutex_unlock(&r->lock);
    if (!r->away)
        tell(r, "%s; training goes on, records wait", why->message);
    r->away = true;
}

static void got_through(struct paramsync_reporter *r)
{
    struct paramsync_reporter_stats stats;
    r->retry_s = 0;
    pthread_mutex_lock(&r->lock);
    r->retry_at = 0;
    r->gone_at = 0;
    if (!r->stats.connected)
        pthread_cond_broadcast(&r->wake); /* the uploader waits for this */
    r->stats.connected = true;
    pthread_mutex_unlock(&r->lock);
    if (!r->away)
        return;
    r->away = false;
    paramsync_reporter_stats(r, &stats);
    tell(r,
         "the sidecar at %s answers again: %llu points, %llu epochs, %llu checkpoints to send, %llu points "
         "dropped",
         r->client->address, (unsigned long long)stats.points_waiting,
         (unsigned long long)stats.epochs_waiting, (unsigned long long)stats.checkpoints_waiting,
         (unsigned long long)stats.points_dropped);
}

/* ---- The sender's steps: each returns 0, or a code after which the sender waits or gives up ---- */

static int send_create(struct paramsync_reporter *r, struct ps_error *err)
{
    ProtobufCMessage *answer;
    int code = ps_call(r->client, &r->sender_call, "/paramsync.v1.Runs/CreateRun", &r->request.base,
                       &paramsync__v1__create_run_response__descriptor, call_timeout_s, &answer, err);
    if (code)
        return code;
    const Paramsync__V1__Run *run = ((const Paramsync__V1__CreateRunResponse *)answer)->run;
    if (!run || strlen(run->id) != sizeof r->run_id - 1) {
        protobuf_c_message_free_unpacked(answer, NULL);
        return ps_fail(err, PS_FAILED_PRECONDITION, "the sidecar's answer to CreateRun holds no run");
    }
    pthread_mutex_lock(&r->lock);
    memcpy(r->run_id, run->id, sizeof r->run_id);
    snprintf(r->run_name, sizeof r->run_name, "%s", run->name);
    r->attempt = run->attempt;
    r->created = true;
    pthread_cond_broadcast(&r->told);
    pthread_mutex_unlock(&r->lock);
    protobuf_c_message_free_unpacked(answer, NULL);
    return 0;
}

static double elapsed_now(const struct paramsync_reporter *r)
{
    return r->last_elapsed + (double)(ps_monotonic_ns() - r->last_told_at) * 1e-9;
}

/* Resident memory, in bytes; 0 if it is not told. */
static uint64_t own_memory(void)
{
    char line[128] = "", *rest = line;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file)
        return 0;
    bool told = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    strtoull(line, &rest, 10); /* all of it, then what is resident */
    return told ? strtoull(rest, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

static int send_heartbeat(struct paramsync_reporter *r, struct ps_error *err)
{
    Paramsync__V1__HeartbeatRequest request = PARAMSYNC__V1__HEARTBEAT_REQUEST__INIT;
    ProtobufCMessage *answer;
    char *lines[log_kept];
    size_t count = 0;
    request.rss_bytes = own_memory();
    pthread_mutex_lock(&r->lock);
    request.run = r->run_id;
    request.rank = r->rank;
    request.attempt = r->attempt;
    request.elapsed_s = elapsed_now(r);
    request.step = r->last_step;
    request.points_sent = r->stats.points_sent;
    request.points_dropped = r->stats.points_dropped;
    request.points_waiting = r->stats.points_waiting;
    request.points_replayed = r->stats.points_replayed;
    request.spool_bytes = r->stats.spool_bytes;
    uint64_t first = r->log_next > log_kept ? r->log_next - log_kept : 1;
    if (first <= r->log_sent)
        first = r->log_sent + 1;
    for (uint64_t n = first; n < r->log_next; n++) {
        lines[count] = strdup(r->log[n % log_kept]);
        if (!lines[count])
            break;
        count++;
    }
    pthread_mutex_unlock(&r->lock);
    request.log = lines;
    request.n_log = count;
    request.first_line = count ? first : 0;
    request.wall_s = (double)ps_wall_ns() * 1e-9;
    int code = ps_call(r->client, &r->sender_call, "/paramsync.v1.Runs/Heartbeat", &request.base,
                       &paramsync__v1__heartbeat_response__descriptor, call_timeout_s, &answer, err);
    for (size_t i = 0; i < count; i++)
        free(lines[i]);
    if (code)
        return code;
    pthread_mutex_lock(&r->lock);
    if (count)
        r->log_sent = first + count - 1;
    pthread_mutex_unlock(&r->lock);
    protobuf_c_message_free_unpacked(answer, NULL);
    r->next_beat = after(r->heartbeat_s);
    return 0;
}

static int send_epochs(struct paramsync_reporter *r, struct ps_error *err)
{
    for (;;) {
        Paramsync__V1__ReportEpochRequest request;
        ProtobufCMessage *answer;
        struct paramsync_epoch epoch;
        pthread_mutex_lock(&r->lock);
        struct epoch_item *item = r->epochs; /* taken off by this thread alone */
        if (item)
            epoch = item->epoch;
        pthread_mutex_unlock(&r->lock);
        if (!item)
            return 0;
        epoch.attempt = r->attempt;
        ps_epoch_request(r->run_id, &epoch, &request);
        int code = ps_call(r->client, &r->sender_call, "/paramsync.v1.Metrics/ReportEpoch", &request.base,
                           &paramsync__v1__report_epoch_response__descriptor, call_timeout_s, &answer, err);
        if (code && (!hopeless(code) || code == PS_NOT_FOUND))
            return code;
        if (code)
            tell(r, "the sidecar refuses epoch %u: %s", epoch.epoch, err->message);
        else
            protobuf_c_message_free_unpacked(answer, NULL);
        pthread_mutex_lock(&r->lock);
        r->epochs = item->next;
        if (!r->epochs)
            r->epochs_end = &r->epochs;
        r->stats.epochs_waiting--;
        if (code)
            r->stats.epochs_refused++;
        else
            r->stats.epochs_sent++;
        pthread_mutex_unlock(&r->lock);
        free(item);
    }
}

static const char *intern(struct paramsync_reporter *r, const char *name);

/* The next batch that waits in the ring, with a number of its own; NULL: there is none, or no memory. */
static struct batch *take_from_ring(struct paramsync_reporter *r)
{
    pthread_mutex_lock(&r->lock);
    bool any = r->ring_count > 0;
    pthread_mutex_unlock(&r->lock);
    struct batch *batch = any ? calloc(1, sizeof *batch) : NULL;
    if (!batch) /* out of memory: the points wait where they are */
        return NULL;
    pthread_mutex_lock(&r->lock);
    while (r->ring_count && batch->count < batch_points) {
        batch->points[batch->count++] = r->ring[r->ring_first];
        r->ring_first = (r->ring_first + 1) % r->ring_size;
        r->ring_count--;
    }
    pthread_mutex_unlock(&r->lock);
    batch->seq = r->next_seq++;
    return batch;
}

/* The next batch of this run's spool that has not arrived; NULL: there is none. */
static struct batch *take_from_spool(struct paramsync_reporter *r)
{
    enum ps_spool_kind kind;
    void *data;
    size_t size;
    struct ps_error ignored = {0};
    while (r->spool && !ps_spool_read(r->spool, &kind, &data, &size, &ignored)) {
        Paramsync__V1__StepBatch *message =
            kind == PS_SPOOL_STEPS ? paramsync__v1__step_batch__unpack(NULL, size, data) : NULL;
        struct batch *batch = message && message->seq > r->spool_acked && message->n_points <= batch_points
                                  ? calloc(1, sizeof *batch)
                                  : NULL;
        free(data);
        if (batch) {
            batch->seq = message->seq;
            batch->spooled = true;
            pthread_mutex_lock(&r->lock);
            for (size_t i = 0; i < message->n_points; i++) {
                const Paramsync__V1__Point *point = message->points[i];
                const char *name = intern(r, point->name);
                if (name)
                    batch->points[batch->count++] =
                        (struct point){name, point->step, point->value, point->elapsed_s};
            }
            pthread_mutex_unlock(&r->lock);
        }
        if (message)
            paramsync__v1__step_batch__free_unpacked(message, NULL);
        if (batch)
            return batch;
    }
    return NULL;
}

static int by_seq(const void *a, const void *b)
{
    const struct batch *x = *(struct batch *const *)a, *y = *(struct batch *const *)b;
    return (x->seq > y->seq) - (x->seq < y->seq);
}

/* Fills free places of the window: from the spool, whose batches are older, then from the ring. */
static void fill_window(struct paramsync_reporter *r)
{
    struct batch *batch;
    while (r->window_count < window_batches && ((batch = take_from_spool(r)) || (batch = take_from_ring(r))))
        r->window[r->window_count++] = batch;
    /* Acknowledgements tell the number up to which batches have arrived. */
    qsort(r->window, r->window_count, sizeof *r->window, by_seq);
}

static void note_spool(struct paramsync_reporter *r)
{
    pthread_mutex_lock(&r->lock);
    r->stats.spool_bytes = r->spool ? ps_spool_bytes(r->spool) : 0;
    pthread_mutex_unlock(&r->lock);
}

static void drop_first_batch(struct paramsync_reporter *r, bool sent)
{
    struct batch *batch = r->window[0];
    memmove(r->window, r->window + 1, --r->window_count * sizeof *r->window);
    if (batch->spooled && batch->seq > r->spool_acked)
        r->spool_acked = batch->seq;
    pthread_mutex_lock(&r->lock);
    r->stats.points_waiting -= batch->count;
    if (sent)
        r->stats.points_sent += batch->count;
    else
        r->stats.points_dropped += batch->count;
    if (sent && (batch->spooled || batch->sends > 1))
        r->stats.points_replayed += batch->count;
    pthread_mutex_unlock(&r->lock);
    free(batch);
    if (r->spool && !r->window_count) {
        ps_spool_settle(r->spool);
        note_spool(r);
    }
}

/* points and pointers: room for a batch. The message borrows the batch's names. */
static void batch_message(const struct paramsync_reporter *r, const struct batch *batch,
                          Paramsync__V1__Point *points, Paramsync__V1__Point **pointers,
                          Paramsync__V1__StepBatch *message)
{
    paramsync__v1__step_batch__init(message);
    for (size_t i = 0; i < batch->count; i++) {
        paramsync__v1__point__init(&points[i]);
        points[i].name = ps_text(batch->points[i].name);
        points[i].step = batch->points[i].step;
        points[i].value = batch->points[i].value;
        points[i].elapsed_s = batch->points[i].elapsed_s;
        pointers[i] = &points[i];
    }
    message->run = (char *)r->run_id;
    message->rank = r->rank;
    message->attempt = r->attempt;
    message->seq = batch->seq;
    message->n_points = batch->count;
    message->points = pointers;
}

/* ---- The spool ---- */

static int spool_message(struct paramsync_reporter *r, enum ps_spool_kind kind,
                         const ProtobufCMessage *message, struct ps_error *err)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    uint8_t *data = malloc(size + 1);
    if (!data)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    protobuf_c_message_pack(message, data);
    int code = ps_spool_append(r->spool, kind, data, size, err);
    free(data);
    return code;
}

static int spool_batch(struct paramsync_reporter *r, struct batch *batch, struct ps_error *err)
{
    Paramsync__V1__StepBatch message;
    Paramsync__V1__Point *points = calloc(batch_points, sizeof *points);
    Paramsync__V1__Point **pointers = calloc(batch_points, sizeof *pointers);
    int code = points && pointers ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code) {
        batch_message(r, batch, points, pointers, &message);
        code = spool_message(r, PS_SPOOL_STEPS, &message.base, err);
    }
    free(points);
    free(pointers);
    return code;
}

static bool open_spool(struct paramsync_reporter *r)
{
    struct ps_error err = {0};
    if (!r->spool_dir || !r->created)
        return false;
    if (!r->spool &&
        ps_spool_open(r->spool_dir, r->run_id, r->attempt, r->rank, r->spool_max, &r->spool, &err)) {
        tell(r, "step points wait in memory only: %s", err.message);
        free(r->spool_dir);
        r->spool_dir = NULL;
    }
    return r->spool != NULL;
}

/* Moves what waits in the window and the ring to the disk, as far as it has room. */
static void spool_out(struct paramsync_reporter *r)
{
    struct ps_error err = {0};
    size_t kept = 0;
    int code = 0;
    if (!open_spool(r))
        return;
    for (size_t i = 0; i < r->window_count; i++) {
        struct batch *batch = r->window[i];
        if (!batch->spooled && !code)
            code = spool_batch(r, batch, &err);
        if (!batch->spooled && code)
            r->window[kept++] = batch;
        else
            free(batch);
    }
    r->window_count = kept;
    /* What was read and not acknowledged is read again, and what was is skipped then. */
    ps_spool_rewind(r->spool);
    while (!code && r->window_count < window_batches) {
        struct batch *batch = take_from_ring(r);
        if (!batch)
            break;
        code = spool_batch(r, batch, &err);
        if (code)
            r->window[r->window_count++] = batch;
        else
            free(batch);
    }
    if (code && !r->spool_full)
        tell(r, "%s: further step points wait in memory, and the oldest are dropped when that is full",
             err.message);
    r->spool_full = code != 0;
    note_spool(r);
}

static int send_batch(struct paramsync_reporter *r, struct ps_rpc_stream *stream, struct batch *batch,
                      Paramsync__V1__Point *points, Paramsync__V1__Point **pointers)
{
    Paramsync__V1__StepBatch message;
    struct ps_error ignored = {0};
    batch_message(r, batch, points, pointers, &message);
    batch->sends++;
    return ps_rpc_stream_send(stream, &message.base, &ignored);
}

/* Sends the whole window on one stream and takes the acknowledgements. */
static int send_window(struct paramsync_reporter *r, struct ps_error *err)
{
    struct ps_rpc_stream *stream;
    struct ps_error ignored = {0};
    ProtobufCMessage *message;
    Paramsync__V1__Point *points = calloc(batch_points, sizeof *points);
    Paramsync__V1__Point **pointers = calloc(batch_points, sizeof *pointers);
    int code = points && pointers
                   ? ps_call_open(r->client, &r->sender_call, "/paramsync.v1.Metrics/ReportSteps",
                                  &paramsync__v1__step_ack__descriptor, 2 * call_timeout_s, &stream, err)
                   : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code) {
        /* A failed send means that the call is over: recv tells why. */
        int over = 0;
        for (size_t i = 0; i < r->window_count && !over; i++)
            over = send_batch(r, stream, r->window[i], points, pointers);
        if (!over)
            ps_rpc_stream_close_send(stream, &ignored);
        while ((code = ps_rpc_stream_recv(stream, &message, err)) > 0) {
            uint64_t seq = ((const Paramsync__V1__StepAck *)message)->seq;
            protobuf_c_message_free_unpacked(message, NULL);
            while (r->window_count && r->window[0]->seq <= seq)
                drop_first_batch(r, true);
        }
        ps_call_free(&r->sender_call, stream);
        if (!code && r->window_count)
            code = ps_fail(err, PS_UNAVAILABLE,
                           "the sidecar ended the stream before it had acknowledged everything");
    }
    free(points);
    free(pointers);
    return code ? ps_call_explain(r->client, err) : 0;
}

static int send_points(struct paramsync_reporter *r, struct ps_error *err)
{
    for (int rounds = 0; rounds < 4; rounds++) { /* then epochs and heartbeats have their turn */
        fill_window(r);
        if (!r->window_count)
            break;
        int code = send_window(r, err);
        if (hopeless(code) && code != PS_NOT_FOUND) {
            tell(r, "the sidecar refuses %zu step points: %s", r->window[0]->count, err->message);
            drop_first_batch(r, false);
            code = 0;
        }
        if (code)
            return code;
    }
    r->next_flush = after(r->flush_s);
    return 0;
}

/* ---- What an ended process left in the spool's folder ---- */

static int send_left_steps(struct paramsync_reporter *r, void *const *data, const size_t *sizes, size_t count,
                           struct ps_error *err)
{
    struct ps_rpc_stream *stream;
    struct ps_error ignored = {0};
    ProtobufCMessage *message;
    uint64_t points = 0;
    size_t acked = 0;
    int code = ps_call_open(r->client, &r->sender_call, "/paramsync.v1.Metrics/ReportSteps",
                            &paramsync__v1__step_ack__descriptor, 2 * call_timeout_s, &stream, err);
    if (code)
        return code;
    int over = 0;
    for (size_t i = 0; i < count && !over; i++) {
        Paramsync__V1__StepBatch *batch = paramsync__v1__step_batch__unpack(NULL, sizes[i], data[i]);
        if (batch) {
            over = ps_rpc_stream_send(stream, &batch->base, &ignored);
            points += batch->n_points;
            paramsync__v1__step_batch__free_unpacked(batch, NULL);
        }
    }
    if (!over)
        ps_rpc_stream_close_send(stream, &ignored);
    while ((code = ps_rpc_stream_recv(stream, &message, err)) > 0) {
        acked++;
        protobuf_c_message_free_unpacked(message, NULL);
    }
    ps_call_free(&r->sender_call, stream);
    if (code)
        return ps_call_explain(r->client, err);
    r->leftover_points += acked ? points : 0;
    return 0;
}

static int send_left_message(struct paramsync_reporter *r, enum ps_spool_kind kind, const void *data,
                             size_t size, struct ps_error *err)
{
    const bool epoch = kind == PS_SPOOL_EPOCH;
    const ProtobufCMessageDescriptor *type = epoch ? &paramsync__v1__report_epoch_request__descriptor
                                                   : &paramsync__v1__finish_run_request__descriptor;
    ProtobufCMessage *answer, *request = protobuf_c_message_unpack(type, NULL, size, data);
    if (!request)
        return 0;
    int code =
        ps_call(r->client, &r->sender_call,
                epoch ? "/paramsync.v1.Metrics/ReportEpoch" : "/paramsync.v1.Runs/FinishRun", request,
                epoch ? &paramsync__v1__report_epoch_response__descriptor : &paramsync__v1__run__descriptor,
                call_timeout_s, &answer, err);
    if (!code)
        protobuf_c_message_free_unpacked(answer, NULL);
    protobuf_c_message_free_unpacked(request, NULL);
    return code;
}

/* One piece of it. Records that the sidecar refuses (their run was deleted) are let go of. */
static int send_leftovers(struct paramsync_reporter *r, struct ps_error *err)
{
    void *data[window_batches];
    size_t sizes[window_batches], count = 0;
    enum ps_spool_kind kind = PS_SPOOL_STEPS;
    int code = 0;
    if (!r->leftover) {
        code = ps_spool_take_over(r->spool_dir, &r->leftover, err);
        r->no_leftovers = code != 0;
        if (code)
            return 0;
        r->leftover_points = 0;
    }
    bool end = false;
    while (count < window_batches && kind == PS_SPOOL_STEPS && !end) {
        end = ps_spool_read(r->leftover, &kind, &data[count], &sizes[count], err) != 0;
        if (!end && kind == PS_SPOOL_STEPS)
            count++;
    }
    if (count)
        code = send_left_steps(r, data, sizes, count, err);
    if (!end && kind != PS_SPOOL_STEPS) {
        if (!code || hopeless(code))
            code = send_left_message(r, kind, data[count], sizes[count], err);
        free(data[count]);
    }
    for (size_t i = 0; i < count; i++)
        free(data[i]);
    if (hopeless(code)) {
        tell(r, "of what was left in %s the sidecar refuses some: %s", ps_spool_path(r->leftover),
             err->message);
        code = 0;
    }
    if (!code && !end)
        return 0;
    if (!code) {
        if (r->leftover_points)
            tell(r, "sent %llu step points that were left in %s", (unsigned long long)r->leftover_points,
                 ps_spool_path(r->leftover));
        ps_spool_settle(r->leftover);
    }
    r->leftover = ps_spool_close(r->leftover);
    return code;
}

static int send_finish(struct paramsync_reporter *r, struct ps_error *err)
{
    Paramsync__V1__FinishRunRequest request = PARAMSYNC__V1__FINISH_RUN_REQUEST__INIT;
    ProtobufCMessage *answer;
    pthread_mutex_lock(&r->lock);
    request.run = r->run_id;
    request.attempt = r->attempt;
    request.state = (Paramsync__V1__RunState)r->final_state;
    request.reason = ps_text(r->final_reason);
    request.elapsed_s = r->final_elapsed;
    pthread_mutex_unlock(&r->lock);
    int code = ps_call(r->client, &r->sender_call, "/paramsync.v1.Runs/FinishRun", &request.base,
                       &paramsync__v1__run__descriptor, call_timeout_s, &answer, err);
    if (!code)
        protobuf_c_message_free_unpacked(answer, NULL);
    return code;
}

/* ---- The sender's thread ---- */

enum work { work_none, work_create, work_send, work_finish, work_stop };

/* Decides under the lock; *ret_until is when to look again if there is nothing to do. */
static enum work next_work(struct paramsync_reporter *r, int64_t now, int64_t *ret_until)
{
    int64_t until = INT64_MAX;
    bool points = r->ring_count || r->window_count || (r->spool && ps_spool_unread(r->spool));
    bool lines = r->log_sent + 1 < r->log_next;
    bool empty = !r->epochs && !points && !lines;
    if (r->closing) {
        bool uploads = r->checkpoints && now < r->finish_by;
        int64_t alone_at = r->gone_at > r->closed_at ? r->gone_at : r->closed_at;
        if (now >= r->close_by || r->dead || (r->gone_at && now - alone_at > (int64_t)(absent_s * 1e9)))
            return work_stop;
        if (r->created && empty && !r->finished && !uploads && now >= r->retry_at)
            return work_finish;
        if (r->created && empty && r->finished && !r->checkpoints)
            return work_stop;
        until = uploads ? r->finish_by : r->close_by;
    }
    if (r->dead) {
        *ret_until = until;
        return work_none;
    }
    if (r->retry_at > now) {
        *ret_until = r->retry_at < until ? r->retry_at : until;
        return work_none;
    }
    if (!r->created)
        return work_create;
    if (now >= r->next_beat || r->epochs || (r->closing && lines) ||
        (r->spool_dir && !r->no_leftovers && !r->closing) ||
        (points && (now >= r->next_flush || r->closing)) ||
        r->ring_count >= (size_t)batch_points * window_batches / 2)
        return work_send;
    if (points && r->next_flush < until)
        until = r->next_flush;
    if (r->next_beat < until)
        until = r->next_beat;
    *ret_until = until;
    return work_none;
}

static int do_send(struct paramsync_reporter *r, struct ps_error *err)
{
    int code = 0;
    pthread_mutex_lock(&r->lock);
    bool last_lines = r->closing && r->log_sent + 1 < r->log_next;
    pthread_mutex_unlock(&r->lock);
    if (ps_monotonic_ns() >= r->next_beat || last_lines)
        code = send_heartbeat(r, err);
    if (!code)
        code = send_epochs(r, err);
    if (!code)
        code = send_points(r, err);
    if (!code && r->spool_dir && !r->no_leftovers && !r->closing)
        code = send_leftovers(r, err);
    return code;
}

static void *sender_main(void *argument)
{
    struct paramsync_reporter *r = argument;
    for (;;) {
        struct ps_error err = {0};
        int64_t until = INT64_MAX;
        int code = 0;
        pthread_mutex_lock(&r->lock);
        enum work work;
        while ((work = next_work(r, ps_monotonic_ns(), &until)) == work_none)
            wait_until(r, &r->wake, until);
        pthread_mutex_unlock(&r->lock);
        if (work == work_stop)
            break;
        if (work == work_create)
            code = send_create(r, &err);
        else if (work == work_send)
            code = do_send(r, &err);
        else
            code = send_finish(r, &err);
        if (!code) {
            got_through(r);
        } else if (hopeless(code) || (code == PS_UNAUTHENTICATED && work == work_create)) {
            /* Only the run as a whole gets here: refused at its creation, unknown by now, or not to be ended.
             */
            tell(r, "the sidecar at %s refuses this run: %s; nothing more is reported", r->client->address,
                 err.message);
            die(r, &err);
        } else if (code != PS_CANCELLED) {
            back_off(r, &err);
            spool_out(r);
        } else {
            pthread_mutex_lock(&r->lock);
            r->retry_at = after(retry_first_s);
            pthread_mutex_unlock(&r->lock);
        }
        if (!code && work == work_finish) {
            pthread_mutex_lock(&r->lock);
            r->finished = true;
            pthread_mutex_unlock(&r->lock);
        }
    }
    pthread_mutex_lock(&r->lock);
    r->sender_done = true;
    pthread_cond_broadcast(&r->told);
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- The uploader's thread ---- */

static void pop_checkpoint(struct paramsync_reporter *r, bool sent)
{
    struct checkpoint_item *item = r->checkpoints;
    r->checkpoints = item->next;
    if (!r->checkpoints)
        r->checkpoints_end = &r->checkpoints;
    r->stats.checkpoints_waiting--;
    if (sent)
        r->stats.checkpoints_sent++;
    else
        r->stats.checkpoints_refused++;
    free(item);
    pthread_cond_broadcast(&r->wake); /* the sender may be waiting for the last one to end the run */
}

/* By its path where the sidecar takes it so, else every byte of it. */
static int hand_over(struct paramsync_reporter *r, const struct paramsync_put *put,
                     struct paramsync_checkpoint **ret_checkpoint, struct ps_error *err)
{
    char *absolute = r->may_register ? realpath(put->path, NULL) : NULL;
    if (absolute) {
        struct paramsync_put there = *put;
        struct ps_error why = {0};
        there.path = absolute;
        int code = ps_register(r->client, &r->uploader_call, r->run_id, &there, ret_checkpoint, &why);
        free(absolute);
        if (code == 0)
            return 0;
        /* Off, unknown to an old sidecar, or elsewhere than it looks: then it is sent, and so are the next.
         */
        r->may_register = !hopeless(code);
        if (!hopeless(code)) {
            *err = why;
            return code;
        }
    }
    return ps_put(r->client, &r->uploader_call, r->run_id, put, ret_checkpoint, err);
}

static void *uploader_main(void *argument)
{
    struct paramsync_reporter *r = argument;
    double retry = 0;
    int64_t not_before = 0;
    int damaged = 0;
    pthread_mutex_lock(&r->lock);
    for (;;) {
        int64_t now = ps_monotonic_ns();
        if (r->dead || (r->closing && (!r->checkpoints || r->sender_done || now >= r->close_by)))
            break;
        /* While the sender gets nothing through, the file need not be read and hashed for nothing. */
        if (!r->created || !r->checkpoints || !r->stats.connected || now < not_before) {
            wait_until(r, &r->wake, now < not_before ? not_before : INT64_MAX);
            continue;
        }
        struct paramsync_put put = r->checkpoints->put; /* taken off by this thread alone */
        struct paramsync_checkpoint *checkpoint = NULL;
        struct ps_error err = {0};
        put.attempt = r->attempt;
        pthread_mutex_unlock(&r->lock);
        int code = hand_over(r, &put, &checkpoint, &err);
        paramsync_checkpoint_free(checkpoint);
        damaged += code == PS_DATA_LOSS;
        bool refused = hopeless(code) || damaged > damage_retries;
        if (refused)
            tell(r, "checkpoint %s was not handed over: %s", put.path, err.message);
        pthread_mutex_lock(&r->lock);
        if (!code || refused) {
            pop_checkpoint(r, !code);
            retry = 0;
            damaged = 0;
        } else {
            retry = retry > 0 ? fmin(retry * 2, retry_most_s) : retry_first_s;
            not_before = after(r->closing ? retry_closing_s : retry);
        }
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- Interface ---- */

static int start_thread(pthread_t *thread, void *(*run)(void *), void *argument, struct ps_error *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the program's own threads */
    int failed = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? ps_fail_errno(err, failed, "starting the reporter's thread") : 0;
}

static void destroy(struct paramsync_reporter *r)
{
    while (r->window_count)
        free(r->window[--r->window_count]);
    for (size_t i = 0; i < log_kept; i++)
        free(r->log[i]);
    ps_spool_close(r->spool);
    ps_spool_close(r->leftover);
    free(r->spool_dir);
    for (size_t i = 0; i < name_slots; i++)
        free(r->names[i]);
    while (r->epochs) {
        struct epoch_item *item = r->epochs;
        r->epochs = item->next;
        free(item);
    }
    while (r->checkpoints) {
        struct checkpoint_item *item = r->checkpoints;
        r->checkpoints = item->next;
        free(item);
    }
    if (r->has_request)
        ps_create_request_done(&r->request);
    paramsync_disconnect(r->client);
    pthread_cond_destroy(&r->wake);
    pthread_cond_destroy(&r->told);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->sender_call.lock);
    pthread_mutex_destroy(&r->uploader_call.lock);
    free(r->final_reason);
    free(r->strings);
    free(r->ring);
    free(r);
}

/* Copies text to *at and moves it on. */
static const char *keep(char **at, const char *text)
{
    char *copy = *at;
    size_t n = text ? strlen(text) + 1 : 1;
    memcpy(copy, text ? text : "", n);
    *at += n;
    return copy;
}

static size_t kept(const char *text)
{
    return text ? strlen(text) + 1 : 1;
}

/* The request outlives open, so its strings are copied into one block, arrays first. */
static int keep_request(struct paramsync_reporter *r, const struct paramsync_new_run *run,
                        struct ps_error *err)
{
    struct paramsync_new_run copy = *run;
    size_t arrays = run->config_count * sizeof(struct paramsync_pair) + run->tag_count * sizeof(char *);
    size_t size = arrays + kept(run->name) + kept(run->model) + kept(run->dataset) + kept(run->dataset_hash) +
                  kept(run->device) + kept(run->commit) + kept(run->notes) + kept(run->request_id);
    for (size_t i = 0; i < run->config_count; i++)
        size += kept(run->config[i].key) + kept(run->config[i].value);
    for (size_t i = 0; i < run->tag_count; i++)
        size += kept(run->tags[i]);
    r->strings = malloc(size);
    if (!r->strings)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    struct paramsync_pair *config = (struct paramsync_pair *)(void *)r->strings;
    const char **tags = (const char **)(void *)(config + run->config_count);
    char *at = r->strings + arrays;
    copy.name = keep(&at, run->name);
    copy.model = keep(&at, run->model);
    copy.dataset = keep(&at, run->dataset);
    copy.dataset_hash = keep(&at, run->dataset_hash);
    copy.device = keep(&at, run->device);
    copy.commit = keep(&at, run->commit);
    copy.notes = keep(&at, run->notes);
    copy.request_id = keep(&at, run->request_id);
    for (size_t i = 0; i < run->config_count; i++) {
        config[i].key = keep(&at, run->config[i].key);
        config[i].value = keep(&at, run->config[i].value);
    }
    for (size_t i = 0; i < run->tag_count; i++)
        tags[i] = keep(&at, run->tags[i]);
    copy.config = config;
    copy.tags = tags;
    if (!*copy.request_id) {
        ps_make_id(r->request_id);
        copy.request_id = r->request_id;
    }
    int code = ps_create_request(&copy, &r->request, err);
    r->has_request = !code;
    return code;
}

static struct paramsync_reporter *allocate(const struct paramsync_reporter_options *options)
{
    struct paramsync_reporter *r = calloc(1, sizeof *r);
    pthread_condattr_t attributes;
    if (!r)
        return NULL;
    r->rank = options->rank;
    r->heartbeat_s = options->heartbeat_s > 0 ? options->heartbeat_s : 5;
    r->flush_s = options->flush_s > 0 ? options->flush_s : 0.5;
    r->notice = options->notice;
    r->context = options->context;
    r->next_seq = 1;
    r->log_next = 1;
    r->spool_max = options->spool_bytes ? options->spool_bytes : spool_default;
    r->may_register = !options->no_register;
    r->last_told_at = ps_monotonic_ns();
    r->epochs_end = &r->epochs;
    r->checkpoints_end = &r->checkpoints;
    r->ring_size = options->ring_points ? options->ring_points : 262144;
    r->ring = calloc(r->ring_size, sizeof *r->ring);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&r->wake, &attributes);
    pthread_cond_init(&r->told, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&r->lock, NULL);
    pthread_mutex_init(&r->sender_call.lock, NULL);
    pthread_mutex_init(&r->uploader_call.lock, NULL);
    if (options->spool_dir && *options->spool_dir)
        r->spool_dir = strdup(options->spool_dir);
    if (!r->ring || (options->spool_dir && *options->spool_dir && !r->spool_dir)) {
        destroy(r);
        return NULL;
    }
    return r;
}

static void stop(struct paramsync_reporter *r, double timeout_s);

static int open_reporter(const struct paramsync_reporter_options *options,
                         struct paramsync_reporter **ret_reporter, struct ps_error *err)
{
    bool joins = options->run_id && *options->run_id;
    struct paramsync_error outer = {0};
    int code;
    if (joins && strlen(options->run_id) != sizeof((*ret_reporter)->run_id) - 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "run id %.40s: must be 26 characters", options->run_id);
    if (!joins && options->rank != 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "rank %u needs the id of the run that rank 0 created",
                       options->rank);
    if (!joins && (code = ps_check_run_name(options->run.name ? options->run.name : "", "run name", err)))
        return code;
    struct paramsync_reporter *r = allocate(options);
    if (!r)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    code = paramsync_connect(&options->connection, &r->client, &outer);
    if (code)
        ps_fail(err, code, "%s", outer.message);
    if (!code)
        r->may_register = r->may_register && ps_is_this_machine(r->client);
    if (!code && joins) {
        memcpy(r->run_id, options->run_id, sizeof r->run_id);
        r->attempt = options->attempt;
        r->created = true;
    } else if (!code) {
        code = keep_request(r, &options->run, err);
    }
    if (!code)
        code = start_thread(&r->sender, sender_main, r, err);
    if (code) {
        destroy(r);
        return code;
    }
    r->has_sender = true;
    if (!joins) {
        int64_t until = after(options->open_timeout_s > 0 ? options->open_timeout_s : 3);
        pthread_mutex_lock(&r->lock);
        while (!r->created && !r->dead && ps_monotonic_ns() < until)
            wait_until(r, &r->told, until);
        if (r->dead) {
            *err = r->death;
            code = err->code;
        }
        pthread_mutex_unlock(&r->lock);
    }
    if (code) {
        stop(r, 0);
        destroy(r);
        return code;
    }
    *ret_reporter = r;
    return 0;
}

int paramsync_reporter_open(const struct paramsync_reporter_options *options,
                            struct paramsync_reporter **ret_reporter, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, open_reporter(options, ret_reporter, &inner));
}

void paramsync_reporter_run(struct paramsync_reporter *r, char ret_id[27], uint32_t *ret_attempt,
                            char *ret_name, size_t name_size)
{
    pthread_mutex_lock(&r->lock);
    memcpy(ret_id, r->run_id, sizeof r->run_id);
    if (ret_attempt)
        *ret_attempt = r->attempt;
    if (ret_name && name_size)
        snprintf(ret_name, name_size, "%s", r->run_name);
    pthread_mutex_unlock(&r->lock);
}

static bool name_allowed(const char *name)
{
    size_t n = strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./-");
    return n >= 1 && n <= 128 && name[n] == '\0';
}

/* The one copy of a series' name, or NULL (a bad name, too many names, no memory). The lock is held. */
static const char *intern(struct paramsync_reporter *r, const char *name)
{
    size_t slot = ps_hash64(name, strlen(name), 0) % name_slots;
    while (r->names[slot] && strcmp(r->names[slot], name) != 0)
        slot = (slot + 1) % name_slots;
    if (!r->names[slot] && r->name_count < name_slots / 2 && name_allowed(name)) {
        r->names[slot] = strdup(name);
        r->name_count += r->names[slot] != NULL;
    }
    return r->names[slot];
}

static void told_time(struct paramsync_reporter *r, uint64_t step, double elapsed_s)
{
    if (step > r->last_step)
        r->last_step = step;
    if (isfinite(elapsed_s) && elapsed_s >= r->last_elapsed) {
        r->last_elapsed = elapsed_s;
        r->last_told_at = ps_monotonic_ns();
    }
}

void paramsync_reporter_point(struct paramsync_reporter *r, const char *name, uint64_t step, double value,
                              double elapsed_s)
{
    pthread_mutex_lock(&r->lock);
    const char *kept_name = r->dead ? NULL : intern(r, name);
    if (!kept_name) {
        r->stats.points_dropped++;
        pthread_mutex_unlock(&r->lock);
        return;
    }
    told_time(r, step, elapsed_s);
    if (r->ring_count == r->ring_size) {
        r->ring_first = (r->ring_first + 1) % r->ring_size;
        r->ring_count--;
        r->stats.points_dropped++;
        r->stats.points_waiting--;
    }
    r->ring[(r->ring_first + r->ring_count) % r->ring_size] =
        (struct point){kept_name, step, value, elapsed_s};
    r->ring_count++;
    r->stats.points_waiting++;
    /* The first point after a pause starts the flush timer; a half full window does not wait for it. */
    if (r->ring_count == 1 || r->ring_count == (size_t)batch_points * window_batches / 2)
        pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
}

void paramsync_reporter_epoch(struct paramsync_reporter *r, const struct paramsync_epoch *epoch)
{
    const size_t cells =
        epoch->confusion && epoch->classes <= 100 ? (size_t)epoch->classes * epoch->classes : 0;
    struct epoch_item *item = calloc(1, sizeof *item + cells * sizeof *item->confusion);
    pthread_mutex_lock(&r->lock);
    if (!item || r->dead || r->stats.epochs_waiting >= queue_max) {
        r->stats.epochs_refused++;
        pthread_mutex_unlock(&r->lock);
        free(item);
        return;
    }
    item->epoch = *epoch;
    item->epoch.confusion = cells ? item->confusion : NULL;
    if (cells)
        memcpy(item->confusion, epoch->confusion, cells * sizeof *item->confusion);
    *r->epochs_end = item;
    r->epochs_end = &item->next;
    r->stats.epochs_waiting++;
    told_time(r, epoch->step, epoch->elapsed_s);
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
}

void paramsync_reporter_log(struct paramsync_reporter *r, const char *line)
{
    size_t size = strlen(line);
    if (size > log_line_max)
        size = log_line_max;
    char *copy = strndup(line, size);
    if (!copy)
        return;
    while (size && !ps_utf8_valid(copy, size)) /* cut within a character, or never text */
        copy[--size] = '\0';
    pthread_mutex_lock(&r->lock);
    char **place = &r->log[r->log_next++ % log_kept];
    free(*place);
    *place = copy;
    pthread_mutex_unlock(&r->lock);
}

static struct checkpoint_item *copy_checkpoint(const struct paramsync_put *put)
{
    size_t size = kept(put->path) + kept(put->filename) + kept(put->format);
    struct checkpoint_item *item = calloc(1, sizeof *item + size);
    if (!item)
        return NULL;
    char *at = (char *)(item + 1);
    item->put = *put;
    item->put.progress = NULL;
    item->put.path = keep(&at, put->path);
    item->put.filename = put->filename ? keep(&at, put->filename) : NULL;
    item->put.format = put->format ? keep(&at, put->format) : NULL;
    return item;
}

void paramsync_reporter_checkpoint(struct paramsync_reporter *r, const struct paramsync_put *put)
{
    struct checkpoint_item *item = copy_checkpoint(put);
    struct ps_error ignored = {0};
    pthread_mutex_lock(&r->lock);
    if (item && !r->has_uploader)
        r->has_uploader = start_thread(&r->uploader, uploader_main, r, &ignored) == 0;
    if (!item || r->dead || !r->has_uploader || r->stats.checkpoints_waiting >= queue_max) {
        r->stats.checkpoints_refused++;
        pthread_mutex_unlock(&r->lock);
        free(item);
        return;
    }
    *r->checkpoints_end = item;
    r->checkpoints_end = &item->next;
    r->stats.checkpoints_waiting++;
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
}

void paramsync_reporter_stats(struct paramsync_reporter *r, struct paramsync_reporter_stats *ret_stats)
{
    pthread_mutex_lock(&r->lock);
    *ret_stats = r->stats;
    pthread_mutex_unlock(&r->lock);
}

/* Ends both threads, within timeout_s and the moment that a cancelled call takes. */
static void stop(struct paramsync_reporter *r, double timeout_s)
{
    pthread_mutex_lock(&r->lock);
    r->closing = true;
    r->closed_at = ps_monotonic_ns();
    r->close_by = after(timeout_s);
    r->finish_by = after(fmax(timeout_s - fmin(2, timeout_s / 4), 0));
    r->retry_at = 0; /* at once, not when the next try would have been due */
    pthread_cond_broadcast(&r->wake);
    while (r->has_sender && !r->sender_done && ps_monotonic_ns() < r->close_by)
        wait_until(r, &r->told, r->close_by);
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
    ps_control_cancel(&r->sender_call);
    ps_control_cancel(&r->uploader_call);
    if (r->has_sender)
        pthread_join(r->sender, NULL);
    if (r->has_uploader)
        pthread_join(r->uploader, NULL);
}

/* With both threads ended: what was not delivered goes to the spool. True: all of it lies there. */
static bool keep_for_later(struct paramsync_reporter *r)
{
    struct ps_error err = {0};
    const struct paramsync_reporter_stats *s = &r->stats;
    int code = 0;
    if (!s->points_waiting && !s->epochs_waiting && r->finished)
        return false;
    if (!open_spool(r))
        return false;
    do
        spool_out(r);
    while (r->ring_count && !r->spool_full);
    for (struct epoch_item *item = r->epochs; item && !code; item = item->next) {
        Paramsync__V1__ReportEpochRequest request;
        struct paramsync_epoch epoch = item->epoch;
        epoch.attempt = r->attempt;
        ps_epoch_request(r->run_id, &epoch, &request);
        code = spool_message(r, PS_SPOOL_EPOCH, &request.base, &err);
    }
    if (!code && !r->finished) {
        Paramsync__V1__FinishRunRequest request = PARAMSYNC__V1__FINISH_RUN_REQUEST__INIT;
        request.run = r->run_id;
        request.attempt = r->attempt;
        request.state = (Paramsync__V1__RunState)r->final_state;
        request.reason = ps_text(r->final_reason);
        request.elapsed_s = r->final_elapsed;
        code = spool_message(r, PS_SPOOL_FINISH, &request.base, &err);
    }
    if (code)
        tell(r, "%s", err.message);
    return !code && !r->window_count && !r->ring_count;
}

int paramsync_reporter_close(struct paramsync_reporter *r, int state, const char *reason, double timeout_s,
                             struct paramsync_reporter_stats *ret_stats, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    int code = 0;
    if (!r)
        return 0;
    pthread_mutex_lock(&r->lock);
    r->final_state = state;
    r->final_elapsed = elapsed_now(r);
    r->final_reason = reason ? strdup(reason) : NULL;
    r->finished = state == PARAMSYNC_RUN_UNSPECIFIED || r->rank != 0;
    pthread_mutex_unlock(&r->lock);
    stop(r, timeout_s);
    const struct paramsync_reporter_stats *s = &r->stats;
    bool kept = !r->dead && keep_for_later(r);
    if (r->dead)
        code = ps_fail(&inner, r->death.code, "%s", r->death.message);
    else if (s->points_waiting || s->epochs_waiting || s->checkpoints_waiting || !r->created || !r->finished)
        code = ps_fail(&inner, PS_DEADLINE_EXCEEDED,
                       "not delivered to the sidecar at %.200s: %llu step points, %llu epochs, %llu "
                       "checkpoints%s%s%.200s%s",
                       r->client->address, (unsigned long long)s->points_waiting,
                       (unsigned long long)s->epochs_waiting, (unsigned long long)s->checkpoints_waiting,
                       !r->created    ? "; the run was never created"
                       : !r->finished ? "; the run's end"
                                      : "",
                       kept ? "; points and epochs are kept in " : "", kept ? r->spool_dir : "",
                       kept ? " for the next run that reports from there" : "");
    if (ret_stats)
        *ret_stats = *s;
    destroy(r);
    return ps_give(err, &inner, code);
}
