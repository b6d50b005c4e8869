/* SPDX-License-Identifier: Apache-2.0
 * The store: runs, attempts, metrics, events and the catalogue of checkpoints in one SQLite file. The only
 * code that speaks SQL is in this folder.
 *
 * Threads. Every function may be called from any thread unless it says otherwise. Functions under "Writing"
 * hand an operation to the one writer thread and return once it is durable (synchronous=FULL; operations that
 * wait together share a transaction, each in a savepoint of its own). Functions under "Reading" run one short
 * read transaction on a small pool of connections and see everything whose writer has returned.
 *
 * Memory. A result (ps_run, ps_run_list, ...) owns all it points to; end it with its ..._done function, which
 * takes a zeroed result too. Strings are UTF-8 and never NULL unless said so. Strings given to the store are
 * copied or used before the call returns.
 *
 * Units. Times of day (..._ns) are the sidecar's clock, nanoseconds since 1970-01-01 UTC, 0 when absent.
 * Elapsed times are seconds on rank 0's own monotonic clock. Accuracies are 0..1. Doubles come back bit for
 * bit (NaN with its payload, infinities, -0.0); only elapsed times of step points are rounded, to the
 * microsecond.
 *
 * Errors. NOT_FOUND (run, attempt, checkpoint), INVALID_ARGUMENT, FAILED_PRECONDITION, RESOURCE_EXHAUSTED
 * (disk full: nothing of the operation is stored; it works again as soon as there is space), UNAVAILABLE (the
 * store is closing), DATA_LOSS (the file is damaged), INTERNAL.
 *
 * `run` parameters are a run's id or its unique name. */
#ifndef PARAMSYNC_DB_STORE_H
#define PARAMSYNC_DB_STORE_H

#include "services/base/digest.h"
#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PS_STORE_FILE "paramsync.db" /* within the data directory */
#define PS_RUN_ID_SIZE 27            /* 26 characters and a NUL */

struct ps_store;

/* ---- Opening ---- */

struct ps_event;

struct ps_store_config {
    const char *dir;  /* data directory; made if absent (unless read_only) */
    const char *file; /* its store; NULL: PS_STORE_FILE. For read_only: a copy has another name */
    /* Only reads, takes no lock and starts no thread: for tools that look into a store, also of a running
     * sidecar. */
    bool read_only;
    int readers;           /* connections for reading; 0: 4 */
    uint32_t block_points; /* step points that wait in a series' tail before they are packed into blocks; 0:
                              2048 */
    uint32_t log_bytes;    /* above it the write-ahead log is started anew, between two reads; 0: 32 MiB */
    uint32_t max_pages;    /* bound on the file, in pages of 4 KiB; 0: none. For tests of a full disk */
    /* Called for every event, in the order of their ids, by the writer thread once the event is durable and
     * before the operation that made it returns. Must be quick and must not call the store. May be NULL. */
    void (*on_event)(void *context, const struct ps_event *event);
    /* Called by the writer thread whenever a heartbeat or report of a run's newest attempt has arrived, also
     * when it then can't be stored (a full disk is no reason to take a run for dead). As quick as the other.
     * May be NULL. */
    void (*on_sign_of_life)(void *context, const char *run_id, uint32_t attempt);
    void *context; /* for both */
};

/* Opens, creates or migrates DIR/paramsync.db. Takes an exclusive lock on the directory (FAILED_PRECONDITION
 * if another process holds it). An older schema is migrated in one transaction after a copy of the file was
 * made beside it (paramsync.db.before-N); a newer one is refused, as are network file systems. */
int ps_store_open(const struct ps_store_config *config, struct ps_store **ret_store, struct ps_error *err);
/* Finishes what was submitted, then closes. No other call may be running or follow. Takes NULL, returns NULL.
 */
struct ps_store *ps_store_free(struct ps_store *store);

/* ---- Runs ---- */

enum ps_run_state { /* the numbers of paramsync.v1.RunState */
                    PS_RUN_CREATED = 1,
                    PS_RUN_RUNNING = 2,
                    PS_RUN_FINISHED = 3,
                    PS_RUN_FAILED = 4,
                    PS_RUN_KILLED = 5,
                    PS_RUN_LOST = 6,
};
const char *ps_run_state_name(int state); /* "running"; "unknown" for other numbers */
/* 0 if there is no such state. */
int ps_run_state_from_name(const char *name);
static inline bool ps_run_is_live(int state)
{
    return state == PS_RUN_CREATED || state == PS_RUN_RUNNING;
}

