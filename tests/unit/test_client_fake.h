/* SPDX-License-Identifier: Apache-2.0
 * A sidecar in this process for the tests of the client: keeps everything in memory across "restarts", and
 * misbehaves on demand. Included by the tests, one translation unit each. */
#ifndef PARAMSYNC_TESTS_CLIENT_FAKE_H
#define PARAMSYNC_TESTS_CLIENT_FAKE_H

#include "services/base/clock.h"
#include "services/base/digest.h"
#include "services/rpc/rpc.h"

#include "paramsync/v1/checkpoints.pb-c.h"
#include "paramsync/v1/metrics.pb-c.h"
#include "paramsync/v1/runs.pb-c.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAKE_POINTS = 1 << 17, FAKE_EPOCHS = 64, FAKE_BLOBS = 4, FAKE_RUNS = 8 };

struct fake_point {
    uint32_t rank;
    uint64_t step;
    double value;
    char name[32];
};

struct fake {
    struct ps_rpc_server *server;
    char listen[64];
    _Atomic(const char *) token; /* NULL: open */

    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t changed;
    /* What was stored. */
    char request_ids[FAKE_RUNS][32];
    char names[FAKE_RUNS][64];
    size_t runs;
    struct fake_point *points;
    size_t point_count;
    uint64_t last_seq[4]; /* per rank */
    size_t replays;
    Paramsync__V1__EpochPoint epochs[FAKE_EPOCHS];
    size_t epoch_count, epoch_calls;
    struct {
        char sha256[65], filename[64], format[16];
        uint8_t *data;
        size_t size;
        uint32_t epoch;
    } blobs[FAKE_BLOBS];
    _Atomic size_t blob_count;
    size_t heartbeats;
    _Atomic int final_state;
    _Atomic double final_elapsed;
    size_t points_at_finish, epochs_at_finish, blobs_at_finish;

    /* How to misbehave. */
    double delay_s;              /* before each answer */
    size_t lose_acks;            /* store this many batches, then end the call instead of acknowledging */
    _Atomic int refuse_create;   /* a ps_code */
    _Atomic int refuse_epoch;    /* epoch that is refused as an INVALID_ARGUMENT */
    _Atomic int refuse_put;      /* a ps_code for the next put, then cleared */
    _Atomic size_t pull_stop_at; /* bytes after which PullCheckpoint breaks off once; 0: never */
    _Atomic size_t
        pull_flip_at; /* byte of which one bit is flipped after its crc32c was taken, once; 0: never */
    _Atomic size_t pull_spoil_at; /* the same before the crc32c was taken: only the sha256 can tell; stays */
    _Atomic size_t pulled_bytes;
};

static const char fake_run_id[] = "01ARZ3NDEKTSV4RRFFQ69G5FAV";

/* Makes visible to the test what the handlers stored; their order comes from the calls themselves. */
static inline void fake_see(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    pthread_mutex_unlock(&f->lock);
}

static void fake_delay(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    double delay = f->delay_s;
    pthread_mutex_unlock(&f->lock);
    if (delay > 0) { /* a slow server is what is being played */
        struct timespec t = {.tv_sec = (time_t)delay,
                             .tv_nsec = (long)((delay - (double)(time_t)delay) * 1e9)};
        nanosleep(&t, NULL);
    }
}

static void fake_fill_run(struct fake *f, size_t index, Paramsync__V1__Run *run)
{
    paramsync__v1__run__init(run);
    run->id = (char *)fake_run_id;
    run->name = f->names[index];
    run->attempt = 1;
    run->state = PARAMSYNC__V1__RUN_STATE__RUN_STATE_RUNNING;
    run->world_size = 2;
    run->model = "resnet18";
}

static int fake_create(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                       struct ps_error *err)
{
    struct fake *f = context;
    const Paramsync__V1__CreateRunRequest *m = (const Paramsync__V1__CreateRunRequest *)message;
    Paramsync__V1__CreateRunResponse answer = PARAMSYNC__V1__CREATE_RUN_RESPONSE__INIT;
    Paramsync__V1__Run run;
    size_t i;
    fake_delay(f);
    pthread_mutex_lock(&f->lock);
    if (f->refuse_create) {
        int code = f->refuse_create;
        pthread_mutex_unlock(&f->lock);
        return ps_fail(err, code, "no such run can be made");
    }
    for (i = 0; i < f->runs && strcmp(f->request_ids[i], m->request_id) != 0; i++)
        ;
    if (i == f->runs && f->runs < FAKE_RUNS) {
        snprintf(f->request_ids[i], sizeof f->request_ids[i], "%s", m->request_id);
        snprintf(f->names[i], sizeof f->names[i], "%s", m->name);
        f->runs++;
        pthread_cond_broadcast(&f->changed);
    }
    fake_fill_run(f, i, &run);
    pthread_mutex_unlock(&f->lock);
    answer.run = &run;
    return ps_rpc_send(call, &answer.base, err);
}

