/* SPDX-License-Identifier: Apache-2.0
 * What the files of the store share. Not for other folders, except the tests of the store. */
#ifndef PARAMSYNC_DB_STORE_INTERNAL_H
#define PARAMSYNC_DB_STORE_INTERNAL_H

#include "db/store.h"

#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>

#define PS_STORE_APPLICATION_ID 0x5053594e /* "PSYN", in the file's header */

/* ---- Memory of results: freed all at once ---- */

struct ps_arena;
struct ps_arena *ps_arena_new(void); /* NULL when out of memory */
void *ps_arena_alloc(struct ps_arena *arena, size_t size);
char *ps_arena_text(struct ps_arena *arena, const char *text);
/* An array of count elements, for one more: returns array or a larger copy of it; NULL when out of memory. */
void *ps_arena_grow(struct ps_arena *arena, void *array, size_t count, size_t *capacity, size_t element);
void ps_arena_free(void *arena);
static inline int ps_no_memory(struct ps_error *err)
{
    ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    return PS_RESOURCE_EXHAUSTED; /* said outright, for static analysis */
}

/* ---- Connections and statements ---- */

enum { PS_CONN_STATEMENTS = 256 };

/* Used by one thread at a time. */
struct ps_conn {
    sqlite3 *db;
    /* Prepared statements by the address of their text, open addressing. */
    struct {
        const char *sql;
        sqlite3_stmt *stmt;
    } cache[PS_CONN_STATEMENTS];
};

/* Opens and sets every option that a connection has; flags as for sqlite3_open_v2. */
int ps_conn_open(struct ps_conn *conn, const char *path, int flags, struct ps_error *err);
void ps_conn_close(struct ps_conn *conn);
/* Fills err from what failed last on db. */
int ps_sql_fail(sqlite3 *db, struct ps_error *err);
/* Runs statements without parameters; not cached. */
int ps_sql_exec(sqlite3 *db, const char *sql, struct ps_error *err);

/* Prepares (cached: sql must be a literal) and binds by format: i int64_t, k int or uint32_t that is not
 * negative, t const char * (NULL: ''), d double as REAL, x double as its bits, b const void * and size_t (not
 * copied), n nothing (NULL). Texts and blobs must live until the statement is done. */
int ps_sql_query(struct ps_conn *conn, sqlite3_stmt **ret_stmt, struct ps_error *err, const char *sql,
                 const char *format, ...);
int ps_sql_step(sqlite3_stmt *stmt, struct ps_error *err); /* 1: a row; 0: done */
/* Query and step to the end. */
int ps_sql_run(struct ps_conn *conn, struct ps_error *err, const char *sql, const char *format, ...);
/* The first column of the first row; missing if there is none. */
int ps_sql_int(struct ps_conn *conn, int64_t missing, int64_t *ret_value, struct ps_error *err,
               const char *sql, const char *format, ...);
char *ps_sql_text(sqlite3_stmt *stmt, int column, struct ps_arena *arena); /* NULL when out of memory */
double ps_sql_bits(sqlite3_stmt *stmt, int column);

/* ---- Schema ---- */

enum { PS_SQL_BUSY_MS = 5000 }; /* how long a connection waits for others */

struct ps_migration {
    const char *name;
    const unsigned char *sql;
    size_t size;
};
/* Brings the file to version count, migrations[i] leading from i to i + 1. path is for the copy. */
int ps_schema_migrate(struct ps_conn *conn, const char *path, const struct ps_migration *migrations,
                      int count, struct ps_error *err);

/* ---- The writer ---- */

struct ps_tx_event {
    struct ps_tx_event *next;
    struct ps_event event;
    char detail[];
};

/* What an operation works on: the writer's connection within a transaction and a savepoint. */
struct ps_tx {
    struct ps_store *store;
    struct ps_conn *conn;
    int64_t now_ns;
    bool pages_freed; /* set by operations that delete much */
    struct ps_tx_event *events, **events_end;
};
int ps_tx_event(struct ps_tx *tx, const char *run_id, uint32_t attempt, const char *kind,
                struct ps_error *err, const char *format, ...) __attribute__((format(printf, 6, 7)));

/* An operation may be run again after its transaction was lost: it starts from its arguments each time, and
 * reset (may be NULL) drops the results of the time before. */
typedef int (*ps_op_run)(struct ps_tx *tx, void *arguments, struct ps_error *err);
int ps_store_write(struct ps_store *store, ps_op_run run, void (*reset)(void *arguments), void *arguments,
                   struct ps_error *err);

/* ---- Readers ---- */

/* A connection within a read transaction. */
int ps_read_begin(struct ps_store *store, struct ps_conn **ret_conn, struct ps_error *err);
void ps_read_end(struct ps_store *store, struct ps_conn *conn);

/* ---- Rows that several files need ---- */

struct ps_run_key {
    int64_t n;
    char id[PS_RUN_ID_SIZE];
    uint32_t attempt;
    int state;
};
int ps_find_run(struct ps_conn *conn, const char *run, struct ps_run_key *ret_key, struct ps_error *err);
/* 0 becomes the newest; NOT_FOUND for one that is not there. */
int ps_find_attempt(const struct ps_run_key *key, const char *run, uint32_t attempt, uint32_t *ret_attempt,
                    struct ps_error *err);
int ps_load_run(struct ps_conn *conn, int64_t n, struct ps_run *ret_run, struct ps_error *err);
/* Notes that the attempt gave a sign of life; the newest one turns created and lost into running. *state is
 * updated. */
int ps_touch_run(struct ps_tx *tx, struct ps_run_key *key, uint32_t attempt, double elapsed_s,
                 struct ps_error *err);
int ps_load_attempts(struct ps_conn *conn, int64_t n, struct ps_attempt_list *list, struct ps_error *err);
/* Takes blobs without checkpoints out of the catalogue, those among the run's (or the one given). */
int ps_collect_orphans(struct ps_tx *tx, const struct ps_blob *candidates, size_t count,
                       struct ps_blob_list *orphans, struct ps_error *err);

struct ps_store {
    struct ps_store_config config;
    char *path;  /* of the file */
    int lock_fd; /* -1 when read_only */

    struct ps_conn writer; /* the writer thread's, and ps_store_open's before it starts */
    pthread_t thread;
    bool thread_started;

    pthread_mutex_t lock; /* guards what follows up to readers */
    pthread_cond_t work;  /* an operation was queued, or closing */
    struct ps_op *queue, **queue_end;
    uint64_t queue_depth;
    bool closing;
    uint64_t commits, operations, failed_operations;
    bool disk_full;
    int last_code;
    char last_error[256];

    atomic_bool log_held;
    int64_t log_tried_ns; /* the writer's: when it last tried to start the log anew; monotonic */
    atomic_uint_fast64_t points_stored, batches_replayed;

    pthread_mutex_t readers_lock; /* guards the list of free readers */
    pthread_cond_t reader_free, readers_idle;
    bool gate; /* no read begins: the log is being started anew */
    struct ps_conn **readers;
    int reader_count, free_count;
};

#endif
