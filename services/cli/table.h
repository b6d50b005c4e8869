/* SPDX-License-Identifier: Apache-2.0
 * Text for terminals: tables whose columns line up whatever script the names are in, and text from outside
 * made harmless. Not thread-safe. */
#ifndef PARAMSYNC_CLI_TABLE_H
#define PARAMSYNC_CLI_TABLE_H

#include "services/base/buf.h"

#include <stdbool.h>

/* Columns that the UTF-8 text takes on a terminal (East Asian wide characters two, combining marks none). */
size_t cli_text_width(const char *text);

/* Appends text with everything that could steer a terminal or turn its reading order made visible: control
 * characters (C0, DEL, C1) and invalid bytes as \xNN, bidirectional controls and line separators as \u{NNNN},
 * a backslash as itself. */
void cli_escape(struct ps_buf *out, const char *text);

enum cli_align { CLI_LEFT, CLI_RIGHT };
enum cli_fit { CLI_KEEP, CLI_CUT, CLI_WRAP }; /* what happens to the column when the table is too wide */
enum cli_colour { CLI_PLAIN, CLI_GREEN, CLI_RED, CLI_YELLOW, CLI_BOLD };

struct cli_column {
    const char *title;
    enum cli_align align;
    enum cli_fit fit;
};

struct cli_table {
    const struct cli_column *columns;
    size_t column_count;
    struct cli_cell {
        char *text; /* escaped, owned */
        enum cli_colour colour;
    } * cells; /* row by row */
    size_t cell_count, capacity;
    int failed; /* a ps_code after an append ran out of memory */
};

/* columns outlive the table. */
void cli_table_init(struct cli_table *table, const struct cli_column *columns, size_t column_count);
/* The next cell, left to right, row by row; text is copied and escaped. */
void cli_table_add(struct cli_table *table, enum cli_colour colour, const char *text);
void cli_table_printf(struct cli_table *table, enum cli_colour colour, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Appends the table in at most width columns if its kept columns allow. Returns out->failed or the table's.
 */
int cli_table_render(const struct cli_table *table, size_t width, bool colours, struct ps_buf *out);
void cli_table_done(struct cli_table *table);

/* Appends text, escaped, in lines of at most width columns. Returns out->failed or PS_RESOURCE_EXHAUSTED. */
int cli_wrap(struct ps_buf *out, size_t width, const char *text);

#endif
