/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_ranks.h"

#include "services/compare/compare.h"
#include "services/sidecar/web_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAT_POINTS = 4000,  /* of each series; more are down-sampled by the store */
    RECENT_STEPS = 200,  /* what the verdict looks at */
    RARE_POINTS = 10000, /* evaluations and checkpoints: one an epoch */
};

static const double warn_share = 0.10, critical_share = 0.20;

const char *ps_rank_state_name(enum ps_rank_state state)
{
    switch (state) {
    case PS_RANKS_EVEN:
        return "even";
    case PS_RANKS_WARN:
        return "warn";
    case PS_RANKS_CRITICAL:
        return "critical";
    case PS_RANKS_ABSTAIN:
        break;
    }
    return "abstain";
}

/* ---- The verdict ---- */

enum quantity { COMPUTE, WAIT, INPUT, QUANTITIES };

static double quantity_of(const struct ps_rank_times *t, enum quantity q)
{
    return q == COMPUTE ? t->compute_s : q == WAIT ? t->wait_s : t->input_s;
}

/* The median of the others; scratch has room for all. */
static double others(const struct ps_rank_times *times, size_t count, size_t me, enum quantity q,
                     double *scratch)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        if (i != me && times[i].steps)
            scratch[n++] = quantity_of(&times[i], q);
    return ps_compare_median(scratch, n);
}

static void insert_late(struct ps_rank_verdict *v, struct ps_rank_lateness one)
{
    size_t at = v->late_count < PS_RANKS_LATE_MAX ? v->late_count++ : PS_RANKS_LATE_MAX - 1;
    for (; at > 0 && v->late[at - 1].lateness < one.lateness; at--)
        v->late[at] = v->late[at - 1];
    v->late[at] = one;
}

void ps_rank_judge(const struct ps_rank_times *times, size_t count, size_t expected,
                   struct ps_rank_verdict *ret)
{
    *ret = (struct ps_rank_verdict){.state = PS_RANKS_ABSTAIN, .reason = ""};
    if (expected < 2) {
        ret->reason = "one_rank";
        return;
    }
    double *scratch = calloc(count + 1, sizeof *scratch);
    size_t known = 0, fewest = SIZE_MAX, late = 0, early = 0, unclear = 0;
    for (size_t i = 0; scratch && i < count; i++) {
        if (!times[i].steps)
            continue;
        scratch[known++] = times[i].compute_s + times[i].wait_s + times[i].input_s;
        fewest = times[i].steps < fewest ? times[i].steps : fewest;
    }
    if (!known || fewest < PS_RANKS_MIN_STEPS)
        ret->reason = "few_steps";
    else if (known < 2 || (double)known < 0.8 * (double)expected)
        ret->reason = "ranks_missing";
    ret->step_s = scratch && known ? ps_compare_median(scratch, known) : 0;
    if (!*ret->reason && !(ret->step_s > 0))
        ret->reason = "few_steps";
    if (*ret->reason)
        goto done;
    for (size_t i = 0; i < count; i++) {
        if (!times[i].steps)
            continue;
        double compute = times[i].compute_s - others(times, count, i, COMPUTE, scratch);
        double input = times[i].input_s - others(times, count, i, INPUT, scratch);
        struct ps_rank_lateness one = {
            .rank = times[i].rank,
            .lateness = (others(times, count, i, WAIT, scratch) - times[i].wait_s) / ret->step_s,
            .own = (compute + input) / ret->step_s,
            .input = input > compute,
        };
        early += one.lateness <= -warn_share;
        if (one.lateness < warn_share)
            continue;
        late++;
        unclear += one.own < one.lateness / 2;
        insert_late(ret, one);
    }
    /* Where about half are late the median tells nothing: then many others wait longer than it. */
    if (late * 2 > known || (!late && early * 4 >= known)) {
        ret->reason = "many_late";
        ret->late_count = 0;
    } else if (unclear) {
        ret->reason = "unclear";
    } else if (!late) {
        ret->state = PS_RANKS_EVEN;
    } else {
        ret->state = ret->late[0].lateness >= critical_share ? PS_RANKS_CRITICAL : PS_RANKS_WARN;
    }
done:
    free(scratch);
}

/* ---- From the step series ---- */

static void put(json_t *object, const char *key, json_t *value)
{
    if (!value || json_object_set_new(object, key, value))
        json_object_set_new(object, "incomplete", json_true());
}

