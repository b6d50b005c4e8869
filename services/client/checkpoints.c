/* SPDX-License-Identifier: Apache-2.0
 * Checkpoints: streamed up and down in chunks with crc32c, whole under their sha256. */
#include "services/client/internal.h"

#include "services/base/digest.h"
#include "services/base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { chunk_bytes = 256 << 10 };

/* Slow links count too: a minute, and a quarter of a MiB per second. */
static double transfer_timeout(uint64_t bytes)
{
    return 60 + (double)bytes / (256 << 10);
}

/* ---- Metadata ---- */

struct checkpoint_box {
    struct paramsync_checkpoint checkpoint; /* first */
    ProtobufCMessage *owner;
};

static void view(const Paramsync__V1__Checkpoint *m, struct paramsync_checkpoint *checkpoint)
{
    *checkpoint = (struct paramsync_checkpoint){.run_id = m->run_id,
                                                .run_name = m->run_name,
                                                .attempt = m->attempt,
                                                .epoch = m->epoch,
                                                .filename = m->filename,
                                                .format = m->format,
                                                .sha256 = m->sha256,
                                                .size = m->size,
                                                .step = m->step,
                                                .accuracy = m->accuracy,
                                                .has_accuracy = m->has_accuracy,
                                                .created_ns = ps_timestamp_ns(m->created_at)};
}

/* Takes owner, also when it fails. */
static int wrap(ProtobufCMessage *owner, const Paramsync__V1__Checkpoint *message,
                struct paramsync_checkpoint **ret_checkpoint, struct ps_error *err)
{
    struct checkpoint_box *box = message ? calloc(1, sizeof *box) : NULL;
    if (!box) {
        protobuf_c_message_free_unpacked(owner, NULL);
        return message ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory")
                       : ps_fail(err, PS_INTERNAL, "the sidecar's answer holds no checkpoint");
    }
    box->owner = owner;
    view(message, &box->checkpoint);
    *ret_checkpoint = &box->checkpoint;
    return 0;
}

void paramsync_checkpoint_free(struct paramsync_checkpoint *checkpoint)
{
    struct checkpoint_box *box = (struct checkpoint_box *)checkpoint;
    if (!box)
        return;
    protobuf_c_message_free_unpacked(box->owner, NULL);
    free(box);
}

struct checkpoints_box {
    struct paramsync_checkpoints list; /* first */
    struct paramsync_checkpoint *checkpoints;
    ProtobufCMessage **pages;
    size_t page_count;
};

static void box_free(struct checkpoints_box *box)
{
    for (size_t i = 0; i < box->page_count; i++)
        protobuf_c_message_free_unpacked(box->pages[i], NULL);
    free(box->pages);
    free(box->checkpoints);
    free(box);
}

void paramsync_checkpoints_free(struct paramsync_checkpoints *checkpoints)
{
    if (checkpoints)
        box_free((struct checkpoints_box *)checkpoints);
}

/* Takes one page, also when it fails. */
static int add_page(struct checkpoints_box *box, ProtobufCMessage *answer, struct ps_error *err)
{
    const Paramsync__V1__ListCheckpointsResponse *m = (const Paramsync__V1__ListCheckpointsResponse *)answer;
    size_t count = box->list.count + m->n_checkpoints;
    ProtobufCMessage **pages = realloc(box->pages, (box->page_count + 1) * sizeof *pages);
    if (pages)
        box->pages = pages;
    struct paramsync_checkpoint *all = pages ? realloc(box->checkpoints, (count + 1) * sizeof *all) : NULL;
    if (!all) {
        protobuf_c_message_free_unpacked(answer, NULL);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    box->pages[box->page_count++] = answer;
    box->checkpoints = all;
    for (size_t i = 0; i < m->n_checkpoints; i++)
        view(m->checkpoints[i], &all[box->list.count + i]);
    box->list.count = count;
    box->list.checkpoints = all;
    return 0;
}

static int list_checkpoints(struct paramsync_client *client, const char *run,
                            struct paramsync_checkpoints **ret_checkpoints, struct ps_error *err)
{
    Paramsync__V1__ListCheckpointsRequest request = PARAMSYNC__V1__LIST_CHECKPOINTS_REQUEST__INIT;
    struct checkpoints_box *box = calloc(1, sizeof *box);
    int code = box ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    request.run = ps_text(run);
    while (!code) {
        ProtobufCMessage *answer;
        code =
            ps_call(client, NULL, "/paramsync.v1.Checkpoints/ListCheckpoints", &request.base,
                    &paramsync__v1__list_checkpoints_response__descriptor, client->timeout_s, &answer, err);
        if (!code)
            code = add_page(box, answer, err);
        if (code)
            break;
        /* The page lives as long as the box. */
        request.page_token = ((Paramsync__V1__ListCheckpointsResponse *)answer)->next_page_token;
        if (!*request.page_token)
            break;
    }
    if (code) {
        if (box)
            box_free(box);
        return code;
    }
    *ret_checkpoints = &box->list;
    return 0;
}

int paramsync_list_checkpoints(struct paramsync_client *client, const char *run,
                               struct paramsync_checkpoints **ret_checkpoints, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, list_checkpoints(client, run, ret_checkpoints, &inner));
}

