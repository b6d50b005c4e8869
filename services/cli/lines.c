/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/lines.h"

#include "services/base/buf.h"

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
    if (*at == '[') { /* what `paramsync launch` puts before a rank's line */
        size_t digits = strspn(at + 1, "0123456789");
        if (digits && at[1 + digits] == ']' && at[2 + digits] == ' ')
            at += 3 + digits;
    }
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

/* ---- patterns ---- */

enum { groups_max = 16 };

/* The group's name in "(?<name>" or "(?P<name>"; its length with the brackets, 0: not so. */
static size_t group_name(const char *text, const char **ret_name, size_t *ret_size)
{
    const char *p = text + 2 + (text[2] == 'P');
    const char *end = text[1] == '?' && *p == '<' ? strchr(p, '>') : NULL;
    if (!end)
        return 0;
    *ret_name = p + 1;
    *ret_size = (size_t)(end - p - 1);
    return (size_t)(end + 1 - text);
}

/* Copies a bracket expression as it is. */
static const char *copy_brackets(const char *p, struct ps_buf *out)
{
    const char *start = p++;
    if (*p == '^')
        p++;
    if (*p == ']')
        p++;
    while (*p && *p != ']') {
        if (*p == '[' && (p[1] == ':' || p[1] == '.' || p[1] == '=')) {
            const char close[] = {p[1], ']', '\0'};
            const char *end = strstr(p + 2, close);
            p = end ? end + 2 : p + strlen(p);
        } else {
            p++;
        }
    }
    p += *p == ']';
    ps_buf_append(out, start, (size_t)(p - start));
    return p;
}

static int translate(const char *text, const char *option, struct cli_pattern *pattern, struct ps_buf *out,
                     struct ps_error *err)
{
    size_t group = 0;
    for (const char *p = text; *p;) {
        if (*p == '\\' && p[1]) {
            if (p[1] == 'd')
                ps_buf_puts(out, "[0-9]");
            else
                ps_buf_append(out, p, 2);
            p += 2;
        } else if (*p == '[') {
            p = copy_brackets(p, out);
        } else if (*p == '(') {
            const char *name;
            size_t size, length = p[1] == '?' ? group_name(p, &name, &size) : 0;
            group++;
            if (p[1] == '?' && !length)
                return ps_fail(err, PS_INVALID_ARGUMENT,
                               "%s: of (?...) only (?<epoch>...) and the like are known", option);
            if (length && size == 5 && strncmp(name, "epoch", size) == 0)
                pattern->epoch = group;
            else if (length && size == 4 && strncmp(name, "loss", size) == 0)
                pattern->loss = group;
            else if (length && size == 8 && strncmp(name, "accuracy", size) == 0)
                pattern->accuracy = group;
            else if (length)
                return ps_fail(err, PS_INVALID_ARGUMENT,
                               "%s: a group is called epoch, loss or accuracy, not %.*s", option,
                               size > 40 ? 40 : (int)size, name);
            ps_buf_puts(out, "(");
            p += length ? length : 1;
        } else {
            ps_buf_append(out, p++, 1);
        }
    }
    return out->failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "%s: too long, or out of memory", option) : 0;
}

int cli_pattern_compile(const char *text, const char *option, bool val, bool percent,
                        struct cli_pattern *ret_pattern, struct ps_error *err)
{
    struct cli_pattern pattern = {.val = val, .percent = percent};
    struct ps_buf plain = PS_BUF_INIT(1 << 14);
    char why[160];
    int code = translate(text, option, &pattern, &plain, err);
    int bad = code ? 0 : regcomp(&pattern.compiled, plain.data ? plain.data : "", REG_EXTENDED);
    ps_buf_done(&plain);
    if (code)
        return code;
    if (bad) {
        regerror(bad, &pattern.compiled, why, sizeof why);
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s %.100s: %s", option, text, why);
    }
    if (!pattern.epoch && !pattern.loss && !pattern.accuracy) {
        pattern.epoch = 1;
        pattern.loss = 2;
        pattern.accuracy = val ? 3 : 0;
    }
    size_t groups = pattern.compiled.re_nsub;
    if (!pattern.epoch || !pattern.loss || (val && !pattern.accuracy) || pattern.epoch > groups ||
        pattern.loss > groups || pattern.accuracy > groups || groups >= groups_max) {
        regfree(&pattern.compiled);
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "%s %.100s: needs groups for epoch%s loss%s (and at most %d)", option, text,
                       val ? "," : " and", val ? " and accuracy" : "", groups_max - 1);
    }
    *ret_pattern = pattern;
    return 0;
}

static bool group_number(const char *text, const regmatch_t *group, double *ret, bool *ret_percent)
{
    char copy[64], *end;
    size_t size = (size_t)(group->rm_eo - group->rm_so);
    if (group->rm_so < 0 || !size || size >= sizeof copy)
        return false;
    memcpy(copy, text + group->rm_so, size);
    copy[size] = '\0';
    *ret = strtod(copy, &end);
    *ret_percent = *end == '%' || text[group->rm_eo] == '%';
    return end != copy && (!*end || (*end == '%' && !end[1]));
}

int cli_pattern_match(const struct cli_pattern *pattern, const char *text, struct cli_line *ret_line)
{
    regmatch_t groups[groups_max];
    struct cli_line line = {.val = pattern->val};
    double epoch;
    bool percent = false;
    if (regexec(&pattern->compiled, text, groups_max, groups, 0))
        return 0;
    if (!group_number(text, &groups[pattern->epoch], &epoch, &percent) || !(epoch >= 0 && epoch <= 1000000) ||
        !group_number(text, &groups[pattern->loss], &line.loss, &percent))
        return 0;
    if (pattern->val && !group_number(text, &groups[pattern->accuracy], &line.accuracy, &percent))
        return 0;
    line.epoch = (uint32_t)epoch;
    if (pattern->val && (pattern->percent || percent))
        line.accuracy /= 100;
    *ret_line = line;
    return 1;
}

void cli_pattern_done(struct cli_pattern *pattern)
{
    regfree(&pattern->compiled);
}

/* ---- epochs ---- */

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
