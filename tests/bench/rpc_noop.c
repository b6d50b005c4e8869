/* SPDX-License-Identifier: Apache-2.0
 * rpc_noop TARGET [SECONDS]: what a server of the Probe service (tests/proto) does per second when the
 * handlers do nothing: unary calls from 1 and 8 threads, and a stream of 256 KiB messages. One line of
 * numbers each. */
#include "tests/unit/test_rpc_probe.h"

#include <sys/resource.h>

struct worker {
    struct ps_rpc_channel *channel;
    double until;
    long calls;
    pthread_t thread;
};

static void die(const struct ps_error *err)
{
    fprintf(stderr, "rpc_noop: %s\n", err->message);
    exit(1);
}

static void *call(void *arg)
{
    struct worker *worker = arg;
    struct ps_error err = {0};
    Note note = NOTE_INIT;
    note.text = "nothing";
    while (ps_monotonic_s() < worker->until) {
        ProtobufCMessage *message = NULL;
        if (ps_rpc_unary(worker->channel, PROBE("Echo"), &note.base, NOTE_TYPE, 10, true, &message, &err))
            die(&err);
        protobuf_c_message_free_unpacked(message, NULL);
        worker->calls++;
    }
    return NULL;
}

static double unary(struct ps_rpc_channel *channel, int threads, double seconds)
{
    struct worker workers[16] = {0};
    double begin = ps_monotonic_s();
    long calls = 0;
    for (int i = 0; i < threads; i++) {
        workers[i] = (struct worker){.channel = channel, .until = begin + seconds};
        pthread_create(&workers[i].thread, NULL, call, &workers[i]);
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(workers[i].thread, NULL);
        calls += workers[i].calls;
    }
    return (double)calls / (ps_monotonic_s() - begin);
}

static double stream(struct ps_rpc_channel *channel, int64_t messages)
{
    static uint8_t block[262144];
    struct ps_error err = {0};
    struct ps_rpc_stream *s = NULL;
    Note note = NOTE_INIT;
    note.number = messages;
    note.data.data = block;
    note.data.len = sizeof block;
    double begin = ps_monotonic_s(), bytes = 0;
    if (ps_rpc_stream_open(channel, PROBE("Count"), NOTE_TYPE, 600, &s, &err) ||
        ps_rpc_stream_send(s, &note.base, &err) || ps_rpc_stream_close_send(s, &err))
        die(&err);
    ProtobufCMessage *message = NULL;
    int code;
    while ((code = ps_rpc_stream_recv(s, &message, &err)) == 1) {
        bytes += (double)((Note *)message)->data.len;
        protobuf_c_message_free_unpacked(message, NULL);
    }
    if (code < 0)
        die(&err);
    ps_rpc_stream_free(s);
    return bytes / 1e6 / (ps_monotonic_s() - begin);
}

static double cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

int main(int argc, char **argv)
{
    struct ps_rpc_channel_config config = {.target = argc > 1 ? argv[1] : ""};
    double seconds = argc > 2 ? atof(argv[2]) : 2;
    struct ps_rpc_channel *channel = NULL;
    struct ps_error err = {0};
    if (ps_rpc_channel_open(&config, &channel, &err))
        die(&err);
    unary(channel, 1, 0.2); /* connects, and warms up */
    printf("unary_1 %.0f\n", unary(channel, 1, seconds));
    printf("unary_8 %.0f\n", unary(channel, 8, seconds));
    double before = cpu_s();
    printf("stream_mb %.0f\n", stream(channel, 4096));
    printf("stream_client_cpu_s %.3f\n", cpu_s() - before);
    ps_rpc_channel_free(channel);
    return 0;
}
