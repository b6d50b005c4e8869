/* SPDX-License-Identifier: Apache-2.0
 * The record of a training in its own output folder, so that it can be judged without a sidecar: run.jsonl,
 * one JSON object (RFC 8259) per line, appended by rank 0 and durable line by line.
 *
 *     {"record":"start","attempt":1,"training":"9f..","started_at":"2026-..Z","name":"resnet18","world_size":2,
 *      "batch_per_rank":128,"epochs_planned":100,"model":..,"dataset":..,"dataset_hash":..,"device":..,
 *      "commit":..,"config":{"lr":"0.01",..}}
 *     {"record":"epoch","attempt":1,"epoch":1,"step":390,"train_loss":..,"lr":..,"samples_per_s":..,
 *      "elapsed_s":..,"train_s":..,"eval_s":..,"evaluated":true,"val_loss":..,"accuracy":..,"correct":..,
 *      "counted":..}
 *     {"record":"end","attempt":1,"state":"finished","reason":"","elapsed_s":..}
 *
 * NaN and infinities are the strings "NaN", "Infinity" and "-Infinity". Times are seconds since the attempt
 * began. A training that is gone on from adds its next attempt; another training in the same folder replaces
 * the file. As long as it trains, the writer holds a lock (flock) on the file: no end and no lock means that
 * it died.
 */
#ifndef PARAMSYNC_TRAINER_RUNLOG_H
#define PARAMSYNC_TRAINER_RUNLOG_H

#include "trainer/report.h"

#define PS_RUNLOG_FILE "run.jsonl"

struct ps_runlog;

/* config: as for the reporter (run_name, world_size, ... config; the connection does not matter). training:
 * the name of the training, the same for all its attempts. start_s: monotonic, when this attempt began. */
int ps_runlog_open(const char *dir, const char *training, const struct ps_report_config *config,
                   double start_s, struct ps_runlog **ret, struct ps_error *err);
/* NULL does nothing. Failing leaves the file as it was before the line. One thread at a time. */
int ps_runlog_epoch(struct ps_runlog *log, const struct ps_report_epoch *epoch, struct ps_error *err);
/* state: "finished", "failed" or "killed". Then frees. Takes NULL. */
int ps_runlog_close(struct ps_runlog *log, const char *state, const char *reason, struct ps_error *err);

#endif
