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
    uint64_t bits[2];
    memcpy(&bits[0], &a, sizeof a);
    memcpy(&bits[1], &b, sizeof b);
    return bits[0] == bits[1];
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

/* The same for an epoch of the newest attempt that is later than all there are, which needs no look at those.
 */
static int summarise_next(struct ps_tx *tx, int64_t n, const struct ps_epoch *e, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    uint32_t best_epoch = 0;
    double best = 0;
    int code = ps_sql_query(tx->conn, &stmt, err,
                            "SELECT best_epoch, best_accuracy_bits FROM runs WHERE n = ?", "i", n);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        best_epoch = (uint32_t)sqlite3_column_int64(stmt, 0);
        best = ps_sql_bits(stmt, 1);
        sqlite3_reset(stmt);
        code = 0;
    }
    if (code)
        return code;
    if (!e->no_eval && !isnan(e->accuracy) && (!best_epoch || e->accuracy > best)) {
        best_epoch = e->epoch;
        best = e->accuracy;
    }
    return ps_sql_run(
        tx->conn, err,
        "UPDATE runs SET last_epoch = ?, last_evaluated = ?, train_loss_bits = ?, val_loss_bits = ?,"
        " accuracy_bits = ?, samples_per_s_bits = ?, best_epoch = ?, best_accuracy_bits = ? WHERE n = ?",
        "kkxxxxkxi", e->epoch, (unsigned)!e->no_eval, e->train_loss, e->no_eval ? 0 : e->val_loss,
        e->no_eval ? 0 : e->accuracy, e->samples_per_s, best_epoch, best, n);
}

/* The newest and the best epoch's stay. */
static int put_confusion(struct ps_tx *tx, int64_t run, uint32_t attempt, const struct ps_epoch *e,
                         struct ps_error *err)
{
    const size_t cells = (size_t)e->classes * e->classes;
    unsigned char *counts = malloc(cells * 4 + 1);
    if (!counts)
        return ps_no_memory(err);
    for (size_t i = 0; i < cells; i++)
        for (int k = 0; k < 4; k++)
            counts[4 * i + (size_t)k] = (unsigned char)(e->confusion[i] >> (8 * k));
    int code = ps_sql_run(tx->conn, err,
                          "INSERT OR REPLACE INTO confusions (run, epoch, attempt, classes, counts)"
                          " VALUES (?, ?, ?, ?, ?)",
                          "ikkkb", run, e->epoch, attempt, e->classes, counts, cells * 4);
    free(counts);
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "DELETE FROM confusions WHERE run = ?1 AND NOT (epoch = ?2 AND attempt = ?3)"
                          " AND epoch <> (SELECT best_epoch FROM runs WHERE n = ?1)",
                          "ikk", run, e->epoch, attempt);
    return code;
}

static int read_confusion(struct ps_conn *conn, const char *run, uint32_t epoch, bool latest,
                          struct ps_confusion *ret, struct ps_error *err)
{
    struct ps_run_key key = {0};
    sqlite3_stmt *stmt;
    int code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = ps_sql_query(conn, &stmt, err,
                            "SELECT epoch, attempt, classes, counts FROM confusions WHERE run = ?1 AND "
                            "(?3 OR epoch = CASE WHEN ?2 THEN ?2 ELSE (SELECT best_epoch FROM runs WHERE n = "
                            "?1) END) ORDER BY attempt DESC, epoch DESC LIMIT 1",
                            "ikk", key.n, epoch, (uint32_t)latest);
    if (code)
        return code;
    code = ps_sql_step(stmt, err);
    if (code == 0)
        return ps_fail(
            err, PS_NOT_FOUND,
            "run %s has no confusion matrix of %s: the newest and the best evaluated epoch's are kept", run,
            latest || !epoch ? "any epoch" : "this epoch");
    if (code < 0)
        return code;
    ret->epoch = (uint32_t)sqlite3_column_int64(stmt, 0);
    ret->attempt = (uint32_t)sqlite3_column_int64(stmt, 1);
    ret->classes = (uint32_t)sqlite3_column_int64(stmt, 2);
    const unsigned char *counts = sqlite3_column_blob(stmt, 3);
    const size_t cells = (size_t)ret->classes * ret->classes;
    code = ret->classes <= PS_MAX_CLASSES && (size_t)sqlite3_column_bytes(stmt, 3) == cells * 4
               ? 0
               : ps_fail(err, PS_DATA_LOSS, "run %s: the confusion matrix of epoch %u is damaged", run,
                         ret->epoch);
    for (size_t i = 0; i < cells && !code; i++)
        ret->counts[i] = (uint32_t)counts[4 * i] | (uint32_t)counts[4 * i + 1] << 8 |
                         (uint32_t)counts[4 * i + 2] << 16 | (uint32_t)counts[4 * i + 3] << 24;
    sqlite3_reset(stmt);
    return code;
}

