/* SPDX-License-Identifier: Apache-2.0
 * Inside the server: calls and their tags, methods, the built-in services. Internal. */
#ifndef PARAMSYNC_RPC_SERVER_H
#define PARAMSYNC_RPC_SERVER_H

#include "services/rpc/core.h"
#include "services/rpc/descriptors.h"
#include "services/rpc/pool.h"

struct ps_rpc_registered { /* one method of the table, or the catch-all (method NULL) */
    struct ps_rpc_server *server;
    const struct ps_rpc_method *method;
    void *handle;
    void *context;            /* for the handler */
    struct ps_rpc_pool *pool; /* runs it */
    bool open;                /* the interceptor is not asked */
};

struct ps_rpc_watch { /* a Health.Watch stream that wants to be woken */
    struct ps_rpc_watch *next;
    struct ps_rpc_call *call;
};

struct ps_rpc_health_entry {
    char *service;
    bool serving;
};

struct ps_rpc_health {
    pthread_mutex_t lock; /* guards all below */
    struct ps_rpc_health_entry *entries;
    size_t count;
    struct ps_rpc_watch *watches;
    bool stopped; /* everything is NOT_SERVING for good */
};

struct ps_rpc_reflection {
    const struct ps_rpc_descriptors *descriptors;
    char **services; /* names of the registered services, sorted */
    size_t count;
};

#define PS_RPC_QUEUES 2
#define PS_RPC_MAX_TRAILERS 16

struct ps_rpc_server {
    grpc_server *core;
    struct ps_rpc_queue queues[PS_RPC_QUEUES];
    struct ps_rpc_registered *methods; /* all of the table, the built-in ones, the catch-all */
    size_t method_count;
    struct ps_rpc_pool unary, streams, builtin, builtin_streams;
    struct ps_rpc_health health;
    struct ps_rpc_reflection reflection;
    struct ps_rpc_descriptors *descriptors;
    int (*intercept)(struct ps_rpc_call *call, void *context, struct ps_error *err);
    void *context;
    struct ps_rpc_server_tls *tls; /* NULL: plain */
    int *ports;
    int *lock_fds; /* of unix sockets; -1 elsewhere */
    size_t listen_count;

    atomic_bool draining;
    atomic_size_t payload_bytes; /* of unary requests that wait for a worker or are being worked on */
    pthread_mutex_t lock;        /* guards all below; taken before a call's lock, never after */
    pthread_cond_t idle;
    struct ps_rpc_call *calls; /* accepted and not yet freed */
    size_t call_count;
    size_t posted;  /* requests that wait for a call */
    bool shut_down; /* the shutdown tag has come */
    bool stopped;
    struct ps_rpc_tag shutdown_tag;
};

struct ps_rpc_pair {
    const char *key, *value;
};

struct ps_rpc_trailer {
    struct ps_rpc_trailer *next;
    grpc_slice key, value;
};

struct ps_rpc_call {
    struct ps_rpc_server *server;
    const struct ps_rpc_registered *registered;
    struct ps_rpc_queue *queue;
    struct ps_rpc_call *next, **link; /* server->calls; guarded by the server's lock */
    struct ps_rpc_job job;

    /* Filled by the core before the request tag comes out. */
    grpc_call *core;
    gpr_timespec deadline;
    grpc_call_details details; /* catch-all only */
    grpc_metadata_array metadata;
    grpc_byte_buffer *payload;
    size_t payload_size; /* what it counts for in the server's payload_bytes */

    /* Of the handler's thread. */
    struct ps_rpc_pair *pairs; /* copies; the texts follow in the same memory */
    size_t pair_count;
    grpc_byte_buffer *answer; /* of a unary or client-streaming call: goes out with the status */
    struct ps_rpc_trailer *trailers;
    size_t trailer_count;
    char *peer;
    struct ps_rpc_scratch scratch;
    bool ended; /* recv has reported the half-close */

    pthread_mutex_t lock; /* guards all below and grpc_call_start_batch */
    pthread_cond_t changed;
    int refs; /* tags that are out, and one for the handler; the call is freed at zero */
    struct ps_rpc_tag request_tag, close_tag, recv_tag, send_tag, status_tag;
    int core_cancelled; /* written by the core until the close tag comes out */
    bool cancelled;
    bool broken; /* a batch was refused: no more of them */
    bool receiving, received, receive_ok;
    grpc_byte_buffer *message;
    bool sending, send_ok;
    grpc_byte_buffer *outgoing; /* while sending */
    bool initial_sent;
    bool woken;
};

/* Server-side calls (call.c). */
struct ps_rpc_call *ps_rpc_call_new(struct ps_rpc_registered *registered, struct ps_rpc_queue *queue);
void ps_rpc_call_free(struct ps_rpc_call *call);
/* Right after the accept, on the polling thread: watches for the call's end. */
void ps_rpc_call_begin(struct ps_rpc_call *call);
/* Sends the status (and the answer, if code is 0) and gives up the handler's reference. */
void ps_rpc_call_finish(struct ps_rpc_call *call, int code, const char *message);
void ps_rpc_call_run(struct ps_rpc_job *job);
void ps_rpc_call_poke(struct ps_rpc_call *call); /* waits look again at what they wait for */

/* A call is over (server.c). */
void ps_rpc_server_forget(struct ps_rpc_call *call);

/* Health (health.c). */
extern const struct ps_rpc_method ps_rpc_health_methods[2];
int ps_rpc_health_init(struct ps_rpc_health *health, const struct ps_rpc_method *methods, size_t count,
                       struct ps_error *err);
void ps_rpc_health_set(struct ps_rpc_health *health, const char *service, bool serving);
void ps_rpc_health_stop(struct ps_rpc_health *health);
void ps_rpc_health_done(struct ps_rpc_health *health);

/* Reflection (reflection.c). */
extern const struct ps_rpc_method ps_rpc_reflection_methods[2];
int ps_rpc_reflection_init(struct ps_rpc_reflection *reflection, const struct ps_rpc_descriptors *descriptors,
                           const struct ps_rpc_registered *methods, size_t count, struct ps_error *err);
void ps_rpc_reflection_done(struct ps_rpc_reflection *reflection);

#endif
