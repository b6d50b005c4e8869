/* SPDX-License-Identifier: Apache-2.0
 * Epochs and step series. */
#include "db/store_block.h"
#include "db/store_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_SERIES = 1024, /* answered at once */
    DEFAULT_POINTS = 2000,
    MAX_POINTS = 10000,
    MAX_BATCH = 1 << 20,
};

void ps_epoch_list_done(struct ps_epoch_list *list)
{
    ps_arena_free(list->memory);
    *list = (struct ps_epoch_list){0};
}

void ps_series_list_done(struct ps_series_list *list)
{
    ps_arena_free(list->memory);
    *list = (struct ps_series_list){0};
}

/* ---- Epochs ---- */

#define EPOCH_COLUMNS                                                                                        \
    "epoch, attempt, train_loss_bits, val_loss_bits, accuracy_bits, lr_bits, samples_per_s_bits, "           \
    "elapsed_bits,"                                                                                          \
    " train_s_bits, eval_s_bits, step, correct, counted, no_eval"

static struct ps_epoch read_epoch(sqlite3_stmt *stmt)
{
    return (struct ps_epoch){
        .epoch = (uint32_t)sqlite3_column_int64(stmt, 0),
        .attempt = (uint32_t)sqlite3_column_int64(stmt, 1),
        .train_loss = ps_sql_bits(stmt, 2),
        .val_loss = ps_sql_bits(stmt, 3),
        .accuracy = ps_sql_bits(stmt, 4),
        .lr = ps_sql_bits(stmt, 5),
        .samples_per_s = ps_sql_bits(stmt, 6),
        .elapsed_s = ps_sql_bits(stmt, 7),
        .train_s = ps_sql_bits(stmt, 8),
        .eval_s = ps_sql_bits(stmt, 9),
        .step = (uint64_t)sqlite3_column_int64(stmt, 10),
        .correct = (uint32_t)sqlite3_column_int64(stmt, 11),
        .counted = (uint32_t)sqlite3_column_int64(stmt, 12),
        .no_eval = sqlite3_column_int(stmt, 13),
    };
}

static bool same_bits(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static bool same_epoch(const struct ps_epoch *a, const struct ps_epoch *b)
{
    return same_bits(a->train_loss, b->train_loss) && same_bits(a->val_loss, b->val_loss) &&
           same_bits(a->accuracy, b->accuracy) && same_bits(a->lr, b->lr) &&
           same_bits(a->samples_per_s, b->samples_per_s) && same_bits(a->elapsed_s, b->elapsed_s) &&
           same_bits(a->train_s, b->train_s) && same_bits(a->eval_s, b->eval_s) && a->step == b->step &&
           a->correct == b->correct && a->counted == b->counted && a->no_eval == b->no_eval;
}

/* Writes the run's digest of its epochs. */
static int summarise(struct ps_tx *tx, int64_t n, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    struct ps_epoch last = {0}, best = {0};
    bool any_best = false;
    int code = ps_sql_query(tx->conn, &stmt, err,
                            "SELECT " EPOCH_COLUMNS " FROM epochs WHERE run = ? ORDER BY epoch, attempt DESC",
                            "i", n);
    uint32_t seen = 0;
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_epoch epoch = read_epoch(stmt);
        if (epoch.attempt >= last.attempt)
            last = epoch;
        if (epoch.epoch == seen) /* an older attempt's */
            continue;
        seen = epoch.epoch;
        if (!epoch.no_eval && !isnan(epoch.accuracy) && (!any_best || epoch.accuracy > best.accuracy)) {
            best = epoch;
            any_best = true;
        }
    }
    if (code)
        return code;
    if (last.no_eval)
        last.val_loss = last.accuracy = 0;
    return ps_sql_run(
        tx->conn, err,
        "UPDATE runs SET last_epoch = ?, last_evaluated = ?, train_loss_bits = ?, val_loss_bits = ?,"
        " accuracy_bits = ?, samples_per_s_bits = ?, best_epoch = ?, best_accuracy_bits = ? WHERE n = ?",
        "kkxxxxkxi", last.epoch, (unsigned)!last.no_eval, last.train_loss, last.val_loss, last.accuracy,
        last.samples_per_s, best.epoch, best.accuracy, n);
}

