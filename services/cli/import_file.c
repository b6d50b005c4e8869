/* SPDX-License-Identifier: Apache-2.0
 * Every format comes down to rows: names with numbers. A row with an epoch and one of its figures is an
 * epoch; one with a step is a point of each series that it names. */
#include "services/cli/import_file.h"

#include "services/base/fs.h"
#include "services/cli/events.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { file_max = 1 << 30, columns_max = 512, epochs_max = 1000000, points_max = 20000000 };

struct cell {
    const char *name;
    double value;
};

struct importing {
    const struct cli_import_names *names;
    struct cli_import *to;
    size_t epoch_room, point_room;
    double first_wall;
    bool has_wall;
    struct ps_error *err;
};

void cli_import_done(struct cli_import *import)
{
    free(import->epochs);
    free(import->points);
    *import = (struct cli_import){0};
}

/* ---- rows ---- */

static struct paramsync_epoch *epoch_of(struct importing *x, uint32_t epoch)
{
    struct cli_import *to = x->to;
    size_t at = to->epoch_count;
    while (at && to->epochs[at - 1].epoch > epoch) /* nearly always the last one */
        at--;
    if (at && to->epochs[at - 1].epoch == epoch)
        return &to->epochs[at - 1];
    if (to->epoch_count == x->epoch_room) {
        size_t room = x->epoch_room ? x->epoch_room * 2 : 64;
        struct paramsync_epoch *grown = room > epochs_max ? NULL : realloc(to->epochs, room * sizeof *grown);
        if (!grown) {
            ps_fail(x->err, PS_RESOURCE_EXHAUSTED, "too many epochs, or out of memory");
            return NULL;
        }
        to->epochs = grown;
        x->epoch_room = room;
    }
    memmove(&to->epochs[at + 1], &to->epochs[at], (to->epoch_count - at) * sizeof *to->epochs);
    to->epoch_count++;
    to->epochs[at] = (struct paramsync_epoch){.epoch = epoch, .no_eval = true};
    return &to->epochs[at];
}

static int add_point(struct importing *x, const char *name, uint64_t step, double value, double elapsed_s)
{
    struct cli_import *to = x->to;
    if (to->point_count == x->point_room) {
        size_t room = x->point_room ? x->point_room * 2 : 1024;
        struct cli_import_point *grown = room > points_max ? NULL : realloc(to->points, room * sizeof *grown);
        if (!grown)
            return ps_fail(x->err, PS_RESOURCE_EXHAUSTED, "too many values, or out of memory");
        to->points = grown;
        x->point_room = room;
    }
    struct cli_import_point *p = &to->points[to->point_count++];
    *p = (struct cli_import_point){.step = step, .value = value, .elapsed_s = elapsed_s};
    for (size_t i = 0; i + 1 < sizeof p->name && name[i]; i++) /* names of series are plainer than tags */
        p->name[i] = isalnum((unsigned char)name[i]) || strchr("_./-", name[i]) ? name[i] : '_';
    if (elapsed_s > to->last_s)
        to->last_s = elapsed_s;
    return 0;
}

