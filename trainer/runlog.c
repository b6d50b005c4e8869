/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/runlog.h"

#include "services/base/buf.h"
#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { record_max = 1 << 20, log_max = 64 << 20 };

struct ps_runlog {
    int fd; /* at the end of the file, locked */
    char *path;
    unsigned attempt;
    double start_s;
};

static void put_string(struct ps_buf *out, const char *text)
{
    text = text ? text : "";
    bool utf8 = ps_utf8_valid(text, strlen(text)); /* a name on a command line may be anything */
    ps_buf_puts(out, "\"");
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            ps_buf_puts(out, "\\");
        if (*p < 0x20)
            ps_buf_printf(out, "\\u%04x", *p);
        else if (*p >= 0x80 && !utf8)
            ps_buf_puts(out, "?");
        else
            ps_buf_append(out, p, 1);
    }
    ps_buf_puts(out, "\"");
}

static void put_number(struct ps_buf *out, const char *key, double value)
{
    ps_buf_printf(out, ",\"%s\":", key);
    if (isnan(value))
        ps_buf_puts(out, "\"NaN\"");
    else if (isinf(value))
        ps_buf_puts(out, value > 0 ? "\"Infinity\"" : "\"-Infinity\"");
    else
        ps_buf_printf(out, "%.17g", value);
}

static void put_field(struct ps_buf *out, const char *key, const char *value)
{
    ps_buf_printf(out, ",\"%s\":", key);
    put_string(out, value);
}

/* Appends the line, whole and durable, or leaves the file as it was. */
static int append(struct ps_runlog *log, struct ps_buf *line, struct ps_error *err)
{
    struct stat before;
    int code;
    ps_buf_puts(line, "\n");
    if (line->failed)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "%s: a record is too large, or memory is short",
                       log->path);
    if (fstat(log->fd, &before))
        return ps_fail_errno(err, errno, "%s", log->path);
    code = ps_write_all(log->fd, line->data, line->size, log->path, err);
    if (!code && fdatasync(log->fd))
        code = ps_fail_errno(err, errno, "%s", log->path);
    if (code && ftruncate(log->fd, before.st_size))
        return ps_error_prefix(err, "a broken line was left");
    return code;
}

/* Attempts of this training that the text holds; -1 where another's come after or there are none. *ret_whole:
 * bytes of whole lines. */
static int count_attempts(const char *text, size_t size, const char *training, size_t *ret_whole)
{
    static const char begin[] = "{\"record\":\"start\",";
    int attempts = -1;
    const char *p = text, *end = text + size, *newline;
    char wanted[96];
    snprintf(wanted, sizeof wanted, "\"training\":\"%s\"", training);
    for (; p < end && (newline = memchr(p, '\n', (size_t)(end - p))); p = newline + 1) {
        if ((size_t)(newline - p) < sizeof begin - 1 || memcmp(p, begin, sizeof begin - 1))
            continue;
        if (memmem(p, (size_t)(newline - p), wanted, strlen(wanted)))
            attempts = (attempts < 0 ? 0 : attempts) + 1;
        else
            attempts = -1;
    }
    *ret_whole = (size_t)(p - text);
    return attempts;
}

