/* SPDX-License-Identifier: Apache-2.0
 * Copies of a store, and looking at all of one. Both work on files that a sidecar may have open. */
#include "db/store_internal.h"

#include "db/store_block.h"
#include "services/base/digest.h"
#include "services/base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* DIR/blobs/sha256/ab/cdef...; free() it. */
static char *blob_file(const char *dir, const char *sha256)
{
    char *path;
    return asprintf(&path, "%s/blobs/sha256/%.2s/%s", dir, sha256, sha256 + 2) < 0 ? NULL : path;
}

static int digest_of(const char *path, char ret_sha256[PS_SHA256_HEX], uint64_t *ret_size,
                     struct ps_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return ps_fail_errno(err, errno, "cannot open %s", path);
    int code = ps_sha256_file(fd, path, ret_sha256, ret_size, err);
    close(fd);
    return code;
}

/* ---- Backup ---- */

static int copy_database(const char *from, const char *to, struct ps_error *err)
{
    sqlite3 *source = NULL, *target = NULL;
    int code = 0;
    if (sqlite3_open_v2(from, &source, SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
        code = ps_fail(err, PS_INTERNAL, "cannot open the store %s: %s", from, sqlite3_errmsg(source));
    if (!code &&
        sqlite3_open_v2(to, &target, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX,
                        NULL) != SQLITE_OK)
        code = ps_fail(err, PS_INTERNAL, "cannot make %s: %s", to, sqlite3_errmsg(target));
    if (!code) {
        sqlite3_busy_timeout(source, 10000);
        /* In one step the copy is of one instant and no write can make it start over; readers do not keep the
         * sidecar's writer waiting. */
        sqlite3_backup *backup = sqlite3_backup_init(target, "main", source, "main");
        int result = backup ? sqlite3_backup_step(backup, -1) : SQLITE_ERROR;
        if (backup)
            sqlite3_backup_finish(backup);
        if (result != SQLITE_DONE)
            code = ps_fail(err, result == SQLITE_FULL ? PS_RESOURCE_EXHAUSTED : PS_INTERNAL,
                           "cannot copy the store to %s: %s", to,
                           result == SQLITE_DONE
                               ? ""
                               : sqlite3_errstr(result == SQLITE_ERROR ? sqlite3_errcode(target) : result));
    }
    /* One file alone: opened as a store it goes back to writing ahead. */
    if (!code && sqlite3_exec(target, "PRAGMA journal_mode = DELETE", NULL, NULL, NULL) != SQLITE_OK)
        code = ps_fail(err, PS_INTERNAL, "cannot finish %s: %s", to, sqlite3_errmsg(target));
    sqlite3_close(target);
    sqlite3_close(source);
    return code;
}

static int copy_bytes(const char *from, const char *to, struct ps_error *err)
{
    enum { piece = 1 << 20 };
    int in = open(from, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (in < 0)
        return ps_fail_errno(err, errno, "cannot open %s", from);
    int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
    char *buffer = malloc(piece);
    int code = out < 0 ? ps_fail_errno(err, errno, "cannot make %s", to) : buffer ? 0 : ps_no_memory(err);
    while (!code) {
        ssize_t n = read(in, buffer, piece);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            code = ps_fail_errno(err, errno, "cannot read %s", from);
        if (n <= 0)
            break;
        code = ps_write_all(out, buffer, (size_t)n, to, err);
    }
    if (!code && fsync(out))
        code = ps_fail_errno(err, errno, "cannot sync %s", to);
    free(buffer);
    if (out >= 0)
        close(out);
    close(in);
    return code;
}

/* Content never changes, so a second name for the file is as good as a copy of it. */
static int copy_blob(const char *from_dir, const char *to_dir, const char *sha256, struct ps_error *err)
{
    char *from = blob_file(from_dir, sha256), *to = blob_file(to_dir, sha256);
    char *folder = to ? strndup(to, (size_t)(strrchr(to, '/') - to)) : NULL;
    int code = from && to && folder ? ps_make_dirs(folder, 0750, err) : ps_no_memory(err);
    if (!code && link(from, to)) {
        if (errno == ENOENT)
            code = ps_fail(err, PS_NOT_FOUND, "%s is gone", from);
        else if (errno != EEXIST)
            code = copy_bytes(from, to, err);
    }
    if (!code)
        code = ps_sync_parent(to, err);
    free(from);
    free(to);
    free(folder);
    return code;
}

static int count_rows(struct ps_conn *conn, const char *sql, uint64_t *ret_count, struct ps_error *err)
{
    int64_t count = 0;
    int code = ps_sql_int(conn, 0, &count, err, sql, "");
    if (!code)
        *ret_count = (uint64_t)count;
    return code;
}

/* The checkpoints that the copied database names. Those deleted since leave it. */
static int copy_blobs(struct ps_conn *conn, const char *from_dir, const char *to_dir,
                      struct ps_backup_report *report, struct ps_error *err)
{
    char last[PS_SHA256_HEX] = "";
    for (;;) {
        sqlite3_stmt *stmt;
        uint64_t size = 0;
        int code = ps_sql_query(
            conn, &stmt, err,
            "SELECT sha256, size FROM blobs WHERE sha256 > ? AND path = '' ORDER BY sha256 LIMIT 1", "t",
            last);
        if (code || (code = ps_sql_step(stmt, err)) != 1)
            return code;
        snprintf(last, sizeof last, "%s", (const char *)sqlite3_column_text(stmt, 0));
        size = (uint64_t)sqlite3_column_int64(stmt, 1);
        sqlite3_reset(stmt);
        code = copy_blob(from_dir, to_dir, last, err);
        if (code == PS_NOT_FOUND) {
            report->missing++;
            code = ps_sql_run(conn, err, "DELETE FROM checkpoints WHERE sha256 = ?", "t", last);
            if (!code)
                code = ps_sql_run(conn, err, "DELETE FROM blobs WHERE sha256 = ?", "t", last);
        } else if (!code) {
            report->bytes += size;
        }
        if (code)
            return code;
    }
}

static bool is_empty_folder(const char *path)
{
    DIR *dir = opendir(path);
    int entries = 0;
    if (!dir)
        return false;
    for (const struct dirent *entry; (entry = readdir(dir));)
        entries += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(dir);
    return entries == 0;
}

static void remove_tree(const char *path)
{
    DIR *dir = opendir(path);
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        char *below = ps_path_join(path, entry->d_name);
        struct stat st;
        if (below && !lstat(below, &st) && S_ISDIR(st.st_mode))
            remove_tree(below);
        else if (below)
            unlink(below);
        free(below);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

int ps_store_backup(const char *data_dir, const char *to, struct ps_backup_report *ret_report,
                    struct ps_error *err)
{
    struct ps_backup_report report = {0};
    struct ps_conn conn = {0};
    struct stat st;
    char *from = ps_path_join(data_dir, PS_STORE_FILE), *making = NULL, *database = NULL,
         *target = strdup(to);
    int code = 0;
    if (!from || !target)
        code = ps_no_memory(err);
    for (size_t n = target ? strlen(target) : 0; n > 1 && target[n - 1] == '/';)
        target[--n] = '\0';
    if (!code &&
        (asprintf(&making, "%s.part", target) < 0 || !(database = ps_path_join(making, PS_STORE_FILE))))
        code = ps_no_memory(err);
    if (!code && access(from, R_OK))
        code = ps_fail_errno(err, errno, "cannot read the store %s", from);
    if (!code && !lstat(target, &st) && !(S_ISDIR(st.st_mode) && is_empty_folder(target)))
        code = ps_fail(err, PS_ALREADY_EXISTS, "%s is there already: name a new or an empty folder", target);
    if (!code && !lstat(making, &st)) { /* of a copy that was cut short */
        if (!S_ISDIR(st.st_mode))
            code = ps_fail(err, PS_ALREADY_EXISTS, "%s is in the way", making);
        else
            remove_tree(making);
    }
    bool made = false;
    if (!code && !(code = ps_make_dirs(making, 0750, err)))
        made = true;
    if (!code)
        code = copy_database(from, database, err);
    if (!code)
        code = ps_conn_open(&conn, database, SQLITE_OPEN_READWRITE, err);
    if (!code)
        code = copy_blobs(&conn, data_dir, making, &report, err);
    if (!code)
        code = count_rows(&conn, "SELECT count(*) FROM runs", &report.runs, err);
    if (!code)
        code = count_rows(&conn, "SELECT count(*) FROM checkpoints", &report.checkpoints, err);
    ps_conn_close(&conn);
    if (!code && !stat(database, &st))
        report.bytes += (uint64_t)st.st_size;
    if (!code)
        code = ps_sync_parent(database, err);
    if (!code && rename(making, target))
        code = ps_fail_errno(err, errno, "cannot put %s in place", target);
    if (!code)
        code = ps_sync_parent(target, err);
    if (code && made)
        remove_tree(making);
    free(from);
    free(making);
    free(database);
    free(target);
    if (!code)
        *ret_report = report;
    return code;
}

/* ---- Looking at everything ---- */

struct verification {
    void (*on_problem)(void *context, const char *line);
    void *context;
    struct ps_verify_report report;
};

__attribute__((format(printf, 2, 3))) static void problem(struct verification *v, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    v->report.problems++;
    if (v->on_problem)
        v->on_problem(v->context, line);
}

static int verify_pages(struct ps_conn *conn, struct verification *v, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err, "PRAGMA integrity_check(20)", "");
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        const char *line = (const char *)sqlite3_column_text(stmt, 0);
        if (line && strcmp(line, "ok") != 0)
            problem(v, "database: %s", line);
        code = 0;
    }
    if (code == PS_DATA_LOSS) { /* so damaged that not even the check gets through */
        problem(v, "database: %s", err->message);
        *err = (struct ps_error){0};
        code = 0;
    }
    int64_t dangling = 0;
    if (!code)
        code = ps_sql_int(conn, 0, &dangling, err, "SELECT count(*) FROM pragma_foreign_key_check", "");
    if (!code && dangling)
        problem(v, "database: %lld rows refer to rows that are not there", (long long)dangling);
    return code;
}

/* Every packed block and tail unpacks to as many points as its row says. */
static int verify_points(struct ps_conn *conn, struct verification *v, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    struct ps_block_point *points = NULL;
    size_t room = 0;
    int code =
        ps_sql_query(conn, &stmt, err,
                     "SELECT r.name, s.name, s.rank, b.first_step, b.count, b.data FROM blocks AS b"
                     " JOIN series AS s ON s.n = b.series JOIN runs AS r ON r.n = s.run"
                     " UNION ALL SELECT r.name, s.name, s.rank, t.first_step, t.count, t.data FROM tails AS t"
                     " JOIN series AS s ON s.n = t.series JOIN runs AS r ON r.n = s.run",
                     "");
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        struct ps_error bad = {0};
        const void *data = sqlite3_column_blob(stmt, 5);
        size_t size = (size_t)sqlite3_column_bytes(stmt, 5), count = 0;
        uint64_t wanted = (uint64_t)sqlite3_column_int64(stmt, 4);
        code = ps_block_count(data, size, &count, &bad);
        if (!code && count > room) {
            struct ps_block_point *larger = realloc(points, count * sizeof *larger);
            if (!larger) {
                code = ps_no_memory(err);
                break;
            }
            points = larger;
            room = count;
        }
        if (!code)
            code = ps_block_unpack(data, size, points, count, &bad);
        if (code || count != wanted)
            problem(v, "run %s, series %s of rank %lld, from step %lld: %s", sqlite3_column_text(stmt, 0),
                    sqlite3_column_text(stmt, 1), (long long)sqlite3_column_int64(stmt, 2),
                    (long long)sqlite3_column_int64(stmt, 3), code ? bad.message : "points are missing");
        v->report.blocks++;
        v->report.points += count;
        code = 0;
    }
    free(points);
    return code;
}

static int verify_blobs(struct ps_conn *conn, const char *data_dir, struct verification *v,
                        struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err, "SELECT sha256, size FROM blobs WHERE path = ''", "");
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        struct ps_error bad = {0};
        const char *sha256 = (const char *)sqlite3_column_text(stmt, 0);
        char hex[PS_SHA256_HEX], *path = ps_sha256_hex_valid(sha256) ? blob_file(data_dir, sha256) : NULL;
        uint64_t size = 0;
        v->report.checkpoints++;
        if (!path)
            problem(v, "checkpoint %s: that is no sha256", sha256);
        else if (digest_of(path, hex, &size, &bad))
            problem(v, "checkpoint %s: %s", sha256, bad.message);
        else if (size != (uint64_t)sqlite3_column_int64(stmt, 1) || strcmp(hex, sha256) != 0)
            problem(v, "checkpoint %s: %s has other bytes", sha256, path);
        v->report.bytes += size;
        free(path);
        code = 0;
    }
    return code;
}

int ps_store_verify(const char *data_dir, void (*on_problem)(void *context, const char *line), void *context,
                    struct ps_verify_report *ret_report, struct ps_error *err)
{
    struct verification v = {.on_problem = on_problem, .context = context};
    struct ps_store_config config = {.dir = data_dir, .read_only = true, .readers = 1};
    struct ps_store *store = NULL;
    struct ps_conn *conn = NULL;
    int code = ps_store_open(&config, &store, err);
    if (!code)
        code = ps_read_begin(store, &conn, err);
    if (code) {
        ps_store_free(store);
        return code;
    }
    code = verify_pages(conn, &v, err);
    if (!code)
        code = count_rows(conn, "SELECT count(*) FROM runs", &v.report.runs, err);
    if (!code)
        code = verify_points(conn, &v, err);
    if (!code)
        code = verify_blobs(conn, data_dir, &v, err);
    ps_read_end(store, conn);
    ps_store_free(store);
    if (code == PS_DATA_LOSS) {
        problem(&v, "database: %s", err->message);
        code = 0;
    }
    if (!code)
        *ret_report = v.report;
    return code;
}