static int ask(struct ps_store *store, const char *run, const char *name, uint64_t from, uint64_t to,
               uint32_t points, struct ps_series_list *ret, struct ps_error *err)
{
    struct ps_series_query query = {
        .name = name, .rank = -1, .from_step = from, .to_step = to, .max_points = points};
    return ps_store_query_series(store, run, &query, false, ret, err);
}

static double finite_median(const double *values, size_t count, double *scratch, size_t *ret_count)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        if (isfinite(values[i]))
            scratch[n++] = values[i];
    if (ret_count)
        *ret_count = n;
    return n ? ps_compare_median(scratch, n) : NAN;
}

static const char *const per_step[QUANTITIES] = {"compute_s", "allreduce_wait_s", "input_wait_s"};

/* Medians of each rank in the columns [from + k * width, ...). */
static json_t *heat_row(const struct ps_series *s, uint64_t from, double width, size_t bins, double *scratch)
{
    json_t *row = json_array();
    size_t at = 0;
    for (size_t b = 0; b < bins; b++) {
        double end = (double)from + width * (double)(b + 1);
        size_t begin = at;
        while (at < s->count && ((double)s->steps[at] < end || b + 1 == bins))
            at++;
        size_t n;
        double value = finite_median(s->values + begin, at - begin, scratch, &n);
        json_array_append_new(row, n ? ps_web_number(value) : json_null());
    }
    return row;
}

/* When each column begins, by the first rank's clock. */
static json_t *heat_times(const struct ps_series *s, uint64_t from, double width, size_t bins)
{
    json_t *row = json_array();
    size_t at = 0;
    for (size_t b = 0; b < bins; b++) {
        double begin = (double)from + width * (double)b;
        while (at + 1 < s->count && (double)s->steps[at] < begin)
            at++;
        json_array_append_new(row, s->count ? ps_web_number(s->elapsed_s[at]) : json_null());
    }
    return row;
}

static json_t *verdict_json(const struct ps_rank_verdict *v, uint64_t from, uint64_t to)
{
    json_t *late = json_array();
    for (size_t i = 0; i < v->late_count; i++)
        json_array_append_new(late, json_pack("{s:I,s:f,s:f,s:s}", "rank", (json_int_t)v->late[i].rank,
                                              "lateness", v->late[i].lateness, "own", v->late[i].own, "cause",
                                              v->late[i].input ? "input" : "compute"));
    return json_pack("{s:s,s:s,s:f,s:I,s:I,s:o}", "state", ps_rank_state_name(v->state), "reason", v->reason,
                     "step_s", v->step_s, "from_step", (json_int_t)from, "to_step", (json_int_t)to, "late",
                     late);
}

/* Evaluations or checkpoints in the window, spread over its steps. */
static double per_step_share(const struct ps_series_list *list, uint32_t rank, double steps)
{
    double sum = 0;
    for (size_t i = 0; i < list->count; i++)
        for (size_t k = 0; list->series[i].rank == rank && k < list->series[i].count; k++)
            sum += isfinite(list->series[i].values[k]) ? list->series[i].values[k] : 0;
    return steps > 0 ? sum / steps : 0;
}

static struct ps_rank_times *find(struct ps_rank_times *times, size_t *count, uint32_t rank)
{
    for (size_t i = 0; i < *count; i++)
        if (times[i].rank == rank)
            return &times[i];
    if (*count == PS_RANKS_MAX)
        return NULL;
    times[*count] = (struct ps_rank_times){.rank = rank};
    return &times[(*count)++];
}

