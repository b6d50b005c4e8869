/* SPDX-License-Identifier: Apache-2.0
 * rpc_probe_client TARGET: our client against a server in another language, which does what ours never does
 * (see rpc_foreign_server.py). Prints what went wrong; the exit status counts it. */
#include "tests/unit/test_rpc_probe.h"

static int failures;

static void check(const char *what, bool good, const struct ps_error *err)
{
    if (good)
        return;
    failures++;
    printf("FAILED: %s (%s: %s)\n", what, ps_code_name(err->code), err->message);
}

static int unary(struct ps_rpc_channel *channel, const char *text, Note **ret, struct ps_error *err)
{
    Note note = NOTE_INIT;
    note.text = (char *)text;
    ProtobufCMessage *message = NULL;
    *err = (struct ps_error){0};
    int code = ps_rpc_unary(channel, PROBE("Echo"), &note.base, NOTE_TYPE, 20, true, &message, err);
    *ret = (Note *)message;
    return code;
}

static void release(Note *note)
{
    protobuf_c_message_free_unpacked(&note->base, NULL);
}

static void unary_calls(struct ps_rpc_channel *channel)
{
    struct ps_error err;
    Note *answer;
    int code = unary(channel, "gr\xc3\xbc\xc3\x9f", &answer, &err);
    check("echo", code == 0 && !strcmp(answer->text, "gr\xc3\xbc\xc3\x9f"), &err);
    if (code == 0)
        release(answer);
    code = unary(channel, "gzip", &answer, &err);
    check("gzip", code == 0 && answer->data.len == 200000, &err);
    if (code == 0)
        release(answer);
    code = unary(channel, "empty", &answer, &err);
    check("an empty answer is an answer", code == 0 && !*answer->text, &err);
    if (code == 0)
        release(answer);
    static const struct {
        const char *text;
        int code;
        const char *says;
    } bad[] = {
        {"not text", PS_INVALID_ARGUMENT, "text is not text"},
        {"garbage", PS_INTERNAL, "Note"},
        {"oversize", PS_RESOURCE_EXHAUSTED, "larger than max"},
        {"details", PS_FAILED_PRECONDITION,
         "gr\xc3\xb6\xc3\x9f"
         "er"},
        {"lines", PS_ABORTED, "one two"}, /* one line, whatever the server says */
        {"long details", PS_DATA_LOSS, "xxxxxxxx"},
        {"raise", PS_UNKNOWN, ""},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        code = unary(channel, bad[i].text, &answer, &err);
        check(bad[i].text,
              code == bad[i].code && strstr(err.message, bad[i].says) && !strchr(err.message, '\n'), &err);
        if (code == 0)
            release(answer);
    }
    ProtobufCMessage *message = NULL;
    Note note = NOTE_INIT;
    code = ps_rpc_unary(channel, PROBE("Nothing"), &note.base, NOTE_TYPE, 20, false, &message, &err);
    check("unknown method", code == PS_UNIMPLEMENTED, &err);
}

/* Sends one message, half-closes, and counts what comes. */
static int drain(struct ps_rpc_channel *channel, const char *path, const char *text, int *ret_count,
                 struct ps_error *err)
{
    struct ps_rpc_stream *stream = NULL;
    struct ps_error ignored = {0};
    *err = ignored;
    *ret_count = 0;
    int code = ps_rpc_stream_open(channel, path, NOTE_TYPE, 20, &stream, err);
    if (code)
        return code;
    Note note = NOTE_INIT;
    note.text = (char *)text;
    if (!ps_rpc_stream_send(stream, &note.base, &ignored))
        ps_rpc_stream_close_send(stream, &ignored);
    ProtobufCMessage *message = NULL;
    while ((code = ps_rpc_stream_recv(stream, &message, err)) == 1) {
        ++*ret_count;
        protobuf_c_message_free_unpacked(message, NULL);
    }
    ps_rpc_stream_free(stream);
    return code;
}

static void stream_calls(struct ps_rpc_channel *channel)
{
    struct ps_error err;
    int count;
    int code = drain(channel, PROBE("Count"), "none", &count, &err);
    check("a stream without messages", code == 0 && count == 0, &err);
    code = drain(channel, PROBE("Count"), "many", &count, &err);
    check("a stream of many messages", code == 0 && count == 5000, &err);
    code = drain(channel, PROBE("Count"), "then fail", &count, &err);
    check("messages before a failure all arrive", code == PS_OUT_OF_RANGE && count == 100, &err);
    code = drain(channel, PROBE("Count"), "fail at once", &count, &err);
    check("a failure without headers", code == PS_NOT_FOUND && count == 0, &err);
    code = drain(channel, PROBE("Count"), "not text", &count, &err);
    check("bad text in a stream", code == PS_INVALID_ARGUMENT && count == 0, &err);
    code = drain(channel, PROBE("Chat"), "early end", &count, &err);
    check("a server that ends first", code == 0 && count == 1, &err);
}

/* A server that ends the call while we send: send fails, recv tells why. */
static void ended_while_sending(struct ps_rpc_channel *channel)
{
    struct ps_rpc_stream *stream = NULL;
    struct ps_error err = {0};
    if (ps_rpc_stream_open(channel, PROBE("Sum"), NOTE_TYPE, 20, &stream, &err)) {
        check("open", false, &err);
        return;
    }
    static uint8_t block[100000];
    Note note = NOTE_INIT;
    note.data.data = block;
    note.data.len = sizeof block;
    int sent = 0;
    while (sent < 10000 && !ps_rpc_stream_send(stream, &note.base, &err))
        sent++;
    check("sending ends with the call", sent < 10000, &err);
    ProtobufCMessage *message = NULL;
    int code = ps_rpc_stream_recv(stream, &message, &err);
    check("the status of a call that ended while we sent", code == PS_RESOURCE_EXHAUSTED, &err);
    ps_rpc_stream_free(stream);
}

int main(int argc, char **argv)
{
    struct ps_rpc_channel_config config = {
        .target = argc > 1 ? argv[1] : "", .token = "secret", .max_receive_bytes = 1 << 20};
    struct ps_rpc_channel *channel = NULL;
    struct ps_error err = {0};
    if (ps_rpc_channel_open(&config, &channel, &err)) {
        printf("%s\n", err.message);
        return 1;
    }
    unary_calls(channel);
    stream_calls(channel);
    ended_while_sending(channel);
    ps_rpc_channel_free(channel);
    printf("%d failures\n", failures);
    return failures != 0;
}
