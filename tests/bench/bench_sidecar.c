/* SPDX-License-Identifier: Apache-2.0
 * The load of tests/bench/sidecar.py: bench_sidecar ADDRESS WHAT ... prints "NAME VALUE" lines.
 *     ingest RANKS SECONDS SERIES    durable step points: each rank on a connection of its own, 16 batches
 * under way fill RUN POINTS SERIES         so many points into a run that stays epochs CALLS SECONDS
 * ReportEpoch with so many calls at a time query RUN SECONDS              QuerySeries of whole series and of
 * windows point COUNT                    the reporter's call, each one timed pull RUN ROUNDS                a
 * checkpoint, chunk by chunk, dropped */
#include "services/base/clock.h"
#include "services/client/paramsync.h"
#include "services/rpc/rpc.h"

#include "paramsync/v1/checkpoints.pb-c.h"
#include "paramsync/v1/metrics.pb-c.h"
#include "paramsync/v1/runs.pb-c.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 1024, WINDOW = 16, MAX_RANKS = 512 };

static const char *address;

static void die(const char *what, const struct ps_error *err)
{
    fprintf(stderr, "bench_sidecar: %s: %s\n", what, err->message);
    exit(1);
}

static struct ps_rpc_channel *connect_to(void)
{
    struct ps_rpc_channel_config config = {.target = address, .max_receive_bytes = 64 << 20};
    struct ps_rpc_channel *channel;
    struct ps_error err = {0};
    if (ps_rpc_channel_open(&config, &channel, &err))
        die("connect", &err);
    return channel;
}

static void create(const char *name, uint32_t world)
{
    Paramsync__V1__CreateRunRequest request = PARAMSYNC__V1__CREATE_RUN_REQUEST__INIT;
    struct ps_rpc_channel *channel = connect_to();
    ProtobufCMessage *answer;
    struct ps_error err = {0};
    request.name = (char *)name;
    request.world_size = world;
    if (ps_rpc_unary(channel, "/paramsync.v1.Runs/CreateRun", &request.base,
                     &paramsync__v1__create_run_response__descriptor, 30, true, &answer, &err))
        die("CreateRun", &err);
    protobuf_c_message_free_unpacked(answer, NULL);
    ps_rpc_channel_free(channel);
}

/* ---- Step points ---- */

struct rank {
    pthread_t thread;
    const char *run;
    uint32_t rank;
    int series;
    uint64_t most; /* points; 0: until stop */
    uint64_t sent;
};
static atomic_bool stop;

static double noise(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (double)(*state >> 11) * 0x1p-53;
}

static void *report(void *argument)
{
    struct rank *r = argument;
    struct ps_rpc_channel *channel = connect_to();
    struct ps_rpc_stream *stream;
    struct ps_error err = {0};
    static Paramsync__V1__Point points[MAX_RANKS][BATCH];
    Paramsync__V1__Point *pointers[BATCH];
    char names[64][24];
    uint64_t step = 0, seq = 0, acked = 0, state = 88172645463325252u + r->rank;
    for (int i = 0; i < r->series; i++)
        snprintf(names[i], sizeof names[i], "series/%d", i);
    if (ps_rpc_stream_open(channel, "/paramsync.v1.Metrics/ReportSteps", &paramsync__v1__step_ack__descriptor,
                           -1, &stream, &err))
        die("ReportSteps", &err);
    while ((!stop && (!r->most || r->sent < r->most)) || acked < seq) {
        bool more = !stop && (!r->most || r->sent < r->most);
        if (more && seq - acked < WINDOW) {
            Paramsync__V1__StepBatch batch = PARAMSYNC__V1__STEP_BATCH__INIT;
            for (int i = 0; i < BATCH; i++) {
                Paramsync__V1__Point *point = &points[r->rank][i];
                paramsync__v1__point__init(point);
                point->name = names[i % r->series];
                point->step = step;
                point->elapsed_s = (double)step * 0.1 + 0.001 * noise(&state);
                point->value = 2.3 * exp(-(double)step * 1e-5) + 0.1 * noise(&state);
                step += i % r->series == r->series - 1;
                pointers[i] = point;
            }
            batch.run = (char *)r->run;
            batch.rank = r->rank;
            batch.attempt = 1;
            batch.seq = ++seq;
            batch.n_points = BATCH;
            batch.points = pointers;
            if (ps_rpc_stream_send(stream, &batch.base, &err))
                break;
            r->sent += BATCH;
            continue;
        }
        ProtobufCMessage *ack;
        if (ps_rpc_stream_recv(stream, &ack, &err) != 1)
            die("ReportSteps", &err);
        acked = ((const Paramsync__V1__StepAck *)ack)->seq;
        protobuf_c_message_free_unpacked(ack, NULL);
    }
    ps_rpc_stream_free(stream);
    ps_rpc_channel_free(channel);
    return NULL;
}

