/* SPDX-License-Identifier: Apache-2.0 */
#include "services/compare/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *ps_gate_verdict_name(int verdict)
{
    return verdict == PS_GATE_PASS ? "pass" : verdict == PS_GATE_FAIL ? "fail" : "cannot decide";
}

int ps_gate_verdict_exit(int verdict)
{
    return verdict == PS_GATE_PASS ? 0 : verdict == PS_GATE_FAIL ? 1 : 2;
}

static const struct {
    const char *name;
    unsigned field;
} fields[] = {
    {"commit", PS_GATE_COMMIT},
    {"data hash", PS_GATE_DATA_HASH},
    {"world size", PS_GATE_WORLD_SIZE},
    {"device", PS_GATE_DEVICE},
};
enum { field_count = sizeof fields / sizeof *fields };

void ps_gate_format_fields(unsigned set, char *out, size_t size)
{
    size_t n = 0;
    if (size)
        *out = '\0';
    for (size_t i = 0; i < field_count; i++)
        if ((set & fields[i].field) && n < size)
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "", fields[i].name);
}

/* As on a command line: world-size, world_size and "world size" are the same. */
static bool is_field(const char *name, const char *text, size_t size)
{
    if (strlen(name) != size)
        return false;
    for (size_t i = 0; i < size; i++)
        if (name[i] != (text[i] == '-' || text[i] == '_' ? ' ' : text[i]))
            return false;
    return true;
}

int ps_gate_parse_fields(const char *text, unsigned *ret_fields, struct ps_error *err)
{
    unsigned set = 0;
    for (const char *p = text; *p;) {
        p += strspn(p, ", ");
        size_t size = strcspn(p, ","), i = 0;
        while (i < field_count && !is_field(fields[i].name, p, size))
            i++;
        if (size && (i == field_count || fields[i].field == PS_GATE_DATA_HASH))
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "%.*s: only commit, world-size and device can be left free (data cannot)",
                           size > 40 ? 40 : (int)size, p);
        set |= size ? fields[i].field : 0;
        p += size;
    }
    *ret_fields = set;
    return 0;
}

struct gate {
    const struct ps_gate_limits *limits;
    const struct ps_compare_run *runs, *baseline;
    struct ps_compare_row *rows;
    size_t count;
    double max_total_s;
    bool complete; /* every run has finished and was evaluated, and they repeat one job: medians mean
                      something */
    bool bounded;  /* not complete, but every run has finished or still trains, and an early end is wanted */
    struct ps_gate_spread best_accuracy, best_time, best_total; /* if bounded: better it can't become */
    struct ps_gate_result *result;
    size_t capacity;
};

static const char *run_name(const struct ps_compare_run *run)
{
    return run->name && *run->name ? run->name : run->id ? run->id : "?";
}

/* The next check's place. There is always one: evaluate allots the most there can be. */
static struct ps_gate_check *add(struct gate *g, int verdict, const char *what)
{
    struct ps_gate_check *check = &g->result->checks[g->result->check_count];
    if (g->result->check_count + 1 < g->capacity)
        g->result->check_count++;
    check->verdict = verdict;
    snprintf(check->what, sizeof check->what, "%s", what);
    return check;
}

static void name_aggregate(const struct gate *g, struct ps_gate_check *check)
{
    if (g->count == 1)
        snprintf(check->run, sizeof check->run, "%s", run_name(&g->runs[0]));
    else
        snprintf(check->run, sizeof check->run, "median of %zu runs", g->count);
}

static bool is_live(const struct ps_compare_run *run)
{
    return run->state == PS_COMPARE_CREATED || run->state == PS_COMPARE_RUNNING;
}

static void check_count(struct gate *g)
{
    if (!g->limits->min_runs)
        return;
    bool enough = g->count >= g->limits->min_runs;
    struct ps_gate_check *c = add(g, enough ? PS_GATE_PASS : PS_GATE_UNDECIDED, "number of runs");
    snprintf(c->run, sizeof c->run, "%zu run%s", g->count, g->count == 1 ? "" : "s");
    snprintf(c->actual, sizeof c->actual, "%zu", g->count);
    snprintf(c->wanted, sizeof c->wanted, "at least %zu", g->limits->min_runs);
}

