/* SPDX-License-Identifier: Apache-2.0
 * What `paramsync import` reads: a whole file, checked before anything is recorded. */
#ifndef PARAMSYNC_CLI_IMPORT_FILE_H
#define PARAMSYNC_CLI_IMPORT_FILE_H

#include "services/cli/cli.h"

struct cli_import_point {
    char name[129];
    uint64_t step;
    double value, elapsed_s;
};
struct cli_import {
    struct paramsync_epoch *epochs; /* ascending by epoch, each once */
    size_t epoch_count;
    struct cli_import_point *points;
    size_t point_count;
    double last_s; /* the highest elapsed time there is */
};
/* Which columns, fields or tags are an epoch's figures; each has a default. */
struct cli_import_names {
    const char *train_loss, *val_loss, *accuracy;
    bool percent;
};

/* format: "tensorboard", "csv", "jsonl", or "auto": by the name and the first bytes. INVALID_ARGUMENT or
 * DATA_LOSS with the place in the file. */
int cli_import_read(const char *path, const char *format, const struct cli_import_names *names,
                    struct cli_import *ret_import, struct ps_error *err);
void cli_import_done(struct cli_import *import);

#endif