static void ingest(const char *run, int ranks, double seconds, int series, uint64_t most)
{
    static struct rank all[MAX_RANKS];
    create(run, (uint32_t)ranks);
    double begun = ps_monotonic_s();
    for (int i = 0; i < ranks; i++) {
        all[i] =
            (struct rank){.run = run, .rank = (uint32_t)i, .series = series, .most = most / (uint64_t)ranks};
        pthread_create(&all[i].thread, NULL, report, &all[i]);
    }
    if (!most) {
        struct timespec pause = {.tv_sec = (time_t)seconds, .tv_nsec = (long)(fmod(seconds, 1) * 1e9)};
        nanosleep(&pause, NULL);
        stop = true;
    }
    uint64_t sent = 0;
    for (int i = 0; i < ranks; i++) {
        pthread_join(all[i].thread, NULL);
        sent += all[i].sent;
    }
    double took = ps_monotonic_s() - begun;
    printf("points %.0f\nseconds %.3f\npoints_per_s %.0f\n", (double)sent, took, (double)sent / took);
}

/* ---- Epochs ---- */

struct caller {
    pthread_t thread;
    char run[32];
    uint32_t epoch;
};

static void *report_epochs(void *argument)
{
    struct caller *c = argument;
    struct ps_rpc_channel *channel = connect_to();
    while (!stop) {
        Paramsync__V1__ReportEpochRequest request = PARAMSYNC__V1__REPORT_EPOCH_REQUEST__INIT;
        ProtobufCMessage *answer;
        struct ps_error err = {0};
        request.run = c->run;
        request.epoch = c->epoch + 1;
        request.accuracy = 0.5;
        if (ps_rpc_unary(channel, "/paramsync.v1.Metrics/ReportEpoch", &request.base,
                         &paramsync__v1__report_epoch_response__descriptor, 30, true, &answer, &err))
            die("ReportEpoch", &err);
        protobuf_c_message_free_unpacked(answer, NULL);
        c->epoch++;
    }
    ps_rpc_channel_free(channel);
    return NULL;
}

/* Each caller for a run of its own, as trainings do. */
static void epochs(int calls, double seconds)
{
    static struct caller callers[MAX_RANKS];
    uint64_t all = 0;
    for (int i = 0; i < calls; i++) {
        snprintf(callers[i].run, sizeof callers[i].run, "epochs-%d", i);
        create(callers[i].run, 1);
    }
    double begun = ps_monotonic_s();
    for (int i = 0; i < calls; i++)
        pthread_create(&callers[i].thread, NULL, report_epochs, &callers[i]);
    struct timespec pause = {.tv_sec = (time_t)seconds};
    nanosleep(&pause, NULL);
    stop = true;
    for (int i = 0; i < calls; i++) {
        pthread_join(callers[i].thread, NULL);
        all += callers[i].epoch;
    }
    printf("calls_per_s %.1f\n", (double)all / (ps_monotonic_s() - begun));
}

/* ---- Latencies ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_latencies(double *us, size_t count)
{
    qsort(us, count, sizeof *us, by_value);
    printf("calls %zu\np50_us %.2f\np99_us %.2f\np999_us %.2f\nmax_us %.2f\n", count, us[count / 2],
           us[count * 99 / 100], us[count * 999 / 1000], us[count - 1]);
}

static void query(const char *run, double seconds)
{
    enum { most = 1000000 };
    double *us = malloc(most * sizeof *us);
    size_t count = 0;
    struct ps_rpc_channel *channel = connect_to();
    uint64_t state = 42;
    double end = ps_monotonic_s() + seconds;
    while (us && count < most && ps_monotonic_s() < end) {
        Paramsync__V1__QuerySeriesRequest request = PARAMSYNC__V1__QUERY_SERIES_REQUEST__INIT;
        ProtobufCMessage *answer;
        struct ps_error err = {0};
        char name[24];
        snprintf(name, sizeof name, "series/%d", (int)(noise(&state) * 4));
        request.run = (char *)run;
        request.name = name;
        request.rank = (int)(noise(&state) * 16);
        if (count % 2) { /* zoomed in */
            request.from_step = (uint64_t)(noise(&state) * 100000);
            request.to_step = request.from_step + 5000;
        }
        double begun = ps_monotonic_s();
        if (ps_rpc_unary(channel, "/paramsync.v1.Metrics/QuerySeries", &request.base,
                         &paramsync__v1__query_series_response__descriptor, 30, true, &answer, &err))
            die("QuerySeries", &err);
        us[count++] = (ps_monotonic_s() - begun) * 1e6;
        protobuf_c_message_free_unpacked(answer, NULL);
    }
    print_latencies(us, count);
    free(us);
    ps_rpc_channel_free(channel);
}