static int fake_get(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                    struct ps_error *err)
{
    struct fake *f = context;
    const Paramsync__V1__GetRunRequest *m = (const Paramsync__V1__GetRunRequest *)message;
    Paramsync__V1__KeyValue pair = PARAMSYNC__V1__KEY_VALUE__INIT, *pairs[] = {&pair};
    char *tags[] = {"a", "b"};
    Paramsync__V1__Run run;
    if (strcmp(m->run, "nobody") == 0)
        return ps_fail(err, PS_NOT_FOUND, "run: there is no run \"nobody\"");
    fake_fill_run(f, 0, &run);
    run.name = m->run;
    pair.key = "lr";
    pair.value = "0.01";
    run.config = pairs;
    run.n_config = 1;
    run.tags = tags;
    run.n_tags = 2;
    return ps_rpc_send(call, &run.base, err);
}

/* 1,234 runs in pages of what is asked for. */
static int fake_list(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                     struct ps_error *err)
{
    enum { total = 1234 };
    const Paramsync__V1__ListRunsRequest *m = (const Paramsync__V1__ListRunsRequest *)message;
    Paramsync__V1__ListRunsResponse answer = PARAMSYNC__V1__LIST_RUNS_RESPONSE__INIT;
    size_t from = (size_t)atoi(m->page_token), n = total - from;
    char(*names)[16] = calloc(total, sizeof *names);
    Paramsync__V1__Run *runs = calloc(total, sizeof *runs), **pointers = calloc(total, sizeof *pointers);
    char next[16] = "";
    if (n > m->page_size)
        n = m->page_size;
    for (size_t i = 0; i < n; i++) {
        fake_fill_run(context, 0, &runs[i]);
        snprintf(names[i], sizeof names[i], "run-%zu", from + i);
        runs[i].name = names[i];
        pointers[i] = &runs[i];
    }
    if (from + n < total)
        snprintf(next, sizeof next, "%zu", from + n);
    answer.next_page_token = next;
    answer.runs = pointers;
    answer.n_runs = n;
    int code = ps_rpc_send(call, &answer.base, err);
    free(names);
    free(runs);
    free(pointers);
    return code;
}

static int fake_finish(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                       struct ps_error *err)
{
    struct fake *f = context;
    const Paramsync__V1__FinishRunRequest *m = (const Paramsync__V1__FinishRunRequest *)message;
    Paramsync__V1__Run run;
    fake_delay(f);
    pthread_mutex_lock(&f->lock);
    f->final_state = (int)m->state;
    f->final_elapsed = m->elapsed_s;
    f->points_at_finish = f->point_count;
    f->epochs_at_finish = f->epoch_count;
    f->blobs_at_finish = f->blob_count;
    fake_fill_run(f, 0, &run);
    pthread_mutex_unlock(&f->lock);
    return ps_rpc_send(call, &run.base, err);
}

static int fake_heartbeat(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                          struct ps_error *err)
{
    struct fake *f = context;
    Paramsync__V1__HeartbeatResponse answer = PARAMSYNC__V1__HEARTBEAT_RESPONSE__INIT;
    (void)message;
    fake_delay(f);
    pthread_mutex_lock(&f->lock);
    f->heartbeats++;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    answer.state = PARAMSYNC__V1__RUN_STATE__RUN_STATE_RUNNING;
    return ps_rpc_send(call, &answer.base, err);
}

static int fake_watch(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                      struct ps_error *err)
{
    const Paramsync__V1__WatchRunRequest *m = (const Paramsync__V1__WatchRunRequest *)message;
    Paramsync__V1__Run run;
    fake_fill_run(context, 0, &run);
    for (uint64_t id = m->since_id + 1; id <= m->since_id + 3; id++) {
        Paramsync__V1__RunEvent event = PARAMSYNC__V1__RUN_EVENT__INIT;
        event.id = id;
        event.kind = "epoch";
        event.run = id == m->since_id + 3 ? &run : NULL;
        int code = ps_rpc_send(call, &event.base, err);
        if (code)
            return code;
    }
    return 0;
}

