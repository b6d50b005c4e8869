/* SPDX-License-Identifier: Apache-2.0
 * Connection, calls and runs. */
#include "services/client/internal.h"

#include "services/base/fs.h"
#include "services/base/text.h"

#include "paramsync_version.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

_Static_assert(PARAMSYNC_UNAUTHENTICATED == (int)PS_UNAUTHENTICATED &&
                   PARAMSYNC_DATA_LOSS == (int)PS_DATA_LOSS,
               "one set of codes");
_Static_assert(sizeof((struct paramsync_error *)0)->message == sizeof((struct ps_error *)0)->message,
               "messages fit");

const char *paramsync_code_name(int code)
{
    return ps_code_name(code);
}

const char *paramsync_version(void)
{
    return PARAMSYNC_VERSION;
}

const char *paramsync_run_state_name(int state)
{
    static const char *const names[] = {"unknown", "created", "running", "finished",
                                        "failed",  "killed",  "lost"};
    return state >= 0 && state < (int)(sizeof names / sizeof *names) ? names[state] : names[0];
}

int ps_give(struct paramsync_error *err, const struct ps_error *inner, int code)
{
    if (code && err) {
        err->code = code;
        memcpy(err->message, inner->message, sizeof err->message);
    }
    return code;
}

int64_t ps_timestamp_ns(const Google__Protobuf__Timestamp *stamp)
{
    const int64_t most = INT64_MAX / 1000000000 - 1;
    if (!stamp || stamp->seconds > most || stamp->seconds < -most)
        return 0;
    return stamp->seconds * 1000000000 + stamp->nanos;
}

/* ---- Connection ---- */

static int read_pem(const char *path, char **ret_text, struct ps_error *err)
{
    if (!path || !*path)
        return 0;
    return ps_read_file(path, 1 << 20, ret_text, NULL, err);
}

static int read_token(const struct paramsync_options *options, char **ret_token, struct ps_error *err)
{
    const char *given = options->token;
    char *token = NULL;
    if (!given && options->token_file && *options->token_file) {
        int code = ps_read_file(options->token_file, 64 << 10, &token, NULL, err);
        if (code)
            return code;
        token[strcspn(token, "\r\n")] = '\0';
        /* A sidecar's own token file may name the role before the token. */
        char *word = strrchr(token, ' ');
        if (word && word[1] &&
            (!strncmp(token, "read ", 5) || !strncmp(token, "write ", 6) || !strncmp(token, "admin ", 6)))
            memmove(token, word + 1, strlen(word));
        if (!*token) {
            free(token);
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s: the token file's first line is empty",
                           options->token_file);
        }
    } else {
        if (!given)
            given = getenv("PARAMSYNC_TOKEN");
        if (!given || !*given)
            return 0;
        token = strdup(given);
        if (!token)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    for (const char *p = token; *p; p++)
        if (*p < 0x21 || *p > 0x7e) {
            free(token);
            return ps_fail(err, PS_INVALID_ARGUMENT, "the token must be printable ASCII without spaces");
        }
    *ret_token = token;
    return 0;
}

