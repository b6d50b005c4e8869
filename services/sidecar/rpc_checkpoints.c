/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/rpc_handlers.h"

#include "services/base/clock.h"
#include "services/base/digest.h"
#include "services/sidecar/tensors.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CHUNK_MIN = 4 << 10,
    CHUNK_DEFAULT = 256 << 10,
    CHUNK_MAX = 1 << 20,
    PAGE_MAX = 5000, /* checkpoints in one answer: with names of the usual length that is 1 MiB */
};

struct checkpoint_message {
    Paramsync__V1__Checkpoint message;
    Google__Protobuf__Timestamp created;
};

/* Borrows the checkpoint's texts. */
static void fill(struct checkpoint_message *out, const struct ps_checkpoint *c)
{
    Paramsync__V1__Checkpoint *m = &out->message;
    paramsync__v1__checkpoint__init(m);
    m->run_id = ps_borrow(c->run_id);
    m->run_name = ps_borrow(c->run_name);
    m->attempt = c->attempt;
    m->epoch = c->epoch;
    m->filename = ps_borrow(c->filename);
    m->format = ps_borrow(c->format);
    m->size = c->size;
    m->sha256 = ps_borrow(c->sha256);
    m->accuracy = c->accuracy;
    m->has_accuracy = c->has_accuracy;
    m->step = c->step;
    m->registered_path = ps_borrow(c->path);
    ps_timestamp_fill(&out->created, c->created_ns);
    m->created_at = &out->created;
}

static int send_checkpoint(struct ps_rpc_call *call, const struct ps_checkpoint *checkpoint,
                           struct ps_error *err)
{
    struct checkpoint_message out;
    fill(&out, checkpoint);
    return ps_rpc_send(call, &out.message.base, err);
}

/* Keeps a stream below so many bytes a second by waiting between chunks. */
struct pace {
    struct ps_limits *limits; /* of the peer as a whole */
    uint64_t bytes_per_s;     /* of this stream; 0: no bound */
    int64_t due_ns;           /* monotonic: when the next chunk may go */
};

static int keep_pace(struct ps_rpc_call *call, struct pace *pace, size_t bytes, struct ps_error *err)
{
    double wait_s = ps_limits_bytes(pace->limits, ps_rpc_peer(call), bytes);
    if (pace->bytes_per_s) {
        int64_t now = ps_monotonic_ns();
        wait_s = fmax(wait_s, (double)(pace->due_ns - now) * 1e-9);
        pace->due_ns = (pace->due_ns > now ? pace->due_ns : now) +
                       (int64_t)((double)bytes / (double)pace->bytes_per_s * 1e9);
    }
    /* A stream that nobody wakes: only its end and the drain cut this short. */
    int code = wait_s > 0 ? ps_rpc_wait(call, wait_s, err) : 0;
    return code < 0 ? code : 0;
}

/* ---- PutCheckpoint ---- */

static int begin_upload(struct ps_service *service, const Paramsync__V1__PutCheckpointHeader *header,
                        struct ps_upload **ret_upload, struct ps_error *err)
{
    struct ps_new_checkpoint checkpoint = {
        .attempt = header->attempt,
        .epoch = header->epoch,
        .filename = header->filename,
        .format = header->format,
        .size = header->size,
        .sha256 = header->sha256,
        .has_accuracy = header->has_accuracy,
        .accuracy = header->accuracy,
        .step = header->step,
    };
    return ps_upload_begin(service, header->run, &checkpoint, ret_upload, err);
}

static int take_chunk(struct ps_rpc_call *call, struct pace *pace, struct ps_upload *upload,
                      const Paramsync__V1__Chunk *chunk, struct ps_error *err)
{
    int code = ps_upload_data(upload, chunk->offset, chunk->data.data, chunk->data.len, chunk->crc32c, err);
    return code ? code : keep_pace(call, pace, chunk->data.len, err);
}

