/* SPDX-License-Identifier: Apache-2.0
 * The RPC server against a client that is not ours but the gRPC C core itself, which can do what our own
 * client never does: leave out the request, send bytes that are no message, ask for what does not exist,
 * start a hundred calls at once. And what the core does when its rules are broken, since the runtime is built
 * around that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/rpc/server.h"
#include "tests/unit/test_rpc_probe.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

struct fixture {
    struct probe probe;
    struct ps_rpc_server *server;
    grpc_channel *channel;
    grpc_completion_queue *cq; /* for plucking */
};

static const char *const loopback[] = {"127.0.0.1:0"};

static void start_server(struct fixture *f, const struct ps_rpc_method *methods, size_t count, int workers)
{
    probe_init(&f->probe);
    struct ps_rpc_server_config config = {
        .listen = loopback,
        .listen_count = 1,
        .methods = methods,
        .method_count = count,
        .context = &f->probe,
        .workers = workers,
        .descriptor_set = probe_descriptor_set,
        .descriptor_set_size = probe_descriptor_set_size,
    };
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_server_start(&config, &f->server, &err), 0);
    grpc_init();
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", ps_rpc_server_port(f->server, 0));
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, .value.integer = 1};
    grpc_channel_args args = {.num_args = 1, .args = &arg};
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    f->channel = grpc_channel_create(target, credentials, &args);
    grpc_channel_credentials_release(credentials);
    f->cq = grpc_completion_queue_create_for_pluck(NULL);
}

static void start_default(struct fixture *f)
{
    start_server(f, probe_methods, PROBE_METHODS, 0);
}

static void finish(struct fixture *f)
{
    grpc_channel_destroy(f->channel);
    grpc_completion_queue_shutdown(f->cq);
    grpc_completion_queue_destroy(f->cq);
    grpc_shutdown();
    ps_rpc_server_free(f->server);
    probe_done(&f->probe);
}

static gpr_timespec in(int seconds)
{
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(seconds, GPR_TIMESPAN));
}

static grpc_call *new_call(struct fixture *f, const char *path, int seconds)
{
    return grpc_channel_create_call(f->channel, NULL, GRPC_PROPAGATE_DEFAULTS, f->cq,
                                    grpc_slice_from_static_string(path), NULL, in(seconds), NULL);
}

static void pluck(struct fixture *f, void *tag, bool *ret_ok)
{
    grpc_event event = grpc_completion_queue_pluck(f->cq, tag, in(20), NULL);
    assert_int_equal(event.type, GRPC_OP_COMPLETE);
    if (ret_ok)
        *ret_ok = event.success != 0;
}

struct result {
    grpc_status_code status;
    grpc_slice details;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *message;
    char text[2048]; /* details */
};

/* One call with count messages (bytes may be NULL, for empty ones), then the end. */
static void raw_call(struct fixture *f, const char *path, const void *bytes, size_t size, size_t count,
                     int seconds, struct result *r)
{
    memset(r, 0, sizeof *r);
    grpc_metadata_array_init(&r->initial);
    grpc_metadata_array_init(&r->trailing);
    grpc_call *call = new_call(f, path, seconds);
    grpc_slice slice = grpc_slice_from_copied_buffer(bytes ? bytes : "", size);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    grpc_op ops[6] = {{.op = GRPC_OP_SEND_INITIAL_METADATA}};
    size_t n = 1;
    if (count) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = buffer;
    }
    ops[n++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[n].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[n++].data.recv_initial_metadata.recv_initial_metadata = &r->initial;
    ops[n].op = GRPC_OP_RECV_MESSAGE;
    ops[n++].data.recv_message.recv_message = &r->message;
    ops[n].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[n].data.recv_status_on_client.status = &r->status;
    ops[n].data.recv_status_on_client.status_details = &r->details;
    ops[n++].data.recv_status_on_client.trailing_metadata = &r->trailing;
    assert_int_equal(grpc_call_start_batch(call, ops, n, f, NULL), GRPC_CALL_OK);
    pluck(f, f, NULL);
    size_t length = GRPC_SLICE_LENGTH(r->details);
    assert_true(length < sizeof r->text);
    memcpy(r->text, GRPC_SLICE_START_PTR(r->details), length);
    grpc_byte_buffer_destroy(buffer);
    grpc_byte_buffer_destroy(r->message);
    grpc_slice_unref(r->details);
    grpc_metadata_array_destroy(&r->initial);
    grpc_metadata_array_destroy(&r->trailing);
    grpc_call_unref(call);
}