struct epoch_arguments {
    const char *name;
    const struct ps_epoch *epoch;
    bool replaced;
};

static int epoch_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct epoch_arguments *a = arguments;
    const struct ps_epoch *e = a->epoch;
    struct ps_run_key key;
    uint32_t attempt;
    a->replaced = false;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_find_attempt(&key, a->name, e->attempt, &attempt, err);
    if (!code)
        code = ps_touch_run(tx, &key, attempt, e->elapsed_s, err);
    sqlite3_stmt *stmt;
    if (!code)
        code =
            ps_sql_query(tx->conn, &stmt, err,
                         "SELECT " EPOCH_COLUMNS " FROM epochs WHERE run = ? AND epoch = ? AND attempt = ?",
                         "ikk", key.n, e->epoch, attempt);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        struct ps_epoch before = read_epoch(stmt);
        sqlite3_reset(stmt);
        a->replaced = true;
        code = 0;
        if (same_epoch(&before, e)) /* sent again: nothing has happened */
            return 0;
    }
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "INSERT OR REPLACE INTO epochs (run, " EPOCH_COLUMNS ")"
                          " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                          "ikkxxxxxxxxikkk", key.n, e->epoch, attempt, e->train_loss, e->val_loss,
                          e->accuracy, e->lr, e->samples_per_s, e->elapsed_s, e->train_s, e->eval_s,
                          (int64_t)e->step, e->correct, e->counted, (unsigned)e->no_eval);
    if (!code)
        code = summarise(tx, key.n, err);
    if (!code && e->no_eval)
        code = ps_tx_event(tx, key.id, attempt, "epoch", err, "epoch %u: train loss %.4f", e->epoch,
                           e->train_loss);
    else if (!code)
        code = ps_tx_event(tx, key.id, attempt, "epoch", err,
                           "epoch %u: train loss %.4f, loss %.4f, accuracy %.4f", e->epoch, e->train_loss,
                           e->val_loss, e->accuracy);
    return code;
}

int ps_store_report_epoch(struct ps_store *store, const char *run, const struct ps_epoch *epoch,
                          bool *ret_replaced, struct ps_error *err)
{
    struct epoch_arguments a = {.name = run, .epoch = epoch};
    int code = ps_store_write(store, epoch_op, NULL, &a, err);
    if (!code && ret_replaced)
        *ret_replaced = a.replaced;
    return code;
}

static double attempt_offset(const struct ps_attempt_list *attempts, uint32_t attempt)
{
    for (size_t i = 0; i < attempts->count; i++)
        if (attempts->attempts[i].attempt == attempt)
            return attempts->attempts[i].offset_s;
    return 0;
}

int ps_store_query_epochs(struct ps_store *store, const char *run, bool all_attempts,
                          struct ps_epoch_list *ret_list, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_epoch_list list = {0};
    struct ps_attempt_list attempts = {0};
    struct ps_run_key key;
    size_t capacity = 0;
    sqlite3_stmt *stmt;
    struct ps_arena *arena = ps_arena_new();
    list.memory = arena;
    code = arena ? ps_find_run(conn, run, &key, err) : ps_no_memory(err);
    if (!code)
        code = ps_load_attempts(conn, key.n, &attempts, err);
    if (!code)
        code = ps_sql_query(conn, &stmt, err,
                            "SELECT " EPOCH_COLUMNS " FROM epochs WHERE run = ? ORDER BY epoch, attempt", "i",
                            key.n);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_epoch epoch = read_epoch(stmt);
        epoch.elapsed_s += attempt_offset(&attempts, epoch.attempt);
        if (!all_attempts && list.count && list.epochs[list.count - 1].epoch == epoch.epoch) {
            list.epochs[list.count - 1] = epoch; /* ordered by attempt: the newer one stays */
            continue;
        }
        struct ps_epoch *larger = ps_arena_grow(arena, list.epochs, list.count, &capacity, sizeof *larger);
        if (!larger) {
            code = ps_no_memory(err);
            break;
        }
        list.epochs = larger;
        list.epochs[list.count++] = epoch;
    }
    ps_read_end(store, conn);
    ps_attempt_list_done(&attempts);
    if (code) {
        ps_epoch_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}

