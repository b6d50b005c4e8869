/* SPDX-License-Identifier: Apache-2.0
 * What the server and the client share: tags, completion queue threads, messages as bytes, statuses.
 * Internal. */
#ifndef PARAMSYNC_RPC_CORE_H
#define PARAMSYNC_RPC_CORE_H

#include "services/rpc/rpc.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define PS_RPC_DEFAULT_RECEIVE_BYTES ((size_t)4 << 20)
#define PS_RPC_MAX_DETAILS                                                                                   \
    1024 /* longer ones can push the trailers over the peer's limit, which hides the status */

/* What a completion queue hands back. Embedded in its owner, who lives until the tag has come out. */
struct ps_rpc_tag;
typedef void (*ps_rpc_tag_fn)(struct ps_rpc_tag *tag, bool ok);
struct ps_rpc_tag {
    /* Stored (release) right before the operation starts and loaded (acquire) by the polling thread, so that
     * all that the starter wrote is visible there without relying on the library's own fences. */
    _Atomic(ps_rpc_tag_fn) fn;
};
#define PS_RPC_OWNER(tag, type, member) ((type *)((char *)(tag)-offsetof(type, member)))

/* A NEXT queue and the one thread that polls it. Tag functions run on that thread and never block. */
struct ps_rpc_queue {
    grpc_completion_queue *cq;
    pthread_t thread;
};
int ps_rpc_queue_start(struct ps_rpc_queue *queue, const char *thread_name, struct ps_error *err);
/* Only when no operation can start any more: drains, joins, destroys. Harmless on a zeroed queue. */
void ps_rpc_queue_stop(struct ps_rpc_queue *queue);

/* Pairs: the library is up between them. Its threads take no signals. */
void ps_rpc_core_up(void);
void ps_rpc_core_down(void);

/* Around whatever may make the library start a thread, now or for the first time: threads inherit the mask.
 */
void ps_rpc_block_signals(sigset_t *ret_old);
void ps_rpc_restore_signals(const sigset_t *old);

/* pthread_create with every signal blocked in the new thread. Returns 0 or an errno. */
int ps_rpc_thread(pthread_t *ret, size_t stack_bytes, const char *name, void *(*run)(void *), void *arg);

/* Condition variables here wait on the monotonic clock. */
void ps_rpc_cond_init(pthread_cond_t *cond);
/* NULL-safe absolute time, seconds from now; used with pthread_cond_timedwait. */
struct timespec ps_rpc_at(double seconds_from_now);

/* The packed message, or NULL when memory is short. */
grpc_byte_buffer *ps_rpc_pack(const ProtobufCMessage *message);
/* Where messages of several slices are joined; kept from message to message of a stream, since fresh memory
 * for each costs more than the copy. Zero-initialise; NULL where only one message comes. Of one thread. */
struct ps_rpc_scratch {
    uint8_t *data;
    size_t capacity;
};
void ps_rpc_scratch_done(struct ps_rpc_scratch *scratch);

/* Checks the strings and unpacks. INTERNAL: no such message; INVALID_ARGUMENT: a string that is not text. The
 * buffer stays the caller's. */
int ps_rpc_unpack(grpc_byte_buffer *buffer, struct ps_rpc_scratch *scratch,
                  const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret, struct ps_error *err);

/* Walks the bytes of a message along its descriptor: strings must be UTF-8 without NUL (INVALID_ARGUMENT
 * names the field), the wire format must hold together (INTERNAL). protobuf-c itself accepts any bytes in a
 * string, and after unpacking an embedded NUL cannot be seen any more. Thread-safe. */
int ps_rpc_check_message(const ProtobufCMessageDescriptor *type, const uint8_t *data, size_t size,
                         struct ps_error *err);

/* A copy of at most max bytes of text as a slice, cut at a character boundary; bytes that are not UTF-8
 * become '?'. */
grpc_slice ps_rpc_details_slice(const char *text, size_t max);
/* A NUL-terminated copy in new memory, or NULL. */
char *ps_rpc_slice_text(grpc_slice slice);

#endif
