/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/rpc_handlers.h"

#include "paramsync/v1/gate.pb-c.h"
#include "paramsync/v1/metrics.pb-c.h"
#include "paramsync/v1/rendezvous.pb-c.h"

#include <string.h>
#include <strings.h>

#define METHOD(service, method, kind, request, response, handler)                                            \
    {                                                                                                        \
        "/paramsync.v1." service "/" method, kind, &paramsync__v1__##request##__descriptor,                  \
            &paramsync__v1__##response##__descriptor, handler, false                                         \
    }
#define WAITING(service, method, request, response, handler)                                                 \
    {                                                                                                        \
        "/paramsync.v1." service "/" method, PS_RPC_UNARY, &paramsync__v1__##request##__descriptor,          \
            &paramsync__v1__##response##__descriptor, handler, true                                          \
    }

const struct ps_rpc_method ps_sidecar_methods[] = {
    METHOD("Runs", "CreateRun", PS_RPC_UNARY, create_run_request, create_run_response, ps_handle_create_run),
    METHOD("Runs", "GetRun", PS_RPC_UNARY, get_run_request, run, ps_handle_get_run),
    METHOD("Runs", "ListRuns", PS_RPC_UNARY, list_runs_request, list_runs_response, ps_handle_list_runs),
    METHOD("Runs", "UpdateRun", PS_RPC_UNARY, update_run_request, run, ps_handle_update_run),
    METHOD("Runs", "FinishRun", PS_RPC_UNARY, finish_run_request, run, ps_handle_finish_run),
    METHOD("Runs", "DeleteRun", PS_RPC_UNARY, delete_run_request, delete_run_response, ps_handle_delete_run),
    METHOD("Runs", "Heartbeat", PS_RPC_UNARY, heartbeat_request, heartbeat_response, ps_handle_heartbeat),
    METHOD("Runs", "WatchRun", PS_RPC_SERVER_STREAM, watch_run_request, run_event, ps_handle_watch_run),
    METHOD("Runs", "GetLog", PS_RPC_UNARY, get_log_request, get_log_response, ps_handle_get_log),
    METHOD("Metrics", "ReportEpoch", PS_RPC_UNARY, report_epoch_request, report_epoch_response,
           ps_handle_report_epoch),
    METHOD("Metrics", "ReportSteps", PS_RPC_BIDI, step_batch, step_ack, ps_handle_report_steps),
    METHOD("Metrics", "QuerySeries", PS_RPC_UNARY, query_series_request, query_series_response,
           ps_handle_query_series),
    METHOD("Metrics", "GetConfusion", PS_RPC_UNARY, get_confusion_request, confusion,
           ps_handle_get_confusion),
    METHOD("Checkpoints", "PutCheckpoint", PS_RPC_CLIENT_STREAM, put_checkpoint_request, checkpoint,
           ps_handle_put_checkpoint),
    WAITING("Checkpoints", "RegisterCheckpoint", register_checkpoint_request, checkpoint,
            ps_handle_register_checkpoint),
    METHOD("Checkpoints", "ListCheckpoints", PS_RPC_UNARY, list_checkpoints_request,
           list_checkpoints_response, ps_handle_list_checkpoints),
    METHOD("Checkpoints", "GetCheckpoint", PS_RPC_UNARY, get_checkpoint_request, checkpoint,
           ps_handle_get_checkpoint),
    METHOD("Checkpoints", "PullCheckpoint", PS_RPC_SERVER_STREAM, pull_checkpoint_request,
           pull_checkpoint_response, ps_handle_pull_checkpoint),
    METHOD("Checkpoints", "WatchCheckpoints", PS_RPC_SERVER_STREAM, watch_checkpoints_request, checkpoint,
           ps_handle_watch_checkpoints),
    METHOD("Checkpoints", "DeleteCheckpoint", PS_RPC_UNARY, delete_checkpoint_request,
           delete_checkpoint_response, ps_handle_delete_checkpoint),
    METHOD("Rendezvous", "Set", PS_RPC_UNARY, set_request, set_response, ps_handle_rendezvous_set),
    WAITING("Rendezvous", "Get", get_request, get_response, ps_handle_rendezvous_get),
    METHOD("Rendezvous", "Add", PS_RPC_UNARY, add_request, add_response, ps_handle_rendezvous_add),
    METHOD("Gate", "Compare", PS_RPC_UNARY, compare_request, compare_response, ps_handle_compare),
    METHOD("Gate", "Evaluate", PS_RPC_UNARY, evaluate_request, evaluate_response, ps_handle_evaluate),
};
const size_t ps_sidecar_method_count = sizeof ps_sidecar_methods / sizeof *ps_sidecar_methods;