struct ps_key_value {
    const char *key, *value;
};

struct ps_run {
    char id[PS_RUN_ID_SIZE];
    const char *name;
    int state;
    uint32_t world_size;
    uint32_t attempt; /* the newest, from 1 */
    const char *model, *dataset, *dataset_hash, *device, *commit;
    uint32_t epochs_planned, batch_per_rank;
    int64_t created_ns;
    int64_t ended_ns;   /* 0 while the run is alive; of a lost one: when it was last heard of */
    int64_t updated_ns; /* anything at all was stored for it */
    const char *reason, *notes;
    const struct ps_key_value *config; /* sorted by key; left out of lists */
    size_t config_count;
    const char *const *tags;
    size_t tag_count;
    /* From the newest attempt that has reported an epoch; all 0 while has_epochs is false. */
    bool has_epochs;
    bool has_accuracy; /* last_epoch was evaluated */
    uint32_t last_epoch;
    double train_loss, val_loss, accuracy, samples_per_s;
    /* Over all epochs, each by the newest attempt that reported it; ties to the earlier epoch. 0: none
     * evaluated. */
    double best_accuracy;
    uint32_t best_epoch;
    double elapsed_s;           /* attempts added up, gaps left out */
    double elapsed_with_gaps_s; /* and with the time between attempts, by the sidecar's clock */
    void *memory;               /* the store's own */
};
void ps_run_done(struct ps_run *run);

struct ps_run_list {
    struct ps_run *runs;
    size_t count;
    char next_page_token[32]; /* empty: this was the last page */
    void *memory;
};
void ps_run_list_done(struct ps_run_list *list);

struct ps_run_query {
    uint32_t page_size;        /* 1..1000; 0: 100 */
    const char *page_token;    /* from the last page; NULL or empty: the first */
    const char *name_contains; /* ASCII letters match either case; NULL or empty: all */
    const int *states;         /* any of these; none: all */
    size_t state_count;
    const char *tag; /* NULL or empty: all */
};

/* What a table of runs is ordered by. */
enum ps_run_order {
    PS_ORDER_CREATED,
    PS_ORDER_NAME,
    PS_ORDER_STATE, /* running, created, then ended ones */
    PS_ORDER_MODEL,
    PS_ORDER_DEVICE,
    PS_ORDER_WORLD,
    PS_ORDER_EPOCH,
    PS_ORDER_ACCURACY,
    PS_ORDER_BEST,
    PS_ORDER_LOSS, /* of the newest epoch: validation, else training */
    PS_ORDER_RATE,
    PS_ORDER_ELAPSED,
    PS_ORDER_TIME_TO_TARGET,
    PS_ORDER_TAGS, /* the first */
};
struct ps_run_window {
    const char *text; /* in name, tags, notes, model, data set or device, ASCII letters in either case; NULL
                         or empty: all */
    const char *tag;  /* NULL or empty: all */
    const int *states;
    size_t state_count; /* 0: all */
    enum ps_run_order order;
    bool descending;
    double target;          /* for PS_ORDER_TIME_TO_TARGET */
    uint32_t offset, limit; /* limit 1..1000; 0: 100 */
};

/* Reading. */
/* A window of the ordered runs, config left out; what has no value, or NaN, comes last in either direction,
 * equal ones newest first. *ret_total: how many there are outside of the window too. */
int ps_store_window_runs(struct ps_store *store, const struct ps_run_window *window,
                         struct ps_run_list *ret_list, uint64_t *ret_total, struct ps_error *err);
/* The id of the run that is pinned as the baseline; empty: none is. */
int ps_store_get_baseline(struct ps_store *store, char ret_id[PS_RUN_ID_SIZE], struct ps_error *err);
int ps_store_get_run(struct ps_store *store, const char *run, struct ps_run *ret_run, struct ps_error *err);
/* Newest first, config left out. INVALID_ARGUMENT for a page token that is not ours. */
int ps_store_list_runs(struct ps_store *store, const struct ps_run_query *query, struct ps_run_list *ret_list,
                       struct ps_error *err);

/* Writing. */
struct ps_new_run {
    const char *name;
    uint32_t world_size;
    bool resume;
    const char *model, *dataset, *dataset_hash, *device, *commit, *notes; /* NULL: empty */
    uint32_t epochs_planned, batch_per_rank;
    const struct ps_key_value *config;
    size_t config_count;
    const char *const *tags;
    size_t tag_count;
    const char *request_id; /* NULL or empty: none */
};
/* A taken name: with resume the run's next attempt is opened (what was running in the old one is closed);
 * otherwise the new run is called NAME-2, NAME-3, ... (cut so that it fits into 200 bytes). A request_id seen
 * before returns the run of that call as it stands now. */
