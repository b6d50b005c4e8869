/* SPDX-License-Identifier: Apache-2.0
 * The catalogue of checkpoints. */
#include "db/store_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ps_checkpoint_done(struct ps_checkpoint *checkpoint)
{
    ps_arena_free(checkpoint->memory);
    *checkpoint = (struct ps_checkpoint){0};
}

void ps_checkpoint_list_done(struct ps_checkpoint_list *list)
{
    ps_arena_free(list->memory);
    *list = (struct ps_checkpoint_list){0};
}

/* A checkpoint's own accuracy goes before the one that was reported for its epoch. */
#define CHECKPOINTS                                                                                          \
    "SELECT c.n, r.id, r.name, c.attempt, c.epoch, c.filename, c.format, b.size, c.sha256, c.step, "         \
    "c.created_ns, b.path,"                                                                                  \
    " coalesce(c.accuracy_bits, (SELECT e.accuracy_bits FROM epochs AS e WHERE e.run = c.run AND e.epoch = " \
    "c.epoch"                                                                                                \
    " AND e.attempt = c.attempt AND NOT e.no_eval))"                                                         \
    " FROM checkpoints AS c JOIN runs AS r ON r.n = c.run JOIN blobs AS b ON b.sha256 = c.sha256"

static int read_checkpoint(sqlite3_stmt *stmt, struct ps_arena *arena, struct ps_checkpoint *c,
                           struct ps_error *err)
{
    *c = (struct ps_checkpoint){
        .id = (uint64_t)sqlite3_column_int64(stmt, 0),
        .run_name = ps_sql_text(stmt, 2, arena),
        .attempt = (uint32_t)sqlite3_column_int64(stmt, 3),
        .epoch = (uint32_t)sqlite3_column_int64(stmt, 4),
        .filename = ps_sql_text(stmt, 5, arena),
        .format = ps_sql_text(stmt, 6, arena),
        .size = (uint64_t)sqlite3_column_int64(stmt, 7),
        .step = (uint64_t)sqlite3_column_int64(stmt, 9),
        .created_ns = sqlite3_column_int64(stmt, 10),
        .path = ps_sql_text(stmt, 11, arena),
        .has_accuracy = sqlite3_column_type(stmt, 12) != SQLITE_NULL,
        .accuracy = ps_sql_bits(stmt, 12), /* 0 for NULL */
    };
    snprintf(c->run_id, sizeof c->run_id, "%s", (const char *)sqlite3_column_text(stmt, 1));
    snprintf(c->sha256, sizeof c->sha256, "%s", (const char *)sqlite3_column_text(stmt, 8));
    return c->run_name && c->filename && c->format && c->path ? 0 : ps_no_memory(err);
}

/* The place after which a page begins. */
struct place {
    int64_t epoch, attempt, id;
};

/* limit negative: all there are. */
static int load_all(struct ps_conn *conn, int64_t run, const struct place *after, int64_t limit,
                    struct ps_checkpoint_list *ret_list, struct ps_error *err)
{
    struct ps_checkpoint_list list = {0};
    size_t capacity = 0;
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        return ps_no_memory(err);
    list.memory = arena;
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err,
                            CHECKPOINTS " WHERE c.run = ? AND (c.epoch, c.attempt, c.n) > (?, ?, ?)"
                                        " ORDER BY c.epoch, c.attempt, c.n LIMIT ?",
                            "iiiii", run, after->epoch, after->attempt, after->id, limit);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        struct ps_checkpoint *larger =
            ps_arena_grow(arena, list.checkpoints, list.count, &capacity, sizeof *larger);
        if (!larger) {
            code = ps_no_memory(err);
            break;
        }
        list.checkpoints = larger;
        code = read_checkpoint(stmt, arena, &list.checkpoints[list.count++], err);
    }
    if (code) {
        ps_checkpoint_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}

int ps_store_list_checkpoints(struct ps_store *store, const char *run, struct ps_checkpoint_list *ret_list,
                              struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_key key = {0};
    const struct place start = {0};
    code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = load_all(conn, key.n, &start, -1, ret_list, err);
    ps_read_end(store, conn);
    return code;
}

