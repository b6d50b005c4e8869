/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/options.h"

#include "services/base/clock.h"
#include "services/base/text.h"

#include "paramsync_version.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Compares names with _ and - alike; b ends at length n. */
static bool same_name(const char *a, const char *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char x = a[i] == '_' ? '-' : a[i], y = b[i] == '_' ? '-' : b[i];
        if (x != y || !x)
            return false;
    }
    return a[n] == '\0';
}

static const struct ps_option *find_row(const struct ps_options *table, const char *name, size_t n)
{
    for (size_t i = 0; i < table->count; i++)
        if (same_name(table->rows[i].name, name, n))
            return &table->rows[i];
    return NULL;
}

static void *field(const struct ps_option *row, void *settings)
{
    return (char *)settings + row->offset;
}

static bool choice_allowed(const char *choices, const char *value)
{
    size_t n = strlen(value);
    for (const char *p = choices; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL)
        if (n && strncmp(p, value, n) == 0 && (p[n] == '|' || p[n] == '\0'))
            return true;
    return false;
}

static int store(const struct ps_option *row, void *settings, const char *text, struct ps_error *err)
{
    const char *shown = row->secret ? "***" : text;
    bool bounded = row->min != 0 || row->max != 0;
    double number = 0;
    switch (row->type) {
    case PS_TYPE_STRING:
        *(const char **)field(row, settings) = text;
        return 0;
    case PS_TYPE_CHOICE:
        if (!choice_allowed(row->choices, text))
            return ps_fail(err, PS_INVALID_ARGUMENT, "--%s %s: must be one of %s", row->name, shown,
                           row->choices);
        *(const char **)field(row, settings) = text;
        return 0;
    case PS_TYPE_BOOL:
        if (strcmp(text, "true") == 0 || strcmp(text, "True") == 0 || strcmp(text, "1") == 0)
            *(bool *)field(row, settings) = true;
        else if (strcmp(text, "false") == 0 || strcmp(text, "False") == 0 || strcmp(text, "0") == 0)
            *(bool *)field(row, settings) = false;
        else
            return ps_fail(err, PS_INVALID_ARGUMENT, "--%s %s: must be true or false", row->name, shown);
        return 0;
    case PS_TYPE_INT: {
        int64_t value;
        int64_t low = bounded ? (int64_t)row->min : INT64_MIN, high = bounded ? (int64_t)row->max : INT64_MAX;
        if (ps_parse_int64(text, low, high, &value)) {
            if (bounded)
                return ps_fail(err, PS_INVALID_ARGUMENT, "--%s %s: must be a whole number from %lld to %lld",
                               row->name, shown, (long long)low, (long long)high);
            return ps_fail(err, PS_INVALID_ARGUMENT, "--%s %s: must be a whole number", row->name, shown);
        }
        *(int64_t *)field(row, settings) = value;
        return 0;
    }
    case PS_TYPE_DOUBLE:
        if (ps_parse_double(text, &number) || (bounded && (number < row->min || number > row->max))) {
            if (bounded)
                return ps_fail(err, PS_INVALID_ARGUMENT, "--%s %s: must be a number from %g to %g", row->name,
                               shown, row->min, row->max);
            return ps_fail(err, PS_INVALID_ARGUMENT, "--%s %s: must be a number", row->name, shown);
        }
        *(double *)field(row, settings) = number;
        return 0;
    case PS_TYPE_DURATION:
        if (ps_parse_duration(text, &number) || (bounded && (number < row->min || number > row->max)))
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "--%s %s: must be a duration such as 90s, 20min or 1h30m%s", row->name, shown,
                           bounded ? " within its range" : "");
        *(double *)field(row, settings) = number;
        return 0;
    }
    return ps_fail(err, PS_INTERNAL, "--%s has an unknown type", row->name);
}

static int set_row(const struct ps_options *table, const struct ps_option *row, void *settings,
                   const char *value, enum ps_option_source source, struct ps_error *err)
{
    size_t at = (size_t)(row - table->rows);
    int code = store(row, settings, value, err);
    if (!code && table->sources)
        table->sources[at] = (unsigned char)source;
    return code;
}

int ps_options_defaults(const struct ps_options *table, void *settings, struct ps_error *err)
{
    for (size_t i = 0; i < table->count; i++) {
        const struct ps_option *row = &table->rows[i];
        if (table->sources)
            table->sources[i] = PS_FROM_DEFAULT;
        if (!row->fallback)
            continue;
        int code = store(row, settings, row->fallback, err);
        if (code) {
            err->code = PS_INTERNAL;
            return ps_error_prefix(err, "bad default");
        }
    }
    return 0;
}

