/* SPDX-License-Identifier: Apache-2.0
 * The training loop of one rank: epochs of steps, evaluation, checkpoints, the sample's printed lines. */
#ifndef PARAMSYNC_TRAINER_LOOP_H
#define PARAMSYNC_TRAINER_LOOP_H

#include "services/base/error.h"
#include "trainer/backend/backend.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/data/dataset.h"
#include "trainer/dist/comm.h"
#include "trainer/dist/reducer.h"
#include "trainer/options.h"
#include "trainer/report.h"
#include "trainer/runlog.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* What a backend is made with so that its BatchNorm meets the other ranks inside of a step: the context of
 * ps_loop_gather. The loop sets it. */
struct ps_loop_ranks {
    struct ps_reducer *reducer;
};
/* ps_bn_sync's gather. */
int ps_loop_gather(void *ranks, const void *mine, size_t bytes, void *all, struct ps_error *err);

/* Everything here outlives the loop and belongs to the caller. */
struct ps_loop_config {
    const struct ps_train_options *options;
    const struct ps_dataset *data;
    const struct ps_model *model;
    const struct ps_backend_ops *ops;
    struct ps_backend *backend; /* weights undefined; made for ps_loop_eval_batch images of evaluation */
    struct ps_comm *comm;
    struct ps_report *report;
    struct ps_runlog *runlog; /* rank 0, or NULL: none */
    /* The sidecar had not answered rank 0: the other ranks learn the run at the end of the epoch in which it
     * has. The same on all ranks. */
    bool run_unknown;
    const char *training;              /* rank 0: the name kept in the states; NULL: none */
    struct ps_checkpoint *resume;      /* rank 0, or NULL: start anew */
    double lr;                         /* effective: at the schedule's peak */
    double warmup_epochs, warmup_from; /* from warmup_from * lr to lr, on top of the schedule */
    struct ps_trace *trace;            /* NULL: none */
    struct ps_loop_ranks *ranks;       /* NULL: statistics of BatchNorm are not shared */
    int threads;
    double start_s; /* monotonic: this attempt's elapsed time counts from here; 0: from the call of run */
    /* Not 0: a signal has asked to stop. Read between steps. */
    const volatile sig_atomic_t *stop;
};

struct ps_loop_result {
    int epochs_done; /* counted from the training's beginning, resumed ones included */
    int64_t steps;
    double accuracy, best_accuracy; /* of the last and best evaluation; negative: none */
    int best_epoch;
    int64_t skipped; /* steps that were left out for a loss or gradient that was no number */
    double elapsed_s;
};

/* Images of one evaluation batch: the same on every rank and for every batch. */
int ps_loop_eval_batch(const struct ps_train_options *options, const struct ps_dataset *data, int world_size);
/* Batches of one rank's epoch; 0: nothing would be trained. */
size_t ps_loop_batches(const struct ps_train_options *options, const struct ps_dataset *data, int world_size);

/* Whether the checkpoint's optimizer state is of the options' optimizer. */
int ps_loop_check_resume(const struct ps_train_options *options, const struct ps_checkpoint *checkpoint,
                         struct ps_error *err);

/* Trains to the end. PS_CANCELLED after a signal; the message of a failure names step and rank where they
 * matter. result is filled in any case. Collective: every rank calls it. */
int ps_loop_run(const struct ps_loop_config *config, struct ps_loop_result *result, struct ps_error *err);

/* Softmax cross-entropy of rows [count, classes], summed in double, and counts of label and prediction, added
 * to confusion [classes, classes]. For evaluation. Of equal logits the first is the prediction. */
void ps_loop_score(const float *logits, const int32_t *labels, int count, int classes, double *loss_sum,
                   double *confusion);

#endif
