/* SPDX-License-Identifier: Apache-2.0
 * Runs, attempts, ranks, events. */
#include "db/store_internal.h"
#include "services/base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const state_names[] = {"unknown", "created", "running", "finished",
                                          "failed",  "killed",  "lost"};
enum { state_count = sizeof state_names / sizeof *state_names };

const char *ps_run_state_name(int state)
{
    return state_names[state > 0 && state < state_count ? state : 0];
}

int ps_run_state_from_name(const char *name)
{
    for (int i = 1; i < state_count; i++)
        if (strcmp(name, state_names[i]) == 0)
            return i;
    return 0;
}

void ps_run_done(struct ps_run *run)
{
    ps_arena_free(run->memory);
    *run = (struct ps_run){0};
}

#define DEFINE_LIST_DONE(function, type)                                                                     \
    void function(struct type *list)                                                                         \
    {                                                                                                        \
        ps_arena_free(list->memory);                                                                         \
        *list = (struct type){0};                                                                            \
    }
DEFINE_LIST_DONE(ps_run_list_done, ps_run_list)
DEFINE_LIST_DONE(ps_attempt_list_done, ps_attempt_list)
DEFINE_LIST_DONE(ps_rank_list_done, ps_rank_list)
DEFINE_LIST_DONE(ps_event_list_done, ps_event_list)
DEFINE_LIST_DONE(ps_blob_list_done, ps_blob_list)

/* ---- Looking up ---- */

int ps_find_run(struct ps_conn *conn, const char *run, struct ps_run_key *ret_key, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    /* Ids go before names, so that nobody takes a run over by naming one after its id. */
    int code = ps_sql_query(conn, &stmt, err,
                            "SELECT n, id, attempt, state FROM runs WHERE id = ?1"
                            " UNION ALL SELECT n, id, attempt, state FROM runs WHERE name = ?1 LIMIT 1",
                            "t", run);
    if (code)
        return code;
    code = ps_sql_step(stmt, err);
    if (code < 0)
        return code;
    if (code == 0)
        return ps_fail(err, PS_NOT_FOUND, "there is no run with the id or name \"%.200s\"", run);
    ret_key->n = sqlite3_column_int64(stmt, 0);
    snprintf(ret_key->id, sizeof ret_key->id, "%s", (const char *)sqlite3_column_text(stmt, 1));
    ret_key->attempt = (uint32_t)sqlite3_column_int64(stmt, 2);
    ret_key->state = sqlite3_column_int(stmt, 3);
    sqlite3_reset(stmt);
    return 0;
}

int ps_find_attempt(const struct ps_run_key *key, const char *run, uint32_t attempt, uint32_t *ret_attempt,
                    struct ps_error *err)
{
    if (attempt > key->attempt)
        return ps_fail(err, PS_NOT_FOUND, "run \"%.200s\" has no attempt %u: its newest is %u", run, attempt,
                       key->attempt);
    *ret_attempt = attempt ? attempt : key->attempt;
    return 0;
}

int ps_load_attempts(struct ps_conn *conn, int64_t n, struct ps_attempt_list *list, struct ps_error *err)
{
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        return ps_no_memory(err);
    sqlite3_stmt *stmt;
    int code = ps_sql_query(
        conn, &stmt, err,
        "SELECT attempt, world_size, device, started_ns, ended_ns, last_seen_ns, elapsed_s, reason"
        " FROM attempts WHERE run = ? ORDER BY attempt",
        "i", n);
    struct ps_attempt *attempts = NULL;
    size_t count = 0, capacity = 0;
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_attempt *larger = ps_arena_grow(arena, attempts, count, &capacity, sizeof *attempts);
        if (!larger) {
            code = ps_no_memory(err);
            break;
        }
        attempts = larger;
        struct ps_attempt *a = &attempts[count];
        *a = (struct ps_attempt){
            .attempt = (uint32_t)sqlite3_column_int64(stmt, 0),
            .world_size = (uint32_t)sqlite3_column_int64(stmt, 1),
            .device = ps_sql_text(stmt, 2, arena),
            .started_ns = sqlite3_column_int64(stmt, 3),
            .ended_ns = sqlite3_column_int64(stmt, 4),
            .last_seen_ns = sqlite3_column_int64(stmt, 5),
            .elapsed_s = sqlite3_column_double(stmt, 6),
            .reason = ps_sql_text(stmt, 7, arena),
        };
        if (!a->device || !a->reason) {
            code = ps_no_memory(err);
            break;
        }
        if (count) {
            a->offset_s = a[-1].offset_s + a[-1].elapsed_s;
            /* The sidecar's clock may have been set back meanwhile. */
            if (a->started_ns > a[-1].last_seen_ns)
                a->gap_s = (double)(a->started_ns - a[-1].last_seen_ns) / 1e9;
        }
        count++;
    }
    sqlite3_reset(stmt);
    if (code) {
        ps_arena_free(arena);
        return code;
    }
    *list = (struct ps_attempt_list){attempts, count, arena};
    return 0;
}

#define RUN_COLUMNS                                                                                          \
    "n, id, name, state, world_size, attempt, model, dataset, dataset_hash, device, source_commit, "         \
    "epochs_planned,"                                                                                        \
    " batch_per_rank, created_ns, ended_ns, updated_ns, reason, notes, last_epoch, last_evaluated, "         \
    "train_loss_bits,"                                                                                       \
    " val_loss_bits, accuracy_bits, samples_per_s_bits, best_epoch, best_accuracy_bits"

/* Reads a row of RUN_COLUMNS; texts go into arena. */
static int read_run(sqlite3_stmt *stmt, struct ps_arena *arena, int64_t *ret_n, struct ps_run *run,
                    struct ps_error *err)
{
    *ret_n = sqlite3_column_int64(stmt, 0);
    *run = (struct ps_run){
        .name = ps_sql_text(stmt, 2, arena),
        .state = sqlite3_column_int(stmt, 3),
        .world_size = (uint32_t)sqlite3_column_int64(stmt, 4),
        .attempt = (uint32_t)sqlite3_column_int64(stmt, 5),
        .model = ps_sql_text(stmt, 6, arena),
        .dataset = ps_sql_text(stmt, 7, arena),
        .dataset_hash = ps_sql_text(stmt, 8, arena),
        .device = ps_sql_text(stmt, 9, arena),
        .commit = ps_sql_text(stmt, 10, arena),
        .epochs_planned = (uint32_t)sqlite3_column_int64(stmt, 11),
        .batch_per_rank = (uint32_t)sqlite3_column_int64(stmt, 12),
        .created_ns = sqlite3_column_int64(stmt, 13),
        .ended_ns = sqlite3_column_int64(stmt, 14),
        .updated_ns = sqlite3_column_int64(stmt, 15),
        .reason = ps_sql_text(stmt, 16, arena),
        .notes = ps_sql_text(stmt, 17, arena),
        .has_epochs = sqlite3_column_int64(stmt, 18) != 0,
        .last_epoch = (uint32_t)sqlite3_column_int64(stmt, 18),
        .has_accuracy = sqlite3_column_int(stmt, 19),
        .train_loss = ps_sql_bits(stmt, 20),
        .val_loss = ps_sql_bits(stmt, 21),
        .accuracy = ps_sql_bits(stmt, 22),
        .samples_per_s = ps_sql_bits(stmt, 23),
        .best_epoch = (uint32_t)sqlite3_column_int64(stmt, 24),
        .best_accuracy = ps_sql_bits(stmt, 25),
    };
    snprintf(run->id, sizeof run->id, "%s", (const char *)sqlite3_column_text(stmt, 1));
    if (!run->name || !run->model || !run->dataset || !run->dataset_hash || !run->device || !run->commit ||
        !run->reason || !run->notes)
        return ps_no_memory(err);
    return 0;
}