static int make_selector(const struct paramsync_selector *selector, Paramsync__V1__CheckpointSelector *ret,
                         struct ps_error *err)
{
    paramsync__v1__checkpoint_selector__init(ret);
    if (!selector)
        return 0;
    bool by_content = selector->sha256 && *selector->sha256;
    if (selector->best + (selector->epoch != 0) + by_content > 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "choose one of best, an epoch, a sha256");
    ret->format = ps_text(selector->format);
    if (selector->best) {
        ret->which_case = PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_BEST;
        ret->best = true;
    } else if (selector->epoch) {
        ret->which_case = PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_EPOCH;
        ret->epoch = selector->epoch;
    } else if (by_content) {
        ret->which_case = PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_SHA256;
        ret->sha256 = ps_text(selector->sha256);
    }
    return 0;
}

static int get_checkpoint(struct paramsync_client *client, const char *run,
                          const struct paramsync_selector *selector,
                          const struct paramsync_pull_options *options, double timeout_s,
                          struct paramsync_checkpoint **ret_checkpoint, struct ps_error *err)
{
    Paramsync__V1__GetCheckpointRequest request = PARAMSYNC__V1__GET_CHECKPOINT_REQUEST__INIT;
    Paramsync__V1__CheckpointSelector which;
    ProtobufCMessage *answer;
    int code = make_selector(selector, &which, err);
    if (code)
        return code;
    request.run = ps_text(run);
    request.selector = &which;
    if (options) {
        request.tensors = (char **)options->tensors;
        request.n_tensors = options->tensor_count;
        request.dtype = ps_text(options->dtype);
    }
    code = ps_call(client, NULL, "/paramsync.v1.Checkpoints/GetCheckpoint", &request.base,
                   &paramsync__v1__checkpoint__descriptor, timeout_s, &answer, err);
    return code ? code : wrap(answer, (const Paramsync__V1__Checkpoint *)answer, ret_checkpoint, err);
}

int paramsync_get_checkpoint(struct paramsync_client *client, const char *run,
                             const struct paramsync_selector *selector,
                             struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner,
                   get_checkpoint(client, run, selector, NULL, client->timeout_s, ret_checkpoint, &inner));
}

/* ---- Put ---- */

/* Up to size bytes at offset into buffer; *ret_size is less only at the end of the file. */
static int read_at(int fd, const char *path, uint64_t offset, void *buffer, size_t size, size_t *ret_size,
                   struct ps_error *err)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = pread(fd, (char *)buffer + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ps_fail_errno(err, errno, "reading %s", path);
        if (n == 0)
            break;
        done += (size_t)n;
    }
    *ret_size = done;
    return 0;
}