static void check_state(struct gate *g, size_t i)
{
    const struct ps_compare_run *run = &g->runs[i];
    const struct ps_compare_row *row = &g->rows[i];
    bool finished = run->state == PS_COMPARE_FINISHED;
    struct ps_gate_check *c = add(g, finished ? PS_GATE_PASS : PS_GATE_UNDECIDED, "run has finished");
    snprintf(c->run, sizeof c->run, "%s", run_name(run));
    snprintf(c->wanted, sizeof c->wanted, "finished");
    snprintf(c->actual, sizeof c->actual, "%s%s%.100s", ps_compare_state_name(run->state),
             !finished && run->reason && *run->reason ? ": " : "",
             !finished && run->reason ? run->reason : "");
    c = add(g, row->non_finite ? PS_GATE_FAIL : PS_GATE_PASS, "metrics are finite");
    snprintf(c->run, sizeof c->run, "%s", run_name(run));
    snprintf(c->wanted, sizeof c->wanted, "no NaN, no infinity, accuracy 0..1");
    snprintf(c->actual, sizeof c->actual, "%s", row->non_finite ? row->non_finite_what : "all finite");
    if (!row->evaluated) {
        c = add(g, row->non_finite ? PS_GATE_FAIL : PS_GATE_UNDECIDED, "evaluated");
        snprintf(c->run, sizeof c->run, "%s", run_name(run));
        snprintf(c->wanted, sizeof c->wanted, "at least one evaluation");
        snprintf(c->actual, sizeof c->actual, "none recorded");
    }
    if (!finished || !row->evaluated)
        g->complete = false;
    if (!(finished && row->evaluated) && !is_live(run))
        g->bounded = false;
}

/* Several runs are judged together only when they repeat one job. */
static void check_repetitions(struct gate *g)
{
    if (g->count == 1)
        return;
    struct ps_gate_check *c = add(g, PS_GATE_PASS, "runs repeat one job");
    snprintf(c->run, sizeof c->run, "%zu runs", g->count);
    snprintf(c->wanted, sizeof c->wanted, "same data, model, world size; each named once");
    snprintf(c->actual, sizeof c->actual, "they do");
    const struct ps_compare_run *first = &g->runs[0];
    for (size_t i = 1; i < g->count && c->verdict == PS_GATE_PASS; i++) {
        const struct ps_compare_run *run = &g->runs[i];
        char reason[sizeof c->actual];
        bool same = true;
        if (!ps_compare_allowed(run, first, reason, sizeof reason)) {
            same = false;
        } else if (run->world_size != first->world_size) {
            snprintf(reason, sizeof reason, "world size %u, %.60s has %u", run->world_size, run_name(first),
                     first->world_size);
            same = false;
        }
        for (size_t k = 0; k < i && same; k++)
            if (run->id && g->runs[k].id && strcmp(run->id, g->runs[k].id) == 0) {
                snprintf(reason, sizeof reason, "named twice");
                same = false;
            }
        if (!same) {
            c->verdict = PS_GATE_UNDECIDED;
            g->complete = g->bounded = false;
            snprintf(c->actual, sizeof c->actual, "%.50s: %.100s", run_name(run), reason);
        }
    }
}

static void spread(struct ps_gate_spread *out, double *values, size_t n)
{
    out->known = true;
    out->median = ps_compare_median(values, n); /* sorts */
    out->low = values[0];
    out->high = values[n - 1];
}

