/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/table.h"

#include <locale.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

/* The code point at text and its length in bytes; an invalid byte is U+FFFFFFFF of length 1. */
static uint32_t decode(const unsigned char *text, size_t *ret_length)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned char lead = text[0];
    size_t n = lead < 0x80                   ? 1
               : lead >= 0xc2 && lead < 0xe0 ? 2
               : lead >= 0xe0 && lead < 0xf0 ? 3
               : lead >= 0xf0 && lead < 0xf5 ? 4
                                             : 0;
    uint32_t value = n == 1 ? lead : n ? lead & (0x7fu >> n) : UINT32_MAX;
    *ret_length = 1;
    if (n < 2)
        return value;
    for (size_t i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return UINT32_MAX;
        value = value << 6 | (text[i] & 0x3f);
    }
    if (value < least[n] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
        return UINT32_MAX;
    *ret_length = n;
    return value;
}

/* Without a UTF-8 locale on the machine: the big blocks. */
static int rough_width(uint32_t c)
{
    static const struct {
        uint32_t from, to;
    } wide[] = {{0x1100, 0x115f}, {0x2e80, 0xa4cf}, {0xac00, 0xd7a3},   {0xf900, 0xfaff},  {0xfe30, 0xfe6f},
                {0xff00, 0xff60}, {0xffe0, 0xffe6}, {0x1f300, 0x1f64f}, {0x20000, 0x3fffd}};
    if ((c >= 0x300 && c <= 0x36f) || (c >= 0x200b && c <= 0x200f))
        return 0;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (c >= wide[i].from && c <= wide[i].to)
            return 2;
    return 1;
}

static int point_width(uint32_t c)
{
    /* wcwidth knows Unicode's tables, but answers for the current locale. */
    static locale_t unicode;
    static bool tried;
    if (c < 0x7f)
        return c >= 0x20;
    if (c == UINT32_MAX)
        return 1;
    if (!tried) {
        unicode = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
        tried = true;
    }
    if (!unicode)
        return rough_width(c);
    locale_t before = uselocale(unicode);
    int width = wcwidth((wchar_t)c);
    uselocale(before);
    return width < 0 ? 1 : width;
}

size_t cli_text_width(const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t width = 0, length;
    while (*p) {
        width += (size_t)point_width(decode(p, &length));
        p += length;
    }
    return width;
}

static bool steers(uint32_t c)
{
    return (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069) || c == 0x200e || c == 0x200f ||
           c == 0x61c || c == 0x2028 || c == 0x2029 || c == 0xfeff || (c >= 0xe0000 && c <= 0xe007f);
}

void cli_escape(struct ps_buf *out, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    while (*p) {
        size_t length;
        uint32_t c = decode(p, &length);
        if (c == UINT32_MAX || c < 0x20 || c == 0x7f)
            ps_buf_printf(out, "\\x%02X", *p);
        else if (c >= 0x80 && c < 0xa0)
            ps_buf_printf(out, "\\x%02X", (unsigned)c);
        else if (steers(c))
            ps_buf_printf(out, "\\u{%X}", (unsigned)c);
        else
            ps_buf_append(out, p, length);
        p += length;
    }
}

void cli_table_init(struct cli_table *table, const struct cli_column *columns, size_t column_count)
{
    memset(table, 0, sizeof *table);
    table->columns = columns;
    table->column_count = column_count;
}

void cli_table_add(struct cli_table *table, enum cli_colour colour, const char *text)
{
    struct ps_buf escaped = PS_BUF_INIT(1 << 16);
    if (table->failed)
        return;
    if (table->cell_count == table->capacity) {
        size_t capacity = table->capacity ? table->capacity * 2 : 64;
        struct cli_cell *cells = realloc(table->cells, capacity * sizeof *cells);
        if (!cells) {
            table->failed = PS_RESOURCE_EXHAUSTED;
            return;
        }
        table->cells = cells;
        table->capacity = capacity;
    }
    cli_escape(&escaped, text);
    table->cells[table->cell_count].colour = colour;
    table->cells[table->cell_count].text = ps_buf_take(&escaped, NULL);
    if (!table->cells[table->cell_count].text)
        table->failed = PS_RESOURCE_EXHAUSTED;
    else
        table->cell_count++;
    ps_buf_done(&escaped);
}

void cli_table_printf(struct cli_table *table, enum cli_colour colour, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cli_table_add(table, colour, text);
}

void cli_table_done(struct cli_table *table)
{
    for (size_t i = 0; i < table->cell_count; i++)
        free(table->cells[i].text);
    free(table->cells);
    memset(table, 0, sizeof *table);
}

/* How many bytes of text fit in width columns; *ret_width is what they take. */
static size_t fit_bytes(const char *text, size_t width, size_t *ret_width)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t used = 0, length;
    while (*p) {
        size_t w = (size_t)point_width(decode(p, &length));
        if (used + w > width)
            break;
        used += w;
        p += length;
    }
    *ret_width = used;
    return (size_t)((const char *)p - text);
}

/* The part of text for one line of width columns: whole words where possible. Returns its bytes; *ret_next is
 * where the following line begins. */
