/* SPDX-License-Identifier: Apache-2.0 */
#include "db/store_internal.h"
#include "services/base/fs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A whole copy beside the file, under its name only once it is durable. */
static int copy_before(struct ps_conn *conn, const char *path, int64_t version, struct ps_error *err)
{
    char *temporary = NULL, *final = NULL, *sql = NULL;
    int code;
    if (asprintf(&final, "%s.before-%lld", path, (long long)version + 1) < 0 ||
        asprintf(&temporary, "%s.tmp", final) < 0 || !(sql = sqlite3_mprintf("VACUUM INTO %Q", temporary))) {
        code = ps_no_memory(err);
        goto out;
    }
    unlink(temporary); /* VACUUM INTO wants a new file; one may be left from a start that was cut short */
    code = ps_sql_exec(conn->db, sql, err);
    if (code) {
        unlink(temporary);
        ps_error_prefix(err, "cannot copy %s before its schema is changed", path);
        goto out;
    }
    if (rename(temporary, final)) {
        code = ps_fail(err, PS_INTERNAL, "cannot put %s in place", final);
        goto out;
    }
    code = ps_sync_parent(final, err);
out:
    sqlite3_free(sql);
    free(temporary);
    free(final);
    return code;
}

static int apply(struct ps_conn *conn, const struct ps_migration *migrations, int64_t from, int count,
                 struct ps_error *err)
{
    int code = ps_sql_exec(conn->db, "BEGIN IMMEDIATE", err);
    for (int64_t i = from; !code && i < count; i++) {
        char *sql = strndup((const char *)migrations[i].sql, migrations[i].size);
        code = sql ? ps_sql_exec(conn->db, sql, err) : ps_no_memory(err);
        if (code)
            ps_error_prefix(err, "migration %s", migrations[i].name);
        free(sql);
    }
    char stamp[128];
    snprintf(stamp, sizeof stamp, "PRAGMA application_id = %d; PRAGMA user_version = %d",
             PS_STORE_APPLICATION_ID, count);
    if (!code)
        code = ps_sql_exec(conn->db, stamp, err);
    int64_t dangling = 0;
    if (!code)
        code = ps_sql_int(conn, 0, &dangling, err, "SELECT count(*) FROM pragma_foreign_key_check", "");
    if (!code && dangling)
        code = ps_fail(err, PS_INTERNAL, "the migration leaves %lld rows that refer to nothing",
                       (long long)dangling);
    if (!code)
        code = ps_sql_exec(conn->db, "COMMIT", err);
    if (code && !sqlite3_get_autocommit(conn->db))
        ps_sql_exec(conn->db, "ROLLBACK", NULL);
    return code;
}

int ps_schema_migrate(struct ps_conn *conn, const char *path, const struct ps_migration *migrations,
                      int count, struct ps_error *err)
{
    int64_t application = 0, version = 0, tables = 0;
    int code = ps_sql_int(conn, 0, &application, err, "PRAGMA application_id", "");
    if (!code)
        code = ps_sql_int(conn, 0, &version, err, "PRAGMA user_version", "");
    if (!code)
        code = ps_sql_int(conn, 0, &tables, err, "SELECT count(*) FROM sqlite_schema", "");
    if (code)
        return code;
    bool fresh = application == 0 && version == 0 && tables == 0;
    if (!fresh && application != PS_STORE_APPLICATION_ID)
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "%s is another program's SQLite file: name another --data-dir", path);
    if (version > count)
        return ps_fail(
            err, PS_FAILED_PRECONDITION,
            "%s has schema %lld, this program knows up to %d: use the newer paramsync that wrote it", path,
            (long long)version, count);
    if (version == count)
        return 0;
    if (!fresh) {
        code = copy_before(conn, path, version, err);
        if (code)
            return code;
    }
    /* A migration may rebuild tables that others refer to; what it leaves is checked before it is committed.
     */
    sqlite3_db_config(conn->db, SQLITE_DBCONFIG_ENABLE_FKEY, 0, NULL);
    code = apply(conn, migrations, version, count, err);
    sqlite3_db_config(conn->db, SQLITE_DBCONFIG_ENABLE_FKEY, 1, NULL);
    return code;
}
