/* SPDX-License-Identifier: Apache-2.0 */
#include "services/compare/compare.h"

#include "services/base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *ps_compare_state_name(int state)
{
    static const char *const names[] = {"unknown", "created", "running", "finished",
                                        "failed",  "killed",  "lost"};
    return state >= 0 && state < (int)(sizeof names / sizeof *names) ? names[state] : names[0];
}

const struct ps_compare_run *ps_compare_builtin(const char *name)
{
    static const struct ps_compare_run samples[] = {
        {.id = "sample-1",
         .name = "sample-1",
         .state = PS_COMPARE_FINISHED,
         .world_size = 1,
         .batch_per_rank = 128,
         .epochs_planned = 100,
         .model = "resnet18",
         .dataset = "CIFAR-10",
         .threshold_only = true,
         .published_accuracy = 0.80,
         .published_total_s = 3600,
         .published_epochs = 100},
        {.id = "sample-16",
         .name = "sample-16",
         .state = PS_COMPARE_FINISHED,
         .world_size = 16,
         .batch_per_rank = 128,
         .epochs_planned = 100,
         .model = "resnet18",
         .dataset = "CIFAR-10",
         .threshold_only = true,
         .published_accuracy = 0.80,
         .published_total_s = 1200,
         .published_epochs = 100},
    };
    for (size_t i = 0; name && i < sizeof samples / sizeof *samples; i++)
        if (strcmp(samples[i].name, name) == 0)
            return &samples[i];
    return NULL;
}

static int by_epoch_then_attempt(const void *a, const void *b)
{
    const struct ps_compare_epoch *x = a, *y = b;
    if (x->epoch != y->epoch)
        return x->epoch < y->epoch ? -1 : 1;
    return (x->attempt > y->attempt) - (x->attempt < y->attempt);
}

size_t ps_compare_sort_epochs(struct ps_compare_epoch *epochs, size_t count)
{
    size_t n = 0;
    if (!count)
        return 0;
    qsort(epochs, count, sizeof *epochs, by_epoch_then_attempt);
    for (size_t i = 0; i < count; i++) {
        if (n && epochs[n - 1].epoch == epochs[i].epoch)
            n--;
        epochs[n++] = epochs[i];
    }
    return n;
}

static const char *text(const char *s)
{
    return s ? s : "";
}

static const char *name_of(const struct ps_compare_run *run)
{
    return run->name && *run->name ? run->name : text(run->id);
}

static bool same_key(const char *a, const char *b)
{
    for (;; a++, b++) {
        char x = *a == '_' ? '-' : *a, y = *b == '_' ? '-' : *b;
        if (x != y)
            return false;
        if (!x)
            return true;
    }
}

static const char *config_of(const struct ps_compare_run *run, const char *key)
{
    for (size_t i = 0; i < run->config_count; i++)
        if (run->config[i].key && same_key(run->config[i].key, key))
            return text(run->config[i].value);
    return "";
}

int ps_compare_allowed(const struct ps_compare_run *run, const struct ps_compare_run *reference,
                       char *ret_reason, size_t size)
{
    const struct ps_compare_run *published = run->threshold_only         ? run
                                             : reference->threshold_only ? reference
                                                                         : NULL;
    const char *const same_settings[] = {"width", "resolution", "custom-data"};
    if (published) {
        snprintf(ret_reason, size, "%.60s is a published end mark without a curve", name_of(published));
        return 0;
    }
    if (!*text(run->dataset_hash) || !*text(reference->dataset_hash)) {
        snprintf(ret_reason, size, "%.60s has no data hash recorded",
                 name_of(*text(run->dataset_hash) ? reference : run));
        return 0;
    }
    if (strcmp(run->dataset_hash, reference->dataset_hash) != 0) {
        snprintf(ret_reason, size, "other data: hash %.12s, %.60s has %.12s", run->dataset_hash,
                 name_of(reference), reference->dataset_hash);
        return 0;
    }
    if (!*text(run->model) || !*text(reference->model)) {
        snprintf(ret_reason, size, "%.60s has no model recorded",
                 name_of(*text(run->model) ? reference : run));
        return 0;
    }
    if (strcmp(run->model, reference->model) != 0) {
        snprintf(ret_reason, size, "other model: %.40s, %.60s has %.40s", run->model, name_of(reference),
                 reference->model);
        return 0;
    }
    for (size_t i = 0; i < sizeof same_settings / sizeof *same_settings; i++) {
        const char *ours = config_of(run, same_settings[i]), *theirs = config_of(reference, same_settings[i]);
        if (strcmp(ours, theirs) != 0) {
            snprintf(ret_reason, size, "other %s: %.40s, %.60s has %.40s", same_settings[i],
                     *ours ? ours : "none", name_of(reference), *theirs ? theirs : "none");
            return 0;
        }
    }
    return 1;
}