static int open_channel(const struct paramsync_options *options, struct paramsync_client *client,
                        struct ps_error *err)
{
    struct ps_rpc_channel_config config = {.target = client->address};
    char *token = NULL, *ca = NULL, *cert = NULL, *key = NULL;
    int code = read_token(options, &token, err);
    if (!code)
        code = read_pem(options->tls_ca, &ca, err);
    if (!code)
        code = read_pem(options->tls_cert, &cert, err);
    if (!code)
        code = read_pem(options->tls_key, &key, err);
    if (!code && (!cert != !key))
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "a client certificate and its key go together: give both or none");
    if (!code && cert && !ca)
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "a client certificate needs the CA file too (TLS is off without it)");
    if (!code) {
        /* The library's threads must not take the program's signals. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        config.token = token;
        config.tls_ca = ca;
        config.tls_cert = cert;
        config.tls_key = key;
        code = ps_rpc_channel_open(&config, &client->channel, err);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    free(token);
    free(ca);
    free(cert);
    free(key);
    return code;
}

static int connect_client(const struct paramsync_options *options, struct paramsync_client **ret_client,
                          struct ps_error *err)
{
    const char *address =
        options->address && *options->address ? options->address : getenv("PARAMSYNC_SIDECAR");
    if (!address || !*address)
        address = "127.0.0.1:50051";
    if (strncmp(address, "unix:", 5) != 0) {
        char host[256];
        int port;
        int code = ps_parse_host_port(address, host, sizeof host, &port, err);
        if (code)
            return ps_error_prefix(err, "sidecar address");
        if (port == 0)
            return ps_fail(err, PS_INVALID_ARGUMENT, "sidecar address %s: port 0 cannot be called", address);
    }
    struct paramsync_client *client = calloc(1, sizeof *client);
    if (client)
        client->address = strdup(address);
    if (!client || !client->address) {
        free(client);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    client->timeout_s = options->timeout_s > 0 ? options->timeout_s : 10;
    int code = open_channel(options, client, err);
    if (code) {
        paramsync_disconnect(client);
        return code;
    }
    *ret_client = client;
    return 0;
}

int paramsync_connect(const struct paramsync_options *options, struct paramsync_client **ret_client,
                      struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, connect_client(options, ret_client, &inner));
}

void paramsync_disconnect(struct paramsync_client *client)
{
    if (!client)
        return;
    ps_rpc_channel_free(client->channel);
    free(client->address);
    free(client);
}

bool ps_is_this_machine(const struct paramsync_client *client)
{
    char host[256];
    int port;
    if (!strncmp(client->address, "unix:", 5))
        return true;
    return !ps_parse_host_port(client->address, host, sizeof host, &port, NULL) &&
           (!strncmp(host, "127.", 4) || !strcmp(host, "::1") || !strcasecmp(host, "localhost"));
}

const char *paramsync_address(const struct paramsync_client *client)
{
    return client->address;
}

/* ---- Calls ---- */

void ps_control_cancel(struct ps_control *control)
{
    pthread_mutex_lock(&control->lock);
    control->cancelled = true;
    if (control->stream)
        ps_rpc_stream_cancel(control->stream);
    pthread_mutex_unlock(&control->lock);
}

int ps_call_open(struct paramsync_client *client, struct ps_control *control, const char *path,
                 const ProtobufCMessageDescriptor *response, double timeout_s,
                 struct ps_rpc_stream **ret_stream, struct ps_error *err)
{
    struct ps_rpc_stream *stream = NULL;
    int code = ps_rpc_stream_open(client->channel, path, response, timeout_s, &stream, err);
    if (code)
        return code;
    if (control) {
        pthread_mutex_lock(&control->lock);
        if (control->cancelled)
            code = ps_fail(err, PS_CANCELLED, "the reporter is being closed");
        else
            control->stream = stream;
        pthread_mutex_unlock(&control->lock);
        if (code) {
            ps_rpc_stream_free(stream);
            return code;
        }
    }
    *ret_stream = stream;
    return 0;
}

void ps_call_free(struct ps_control *control, struct ps_rpc_stream *stream)
{
    if (control) {
        pthread_mutex_lock(&control->lock);
        control->stream = NULL;
        pthread_mutex_unlock(&control->lock);
    }
    ps_rpc_stream_free(stream);
}

int ps_call_explain(const struct paramsync_client *client, struct ps_error *err)
{
    /* The plain case in few words; what the runtime says of others (TLS, names, lost connections) stays. */
    if (err->code == PS_UNAVAILABLE && strncmp(err->message, "cannot connect", 14) == 0 &&
        strstr(err->message, "Connection refused"))
        return ps_fail(err, PS_UNAVAILABLE, "no sidecar answers at %.200s (is paramsyncd running there?)",
                       client->address);
    return err->code;
}

int ps_call_end(struct ps_rpc_stream *stream, struct ps_error *err)
{
    ProtobufCMessage *extra = NULL;
    int code = ps_rpc_stream_recv(stream, &extra, err);
    if (code <= 0)
        return code;
    protobuf_c_message_free_unpacked(extra, NULL);
    return ps_fail(err, PS_INTERNAL, "more than one answer to a call that has one");
}

int ps_call(struct paramsync_client *client, struct ps_control *control, const char *path,
            const ProtobufCMessage *request, const ProtobufCMessageDescriptor *response, double timeout_s,
            ProtobufCMessage **ret_response, struct ps_error *err)
{
    ProtobufCMessage *answer = NULL;
    struct ps_error ignored = {0};
    int code;
    if (!control) {
        code = ps_rpc_unary(client->channel, path, request, response, timeout_s, false, &answer, err);
    } else {
        /* As a stream, because a stream can be cancelled from another thread. */
        struct ps_rpc_stream *stream;
        code = ps_call_open(client, control, path, response, timeout_s, &stream, err);
        if (code)
            return code;
        /* A failed send means that the call is over: recv tells why. */
        if (!ps_rpc_stream_send(stream, request, &ignored))
            ps_rpc_stream_close_send(stream, &ignored);
        code = ps_rpc_stream_recv(stream, &answer, err);
        if (code == 0)
            code = ps_fail(err, PS_INTERNAL, "%s: no answer in the answer", path);
        else if (code > 0)
            code = ps_call_end(stream, err);
        ps_call_free(control, stream);
    }
    if (code) {
        if (answer)
            protobuf_c_message_free_unpacked(answer, NULL);
        ps_call_explain(client, err);
        return code;
    }
    *ret_response = answer;
    return 0;
}

/* ---- Runs ---- */

struct run_box {
    struct paramsync_run run; /* first: what the caller holds */
    ProtobufCMessage *owner;
    struct paramsync_pair *pairs;
};

struct runs_box {
    struct paramsync_runs list; /* first */
    struct paramsync_run *runs;
    ProtobufCMessage **owners;
    size_t owner_count;
};

static void view_run(const Paramsync__V1__Run *m, struct paramsync_run *run)
{
    *run = (struct paramsync_run){
        .id = m->id,
        .name = m->name,
        .state = (int)m->state,
        .world_size = m->world_size,
        .attempt = m->attempt,
        .batch_per_rank = m->batch_per_rank,
        .epochs_planned = m->epochs_planned,
        .model = m->model,
        .dataset = m->dataset,
        .dataset_hash = m->dataset_hash,
        .device = m->device,
        .commit = m->commit,
        .reason = m->reason,
        .notes = m->notes,
        .created_ns = ps_timestamp_ns(m->created_at),
        .ended_ns = ps_timestamp_ns(m->ended_at),
        .tags = (const char *const *)m->tags,
        .tag_count = m->n_tags,
        .has_epochs = m->has_epochs,
        .last_epoch = m->last_epoch,
        .best_epoch = m->best_epoch,
        .train_loss = m->train_loss,
        .val_loss = m->val_loss,
        .accuracy = m->accuracy,
        .best_accuracy = m->best_accuracy,
        .samples_per_s = m->samples_per_s,
        .elapsed_s = m->elapsed_s,
        .elapsed_with_gaps_s = m->elapsed_with_gaps_s,
    };
}

int ps_run_wrap(ProtobufCMessage *owner, const Paramsync__V1__Run *message, struct paramsync_run **ret_run,
                struct ps_error *err)
{
    struct run_box *box = NULL;
    if (!message) {
        protobuf_c_message_free_unpacked(owner, NULL);
        return ps_fail(err, PS_INTERNAL, "the sidecar's answer holds no run");
    }
    box = calloc(1, sizeof *box);
    if (box && message->n_config)
        box->pairs = calloc(message->n_config, sizeof *box->pairs);
    if (!box || (message->n_config && !box->pairs)) {
        free(box);
        protobuf_c_message_free_unpacked(owner, NULL);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    box->owner = owner;
    view_run(message, &box->run);
    for (size_t i = 0; i < message->n_config; i++) {
        box->pairs[i].key = message->config[i]->key;
        box->pairs[i].value = message->config[i]->value;
    }
    box->run.config = box->pairs;
    box->run.config_count = message->n_config;
    *ret_run = &box->run;
    return 0;
}

void paramsync_run_free(struct paramsync_run *run)
{
    struct run_box *box = (struct run_box *)run;
    if (!box)
        return;
    if (box->owner)
        protobuf_c_message_free_unpacked(box->owner, NULL);
    free(box->pairs);
    free(box);
}

int ps_create_request(const struct paramsync_new_run *run, Paramsync__V1__CreateRunRequest *ret_request,
                      struct ps_error *err)
{
    Paramsync__V1__CreateRunRequest request = PARAMSYNC__V1__CREATE_RUN_REQUEST__INIT;
    request.name = ps_text(run->name);
    request.world_size = run->world_size;
    request.resume = run->resume;
    request.model = ps_text(run->model);
    request.dataset = ps_text(run->dataset);
    request.dataset_hash = ps_text(run->dataset_hash);
    request.device = ps_text(run->device);
    request.epochs_planned = run->epochs_planned;
    request.notes = ps_text(run->notes);
    request.commit = ps_text(run->commit);
    request.batch_per_rank = run->batch_per_rank;
    request.request_id = ps_text(run->request_id);
    request.tags = (char **)run->tags;
    request.n_tags = run->tag_count;
    if (run->config_count) {
        Paramsync__V1__KeyValue *values = calloc(run->config_count, sizeof *values);
        request.config = calloc(run->config_count, sizeof *request.config);
        if (!values || !request.config) {
            free(values);
            free(request.config);
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        }
        for (size_t i = 0; i < run->config_count; i++) {
            paramsync__v1__key_value__init(&values[i]);
            values[i].key = ps_text(run->config[i].key);
            values[i].value = ps_text(run->config[i].value);
            request.config[i] = &values[i];
        }
        request.n_config = run->config_count;
    }
    *ret_request = request;
    return 0;
}

void ps_create_request_done(Paramsync__V1__CreateRunRequest *request)
{
    if (request->n_config)
        free(request->config[0]); /* the array that all of them lie in */
    free(request->config);
}

static int create_run(struct paramsync_client *client, const struct paramsync_new_run *run,
                      struct paramsync_run **ret_run, bool *ret_resumed, struct ps_error *err)
{
    Paramsync__V1__CreateRunRequest request;
    ProtobufCMessage *answer;
    char fresh[27];
    int code = ps_check_run_name(run->name ? run->name : "", "name", err);
    if (!code)
        code = ps_create_request(run, &request, err);
    if (code)
        return code;
    if (!*request.request_id) {
        ps_make_id(fresh);
        request.request_id = fresh;
    }
    code = ps_call(client, NULL, "/paramsync.v1.Runs/CreateRun", &request.base,
                   &paramsync__v1__create_run_response__descriptor, client->timeout_s, &answer, err);
    ps_create_request_done(&request);
    if (code)
        return code;
    const Paramsync__V1__CreateRunResponse *response = (const Paramsync__V1__CreateRunResponse *)answer;
    bool resumed = response->resumed;
    code = ps_run_wrap(answer, response->run, ret_run, err);
    if (!code && ret_resumed)
        *ret_resumed = resumed;
    return code;
}

int paramsync_create_run(struct paramsync_client *client, const struct paramsync_new_run *request,
                         struct paramsync_run **ret_run, bool *ret_resumed, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, create_run(client, request, ret_run, ret_resumed, &inner));
}

int paramsync_get_run(struct paramsync_client *client, const char *run, struct paramsync_run **ret_run,
                      struct paramsync_error *err)
{
    struct ps_error inner = {0};
    Paramsync__V1__GetRunRequest request = PARAMSYNC__V1__GET_RUN_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.run = ps_text(run);
    int code = ps_call(client, NULL, "/paramsync.v1.Runs/GetRun", &request.base,
                       &paramsync__v1__run__descriptor, client->timeout_s, &answer, &inner);
    if (!code)
        code = ps_run_wrap(answer, (const Paramsync__V1__Run *)answer, ret_run, &inner);
    return ps_give(err, &inner, code);
}

/* Appends a page; takes page, also when it fails. */
static int add_page(struct runs_box *box, Paramsync__V1__ListRunsResponse *page, size_t limit,
                    struct ps_error *err)
{
    size_t n = page->n_runs;
    if (limit && n > limit - box->list.count)
        n = limit - box->list.count;
    ProtobufCMessage **owners = realloc(box->owners, (box->owner_count + 1) * sizeof *owners);
    if (owners)
        box->owners = owners;
    struct paramsync_run *runs = realloc(box->runs, (box->list.count + n + 1) * sizeof *runs);
    if (runs)
        box->list.runs = box->runs = runs;
    if (!owners || !runs) {
        protobuf_c_message_free_unpacked(&page->base, NULL);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    box->owners[box->owner_count++] = &page->base;
    for (size_t i = 0; i < n; i++)
        view_run(page->runs[i], &box->runs[box->list.count++]);
    return 0;
}

static int list_runs(struct paramsync_client *client, const char *name_contains, size_t limit,
                     struct paramsync_runs **ret_runs, struct ps_error *err)
{
    enum { page_size = 500 };
    Paramsync__V1__ListRunsRequest request = PARAMSYNC__V1__LIST_RUNS_REQUEST__INIT;
    struct runs_box *box = calloc(1, sizeof *box);
    if (!box)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    request.name_contains = ps_text(name_contains);
    int code;
    for (;;) {
        ProtobufCMessage *answer;
        size_t left = limit ? limit - box->list.count : page_size;
        request.page_size = left < page_size ? (uint32_t)left : page_size;
        code = ps_call(client, NULL, "/paramsync.v1.Runs/ListRuns", &request.base,
                       &paramsync__v1__list_runs_response__descriptor, client->timeout_s, &answer, err);
        if (code)
            break;
        Paramsync__V1__ListRunsResponse *page = (Paramsync__V1__ListRunsResponse *)answer;
        bool more = *page->next_page_token && page->n_runs;
        code = add_page(box, page, limit, err);
        if (code || !more || (limit && box->list.count >= limit))
            break;
        request.page_token = page->next_page_token; /* lives in the box */
    }
    if (code) {
        paramsync_runs_free(&box->list);
        return code;
    }
    *ret_runs = &box->list;
    return 0;
}

int paramsync_list_runs(struct paramsync_client *client, const char *name_contains, size_t limit,
                        struct paramsync_runs **ret_runs, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, list_runs(client, name_contains, limit, ret_runs, &inner));
}

void paramsync_runs_free(struct paramsync_runs *runs)
{
    struct runs_box *box = (struct runs_box *)runs;
    if (!box)
        return;
    for (size_t i = 0; i < box->owner_count; i++)
        protobuf_c_message_free_unpacked(box->owners[i], NULL);
    free(box->owners);
    free(box->runs);
    free(box);
}

int paramsync_finish_run(struct paramsync_client *client, const char *run, uint32_t attempt, int state,
                         const char *reason, double elapsed_s, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    Paramsync__V1__FinishRunRequest request = PARAMSYNC__V1__FINISH_RUN_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.run = ps_text(run);
    request.attempt = attempt;
    request.state = (Paramsync__V1__RunState)state;
    request.reason = ps_text(reason);
    request.elapsed_s = elapsed_s;
    int code = ps_call(client, NULL, "/paramsync.v1.Runs/FinishRun", &request.base,
                       &paramsync__v1__run__descriptor, client->timeout_s, &answer, &inner);
    if (!code)
        protobuf_c_message_free_unpacked(answer, NULL);
    return ps_give(err, &inner, code);
}

int paramsync_heartbeat(struct paramsync_client *client, const char *run,
                        const struct paramsync_heartbeat *beat, int *ret_state, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    Paramsync__V1__HeartbeatRequest request = PARAMSYNC__V1__HEARTBEAT_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.run = ps_text(run);
    request.rank = beat->rank;
    request.attempt = beat->attempt;
    request.elapsed_s = beat->elapsed_s;
    request.step = beat->step;
    request.points_sent = beat->points_sent;
    request.points_dropped = beat->points_dropped;
    request.spool_bytes = beat->spool_bytes;
    int code = ps_call(client, NULL, "/paramsync.v1.Runs/Heartbeat", &request.base,
                       &paramsync__v1__heartbeat_response__descriptor, client->timeout_s, &answer, &inner);
    if (!code) {
        if (ret_state)
            *ret_state = (int)((const Paramsync__V1__HeartbeatResponse *)answer)->state;
        protobuf_c_message_free_unpacked(answer, NULL);
    }
    return ps_give(err, &inner, code);
}

static int watch_run(struct paramsync_client *client, const char *run, uint64_t since_id, double timeout_s,
                     int (*on_event)(void *context, const struct paramsync_event *event), void *context,
                     struct ps_error *err)
{
    Paramsync__V1__WatchRunRequest request = PARAMSYNC__V1__WATCH_RUN_REQUEST__INIT;
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message;
    struct ps_error ignored = {0};
    request.run = ps_text(run);
    request.since_id = since_id;
    int code = ps_call_open(client, NULL, "/paramsync.v1.Runs/WatchRun",
                            &paramsync__v1__run_event__descriptor, timeout_s, &stream, err);
    if (code)
        return code;
    if (!ps_rpc_stream_send(stream, &request.base, &ignored))
        ps_rpc_stream_close_send(stream, &ignored);
    bool enough = false;
    while (!enough && (code = ps_rpc_stream_recv(stream, &message, err)) > 0) {
        const Paramsync__V1__RunEvent *m = (const Paramsync__V1__RunEvent *)message;
        struct paramsync_run run_now;
        struct paramsync_event event = {.id = m->id,
                                        .kind = m->kind,
                                        .detail = m->detail,
                                        .at_ns = ps_timestamp_ns(m->at),
                                        .attempt = m->attempt};
        if (m->run) {
            view_run(m->run, &run_now);
            event.run = &run_now;
        }
        enough = on_event(context, &event) != 0;
        protobuf_c_message_free_unpacked(message, NULL);
    }
    ps_call_free(NULL, stream);
    if (enough)
        return 0;
    return code ? ps_call_explain(client, err)
                : ps_fail(err, PS_UNAVAILABLE, "the sidecar ended the event stream");
}

struct log_box {
    struct paramsync_log log; /* first */
    struct paramsync_log_line *lines;
    ProtobufCMessage *owner;
};

static int get_log(struct paramsync_client *client, const char *run, uint32_t attempt, int rank,
                   uint32_t lines, struct paramsync_log **ret_log, struct ps_error *err)
{
    Paramsync__V1__GetLogRequest request = PARAMSYNC__V1__GET_LOG_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.run = ps_text(run);
    request.attempt = attempt;
    request.rank = rank;
    request.lines = lines;
    int code = ps_call(client, NULL, "/paramsync.v1.Runs/GetLog", &request.base,
                       &paramsync__v1__get_log_response__descriptor, client->timeout_s, &answer, err);
    if (code)
        return code;
    const Paramsync__V1__GetLogResponse *m = (const Paramsync__V1__GetLogResponse *)answer;
    struct log_box *box = calloc(1, sizeof *box);
    if (box)
        box->lines = calloc(m->n_lines + 1, sizeof *box->lines);
    if (!box || !box->lines) {
        free(box);
        protobuf_c_message_free_unpacked(answer, NULL);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    box->owner = answer;
    for (size_t i = 0; i < m->n_lines; i++)
        box->lines[i] = (struct paramsync_log_line){m->lines[i]->rank, m->lines[i]->seq, m->lines[i]->text};
    box->log = (struct paramsync_log){m->attempt, box->lines, m->n_lines};
    *ret_log = &box->log;
    return 0;
}

int paramsync_get_log(struct paramsync_client *client, const char *run, uint32_t attempt, int rank,
                      uint32_t lines, struct paramsync_log **ret_log, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, get_log(client, run, attempt, rank, lines, ret_log, &inner));
}

void paramsync_log_free(struct paramsync_log *log)
{
    struct log_box *box = (struct log_box *)log;
    if (!box)
        return;
    protobuf_c_message_free_unpacked(box->owner, NULL);
    free(box->lines);
    free(box);
}

int paramsync_watch_run(struct paramsync_client *client, const char *run, uint64_t since_id, double timeout_s,
                        int (*on_event)(void *context, const struct paramsync_event *event), void *context,
                        struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, watch_run(client, run, since_id, timeout_s, on_event, context, &inner));
}