int ps_store_get_confusion(struct ps_store *store, const char *run, uint32_t epoch, bool latest,
                           struct ps_confusion *ret, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    code = read_confusion(conn, run, epoch, latest, ret, err);
    ps_read_end(store, conn);
    return code;
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
    struct ps_run_key key = {0};
    uint32_t attempt = 0;
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
    int64_t latest = 0;
    if (!code)
        code =
            ps_sql_int(tx->conn, 0, &latest, err, "SELECT max(epoch) FROM epochs WHERE run = ?", "i", key.n);
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "INSERT OR REPLACE INTO epochs (run, " EPOCH_COLUMNS ")"
                          " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                          "ikkxxxxxxxxikkk", key.n, e->epoch, attempt, e->train_loss, e->val_loss,
                          e->accuracy, e->lr, e->samples_per_s, e->elapsed_s, e->train_s, e->eval_s,
                          (int64_t)e->step, e->correct, e->counted, (unsigned)e->no_eval);
    if (!code)
        code = attempt == key.attempt && (int64_t)e->epoch > latest ? summarise_next(tx, key.n, e, err)
                                                                    : summarise(tx, key.n, err);
    if (!code && e->confusion)
        code = put_confusion(tx, key.n, attempt, e, err);
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
    struct ps_run_key key = {0};
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
    int64_t tail; /* points in tails, with this batch's */
    size_t first; /* of its points in order[], once they are sorted by series */
    size_t count;
};

struct steps_arguments {
    const char *name;
    uint32_t rank, attempt;
    uint64_t seq;
    const struct ps_point *points;
    size_t count;
    struct batch_series *table; /* table_size places */
    size_t table_size;
    uint32_t *places;               /* count: each point's place in the table */
    struct ps_block_point *ordered; /* count: the points series by series, otherwise as they came */
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

static double block_value(const struct ps_block_point *point)
{
    double value;
    memcpy(&value, &point->value_bits, sizeof value);
    return value;
}

/* Appends to a list of indexes, which stays sorted and without repetition. */
static size_t add_index(size_t *list, size_t count, size_t index)
{
    size_t at = count;
    while (at > 0 && list[at - 1] > index)
        at--;
    if (index == SIZE_MAX || (at > 0 && list[at - 1] == index))
        return count;
    memmove(list + at + 1, list + at, (count - at) * sizeof *list);
    list[at] = index;
    return count + 1;
}

enum { SUMMARY_MAX = 5 };

/* The points that stand for a block when it is looked at from afar; none for a block that has a step twice,
 * of which only the last may be shown. */
static int pack_summary(const struct ps_block_point *points, size_t count, struct ps_buf *out,
                        struct ps_error *err)
{
    size_t low = SIZE_MAX, high = SIZE_MAX, special = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        if (i && points[i].step == points[i - 1].step)
            return ps_block_pack(points, 0, out, err);
        double value = block_value(&points[i]);
        if (!isfinite(value)) {
            if (special == SIZE_MAX)
                special = i;
            continue;
        }
        if (low == SIZE_MAX || value < block_value(&points[low]))
            low = i;
        if (high == SIZE_MAX || value > block_value(&points[high]))
            high = i;
    }
    size_t list[SUMMARY_MAX], n = 0;
    const size_t wanted[SUMMARY_MAX] = {0, low, high, special, count - 1};
    for (size_t i = 0; i < SUMMARY_MAX; i++)
        n = add_index(list, n, wanted[i]);
    struct ps_block_point chosen[SUMMARY_MAX];
    for (size_t i = 0; i < n; i++)
        chosen[i] = points[list[i]];
    return ps_block_pack(chosen, n, out, err);
}

/* What fits into one page of the file beside the row's other columns: a longer row takes a second page, and
 * leaves most of it empty. */
enum { BLOCK_BYTES = 4000 };

struct packed_block {
    struct ps_buf data, summary;
};

