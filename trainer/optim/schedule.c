/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/optim/schedule.h"

#include <math.h>
#include <string.h>

static const char *const names[] = {"constant", "onecycle", "cosine"};

int ps_schedule_kind_parse(const char *name, enum ps_schedule_kind *ret_kind, struct ps_error *err)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) {
            *ret_kind = (enum ps_schedule_kind)i;
            return 0;
        }
    return ps_fail(err, PS_INVALID_ARGUMENT, "schedule '%.40s' is not known (constant, onecycle, cosine are)",
                   name);
}

const char *ps_schedule_kind_name(enum ps_schedule_kind kind)
{
    return names[kind];
}

double ps_schedule_rate(const struct ps_schedule *s, int64_t step, int64_t total)
{
    if (s->kind == PS_SCHEDULE_CONSTANT)
        return s->peak;
    if (total < 1 || step >= total)
        return 0;
    double at = step < 0 ? 0 : ((double)step + 0.5) / (double)total;
    double rise = fmin(fmax(s->rise, 0), 1);
    if (at < rise)
        return s->peak * at / rise;
    double down = rise < 1 ? (at - rise) / (1 - rise) : 0; /* 0 at the peak, 1 at the end */
    if (s->kind == PS_SCHEDULE_COSINE)
        return s->peak * 0.5 * (1 + cos(acos(-1.0) * down));
    return s->peak * (1 - down);
}