int ps_store_create_run(struct ps_store *store, const struct ps_new_run *request, struct ps_run *ret_run,
                        bool *ret_resumed, struct ps_error *err);
/* notes NULL: unchanged; set_tags false: tags unchanged. ret_run may be NULL here and below. */
int ps_store_update_run(struct ps_store *store, const char *run, const char *notes, bool set_tags,
                        const char *const *tags, size_t tag_count, struct ps_run *ret_run,
                        struct ps_error *err);
/* Pins the run as the baseline in place of another one, or with pin false takes the pin off if it has it. */
int ps_store_pin_baseline(struct ps_store *store, const char *run, bool pin, struct ps_error *err);
/* state: FINISHED, FAILED or KILLED. Repeating it is fine; another end than the one recorded is
 * FAILED_PRECONDITION. For an attempt that is not the newest, only that attempt is closed. elapsed_s 0: keep
 * what was reported. */
int ps_store_finish_run(struct ps_store *store, const char *run, uint32_t attempt, int state,
                        const char *reason, double elapsed_s, struct ps_run *ret_run, struct ps_error *err);
/* Marks a live run lost if its newest attempt is still the given one and silent(context), asked by the writer
 * thread in the order of all operations, is true (NULL: it is); *ret_marked tells. */
int ps_store_mark_lost(struct ps_store *store, const char *run, uint32_t attempt, const char *reason,
                       bool (*silent)(void *context), void *context, bool *ret_marked, struct ps_error *err);

struct ps_blob {
    char sha256[PS_SHA256_HEX];
    uint64_t size;
    bool registered; /* lies beside the store: its file is another's */
};
struct ps_blob_list {
    struct ps_blob *blobs;
    size_t count;
    void *memory;
};
void ps_blob_list_done(struct ps_blob_list *list);
/* Removes the run and all that is its own; a live one is refused (FAILED_PRECONDITION). Returns the blobs
 * that no checkpoint refers to any more; they are out of the catalogue, their files are the caller's to
 * remove. */
int ps_store_delete_run(struct ps_store *store, const char *run, struct ps_blob_list *ret_orphans,
                        struct ps_error *err);

/* ---- Attempts and ranks ---- */

struct ps_attempt {
    uint32_t attempt, world_size;
    const char *device;
    int64_t started_ns, ended_ns, last_seen_ns; /* last_seen: the last heartbeat or report */
    double elapsed_s;                           /* the highest that was reported */
    double offset_s;                            /* elapsed of all earlier attempts */
    double gap_s; /* between the attempt before was last seen and this one started; 0 for the first */
    const char *reason;
};
struct ps_attempt_list {
    struct ps_attempt *attempts; /* in order */
    size_t count;
    void *memory;
};
void ps_attempt_list_done(struct ps_attempt_list *list);
int ps_store_list_attempts(struct ps_store *store, const char *run, struct ps_attempt_list *ret_list,
                           struct ps_error *err);

struct ps_rank {
    uint32_t attempt, rank;
    double elapsed_s;
    uint64_t step, points_sent, points_dropped, spool_bytes;
    uint64_t last_seq; /* highest batch of step points stored; 0: none */
    uint64_t points_waiting, points_replayed, rss_bytes;
    bool has_clock_offset;
    double clock_offset_s; /* its wall clock less the sidecar's, network latency included */
    int64_t last_seen_ns;
};
struct ps_rank_list {
    struct ps_rank *ranks; /* by (attempt, rank) */
    size_t count;
    void *memory;
};
void ps_rank_list_done(struct ps_rank_list *list);
/* attempt 0: the newest. */
int ps_store_list_ranks(struct ps_store *store, const char *run, uint32_t attempt,
                        struct ps_rank_list *ret_list, struct ps_error *err);

/* Writing. attempt 0: the newest. One from the newest attempt turns created and lost into running; one from
 * an older attempt is recorded and changes no state. */