static bool same(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

/* Fills the epoch's field that has this name; false: none has. */
static bool set_figure(const struct importing *x, struct paramsync_epoch *e, const char *name, double value)
{
    if (same(name, x->names->train_loss) || same(name, "epoch/train_loss"))
        e->train_loss = value;
    else if (same(name, x->names->val_loss) || same(name, "epoch/val_loss"))
        e->val_loss = value;
    else if (same(name, x->names->accuracy) || same(name, "epoch/accuracy"))
        e->accuracy = x->names->percent ? value / 100 : value;
    else if (same(name, "lr") || same(name, "epoch/lr"))
        e->lr = value;
    else if (same(name, "samples_per_s") || same(name, "epoch/samples_per_s"))
        e->samples_per_s = value;
    else if (same(name, "train_s"))
        e->train_s = value;
    else if (same(name, "eval_s"))
        e->eval_s = value;
    else
        return false;
    if (same(name, x->names->accuracy) || same(name, "epoch/accuracy"))
        e->no_eval = false;
    return true;
}

static bool is_figure(const struct importing *x, const char *name)
{
    return same(name, x->names->train_loss) || same(name, x->names->val_loss) ||
           same(name, x->names->accuracy);
}

static bool is_seconds(double value)
{
    return value >= 0 && value < 1e12;
}

static int take_row(struct importing *x, const struct cell *cells, size_t count)
{
    double epoch = NAN, step = NAN, elapsed = 0;
    bool figures = false;
    for (size_t i = 0; i < count; i++) {
        if (same(cells[i].name, "epoch"))
            epoch = cells[i].value;
        else if (same(cells[i].name, "step"))
            step = cells[i].value;
        else if (same(cells[i].name, "elapsed_s"))
            elapsed = is_seconds(cells[i].value) ? cells[i].value : 0;
        else if (is_figure(x, cells[i].name))
            figures = true;
    }
    if (!isnan(epoch) && !(epoch >= 1 && epoch <= 1e9 && epoch == floor(epoch)))
        return ps_fail(x->err, PS_INVALID_ARGUMENT, "epoch %g: must be a whole number from 1", epoch);
    if (!isnan(step) && !(step >= 0 && step < 9e15 && step == floor(step)))
        return ps_fail(x->err, PS_INVALID_ARGUMENT, "step %g: must be a whole number from 0", step);
    if (!isnan(epoch) && figures) {
        struct paramsync_epoch *e = epoch_of(x, (uint32_t)epoch);
        if (!e)
            return PS_RESOURCE_EXHAUSTED;
        e->elapsed_s = elapsed;
        e->step = isnan(step) ? e->step : (uint64_t)step;
        if (elapsed > x->to->last_s)
            x->to->last_s = elapsed;
        for (size_t i = 0; i < count; i++)
            set_figure(x, e, cells[i].name, cells[i].value);
        if (!e->no_eval && !(e->accuracy >= 0 && e->accuracy <= 1) && !isnan(e->accuracy))
            return ps_fail(x->err, PS_INVALID_ARGUMENT,
                           "accuracy %g of epoch %u: must be 0..1, or give --percent", e->accuracy, e->epoch);
        return 0;
    }
    int code = 0;
    for (size_t i = 0; i < count && !isnan(step) && !code; i++)
        if (!same(cells[i].name, "step") && !same(cells[i].name, "epoch") &&
            !same(cells[i].name, "elapsed_s"))
            code = add_point(x, cells[i].name, (uint64_t)step, cells[i].value, elapsed);
    return code;
}

/* ---- JSON lines ---- */

static int read_jsonl(struct importing *x, const char *path, const char *text, size_t size)
{
    const char *p = text, *end = text + size;
    for (unsigned line = 1; p < end; line++) {
        const char *newline = memchr(p, '\n', (size_t)(end - p)), *stop = newline ? newline : end;
        struct cell cells[columns_max];
        size_t count = 0;
        json_error_t where;
        if (strspn(p, " \t\r") < (size_t)(stop - p)) {
            json_t *o = json_loadb(p, (size_t)(stop - p), JSON_REJECT_DUPLICATES, &where), *value;
            const char *key;
            if (!json_is_object(o)) {
                json_decref(o);
                return ps_fail(x->err, PS_INVALID_ARGUMENT, "%s, line %u: not a JSON object%s%s", path, line,
                               o ? "" : ": ", o ? "" : where.text);
            }
            json_object_foreach(o, key, value)
            {
                const char *word = json_string_value(value);
                bool odd = word && (same(word, "NaN") || same(word, "Infinity") || same(word, "-Infinity"));
                if ((json_is_number(value) || odd) && count < columns_max)
                    cells[count++] = (struct cell){key, cli_json_to_number(value)};
            }
            int code = take_row(x, cells, count);
            json_decref(o);
            if (code)
                return ps_error_prefix(x->err, "%s, line %u", path, line);
        }
        p = stop + 1;
    }
    return 0;
}

/* ---- CSV (RFC 4180) ---- */

struct csv {
    char *at, *end;
    unsigned line;
    bool line_over;
};

/* The next field, unquoted in place; NULL: a quote that does not end. */
static char *csv_field(struct csv *csv)
{
    char *start = csv->at, *out = csv->at;
    if (csv->at < csv->end && *csv->at == '"') {
        csv->at++;
        for (;; *out++ = *csv->at++) {
            if (csv->at >= csv->end)
                return NULL;
            if (*csv->at == '\n')
                csv->line++;
            if (*csv->at != '"')
                continue;
            if (csv->at[1] != '"')
                break;
            csv->at++;
        }
        csv->at++;
        if (csv->at < csv->end && !strchr(",\r\n", *csv->at))
            return NULL;
    } else {
        while (csv->at < csv->end && *csv->at != ',' && *csv->at != '\n' && *csv->at != '\r')
            csv->at++;
        out = csv->at;
    }
    char *stop = csv->at;
    if (csv->at < csv->end && *csv->at == '\r')
        csv->at++;
    csv->line_over = csv->at >= csv->end || *csv->at == '\n';
    if (csv->at < csv->end)
        csv->at++;
    *out = '\0';
    if (stop > out)
        *stop = '\0';
    return start;
}

/* A number, "nan" and "inf" among them; false: something else. */
static bool csv_number(const char *text, double *ret)
{
    char *end;
    if (!*text || isspace((unsigned char)*text))
        return false;
    *ret = strtod(text, &end);
    return end != text && !*end;
}

static int read_csv(struct importing *x, const char *path, char *text, size_t size)
{
    struct csv csv = {.at = text, .end = text + size, .line = 1};
    char *names[columns_max];
    size_t columns = 0;
    do {
        char *name = csv_field(&csv);
        if (!name || columns == columns_max)
            return ps_fail(x->err, PS_INVALID_ARGUMENT, "%s, line 1: %s", path,
                           name ? "too many columns" : "a quote does not end");
        names[columns++] = name;
    } while (!csv.line_over);
    bool useful = false;
    for (size_t i = 0; i < columns; i++)
        useful = useful || same(names[i], "epoch") || same(names[i], "step");
    if (!useful)
        return ps_fail(x->err, PS_INVALID_ARGUMENT, "%s, line 1: no column is called epoch or step", path);
    for (csv.line = 2; csv.at < csv.end; csv.line++) {
        struct cell cells[columns_max + 1];
        size_t count = 0, column = 0;
        const char *series = NULL;
        unsigned line = csv.line;
        do {
            char *field = csv_field(&csv);
            double value;
            if (!field || (column == columns && *field))
                return ps_fail(x->err, PS_INVALID_ARGUMENT, "%s, line %u: %s", path, line,
                               field ? "more fields than columns" : "a quote does not end");
            if (column < columns && same(names[column], "series"))
                series = field;
            else if (column < columns && csv_number(field, &value))
                cells[count++] = (struct cell){names[column], value};
            column++;
        } while (!csv.line_over && column <= columns);
        if (!csv.line_over)
            return ps_fail(x->err, PS_INVALID_ARGUMENT, "%s, line %u: more fields than columns", path, line);
        /* The long form of `paramsync export --series`: one value a line. */
        size_t kept = 0;
        for (size_t i = 0; i < count && series; i++) {
            if (same(cells[i].name, "value"))
                cells[kept++] = (struct cell){series, cells[i].value};
            else if (same(cells[i].name, "step") || same(cells[i].name, "elapsed_s"))
                cells[kept++] = cells[i];
        }
        if (take_row(x, cells, series ? kept : count))
            return ps_error_prefix(x->err, "%s, line %u", path, line);
    }
    return 0;
}

/* ---- TensorBoard ---- */

static int on_scalar(void *context, const struct cli_scalar *s)
{
    struct importing *x = context;
    if (!x->has_wall && s->wall_s > 0) {
        x->has_wall = true;
        x->first_wall = s->wall_s;
    }
    double elapsed = x->has_wall && is_seconds(s->wall_s - x->first_wall) ? s->wall_s - x->first_wall : 0;
    struct paramsync_epoch probe = {0};
    if (s->step >= INT64_MAX)
        return ps_fail(x->err, PS_INVALID_ARGUMENT, "step %llu of %.100s: too high",
                       (unsigned long long)s->step, s->tag);
    bool ours = strncmp(s->tag, "epoch/", 6) == 0;
    if ((is_figure(x, s->tag) || ours) && s->step >= 1 && s->step <= epochs_max &&
        set_figure(x, &probe, s->tag, 0)) {
        struct paramsync_epoch *e = epoch_of(x, (uint32_t)s->step);
        if (!e)
            return PS_RESOURCE_EXHAUSTED;
        set_figure(x, e, s->tag, s->value);
        e->elapsed_s = fmax(e->elapsed_s, elapsed);
        x->to->last_s = fmax(x->to->last_s, elapsed);
        return 0;
    }
    return add_point(x, s->tag, s->step, s->value, elapsed);
}

static const char *guess(const char *path, const char *text, size_t size)
{
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    const char *dot = strrchr(name, '.');
    if (strstr(name, "tfevents"))
        return "tensorboard";
    if (dot && (same(dot, ".csv") || same(dot, ".CSV")))
        return "csv";
    if (dot && (same(dot, ".jsonl") || same(dot, ".ndjson")))
        return "jsonl";
    if (memchr(text, '\0', size))
        return "tensorboard";
    return text[strspn(text, " \t\r\n")] == '{' ? "jsonl" : "csv";
}

int cli_import_read(const char *path, const char *format, const struct cli_import_names *names,
                    struct cli_import *ret_import, struct ps_error *err)
{
    struct cli_import import = {0};
    struct importing x = {.names = names, .to = &import, .err = err};
    char *text;
    size_t size;
    int code = ps_read_file(path, file_max, &text, &size, err);
    if (code)
        return code;
    if (same(format, "auto"))
        format = guess(path, text, size);
    if (!size)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is empty", path);
    else if (same(format, "tensorboard"))
        code = cli_events_read(text, size, path, on_scalar, &x, err);
    else if (memchr(text, '\0', size))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is no text: not %s", path, format);
    else
        code = same(format, "csv") ? read_csv(&x, path, text, size) : read_jsonl(&x, path, text, size);
    free(text);
    if (!code && !import.epoch_count && !import.point_count)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s holds no epoch and no step with a number", path);
    if (code) {
        cli_import_done(&import);
        return code;
    }
    *ret_import = import;
    return 0;
}
