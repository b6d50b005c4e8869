/* SPDX-License-Identifier: Apache-2.0
 * The RPC runtime through its own interface: both sides in one process, over the loopback. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/test_rpc_probe.h"
#include <cmocka.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "grpc/health/v1/health.pb-c.h"

#include <dirent.h>
#include <signal.h>

struct fixture {
    struct probe probe;
    struct ps_rpc_server *server;
    struct ps_rpc_channel *channel;
    char target[64];
};

static const char *const loopback[] = {"127.0.0.1:0"};

static struct ps_rpc_server_config base_config(struct fixture *f)
{
    return (struct ps_rpc_server_config){
        .listen = loopback,
        .listen_count = 1,
        .methods = probe_methods,
        .method_count = PROBE_METHODS,
        .context = &f->probe,
        .descriptor_set = probe_descriptor_set,
        .descriptor_set_size = probe_descriptor_set_size,
    };
}

static void start_with(struct fixture *f, const struct ps_rpc_server_config *config)
{
    struct ps_error err = {0};
    probe_init(&f->probe);
    assert_int_equal(ps_rpc_server_start(config, &f->server, &err), 0);
    snprintf(f->target, sizeof f->target, "127.0.0.1:%d", ps_rpc_server_port(f->server, 0));
    struct ps_rpc_channel_config client = {
        .target = f->target, .token = "secret", .max_receive_bytes = 16 << 20};
    assert_int_equal(ps_rpc_channel_open(&client, &f->channel, &err), 0);
}

static void start_default(struct fixture *f)
{
    struct ps_rpc_server_config config = base_config(f);
    start_with(f, &config);
}

static void finish(struct fixture *f)
{
    ps_rpc_channel_free(f->channel);
    ps_rpc_server_free(f->server);
    probe_done(&f->probe);
}

static int echo(struct ps_rpc_channel *channel, const Note *note, double timeout_s, Note **ret,
                struct ps_error *err)
{
    ProtobufCMessage *message = NULL;
    int code = ps_rpc_unary(channel, PROBE("Echo"), &note->base, NOTE_TYPE, timeout_s, false, &message, err);
    if (code == 0)
        *ret = (Note *)message;
    return code;
}

static void free_note(Note *note)
{
    protobuf_c_message_free_unpacked(&note->base, NULL);
}

static void test_unary(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    note.text = "hello";
    note.number = -7;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_string_equal(answer->text, "hello");
    assert_int_equal(answer->number, -7);
    free_note(answer);

    char *words[] = {"for a reason"};
    note.text = "fail";
    note.words = words;
    note.n_words = 1;
    for (int code = -1; code >= -16; code--) {
        note.number = code;
        assert_int_equal(echo(f.channel, &note, 10, &answer, &err), code);
        assert_string_equal(err.message, "failed as asked: for a reason");
    }
    finish(&f);
}

static void test_client_stream(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Sum"), NOTE_TYPE, 10, &stream, &err), 0);
    Note note = NOTE_INIT;
    for (int i = 1; i <= 1000; i++) {
        note.number = i;
        assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    }
    assert_int_equal(ps_rpc_stream_close_send(stream, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), 1);
    assert_int_equal(((Note *)message)->number, 500500);
    protobuf_c_message_free_unpacked(message, NULL);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), 0); /* stays so */
    ps_rpc_stream_free(stream);
    finish(&f);
}

static void test_server_stream(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Count"), NOTE_TYPE, 10, &stream, &err), 0);
    Note note = NOTE_INIT;
    note.number = 300;
    note.text = "then fail";
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    assert_int_equal(ps_rpc_stream_close_send(stream, &err), 0);
    for (int i = 1; i <= 300; i++) {
        assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), 1);
        assert_int_equal(((Note *)message)->number, i);
        protobuf_c_message_free_unpacked(message, NULL);
    }
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_ABORTED);
    assert_string_equal(err.message, "after 300 messages");
    ps_rpc_stream_free(stream);
    finish(&f);
}

static void test_bidi(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, 10, &stream, &err), 0);
    Note note = NOTE_INIT; /* rule 17: an empty message is a message, not the end */
    for (int i = 0; i < 100; i++) {
        note.number = i;
        assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
        assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), 1);
        assert_int_equal(((Note *)message)->number, i);
        protobuf_c_message_free_unpacked(message, NULL);
    }
    assert_int_equal(ps_rpc_stream_close_send(stream, &err), 0);
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), PS_FAILED_PRECONDITION);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), 0);
    ps_rpc_stream_free(stream);
    finish(&f);
}

