/* SPDX-License-Identifier: Apache-2.0
 * Memory of results, connections, statements. */
#include "db/store_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct arena_block {
    struct arena_block *next;
    size_t size, used;
    max_align_t data[];
};

struct ps_arena {
    struct arena_block *blocks;
};

struct ps_arena *ps_arena_new(void)
{
    return calloc(1, sizeof(struct ps_arena));
}

void *ps_arena_alloc(struct ps_arena *arena, size_t size)
{
    size = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    struct arena_block *block = arena->blocks;
    if (!block || block->size - block->used < size) {
        size_t room = size > 2048 ? size : 4096;
        block = malloc(sizeof *block + room);
        if (!block)
            return NULL;
        block->size = room;
        block->used = 0;
        /* A block made for one large piece goes behind the one that still has room. */
        if (size > 2048 && arena->blocks) {
            block->next = arena->blocks->next;
            arena->blocks->next = block;
        } else {
            block->next = arena->blocks;
            arena->blocks = block;
        }
    }
    void *at = (char *)block->data + block->used;
    block->used += size;
    return at;
}

char *ps_arena_text(struct ps_arena *arena, const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = ps_arena_alloc(arena, size);
    return copy ? memcpy(copy, text, size) : NULL;
}

void *ps_arena_grow(struct ps_arena *arena, void *array, size_t count, size_t *capacity, size_t element)
{
    if (count < *capacity)
        return array;
    size_t more = *capacity ? *capacity * 2 : 16;
    void *larger = ps_arena_alloc(arena, more * element);
    if (!larger)
        return NULL;
    if (count)
        memcpy(larger, array, count * element);
    *capacity = more;
    return larger;
}

void ps_arena_free(void *memory)
{
    struct ps_arena *arena = memory;
    if (!arena)
        return;
    for (struct arena_block *block = arena->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(arena);
}

int ps_sql_fail(sqlite3 *db, struct ps_error *err)
{
    int full = db ? sqlite3_extended_errcode(db) : SQLITE_NOMEM;
    int system = db ? sqlite3_system_errno(db) : 0;
    const char *file = db ? sqlite3_db_filename(db, "main") : NULL;
    if (!file || !*file)
        file = PS_STORE_FILE;
    int primary = full & 0xff;
    if (primary == SQLITE_FULL || (primary == SQLITE_IOERR && (system == ENOSPC || system == EDQUOT)))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "the disk is full: nothing was stored in %s; free some space", file);
    switch (primary) {
    case SQLITE_NOMEM:
        return ps_no_memory(err);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        return ps_fail(err, PS_DATA_LOSS, "%s is damaged or no SQLite file (%s): restore a copy of it", file,
                       sqlite3_errmsg(db));
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return ps_fail(err, PS_UNAVAILABLE, "%s is locked by another program (%s)", file, sqlite3_errmsg(db));
    case SQLITE_READONLY:
    case SQLITE_PERM:
    case SQLITE_CANTOPEN:
        return ps_fail(err, PS_PERMISSION_DENIED, "cannot open or write %s: %s", file, sqlite3_errmsg(db));
    case SQLITE_IOERR:
        return ps_fail(err, PS_UNAVAILABLE, "cannot read or write %s: %s (%s)", file, sqlite3_errmsg(db),
                       strerror(system));
    default:
        return ps_fail(err, PS_INTERNAL, "the store failed: %s (code %d)", sqlite3_errmsg(db), full);
    }
}

int ps_sql_exec(sqlite3 *db, const char *sql, struct ps_error *err)
{
    return sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : ps_sql_fail(db, err);
}

/* The one place where connections get their options. */
static int set_options(sqlite3 *db, bool read_only, struct ps_error *err)
{
    sqlite3_extended_result_codes(db, 1);
    sqlite3_busy_timeout(db, PS_SQL_BUSY_MS);
    if (sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL) != SQLITE_OK ||
        sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL) != SQLITE_OK ||
        sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_FKEY, 1, NULL) != SQLITE_OK ||
        sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, NULL) != SQLITE_OK ||
        sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_VIEW, 0, NULL) != SQLITE_OK)
        return ps_sql_fail(db, err);
    sqlite3_limit(db, SQLITE_LIMIT_LENGTH, 64 << 20);
    int code = ps_sql_exec(
        db, "PRAGMA temp_store = MEMORY; PRAGMA cell_size_check = ON; PRAGMA synchronous = FULL", err);
    if (code)
        return code;
    if (read_only)
        return ps_sql_exec(db, "PRAGMA query_only = ON", err);
    /* auto_vacuum only takes effect while the file is empty; so does the page size. */
    return ps_sql_exec(db,
                       "PRAGMA page_size = 4096; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;"
                       "PRAGMA wal_autocheckpoint = 2000; PRAGMA journal_size_limit = 16777216;"
                       "PRAGMA cache_size = -16384",
                       err);
}

/* real_of_bits(integer): the double of these bits, NULL for NaN; so that SQL can order by what is stored. */
static void real_of_bits(sqlite3_context *context, int count, sqlite3_value **values)
{
    (void)count;
    int64_t bits = sqlite3_value_int64(values[0]);
    double value;
    memcpy(&value, &bits, sizeof value);
    sqlite3_result_double(context, value);
}