static int read_tags(struct ps_conn *conn, int64_t n, struct ps_arena *arena, struct ps_run *run,
                     struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err, "SELECT tag FROM tags WHERE run = ? ORDER BY position", "i", n);
    const char **tags = NULL;
    size_t count = 0, capacity = 0;
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        const char **larger = ps_arena_grow(arena, tags, count, &capacity, sizeof *tags);
        if (!larger || !(larger[count] = ps_sql_text(stmt, 0, arena)))
            return ps_no_memory(err);
        tags = larger;
        count++;
    }
    run->tags = tags;
    run->tag_count = count;
    return code;
}

static int read_config(struct ps_conn *conn, int64_t n, struct ps_arena *arena, struct ps_run *run,
                       struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code =
        ps_sql_query(conn, &stmt, err, "SELECT key, value FROM config WHERE run = ? ORDER BY key", "i", n);
    struct ps_key_value *config = NULL;
    size_t count = 0, capacity = 0;
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_key_value *larger = ps_arena_grow(arena, config, count, &capacity, sizeof *config);
        if (!larger || !(larger[count].key = ps_sql_text(stmt, 0, arena)) ||
            !(larger[count].value = ps_sql_text(stmt, 1, arena)))
            return ps_no_memory(err);
        config = larger;
        count++;
    }
    run->config = config;
    run->config_count = count;
    return code;
}

/* What the attempts say: elapsed times and the last sign of life. */
static int read_elapsed(struct ps_conn *conn, int64_t n, struct ps_run *run, struct ps_error *err)
{
    struct ps_attempt_list attempts = {0};
    int code = ps_load_attempts(conn, n, &attempts, err);
    if (code)
        return code;
    double gaps = 0;
    for (size_t i = 0; i < attempts.count; i++) {
        run->elapsed_s += attempts.attempts[i].elapsed_s;
        gaps += attempts.attempts[i].gap_s;
        if (attempts.attempts[i].last_seen_ns > run->updated_ns)
            run->updated_ns = attempts.attempts[i].last_seen_ns;
    }
    run->elapsed_with_gaps_s = run->elapsed_s + gaps;
    ps_attempt_list_done(&attempts);
    return 0;
}

int ps_load_run(struct ps_conn *conn, int64_t n, struct ps_run *ret_run, struct ps_error *err)
{
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        return ps_no_memory(err);
    struct ps_run run = {0};
    sqlite3_stmt *stmt;
    int code = ps_sql_query(conn, &stmt, err, "SELECT " RUN_COLUMNS " FROM runs WHERE n = ?", "i", n);
    if (!code) {
        code = ps_sql_step(stmt, err);
        code = code == 1 ? read_run(stmt, arena, &n, &run, err)
               : code    ? code
                         : ps_fail(err, PS_NOT_FOUND, "no such run");
        sqlite3_reset(stmt);
    }
    if (!code)
        code = read_tags(conn, n, arena, &run, err);
    if (!code)
        code = read_config(conn, n, arena, &run, err);
    if (!code)
        code = read_elapsed(conn, n, &run, err);
    if (code) {
        ps_arena_free(arena);
        return code;
    }
    run.memory = arena;
    *ret_run = run;
    return 0;
}

int ps_store_get_run(struct ps_store *store, const char *run, struct ps_run *ret_run, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_key key = {0};
    code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = ps_load_run(conn, key.n, ret_run, err);
    ps_read_end(store, conn);
    return code;
}

/* Texts of a page; one run alone may go beyond it. gRPC clients take 4 MiB unless they ask for more. */
enum { PAGE_TEXT_MAX = 2 << 20 };

static size_t text_bytes(const struct ps_run *run)
{
    const char *const texts[] = {run->name,   run->model,  run->dataset, run->dataset_hash,
                                 run->device, run->commit, run->notes,   run->reason};
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        bytes += texts[i] ? strlen(texts[i]) : 0;
    for (size_t i = 0; i < run->tag_count; i++)
        bytes += strlen(run->tags[i]);
    return bytes;
}