PS_HANDLER(ps_handle_put_checkpoint)
{
    (void)message;
    struct ps_service *service = context;
    struct ps_upload *upload = NULL;
    ProtobufCMessage *received;
    int code;
    struct pace pace = {.limits = service->limits};
    bool known = false;
    while (!known && (code = ps_rpc_recv(call, &received, err)) == 1) {
        const Paramsync__V1__PutCheckpointRequest *request = (const void *)received;
        bool is_header = request->part_case == PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__PART_HEADER;
        bool is_chunk = request->part_case == PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__PART_CHUNK;
        if (!upload && is_header)
            code = begin_upload(service, request->header, &upload, err);
        else if (upload && is_chunk)
            code = take_chunk(call, &pace, upload, request->chunk, err);
        else
            code = ps_fail(err, PS_INVALID_ARGUMENT,
                           upload ? "part: only chunks may follow the header"
                                  : "part: the first must be the header");
        known = !code && is_header && ps_upload_is_known(upload);
        protobuf_c_message_free_unpacked(received, NULL);
        if (code)
            break;
    }
    if (!code && !upload)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "part: the header is missing");
    struct ps_checkpoint checkpoint = {0};
    if (!code)
        code = ps_upload_commit(upload, &checkpoint, err);
    ps_upload_free(upload);
    if (!code)
        code = send_checkpoint(call, &checkpoint, err);
    ps_checkpoint_done(&checkpoint);
    return code;
}

PS_HANDLER(ps_handle_register_checkpoint)
{
    struct ps_service *service = context;
    const Paramsync__V1__RegisterCheckpointRequest *request = (const void *)message;
    struct ps_new_checkpoint header = {
        .attempt = request->attempt,
        .epoch = request->epoch,
        .filename = request->filename,
        .format = request->format,
        .sha256 = request->sha256,
        .has_accuracy = request->has_accuracy,
        .accuracy = request->accuracy,
        .step = request->step,
    };
    struct ps_checkpoint checkpoint = {0};
    int code = ps_service_register(service, request->run, request->path, &header, &checkpoint, err);
    if (!code)
        code = send_checkpoint(call, &checkpoint, err);
    ps_checkpoint_done(&checkpoint);
    return code;
}

/* ---- Reading the catalogue ---- */

PS_HANDLER(ps_handle_list_checkpoints)
{
    struct ps_service *service = context;
    const Paramsync__V1__ListCheckpointsRequest *request = (const void *)message;
    struct ps_checkpoint_list list;
    char token[64];
    int code = ps_need_run(request->run, err);
    if (!code && request->page_size > PAGE_MAX)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "page_size: %u is not from 1 to %d", request->page_size,
                       PAGE_MAX);
    if (!code)
        code = ps_store_page_checkpoints(service->store, request->run,
                                         request->page_size ? request->page_size : PAGE_MAX,
                                         request->page_token, &list, token, err);
    if (code)
        return code;
    struct checkpoint_message *messages = calloc(list.count + 1, sizeof *messages);
    Paramsync__V1__Checkpoint **pointers = calloc(list.count + 1, sizeof *pointers);
    if (messages && pointers) {
        for (size_t i = 0; i < list.count; i++) {
            fill(&messages[i], &list.checkpoints[i]);
            pointers[i] = &messages[i].message;
        }
        Paramsync__V1__ListCheckpointsResponse response = PARAMSYNC__V1__LIST_CHECKPOINTS_RESPONSE__INIT;
        response.checkpoints = pointers;
        response.n_checkpoints = list.count;
        response.next_page_token = token;
        code = ps_rpc_send(call, &response.base, err);
    } else {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    free(messages);
    free(pointers);
    ps_checkpoint_list_done(&list);
    return code;
}

static int find(struct ps_service *service, const char *run,
                const Paramsync__V1__CheckpointSelector *selector, struct ps_checkpoint *ret_checkpoint,
                struct ps_error *err)
{
    struct ps_checkpoint_selector wanted = {.which = PS_CHECKPOINT_LATEST};
    int code = ps_need_run(run, err);
    if (code)
        return code;
    if (selector) {
        wanted.format = selector->format;
        switch (selector->which_case) {
        case PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_BEST:
            wanted.which = selector->best ? PS_CHECKPOINT_BEST : PS_CHECKPOINT_LATEST;
            break;
        case PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_EPOCH:
            if (selector->epoch < 1)
                return ps_fail(err, PS_INVALID_ARGUMENT, "selector.epoch: counts from 1");
            wanted.which = PS_CHECKPOINT_EPOCH;
            wanted.epoch = selector->epoch;
            break;
        case PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_SHA256:
            if (!ps_sha256_hex_valid(selector->sha256))
                return ps_fail(err, PS_INVALID_ARGUMENT,
                               "selector.sha256: must be 64 lower-case hexadecimal digits");
            wanted.which = PS_CHECKPOINT_SHA256;
            wanted.sha256 = selector->sha256;
            break;
        default:
            break;
        }
    }
    return ps_store_get_checkpoint(service->store, run, &wanted, ret_checkpoint, err);
}

