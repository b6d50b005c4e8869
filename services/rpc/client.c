/* SPDX-License-Identifier: Apache-2.0
 * Channels and calls on the client. One queue and one polling thread per channel; callers wait on condition
 * variables. */
#include "services/rpc/core.h"

#include "services/base/log.h"
#include "services/base/pem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ps_rpc_channel {
    grpc_channel *core;
    struct ps_rpc_queue queue;
    char *target;
    bool has_token;
    grpc_slice authorization; /* "Bearer TOKEN" */
    pthread_mutex_t lock;     /* guards streams */
    pthread_cond_t idle;
    size_t streams; /* not yet gone: their last tags may come after ps_rpc_stream_free */
};

/* How a call ended, and in which words. */
struct outcome {
    grpc_status_code status;
    grpc_slice details;
    grpc_metadata_array initial, trailing;
};

static void outcome_init(struct outcome *outcome)
{
    *outcome = (struct outcome){.details = grpc_empty_slice()};
    grpc_metadata_array_init(&outcome->initial);
    grpc_metadata_array_init(&outcome->trailing);
}

static void outcome_done(struct outcome *outcome)
{
    grpc_slice_unref(outcome->details);
    grpc_metadata_array_destroy(&outcome->initial);
    grpc_metadata_array_destroy(&outcome->trailing);
}

/* What the core itself says when a connection goes; a server's own words are passed on as they are. */
static bool is_lost(const char *text)
{
    static const char *const words[] = {
        "Socket closed",    "recvmsg:",         "sendmsg:",         "Broken pipe",
        "Connection reset", "watchdog timeout", "ping timeout",     "Too many pings",
        "too_many_pings",   "GOAWAY received",  "Transport closed", "Stream removed"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(text, words[i]))
            return true;
    return false;
}

static int fail_from(const struct ps_rpc_channel *channel, const char *path, const struct outcome *outcome,
                     struct ps_error *err)
{
    char *details = ps_rpc_slice_text(outcome->details);
    const char *text = details ? details : "";
    int code = ps_code_from_grpc((int)outcome->status);
    if (code == PS_UNAVAILABLE && !strncmp(text, "failed to connect", 17))
        ps_fail(err, code, "cannot connect to %s; is the server running there? (%s)", channel->target, text);
    else if (code == PS_UNAVAILABLE && !strncmp(text, "DNS resolution", 14))
        ps_fail(err, code, "cannot find %s: %s", channel->target, text);
    else if (code == PS_UNAVAILABLE && is_lost(text))
        ps_fail(err, code, "the connection to %s was lost: %s", channel->target, text);
    else if (code == PS_DEADLINE_EXCEEDED && !strcmp(text, "Deadline Exceeded"))
        ps_fail(err, code, "%s has not answered %s in time", channel->target, path);
    else if (*text)
        ps_fail(err, code, "%s", text);
    else
        ps_fail(err, code, "%s at %s ended with %s", path, channel->target, ps_code_name(code));
    free(details);
    return code;
}

/* ---- Channels ---- */

static grpc_arg int_arg(const char *key, double value)
{
    return (grpc_arg){
        .type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = (int)fmin(value, 0x7fffffff)};
}

static int make_credentials(const struct ps_rpc_channel_config *config, grpc_channel_credentials **ret,
                            struct ps_error *err)
{
    if (!config->tls_ca && !config->tls_cert && !config->tls_key) {
        *ret = grpc_insecure_credentials_create();
        return 0;
    }
    if (!config->tls_ca)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "TLS needs the authority (CA) that signed the server's certificate");
    if (!config->tls_cert != !config->tls_key)
        return ps_fail(err, PS_INVALID_ARGUMENT, "a client certificate and its private key go together");
    int code = ps_check_pem(config->tls_cert, config->tls_key, config->tls_ca, err);
    if (code < 0)
        return code;
    grpc_ssl_pem_key_cert_pair pair = {.private_key = config->tls_key, .cert_chain = config->tls_cert};
    *ret = grpc_ssl_credentials_create(config->tls_ca, config->tls_cert ? &pair : NULL, NULL, NULL);
    return *ret ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "the TLS texts cannot be used");
}

