/* SPDX-License-Identifier: Apache-2.0
 * A small runtime over the gRPC C core (https://grpc.io) and protobuf-c, for servers and clients: unary calls
 * and all three streaming kinds with deadlines, cancellation, metadata, status codes, back-pressure (one
 * write outstanding per call) and graceful shutdown. A new method is a handler function and a line in a
 * table.
 *
 * Messages that are received belong to the caller of recv, who frees them with
 * protobuf_c_message_free_unpacked. Strings in received messages are checked to be UTF-8 without NUL before
 * anyone sees them (INVALID_ARGUMENT names the field).
 *
 * RULES.md lists what the core asks of its users and where that is kept to ("rule N" in the tests).
 *
 * Threads: the runtime starts its own (two that poll, and handlers) with all signals blocked. A process that
 * uses it must not fork without exec afterwards.
 */
#ifndef PARAMSYNC_RPC_RPC_H
#define PARAMSYNC_RPC_RPC_H

#include "services/base/error.h"

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ps_rpc_kind { PS_RPC_UNARY, PS_RPC_CLIENT_STREAM, PS_RPC_SERVER_STREAM, PS_RPC_BIDI };

/* ---- Server ---- */

struct ps_rpc_server;
struct ps_rpc_call; /* valid until its handler returns */

/* Runs on a worker thread and may block in recv and send; unary handlers run on a fixed pool, streaming ones
 * each on a thread of their own. request is the one request of a unary or server-streaming call (owned by the
 * runtime), NULL for client-streaming and bidirectional ones. Answers go through ps_rpc_send. The return
 * value is the status: 0 is OK, else a ps_code with err's message. A unary or client-streaming handler that
 * returns 0 has sent one answer. */
typedef int (*ps_rpc_handler)(struct ps_rpc_call *call, const ProtobufCMessage *request, void *context,
                              struct ps_error *err);

struct ps_rpc_method {
    const char *path; /* "/paramsync.v1.Runs/CreateRun" */
    enum ps_rpc_kind kind;
    const ProtobufCMessageDescriptor *request, *response;
    ps_rpc_handler handler;
    bool waits; /* a unary method that may wait for long: on a thread of its own, counted with the streams */
};

struct ps_rpc_server_config {
    const char *const *listen; /* "ADDR:PORT" (port 0: any) or "unix:PATH" */
    size_t listen_count;
    const struct ps_rpc_method *methods; /* outlives the server */
    size_t method_count;
    void *context; /* passed to every handler */
    /* Runs before each handler, for authentication, on the handler's thread. Health is not asked about, so
     * that probes need no token; reflection is. May be NULL. */
    int (*intercept)(struct ps_rpc_call *call, void *context, struct ps_error *err);
    int workers;                    /* 0: 4 */
    int max_streams;                /* streaming calls at a time; 0: 512. Above it: RESOURCE_EXHAUSTED */
    size_t max_receive_bytes;       /* 0: 4 MiB */
    const char *tls_cert, *tls_key; /* PEM text; NULL: plain */
    const char *tls_ca;             /* PEM text; clients must then show a certificate that it has signed */
    double keepalive_s; /* silence after which a client is pinged; 0: 30 s. See "Keepalive" below */
    bool no_reflection;
    /* What the method table is checked against and reflection answers from; NULL: the one of the paramsync
     * protos. Outlives the server. */
    const unsigned char *descriptor_set;
    size_t descriptor_set_size;
};

/* Keepalive: a peer that leaves a ping without an answer for 10 s (or keepalive_s, if that is less) is taken
 * for dead, and its calls end. Clients may ping every 5 s (or every keepalive_s / 2, if that is less); a
 * client that pings more often is sent away with ENHANCE_YOUR_CALM. */

/* Binds and starts. The method table is checked against the FileDescriptorSet (kinds and types), TLS texts
 * are parsed. config may go afterwards, what it says must outlive the server may not. A unix socket is
 * guarded by a lock file PATH.lock, which stays behind. */
int ps_rpc_server_start(const struct ps_rpc_server_config *config, struct ps_rpc_server **ret,
                        struct ps_error *err);
/* The bound port; 0 for a unix socket. */
int ps_rpc_server_port(const struct ps_rpc_server *server, size_t listener);
/* Another certificate, key and CA (PEM texts, copied) for the connections made from now on.
 * FAILED_PRECONDITION for a server that was started without TLS, or with (without) a CA when this has none
 * (has one); INVALID_ARGUMENT for texts that are no good: then everything stays. Thread-safe. */
int ps_rpc_server_reload_tls(struct ps_rpc_server *server, const char *cert, const char *key, const char *ca,
                             struct ps_error *err);
/* grpc.health.v1.Health is always served, on threads of its own (64 watches and reflection streams at most).
 * service "" is the whole server; at the start it and all services of the table are serving. NULL: all that
 * are known. Thread-safe. */
void ps_rpc_server_set_serving(struct ps_rpc_server *server, const char *service, bool serving);
/* Drains: health NOT_SERVING, no new calls (UNAVAILABLE), running handlers have grace_s (ps_rpc_draining
 * turns true for them and waits end), then all calls are cancelled; returns when nothing runs any more. */