int ps_options_environment(const struct ps_options *table, void *settings, struct ps_error *err)
{
    for (size_t i = 0; i < table->count; i++) {
        const struct ps_option *row = &table->rows[i];
        const char *value = row->environment ? getenv(row->environment) : NULL;
        if (!value || !*value || (table->sources && table->sources[i] == PS_FROM_COMMAND_LINE))
            continue;
        int code = set_row(table, row, settings, value, PS_FROM_ENVIRONMENT, err);
        if (code)
            return ps_error_prefix(err, "environment variable %s", row->environment);
    }
    return 0;
}

/* Edit distance, for "did you mean". Names longer than 63 have none. */
static int distance(const char *a, const char *b, size_t nb)
{
    int row[64];
    size_t na = strlen(a);
    if (na >= 64 || nb >= 64)
        return 99;
    for (size_t j = 0; j <= na; j++)
        row[j] = (int)j;
    for (size_t i = 1; i <= nb; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= na; j++) {
            int cost = diagonal + ((b[i - 1] == '_' ? '-' : b[i - 1]) != a[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < cost)
                cost = row[j] + 1;
            if (row[j - 1] + 1 < cost)
                cost = row[j - 1] + 1;
            row[j] = cost;
        }
    }
    return row[na];
}

static int unknown_flag(const struct ps_options *table, const char *name, size_t n, struct ps_error *err)
{
    const char *nearest = NULL;
    int best = 3;
    for (size_t i = 0; i < table->count; i++) {
        int d = distance(table->rows[i].name, name, n);
        if (d < best) {
            best = d;
            nearest = table->rows[i].name;
        }
    }
    if (nearest)
        return ps_fail(err, PS_NOT_FOUND, "unknown flag --%.*s: did you mean --%s?", (int)(n < 100 ? n : 100),
                       name, nearest);
    return ps_fail(err, PS_NOT_FOUND, "unknown flag --%.*s: %s --help lists them all",
                   (int)(n < 100 ? n : 100), name, table->program);
}

int ps_options_set(const struct ps_options *table, void *settings, const char *name, const char *value,
                   enum ps_option_source source, struct ps_error *err)
{
    const struct ps_option *row = find_row(table, name, strlen(name));
    return row ? set_row(table, row, settings, value, source, err)
               : unknown_flag(table, name, strlen(name), err);
}

int ps_options_parse(const struct ps_options *table, void *settings, int argc, char **argv,
                     int *ret_positional, bool ignore_unknown, void (*unknown)(const char *flag),
                     struct ps_error *err)
{
    int positional = 0;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i];
        const struct ps_option *row = NULL;
        const char *value = NULL;
        if (strcmp(arg, "--") == 0) {
            while (++i < argc)
                argv[++positional] = argv[i];
            break;
        }
        if (arg[0] != '-' || arg[1] == '\0') {
            argv[++positional] = arg;
            continue;
        }
        const char *name = arg + 1;
        size_t n;
        if (arg[1] == '-') {
            name = arg + 2;
            n = strcspn(name, "=");
            row = find_row(table, name, n);
            if (name[n] == '=')
                value = name + n + 1;
        } else {
            n = 1;
            for (size_t k = 0; k < table->count && !row; k++)
                if (table->rows[k].short_name && table->rows[k].short_name[0] == arg[1])
                    row = &table->rows[k];
            if (row && arg[2])
                value = arg + 2;
        }
        if (!row) {
            int code = unknown_flag(table, name, arg[1] == '-' ? n : strlen(name), err);
            if (!ignore_unknown) {
                err->code = PS_INVALID_ARGUMENT;
                return code < 0 ? PS_INVALID_ARGUMENT : code;
            }
            if (unknown)
                unknown(arg);
            /* An unknown flag's value would otherwise be read as a positional argument. */
            if (!value && !strchr(arg, '=') && i + 1 < argc && argv[i + 1][0] != '-')
                i++;
            continue;
        }
        if (!value && row->type == PS_TYPE_BOOL) {
            value = "true";
            if (i + 1 < argc && (strcmp(argv[i + 1], "true") == 0 || strcmp(argv[i + 1], "false") == 0 ||
                                 strcmp(argv[i + 1], "True") == 0 || strcmp(argv[i + 1], "False") == 0))
                value = argv[++i];
        } else if (!value) {
            if (i + 1 >= argc)
                return ps_fail(err, PS_INVALID_ARGUMENT, "--%s needs a value (%s)", row->name,
                               row->value     ? row->value
                               : row->choices ? row->choices
                                              : "VALUE");
            value = argv[++i];
        }
        int code = set_row(table, row, settings, value, PS_FROM_COMMAND_LINE, err);
        if (code)
            return code;
    }
    if (ret_positional)
        *ret_positional = positional;
    return 0;
}

