/* SPDX-License-Identifier: Apache-2.0
 * One call on the server, from its acceptance to its status. */
#include "services/rpc/server.h"

#include "services/base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct ps_rpc_call *ps_rpc_call_new(struct ps_rpc_registered *registered, struct ps_rpc_queue *queue)
{
    struct ps_rpc_call *call = calloc(1, sizeof *call);
    if (!call)
        return NULL;
    call->server = registered->server;
    call->registered = registered;
    call->queue = queue;
    call->send_ok = true;
    grpc_call_details_init(&call->details);
    grpc_metadata_array_init(&call->metadata);
    pthread_mutex_init(&call->lock, NULL);
    ps_rpc_cond_init(&call->changed);
    return call;
}

void ps_rpc_call_free(struct ps_rpc_call *call)
{
    while (call->trailers) {
        struct ps_rpc_trailer *trailer = call->trailers;
        call->trailers = trailer->next;
        grpc_slice_unref(trailer->key);
        grpc_slice_unref(trailer->value);
        free(trailer);
    }
    /* The elements of the metadata belong to the core's call; the array is ours. */
    grpc_metadata_array_destroy(&call->metadata);
    grpc_call_details_destroy(&call->details);
    grpc_byte_buffer_destroy(call->payload);
    grpc_byte_buffer_destroy(call->message);
    grpc_byte_buffer_destroy(call->answer);
    if (call->core)
        grpc_call_unref(call->core);
    gpr_free(call->peer);
    free(call->pairs);
    ps_rpc_scratch_done(&call->scratch);
    pthread_cond_destroy(&call->changed);
    pthread_mutex_destroy(&call->lock);
    free(call);
}

/* Gives up one reference with the lock held, and the lock. */
static void unlock_and_release(struct ps_rpc_call *call)
{
    int left = --call->refs;
    pthread_mutex_unlock(&call->lock);
    if (!left)
        ps_rpc_server_forget(call);
}

/* With the lock held. False: the call is broken, and cancelled because of that. */
static bool start(struct ps_rpc_call *call, const grpc_op *ops, size_t count, struct ps_rpc_tag *tag,
                  ps_rpc_tag_fn fn)
{
    if (call->broken)
        return false;
    atomic_store_explicit(&tag->fn, fn, memory_order_release);
    grpc_call_error error = grpc_call_start_batch(call->core, ops, count, tag, NULL);
    if (error != GRPC_CALL_OK) {
        /* A refused batch leaves its slot unusable, so nothing can be sent any more: give the call up. */
        const char *text = grpc_call_error_to_string(error);
        ps_log_debug("rpc: %s: batch refused: %s", ps_rpc_path(call), text);
        call->broken = true;
        grpc_call_cancel_with_status(call->core, GRPC_STATUS_INTERNAL, text, NULL);
        return false;
    }
    call->refs++;
    return true;
}

static void closed(struct ps_rpc_tag *tag, bool ok)
{
    (void)ok; /* always true; the truth is core_cancelled */
    struct ps_rpc_call *call = PS_RPC_OWNER(tag, struct ps_rpc_call, close_tag);
    pthread_mutex_lock(&call->lock);
    if (call->core_cancelled)
        call->cancelled = true;
    pthread_cond_broadcast(&call->changed);
    unlock_and_release(call);
}

void ps_rpc_call_begin(struct ps_rpc_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &call->core_cancelled;
    pthread_mutex_lock(&call->lock);
    call->refs = 1;
    start(call, &op, 1, &call->close_tag, closed);
    pthread_mutex_unlock(&call->lock);
}

void ps_rpc_call_poke(struct ps_rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    pthread_cond_broadcast(&call->changed);
    pthread_mutex_unlock(&call->lock);
}

/* Why a call that is over is over. */
static int over(struct ps_rpc_call *call, struct ps_error *err)
{
    if (ps_rpc_time_left(call) <= 0)
        return ps_fail(err, PS_DEADLINE_EXCEEDED, "the deadline of the call has passed");
    if (atomic_load(&call->server->draining))
        return ps_fail(err, PS_UNAVAILABLE, "the server is shutting down");
    return ps_fail(err, PS_CANCELLED, "the call was cancelled");
}

/* ---- Receiving ---- */

