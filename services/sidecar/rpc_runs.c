/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/rpc_handlers.h"

#include <stdlib.h>
#include <string.h>

/* The store's states are the wire's. */
_Static_assert((int)PS_RUN_CREATED == (int)PARAMSYNC__V1__RUN_STATE__RUN_STATE_CREATED, "state");
_Static_assert((int)PS_RUN_LOST == (int)PARAMSYNC__V1__RUN_STATE__RUN_STATE_LOST, "state");

int ps_run_message_fill(struct ps_run_message *out, const struct ps_run *run, struct ps_error *err)
{
    Paramsync__V1__Run *m = &out->message;
    paramsync__v1__run__init(m);
    out->memory = NULL;
    if (run->config_count) {
        Paramsync__V1__KeyValue *entries =
            malloc(run->config_count * (sizeof *entries + sizeof(Paramsync__V1__KeyValue *)));
        if (!entries)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        out->memory = entries;
        m->config = (Paramsync__V1__KeyValue **)(entries + run->config_count);
        m->n_config = run->config_count;
        for (size_t i = 0; i < run->config_count; i++) {
            paramsync__v1__key_value__init(&entries[i]);
            entries[i].key = ps_borrow(run->config[i].key);
            entries[i].value = ps_borrow(run->config[i].value);
            m->config[i] = &entries[i];
        }
    }
    m->id = ps_borrow(run->id);
    m->name = ps_borrow(run->name);
    m->state = (Paramsync__V1__RunState)run->state;
    m->world_size = run->world_size;
    m->attempt = run->attempt;
    m->model = ps_borrow(run->model);
    m->dataset = ps_borrow(run->dataset);
    m->dataset_hash = ps_borrow(run->dataset_hash);
    m->device = ps_borrow(run->device);
    m->commit = ps_borrow(run->commit);
    m->epochs_planned = run->epochs_planned;
    m->batch_per_rank = run->batch_per_rank;
    ps_timestamp_fill(&out->created, run->created_ns);
    m->created_at = &out->created;
    if (run->ended_ns) {
        ps_timestamp_fill(&out->ended, run->ended_ns);
        m->ended_at = &out->ended;
    }
    m->reason = ps_borrow(run->reason);
    m->notes = ps_borrow(run->notes);
    m->tags = (char **)run->tags;
    m->n_tags = run->tag_count;
    m->has_epochs = run->has_epochs;
    m->last_epoch = run->last_epoch;
    m->train_loss = run->train_loss;
    m->val_loss = run->val_loss;
    m->accuracy = run->accuracy;
    m->best_accuracy = run->best_accuracy;
    m->best_epoch = run->best_epoch;
    m->samples_per_s = run->samples_per_s;
    m->elapsed_s = run->elapsed_s;
    m->elapsed_with_gaps_s = run->elapsed_with_gaps_s;
    return 0;
}

void ps_run_message_done(struct ps_run_message *out)
{
    free(out->memory);
    out->memory = NULL;
}

/* Sends the run and drops it. */
static int send_run(struct ps_rpc_call *call, struct ps_run *run, struct ps_error *err)
{
    struct ps_run_message message;
    int code = ps_run_message_fill(&message, run, err);
    if (!code) {
        code = ps_rpc_send(call, &message.message.base, err);
        ps_run_message_done(&message);
    }
    ps_run_done(run);
    return code;
}

PS_HANDLER(ps_handle_create_run)
{
    struct ps_service *service = context;
    const Paramsync__V1__CreateRunRequest *request = (const void *)message;
    struct ps_key_value *config = calloc(request->n_config + 1, sizeof *config);
    if (!config)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < request->n_config; i++)
        config[i] = (struct ps_key_value){request->config[i]->key, request->config[i]->value};
    struct ps_new_run run = {
        .name = request->name,
        .world_size = request->world_size,
        .resume = request->resume,
        .model = request->model,
        .dataset = request->dataset,
        .dataset_hash = request->dataset_hash,
        .device = request->device,
        .commit = request->commit,
        .notes = request->notes,
        .epochs_planned = request->epochs_planned,
        .batch_per_rank = request->batch_per_rank,
        .config = config,
        .config_count = request->n_config,
        .tags = (const char *const *)request->tags,
        .tag_count = request->n_tags,
        .request_id = request->request_id,
    };
    struct ps_run created = {0};
    bool resumed = false;
    int code = ps_service_create_run(service, &run, &created, &resumed, err);
    free(config);
    if (code)
        return code;
    struct ps_run_message inner;
    code = ps_run_message_fill(&inner, &created, err);
    if (!code) {
        Paramsync__V1__CreateRunResponse response = PARAMSYNC__V1__CREATE_RUN_RESPONSE__INIT;
        response.run = &inner.message;
        response.resumed = resumed;
        code = ps_rpc_send(call, &response.base, err);
        ps_run_message_done(&inner);
    }
    ps_run_done(&created);
    return code;
}