static int gather(struct gate *g, struct ps_error *err)
{
    double *values = malloc(g->count * sizeof *values);
    if (!values)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < g->count; i++)
        values[i] = g->rows[i].best_accuracy;
    spread(&g->result->accuracy, values, g->count);
    bool times_known = true, totals_known = true;
    for (size_t i = 0; i < g->count; i++) {
        const struct ps_compare_row *row = &g->rows[i];
        times_known = times_known && (row->has_time_to_target || !row->epochs_to_target);
        values[i] = row->has_time_to_target ? row->time_to_target_s : INFINITY;
    }
    if (times_known)
        spread(&g->result->time, values, g->count);
    for (size_t i = 0; i < g->count; i++) {
        totals_known = totals_known && g->rows[i].has_total;
        values[i] = g->rows[i].total_s;
    }
    if (totals_known)
        spread(&g->result->total, values, g->count);
    free(values);
    return 0;
}

/* The best that the runs can still come to: what is over counts as it is, epochs to come as perfect, and no
 * time will be less than it is now. */
static int gather_best(struct gate *g, struct ps_error *err)
{
    double *values = malloc(3 * g->count * sizeof *values), *times = values + g->count,
           *totals = times + g->count;
    if (!values)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < g->count; i++) {
        const struct ps_compare_run *run = &g->runs[i];
        const struct ps_compare_row *row = &g->rows[i];
        bool ends = !is_live(run) || (run->epochs_planned && row->epochs >= run->epochs_planned);
        double so_far = run->epoch_count ? run->epochs[run->epoch_count - 1].elapsed_s : 0;
        if (run->total_s > so_far)
            so_far = run->total_s;
        values[i] = ends && row->has_accuracy ? row->best_accuracy : 1;
        times[i] = row->has_time_to_target ? row->time_to_target_s
                   : row->epochs_to_target ? 0 /* reached, at a time that was not recorded */
                   : is_live(run)          ? so_far
                                           : INFINITY;
        totals[i] = so_far;
    }
    spread(&g->best_accuracy, values, g->count);
    spread(&g->best_time, times, g->count);
    spread(&g->best_total, totals, g->count);
    free(values);
    return 0;
}

/* The verdict on a figure that is not known yet. */
static void check_early(const struct gate *g, struct ps_gate_check *c, bool hopeless, const char *at_best)
{
    if (g->bounded && hopeless) {
        c->verdict = PS_GATE_FAIL;
        snprintf(c->actual, sizeof c->actual, "can't pass any more: %s%s", at_best,
                 g->count > 1 ? " (median)" : "");
    } else {
        snprintf(c->actual, sizeof c->actual, "not known");
    }
}

static void early_time(const struct gate *g, struct ps_gate_check *c, double at_best, double limit)
{
    char time[48], text[96];
    ps_compare_format_time(at_best, limit, time, sizeof time);
    snprintf(text, sizeof text, "not there after %s", time);
    check_early(g, c, at_best > limit, text);
}

static void print_time(char *out, size_t size, const struct gate *g, const struct ps_gate_spread *s,
                       double limit)
{
    char median[48], low[48], high[48];
    ps_compare_format_time(s->median, limit, median, sizeof median);
    ps_compare_format_time(s->low, NAN, low, sizeof low);
    ps_compare_format_time(s->high, NAN, high, sizeof high);
    if (g->count == 1)
        snprintf(out, size, "%s", median);
    else
        snprintf(out, size, "%s (%s .. %s, n=%zu)", median, low, high, g->count);
}

static void check_accuracy(struct gate *g, const char *what, double limit, const char *suffix)
{
    const struct ps_gate_spread *s = &g->result->accuracy;
    struct ps_gate_check *c = add(g, PS_GATE_UNDECIDED, what);
    char wanted[32];
    name_aggregate(g, c);
    ps_compare_format_share(limit, NAN, wanted, sizeof wanted);
    snprintf(c->wanted, sizeof c->wanted, "at least %s%s", wanted, suffix);
    if (!g->complete) {
        char best[32], text[96];
        ps_compare_format_share(g->best_accuracy.median, limit, best, sizeof best);
        snprintf(text, sizeof text, "%s after the last epoch", best);
        check_early(g, c, g->best_accuracy.median < limit, text);
        return;
    }
    char median[32], low[32], high[32];
    ps_compare_format_share(s->median, limit, median, sizeof median);
    ps_compare_format_share(s->low, NAN, low, sizeof low);
    ps_compare_format_share(s->high, NAN, high, sizeof high);
    c->verdict = s->median >= limit ? PS_GATE_PASS : PS_GATE_FAIL;
    if (g->count > 1)
        snprintf(c->actual, sizeof c->actual, "%s (%s .. %s, n=%zu)", median, low, high, g->count);
    else
        snprintf(c->actual, sizeof c->actual, "%s (epoch %u)", median, g->rows[0].best_epoch);
}