static void received(struct ps_rpc_tag *tag, bool ok)
{
    struct ps_rpc_call *call = PS_RPC_OWNER(tag, struct ps_rpc_call, recv_tag);
    pthread_mutex_lock(&call->lock);
    call->receiving = false;
    call->received = true;
    call->receive_ok = ok;
    pthread_cond_broadcast(&call->changed);
    unlock_and_release(call);
}

static int receive(struct ps_rpc_call *call, bool end_at_drain, ProtobufCMessage **ret_message,
                   struct ps_error *err)
{
    if (call->ended)
        return 0;
    pthread_mutex_lock(&call->lock);
    if (!call->receiving && !call->received) {
        grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
        op.data.recv_message.recv_message = &call->message;
        call->receiving = start(call, &op, 1, &call->recv_tag, received);
    }
    while (call->receiving && !(end_at_drain && atomic_load(&call->server->draining)))
        pthread_cond_wait(&call->changed, &call->lock);
    bool there = call->received, ok = there && call->receive_ok;
    grpc_byte_buffer *buffer = NULL;
    if (there) {
        buffer = call->message;
        call->message = NULL;
        call->received = false;
    }
    pthread_mutex_unlock(&call->lock);
    if (!ok || (!buffer && grpc_call_failed_before_recv_message(call->core))) {
        grpc_byte_buffer_destroy(buffer);
        return over(call, err);
    }
    if (!buffer) {
        call->ended = true;
        return 0;
    }
    int code = ps_rpc_unpack(buffer, &call->scratch, call->registered->method->request, ret_message, err);
    grpc_byte_buffer_destroy(buffer);
    return code < 0 ? code : 1;
}

int ps_rpc_recv(struct ps_rpc_call *call, ProtobufCMessage **ret_message, struct ps_error *err)
{
    return receive(call, false, ret_message, err);
}

int ps_rpc_recv_or_drain(struct ps_rpc_call *call, ProtobufCMessage **ret_message, struct ps_error *err)
{
    return receive(call, true, ret_message, err);
}

/* ---- Sending ---- */

static void sent(struct ps_rpc_tag *tag, bool ok)
{
    struct ps_rpc_call *call = PS_RPC_OWNER(tag, struct ps_rpc_call, send_tag);
    pthread_mutex_lock(&call->lock);
    call->sending = false;
    call->send_ok = ok;
    grpc_byte_buffer_destroy(call->outgoing);
    call->outgoing = NULL;
    pthread_cond_broadcast(&call->changed);
    unlock_and_release(call);
}

int ps_rpc_send(struct ps_rpc_call *call, const ProtobufCMessage *message, struct ps_error *err)
{
    const struct ps_rpc_method *method = call->registered->method;
    if (message->descriptor != method->response)
        return ps_fail(err, PS_INTERNAL, "%s answers with %s, not %s", method->path, method->response->name,
                       message->descriptor->name);
    if (method->kind == PS_RPC_UNARY || method->kind == PS_RPC_CLIENT_STREAM) {
        if (call->answer)
            return ps_fail(err, PS_INTERNAL, "%s has one answer, this is the second", method->path);
        call->answer = ps_rpc_pack(message);
        return 0;
    }
    grpc_byte_buffer *buffer = ps_rpc_pack(message);
    pthread_mutex_lock(&call->lock);
    while (call->sending)
        pthread_cond_wait(&call->changed, &call->lock);
    bool good = !call->cancelled && call->send_ok;
    if (good) {
        grpc_op ops[2] = {0};
        size_t count = 0;
        if (!call->initial_sent)
            ops[count++].op = GRPC_OP_SEND_INITIAL_METADATA;
        call->initial_sent = true;
        ops[count].op = GRPC_OP_SEND_MESSAGE;
        ops[count++].data.send_message.send_message = buffer;
        good = call->sending = start(call, ops, count, &call->send_tag, sent);
        if (good)
            call->outgoing = buffer;
    }
    pthread_mutex_unlock(&call->lock);
    if (!good)
        grpc_byte_buffer_destroy(buffer);
    return good ? 0 : over(call, err);
}