void ps_rpc_server_stop(struct ps_rpc_server *server, double grace_s);
struct ps_rpc_server *ps_rpc_server_free(struct ps_rpc_server *server); /* stops if need be; takes NULL */

/* 1: *ret_message; 0: the client has half-closed; negative: cancelled, deadline, broken message. Does not end
 * when the server drains: a client in the middle of an upload has the grace to finish it. */
int ps_rpc_recv(struct ps_rpc_call *call, ProtobufCMessage **ret_message, struct ps_error *err);
/* The same for streams that stay open for as long as the client likes: PS_UNAVAILABLE when the server drains
 * and no message is there. */
int ps_rpc_recv_or_drain(struct ps_rpc_call *call, ProtobufCMessage **ret_message, struct ps_error *err);
/* Waits until the core has taken the message before this one (back-pressure: one is under way at most), then
 * hands this one over: 0, or negative when the call is over. message may go when this returns. Another thread
 * than the receiving one may send, as long as it is done before the handler returns. */
int ps_rpc_send(struct ps_rpc_call *call, const ProtobufCMessage *message, struct ps_error *err);
/* The next four may be called from any thread while the handler runs; see to it that none is called after it.
 */
bool ps_rpc_cancelled(struct ps_rpc_call *call); /* by the client, its deadline, or the end of the drain */
bool ps_rpc_draining(struct ps_rpc_call *call);
/* Waits until wake() is called for this call, the call is cancelled, the server drains, or timeout_s is over
 * (negative: no timeout). Returns 1 if woken, 0 at the timeout, negative when the handler should end. */
int ps_rpc_wait(struct ps_rpc_call *call, double timeout_s, struct ps_error *err);
void ps_rpc_wake(struct ps_rpc_call *call);
/* Value of a request header, copied at the start of the call; NULL if absent. Lives as long as the call. */
const char *ps_rpc_metadata(struct ps_rpc_call *call, const char *key);
int ps_rpc_set_trailer(struct ps_rpc_call *call, const char *key, const char *value, struct ps_error *err);
const char *ps_rpc_peer(struct ps_rpc_call *call); /* not authenticated */
const char *ps_rpc_path(struct ps_rpc_call *call);
double ps_rpc_time_left(struct ps_rpc_call *call); /* seconds to the deadline; INFINITY if none */

/* ---- Client ---- */

struct ps_rpc_channel; /* thread-safe */
struct ps_rpc_stream;  /* one thread sends, one may receive at the same time; cancel from any */

struct ps_rpc_channel_config {
    const char *target;                      /* "HOST:PORT" or "unix:PATH" */
    const char *token;                       /* sent as "authorization: Bearer TOKEN"; NULL: none */
    const char *tls_ca, *tls_cert, *tls_key; /* PEM text; tls_ca NULL: plain */
    size_t max_receive_bytes;                /* 0: 4 MiB */
    double keepalive_s; /* silence in an open call after which the server is pinged; 0: 20 s. Not below 5 s,
                           see above */
};

/* Does not connect yet. Proxies named by the environment are not used. */
int ps_rpc_channel_open(const struct ps_rpc_channel_config *config, struct ps_rpc_channel **ret,
                        struct ps_error *err);
struct ps_rpc_channel *
ps_rpc_channel_free(struct ps_rpc_channel *channel); /* streams must be freed first; takes NULL */

/* timeout_s bounds the whole call (negative: none). wait_for_ready: wait for the server until the deadline
 * instead of failing at once with UNAVAILABLE. *ret_response is freed with protobuf_c_message_free_unpacked.
 */
int ps_rpc_unary(struct ps_rpc_channel *channel, const char *path, const ProtobufCMessage *request,
                 const ProtobufCMessageDescriptor *response, double timeout_s, bool wait_for_ready,
                 ProtobufCMessage **ret_response, struct ps_error *err);

/* Fails fast: the first receive or send tells if nobody listens. */
int ps_rpc_stream_open(struct ps_rpc_channel *channel, const char *path,
                       const ProtobufCMessageDescriptor *response, double timeout_s,
                       struct ps_rpc_stream **ret, struct ps_error *err);
/* As ps_rpc_send. Negative when the call is over; receive then to learn the status. */
int ps_rpc_stream_send(struct ps_rpc_stream *stream, const ProtobufCMessage *message, struct ps_error *err);
int ps_rpc_stream_close_send(struct ps_rpc_stream *stream, struct ps_error *err);
/* 1: a message; 0: the call ended with OK; negative: its status. */
int ps_rpc_stream_recv(struct ps_rpc_stream *stream, ProtobufCMessage **ret_message, struct ps_error *err);
/* The call ends with PS_CANCELLED, unless its status has come already. */
void ps_rpc_stream_cancel(struct ps_rpc_stream *stream);
struct ps_rpc_stream *ps_rpc_stream_free(struct ps_rpc_stream *stream); /* cancels if need be; takes NULL */

#endif