/* ---- Step points: writing ---- */

/* The series of one batch by name: open addressing, twice as many places as points. */
struct batch_series {
    const char *name;
    int64_t n;
    int64_t tail; /* rows of points, with this batch's */
};

struct steps_arguments {
    const char *name;
    uint32_t rank, attempt;
    uint64_t seq;
    const struct ps_point *points;
    size_t count;
    struct batch_series *table; /* table_size places */
    size_t table_size;
    bool stored;
    uint32_t ret_attempt;
};

/* Puts seq into the intervals of what is stored; *ret_new is false if it was there. */
static int claim_seq(struct ps_tx *tx, int64_t n, uint32_t attempt, uint32_t rank, int64_t seq, bool *ret_new,
                     struct ps_error *err)
{
    /* The interval that begins last at or before seq, and the one that begins right after it. */
    int64_t first = 0, last = 0, next_last = 0;
    sqlite3_stmt *stmt;
    int code = ps_sql_query(
        tx->conn, &stmt, err,
        "SELECT first, last FROM batches WHERE run = ? AND attempt = ? AND rank = ? AND first <= ?"
        " ORDER BY first DESC LIMIT 1",
        "ikki", n, attempt, rank, seq);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        first = sqlite3_column_int64(stmt, 0);
        last = sqlite3_column_int64(stmt, 1);
        sqlite3_reset(stmt);
        code = 0;
    }
    if (code)
        return code;
    *ret_new = !(first && seq <= last);
    if (!*ret_new)
        return 0;
    code = ps_sql_int(tx->conn, 0, &next_last, err,
                      "SELECT last FROM batches WHERE run = ? AND attempt = ? AND rank = ? AND first = ?",
                      "ikki", n, attempt, rank, seq + 1);
    if (!code && next_last)
        code = ps_sql_run(tx->conn, err,
                          "DELETE FROM batches WHERE run = ? AND attempt = ? AND rank = ? AND first = ?",
                          "ikki", n, attempt, rank, seq + 1);
    int64_t new_last = next_last ? next_last : seq;
    if (!code && first && last == seq - 1)
        return ps_sql_run(
            tx->conn, err,
            "UPDATE batches SET last = ? WHERE run = ? AND attempt = ? AND rank = ? AND first = ?", "iikki",
            new_last, n, attempt, rank, first);
    return code ? code
                : ps_sql_run(tx->conn, err,
                             "INSERT INTO batches (run, attempt, rank, first, last) VALUES (?, ?, ?, ?, ?)",
                             "ikkii", n, attempt, rank, seq, new_last);
}

static int find_series(struct ps_tx *tx, struct steps_arguments *a, int64_t run, uint32_t attempt,
                       const char *name, struct batch_series **ret_series, struct ps_error *err)
{
    size_t at = (size_t)ps_hash64(name, strlen(name), 0) & (a->table_size - 1);
    while (a->table[at].name && strcmp(a->table[at].name, name) != 0)
        at = (at + 1) & (a->table_size - 1);
    struct batch_series *series = &a->table[at];
    *ret_series = series;
    if (series->name)
        return 0;
    sqlite3_stmt *stmt;
    int code =
        ps_sql_query(tx->conn, &stmt, err,
                     "SELECT n, tail FROM series WHERE run = ? AND name = ? AND rank = ? AND attempt = ?",
                     "itkk", run, name, a->rank, attempt);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        series->n = sqlite3_column_int64(stmt, 0);
        series->tail = sqlite3_column_int64(stmt, 1);
        sqlite3_reset(stmt);
        code = 0;
    } else if (!code) {
        code = ps_sql_run(tx->conn, err, "INSERT INTO series (run, name, rank, attempt) VALUES (?, ?, ?, ?)",
                          "itkk", run, name, a->rank, attempt);
        series->n = sqlite3_last_insert_rowid(tx->conn->db);
        series->tail = 0;
    }
    if (!code)
        series->name = name;
    return code;
}

