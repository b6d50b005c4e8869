/* SPDX-License-Identifier: Apache-2.0
 * The Probe service (tests/proto) for the tests of the RPC runtime: what a call does follows from the text it
 * gets. */
#ifndef PARAMSYNC_TEST_RPC_PROBE_H
#define PARAMSYNC_TEST_RPC_PROBE_H

#include "services/base/clock.h"
#include "services/rpc/rpc.h"

#include "paramsync/test/v1/probe.pb-c.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef Paramsync__Test__V1__Note Note;
#define NOTE_INIT PARAMSYNC__TEST__V1__NOTE__INIT
#define NOTE_TYPE (&paramsync__test__v1__note__descriptor)
#define PROBE(method) "/paramsync.test.v1.Probe/" method

extern const unsigned char probe_descriptor_set[];
extern const size_t probe_descriptor_set_size;

/* What the handlers tell the test. */
struct probe {
    atomic_int running;                    /* handlers */
    atomic_int sent;                       /* messages that Count has handed over */
    atomic_int handled;                    /* handlers that have ended */
    _Atomic(struct ps_rpc_call *) waiting; /* a handler in ps_rpc_wait that may be woken */
    pthread_mutex_t lock;                  /* guards open */
    pthread_cond_t changed;
    bool open; /* "hold" waits for it without looking at its call, as a slow database would make it */
};

static inline void probe_init(struct probe *probe)
{
    memset(probe, 0, sizeof *probe);
    pthread_mutex_init(&probe->lock, NULL);
    pthread_cond_init(&probe->changed, NULL);
}

static inline void probe_open(struct probe *probe)
{
    pthread_mutex_lock(&probe->lock);
    probe->open = true;
    pthread_cond_broadcast(&probe->changed);
    pthread_mutex_unlock(&probe->lock);
}

static inline void probe_done(struct probe *probe)
{
    pthread_cond_destroy(&probe->changed);
    pthread_mutex_destroy(&probe->lock);
}

/* Things that any handler understands. Returns 1 if text was none of them. */
static inline int probe_common(struct ps_rpc_call *call, const Note *note, struct probe *probe,
                               struct ps_error *err)
{
    const char *text = note->text;
    if (!strcmp(text, "fail"))
        return ps_fail(err, (int)note->number, "failed as asked: %s", note->n_words ? note->words[0] : "");
    if (!strcmp(text, "status")) { /* the message to the byte, where ps_fail makes one line of it */
        err->code = (int)note->number;
        snprintf(err->message, sizeof err->message, "%s", note->n_words ? note->words[0] : "");
        return err->code;
    }
    if (!strcmp(text, "hold")) {
        pthread_mutex_lock(&probe->lock);
        while (!probe->open)
            pthread_cond_wait(&probe->changed, &probe->lock);
        pthread_mutex_unlock(&probe->lock);
        return 1;
    }
    if (!strcmp(text, "wait")) { /* until it is woken (OK), or the call or the server ends */
        atomic_store(&probe->waiting, call);
        int code = ps_rpc_wait(call, note->number > 0 ? (double)note->number / 1e3 : -1, err);
        atomic_store(&probe->waiting, NULL);
        return code < 0 ? code : 1;
    }
    if (!strcmp(text, "trailer"))
        return ps_rpc_set_trailer(call, note->n_words ? note->words[0] : "",
                                  note->n_words > 1 ? note->words[1] : "", err) < 0
                   ? err->code
                   : 1;
    return 1;
}

