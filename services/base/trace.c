/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/trace.h"

#include "services/base/buf.h"
#include "services/base/fs.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEFAULT_CAPACITY = 262144, NAME_SIZE = 64, SPAN_TEXT = 256, PIECE = 1 << 16 };
static const char *const thread_names[PS_TRACE_THREADS] = {"loop", "communication"};

struct span {
    const char *name, *key;
    double begin_s, end_s;
    int thread;
    long value;
};

struct ps_trace {
    pthread_mutex_t lock; /* guards all below but what open has set */
    char *path;
    int process;
    char process_name[NAME_SIZE];
    struct span *spans;
    size_t capacity, count, dropped;
    bool written;
};

int ps_trace_open(const char *path, int process, const char *process_name, size_t capacity,
                  struct ps_trace **ret, struct ps_error *err)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    struct ps_trace *t = calloc(1, sizeof *t);
    int code = folder && t ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code && (!*path || (slash && !slash[1])))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s: not the name of a file", path);
    if (!code && access(folder, W_OK | X_OK) < 0)
        code = ps_fail_errno(err, errno, "%s cannot be written: %s", path, folder);
    if (!code) {
        t->capacity = capacity ? capacity : DEFAULT_CAPACITY;
        t->path = strdup(path);
        t->spans = malloc(t->capacity * sizeof *t->spans);
        t->process = process;
        snprintf(t->process_name, sizeof t->process_name, "%s", process_name);
        pthread_mutex_init(&t->lock, NULL);
        if (!t->path || !t->spans)
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for a trace of %zu spans", t->capacity);
    }
    free(folder);
    if (code) {
        if (t) {
            free(t->path);
            free(t->spans);
        }
        free(t);
        return code;
    }
    *ret = t;
    return 0;
}

void ps_trace_span(struct ps_trace *t, int thread, const char *name, double begin_s, double end_s,
                   const char *key, long value)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    if (t->written || t->count == t->capacity)
        t->dropped++;
    else
        t->spans[t->count++] = (struct span){name, key, begin_s, end_s, thread, value};
    pthread_mutex_unlock(&t->lock);
}

static int flush(struct ps_new_file *file, struct ps_buf *text, size_t limit, const char *path,
                 struct ps_error *err)
{
    if (text->failed)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for %s", path);
    if (text->size < limit)
        return 0;
    int code = ps_write_all(file->fd, text->data, text->size, path, err);
    ps_buf_clear(text);
    return code;
}

/* The lock is held. */
static int write_spans(struct ps_trace *t, struct ps_new_file *file, struct ps_error *err)
{
    struct ps_buf text = PS_BUF_INIT(PIECE + 4 * SPAN_TEXT);
    ps_buf_printf(&text,
                  "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped\":%zu},\"traceEvents\":[\n"
                  "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"%s\"}}",
                  t->dropped, t->process, t->process_name);
    for (int i = 0; i < PS_TRACE_THREADS; i++)
        ps_buf_printf(
            &text,
            ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
            t->process, i, thread_names[i]);
    int code = 0;
    for (size_t i = 0; i < t->count && !code; i++) {
        const struct span *s = &t->spans[i];
        ps_buf_printf(&text,
                      ",\n{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f",
                      s->name, t->process, s->thread, s->begin_s * 1e6, (s->end_s - s->begin_s) * 1e6);
        if (s->key)
            ps_buf_printf(&text, ",\"args\":{\"%s\":%ld}", s->key, s->value);
        ps_buf_puts(&text, "}");
        code = flush(file, &text, PIECE, t->path, err);
    }
    if (!code) {
        ps_buf_puts(&text, "\n]}\n");
        code = flush(file, &text, 1, t->path, err);
    }
    ps_buf_done(&text);
    return code;
}

int ps_trace_close(struct ps_trace *t, int keep, struct ps_error *err)
{
    int code = 0;
    if (!t)
        return 0;
    pthread_mutex_lock(&t->lock);
    if (!t->written) {
        struct ps_new_file file;
        t->written = true;
        code = ps_new_file_open(&file, t->path, err);
        if (!code) {
            code = write_spans(t, &file, err);
            if (!code)
                code = ps_new_file_commit(&file, err);
            ps_new_file_abandon(&file);
        }
    }
    pthread_mutex_unlock(&t->lock);
    if (keep)
        return code;
    pthread_mutex_destroy(&t->lock);
    free(t->path);
    free(t->spans);
    free(t);
    return code;
}