static int health(struct ps_rpc_channel *channel, const char *service, struct ps_error *err)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)service;
    ProtobufCMessage *message = NULL;
    int code = ps_rpc_unary(channel, "/grpc.health.v1.Health/Check", &request.base,
                            &grpc__health__v1__health_check_response__descriptor, 10, false, &message, err);
    if (code < 0)
        return code;
    int status = (int)((Grpc__Health__V1__HealthCheckResponse *)message)->status;
    protobuf_c_message_free_unpacked(message, NULL);
    return status;
}

static void test_health_check(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    assert_int_equal(health(f.channel, "", &err), 1);
    assert_int_equal(health(f.channel, "paramsync.test.v1.Probe", &err), 1);
    assert_int_equal(health(f.channel, "nobody", &err), PS_NOT_FOUND);
    ps_rpc_server_set_serving(f.server, "paramsync.test.v1.Probe", false);
    assert_int_equal(health(f.channel, "paramsync.test.v1.Probe", &err), 2);
    assert_int_equal(health(f.channel, "", &err), 1);
    for (int serving = 1; serving >= 0; serving--) {
        ps_rpc_server_set_serving(f.server, NULL, serving);
        assert_int_equal(health(f.channel, "paramsync.test.v1.Probe", &err), serving ? 1 : 2);
        assert_int_equal(health(f.channel, "", &err), serving ? 1 : 2);
    }
    assert_int_equal(health(f.channel, "nobody", &err), PS_NOT_FOUND);
    finish(&f);
}

static void test_echo_what_the_call_is(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    char *key[] = {"authorization"};
    note.text = "metadata";
    note.words = key;
    note.n_words = 1;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_string_equal(answer->text, "Bearer secret");
    free_note(answer);
    key[0] = "x-nothing";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_string_equal(answer->text, "(absent)");
    free_note(answer);
    note.text = "peer";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_non_null(strstr(answer->text, "127.0.0.1"));
    free_note(answer);
    note.text = "path";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_string_equal(answer->text, PROBE("Echo"));
    free_note(answer);
    note.text = "deadline";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_in_range(answer->number, 5000, 11000); /* the library rounds up */
    free_note(answer);
    assert_int_equal(echo(f.channel, &note, -1, &answer, &err), 0);
    assert_int_equal(answer->number, -1); /* none */
    free_note(answer);
    finish(&f);
}

static void test_one_answer_exactly(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    note.text = "silent";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), PS_INTERNAL);
    assert_non_null(strstr(err.message, "without an answer"));
    note.text = "twice";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), PS_INTERNAL);
    assert_non_null(strstr(err.message, "second"));
    finish(&f);
}

static void test_trailers_are_checked(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    char *words[2];
    note.text = "trailer";
    note.words = words;
    note.n_words = 2;
    static char *const bad[][2] = {
        {"Upper", "x"}, {"key", "new\nline"}, {"", "x"}, {"grpc-status", "0"}, {"k y", "x"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        words[0] = bad[i][0];
        words[1] = bad[i][1];
        assert_int_equal(echo(f.channel, &note, 10, &answer, &err), PS_INVALID_ARGUMENT);
    }
    words[0] = "x-good";
    words[1] = "yes";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    free_note(answer);
    finish(&f);
}

/* Rule 23, both directions: the limit passes, one byte more does not. */
static size_t packed(Note *note, size_t want)
{
    static uint8_t filler[1 << 20];
    note->data.data = filler;
    note->data.len = want > 8 ? want - 8 : 0;
    while (protobuf_c_message_get_packed_size(&note->base) < want)
        note->data.len++;
    return protobuf_c_message_get_packed_size(&note->base);
}

static void test_size_limits(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    config.max_receive_bytes = 300000;
    start_with(&f, &config);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    assert_int_equal(packed(&note, 300000), 300000);
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_int_equal(answer->data.len, note.data.len);
    free_note(answer);
    assert_int_equal(packed(&note, 300001), 300001);
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), PS_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(err.message, "larger than max"));

    struct ps_rpc_channel *small = NULL;
    struct ps_rpc_channel_config client = {.target = f.target, .max_receive_bytes = 1000};
    assert_int_equal(ps_rpc_channel_open(&client, &small, &err), 0);
    packed(&note, 1000);
    assert_int_equal(echo(small, &note, 10, &answer, &err), 0);
    free_note(answer);
    packed(&note, 1001);
    assert_int_equal(echo(small, &note, 10, &answer, &err), PS_RESOURCE_EXHAUSTED);
    ps_rpc_channel_free(small);

    /* In a stream the handler sees the call end, and the client the reason. */
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Sum"), NOTE_TYPE, 10, &stream, &err), 0);
    packed(&note, 300001);
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_RESOURCE_EXHAUSTED);
    ps_rpc_stream_free(stream);
    finish(&f);
}

