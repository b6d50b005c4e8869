/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/workers.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    LINE_MAX_BYTES = 16384, /* longer lines are shown in pieces */
    LAST_LINES = 12,
    LAST_LINE_BYTES = 400,
    PIECE = 4096,         /* a pipe that polls writable takes as much at once */
    WAITING_MAX = 1 << 20 /* bytes that wait for a slow reader, before the ranks wait too */
};

struct stream {
    int fd; /* -1: ended */
    struct cli_output *output;
    struct ps_buf line;
    bool returned; /* a carriage return was the last byte */
};

struct worker {
    pid_t pid;
    bool alive, told; /* told: it had a signal from us before it ended */
    int rank, log_fd;
    struct stream streams[2];
    char last[LAST_LINES][LAST_LINE_BYTES];
    unsigned lines; /* so far */
};

struct cli_workers {
    int count;
    bool prefix;
    bool failed;
    struct cli_failure failure;
    struct ps_buf text;
    struct worker workers[];
};

void cli_output_flush(struct cli_output *o, bool all)
{
    while (o->waiting.size && !o->closed) {
        struct pollfd poll_fd = {.fd = o->fd, .events = POLLOUT};
        if (!all && poll(&poll_fd, 1, 0) <= 0)
            return;
        size_t size = o->waiting.size < PIECE ? o->waiting.size : PIECE;
        ssize_t n = write(o->fd, o->waiting.data, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            if (!all)
                return;
            poll(&poll_fd, 1, -1);
            continue;
        }
        if (n < 0) {
            o->closed = true;
            break;
        }
        memmove(o->waiting.data, o->waiting.data + n, o->waiting.size - (size_t)n);
        o->waiting.size -= (size_t)n;
    }
    if (o->closed)
        ps_buf_clear(&o->waiting);
}

/* ---- what they print ---- */

static void show(struct cli_workers *w, struct worker *k, struct stream *s, bool whole)
{
    static const int colours[] = {36, 33, 35, 32, 34, 31}; /* cyan first: red looks like an error */
    const char *line = s->line.data ? s->line.data : "";
    size_t size = s->line.size;
    struct ps_buf *out = &s->output->waiting;
    if (k->log_fd >= 0) {
        /* A full disk is no reason to stop a training: the log has a gap. */
        (void)!write(k->log_fd, line, size);
        if (whole)
            (void)!write(k->log_fd, "\n", 1);
    }
    snprintf(k->last[k->lines % LAST_LINES], LAST_LINE_BYTES, "%.*s", (int)(size < INT_MAX ? size : 0), line);
    k->lines++;
    if (s->output->closed)
        return;
    if (w->prefix && s->output->colour)
        ps_buf_printf(out, "\033[%dm[%d]\033[0m ", colours[k->rank % 6], k->rank);
    else if (w->prefix)
        ps_buf_printf(out, "[%d] ", k->rank);
    ps_buf_append(out, line, size);
    ps_buf_append(out, "\n", 1);
}

static void take(struct cli_workers *w, struct worker *k, struct stream *s, const char *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        char c = data[i];
        if (c == '\n') {
            show(w, k, s, true);
            ps_buf_clear(&s->line);
        } else if (c != '\r') {
            if (s->returned) /* a progress bar overwrites what stood there */
                ps_buf_clear(&s->line);
            if (s->line.size == LINE_MAX_BYTES) {
                show(w, k, s, false);
                ps_buf_clear(&s->line);
            }
            ps_buf_append(&s->line, &c, 1);
        }
        s->returned = c == '\r';
    }
}

static void end_stream(struct cli_workers *w, struct worker *k, struct stream *s)
{
    if (s->fd < 0)
        return;
    if (s->line.size)
        show(w, k, s, true);
    ps_buf_done(&s->line);
    close(s->fd);
    s->fd = -1;
}

