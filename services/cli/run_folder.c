/* SPDX-License-Identifier: Apache-2.0
 * A run from its own folder: run.jsonl, which trainer/runlog.h describes. */
#include "services/cli/cli.h"

#include "services/base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { log_max = 64 << 20 };

struct reading {
    json_t *start, *end; /* of the newest attempt; end NULL: none */
    json_t *epochs;
    double offset_s; /* of the attempts before */
    double latest_s; /* highest elapsed time of this attempt */
};

static const char *text_of(const json_t *o, const char *key)
{
    const char *text = json_string_value(json_object_get(o, key));
    return text ? text : "";
}

static double seconds_of(const json_t *o)
{
    double s = cli_json_to_number(json_object_get(o, "elapsed_s"));
    return s > 0 && s < 1e12 ? s : 0;
}

static int take_record(struct reading *r, json_t *record)
{
    const char *kind = text_of(record, "record");
    double elapsed = seconds_of(record);
    if (strcmp(kind, "start") == 0) {
        r->offset_s += r->latest_s;
        r->latest_s = 0;
        json_decref(r->start);
        json_decref(r->end);
        r->start = json_incref(record);
        r->end = NULL;
        return 0;
    }
    if (!r->start)
        return -1;
    if (strcmp(kind, "epoch") == 0 && json_integer_value(json_object_get(record, "epoch")) > 0) {
        json_object_set_new(record, "elapsed_s", json_real(r->offset_s + elapsed));
        json_array_append(r->epochs, record);
    } else if (strcmp(kind, "end") == 0) {
        json_decref(r->end);
        r->end = json_incref(record);
    } else {
        return -1;
    }
    if (elapsed > r->latest_s)
        r->latest_s = elapsed;
    return 0;
}

/* Every whole line; what a writer has not finished is not there yet. */
static int read_records(struct reading *r, const char *path, const char *text, size_t size,
                        struct ps_error *err)
{
    const char *p = text, *end = text + size, *newline;
    for (unsigned line = 1; p < end && (newline = memchr(p, '\n', (size_t)(end - p)));
         line++, p = newline + 1) {
        json_error_t where;
        json_t *record = json_loadb(p, (size_t)(newline - p), JSON_REJECT_DUPLICATES, &where);
        int bad = record ? take_record(r, record) : -1;
        json_decref(record);
        if (bad)
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %u: not a record of a training%s%s", path,
                           line, record ? "" : ": ", record ? "" : where.text);
    }
    if (!r->start)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s holds no training", path);
    return 0;
}

/* Whether its writer still lives: it holds a lock. */
static bool is_written(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool locked = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
    if (fd >= 0)
        close(fd);
    return locked;
}

/* As the object of `paramsync export`, so that one reader knows its fields. */
static json_t *as_export(struct reading *r, bool written)
{
    json_t *run = json_copy(r->start);
    const char *state = r->end ? text_of(r->end, "state") : written ? "running" : "lost";
    json_object_set_new(run, "id", json_string(text_of(r->start, "training")));
    json_object_set_new(run, "state", json_string(state));
    json_object_set_new(run, "reason",
                        json_string(r->end    ? text_of(r->end, "reason")
                                    : written ? ""
                                              : "its process ended without a word"));
    json_object_set_new(run, "elapsed_s", json_real(r->offset_s + r->latest_s));
    return json_pack("{s:i, s:o, s:O}", "paramsync_export", 1, "run", run, "epochs", r->epochs);
}

int cli_run_from_folder(const char *folder, struct cli_run *ret_run, struct ps_error *err)
{
    struct reading r = {.epochs = json_array()};
    char *path = ps_path_join(folder, "run.jsonl"), *text = NULL;
    size_t size = 0;
    if (!path || !r.epochs) {
        free(path);
        json_decref(r.epochs);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    bool written = is_written(path); /* asked first: an end that comes meanwhile is then read */
    int code = ps_read_file(path, log_max, &text, &size, err);
    if (code == PS_NOT_FOUND)
        ps_fail(err, code, "%s is no run's folder: it has no run.jsonl, which paramsync-train writes",
                folder);
    if (!code)
        code = read_records(&r, path, text, size, err);
    if (!code) {
        json_t *object = as_export(&r, written);
        code = object ? cli_run_from_json(object, path, ret_run, err)
                      : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        json_decref(object);
    }
    json_decref(r.start);
    json_decref(r.end);
    json_decref(r.epochs);
    free(text);
    free(path);
    return code;
}