static int fake_epoch(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                      struct ps_error *err)
{
    struct fake *f = context;
    const Paramsync__V1__ReportEpochRequest *m = (const Paramsync__V1__ReportEpochRequest *)message;
    Paramsync__V1__ReportEpochResponse answer = PARAMSYNC__V1__REPORT_EPOCH_RESPONSE__INIT;
    size_t i;
    fake_delay(f);
    pthread_mutex_lock(&f->lock);
    f->epoch_calls++;
    if (f->refuse_epoch && (uint32_t)f->refuse_epoch == m->epoch) {
        pthread_mutex_unlock(&f->lock);
        return ps_fail(err, PS_INVALID_ARGUMENT, "epoch: not this one");
    }
    for (i = 0; i < f->epoch_count && f->epochs[i].epoch != m->epoch; i++)
        ;
    answer.replaced = i < f->epoch_count;
    if (i < FAKE_EPOCHS) {
        paramsync__v1__epoch_point__init(&f->epochs[i]);
        f->epochs[i].attempt = m->attempt;
        f->epochs[i].epoch = m->epoch;
        f->epochs[i].accuracy = m->accuracy;
        f->epochs[i].val_loss = m->val_loss;
        f->epochs[i].elapsed_s = m->elapsed_s;
        f->epochs[i].no_eval = m->no_eval;
        f->epoch_count = i < f->epoch_count ? f->epoch_count : i + 1;
    }
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    return ps_rpc_send(call, &answer.base, err);
}

static int fake_steps(struct ps_rpc_call *call, const ProtobufCMessage *request, void *context,
                      struct ps_error *err)
{
    struct fake *f = context;
    ProtobufCMessage *message;
    int code;
    (void)request;
    while ((code = ps_rpc_recv(call, &message, err)) > 0) {
        const Paramsync__V1__StepBatch *m = (const Paramsync__V1__StepBatch *)message;
        Paramsync__V1__StepAck ack = PARAMSYNC__V1__STEP_ACK__INIT;
        bool lose = false;
        fake_delay(f);
        pthread_mutex_lock(&f->lock);
        uint64_t *last = &f->last_seq[m->rank % 4];
        if (m->seq <= *last) {
            f->replays++;
        } else {
            for (size_t i = 0; i < m->n_points && f->point_count < FAKE_POINTS; i++) {
                struct fake_point *p = &f->points[f->point_count++];
                p->rank = m->rank;
                p->step = m->points[i]->step;
                p->value = m->points[i]->value;
                snprintf(p->name, sizeof p->name, "%s", m->points[i]->name);
            }
            *last = m->seq;
        }
        if (f->lose_acks) {
            f->lose_acks--;
            lose = true;
        }
        ack.rank = m->rank;
        ack.attempt = m->attempt;
        ack.seq = m->seq;
        pthread_cond_broadcast(&f->changed);
        pthread_mutex_unlock(&f->lock);
        protobuf_c_message_free_unpacked(message, NULL);
        if (lose)
            return ps_fail(err, PS_UNAVAILABLE, "died after the commit");
        code = ps_rpc_send(call, &ack.base, err);
        if (code)
            return code;
    }
    return code;
}

static int fake_query(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                      struct ps_error *err)
{
    struct fake *f = context;
    const Paramsync__V1__QuerySeriesRequest *m = (const Paramsync__V1__QuerySeriesRequest *)message;
    Paramsync__V1__QuerySeriesResponse answer = PARAMSYNC__V1__QUERY_SERIES_RESPONSE__INIT;
    Paramsync__V1__EpochPoint *epochs[FAKE_EPOCHS];
    Paramsync__V1__Series series = PARAMSYNC__V1__SERIES__INIT, *all[] = {&series};
    char *names[] = {"loss"};
    uint32_t attempts[] = {1, 1};
    uint64_t steps[] = {10, 20};
    double values[] = {0.5, 0.25}, elapsed[] = {1, 2};
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->epoch_count; i++)
        epochs[i] = &f->epochs[i];
    answer.epochs = epochs;
    answer.n_epochs = f->epoch_count;
    answer.names = names;
    answer.n_names = 1;
    if (*m->name) {
        series.name = m->name;
        series.attempts = attempts;
        series.steps = steps;
        series.values = values;
        series.elapsed_s = elapsed;
        series.n_attempts = series.n_steps = series.n_values = series.n_elapsed_s = 2;
        series.total_points = 2;
        answer.series = all;
        answer.n_series = 1;
    }
    int code = ps_rpc_send(call, &answer.base, err);
    pthread_mutex_unlock(&f->lock);
    return code;
}