static void read_stream(struct cli_workers *w, struct worker *k, struct stream *s)
{
    char data[16384];
    while (s->fd >= 0 && s->output->waiting.size < WAITING_MAX) {
        ssize_t n = read(s->fd, data, sizeof data);
        if (n > 0) {
            take(w, k, s, data, (size_t)n);
            cli_output_flush(s->output, false);
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            end_stream(w, k, s);
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

void cli_workers_read(struct cli_workers *w)
{
    for (int i = 0; w && i < w->count; i++)
        for (int j = 0; j < 2; j++)
            read_stream(w, &w->workers[i], &w->workers[i].streams[j]);
}

size_t cli_workers_pollfds(const struct cli_workers *w, struct pollfd *fds)
{
    size_t count = 0;
    for (int i = 0; w && i < w->count; i++)
        for (int j = 0; j < 2; j++) {
            const struct stream *s = &w->workers[i].streams[j];
            if (s->fd >= 0 && s->output->waiting.size < WAITING_MAX)
                fds[count++] = (struct pollfd){.fd = s->fd, .events = POLLIN};
        }
    return count;
}

const char *cli_workers_last_lines(struct cli_workers *w, int rank)
{
    ps_buf_clear(&w->text);
    for (int i = 0; i < w->count; i++) {
        const struct worker *k = &w->workers[i];
        if (k->rank != rank)
            continue;
        unsigned first = k->lines > LAST_LINES ? k->lines - LAST_LINES : 0;
        for (unsigned line = first; line < k->lines; line++)
            ps_buf_printf(&w->text, "%s\n", k->last[line % LAST_LINES]);
    }
    return w->text.size ? w->text.data : "";
}

/* ---- start ---- */

static void set_environment(const struct cli_workers_config *c, int local, int threads)
{
    char number[16];
    for (size_t i = 0; i < c->environment_count; i++)
        if (c->environment[i].value)
            setenv(c->environment[i].name, c->environment[i].value, 1);
        else
            unsetenv(c->environment[i].name);
    const struct {
        const char *name;
        int value;
    } numbers[] = {
        {"RANK", c->first_rank + local},
        {"LOCAL_RANK", local},
        {"WORLD_SIZE", c->world_size},
        {"LOCAL_WORLD_SIZE", c->count},
        {"GROUP_RANK", c->node},
        {"ROLE_RANK", c->first_rank + local},
        {"ROLE_WORLD_SIZE", c->world_size},
        {"PARAMSYNC_THREADS", threads},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(number, sizeof number, "%d", numbers[i].value);
        setenv(numbers[i].name, number, 1);
    }
    snprintf(number, sizeof number, "%d", threads);
    setenv("OMP_NUM_THREADS", number, 0);
    setenv("PYTHONUNBUFFERED", "1",
           0); /* its lines go through a pipe now, and should come when they are printed */
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0);
}

/* In the child. This program has one thread when it starts its ranks, so setenv is safe here; should a
 * library have made more, they do nothing that holds the environment's lock. */
static void run(const struct cli_workers_config *c, int local, const int pipes[2], int nothing, int report,
                pid_t parent)
{
    struct cli_share share;
    sigset_t none;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    cli_topology_share(c->topology, local, c->count, &share);
    if (c->bind)
        (void)sched_setaffinity(0, sizeof share.cpus, &share.cpus);
    set_environment(c, local, share.threads);
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (dup2(nothing, STDIN_FILENO) >= 0 && dup2(pipes[0], STDOUT_FILENO) >= 0 &&
        dup2(pipes[1], STDERR_FILENO) >= 0)
        execvp(c->command[0], c->command);
    int reason = errno;
    (void)!write(report, &reason, sizeof reason);
    _exit(127);
}

static int open_log(const struct cli_workers_config *c, struct worker *k, struct ps_error *err)
{
    char path[PATH_MAX];
    if (!c->log_dir)
        return 0;
    if (snprintf(path, sizeof path, "%s/rank_%d.log", c->log_dir, k->rank) >= (int)sizeof path)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--log-dir: the path is too long");
    k->log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (k->log_fd < 0)
        return ps_fail_errno(err, errno, "%s cannot be written", path);
    return ps_write_all(k->log_fd, c->heading, strlen(c->heading), path, err);
}

static int start_one(struct cli_workers *w, const struct cli_workers_config *c, int local, int nothing,
                     struct ps_error *err)
{
    struct worker *k = &w->workers[local];
    int out[2] = {-1, -1}, error[2] = {-1, -1}, report[2] = {-1, -1}, code = open_log(c, k, err);
    if (!code && (pipe2(out, O_CLOEXEC) < 0 || pipe2(error, O_CLOEXEC) < 0 || pipe2(report, O_CLOEXEC) < 0))
        code = ps_fail_errno(err, errno, "no pipe for rank %d", k->rank);
    pid_t parent = getpid(), pid = code ? -1 : fork();
    if (pid == 0)
        run(c, local, (const int[]){out[1], error[1]}, nothing, report[1], parent);
    if (!code && pid < 0)
        code = ps_fail_errno(err, errno, "rank %d cannot be started", k->rank);
    int ends[] = {out[1], error[1], report[1]};
    for (size_t i = 0; i < 3; i++)
        if (ends[i] >= 0)
            close(ends[i]);
    int reason = 0;
    if (!code) {
        setpgid(pid, pid); /* whoever of the two comes first */
        k->pid = pid;
        k->alive = true;
        ssize_t n;
        while ((n = read(report[0], &reason, sizeof reason)) < 0 && errno == EINTR)
            ;
        if (n == (ssize_t)sizeof reason) {
            waitpid(pid, NULL, 0);
            k->alive = false;
            code = ps_fail_errno(err, reason, "%.200s cannot be run", c->command[0]);
        }
    }
    k->streams[0].fd = out[0];
    k->streams[1].fd = error[0];
    for (int j = 0; j < 2; j++)
        if (k->streams[j].fd >= 0)
            fcntl(k->streams[j].fd, F_SETFL, O_NONBLOCK);
    if (report[0] >= 0)
        close(report[0]);
    return code;
}

int cli_workers_start(const struct cli_workers_config *c, struct cli_workers **ret, struct ps_error *err)
{
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    struct cli_workers *w = calloc(1, sizeof *w + (size_t)c->count * sizeof w->workers[0]);
    if (!w || nothing < 0) {
        free(w);
        if (nothing >= 0)
            close(nothing);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory or files for %d ranks", c->count);
    }
    w->prefix = c->prefix;
    w->text = (struct ps_buf)PS_BUF_INIT(1 << 16);
    int code = 0;
    for (int i = 0; i < c->count && !code; i++) {
        struct worker *k = &w->workers[w->count++];
        *k = (struct worker){
            .rank = c->first_rank + i,
            .log_fd = -1,
            .streams = {{.fd = -1, .output = c->out, .line = PS_BUF_INIT(LINE_MAX_BYTES + 1)},
                        {.fd = -1, .output = c->err, .line = PS_BUF_INIT(LINE_MAX_BYTES + 1)}}};
        code = start_one(w, c, i, nothing, err);
    }
    close(nothing);
    if (code) {
        cli_workers_free(w);
        return code;
    }
    *ret = w;
    return 0;
}

/* ---- end ---- */

int cli_workers_reap(struct cli_workers *w, pid_t pid)
{
    int status = 0;
    for (int i = 0; w && i < w->count; i++) {
        struct worker *k = &w->workers[i];
        if (k->pid != pid || !k->alive)
            continue;
        kill(-pid, SIGKILL); /* while its number cannot be anybody else's */
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        k->alive = false;
        for (int j = 0; j < 2; j++)
            read_stream(w, k, &k->streams[j]);
        struct cli_failure f = {.rank = k->rank, .at_s = ps_monotonic_s()};
        if (WIFSIGNALED(status)) {
            f.signal = WTERMSIG(status);
            f.status = 128 + f.signal;
        } else {
            f.status = WEXITSTATUS(status);
        }
        /* Several that are reaped in one go ended together: then what was killed is the cause, and what exits
         * the consequence. */
        bool together = w->failed && f.signal && !w->failure.signal && f.at_s - w->failure.at_s < 0.1;
        if (f.status && !k->told && (!w->failed || together)) {
            w->failed = true;
            w->failure = f;
        }
        return 1;
    }
    return 0;
}

int cli_workers_failure(const struct cli_workers *w, struct cli_failure *ret)
{
    if (!w || !w->failed)
        return 0;
    *ret = w->failure;
    return 1;
}

void cli_workers_signal(struct cli_workers *w, int number, bool ending)
{
    for (int i = 0; w && i < w->count; i++)
        if (w->workers[i].alive) {
            w->workers[i].told = w->workers[i].told || ending;
            kill(-w->workers[i].pid, number);
            if (number != SIGSTOP && number != SIGTSTP)
                kill(-w->workers[i].pid, SIGCONT); /* a stopped process hears nothing else */
        }
}

int cli_workers_alive(const struct cli_workers *w)
{
    int alive = 0;
    for (int i = 0; w && i < w->count; i++)
        alive += w->workers[i].alive;
    return alive;
}

void cli_workers_sweep(struct cli_workers *w)
{
    for (int i = 0; w && i < w->count; i++) {
        struct worker *k = &w->workers[i];
        for (int j = 0; j < 2; j++) {
            read_stream(w, k, &k->streams[j]);
            end_stream(w, k, &k->streams[j]);
        }
    }
}

struct cli_workers *cli_workers_free(struct cli_workers *w)
{
    if (!w)
        return NULL;
    for (int i = 0; i < w->count; i++)
        if (w->workers[i].alive)
            kill(-w->workers[i].pid, SIGKILL);
    for (int i = 0; i < w->count; i++) {
        struct worker *k = &w->workers[i];
        while (k->alive && waitpid(k->pid, NULL, 0) < 0 && errno == EINTR)
            ;
        k->alive = false;
    }
    cli_workers_sweep(w);
    for (int i = 0; i < w->count; i++)
        if (w->workers[i].log_fd >= 0)
            close(w->workers[i].log_fd);
    ps_buf_done(&w->text);
    free(w);
    return NULL;
}