struct ps_heartbeat {
    uint32_t rank, attempt;
    double elapsed_s;
    uint64_t step, points_sent, points_dropped, spool_bytes;
    uint64_t points_waiting, points_replayed, rss_bytes;
    bool has_clock_offset;
    double clock_offset_s;
    /* Lines logged since the last beat, numbered from first_line on; each number is stored once. */
    const char *const *lines;
    size_t line_count;
    uint64_t first_line;
};
int ps_store_heartbeat(struct ps_store *store, const char *run, const struct ps_heartbeat *beat,
                       int *ret_state, struct ps_error *err);

enum { PS_LOG_KEPT = 200 }; /* lines of each rank and attempt */
struct ps_log_line {
    uint32_t attempt, rank;
    uint64_t seq; /* of the rank, from 1 */
    const char *text;
};
struct ps_log_list {
    struct ps_log_line *lines; /* by (rank, seq) */
    size_t count;
    void *memory;
};
void ps_log_list_done(struct ps_log_list *list);
/* The last lines of one rank, or with rank -1 of every rank. attempt 0: the newest. limit is for each rank
 * (1..PS_LOG_KEPT; 0: PS_LOG_KEPT). */
int ps_store_list_log(struct ps_store *store, const char *run, uint32_t attempt, int64_t rank, uint32_t limit,
                      struct ps_log_list *ret_list, struct ps_error *err);

/* ---- Events ---- */

struct ps_event {
    uint64_t id; /* increasing over all runs */
    char run_id[PS_RUN_ID_SIZE];
    char
        kind[16]; /* created attempt epoch checkpoint finished failed killed lost recovered updated deleted */
    const char *detail;
    int64_t at_ns;
    uint32_t attempt;
};
struct ps_event_list {
    struct ps_event *events; /* by id */
    size_t count;
    void *memory;
};
void ps_event_list_done(struct ps_event_list *list);
/* Events with id > since_id, at most limit (1..10000; 0: 1000). run NULL or empty: of all runs. */
int ps_store_list_events(struct ps_store *store, const char *run, uint64_t since_id, uint32_t limit,
                         struct ps_event_list *ret_list, struct ps_error *err);
/* A run's newest events, at most limit, by id. */
int ps_store_newest_events(struct ps_store *store, const char *run, uint32_t limit,
                           struct ps_event_list *ret_list, struct ps_error *err);
/* The highest id there is; 0: none. */
int ps_store_last_event(struct ps_store *store, uint64_t *ret_id, struct ps_error *err);

/* ---- Epochs ---- */

struct ps_epoch {
    uint32_t attempt, epoch; /* epoch is 1-based */
    double train_loss, val_loss, accuracy, lr, samples_per_s;
    double elapsed_s; /* writing: since the start of the attempt; reading: attempts added up, gaps left out */
    double train_s, eval_s;
    uint64_t step;
    uint32_t correct, counted;
    bool no_eval; /* val_loss and accuracy mean nothing */
    /* Writing only: classes * classes counts by label, then prediction; NULL: none. */
    const uint32_t *confusion;
    uint32_t classes;
};
struct ps_epoch_list {
    struct ps_epoch *epochs; /* by (epoch, attempt) */
    size_t count;
    void *memory;
};
void ps_epoch_list_done(struct ps_epoch_list *list);
enum { PS_MAX_CLASSES = 100 };
struct ps_confusion {
    uint32_t epoch, attempt, classes;
    uint32_t counts[PS_MAX_CLASSES * PS_MAX_CLASSES]; /* [classes, classes] by label, then prediction */
};
/* Kept for a run's newest and best evaluated epoch. epoch 0: the best; latest: the newest. PS_NOT_FOUND says
 * which are there. */
int ps_store_get_confusion(struct ps_store *store, const char *run, uint32_t epoch, bool latest,
                           struct ps_confusion *ret, struct ps_error *err);

/* all_attempts false: each epoch once, by the newest attempt that reported it. */
int ps_store_query_epochs(struct ps_store *store, const char *run, bool all_attempts,
                          struct ps_epoch_list *ret_list, struct ps_error *err);
/* Writing. The same (run, attempt, epoch) replaces itself. Counts as a sign of life. */
int ps_store_report_epoch(struct ps_store *store, const char *run, const struct ps_epoch *epoch,
                          bool *ret_replaced, struct ps_error *err);

/* ---- Step series: keyed by (run, rank, attempt, name), ordered by (attempt, step, seq) ---- */

struct ps_point {
    const char *name;
    uint64_t step;
    double value, elapsed_s;
};
/* Writing. A batch is stored once however often it is sent; batches may come in any order. seq from 1.
 * attempt 0 is the newest. Steps are below 2^63. *ret_stored is false for a replay; *ret_attempt is the
 * attempt it belongs to. Counts as a sign of life. */
