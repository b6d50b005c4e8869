/* SPDX-License-Identifier: Apache-2.0
 * Rules 3 and 4: calls of every kind, cancelled at random moments, from other threads, by deadlines, by a
 * server that stops. Nothing may hang, and the sanitizers must find nothing. PS_STORM_SECONDS makes it
 * longer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/test_rpc_probe.h"

struct storm {
    struct probe probe;
    struct ps_rpc_server *server;
    struct ps_rpc_channel *channel;
    double until;
    unsigned seed;
    atomic_long calls, fine, cancelled;
};

static uint32_t draw(unsigned *state) /* xorshift: a seed makes the same storm again */
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

struct canceller {
    struct ps_rpc_stream *stream;
    unsigned delay_us;
};

static void *cancel_later(void *arg)
{
    struct canceller *canceller = arg;
    usleep(canceller->delay_us);
    ps_rpc_stream_cancel(canceller->stream);
    return NULL;
}

static void one_unary(struct storm *storm, unsigned *state)
{
    static char *const texts[] = {"", "wait", "fail", "silent", "twice", "metadata"};
    Note note = NOTE_INIT;
    note.text = texts[draw(state) % 6];
    note.number = !strcmp(note.text, "fail") ? -5 : 2;
    ProtobufCMessage *message = NULL;
    struct ps_error err = {0};
    double timeout_s = (double)(draw(state) % 20) / 1e3;
    int code = ps_rpc_unary(storm->channel, PROBE("Echo"), &note.base, NOTE_TYPE, timeout_s,
                            draw(state) % 2 != 0, &message, &err);
    if (code == 0)
        protobuf_c_message_free_unpacked(message, NULL);
    assert_true(code == 0 || (err.code == code && err.message[0]));
    atomic_fetch_add(code == 0 ? &storm->fine : &storm->cancelled, 1);
}

static void one_stream(struct storm *storm, unsigned *state)
{
    static const char *const paths[] = {PROBE("Sum"), PROBE("Count"), PROBE("Chat"), PROBE("Nothing")};
    static char *const texts[] = {"", "wait", "then fail", "bye", ""};
    static uint8_t block[40000];
    struct ps_rpc_stream *stream = NULL;
    struct ps_error err = {0};
    const char *path = paths[draw(state) % 10 == 0 ? 3 : draw(state) % 3];
    double timeout_s = draw(state) % 3 ? (double)(draw(state) % 50) / 1e3 : 30;
    if (ps_rpc_stream_open(storm->channel, path, NOTE_TYPE, timeout_s, &stream, &err))
        return;
    struct canceller canceller = {stream, draw(state) % 3000};
    pthread_t thread;
    bool cancels = draw(state) % 2 && !pthread_create(&thread, NULL, cancel_later, &canceller);
    Note note = NOTE_INIT;
    note.data.data = block;
    int code = 0;
    for (uint32_t left = draw(state) % 8; left && code == 0; left--) {
        note.text = texts[draw(state) % 5];
        note.number = !strcmp(path, PROBE("Count")) ? draw(state) % 30 : 3; /* a wait of 3 ms elsewhere */
        note.data.len = draw(state) % sizeof block;
        code = ps_rpc_stream_send(stream, &note.base, &err);
        if (code == 0 && draw(state) % 2 && !strcmp(path, PROBE("Chat"))) {
            ProtobufCMessage *message = NULL;
            code = ps_rpc_stream_recv(stream, &message, &err) == 1 ? 0 : -1;
            if (code == 0)
                protobuf_c_message_free_unpacked(message, NULL);
        }
    }
    if (draw(state) % 3)
        ps_rpc_stream_close_send(stream, &err);
    if (draw(state) % 3 && (cancels || timeout_s < 1)) {
        ProtobufCMessage *message = NULL;
        while ((code = ps_rpc_stream_recv(stream, &message, &err)) == 1)
            protobuf_c_message_free_unpacked(message, NULL);
        atomic_fetch_add(code == 0 ? &storm->fine : &storm->cancelled, 1);
    }
    if (cancels)
        pthread_join(thread, NULL);
    ps_rpc_stream_free(stream);
}

struct sailor {
    struct storm *storm;
    unsigned state;
    pthread_t thread;
};

static void *sail(void *arg)
{
    struct sailor *sailor = arg;
    while (ps_monotonic_s() < sailor->storm->until) {
        if (draw(&sailor->state) % 3 == 0)
            one_unary(sailor->storm, &sailor->state);
        else
            one_stream(sailor->storm, &sailor->state);
        atomic_fetch_add(&sailor->storm->calls, 1);
    }
    return NULL;
}

static void *wake_at_random(void *arg)
{
    struct storm *storm = arg;
    while (ps_monotonic_s() < storm->until) {
        ps_rpc_server_set_serving(storm->server, "paramsync.test.v1.Probe", false);
        usleep(500);
        ps_rpc_server_set_serving(storm->server, "paramsync.test.v1.Probe", true);
    }
    return NULL;
}

static void blow(double seconds, bool stop_in_the_middle)
{
    enum { SAILORS = 6 };
    static const char *const loopback[] = {"127.0.0.1:0"};
    struct storm storm = {.seed = 20240501};
    probe_init(&storm.probe);
    struct ps_rpc_server_config config = {
        .listen = loopback,
        .listen_count = 1,
        .methods = probe_methods,
        .method_count = PROBE_METHODS,
        .context = &storm.probe,
        .max_streams = 4, /* few, so that calls are turned away too */
        .descriptor_set = probe_descriptor_set,
        .descriptor_set_size = probe_descriptor_set_size,
    };
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_server_start(&config, &storm.server, &err), 0);
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", ps_rpc_server_port(storm.server, 0));
    struct ps_rpc_channel_config client = {.target = target};
    assert_int_equal(ps_rpc_channel_open(&client, &storm.channel, &err), 0);
    storm.until = ps_monotonic_s() + seconds;
    struct sailor sailors[SAILORS];
    for (unsigned i = 0; i < SAILORS; i++) {
        sailors[i] = (struct sailor){.storm = &storm, .state = storm.seed + i * 7919};
        assert_int_equal(pthread_create(&sailors[i].thread, NULL, sail, &sailors[i]), 0);
    }
    pthread_t waker;
    assert_int_equal(pthread_create(&waker, NULL, wake_at_random, &storm), 0);
    if (stop_in_the_middle) {
        usleep((useconds_t)(seconds * 5e5));
        ps_rpc_server_stop(storm.server, 0.05);
        assert_int_equal(atomic_load(&storm.probe.running), 0);
    }
    for (int i = 0; i < SAILORS; i++)
        pthread_join(sailors[i].thread, NULL);
    pthread_join(waker, NULL);
    ps_rpc_channel_free(storm.channel);
    ps_rpc_server_stop(storm.server, 5);
    assert_int_equal(atomic_load(&storm.probe.running), 0);
    ps_rpc_server_free(storm.server);
    probe_done(&storm.probe);
    /* It was a storm, not a calm: calls went well and calls were cut. */
    assert_true(atomic_load(&storm.calls) > 0);
    if (!stop_in_the_middle) {
        assert_true(atomic_load(&storm.fine) > 0);
        assert_true(atomic_load(&storm.cancelled) > 0);
    }
}

static double duration(void)
{
    const char *text = getenv("PS_STORM_SECONDS");
    return text && atof(text) > 0 ? atof(text) : 2;
}

static void test_cancel_storm(void **state)
{
    (void)state;
    blow(duration(), false);
}

static void test_stop_in_a_storm(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        blow(duration() / 4, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancel_storm),
        cmocka_unit_test(test_stop_in_a_storm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
