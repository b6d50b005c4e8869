/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/sidecar_child.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static const double ready_s = 60, stop_s = 20;

/* Beside this program, else on PATH. */
static void find_program(char *path, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", path, size - 1);
    char *slash = n > 0 ? (path[n] = '\0', strrchr(path, '/')) : NULL;
    if (slash && (size_t)(slash - path) + sizeof "/paramsyncd" <= size) {
        memcpy(slash, "/paramsyncd", sizeof "/paramsyncd");
        if (access(path, X_OK) == 0)
            return;
    }
    snprintf(path, size, "paramsyncd");
}

static void run(char **arguments, int out, pid_t parent)
{
    sigset_t none;
    setpgid(0, 0); /* a Ctrl-C is for us first: it is stopped last */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (dup2(out, STDOUT_FILENO) >= 0)
        execvp(arguments[0], arguments);
    (void)!write(STDERR_FILENO, "paramsyncd cannot be run\n", 25);
    _exit(127);
}

/* The line it prints when it is ready. */
static int read_ready(int fd, char *line, size_t size, struct ps_error *err)
{
    double end = ps_monotonic_s() + ready_s;
    size_t used = 0;
    while (used + 1 < size && !memchr(line, '\n', used)) {
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        double left = end - ps_monotonic_s();
        int ready = left > 0 ? poll(&poll_fd, 1, (int)(left * 1000) + 1) : 0;
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0)
            return ps_fail(err, PS_DEADLINE_EXCEEDED, "paramsyncd was not ready within %.0f s", ready_s);
        ssize_t n = read(fd, line + used, size - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return ps_fail(
                err, PS_UNAVAILABLE,
                "paramsyncd did not start (its reason stands above); --sidecar HOST:PORT takes one "
                "that runs");
        used += (size_t)n;
    }
    line[used] = '\0';
    return 0;
}

int cli_sidecar_start(const char *data_dir, bool everywhere, const char *token_file, struct cli_sidecar *ret,
                      struct ps_error *err)
{
    char program[PATH_MAX], line[PATH_MAX + 256],
        dir[] = "--data-dir", listen[] = "--grpc-listen", http[] = "--http-listen", any[] = "127.0.0.1:0",
        all[] = "0.0.0.0:0", insecure[] = "--insecure", token[] = "--token-file";
    int out[2];
    int code = ps_make_dirs(data_dir, 0700, err);
    if (code)
        return code;
    find_program(program, sizeof program);
    char *arguments[] = {program, dir, (char *)data_dir, listen, everywhere ? all : any,
                         http,    any, insecure,         token,  NULL,
                         NULL};
    if (token_file)
        arguments[9] = (char *)token_file;
    else
        arguments[8] = NULL;
    if (pipe2(out, O_CLOEXEC) < 0)
        return ps_fail_errno(err, errno, "no pipe for paramsyncd");
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        run(arguments, out[1], parent);
    close(out[1]);
    if (pid < 0) {
        close(out[0]);
        return ps_fail_errno(err, errno, "paramsyncd cannot be started");
    }
    struct cli_sidecar sidecar = {.pid = pid, .pipe = out[0]};
    code = read_ready(out[0], line, sizeof line, err);
    const char *grpc_at = code ? NULL : strstr(line, "gRPC "), *http_at = code ? NULL : strstr(line, "HTTP ");
    const char *colon = grpc_at ? strchr(grpc_at, ':') : NULL;
    if (!code && (!colon || !http_at))
        code = ps_fail(err, PS_INTERNAL, "paramsyncd said: %.200s", line);
    if (code) {
        cli_sidecar_stop(&sidecar);
        return code;
    }
    snprintf(sidecar.grpc, sizeof sidecar.grpc, "127.0.0.1%.*s", (int)strcspn(colon, ", \n"), colon);
    snprintf(sidecar.http, sizeof sidecar.http, "%.*s", (int)strcspn(http_at + 5, ", \n"), http_at + 5);
    *ret = sidecar;
    return 0;
}

void cli_sidecar_stop(struct cli_sidecar *s)
{
    if (s->pid <= 0)
        return;
    kill(s->pid, SIGTERM);
    double end = ps_monotonic_s() + stop_s;
    struct pollfd ended = {.fd = s->pipe, .events = 0};
    pid_t done;
    while ((done = waitpid(s->pid, NULL, WNOHANG)) == 0 && ps_monotonic_s() < end)
        poll(&ended, 1, 50); /* returns when its end of the pipe closes */
    if (done == 0) {
        kill(s->pid, SIGKILL);
        while (waitpid(s->pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    close(s->pipe);
    s->pid = 0;
}