static void fake_view_blob(struct fake *f, size_t i, Paramsync__V1__Checkpoint *m)
{
    paramsync__v1__checkpoint__init(m);
    m->run_id = (char *)fake_run_id;
    m->run_name = "run";
    m->attempt = 1;
    m->epoch = f->blobs[i].epoch;
    m->filename = f->blobs[i].filename;
    m->format = f->blobs[i].format;
    m->sha256 = f->blobs[i].sha256;
    m->size = f->blobs[i].size;
}

static int fake_put(struct ps_rpc_call *call, const ProtobufCMessage *request, void *context,
                    struct ps_error *err)
{
    struct fake *f = context;
    ProtobufCMessage *message = NULL;
    Paramsync__V1__Checkpoint answer;
    uint8_t *data = NULL;
    size_t have = 0;
    char hex[PS_SHA256_HEX];
    (void)request;
    fake_delay(f);
    int code = ps_rpc_recv(call, &message, err);
    if (code <= 0)
        return code ? code : ps_fail(err, PS_INVALID_ARGUMENT, "no header");
    pthread_mutex_lock(&f->lock);
    int refuse = f->refuse_put;
    f->refuse_put = 0;
    pthread_mutex_unlock(&f->lock);
    Paramsync__V1__PutCheckpointRequest *first = (Paramsync__V1__PutCheckpointRequest *)message;
    if (refuse || first->part_case != PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__PART_HEADER) {
        protobuf_c_message_free_unpacked(message, NULL);
        return ps_fail(err, refuse ? refuse : PS_INVALID_ARGUMENT, "put refused");
    }
    const Paramsync__V1__PutCheckpointHeader *header = first->header;
    ProtobufCMessage *next;
    data = malloc(header->size + 1);
    while ((code = ps_rpc_recv(call, &next, err)) > 0) {
        const Paramsync__V1__Chunk *chunk = ((Paramsync__V1__PutCheckpointRequest *)next)->chunk;
        code = 0;
        if (chunk->offset != have || have + chunk->data.len > header->size ||
            ps_crc32c(0, chunk->data.data, chunk->data.len) != chunk->crc32c)
            code = ps_fail(err, PS_DATA_LOSS, "bad chunk");
        else
            memcpy(data + have, chunk->data.data, chunk->data.len);
        have += chunk->data.len;
        protobuf_c_message_free_unpacked(next, NULL);
        if (code)
            break;
    }
    struct ps_sha256 *sha = ps_sha256_new();
    ps_sha256_update(sha, data, code ? 0 : have);
    ps_sha256_hex(sha, hex);
    ps_sha256_free(sha);
    if (!code && (have != header->size || strcmp(hex, header->sha256) != 0))
        code = ps_fail(err, PS_DATA_LOSS, "bad digest");
    pthread_mutex_lock(&f->lock);
    if (!code && f->blob_count < FAKE_BLOBS) {
        size_t i = f->blob_count++;
        snprintf(f->blobs[i].sha256, sizeof f->blobs[i].sha256, "%s", hex);
        snprintf(f->blobs[i].filename, sizeof f->blobs[i].filename, "%s", header->filename);
        snprintf(f->blobs[i].format, sizeof f->blobs[i].format, "%s", header->format);
        f->blobs[i].data = data;
        f->blobs[i].size = have;
        f->blobs[i].epoch = header->epoch;
        data = NULL;
        fake_view_blob(f, i, &answer);
        pthread_cond_broadcast(&f->changed);
    }
    pthread_mutex_unlock(&f->lock);
    protobuf_c_message_free_unpacked(message, NULL);
    free(data);
    return code ? code : ps_rpc_send(call, &answer.base, err);
}