/* Rule 8: at once, not at the client's deadline. */
static void test_unknown_methods_are_refused(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct result r;
    double begin = ps_monotonic_s();
    for (int i = 0; i < 20; i++) { /* more often than requests are posted */
        raw_call(&f, "/paramsync.test.v1.Probe/Nothing", "x", 1, 1, 30, &r);
        assert_int_equal(r.status, GRPC_STATUS_UNIMPLEMENTED);
        assert_non_null(strstr(r.text, "/paramsync.test.v1.Probe/Nothing"));
        raw_call(&f, "/nobody/Nothing", NULL, 0, 0, 30, &r);
        assert_int_equal(r.status, GRPC_STATUS_UNIMPLEMENTED);
    }
    assert_true(ps_monotonic_s() - begin < 10);
    finish(&f);
}

/* Rule 17. */
static void test_missing_and_empty_requests(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct result r;
    raw_call(&f, PROBE("Echo"), NULL, 0, 0, 30, &r);
    assert_int_equal(r.status, GRPC_STATUS_UNIMPLEMENTED);
    assert_non_null(strstr(r.text, "none came"));
    raw_call(&f, PROBE("Count"), NULL, 0, 0, 30, &r);
    assert_int_equal(r.status, GRPC_STATUS_UNIMPLEMENTED);
    assert_int_equal(atomic_load(&f.probe.handled), 0);
    raw_call(&f, PROBE("Echo"), NULL, 0, 1, 30, &r); /* no bytes are a message of defaults */
    assert_int_equal(r.status, GRPC_STATUS_OK);
    raw_call(&f, PROBE("Sum"), NULL, 0, 0, 30, &r); /* a stream may be empty */
    assert_int_equal(r.status, GRPC_STATUS_OK);
    raw_call(&f, PROBE("Chat"), NULL, 0, 0, 30, &r);
    assert_int_equal(r.status, GRPC_STATUS_OK);
    finish(&f);
}

static void test_bad_bytes(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    struct result r;
    static const struct {
        const char *bytes;
        size_t size;
        grpc_status_code status;
    } cases[] = {
        {"\x0a\x05"
         "ab",
         4, GRPC_STATUS_INTERNAL}, /* shorter than it says */
        {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 11, GRPC_STATUS_INTERNAL},
        {"\x0b\x0c", 2, GRPC_STATUS_INTERNAL}, /* a group */
        {"\x08\x01", 2, GRPC_STATUS_INTERNAL}, /* text as a number */
        {"\x0a\x03"
         "a\0b",
         5, GRPC_STATUS_INVALID_ARGUMENT}, /* a NUL that C would not see */
        {"\x0a\x01\x80", 3, GRPC_STATUS_INVALID_ARGUMENT},
        {"\x2a\x01"
         "x\x2a\x01\xfe",
         6, GRPC_STATUS_INVALID_ARGUMENT},       /* in the second of repeated ones */
        {"\x7a\x02\xff\xff", 4, GRPC_STATUS_OK}, /* an unknown field is none of our business */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        raw_call(&f, PROBE("Echo"), cases[i].bytes, cases[i].size, 1, 30, &r);
        assert_int_equal(r.status, cases[i].status);
        raw_call(&f, PROBE("Sum"), cases[i].bytes, cases[i].size, 1, 30, &r);
        assert_int_equal(r.status, cases[i].status);
    }
    finish(&f);
}

/* Rule 7: more calls at once than requests are posted and workers are there. */
static void test_burst(void **state)
{
    (void)state;
    enum { CALLS = 300 };
    struct fixture f;
    start_server(&f, probe_methods, PROBE_METHODS, 2);
    grpc_completion_queue *cq = grpc_completion_queue_create_for_next(NULL);
    static struct {
        grpc_call *call;
        struct result r;
    } all[CALLS];
    memset(all, 0, sizeof all);
    grpc_slice slice = grpc_slice_from_static_string("\x10\x07");
    grpc_byte_buffer *buffers[CALLS];
    for (int i = 0; i < CALLS; i++) {
        struct result *r = &all[i].r;
        buffers[i] = grpc_raw_byte_buffer_create(&slice, 1);
        all[i].call =
            grpc_channel_create_call(f.channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
                                     grpc_slice_from_static_string(PROBE("Echo")), NULL, in(30), NULL);
        grpc_op ops[6] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},  {.op = GRPC_OP_SEND_MESSAGE},
                          {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}, {.op = GRPC_OP_RECV_INITIAL_METADATA},
                          {.op = GRPC_OP_RECV_MESSAGE},           {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
        ops[1].data.send_message.send_message = buffers[i];
        ops[3].data.recv_initial_metadata.recv_initial_metadata = &r->initial;
        ops[4].data.recv_message.recv_message = &r->message;
        ops[5].data.recv_status_on_client.status = &r->status;
        ops[5].data.recv_status_on_client.status_details = &r->details;
        ops[5].data.recv_status_on_client.trailing_metadata = &r->trailing;
        assert_int_equal(grpc_call_start_batch(all[i].call, ops, 6, &all[i], NULL), GRPC_CALL_OK);
    }
    for (int i = 0; i < CALLS; i++) {
        grpc_event event = grpc_completion_queue_next(cq, in(30), NULL);
        assert_int_equal(event.type, GRPC_OP_COMPLETE);
    }
    for (int i = 0; i < CALLS; i++) {
        assert_int_equal(all[i].r.status, GRPC_STATUS_OK);
        assert_non_null(all[i].r.message);
        grpc_byte_buffer_destroy(all[i].r.message);
        grpc_byte_buffer_destroy(buffers[i]);
        grpc_slice_unref(all[i].r.details);
        grpc_metadata_array_destroy(&all[i].r.initial);
        grpc_metadata_array_destroy(&all[i].r.trailing);
        grpc_call_unref(all[i].call);
    }
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, in(5), NULL).type != GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_completion_queue_destroy(cq);
    assert_int_equal(atomic_load(&f.probe.handled), CALLS);
    finish(&f);
}