/* What a method asks of its caller: the longest name that fits decides. */
static enum ps_role needed_role(const char *path)
{
    static const struct {
        const char *prefix;
        enum ps_role role;
    } rules[] = {
        {"Runs/Get", PS_ROLE_READ},         {"Runs/List", PS_ROLE_READ},
        {"Runs/Watch", PS_ROLE_READ},       {"Runs/CreateRun", PS_ROLE_WRITE},
        {"Runs/FinishRun", PS_ROLE_WRITE},  {"Runs/UpdateRun", PS_ROLE_WRITE},
        {"Runs/Heartbeat", PS_ROLE_WRITE},  {"Metrics/Get", PS_ROLE_READ},
        {"Metrics/Query", PS_ROLE_READ},    {"Metrics/Report", PS_ROLE_WRITE},
        {"Checkpoints/Get", PS_ROLE_READ},  {"Checkpoints/List", PS_ROLE_READ},
        {"Checkpoints/Pull", PS_ROLE_READ}, {"Checkpoints/Watch", PS_ROLE_READ},
        {"Checkpoints/Put", PS_ROLE_WRITE}, {"Checkpoints/Register", PS_ROLE_WRITE},
        {"Rendezvous/", PS_ROLE_WRITE},     {"Gate/", PS_ROLE_READ},
    };
    static const char package[] = "/paramsync.v1.";
    if (strncmp(path, package, sizeof package - 1) != 0)
        return PS_ROLE_READ; /* reflection */
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (!strncmp(path + sizeof package - 1, rules[i].prefix, strlen(rules[i].prefix)))
            return rules[i].role;
    return PS_ROLE_ADMIN; /* Delete..., and whatever nobody thought about */
}

int ps_sidecar_intercept(struct ps_rpc_call *call, void *context, struct ps_error *err)
{
    struct ps_service *service = context;
    const char *header = ps_rpc_metadata(call, "authorization");
    const char *token = header && strncasecmp(header, "Bearer ", 7) == 0 ? header + 7 : NULL;
    double wait_s;
    if (!ps_limits_call(service->limits, ps_rpc_peer(call), &wait_s))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "more calls from this address than --peer-calls allows: try again in %.0f ms",
                       wait_s * 1e3 + 1);
    enum ps_role role = ps_access_role(service->access, token), needed = needed_role(ps_rpc_path(call));
    if (role == PS_ROLE_NONE)
        return ps_fail(err, PS_UNAUTHENTICATED,
                       token ? "the token is wrong" : "a token is needed: --token-file or PARAMSYNC_TOKEN");
    if (role < needed)
        return ps_fail(err, PS_PERMISSION_DENIED,
                       "this token may only %s, %s asks for a token with the role %s", ps_role_name(role),
                       ps_rpc_path(call) + 1, ps_role_name(needed));
    return 0;
}

int ps_need_run(const char *run, struct ps_error *err)
{
    return *run ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "run: must be a run's id or name");
}

void ps_timestamp_fill(Google__Protobuf__Timestamp *out, int64_t ns)
{
    google__protobuf__timestamp__init(out);
    out->seconds = ns / 1000000000;
    out->nanos = (int32_t)(ns % 1000000000);
}

void ps_wake_call(void *call)
{
    ps_rpc_wake(call);
}