void ps_options_format(const struct ps_option *row, const void *settings, char *out, size_t size)
{
    const void *at = (const char *)settings + row->offset;
    const char *text;
    switch (row->type) {
    case PS_TYPE_STRING:
    case PS_TYPE_CHOICE:
        text = *(const char *const *)at;
        snprintf(out, size, "%s", !text ? "" : row->secret ? "***" : text);
        break;
    case PS_TYPE_INT:
        snprintf(out, size, "%lld", (long long)*(const int64_t *)at);
        break;
    case PS_TYPE_DOUBLE:
        snprintf(out, size, "%.10g", *(const double *)at);
        break;
    case PS_TYPE_DURATION:
        snprintf(out, size, "%gs", *(const double *)at);
        break;
    case PS_TYPE_BOOL:
        snprintf(out, size, "%s", *(const bool *)at ? "true" : "false");
        break;
    }
}

/* Wraps text at 80 columns, continuing at indent; the first line begins at column. */
static void wrap(struct ps_buf *out, const char *text, int column, int indent)
{
    bool spaced = true; /* whether the next word may follow where we are */
    while (*text) {
        int n = (int)strcspn(text, " ");
        if ((!spaced || column + n > 79) && column > indent) {
            ps_buf_printf(out, "\n%*s", indent, "");
            column = indent;
        }
        ps_buf_append(out, text, (size_t)n);
        column += n;
        text += n;
        while (*text == ' ')
            text++;
        spaced = *text && column + 1 + (int)strcspn(text, " ") <= 79;
        if (spaced) {
            ps_buf_puts(out, " ");
            column++;
        } else {
            column = 80; /* what follows begins a line */
        }
    }
    ps_buf_puts(out, "\n");
}

/* Text for troff: backslashes, hyphens (an option's is no typographic one) and a leading dot or quote. */
static void troff(struct ps_buf *out, const char *text)
{
    for (const char *p = text; *p; p++) {
        if ((p == text || p[-1] == '\n') && (*p == '.' || *p == '\''))
            ps_buf_puts(out, "\\&");
        if (*p == '\\')
            ps_buf_puts(out, "\\e");
        else if (*p == '-')
            ps_buf_puts(out, "\\-");
        else
            ps_buf_append(out, p, 1);
    }
}

static void troff_row(struct ps_buf *out, const struct ps_option *row)
{
    const char *value = row->value ? row->value : row->type == PS_TYPE_CHOICE ? row->choices : NULL;
    ps_buf_puts(out, ".TP\n\\fB");
    if (row->short_name) {
        ps_buf_puts(out, "\\-");
        troff(out, row->short_name);
        ps_buf_puts(out, "\\fR, \\fB");
    }
    ps_buf_puts(out, "\\-\\-");
    troff(out, row->name);
    ps_buf_puts(out, "\\fR");
    if (value) {
        ps_buf_puts(out, " \\fI");
        troff(out, value);
        ps_buf_puts(out, "\\fR");
    }
    ps_buf_puts(out, "\n");
    troff(out, row->help);
    if (row->fallback && *row->fallback) {
        ps_buf_puts(out, " (default: ");
        troff(out, row->fallback);
        ps_buf_puts(out, ")");
    }
    if (row->environment) {
        ps_buf_puts(out, " [");
        troff(out, row->environment);
        ps_buf_puts(out, "]");
    }
    ps_buf_puts(out, "\n");
}