static int64_t microseconds(double seconds)
{
    double us = nearbyint(seconds * 1e6);
    if (!(us >= -9e18))
        return us < 0 ? INT64_MIN : 0; /* NaN is 0 */
    return us > 9e18 ? INT64_MAX : (int64_t)us;
}

/* Turns the rows of a series into blocks of block_points to twice as many points each. */
static int pack_tail(struct ps_tx *tx, struct batch_series *series, struct ps_error *err)
{
    size_t count = 0, room = (size_t)series->tail;
    struct ps_block_point *points = malloc(room * sizeof *points);
    struct ps_buf block = PS_BUF_INIT(32 << 20);
    sqlite3_stmt *stmt;
    int code = points ? 0 : ps_no_memory(err);
    if (!code)
        code = ps_sql_query(tx->conn, &stmt, err,
                            "SELECT step, seq, value_bits, elapsed_us FROM points WHERE series = ?"
                            " ORDER BY step, seq, position",
                            "i", series->n);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        if (count == room) {
            code = ps_fail(err, PS_DATA_LOSS, "a series has more rows than it should");
            break;
        }
        points[count++] = (struct ps_block_point){
            .step = (uint64_t)sqlite3_column_int64(stmt, 0),
            .seq = (uint64_t)sqlite3_column_int64(stmt, 1),
            .value_bits = (uint64_t)sqlite3_column_int64(stmt, 2),
            .elapsed_us = sqlite3_column_int64(stmt, 3),
        };
    }
    size_t blocks = count / tx->store->config.block_points;
    if (blocks == 0)
        blocks = 1;
    for (size_t i = 0; !code && count && i < blocks; i++) {
        size_t from = count * i / blocks, to = count * (i + 1) / blocks;
        ps_buf_clear(&block);
        code = ps_block_pack(points + from, to - from, &block, err);
        if (!code)
            code = ps_sql_run(
                tx->conn, err,
                "INSERT INTO blocks (series, first_step, last_step, count, data) VALUES (?, ?, ?, ?, ?)",
                "iiiib", series->n, (int64_t)points[from].step, (int64_t)points[to - 1].step,
                (int64_t)(to - from), (const void *)block.data, block.size);
    }
    if (!code)
        code = ps_sql_run(tx->conn, err, "DELETE FROM points WHERE series = ?", "i", series->n);
    series->tail = 0;
    ps_buf_done(&block);
    free(points);
    return code;
}

static int steps_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct steps_arguments *a = arguments;
    struct ps_run_key key;
    uint32_t attempt;
    a->stored = false;
    memset(a->table, 0, a->table_size * sizeof *a->table);
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_find_attempt(&key, a->name, a->attempt, &attempt, err);
    if (!code)
        code = claim_seq(tx, key.n, attempt, a->rank, (int64_t)a->seq, &a->stored, err);
    if (code)
        return code;
    a->ret_attempt = attempt;
    double elapsed = 0;
    for (size_t i = 0; a->rank == 0 && i < a->count; i++)
        if (a->points[i].elapsed_s > elapsed)
            elapsed = a->points[i].elapsed_s;
    code = ps_touch_run(tx, &key, attempt, elapsed, err);
    if (code || !a->stored)
        return code;
    for (size_t i = 0; !code && i < a->count; i++) {
        const struct ps_point *point = &a->points[i];
        struct batch_series *series;
        code = find_series(tx, a, key.n, attempt, point->name, &series, err);
        if (!code)
            code = ps_sql_run(tx->conn, err,
                              "INSERT INTO points (series, step, seq, position, value_bits, elapsed_us)"
                              " VALUES (?, ?, ?, ?, ?, ?)",
                              "iiiixi", series->n, (int64_t)point->step, (int64_t)a->seq, (int64_t)i,
                              point->value, microseconds(point->elapsed_s));
        if (!code)
            series->tail++;
    }
    for (size_t i = 0; !code && i < a->table_size; i++) {
        struct batch_series *series = &a->table[i];
        if (!series->name)
            continue;
        if (series->tail >= (int64_t)tx->store->config.block_points)
            code = pack_tail(tx, series, err);
        if (!code)
            code = ps_sql_run(tx->conn, err, "UPDATE series SET tail = ? WHERE n = ?", "ii", series->tail,
                              series->n);
    }
    return code;
}