int ps_conn_open(struct ps_conn *conn, const char *path, int flags, struct ps_error *err)
{
    memset(conn, 0, sizeof *conn);
    int code = 0;
    if (sqlite3_open_v2(path, &conn->db, flags | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
        code = ps_sql_fail(conn->db, err);
    if (!code)
        code = set_options(conn->db, flags & SQLITE_OPEN_READONLY, err);
    if (!code && sqlite3_create_function_v2(conn->db, "real_of_bits", 1,
                                            SQLITE_UTF8 | SQLITE_DETERMINISTIC | SQLITE_INNOCUOUS, NULL,
                                            real_of_bits, NULL, NULL, NULL) != SQLITE_OK)
        code = ps_sql_fail(conn->db, err);
    if (code)
        ps_conn_close(conn);
    return code;
}

void ps_conn_close(struct ps_conn *conn)
{
    for (size_t i = 0; i < PS_CONN_STATEMENTS; i++)
        sqlite3_finalize(conn->cache[i].stmt);
    sqlite3_close(conn->db);
    memset(conn, 0, sizeof *conn);
}

static int prepare(struct ps_conn *conn, const char *sql, sqlite3_stmt **ret_stmt, struct ps_error *err)
{
    size_t at = ((uintptr_t)sql >> 3) % PS_CONN_STATEMENTS;
    for (size_t tries = 0; conn->cache[at].sql && conn->cache[at].sql != sql;
         at = (at + 1) % PS_CONN_STATEMENTS)
        if (++tries == PS_CONN_STATEMENTS)
            return ps_fail(err, PS_INTERNAL, "more than %d different statements", PS_CONN_STATEMENTS);
    if (!conn->cache[at].sql) {
        sqlite3_stmt *stmt;
        if (sqlite3_prepare_v3(conn->db, sql, -1, SQLITE_PREPARE_PERSISTENT, &stmt, NULL) != SQLITE_OK)
            return ps_sql_fail(conn->db, err);
        conn->cache[at].sql = sql;
        conn->cache[at].stmt = stmt;
    }
    *ret_stmt = conn->cache[at].stmt;
    sqlite3_reset(*ret_stmt);
    return 0;
}

static int bind(sqlite3_stmt *stmt, const char *format, va_list list, struct ps_error *err)
{
    int result = SQLITE_OK, at = 0;
    for (; *format && result == SQLITE_OK; format++) {
        at++;
        switch (*format) {
        case 'i':
            result = sqlite3_bind_int64(stmt, at, va_arg(list, int64_t));
            break;
        case 'k':
            result = sqlite3_bind_int64(stmt, at, (int64_t)va_arg(list, unsigned));
            break;
        case 't': {
            const char *text = va_arg(list, const char *);
            result = sqlite3_bind_text(stmt, at, text ? text : "", -1, SQLITE_STATIC);
            break;
        }
        case 'd':
            result = sqlite3_bind_double(stmt, at, va_arg(list, double));
            break;
        case 'x': {
            double value = va_arg(list, double);
            int64_t bits;
            memcpy(&bits, &value, sizeof bits);
            result = sqlite3_bind_int64(stmt, at, bits);
            break;
        }
        case 'b': {
            const void *data = va_arg(list, const void *);
            result = sqlite3_bind_blob64(stmt, at, data, va_arg(list, size_t), SQLITE_STATIC);
            break;
        }
        case 'n':
            result = sqlite3_bind_null(stmt, at);
            break;
        default:
            return ps_fail(err, PS_INTERNAL, "unknown bind letter '%c'", *format);
        }
    }
    if (result != SQLITE_OK)
        return ps_sql_fail(sqlite3_db_handle(stmt), err);
    if (at != sqlite3_bind_parameter_count(stmt))
        return ps_fail(err, PS_INTERNAL, "%d values for: %s", at, sqlite3_sql(stmt));
    return 0;
}

static int query(struct ps_conn *conn, sqlite3_stmt **ret_stmt, struct ps_error *err, const char *sql,
                 const char *format, va_list list)
{
    int code = prepare(conn, sql, ret_stmt, err);
    return code ? code : bind(*ret_stmt, format, list, err);
}

int ps_sql_query(struct ps_conn *conn, sqlite3_stmt **ret_stmt, struct ps_error *err, const char *sql,
                 const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int code = query(conn, ret_stmt, err, sql, format, list);
    va_end(list);
    return code;
}

int ps_sql_step(sqlite3_stmt *stmt, struct ps_error *err)
{
    int result = sqlite3_step(stmt);
    if (result == SQLITE_ROW)
        return 1;
    int code = result == SQLITE_DONE ? 0 : ps_sql_fail(sqlite3_db_handle(stmt), err);
    sqlite3_reset(stmt); /* an open statement would keep the transaction from ending */
    return code;
}

int ps_sql_run(struct ps_conn *conn, struct ps_error *err, const char *sql, const char *format, ...)
{
    sqlite3_stmt *stmt;
    va_list list;
    va_start(list, format);
    int code = query(conn, &stmt, err, sql, format, list);
    va_end(list);
    if (code)
        return code;
    while ((code = ps_sql_step(stmt, err)) == 1)
        ;
    return code;
}

int ps_sql_int(struct ps_conn *conn, int64_t missing, int64_t *ret_value, struct ps_error *err,
               const char *sql, const char *format, ...)
{
    sqlite3_stmt *stmt;
    va_list list;
    va_start(list, format);
    int code = query(conn, &stmt, err, sql, format, list);
    va_end(list);
    if (code)
        return code;
    code = ps_sql_step(stmt, err);
    if (code < 0)
        return code;
    *ret_value = code ? sqlite3_column_int64(stmt, 0) : missing;
    sqlite3_reset(stmt);
    return 0;
}

char *ps_sql_text(sqlite3_stmt *stmt, int column, struct ps_arena *arena)
{
    const char *text = (const char *)sqlite3_column_text(stmt, column);
    return ps_arena_text(arena, text ? text : "");
}

double ps_sql_bits(sqlite3_stmt *stmt, int column)
{
    int64_t bits = sqlite3_column_int64(stmt, column);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
