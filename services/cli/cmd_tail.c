/* SPDX-License-Identifier: Apache-2.0
 * paramsync tail: standard input goes through to standard output, its epochs to the sidecar. */
#include "services/cli/cli.h"
#include "services/cli/lines.h"

#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/text.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct tail_settings {
    struct cli_common common;
    const char *run, *model, *dataset, *dataset_hash;
    int64_t world_size, batch, epochs;
    bool resume;
    double timeout;
};

static const struct ps_option rows[] = {
    {.name = "run",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, run),
     .value = "NAME",
     .help = "name of the run to record; when it is taken, NAME-2 and so on",
     .group = "The run"},
    {.name = "resume",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct tail_settings, resume),
     .help = "a taken name: go on as that run's next attempt"},
    {.name = "world-size",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct tail_settings, world_size),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = 100000,
     .help = "processes that train together"},
    {.name = "batch",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct tail_settings, batch),
     .value = "N",
     .min = 0,
     .max = 1e9,
     .help = "batch of each process"},
    {.name = "epochs",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct tail_settings, epochs),
     .value = "N",
     .min = 0,
     .max = 1e9,
     .help = "epochs planned"},
    {.name = "model",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, model),
     .value = "NAME",
     .help = "model to record, for example resnet18; comparisons need it"},
    {.name = "dataset",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, dataset),
     .value = "NAME",
     .help = "data to record, for example CIFAR-10"},
    {.name = "dataset-hash",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, dataset_hash),
     .value = "TEXT",
     .help = "what tells these data from others; comparisons need it"},
    {.name = "timeout",
     .type = PS_TYPE_DURATION,
     .offset = offsetof(struct tail_settings, timeout),
     .value = "T",
     .fallback = "30s",
     .min = 0,
     .max = 86400,
     .help = "how long to wait at the end for what is still to be sent"},
    CLI_CONNECTION_ROWS(struct tail_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync tail",
    .usage = "--run NAME [--world-size N] [--model NAME] < LINES",
    .example = "python3 train.py | paramsync tail --run nightly --model resnet18",
    .about = "Passes standard input through and records the epochs in it: lines as the ModelArts sample "
             "prints them, "
             "\"train | epoch: 3 | loss: 0.8123\" and \"val | epoch: 3 | loss: 0.7500 | accuracy: 0.7421\". "
             "Several "
             "processes that print the same epoch make one, with the mean of what they print. Times count "
             "from the "
             "start of this command. The sidecar being away never stops the pipe.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    interrupted = number;
}

static void notice(void *context, const char *line)
{
    struct ps_buf text = PS_BUF_INIT(1 << 14);
    (void)context;
    cli_escape(&text, line);
    fprintf(stderr, "paramsync tail: %s\n", text.data ? text.data : "");
    ps_buf_done(&text);
}

struct tail {
    struct paramsync_reporter *reporter;
    struct cli_folds folds;
    double started;
    char line[4096];
    size_t length; /* SIZE_MAX: the line is too long to be one of ours */
};

static void take_line(struct tail *t)
{
    struct cli_line line;
    t->line[t->length] = '\0';
    if (!cli_line_parse(t->line, &line))
        return;
    const struct cli_fold *f = cli_folds_add(&t->folds, &line, ps_monotonic_s() - t->started);
    if (!f)
        return;
    struct paramsync_epoch epoch = {.epoch = f->epoch,
                                    .train_loss = f->train_count ? f->train_sum / f->train_count : 0,
                                    .elapsed_s = f->elapsed_s,
                                    .no_eval = !f->val_count};
    if (f->val_count) {
        epoch.val_loss = f->val_sum / f->val_count;
        epoch.accuracy = f->accuracy_sum / f->val_count;
    }
    paramsync_reporter_epoch(t->reporter, &epoch);
}

static void take_bytes(struct tail *t, const char *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        /* A progress bar ends its lines with a carriage return. */
        if (data[i] == '\n' || data[i] == '\r') {
            if (t->length && t->length != SIZE_MAX)
                take_line(t);
            t->length = 0;
        } else if (t->length != SIZE_MAX) {
            if (t->length + 1 < sizeof t->line)
                t->line[t->length++] = data[i];
            else
                t->length = SIZE_MAX;
        }
    }
}

/* To the end of the input, or of the patience of who pressed Ctrl-C twice. */
static int pass_through(struct tail *t, struct ps_error *err)
{
    char data[65536];
    bool out_open = true;
    for (;;) {
        ssize_t n = read(STDIN_FILENO, data, sizeof data);
        if (n < 0 && errno == EINTR)
            continue; /* whoever feeds us got the signal too: its end comes */
        if (n < 0)
            return ps_fail_errno(err, errno, "reading standard input");
        if (n == 0)
            break;
        /* A reader that went away stops the show, not the recording. */
        if (out_open && ps_write_all(STDOUT_FILENO, data, (size_t)n, "standard output", err))
            out_open = false;
        take_bytes(t, data, (size_t)n);
    }
    if (t->length && t->length != SIZE_MAX)
        take_line(t);
    return 0;
}

static int tail_main(const struct tail_settings *settings, struct ps_error *err)
{
    struct tail t = {.started = ps_monotonic_s()};
    struct paramsync_error outer = {0};
    struct paramsync_reporter_options options = {
        .connection = {.address = settings->common.sidecar,
                       .token_file = settings->common.token_file,
                       .tls_ca = settings->common.tls_ca,
                       .tls_cert = settings->common.tls_cert,
                       .tls_key = settings->common.tls_key},
        .run = {.name = settings->run,
                .resume = settings->resume,
                .world_size = (uint32_t)settings->world_size,
                .batch_per_rank = (uint32_t)settings->batch,
                .epochs_planned = (uint32_t)settings->epochs,
                .model = settings->model,
                .dataset = settings->dataset,
                .dataset_hash = settings->dataset_hash},
        .notice = notice,
    };
    if (!settings->run)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--run NAME is missing");
    int code = ps_check_run_name(settings->run, "--run", err);
    if (code)
        return code;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (paramsync_reporter_open(&options, &t.reporter, &outer))
        return cli_error(err, &outer);
    code = pass_through(&t, err);
    int state = interrupted     ? PARAMSYNC_RUN_KILLED
                : t.folds.count ? PARAMSYNC_RUN_FINISHED
                                : PARAMSYNC_RUN_FAILED;
    const char *reason = interrupted      ? "interrupted by a signal"
                         : code           ? err->message
                         : !t.folds.count ? "the input ended without an epoch"
                                          : "";
    if (paramsync_reporter_close(t.reporter, state, reason, settings->timeout, NULL, &outer) && !code)
        code = cli_error(err, &outer);
    cli_folds_done(&t.folds);
    return code;
}

int cli_tail(int argc, char **argv)
{
    struct tail_settings settings = {0};
    struct ps_error err = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 0, 0, &words, &err);
    if (code > 0)
        return 0;
    if (!code)
        code = tail_main(&settings, &err);
    return code ? cli_complain("tail", &err) : 0;
}
