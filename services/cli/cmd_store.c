/* SPDX-License-Identifier: Apache-2.0
 * paramsync export --store: a copy of a whole store, also of one in use, and a look at all of it. */
#include "services/cli/cli.h"

#include "db/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* DIR, or the database in it. free() it. */
static char *data_dir(const char *store)
{
    struct stat st;
    const char *slash = strrchr(store, '/');
    if (stat(store, &st) || S_ISDIR(st.st_mode))
        return strdup(store);
    return !slash ? strdup(".") : slash == store ? strdup("/") : strndup(store, (size_t)(slash - store));
}

static void print_problem(void *context, const char *line)
{
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    (void)context;
    cli_escape(&out, line);
    fprintf(stderr, "paramsync export: %.*s\n", (int)out.size, out.data);
    ps_buf_done(&out);
}

static int verify(const char *dir, bool json, struct ps_error *err)
{
    struct ps_verify_report r;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    char bytes[32];
    int code = ps_store_verify(dir, print_problem, NULL, &r, err);
    if (code)
        return code;
    if (json) {
        code = cli_write_json(json_pack("{s:s, s:I, s:I, s:I, s:I, s:I}", "store", dir, "runs",
                                        (json_int_t)r.runs, "points", (json_int_t)r.points, "checkpoints",
                                        (json_int_t)r.checkpoints, "bytes", (json_int_t)r.bytes, "problems",
                                        (json_int_t)r.problems),
                              err);
    } else {
        cli_format_bytes(r.bytes, bytes, sizeof bytes);
        cli_escape(&out, dir);
        ps_buf_printf(&out,
                      ": %" PRIu64 " runs, %" PRIu64 " step points, %" PRIu64 " checkpoints (%s): ", r.runs,
                      r.points, r.checkpoints, bytes);
        if (r.problems)
            ps_buf_printf(&out, "%" PRIu64 " problems\n", r.problems);
        else
            ps_buf_puts(&out, "all good\n");
        code = cli_write(&out, err);
        ps_buf_done(&out);
    }
    if (!code && r.problems)
        code = ps_fail(err, PS_DATA_LOSS, "%s is damaged: go back to a copy, or delete what is named above",
                       dir);
    return code;
}

int cli_store_export(const char *store, const char *to, bool check, bool json, struct ps_error *err)
{
    struct ps_backup_report r;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    char bytes[32], *dir = data_dir(store);
    int code = dir ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code && !to && !check)
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "--store copies a whole store: name a new folder with -o, or say --check");
    if (!code && to)
        code = ps_store_backup(dir, to, &r, err);
    if (!code && to && json) {
        code = cli_write_json(json_pack("{s:s, s:s, s:I, s:I, s:I}", "store", dir, "output", to, "runs",
                                        (json_int_t)r.runs, "checkpoints", (json_int_t)r.checkpoints, "bytes",
                                        (json_int_t)r.bytes),
                              err);
    } else if (!code && to) {
        cli_format_bytes(r.bytes, bytes, sizeof bytes);
        cli_escape(&out, to);
        ps_buf_printf(&out, ": %" PRIu64 " runs, %" PRIu64 " checkpoints, %s\n", r.runs, r.checkpoints,
                      bytes);
        if (r.missing)
            ps_buf_printf(&out,
                          "%" PRIu64 " checkpoints were deleted while the copy was made and are not in it\n",
                          r.missing);
        code = cli_write(&out, err);
    }
    if (!code && check)
        code = verify(to ? to : dir, json, err);
    ps_buf_done(&out);
    free(dir);
    return code;
}