/* Rule 22: a message of many slices arrives in one piece. */
static void test_large_message(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    size_t size = 3000000;
    uint8_t *data = malloc(size);
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)(i * 31 + i / 65536);
    note.data.data = data;
    note.data.len = size;
    assert_int_equal(echo(f.channel, &note, 20, &answer, &err), 0);
    assert_int_equal(answer->data.len, size);
    assert_memory_equal(answer->data.data, data, size);
    free_note(answer);
    free(data);
    finish(&f);
}

static void test_strings_are_text(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    note.text = "gr\xc3\xbc\xc3\x9f";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    assert_string_equal(answer->text, note.text);
    free_note(answer);
    note.text = "bad \xff byte";
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "text is not text"));
    Paramsync__Test__V1__Inner inner = PARAMSYNC__TEST__V1__INNER__INIT;
    inner.label = "\xc0\x80"; /* an overlong NUL */
    note.text = "";
    note.inner = &inner;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "inner.label"));

    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, 10, &stream, &err), 0);
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_INVALID_ARGUMENT);
    ps_rpc_stream_free(stream);
    finish(&f);
}

/* ---- Time ---- */

static bool becomes(atomic_int *value, int want)
{
    for (double until = ps_monotonic_s() + 10; ps_monotonic_s() < until;) {
        if (atomic_load(value) == want)
            return true;
        usleep(1000);
    }
    return false;
}

static void test_deadline_reaches_both_sides(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    note.text = "wait";
    double begin = ps_monotonic_s();
    assert_int_equal(echo(f.channel, &note, 0.2, &answer, &err), PS_DEADLINE_EXCEEDED);
    assert_true(ps_monotonic_s() - begin < 5);
    assert_non_null(strstr(err.message, f.target));
    assert_true(becomes(&f.probe.running, 0)); /* rule 14: the handler's wait has ended too */
    finish(&f);
}

struct pending {
    struct fixture *f;
    struct ps_rpc_channel *channel;
    const char *text;
    int64_t number;
    double timeout_s;
    int code;
    struct ps_error err;
    pthread_t thread;
};

static void *pending_run(void *arg)
{
    struct pending *p = arg;
    Note note = NOTE_INIT, *answer = NULL;
    note.text = (char *)p->text;
    note.number = p->number;
    p->code = echo(p->channel, &note, p->timeout_s, &answer, &p->err);
    if (p->code == 0)
        free_note(answer);
    return NULL;
}

static void pending_start(struct pending *p, struct fixture *f, const char *text, double timeout_s)
{
    *p = (struct pending){.f = f, .channel = f->channel, .text = text, .timeout_s = timeout_s};
    assert_int_equal(pthread_create(&p->thread, NULL, pending_run, p), 0);
}

static void test_wake(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct pending p;
    pending_start(&p, &f, "wait", 20);
    struct ps_rpc_call *call;
    while (!(call = atomic_load(&f.probe.waiting)))
        usleep(1000);
    ps_rpc_wake(call);
    pthread_join(p.thread, NULL);
    assert_int_equal(p.code, 0);
    /* A wait with a timeout comes back by itself. */
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    note.text = "wait";
    note.number = 50;
    assert_int_equal(echo(f.channel, &note, 20, &answer, &err), 0);
    free_note(answer);
    finish(&f);
}

/* Rule 7: a call that has waited past its deadline is not run. */
static void test_late_calls_are_not_run(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    config.workers = 1;
    start_with(&f, &config);
    struct pending held, late[8];
    pending_start(&held, &f, "hold", 20);
    assert_true(becomes(&f.probe.running, 1));
    for (int i = 0; i < 8; i++)
        pending_start(&late[i], &f, "", 0.1);
    for (int i = 0; i < 8; i++) {
        pthread_join(late[i].thread, NULL);
        assert_int_equal(late[i].code, PS_DEADLINE_EXCEEDED);
    }
    usleep(1000000); /* the server counts from when it got the call, and rounds up: let its clock get there
                        too */
    probe_open(&f.probe);
    pthread_join(held.thread, NULL);
    assert_int_equal(held.code, 0);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0); /* behind the late ones in the queue */
    free_note(answer);
    assert_int_equal(atomic_load(&f.probe.handled), 2);
    finish(&f);
}

