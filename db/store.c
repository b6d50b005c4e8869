/* SPDX-License-Identifier: Apache-2.0
 * Opening and closing, the writer thread, the pool of readers, the state of the store. */
#include "db/store.h"

#include "db/store_internal.h"
#include "services/base/clock.h"
#include "services/base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

extern const unsigned char ps_schema_0001[];
extern const size_t ps_schema_0001_size;
extern const unsigned char ps_schema_0002[];
extern const size_t ps_schema_0002_size;
extern const unsigned char ps_schema_0003[];
extern const size_t ps_schema_0003_size;
extern const unsigned char ps_schema_0004[];
extern const size_t ps_schema_0004_size;

/* ---- Opening ---- */

int ps_store_check_file_system(long type, const char *path, struct ps_error *err)
{
    static const struct {
        uint32_t magic; /* linux/magic.h, statfs(2) */
        const char *name;
    } network[] = {
        {0x6969, "NFS"},        {0xff534d42, "CIFS"},  {0xfe534d42, "SMB"},  {0x517b, "SMB"},
        {0x0bd00bd0, "Lustre"}, {0x47504653, "GPFS"},  {0x00c36400, "Ceph"}, {0x5346414f, "AFS"},
        {0x19830326, "BeeGFS"}, {0x7461636f, "OCFS2"}, {0x01161970, "GFS2"}, {0x73757245, "Coda"},
    };
    for (size_t i = 0; i < sizeof network / sizeof *network; i++)
        if (network[i].magic == (uint32_t)type)
            return ps_fail(
                err, PS_FAILED_PRECONDITION,
                "%s lies on %s, where SQLite's log does not work: name a --data-dir on a local disk", path,
                network[i].name);
    return 0;
}

static int take_lock(const char *dir, int *ret_fd, struct ps_error *err)
{
    char *path = ps_path_join(dir, "paramsync.lock");
    if (!path)
        return ps_no_memory(err);
    int code = 0;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0640);
    if (fd < 0) {
        code = ps_fail_errno(err, errno, "cannot open %s", path);
    } else if (flock(fd, LOCK_EX | LOCK_NB)) {
        int errnum = errno;
        char holder[32] = "";
        ssize_t n = pread(fd, holder, sizeof holder - 1, 0);
        holder[n > 0 ? (size_t)n : 0] = '\0';
        holder[strcspn(holder, "\n")] = '\0';
        if (errnum == EWOULDBLOCK)
            code = ps_fail(err, PS_FAILED_PRECONDITION,
                           "%s is in use by another sidecar (process %s): stop it or name another --data-dir",
                           dir, *holder ? holder : "unknown");
        else
            code = ps_fail_errno(err, errnum, "cannot lock %s", path);
    } else {
        char line[32];
        int n = snprintf(line, sizeof line, "%ld\n", (long)getpid());
        /* Only for the message above, so a full disk is no reason to stop here. */
        if (ftruncate(fd, 0) == 0 && pwrite(fd, line, (size_t)n, 0) != n)
            errno = 0;
    }
    free(path);
    if (code) {
        if (fd >= 0)
            close(fd);
        return code;
    }
    *ret_fd = fd;
    return 0;
}

static int open_readers(struct ps_store *store, struct ps_error *err)
{
    int count = store->config.readers > 0 ? store->config.readers : 4;
    store->readers = calloc((size_t)count, sizeof(struct ps_conn *));
    if (!store->readers)
        return ps_no_memory(err);
    while (store->reader_count < count) {
        struct ps_conn *conn = calloc(1, sizeof *conn);
        if (!conn)
            return ps_no_memory(err);
        int code = ps_conn_open(conn, store->path, SQLITE_OPEN_READONLY, err);
        if (code) {
            free(conn);
            return code;
        }
        store->readers[store->reader_count++] = conn;
        store->free_count++;
    }
    return 0;
}