static void check_time(struct gate *g, const char *what, double limit, const char *suffix)
{
    const struct ps_gate_spread *s = &g->result->time;
    const struct ps_compare_row *row = &g->rows[0];
    struct ps_gate_check *c = add(g, PS_GATE_UNDECIDED, what);
    char wanted[48];
    name_aggregate(g, c);
    ps_compare_format_time(limit, NAN, wanted, sizeof wanted);
    snprintf(c->wanted, sizeof c->wanted, "at most %s%s", wanted, suffix);
    if (!g->complete) {
        early_time(g, c, g->best_time.median, limit);
        return;
    }
    if (!s->known) {
        snprintf(c->actual, sizeof c->actual, "no elapsed time recorded");
        return;
    }
    c->verdict = s->median <= limit ? PS_GATE_PASS : PS_GATE_FAIL;
    print_time(c->actual, sizeof c->actual, g, s, limit);
    if (g->count == 1 && row->has_time_to_target) {
        size_t n = strlen(c->actual);
        char before[48], share[32];
        ps_compare_format_share(row->accuracy_at_target, g->result->min_accuracy, share, sizeof share);
        n += (size_t)snprintf(c->actual + n, sizeof c->actual - n, " (epoch %u, %s", row->epochs_to_target,
                              share);
        if (row->has_before) {
            ps_compare_format_time(row->before_s, NAN, before, sizeof before);
            ps_compare_format_share(row->before_accuracy, g->result->min_accuracy, share, sizeof share);
            snprintf(c->actual + n, sizeof c->actual - n, "; before: %s, %s)", before, share);
        } else {
            snprintf(c->actual + n, sizeof c->actual - n, "; first evaluation)");
        }
    }
}

static void check_total(struct gate *g, const char *suffix)
{
    const struct ps_gate_spread *s = &g->result->total;
    struct ps_gate_check *c = add(g, PS_GATE_UNDECIDED, "total time of the run");
    char wanted[48];
    name_aggregate(g, c);
    ps_compare_format_time(g->max_total_s, NAN, wanted, sizeof wanted);
    snprintf(c->wanted, sizeof c->wanted, "at most %s%s", wanted, suffix);
    if (!g->complete) {
        early_time(g, c, g->best_total.median, g->max_total_s);
        return;
    }
    if (!s->known) {
        snprintf(c->actual, sizeof c->actual, "no elapsed time recorded");
        return;
    }
    c->verdict = s->median <= g->max_total_s ? PS_GATE_PASS : PS_GATE_FAIL;
    print_time(c->actual, sizeof c->actual, g, s, g->max_total_s);
    if (g->count == 1) {
        size_t n = strlen(c->actual);
        snprintf(c->actual + n, sizeof c->actual - n, " (%u epochs)", g->rows[0].epochs);
    }
}