static int pack_block(const struct ps_block_point *points, size_t count, struct packed_block *block,
                      struct ps_error *err)
{
    *block = (struct packed_block){PS_BUF_INIT(32 << 20), PS_BUF_INIT(1 << 10)};
    int code = ps_block_pack(points, count, &block->data, err);
    return code ? code : pack_summary(points, count, &block->summary, err);
}

static void block_done(struct packed_block *block)
{
    ps_buf_done(&block->data);
    ps_buf_done(&block->summary);
}

/* In how many blocks of as many points each fills a page and none is larger. */
static int count_blocks(const struct ps_block_point *points, size_t count, size_t *ret_blocks,
                        struct ps_error *err)
{
    struct packed_block all;
    *ret_blocks = 0;
    if (!count) /* what the series' row said to be waiting is not there */
        return 0;
    int code = pack_block(points, count, &all, err);
    size_t blocks = (all.data.size + BLOCK_BYTES - 1) / BLOCK_BYTES;
    block_done(&all);
    bool fits = false;
    for (int tries = 0; !code && !fits && tries < 8 && blocks < count; tries++, blocks += !fits) {
        fits = true;
        for (size_t i = 0; !code && fits && i < blocks; i++) {
            struct packed_block one;
            size_t from = count * i / blocks, to = count * (i + 1) / blocks;
            code = pack_block(points + from, to - from, &one, err);
            fits = one.data.size + one.summary.size <= BLOCK_BYTES;
            block_done(&one);
        }
    }
    *ret_blocks = blocks ? blocks : 1;
    return code;
}

static int insert_block(struct ps_tx *tx, int64_t series, const struct ps_block_point *points, size_t count,
                        struct ps_error *err)
{
    struct packed_block block;
    int code = pack_block(points, count, &block, err);
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "INSERT INTO blocks (series, first_step, last_step, count, summary, data)"
                          " VALUES (?, ?, ?, ?, ?, ?)",
                          "iiiibb", series, (int64_t)points[0].step, (int64_t)points[count - 1].step,
                          (int64_t)count, (const void *)block.summary.data, block.summary.size,
                          (const void *)block.data.data, block.data.size);
    block_done(&block);
    return code;
}

static int by_step(const void *left, const void *right)
{
    const struct ps_block_point *a = left, *b = right;
    if (a->step != b->step)
        return a->step < b->step ? -1 : 1;
    if (a->seq != b->seq)
        return a->seq < b->seq ? -1 : 1;
    return 0;
}

/* Sorts by (step, seq), keeping the order of equals; mostly they are in order already. */
static int sort_points(struct ps_block_point *points, size_t count, struct ps_error *err)
{
    size_t i = 1;
    while (i < count && by_step(&points[i - 1], &points[i]) <= 0)
        i++;
    if (i >= count)
        return 0;
    struct ps_block_point *scratch = malloc(count * sizeof *scratch);
    if (!scratch)
        return ps_no_memory(err);
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t begin = 0; begin < count; begin += 2 * width) {
            size_t middle = begin + width < count ? begin + width : count;
            size_t end = begin + 2 * width < count ? begin + 2 * width : count;
            size_t left = begin, right = middle, out = begin;
            while (out < end)
                scratch[out++] =
                    right >= end || (left < middle && by_step(&points[left], &points[right]) <= 0)
                        ? points[left++]
                        : points[right++];
        }
        memcpy(points, scratch, count * sizeof *points);
    }
    free(scratch);
    return 0;
}

/* Turns the tail of a series into blocks that each fill a page. */
static int pack_tail(struct ps_tx *tx, struct batch_series *series, struct ps_error *err)
{
    size_t count = 0, room = (size_t)series->tail;
    struct ps_block_point *points = malloc(room * sizeof *points);
    sqlite3_stmt *stmt;
    int code = points ? 0 : ps_no_memory(err);
    if (!code)
        code = ps_sql_query(tx->conn, &stmt, err, "SELECT data FROM tails WHERE series = ? ORDER BY seq", "i",
                            series->n);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        const void *data = sqlite3_column_blob(stmt, 0);
        size_t size = (size_t)sqlite3_column_bytes(stmt, 0), n = 0;
        code = ps_block_count(data, size, &n, err);
        if (!code && n > room - count)
            code = ps_fail(err, PS_DATA_LOSS, "a series has more points in its tail than it should");
        if (!code)
            code = ps_block_unpack(data, size, points + count, n, err);
        count += n;
    }
    if (!code)
        code = sort_points(points, count, err);
    size_t blocks = 0;
    if (!code)
        code = count_blocks(points, count, &blocks, err);
    for (size_t i = 0; !code && i < blocks; i++) {
        size_t from = count * i / blocks, to = count * (i + 1) / blocks;
        code = insert_block(tx, series->n, points + from, to - from, err);
    }
    if (!code)
        code = ps_sql_run(tx->conn, err, "DELETE FROM tails WHERE series = ?", "i", series->n);
    series->tail = 0;
    free(points);
    return code;
}