static int set_token(struct ps_rpc_channel *channel, const char *token, struct ps_error *err)
{
    if (!token)
        return 0;
    char *text;
    if (asprintf(&text, "Bearer %s", token) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    channel->authorization = grpc_slice_from_copied_string(text);
    channel->has_token = true;
    free(text);
    /* An illegal value would spoil every call. */
    if (!*token || !grpc_header_nonbin_value_is_legal(channel->authorization))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "the token must be printable ASCII on one line, and not empty");
    return 0;
}

int ps_rpc_channel_open(const struct ps_rpc_channel_config *config, struct ps_rpc_channel **ret,
                        struct ps_error *err)
{
    if (!config->target || !*config->target)
        return ps_fail(err, PS_INVALID_ARGUMENT, "no server is named");
    struct ps_rpc_channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    pthread_mutex_init(&channel->lock, NULL);
    ps_rpc_cond_init(&channel->idle);
    sigset_t signals;
    ps_rpc_block_signals(&signals);
    ps_rpc_core_up();
    grpc_channel_credentials *credentials = NULL;
    channel->target = strdup(config->target);
    int code = channel->target ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (code == 0)
        code = set_token(channel, config->token, err);
    if (code == 0)
        code = make_credentials(config, &credentials, err);
    if (code == 0)
        code = ps_rpc_queue_start(&channel->queue, "rpc-client", err);
    if (code == 0) {
        double keepalive_s = config->keepalive_s > 0 ? config->keepalive_s : 20;
        size_t receive = config->max_receive_bytes ? config->max_receive_bytes : PS_RPC_DEFAULT_RECEIVE_BYTES;
        grpc_arg args[] = {
            int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (double)receive),
            int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1),
            int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_s * 1e3),
            int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, fmin(10, keepalive_s) * 1e3),
            int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
            /* A sidecar that restarts is found again within seconds, not after the default of up to two
               minutes. */
            int_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200),
            int_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000), /* the time one attempt to connect may take */
            int_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 3000),
            int_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1), /* each channel its own connection */
            int_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
            int_arg(GRPC_ARG_ENABLE_RETRIES, 0), /* callers repeat what is safe to repeat */
        };
        grpc_channel_args list = {.num_args = sizeof args / sizeof *args, .args = args};
        channel->core = grpc_channel_create(channel->target, credentials, &list);
        if (!channel->core)
            code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is no address of a server", config->target);
    }
    if (credentials)
        grpc_channel_credentials_release(credentials);
    ps_rpc_restore_signals(&signals);
    if (code < 0) {
        ps_rpc_channel_free(channel);
        return code;
    }
    *ret = channel;
    return 0;
}

struct ps_rpc_channel *ps_rpc_channel_free(struct ps_rpc_channel *channel)
{
    if (!channel)
        return NULL;
    pthread_mutex_lock(&channel->lock);
    while (channel->streams)
        pthread_cond_wait(&channel->idle, &channel->lock);
    pthread_mutex_unlock(&channel->lock);
    if (channel->core)
        grpc_channel_destroy(channel->core);
    ps_rpc_queue_stop(&channel->queue);
    if (channel->has_token)
        grpc_slice_unref(channel->authorization);
    ps_rpc_core_down();
    pthread_cond_destroy(&channel->idle);
    pthread_mutex_destroy(&channel->lock);
    free(channel->target);
    free(channel);
    return NULL;
}

static gpr_timespec deadline_in(double seconds)
{
    if (seconds < 0 || seconds > 3e9)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    gpr_timespec span = {.tv_sec = (int64_t)seconds, .clock_type = GPR_TIMESPAN};
    span.tv_nsec = (int32_t)((seconds - (double)span.tv_sec) * 1e9);
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), span);
}

static grpc_call *create_call(struct ps_rpc_channel *channel, const char *path, double timeout_s)
{
    grpc_slice method = grpc_slice_from_copied_string(path);
    grpc_call *call = grpc_channel_create_call(channel->core, NULL, GRPC_PROPAGATE_DEFAULTS,
                                               channel->queue.cq, method, NULL, deadline_in(timeout_s), NULL);
    grpc_slice_unref(method);
    return call;
}

/* The op that sends the headers; header has room for one element and lives until the batch is started. */
static grpc_op headers_op(struct ps_rpc_channel *channel, grpc_metadata *header, bool wait_for_ready)
{
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    if (wait_for_ready)
        op.flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    if (channel->has_token) {
        *header = (grpc_metadata){.key = grpc_slice_from_static_string("authorization"),
                                  .value = channel->authorization};
        op.data.send_initial_metadata.count = 1;
        op.data.send_initial_metadata.metadata = header;
    }
    return op;
}