/* Opens the file at its end, with the next attempt's number: the one there is, or a new one. */
static int open_file(struct ps_runlog *log, const char *training, struct ps_error *err)
{
    char *text = NULL;
    size_t size = 0, whole = 0;
    struct ps_error absent = {0};
    int attempts = -1;
    if (!ps_read_file(log->path, log_max, &text, &size, &absent))
        attempts = count_attempts(text, size, training, &whole);
    free(text);
    if (attempts < 0) {
        whole = 0;
        if (unlink(log->path) && errno != ENOENT)
            return ps_fail_errno(err, errno, "%s", log->path);
    }
    log->attempt = attempts < 0 ? 1 : (unsigned)attempts + 1;
    log->fd = open(log->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log->fd < 0)
        return ps_fail_errno(err, errno, "%s", log->path);
    if (flock(log->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return ps_fail(err, PS_FAILED_PRECONDITION, "%s: another training is writing to it", log->path);
    if (ftruncate(log->fd, (off_t)whole)) /* the rest of a line that was never finished */
        return ps_fail_errno(err, errno, "%s", log->path);
    return ps_sync_parent(log->path, err);
}

static int write_start(struct ps_runlog *log, const char *training, const struct ps_report_config *c,
                       struct ps_error *err)
{
    struct ps_buf line = PS_BUF_INIT(record_max);
    char now[32];
    ps_format_utc(ps_wall_ns(), now, sizeof now);
    ps_buf_printf(&line, "{\"record\":\"start\",\"attempt\":%u", log->attempt);
    put_field(&line, "training", training);
    put_field(&line, "started_at", now);
    put_field(&line, "name", c->run_name);
    ps_buf_printf(&line, ",\"world_size\":%d,\"batch_per_rank\":%d,\"epochs_planned\":%d", c->world_size,
                  c->batch_per_rank, c->epochs);
    put_field(&line, "model", c->model);
    put_field(&line, "dataset", c->dataset);
    put_field(&line, "dataset_hash", c->dataset_hash);
    put_field(&line, "device", c->device);
    put_field(&line, "commit", c->commit);
    ps_buf_puts(&line, ",\"config\":{");
    for (size_t i = 0; i < c->config_count; i++) {
        ps_buf_puts(&line, i ? "," : "");
        put_string(&line, c->config[i].key);
        ps_buf_puts(&line, ":");
        put_string(&line, c->config[i].value);
    }
    ps_buf_puts(&line, "}}");
    int code = append(log, &line, err);
    ps_buf_done(&line);
    return code;
}

static void discard(struct ps_runlog *log)
{
    if (log->fd >= 0)
        close(log->fd);
    free(log->path);
    free(log);
}

int ps_runlog_open(const char *dir, const char *training, const struct ps_report_config *config,
                   double start_s, struct ps_runlog **ret, struct ps_error *err)
{
    struct ps_runlog *log = calloc(1, sizeof *log);
    if (!log)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    log->fd = -1;
    log->start_s = start_s;
    log->path = ps_path_join(dir, PS_RUNLOG_FILE);
    int code =
        log->path ? open_file(log, training, err) : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        code = write_start(log, training, config, err);
    if (code) {
        discard(log);
        return code;
    }
    *ret = log;
    return 0;
}

int ps_runlog_epoch(struct ps_runlog *log, const struct ps_report_epoch *e, struct ps_error *err)
{
    struct ps_buf line = PS_BUF_INIT(record_max);
    if (!log)
        return 0;
    ps_buf_printf(&line, "{\"record\":\"epoch\",\"attempt\":%u,\"epoch\":%d,\"step\":%" PRId64, log->attempt,
                  e->epoch, e->step);
    put_number(&line, "train_loss", e->train_loss);
    put_number(&line, "lr", e->lr);
    put_number(&line, "samples_per_s", e->samples_per_s);
    put_number(&line, "elapsed_s", e->elapsed_s);
    put_number(&line, "train_s", e->train_s);
    put_number(&line, "eval_s", e->eval_s);
    ps_buf_printf(&line, ",\"evaluated\":%s", e->no_eval ? "false" : "true");
    if (!e->no_eval) {
        put_number(&line, "val_loss", e->val_loss);
        put_number(&line, "accuracy", e->accuracy);
        ps_buf_printf(&line, ",\"correct\":%" PRId64 ",\"counted\":%" PRId64, e->correct, e->counted);
    }
    ps_buf_puts(&line, "}");
    int code = append(log, &line, err);
    ps_buf_done(&line);
    return code;
}

int ps_runlog_close(struct ps_runlog *log, const char *state, const char *reason, struct ps_error *err)
{
    struct ps_buf line = PS_BUF_INIT(record_max);
    if (!log)
        return 0;
    ps_buf_printf(&line, "{\"record\":\"end\",\"attempt\":%u", log->attempt);
    put_field(&line, "state", state);
    put_field(&line, "reason", reason);
    put_number(&line, "elapsed_s", ps_monotonic_s() - log->start_s);
    ps_buf_puts(&line, "}");
    int code = append(log, &line, err);
    ps_buf_done(&line);
    discard(log);
    return code;
}
