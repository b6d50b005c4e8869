/* SPDX-License-Identifier: Apache-2.0
 * One line per message on stderr: UTC time, level, text. Programs log; libraries do not log above debug.
 * Thread-safe: each line is one write. */
#ifndef PARAMSYNC_BASE_LOG_H
#define PARAMSYNC_BASE_LOG_H

enum ps_log_level { PS_LOG_ERROR, PS_LOG_WARNING, PS_LOG_NOTICE, PS_LOG_INFO, PS_LOG_DEBUG };

/* Read without a lock on every message: set it before threads start, or accept that a message is missed. */
extern _Atomic int ps_log_threshold;

/* A word put before every message, such as "rank 1"; copied, at most 31 bytes. Set before threads start. */
void ps_log_set_prefix(const char *prefix);
/* Plain: no time and no level (for people at a terminal). Set before threads start. */
void ps_log_set_plain(int plain);

/* Every line that is written goes to sink too, without time, level and newline; NULL: to none. One call at a
 * time; the sink must not log. */
void ps_log_set_sink(void (*sink)(void *context, enum ps_log_level level, const char *line), void *context);

void ps_log_write(enum ps_log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));

/* Arguments are not evaluated below the threshold. */
#define ps_log(level, ...)                                                                                   \
    do {                                                                                                     \
        if ((int)(level) <= ps_log_threshold)                                                                \
            ps_log_write((level), __VA_ARGS__);                                                              \
    } while (0)
#define ps_log_error(...) ps_log(PS_LOG_ERROR, __VA_ARGS__)
#define ps_log_warning(...) ps_log(PS_LOG_WARNING, __VA_ARGS__)
#define ps_log_notice(...) ps_log(PS_LOG_NOTICE, __VA_ARGS__)
#define ps_log_info(...) ps_log(PS_LOG_INFO, __VA_ARGS__)
#define ps_log_debug(...) ps_log(PS_LOG_DEBUG, __VA_ARGS__)

#endif