static void status_sent(struct ps_rpc_tag *tag, bool ok)
{
    (void)ok; /* false: the client has gone, and nobody is left to tell */
    struct ps_rpc_call *call = PS_RPC_OWNER(tag, struct ps_rpc_call, status_tag);
    pthread_mutex_lock(&call->lock);
    unlock_and_release(call);
}

void ps_rpc_call_finish(struct ps_rpc_call *call, int code, const char *message)
{
    grpc_metadata trailers[PS_RPC_MAX_TRAILERS] = {0};
    size_t trailer_count = 0;
    for (struct ps_rpc_trailer *trailer = call->trailers; trailer; trailer = trailer->next) {
        trailers[trailer_count].key = trailer->key;
        trailers[trailer_count++].value = trailer->value;
    }
    grpc_slice details = ps_rpc_details_slice(message, PS_RPC_MAX_DETAILS);
    grpc_op ops[3] = {0};
    size_t count = 0;

    pthread_mutex_lock(&call->lock);
    while (call->sending)
        pthread_cond_wait(&call->changed, &call->lock);
    if (!call->initial_sent)
        ops[count++].op = GRPC_OP_SEND_INITIAL_METADATA;
    call->initial_sent = true;
    if (call->answer && code == 0) {
        ops[count].op = GRPC_OP_SEND_MESSAGE;
        ops[count++].data.send_message.send_message = call->answer;
    }
    ops[count].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[count].data.send_status_from_server.status = (grpc_status_code)ps_code_to_grpc(code);
    ops[count].data.send_status_from_server.status_details = &details;
    ops[count].data.send_status_from_server.trailing_metadata = trailers;
    ops[count++].data.send_status_from_server.trailing_metadata_count = trailer_count;
    start(call, ops, count, &call->status_tag, status_sent);
    grpc_slice_unref(details);
    unlock_and_release(call);
}

/* ---- Running the handler ---- */

static int copy_metadata(struct ps_rpc_call *call)
{
    size_t count = call->metadata.count, bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += GRPC_SLICE_LENGTH(call->metadata.metadata[i].key) +
                 GRPC_SLICE_LENGTH(call->metadata.metadata[i].value) + 2;
    call->pairs = malloc(count * sizeof *call->pairs + bytes + 1);
    if (!call->pairs)
        return -1;
    char *text = (char *)(call->pairs + count);
    for (size_t i = 0; i < count; i++) {
        const grpc_metadata *element = &call->metadata.metadata[i];
        const grpc_slice *parts[2] = {&element->key, &element->value};
        const char *starts[2];
        for (int j = 0; j < 2; j++) {
            size_t size = GRPC_SLICE_LENGTH(*parts[j]);
            starts[j] = text;
            memcpy(text, GRPC_SLICE_START_PTR(*parts[j]), size);
            text[size] = '\0';
            text += size + 1;
        }
        call->pairs[i] = (struct ps_rpc_pair){starts[0], starts[1]};
    }
    call->pair_count = count;
    return 0;
}

static int prepare(struct ps_rpc_call *call, ProtobufCMessage **ret_request, struct ps_error *err)
{
    const struct ps_rpc_registered *registered = call->registered;
    const struct ps_rpc_method *method = registered->method;
    if (copy_metadata(call))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    /* The core hands over calls that have waited past their deadline as if nothing were wrong. */
    if (ps_rpc_cancelled(call) || ps_rpc_time_left(call) <= 0)
        return over(call, err);
    if (call->server->intercept && !registered->open) {
        int code = call->server->intercept(call, call->server->context, err);
        if (code < 0)
            return code;
    }
    if (method->kind == PS_RPC_CLIENT_STREAM || method->kind == PS_RPC_BIDI)
        return 0;
    if (!call->payload) {
        if (grpc_call_failed_before_recv_message(call->core))
            return over(call, err);
        return ps_fail(err, PS_UNIMPLEMENTED, "%s takes one request, none came", method->path);
    }
    int code = ps_rpc_unpack(call->payload, NULL, method->request, ret_request, err);
    grpc_byte_buffer_destroy(call->payload);
    call->payload = NULL;
    return code;
}

