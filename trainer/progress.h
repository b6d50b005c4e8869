/* SPDX-License-Identifier: Apache-2.0
 * The progress bar: one line of at most 79 columns on standard error, drawn only on a terminal, a few times a
 * second. */
#ifndef PARAMSYNC_TRAINER_PROGRESS_H
#define PARAMSYNC_TRAINER_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_progress {
    bool on;
    bool drawn; /* a line stands there now */
    int64_t last_ns;
};

struct ps_progress_state {
    int epoch, epochs;
    int64_t step, steps; /* of this epoch */
    double samples_per_s;
    double left_s; /* until the end of the training; negative: not known yet */
};

/* on: rank 0 with standard error a terminal. */
void ps_progress_start(struct ps_progress *progress, bool on);
void ps_progress_draw(struct ps_progress *progress, const struct ps_progress_state *state, int64_t now_ns);
/* Takes the line away, before anything else is printed. */
void ps_progress_clear(struct ps_progress *progress);
/* The line itself, without control characters: at most 79 columns. size >= 1. */
void ps_progress_format(const struct ps_progress_state *state, char *out, size_t size);

#endif