/* The sample trained ResNet-18 on CIFAR-10: its marks say nothing about another job. */
static void check_published(struct gate *g)
{
    struct ps_gate_check *c = add(g, PS_GATE_PASS, "job the baseline was published for");
    snprintf(c->wanted, sizeof c->wanted, "%s on %s", g->baseline->model, g->baseline->dataset);
    for (size_t i = 0; i < g->count; i++) {
        const struct ps_compare_run *run = &g->runs[i];
        const char *model = run->model && *run->model ? run->model : "unknown model";
        const char *data = run->dataset && *run->dataset ? run->dataset : "unknown data";
        bool same = strcmp(model, g->baseline->model) == 0 &&
                    strncmp(data, g->baseline->dataset, strlen(g->baseline->dataset)) == 0;
        if (i && same)
            continue;
        if (!same)
            c->verdict = PS_GATE_UNDECIDED;
        snprintf(c->run, sizeof c->run, "%s", run_name(run));
        snprintf(c->actual, sizeof c->actual, "%.40s on %.60s, world size %u", model, data, run->world_size);
        if (!same)
            return;
    }
}

/* One field of a run against the pin's: what differs, as text; false if they are the same. */
static bool field_differs(const struct ps_compare_run *run, const struct ps_compare_run *pin, unsigned field,
                          char *out, size_t size)
{
    const char *ours, *theirs;
    if (field == PS_GATE_WORLD_SIZE) {
        snprintf(out, size, "world size %u, pinned %u", run->world_size, pin->world_size);
        return run->world_size != pin->world_size;
    }
    ours = field == PS_GATE_COMMIT      ? run->commit
           : field == PS_GATE_DATA_HASH ? run->dataset_hash
                                        : run->device;
    theirs = field == PS_GATE_COMMIT      ? pin->commit
             : field == PS_GATE_DATA_HASH ? pin->dataset_hash
                                          : pin->device;
    const char *name = field == PS_GATE_COMMIT      ? "commit"
                       : field == PS_GATE_DATA_HASH ? "data hash"
                                                    : "device";
    if (!theirs || !*theirs)
        snprintf(out, size, "the pin has no %s", name);
    else if (!ours || !*ours)
        snprintf(out, size, "%s not recorded", name);
    else
        snprintf(out, size, "%s %.36s, pinned %.36s", name, ours, theirs);
    return !ours || !*ours || !theirs || !*theirs || strcmp(ours, theirs) != 0;
}

/* A pinned baseline speaks of one commit, data set, world size and device. 1, or 0 after saying what differs.
 */
static int check_pin(struct gate *g)
{
    const struct ps_compare_run *pin = g->baseline;
    struct ps_gate_check *c = add(g, PS_GATE_PASS, "provenance is the pinned one");
    char held[80], free_ones[80];
    ps_gate_format_fields(~pin->pin_free, held, sizeof held);
    ps_gate_format_fields(pin->pin_free, free_ones, sizeof free_ones);
    snprintf(c->run, sizeof c->run, "%s", run_name(&g->runs[0]));
    snprintf(c->wanted, sizeof c->wanted, "%.50s as in %.40s%s%.40s", held, run_name(pin),
             *free_ones ? "; free: " : "", free_ones);
    snprintf(c->actual, sizeof c->actual, "the same");
    for (size_t i = 0; i < g->count; i++) {
        size_t n = 0;
        for (size_t k = 0; k < field_count; k++) {
            char text[128];
            if ((pin->pin_free & fields[k].field) ||
                !field_differs(&g->runs[i], pin, fields[k].field, text, sizeof text))
                continue;
            c->verdict = PS_GATE_UNDECIDED;
            if (n < sizeof c->actual)
                n += (size_t)snprintf(c->actual + n, sizeof c->actual - n, "%s%s", n ? "; " : "", text);
        }
        if (n) {
            snprintf(c->run, sizeof c->run, "%s", run_name(&g->runs[i]));
            return 0;
        }
    }
    return 1;
}

