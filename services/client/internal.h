/* SPDX-License-Identifier: Apache-2.0
 * What the files of libparamsync share. Inside, errors are ps_error; the public functions copy them out. */
#ifndef PARAMSYNC_CLIENT_INTERNAL_H
#define PARAMSYNC_CLIENT_INTERNAL_H

#include "services/base/error.h"
#include "services/client/paramsync.h"
#include "services/rpc/rpc.h"

#include "paramsync/v1/checkpoints.pb-c.h"
#include "paramsync/v1/metrics.pb-c.h"
#include "paramsync/v1/runs.pb-c.h"

#include <pthread.h>

/* Only what paramsync.h declares leaves the shared object. */
struct paramsync_client {
    struct ps_rpc_channel *channel;
    char *address;
    double timeout_s;
};

/* Lets another thread end a call, and keeps later ones from starting. */
struct ps_control {
    pthread_mutex_t lock; /* guards what follows */
    struct ps_rpc_stream *stream;
    bool cancelled;
};
#define PS_CONTROL_INIT                                                                                      \
    {                                                                                                        \
        .lock = PTHREAD_MUTEX_INITIALIZER                                                                    \
    }
void ps_control_cancel(struct ps_control *control);

/* A stream registered with control (which may be NULL): open and free only through these. */
int ps_call_open(struct paramsync_client *client, struct ps_control *control, const char *path,
                 const ProtobufCMessageDescriptor *response, double timeout_s,
                 struct ps_rpc_stream **ret_stream, struct ps_error *err);
void ps_call_free(struct ps_control *control, struct ps_rpc_stream *stream);
/* After the one answer of a call: its status. */
int ps_call_end(struct ps_rpc_stream *stream, struct ps_error *err);
/* One request, one answer. */
int ps_call(struct paramsync_client *client, struct ps_control *control, const char *path,
            const ProtobufCMessage *request, const ProtobufCMessageDescriptor *response, double timeout_s,
            ProtobufCMessage **ret_response, struct ps_error *err);
/* Puts what a person needs before the core's own text where nobody answered. Returns err's code. */
int ps_call_explain(const struct paramsync_client *client, struct ps_error *err);

/* Copies the error out and returns code. */
int ps_give(struct paramsync_error *err, const struct ps_error *inner, int code);

int64_t ps_timestamp_ns(const Google__Protobuf__Timestamp *stamp); /* 0 for NULL */
int ps_run_wrap(ProtobufCMessage *owner, const Paramsync__V1__Run *message, struct paramsync_run **ret_run,
                struct ps_error *err); /* takes owner, also when it fails */

/* The request's arrays are to be freed with ps_create_request_done; strings are borrowed. */
int ps_create_request(const struct paramsync_new_run *run, Paramsync__V1__CreateRunRequest *ret_request,
                      struct ps_error *err);
void ps_create_request_done(Paramsync__V1__CreateRunRequest *request);
void ps_epoch_request(const char *run, const struct paramsync_epoch *epoch,
                      Paramsync__V1__ReportEpochRequest *ret_request);

int ps_put(struct paramsync_client *client, struct ps_control *control, const char *run,
           const struct paramsync_put *put, struct paramsync_checkpoint **ret_checkpoint,
           struct ps_error *err);

int ps_register(struct paramsync_client *client, struct ps_control *control, const char *run,
                const struct paramsync_put *put, struct paramsync_checkpoint **ret_checkpoint,
                struct ps_error *err);
bool ps_is_this_machine(
    const struct paramsync_client *client); /* by its address: loopback or a unix socket */

/* protobuf-c's strings are char * although they are only read. */
static inline char *ps_text(const char *text)
{
    return (char *)(text ? text : "");
}

#endif
