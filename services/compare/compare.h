/* SPDX-License-Identifier: Apache-2.0
 * What two training runs say about each other: pure arithmetic on plain structs, no I/O, no clock, no
 * logging. The sidecar (Gate service, HTTP) and the command line both use it, so that they cannot disagree.
 *
 * Definitions, all on recorded points, nothing interpolated:
 *  - time to target: elapsed time from the run's start to the END of the first evaluation whose accuracy is
 * at or above the target (MLPerf's "time to quality", https://github.com/mlcommons/training_policies); the
 * evaluation before it is given too, since the true crossing lies between the two.
 *  - throughput: median of the epochs' samples/s; the first epoch is left out when there are at least three.
 *  - speed-up: throughput / throughput of the reference; efficiency: speed-up * reference world size / world
 * size, which is T1 / (N * TN) when the reference is one process.
 *  - time speed-up: time to target of the reference / ours.
 *
 * Published figures (sample-1, sample-16) are thresholds and one end mark: they have no curve, so no time to
 * target, throughput, speed-up or efficiency is ever derived from them.
 *
 * Accuracies are shares (0..1), times are seconds. Thread-safe: no state.
 */
#ifndef PARAMSYNC_COMPARE_COMPARE_H
#define PARAMSYNC_COMPARE_COMPARE_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The values are those of paramsync.v1.RunState. */
enum ps_compare_state {
    PS_COMPARE_UNKNOWN = 0,
    PS_COMPARE_CREATED = 1,
    PS_COMPARE_RUNNING = 2,
    PS_COMPARE_FINISHED = 3,
    PS_COMPARE_FAILED = 4,
    PS_COMPARE_KILLED = 5,
    PS_COMPARE_LOST = 6,
};
const char *ps_compare_state_name(int state); /* "finished"; static */

struct ps_compare_epoch {
    uint32_t attempt; /* 1-based */
    uint32_t epoch;   /* 1-based */
    double elapsed_s; /* from the run's start to the end of this epoch's evaluation, attempts added up */
    double train_loss, val_loss, accuracy, samples_per_s;
    double train_s, eval_s;
    bool no_eval; /* not evaluated: val_loss and accuracy mean nothing */
};

struct ps_compare_pair {
    const char *key, *value;
};

/* One run, or a published result (threshold_only). Everything is borrowed; NULL strings mean "not recorded".
 */
struct ps_compare_run {
    const char *id, *name;
    int state; /* enum ps_compare_state */
    uint32_t world_size, batch_per_rank, epochs_planned;
    const char *model, *dataset, *dataset_hash, *device, *commit;
    const struct ps_compare_pair *config; /* resolved options of the trainer; _ and - in keys are the same */
    size_t config_count;
    const struct ps_compare_epoch *epochs; /* strictly ascending by epoch: see ps_compare_sort_epochs */
    size_t epoch_count;
    double total_s;     /* whole run; 0: that of the last epoch */
    const char *reason; /* why it ended */

    /* As a baseline: it was pinned, so what is judged must have its provenance, less the fields (enum
     * ps_gate_field, or-ed) that the pin leaves free. Two runs of one's own need no pin. */
    bool pinned;
    unsigned pin_free;

    bool threshold_only;
    double published_accuracy; /* "at least" */
    double published_total_s;  /* of published_epochs epochs */
    uint32_t published_epochs;
};

/* Orders by epoch and keeps the newest attempt of each. Returns how many are left. */
size_t ps_compare_sort_epochs(struct ps_compare_epoch *epochs, size_t count);

/* "sample-1" or "sample-16": static, or NULL. https://support.huaweicloud.com (ModelArts, distributed
 * training of ResNet-18 on CIFAR-10): 100 epochs, one card 60 min, two nodes of eight cards 20 min, accuracy
 * 80+ % in both. */
const struct ps_compare_run *ps_compare_builtin(const char *name);

struct ps_compare_row {
    uint32_t epochs;    /* newest epoch; 0: none */
    uint32_t evaluated; /* epochs that were evaluated with a finite accuracy */
    bool threshold_only;

    bool has_accuracy;                    /* some evaluated epoch has a finite accuracy; else both are NaN */
    double best_accuracy, final_accuracy; /* final: of the last evaluated epoch, NaN if that was NaN; for a
                                             published result both are its lower bound */
    uint32_t best_epoch;                  /* ties: the earlier */
    bool non_finite;                      /* a NaN or infinity, or an accuracy outside 0..1, in an epoch */
    char non_finite_what[64];             /* "val loss of epoch 3 is nan" */

    bool has_total;
    double total_s;

    bool has_time_to_target;
    double time_to_target_s;
    uint32_t epochs_to_target; /* the epoch that reached it */
    double accuracy_at_target;
    bool has_before; /* an evaluation before it: the bracket */
    double before_s, before_accuracy;
    uint32_t before_epoch;

    bool has_throughput;
    double samples_per_s;

    bool has_speedup;
    double speedup, efficiency;
    bool has_time_speedup;
    double time_speedup;

    char refusal[256];      /* why it is not compared with the reference; empty: it is */
    char time_refusal[256]; /* compared, but not by time to target; empty: it is */
    char differs[256]; /* "lr 0.01 / 0.02, batch 128 / 64": settings unlike the reference's (theirs first);
                          the comparison stands, the reader should know */
};

/* Fills one row per run. reference is an index into runs. target is in (0, 1]. PS_INVALID_ARGUMENT if not. */
int ps_compare(const struct ps_compare_run *runs, size_t count, size_t reference, double target,
               struct ps_compare_row *rows, struct ps_error *err);

/* Whether the figures of two runs may be set against each other: same data (hash), model, width, resolution,
 * all of them recorded. 1, or 0 and the reason. */
