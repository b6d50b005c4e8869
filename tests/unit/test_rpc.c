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
    finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary),         cmocka_unit_test(test_client_stream),
        cmocka_unit_test(test_server_stream), cmocka_unit_test(test_bidi),
        cmocka_unit_test(test_health_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