/* "EPOCH.ATTEMPT.ID", as a page before ended. */
static bool read_place(const char *token, struct place *place)
{
    int64_t *const parts[] = {&place->epoch, &place->attempt, &place->id};
    for (int i = 0; i < 3; i++) {
        char *end;
        if (*token < '0' || *token > '9')
            return false;
        errno = 0;
        *parts[i] = strtoll(token, &end, 10);
        if (errno || *end != (i < 2 ? '.' : '\0'))
            return false;
        token = end + 1;
    }
    return true;
}

int ps_store_page_checkpoints(struct ps_store *store, const char *run, uint32_t limit, const char *token,
                              struct ps_checkpoint_list *ret_list, char ret_token[64], struct ps_error *err)
{
    struct ps_conn *conn;
    struct place after = {0};
    if (token && *token && !read_place(token, &after))
        return ps_fail(err, PS_INVALID_ARGUMENT, "page_token: it is none that an answer held");
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_key key = {0};
    struct ps_checkpoint_list list = {0};
    code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = load_all(conn, key.n, &after, (int64_t)limit + 1, &list, err);
    ps_read_end(store, conn);
    if (code)
        return code;
    *ret_token = '\0';
    if (list.count > limit) {
        list.count = limit;
        const struct ps_checkpoint *last = &list.checkpoints[limit - 1];
        snprintf(ret_token, 64, "%u.%u.%llu", last->epoch, last->attempt, (unsigned long long)last->id);
    }
    *ret_list = list;
    return 0;
}

/* checkpoints are by (epoch, attempt, age), so the last of an epoch is the newest attempt's. */
static const struct ps_checkpoint *choose(const struct ps_checkpoint_list *list,
                                          const struct ps_checkpoint_selector *selector, const char *format)
{
    const struct ps_checkpoint *chosen = NULL;
    for (size_t i = 0; i < list->count; i++) {
        const struct ps_checkpoint *c = &list->checkpoints[i];
        if (selector->which == PS_CHECKPOINT_SHA256) {
            if (strcmp(c->sha256, selector->sha256) == 0)
                chosen = c;
            continue;
        }
        if (strcmp(c->format, format) != 0)
            continue;
        switch (selector->which) {
        case PS_CHECKPOINT_LATEST:
            if (!chosen || c->attempt >= chosen->attempt)
                chosen = c;
            break;
        case PS_CHECKPOINT_EPOCH:
            if (c->epoch == selector->epoch)
                chosen = c;
            break;
        case PS_CHECKPOINT_BEST: {
            bool superseded = false;
            for (size_t k = i + 1; k < list->count && list->checkpoints[k].epoch == c->epoch; k++)
                superseded = superseded || strcmp(list->checkpoints[k].format, format) == 0;
            if (!superseded && c->has_accuracy && !isnan(c->accuracy) &&
                (!chosen || c->accuracy > chosen->accuracy))
                chosen = c;
            break;
        }
        case PS_CHECKPOINT_SHA256:
            break;
        }
    }
    return chosen;
}

static bool has_format(const struct ps_checkpoint_list *list, const char *format)
{
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->checkpoints[i].format, format) == 0)
            return true;
    return false;
}

int ps_store_get_checkpoint(struct ps_store *store, const char *run,
                            const struct ps_checkpoint_selector *selector,
                            struct ps_checkpoint *ret_checkpoint, struct ps_error *err)
{
    struct ps_checkpoint_list list = {0};
    int code = ps_store_list_checkpoints(store, run, &list, err);
    if (code)
        return code;
    const char *format = selector->format && *selector->format                           ? selector->format
                         : has_format(&list, "safetensors") || !has_format(&list, "pth") ? "safetensors"
                                                                                         : "pth";
    const struct ps_checkpoint *chosen = choose(&list, selector, format);
    if (chosen) {
        struct ps_checkpoint result = *chosen;
        result.memory = list.memory;
        *ret_checkpoint = result;
        return 0;
    }
    ps_checkpoint_list_done(&list);
    switch (selector->which) {
    case PS_CHECKPOINT_EPOCH:
        return ps_fail(err, PS_NOT_FOUND, "run \"%.200s\" has no %s checkpoint of epoch %u", run, format,
                       selector->epoch);
    case PS_CHECKPOINT_BEST:
        return ps_fail(err, PS_NOT_FOUND, "run \"%.200s\" has no %s checkpoint with an accuracy", run,
                       format);
    case PS_CHECKPOINT_SHA256:
        return ps_fail(err, PS_NOT_FOUND, "run \"%.200s\" has no checkpoint with sha256 %.64s", run,
                       selector->sha256);
    default:
        return ps_fail(err, PS_NOT_FOUND, "run \"%.200s\" has no %s checkpoint yet", run, format);
    }
}