/* Rule 12: when the core refuses a batch the call is given up with INTERNAL, and all that waits for it ends.
 * The handler makes the runtime send its headers a second time, which no public function can. */
static int spoiled(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                   struct ps_error *err)
{
    struct probe *probe = context;
    int code = ps_rpc_send(call, message, err);
    pthread_mutex_lock(&call->lock);
    while (call->sending)
        pthread_cond_wait(&call->changed, &call->lock);
    call->initial_sent = false;
    pthread_mutex_unlock(&call->lock);
    int refused = ps_rpc_send(call, message, err);
    int waited = ps_rpc_wait(call, -1, NULL);
    int again = ps_rpc_send(call, message, NULL);
    atomic_fetch_add(&probe->handled, code == 0 && refused < 0 && waited < 0 && again < 0 ? 1 : 100);
    return refused;
}

static void test_refused_batch_ends_the_call(void **state)
{
    (void)state;
    static const struct ps_rpc_method methods[] = {
        {PROBE("Count"), PS_RPC_SERVER_STREAM, NOTE_TYPE, NOTE_TYPE, spoiled, false}};
    struct fixture f;
    start_server(&f, methods, 1, 0);
    struct result r;
    raw_call(&f, PROBE("Count"), NULL, 0, 1, 20, &r);
    assert_int_equal(r.status, GRPC_STATUS_INTERNAL);
    ps_rpc_server_stop(f.server, 10);
    assert_int_equal(atomic_load(&f.probe.handled), 1);
    finish(&f);
}

/* Rules 10 and 11: what the core says to a batch that breaks its rules. Were this to change, start() in
 * call.c and client.c would have to be looked at again. */
static void test_core_refuses_bad_batches(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    grpc_call *call = new_call(&f, PROBE("Chat"), 30);
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA, .flags = 0xffff0000u};
    assert_int_equal(grpc_call_start_batch(call, &op, 1, &op, NULL), GRPC_CALL_ERROR_INVALID_FLAGS);
    grpc_call_cancel(call, NULL);
    grpc_call_unref(call);

    call = new_call(&f, PROBE("Chat"), 30);
    grpc_op first = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    assert_int_equal(grpc_call_start_batch(call, &first, 1, &first, NULL), GRPC_CALL_OK);
    pluck(&f, &first, NULL);
    assert_int_equal(grpc_call_start_batch(call, &first, 1, &first, NULL),
                     GRPC_CALL_ERROR_TOO_MANY_OPERATIONS);
    grpc_call_cancel(call, NULL);
    grpc_call_unref(call);
    finish(&f);
}

/* Rules 13 and 15: whatever way a handler takes, the client gets exactly one status. */
static void test_every_path_has_a_status(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    static const char *const paths[] = {PROBE("Echo"), PROBE("Sum"), PROBE("Count"), PROBE("Chat")};
    struct result r;
    for (size_t i = 0; i < 4; i++) {
        /* "fail" with PS_ABORTED (-10, zigzag is not used: ten bytes) */
        static const char fail[] = "\x0a\x04"
                                   "fail\x10\xf6\xff\xff\xff\xff\xff\xff\xff\xff\x01";
        raw_call(&f, paths[i], fail, sizeof fail - 1, 1, 30, &r);
        assert_int_equal(r.status, GRPC_STATUS_ABORTED);
        assert_string_equal(r.text, "failed as asked:");
        /* OK, with and without a message before it */
        raw_call(&f, paths[i], "\x10\x01", 2, 1, 30, &r);
        assert_int_equal(r.status, GRPC_STATUS_OK);
        raw_call(&f, paths[i], "\x10\x00", 2, 1, 30, &r);
        assert_int_equal(r.status, GRPC_STATUS_OK);
    }
    finish(&f);
}

