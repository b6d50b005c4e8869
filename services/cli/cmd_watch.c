/* SPDX-License-Identifier: Apache-2.0
 * paramsync watch: the epochs of a run as they come, until it ends. */
#include "services/cli/cli.h"

#include "services/base/clock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct watch_settings {
    struct cli_common common;
};

static const struct ps_option rows[] = {
    CLI_JSON_ROW(struct watch_settings, "one JSON object per line"),
    CLI_CONNECTION_ROWS(struct watch_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync watch",
    .usage = "RUN [--json]",
    .example = "paramsync watch double",
    .about =
        "Prints the epochs there are, then each new one, checkpoints and changes of state, until the run has "
        "ended. Waits up to a minute for a sidecar that has gone away. Exit status 0 when the run has "
        "finished, 1 "
        "when it ended otherwise.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

struct watch {
    struct paramsync_client *client;
    char id[64];
    bool json;
    uint64_t last_id;
    uint32_t printed_epoch, printed_attempt;
    int state;
    struct ps_error *err;
    int code;
};

static bool has_ended(int state)
{
    return state == PARAMSYNC_RUN_FINISHED || state == PARAMSYNC_RUN_FAILED || state == PARAMSYNC_RUN_KILLED;
}

static int print_line(struct watch *w, json_t *json, const char *text)
{
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    if (w->json) {
        char *line = json ? json_dumps(json, JSON_COMPACT) : NULL;
        ps_buf_puts(&out, line ? line : "");
        free(line);
    } else {
        cli_escape(&out, text);
    }
    json_decref(json);
    ps_buf_puts(&out, "\n");
    int code = cli_write(&out, w->err);
    ps_buf_done(&out);
    return code;
}

static int print_epoch(struct watch *w, const struct paramsync_epoch *e)
{
    char text[256], share[32], elapsed[32];
    ps_format_duration(e->elapsed_s, elapsed, sizeof elapsed);
    if (e->no_eval) {
        snprintf(text, sizeof text, "epoch %3u  train loss %.4f  not evaluated  %.1f samples/s  %s", e->epoch,
                 e->train_loss, e->samples_per_s, elapsed);
    } else {
        ps_compare_format_share(e->accuracy, -1, share, sizeof share);
        snprintf(text, sizeof text,
                 "epoch %3u  train loss %.4f  val loss %.4f  accuracy %s  %.1f samples/s  %s", e->epoch,
                 e->train_loss, e->val_loss, share, e->samples_per_s, elapsed);
    }
    return print_line(w, w->json ? cli_epoch_json(e) : NULL, text);
}

/* Prints the epochs that were not printed yet. */
static int catch_up(struct watch *w)
{
    struct paramsync_error outer = {0};
    struct paramsync_metrics *m = NULL;
    int code = paramsync_query(w->client, w->id, NULL, -1, 0, &m, &outer);
    if (code)
        return cli_error(w->err, &outer);
    for (size_t i = 0; i < m->epoch_count && !code; i++) {
        const struct paramsync_epoch *e = &m->epochs[i];
        if (e->attempt < w->printed_attempt ||
            (e->attempt == w->printed_attempt && e->epoch <= w->printed_epoch))
            continue;
        code = print_epoch(w, e);
        w->printed_attempt = e->attempt;
        w->printed_epoch = e->epoch;
    }
    paramsync_metrics_free(m);
    return code;
}

static int read_state(struct watch *w)
{
    struct paramsync_error outer = {0};
    struct paramsync_run *run = NULL;
    int code = paramsync_get_run(w->client, w->id, &run, &outer);
    if (code)
        return cli_error(w->err, &outer);
    w->state = run->state;
    paramsync_run_free(run);
    return 0;
}

/* Whether this event's epoch has not been printed. One that is replayed may have been reported between our
 * first look and the start of the stream. */
static bool is_news(const struct watch *w, const struct paramsync_event *event)
{
    unsigned long epoch = strncmp(event->detail, "epoch ", 6) == 0 ? strtoul(event->detail + 6, NULL, 10) : 0;
    return event->run || event->attempt > w->printed_attempt ||
           (event->attempt == w->printed_attempt && epoch > w->printed_epoch);
}

static int on_event(void *context, const struct paramsync_event *event)
{
    struct watch *w = context;
    static const char *const loud[] = {"attempt", "checkpoint", "finished", "failed",
                                       "killed",  "lost",       "recovered"};
    if (event->id > w->last_id)
        w->last_id = event->id;
    if (event->run)
        w->state = event->run->state;
    else if (strcmp(event->kind, "finished") == 0 || strcmp(event->kind, "failed") == 0 ||
             strcmp(event->kind, "killed") == 0)
        w->code = read_state(w); /* replayed: an earlier attempt's end, or the run's */
    if (!w->code && strcmp(event->kind, "epoch") == 0 && is_news(w, event))
        w->code = catch_up(w);
    for (size_t i = 0; !w->code && event->run && i < sizeof loud / sizeof *loud; i++) {
        char text[600];
        if (strcmp(event->kind, loud[i]) != 0)
            continue;
        snprintf(text, sizeof text, "%s%s%.500s", event->kind, *event->detail ? ": " : "", event->detail);
        w->code = print_line(w,
                             json_pack("{s:s, s:s, s:i}", "event", event->kind, "detail", event->detail,
                                       "attempt", (int)event->attempt),
                             text);
    }
    return w->code || has_ended(w->state);
}

static int follow(struct watch *w)
{
    double quiet_since = 0;
    while (!w->code && !has_ended(w->state)) {
        struct paramsync_error outer = {0};
        uint64_t before = w->last_id;
        int code = paramsync_watch_run(w->client, w->id, w->last_id, -1, on_event, w, &outer);
        if (!code)
            continue;
        if (code != PARAMSYNC_UNAVAILABLE && code != PARAMSYNC_CANCELLED)
            return cli_error(w->err, &outer);
        double now = ps_monotonic_s();
        if (w->last_id != before || quiet_since == 0)
            quiet_since = now;
        if (now - quiet_since > 60)
            return cli_error(w->err, &outer);
        struct timespec pause = {.tv_sec = 1};
        while (nanosleep(&pause, &pause) && errno == EINTR)
            ;
        read_state(w); /* an error shows again at the next try */
    }
    return w->code;
}

static int watch_main(int argc, char **argv, struct watch *w, struct ps_error *err)
{
    struct watch_settings settings = {0};
    struct paramsync_error outer = {0};
    struct paramsync_run *run = NULL;
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 1, 1, &words, err);
    if (code)
        return code;
    w->json = settings.common.json;
    w->err = err;
    code = cli_connect(&settings.common, &w->client, err);
    if (!code && paramsync_get_run(w->client, argv[1], &run, &outer))
        code = cli_error(err, &outer);
    if (!code) {
        snprintf(w->id, sizeof w->id, "%s", run->id);
        w->state = run->state;
        code = catch_up(w);
    }
    paramsync_run_free(run);
    if (!code && w->state == PARAMSYNC_RUN_LOST)
        code =
            print_line(w, json_pack("{s:s}", "state", "lost"), "lost; waiting for it to be heard of again");
    if (!code)
        code = follow(w);
    if (!code)
        code = catch_up(w);
    if (!code)
        code = print_line(w, json_pack("{s:s}", "state", paramsync_run_state_name(w->state)),
                          paramsync_run_state_name(w->state));
    paramsync_disconnect(w->client);
    return code;
}

int cli_watch(int argc, char **argv)
{
    struct watch w = {0};
    struct ps_error err = {0};
    int code = watch_main(argc, argv, &w, &err);
    if (code < 0)
        return cli_complain("watch", &err);
    return code > 0 || w.state == PARAMSYNC_RUN_FINISHED ? 0 : 1;
}