/* Whether the baseline run can be used at all: 1, or 0 after a check that says why not. */
static int check_provenance(struct gate *g, const struct ps_compare_row *base)
{
    struct ps_gate_check *c = add(g, PS_GATE_PASS, "baseline is comparable");
    char reason[sizeof c->actual];
    snprintf(c->run, sizeof c->run, "%s", run_name(g->baseline));
    snprintf(c->wanted, sizeof c->wanted, "finished; same data, model, resolution");
    if (g->baseline->state != PS_COMPARE_FINISHED) {
        c->verdict = PS_GATE_UNDECIDED;
        snprintf(c->actual, sizeof c->actual, "baseline is %s", ps_compare_state_name(g->baseline->state));
        return 0;
    }
    if (base->non_finite || !base->evaluated) {
        c->verdict = PS_GATE_UNDECIDED;
        snprintf(c->actual, sizeof c->actual, "baseline: %s",
                 base->non_finite ? base->non_finite_what : "no evaluation recorded");
        return 0;
    }
    for (size_t i = 0; i < g->count; i++)
        if (!ps_compare_allowed(&g->runs[i], g->baseline, reason, sizeof reason)) {
            c->verdict = PS_GATE_UNDECIDED;
            snprintf(c->actual, sizeof c->actual, "%.50s: %.100s", run_name(&g->runs[i]), reason);
            return 0;
        }
    snprintf(c->actual, sizeof c->actual, "yes; world size %u, baseline %u", g->runs[0].world_size,
             g->baseline->world_size);
    return !g->baseline->pinned || check_pin(g);
}

static int check_baseline_run(struct gate *g, struct ps_error *err)
{
    struct ps_compare_row base;
    char what[96], suffix[96], share[32], time[48];
    int code = ps_compare(g->baseline, 1, 0, g->result->min_accuracy, &base, err);
    if (code)
        return code;
    if (!check_provenance(g, &base))
        return 0;
    double slack =
        g->limits->accuracy_tolerance < 0 ? PS_GATE_ACCURACY_TOLERANCE : g->limits->accuracy_tolerance;
    ps_compare_format_share(base.best_accuracy, NAN, share, sizeof share);
    snprintf(suffix, sizeof suffix, " (baseline %s less %g points)", share, slack * 100);
    check_accuracy(g, "best accuracy against baseline", fmax(base.best_accuracy - slack, 0), suffix);

    slack = g->limits->time_tolerance < 0 ? PS_GATE_TIME_TOLERANCE : g->limits->time_tolerance;
    ps_compare_format_share(g->result->min_accuracy, NAN, share, sizeof share);
    snprintf(what, sizeof what, "time to %s against baseline", share);
    if (!base.has_time_to_target) {
        struct ps_gate_check *c = add(g, PS_GATE_UNDECIDED, what);
        name_aggregate(g, c);
        snprintf(c->wanted, sizeof c->wanted, "a baseline that reached %s", share);
        snprintf(c->actual, sizeof c->actual, "%.60s did not", run_name(g->baseline));
        return 0;
    }
    ps_compare_format_time(base.time_to_target_s, NAN, time, sizeof time);
    snprintf(suffix, sizeof suffix, " (baseline %s plus %g %%)", time, slack * 100);
    check_time(g, what, base.time_to_target_s * (1 + slack), suffix);
    return 0;
}

static void decide(struct ps_gate_result *r)
{
    const struct ps_gate_check *first = NULL;
    r->verdict = PS_GATE_PASS;
    for (size_t i = 0; i < r->check_count; i++) {
        const struct ps_gate_check *c = &r->checks[i];
        if (c->verdict == PS_GATE_PASS || r->verdict == PS_GATE_FAIL)
            continue;
        if (c->verdict == PS_GATE_FAIL || !first) {
            first = c;
            r->verdict = c->verdict;
        }
    }
    if (first)
        snprintf(r->reason, sizeof r->reason, "%s: %s; wanted: %s", first->what, first->actual,
                 first->wanted);
    else
        snprintf(r->reason, sizeof r->reason, "all %zu checks passed, n=%zu", r->check_count, r->n);
}

