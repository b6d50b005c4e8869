/* SPDX-License-Identifier: Apache-2.0
 * paramsync tail: a command's output (or standard input) goes through to standard output, its epochs to the
 * sidecar. */
#include "services/cli/cli.h"
#include "services/cli/lines.h"

#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>

struct tail_settings {
    struct cli_common common;
    const char *run, *model, *dataset, *dataset_hash, *device, *commit, *train_regex, *val_regex;
    int64_t world_size, batch, epochs;
    bool resume, percent;
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
     .help = "epochs planned; input that ends before is a failure"},
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
    {.name = "device",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, device),
     .value = "NAME",
     .help = "what it trains on, to record"},
    {.name = "commit",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, commit),
     .value = "ID",
     .environment = "PARAMSYNC_COMMIT",
     .help = "commit to record"},
    {.name = "train-regex",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, train_regex),
     .value = "PATTERN",
     .help = "lines with an epoch's training loss: a POSIX extended regular expression with groups for epoch "
             "and loss, in this order or named (?<epoch>..), (?<loss>..); \\d is a digit",
     .group = "Lines"},
    {.name = "val-regex",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct tail_settings, val_regex),
     .value = "PATTERN",
     .help = "lines with its test loss and accuracy: groups for epoch, loss and accuracy"},
    {.name = "percent",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct tail_settings, percent),
     .help = "accuracies are printed as 0..100 (with a % sign they are taken so anyway)"},
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
    .usage = "--run NAME [--world-size N] [--model NAME] [-- COMMAND ARGS | < LINES]",
    .example = "paramsync tail --run nightly --model resnet18 -- python3 train.py\n"
               "paramsync tail --run b --val-regex 'ep (\\d+) loss (.+) acc (.+)' -- ./train\n"
               "python3 train.py | paramsync tail --run nightly --model resnet18",
    .about =
        "Passes what COMMAND prints (or standard input) through and records the epochs in it: lines as the "
        "ModelArts sample prints them, \"train | epoch: 3 | loss: 0.8123\" and \"val | epoch: 3 | loss: "
        "0.7500 | accuracy: 0.7421\", or others by --train-regex and --val-regex. Several processes that "
        "print the same epoch make one, with the mean of what they print. Times count from the start of "
        "this command. The sidecar being away never stops the training. COMMAND's exit status is returned "
        "and decides whether the run has finished or failed; of a pipe it can't be known.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

static volatile sig_atomic_t interrupted;
static volatile pid_t child;

/* Of the terminal's Ctrl-C the command hears itself; what is sent to us alone goes on to it. */
static void on_signal(int number, siginfo_t *info, void *context)
{
    (void)context;
    interrupted = number;
    if (child > 0 && info->si_code <= 0)
        kill(child, number);
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
    struct cli_pattern train, val;
    bool has_train, has_val;
    double started;
    bool out_closed;
    char line[4096];
    size_t length; /* SIZE_MAX: the line is too long to be one of ours */
};

