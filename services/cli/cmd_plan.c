/* SPDX-License-Identifier: Apache-2.0
 * paramsync plan: from one card's measured step, what more cards would take. */
#include "services/cli/cli.h"

#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/text.h"
#include "services/compare/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct plan_settings {
    struct cli_common common;
    const char *trace, *buckets, *cards, *in, *out, *algorithm;
    double forward, backward, update, input, eval, first_mib, bucket_mib, copy;
    int64_t batch, images, per_node, nics;
    bool overlap;
};

#define AT(field) .offset = offsetof(struct plan_settings, field)
static const struct ps_option rows[] = {
    {.name = "trace",
     .type = PS_TYPE_STRING,
     AT(trace),
     .value = "FILE",
     .help = "what paramsync-train --trace FILE wrote, best by a single process",
     .group = "The measured step"},
    {.name = "forward",
     .type = PS_TYPE_DURATION,
     AT(forward),
     .value = "TIME",
     .help = "of one step; with --backward and --buckets instead of a trace",
     .min = 0,
     .max = 86400},
    {.name = "backward",
     .type = PS_TYPE_DURATION,
     AT(backward),
     .value = "TIME",
     .min = 0,
     .max = 86400,
     .help = "the same"},
    {.name = "update",
     .type = PS_TYPE_DURATION,
     AT(update),
     .value = "TIME",
     .min = 0,
     .max = 86400,
     .help = "the same: the optimizer"},
    {.name = "input",
     .type = PS_TYPE_DURATION,
     AT(input),
     .value = "TIME",
     .min = 0,
     .max = 86400,
     .help = "the same: waiting for images"},
    {.name = "buckets",
     .type = PS_TYPE_STRING,
     AT(buckets),
     .value = "TIME:BYTES,...",
     .help = "each bucket: when it is full, since backward began, and its size"},
    {.name = "batch",
     .type = PS_TYPE_INT,
     AT(batch),
     .value = "N",
     .fallback = "128",
     .min = 1,
     .max = 1e7,
     .help = "images of that step; every card will have as many"},
    {.name = "images",
     .type = PS_TYPE_INT,
     AT(images),
     .value = "N",
     .fallback = "50000",
     .min = 1,
     .max = 1e12,
     .help = "of an epoch"},
    {.name = "eval",
     .type = PS_TYPE_DURATION,
     AT(eval),
     .value = "TIME",
     .min = 0,
     .max = 86400,
     .help = "test of an epoch on one card; default: the trace's"},

    {.name = "cards",
     .type = PS_TYPE_STRING,
     AT(cards),
     .value = "N,...",
     .fallback = "1,2,4,8,16,32",
     .help = "how many in all",
     .group = "The machines"},
    {.name = "cards-per-node",
     .type = PS_TYPE_INT,
     AT(per_node),
     .value = "N",
     .fallback = "8",
     .min = 1,
     .max = 1024,
     .help = "how many of them a node has"},
    {.name = "intra",
     .type = PS_TYPE_STRING,
     AT(in),
     .value = "LINK",
     .fallback = "nvlink4",
     .help = "between the cards of a node: a name below, or LATENCY:GB/S (5us:300)"},
    {.name = "inter",
     .type = PS_TYPE_STRING,
     AT(out),
     .value = "LINK",
     .fallback = "ib-ndr",
     .help = "between nodes, of one network card"},
    {.name = "nics",
     .type = PS_TYPE_INT,
     AT(nics),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = 64,
     .help = "network cards of a node"},
    {.name = "algorithm",
     .type = PS_TYPE_CHOICE,
     AT(algorithm),
     .choices = "auto|ring|tree|hierarchical",
     .fallback = "auto",
     .help = "of the all-reduce; auto: for each bucket the one that takes least"},
    {.name = "overlap",
     .type = PS_TYPE_BOOL,
     AT(overlap),
     .fallback = "true",
     .help = "with backward; false: all of it after"},
    {.name = "first-bucket-mib",
     .type = PS_TYPE_DOUBLE,
     AT(first_mib),
     .value = "MIB",
     .fallback = "1",
     .min = 0.001,
     .max = 1e6,
     .help = "limit of the first bucket"},
    {.name = "bucket-mib",
     .type = PS_TYPE_DOUBLE,
     AT(bucket_mib),
     .value = "MIB",
     .fallback = "25",
     .min = 0.001,
     .max = 1e6,
     .help = "limit of the others"},
    {.name = "copy",
     .type = PS_TYPE_DOUBLE,
     AT(copy),
     .value = "GB/S",
     .min = 0,
     .max = 1e6,
     .help = "at which gradients are copied into buckets and back; default: not at all"},
    CLI_JSON_ROW(struct plan_settings, "print a JSON object"),
    {.name = "help",
     .short_name = "h",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct plan_settings, common.help),
     .help = "print this"},
};
static const struct ps_options table_of_options = {
    .program = "paramsync plan",
    .usage = "--trace FILE [--cards N,...] [--intra LINK] [--inter LINK]",
    .example = "paramsync-train --epochs 1 --train_images 2560 --trace one.json\n"
               "paramsync plan --trace one.json --batch 128 --cards 8,16 --inter eth-25g",
    .about =
        "Predicts step time, epoch time and efficiency of data-parallel training on more cards, each with "
        "the "
        "measured batch: buckets as they get full, reduced in order beside backward, each by latency and "
        "bandwidth of its slowest link. Stragglers and congestion are not in it: it is what the links allow.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

enum { COUNTS_MAX = 32, TRACE_MAX = 512 << 20 };

/* ---- numbers from text ---- */

static int parse_link(const char *flag, const char *text, struct ps_plan_link *ret, struct ps_error *err)
{
    const struct ps_plan_preset *preset = ps_plan_preset(text);
    if (preset) {
        *ret = preset->link;
        return 0;
    }
    char *end;
    double latency = strtod(text, &end), unit = 1e-6, rate;
    if (end != text && strncmp(end, "us", 2) == 0)
        end += 2;
    else if (end != text && strncmp(end, "ms", 2) == 0)
        unit = 1e-3, end += 2;
    else if (end != text && *end == 's')
        unit = 1, end += 1;
    if (end == text || *end != ':' || ps_parse_double(end + 1, &rate) || rate <= 0 || !(latency >= 0)) {
        char names[256] = "";
        for (size_t i = 0; (preset = ps_plan_preset_at(i)); i++)
            snprintf(names + strlen(names), sizeof names - strlen(names), " %s", preset->name);
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--%s %.60s: give LATENCY:GB/S, for example 5us:12.5, or one of%s", flag, text, names);
    }
    *ret = (struct ps_plan_link){latency * unit, rate * 1e9};
    return 0;
}

static int parse_counts(const char *text, int counts[COUNTS_MAX], size_t *ret_count, struct ps_error *err)
{
    size_t count = 0;
    for (const char *at = text; *at;) {
        size_t length = strcspn(at, ",");
        char word[16];
        int64_t value;
        snprintf(word, sizeof word, "%.*s", (int)(length < 15 ? length : 15), at);
        if (count == COUNTS_MAX || ps_parse_int64(word, 1, 1000000, &value))
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "--cards %.60s: give at most %d numbers from 1 to 1000000", text, COUNTS_MAX);
        counts[count++] = (int)value;
        at += length;
        at += *at == ',';
    }
    *ret_count = count;
    return count ? 0 : ps_fail(err, PS_INVALID_ARGUMENT, "--cards is empty");
}