static int insert_tail(struct ps_tx *tx, const struct batch_series *series, uint64_t seq,
                       const struct ps_block_point *points, struct ps_error *err)
{
    uint64_t low = points[0].step, high = points[0].step;
    for (size_t i = 1; i < series->count; i++) {
        low = points[i].step < low ? points[i].step : low;
        high = points[i].step > high ? points[i].step : high;
    }
    struct ps_buf data = PS_BUF_INIT(64 << 20);
    int code = ps_block_pack(points, series->count, &data, err);
    if (!code)
        code = ps_sql_run(
            tx->conn, err,
            "INSERT INTO tails (series, seq, first_step, last_step, count, data) VALUES (?, ?, ?, ?, ?, ?)",
            "iiiiib", series->n, (int64_t)seq, (int64_t)low, (int64_t)high, (int64_t)series->count,
            (const void *)data.data, data.size);
    ps_buf_done(&data);
    return code;
}

/* Fills ordered: the batch's points series by series. */
static int order_batch(struct ps_tx *tx, struct steps_arguments *a, int64_t run, uint32_t attempt,
                       struct ps_error *err)
{
    for (size_t i = 0; i < a->count; i++) {
        struct batch_series *series;
        int code = find_series(tx, a, run, attempt, a->points[i].name, &series, err);
        if (code)
            return code;
        series->count++;
        a->places[i] = (uint32_t)(series - a->table);
    }
    size_t next = 0;
    for (size_t i = 0; i < a->table_size; i++) {
        a->table[i].first = next;
        next += a->table[i].count;
        a->table[i].count = 0;
    }
    for (size_t i = 0; i < a->count; i++) {
        const struct ps_point *point = &a->points[i];
        struct batch_series *series = &a->table[a->places[i]];
        struct ps_block_point *to = &a->ordered[series->first + series->count++];
        to->step = point->step;
        to->seq = a->seq;
        memcpy(&to->value_bits, &point->value, sizeof to->value_bits);
        to->elapsed_us = microseconds(point->elapsed_s);
    }
    return 0;
}