/* Fills the buffer from the file; fewer bytes than asked for are a damaged store. */
static int read_chunk(int fd, unsigned char *buffer, size_t size, uint64_t offset, struct ps_error *err)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = pread(fd, buffer + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ps_fail_errno(err, errno, "cannot read the checkpoint");
        if (n == 0)
            return ps_fail(err, PS_DATA_LOSS, "the checkpoint's file ends at byte %llu",
                           (unsigned long long)(offset + done));
        done += (size_t)n;
    }
    return 0;
}

/* What is sent of a checkpoint: the file, or a view of it. */
struct content {
    int fd;                      /* -1: none */
    struct ps_tensor_view *view; /* NULL: the file itself */
    uint64_t size;
    char sha256[PS_SHA256_HEX];
};

static void content_done(struct content *content)
{
    ps_tensor_view_free(content->view);
    if (content->fd >= 0)
        close(content->fd);
}

static int read_content(const struct content *content, unsigned char *buffer, size_t size, uint64_t offset,
                        struct ps_error *err)
{
    return content->view ? ps_tensor_view_read(content->view, offset, buffer, size, err)
                         : read_chunk(content->fd, buffer, size, offset, err);
}

/* Feeds the first `bytes` of it to sha, through a buffer of the given size. */
static int hash_content(struct ps_rpc_call *call, const struct content *content, uint64_t bytes,
                        struct ps_sha256 *sha, unsigned char *buffer, size_t room, struct ps_error *err)
{
    int code = 0;
    for (uint64_t at = 0; !code && at < bytes;) {
        size_t n = bytes - at < room ? (size_t)(bytes - at) : room;
        code = ps_rpc_cancelled(call) ? ps_fail(err, PS_CANCELLED, "the client has gone")
                                      : read_content(content, buffer, n, at, err);
        if (!code)
            ps_sha256_update(sha, buffer, n);
        at += n;
    }
    return code;
}

static int digest_view(struct ps_rpc_call *call, struct content *content, struct ps_error *err)
{
    unsigned char *buffer = malloc(CHUNK_MAX);
    struct ps_sha256 *sha = ps_sha256_new();
    int code = buffer && sha ? hash_content(call, content, content->size, sha, buffer, CHUNK_MAX, err)
                             : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        ps_sha256_hex(sha, content->sha256);
    ps_sha256_free(sha);
    free(buffer);
    return code;
}

/* tensors and dtype as in the requests; none of them: the file itself. */
static int open_content(struct ps_rpc_call *call, struct ps_service *service,
                        const struct ps_checkpoint *checkpoint, char **tensors, size_t count,
                        const char *dtype, struct content *ret, struct ps_error *err)
{
    struct content content = {.fd = -1, .size = checkpoint->size};
    struct ps_tensor_choice choice = {(const char *const *)tensors, count, strcmp(dtype, "bf16") == 0};
    bool is_view = count || *dtype;
    memcpy(content.sha256, checkpoint->sha256, sizeof content.sha256);
    if (*dtype && !choice.bf16)
        return ps_fail(err, PS_INVALID_ARGUMENT, "dtype: %.40s; only bf16 can be asked for", dtype);
    if (is_view && strcmp(checkpoint->format, "safetensors") != 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s: only safetensors can be taken apart, %s is %s",
                       count ? "tensors" : "dtype", checkpoint->filename, checkpoint->format);
    int code = ps_service_read_blob(service, checkpoint->sha256, checkpoint->size, is_view, &content.fd, err);
    if (!code && is_view) {
        code = ps_tensor_view_open(content.fd, checkpoint->size, &choice, &content.view, err);
        if (!code) {
            content.size = ps_tensor_view_size(content.view);
            code = digest_view(call, &content, err);
        }
    }
    if (code) {
        content_done(&content);
        return code;
    }
    *ret = content;
    return 0;
}

static void fill_content(struct checkpoint_message *out, const struct ps_checkpoint *checkpoint,
                         const struct content *content)
{
    fill(out, checkpoint);
    if (!content->view)
        return;
    out->message.size = content->size;
    out->message.sha256 = ps_borrow(content->sha256);
    out->message.source_sha256 = ps_borrow(checkpoint->sha256);
}