int ps_options_man(const struct ps_options *table, const char *version, struct ps_buf *out)
{
    char title[64];
    snprintf(title, sizeof title, "%s", table->program);
    for (char *p = title; *p; p++)
        *p = *p == ' ' ? '-' : (char)toupper((unsigned char)*p);
    ps_buf_puts(out, ".TH ");
    troff(out, title);
    ps_buf_printf(out, " 1 \"\" \"paramsync %s\" \"paramsync\"\n.nh\n.SH NAME\n", version);
    for (const char *p = table->program; *p; p++)
        ps_buf_puts(out, *p == ' ' || *p == '-' ? "\\-" : (const char[]){*p, '\0'});
    ps_buf_puts(out, " \\- ");
    const char *about = table->about ? table->about : "";
    int first = (int)strcspn(about, ".:;,("); /* its first phrase */
    char phrase[200];
    while (first > 0 && about[first - 1] == ' ')
        first--;
    snprintf(phrase, sizeof phrase, "%.*s", first, about);
    troff(out, phrase);
    ps_buf_puts(out, "\n.SH SYNOPSIS\n\\fB");
    troff(out, table->program);
    ps_buf_puts(out, "\\fR ");
    troff(out, table->usage);
    ps_buf_puts(out, "\n.SH DESCRIPTION\n");
    troff(out, about);
    ps_buf_puts(out, "\n.SH OPTIONS\n");
    for (size_t i = 0; i < table->count; i++) {
        if (table->rows[i].group) {
            ps_buf_puts(out, ".SS ");
            troff(out, table->rows[i].group);
            ps_buf_puts(out, "\n");
        }
        troff_row(out, &table->rows[i]);
    }
    if (table->example) {
        ps_buf_puts(out, ".SH EXAMPLES\n.nf\n");
        troff(out, table->example);
        ps_buf_puts(out, "\n.fi\n");
    }
    return out->failed;
}

int ps_options_words(const struct ps_options *table, struct ps_buf *out)
{
    for (size_t i = 0; i < table->count; i++) {
        const struct ps_option *row = &table->rows[i];
        ps_buf_printf(out, "--%s", row->name);
        if (row->type == PS_TYPE_CHOICE)
            ps_buf_printf(out, "\tchoice\t%s", row->choices);
        else if (row->type != PS_TYPE_BOOL)
            ps_buf_printf(out, "\tvalue\t%s", row->value ? row->value : "");
        ps_buf_puts(out, "\n");
    }
    return out->failed;
}

int ps_options_help(const struct ps_options *table, struct ps_buf *out)
{
    enum { indent = 26 };
    const char *form = getenv("PARAMSYNC_HELP");
    if (form && strcmp(form, "man") == 0)
        return ps_options_man(table, PARAMSYNC_VERSION, out);
    if (form && strcmp(form, "words") == 0)
        return ps_options_words(table, out);
    if (table->example) {
        ps_buf_puts(out, "Example:\n");
        const char *p = table->example;
        while (*p) {
            int n = (int)strcspn(p, "\n");
            ps_buf_printf(out, "  %.*s\n", n, p);
            p += n + (p[n] == '\n');
        }
        ps_buf_puts(out, "\n");
    }
    char usage[256];
    snprintf(usage, sizeof usage, "Usage: %s %s", table->program, table->usage);
    wrap(out, usage, 0, 2);
    if (table->about) {
        ps_buf_puts(out, "\n");
        wrap(out, table->about, 0, 0);
    }
    for (size_t i = 0; i < table->count; i++) {
        const struct ps_option *row = &table->rows[i];
        char left[160];
        if (row->group)
            ps_buf_printf(out, "\n%s:\n", row->group);
        else if (i == 0)
            ps_buf_puts(out, "\nOptions:\n");
        const char *value = row->value ? row->value : row->type == PS_TYPE_CHOICE ? row->choices : NULL;
        int n = snprintf(left, sizeof left, "  %s%s%s--%s%s%s", row->short_name ? "-" : "",
                         row->short_name ? row->short_name : "", row->short_name ? ", " : "", row->name,
                         value ? " " : "", value ? value : "");
        ps_buf_puts(out, left);
        if (n > indent - 2)
            ps_buf_printf(out, "\n%*s", indent, "");
        else
            ps_buf_printf(out, "%*s", indent - n, "");
        char text[512];
        snprintf(text, sizeof text, "%s%s%s%s%s%s%s", row->help,
                 row->fallback && *row->fallback ? " (default: " : "",
                 row->fallback && *row->fallback ? row->fallback : "",
                 row->fallback && *row->fallback ? ")" : "", row->environment ? " [" : "",
                 row->environment ? row->environment : "", row->environment ? "]" : "");
        wrap(out, text, indent, indent);
    }
    return out->failed;
}