static int steps_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct steps_arguments *a = arguments;
    struct ps_run_key key = {0};
    uint32_t attempt = 0;
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
    code = order_batch(tx, a, key.n, attempt, err);
    for (size_t i = 0; !code && i < a->table_size; i++) {
        struct batch_series *series = &a->table[i];
        if (!series->name)
            continue;
        series->tail += (int64_t)series->count;
        code = insert_tail(tx, series, a->seq, a->ordered + series->first, err);
        if (!code && series->tail >= (int64_t)tx->store->config.block_points)
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
    a.places = malloc((count + 1) * sizeof *a.places);
    a.ordered = malloc((count + 1) * sizeof *a.ordered);
    int code =
        a.table && a.places && a.ordered ? ps_store_write(store, steps_op, NULL, &a, err) : ps_no_memory(err);
    free(a.table);
    free(a.places);
    free(a.ordered);
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

/* ---- Rolling up ---- */

struct roll_arguments {
    const char *name;
    int64_t after; /* the series before this round's */
    bool done;     /* there are no more */
    uint64_t dropped;
    uint64_t dropped_before; /* this round */
};

static void roll_reset(void *arguments)
{
    struct roll_arguments *a = arguments;
    a->dropped = a->dropped_before;
}

/* One series a transaction, so that reports need not wait for long. */
static int roll_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct roll_arguments *a = arguments;
    struct ps_run_key key = {0};
    struct batch_series series = {0};
    int64_t n = 0, tail = 0;
    sqlite3_stmt *stmt;
    a->dropped_before = a->dropped;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code && ps_run_is_live(key.state))
        code = ps_fail(err, PS_FAILED_PRECONDITION,
                       "run \"%.200s\" is alive (%s): only ended runs are rolled up", a->name,
                       ps_run_state_name(key.state));
    if (!code)
        code = ps_sql_query(tx->conn, &stmt, err,
                            "SELECT n, tail FROM series WHERE run = ? AND n > ? ORDER BY n LIMIT 1", "ii",
                            key.n, a->after);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        n = sqlite3_column_int64(stmt, 0);
        tail = sqlite3_column_int64(stmt, 1);
        sqlite3_reset(stmt);
        code = 0;
    }
    if (code)
        return code;
    if (!n) {
        a->done = true;
        return ps_sql_run(tx->conn, err, "UPDATE runs SET rolled_up = 1 WHERE n = ?", "i", key.n);
    }
    series.n = n;
    series.tail = tail;
    if (tail > 0) /* no more will come */
        code = pack_tail(tx, &series, err);
    if (!code)
        code = ps_sql_run(tx->conn, err, "UPDATE series SET tail = ? WHERE n = ?", "ii", (int64_t)series.tail,
                          n);
    int64_t block = 0;
    while (!code) {
        size_t kept = 0;
        int64_t count = 0;
        code =
            ps_sql_query(tx->conn, &stmt, err,
                         "SELECT n, count, summary FROM blocks WHERE series = ? AND n > ? ORDER BY n LIMIT 1",
                         "ii", n, block);
        if (code || (code = ps_sql_step(stmt, err)) != 1)
            break;
        block = sqlite3_column_int64(stmt, 0);
        count = sqlite3_column_int64(stmt, 1);
        code =
            ps_block_count(sqlite3_column_blob(stmt, 2), (size_t)sqlite3_column_bytes(stmt, 2), &kept, err);
        sqlite3_reset(stmt);
        if (!code && kept &&
            (int64_t)kept < count) { /* a block without a summary has several points of one step */
            code = ps_sql_run(tx->conn, err, "UPDATE blocks SET data = summary, count = ? WHERE n = ?", "ii",
                              (int64_t)kept, block);
            a->dropped += (uint64_t)count - kept;
        }
    }
    a->after = n;
    tx->pages_freed = true;
    return code < 0 ? code : 0;
}

int ps_store_roll_up(struct ps_store *store, const char *run, uint64_t *ret_dropped, struct ps_error *err)
{
    struct roll_arguments a = {.name = run};
    while (!a.done) {
        int64_t after = a.after;
        int code = ps_store_write(store, roll_op, roll_reset, &a, err);
        if (code)
            return code;
        if (!a.done && a.after == after)
            return ps_fail(err, PS_INTERNAL, "rolling up does not get on");
    }
    *ret_dropped = a.dropped;
    return 0;
}

int ps_store_next_to_roll_up(struct ps_store *store, int64_t ended_before_ns, char ret_id[PS_RUN_ID_SIZE],
                             struct ps_error *err)
{
    struct ps_conn *conn;
    sqlite3_stmt *stmt;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    *ret_id = '\0';
    code =
        ps_sql_query(conn, &stmt, err,
                     "SELECT id FROM runs WHERE rolled_up = 0 AND ended_ns > 0 AND ended_ns < ? AND state > 2"
                     " ORDER BY ended_ns LIMIT 1",
                     "i", ended_before_ns);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        snprintf(ret_id, PS_RUN_ID_SIZE, "%s", (const char *)sqlite3_column_text(stmt, 0));
        code = 0;
    }
    ps_read_end(store, conn);
    return code;
}

int ps_store_run_size(struct ps_store *store, const char *run, struct ps_run_size *ret_size,
                      struct ps_error *err)
{
    struct ps_conn *conn;
    struct ps_run_key key = {0};
    int64_t blocks = 0, tails = 0, blobs = 0;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = ps_sql_int(conn, 0, &blocks, err,
                          "SELECT sum(length(b.data) + length(b.summary)) FROM blocks AS b JOIN series AS s"
                          " ON s.n = b.series WHERE s.run = ?",
                          "i", key.n);
    if (!code)
        code = ps_sql_int(conn, 0, &tails, err,
                          "SELECT sum(length(t.data)) FROM tails AS t JOIN series AS s ON s.n = t.series"
                          " WHERE s.run = ?",
                          "i", key.n);
    if (!code)
        code = ps_sql_int(conn, 0, &blobs, err,
                          "SELECT sum(size) FROM blobs WHERE path = '' AND sha256 IN"
                          " (SELECT sha256 FROM checkpoints WHERE run = ?)",
                          "i", key.n);
    ps_read_end(store, conn);
    if (!code)
        *ret_size = (struct ps_run_size){(uint64_t)(blocks + tails), (uint64_t)blobs};
    return code;
}