int ps_store_list_runs(struct ps_store *store, const struct ps_run_query *query, struct ps_run_list *ret_list,
                       struct ps_error *err)
{
    int64_t before = INT64_MAX, states = 0;
    if (query->page_size > 1000)
        return ps_fail(err, PS_INVALID_ARGUMENT, "page_size %u: must be at most 1000", query->page_size);
    if (query->page_token && *query->page_token && ps_parse_int64(query->page_token, 1, INT64_MAX, &before))
        return ps_fail(err, PS_INVALID_ARGUMENT, "page_token \"%.40s\": not one of ours", query->page_token);
    for (size_t i = 0; i < query->state_count; i++) {
        if (query->states[i] <= 0 || query->states[i] >= state_count)
            return ps_fail(err, PS_INVALID_ARGUMENT, "states: %d is no state", query->states[i]);
        states |= INT64_C(1) << query->states[i];
    }
    size_t limit = query->page_size ? query->page_size : 100;
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_list list = {0};
    struct ps_arena *arena = ps_arena_new();
    list.memory = arena;
    list.runs = arena ? ps_arena_alloc(arena, (limit + 1) * sizeof *list.runs) : NULL;
    int64_t *keys = arena ? ps_arena_alloc(arena, (limit + 1) * sizeof *keys) : NULL;
    if (!list.runs || !keys)
        code = ps_no_memory(err);
    sqlite3_stmt *stmt;
    if (!code) /* instr of lower: LIKE would take % and _ in what is looked for as wildcards */
        code = ps_sql_query(conn, &stmt, err,
                            "SELECT " RUN_COLUMNS " FROM runs WHERE n < ?1 AND (?2 = 0 OR (?2 >> state) & 1)"
                            " AND (?3 = '' OR instr(lower(name), lower(?3)))"
                            " AND (?4 = '' OR EXISTS (SELECT 1 FROM tags WHERE run = runs.n AND tag = ?4))"
                            " ORDER BY n DESC LIMIT ?5",
                            "iitti", before, states, query->name_contains, query->tag, (int64_t)limit + 1);
    size_t bytes = 0;
    bool more = false;
    while (!code && !more && (code = ps_sql_step(stmt, err)) == 1) {
        struct ps_run *run = &list.runs[list.count];
        code = read_run(stmt, arena, &keys[list.count], run, err);
        if (!code)
            code = read_tags(conn, keys[list.count], arena, run, err);
        bytes += code ? 0 : text_bytes(run);
        more = list.count == limit || (list.count && bytes > PAGE_TEXT_MAX);
        list.count += !more;
    }
    if (!code && more)
        snprintf(list.next_page_token, sizeof list.next_page_token, "%lld", (long long)keys[list.count - 1]);
    for (size_t i = 0; !code && i < list.count; i++)
        code = read_elapsed(conn, keys[i], &list.runs[i], err);
    ps_read_end(store, conn);
    if (code) {
        ps_run_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}

/* ---- Windows of a table of runs ---- */

/* The runs of matching tags are found once, not for each row. */
#define WINDOW_WHERE                                                                                         \
    " WHERE (?1 = 0 OR (?1 >> state) & 1)"                                                                   \
    " AND (?2 = '' OR instr(lower(name), lower(?2)) OR instr(lower(model), lower(?2))"                       \
    " OR instr(lower(dataset), lower(?2)) OR instr(lower(device), lower(?2))"                                \
    " OR (notes <> '' AND instr(lower(notes), lower(?2)))"                                                   \
    " OR n IN (SELECT run FROM tags WHERE ?2 <> '' AND instr(lower(tag), lower(?2))))"                       \
    " AND (?3 = '' OR n IN (SELECT run FROM tags WHERE tag = ?3))"

/* In the order of the table: only what is before and in the window is read. */
static const char window_newest[] = "SELECT n FROM runs" WINDOW_WHERE " ORDER BY n DESC LIMIT ?4 OFFSET ?5";
static const char window_oldest[] = "SELECT n FROM runs" WINDOW_WHERE " ORDER BY n LIMIT ?4 OFFSET ?5";
/* Only one branch of the CASE is computed for a row. */
static const char window_by_key[] =
    "SELECT n FROM (SELECT n, CASE ?7"
    " WHEN 1 THEN lower(name)"
    " WHEN 2 THEN CASE state WHEN 2 THEN 0 ELSE state END"
    " WHEN 3 THEN nullif(lower(model || ' ' || dataset), ' ')"
    " WHEN 4 THEN nullif(lower(device), '')"
    " WHEN 5 THEN world_size"
    " WHEN 6 THEN last_epoch"
    " WHEN 7 THEN CASE WHEN last_evaluated THEN real_of_bits(accuracy_bits) END"
    " WHEN 8 THEN CASE WHEN best_epoch THEN real_of_bits(best_accuracy_bits) END"
    " WHEN 9 THEN CASE WHEN last_evaluated THEN real_of_bits(val_loss_bits)"
    "                  WHEN last_epoch THEN real_of_bits(train_loss_bits) END"
    " WHEN 10 THEN CASE WHEN last_epoch THEN real_of_bits(samples_per_s_bits) END"
    " WHEN 11 THEN (SELECT sum(elapsed_s) FROM attempts WHERE run = runs.n)"
    " WHEN 12 THEN CASE WHEN best_epoch AND real_of_bits(best_accuracy_bits) >= ?8 THEN"
    "  (SELECT real_of_bits(e.elapsed_bits) + coalesce((SELECT sum(a.elapsed_s) FROM attempts AS a"
    "    WHERE a.run = e.run AND a.attempt < e.attempt), 0)"
    "   FROM epochs AS e WHERE e.run = runs.n AND NOT e.no_eval AND real_of_bits(e.accuracy_bits) >= ?8"
    "    AND e.attempt = (SELECT max(f.attempt) FROM epochs AS f WHERE f.run = e.run AND f.epoch = e.epoch)"
    "   ORDER BY e.epoch LIMIT 1) END"
    " WHEN 13 THEN (SELECT lower(tag) FROM tags WHERE run = runs.n ORDER BY position LIMIT 1)"
    " END AS key FROM runs" WINDOW_WHERE ") ORDER BY CASE WHEN ?4 THEN key END DESC NULLS LAST,"
    " CASE WHEN NOT ?4 THEN key END ASC NULLS LAST, n DESC LIMIT ?5 OFFSET ?6";

int ps_store_window_runs(struct ps_store *store, const struct ps_run_window *window,
                         struct ps_run_list *ret_list, uint64_t *ret_total, struct ps_error *err)
{
    int64_t states = 0, total = 0;
    if (window->limit > 1000)
        return ps_fail(err, PS_INVALID_ARGUMENT, "limit %u: must be at most 1000", window->limit);
    for (size_t i = 0; i < window->state_count; i++) {
        if (window->states[i] <= 0 || window->states[i] >= state_count)
            return ps_fail(err, PS_INVALID_ARGUMENT, "states: %d is no state", window->states[i]);
        states |= INT64_C(1) << window->states[i];
    }
    const size_t limit = window->limit ? window->limit : 100;
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_list list = {0};
    struct ps_arena *arena = ps_arena_new();
    list.memory = arena;
    list.runs = arena ? ps_arena_alloc(arena, limit * sizeof *list.runs) : NULL;
    int64_t *keys = arena ? ps_arena_alloc(arena, limit * sizeof *keys) : NULL;
    size_t count = 0;
    if (!list.runs || !keys)
        code = ps_no_memory(err);
    const bool by_age = window->order == PS_ORDER_CREATED;
    sqlite3_stmt *stmt;
    const bool all = !states && !(window->text && *window->text) && !(window->tag && *window->tag);
    if (!code && all) /* from an index, without the rows */
        code = ps_sql_int(conn, 0, &total, err, "SELECT count(*) FROM runs", "");
    else if (!code)
        code = ps_sql_int(conn, 0, &total, err, "SELECT count(*) FROM runs" WINDOW_WHERE, "itt", states,
                          window->text, window->tag);
    if (!code && by_age)
        code = ps_sql_query(conn, &stmt, err, window->descending ? window_newest : window_oldest, "ittkk",
                            states, window->text, window->tag, (unsigned)limit, window->offset);
    else if (!code)
        code = ps_sql_query(conn, &stmt, err, window_by_key, "ittkkkkd", states, window->text, window->tag,
                            (unsigned)window->descending, (unsigned)limit, window->offset,
                            (unsigned)window->order, window->target);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        keys[count++] = sqlite3_column_int64(stmt, 0);
    }
    for (size_t i = 0; !code && i < count; i++) {
        struct ps_run *run = &list.runs[list.count];
        code = ps_sql_query(conn, &stmt, err, "SELECT " RUN_COLUMNS " FROM runs WHERE n = ?", "i", keys[i]);
        if (!code)
            code = ps_sql_step(stmt, err);
        if (code != 1)
            continue; /* a failure ends the loop; that a row is gone cannot be within one transaction */
        code = read_run(stmt, arena, &keys[i], run, err);
        sqlite3_reset(stmt);
        if (!code)
            code = read_tags(conn, keys[i], arena, run, err);
        if (!code)
            code = read_elapsed(conn, keys[i], run, err);
        list.count++;
    }
    ps_read_end(store, conn);
    if (code) {
        ps_run_list_done(&list);
        return code;
    }
    *ret_list = list;
    *ret_total = (uint64_t)total;
    return 0;
}