/* Rule 2: handlers that do not come back keep nobody from asking how the server is. */
static void test_slow_handlers_do_not_delay_health(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    config.workers = 2;
    config.max_streams = 2;
    start_with(&f, &config);
    struct ps_error err = {0};
    struct pending held[4];
    for (int i = 0; i < 4; i++)
        pending_start(&held[i], &f, "hold", 30);
    struct ps_rpc_stream *streams[3];
    Note note = NOTE_INIT;
    note.text = "hold";
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, 30, &streams[i], &err), 0);
        assert_int_equal(ps_rpc_stream_send(streams[i], &note.base, &err), 0);
    }
    assert_true(becomes(&f.probe.running, 4)); /* two unary ones and two streams; two unary ones wait */
    double begin = ps_monotonic_s();
    for (int i = 0; i < 20; i++)
        assert_int_equal(health(f.channel, "", &err), 1);
    assert_true(ps_monotonic_s() - begin < 5);
    /* One stream more than may run is turned away, not queued. */
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, 30, &streams[2], &err), 0);
    assert_int_equal(ps_rpc_stream_recv(streams[2], &message, &err), PS_RESOURCE_EXHAUSTED);
    probe_open(&f.probe);
    for (int i = 0; i < 3; i++)
        ps_rpc_stream_free(streams[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(held[i].thread, NULL);
        assert_int_equal(held[i].code, 0);
    }
    finish(&f);
}

/* What waits for a worker is bounded in bytes too: the rest is turned away, and nothing is lost. */
static void *pending_block(void *arg)
{
    static uint8_t block[3 << 20];
    struct pending *p = arg;
    Note note = NOTE_INIT, *answer = NULL;
    note.text = "hold";
    note.data.data = block;
    note.data.len = sizeof block;
    p->code = echo(p->channel, &note, 60, &answer, &p->err);
    if (p->code == 0)
        free_note(answer);
    return NULL;
}

static void test_waiting_requests_are_bounded(void **state)
{
    (void)state;
    enum { CALLS = 30 }; /* 90 MiB */
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    config.workers = 1;
    start_with(&f, &config);
    struct pending held[CALLS];
    for (int i = 0; i < CALLS; i++) {
        held[i] = (struct pending){.f = &f, .channel = f.channel};
        assert_int_equal(pthread_create(&held[i].thread, NULL, pending_block, &held[i]), 0);
    }
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    /* Refusals come while the others are held; when the first has come the bound has been reached. */
    double until = ps_monotonic_s() + 30;
    static uint8_t block[3 << 20];
    note.data.data = block;
    note.data.len = sizeof block;
    int code;
    do {
        code = echo(f.channel, &note, 0.5, &answer, &err);
        if (code == 0) /* it came before the others */
            free_note(answer);
    } while (code != PS_RESOURCE_EXHAUSTED && ps_monotonic_s() < until);
    assert_int_equal(code, PS_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(err.message, "busy"));
    probe_open(&f.probe);
    int good = 0, refused = 0;
    for (int i = 0; i < CALLS; i++) {
        pthread_join(held[i].thread, NULL);
        good += held[i].code == 0;
        refused += held[i].code == PS_RESOURCE_EXHAUSTED;
    }
    assert_int_equal(good + refused, CALLS);
    assert_true(good >= 1); /* how many depends on who came before the first refusal */
    note.data.len = 10;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    free_note(answer);
    finish(&f);
}

/* ---- Cancellation and back-pressure ---- */

static void *cancel_later(void *arg)
{
    usleep(100000);
    ps_rpc_stream_cancel(arg);
    return NULL;
}

static void test_cancel_from_another_thread(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    Note note = NOTE_INIT;
    note.text = "wait";
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, -1, &stream, &err), 0);
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    assert_true(becomes(&f.probe.running, 1));
    pthread_t thread;
    pthread_create(&thread, NULL, cancel_later, stream);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_CANCELLED);
    assert_true(becomes(&f.probe.running, 0)); /* rules 14 and 16: the handler learns of it */
    assert_true(ps_rpc_stream_send(stream, &note.base, &err) < 0);
    pthread_join(thread, NULL);
    ps_rpc_stream_free(stream);
    finish(&f);
}