struct row {
    struct ps_block_point point;
    uint32_t attempt;
};

struct rows {
    struct row *rows;
    size_t count, capacity;
    uint64_t hidden; /* points that summaries stand for, beside the ones that are there */
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

/* A piece of a series as it is stored: a block or a tail. */
struct piece {
    uint64_t first_step, last_step, count;
    int64_t block; /* its row; 0 for a tail */
    int64_t seq;   /* of a tail */
    size_t key;    /* which of the group's series (attempts) it belongs to */
    bool crossed;  /* its steps overlap another piece's */
    size_t summary_count;
    struct ps_block_point summary[SUMMARY_MAX];
};

struct pieces {
    struct piece *pieces;
    size_t count, capacity, blocks;
};

static int list_pieces(struct ps_conn *conn, int64_t series, size_t key, uint64_t from, uint64_t to,
                       struct pieces *list, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err,
                            "SELECT first_step, last_step, count, n, 0, summary FROM blocks"
                            " WHERE series = ?1 AND last_step >= ?2 AND first_step <= ?3"
                            " UNION ALL SELECT first_step, last_step, count, 0, seq, NULL FROM tails"
                            " WHERE series = ?1 AND last_step >= ?2 AND first_step <= ?3",
                            "iii", series, (int64_t)from, (int64_t)to);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        if (list->count == list->capacity) {
            size_t capacity = list->capacity ? list->capacity * 2 : 64;
            struct piece *larger = realloc(list->pieces, capacity * sizeof *larger);
            if (!larger)
                return ps_no_memory(err);
            list->pieces = larger;
            list->capacity = capacity;
        }
        struct piece *piece = &list->pieces[list->count++];
        piece->first_step = (uint64_t)sqlite3_column_int64(stmt, 0);
        piece->last_step = (uint64_t)sqlite3_column_int64(stmt, 1);
        piece->count = (uint64_t)sqlite3_column_int64(stmt, 2);
        piece->block = sqlite3_column_int64(stmt, 3);
        piece->seq = sqlite3_column_int64(stmt, 4);
        piece->key = key;
        piece->crossed = false;
        piece->summary_count = 0;
        if (!piece->block)
            continue;
        list->blocks++;
        const void *summary = sqlite3_column_blob(stmt, 5);
        size_t size = (size_t)sqlite3_column_bytes(stmt, 5);
        code = ps_block_count(summary, size, &piece->summary_count, err);
        if (!code && piece->summary_count > SUMMARY_MAX)
            code = ps_fail(err, PS_DATA_LOSS, "a block's summary is damaged");
        if (!code)
            code = ps_block_unpack(summary, size, piece->summary, piece->summary_count, err);
    }
    return code;
}

static int by_first_step(const void *left, const void *right)
{
    const struct piece *a = left, *b = right;
    if (a->first_step != b->first_step)
        return a->first_step < b->first_step ? -1 : 1;
    if (a->block != b->block) /* blocks before tails, older before newer: the order of what came */
        return !a->block || (b->block && a->block > b->block) ? 1 : -1;
    return (a->seq > b->seq) - (a->seq < b->seq);
}

/* Sorts by step and marks what overlaps. */
static void sort_pieces(struct pieces *list)
{
    if (list->count)
        qsort(list->pieces, list->count, sizeof *list->pieces, by_first_step);
    size_t reach = 0; /* the piece so far whose steps go furthest */
    for (size_t i = 1; i < list->count; i++) {
        if (list->pieces[i].first_step <= list->pieces[reach].last_step)
            list->pieces[i].crossed = list->pieces[reach].crossed = true;
        if (list->pieces[i].last_step >= list->pieces[reach].last_step)
            reach = i;
    }
}

