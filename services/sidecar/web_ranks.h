/* SPDX-License-Identifier: Apache-2.0
 * What the ranks of a run spend their steps on, and which of them the others wait for. */
#ifndef PARAMSYNC_SIDECAR_WEB_RANKS_H
#define PARAMSYNC_SIDECAR_WEB_RANKS_H

#include "db/store.h"

#include <jansson.h>

/* One rank's typical step over a window: medians in seconds. */
struct ps_rank_times {
    uint32_t rank;
    size_t steps; /* of the window that were reported; 0: none, the rest means nothing */
    double compute_s, wait_s, input_s;
};

enum ps_rank_state {
    PS_RANKS_ABSTAIN, /* cannot be said, see reason */
    PS_RANKS_EVEN,    /* no rank is late by 10 % of a step */
    PS_RANKS_WARN,    /* one or more are late by 10 % and less than 20 % */
    PS_RANKS_CRITICAL /* by 20 % or more */
};
const char *ps_rank_state_name(enum ps_rank_state state);

struct ps_rank_lateness {
    uint32_t rank;
    double lateness; /* share of a step by which it waits less than the others (their median) */
    double own;      /* share of a step by which its compute and input take longer than the others' */
    bool input;      /* most of that is waiting for input */
};

enum { PS_RANKS_MAX = 1024, PS_RANKS_LATE_MAX = 16, PS_RANKS_MIN_STEPS = 20 };
struct ps_rank_verdict {
    enum ps_rank_state state;
    const char
        *reason;   /* of an abstention: one_rank, few_steps, ranks_missing, many_late, unclear; else "" */
    double step_s; /* a typical step */
    struct ps_rank_lateness late[PS_RANKS_LATE_MAX]; /* the latest first; of the abstention many_late none */
    size_t late_count;
};
/* A step ends for all ranks when the slowest arrives at the collective: it is the one that waits least there,
 * while step times are all the same. A rank is late by the others' median wait less its own, as a share of a
 * typical step; it is named if its own compute and input time say so too (by at least half of that).
 * expected: ranks that should have reported. Pure; count may be 0. */
void ps_rank_judge(const struct ps_rank_times *times, size_t count, size_t expected,
                   struct ps_rank_verdict *ret_verdict);

/* Adds to o what the step series say of a run's ranks: heat map, split of a step, verdict. from, to: first
 * and last step, to 0: no bound; bins: columns of the heat map. */
int ps_web_ranks(struct ps_store *store, const char *run, uint64_t from, uint64_t to, size_t bins, json_t *o,
                 struct ps_error *err);

#endif