/* ---- Unary ---- */

struct unary {
    struct ps_rpc_tag tag;
    pthread_mutex_t lock; /* guards done */
    pthread_cond_t changed;
    bool done;
};

static void unary_done(struct ps_rpc_tag *tag, bool ok)
{
    (void)ok; /* the status tells */
    struct unary *unary = PS_RPC_OWNER(tag, struct unary, tag);
    pthread_mutex_lock(&unary->lock);
    unary->done = true;
    pthread_cond_signal(&unary->changed);
    pthread_mutex_unlock(&unary->lock);
}

int ps_rpc_unary(struct ps_rpc_channel *channel, const char *path, const ProtobufCMessage *request,
                 const ProtobufCMessageDescriptor *response, double timeout_s, bool wait_for_ready,
                 ProtobufCMessage **ret_response, struct ps_error *err)
{
    struct unary unary = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct outcome outcome;
    outcome_init(&outcome);
    grpc_byte_buffer *message = ps_rpc_pack(request), *answer = NULL;
    grpc_metadata header = {0};
    grpc_op ops[6] = {headers_op(channel, &header, wait_for_ready)};
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = message;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &outcome.initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &answer;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.status = &outcome.status;
    ops[5].data.recv_status_on_client.status_details = &outcome.details;
    ops[5].data.recv_status_on_client.trailing_metadata = &outcome.trailing;

    sigset_t signals;
    ps_rpc_block_signals(&signals);
    grpc_call *call = create_call(channel, path, timeout_s);
    atomic_store_explicit(&unary.tag.fn, unary_done, memory_order_release);
    grpc_call_error error = grpc_call_start_batch(call, ops, 6, &unary.tag, NULL);
    ps_rpc_restore_signals(&signals);
    int code;
    if (error == GRPC_CALL_OK) {
        pthread_mutex_lock(&unary.lock);
        while (!unary.done)
            pthread_cond_wait(&unary.changed, &unary.lock);
        pthread_mutex_unlock(&unary.lock);
        if (outcome.status != GRPC_STATUS_OK)
            code = fail_from(channel, path, &outcome, err);
        else if (!answer)
            code = ps_fail(err, PS_INTERNAL, "%s at %s ended well without an answer", path, channel->target);
        else
            code = ps_rpc_unpack(answer, NULL, response, ret_response, err);
    } else {
        code = ps_fail(err, PS_INTERNAL, "%s: %s", path, grpc_call_error_to_string(error));
    }
    grpc_byte_buffer_destroy(message);
    grpc_byte_buffer_destroy(answer);
    grpc_call_unref(call);
    outcome_done(&outcome);
    pthread_cond_destroy(&unary.changed);
    pthread_mutex_destroy(&unary.lock);
    return code;
}

/* ---- Streams ---- */

struct ps_rpc_stream {
    struct ps_rpc_channel *channel;
    const ProtobufCMessageDescriptor *response;
    char *path;
    grpc_call *core;
    struct outcome outcome;        /* filled by the core; valid once over is true */
    struct ps_rpc_scratch scratch; /* of the receiving thread */

    pthread_mutex_t lock; /* guards all below and grpc_call_start_batch */
    pthread_cond_t changed;
    int refs; /* tags that are out, and one for the owner */
    struct ps_rpc_tag open_tag, recv_tag, send_tag, status_tag;
    bool over; /* the status has come */
    bool broken;
    bool receiving, received, receive_ok;
    grpc_byte_buffer *message, *outgoing;
    bool sending, send_ok, half_closed;
};

static void stream_release_locked(struct ps_rpc_stream *stream)
{
    int left = --stream->refs;
    pthread_mutex_unlock(&stream->lock);
    if (left)
        return;
    struct ps_rpc_channel *channel = stream->channel;
    grpc_byte_buffer_destroy(stream->message);
    grpc_byte_buffer_destroy(stream->outgoing);
    grpc_call_unref(stream->core);
    outcome_done(&stream->outcome);
    pthread_cond_destroy(&stream->changed);
    pthread_mutex_destroy(&stream->lock);
    ps_rpc_scratch_done(&stream->scratch);
    free(stream->path);
    free(stream);
    pthread_mutex_lock(&channel->lock);
    channel->streams--;
    pthread_cond_broadcast(&channel->idle);
    pthread_mutex_unlock(&channel->lock);
}