/* ---- the step, from flags ---- */

struct measured {
    struct ps_plan_step step;
    struct ps_plan_gradient *gradients; /* owned */
    double eval_s;
    size_t steps; /* that the medians are of; 0: from flags */
    bool several; /* the trace is of a rank among others */
    bool from_buckets;
};

static int read_buckets(const char *text, struct measured *m, struct ps_error *err)
{
    size_t count = 1;
    for (const char *at = text; *at; at++)
        count += *at == ',';
    m->gradients = calloc(count, sizeof *m->gradients);
    if (!m->gradients)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    m->step.gradients = m->gradients;
    for (const char *at = text; *at;) {
        size_t length = strcspn(at, ",");
        char word[64], *colon;
        struct ps_plan_gradient *g = &m->gradients[m->step.gradient_count];
        snprintf(word, sizeof word, "%.*s", (int)(length < 63 ? length : 63), at);
        colon = strchr(word, ':');
        if (colon)
            *colon = '\0';
        if (!colon || ps_parse_duration(word, &g->ready_s) || ps_parse_double(colon + 1, &g->bytes) ||
            g->bytes <= 0)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "--buckets %.60s: give TIME:BYTES for each, as 12ms:9461800", text);
        m->step.gradient_count++;
        at += length;
        at += *at == ',';
    }
    m->from_buckets = true;
    return 0;
}