/* Feeds the first `bytes` of the file to sha. */
static int hash_file(int fd, const char *path, uint64_t bytes, struct ps_sha256 *sha, void *buffer,
                     struct ps_error *err)
{
    for (uint64_t at = 0; at < bytes;) {
        size_t n, want = bytes - at < chunk_bytes ? (size_t)(bytes - at) : chunk_bytes;
        int code = read_at(fd, path, at, buffer, want, &n, err);
        if (code)
            return code;
        if (n < want)
            return ps_fail(err, PS_DATA_LOSS, "%s became shorter while it was read", path);
        ps_sha256_update(sha, buffer, n);
        at += n;
    }
    return 0;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static const char *format_of(const char *filename)
{
    const char *dot = strrchr(filename, '.');
    return dot && dot[1] ? dot + 1 : "";
}

static int send_chunks(struct ps_rpc_stream *stream, int fd, const struct paramsync_put *put, uint64_t size,
                       uint8_t *buffer, struct ps_error *err)
{
    struct ps_error over = {0};
    for (uint64_t at = 0; at < size;) {
        Paramsync__V1__PutCheckpointRequest part = PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__INIT;
        Paramsync__V1__Chunk chunk = PARAMSYNC__V1__CHUNK__INIT;
        size_t n, want = size - at < chunk_bytes ? (size_t)(size - at) : chunk_bytes;
        int code = read_at(fd, put->path, at, buffer, want, &n, err);
        if (code)
            return code;
        if (n < want)
            return ps_fail(err, PS_DATA_LOSS, "%s became shorter while it was sent", put->path);
        chunk.offset = at;
        chunk.data.data = buffer;
        chunk.data.len = n;
        chunk.crc32c = ps_crc32c(0, buffer, n);
        part.part_case = PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__PART_CHUNK;
        part.chunk = &chunk;
        if (ps_rpc_stream_send(stream, &part.base, &over))
            return 0; /* the sidecar has answered already: recv tells what */
        at += n;
        if (put->progress)
            put->progress(put->context, at, size);
    }
    return 0;
}

static int put_open_file(struct paramsync_client *client, struct ps_control *control, const char *run,
                         const struct paramsync_put *put, int fd, uint64_t size, const char *sha256,
                         uint8_t *buffer, struct paramsync_checkpoint **ret_checkpoint, struct ps_error *err)
{
    Paramsync__V1__PutCheckpointRequest first = PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__INIT;
    Paramsync__V1__PutCheckpointHeader header = PARAMSYNC__V1__PUT_CHECKPOINT_HEADER__INIT;
    struct ps_rpc_stream *stream;
    struct ps_error ignored = {0};
    ProtobufCMessage *answer = NULL;
    header.run = ps_text(run);
    header.attempt = put->attempt;
    header.epoch = put->epoch;
    header.step = put->step;
    header.filename = ps_text(put->filename ? put->filename : last_part(put->path));
    header.format = ps_text(put->format ? put->format : format_of(header.filename));
    header.size = size;
    header.sha256 = ps_text(sha256);
    header.accuracy = put->accuracy;
    header.has_accuracy = put->has_accuracy;
    first.part_case = PARAMSYNC__V1__PUT_CHECKPOINT_REQUEST__PART_HEADER;
    first.header = &header;
    int code = ps_call_open(client, control, "/paramsync.v1.Checkpoints/PutCheckpoint",
                            &paramsync__v1__checkpoint__descriptor, transfer_timeout(size), &stream, err);
    if (code)
        return code;
    if (!ps_rpc_stream_send(stream, &first.base, &ignored))
        code = send_chunks(stream, fd, put, size, buffer, err);
    if (code) {
        ps_call_free(control, stream);
        return code;
    }
    ps_rpc_stream_close_send(stream, &ignored);
    code = ps_rpc_stream_recv(stream, &answer, err);
    if (code > 0)
        code = ps_call_end(stream, err);
    ps_call_free(control, stream);
    if (code && answer)
        protobuf_c_message_free_unpacked(answer, NULL);
    if (code) {
        ps_call_explain(client, err);
        return code;
    }
    if (!answer)
        return ps_fail(err, PS_INTERNAL, "PutCheckpoint: no answer in the answer");
    return wrap(answer, (const Paramsync__V1__Checkpoint *)answer, ret_checkpoint, err);
}

int ps_put(struct paramsync_client *client, struct ps_control *control, const char *run,
           const struct paramsync_put *put, struct paramsync_checkpoint **ret_checkpoint,
           struct ps_error *err)
{
    struct stat st;
    char hex[PS_SHA256_HEX];
    int code = 0;
    int fd = open(put->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* not to wait for the writer of a fifo */
    if (fd < 0)
        return ps_fail_errno(err, errno, "opening %s", put->path);
    uint8_t *buffer = malloc(chunk_bytes);
    struct ps_sha256 *sha = ps_sha256_new();
    if (!buffer || !sha)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    else if (fstat(fd, &st))
        code = ps_fail_errno(err, errno, "reading %s", put->path);
    else if (!S_ISREG(st.st_mode))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is not a regular file", put->path);
    else
        code = hash_file(fd, put->path, (uint64_t)st.st_size, sha, buffer, err);
    if (!code) {
        ps_sha256_hex(sha, hex);
        code = put_open_file(client, control, run, put, fd, (uint64_t)st.st_size, hex, buffer, ret_checkpoint,
                             err);
    }
    ps_sha256_free(sha);
    free(buffer);
    close(fd);
    return code;
}

int paramsync_put_checkpoint(struct paramsync_client *client, const char *run,
                             const struct paramsync_put *put, struct paramsync_checkpoint **ret_checkpoint,
                             struct paramsync_error *err)
{
    struct ps_error inner = {0};
    struct paramsync_checkpoint *checkpoint = NULL;
    int code = put->path ? ps_put(client, NULL, run, put, &checkpoint, &inner)
                         : ps_fail(&inner, PS_INVALID_ARGUMENT, "no file to put");
    if (!code && ret_checkpoint)
        *ret_checkpoint = checkpoint;
    else
        paramsync_checkpoint_free(checkpoint);
    return ps_give(err, &inner, code);
}

/* ---- Register ---- */

int ps_register(struct paramsync_client *client, struct ps_control *control, const char *run,
                const struct paramsync_put *put, struct paramsync_checkpoint **ret_checkpoint,
                struct ps_error *err)
{
    Paramsync__V1__RegisterCheckpointRequest request = PARAMSYNC__V1__REGISTER_CHECKPOINT_REQUEST__INIT;
    ProtobufCMessage *answer;
    struct stat st;
    request.run = ps_text(run);
    request.path = ps_text(put->path);
    request.filename = ps_text(put->filename);
    request.format = ps_text(put->format);
    request.attempt = put->attempt;
    request.epoch = put->epoch;
    request.step = put->step;
    request.accuracy = put->accuracy;
    request.has_accuracy = put->has_accuracy;
    /* The sidecar reads all of it; what it may be here says for how long. */
    double timeout_s =
        transfer_timeout(stat(put->path, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0);
    int code = ps_call(client, control, "/paramsync.v1.Checkpoints/RegisterCheckpoint", &request.base,
                       &paramsync__v1__checkpoint__descriptor, timeout_s, &answer, err);
    return code ? code : wrap(answer, (const Paramsync__V1__Checkpoint *)answer, ret_checkpoint, err);
}

int paramsync_register_checkpoint(struct paramsync_client *client, const char *run,
                                  const struct paramsync_put *put,
                                  struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    struct paramsync_checkpoint *checkpoint = NULL;
    int code = put->path ? ps_register(client, NULL, run, put, &checkpoint, &inner)
                         : ps_fail(&inner, PS_INVALID_ARGUMENT, "no file to register");
    if (!code && ret_checkpoint)
        *ret_checkpoint = checkpoint;
    else
        paramsync_checkpoint_free(checkpoint);
    return ps_give(err, &inner, code);
}

/* ---- Watch ---- */

static int
watch_checkpoints(struct paramsync_client *client, const char *run, const char *format, double timeout_s,
                  int (*on_checkpoint)(void *context, const struct paramsync_checkpoint *checkpoint),
                  void *context, struct ps_error *err)
{
    Paramsync__V1__WatchCheckpointsRequest request = PARAMSYNC__V1__WATCH_CHECKPOINTS_REQUEST__INIT;
    struct ps_rpc_stream *stream;
    struct ps_error ignored = {0};
    ProtobufCMessage *message;
    request.run = ps_text(run);
    request.format = ps_text(format);
    int code = ps_call_open(client, NULL, "/paramsync.v1.Checkpoints/WatchCheckpoints",
                            &paramsync__v1__checkpoint__descriptor, timeout_s, &stream, err);
    if (code)
        return code;
    if (!ps_rpc_stream_send(stream, &request.base, &ignored))
        ps_rpc_stream_close_send(stream, &ignored);
    bool enough = false;
    while (!enough && (code = ps_rpc_stream_recv(stream, &message, err)) > 0) {
        struct paramsync_checkpoint checkpoint;
        view((const Paramsync__V1__Checkpoint *)message, &checkpoint);
        enough = on_checkpoint(context, &checkpoint) != 0;
        protobuf_c_message_free_unpacked(message, NULL);
    }
    ps_call_free(NULL, stream);
    return enough || !code ? 0 : ps_call_explain(client, err);
}

int paramsync_watch_checkpoints(struct paramsync_client *client, const char *run, const char *format,
                                double timeout_s,
                                int (*on_checkpoint)(void *context,
                                                     const struct paramsync_checkpoint *checkpoint),
                                void *context, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner,
                   watch_checkpoints(client, run, format, timeout_s, on_checkpoint, context, &inner));
}

/* ---- Pull ---- */

struct pull {
    struct paramsync_client *client;
    const char *run;
    const struct paramsync_checkpoint *checkpoint; /* what was asked for, by content from here on */
    const struct paramsync_pull_options *options;  /* NULL: none */
    const char *source; /* sha256 of the checkpoint itself, of which the one above may be a view */
    const char *path;
    char *part;
    int fd;
    struct ps_sha256 *sha;
    uint8_t *buffer;
    uint64_t have; /* bytes in the part file that sha has seen */
    paramsync_progress progress;
    void *context;
};

/* Opens PATH.part under a lock that says who may write it. */
static int open_part(struct pull *pull, struct ps_error *err)
{
    for (int tries = 0; tries < 10; tries++) {
        struct stat ours, there;
        pull->fd = open(pull->part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (pull->fd < 0)
            return ps_fail_errno(err, errno, "opening %s", pull->part);
        if (flock(pull->fd, LOCK_EX | LOCK_NB))
            return errno == EWOULDBLOCK ? ps_fail(err, PS_FAILED_PRECONDITION,
                                                  "%s is being written by another pull", pull->part)
                                        : ps_fail_errno(err, errno, "locking %s", pull->part);
        if (fstat(pull->fd, &ours))
            return ps_fail_errno(err, errno, "reading %s", pull->part);
        if (!S_ISREG(ours.st_mode))
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s is not a regular file", pull->part);
        /* Another pull may have finished and renamed it between open and lock. */
        if (stat(pull->part, &there) == 0 && there.st_ino == ours.st_ino && there.st_dev == ours.st_dev) {
            pull->have = (uint64_t)ours.st_size;
            return 0;
        }
        close(pull->fd);
        pull->fd = -1;
    }
    return ps_fail(err, PS_ABORTED, "%s keeps changing hands", pull->part);
}

/* The first `keep` bytes stay and are hashed. */
static int begin_at(struct pull *pull, uint64_t keep, struct ps_error *err)
{
    if (ftruncate(pull->fd, (off_t)keep))
        return ps_fail_errno(err, errno, "truncating %s", pull->part);
    ps_sha256_free(pull->sha);
    pull->sha = ps_sha256_new();
    if (!pull->sha)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    pull->have = keep;
    return hash_file(pull->fd, pull->part, keep, pull->sha, pull->buffer, err);
}

static int take_chunk(struct pull *pull, const Paramsync__V1__Chunk *chunk, struct ps_error *err)
{
    const uint64_t size = pull->checkpoint->size;
    if (chunk->offset != pull->have)
        return ps_fail(err, PS_DATA_LOSS,
                       "the sidecar sent bytes from %" PRIu64 " where %" PRIu64 " was next", chunk->offset,
                       pull->have);
    if (chunk->data.len > size - pull->have)
        return ps_fail(err, PS_DATA_LOSS, "the sidecar sent more than the checkpoint's %" PRIu64 " bytes",
                       size);
    if (ps_crc32c(0, chunk->data.data, chunk->data.len) != chunk->crc32c)
        return ps_fail(err, PS_DATA_LOSS,
                       "the bytes from %" PRIu64 " on arrived damaged (crc32c); pull again", chunk->offset);
    if (lseek(pull->fd, (off_t)pull->have, SEEK_SET) < 0)
        return ps_fail_errno(err, errno, "writing %s", pull->part);
    int code = ps_write_all(pull->fd, chunk->data.data, chunk->data.len, pull->part, err);
    if (code)
        return code;
    ps_sha256_update(pull->sha, chunk->data.data, chunk->data.len);
    pull->have += chunk->data.len;
    if (pull->progress)
        pull->progress(pull->context, pull->have, size);
    return 0;
}

static int receive(struct pull *pull, struct ps_error *err)
{
    Paramsync__V1__PullCheckpointRequest request = PARAMSYNC__V1__PULL_CHECKPOINT_REQUEST__INIT;
    Paramsync__V1__CheckpointSelector which = PARAMSYNC__V1__CHECKPOINT_SELECTOR__INIT;
    const struct paramsync_checkpoint *wanted = pull->checkpoint;
    struct ps_error ignored = {0};
    struct ps_rpc_stream *stream;
    ProtobufCMessage *message;
    which.which_case = PARAMSYNC__V1__CHECKPOINT_SELECTOR__WHICH_SHA256;
    which.sha256 = ps_text(pull->source);
    which.format = ps_text(wanted->format);
    request.run = ps_text(pull->run);
    request.selector = &which;
    request.offset = pull->have;
    request.chunk_bytes = chunk_bytes;
    double timeout_s = transfer_timeout(wanted->size - pull->have);
    if (pull->options) {
        request.tensors = (char **)pull->options->tensors;
        request.n_tensors = pull->options->tensor_count;
        request.dtype = ps_text(pull->options->dtype);
        request.max_bytes_per_s = pull->options->max_bytes_per_s;
        if (request.max_bytes_per_s)
            timeout_s += 2 * (double)(wanted->size - pull->have) / (double)request.max_bytes_per_s;
    }
    int code = ps_call_open(pull->client, NULL, "/paramsync.v1.Checkpoints/PullCheckpoint",
                            &paramsync__v1__pull_checkpoint_response__descriptor, timeout_s, &stream, err);
    if (code)
        return code;
    if (!ps_rpc_stream_send(stream, &request.base, &ignored))
        ps_rpc_stream_close_send(stream, &ignored);
    while ((code = ps_rpc_stream_recv(stream, &message, err)) > 0) {
        const Paramsync__V1__PullCheckpointResponse *m =
            (const Paramsync__V1__PullCheckpointResponse *)message;
        code = 0;
        if (m->part_case == PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHUNK)
            code = take_chunk(pull, m->chunk, err);
        else if (m->part_case == PARAMSYNC__V1__PULL_CHECKPOINT_RESPONSE__PART_CHECKPOINT &&
                 (m->checkpoint->size != wanted->size || strcmp(m->checkpoint->sha256, wanted->sha256) != 0))
            code = ps_fail(err, PS_ABORTED, "the checkpoint changed while it was being pulled; pull again");
        protobuf_c_message_free_unpacked(message, NULL);
        if (code)
            break;
    }
    ps_call_free(NULL, stream);
    if (code)
        ps_call_explain(pull->client, err);
    return code;
}

/* Receives what is missing and compares the digest: 0, or DATA_LOSS with whole set when every byte was there.
 */
static int receive_and_check(struct pull *pull, bool *ret_whole, struct ps_error *err)
{
    char hex[PS_SHA256_HEX];
    int code = 0;
    *ret_whole = false;
    if (pull->have < pull->checkpoint->size)
        code = receive(pull, err);
    if (code)
        return code;
    if (pull->have != pull->checkpoint->size)
        return ps_fail(err, PS_DATA_LOSS,
                       "the sidecar stopped after %" PRIu64 " of %" PRIu64 " bytes; pull again", pull->have,
                       pull->checkpoint->size);
    *ret_whole = true;
    ps_sha256_hex(pull->sha, hex);
    if (strcmp(hex, pull->checkpoint->sha256) != 0)
        return ps_fail(err, PS_DATA_LOSS, "%s: the bytes have sha256 %s, not %s: nothing was kept",
                       pull->path, hex, pull->checkpoint->sha256);
    return 0;
}

static int pull_into_part(struct pull *pull, struct ps_error *err)
{
    bool whole = false;
    int code = open_part(pull, err);
    if (code)
        return code;
    bool resumed = pull->have > 0 && pull->have <= pull->checkpoint->size;
    code = begin_at(pull, resumed ? pull->have : 0, err);
    if (!code)
        code = receive_and_check(pull, &whole, err);
    /* What lay there may have been the beginning of another file: once more, from the start. */
    if (code == PS_DATA_LOSS && whole && resumed) {
        code = begin_at(pull, 0, err);
        if (!code)
            code = receive_and_check(pull, &whole, err);
    }
    if (code == PS_DATA_LOSS && whole)
        unlink(pull->part); /* resuming from it could only fail again */
    if (code)
        return code;
    if (fsync(pull->fd))
        return ps_fail_errno(err, errno, "syncing %s", pull->part);
    if (rename(pull->part, pull->path))
        return ps_fail_errno(err, errno, "renaming %s", pull->part);
    return ps_sync_parent(pull->path, err);
}

static int pull_checkpoint(struct pull *pull, struct ps_error *err)
{
    const char *name = pull->checkpoint->filename;
    if (!ps_sha256_hex_valid(pull->checkpoint->sha256) || pull->checkpoint->size > INT64_MAX)
        return ps_fail(err, PS_DATA_LOSS, "the sidecar's record of the checkpoint has no sha256 or no size");
    if (!pull->path) {
        /* It comes from outside: it must not lead anywhere else. */
        if (!*name || *name == '.' || *name == '-' || strchr(name, '/') || strlen(name) > 200)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "the checkpoint's file name is not usable here: name an output file");
        for (const char *p = name; *p; p++)
            if ((unsigned char)*p < 0x20 || *p == 0x7f)
                return ps_fail(err, PS_INVALID_ARGUMENT,
                               "the checkpoint's file name has control characters: name an output file");
        pull->path = name;
    }
    size_t n = strlen(pull->path);
    pull->part = malloc(n + sizeof ".part");
    pull->buffer = malloc(chunk_bytes);
    if (!pull->part || !pull->buffer)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    memcpy(pull->part, pull->path, n);
    memcpy(pull->part + n, ".part", sizeof ".part");
    return pull_into_part(pull, err);
}

int paramsync_pull_with(struct paramsync_client *client, const char *run,
                        const struct paramsync_selector *selector,
                        const struct paramsync_pull_options *options, const char *path,
                        paramsync_progress progress, void *context,
                        struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    struct paramsync_checkpoint *checkpoint = NULL;
    const bool is_view = options && (options->tensor_count || (options->dtype && *options->dtype));
    /* For the digest of a view the sidecar reads all of the checkpoint. */
    int code = get_checkpoint(client, run, selector, options,
                              is_view ? transfer_timeout(0) : client->timeout_s, &checkpoint, &inner);
    if (!code) {
        const struct checkpoint_box *box = (const struct checkpoint_box *)checkpoint;
        const char *source = ((const Paramsync__V1__Checkpoint *)box->owner)->source_sha256;
        struct pull pull = {.client = client,
                            .run = run,
                            .checkpoint = checkpoint,
                            .options = options,
                            .source = is_view && ps_sha256_hex_valid(source) ? source : checkpoint->sha256,
                            .path = path,
                            .fd = -1,
                            .progress = progress,
                            .context = context};
        code = is_view && pull.source != source
                   ? ps_fail(&inner, PS_UNIMPLEMENTED,
                             "the sidecar at %.200s is too old to send parts of checkpoints", client->address)
                   : pull_checkpoint(&pull, &inner);
        if (pull.fd >= 0)
            close(pull.fd);
        ps_sha256_free(pull.sha);
        free(pull.buffer);
        free(pull.part);
    }
    if (!code && ret_checkpoint)
        *ret_checkpoint = checkpoint;
    else
        paramsync_checkpoint_free(checkpoint);
    return ps_give(err, &inner, code);
}

int paramsync_pull(struct paramsync_client *client, const char *run,
                   const struct paramsync_selector *selector, const char *path, paramsync_progress progress,
                   void *context, struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err)
{
    return paramsync_pull_with(client, run, selector, NULL, path, progress, context, ret_checkpoint, err);
}