/* With the lock held. */
static bool stream_start(struct ps_rpc_stream *stream, const grpc_op *ops, size_t count,
                         struct ps_rpc_tag *tag, ps_rpc_tag_fn fn)
{
    if (stream->broken)
        return false;
    atomic_store_explicit(&tag->fn, fn, memory_order_release);
    grpc_call_error error = grpc_call_start_batch(stream->core, ops, count, tag, NULL);
    if (error != GRPC_CALL_OK) {
        const char *text = grpc_call_error_to_string(error);
        ps_log_debug("rpc: %s: batch refused: %s", stream->path, text);
        stream->broken = true;
        grpc_call_cancel_with_status(stream->core, GRPC_STATUS_INTERNAL, text, NULL);
        return false;
    }
    stream->refs++;
    return true;
}

static void stream_opened(struct ps_rpc_tag *tag, bool ok)
{
    (void)ok; /* a failure shows in the status */
    struct ps_rpc_stream *stream = PS_RPC_OWNER(tag, struct ps_rpc_stream, open_tag);
    pthread_mutex_lock(&stream->lock);
    stream_release_locked(stream);
}

static void stream_over(struct ps_rpc_tag *tag, bool ok)
{
    (void)ok;
    struct ps_rpc_stream *stream = PS_RPC_OWNER(tag, struct ps_rpc_stream, status_tag);
    pthread_mutex_lock(&stream->lock);
    stream->over = true;
    pthread_cond_broadcast(&stream->changed);
    stream_release_locked(stream);
}

static void stream_received(struct ps_rpc_tag *tag, bool ok)
{
    struct ps_rpc_stream *stream = PS_RPC_OWNER(tag, struct ps_rpc_stream, recv_tag);
    pthread_mutex_lock(&stream->lock);
    stream->receiving = false;
    stream->received = true;
    stream->receive_ok = ok;
    pthread_cond_broadcast(&stream->changed);
    stream_release_locked(stream);
}

static void stream_sent(struct ps_rpc_tag *tag, bool ok)
{
    struct ps_rpc_stream *stream = PS_RPC_OWNER(tag, struct ps_rpc_stream, send_tag);
    pthread_mutex_lock(&stream->lock);
    stream->sending = false;
    stream->send_ok = ok;
    grpc_byte_buffer_destroy(stream->outgoing);
    stream->outgoing = NULL;
    pthread_cond_broadcast(&stream->changed);
    stream_release_locked(stream);
}

