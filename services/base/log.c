/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

_Atomic int ps_log_threshold = PS_LOG_INFO;
static char log_prefix[32];
static int log_plain;

void ps_log_set_prefix(const char *prefix)
{
    snprintf(log_prefix, sizeof log_prefix, "%s", prefix ? prefix : "");
}

void ps_log_set_plain(int plain)
{
    log_plain = plain;
}

static pthread_mutex_t sink_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the two below */
static void (*log_sink)(void *context, enum ps_log_level level, const char *line);
static void *log_sink_context;

void ps_log_set_sink(void (*sink)(void *context, enum ps_log_level level, const char *line), void *context)
{
    pthread_mutex_lock(&sink_lock);
    log_sink = sink;
    log_sink_context = context;
    pthread_mutex_unlock(&sink_lock);
}

static void give_to_sink(enum ps_log_level level, const char *line)
{
    pthread_mutex_lock(&sink_lock);
    if (log_sink)
        log_sink(log_sink_context, level, line);
    pthread_mutex_unlock(&sink_lock);
}

void ps_log_write(enum ps_log_level level, const char *format, ...)
{
    static const char *const names[] = {"error", "warning", "notice", "info", "debug"};
    char line[2048];
    size_t used = 0;
    int saved_errno = errno;

    if (!log_plain) {
        struct timespec now;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &now);
        gmtime_r(&now.tv_sec, &tm);
        used = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &tm);
        used += (size_t)snprintf(line + used, sizeof line - used, ".%03ldZ %s ", now.tv_nsec / 1000000,
                                 names[level]);
    } else if (level <= PS_LOG_WARNING) {
        used += (size_t)snprintf(line + used, sizeof line - used, "%s: ", names[level]);
    }
    if (log_prefix[0])
        used += (size_t)snprintf(line + used, sizeof line - used, "%s: ", log_prefix);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line + used, sizeof line - used - 1, format, args);
    va_end(args);
    size_t start = used;
    if (n > 0)
        used += (size_t)n;
    if (used > sizeof line - 2)
        used = sizeof line - 2;
    for (size_t i = start; i < used; i++) /* what a client sent must not forge a line */
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = ' ';
    line[used] = '\0';
    give_to_sink(level, line + start);
    line[used++] = '\n';
    for (size_t done = 0; done < used;) {
        ssize_t w = write(STDERR_FILENO, line + done, used - done);
        if (w < 0 && errno != EINTR)
            break;
        if (w > 0)
            done += (size_t)w;
    }
    errno = saved_errno;
}