static long resident_kib(void)
{
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld %ld", &pages, &resident), 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Rule 26: a client that does not read stops the handler, and memory stays. */
static void test_dead_reader(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    struct ps_rpc_stream *stream;
    static uint8_t block[65536];
    Note note = NOTE_INIT;
    note.number = 100000; /* 6.5 GB, were they taken */
    note.data.data = block;
    note.data.len = sizeof block;
    long before = resident_kib();
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Count"), NOTE_TYPE, -1, &stream, &err), 0);
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    int sent = -1;
    double until = ps_monotonic_s() + 30;
    for (int still = 0; still < 8 && ps_monotonic_s() < until; still++) { /* stuck: no progress for 0.8 s */
        if (atomic_load(&f.probe.sent) != sent || sent == 0)
            still = 0;
        sent = atomic_load(&f.probe.sent);
        usleep(100000);
    }
    assert_in_range(sent, 1, 1000);
    assert_true(resident_kib() - before < 150000);
    assert_int_equal(atomic_load(&f.probe.running), 1);
    ps_rpc_stream_free(stream); /* cancels */
    assert_true(becomes(&f.probe.running, 0));
    finish(&f);
}

/* Rule 4: a handler that receives while a thread of its own sends, as acknowledgements are sent once they are
 * durable. */
struct acks {
    struct ps_rpc_call *call;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t received;
    bool end;
};

static void *send_acks(void *arg)
{
    struct acks *acks = arg;
    Note ack = NOTE_INIT;
    pthread_mutex_lock(&acks->lock);
    while (!acks->end || ack.number < acks->received) {
        if (ack.number == acks->received) {
            pthread_cond_wait(&acks->changed, &acks->lock);
            continue;
        }
        ack.number = acks->received; /* one for all that have come meanwhile */
        pthread_mutex_unlock(&acks->lock);
        int code = ps_rpc_send(acks->call, &ack.base, NULL);
        pthread_mutex_lock(&acks->lock);
        if (code < 0)
            break;
    }
    pthread_mutex_unlock(&acks->lock);
    return NULL;
}

static int acknowledge(struct ps_rpc_call *call, const ProtobufCMessage *unused, void *context,
                       struct ps_error *err)
{
    (void)unused, (void)context;
    struct acks acks = {.call = call, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    pthread_t sender;
    if (pthread_create(&sender, NULL, send_acks, &acks))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "no thread");
    ProtobufCMessage *message = NULL;
    int code;
    while ((code = ps_rpc_recv_or_drain(call, &message, err)) == 1) {
        pthread_mutex_lock(&acks.lock);
        acks.received++;
        pthread_cond_signal(&acks.changed);
        pthread_mutex_unlock(&acks.lock);
        protobuf_c_message_free_unpacked(message, NULL);
    }
    pthread_mutex_lock(&acks.lock);
    acks.end = true;
    pthread_cond_signal(&acks.changed);
    pthread_mutex_unlock(&acks.lock);
    pthread_join(sender, NULL);
    return code;
}

static void *send_2000(void *arg)
{
    struct ps_rpc_stream *stream = arg;
    struct ps_error err = {0};
    Note note = NOTE_INIT;
    for (int i = 0; i < 2000; i++)
        if (ps_rpc_stream_send(stream, &note.base, &err))
            return stream;
    return ps_rpc_stream_close_send(stream, &err) ? stream : NULL;
}

static void test_both_directions_at_once(void **state)
{
    (void)state;
    static const struct ps_rpc_method methods[] = {
        {PROBE("Chat"), PS_RPC_BIDI, NOTE_TYPE, NOTE_TYPE, acknowledge, false}};
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    config.methods = methods;
    config.method_count = 1;
    start_with(&f, &config);
    struct ps_error err = {0};
    struct ps_rpc_stream *stream;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, 60, &stream, &err), 0);
    pthread_t sender;
    assert_int_equal(pthread_create(&sender, NULL, send_2000, stream), 0);
    ProtobufCMessage *message = NULL;
    int64_t last = 0;
    int code;
    while ((code = ps_rpc_stream_recv(stream, &message, &err)) == 1) {
        int64_t number = ((Note *)message)->number;
        protobuf_c_message_free_unpacked(message, NULL);
        assert_true(number > last);
        last = number;
    }
    assert_int_equal(code, 0);
    assert_int_equal(last, 2000);
    void *failed;
    pthread_join(sender, &failed);
    assert_null(failed);
    ps_rpc_stream_free(stream);
    finish(&f);
}

/* ---- Interceptor ---- */

static int only_the_secret(struct ps_rpc_call *call, void *context, struct ps_error *err)
{
    (void)context;
    const char *value = ps_rpc_metadata(call, "authorization");
    if (!value || strcmp(value, "Bearer secret") != 0)
        return ps_fail(err, PS_UNAUTHENTICATED, "a token is needed for %s", ps_rpc_path(call));
    return 0;
}

static void test_interceptor(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    config.intercept = only_the_secret;
    start_with(&f, &config);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    free_note(answer);
    struct ps_rpc_channel *stranger = NULL;
    struct ps_rpc_channel_config client = {.target = f.target};
    assert_int_equal(ps_rpc_channel_open(&client, &stranger, &err), 0);
    assert_int_equal(echo(stranger, &note, 10, &answer, &err), PS_UNAUTHENTICATED);
    assert_string_equal(err.message, "a token is needed for " PROBE("Echo"));
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(stranger, PROBE("Chat"), NOTE_TYPE, 10, &stream, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_UNAUTHENTICATED);
    ps_rpc_stream_free(stream);
    assert_int_equal(atomic_load(&f.probe.handled), 1);
    assert_int_equal(health(stranger, "", &err), 1); /* probes carry no token */
    ps_rpc_channel_free(stranger);

    static const char *const bad[] = {"", "two\nlines", "\xc3\xbc"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        client.token = bad[i];
        assert_int_equal(ps_rpc_channel_open(&client, &stranger, &err), PS_INVALID_ARGUMENT);
    }
    finish(&f);
}

