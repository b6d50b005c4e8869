/* SPDX-License-Identifier: Apache-2.0
 * Reads the lines that the ModelArts sample prints, from one process or from several that print the same
 * epochs into one stream: train | epoch: 3 | loss: 0.8123 val | epoch: 3 | loss: 0.7500 | accuracy: 0.7421
 */
#ifndef PARAMSYNC_CLI_LINES_H
#define PARAMSYNC_CLI_LINES_H

#include "services/base/error.h"

#include <regex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cli_line {
    bool val;
    uint32_t epoch; /* as printed */
    double loss, accuracy;
};
/* 1 and *ret_line, or 0 when text (without its newline) is something else. A rank's mark as `paramsync
 * launch` prints it, "[3] ", may stand before it. */
int cli_line_parse(const char *text, struct cli_line *ret_line);

/* A pattern for what other scripts print: a POSIX extended regular expression, in which \\d stands for [0-9]
 * and
 * (?<epoch>...), (?<loss>...) and (?<accuracy>...) name its groups; without names the first group is the
 * epoch, the second the loss, the third (val) the accuracy. */
struct cli_pattern {
    regex_t compiled;
    bool val, percent; /* percent: accuracies are 0..100; one followed by % is in any case */
    size_t epoch, loss, accuracy;
};
/* option is for the message. */
int cli_pattern_compile(const char *text, const char *option, bool val, bool percent,
                        struct cli_pattern *ret_pattern, struct ps_error *err);
/* As cli_line_parse. */
int cli_pattern_match(const struct cli_pattern *pattern, const char *text, struct cli_line *ret_line);
void cli_pattern_done(struct cli_pattern *pattern);

/* One epoch, folded over the processes that printed it: means of what they say. */
struct cli_fold {
    uint32_t epoch; /* 1-based, whatever the script counts from */
    double train_sum, val_sum, accuracy_sum;
    uint32_t train_count, val_count;
    double elapsed_s; /* when its first val line came, before that its first train line */
};
struct cli_folds {
    struct cli_fold *folds;
    size_t count;
    bool from_zero; /* the script's first epoch is 0 */
};
/* The fold that the line went into, valid until the next call, or NULL when out of memory. */
const struct cli_fold *cli_folds_add(struct cli_folds *folds, const struct cli_line *line, double elapsed_s);
void cli_folds_done(struct cli_folds *folds);

#endif
