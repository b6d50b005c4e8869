/* SPDX-License-Identifier: Apache-2.0
 * paramsync pull --follow: a folder that always holds the newest (or best) checkpoint of a run, under a name
 * that does not change. */
#include "services/cli/cli.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct follow {
    struct paramsync_client *client;
    const char *run, *dir;
    const struct paramsync_selector *selector;
    const struct paramsync_pull_options *options;
    const struct cli_common *common;
    char *link, *fresh_link; /* DIR/current, and the one that is renamed over it */
    char source[80];         /* sha256 of what the folder holds */
    char *held;              /* its file name */
    uint64_t last_event;
    bool ended;
    int state;
    struct ps_error *err;
    int code;
};

static bool usable(const char *name)
{
    if (!*name || *name == '.' || *name == '-' || strchr(name, '/') || strlen(name) > 200 ||
        !strcmp(name, "current"))
        return false;
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            return false;
    return true;
}

/* The link points to a whole file at every instant. */
static int point_to(struct follow *f, const char *name)
{
    unlink(f->fresh_link);
    if (symlink(name, f->fresh_link) || rename(f->fresh_link, f->link))
        return ps_fail_errno(f->err, errno, "cannot put %s in place", f->link);
    return 0;
}

static int tell(const struct follow *f, const struct paramsync_checkpoint *c)
{
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    char size[32];
    if (f->common->json)
        return cli_write_json(json_pack("{s:s, s:i, s:i, s:s, s:s, s:I}", "path", f->link, "epoch",
                                        (int)c->epoch, "attempt", (int)c->attempt, "filename", c->filename,
                                        "sha256", c->sha256, "size", (json_int_t)c->size),
                              f->err);
    cli_format_bytes(c->size, size, sizeof size);
    cli_escape(&out, f->link);
    ps_buf_puts(&out, " -> ");
    cli_escape(&out, c->filename);
    ps_buf_printf(&out, ": epoch %u, %s, sha256 %s\n", c->epoch, size, c->sha256);
    int code = cli_write(&out, f->err);
    ps_buf_done(&out);
    return code;
}

/* Brings the folder up to date. A run without checkpoints is no failure. */
static int update(struct follow *f)
{
    struct paramsync_error outer = {0};
    struct paramsync_checkpoint *wanted = NULL, *pulled = NULL;
    int code = paramsync_get_checkpoint(f->client, f->run, f->selector, &wanted, &outer);
    if (code == PARAMSYNC_NOT_FOUND && f->last_event)
        return 0;
    if (code)
        return cli_error(f->err, &outer);
    char *path = NULL;
    if (strcmp(wanted->sha256, f->source) != 0) {
        const struct paramsync_selector exact = {.sha256 = wanted->sha256, .format = wanted->format};
        if (!usable(wanted->filename))
            code = ps_fail(f->err, PS_INVALID_ARGUMENT, "the checkpoint's file name is not usable here");
        else if (!(path = ps_path_join(f->dir, wanted->filename)))
            code = ps_fail(f->err, PS_RESOURCE_EXHAUSTED, "out of memory");
        else if (paramsync_pull_with(f->client, f->run, &exact, f->options, path, NULL, NULL, &pulled,
                                     &outer))
            code = outer.code == PARAMSYNC_NOT_FOUND
                       ? 0
                       : cli_error(f->err, &outer); /* gone again: the next one comes */
        else
            code = point_to(f, wanted->filename);
    }
    if (!code && pulled) {
        if (f->held && strcmp(f->held, wanted->filename) != 0) {
            char *old = ps_path_join(f->dir, f->held);
            if (old)
                unlink(old);
            free(old);
        }
        free(f->held);
        f->held = strdup(wanted->filename);
        snprintf(f->source, sizeof f->source, "%s", wanted->sha256);
        code = tell(f, pulled);
    }
    free(path);
    paramsync_checkpoint_free(pulled);
    paramsync_checkpoint_free(wanted);
    return code;
}

static int on_event(void *context, const struct paramsync_event *event)
{
    struct follow *f = context;
    f->last_event = event->id;
    if (!event->run) /* of before: the folder was brought up to date when the stream began */
        return 0;
    f->state = event->run->state;
    f->ended = f->state == PARAMSYNC_RUN_FINISHED || f->state == PARAMSYNC_RUN_FAILED ||
               f->state == PARAMSYNC_RUN_KILLED;
    if (!strcmp(event->kind, "checkpoint") || !strcmp(event->kind, "epoch") || f->ended)
        f->code = update(f);
    return f->code || f->ended;
}

/* A sidecar that is restarted, or a network that is down for a while. */
static bool passes(int code)
{
    return code == PS_UNAVAILABLE || code == PS_DEADLINE_EXCEEDED || code == PS_ABORTED;
}

static int follow_run(struct follow *f)
{
    struct paramsync_error outer = {0};
    struct paramsync_run *run = NULL;
    int code = paramsync_get_run(f->client, f->run, &run, &outer);
    if (code)
        return cli_error(f->err, &outer);
    f->state = run->state;
    f->ended = f->state == PARAMSYNC_RUN_FINISHED || f->state == PARAMSYNC_RUN_FAILED ||
               f->state == PARAMSYNC_RUN_KILLED;
    paramsync_run_free(run);
    f->last_event =
        f->last_event ? f->last_event : 1; /* the run is there: having no checkpoint yet is fine */
    code = update(f);
    if (code || f->ended)
        return code;
    f->code = 0;
    code = paramsync_watch_run(f->client, f->run, f->last_event, -1, on_event, f, &outer);
    if (f->code)
        return f->code;
    return code ? cli_error(f->err, &outer) : 0;
}

int cli_follow(const struct cli_common *common, struct paramsync_client *client, const char *run,
               const char *dir, const struct paramsync_selector *selector,
               const struct paramsync_pull_options *options, struct ps_error *err)
{
    struct follow f = {.client = client,
                       .run = run,
                       .dir = dir,
                       .selector = selector,
                       .options = options,
                       .common = common,
                       .err = err};
    char held[256];
    int code = ps_make_dirs(dir, 0777, err);
    f.link = ps_path_join(dir, "current");
    f.fresh_link = ps_path_join(dir, ".current.new");
    if (!code && (!f.link || !f.fresh_link))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code) { /* what an earlier call left is replaced by what is newer */
        ssize_t n = readlink(f.link, held, sizeof held - 1);
        held[n > 0 ? n : 0] = '\0';
        struct stat st;
        if (n < 0 && errno != ENOENT)
            code = ps_fail(err, PS_ALREADY_EXISTS,
                           "%s is there and no link of an earlier --follow: name another folder", f.link);
        else if (n > 0 && usable(held) && !stat(f.link, &st))
            f.held = strdup(held);
    }
    bool away = false;
    while (!code) {
        code = follow_run(&f);
        if (!passes(code))
            break;
        if (!away)
            fprintf(stderr, "paramsync pull: %s; trying again until it is there\n", err->message);
        away = true;
        code = 0;
        *err = (struct ps_error){0};
        const struct timespec pause = {.tv_sec = 1};
        nanosleep(&pause, NULL); /* between two tries, not to wait for anything of ours */
    }
    free(f.held);
    free(f.link);
    free(f.fresh_link);
    return code;
}