int ps_store_append_steps(struct ps_store *store, const char *run, uint32_t rank, uint32_t attempt,
                          uint64_t seq, const struct ps_point *points, size_t count, bool *ret_stored,
                          uint32_t *ret_attempt, struct ps_error *err)
{
    if (seq == 0 || seq >= INT64_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "seq: must be from 1 to 2^63 - 2");
    if (count > MAX_BATCH)
        return ps_fail(err, PS_INVALID_ARGUMENT, "points: %zu in one batch, at most %d", count, MAX_BATCH);
    for (size_t i = 0; i < count; i++)
        if (points[i].step > INT64_MAX)
            return ps_fail(err, PS_INVALID_ARGUMENT, "points[%zu].step: must be below 2^63", i);
    struct steps_arguments a = {.name = run,
                                .rank = rank,
                                .attempt = attempt,
                                .seq = seq,
                                .points = points,
                                .count = count,
                                .table_size = 2};
    while (a.table_size < 2 * count)
        a.table_size *= 2;
    a.table = malloc(a.table_size * sizeof *a.table);
    if (!a.table)
        return ps_no_memory(err);
    int code = ps_store_write(store, steps_op, NULL, &a, err);
    free(a.table);
    if (code)
        return code;
    if (a.stored)
        store->points_stored += count;
    else
        store->batches_replayed++;
    if (ret_stored)
        *ret_stored = a.stored;
    if (ret_attempt)
        *ret_attempt = a.ret_attempt;
    return 0;
}

/* ---- Step points: reading ---- */

struct row {
    struct ps_block_point point;
    uint32_t attempt;
};

struct rows {
    struct row *rows;
    size_t count, capacity;
};

static int rows_reserve(struct rows *rows, size_t more, struct ps_error *err)
{
    if (rows->capacity - rows->count >= more)
        return 0;
    size_t capacity = rows->capacity ? rows->capacity * 2 : 1024;
    while (capacity - rows->count < more)
        capacity *= 2;
    struct row *larger = realloc(rows->rows, capacity * sizeof *larger);
    if (!larger)
        return ps_no_memory(err);
    rows->rows = larger;
    rows->capacity = capacity;
    return 0;
}

static int load_block(const void *data, size_t size, uint64_t from, uint64_t to, uint32_t attempt,
                      struct ps_block_point **scratch, size_t *scratch_size, struct rows *rows,
                      struct ps_error *err)
{
    size_t count;
    int code = ps_block_count(data, size, &count, err);
    if (!code && count > *scratch_size) {
        struct ps_block_point *larger = realloc(*scratch, count * sizeof *larger);
        if (!larger)
            return ps_no_memory(err);
        *scratch = larger;
        *scratch_size = count;
    }
    if (!code)
        code = ps_block_unpack(data, size, *scratch, count, err);
    if (!code)
        code = rows_reserve(rows, count, err);
    for (size_t i = 0; !code && i < count; i++)
        if ((*scratch)[i].step >= from && (*scratch)[i].step <= to)
            rows->rows[rows->count++] = (struct row){(*scratch)[i], attempt};
    return code;
}

static int by_step(const void *left, const void *right)
{
    const struct row *a = left, *b = right;
    if (a->point.step != b->point.step)
        return a->point.step < b->point.step ? -1 : 1;
    if (a->point.seq != b->point.seq)
        return a->point.seq < b->point.seq ? -1 : 1;
    return 0;
}