/* ---- Starting and stopping ---- */

static void test_bad_tables_are_refused(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_rpc_server_config config = base_config(&f);
    struct ps_error err = {0};
    struct ps_rpc_method table[2] = {probe_methods[0], probe_methods[0]};
    config.methods = table;
    config.method_count = 2;
    assert_int_equal(ps_rpc_server_start(&config, &f.server, &err), PS_INVALID_ARGUMENT); /* rule 6 */
    assert_non_null(strstr(err.message, PROBE("Echo") " stands there twice"));
    config.method_count = 1;
    table[0].kind = PS_RPC_BIDI;
    assert_int_equal(ps_rpc_server_start(&config, &f.server, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "is unary in the .proto file, not bidirectional"));
    table[0] = probe_methods[0];
    table[0].response = &paramsync__test__v1__inner__descriptor;
    assert_int_equal(ps_rpc_server_start(&config, &f.server, &err), PS_INVALID_ARGUMENT);
    table[0] = probe_methods[0];
    table[0].path = PROBE("Nothing");
    assert_int_equal(ps_rpc_server_start(&config, &f.server, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, PROBE("Nothing")));
    config.descriptor_set = NULL; /* the paramsync protos know no Probe */
    config.methods = probe_methods;
    assert_int_equal(ps_rpc_server_start(&config, &f.server, &err), PS_INVALID_ARGUMENT);
}

static void test_port_taken(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_rpc_server_config config = base_config(&f);
    const char *same[] = {f.target};
    config.listen = same;
    struct ps_rpc_server *second = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_server_start(&config, &second, &err), PS_UNAVAILABLE); /* rule 28 */
    assert_non_null(strstr(err.message, f.target));
    assert_non_null(strstr(err.message, "in use"));
    same[0] = "127.0.0.1:99999";
    assert_int_equal(ps_rpc_server_start(&config, &second, &err), PS_INVALID_ARGUMENT);
    same[0] = "no such host.invalid:0";
    assert_true(ps_rpc_server_start(&config, &second, &err) < 0);
    assert_non_null(strstr(err.message, "no such host.invalid"));
    finish(&f);
}

static void test_listening_everywhere(void **state)
{
    (void)state;
    struct fixture f;
    static const char *const everywhere[] = {":0"};
    struct ps_rpc_server_config config = base_config(&f);
    config.listen = everywhere;
    start_with(&f, &config); /* its client comes to 127.0.0.1 */
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    free_note(answer);
    finish(&f);
}

static void test_unix_socket(void **state)
{
    (void)state;
    struct fixture f;
    char folder[] = "/tmp/ps-rpc-XXXXXX", listen_on[64], file[80];
    assert_non_null(mkdtemp(folder));
    snprintf(listen_on, sizeof listen_on, "unix:%s/s", folder);
    const char *paths[] = {listen_on, "127.0.0.1:0"};
    struct ps_rpc_server_config config = base_config(&f);
    config.listen = paths;
    config.listen_count = 2;
    struct ps_error err = {0};
    for (int round = 0; round < 2; round++) { /* the second one finds the lock file of the first */
        start_with(&f, &config);
        assert_int_equal(ps_rpc_server_port(f.server, 0), 0);
        assert_true(ps_rpc_server_port(f.server, 1) > 0);
        ps_rpc_channel_free(f.channel);
        struct ps_rpc_channel_config client = {.target = listen_on};
        assert_int_equal(ps_rpc_channel_open(&client, &f.channel, &err), 0);
        Note note = NOTE_INIT, *answer = NULL;
        assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
        free_note(answer);
        struct ps_rpc_server *second = NULL;
        assert_int_equal(ps_rpc_server_start(&config, &second, &err), PS_UNAVAILABLE); /* rule 29 */
        assert_non_null(strstr(err.message, "another server listens"));
        assert_int_equal(echo(f.channel, &note, 10, &answer, &err),
                         0); /* and the first has kept its socket */
        free_note(answer);
        finish(&f);
    }
    snprintf(file, sizeof file, "%s/s", folder);
    unlink(file);
    snprintf(file, sizeof file, "%s/s.lock", folder);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(folder), 0);
    char long_path[200] = "unix:/tmp/";
    memset(long_path + 10, 'x', 150);
    paths[0] = long_path;
    struct ps_rpc_server *second = NULL;
    assert_int_equal(ps_rpc_server_start(&config, &second, &err), PS_INVALID_ARGUMENT);
}