static int check_schema(struct ps_store *store, int known, struct ps_error *err)
{
    struct ps_conn *conn = store->readers[0];
    int64_t application = 0, version = 0;
    int code = ps_sql_int(conn, 0, &application, err, "PRAGMA application_id", "");
    if (!code)
        code = ps_sql_int(conn, 0, &version, err, "PRAGMA user_version", "");
    if (code)
        return code;
    if (application != PS_STORE_APPLICATION_ID)
        return ps_fail(err, PS_FAILED_PRECONDITION, "%s is no paramsync store", store->path);
    if (version != known)
        return ps_fail(err, PS_FAILED_PRECONDITION, "%s has schema %lld, this program reads schema %d: %s",
                       store->path, (long long)version, known,
                       version > known ? "use the newer paramsync that wrote it"
                                       : "start paramsyncd on it once");
    return 0;
}

static void *writer_main(void *argument);

static int start_writer(struct ps_store *store, struct ps_error *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&store->thread, NULL, writer_main, store);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result)
        return ps_fail_errno(err, result, "cannot start the store's thread");
    store->thread_started = true;
    return 0;
}

int ps_store_open(const struct ps_store_config *config, struct ps_store **ret_store, struct ps_error *err)
{
    const struct ps_migration migrations[] = {
        {"0001_initial", ps_schema_0001, ps_schema_0001_size},
        {"0002_confusion", ps_schema_0002, ps_schema_0002_size},
        {"0003_beside", ps_schema_0003, ps_schema_0003_size},
        {"0004_pinned", ps_schema_0004, ps_schema_0004_size},
    };
    enum { known = sizeof migrations / sizeof *migrations };
    struct ps_store *store = calloc(1, sizeof *store);
    if (!store)
        return ps_no_memory(err);
    store->config = *config;
    store->config.dir = store->config.file = NULL; /* the caller's */
    if (!store->config.block_points)
        store->config.block_points = 2048;
    store->lock_fd = -1;
    store->queue_end = &store->queue;
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->work, NULL);
    pthread_mutex_init(&store->readers_lock, NULL);
    pthread_cond_init(&store->reader_free, NULL);
    pthread_cond_init(&store->readers_idle, NULL);
    int code = 0;
    struct statfs fs;
    store->path = ps_path_join(config->dir, config->file ? config->file : PS_STORE_FILE);
    if (!store->path)
        code = ps_no_memory(err);
    if (!code && !config->read_only)
        code = ps_make_dirs(config->dir, 0750, err);
    if (!code && statfs(config->dir, &fs))
        code = ps_fail_errno(err, errno, "cannot use the data directory %s", config->dir);
    if (!code && !config->read_only) {
        code = ps_store_check_file_system((long)fs.f_type, config->dir, err);
        if (!code)
            code = take_lock(config->dir, &store->lock_fd, err);
        if (!code)
            code = ps_conn_open(&store->writer, store->path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, err);
        if (!code)
            code = ps_schema_migrate(&store->writer, store->path, migrations, known, err);
        if (!code && config->max_pages) {
            char sql[64];
            snprintf(sql, sizeof sql, "PRAGMA max_page_count = %u", config->max_pages);
            code = ps_sql_exec(store->writer.db, sql, err);
        }
    } else if (!code && store->path && access(store->path, R_OK)) {
        code = ps_fail_errno(err, errno, "cannot read the store %s", store->path);
    }
    if (!code)
        code = open_readers(store, err);
    if (!code && config->read_only)
        code = check_schema(store, known, err);
    if (!code && !config->read_only)
        code = start_writer(store, err);
    if (code) {
        ps_store_free(store);
        return code;
    }
    *ret_store = store;
    return 0;
}

struct ps_store *ps_store_free(struct ps_store *store)
{
    if (!store)
        return NULL;
    if (store->thread_started) {
        pthread_mutex_lock(&store->lock);
        store->closing = true;
        pthread_cond_signal(&store->work);
        pthread_mutex_unlock(&store->lock);
        pthread_join(store->thread, NULL);
    }
    for (int i = 0; i < store->reader_count; i++) {
        ps_conn_close(store->readers[i]);
        free(store->readers[i]);
    }
    free(store->readers);
    ps_conn_close(&store->writer);
    if (store->lock_fd >= 0)
        close(store->lock_fd);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->work);
    pthread_mutex_destroy(&store->readers_lock);
    pthread_cond_destroy(&store->reader_free);
    pthread_cond_destroy(&store->readers_idle);
    free(store->path);
    free(store);
    return NULL;
}