PS_HANDLER(ps_handle_get_checkpoint)
{
    struct ps_service *service = context;
    const Paramsync__V1__GetCheckpointRequest *request = (const void *)message;
    struct ps_checkpoint checkpoint;
    int code = find(service, request->run, request->selector, &checkpoint, err);
    if (code)
        return code;
    if (!request->n_tensors && !*request->dtype) {
        code = send_checkpoint(call, &checkpoint, err);
    } else {
        struct content content;
        struct checkpoint_message out;
        code = open_content(call, service, &checkpoint, request->tensors, request->n_tensors, request->dtype,
                            &content, err);
        if (!code) {
            fill_content(&out, &checkpoint, &content);
            code = ps_rpc_send(call, &out.message.base, err);
            content_done(&content);
        }
    }
    ps_checkpoint_done(&checkpoint);
    return code;
}

PS_HANDLER(ps_handle_delete_checkpoint)
{
    struct ps_service *service = context;
    const Paramsync__V1__DeleteCheckpointRequest *request = (const void *)message;
    Paramsync__V1__DeleteCheckpointResponse response = PARAMSYNC__V1__DELETE_CHECKPOINT_RESPONSE__INIT;
    int code =
        ps_service_delete_checkpoint(service, request->run, request->sha256, &response.bytes_freed, err);
    return code ? code : ps_rpc_send(call, &response.base, err);
}

/* ---- PullCheckpoint ---- */

/* The digest is taken of what is sent (and of what a resumed pull has already), so that a file that has
 * rotted on the disk ends as DATA_LOSS also for a client that does not look itself. */
static int send_content(struct ps_rpc_call *call, const struct content *content, const char *filename,
                        uint64_t offset, size_t chunk_bytes, struct pace *pace, struct ps_error *err)
{
    const uint64_t size = content->size;
    unsigned char *buffer = malloc(chunk_bytes);
    struct ps_sha256 *sha = ps_sha256_new();
    int code = buffer && sha ? hash_content(call, content, offset, sha, buffer, chunk_bytes, err)
                             : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    while (!code && offset < size) {
        size_t n = size - offset < chunk_bytes ? (size_t)(size - offset) : chunk_bytes;
        code = keep_pace(call, pace, n, err);
        if (!code)
            code = read_content(content, buffer, n, offset, err);
        if (code)
            break;
        Paramsync__V1__PullCheckpointResponse response = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__INIT;
        Paramsync__V1__Chunk chunk = PARAMSYNC__V1__CHUNK__INIT;
        chunk.offset = offset;
        chunk.data.data = buffer;
        chunk.data.len = n;
        chunk.crc32c = ps_crc32c(0, buffer, n);
        ps_sha256_update(sha, buffer, n);
        response.part_case = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHUNK;
        response.chunk = &chunk;
        code = ps_rpc_send(call, &response.base, err);
        offset += n;
    }
    char hex[PS_SHA256_HEX];
    if (!code) {
        ps_sha256_hex(sha, hex);
        if (strcmp(hex, content->sha256) != 0)
            code = ps_fail(err, PS_DATA_LOSS,
                           "the file of %s has changed on the sidecar's disk: its sha256 is %s, not %s",
                           filename, hex, content->sha256);
    }
    ps_sha256_free(sha);
    free(buffer);
    return code;
}