PS_HANDLER(ps_handle_get_run)
{
    struct ps_service *service = context;
    const Paramsync__V1__GetRunRequest *request = (const void *)message;
    struct ps_run run;
    int code = ps_need_run(request->run, err);
    if (!code)
        code = ps_store_get_run(service->store, request->run, &run, err);
    if (code)
        return code;
    struct ps_run_message out;
    struct ps_run_size size = {0};
    code = ps_run_message_fill(&out, &run, err);
    if (!code) {
        code = ps_store_run_size(service->store, run.id, &size, err);
        out.message.metric_bytes = size.metric_bytes;
        out.message.checkpoint_bytes = size.checkpoint_bytes;
        if (!code || code == PS_NOT_FOUND) /* deleted just now */
            code = ps_rpc_send(call, &out.message.base, err);
        ps_run_message_done(&out);
    }
    ps_run_done(&run);
    return code;
}

PS_HANDLER(ps_handle_list_runs)
{
    struct ps_service *service = context;
    const Paramsync__V1__ListRunsRequest *request = (const void *)message;
    int *states = calloc(request->n_states + 1, sizeof *states);
    if (!states)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < request->n_states; i++)
        states[i] = (int)request->states[i];
    struct ps_run_query query = {.page_size = request->page_size,
                                 .page_token = request->page_token,
                                 .name_contains = request->name_contains,
                                 .states = states,
                                 .state_count = request->n_states};
    struct ps_run_list list;
    int code = ps_store_list_runs(service->store, &query, &list, err);
    free(states);
    if (code)
        return code;
    struct ps_run_message *messages = calloc(list.count + 1, sizeof *messages);
    Paramsync__V1__Run **pointers = calloc(list.count + 1, sizeof *pointers);
    if (!messages || !pointers)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; !code && i < list.count; i++) {
        code = ps_run_message_fill(&messages[i], &list.runs[i], err);
        pointers[i] = &messages[i].message;
    }
    if (!code) {
        Paramsync__V1__ListRunsResponse response = PARAMSYNC__V1__LIST_RUNS_RESPONSE__INIT;
        response.runs = pointers;
        response.n_runs = list.count;
        response.next_page_token = list.next_page_token;
        code = ps_rpc_send(call, &response.base, err);
    }
    for (size_t i = 0; messages && i < list.count; i++)
        ps_run_message_done(&messages[i]);
    free(messages);
    free(pointers);
    ps_run_list_done(&list);
    return code;
}

PS_HANDLER(ps_handle_update_run)
{
    struct ps_service *service = context;
    const Paramsync__V1__UpdateRunRequest *request = (const void *)message;
    const char *notes =
        request->new_notes_case == PARAMSYNC__V1__UPDATE_RUN_REQUEST__NEW_NOTES_NOTES ? request->notes : NULL;
    if (!request->set_tags && request->n_tags)
        return ps_fail(err, PS_INVALID_ARGUMENT, "set_tags: must be true where tags are given");
    struct ps_run run;
    int code = ps_service_update_run(service, request->run, notes, request->set_tags,
                                     (const char *const *)request->tags, request->n_tags, &run, err);
    return code ? code : send_run(call, &run, err);
}

PS_HANDLER(ps_handle_finish_run)
{
    struct ps_service *service = context;
    const Paramsync__V1__FinishRunRequest *request = (const void *)message;
    struct ps_run run;
    int code = ps_service_finish_run(service, request->run, request->attempt, (int)request->state,
                                     request->reason, request->elapsed_s, &run, err);
    return code ? code : send_run(call, &run, err);
}

PS_HANDLER(ps_handle_delete_run)
{
    struct ps_service *service = context;
    const Paramsync__V1__DeleteRunRequest *request = (const void *)message;
    Paramsync__V1__DeleteRunResponse response = PARAMSYNC__V1__DELETE_RUN_RESPONSE__INIT;
    int code = ps_service_delete_run(service, request->run, &response.bytes_freed, err);
    return code ? code : ps_rpc_send(call, &response.base, err);
}

PS_HANDLER(ps_handle_heartbeat)
{
    struct ps_service *service = context;
    const Paramsync__V1__HeartbeatRequest *request = (const void *)message;
    struct ps_heartbeat beat = {
        .rank = request->rank,
        .attempt = request->attempt,
        .elapsed_s = request->elapsed_s,
        .step = request->step,
        .points_sent = request->points_sent,
        .points_dropped = request->points_dropped,
        .spool_bytes = request->spool_bytes,
        .points_waiting = request->points_waiting,
        .points_replayed = request->points_replayed,
        .rss_bytes = request->rss_bytes,
        .has_clock_offset = request->wall_s != 0,
        .clock_offset_s = request->wall_s != 0 ? request->wall_s - (double)ps_wall_ns() * 1e-9 : 0,
        .lines = (const char *const *)request->log,
        .line_count = request->n_log,
        .first_line = request->first_line,
    };
    int state = 0;
    int code = ps_service_heartbeat(service, request->run, &beat, &state, err);
    if (code)
        return code;
    Paramsync__V1__HeartbeatResponse response = PARAMSYNC__V1__HEARTBEAT_RESPONSE__INIT;
    response.state = (Paramsync__V1__RunState)state;
    return ps_rpc_send(call, &response.base, err);
}