int ps_store_get_baseline(struct ps_store *store, char ret_id[PS_RUN_ID_SIZE], struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    sqlite3_stmt *stmt;
    code = ps_sql_query(conn, &stmt, err, "SELECT id FROM pinned JOIN runs ON n = run", "");
    if (!code)
        code = ps_sql_step(stmt, err);
    if (code >= 0)
        snprintf(ret_id, PS_RUN_ID_SIZE, "%s", code ? (const char *)sqlite3_column_text(stmt, 0) : "");
    if (code == 1)
        sqlite3_reset(stmt);
    ps_read_end(store, conn);
    return code < 0 ? code : 0;
}

struct pin_arguments {
    const char *name;
    bool pin;
};

static int pin_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    const struct pin_arguments *a = arguments;
    struct ps_run_key key = {0};
    int64_t pinned = 0;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_sql_int(tx->conn, 0, &pinned, err, "SELECT run FROM pinned", "");
    if (code || (pinned == key.n) == a->pin)
        return code;
    if (a->pin)
        code =
            ps_sql_run(tx->conn, err, "INSERT OR REPLACE INTO pinned (slot, run) VALUES (1, ?)", "i", key.n);
    else
        code = ps_sql_run(tx->conn, err, "DELETE FROM pinned WHERE run = ?", "i", key.n);
    return code ? code
                : ps_tx_event(tx, key.id, key.attempt, "updated", err, "%s",
                              a->pin ? "pinned as the baseline" : "no longer the baseline");
}

int ps_store_pin_baseline(struct ps_store *store, const char *run, bool pin, struct ps_error *err)
{
    struct pin_arguments a = {.name = run, .pin = pin};
    return ps_store_write(store, pin_op, NULL, &a, err);
}

int ps_store_list_attempts(struct ps_store *store, const char *run, struct ps_attempt_list *ret_list,
                           struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_key key = {0};
    code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = ps_load_attempts(conn, key.n, ret_list, err);
    ps_read_end(store, conn);
    return code;
}

void ps_log_list_done(struct ps_log_list *list)
{
    ps_arena_free(list->memory);
    *list = (struct ps_log_list){0};
}

int ps_store_list_log(struct ps_store *store, const char *run, uint32_t attempt, int64_t rank, uint32_t limit,
                      struct ps_log_list *ret_list, struct ps_error *err)
{
    struct ps_conn *conn;
    if (limit > PS_LOG_KEPT)
        return ps_fail(err, PS_INVALID_ARGUMENT, "limit: %u is not from 1 to %d", limit, PS_LOG_KEPT);
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_key key = {0};
    struct ps_log_list list = {0};
    size_t capacity = 0;
    sqlite3_stmt *stmt;
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        code = ps_no_memory(err);
    list.memory = arena;
    if (!code)
        code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = ps_find_attempt(&key, run, attempt, &attempt, err);
    if (!code)
        code = ps_sql_query(conn, &stmt, err,
                            "SELECT rank, seq, text FROM log_lines AS l WHERE run = ?1 AND attempt = ?2"
                            " AND (?3 < 0 OR rank = ?3) AND seq > (SELECT max(seq) FROM log_lines AS m"
                            " WHERE m.run = l.run AND m.attempt = l.attempt AND m.rank = l.rank) - ?4"
                            " ORDER BY rank, seq",
                            "ikik", key.n, attempt, rank, limit ? limit : (uint32_t)PS_LOG_KEPT);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_log_line *larger = ps_arena_grow(arena, list.lines, list.count, &capacity, sizeof *larger);
        const char *text = larger ? ps_sql_text(stmt, 2, arena) : NULL;
        if (!text) {
            code = ps_no_memory(err);
            break;
        }
        list.lines = larger;
        list.lines[list.count++] = (struct ps_log_line){
            .attempt = attempt,
            .rank = (uint32_t)sqlite3_column_int64(stmt, 0),
            .seq = (uint64_t)sqlite3_column_int64(stmt, 1),
            .text = text,
        };
    }
    ps_read_end(store, conn);
    if (code) {
        ps_log_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}

int ps_store_list_ranks(struct ps_store *store, const char *run, uint32_t attempt,
                        struct ps_rank_list *ret_list, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_run_key key = {0};
    struct ps_rank_list list = {0};
    size_t capacity = 0;
    sqlite3_stmt *stmt;
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        code = ps_no_memory(err);
    list.memory = arena;
    if (!code)
        code = ps_find_run(conn, run, &key, err);
    if (!code)
        code = ps_find_attempt(&key, run, attempt, &attempt, err);
    if (!code)
        code = ps_sql_query(
            conn, &stmt, err,
            "SELECT rank, elapsed_s, step, points_sent, points_dropped, spool_bytes, last_seen_ns,"
            " (SELECT coalesce(max(last), 0) FROM batches AS b WHERE b.run = r.run"
            " AND b.attempt = r.attempt AND b.rank = r.rank),"
            " points_waiting, points_replayed, rss_bytes, clock_offset_bits"
            " FROM ranks AS r WHERE run = ? AND attempt = ? ORDER BY rank",
            "ik", key.n, attempt);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_rank *larger = ps_arena_grow(arena, list.ranks, list.count, &capacity, sizeof *larger);
        if (!larger) {
            code = ps_no_memory(err);
            break;
        }
        list.ranks = larger;
        list.ranks[list.count++] = (struct ps_rank){
            .attempt = attempt,
            .rank = (uint32_t)sqlite3_column_int64(stmt, 0),
            .elapsed_s = sqlite3_column_double(stmt, 1),
            .step = (uint64_t)sqlite3_column_int64(stmt, 2),
            .points_sent = (uint64_t)sqlite3_column_int64(stmt, 3),
            .points_dropped = (uint64_t)sqlite3_column_int64(stmt, 4),
            .spool_bytes = (uint64_t)sqlite3_column_int64(stmt, 5),
            .last_seen_ns = sqlite3_column_int64(stmt, 6),
            .last_seq = (uint64_t)sqlite3_column_int64(stmt, 7),
            .points_waiting = (uint64_t)sqlite3_column_int64(stmt, 8),
            .points_replayed = (uint64_t)sqlite3_column_int64(stmt, 9),
            .rss_bytes = (uint64_t)sqlite3_column_int64(stmt, 10),
            .has_clock_offset = sqlite3_column_type(stmt, 11) != SQLITE_NULL,
            .clock_offset_s = ps_sql_bits(stmt, 11),
        };
    }
    ps_read_end(store, conn);
    if (code) {
        ps_rank_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}