static int fake_find_blob(struct fake *f, const Paramsync__V1__CheckpointSelector *s, size_t *ret,
                          struct ps_error *err)
{
    for (size_t k = f->blob_count; k-- > 0;)
        if (!s || s->which_case == PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH__NOT_SET ||
            (s->which_case == PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_SHA256 &&
             strcmp(s->sha256, f->blobs[k].sha256) == 0) ||
            (s->which_case == PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_EPOCH &&
             s->epoch == f->blobs[k].epoch)) {
            *ret = k;
            return 0;
        }
    return ps_fail(err, PS_NOT_FOUND, "no such checkpoint");
}

static int fake_get_checkpoint(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                               struct ps_error *err)
{
    struct fake *f = context;
    Paramsync__V1__Checkpoint answer;
    size_t i;
    int code = fake_find_blob(f, ((const Paramsync__V1__GetCheckpointRequest *)message)->selector, &i, err);
    if (code)
        return code;
    pthread_mutex_lock(&f->lock); /* the message points into what the test may change */
    fake_view_blob(f, i, &answer);
    code = ps_rpc_send(call, &answer.base, err);
    pthread_mutex_unlock(&f->lock);
    return code;
}

static int fake_list_checkpoints(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                                 struct ps_error *err)
{
    struct fake *f = context;
    Paramsync__V1__ListCheckpointsResponse answer = PARAMSYNC__V1__LIST_CHECKPOINTS_RESPONSE__INIT;
    Paramsync__V1__Checkpoint views[FAKE_BLOBS], *pointers[FAKE_BLOBS];
    (void)message;
    for (size_t i = 0; i < f->blob_count; i++) {
        fake_view_blob(f, i, &views[i]);
        pointers[i] = &views[i];
    }
    answer.n_checkpoints = f->blob_count;
    answer.checkpoints = pointers;
    return ps_rpc_send(call, &answer.base, err);
}

static int fake_pull(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                     struct ps_error *err)
{
    struct fake *f = context;
    const Paramsync__V1__PullCheckpointRequest *m = (const Paramsync__V1__PullCheckpointRequest *)message;
    Paramsync__V1__PullCheckpointResponse part = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__INIT;
    Paramsync__V1__Checkpoint meta;
    size_t i;
    int code = fake_find_blob(f, m->selector, &i, err);
    if (code)
        return code;
    pthread_mutex_lock(&f->lock);
    fake_view_blob(f, i, &meta);
    part.part_case = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHECKPOINT;
    part.checkpoint = &meta;
    code = ps_rpc_send(call, &part.base, err);
    pthread_mutex_unlock(&f->lock);
    uint8_t *copy = malloc(m->chunk_bytes);
    for (size_t at = m->offset; !code && at < f->blobs[i].size;) {
        Paramsync__V1__Chunk chunk = PARAMSYNC__V1__CHUNK__INIT;
        size_t n = f->blobs[i].size - at < m->chunk_bytes ? f->blobs[i].size - at : m->chunk_bytes;
        if (f->pull_stop_at && at >= f->pull_stop_at) {
            f->pull_stop_at = 0;
            code = ps_fail(err, PS_UNAVAILABLE, "gone");
            break;
        }
        memcpy(copy, f->blobs[i].data + at, n);
        if (f->pull_spoil_at >= at && f->pull_spoil_at < at + n && f->pull_spoil_at)
            copy[f->pull_spoil_at - at] ^= 1;
        chunk.crc32c = ps_crc32c(0, copy, n);
        if (f->pull_flip_at >= at && f->pull_flip_at < at + n && f->pull_flip_at) {
            copy[f->pull_flip_at - at] ^= 1;
            f->pull_flip_at = 0;
        }
        chunk.offset = at;
        chunk.data.data = copy;
        chunk.data.len = n;
        part.part_case = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHUNK;
        part.chunk = &chunk;
        code = ps_rpc_send(call, &part.base, err);
        at += n;
        f->pulled_bytes += n;
    }
    free(copy);
    fake_see(f);
    return code;
}

static int fake_intercept(struct ps_rpc_call *call, void *context, struct ps_error *err)
{
    struct fake *f = context;
    char wanted[128];
    const char *given = ps_rpc_metadata(call, "authorization");
    if (!f->token)
        return 0;
    snprintf(wanted, sizeof wanted, "Bearer %s", f->token);
    return given && strcmp(given, wanted) == 0 ? 0 : ps_fail(err, PS_UNAUTHENTICATED, "wrong token");
}

