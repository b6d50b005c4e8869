/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/clock.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t read_clock(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return (int64_t)t.tv_sec * PS_NS_PER_S + t.tv_nsec;
}

int64_t ps_monotonic_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

int64_t ps_wall_ns(void)
{
    return read_clock(CLOCK_REALTIME);
}

double ps_monotonic_s(void)
{
    return (double)ps_monotonic_ns() * 1e-9;
}

static int64_t monotonic_source(void *context)
{
    (void)context;
    return ps_monotonic_ns();
}

const struct ps_clock ps_clock_monotonic = {.now_ns = monotonic_source};

void ps_format_utc(int64_t wall_ns, char *out, size_t size)
{
    time_t seconds = (time_t)(wall_ns / PS_NS_PER_S);
    long ms = (long)(wall_ns % PS_NS_PER_S / 1000000);
    struct tm tm;
    char day[32];
    gmtime_r(&seconds, &tm);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out, size, "%s.%03ldZ", day, ms);
}

void ps_format_duration(double seconds, char *out, size_t size)
{
    if (!isfinite(seconds) || seconds < 0 || seconds > 1e12)
        snprintf(out, size, "-");
    else if (seconds < 59.95)
        snprintf(out, size, "%.1f s", seconds);
    else if (llround(seconds) < 3600)
        snprintf(out, size, "%lld min %02lld s", llround(seconds) / 60, llround(seconds) % 60);
    else
        snprintf(out, size, "%lld h %02lld min", llround(seconds / 60) / 60, llround(seconds / 60) % 60);
}

int ps_parse_duration(const char *text, double *ret_seconds)
{
    static const struct {
        const char *name;
        double seconds;
    } units[] = {{"ms", 1e-3}, {"min", 60}, {"m", 60}, {"s", 1}, {"h", 3600}, {"d", 86400}};
    double total = 0;
    if (!*text)
        return -1;
    while (*text) {
        char *end;
        if (!isdigit((unsigned char)*text) && *text != '.') /* strtod would take signs, hex, inf and nan */
            return -1;
        if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X'))
            return -1;
        double value = strtod(text, &end);
        if (end == text)
            return -1;
        while (*end == ' ')
            end++;
        double unit = 0;
        for (size_t i = 0; i < sizeof units / sizeof *units && unit == 0; i++) {
            size_t n = strlen(units[i].name);
            if (strncmp(end, units[i].name, n) == 0) {
                unit = units[i].seconds;
                end += n;
            }
        }
        if (unit == 0) {
            if (*end || total > 0)
                return -1;
            unit = 1;
        }
        total += value * unit;
        while (*end == ' ')
            end++;
        text = end;
    }
    if (!isfinite(total))
        return -1;
    *ret_seconds = total;
    return 0;
}