enum event_order { SINCE, NEWEST };

static int list_events(struct ps_store *store, const char *run, enum event_order which, uint64_t since_id,
                       uint32_t limit, struct ps_event_list *ret_list, struct ps_error *err)
{
    if (limit > 10000)
        return ps_fail(err, PS_INVALID_ARGUMENT, "limit %u: must be at most 10000", limit);
    if (since_id > INT64_MAX)
        since_id = INT64_MAX;
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    struct ps_event_list list = {0};
    size_t capacity = 0;
    struct ps_run_key key = {0};
    sqlite3_stmt *stmt;
    bool one = run && *run;
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        code = ps_no_memory(err);
    list.memory = arena;
    if (!code && one)
        code = ps_find_run(conn, run, &key, err);
    if (!code && one && which == NEWEST)
        code = ps_sql_query(conn, &stmt, err,
                            "SELECT * FROM (SELECT id, run_id, attempt, kind, detail, at_ns FROM events"
                            " WHERE run_id = ? ORDER BY id DESC LIMIT ?) ORDER BY id",
                            "tk", key.id, limit ? limit : 1000);
    else if (!code && one)
        code = ps_sql_query(
            conn, &stmt, err,
            "SELECT id, run_id, attempt, kind, detail, at_ns FROM events WHERE run_id = ? AND id > ?"
            " ORDER BY id LIMIT ?",
            "tik", key.id, (int64_t)since_id, limit ? limit : 1000);
    else if (!code)
        code = ps_sql_query(
            conn, &stmt, err,
            "SELECT id, run_id, attempt, kind, detail, at_ns FROM events WHERE id > ? ORDER BY id LIMIT ?",
            "ik", (int64_t)since_id, limit ? limit : 1000);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_event *larger = ps_arena_grow(arena, list.events, list.count, &capacity, sizeof *larger);
        if (!larger) {
            code = ps_no_memory(err);
            break;
        }
        list.events = larger;
        struct ps_event *event = &list.events[list.count++];
        *event = (struct ps_event){
            .id = (uint64_t)sqlite3_column_int64(stmt, 0),
            .attempt = (uint32_t)sqlite3_column_int64(stmt, 2),
            .detail = ps_sql_text(stmt, 4, arena),
            .at_ns = sqlite3_column_int64(stmt, 5),
        };
        snprintf(event->run_id, sizeof event->run_id, "%s", (const char *)sqlite3_column_text(stmt, 1));
        snprintf(event->kind, sizeof event->kind, "%s", (const char *)sqlite3_column_text(stmt, 3));
        if (!event->detail)
            code = ps_no_memory(err);
    }
    ps_read_end(store, conn);
    if (code) {
        ps_event_list_done(&list);
        return code;
    }
    *ret_list = list;
    return 0;
}

int ps_store_list_events(struct ps_store *store, const char *run, uint64_t since_id, uint32_t limit,
                         struct ps_event_list *ret_list, struct ps_error *err)
{
    return list_events(store, run, SINCE, since_id, limit, ret_list, err);
}

int ps_store_newest_events(struct ps_store *store, const char *run, uint32_t limit,
                           struct ps_event_list *ret_list, struct ps_error *err)
{
    return list_events(store, run, NEWEST, 0, limit, ret_list, err);
}

int ps_store_last_event(struct ps_store *store, uint64_t *ret_id, struct ps_error *err)
{
    struct ps_conn *conn;
    int code = ps_read_begin(store, &conn, err);
    if (code)
        return code;
    int64_t id;
    code = ps_sql_int(conn, 0, &id, err, "SELECT coalesce(max(id), 0) FROM events", "");
    ps_read_end(store, conn);
    if (!code)
        *ret_id = (uint64_t)id;
    return code;
}

/* ---- Writing ---- */

int ps_touch_run(struct ps_tx *tx, struct ps_run_key *key, uint32_t attempt, double elapsed_s,
                 struct ps_error *err)
{
    const struct ps_store_config *config = &tx->store->config;
    if (config->on_sign_of_life && attempt == key->attempt)
        config->on_sign_of_life(config->context, key->id, attempt);
    int code =
        ps_sql_run(tx->conn, err,
                   "UPDATE attempts SET last_seen_ns = max(last_seen_ns, ?), elapsed_s = max(elapsed_s, ?)"
                   " WHERE run = ? AND attempt = ?",
                   "idik", tx->now_ns, elapsed_s, key->n, attempt);
    if (code || attempt != key->attempt || (key->state != PS_RUN_CREATED && key->state != PS_RUN_LOST))
        return code;
    code = ps_sql_run(tx->conn, err,
                      "UPDATE runs SET state = ?, ended_ns = 0, reason = '', updated_ns = ? WHERE n = ?",
                      "kii", PS_RUN_RUNNING, tx->now_ns, key->n);
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "UPDATE attempts SET ended_ns = 0, reason = '' WHERE run = ? AND attempt = ?", "ik",
                          key->n, attempt);
    if (!code && key->state == PS_RUN_LOST)
        code = ps_tx_event(tx, key->id, attempt, "recovered", err, "heard of again");
    else if (!code)
        code = ps_tx_event(tx, key->id, attempt, "updated", err, "running");
    if (!code)
        key->state = PS_RUN_RUNNING;
    return code;
}

static int store_tags(struct ps_tx *tx, int64_t n, const char *const *tags, size_t count,
                      struct ps_error *err)
{
    int code = ps_sql_run(tx->conn, err, "DELETE FROM tags WHERE run = ?", "i", n);
    for (size_t i = 0; !code && i < count; i++)
        code = ps_sql_run(tx->conn, err, "INSERT INTO tags (run, position, tag) VALUES (?, ?, ?)", "iit", n,
                          (int64_t)i, tags[i]);
    return code;
}

static int store_config(struct ps_tx *tx, int64_t n, const struct ps_key_value *config, size_t count,
                        struct ps_error *err)
{
    int code = ps_sql_run(tx->conn, err, "DELETE FROM config WHERE run = ?", "i", n);
    for (size_t i = 0; !code && i < count; i++)
        code = ps_sql_run(tx->conn, err, "INSERT OR REPLACE INTO config (run, key, value) VALUES (?, ?, ?)",
                          "itt", n, config[i].key, config[i].value);
    return code;
}

struct create_arguments {
    const struct ps_new_run *request;
    struct ps_run run;
    bool resumed;
};

static void create_reset(void *arguments)
{
    struct create_arguments *a = arguments;
    ps_run_done(&a->run);
}