/* ---- the step, from a trace ---- */

struct traced_step {
    double input_s, forward_s, backward_s, update_s, backward_at;
    size_t first, count; /* its gradients */
    bool whole;
};
struct traced_gradient {
    double at, elements;
};
struct reading {
    struct traced_step *steps, now;
    size_t step_count, step_room;
    struct traced_gradient *gradients;
    size_t gradient_count, gradient_room;
    double evals[4096];
    size_t eval_count;
};

static bool grow(void **items, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return true;
    size_t more = *room ? *room * 2 : 256;
    void *grown = realloc(*items, more * size);
    if (!grown)
        return false;
    *items = grown;
    *room = more;
    return true;
}

/* Spans of the loop's thread come in the order in which they ended. */
static bool take_span(struct reading *r, const char *name, double at, double took, double value)
{
    struct traced_step *s = &r->now;
    if (strcmp(name, "input wait") == 0) {
        if (!s->backward_s) /* a new step; with several batches a step more waits follow */
            *s = (struct traced_step){.first = r->gradient_count};
        s->input_s += took;
    } else if (strcmp(name, "forward") == 0) {
        s->forward_s += took;
    } else if (strcmp(name, "gradient") == 0) {
        if (!grow((void **)&r->gradients, r->gradient_count, &r->gradient_room, sizeof *r->gradients))
            return false;
        r->gradients[r->gradient_count++] = (struct traced_gradient){at, value};
    } else if (strcmp(name, "backward") == 0) {
        s->forward_s += s->backward_s; /* of an earlier batch of this step: nothing is reduced beside it */
        s->backward_s = took;
        s->backward_at = at;
    } else if (strcmp(name, "update") == 0) {
        s->update_s = took;
        s->count = r->gradient_count - s->first;
        if (!grow((void **)&r->steps, r->step_count, &r->step_room, sizeof *r->steps))
            return false;
        if (s->backward_s > 0 && s->count)
            r->steps[r->step_count++] = *s;
        *s = (struct traced_step){.first = r->gradient_count};
    } else if (strcmp(name, "evaluation") == 0 && r->eval_count < sizeof r->evals / sizeof *r->evals) {
        r->evals[r->eval_count++] = took;
    }
    return true;
}

/* Medians over the steps after the first quarter, in which buffers and code are still made. */
static int take_medians(const struct reading *r, const char *path, struct measured *m, struct ps_error *err)
{
    size_t first = r->step_count / 4, count = r->step_count - first;
    if (!count)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "%.200s holds no step with gradients: it must be a trace that this version's "
                       "paramsync-train wrote",
                       path);
    size_t gradients = r->steps[first].count;
    double *values = malloc(count * sizeof *values);
    m->gradients = calloc(gradients, sizeof *m->gradients);
    if (!values || !m->gradients) {
        free(values);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
#define MEDIAN_OF(field, into)                                                                               \
    for (size_t i = 0; i < count; i++)                                                                       \
        values[i] = r->steps[first + i].field;                                                               \
    (into) = ps_compare_median(values, count)
    MEDIAN_OF(input_s, m->step.input_s);
    MEDIAN_OF(forward_s, m->step.forward_s);
    MEDIAN_OF(backward_s, m->step.backward_s);
    MEDIAN_OF(update_s, m->step.update_s);
#undef MEDIAN_OF
    int code = 0;
    for (size_t k = 0; k < gradients && !code; k++) {
        for (size_t i = 0; i < count; i++) {
            const struct traced_step *s = &r->steps[first + i];
            if (s->count != gradients) {
                code = ps_fail(err, PS_INVALID_ARGUMENT,
                               "%.200s: its steps have different numbers of gradients", path);
                break;
            }
            /* As a share of this step's backward: a slow step must not move the gradients of the usual one.
             */
            values[i] = (r->gradients[s->first + k].at - s->backward_at) / s->backward_s;
        }
        if (code)
            break;
        double ready = ps_compare_median(values, count) * m->step.backward_s;
        double before = k ? m->gradients[k - 1].ready_s : 0;
        m->gradients[k].ready_s = ready > before ? ready : before;
        m->gradients[k].bytes = 4 * r->gradients[r->steps[first].first + k].elements;
    }
    free(values);
    m->step.gradients = m->gradients;
    m->step.gradient_count = gradients;
    m->steps = count;
    if (r->eval_count) {
        double *evals = malloc(r->eval_count * sizeof *evals);
        if (evals) {
            memcpy(evals, r->evals, r->eval_count * sizeof *evals);
            m->eval_s = ps_compare_median(evals, r->eval_count);
        }
        free(evals);
    }
    return code;
}

