/* SPDX-License-Identifier: Apache-2.0
 * Spans of time by thread, written as Chrome's trace event format (JSON object form, complete events "X"):
 * https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Perfetto and
 * chrome://tracing show it.
 *
 * Memory is bounded: what comes after the last place is dropped and counted. Thread-safe; recording takes a
 * lock for a few instructions. Every call takes NULL for the trace: then nothing is done. */
#ifndef PARAMSYNC_BASE_TRACE_H
#define PARAMSYNC_BASE_TRACE_H

#include "services/base/error.h"

#include <stddef.h>

struct ps_trace;

enum { PS_TRACE_LOOP, PS_TRACE_COMM, PS_TRACE_THREADS }; /* threads, by number */

/* process: a number and a name for all its spans ("rank 3"). capacity: spans; 0: 262,144 (10 MiB). Fails if
 * path's folder cannot be written to; the file itself is written by ps_trace_close. */
int ps_trace_open(const char *path, int process, const char *process_name, size_t capacity,
                  struct ps_trace **ret, struct ps_error *err);
/* Times are ps_monotonic_s(). name and key live as long as the program; key NULL: no argument. */
void ps_trace_span(struct ps_trace *trace, int thread, const char *name, double begin_s, double end_s,
                   const char *key, long value);
/* Writes the file, whole or not at all, and frees. The first call writes, for a thread that is about to
 * _exit; keep: the trace itself stays, and what is still recorded is lost. */
int ps_trace_close(struct ps_trace *trace, int keep, struct ps_error *err);

#endif
