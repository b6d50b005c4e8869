/* SPDX-License-Identifier: Apache-2.0
 * Learning rate schedules: a pure function of the step, so that a resumed run needs no state. */
#ifndef PARAMSYNC_OPTIM_SCHEDULE_H
#define PARAMSYNC_OPTIM_SCHEDULE_H

#include "services/base/error.h"

#include <stdint.h>

enum ps_schedule_kind {
    PS_SCHEDULE_CONSTANT, /* peak */
    PS_SCHEDULE_ONECYCLE, /* a triangle: 0 to peak over the first `rise` of the steps, then down to 0 */
    PS_SCHEDULE_COSINE,   /* 0 to peak over the first `rise` of the steps, then half a cosine down to 0 */
};

struct ps_schedule {
    enum ps_schedule_kind kind;
    double peak; /* learning rate at the top */
    double rise; /* fraction of all steps until the peak, in [0, 1]; 0.25 is usual for onecycle, 0.05 for
                    cosine */
};

/* "constant", "onecycle", "cosine"; PS_INVALID_ARGUMENT for others. */
int ps_schedule_kind_parse(const char *name, enum ps_schedule_kind *ret_kind, struct ps_error *err);
const char *ps_schedule_kind_name(enum ps_schedule_kind kind);

/* The rate of optimizer step `step` (0 for the first) of `total`. A step stands at the middle of its
 * interval, (step + 1/2) / total, so that neither the first nor the last is a step of rate 0. Past the end it
 * is 0, but for constant. Thread-safe. */
double ps_schedule_rate(const struct ps_schedule *schedule, int64_t step, int64_t total);

#endif