static int by_rank(const void *left, const void *right)
{
    const struct ps_rank_times *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

/* The typical step of each rank in [from, to], from points that are all there. */
static int typical(struct ps_store *store, const char *run, uint64_t from, uint64_t to, double *scratch,
                   struct ps_rank_times *times, size_t *ret_count, struct ps_error *err)
{
    size_t count = 0;
    for (enum quantity q = COMPUTE; q < QUANTITIES; q++) {
        struct ps_series_list list = {0};
        int rc = ask(store, run, per_step[q], from, to, HEAT_POINTS, &list, err);
        if (rc < 0)
            return rc;
        for (size_t i = 0; i < list.count; i++) {
            struct ps_rank_times *t = find(times, &count, list.series[i].rank);
            size_t n;
            double value = finite_median(list.series[i].values, list.series[i].count, scratch, &n);
            if (!t || !n)
                continue;
            *(q == COMPUTE ? &t->compute_s : q == WAIT ? &t->wait_s : &t->input_s) = value;
            if (q == WAIT)
                t->steps = n;
        }
        ps_series_list_done(&list);
    }
    qsort(times, count, sizeof *times, by_rank);
    *ret_count = count;
    return 0;
}

int ps_web_ranks(struct ps_store *store, const char *run, uint64_t from, uint64_t to, size_t bins, json_t *o,
                 struct ps_error *err)
{
    struct ps_series_list lists[QUANTITIES] = {0}, evaluation = {0}, checkpoint = {0};
    struct ps_rank_times *times = calloc(PS_RANKS_MAX, sizeof *times);
    double *scratch = calloc(HEAT_POINTS + 1, sizeof *scratch);
    struct ps_run info = {0};
    int rc = times && scratch ? ps_store_get_run(store, run, &info, err)
                              : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (enum quantity q = COMPUTE; q < QUANTITIES && rc == 0; q++)
        rc = ask(store, run, per_step[q], from, to, HEAT_POINTS, &lists[q], err);
    uint64_t first = UINT64_MAX, last = 0;
    bool sampled = false;
    for (enum quantity q = COMPUTE; q < QUANTITIES; q++) {
        for (size_t i = 0; rc == 0 && i < lists[q].count; i++) {
            const struct ps_series *s = &lists[q].series[i];
            sampled = sampled || s->total_points > s->count;
            if (s->count && s->steps[0] < first)
                first = s->steps[0];
            if (s->count && s->steps[s->count - 1] > last)
                last = s->steps[s->count - 1];
        }
    }
    bool some = first <= last;
    if (rc == 0 && some)
        rc = ask(store, run, "evaluation_s", from, to, RARE_POINTS, &evaluation, err);
    if (rc == 0 && some)
        rc = ask(store, run, "checkpoint_s", from, to, RARE_POINTS, &checkpoint, err);
    size_t count = 0;
    uint64_t recent =
        last >= RECENT_STEPS && last - RECENT_STEPS + 1 > first ? last - RECENT_STEPS + 1 : first;
    if (rc == 0 && some)
        rc = typical(store, run, recent, last, scratch, times, &count, err);
    if (rc < 0)
        goto done;

    double steps = some ? (double)(last - first + 1) : 0;
    if (some && bins > (size_t)steps)
        bins = (size_t)steps;
    double width = bins ? steps / (double)bins : 1;
    json_t *heat = json_array(), *split = json_array(), *starts = json_array(), *elapsed = json_array();
    for (size_t b = 0; some && b < bins; b++)
        json_array_append_new(starts, json_integer((json_int_t)((double)first + ceil(width * (double)b))));
    if (some && lists[COMPUTE].count) {
        json_decref(elapsed);
        elapsed = heat_times(&lists[COMPUTE].series[0], first, width, bins);
    }
    for (size_t i = 0; some && i < count; i++) {
        json_t *row = json_pack("{s:I}", "rank", (json_int_t)times[i].rank);
        for (enum quantity q = COMPUTE; q < QUANTITIES; q++)
            for (size_t k = 0; k < lists[q].count; k++)
                if (lists[q].series[k].rank == times[i].rank)
                    put(row, per_step[q], heat_row(&lists[q].series[k], first, width, bins, scratch));
        json_array_append_new(heat, row);
        const struct ps_rank_times *t = &times[i];
        json_array_append_new(split, json_pack("{s:I,s:I,s:f,s:f,s:f,s:f,s:f}", "rank", (json_int_t)t->rank,
                                               "steps", (json_int_t)t->steps, "compute_s", t->compute_s,
                                               "allreduce_wait_s", t->wait_s, "input_wait_s", t->input_s,
                                               "evaluation_s", per_step_share(&evaluation, t->rank, steps),
                                               "checkpoint_s", per_step_share(&checkpoint, t->rank, steps)));
    }
    struct ps_rank_verdict verdict;
    ps_rank_judge(times, count, info.world_size, &verdict);
    put(o, "world_size", json_integer(info.world_size));
    put(o, "first_step", some ? json_integer((json_int_t)first) : json_null());
    put(o, "last_step", some ? json_integer((json_int_t)last) : json_null());
    put(o, "sampled", json_boolean(sampled));
    put(o, "bin_steps", starts);
    put(o, "bin_elapsed_s", elapsed);
    put(o, "heat", heat);
    put(o, "split", split);
    put(o, "verdict", verdict_json(&verdict, some ? recent : 0, last));
done:
    for (enum quantity q = COMPUTE; q < QUANTITIES; q++)
        ps_series_list_done(&lists[q]);
    ps_series_list_done(&evaluation);
    ps_series_list_done(&checkpoint);
    ps_run_done(&info);
    free(times);
    free(scratch);
    return rc;
}
