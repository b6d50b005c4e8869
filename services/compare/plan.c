/* SPDX-License-Identifier: Apache-2.0 */
#include "services/compare/plan.h"

#include <math.h>
#include <string.h>

static const struct ps_plan_preset presets[] = {
    {"nvlink4", "H100, H200: 18 links of 25 GB/s", {4e-6, 450e9}},
    {"nvlink3", "A100: 12 links of 25 GB/s", {5e-6, 300e9}},
    {"nvlink2", "V100: 6 links of 25 GB/s", {6e-6, 150e9}},
    {"pcie5", "16 lanes", {8e-6, 63e9}},
    {"pcie4", "16 lanes", {8e-6, 31.5e9}},
    {"pcie3", "16 lanes", {10e-6, 15.75e9}},
    {"ib-ndr", "InfiniBand, 400 Gbit/s", {5e-6, 50e9}},
    {"ib-hdr", "InfiniBand, 200 Gbit/s", {5e-6, 25e9}},
    {"ib-edr", "InfiniBand, 100 Gbit/s", {6e-6, 12.5e9}},
    {"eth-100g", "Ethernet, TCP", {30e-6, 12.5e9}},
    {"eth-25g", "Ethernet, TCP", {30e-6, 3.125e9}},
    {"eth-10g", "Ethernet, TCP", {40e-6, 1.25e9}},
    {"eth-1g", "Ethernet, TCP", {60e-6, 0.125e9}},
};
enum { preset_count = sizeof presets / sizeof *presets };

const struct ps_plan_preset *ps_plan_preset(const char *name)
{
    for (size_t i = 0; i < preset_count; i++)
        if (strcmp(presets[i].name, name) == 0)
            return &presets[i];
    return NULL;
}

const struct ps_plan_preset *ps_plan_preset_at(size_t i)
{
    return i < preset_count ? &presets[i] : NULL;
}

const char *ps_plan_algorithm_name(int algorithm)
{
    static const char *const names[] = {"auto", "ring", "tree", "hierarchical"};
    return algorithm >= 0 && algorithm < 4 ? names[algorithm] : "?";
}

static bool positive(double value)
{
    return isfinite(value) && value > 0;
}

static int check_link(const struct ps_plan_link *link, const char *name, struct ps_error *err)
{
    if (!isfinite(link->alpha_s) || link->alpha_s < 0 || !positive(link->bytes_per_s))
        return ps_fail(err, PS_INVALID_ARGUMENT, "the link %s needs a latency of at least 0 and a bandwidth",
                       name);
    return 0;
}

static int nodes_of(const struct ps_plan_setup *s)
{
    return (s->cards + s->cards_per_node - 1) / s->cards_per_node;
}

int ps_plan_reduce(const struct ps_plan_setup *s, enum ps_plan_algorithm algorithm, double bytes,
                   double *ret_s, struct ps_error *err)
{
    if (s->cards < 1 || s->cards_per_node < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "the number of cards, and of cards per node, is at least 1");
    const int nodes = nodes_of(s);
    const double p = s->cards, m = nodes, g = nodes > 1 ? s->cards_per_node : s->cards;
    int code = s->cards > 1 && g > 1 ? check_link(&s->in, "within a node", err) : 0;
    if (!code && nodes > 1)
        code = check_link(&s->out, "between nodes", err);
    if (code)
        return code;
    /* The slowest link that a message may meet. */
    struct ps_plan_link worst = nodes > 1 ? s->out : s->in;
    if (nodes > 1 && g > 1) {
        worst.alpha_s = fmax(s->in.alpha_s, s->out.alpha_s);
        worst.bytes_per_s = fmin(s->in.bytes_per_s, s->out.bytes_per_s);
    }
    double time = 0;
    if (s->cards > 1 && algorithm == PS_PLAN_RING) {
        time = 2 * (p - 1) * worst.alpha_s + 2 * (p - 1) / p * bytes / worst.bytes_per_s;
    } else if (s->cards > 1 && algorithm == PS_PLAN_TREE) {
        time = 2 * ceil(log2(p)) * worst.alpha_s + 2 * bytes / worst.bytes_per_s;
    } else if (s->cards > 1 && algorithm == PS_PLAN_HIERARCHICAL) {
        if (s->cards != nodes * (int)g)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "hierarchical: %d cards are not the same number on each of "
                           "%d nodes",
                           s->cards, nodes);
        if (g > 1)
            time += 2 * (g - 1) * s->in.alpha_s + 2 * (g - 1) / g * bytes / s->in.bytes_per_s;
        if (nodes > 1)
            time += 2 * (m - 1) * s->out.alpha_s + 2 * (m - 1) / m * bytes / s->out.bytes_per_s;
    } else if (s->cards > 1) {
        return ps_fail(err, PS_INVALID_ARGUMENT, "no such algorithm: %d", (int)algorithm);
    }
    *ret_s = time;
    return 0;
}