static int read_trace(const char *path, struct measured *m, struct ps_error *err)
{
    char *text = NULL;
    size_t size;
    json_error_t why;
    int code = ps_read_file(path, TRACE_MAX, &text, &size, err);
    if (code) {
        err->code = PS_INVALID_ARGUMENT;
        return ps_error_prefix(err, "--trace");
    }
    json_t *root = json_loadb(text, size, 0, &why);
    free(text);
    json_t *events = root ? json_object_get(root, "traceEvents") : NULL, *event;
    if (!json_is_array(events)) {
        json_decref(root);
        return ps_fail(err, PS_INVALID_ARGUMENT, "--trace %.200s: no trace (%s)", path,
                       root ? "it has no traceEvents" : why.text);
    }
    struct reading *r = calloc(1, sizeof *r);
    if (!r)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    size_t i;
    json_array_foreach(events, i, event)
    {
        const char *name = json_string_value(json_object_get(event, "name"));
        const char *kind = json_string_value(json_object_get(event, "ph"));
        if (code || !name || !kind || strcmp(kind, "X") != 0)
            continue;
        if (json_integer_value(json_object_get(event, "tid")) != 0) {
            m->several = true; /* something was communicated */
            continue;
        }
        double at = json_number_value(json_object_get(event, "ts")) / 1e6,
               took = json_number_value(json_object_get(event, "dur")) / 1e6;
        json_t *elements = json_object_get(json_object_get(event, "args"), "elements");
        if (!take_span(r, name, at, took, json_number_value(elements)))
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    json_decref(root);
    if (!code)
        code = take_medians(r, path, m, err);
    if (r) {
        free(r->steps);
        free(r->gradients);
    }
    free(r);
    return code;
}

/* ---- the answer ---- */

struct answer {
    struct ps_plan_result results[COUNTS_MAX];
    double epoch_s[COUNTS_MAX];
    size_t count;
};

static double epoch_of(const struct plan_settings *s, const struct measured *m,
                       const struct ps_plan_result *r)
{
    double steps = floor((double)s->images / ((double)s->batch * r->cards));
    return (steps < 1 ? 1 : steps) * r->step_s + m->eval_s / r->cards;
}

/* "ring", or "ring, tree" where the buckets differ. */
static void algorithms_of(const struct ps_plan_result *r, char *text, size_t size)
{
    bool used[4] = {false};
    for (size_t i = 0; r->cards > 1 && i < r->bucket_count; i++)
        used[r->buckets[i].algorithm] = true;
    snprintf(text, size, "%s", r->cards > 1 ? "" : "-");
    for (int a = 1; a < 4; a++)
        if (used[a])
            snprintf(text + strlen(text), size - strlen(text), "%s%s", *text ? ", " : "",
                     a == PS_PLAN_HIERARCHICAL ? "hier." : ps_plan_algorithm_name(a));
}

static void put_time(struct cli_table *table, double seconds)
{
    if (seconds < 1)
        cli_table_printf(table, CLI_PLAIN, "%.*f ms", seconds < 0.1 ? 2 : 1, seconds * 1e3);
    else if (seconds < 100)
        cli_table_printf(table, CLI_PLAIN, "%.2f s", seconds);
    else
        cli_table_printf(table, CLI_PLAIN, "%.0f s", seconds);
}

static int print(const struct plan_settings *s, const struct measured *m, const struct answer *a,
                 struct ps_error *err)
{
    static const struct cli_column columns[] = {
        {"CARDS", CLI_RIGHT, CLI_KEEP},  {"NODES", CLI_RIGHT, CLI_KEEP},   {"STEP", CLI_RIGHT, CLI_KEEP},
        {"REDUCE", CLI_RIGHT, CLI_KEEP}, {"EXPOSED", CLI_RIGHT, CLI_KEEP}, {"IMG/S", CLI_RIGHT, CLI_KEEP},
        {"SPEED", CLI_RIGHT, CLI_KEEP},  {"EFF.", CLI_RIGHT, CLI_KEEP},    {"EPOCH", CLI_RIGHT, CLI_KEEP},
        {"BY", CLI_LEFT, CLI_KEEP}};
    struct cli_table table;
    struct ps_buf out = PS_BUF_INIT(1 << 20);
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    const struct ps_plan_result *sixteen = NULL;
    for (size_t i = 0; i < a->count; i++) {
        const struct ps_plan_result *r = &a->results[i];
        char text[64];
        sixteen = r->cards == PS_PLAN_SAMPLE_CARDS ? r : sixteen;
        cli_table_printf(&table, CLI_PLAIN, "%d", r->cards);
        cli_table_printf(&table, CLI_PLAIN, "%d", r->nodes);
        put_time(&table, r->step_s);
        put_time(&table, r->reduce_s);
        put_time(&table, r->exposed_s);
        cli_table_printf(&table, CLI_PLAIN, "%.*f", r->cards * s->batch / r->step_s < 1000 ? 1 : 0,
                         r->cards * (double)s->batch / r->step_s);
        cli_table_printf(&table, CLI_PLAIN, "%.2fx", r->speedup);
        cli_table_printf(&table, CLI_PLAIN, "%.1f%%", r->efficiency * 100);
        put_time(&table, a->epoch_s[i]);
        algorithms_of(r, text, sizeof text);
        cli_table_add(&table, CLI_PLAIN, text);
    }
    int code = cli_table_render(&table, cli_columns(), cli_colours(STDOUT_FILENO), &out);
    cli_table_done(&table);
    char text[600];
    if (m->steps)
        snprintf(text, sizeof text, "One card's step: medians of %zu steps of %.200s, batch %lld.", m->steps,
                 s->trace, (long long)s->batch);
    else
        snprintf(text, sizeof text, "One card's step: as given, batch %lld.", (long long)s->batch);
    ps_buf_puts(&out, "\n");
    cli_wrap(&out, cli_columns(), text);
    snprintf(text, sizeof text,
             "Links: %s within a node of %lld, %s between nodes%s. Predicted, not measured.", s->in,
             (long long)s->per_node, s->out, s->nics > 1 ? " by each of its network cards" : "");
    cli_wrap(&out, cli_columns(), text);
    cli_wrap(&out, cli_columns(), "BY: ring, tree, or hier.: reduced within the node, then between nodes.");
    int used =
        snprintf(text, sizeof text, "The sample's published result on %d cards: %.2fx, efficiency %.0f %%",
                 PS_PLAN_SAMPLE_CARDS, PS_PLAN_SAMPLE_SPEEDUP, PS_PLAN_SAMPLE_EFFICIENCY * 100);
    if (sixteen)
        snprintf(text + used, sizeof text - (size_t)used, "; predicted here: %.2fx, %.0f %%.",
                 sixteen->speedup, sixteen->efficiency * 100);
    else
        snprintf(text + used, sizeof text - (size_t)used, ".");
    cli_wrap(&out, cli_columns(), text);
    code = code ? ps_fail(err, code, "out of memory") : cli_write(&out, err);
    ps_buf_done(&out);
    return code;
}

static int print_json(const struct plan_settings *s, const struct measured *m, const struct answer *a,
                      struct ps_error *err)
{
    json_t *all = json_array();
    for (size_t i = 0; i < a->count; i++) {
        const struct ps_plan_result *r = &a->results[i];
        json_t *buckets = json_array();
        for (size_t k = 0; k < r->bucket_count; k++) {
            const struct ps_plan_bucket *b = &r->buckets[k];
            json_array_append_new(buckets,
                                  json_pack("{s:f, s:i, s:f, s:f, s:f, s:s}", "bytes", b->bytes, "gradients",
                                            b->gradients, "ready_s", b->ready_s, "start_s", b->start_s,
                                            "end_s", b->end_s, "algorithm",
                                            r->cards > 1 ? ps_plan_algorithm_name(b->algorithm) : "none"));
        }
        json_array_append_new(
            all, json_pack("{s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "cards", r->cards, "nodes",
                           r->nodes, "step_s", r->step_s, "reduce_s", r->reduce_s, "exposed_s", r->exposed_s,
                           "samples_per_s", r->cards * (double)s->batch / r->step_s, "speedup", r->speedup,
                           "efficiency", r->efficiency, "epoch_s", a->epoch_s[i], "buckets", buckets));
    }
    json_t *step =
        json_pack("{s:f, s:f, s:f, s:f, s:i, s:i}", "input_s", m->step.input_s, "forward_s",
                  m->step.forward_s, "backward_s", m->step.backward_s, "update_s", m->step.update_s,
                  "gradients", (int)m->step.gradient_count, "steps", (int)m->steps);
    return cli_write_json(json_pack("{s:o, s:s, s:s, s:I, s:o, s:{s:i, s:f, s:f}}", "step", step, "intra",
                                    s->in, "inter", s->out, "batch", (json_int_t)s->batch, "predictions", all,
                                    "sample", "cards", PS_PLAN_SAMPLE_CARDS, "speedup",
                                    PS_PLAN_SAMPLE_SPEEDUP, "efficiency", PS_PLAN_SAMPLE_EFFICIENCY),
                          err);
}

static int read_step(const struct plan_settings *s, struct measured *m, struct ps_error *err)
{
    bool flags = s->buckets || s->forward > 0 || s->backward > 0;
    if (s->trace && flags)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--trace or --forward, --backward and --buckets, not both");
    if (!s->trace && !(s->buckets && s->backward > 0))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "a measured step is missing: --trace FILE, or --forward, --backward and --buckets");
    m->step = (struct ps_plan_step){
        .input_s = s->input, .forward_s = s->forward, .backward_s = s->backward, .update_s = s->update};
    int code = s->trace ? read_trace(s->trace, m, err) : read_buckets(s->buckets, m, err);
    if (!code && s->eval > 0)
        m->eval_s = s->eval;
    if (!code && m->several)
        fprintf(
            stderr,
            "paramsync plan: the trace is of one rank among others: its step holds their copies and waits; "
            "a single process's gives better figures\n");
    return code;
}