/* NAME, NAME-2, NAME-3, ...: the first that is free, cut before the number so that it fits into 200 bytes. */
static int free_name(struct ps_tx *tx, const char *name, char out[256], struct ps_error *err)
{
    snprintf(out, 256, "%s", name);
    for (int number = 2;; number++) {
        int64_t taken;
        int code = ps_sql_int(tx->conn, 0, &taken, err, "SELECT 1 FROM runs WHERE name = ?", "t", out);
        if (code || !taken)
            return code;
        char suffix[16];
        size_t room = 200 - (size_t)snprintf(suffix, sizeof suffix, "-%d", number);
        size_t size = strlen(name);
        if (size > room) {
            size = room;
            while (size && ((unsigned char)name[size] & 0xc0) == 0x80)
                size--;
        }
        snprintf(out, 256, "%.*s%s", (int)size, name, suffix);
    }
}

static int insert_attempt(struct ps_tx *tx, int64_t n, uint32_t attempt, const struct ps_new_run *request,
                          struct ps_error *err)
{
    return ps_sql_run(tx->conn, err,
                      "INSERT INTO attempts (run, attempt, world_size, device, started_ns, last_seen_ns)"
                      " VALUES (?1, ?2, ?3, ?4, ?5, ?5)",
                      "ikkti", n, attempt, request->world_size, request->device, tx->now_ns);
}

static int insert_run(struct ps_tx *tx, const struct ps_new_run *request, int64_t *ret_n,
                      struct ps_error *err)
{
    char id[PS_RUN_ID_SIZE], name[256];
    ps_make_id(id);
    int code = free_name(tx, request->name, name, err);
    if (!code)
        code = ps_sql_run(
            tx->conn, err,
            "INSERT INTO runs (id, name, state, world_size, attempt, model, dataset, dataset_hash, device,"
            " source_commit, epochs_planned, batch_per_rank, created_ns, updated_ns, notes)"
            " VALUES (?1, ?2, ?3, ?4, 1, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?12, ?13)",
            "ttkktttttkkit", id, name, PS_RUN_CREATED, request->world_size, request->model, request->dataset,
            request->dataset_hash, request->device, request->commit, request->epochs_planned,
            request->batch_per_rank, tx->now_ns, request->notes);
    if (code)
        return code;
    int64_t n = sqlite3_last_insert_rowid(tx->conn->db);
    code = insert_attempt(tx, n, 1, request, err);
    if (!code)
        code = store_config(tx, n, request->config, request->config_count, err);
    if (!code)
        code = store_tags(tx, n, request->tags, request->tag_count, err);
    if (!code)
        code = ps_tx_event(tx, id, 1, "created", err, "%s", name);
    if (!code)
        *ret_n = n;
    return code;
}

static int open_next_attempt(struct ps_tx *tx, const struct ps_run_key *key, const struct ps_new_run *request,
                             struct ps_error *err)
{
    uint32_t attempt = key->attempt + 1;
    char reason[64];
    snprintf(reason, sizeof reason, "attempt %u took over", attempt);
    int code = 0;
    if (ps_run_is_live(key->state) || key->state == PS_RUN_LOST)
        code = ps_sql_run(
            tx->conn, err,
            "UPDATE attempts SET ended_ns = CASE WHEN ended_ns THEN ended_ns ELSE last_seen_ns END,"
            " reason = ? WHERE run = ? AND attempt = ?",
            "tik", reason, key->n, key->attempt);
    /* What the caller left empty stays as it was. */
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "UPDATE runs SET state = ?, attempt = ?, world_size = ?, ended_ns = 0, reason = '',"
                          " updated_ns = ?, model = CASE ?5 WHEN '' THEN model ELSE ?5 END,"
                          " dataset = CASE ?6 WHEN '' THEN dataset ELSE ?6 END,"
                          " dataset_hash = CASE ?7 WHEN '' THEN dataset_hash ELSE ?7 END,"
                          " device = CASE ?8 WHEN '' THEN device ELSE ?8 END,"
                          " source_commit = CASE ?9 WHEN '' THEN source_commit ELSE ?9 END,"
                          " epochs_planned = CASE ?10 WHEN 0 THEN epochs_planned ELSE ?10 END,"
                          " batch_per_rank = CASE ?11 WHEN 0 THEN batch_per_rank ELSE ?11 END,"
                          " notes = CASE ?12 WHEN '' THEN notes ELSE ?12 END WHERE n = ?13",
                          "kkkitttttkkti", PS_RUN_CREATED, attempt, request->world_size, tx->now_ns,
                          request->model, request->dataset, request->dataset_hash, request->device,
                          request->commit, request->epochs_planned, request->batch_per_rank, request->notes,
                          key->n);
    if (!code)
        code = insert_attempt(tx, key->n, attempt, request, err);
    if (!code && request->config_count)
        code = store_config(tx, key->n, request->config, request->config_count, err);
    if (!code && request->tag_count)
        code = store_tags(tx, key->n, request->tags, request->tag_count, err);
    if (!code)
        code = ps_tx_event(tx, key->id, attempt, "attempt", err, "attempt %u, world size %u", attempt,
                           request->world_size);
    return code;
}

/* 1: the request was answered before. */
static int answered_before(struct ps_tx *tx, struct create_arguments *a, int64_t *ret_n, struct ps_error *err)
{
    sqlite3_stmt *stmt;
    int code =
        ps_sql_query(tx->conn, &stmt, err, "SELECT run, resumed, name FROM requests WHERE request_id = ?",
                     "t", a->request->request_id);
    if (!code)
        code = ps_sql_step(stmt, err);
    if (code != 1)
        return code;
    *ret_n = sqlite3_column_int64(stmt, 0);
    a->resumed = sqlite3_column_int(stmt, 1);
    bool same = strcmp((const char *)sqlite3_column_text(stmt, 2), a->request->name) == 0;
    sqlite3_reset(stmt);
    return same ? 1
                : ps_fail(err, PS_INVALID_ARGUMENT, "request_id was used before, for a run of another name");
}

static int create_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct create_arguments *a = arguments;
    const struct ps_new_run *request = a->request;
    bool keep = request->request_id && *request->request_id;
    int64_t n = 0;
    a->resumed = false;
    int code = keep ? answered_before(tx, a, &n, err) : 0;
    if (code == 0) {
        struct ps_run_key key = {0};
        struct ps_error lookup = {0};
        code = request->resume ? ps_find_run(tx->conn, request->name, &key, &lookup) : PS_NOT_FOUND;
        if (code == 0) {
            n = key.n;
            a->resumed = true;
            code = open_next_attempt(tx, &key, request, err);
        } else if (code == PS_NOT_FOUND) {
            code = insert_run(tx, request, &n, err);
        } else if (err) {
            *err = lookup;
        }
        if (!code && keep)
            code = ps_sql_run(tx->conn, err,
                              "INSERT INTO requests (request_id, run, name, resumed) VALUES (?, ?, ?, ?)",
                              "titk", request->request_id, n, request->name, (unsigned)a->resumed);
        if (!code)
            code = 1;
    }
    return code == 1 ? ps_load_run(tx->conn, n, &a->run, err) : code;
}