/* Sorts by (step, seq), keeping the order of equals; blocks come nearly sorted, one after the other. */
static int sort_rows(struct row *rows, size_t count, struct ps_error *err)
{
    size_t i = 1;
    while (i < count && by_step(&rows[i - 1], &rows[i]) <= 0)
        i++;
    if (i >= count)
        return 0;
    struct row *scratch = malloc(count * sizeof *scratch);
    if (!scratch)
        return ps_no_memory(err);
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t low = 0; low < count; low += 2 * width) {
            size_t middle = low + width < count ? low + width : count;
            size_t high = low + 2 * width < count ? low + 2 * width : count;
            size_t left = low, right = middle, out = low;
            while (out < high)
                scratch[out++] = right >= high || (left < middle && by_step(&rows[left], &rows[right]) <= 0)
                                     ? rows[left++]
                                     : rows[right++];
        }
        memcpy(rows, scratch, count * sizeof *rows);
    }
    free(scratch);
    return 0;
}

/* All points of one series (of one attempt) in the window, in order, appended to rows. */
static int load_series(struct ps_conn *conn, int64_t n, uint32_t attempt, uint64_t from, uint64_t to,
                       struct rows *rows, struct ps_error *err)
{
    size_t start = rows->count, scratch_size = 0;
    struct ps_block_point *scratch = NULL;
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err,
                            "SELECT data FROM blocks WHERE series = ? AND last_step >= ? AND first_step <= ?"
                            " ORDER BY first_step, n",
                            "iii", n, (int64_t)from, (int64_t)to);
    while (!code && (code = ps_sql_step(stmt, err)) == 1)
        code = load_block(sqlite3_column_blob(stmt, 0), (size_t)sqlite3_column_bytes(stmt, 0), from, to,
                          attempt, &scratch, &scratch_size, rows, err);
    free(scratch);
    if (!code)
        code = ps_sql_query(
            conn, &stmt, err,
            "SELECT step, seq, value_bits, elapsed_us FROM points WHERE series = ? AND step BETWEEN ? AND ?"
            " ORDER BY step, seq, position",
            "iii", n, (int64_t)from, (int64_t)to);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = rows_reserve(rows, 1, err);
        if (!code)
            rows->rows[rows->count++] = (struct row){{.step = (uint64_t)sqlite3_column_int64(stmt, 0),
                                                      .seq = (uint64_t)sqlite3_column_int64(stmt, 1),
                                                      .value_bits = (uint64_t)sqlite3_column_int64(stmt, 2),
                                                      .elapsed_us = sqlite3_column_int64(stmt, 3)},
                                                     attempt};
    }
    return code ? code : sort_rows(rows->rows + start, rows->count - start, err);
}

/* Each step once: rows holds older[0..split) and, after it, the newer attempt's; both sorted by step. */
static int merge_attempts(struct rows *rows, size_t split, struct ps_error *err)
{
    struct row *merged = malloc((rows->count + 1) * sizeof *merged);
    if (!merged)
        return ps_no_memory(err);
    size_t out = 0, old = 0, new = split;
    while (old < split || new < rows->count) {
        /* Of equal steps the newer attempt's comes after the older one's, and replaces it. */
        bool older =
            new == rows->count || (old < split && rows->rows[old].point.step <= rows->rows[new].point.step);
        const struct row *take = &rows->rows[older ? old++ : new ++];
        if (out && merged[out - 1].point.step == take->point.step)
            merged[out - 1] = *take;
        else
            merged[out++] = *take;
    }
    free(rows->rows);
    *rows = (struct rows){merged, out, rows->count + 1};
    return 0;
}

static double row_value(const struct row *row)
{
    double value;
    memcpy(&value, &row->point.value_bits, sizeof value);
    return value;
}

/* Chooses at most max of count rows, in order, into picked: first, last, and of each of equally many rows in
 * between the lowest, the highest and, where there are such values, the first that is not finite. Depends on
 * nothing but the rows. */