/* Rule 20: long details are cut at a character, so that the status itself arrives. */
static void test_details_are_capped(void **state)
{
    (void)state;
    char text[9001];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    grpc_slice slice = ps_rpc_details_slice(text, PS_RPC_MAX_DETAILS);
    assert_int_equal(GRPC_SLICE_LENGTH(slice), PS_RPC_MAX_DETAILS);
    grpc_slice_unref(slice);
    memcpy(text + 1022, "\xe2\x82\xac", 3); /* the euro sign straddles the end */
    slice = ps_rpc_details_slice(text, PS_RPC_MAX_DETAILS);
    assert_int_equal(GRPC_SLICE_LENGTH(slice), 1022);
    grpc_slice_unref(slice);
    slice = ps_rpc_details_slice("a\xff"
                                 "b\xe2\x82",
                                 PS_RPC_MAX_DETAILS);
    assert_int_equal(GRPC_SLICE_LENGTH(slice), 5);
    assert_memory_equal(GRPC_SLICE_START_PTR(slice), "a?b??", 5);
    grpc_slice_unref(slice);
}

static int long_winded(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                       struct ps_error *err)
{
    (void)call, (void)message, (void)context;
    char text[9000];
    for (size_t i = 0; i + 3 < sizeof text; i += 3)
        memcpy(text + i, "\xe2\x82\xac", 4);
    return ps_fail(err, PS_DATA_LOSS, "%s", text);
}

static void test_long_details_arrive(void **state)
{
    (void)state;
    static const struct ps_rpc_method methods[] = {
        {PROBE("Echo"), PS_RPC_UNARY, NOTE_TYPE, NOTE_TYPE, long_winded, false}};
    struct fixture f;
    start_server(&f, methods, 1, 0);
    struct result r;
    raw_call(&f, PROBE("Echo"), NULL, 0, 1, 20, &r);
    assert_int_equal(r.status, GRPC_STATUS_DATA_LOSS);
    assert_in_range(strlen(r.text), 700, PS_RPC_MAX_DETAILS);
    finish(&f);
}

/* Rule 9, and the first half of 33: a server without calls stops at once, again and again. */
static void test_start_and_stop(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct fixture f;
        start_default(&f);
        double begin = ps_monotonic_s();
        ps_rpc_server_stop(f.server, 30);
        assert_true(ps_monotonic_s() - begin < 10);
        ps_rpc_server_stop(f.server, 30); /* again: nothing happens */
        finish(&f);
    }
}

/* Rule 33: a client that has no call and neither reads nor hangs up keeps no server from stopping. */
static void test_stop_beside_an_idle_client(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    static const char hello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0"; /* and no settings */
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)ps_rpc_server_port(f.server, 0)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(send(fd, hello, sizeof hello, 0), sizeof hello);
    char byte;
    assert_int_equal(recv(fd, &byte, 1, 0), 1); /* the connection stands */
    double begin = ps_monotonic_s();
    ps_rpc_server_stop(f.server, 30);
    assert_true(ps_monotonic_s() - begin < 3);
    close(fd);
    finish(&f);
}

/* A client that vanishes without a word (its connection is cut) ends what it had running. */
static void test_vanished_client(void **state)
{
    (void)state;
    struct fixture f;
    start_default(&f);
    grpc_call *call = new_call(&f, PROBE("Sum"), 60);
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    assert_int_equal(grpc_call_start_batch(call, &op, 1, &op, NULL), GRPC_CALL_OK);
    pluck(&f, &op, NULL);
    double until = ps_monotonic_s() + 10;
    while (atomic_load(&f.probe.running) != 1 && ps_monotonic_s() < until)
        usleep(1000);
    assert_int_equal(atomic_load(&f.probe.running), 1);
    grpc_call_cancel(call, NULL);
    grpc_call_unref(call);
    while (atomic_load(&f.probe.running) != 0 && ps_monotonic_s() < until)
        usleep(1000);
    assert_int_equal(atomic_load(&f.probe.running), 0);
    finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unknown_methods_are_refused),
        cmocka_unit_test(test_missing_and_empty_requests),
        cmocka_unit_test(test_bad_bytes),
        cmocka_unit_test(test_burst),
        cmocka_unit_test(test_refused_batch_ends_the_call),
        cmocka_unit_test(test_core_refuses_bad_batches),
        cmocka_unit_test(test_every_path_has_a_status),
        cmocka_unit_test(test_details_are_capped),
        cmocka_unit_test(test_long_details_arrive),
        cmocka_unit_test(test_start_and_stop),
        cmocka_unit_test(test_stop_beside_an_idle_client),
        cmocka_unit_test(test_vanished_client),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