/* Hands a run on, or drops it where the caller does not want it. */
static void give_run(struct ps_run *run, struct ps_run *ret_run)
{
    if (ret_run)
        *ret_run = *run;
    else
        ps_run_done(run);
}

int ps_store_create_run(struct ps_store *store, const struct ps_new_run *request, struct ps_run *ret_run,
                        bool *ret_resumed, struct ps_error *err)
{
    int code = ps_check_run_name(request->name, "name", err);
    if (code)
        return code;
    struct create_arguments a = {.request = request};
    code = ps_store_write(store, create_op, create_reset, &a, err);
    if (code)
        return code;
    give_run(&a.run, ret_run);
    if (ret_resumed)
        *ret_resumed = a.resumed;
    return 0;
}

struct update_arguments {
    const char *name, *notes;
    bool set_tags;
    const char *const *tags;
    size_t tag_count;
    struct ps_run run;
};

static void update_reset(void *arguments)
{
    struct update_arguments *a = arguments;
    ps_run_done(&a->run);
}

static int update_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct update_arguments *a = arguments;
    struct ps_run_key key = {0};
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code && a->notes)
        code = ps_sql_run(tx->conn, err, "UPDATE runs SET notes = ?, updated_ns = ? WHERE n = ?", "tii",
                          a->notes, tx->now_ns, key.n);
    if (!code && a->set_tags)
        code = store_tags(tx, key.n, a->tags, a->tag_count, err);
    if (!code && (a->notes || a->set_tags))
        code = ps_tx_event(tx, key.id, key.attempt, "updated", err, "%s",
                           a->notes && a->set_tags ? "notes and tags"
                           : a->notes              ? "notes"
                                                   : "tags");
    return code ? code : ps_load_run(tx->conn, key.n, &a->run, err);
}

int ps_store_update_run(struct ps_store *store, const char *run, const char *notes, bool set_tags,
                        const char *const *tags, size_t tag_count, struct ps_run *ret_run,
                        struct ps_error *err)
{
    struct update_arguments a = {
        .name = run, .notes = notes, .set_tags = set_tags, .tags = tags, .tag_count = tag_count};
    int code = ps_store_write(store, update_op, update_reset, &a, err);
    if (!code)
        give_run(&a.run, ret_run);
    return code;
}

struct finish_arguments {
    const char *name, *reason;
    uint32_t attempt;
    int state;
    double elapsed_s;
    struct ps_run run;
};

static void finish_reset(void *arguments)
{
    struct finish_arguments *a = arguments;
    ps_run_done(&a->run);
}

static int finish_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct finish_arguments *a = arguments;
    struct ps_run_key key = {0};
    uint32_t attempt = 0;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_find_attempt(&key, a->name, a->attempt, &attempt, err);
    if (code)
        return code;
    bool newest = attempt == key.attempt;
    if (newest && !ps_run_is_live(key.state) && key.state != PS_RUN_LOST) {
        if (key.state != a->state)
            return ps_fail(err, PS_FAILED_PRECONDITION, "run \"%.200s\" has ended already: it is %s, not %s",
                           a->name, ps_run_state_name(key.state), ps_run_state_name(a->state));
        return ps_load_run(tx->conn, key.n, &a->run, err);
    }
    code = ps_sql_run(tx->conn, err,
                      "UPDATE attempts SET ended_ns = ?1, reason = ?2, elapsed_s = max(elapsed_s, ?3),"
                      " last_seen_ns = CASE WHEN ?6 THEN max(last_seen_ns, ?1) ELSE last_seen_ns END"
                      " WHERE run = ?4 AND attempt = ?5",
                      "itdikk", tx->now_ns, a->reason, a->elapsed_s, key.n, attempt, (unsigned)newest);
    if (!code && newest)
        code =
            ps_sql_run(tx->conn, err,
                       "UPDATE runs SET state = ?1, ended_ns = ?2, updated_ns = ?2, reason = ?3 WHERE n = ?4",
                       "kiti", (unsigned)a->state, tx->now_ns, a->reason, key.n);
    if (!code && newest)
        code = ps_tx_event(tx, key.id, attempt, ps_run_state_name(a->state), err, "%s",
                           a->reason ? a->reason : "");
    return code ? code : ps_load_run(tx->conn, key.n, &a->run, err);
}

int ps_store_finish_run(struct ps_store *store, const char *run, uint32_t attempt, int state,
                        const char *reason, double elapsed_s, struct ps_run *ret_run, struct ps_error *err)
{
    if (state != PS_RUN_FINISHED && state != PS_RUN_FAILED && state != PS_RUN_KILLED)
        return ps_fail(err, PS_INVALID_ARGUMENT, "state: must be FINISHED, FAILED or KILLED");
    struct finish_arguments a = {
        .name = run, .reason = reason, .attempt = attempt, .state = state, .elapsed_s = elapsed_s};
    int code = ps_store_write(store, finish_op, finish_reset, &a, err);
    if (!code)
        give_run(&a.run, ret_run);
    return code;
}

struct lost_arguments {
    const char *name, *reason;
    uint32_t attempt;
    bool (*silent)(void *context);
    void *context;
    bool marked;
};

static int lost_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct lost_arguments *a = arguments;
    struct ps_run_key key = {0};
    a->marked = false;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (code || !ps_run_is_live(key.state) || key.attempt != a->attempt ||
        (a->silent && !a->silent(a->context)))
        return code;
    code = ps_sql_run(tx->conn, err,
                      "UPDATE attempts SET ended_ns = last_seen_ns, reason = ? WHERE run = ? AND attempt = ?",
                      "tik", a->reason, key.n, a->attempt);
    if (!code)
        code = ps_sql_run(tx->conn, err,
                          "UPDATE runs SET state = ?, updated_ns = ?, reason = ?, ended_ns ="
                          " (SELECT last_seen_ns FROM attempts WHERE run = ?4 AND attempt = ?5) WHERE n = ?4",
                          "kitik", PS_RUN_LOST, tx->now_ns, a->reason, key.n, a->attempt);
    if (!code)
        code = ps_tx_event(tx, key.id, a->attempt, "lost", err, "%s", a->reason);
    a->marked = !code;
    return code;
}

int ps_store_mark_lost(struct ps_store *store, const char *run, uint32_t attempt, const char *reason,
                       bool (*silent)(void *context), void *context, bool *ret_marked, struct ps_error *err)
{
    struct lost_arguments a = {
        .name = run, .reason = reason, .attempt = attempt, .silent = silent, .context = context};
    int code = ps_store_write(store, lost_op, NULL, &a, err);
    if (!code && ret_marked)
        *ret_marked = a.marked;
    return code;
}