static int plan_main(const struct plan_settings *s, struct ps_error *err)
{
    struct measured m = {0};
    struct answer *a = calloc(1, sizeof *a);
    int counts[COUNTS_MAX];
    struct ps_plan_setup setup = {.cards_per_node = (int)s->per_node,
                                  .overlap = s->overlap,
                                  .first_bucket = s->first_mib * 1048576,
                                  .bucket = s->bucket_mib * 1048576,
                                  .copy_bytes_per_s = s->copy * 1e9};
    int code = a ? read_step(s, &m, err) : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        code = parse_link("intra", s->in, &setup.in, err);
    if (!code)
        code = parse_link("inter", s->out, &setup.out, err);
    if (!code)
        code = parse_counts(s->cards, counts, &a->count, err);
    setup.out.bytes_per_s *= (double)s->nics;
    for (int i = 0; i < 4; i++)
        if (!code && strcmp(s->algorithm, ps_plan_algorithm_name(i)) == 0)
            setup.algorithm = (enum ps_plan_algorithm)i;
    if (m.from_buckets) /* they are what they are */
        setup.first_bucket = setup.bucket = 1e-9;
    for (size_t i = 0; !code && i < a->count; i++) {
        setup.cards = counts[i];
        code = ps_plan(&m.step, &setup, &a->results[i], err);
        if (!code)
            a->epoch_s[i] = epoch_of(s, &m, &a->results[i]);
    }
    if (!code)
        code = s->common.json ? print_json(s, &m, a, err) : print(s, &m, a, err);
    free(m.gradients);
    free(a);
    return code;
}

int cli_plan(int argc, char **argv)
{
    struct plan_settings settings = {0};
    struct ps_error err = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 0, 0, &words, &err);
    if (code > 0)
        return 0;
    if (!code)
        code = plan_main(&settings, &err);
    return code ? cli_complain("plan", &err) : 0;
}