PS_HANDLER(ps_handle_get_log)
{
    struct ps_service *service = context;
    const Paramsync__V1__GetLogRequest *request = (const void *)message;
    struct ps_log_list list;
    int code = ps_need_run(request->run, err);
    if (!code && request->rank < -1)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "rank: -1 means every rank, %d nothing", request->rank);
    if (!code)
        code = ps_store_list_log(service->store, request->run, request->attempt, request->rank,
                                 request->lines, &list, err);
    if (code)
        return code;
    Paramsync__V1__GetLogResponse response = PARAMSYNC__V1__GET_LOG_RESPONSE__INIT;
    Paramsync__V1__LogLine *lines = calloc(list.count + 1, sizeof *lines);
    Paramsync__V1__LogLine **pointers = calloc(list.count + 1, sizeof *pointers);
    if (lines && pointers) {
        for (size_t i = 0; i < list.count; i++) {
            paramsync__v1__log_line__init(&lines[i]);
            lines[i].rank = list.lines[i].rank;
            lines[i].seq = list.lines[i].seq;
            lines[i].text = ps_borrow(list.lines[i].text);
            pointers[i] = &lines[i];
        }
        response.attempt = list.count ? list.lines[0].attempt : request->attempt;
        response.lines = pointers;
        response.n_lines = list.count;
        code = ps_rpc_send(call, &response.base, err);
    } else {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    free(lines);
    free(pointers);
    ps_log_list_done(&list);
    return code;
}

/* ---- WatchRun ---- */

static int send_event(struct ps_rpc_call *call, const struct ps_event *event, Paramsync__V1__Run *run,
                      struct ps_error *err)
{
    Paramsync__V1__RunEvent out = PARAMSYNC__V1__RUN_EVENT__INIT;
    Google__Protobuf__Timestamp at;
    ps_timestamp_fill(&at, event->at_ns);
    out.id = event->id;
    out.run_id = ps_borrow(event->run_id);
    out.kind = ps_borrow(event->kind);
    out.detail = ps_borrow(event->detail);
    out.at = &at;
    out.attempt = event->attempt;
    out.run = run;
    return ps_rpc_send(call, &out.base, err);
}

static int send_new_event(struct ps_rpc_call *call, struct ps_service *service, const struct ps_event *event,
                          struct ps_error *err)
{
    struct ps_run run;
    int code = ps_store_get_run(service->store, event->run_id, &run, err);
    if (code == PS_NOT_FOUND) /* deleted since */
        return send_event(call, event, NULL, err);
    if (code)
        return code;
    struct ps_run_message message;
    code = ps_run_message_fill(&message, &run, err);
    if (!code) {
        code = send_event(call, event, &message.message, err);
        ps_run_message_done(&message);
    }
    ps_run_done(&run);
    return code;
}

/* Sends what the store has after *last, which it moves. */
static int replay(struct ps_rpc_call *call, struct ps_service *service, const char *run_id, uint64_t *last,
                  struct ps_error *err)
{
    size_t count;
    do {
        struct ps_event_list list;
        int code = ps_store_list_events(service->store, run_id, *last, 0, &list, err);
        if (code)
            return code;
        count = list.count;
        for (size_t i = 0; !code && i < list.count; i++) {
            code = send_event(call, &list.events[i], NULL, err);
            *last = list.events[i].id;
        }
        ps_event_list_done(&list);
        if (code)
            return code;
    } while (count);
    return 0;
}

PS_HANDLER(ps_handle_watch_run)
{
    struct ps_service *service = context;
    const Paramsync__V1__WatchRunRequest *request = (const void *)message;
    struct ps_run run;
    char id[PS_RUN_ID_SIZE];
    int code = ps_need_run(request->run, err);
    if (!code)
        code = ps_store_get_run(service->store, request->run, &run, err);
    if (code)
        return code;
    memcpy(id, run.id, sizeof id);
    ps_run_done(&run);
    /* First listen, then read, then leave out what comes twice. */
    struct ps_subscription *subscription;
    code = ps_hub_subscribe(service->hub, id, 0, ps_wake_call, call, &subscription, err);
    if (code)
        return code;
    uint64_t last = request->since_id;
    code = replay(call, service, id, &last, err);
    bool deleted = false;
    while (code >= 0 && !deleted) {
        const struct ps_event *event;
        while (code >= 0 && !deleted && (code = ps_hub_next(subscription, &event, err)) == 1) {
            deleted = strcmp(event->kind, "deleted") == 0;
            if (event->id > last) {
                last = event->id;
                code = send_new_event(call, service, event, err);
            }
            ps_hub_release(event);
        }
        if (code >= 0 && !deleted)
            code = ps_rpc_wait(call, -1, err);
    }
    ps_hub_unsubscribe(subscription);
    return code < 0 ? code : 0;
}