int ps_store_get_blob(struct ps_store *store, const char *sha256, struct ps_blob *ret_blob,
                      char **ret_filename, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    sqlite3_stmt *stmt;
    code = ps_sql_query(conn, &stmt, err,
                        "SELECT b.size, (SELECT filename FROM checkpoints AS c WHERE c.sha256 = b.sha256"
                        " ORDER BY n DESC LIMIT 1), b.path <> '' FROM blobs AS b WHERE b.sha256 = ?",
                        "t", sha256);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        const char *filename = (const char *)sqlite3_column_text(stmt, 1);
        char *copy = NULL;
        if (ret_filename && !(copy = strdup(filename ? filename : "checkpoint")))
            code = ps_no_memory(err);
        if (!code) {
            snprintf(ret_blob->sha256, sizeof ret_blob->sha256, "%s", sha256);
            ret_blob->size = (uint64_t)sqlite3_column_int64(stmt, 0);
            ret_blob->registered = sqlite3_column_int(stmt, 2) != 0;
            if (ret_filename)
                *ret_filename = copy;
        }
    } else if (!code) {
        code = ps_fail(err, PS_NOT_FOUND, "there is no checkpoint with sha256 %.64s", sha256);
    }
    ps_read_end(store, conn);
    return code;
}

int ps_store_get_blob_path(struct ps_store *store, const char *sha256, char **ret_path, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    sqlite3_stmt *stmt;
    code = ps_sql_query(conn, &stmt, err, "SELECT path FROM blobs WHERE sha256 = ?", "t", sha256);
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        const char *path = (const char *)sqlite3_column_text(stmt, 0);
        char *copy = path && *path ? strdup(path) : NULL;
        code = path && *path && !copy ? ps_no_memory(err) : 0;
        if (!code)
            *ret_path = copy;
    } else if (!code) {
        code = ps_fail(err, PS_NOT_FOUND, "there is no checkpoint with sha256 %.64s", sha256);
    }
    ps_read_end(store, conn);
    return code;
}

/* ---- Writing ---- */

struct add_arguments {
    const char *name;
    const struct ps_new_checkpoint *checkpoint;
    struct ps_checkpoint result;
};

static void add_reset(void *arguments)
{
    struct add_arguments *a = arguments;
    ps_checkpoint_done(&a->result);
}

static int load_one(struct ps_conn *conn, int64_t n, struct ps_checkpoint *ret_checkpoint,
                    struct ps_error *err)
{
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        return ps_no_memory(err);
    struct ps_checkpoint checkpoint = {0};
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err, CHECKPOINTS " WHERE c.n = ?", "i", n);
    if (!code) {
        code = ps_sql_step(stmt, err);
        code = code == 1 ? read_checkpoint(stmt, arena, &checkpoint, err)
               : code    ? code
                         : ps_fail(err, PS_NOT_FOUND, "no such checkpoint");
    }
    if (code) {
        ps_arena_free(arena);
        return code;
    }
    checkpoint.memory = arena;
    *ret_checkpoint = checkpoint;
    return 0;
}