#define FAKE_METHOD(service, method, kind_, in, out, function)                                               \
    {                                                                                                        \
        .path = "/paramsync.v1." service "/" method, .kind = kind_,                                          \
        .request = &paramsync__v1__##in##__descriptor, .response = &paramsync__v1__##out##__descriptor,      \
        .handler = function                                                                                  \
    }
static const struct ps_rpc_method fake_methods[] = {
    FAKE_METHOD("Runs", "CreateRun", PS_RPC_UNARY, create_run_request, create_run_response, fake_create),
    FAKE_METHOD("Runs", "GetRun", PS_RPC_UNARY, get_run_request, run, fake_get),
    FAKE_METHOD("Runs", "ListRuns", PS_RPC_UNARY, list_runs_request, list_runs_response, fake_list),
    FAKE_METHOD("Runs", "FinishRun", PS_RPC_UNARY, finish_run_request, run, fake_finish),
    FAKE_METHOD("Runs", "Heartbeat", PS_RPC_UNARY, heartbeat_request, heartbeat_response, fake_heartbeat),
    FAKE_METHOD("Runs", "WatchRun", PS_RPC_SERVER_STREAM, watch_run_request, run_event, fake_watch),
    FAKE_METHOD("Metrics", "ReportEpoch", PS_RPC_UNARY, report_epoch_request, report_epoch_response,
                fake_epoch),
    FAKE_METHOD("Metrics", "ReportSteps", PS_RPC_BIDI, step_batch, step_ack, fake_steps),
    FAKE_METHOD("Metrics", "QuerySeries", PS_RPC_UNARY, query_series_request, query_series_response,
                fake_query),
    FAKE_METHOD("Checkpoints", "PutCheckpoint", PS_RPC_CLIENT_STREAM, put_checkpoint_request, checkpoint,
                fake_put),
    FAKE_METHOD("Checkpoints", "GetCheckpoint", PS_RPC_UNARY, get_checkpoint_request, checkpoint,
                fake_get_checkpoint),
    FAKE_METHOD("Checkpoints", "ListCheckpoints", PS_RPC_UNARY, list_checkpoints_request,
                list_checkpoints_response, fake_list_checkpoints),
    FAKE_METHOD("Checkpoints", "PullCheckpoint", PS_RPC_SERVER_STREAM, pull_checkpoint_request,
                pull_checkpoint_response, fake_pull),
};

static void fake_init(struct fake *f)
{
    pthread_condattr_t attributes;
    memset(f, 0, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&f->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    f->points = calloc(FAKE_POINTS, sizeof *f->points);
    snprintf(f->listen, sizeof f->listen, "127.0.0.1:0");
}

static void fake_start(struct fake *f)
{
    const char *listen = f->listen;
    struct ps_error err = {0};
    struct ps_rpc_server_config config = {.listen = &listen,
                                          .listen_count = 1,
                                          .methods = fake_methods,
                                          .method_count = sizeof fake_methods / sizeof *fake_methods,
                                          .context = f,
                                          .intercept = fake_intercept};
    if (ps_rpc_server_start(&config, &f->server, &err))
        fail_msg("%s", err.message);
    snprintf(f->listen, sizeof f->listen, "127.0.0.1:%d", ps_rpc_server_port(f->server, 0));
}

static void fake_stop(struct fake *f)
{
    ps_rpc_server_stop(f->server, 0);
    f->server = ps_rpc_server_free(f->server);
}

static void fake_done(struct fake *f)
{
    if (f->server)
        fake_stop(f);
    for (size_t i = 0; i < f->blob_count; i++)
        free(f->blobs[i].data);
    free(f->points);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->changed);
}

/* Waits until the condition holds; the test fails after 30 s. */
#define fake_wait(f, condition)                                                                              \
    do {                                                                                                     \
        struct timespec until_;                                                                              \
        clock_gettime(CLOCK_MONOTONIC, &until_);                                                             \
        until_.tv_sec += 30;                                                                                 \
        pthread_mutex_lock(&(f)->lock);                                                                      \
        int late_ = 0;                                                                                       \
        while (!(condition) && !late_)                                                                       \
            late_ = pthread_cond_timedwait(&(f)->changed, &(f)->lock, &until_);                              \
        pthread_mutex_unlock(&(f)->lock);                                                                    \
        if (late_)                                                                                           \
            fail_msg("waited in vain for " #condition);                                                      \
    } while (0)

#endif