static int read_piece(struct ps_conn *conn, int64_t series, const struct piece *piece,
                      struct ps_block_point **scratch, size_t *scratch_size, size_t *ret_count,
                      struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code = piece->block
                   ? ps_sql_query(conn, &stmt, err, "SELECT data FROM blocks WHERE n = ?", "i", piece->block)
                   : ps_sql_query(conn, &stmt, err, "SELECT data FROM tails WHERE series = ? AND seq = ?",
                                  "ii", series, piece->seq);
    if (!code)
        code = ps_sql_step(stmt, err);
    if (code != 1)
        return code ? code : ps_fail(err, PS_DATA_LOSS, "a packed block of step points is gone");
    const void *data = sqlite3_column_blob(stmt, 0);
    size_t size = (size_t)sqlite3_column_bytes(stmt, 0), count = 0;
    code = ps_block_count(data, size, &count, err);
    if (!code && count > *scratch_size) {
        struct ps_block_point *larger = realloc(*scratch, count * sizeof *larger);
        if (larger) {
            *scratch = larger;
            *scratch_size = count;
        } else {
            code = ps_no_memory(err);
        }
    }
    if (!code)
        code = ps_block_unpack(data, size, *scratch, count, err);
    sqlite3_reset(stmt);
    if (!code)
        *ret_count = count;
    return code;
}

static int by_row(const struct row *a, const struct row *b)
{
    return by_step(&a->point, &b->point);
}

/* As sort_points. */
static int sort_rows(struct row *rows, size_t count, struct ps_error *err)
{
    size_t i = 1;
    while (i < count && by_row(&rows[i - 1], &rows[i]) <= 0)
        i++;
    if (i >= count)
        return 0;
    struct row *scratch = malloc(count * sizeof *scratch);
    if (!scratch)
        return ps_no_memory(err);
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t begin = 0; begin < count; begin += 2 * width) {
            size_t middle = begin + width < count ? begin + width : count;
            size_t end = begin + 2 * width < count ? begin + 2 * width : count;
            size_t left = begin, right = middle, out = begin;
            while (out < end)
                scratch[out++] = right >= end || (left < middle && by_row(&rows[left], &rows[right]) <= 0)
                                     ? rows[left++]
                                     : rows[right++];
        }
        memcpy(rows, scratch, count * sizeof *rows);
    }
    free(scratch);
    return 0;
}

struct series_key {
    int64_t n;
    const char *name;
    uint32_t rank, attempt;
};

/* The points of one attempt in the window, in order, appended to rows. With coarse, whole blocks that nothing
 * overlaps are stood for by their summaries. */
static int load_attempt(struct ps_conn *conn, const struct series_key *key, size_t number,
                        const struct pieces *list, uint64_t from, uint64_t to, bool coarse, struct rows *rows,
                        struct ps_error *err)
{
    size_t start = rows->count, scratch_size = 0;
    struct ps_block_point *scratch = NULL;
    int code = 0;
    for (size_t i = 0; !code && i < list->count; i++) {
        const struct piece *piece = &list->pieces[i];
        if (piece->key != number)
            continue;
        const struct ps_block_point *points = piece->summary;
        size_t count = piece->summary_count;
        bool whole = piece->first_step >= from && piece->last_step <= to;
        if (coarse && piece->summary_count && whole && !piece->crossed) {
            rows->hidden += piece->count - count;
        } else {
            code = read_piece(conn, key->n, piece, &scratch, &scratch_size, &count, err);
            points = scratch;
        }
        if (!code)
            code = rows_reserve(rows, count, err);
        for (size_t k = 0; !code && k < count; k++)
            if (points[k].step >= from && points[k].step <= to)
                rows->rows[rows->count++] = (struct row){points[k], key->attempt};
    }
    free(scratch);
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
    *rows = (struct rows){merged, out, rows->count + 1, rows->hidden};
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
    series->total_points = rows->count + rows->hidden;
    return 0;
}

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
    uint32_t max = query->max_points ? query->max_points : DEFAULT_POINTS;
    struct rows rows = {0};
    struct pieces list = {0};
    int code = 0;
    for (size_t i = 0; !code && i < count; i++)
        code = list_pieces(conn, keys[i].n, i, from, to, &list, err);
    sort_pieces(&list);
    /* So many blocks that each gives at least a fourth of a point: their summaries are fine enough. */
    bool coarse = list.blocks * 4 >= max;
    for (size_t i = 0; !code && i < count; i++) {
        size_t split = rows.count;
        code = load_attempt(conn, &keys[i], i, &list, from, to, coarse, &rows, err);
        if (!code && !query->all_attempts)
            code = merge_attempts(&rows, split, err);
    }
    free(list.pieces);
    series->name = keys[0].name;
    series->rank = keys[0].rank;
    if (!code)
        code = give_series(&rows, max, attempts, arena, series, err);
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
    struct ps_run_key key = {0};
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
