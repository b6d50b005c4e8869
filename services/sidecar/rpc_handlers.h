/* SPDX-License-Identifier: Apache-2.0
 * The gRPC face of the domain layer: what the files with handlers share. Every handler's context is the
 * ps_service. */
#ifndef PARAMSYNC_SIDECAR_RPC_HANDLERS_H
#define PARAMSYNC_SIDECAR_RPC_HANDLERS_H

#include "services/rpc/rpc.h"
#include "services/sidecar/service.h"

#include "paramsync/v1/checkpoints.pb-c.h"
#include "paramsync/v1/runs.pb-c.h"

/* All methods of paramsync.v1 that the sidecar serves. */
extern const struct ps_rpc_method ps_sidecar_methods[];
extern const size_t ps_sidecar_method_count;

/* Lets a call through whose token ("authorization: Bearer TOKEN") has the role that the method asks for, else
 * UNAUTHENTICATED or PERMISSION_DENIED. */
int ps_sidecar_intercept(struct ps_rpc_call *call, void *context, struct ps_error *err);

#define PS_HANDLER(name)                                                                                     \
    int name(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context, struct ps_error *err)
PS_HANDLER(ps_handle_create_run);
PS_HANDLER(ps_handle_get_run);
PS_HANDLER(ps_handle_list_runs);
PS_HANDLER(ps_handle_update_run);
PS_HANDLER(ps_handle_finish_run);
PS_HANDLER(ps_handle_delete_run);
PS_HANDLER(ps_handle_heartbeat);
PS_HANDLER(ps_handle_watch_run);
PS_HANDLER(ps_handle_get_log);
PS_HANDLER(ps_handle_report_epoch);
PS_HANDLER(ps_handle_report_steps);
PS_HANDLER(ps_handle_query_series);
PS_HANDLER(ps_handle_get_confusion);
PS_HANDLER(ps_handle_rendezvous_set);
PS_HANDLER(ps_handle_rendezvous_get);
PS_HANDLER(ps_handle_rendezvous_add);
PS_HANDLER(ps_handle_put_checkpoint);
PS_HANDLER(ps_handle_register_checkpoint);
PS_HANDLER(ps_handle_list_checkpoints);
PS_HANDLER(ps_handle_get_checkpoint);
PS_HANDLER(ps_handle_pull_checkpoint);
PS_HANDLER(ps_handle_watch_checkpoints);
PS_HANDLER(ps_handle_delete_checkpoint);
PS_HANDLER(ps_handle_compare);
PS_HANDLER(ps_handle_evaluate);

/* INVALID_ARGUMENT unless run names one. */
int ps_need_run(const char *run, struct ps_error *err);

/* A run as a message that borrows all its texts; end it with ps_run_message_done before the run. */
struct ps_run_message {
    Paramsync__V1__Run message;
    Google__Protobuf__Timestamp created, ended;
    void *memory;
};
int ps_run_message_fill(struct ps_run_message *out, const struct ps_run *run, struct ps_error *err);
void ps_run_message_done(struct ps_run_message *out);

void ps_timestamp_fill(Google__Protobuf__Timestamp *out, int64_t ns);

/* For ps_hub_subscribe: context is the call. */
void ps_wake_call(void *call);

/* protobuf-c's strings are not const; ours are not written to. */
static inline char *ps_borrow(const char *text)
{
    return (char *)(text ? text : "");
}

#endif