struct beat_arguments {
    const char *name;
    const struct ps_heartbeat *beat;
    int state;
};

static int keep_lines(struct ps_tx *tx, int64_t run, uint32_t attempt, const struct ps_heartbeat *beat,
                      struct ps_error *err)
{
    int code = 0;
    size_t skipped = beat->line_count > PS_LOG_KEPT ? beat->line_count - PS_LOG_KEPT : 0;
    for (size_t i = skipped; !code && i < beat->line_count; i++)
        code = ps_sql_run(
            tx->conn, err,
            "INSERT OR IGNORE INTO log_lines (run, attempt, rank, seq, text) VALUES (?, ?, ?, ?, ?)", "ikkit",
            run, attempt, beat->rank, (int64_t)(beat->first_line + i), beat->lines[i]);
    if (!code)
        code =
            ps_sql_run(tx->conn, err,
                       "DELETE FROM log_lines WHERE run = ?1 AND attempt = ?2 AND rank = ?3 AND seq <= ("
                       "SELECT max(seq) FROM log_lines WHERE run = ?1 AND attempt = ?2 AND rank = ?3) - ?4",
                       "ikkk", run, attempt, beat->rank, (uint32_t)PS_LOG_KEPT);
    return code;
}

static int beat_op(struct ps_tx *tx, void *arguments, struct ps_error *err)
{
    struct beat_arguments *a = arguments;
    const struct ps_heartbeat *beat = a->beat;
    struct ps_run_key key = {0};
    uint32_t attempt = 0;
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (!code)
        code = ps_find_attempt(&key, a->name, beat->attempt, &attempt, err);
    if (!code) /* elapsed time is rank 0's own */
        code = ps_touch_run(tx, &key, attempt, beat->rank == 0 ? beat->elapsed_s : 0, err);
    if (!code)
        code = ps_sql_run(
            tx->conn, err,
            "INSERT OR REPLACE INTO ranks (run, attempt, rank, elapsed_s, step, points_sent,"
            " points_dropped, spool_bytes, last_seen_ns, points_waiting, points_replayed, rss_bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            "ikkdiiiiiiii", key.n, attempt, beat->rank, beat->elapsed_s, (int64_t)beat->step,
            (int64_t)beat->points_sent, (int64_t)beat->points_dropped, (int64_t)beat->spool_bytes, tx->now_ns,
            (int64_t)beat->points_waiting, (int64_t)beat->points_replayed, (int64_t)beat->rss_bytes);
    if (!code && beat->has_clock_offset)
        code = ps_sql_run(tx->conn, err,
                          "UPDATE ranks SET clock_offset_bits = ? WHERE run = ? AND attempt = ? AND rank = ?",
                          "xikk", beat->clock_offset_s, key.n, attempt, beat->rank);
    if (!code && beat->line_count)
        code = keep_lines(tx, key.n, attempt, beat, err);
    a->state = key.state;
    return code;
}

int ps_store_heartbeat(struct ps_store *store, const char *run, const struct ps_heartbeat *beat,
                       int *ret_state, struct ps_error *err)
{
    struct beat_arguments a = {.name = run, .beat = beat};
    int code = ps_store_write(store, beat_op, NULL, &a, err);
    if (!code && ret_state)
        *ret_state = a.state;
    return code;
}

/* ---- Deleting ---- */

int ps_collect_orphans(struct ps_tx *tx, const struct ps_blob *candidates, size_t count,
                       struct ps_blob_list *orphans, struct ps_error *err)
{
    struct ps_arena *arena = ps_arena_new();
    struct ps_blob *blobs = arena ? ps_arena_alloc(arena, (count + 1) * sizeof *blobs) : NULL;
    size_t found = 0;
    int code = blobs ? 0 : ps_no_memory(err);
    for (size_t i = 0; !code && i < count; i++) {
        int64_t registered = 0;
        code = ps_sql_int(tx->conn, 0, &registered, err, "SELECT path <> '' FROM blobs WHERE sha256 = ?", "t",
                          candidates[i].sha256);
        if (!code)
            code = ps_sql_run(tx->conn, err,
                              "DELETE FROM blobs WHERE sha256 = ?1"
                              " AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE sha256 = ?1)",
                              "t", candidates[i].sha256);
        if (!code && sqlite3_changes(tx->conn->db) == 1) {
            blobs[found] = candidates[i];
            blobs[found++].registered = registered != 0;
        }
    }
    if (code) {
        ps_arena_free(arena);
        return code;
    }
    *orphans = (struct ps_blob_list){blobs, found, arena};
    return 0;
}

struct delete_arguments {
    const char *name;
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
    int code = ps_find_run(tx->conn, a->name, &key, err);
    if (code)
        return code;
    if (ps_run_is_live(key.state))
        return ps_fail(err, PS_FAILED_PRECONDITION, "run \"%.200s\" is alive (%s): end it before deleting it",
                       a->name, ps_run_state_name(key.state));
    struct ps_arena *arena = ps_arena_new();
    if (!arena)
        return ps_no_memory(err);
    struct ps_blob *blobs = NULL;
    size_t count = 0, capacity = 0;
    sqlite3_stmt *stmt;
    code =
        ps_sql_query(tx->conn, &stmt, err,
                     "SELECT DISTINCT b.sha256, b.size FROM checkpoints AS c JOIN blobs AS b USING (sha256)"
                     " WHERE c.run = ?",
                     "i", key.n);
    while (!code && (code = ps_sql_step(stmt, err)) == 1) {
        code = 0;
        struct ps_blob *larger = ps_arena_grow(arena, blobs, count, &capacity, sizeof *blobs);
        if (!larger) {
            code = ps_no_memory(err);
            break;
        }
        blobs = larger;
        snprintf(blobs[count].sha256, sizeof blobs[count].sha256, "%s",
                 (const char *)sqlite3_column_text(stmt, 0));
        blobs[count++].size = (uint64_t)sqlite3_column_int64(stmt, 1);
    }
    if (!code)
        code = ps_sql_run(tx->conn, err, "DELETE FROM events WHERE run_id = ?", "t", key.id);
    if (!code)
        code = ps_sql_run(tx->conn, err, "DELETE FROM runs WHERE n = ?", "i", key.n);
    if (!code)
        code = ps_tx_event(tx, key.id, key.attempt, "deleted", err, "%s", a->name);
    if (!code)
        code = ps_collect_orphans(tx, blobs, count, &a->orphans, err);
    ps_arena_free(arena);
    tx->pages_freed = true;
    return code;
}

int ps_store_delete_run(struct ps_store *store, const char *run, struct ps_blob_list *ret_orphans,
                        struct ps_error *err)
{
    struct delete_arguments a = {.name = run};
    int code = ps_store_write(store, delete_op, delete_reset, &a, err);
    if (!code)
        *ret_orphans = a.orphans;
    return code;
}