static void take_values(struct tail *t, const struct cli_line *line)
{
    const struct cli_fold *f = cli_folds_add(&t->folds, line, ps_monotonic_s() - t->started);
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

static void take_line(struct tail *t)
{
    struct cli_line line;
    t->line[t->length] = '\0';
    if (cli_line_parse(t->line, &line) && !(line.val ? t->has_val : t->has_train))
        take_values(t, &line);
    if (t->has_train && cli_pattern_match(&t->train, t->line, &line)) /* one line may be both */
        take_values(t, &line);
    if (t->has_val && cli_pattern_match(&t->val, t->line, &line))
        take_values(t, &line);
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

/* 1: there may be more; 0: the end. */
static int pass_some(struct tail *t, int fd, struct ps_error *err)
{
    char data[65536];
    ssize_t n = read(fd, data, sizeof data);
    if (n < 0)
        return errno == EINTR ? 1 : ps_fail_errno(err, errno, "reading the training's output");
    if (n == 0)
        return 0;
    /* A reader that went away stops the show, not the recording. */
    struct ps_error closed = {0};
    if (!t->out_closed && ps_write_all(STDOUT_FILENO, data, (size_t)n, "standard output", &closed))
        t->out_closed = true;
    take_bytes(t, data, (size_t)n);
    return 1;
}

/* Standard input to its end: whoever feeds us gets the signals too. */
static int pass_input(struct tail *t, struct ps_error *err)
{
    int more;
    while ((more = pass_some(t, STDIN_FILENO, err)) > 0)
        ;
    return more;
}

/* The command's output, until it has ended (and what it had printed by then is here), whoever else still
 * holds the pipe. */
static int pass_command(struct tail *t, int out, int *ret_status, struct ps_error *err)
{
    int process = pidfd_open(child, 0), code = 1;
    struct pollfd fds[] = {{.fd = out, .events = POLLIN}, {.fd = process, .events = POLLIN}};
    if (process < 0)
        return ps_fail_errno(err, errno, "watching the command");
    bool ended = false;
    while (code > 0) {
        int n = poll(fds, 2, ended ? 0 : -1);
        if (n < 0 && errno != EINTR)
            code = ps_fail_errno(err, errno, "waiting for the command");
        if (n < 0)
            continue;
        if (fds[0].revents)
            code = pass_some(t, out, err);
        else if (ended)
            code = 0;
        if (code == 0 && !ended) { /* it has closed its output, and may go on without */
            fds[0].fd = -1;
            code = 1;
        }
        ended = ended || fds[1].revents;
    }
    close(process);
    while (waitpid(child, ret_status, 0) < 0 && errno == EINTR)
        ;
    child = 0;
    return code;
}

static int start_command(char **command, int *ret_out, struct ps_error *err)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t defaults;
    int ends[2];
    pid_t pid;
    if (pipe2(ends, O_CLOEXEC))
        return ps_fail_errno(err, errno, "making a pipe");
    setenv("PYTHONUNBUFFERED", "1", 0); /* into a pipe Python would hold its lines back */
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    int failed = posix_spawnp(&pid, command[0], &actions, &attributes, command, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    close(ends[1]);
    if (failed) {
        close(ends[0]);
        return ps_fail_errno(err, failed, "cannot run %.200s", command[0]);
    }
    child = pid;
    *ret_out = ends[0];
    return 0;
}

/* How the run ended. status: of the command; NULL: its end is not known. */
static int end_of(const struct tail *t, const struct tail_settings *settings, const int *status,
                  const char *broken, char *reason, size_t size)
{
    uint32_t last = t->folds.count ? t->folds.folds[t->folds.count - 1].epoch : 0;
    *reason = '\0';
    if (broken) {
        snprintf(reason, size, "%.200s", broken);
    } else if (status && WIFSIGNALED(*status)) {
        snprintf(reason, size, "ended by signal %d (%s)", WTERMSIG(*status), strsignal(WTERMSIG(*status)));
    } else if (status && WEXITSTATUS(*status)) {
        snprintf(reason, size, "exit status %d", WEXITSTATUS(*status));
    } else if (!interrupted && !t->folds.count) {
        snprintf(reason, size, "%s ended without an epoch", status ? "the command" : "the input");
    } else if (!interrupted && !status && last < settings->epochs) {
        snprintf(reason, size, "the input ended after epoch %u of %lld", last, (long long)settings->epochs);
    }
    if (interrupted) {
        if (!*reason)
            snprintf(reason, size, "interrupted by a signal");
        return status && !WIFSIGNALED(*status) && !WEXITSTATUS(*status) ? PARAMSYNC_RUN_FINISHED
                                                                        : PARAMSYNC_RUN_KILLED;
    }
    return *reason ? PARAMSYNC_RUN_FAILED : PARAMSYNC_RUN_FINISHED;
}

static int compile_patterns(const struct tail_settings *settings, struct tail *t, struct ps_error *err)
{
    int code = 0;
    if (settings->train_regex)
        code = cli_pattern_compile(settings->train_regex, "--train-regex", false, false, &t->train, err);
    t->has_train = settings->train_regex && !code;
    if (!code && settings->val_regex)
        code = cli_pattern_compile(settings->val_regex, "--val-regex", true, settings->percent, &t->val, err);
    t->has_val = settings->val_regex && !code;
    return code;
}

static int open_run(const struct tail_settings *settings, struct tail *t, struct ps_error *err)
{
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
                .dataset_hash = settings->dataset_hash,
                .device = settings->device,
                .commit = settings->commit},
        .notice = notice,
    };
    return paramsync_reporter_open(&options, &t->reporter, &outer) ? cli_error(err, &outer) : 0;
}

/* command[0] NULL: standard input. *ret_status: the command's, as waitpid has it. */
static int tail_main(const struct tail_settings *settings, char **command, int *ret_status,
                     struct ps_error *err)
{
    struct tail t = {.started = ps_monotonic_s()};
    struct paramsync_error outer = {0};
    char reason[256];
    int out = -1, code;
    if (!settings->run)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--run NAME is missing");
    code = ps_check_run_name(settings->run, "--run", err);
    if (!code)
        code = compile_patterns(settings, &t, err);
    struct sigaction action = {.sa_sigaction = on_signal,
                               .sa_flags = SA_SIGINFO | (command[0] ? 0 : SA_RESETHAND)};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (!code && command[0]) /* before the reporter has threads */
        code = start_command(command, &out, err);
    if (!code) {
        code = open_run(settings, &t, err);
        if (code && child > 0) {
            kill(child, SIGTERM);
            waitpid(child, NULL, 0);
            child = 0;
        }
    }
    if (!code) {
        int passed = command[0] ? pass_command(&t, out, ret_status, err) : pass_input(&t, err);
        if (t.length && t.length != SIZE_MAX)
            take_line(&t);
        int state = end_of(&t, settings, command[0] && !passed ? ret_status : NULL,
                           passed ? err->message : NULL, reason, sizeof reason);
        code = passed;
        if (paramsync_reporter_close(t.reporter, state, reason, settings->timeout, NULL, &outer) && !code)
            code = cli_error(err, &outer);
        if (*reason && state == PARAMSYNC_RUN_FAILED)
            notice(NULL, reason);
    }
    if (out >= 0)
        close(out);
    cli_folds_done(&t.folds);
    if (t.has_train)
        cli_pattern_done(&t.train);
    if (t.has_val)
        cli_pattern_done(&t.val);
    return code;
}

int cli_tail(int argc, char **argv)
{
    struct tail_settings settings = {0};
    struct ps_error err = {0};
    int words, status = 0;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 0, -1, &words, &err);
    if (code > 0)
        return 0;
    if (code)
        return cli_complain("tail", &err);
    argv[words + 1] = NULL;
    code = tail_main(&settings, argv + 1, &status, &err);
    if (code) {
        int own = cli_complain("tail", &err);
        if (!status)
            return own;
    }
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