static size_t down_sample(const struct row *rows, size_t count, size_t max, size_t *picked)
{
    if (count <= max) {
        for (size_t i = 0; i < count; i++)
            picked[i] = i;
        return count;
    }
    bool special = false;
    size_t low = SIZE_MAX, high = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        double value = row_value(&rows[i]);
        if (!isfinite(value)) {
            special = true;
            continue;
        }
        if (low == SIZE_MAX || value < row_value(&rows[low]))
            low = i;
        if (high == SIZE_MAX || value > row_value(&rows[high]))
            high = i;
    }
    size_t per = special ? 3 : 2, out = 0;
    if (max < 2 + per) { /* by importance, while there is room */
        size_t wanted[4] = {count - 1, 0, high, low};
        bool used[4] = {false};
        size_t n = 0;
        for (size_t i = 0; i < 4 && n < max; i++) {
            bool again = wanted[i] == SIZE_MAX;
            for (size_t k = 0; k < i; k++)
                again = again || (used[k] && wanted[k] == wanted[i]);
            used[i] = !again;
            n += !again;
        }
        for (size_t i = 0; i < count; i++)
            for (size_t k = 0; k < 4; k++)
                if (used[k] && wanted[k] == i)
                    picked[out++] = i;
        return out;
    }
    size_t buckets = (max - 2) / per, inner = count - 2;
    picked[out++] = 0;
    for (size_t b = 0; b < buckets; b++) {
        size_t from = 1 + inner * b / buckets, to = 1 + inner * (b + 1) / buckets;
        size_t best[3] = {SIZE_MAX, SIZE_MAX, SIZE_MAX};
        for (size_t i = from; i < to; i++) {
            double value = row_value(&rows[i]);
            if (!isfinite(value)) {
                if (best[2] == SIZE_MAX)
                    best[2] = i;
                continue;
            }
            if (best[0] == SIZE_MAX || value < row_value(&rows[best[0]]))
                best[0] = i;
            if (best[1] == SIZE_MAX || value > row_value(&rows[best[1]]))
                best[1] = i;
        }
        for (;;) { /* in order, each once */
            size_t next = SIZE_MAX;
            for (size_t k = 0; k < 3; k++)
                if (best[k] < next)
                    next = best[k];
            if (next == SIZE_MAX)
                break;
            picked[out++] = next;
            for (size_t k = 0; k < 3; k++)
                if (best[k] == next)
                    best[k] = SIZE_MAX;
        }
    }
    picked[out++] = count - 1;
    return out;
}

static int give_series(const struct rows *rows, size_t max, const struct ps_attempt_list *attempts,
                       struct ps_arena *arena, struct ps_series *series, struct ps_error *err)
{
    size_t room = rows->count < max ? rows->count : max;
    size_t *picked = malloc((room + 1) * sizeof *picked);
    if (!picked)
        return ps_no_memory(err);
    size_t count = down_sample(rows->rows, rows->count, max, picked);
    uint32_t *numbers = ps_arena_alloc(arena, (count + 1) * sizeof *numbers);
    uint64_t *steps = ps_arena_alloc(arena, (count + 1) * sizeof *steps);
    double *values = ps_arena_alloc(arena, (count + 1) * sizeof *values);
    double *elapsed = ps_arena_alloc(arena, (count + 1) * sizeof *elapsed);
    if (!numbers || !steps || !values || !elapsed) {
        free(picked);
        return ps_no_memory(err);
    }
    for (size_t i = 0; i < count; i++) {
        const struct row *row = &rows->rows[picked[i]];
        numbers[i] = row->attempt;
        steps[i] = row->point.step;
        values[i] = row_value(row);
        elapsed[i] = (double)row->point.elapsed_us / 1e6 + attempt_offset(attempts, row->attempt);
    }
    free(picked);
    series->count = count;
    series->attempts = numbers;
    series->steps = steps;
    series->values = values;
    series->elapsed_s = elapsed;
    series->total_points = rows->count;
    return 0;
}

struct series_key {
    int64_t n;
    const char *name;
    uint32_t rank, attempt;
};

static int list_keys(struct ps_conn *conn, int64_t run, const struct ps_series_query *query,
                     struct ps_arena *arena, struct series_key **ret_keys, size_t *ret_count,
                     struct ps_error *err)
{
    struct series_key *keys = NULL;
    size_t count = 0, capacity = 0;
    sqlite3_stmt *stmt;
    int code =
        ps_sql_query(conn, &stmt, err,
                     "SELECT n, name, rank, attempt FROM series WHERE run = ?1 AND (?2 = '' OR name = ?2)"
                     " AND (?3 < 0 OR rank = ?3) ORDER BY name, rank, attempt",
                     "iti", run, query->name, query->rank);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct series_key *larger = ps_arena_grow(arena, keys, count, &capacity, sizeof *keys);
        if (!larger || !(larger[count].name = ps_sql_text(stmt, 1, arena)))
            return ps_no_memory(err);
        keys = larger;
        keys[count].n = sqlite3_column_int64(stmt, 0);
        keys[count].rank = (uint32_t)sqlite3_column_int64(stmt, 2);
        keys[count].attempt = (uint32_t)sqlite3_column_int64(stmt, 3);
        count++;
    }
    *ret_keys = keys;
    *ret_count = count;
    return code;
}