int ps_rpc_stream_open(struct ps_rpc_channel *channel, const char *path,
                       const ProtobufCMessageDescriptor *response, double timeout_s,
                       struct ps_rpc_stream **ret, struct ps_error *err)
{
    struct ps_rpc_stream *stream = calloc(1, sizeof *stream);
    char *own_path = strdup(path);
    if (!stream || !own_path) {
        free(stream);
        free(own_path);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    stream->channel = channel;
    stream->response = response;
    stream->path = own_path;
    outcome_init(&stream->outcome);
    pthread_mutex_init(&stream->lock, NULL);
    ps_rpc_cond_init(&stream->changed);
    stream->refs = 1;
    stream->send_ok = true;
    sigset_t signals;
    ps_rpc_block_signals(&signals);
    stream->core = create_call(channel, path, timeout_s);
    pthread_mutex_lock(&channel->lock);
    channel->streams++;
    pthread_mutex_unlock(&channel->lock);

    grpc_op status = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    status.data.recv_status_on_client.status = &stream->outcome.status;
    status.data.recv_status_on_client.status_details = &stream->outcome.details;
    status.data.recv_status_on_client.trailing_metadata = &stream->outcome.trailing;
    grpc_metadata header = {0};
    grpc_op open[2] = {headers_op(channel, &header, false)};
    open[1].op = GRPC_OP_RECV_INITIAL_METADATA;
    open[1].data.recv_initial_metadata.recv_initial_metadata = &stream->outcome.initial;
    pthread_mutex_lock(&stream->lock);
    bool good = stream_start(stream, &status, 1, &stream->status_tag, stream_over) &&
                stream_start(stream, open, 2, &stream->open_tag, stream_opened);
    ps_rpc_restore_signals(&signals);
    if (!good) {
        stream_release_locked(stream);
        return ps_fail(err, PS_INTERNAL, "%s cannot be called", path);
    }
    pthread_mutex_unlock(&stream->lock);
    *ret = stream;
    return 0;
}

/* With the lock held: why nothing more can be sent. */
static int send_failed(struct ps_rpc_stream *stream, struct ps_error *err)
{
    if (stream->over && stream->outcome.status != GRPC_STATUS_OK)
        return fail_from(stream->channel, stream->path, &stream->outcome, err);
    return ps_fail(err, PS_CANCELLED, "%s at %s has ended the call", stream->path, stream->channel->target);
}

int ps_rpc_stream_send(struct ps_rpc_stream *stream, const ProtobufCMessage *message, struct ps_error *err)
{
    grpc_byte_buffer *buffer = ps_rpc_pack(message);
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
    op.data.send_message.send_message = buffer;
    pthread_mutex_lock(&stream->lock);
    while (stream->sending)
        pthread_cond_wait(&stream->changed, &stream->lock);
    bool usable = !stream->half_closed;
    bool good = usable && !stream->over && stream->send_ok &&
                stream_start(stream, &op, 1, &stream->send_tag, stream_sent);
    int code = 0;
    if (good) {
        stream->sending = true;
        stream->outgoing = buffer;
    } else {
        grpc_byte_buffer_destroy(buffer);
        code = usable ? send_failed(stream, err)
                      : ps_fail(err, PS_FAILED_PRECONDITION, "%s: nothing can be sent after the end",
                                stream->path);
    }
    pthread_mutex_unlock(&stream->lock);
    return code;
}

int ps_rpc_stream_close_send(struct ps_rpc_stream *stream, struct ps_error *err)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    pthread_mutex_lock(&stream->lock);
    while (stream->sending)
        pthread_cond_wait(&stream->changed, &stream->lock);
    int code = 0;
    if (!stream->half_closed) {
        stream->half_closed = true;
        if (!stream->over && stream->send_ok && stream_start(stream, &op, 1, &stream->send_tag, stream_sent))
            stream->sending = true;
        else
            code = send_failed(stream, err);
    }
    pthread_mutex_unlock(&stream->lock);
    return code;
}

/* With the lock held. */
static void ask_for_message(struct ps_rpc_stream *stream)
{
    if (stream->receiving || stream->over)
        return;
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &stream->message;
    stream->receiving = stream_start(stream, &op, 1, &stream->recv_tag, stream_received);
}

int ps_rpc_stream_recv(struct ps_rpc_stream *stream, ProtobufCMessage **ret_message, struct ps_error *err)
{
    pthread_mutex_lock(&stream->lock);
    if (!stream->received)
        ask_for_message(stream);
    while (stream->receiving)
        pthread_cond_wait(&stream->changed, &stream->lock);
    grpc_byte_buffer *buffer = stream->received ? stream->message : NULL;
    stream->message = NULL;
    stream->received = false;
    if (buffer) /* the next one comes in while this one is looked at */
        ask_for_message(stream);
    /* Nothing: the end has come, and its status with it or right after. */
    while (!buffer && !stream->over)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    if (!buffer)
        return stream->outcome.status == GRPC_STATUS_OK
                   ? 0
                   : fail_from(stream->channel, stream->path, &stream->outcome, err);
    int code = ps_rpc_unpack(buffer, &stream->scratch, stream->response, ret_message, err);
    grpc_byte_buffer_destroy(buffer);
    return code < 0 ? code : 1;
}

void ps_rpc_stream_cancel(struct ps_rpc_stream *stream)
{
    grpc_call_cancel_with_status(stream->core, GRPC_STATUS_CANCELLED, "the call was cancelled", NULL);
}

struct ps_rpc_stream *ps_rpc_stream_free(struct ps_rpc_stream *stream)
{
    if (!stream)
        return NULL;
    pthread_mutex_lock(&stream->lock);
    bool over = stream->over;
    pthread_mutex_unlock(&stream->lock);
    if (!over)
        ps_rpc_stream_cancel(stream);
    pthread_mutex_lock(&stream->lock);
    stream_release_locked(stream);
    return NULL;
}
