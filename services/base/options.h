/* SPDX-License-Identifier: Apache-2.0
 * One options table per program. A row drives the command line, the environment, the config file, --help, the
 * man page and the docs. `_` and `-` are the same in a name; booleans take the bare flag or true|false.
 *
 *     struct settings { const char *name; double lr; bool gpu; };
 *     static const struct ps_option rows[] = {
 *         {.name = "lr", .type = PS_TYPE_DOUBLE, .offset = offsetof(struct settings, lr), .value = "RATE",
 *          .fallback = "0.01", .min = 1e-9, .max = 1e3, .help = "learning rate", .group = "Training"},
 *     };
 */
#ifndef PARAMSYNC_BASE_OPTIONS_H
#define PARAMSYNC_BASE_OPTIONS_H

#include "services/base/buf.h"
#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ps_option_type {
    PS_TYPE_STRING,   /* const char *: points into argv, the environment, the default or the table's arena */
    PS_TYPE_INT,      /* int64_t in [min, max] */
    PS_TYPE_DOUBLE,   /* double in [min, max] */
    PS_TYPE_BOOL,     /* bool */
    PS_TYPE_CHOICE,   /* const char *, one of choices ("a|b|c") */
    PS_TYPE_DURATION, /* double seconds in [min, max]; a bare number is seconds */
};

enum ps_option_source { PS_FROM_DEFAULT, PS_FROM_FILE, PS_FROM_ENVIRONMENT, PS_FROM_COMMAND_LINE };

struct ps_option {
    const char *name;       /* with dashes */
    const char *short_name; /* one letter, or NULL */
    enum ps_option_type type;
    size_t offset;           /* of the field in the program's settings */
    const char *value;       /* placeholder in --help; NULL for a boolean */
    const char *fallback;    /* default as text; NULL leaves a string NULL, a number 0 */
    const char *choices;     /* for PS_TYPE_CHOICE */
    double min, max;         /* for numbers; both 0: no bound */
    const char *environment; /* variable that stands in, or NULL */
    const char *help;        /* a phrase, no full stop */
    const char *group;       /* heading in --help, or NULL to continue the last one */
    bool secret;             /* the value is never printed */
};

struct ps_options {
    const char *program; /* "paramsync-train" */
    const char *usage;   /* what follows the program's name */
    const char *example; /* first lines of --help, each indented by the printer */
    const char *about;   /* one paragraph */
    const struct ps_option *rows;
    size_t count;
    /* May be NULL. One ps_option_source per row, filled by the parser: who set it. */
    unsigned char *sources;
};

/* Fills settings with the defaults. Returns PS_INTERNAL if the table is wrong. */
int ps_options_defaults(const struct ps_options *table, void *settings, struct ps_error *err);
/* Applies environment variables to rows that the command line has not set. */
int ps_options_environment(const struct ps_options *table, void *settings, struct ps_error *err);
/* Sets one option from text; name may use _ or -. PS_NOT_FOUND if there is no such row (with a suggestion).
 */
int ps_options_set(const struct ps_options *table, void *settings, const char *name, const char *value,
                   enum ps_option_source source, struct ps_error *err);
/* Parses argv[1..argc-1]. Positional arguments are moved to argv[1..*ret_positional] in order (all that
 * follows
 * "--" is positional). Unknown flags: an error, or with ignore_unknown a warning through unknown(flag). */
int ps_options_parse(const struct ps_options *table, void *settings, int argc, char **argv,
                     int *ret_positional, bool ignore_unknown, void (*unknown)(const char *flag),
                     struct ps_error *err);
/* The row's present value as text ("***" for secrets). */
void ps_options_format(const struct ps_option *row, const void *settings, char *out, size_t size);
/* The program's page for man, section 1 (troff). */
int ps_options_man(const struct ps_options *table, const char *version, struct ps_buf *out);
/* For completion, a line a row: --name, then by tabs "value" and its placeholder or "choice" and its choices.
 */
int ps_options_words(const struct ps_options *table, struct ps_buf *out);
/* --help, at most 80 columns: usage, an example, then the rows by group. With PARAMSYNC_HELP=man or =words in
 * the environment one of the two above: so the build makes the man pages, and the shell completes, from the
 * rows themselves. */
int ps_options_help(const struct ps_options *table, struct ps_buf *out);

#define PS_OPTIONS_COUNT(rows) (sizeof(rows) / sizeof *(rows))

#endif
