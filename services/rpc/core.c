/* SPDX-License-Identifier: Apache-2.0
 * The library's start and end, polling threads, and messages as bytes. */
#include "services/rpc/core.h"

#include "services/base/clock.h"
#include "services/base/log.h"
#include "services/base/text.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void bridge_log(gpr_log_func_args *args)
{
    const char *slash = strrchr(args->file, '/');
    ps_log_debug("grpc %s:%d: %s", slash ? slash + 1 : args->file, args->line, args->message);
}

void ps_rpc_block_signals(sigset_t *ret_old)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, ret_old);
}

void ps_rpc_restore_signals(const sigset_t *old)
{
    pthread_sigmask(SIG_SETMASK, old, NULL);
}

static void set_log_function(void)
{
    gpr_set_log_function(bridge_log);
}

void ps_rpc_core_up(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_log_function);
    sigset_t old;
    ps_rpc_block_signals(&old);
    grpc_init();
    ps_rpc_restore_signals(&old);
}

void ps_rpc_core_down(void)
{
    grpc_shutdown();
}

int ps_rpc_thread(pthread_t *ret, size_t stack_bytes, const char *name, void *(*run)(void *), void *arg)
{
    pthread_attr_t attr;
    int status = pthread_attr_init(&attr);
    if (status)
        return status;
    if (stack_bytes)
        pthread_attr_setstacksize(&attr, stack_bytes);
    sigset_t old;
    ps_rpc_block_signals(&old);
    status = pthread_create(ret, &attr, run, arg);
    ps_rpc_restore_signals(&old);
    pthread_attr_destroy(&attr);
    if (!status)
        pthread_setname_np(*ret, name);
    return status;
}

void ps_rpc_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

struct timespec ps_rpc_at(double seconds_from_now)
{
    /* A hundred years are as good as for ever and do not overflow. */
    double seconds = fmin(fmax(seconds_from_now, 0.0), 3e9);
    int64_t ns = ps_monotonic_ns() + (int64_t)(seconds * (double)PS_NS_PER_S);
    return (struct timespec){.tv_sec = ns / PS_NS_PER_S, .tv_nsec = ns % PS_NS_PER_S};
}

static void *poll_queue(void *arg)
{
    grpc_completion_queue *cq = arg;
    for (;;) {
        grpc_event event = grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type != GRPC_OP_COMPLETE)
            continue;
        struct ps_rpc_tag *tag = event.tag;
        ps_rpc_tag_fn fn = atomic_load_explicit(&tag->fn, memory_order_acquire);
        fn(tag, event.success != 0);
    }
}

int ps_rpc_queue_start(struct ps_rpc_queue *queue, const char *thread_name, struct ps_error *err)
{
    queue->cq = grpc_completion_queue_create_for_next(NULL);
    int status = ps_rpc_thread(&queue->thread, 0, thread_name, poll_queue, queue->cq);
    if (status) {
        grpc_completion_queue_shutdown(queue->cq);
        grpc_completion_queue_destroy(queue->cq);
        queue->cq = NULL;
        return ps_fail_errno(err, status, "cannot start a thread");
    }
    return 0;
}

void ps_rpc_queue_stop(struct ps_rpc_queue *queue)
{
    if (!queue->cq)
        return;
    grpc_completion_queue_shutdown(queue->cq);
    pthread_join(queue->thread, NULL);
    grpc_completion_queue_destroy(queue->cq);
    queue->cq = NULL;
}

grpc_byte_buffer *ps_rpc_pack(const ProtobufCMessage *message)
{
    grpc_slice slice = grpc_slice_malloc(protobuf_c_message_get_packed_size(message));
    protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

static int unpack_bytes(const uint8_t *data, size_t size, const ProtobufCMessageDescriptor *type,
                        ProtobufCMessage **ret, struct ps_error *err)
{
    int code = ps_rpc_check_message(type, data, size, err);
    if (code < 0)
        return code;
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, size, data);
    if (!message)
        return ps_fail(err, PS_INTERNAL, "the bytes are no %s message", type->name);
    *ret = message;
    return 0;
}

void ps_rpc_scratch_done(struct ps_rpc_scratch *scratch)
{
    free(scratch->data);
    *scratch = (struct ps_rpc_scratch){0};
}

/* More than this is not kept for a next message that may never come. */
enum { SCRATCH_KEPT = 2 << 20 };

static int unpack_joined(grpc_byte_buffer_reader *reader, size_t size, struct ps_rpc_scratch *scratch,
                         const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret, struct ps_error *err)
{
    if (!scratch->data || scratch->capacity < size) {
        ps_rpc_scratch_done(scratch);
        scratch->data = malloc(size + 1);
        if (!scratch->data)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for a message of %zu bytes", size);
        scratch->capacity = size;
    }
    size_t used = 0;
    grpc_slice *slice;
    while (grpc_byte_buffer_reader_peek(reader, &slice) && GRPC_SLICE_LENGTH(*slice) <= size - used) {
        memcpy(scratch->data + used, GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice));
        used += GRPC_SLICE_LENGTH(*slice);
    }
    int code = unpack_bytes(scratch->data, used, type, ret, err);
    if (scratch->capacity > SCRATCH_KEPT)
        ps_rpc_scratch_done(scratch);
    return code;
}

int ps_rpc_unpack(grpc_byte_buffer *buffer, struct ps_rpc_scratch *scratch,
                  const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret, struct ps_error *err)
{
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, buffer))
        return ps_fail(err, PS_INTERNAL, "the bytes of a %s message cannot be read", type->name);
    int code;
    size_t slices = buffer->data.raw.slice_buffer.count;
    if (slices <= 1) { /* in place; several slices must be joined, for protobuf-c wants them in one piece */
        grpc_slice *slice;
        if (grpc_byte_buffer_reader_peek(&reader, &slice))
            code = unpack_bytes(GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice), type, ret, err);
        else
            code = unpack_bytes((const uint8_t *)"", 0, type, ret, err);
    } else {
        struct ps_rpc_scratch own = {0};
        code =
            unpack_joined(&reader, grpc_byte_buffer_length(buffer), scratch ? scratch : &own, type, ret, err);
        ps_rpc_scratch_done(&own);
    }
    grpc_byte_buffer_reader_destroy(&reader);
    return code;
}

/* Length of the valid UTF-8 character at text, 0 if there is none within size bytes. */
static size_t character(const char *text, size_t size)
{
    for (size_t length = 1; length <= 4 && length <= size; length++)
        if (ps_utf8_valid(text, length))
            return length;
    return 0;
}

grpc_slice ps_rpc_details_slice(const char *text, size_t max)
{
    size_t size = strlen(text), out = 0;
    char *copy = malloc(max + 1);
    if (!copy)
        return grpc_empty_slice();
    for (size_t in = 0; in < size;) {
        size_t length = character(text + in, size - in);
        if (out + (length ? length : 1) > max)
            break;
        if (length)
            memcpy(copy + out, text + in, length);
        else
            copy[out] = '?';
        length = length ? length : 1;
        in += length;
        out += length;
    }
    /* HTTP/2 allows no blank at the end of a header (RFC 9113, 8.2.1): clients let go of all of it. */
    while (out && copy[out - 1] == ' ')
        out--;
    grpc_slice slice = grpc_slice_from_copied_buffer(copy, out);
    free(copy);
    return slice;
}

char *ps_rpc_slice_text(grpc_slice slice)
{
    size_t size = GRPC_SLICE_LENGTH(slice);
    char *text = malloc(size + 1);
    if (text) {
        memcpy(text, GRPC_SLICE_START_PTR(slice), size);
        text[size] = '\0';
    }
    return text;
}