static void test_nobody_listens(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    ps_rpc_server_free(f.server); /* its port is free now */
    f.server = NULL;
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    double begin = ps_monotonic_s();
    assert_int_equal(echo(f.channel, &note, 20, &answer, &err), PS_UNAVAILABLE);
    assert_true(ps_monotonic_s() - begin < 15);
    assert_non_null(strstr(err.message, "cannot connect to "));
    assert_non_null(strstr(err.message, f.target));
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, 20, &stream, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_UNAVAILABLE);
    assert_non_null(strstr(err.message, f.target));
    ps_rpc_stream_free(stream);
    struct ps_rpc_channel *nowhere = NULL;
    struct ps_rpc_channel_config client = {.target = "no-such-host.invalid:1"};
    assert_int_equal(ps_rpc_channel_open(&client, &nowhere, &err), 0);
    int code = echo(nowhere, &note, 20, &answer, &err);
    assert_true(code == PS_UNAVAILABLE || code == PS_DEADLINE_EXCEEDED); /* a name server may keep silent */
    assert_non_null(strstr(err.message, "no-such-host.invalid:1"));
    ps_rpc_channel_free(nowhere);
    /* Waiting for the server stops at the deadline. */
    assert_int_equal(ps_rpc_unary(f.channel, PROBE("Echo"), &note.base, NOTE_TYPE, 0.3, true, &message, &err),
                     PS_DEADLINE_EXCEEDED);
    finish(&f);
}

static void *start_later(void *arg)
{
    struct fixture *f = arg;
    usleep(300000);
    struct ps_rpc_server_config config = base_config(f);
    const char *same[] = {f->target};
    config.listen = same;
    struct ps_error err = {0};
    return ps_rpc_server_start(&config, &f->server, &err) ? (void *)f : NULL;
}

static void test_wait_for_ready_and_restart(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    ps_rpc_server_free(f.server);
    pthread_t thread;
    pthread_create(&thread, NULL, start_later, &f);
    struct ps_error err = {0};
    Note note = NOTE_INIT;
    ProtobufCMessage *message = NULL;
    note.text = "patient";
    assert_int_equal(ps_rpc_unary(f.channel, PROBE("Echo"), &note.base, NOTE_TYPE, 20, true, &message, &err),
                     0);
    protobuf_c_message_free_unpacked(message, NULL);
    void *failed;
    pthread_join(thread, &failed);
    assert_null(failed);
    finish(&f);
}

static void *stop_with_grace(void *arg)
{
    ps_rpc_server_stop(arg, 10);
    return NULL;
}

/* Rule 33: running calls end well, waits end, new calls are turned away. */
static void test_drain(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    struct ps_rpc_stream *watch, *chat;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, "/grpc.health.v1.Health/Watch",
                                        &grpc__health__v1__health_check_response__descriptor, -1, &watch,
                                        &err),
                     0);
    assert_int_equal(ps_rpc_stream_send(watch, &request.base, &err), 0);
    assert_int_equal(ps_rpc_stream_recv(watch, &message, &err), 1);
    assert_int_equal(((Grpc__Health__V1__HealthCheckResponse *)message)->status, 1);
    protobuf_c_message_free_unpacked(message, NULL);
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Chat"), NOTE_TYPE, -1, &chat, &err), 0);
    struct pending held, waiting;
    pending_start(&held, &f, "hold", 30);
    pending_start(&waiting, &f, "wait", 30);
    assert_true(becomes(&f.probe.running, 3));

    pthread_t stopper;
    pthread_create(&stopper, NULL, stop_with_grace, f.server);
    assert_int_equal(ps_rpc_stream_recv(watch, &message, &err), 1); /* the news first, then the end */
    assert_int_equal(((Grpc__Health__V1__HealthCheckResponse *)message)->status, 2);
    protobuf_c_message_free_unpacked(message, NULL);
    assert_int_equal(ps_rpc_stream_recv(watch, &message, &err), PS_UNAVAILABLE);
    assert_int_equal(ps_rpc_stream_recv(chat, &message, &err), PS_UNAVAILABLE); /* recv_or_drain */
    pthread_join(waiting.thread, NULL);
    assert_int_equal(waiting.code, PS_UNAVAILABLE);
    Note note = NOTE_INIT, *answer = NULL;
    struct ps_rpc_channel *late = NULL;
    struct ps_rpc_channel_config client = {.target = f.target};
    assert_int_equal(ps_rpc_channel_open(&client, &late, &err), 0);
    assert_int_equal(echo(late, &note, 5, &answer, &err), PS_UNAVAILABLE);
    ps_rpc_channel_free(late);
    assert_int_equal(atomic_load(&f.probe.running), 1);
    probe_open(&f.probe);
    pthread_join(held.thread, NULL);
    assert_int_equal(held.code, 0); /* what was running has ended well */
    pthread_join(stopper, NULL);
    ps_rpc_stream_free(watch);
    ps_rpc_stream_free(chat);
    finish(&f);
}