static inline int probe_echo(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                             struct ps_error *err)
{
    struct probe *probe = context;
    const Note *note = (const Note *)message;
    atomic_fetch_add(&probe->running, 1);
    int code = probe_common(call, note, probe, err);
    if (code == 1) {
        Note answer = *note;
        char text[256] = "";
        answer.base = (ProtobufCMessage)PROTOBUF_C_MESSAGE_INIT(NOTE_TYPE);
        answer.base.n_unknown_fields = 0;
        answer.base.unknown_fields = NULL;
        if (!strcmp(note->text, "metadata") && note->n_words) {
            const char *value = ps_rpc_metadata(call, note->words[0]);
            snprintf(text, sizeof text, "%s", value ? value : "(absent)");
            answer.text = text;
        } else if (!strcmp(note->text, "peer")) {
            snprintf(text, sizeof text, "%s", ps_rpc_peer(call));
            answer.text = text;
        } else if (!strcmp(note->text, "path")) {
            answer.text = (char *)ps_rpc_path(call);
        } else if (!strcmp(note->text, "deadline")) {
            double left = ps_rpc_time_left(call);
            answer.number = left > 1e9 ? -1 : (int64_t)(left * 1e3);
        }
        code = strcmp(note->text, "silent") ? ps_rpc_send(call, &answer.base, err) : 0;
        if (code == 0 && !strcmp(note->text, "twice"))
            code = ps_rpc_send(call, &answer.base, err);
    }
    atomic_fetch_sub(&probe->running, 1);
    atomic_fetch_add(&probe->handled, 1);
    return code;
}

static inline int probe_sum(struct ps_rpc_call *call, const ProtobufCMessage *unused, void *context,
                            struct ps_error *err)
{
    (void)unused;
    struct probe *probe = context;
    atomic_fetch_add(&probe->running, 1);
    Note answer = NOTE_INIT;
    ProtobufCMessage *message;
    int code;
    while ((code = ps_rpc_recv(call, &message, err)) == 1) {
        const Note *note = (const Note *)message;
        int common = probe_common(call, note, probe, err);
        answer.number += note->number + (int64_t)note->data.len;
        protobuf_c_message_free_unpacked(message, NULL);
        if (common < 0) {
            code = common;
            break;
        }
    }
    if (code == 0)
        code = ps_rpc_send(call, &answer.base, err);
    atomic_fetch_sub(&probe->running, 1);
    atomic_fetch_add(&probe->handled, 1);
    return code;
}

/* number messages with the numbers 1..number and the request's data; "fail" after them if text says "then
 * fail". */
static inline int probe_count(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                              struct ps_error *err)
{
    struct probe *probe = context;
    const Note *note = (const Note *)message;
    atomic_fetch_add(&probe->running, 1);
    int code = probe_common(call, note, probe, err);
    for (int64_t i = 1; i <= note->number && code >= 0; i++) {
        Note answer = NOTE_INIT;
        answer.number = i;
        answer.data = note->data;
        code = ps_rpc_send(call, &answer.base, err);
        if (code == 0)
            atomic_fetch_add(&probe->sent, 1);
    }
    if (code >= 0 && !strcmp(note->text, "then fail"))
        code = ps_fail(err, PS_ABORTED, "after %lld messages", (long long)note->number);
    atomic_fetch_sub(&probe->running, 1);
    atomic_fetch_add(&probe->handled, 1);
    return code < 0 ? code : 0;
}

static inline int probe_chat(struct ps_rpc_call *call, const ProtobufCMessage *unused, void *context,
                             struct ps_error *err)
{
    (void)unused;
    struct probe *probe = context;
    atomic_fetch_add(&probe->running, 1);
    ProtobufCMessage *message;
    int code;
    while ((code = ps_rpc_recv_or_drain(call, &message, err)) == 1) {
        const Note *note = (const Note *)message;
        code = probe_common(call, note, probe, err);
        if (code >= 0)
            code = ps_rpc_send(call, message, err);
        bool enough = !strcmp(note->text, "bye");
        protobuf_c_message_free_unpacked(message, NULL);
        if (code < 0 || enough)
            break;
    }
    atomic_fetch_sub(&probe->running, 1);
    atomic_fetch_add(&probe->handled, 1);
    return code < 0 ? code : 0;
}

static const struct ps_rpc_method probe_methods[] = {
    {PROBE("Echo"), PS_RPC_UNARY, NOTE_TYPE, NOTE_TYPE, probe_echo, false},
    {PROBE("Sum"), PS_RPC_CLIENT_STREAM, NOTE_TYPE, NOTE_TYPE, probe_sum, false},
    {PROBE("Count"), PS_RPC_SERVER_STREAM, NOTE_TYPE, NOTE_TYPE, probe_count, false},
    {PROBE("Chat"), PS_RPC_BIDI, NOTE_TYPE, NOTE_TYPE, probe_chat, false},
};
#define PROBE_METHODS (sizeof probe_methods / sizeof *probe_methods)

#endif