static int add_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct add_arguments *a = arguments;
    const struct ps_new_checkpoint *c = a->checkpoint;
    struct ps_run_key key = {0};
    uint32_t attempt = 0;
    int64_t n = 0, size = 0;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_find_attempt(&key, a->name, c->attempt, &attempt, err);
    if (!code)
        code =
            ps_sql_int(tx->conn, 0, &n, err,
                       "SELECT n FROM checkpoints WHERE run = ? AND attempt = ? AND epoch = ? AND format = ?"
                       " AND sha256 = ?",
                       "ikktt", key.n, attempt, c->epoch, c->format, c->sha256);
    if (code)
        return code;
    /* The store's own copy goes before a file that lies elsewhere, and the newest such file before others. */
    code = ps_sql_run(tx->conn, err,
                      "INSERT INTO blobs (sha256, size, created_ns, path) VALUES (?1, ?2, ?3, ?4)"
                      " ON CONFLICT (sha256) DO UPDATE SET path = ?4 WHERE path <> ''",
                      "tiit", c->sha256, (int64_t)c->size, tx->now_ns, c->path ? c->path : "");
    if (!code && !n) {
        if (!code)
            code = ps_sql_int(tx->conn, 0, &size, err, "SELECT size FROM blobs WHERE sha256 = ?", "t",
                              c->sha256);
        if (!code && (uint64_t)size != c->size)
            code = ps_fail(err, PS_DATA_LOSS, "the store holds %lld bytes with this sha256, not %llu",
                           (long long)size, (unsigned long long)c->size);
        if (!code && c->has_accuracy)
            code = ps_sql_run(
                tx->conn, err,
                "INSERT INTO checkpoints (run, attempt, epoch, format, sha256, filename, step, created_ns,"
                " accuracy_bits) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                "ikktttiix", key.n, attempt, c->epoch, c->format, c->sha256, c->filename, (int64_t)c->step,
                tx->now_ns, c->accuracy);
        else if (!code)
            code = ps_sql_run(
                tx->conn, err,
                "INSERT INTO checkpoints (run, attempt, epoch, format, sha256, filename, step, created_ns)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                "ikktttii", key.n, attempt, c->epoch, c->format, c->sha256, c->filename, (int64_t)c->step,
                tx->now_ns);
        n = sqlite3_last_insert_rowid(tx->conn->db);
        if (!code)
            code = ps_tx_event(tx, key.id, attempt, "checkpoint", err, "epoch %u: %s, %llu bytes, sha256 %s",
                               c->epoch, c->filename, (unsigned long long)c->size, c->sha256);
    }
    return code ? code : load_one(tx->conn, n, &a->result, err);
}

int ps_store_add_checkpoint(struct ps_store *store, const char *run,
                            const struct ps_new_checkpoint *checkpoint, struct ps_checkpoint *ret_checkpoint,
                            struct ps_error *err)
{
    if (!ps_sha256_hex_valid(checkpoint->sha256))
        return ps_fail(err, PS_INVALID_ARGUMENT, "sha256: must be 64 lower-case hexadecimal digits");
    struct add_arguments a = {.name = run, .checkpoint = checkpoint};
    int code = ps_store_write(store, add_op, add_reset, &a, err);
    if (code)
        return code;
    if (ret_checkpoint)
        *ret_checkpoint = a.result;
    else
        ps_checkpoint_done(&a.result);
    return 0;
}

struct delete_arguments {
    const char *name, *sha256;
    bool announce;
    struct ps_blob_list orphans;
};

static void delete_reset(void *arguments)
{
    struct delete_arguments *a = arguments;
    ps_blob_list_done(&a->orphans);
}

static int delete_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct delete_arguments *a = arguments;
    struct ps_run_key key = {0};
    struct ps_blob blob = {0};
    int64_t size = 0;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_sql_int(tx->conn, 0, &size, err, "SELECT size FROM blobs WHERE sha256 = ?", "t", a->sha256);
    if (!code)
        code = ps_sql_run(tx->conn, err, "DELETE FROM checkpoints WHERE run = ? AND sha256 = ?", "it", key.n,
                          a->sha256);
    if (!code && sqlite3_changes(tx->conn->db) == 0)
        code = ps_fail(err, PS_NOT_FOUND, "run \"%.200s\" has no checkpoint with sha256 %.64s", a->name,
                       a->sha256);
    if (!code && a->announce)
        code = ps_tx_event(tx, key.id, key.attempt, "updated", err, "checkpoint %s deleted", a->sha256);
    if (code)
        return code;
    snprintf(blob.sha256, sizeof blob.sha256, "%s", a->sha256);
    blob.size = (uint64_t)size;
    return ps_collect_orphans(tx, &blob, 1, &a->orphans, err);
}

int ps_store_delete_checkpoint(struct ps_store *store, const char *run, const char *sha256, bool announce,
                               struct ps_blob_list *ret_orphans, struct ps_error *err)
{
    struct delete_arguments a = {.name = run, .sha256 = sha256, .announce = announce};
    int code = ps_store_write(store, delete_op, delete_reset, &a, err);
    if (!code)
        *ret_orphans = a.orphans;
    return code;
}