/* ---- The writer ---- */

struct ps_op {
    struct ps_op *next;
    ps_op_run run;
    void (*reset)(void *arguments);
    void *arguments;
    struct ps_error error;
    bool done; /* guarded by the store's lock; then the caller may let go of this */
    pthread_cond_t finished;
};

int ps_tx_event(struct ps_tx *tx, const char *run_id, uint32_t attempt, const char *kind,
                struct ps_error *err, const char *format, ...)
{
    char detail[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(detail, sizeof detail, format, list);
    va_end(list);
    size_t size = strlen(detail);
    /* vsnprintf may have cut a character in two. */
    if (size == sizeof detail - 1) {
        while (size && ((unsigned char)detail[size - 1] & 0xc0) == 0x80)
            size--;
        if (size && (unsigned char)detail[size - 1] >= 0xc0)
            size--;
        detail[size] = '\0';
    }
    int code = ps_sql_run(tx->conn, err,
                          "INSERT INTO events (run_id, attempt, kind, detail, at_ns) VALUES (?, ?, ?, ?, ?)",
                          "tktti", run_id, attempt, kind, detail, tx->now_ns);
    if (code)
        return code;
    struct ps_tx_event *event = calloc(1, sizeof *event + size + 1);
    if (!event)
        return ps_no_memory(err);
    memcpy(event->detail, detail, size + 1);
    event->event = (struct ps_event){.id = (uint64_t)sqlite3_last_insert_rowid(tx->conn->db),
                                     .detail = event->detail,
                                     .at_ns = tx->now_ns,
                                     .attempt = attempt};
    snprintf(event->event.run_id, sizeof event->event.run_id, "%s", run_id);
    snprintf(event->event.kind, sizeof event->event.kind, "%s", kind);
    *tx->events_end = event;
    tx->events_end = &event->next;
    return 0;
}

/* Drops the events from *end on. */
static void drop_events(struct ps_tx *tx, struct ps_tx_event **end)
{
    for (struct ps_tx_event *event = *end, *next; event; event = next) {
        next = event->next;
        free(event);
    }
    *end = NULL;
    tx->events_end = end;
}

static void reset_statements(struct ps_conn *conn)
{
    for (size_t i = 0; i < PS_CONN_STATEMENTS; i++)
        if (conn->cache[i].stmt)
            sqlite3_reset(conn->cache[i].stmt);
}

/* False: the whole transaction is lost, with the reason in op->error. */
static bool run_op(struct ps_tx *tx, struct ps_op *op)
{
    struct ps_tx_event **events = tx->events_end;
    op->error = (struct ps_error){0};
    int code = ps_sql_run(tx->conn, &op->error, "SAVEPOINT op", "");
    if (!code)
        code = op->run(tx, op->arguments, &op->error);
    op->error.code = code;
    reset_statements(tx->conn);
    if (sqlite3_get_autocommit(tx->conn->db)) /* SQLite rolled back on its own, as it may on a full disk */
        return false;
    if (code) {
        drop_events(tx, events);
        if (op->reset)
            op->reset(op->arguments);
        struct ps_error lost = {0};
        if (ps_sql_run(tx->conn, &lost, "ROLLBACK TO op", "") ||
            ps_sql_run(tx->conn, &lost, "RELEASE op", ""))
            return false;
        return true;
    }
    struct ps_error release = {0};
    code = ps_sql_run(tx->conn, &release, "RELEASE op", "");
    if (code) {
        op->error = release;
        return false;
    }
    return true;
}

/* Runs count operations in one transaction. On false nothing of any of them is stored; *err tells why. */
static bool run_group(struct ps_store *store, struct ps_op *first, size_t count, bool *ret_pages_freed,
                      struct ps_error *err)
{
    struct ps_tx tx = {.store = store, .conn = &store->writer, .now_ns = ps_wall_ns()};
    tx.events_end = &tx.events;
    *err = (struct ps_error){0};
    bool good = ps_sql_run(tx.conn, err, "BEGIN IMMEDIATE", "") == 0;
    struct ps_op *op = first;
    for (size_t i = 0; good && i < count; i++, op = op->next) {
        good = run_op(&tx, op);
        if (!good)
            *err = op->error;
    }
    if (good)
        good = ps_sql_run(tx.conn, err, "COMMIT", "") == 0;
    if (!good) {
        reset_statements(tx.conn);
        if (!sqlite3_get_autocommit(tx.conn->db))
            ps_sql_exec(tx.conn->db, "ROLLBACK", NULL);
        op = first;
        for (size_t i = 0; i < count; i++, op = op->next)
            if (op->reset)
                op->reset(op->arguments);
        if (!err->code)
            ps_fail(err, PS_INTERNAL, "the transaction was lost");
    } else {
        for (struct ps_tx_event *event = tx.events; event && store->config.on_event; event = event->next)
            store->config.on_event(store->config.context, &event->event);
        *ret_pages_freed = *ret_pages_freed || tx.pages_freed;
    }
    drop_events(&tx, &tx.events);
    return good;
}

/* A failure of the store itself, as opposed to one of what was asked for. */
static bool is_store_failure(int code)
{
    return code == PS_RESOURCE_EXHAUSTED || code == PS_DATA_LOSS || code == PS_UNAVAILABLE ||
           code == PS_INTERNAL || code == PS_PERMISSION_DENIED;
}

/* Hands the operations back to their callers. */
static void finish_group(struct ps_store *store, struct ps_op *first, size_t count, uint64_t commits)
{
    pthread_mutex_lock(&store->lock);
    const struct ps_error *bad = NULL;
    bool any_good = false;
    struct ps_op *op = first;
    for (size_t i = 0; i < count; i++, op = op->next) {
        if (op->error.code)
            store->failed_operations++;
        if (is_store_failure(op->error.code))
            bad = &op->error;
        any_good = any_good || !op->error.code;
    }
    if (bad) {
        store->last_code = bad->code;
        store->disk_full = bad->code == PS_RESOURCE_EXHAUSTED;
        snprintf(store->last_error, sizeof store->last_error, "%.255s", bad->message);
    } else if (any_good) {
        store->last_code = 0;
        store->disk_full = false;
        store->last_error[0] = '\0';
    }
    store->commits += commits;
    store->operations += count;
    for (op = first; count > 0; count--) {
        struct ps_op *next = op->next; /* once done is seen, op is gone */
        op->done = true;
        pthread_cond_signal(&op->finished);
        op = next;
    }
    pthread_mutex_unlock(&store->lock);
}

/* With nothing else to do: hands a slice of the freed pages back to the file system. True: there are more. */
static bool give_back_pages(struct ps_conn *conn)
{
    int64_t before = 0, free_pages = 0;
    if (ps_sql_int(conn, 0, &before, NULL, "PRAGMA freelist_count", "") ||
        ps_sql_exec(conn->db, "PRAGMA incremental_vacuum(500)", NULL) ||
        ps_sql_int(conn, 0, &free_pages, NULL, "PRAGMA freelist_count", ""))
        return false;
    if (free_pages == 0) /* the file itself gets shorter when the log is copied into it */
        ps_sql_exec(conn->db, "PRAGMA wal_checkpoint(PASSIVE)", NULL);
    /* A file without auto_vacuum (one that was rebuilt by other tools) gives nothing back, ever. */
    return free_pages > 0 && free_pages < before;
}

static uint64_t file_size(const char *path)
{
    struct stat st;
    return stat(path, &st) ? 0 : (uint64_t)st.st_size;
}

static uint64_t log_size(const struct ps_store *store)
{
    char *path;
    uint64_t size = 0;
    if (asprintf(&path, "%s-wal", store->path) >= 0) {
        size = file_size(path);
        free(path);
    }
    return size;
}

/* The log grows for as long as one reader after the other begins before the last has ended, since it can only
 * be started anew when nobody reads it. So when it is large, no read begins until those under way have ended.
 */
static void bound_log(struct ps_store *store)
{
    const uint64_t most = store->config.log_bytes ? store->config.log_bytes : 32 << 20;
    int64_t now = ps_monotonic_ns();
    if (log_size(store) <= most) {
        store->log_held = false;
        return;
    }
    if (store->log_held &&
        now - store->log_tried_ns < PS_NS_PER_S) /* another program's reader: not at every commit */
        return;
    store->log_tried_ns = now;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++; /* a read takes milliseconds; one that hangs must not stop the writer for good */
    pthread_mutex_lock(&store->readers_lock);
    store->gate = true;
    while (store->free_count < store->reader_count &&
           pthread_cond_timedwait(&store->readers_idle, &store->readers_lock, &until) == 0)
        ;
    pthread_mutex_unlock(&store->readers_lock);
    int64_t busy = 1;
    sqlite3_busy_timeout(store->writer.db, 50);
    if (ps_sql_int(&store->writer, 1, &busy, NULL, "PRAGMA wal_checkpoint(TRUNCATE)", ""))
        busy = 1;
    sqlite3_busy_timeout(store->writer.db, PS_SQL_BUSY_MS);
    store->log_held = busy != 0;
    pthread_mutex_lock(&store->readers_lock);
    store->gate = false;
    pthread_cond_broadcast(&store->reader_free);
    pthread_mutex_unlock(&store->readers_lock);
}

static void *writer_main(void *argument)
{
    enum { group_max = 512 };
    struct ps_store *store = argument;
    bool pages_freed = false;
    for (;;) {
        pthread_mutex_lock(&store->lock);
        while (!store->queue && !store->closing && !pages_freed)
            pthread_cond_wait(&store->work, &store->lock);
        if (!store->queue) {
            bool closing = store->closing;
            pthread_mutex_unlock(&store->lock);
            if (closing)
                return NULL;
            pages_freed = give_back_pages(&store->writer);
            continue;
        }
        struct ps_op *first = store->queue, *last = first;
        size_t count = 1;
        while (last->next && count < group_max) {
            last = last->next;
            count++;
        }
        store->queue = last->next;
        if (!store->queue)
            store->queue_end = &store->queue;
        last->next = NULL;
        store->queue_depth -= count;
        pthread_mutex_unlock(&store->lock);

        struct ps_error err;
        uint64_t commits = 1;
        if (!run_group(store, first, count, &pages_freed, &err)) {
            /* One of them may be too much for the disk, or none may fit: each by itself, so that the small
             * ones pass. */
            struct ps_op *op = first;
            commits = 0;
            for (size_t i = 0; i < count; i++, op = op->next) {
                if (count == 1 || !run_group(store, op, 1, &pages_freed, &err))
                    op->error = err;
                else
                    commits++;
            }
        }
        finish_group(store, first, count, commits);
        bound_log(store);
    }
}

int ps_store_write(struct ps_store *store, ps_op_run run, void (*reset)(void *arguments), void *arguments,
                   struct ps_error *err)
{
    if (store->config.read_only)
        return ps_fail(err, PS_FAILED_PRECONDITION, "the store was opened for reading");
    struct ps_op op = {.run = run, .reset = reset, .arguments = arguments};
    pthread_cond_init(&op.finished, NULL);
    pthread_mutex_lock(&store->lock);
    if (store->closing) {
        ps_fail(&op.error, PS_UNAVAILABLE, "the store is closing");
    } else {
        *store->queue_end = &op;
        store->queue_end = &op.next;
        store->queue_depth++;
        pthread_cond_signal(&store->work);
        while (!op.done)
            pthread_cond_wait(&op.finished, &store->lock);
    }
    pthread_mutex_unlock(&store->lock);
    pthread_cond_destroy(&op.finished);
    if (op.error.code && err)
        *err = op.error;
    return op.error.code;
}

/* ---- Readers ---- */

int ps_read_begin(struct ps_store *store, struct ps_conn **ret_conn, struct ps_error *err)
{
    pthread_mutex_lock(&store->readers_lock);
    while (!store->free_count || store->gate)
        pthread_cond_wait(&store->reader_free, &store->readers_lock);
    struct ps_conn *conn = store->readers[--store->free_count];
    pthread_mutex_unlock(&store->readers_lock);
    int code = ps_sql_run(conn, err, "BEGIN", "");
    if (code) {
        ps_read_end(store, conn);
        return code;
    }
    *ret_conn = conn;
    return 0;
}

void ps_read_end(struct ps_store *store, struct ps_conn *conn)
{
    reset_statements(conn);
    if (!sqlite3_get_autocommit(conn->db))
        ps_sql_run(conn, NULL, "COMMIT", "");
    pthread_mutex_lock(&store->readers_lock);
    store->readers[store->free_count++] = conn;
    if (store->gate && store->free_count == store->reader_count)
        pthread_cond_signal(&store->readers_idle);
    pthread_cond_signal(&store->reader_free);
    pthread_mutex_unlock(&store->readers_lock);
}

/* ---- State ---- */

int ps_store_get_stats(struct ps_store *store, struct ps_store_stats *ret_stats, struct ps_error *err)
{
    struct ps_store_stats stats = {0};
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    sqlite3_stmt *stmt;
    code = ps_sql_query(conn, &stmt, err, "SELECT state, count(*) FROM runs GROUP BY state", "");
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        int state = sqlite3_column_int(stmt, 0);
        if (state > 0 && state < 8)
            stats.runs[state] = (uint64_t)sqlite3_column_int64(stmt, 1);
        code = 0;
    }
    if (!code)
        code = ps_sql_query(conn, &stmt, err,
                            "SELECT (SELECT count(*) FROM checkpoints), (SELECT count(*) FROM blobs),"
                            " (SELECT coalesce(sum(size), 0) FROM blobs), (SELECT count(*) FROM epochs),"
                            " (SELECT count(*) FROM series)",
                            "");
    if (!code && (code = ps_sql_step(stmt, err)) == 1) {
        stats.checkpoints = (uint64_t)sqlite3_column_int64(stmt, 0);
        stats.blobs = (uint64_t)sqlite3_column_int64(stmt, 1);
        stats.blob_bytes = (uint64_t)sqlite3_column_int64(stmt, 2);
        stats.epochs = (uint64_t)sqlite3_column_int64(stmt, 3);
        stats.series = (uint64_t)sqlite3_column_int64(stmt, 4);
        code = 0;
    }
    ps_read_end(store, conn);
    if (code)
        return code;
    stats.points_stored = store->points_stored;
    stats.batches_replayed = store->batches_replayed;
    pthread_mutex_lock(&store->lock);
    stats.commits = store->commits;
    stats.operations = store->operations;
    stats.failed_operations = store->failed_operations;
    stats.queue_depth = store->queue_depth;
    stats.disk_full = store->disk_full;
    memcpy(stats.last_error, store->last_error, sizeof stats.last_error);
    pthread_mutex_unlock(&store->lock);
    stats.file_bytes = file_size(store->path);
    stats.wal_bytes = log_size(store);
    stats.log_held = store->log_held;
    *ret_stats = stats;
    return 0;
}

static int fill_probe(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    (void)arguments;
    return ps_sql_run(tx->conn, err, "INSERT INTO probe (filler) VALUES (zeroblob(262144))", "");
}

static int empty_probe(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    (void)arguments;
    return ps_sql_run(tx->conn, err, "DELETE FROM probe", "");
}

/* As much as the largest thing that is written in one piece, and in a transaction of its own: pages that are
 * freed before the commit would not be written at all. */
static int probe(struct ps_store *store, struct ps_error *err)
{
    int code = ps_store_write(store, fill_probe, NULL, NULL, err);
    return code ? code : ps_store_write(store, empty_probe, NULL, NULL, err);
}

int ps_store_check(struct ps_store *store, struct ps_error *err)
{
    pthread_mutex_lock(&store->lock);
    int last = store->last_code;
    pthread_mutex_unlock(&store->lock);
    /* After a failure only a write can tell whether its cause is gone. */
    if (last)
        return probe(store, err);
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    int64_t version;
    code = ps_sql_int(conn, 0, &version, err, "PRAGMA user_version", "");
    ps_read_end(store, conn);
    return code;
}
