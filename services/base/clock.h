/* SPDX-License-Identifier: Apache-2.0
 * Time. Liveness and deadlines use the monotonic clock, through a ps_clock where a test must turn it. */
#ifndef PARAMSYNC_BASE_CLOCK_H
#define PARAMSYNC_BASE_CLOCK_H

#include <stddef.h>
#include <stdint.h>

#define PS_NS_PER_S INT64_C(1000000000)

/* A clock that can be injected. Thread-safe if its function is. */
struct ps_clock {
    int64_t (*now_ns)(void *context);
    void *context;
};

extern const struct ps_clock ps_clock_monotonic;

int64_t ps_monotonic_ns(void);
int64_t ps_wall_ns(void); /* since 1970-01-01 UTC */
double ps_monotonic_s(void);
/* "2026-01-31T23:59:59.123Z", NUL-terminated; size >= 25. */
void ps_format_utc(int64_t wall_ns, char *out, size_t size);
/* "1 h 02 min", "12.3 s", "3 min 05 s": for people. */
void ps_format_duration(double seconds, char *out, size_t size);
/* Reads "90", "90s", "20m", "20min", "1h", "1h30m", "1.5h", "500ms" into seconds. Returns 0 or -1. */
int ps_parse_duration(const char *text, double *ret_seconds);

#endif