static size_t wrap_bytes(const char *text, size_t width, const char **ret_next)
{
    size_t used, n = fit_bytes(text, width, &used);
    if (text[n]) {
        size_t word = n;
        while (word && text[word] != ' ')
            word--;
        if (word)
            n = word;
        else if (!n) /* a character wider than the column: it goes out all the same */
            decode((const unsigned char *)text, &n);
    }
    *ret_next = text + n;
    while (**ret_next == ' ')
        ++*ret_next;
    while (n && text[n - 1] == ' ')
        n--;
    return n;
}

static size_t total_width(const size_t *widths, size_t count)
{
    size_t total = count ? 2 * (count - 1) : 0;
    for (size_t i = 0; i < count; i++)
        total += widths[i];
    return total;
}

/* Takes one column after another from the widest that may give. */
static void shrink(const struct cli_table *t, size_t *widths, size_t width)
{
    enum { least = 8 };
    size_t total = total_width(widths, t->column_count);
    while (total > width) {
        size_t widest = SIZE_MAX;
        for (size_t i = 0; i < t->column_count; i++)
            if (t->columns[i].fit != CLI_KEEP && widths[i] > least &&
                (widest == SIZE_MAX || widths[i] > widths[widest]))
                widest = i;
        if (widest == SIZE_MAX)
            return;
        widths[widest]--;
        total--;
    }
}

static const char *colour_code(enum cli_colour colour)
{
    static const char *const codes[] = {"", "\033[32m", "\033[31m", "\033[33m", "\033[1m"};
    return codes[colour];
}

static void put_cell(struct ps_buf *out, const char *text, size_t bytes, size_t shown, size_t width, bool cut,
                     const struct cli_column *column, enum cli_colour colour, bool colours, bool last)
{
    size_t pad = width > shown + cut ? width - shown - cut : 0;
    if (column->align == CLI_RIGHT)
        ps_buf_printf(out, "%*s", (int)pad, "");
    if (colours && colour != CLI_PLAIN)
        ps_buf_puts(out, colour_code(colour));
    ps_buf_append(out, text, bytes);
    if (cut)
        ps_buf_puts(out, "\u2026");
    if (colours && colour != CLI_PLAIN)
        ps_buf_puts(out, "\033[0m");
    if (column->align == CLI_LEFT && !last)
        ps_buf_printf(out, "%*s", (int)pad, "");
    ps_buf_puts(out, last ? "" : "  ");
}

static void trim_line(struct ps_buf *out)
{
    while (out->size && out->data[out->size - 1] == ' ')
        out->data[--out->size] = '\0';
    ps_buf_puts(out, "\n");
}

/* Texts and colours of one row of cells; rest holds where each text goes on and is used up. */
static void render_row(const struct cli_table *t, const struct cli_cell *cells, const char **rest,
                       const size_t *widths, bool colours, struct ps_buf *out)
{
    bool more = true;
    while (more && !out->failed) {
        more = false;
        for (size_t i = 0; i < t->column_count; i++) {
            const char *text = rest[i], *next = text + strlen(text);
            size_t shown = cli_text_width(text), bytes = strlen(text);
            bool cut = false;
            if (shown > widths[i] && t->columns[i].fit == CLI_CUT) {
                bytes = fit_bytes(text, widths[i] - 1, &shown);
                cut = true;
            } else if (shown > widths[i] && t->columns[i].fit == CLI_WRAP) {
                bytes = wrap_bytes(text, widths[i], &next);
                char *line = strndup(text, bytes);
                shown = line ? cli_text_width(line) : 0;
                free(line);
            }
            put_cell(out, text, bytes, shown, widths[i], cut, &t->columns[i],
                     cells ? cells[i].colour : CLI_BOLD, colours, i + 1 == t->column_count);
            rest[i] = next;
            more = more || *next;
        }
        trim_line(out);
    }
}

int cli_table_render(const struct cli_table *t, size_t width, bool colours, struct ps_buf *out)
{
    size_t n = t->column_count, rows = n ? t->cell_count / n : 0;
    size_t *widths = calloc(n + 1, sizeof *widths);
    const char **rest = calloc(n + 1, sizeof *rest);
    if (!widths || !rest || t->failed) {
        free(widths);
        free(rest);
        return PS_RESOURCE_EXHAUSTED;
    }
    for (size_t i = 0; i < n; i++)
        widths[i] = cli_text_width(t->columns[i].title);
    for (size_t k = 0; k < rows * n; k++) {
        size_t w = cli_text_width(t->cells[k].text);
        if (w > widths[k % n])
            widths[k % n] = w;
    }
    shrink(t, widths, width);
    for (size_t i = 0; i < n; i++)
        rest[i] = t->columns[i].title;
    render_row(t, NULL, rest, widths, colours, out);
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < n; i++)
            rest[i] = t->cells[r * n + i].text;
        render_row(t, &t->cells[r * n], rest, widths, colours, out);
    }
    free(widths);
    free(rest);
    return out->failed;
}

int cli_wrap(struct ps_buf *out, size_t width, const char *text)
{
    struct ps_buf escaped = PS_BUF_INIT(1 << 20);
    cli_escape(&escaped, text);
    int code = escaped.failed;
    for (const char *at = escaped.data, *next; at && *at; at = next) {
        size_t n = wrap_bytes(at, width, &next);
        ps_buf_append(out, at, n);
        ps_buf_puts(out, "\n");
    }
    ps_buf_done(&escaped);
    return code ? code : out->failed;
}