int ps_store_append_steps(struct ps_store *store, const char *run, uint32_t rank, uint32_t attempt,
                          uint64_t seq, const struct ps_point *points, size_t count, bool *ret_stored,
                          uint32_t *ret_attempt, struct ps_error *err);

/* Writing. Of every packed block of an ended run the points stay that a coarse view shows: first, last,
 * lowest, highest and the first that is not finite; the space of the others is given back. Runs once for a
 * run. FAILED_PRECONDITION for a live one. *ret_dropped: how many points went. */
int ps_store_roll_up(struct ps_store *store, const char *run, uint64_t *ret_dropped, struct ps_error *err);
/* The id of a run that ended before the time and was not rolled up yet, the oldest first; empty: there is
 * none. */
int ps_store_next_to_roll_up(struct ps_store *store, int64_t ended_before_ns, char ret_id[PS_RUN_ID_SIZE],
                             struct ps_error *err);

/* What a run takes on the disk: its packed step points, and its checkpoints' contents, each once. */
struct ps_run_size {
    uint64_t metric_bytes, checkpoint_bytes;
};
int ps_store_run_size(struct ps_store *store, const char *run, struct ps_run_size *ret_size,
                      struct ps_error *err);

struct ps_series_query {
    const char *name;            /* NULL or empty: every series */
    int64_t rank;                /* -1: every rank */
    uint64_t from_step, to_step; /* inclusive; to_step 0: no bound */
    uint32_t max_points; /* 1..10000; 0: 2000. First, last, minimum and maximum stay as far as it allows */
    bool all_attempts;   /* false: each step once, by the newest attempt that has it */
};
struct ps_series {
    const char *name;
    uint32_t rank;
    size_t count;
    const uint32_t *attempts;
    const uint64_t *steps;
    const double *values;
    const double *elapsed_s; /* attempts added up, gaps left out */
    uint64_t total_points;   /* in the window, before down-sampling */
};
struct ps_series_list {
    const char *const *names; /* of every step series of the run, sorted */
    size_t name_count;
    struct ps_series *series; /* by (name, rank); empty when only the names were asked */
    size_t count;
    void *memory;
};
void ps_series_list_done(struct ps_series_list *list);
/* names_only: series stays empty. At most 1024 series are returned at once (RESOURCE_EXHAUSTED names the
 * remedy). */
int ps_store_query_series(struct ps_store *store, const char *run, const struct ps_series_query *query,
                          bool names_only, struct ps_series_list *ret_list, struct ps_error *err);

/* ---- Checkpoints ---- */

struct ps_checkpoint {
    uint64_t id; /* increasing over all checkpoints */
    char run_id[PS_RUN_ID_SIZE];
    const char *run_name;
    uint32_t attempt, epoch;
    const char *filename, *format;
    uint64_t size;
    char sha256[PS_SHA256_HEX];
    bool has_accuracy; /* its own, else what the epoch's report said */
    double accuracy;
    uint64_t step;
    int64_t created_ns;
    const char *path; /* of a registered one, beneath the register root; empty: the store holds it */
    void *memory;     /* NULL within a list */
};
void ps_checkpoint_done(struct ps_checkpoint *checkpoint);
struct ps_checkpoint_list {
    struct ps_checkpoint *checkpoints; /* by (epoch, attempt), the newest last */
    size_t count;
    void *memory;
};
void ps_checkpoint_list_done(struct ps_checkpoint_list *list);
int ps_store_list_checkpoints(struct ps_store *store, const char *run, struct ps_checkpoint_list *ret_list,
                              struct ps_error *err);
/* The same in pages of at most limit: those after the place that token names, which a page before gave (NULL
 * or empty: from the start). *ret_token is empty on the last page. INVALID_ARGUMENT for a token that is not
 * ours. */
int ps_store_page_checkpoints(struct ps_store *store, const char *run, uint32_t limit, const char *token,
                              struct ps_checkpoint_list *ret_list, char ret_token[64], struct ps_error *err);