static int list_names(struct ps_conn *conn, int64_t run, struct ps_arena *arena, struct ps_series_list *list,
                      struct ps_error *err)
{
    const char **names = NULL;
    size_t capacity = 0;
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err, "SELECT DISTINCT name FROM series WHERE run = ? ORDER BY name",
                            "i", run);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        const char **larger = ps_arena_grow(arena, names, list->name_count, &capacity, sizeof *names);
        if (!larger || !(larger[list->name_count] = ps_sql_text(stmt, 0, arena)))
            return ps_no_memory(err);
        names = larger;
        list->name_count++;
    }
    list->names = names;
    return code;
}

/* keys[0..count) are the attempts of one series. */
static int load_group(struct ps_conn *conn, const struct series_key *keys, size_t count,
                      const struct ps_series_query *query, const struct ps_attempt_list *attempts,
                      struct ps_arena *arena, struct ps_series *series, struct ps_error *err)
{
    uint64_t from = query->from_step > INT64_MAX ? INT64_MAX : query->from_step;
    uint64_t to = query->to_step && query->to_step < INT64_MAX ? query->to_step : INT64_MAX;
    struct rows rows = {0};
    int code = 0;
    for (size_t i = 0; !code && i < count; i++) {
        size_t split = rows.count;
        code = load_series(conn, keys[i].n, keys[i].attempt, from, to, &rows, err);
        if (!code && !query->all_attempts)
            code = merge_attempts(&rows, split, err);
    }
    series->name = keys[0].name;
    series->rank = keys[0].rank;
    if (!code)
        code = give_series(&rows, query->max_points ? query->max_points : DEFAULT_POINTS, attempts, arena,
                           series, err);
    free(rows.rows);
    return code;
}

int ps_store_query_series(struct ps_store *store, const char *run, const struct ps_series_query *query,
                          bool names_only, struct ps_series_list *ret_list, struct ps_error *err)
{
    if (query->max_points > MAX_POINTS)
        return ps_fail(err, PS_INVALID_ARGUMENT, "max_points %u: must be at most %d", query->max_points,
                       MAX_POINTS);
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_series_list list = {0};
    struct ps_attempt_list attempts = {0};
    struct ps_run_key key;
    struct series_key *keys = NULL;
    size_t count = 0;
    struct ps_arena *arena = ps_arena_new();
    list.memory = arena;
    code = arena ? ps_find_run(conn, run, &key, err) : ps_no_memory(err);
    if (!code)
        code = list_names(conn, key.n, arena, &list, err);
    if (!code && !names_only)
        code = list_keys(conn, key.n, query, arena, &keys, &count, err);
    if (!code && !names_only)
        code = ps_load_attempts(conn, key.n, &attempts, err);
    size_t capacity = 0;
    for (size_t i = 0, end; !code && i < count; i = end) {
        for (end = i + 1;
             end < count && keys[end].rank == keys[i].rank && strcmp(keys[end].name, keys[i].name) == 0;)
            end++;
        struct ps_series *larger = ps_arena_grow(arena, list.series, list.count, &capacity, sizeof *larger);
        if (!larger) {
            code = ps_no_memory(err);
        } else if (list.count == MAX_SERIES) {
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED,
                           "more than %d series at once: ask for one name or one rank", MAX_SERIES);
        } else {
            list.series = larger;
            code =
                load_group(conn, keys + i, end - i, query, &attempts, arena, &list.series[list.count++], err);
        }
    }
    ps_read_end(store, conn);
    ps_attempt_list_done(&attempts);
    if (code) {
        ps_series_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}