static int cheapest(const struct ps_plan_setup *s, double bytes, enum ps_plan_algorithm *ret_algorithm,
                    double *ret_s, struct ps_error *err)
{
    if (s->algorithm != PS_PLAN_AUTO) {
        *ret_algorithm = s->algorithm;
        return ps_plan_reduce(s, s->algorithm, bytes, ret_s, err);
    }
    double best = INFINITY;
    int code = 0;
    for (int a = PS_PLAN_RING; a <= PS_PLAN_HIERARCHICAL; a++) {
        double time;
        struct ps_error why = {0};
        int failed = ps_plan_reduce(s, a, bytes, &time, &why);
        if (failed && a != PS_PLAN_HIERARCHICAL)
            return ps_fail(err, failed, "%s", why.message);
        if (!failed && time < best) {
            best = time;
            *ret_algorithm = a;
        }
    }
    *ret_s = best;
    return code;
}

static int fill_buckets(const struct ps_plan_step *step, const struct ps_plan_setup *s,
                        struct ps_plan_result *r, struct ps_error *err)
{
    double limit = s->first_bucket > 0 ? s->first_bucket : PS_PLAN_FIRST_BUCKET;
    double last = 0;
    struct ps_plan_bucket *b = NULL;
    for (size_t i = 0; i < step->gradient_count; i++) {
        const struct ps_plan_gradient *g = &step->gradients[i];
        if (!isfinite(g->ready_s) || g->ready_s < last || !positive(g->bytes))
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "gradient %zu: its time must not lie before the one before, its size be positive",
                           i);
        last = g->ready_s;
        if (!b) {
            if (r->bucket_count == PS_PLAN_BUCKETS_MAX)
                return ps_fail(err, PS_INVALID_ARGUMENT, "more than %d buckets: raise their limit",
                               PS_PLAN_BUCKETS_MAX);
            b = &r->buckets[r->bucket_count++];
            *b = (struct ps_plan_bucket){0};
        }
        b->bytes += g->bytes;
        b->ready_s = g->ready_s;
        b->gradients++;
        if (b->bytes >= limit) {
            b = NULL;
            limit = s->bucket > 0 ? s->bucket : PS_PLAN_BUCKET;
        }
    }
    return 0;
}

int ps_plan(const struct ps_plan_step *step, const struct ps_plan_setup *s, struct ps_plan_result *ret,
            struct ps_error *err)
{
    const double times[] = {step->input_s, step->forward_s, step->backward_s, step->update_s};
    for (size_t i = 0; i < 4; i++)
        if (!isfinite(times[i]) || times[i] < 0)
            return ps_fail(err, PS_INVALID_ARGUMENT, "the times of a step are numbers of at least 0");
    const double alone = step->input_s + step->forward_s + step->backward_s + step->update_s;
    if (!positive(alone) || !step->gradient_count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "a step takes time and has gradients");
    if (s->cards < 1 || s->cards_per_node < 1 || s->cards > 1000000)
        return ps_fail(err, PS_INVALID_ARGUMENT, "the number of cards, and of cards per node, is at least 1");
    struct ps_plan_result r = {.cards = s->cards, .nodes = nodes_of(s)};
    int code = fill_buckets(step, s, &r, err);
    if (code)
        return code;
    double end = 0, copied = 0, total = 0;
    const double copy_s_per_byte = s->cards > 1 && s->copy_bytes_per_s > 0 ? 1 / s->copy_bytes_per_s : 0;
    for (size_t i = 0; i < r.bucket_count; i++) {
        struct ps_plan_bucket *b = &r.buckets[i];
        double time = 0;
        code = cheapest(s, b->bytes, &b->algorithm, &time, err);
        if (code)
            return code;
        copied +=
            b->bytes * copy_s_per_byte; /* copies in stand between the gradients and delay what follows */
        b->ready_s = (s->overlap ? b->ready_s : step->backward_s) + (s->overlap ? copied : 0);
        total += b->bytes;
        b->start_s = fmax(b->ready_s, end);
        b->end_s = end = b->start_s + time;
        r.reduce_s += time;
    }
    if (!s->overlap)
        for (size_t i = 0; i < r.bucket_count; i++) {
            r.buckets[i].ready_s += copied;
            r.buckets[i].start_s += copied;
            r.buckets[i].end_s += copied;
        }
    const double backward = step->backward_s + copied;
    const double reduced = s->cards > 1 ? fmax(backward, r.buckets[r.bucket_count - 1].end_s) : backward;
    r.exposed_s = reduced - backward;
    /* Only the last bucket's copy back is sure to have nothing to hide behind; the others go while it
     * reduces. */
    double back = r.bucket_count ? r.buckets[r.bucket_count - 1].bytes * copy_s_per_byte : 0;
    if (r.exposed_s <= 0)
        back = total * copy_s_per_byte;
    r.step_s = step->input_s + step->forward_s + reduced + back + step->update_s;
    r.efficiency = alone / r.step_s;
    r.speedup = r.efficiency * s->cards;
    *ret = r;
    return 0;
}