enum ps_checkpoint_which {
    PS_CHECKPOINT_LATEST,
    PS_CHECKPOINT_BEST,
    PS_CHECKPOINT_EPOCH,
    PS_CHECKPOINT_SHA256
};
struct ps_checkpoint_selector {
    enum ps_checkpoint_which which;
    uint32_t epoch;     /* for PS_CHECKPOINT_EPOCH: by the newest attempt that has it */
    const char *sha256; /* for PS_CHECKPOINT_SHA256; the format is ignored */
    const char *format; /* NULL or empty: safetensors, else pth */
};
/* latest: the highest epoch of the newest attempt that has any. best: the highest accuracy, each epoch by its
 * newest attempt, ties to the earlier epoch; NaN is never best. */
int ps_store_get_checkpoint(struct ps_store *store, const char *run,
                            const struct ps_checkpoint_selector *selector,
                            struct ps_checkpoint *ret_checkpoint, struct ps_error *err);
/* A blob by content, whichever run has it; NOT_FOUND. ret_filename (free()) may be NULL: a name that fits it.
 */
int ps_store_get_blob(struct ps_store *store, const char *sha256, struct ps_blob *ret_blob,
                      char **ret_filename, struct ps_error *err);
/* Where a registered blob lies, beneath the register root (free()); NULL for one of the store's own. */
int ps_store_get_blob_path(struct ps_store *store, const char *sha256, char **ret_path, struct ps_error *err);

struct ps_new_checkpoint {
    uint32_t attempt; /* 0: the newest */
    uint32_t epoch;
    const char *filename, *format;
    uint64_t size;
    const char *sha256;
    bool has_accuracy;
    double accuracy;
    uint64_t step;
    /* Where it lies beneath the register root; NULL or empty: among the blobs. Content that the store holds
     * itself stays its own when it is registered too. */
    const char *path;
};
/* Writing. The blob must be whole and durable before. The same (run, attempt, epoch, format, sha256) again is
 * fine. */
int ps_store_add_checkpoint(struct ps_store *store, const char *run,
                            const struct ps_new_checkpoint *checkpoint, struct ps_checkpoint *ret_checkpoint,
                            struct ps_error *err);
/* Removes every checkpoint of the run with this content; announce: as an event, too. As for
 * ps_store_delete_run. */
int ps_store_delete_checkpoint(struct ps_store *store, const char *run, const char *sha256, bool announce,
                               struct ps_blob_list *ret_orphans, struct ps_error *err);

/* ---- State of the store ---- */

struct ps_store_stats {
    uint64_t runs[8]; /* by enum ps_run_state */
    uint64_t checkpoints, blobs, blob_bytes, epochs, series;
    uint64_t points_stored;       /* since the start */
    uint64_t batches_replayed;    /* since the start */
    uint64_t commits, operations; /* since the start: operations / commits is the group's size */
    uint64_t failed_operations;
    uint64_t queue_depth; /* operations waiting now */
    uint64_t file_bytes, wal_bytes;
    bool log_held;        /* another program reads for so long that the log can't be started anew */
    bool disk_full;       /* the last write failed for want of space */
    char last_error[256]; /* of the last transaction that failed as a whole; empty after a good one */
};
int ps_store_get_stats(struct ps_store *store, struct ps_store_stats *ret_stats, struct ps_error *err);
/* 0 when the last transaction was good (or there was none) and the file can be read: for readiness. */
int ps_store_check(struct ps_store *store, struct ps_error *err);

/* ---- Copies ---- */

struct ps_backup_report {
    uint64_t runs, checkpoints, bytes; /* bytes: of the database and the checkpoints */
    uint64_t missing;                  /* checkpoints deleted while the copy was made, left out of it */
};
/* Copies the store in data_dir, which may be in use by a sidecar, to the new or empty folder `to`: the
 * database as of one instant, then the checkpoints it names (linked where they can be, for their content
 * never changes). The copy is a data directory as any other, and lies at `to` only once it is whole and
 * durable. */
int ps_store_backup(const char *data_dir, const char *to, struct ps_backup_report *ret_report,
                    struct ps_error *err);

struct ps_verify_report {
    uint64_t runs, blocks, points, checkpoints, bytes, problems;
};
/* Reads everything in data_dir, which may be in use by a sidecar, and tells on_problem (one line each; may be
 * NULL) what is damaged or missing. 0 also when problems were found; negative if the store can't be read at
 * all. */
int ps_store_verify(const char *data_dir, void (*on_problem)(void *context, const char *line), void *context,
                    struct ps_verify_report *ret_report, struct ps_error *err);

/* What is said of a path on a file system that cannot hold the store: 0, or FAILED_PRECONDITION with the
 * remedy. type is statfs's f_type. */
int ps_store_check_file_system(long type, const char *path, struct ps_error *err);

#endif