PS_HANDLER(ps_handle_pull_checkpoint)
{
    struct ps_service *service = context;
    const Paramsync__V1__PullCheckpointRequest *request = (const void *)message;
    uint32_t chunk_bytes = request->chunk_bytes ? request->chunk_bytes : CHUNK_DEFAULT;
    if (chunk_bytes < CHUNK_MIN || chunk_bytes > CHUNK_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "chunk_bytes: %u is not from 4 KiB to 1 MiB", chunk_bytes);
    struct ps_checkpoint checkpoint;
    int code = find(service, request->run, request->selector, &checkpoint, err);
    if (code)
        return code;
    ps_service_pulling(service, checkpoint.sha256, 1);
    struct content content;
    /* Chunks of an eighth of a second, so that a slow stream is an even one. */
    if (request->max_bytes_per_s && request->max_bytes_per_s / 8 < chunk_bytes)
        chunk_bytes =
            request->max_bytes_per_s / 8 < CHUNK_MIN ? CHUNK_MIN : (uint32_t)(request->max_bytes_per_s / 8);
    struct pace pace = {service->limits, request->max_bytes_per_s, ps_monotonic_ns()};
    code = open_content(call, service, &checkpoint, request->tensors, request->n_tensors, request->dtype,
                        &content, err);
    if (code) {
        ps_service_pulling(service, checkpoint.sha256, -1);
        ps_checkpoint_done(&checkpoint);
        return code;
    }
    if (request->offset > content.size)
        code = ps_fail(err, PS_OUT_OF_RANGE, "offset: %llu is past the end, the checkpoint has %llu bytes",
                       (unsigned long long)request->offset, (unsigned long long)content.size);
    if (!code) {
        struct checkpoint_message metadata;
        fill_content(&metadata, &checkpoint, &content);
        Paramsync__V1__PullCheckpointResponse response = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__INIT;
        response.part_case = PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHECKPOINT;
        response.checkpoint = &metadata.message;
        code = ps_rpc_send(call, &response.base, err);
    }
    if (!code)
        code = send_content(call, &content, checkpoint.filename, request->offset, chunk_bytes, &pace, err);
    content_done(&content);
    ps_service_pulling(service, checkpoint.sha256, -1);
    ps_checkpoint_done(&checkpoint);
    return code;
}

/* ---- WatchCheckpoints ---- */

static bool wanted_format(const struct ps_checkpoint_list *list, const struct ps_checkpoint *c,
                          const char *format)
{
    if (*format)
        return strcmp(c->format, format) == 0;
    if (strcmp(c->format, "safetensors") == 0)
        return true;
    bool any = false;
    for (size_t i = 0; i < list->count; i++)
        any = any || strcmp(list->checkpoints[i].format, "safetensors") == 0;
    return !any && strcmp(c->format, "pth") == 0;
}

/* Sends what the catalogue has with ids above *last, in their order; the first time only the newest. */
static int send_new(struct ps_rpc_call *call, struct ps_service *service, const char *run, const char *format,
                    bool first_time, uint64_t *last, struct ps_error *err)
{
    struct ps_checkpoint_list list;
    int code = ps_store_list_checkpoints(service->store, run, &list, err);
    if (code)
        return code;
    for (;;) {
        const struct ps_checkpoint *next = NULL;
        for (size_t i = 0; i < list.count; i++) {
            const struct ps_checkpoint *c = &list.checkpoints[i];
            if (c->id > *last && wanted_format(&list, c, format) &&
                (!next || (first_time ? c->attempt >= next->attempt : c->id < next->id)))
                next = c;
        }
        if (!next)
            break;
        code = send_checkpoint(call, next, err);
        *last = next->id;
        if (code || first_time)
            break;
    }
    for (size_t i = 0; first_time && i < list.count; i++)
        if (list.checkpoints[i].id > *last)
            *last = list.checkpoints[i].id;
    ps_checkpoint_list_done(&list);
    return code;
}

PS_HANDLER(ps_handle_watch_checkpoints)
{
    struct ps_service *service = context;
    const Paramsync__V1__WatchCheckpointsRequest *request = (const void *)message;
    struct ps_run run;
    char id[PS_RUN_ID_SIZE];
    int code = ps_need_run(request->run, err);
    if (!code)
        code = ps_store_get_run(service->store, request->run, &run, err);
    if (code)
        return code;
    memcpy(id, run.id, sizeof id);
    ps_run_done(&run);
    struct ps_subscription *subscription;
    code = ps_hub_subscribe(service->hub, id, 0, ps_wake_call, call, &subscription, err);
    if (code)
        return code;
    uint64_t last = 0;
    bool deleted = false;
    code = send_new(call, service, id, request->format, true, &last, err);
    while (code >= 0 && !deleted) {
        code = ps_rpc_wait(call, -1, err);
        bool any = false;
        const struct ps_event *event;
        while (code >= 0 && (code = ps_hub_next(subscription, &event, err)) == 1) {
            any = any || strcmp(event->kind, "checkpoint") == 0;
            deleted = deleted || strcmp(event->kind, "deleted") == 0;
            ps_hub_release(event);
        }
        if (code >= 0 && any && !deleted)
            code = send_new(call, service, id, request->format, false, &last, err);
    }
    ps_hub_unsubscribe(subscription);
    return code < 0 ? code : 0;
}