static void note_non_finite(struct ps_compare_row *row, const char *what, uint32_t epoch, double value)
{
    if (row->non_finite)
        return;
    row->non_finite = true;
    snprintf(row->non_finite_what, sizeof row->non_finite_what, "%s of epoch %u is %g", what, epoch, value);
}

static void summarise_epochs(const struct ps_compare_run *run, double target, struct ps_compare_row *row)
{
    for (size_t i = 0; i < run->epoch_count; i++) {
        const struct ps_compare_epoch *e = &run->epochs[i];
        row->epochs = e->epoch;
        if (!isfinite(e->train_loss))
            note_non_finite(row, "train loss", e->epoch, e->train_loss);
        if (e->no_eval)
            continue;
        if (!isfinite(e->val_loss))
            note_non_finite(row, "val loss", e->epoch, e->val_loss);
        if (!(e->accuracy >= 0 && e->accuracy <= 1)) {
            note_non_finite(row, "accuracy", e->epoch, e->accuracy);
            row->final_accuracy = NAN;
            continue;
        }
        row->evaluated++;
        row->final_accuracy = e->accuracy;
        if (!row->has_accuracy || e->accuracy > row->best_accuracy) {
            row->has_accuracy = true;
            row->best_accuracy = e->accuracy;
            row->best_epoch = e->epoch;
        }
        if (row->epochs_to_target)
            continue;
        if (e->accuracy >= target) {
            row->epochs_to_target = e->epoch;
            row->accuracy_at_target = e->accuracy;
            row->has_time_to_target = isfinite(e->elapsed_s) && e->elapsed_s > 0;
            row->time_to_target_s = row->has_time_to_target ? e->elapsed_s : 0;
        } else {
            row->has_before = true;
            row->before_s = e->elapsed_s;
            row->before_accuracy = e->accuracy;
            row->before_epoch = e->epoch;
        }
    }
}

static int throughput(const struct ps_compare_run *run, struct ps_compare_row *row, struct ps_error *err)
{
    if (!run->epoch_count)
        return 0;
    double *speeds = malloc(run->epoch_count * sizeof *speeds);
    size_t n = 0;
    if (!speeds)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    /* The first epoch holds warm-up: caches, lazily made primitives, connections. */
    for (size_t i = run->epoch_count >= 3 ? 1 : 0; i < run->epoch_count; i++)
        if (isfinite(run->epochs[i].samples_per_s) && run->epochs[i].samples_per_s > 0)
            speeds[n++] = run->epochs[i].samples_per_s;
    row->has_throughput = n > 0;
    row->samples_per_s = n ? ps_compare_median(speeds, n) : 0;
    free(speeds);
    return 0;
}

static int summarise(const struct ps_compare_run *run, double target, struct ps_compare_row *row,
                     struct ps_error *err)
{
    memset(row, 0, sizeof *row);
    if (run->threshold_only) {
        row->threshold_only = true;
        row->epochs = run->published_epochs;
        row->has_accuracy = true;
        row->best_accuracy = row->final_accuracy = run->published_accuracy;
        row->has_total = run->published_total_s > 0;
        row->total_s = run->published_total_s;
        return 0;
    }
    row->best_accuracy = row->final_accuracy = NAN;
    summarise_epochs(run, target, row);
    double last = run->epoch_count ? run->epochs[run->epoch_count - 1].elapsed_s : 0;
    double total = isfinite(run->total_s) && run->total_s > last ? run->total_s : last;
    row->has_total = isfinite(total) && total > 0;
    row->total_s = row->has_total ? total : 0;
    return throughput(run, row, err);
}

/* Appends "key ours / theirs" to row->differs as long as it fits. */
static void note_difference(struct ps_compare_row *row, const char *key, const char *ours, const char *theirs)
{
    size_t n = strlen(row->differs);
    int written = snprintf(row->differs + n, sizeof row->differs - n, "%s%s %.30s / %.30s", n ? ", " : "",
                           key, *ours ? ours : "-", *theirs ? theirs : "-");
    if (written < 0 || (size_t)written >= sizeof row->differs - n)
        row->differs[n] = '\0';
}

static void differences(const struct ps_compare_run *run, const struct ps_compare_run *reference,
                        struct ps_compare_row *row)
{
    static const char *const keys[] = {
        "lr",      "effective-lr", "lr-scale",        "optimizer",    "schedule",
        "recipe",  "precision",    "augment",         "normalize",    "epochs",
        "sync-bn", "accumulate",   "label-smoothing", "weight-decay", "mode"};
    if (run->batch_per_rank != reference->batch_per_rank) {
        char ours[16], theirs[16];
        snprintf(ours, sizeof ours, "%u", run->batch_per_rank);
        snprintf(theirs, sizeof theirs, "%u", reference->batch_per_rank);
        note_difference(row, "batch", ours, theirs);
    }
    if (strcmp(text(run->device), text(reference->device)) != 0)
        note_difference(row, "device", text(run->device), text(reference->device));
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char *ours = config_of(run, keys[i]), *theirs = config_of(reference, keys[i]);
        if (strcmp(ours, theirs) != 0)
            note_difference(row, keys[i], ours, theirs);
    }
}