static int validate(const struct ps_gate_limits *limits, const struct ps_compare_run *runs, size_t count,
                    const struct ps_compare_run *baseline, double *ret_min_accuracy, struct ps_error *err)
{
    double min_accuracy = limits->min_accuracy;
    if (!count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "the gate needs a run to judge");
    for (size_t i = 0; i < count; i++)
        if (runs[i].threshold_only)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "%s is a published result: it can be a baseline, not a run to judge",
                           run_name(&runs[i]));
    if (min_accuracy == 0 && baseline && baseline->threshold_only)
        min_accuracy = baseline->published_accuracy;
    if (min_accuracy == 0)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "no accuracy to ask for: give --min-accuracy, for example 0.8");
    if (!(min_accuracy > 0 && min_accuracy <= 1))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "min accuracy %g: must be above 0 and at most 1 (0.8 is 80 %%)", min_accuracy);
    if (!(limits->max_time_s >= 0) || !(limits->max_total_time_s >= 0))
        return ps_fail(err, PS_INVALID_ARGUMENT, "a time limit must not be negative");
    if (isnan(limits->time_tolerance) || isnan(limits->accuracy_tolerance))
        return ps_fail(err, PS_INVALID_ARGUMENT, "a tolerance must be a number");
    *ret_min_accuracy = min_accuracy;
    return 0;
}

static int run_checks(struct gate *g, struct ps_error *err)
{
    char what[96], share[32], suffix[96] = "";
    const struct ps_compare_run *published = g->baseline && g->baseline->threshold_only ? g->baseline : NULL;
    struct ps_gate_result *r = g->result;
    int code = 0;
    g->bounded = g->limits->early;
    check_count(g);
    for (size_t i = 0; i < g->count; i++)
        check_state(g, i);
    check_repetitions(g);
    g->bounded = g->bounded && !g->complete;
    if (g->complete)
        code = gather(g, err);
    else if (g->bounded)
        code = gather_best(g, err);
    if (code)
        return code;
    if (published)
        check_published(g);
    check_accuracy(g, "best accuracy", r->min_accuracy, "");
    if (g->limits->max_time_s > 0) {
        ps_compare_format_share(r->min_accuracy, NAN, share, sizeof share);
        snprintf(what, sizeof what, "time to %s", share);
        check_time(g, what, g->limits->max_time_s, "");
    }
    g->max_total_s = g->limits->max_total_time_s;
    if (!(g->max_total_s > 0) && published) {
        g->max_total_s = published->published_total_s;
        snprintf(suffix, sizeof suffix, " (published for %u epochs on %u card%s)",
                 published->published_epochs, published->world_size, published->world_size == 1 ? "" : "s");
    }
    if (g->max_total_s > 0)
        check_total(g, suffix);
    if (g->baseline && !published)
        code = check_baseline_run(g, err);
    return code;
}

int ps_gate_evaluate(const struct ps_gate_limits *limits, const struct ps_compare_run *runs, size_t count,
                     const struct ps_compare_run *baseline, struct ps_gate_result **ret_result,
                     struct ps_error *err)
{
    struct gate g = {.limits = limits, .runs = runs, .baseline = baseline, .count = count, .complete = true};
    double min_accuracy = 0;
    int code = validate(limits, runs, count, baseline, &min_accuracy, err);
    if (code)
        return code;
    g.capacity = count * 3 + 11; /* three per run, ten over all, one spare */
    g.rows = calloc(count, sizeof *g.rows);
    g.result = calloc(1, sizeof *g.result);
    if (g.result)
        g.result->checks = calloc(g.capacity, sizeof *g.result->checks);
    if (!g.rows || !g.result || !g.result->checks) {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    } else {
        g.result->n = count;
        g.result->min_accuracy = min_accuracy;
        code = ps_compare(runs, count, 0, min_accuracy, g.rows, err);
    }
    if (!code)
        code = run_checks(&g, err);
    free(g.rows);
    if (code) {
        ps_gate_result_free(g.result);
        return code;
    }
    decide(g.result);
    *ret_result = g.result;
    return 0;
}

struct ps_gate_result *ps_gate_result_free(struct ps_gate_result *result)
{
    if (result)
        free(result->checks);
    free(result);
    return NULL;
}