void ps_rpc_call_run(struct ps_rpc_job *job)
{
    struct ps_rpc_call *call = PS_RPC_OWNER(job, struct ps_rpc_call, job);
    const struct ps_rpc_method *method = call->registered->method;
    struct ps_error err = {0};
    ProtobufCMessage *request = NULL;
    int code = prepare(call, &request, &err);
    if (code >= 0)
        code = method->handler(call, request, call->registered->context, &err);
    protobuf_c_message_free_unpacked(request, NULL);
    if (code >= 0 && !call->answer && (method->kind == PS_RPC_UNARY || method->kind == PS_RPC_CLIENT_STREAM))
        code = ps_fail(&err, PS_INTERNAL, "%s ended well without an answer", method->path);
    ps_rpc_call_finish(call, code < 0 ? code : 0, code < 0 ? err.message : "");
}

/* ---- What handlers ask ---- */

bool ps_rpc_cancelled(struct ps_rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    bool cancelled = call->cancelled;
    pthread_mutex_unlock(&call->lock);
    return cancelled;
}

bool ps_rpc_draining(struct ps_rpc_call *call)
{
    return atomic_load(&call->server->draining);
}

int ps_rpc_wait(struct ps_rpc_call *call, double timeout_s, struct ps_error *err)
{
    struct timespec until = ps_rpc_at(timeout_s < 0 ? INFINITY : timeout_s);
    int result = 0;
    bool in_time = true;
    pthread_mutex_lock(&call->lock);
    for (;;) {
        if (call->cancelled || call->broken || atomic_load(&call->server->draining))
            result = -1;
        else if (call->woken)
            result = 1;
        if (result || !in_time)
            break;
        in_time = pthread_cond_timedwait(&call->changed, &call->lock, &until) == 0;
    }
    if (result == 1)
        call->woken = false;
    pthread_mutex_unlock(&call->lock);
    return result < 0 ? over(call, err) : result;
}

void ps_rpc_wake(struct ps_rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    call->woken = true;
    pthread_cond_broadcast(&call->changed);
    pthread_mutex_unlock(&call->lock);
}

const char *ps_rpc_metadata(struct ps_rpc_call *call, const char *key)
{
    for (size_t i = 0; i < call->pair_count; i++)
        if (!strcmp(call->pairs[i].key, key))
            return call->pairs[i].value;
    return NULL;
}

int ps_rpc_set_trailer(struct ps_rpc_call *call, const char *key, const char *value, struct ps_error *err)
{
    if (call->trailer_count == PS_RPC_MAX_TRAILERS)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "a call has at most %d trailers", PS_RPC_MAX_TRAILERS);
    /* The core keeps a reference to the value until it is sent: it must be a copy. */
    grpc_slice key_slice = grpc_slice_from_copied_string(key);
    grpc_slice value_slice = grpc_slice_from_copied_string(value);
    bool legal = *key && grpc_header_key_is_legal(key_slice) && strncmp(key, "grpc-", 5) != 0 &&
                 (grpc_is_binary_header(key_slice) || grpc_header_nonbin_value_is_legal(value_slice));
    struct ps_rpc_trailer *trailer = legal ? calloc(1, sizeof *trailer) : NULL;
    if (!trailer) {
        grpc_slice_unref(key_slice);
        grpc_slice_unref(value_slice);
        return legal ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory")
                     : ps_fail(err, PS_INVALID_ARGUMENT,
                               "trailer %s: a key has lower-case letters, digits, '-', '_' and "
                               "'.', a value has printable ASCII",
                               key);
    }
    trailer->key = key_slice;
    trailer->value = value_slice;
    trailer->next = call->trailers;
    call->trailers = trailer;
    call->trailer_count++;
    return 0;
}

const char *ps_rpc_peer(struct ps_rpc_call *call)
{
    if (!call->peer)
        call->peer = grpc_call_get_peer(call->core);
    return call->peer ? call->peer : "unknown";
}

const char *ps_rpc_path(struct ps_rpc_call *call)
{
    return call->registered->method ? call->registered->method->path : "unknown method";
}

double ps_rpc_time_left(struct ps_rpc_call *call)
{
    if (!gpr_time_cmp(call->deadline, gpr_inf_future(call->deadline.clock_type)))
        return INFINITY;
    gpr_timespec left = gpr_time_sub(call->deadline, gpr_now(call->deadline.clock_type));
    return (double)left.tv_sec + (double)left.tv_nsec * 1e-9;
}