int ps_compare(const struct ps_compare_run *runs, size_t count, size_t reference, double target,
               struct ps_compare_row *rows, struct ps_error *err)
{
    if (!count || reference >= count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "no run to compare with");
    if (!(target > 0 && target <= 1))
        return ps_fail(err, PS_INVALID_ARGUMENT, "target %g: must be above 0 and at most 1 (0.8 is 80 %%)",
                       target);
    for (size_t i = 0; i < count; i++) {
        int code = summarise(&runs[i], target, &rows[i], err);
        if (code)
            return code;
    }
    const struct ps_compare_run *base = &runs[reference];
    const struct ps_compare_row *base_row = &rows[reference];
    for (size_t i = 0; i < count; i++) {
        const struct ps_compare_run *run = &runs[i];
        struct ps_compare_row *row = &rows[i];
        if (i == reference && !run->threshold_only) {
            row->has_speedup = row->has_throughput;
            row->speedup = row->efficiency = row->has_throughput ? 1 : 0;
            row->has_time_speedup = row->has_time_to_target;
            row->time_speedup = row->has_time_to_target ? 1 : 0;
            continue;
        }
        if (!ps_compare_allowed(run, base, row->refusal, sizeof row->refusal))
            continue;
        differences(run, base, row);
        if (!row->has_throughput || !base_row->has_throughput) {
            snprintf(row->refusal, sizeof row->refusal, "%.60s has no throughput recorded yet",
                     name_of(row->has_throughput ? base : run));
        } else if (!run->world_size || !base->world_size) {
            snprintf(row->refusal, sizeof row->refusal, "%.60s has no world size recorded",
                     name_of(run->world_size ? base : run));
        } else {
            row->has_speedup = true;
            row->speedup = row->samples_per_s / base_row->samples_per_s;
            row->efficiency = row->speedup * base->world_size / run->world_size;
        }
        if (row->has_time_to_target && base_row->has_time_to_target) {
            row->has_time_speedup = true;
            row->time_speedup = base_row->time_to_target_s / row->time_to_target_s;
        } else {
            const struct ps_compare_run *without = row->has_time_to_target ? base : run;
            char share[32];
            ps_compare_format_share(target, NAN, share, sizeof share);
            snprintf(row->time_refusal, sizeof row->time_refusal, "%.60s has not reached %s",
                     name_of(without), share);
        }
    }
    return 0;
}

void ps_compare_format_share(double value, double limit, char *out, size_t size)
{
    if (!isfinite(value)) {
        snprintf(out, size, "%s", isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
        return;
    }
    for (int digits = 2; digits <= 10; digits++) {
        char number[48];
        double shown;
        snprintf(number, sizeof number, "%.*f", digits, value * 100);
        snprintf(out, size, "%s %%", number);
        if (isnan(limit) || ps_parse_double(number, &shown) || (shown / 100 >= limit) == (value >= limit))
            return;
    }
}

void ps_compare_format_time(double seconds, double limit, char *out, size_t size)
{
    if (!isfinite(seconds) || seconds < 0) {
        snprintf(out, size, "%s", seconds > 0 ? "never" : "unknown");
        return;
    }
    for (int digits = 1; digits <= 6; digits++) {
        double scale = pow(10, digits);
        double shown = round(seconds * scale) / scale;
        double minutes = floor(shown / 60), hours = floor(minutes / 60);
        double rest = fmax(shown - minutes * 60, 0);
        if (shown < 60)
            snprintf(out, size, "%.*f s", digits, shown);
        else if (seconds == minutes * 60 && minutes < 60) /* whole minutes, as limits are given */
            snprintf(out, size, "%.0f min", minutes);
        else if (seconds == minutes * 60)
            snprintf(out, size, "%.0f h %02.0f min", hours, minutes - hours * 60);
        else if (minutes < 60)
            snprintf(out, size, "%.0f min %0*.*f s", minutes, digits + 3, digits, rest);
        else
            snprintf(out, size, "%.0f h %02.0f min %0*.*f s", hours, minutes - hours * 60, digits + 3, digits,
                     rest);
        if (isnan(limit) || (shown <= limit) == (seconds <= limit))
            return;
    }
}

int ps_compare_parse_share(const char *number, double *ret_share)
{
    char digits[64];
    size_t n = strlen(number);
    bool percent = n && number[n - 1] == '%';
    double value;
    if (percent)
        n--;
    if (percent && n && number[n - 1] == ' ')
        n--;
    if (!n || n >= sizeof digits)
        return -1;
    memcpy(digits, number, n);
    digits[n] = '\0';
    if (ps_parse_double(digits, &value))
        return -1;
    if (percent)
        value /= 100;
    if (!(value >= 0 && value <= 1))
        return -1;
    *ret_share = value;
    return 0;
}