int ps_compare_allowed(const struct ps_compare_run *run, const struct ps_compare_run *reference,
                       char *ret_reason, size_t size);

/* ---- Gate ---- */

/* The values are those of paramsync.v1.EvaluateResponse.Verdict. */
enum ps_gate_verdict { PS_GATE_UNDECIDED = 0, PS_GATE_PASS = 1, PS_GATE_FAIL = 2 };
const char *ps_gate_verdict_name(int verdict); /* "pass", "fail", "cannot decide" */
int ps_gate_verdict_exit(int verdict);         /* 0, 1, 2 */

/* What a pinned baseline holds a run to. The data's hash can't be left free: other data are no baseline. */
enum ps_gate_field {
    PS_GATE_COMMIT = 1,
    PS_GATE_DATA_HASH = 2,
    PS_GATE_WORLD_SIZE = 4,
    PS_GATE_DEVICE = 8,
};
/* "commit,device" into the or-ed fields. Returns 0 or PS_INVALID_ARGUMENT. */
int ps_gate_parse_fields(const char *text, unsigned *ret_fields, struct ps_error *err);
void ps_gate_format_fields(unsigned fields, char *out, size_t size); /* "commit, device"; "" for none */

struct ps_gate_limits {
    double min_accuracy;     /* of the best evaluation; 0: the published baseline's, an error without one */
    double max_time_s;       /* time to min_accuracy; 0: no bound */
    double max_total_time_s; /* whole run; 0: that of the published baseline, if any */
    /* Against a run of one's own as the baseline only; negative: the defaults below. */
    double time_tolerance;     /* time to min_accuracy at most (1 + this) times the baseline's */
    double accuracy_tolerance; /* best accuracy at least the baseline's less this */
    size_t min_runs;           /* fewer than this many runs cannot be decided; 0: any number */
    /* Fails a run that is still training as soon as no end of it could pass (for those who wait): its epochs
     * to come are taken for perfect, its times for what they are now. */
    bool early;
};
#define PS_GATE_TIME_TOLERANCE 0.10
#define PS_GATE_ACCURACY_TOLERANCE 0.01
#define PS_GATE_LIMITS_INIT                                                                                  \
    {                                                                                                        \
        .time_tolerance = -1, .accuracy_tolerance = -1                                                       \
    }

struct ps_gate_check {
    char what[96];
    char actual[160];
    char wanted[160];
    char run[208]; /* the run it is about; "median of n" for checks over several */
    int verdict;
};

struct ps_gate_spread { /* over runs; infinite where a run never reached the target */
    bool known;
    double median, low, high;
};

struct ps_gate_result {
    int verdict;
    char reason[512]; /* one line: the first check that decided */
    struct ps_gate_check *checks;
    size_t check_count;
    size_t n;            /* runs */
    double min_accuracy; /* as applied */
    struct ps_gate_spread accuracy, time, total;
};

/* Any failed check: FAIL. Else any that cannot be decided: UNDECIDED. Else PASS.
 *  - NaN or infinite metrics fail, whatever the run's state.
 *  - A run that has not finished (running, failed, killed, lost) or was never evaluated cannot be decided
 * (running: unless limits->early and it can't pass any more).
 *  - Several runs must be repetitions of one job (comparable, same world size); their medians are judged. A
 * run that never reached the target counts as infinitely slow.
 *  - A baseline run must be finished and comparable, else its checks cannot be decided; nor can they where a
 * pinned one has another commit, data hash, world size or device, or one of these was not recorded. A
 * published baseline holds for ResNet-18 on CIFAR-10 only and gives thresholds, nothing else.
 * PS_INVALID_ARGUMENT: no runs, a limit out of range, no accuracy to ask for, a published result among the
 * runs. */
int ps_gate_evaluate(const struct ps_gate_limits *limits, const struct ps_compare_run *runs, size_t count,
                     const struct ps_compare_run *baseline, struct ps_gate_result **ret_result,
                     struct ps_error *err);
struct ps_gate_result *ps_gate_result_free(struct ps_gate_result *result); /* takes NULL, returns NULL */

/* ---- Text and series helpers ---- */

/* "80.12 %"; with a limit that the rounded text would seem to meet though the value does not (or the other
 * way round), more digits: 0.79996 against 0.8 is "79.996 %". limit NaN: none. "nan" for NaN. */
void ps_compare_format_share(double value, double limit, char *out, size_t size);
/* "20 min 00.1 s", "12.3 s", "1 h 02 min 03.4 s", "20 min" when it is exactly that; the same rule for digits.
 * "never" for infinity. */
void ps_compare_format_time(double seconds, double limit, char *out, size_t size);
/* "0.8", "80%" or "80 %" into 0.8: in [0, 1]. Returns 0 or -1. A bare number above 1 is refused. */
int ps_compare_parse_share(const char *text, double *ret_share);

/* Median; sorts values. Infinities are values. NaN if count is 0. */
double ps_compare_median(double *values, size_t count);

/* Exponential moving average over all points with debias (a constant series stays constant; later points
 * never change earlier results). weight 0..1 (0: none). Non-finite values pass through and leave the average
 * alone. */
void ps_compare_smooth(const double *values, size_t count, double weight, double *ret_smoothed);

/* Picks at most max_points (at least 4) indices, ascending: always the first, the last, the global minimum
 * and maximum, and per bucket its minimum, its maximum and a non-finite value if it has one. The same input
 * gives the same answer. indices has min(count, max(max_points, 4)) places. Returns how many were written. */
size_t ps_compare_downsample(const double *values, size_t count, size_t max_points, size_t *ret_indices);

#endif
