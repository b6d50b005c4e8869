/* SPDX-License-Identifier: Apache-2.0
 * The trainer's view of the sidecar. Every call but open returns at once: records go into a bounded ring that
 * the reporter's thread empties; when the sidecar is away they wait, and over the bound they are dropped and
 * counted. report_sidecar.c speaks through libparamsync; report_null.c is what a trainer-only build has.
 */
#ifndef PARAMSYNC_TRAINER_REPORT_H
#define PARAMSYNC_TRAINER_REPORT_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_report;

struct ps_report_pair {
    const char *key, *value;
};

struct ps_report_config {
    const char *sidecar; /* HOST:PORT; NULL: no reporting */
    const char *token_file, *tls_ca, *tls_cert, *tls_key;
    int rank, world_size;
    /* Rank 0 creates the run from these; other ranks join by run_id and leave them out. */
    const char *run_name;
    bool resume;
    const char *model, *dataset, *dataset_hash, *device, *commit;
    int epochs, batch_per_rank;
    const struct ps_report_pair *config;
    size_t config_count;
    const char
        *run_id; /* other ranks; "": not known yet (see ps_report_join), then all here outlives the report */
    uint32_t attempt; /* other ranks */
    const char
        *spool_dir; /* where records wait on the disk while the sidecar is away; NULL: in memory only */
};

struct ps_report_epoch {
    int epoch;
    int64_t step;
    double train_loss, val_loss, accuracy, lr, samples_per_s, elapsed_s, train_s, eval_s;
    int64_t correct, counted;
    bool no_eval;
    const double *confusion; /* [classes, classes] counts by label and prediction; NULL: none */
    int classes;
};

/* Waits at most a few seconds for the sidecar. With nobody there it still succeeds: one line on stderr names
 * the address, the run is created as soon as the sidecar answers. Fails on bad arguments only (wrong token,
 * bad name). */
int ps_report_open(const struct ps_report_config *config, struct ps_report **ret, struct ps_error *err);
/* The run's id ("" while the sidecar has not answered) and attempt, to be shared with the other ranks. */
void ps_report_run(struct ps_report *report, char ret_id[27], uint32_t *ret_attempt, char *ret_name,
                   size_t name_size);
/* The run of a rank that was opened with run_id "": from now on its points are recorded. Does not wait for
 * the sidecar. Nothing happens if the report has its run, or no sidecar. */
int ps_report_join(struct ps_report *report, const char *run_id, uint32_t attempt, struct ps_error *err);
void ps_report_epoch(struct ps_report *report, const struct ps_report_epoch *epoch);
void ps_report_point(struct ps_report *report, const char *name, int64_t step, double value,
                     double elapsed_s);
/* The file at path is whole and stays; handed over off the training loop, retried after an outage. */
void ps_report_checkpoint(struct ps_report *report, const char *path, const char *format, int epoch,
                          int64_t step, double accuracy, bool has_accuracy);
/* For a thread that is about to _exit while the report is in other hands: tells the sidecar over a connection
 * of its own that the run has failed, waiting at most timeout_s. Nothing is said if that does not succeed:
 * the run is then found lost. */
void ps_report_failed(const struct ps_report_config *config, const char *run_id, uint32_t attempt,
                      const char *reason, double timeout_s);
/* Fetches the newest checkpoint of config's run from which training can go on (its .state, and the weights
 * that go with it) into dir, under the names that the trainer gave them; each file is whole or not there.
 * *ret_epoch: which. PS_NOT_FOUND: no such run, or nothing to go on from; other failures say why the sidecar
 * could not be asked. Blocks. */
int ps_report_fetch(const struct ps_report_config *config, const char *dir, int *ret_epoch,
                    struct ps_error *err);
/* state: "finished", "failed" or "killed". Waits at most timeout_s for what is still to be sent; says on
 * stderr what was not delivered. Then frees. Takes NULL. */
void ps_report_close(struct ps_report *report, const char *state, const char *reason, double timeout_s);

#endif