/* Rule 33: after the grace everything is cancelled, and stop comes back. */
static void test_stop_cancels_after_the_grace(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    struct ps_rpc_stream *sum;
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_open(f.channel, PROBE("Sum"), NOTE_TYPE, -1, &sum, &err), 0);
    Note note = NOTE_INIT;
    assert_int_equal(ps_rpc_stream_send(sum, &note.base, &err), 0);
    assert_true(becomes(&f.probe.running, 1));
    double begin = ps_monotonic_s();
    ps_rpc_server_stop(f.server, 0.3);
    double took = ps_monotonic_s() - begin;
    assert_true(took >= 0.3 && took < 10);
    assert_int_equal(atomic_load(&f.probe.running), 0);
    assert_true(ps_rpc_stream_recv(sum, &message, &err) < 0);
    ps_rpc_stream_free(sum);
    finish(&f);
}

static void test_health_watch(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    struct ps_rpc_stream *watch;
    ProtobufCMessage *message = NULL;
    request.service = "later";
    assert_int_equal(ps_rpc_stream_open(f.channel, "/grpc.health.v1.Health/Watch",
                                        &grpc__health__v1__health_check_response__descriptor, 20, &watch,
                                        &err),
                     0);
    assert_int_equal(ps_rpc_stream_send(watch, &request.base, &err), 0);
    static const int news[] = {3, 1, 2, 1}; /* SERVICE_UNKNOWN, and the call stays open */
    for (int i = 0; i < 4; i++) {
        if (i)
            ps_rpc_server_set_serving(f.server, "later", news[i] == 1);
        assert_int_equal(ps_rpc_stream_recv(watch, &message, &err), 1);
        assert_int_equal(((Grpc__Health__V1__HealthCheckResponse *)message)->status, news[i]);
        protobuf_c_message_free_unpacked(message, NULL);
    }
    ps_rpc_stream_free(watch);
    finish(&f);
}

/* Rule 5: no thread of the runtime takes the process's signals. */
static void test_threads_block_signals(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct ps_error err = {0};
    Note note = NOTE_INIT, *answer = NULL;
    assert_int_equal(echo(f.channel, &note, 10, &answer, &err), 0);
    free_note(answer);
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    struct dirent *entry;
    int seen = 0;
    while ((entry = readdir(tasks))) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
            continue;
        char path[300], line[256], name[64] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file)
            continue; /* it has just ended */
        unsigned long long blocked = 0;
        while (fgets(line, sizeof line, file)) {
            sscanf(line, "Name: %63s", name);
            if (sscanf(line, "SigBlk: %llx", &blocked) == 1)
                seen++;
        }
        fclose(file);
        unsigned long long want = 1ull << (SIGTERM - 1) | 1ull << (SIGINT - 1) | 1ull << (SIGUSR1 - 1);
        if (getenv("PS_TSAN_BACKGROUND") || !strcmp(name, "test_rpc"))
            want = 0; /* a sanitizer's own thread, or one that was there before us */
        if ((blocked & want) != want)
            print_error("thread %s\n", name);
        assert_int_equal(blocked & want, want);
    }
    closedir(tasks);
    assert_true(seen >= 3);
    finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary),
        cmocka_unit_test(test_client_stream),
        cmocka_unit_test(test_server_stream),
        cmocka_unit_test(test_bidi),
        cmocka_unit_test(test_health_check),
        cmocka_unit_test(test_echo_what_the_call_is),
        cmocka_unit_test(test_one_answer_exactly),
        cmocka_unit_test(test_trailers_are_checked),
        cmocka_unit_test(test_size_limits),
        cmocka_unit_test(test_large_message),
        cmocka_unit_test(test_strings_are_text),
        cmocka_unit_test(test_deadline_reaches_both_sides),
        cmocka_unit_test(test_wake),
        cmocka_unit_test(test_late_calls_are_not_run),
        cmocka_unit_test(test_slow_handlers_do_not_delay_health),
        cmocka_unit_test(test_waiting_requests_are_bounded),
        cmocka_unit_test(test_cancel_from_another_thread),
        cmocka_unit_test(test_dead_reader),
        cmocka_unit_test(test_both_directions_at_once),
        cmocka_unit_test(test_interceptor),
        cmocka_unit_test(test_bad_tables_are_refused),
        cmocka_unit_test(test_port_taken),
        cmocka_unit_test(test_listening_everywhere),
        cmocka_unit_test(test_unix_socket),
        cmocka_unit_test(test_nobody_listens),
        cmocka_unit_test(test_wait_for_ready_and_restart),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_stop_cancels_after_the_grace),
        cmocka_unit_test(test_health_watch),
        cmocka_unit_test(test_threads_block_signals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