static void point(size_t count)
{
    double *us = malloc(count * sizeof *us);
    struct paramsync_reporter *reporter;
    struct paramsync_error err = {0};
    struct paramsync_reporter_options options = {.connection = {.address = address},
                                                 .run = {.name = "reporter", .world_size = 1}};
    if (!us || paramsync_reporter_open(&options, &reporter, &err)) {
        fprintf(stderr, "bench_sidecar: %s\n", err.message);
        exit(1);
    }
    for (size_t i = 0; i < count; i++) {
        int64_t begun = ps_monotonic_ns();
        paramsync_reporter_point(reporter, i % 2 ? "loss" : "lr", i / 2, (double)i, (double)i * 1e-3);
        us[i] = (double)(ps_monotonic_ns() - begun) * 1e-3;
        if (i % 100 == 99) { /* a training step's worth; the sender gets its turn */
            struct timespec pause = {.tv_nsec = 100000};
            nanosleep(&pause, NULL);
        }
    }
    struct paramsync_reporter_stats stats;
    if (paramsync_reporter_close(reporter, PARAMSYNC_RUN_FINISHED, "", 60, &stats, &err))
        fprintf(stderr, "bench_sidecar: %s\n", err.message);
    print_latencies(us, count);
    printf("dropped %.0f\n", (double)stats.points_dropped);
    free(us);
}

static void pull(const char *run, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        struct ps_rpc_channel *channel = connect_to();
        Paramsync__V1__PullCheckpointRequest request = PARAMSYNC__V1__PULL_CHECKPOINT_REQUEST__INIT;
        struct ps_rpc_stream *stream;
        struct ps_error err = {0};
        ProtobufCMessage *message;
        uint64_t bytes = 0;
        int code;
        request.run = (char *)run;
        double begun = ps_monotonic_s();
        if (ps_rpc_stream_open(channel, "/paramsync.v1.Checkpoints/PullCheckpoint",
                               &paramsync__v1__pull_checkpoint_response__descriptor, -1, &stream, &err) ||
            ps_rpc_stream_send(stream, &request.base, &err) || ps_rpc_stream_close_send(stream, &err))
            die("PullCheckpoint", &err);
        while ((code = ps_rpc_stream_recv(stream, &message, &err)) == 1) {
            const Paramsync__V1__PullCheckpointResponse *m = (const void *)message;
            if (m->part_case == PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHUNK)
                bytes += m->chunk->data.len;
            protobuf_c_message_free_unpacked(message, NULL);
        }
        if (code)
            die("PullCheckpoint", &err);
        printf("mb_per_s %.1f\n", (double)bytes / 1e6 / (ps_monotonic_s() - begun));
        ps_rpc_stream_free(stream);
        ps_rpc_channel_free(channel);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    address = argv[1];
    const char *what = argv[2];
    const char *a = argc > 3 ? argv[3] : "", *b = argc > 4 ? argv[4] : "0", *c = argc > 5 ? argv[5] : "4";
    if (!strcmp(what, "ingest")) {
        char run[32];
        snprintf(run, sizeof run, "ingest-%s", a);
        ingest(run, atoi(a), atof(b), atoi(c), 0);
    } else if (!strcmp(what, "fill")) {
        ingest(a, 16, 0, atoi(c), (uint64_t)atof(b));
    } else if (!strcmp(what, "epochs")) {
        epochs(atoi(a), atof(b));
    } else if (!strcmp(what, "query")) {
        query(a, atof(b));
    } else if (!strcmp(what, "point")) {
        point((size_t)atof(a));
    } else if (!strcmp(what, "pull")) {
        pull(a, atoi(b));
    } else {
        return 2;
    }
    return 0;
}
