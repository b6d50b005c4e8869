/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/lines.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Moves *at past word, with any blanks around it. */
static bool skip(const char **at, const char *word)
{
    const char *p = *at;
    size_t n = strlen(word);
    while (*p == ' ' || *p == '\t')
        p++;
    if (strncmp(p, word, n) != 0)
        return false;
    p += n;
    while (*p == ' ' || *p == '\t')
        p++;
    *at = p;
    return true;
}

static bool number(const char **at, double *ret)
{
    char *end;
    if (isspace((unsigned char)**at))
        return false;
    *ret = strtod(*at, &end); /* nan and inf are what a script prints when it goes wrong: taken as such */
    if (end == *at)
        return false;
    *at = end;
    return true;
}

int cli_line_parse(const char *text, struct cli_line *ret_line)
{
    struct cli_line line = {0};
    const char *at = text;
    char *end;
    if (skip(&at, "val"))
        line.val = true;
    else if (!skip(&at, "train"))
        return 0;
    if (!skip(&at, "|") || !skip(&at, "epoch:") || !isdigit((unsigned char)*at))
        return 0;
    errno = 0;
    unsigned long epoch = strtoul(at, &end, 10);
    if (errno || epoch > 1000000)
        return 0;
    line.epoch = (uint32_t)epoch;
    at = end;
    if (!skip(&at, "|") || !skip(&at, "loss:") || !number(&at, &line.loss))
        return 0;
    if (line.val && (!skip(&at, "|") || !skip(&at, "accuracy:") || !number(&at, &line.accuracy)))
        return 0;
    skip(&at, "");
    if (*at && *at != '\r')
        return 0;
    *ret_line = line;
    return 1;
}

const struct cli_fold *cli_folds_add(struct cli_folds *folds, const struct cli_line *line, double elapsed_s)
{
    struct cli_fold *fold = NULL;
    if (!folds->count && line->epoch == 0)
        folds->from_zero = true;
    uint32_t epoch = line->epoch + (folds->from_zero ? 1 : 0);
    for (size_t i = folds->count; i-- > 0 && !fold;)
        if (folds->folds[i].epoch == epoch)
            fold = &folds->folds[i];
    if (!fold) {
        struct cli_fold *grown = realloc(folds->folds, (folds->count + 1) * sizeof *grown);
        if (!grown)
            return NULL;
        folds->folds = grown;
        fold = &grown[folds->count++];
        *fold = (struct cli_fold){.epoch = epoch, .elapsed_s = elapsed_s};
    }
    if (line->val) {
        if (!fold->val_count)
            fold->elapsed_s = elapsed_s;
        fold->val_count++;
        fold->val_sum += line->loss;
        fold->accuracy_sum += line->accuracy;
    } else {
        fold->train_count++;
        fold->train_sum += line->loss;
    }
    return fold;
}

void cli_folds_done(struct cli_folds *folds)
{
    free(folds->folds);
    *folds = (struct cli_folds){0};
}
