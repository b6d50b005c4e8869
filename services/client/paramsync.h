/* SPDX-License-Identifier: Apache-2.0
 * libparamsync: the client of a paramsync sidecar. Link with -lparamsync (pkg-config paramsync).
 *
 *     struct paramsync_error err = {0};
 *     struct paramsync_client *client;
 *     if (paramsync_connect(&(struct paramsync_options){.address = "127.0.0.1:50051"}, &client, &err))
 *         errx(1, "%s", err.message);
 *     struct paramsync_run *run;
 *     if (paramsync_get_run(client, "baseline", &run, &err))
 *         errx(1, "%s", err.message);
 *     printf("%s: %.2f %%\n", run->name, run->best_accuracy * 100);
 *     paramsync_run_free(run);
 *     paramsync_disconnect(client);
 *
 * Functions return 0 or a negative paramsync_code and then fill err (which may be NULL). Out-parameters
 * (ret_...) are written on success only. Functions that free take NULL. `run` is a run's id or its unique
 * name. Accuracies are shares (0..1), times are seconds, strings are UTF-8. Input structs are to be
 * zero-initialised; strings in them are borrowed for the call. A client may be used from any number of
 * threads at once; so may a reporter.
 *
 * Fork: the library has threads of its own. A child of fork may exec or _exit, and the parent goes on as
 * before; it must not call the library, also not to free what the parent has, and not leave by exit or return
 * from main.
 *
 * ABI: the soname's number changes when a program that was built against an earlier header would break;
 * symbols carry the version PARAMSYNC_0. Structs only grow at their end with a new number.
 */
#ifndef PARAMSYNC_H
#define PARAMSYNC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Negated gRPC status codes. */
enum paramsync_code {
    PARAMSYNC_OK = 0,
    PARAMSYNC_CANCELLED = -1,
    PARAMSYNC_UNKNOWN = -2,
    PARAMSYNC_INVALID_ARGUMENT = -3,
    PARAMSYNC_DEADLINE_EXCEEDED = -4,
    PARAMSYNC_NOT_FOUND = -5,
    PARAMSYNC_ALREADY_EXISTS = -6,
    PARAMSYNC_PERMISSION_DENIED = -7,
    PARAMSYNC_RESOURCE_EXHAUSTED = -8,
    PARAMSYNC_FAILED_PRECONDITION = -9,
    PARAMSYNC_ABORTED = -10,
    PARAMSYNC_OUT_OF_RANGE = -11,
    PARAMSYNC_UNIMPLEMENTED = -12,
    PARAMSYNC_INTERNAL = -13,
    PARAMSYNC_UNAVAILABLE = -14,
    PARAMSYNC_DATA_LOSS = -15,
    PARAMSYNC_UNAUTHENTICATED = -16,
};
const char *paramsync_code_name(int code); /* "NOT_FOUND"; static */
const char *paramsync_version(void);       /* "0.1.0"; static */

struct paramsync_error {
    int code;
    char message[768]; /* one line, NUL-terminated */
};

/* ---- Connection ---- */

struct paramsync_client;

struct paramsync_options {
    const char *address;    /* HOST:PORT or unix:PATH; NULL: $PARAMSYNC_SIDECAR, else 127.0.0.1:50051 */
    const char *token;      /* NULL: token_file, else $PARAMSYNC_TOKEN, else none */
    const char *token_file; /* its first line is the token */
    const char *tls_ca;     /* PEM file; NULL: no TLS */
    const char *tls_cert, *tls_key; /* PEM files of a client certificate, both or none */
    double timeout_s;               /* of each unary call; 0: 10 */
};

/* Reads the files named; does not touch the network: an absent sidecar shows at the first call (UNAVAILABLE).
 */
int paramsync_connect(const struct paramsync_options *options, struct paramsync_client **ret_client,
                      struct paramsync_error *err);
void paramsync_disconnect(struct paramsync_client *client); /* after everything made from it */
const char *paramsync_address(const struct paramsync_client *client);

/* ---- Runs ---- */

enum paramsync_run_state {
    PARAMSYNC_RUN_UNSPECIFIED = 0,
    PARAMSYNC_RUN_CREATED = 1,
    PARAMSYNC_RUN_RUNNING = 2,
    PARAMSYNC_RUN_FINISHED = 3,
    PARAMSYNC_RUN_FAILED = 4,
    PARAMSYNC_RUN_KILLED = 5,
    PARAMSYNC_RUN_LOST = 6,
};
const char *paramsync_run_state_name(int state); /* "running"; static */

struct paramsync_pair {
    const char *key, *value;
};

/* Strings are never NULL; everything belongs to the run, which is read-only. */
struct paramsync_run {
    const char *id, *name;
    int state;
    uint32_t world_size, attempt, batch_per_rank, epochs_planned;
    const char *model, *dataset, *dataset_hash, *device, *commit, *reason, *notes;
    int64_t created_ns, ended_ns;        /* since 1970 UTC; ended_ns is 0 while the run is alive */
    const struct paramsync_pair *config; /* left out in lists */
    size_t config_count;
    const char *const *tags;
    size_t tag_count;
    bool has_epochs; /* else the next five mean nothing */
    uint32_t last_epoch, best_epoch;
    double train_loss, val_loss, accuracy, best_accuracy, samples_per_s;
    double elapsed_s, elapsed_with_gaps_s; /* attempts added up, without and with the time between them */
};
struct paramsync_runs {
    const struct paramsync_run *runs; /* newest first */
    size_t count;
};

struct paramsync_new_run {
    const char *name; /* 1..200 bytes */
    bool resume;      /* a taken name: the run's next attempt; otherwise the new run is called NAME-2, ... */
    uint32_t world_size, batch_per_rank, epochs_planned;
    const char *model, *dataset, *dataset_hash, *device, *commit, *notes;
    const struct paramsync_pair *config;
    size_t config_count;
    const char *const *tags;
    size_t tag_count;
    const char *request_id; /* repeating a call with the same one makes no second run; NULL: a fresh one */
};
int paramsync_create_run(struct paramsync_client *client, const struct paramsync_new_run *request,
                         struct paramsync_run **ret_run, bool *ret_resumed, struct paramsync_error *err);
int paramsync_get_run(struct paramsync_client *client, const char *run, struct paramsync_run **ret_run,
                      struct paramsync_error *err);
/* limit 0: all of them. name_contains may be NULL. */
int paramsync_list_runs(struct paramsync_client *client, const char *name_contains, size_t limit,
                        struct paramsync_runs **ret_runs, struct paramsync_error *err);
/* state: FINISHED, FAILED or KILLED. attempt 0: the newest. */
int paramsync_finish_run(struct paramsync_client *client, const char *run, uint32_t attempt, int state,
                         const char *reason, double elapsed_s, struct paramsync_error *err);
void paramsync_run_free(struct paramsync_run *run);
void paramsync_runs_free(struct paramsync_runs *runs);

struct paramsync_heartbeat {
    uint32_t rank, attempt;
    double elapsed_s; /* the rank's monotonic clock since the start of this attempt */
    uint64_t step, points_sent, points_dropped, spool_bytes;
};
struct paramsync_log_line {
    uint32_t rank;
    uint64_t seq; /* of the rank's line, from 1 */
    const char *text;
};
struct paramsync_log {
    uint32_t attempt;
    const struct paramsync_log_line *lines; /* by (rank, seq) */
    size_t count;
};
/* The last lines that ranks logged. attempt 0: the newest; rank -1: every rank; lines 0: all that are kept.
 */
int paramsync_get_log(struct paramsync_client *client, const char *run, uint32_t attempt, int rank,
                      uint32_t lines, struct paramsync_log **ret_log, struct paramsync_error *err);
void paramsync_log_free(struct paramsync_log *log);

int paramsync_heartbeat(struct paramsync_client *client, const char *run,
                        const struct paramsync_heartbeat *beat, int *ret_state, struct paramsync_error *err);

struct paramsync_event {
    uint64_t id;
    const char *kind,
        *detail; /* created, attempt, epoch, checkpoint, finished, failed, killed, lost, recovered, ... */
    int64_t at_ns;
    uint32_t attempt;
    const struct paramsync_run *run; /* as it stands now; NULL in replayed events */
};
/* Calls on_event for what happened after since_id and then for each new event, until it returns non-zero
 * (then 0 is returned), the stream ends (UNAVAILABLE) or timeout_s is over (negative: none). */
int paramsync_watch_run(struct paramsync_client *client, const char *run, uint64_t since_id, double timeout_s,
                        int (*on_event)(void *context, const struct paramsync_event *event), void *context,
                        struct paramsync_error *err);

/* ---- Rendezvous: a small key-value store in the sidecar's memory ---- */

/* run and key: 1 to 256 bytes; value: at most 64 KiB; ttl_s: after which it is forgotten, 0: 600. */
int paramsync_rendezvous_set(struct paramsync_client *client, const char *run, const char *key,
                             const void *value, size_t size, double ttl_s, struct paramsync_error *err);
/* Waits at most timeout_s for the key (DEADLINE_EXCEEDED); 0: does not wait (NOT_FOUND). *ret_value is
 * free()d by the caller; a NUL follows its bytes. */
int paramsync_rendezvous_get(struct paramsync_client *client, const char *run, const char *key,
                             double timeout_s, void **ret_value, size_t *ret_size,
                             struct paramsync_error *err);
/* A counter that begins at 0. */
int paramsync_rendezvous_add(struct paramsync_client *client, const char *run, const char *key,
                             int64_t amount, double ttl_s, int64_t *ret_sum, struct paramsync_error *err);

/* ---- Metrics ---- */

struct paramsync_epoch {
    uint32_t attempt; /* 0 in a report: the newest */
    uint32_t epoch;   /* 1-based */
    double train_loss, val_loss, accuracy, lr, samples_per_s;
    double elapsed_s; /* reported: since the start of the attempt; queried: attempts added up */
    double train_s, eval_s;
    uint64_t step;
    uint32_t correct, counted;
    bool no_eval; /* not evaluated: val_loss and accuracy mean nothing */
    /* In a report: test images by label, then prediction, [classes, classes], at most 100 classes; NULL:
     * none. Their sum is counted, their diagonal correct. Copied. Never set in answers. */
    const uint32_t *confusion;
    uint32_t classes;
};
int paramsync_report_epoch(struct paramsync_client *client, const char *run,
                           const struct paramsync_epoch *epoch, struct paramsync_error *err);

struct paramsync_series {
    const char *name;
    uint32_t rank;
    size_t count;
    const uint32_t *attempts;
    const uint64_t *steps;
    const double *values, *elapsed_s;
    uint64_t total_points; /* before down-sampling */
};
struct paramsync_metrics {
    const char *const *names; /* every step series of the run */
    size_t name_count;
    const struct paramsync_series *series;
    size_t series_count;
    const struct paramsync_epoch *epochs; /* ascending */
    size_t epoch_count;
};
/* name NULL: epochs and the list of names only. rank -1: every rank. max_points 0: 2000. */
int paramsync_query(struct paramsync_client *client, const char *run, const char *name, int rank,
                    uint32_t max_points, struct paramsync_metrics **ret_metrics, struct paramsync_error *err);
void paramsync_metrics_free(struct paramsync_metrics *metrics);

/* ---- Checkpoints ---- */

struct paramsync_checkpoint {
    const char *run_id, *run_name;
    uint32_t attempt, epoch;
    const char *filename; /* "epoch_3.safetensors": never a path */
    const char *format;   /* safetensors, pth or state */
    const char *sha256;   /* 64 lower-case hexadecimal digits */
    uint64_t size, step;
    double accuracy;
    bool has_accuracy;
    int64_t created_ns;
};
struct paramsync_checkpoints {
    const struct paramsync_checkpoint *checkpoints; /* by (epoch, attempt), the newest last */
    size_t count;
};
int paramsync_list_checkpoints(struct paramsync_client *client, const char *run,
                               struct paramsync_checkpoints **ret_checkpoints, struct paramsync_error *err);
void paramsync_checkpoint_free(struct paramsync_checkpoint *checkpoint);
void paramsync_checkpoints_free(struct paramsync_checkpoints *checkpoints);

struct paramsync_selector {
    bool best;          /* highest test accuracy */
    uint32_t epoch;     /* or this epoch */
    const char *sha256; /* or this content; none of the three: the latest */
    const char *format; /* NULL: safetensors, else pth */
};
int paramsync_get_checkpoint(struct paramsync_client *client, const char *run,
                             const struct paramsync_selector *selector,
                             struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err);

typedef void (*paramsync_progress)(void *context, uint64_t done, uint64_t total);

struct paramsync_put {
    const char *path;     /* a whole, regular file */
    const char *filename; /* NULL: the last part of path */
    const char *format;   /* NULL: from the file name's extension */
    uint32_t attempt;     /* 0: the newest */
    uint32_t epoch;
    uint64_t step;
    double accuracy;
    bool has_accuracy;
    paramsync_progress progress; /* may be NULL */
    void *context;
};
/* Streams the file in chunks with crc32c under its sha256; returns when it is durable. DATA_LOSS if it
 * arrived otherwise than it was read (or changed meanwhile). */
int paramsync_put_checkpoint(struct paramsync_client *client, const char *run,
                             const struct paramsync_put *put, struct paramsync_checkpoint **ret_checkpoint,
                             struct paramsync_error *err);

/* By path: a file on the sidecar's own machine that it takes without a copy, put->path absolute or beneath
 * the sidecar's
 * --register-root. progress is ignored. FAILED_PRECONDITION where the sidecar takes none. The file must stay.
 */
int paramsync_register_checkpoint(struct paramsync_client *client, const char *run,
                                  const struct paramsync_put *put,
                                  struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err);

struct paramsync_pull_options {
    const char *const *tensors; /* of a safetensors checkpoint: a file with these alone; none: all of them */
    size_t tensor_count;
    const char *dtype;        /* "bf16": 32-bit floats are rounded on the way; NULL: as they are */
    uint64_t max_bytes_per_s; /* the sidecar keeps below this; 0: as fast as it goes */
};
/* As paramsync_pull, which is this with options NULL. With tensors or dtype *ret_checkpoint's size and sha256
 * are those of the file that was made. */
int paramsync_pull_with(struct paramsync_client *client, const char *run,
                        const struct paramsync_selector *selector,
                        const struct paramsync_pull_options *options, const char *path,
                        paramsync_progress progress, void *context,
                        struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err);

/* Calls on_checkpoint for the newest checkpoint of a format (NULL: safetensors, else pth) and then for each
 * new one, until it returns non-zero (then 0 is returned), the stream ends (UNAVAILABLE; OK when the run was
 * deleted) or timeout_s is over (negative: none). */
int paramsync_watch_checkpoints(struct paramsync_client *client, const char *run, const char *format,
                                double timeout_s,
                                int (*on_checkpoint)(void *context,
                                                     const struct paramsync_checkpoint *checkpoint),
                                void *context, struct paramsync_error *err);

/* Fetches a checkpoint to path; NULL: its own file name, in the working directory. The bytes go to PATH.part,
 * which a later call resumes from; only when size and sha256 are right is it synced and renamed. Otherwise:
 * DATA_LOSS and nothing new at path. Two pulls to one path at a time: the second gets FAILED_PRECONDITION. */
int paramsync_pull(struct paramsync_client *client, const char *run,
                   const struct paramsync_selector *selector, const char *path, paramsync_progress progress,
                   void *context, struct paramsync_checkpoint **ret_checkpoint, struct paramsync_error *err);

/* ---- Reporter ----
 * For a training loop: every call below except open and close returns at once, without network or disk I/O.
 * Step points wait in a bounded ring; when it is full the oldest are dropped and counted. Epochs and
 * checkpoints are never dropped. While the sidecar is away everything waits, and arrives exactly once when it
 * is back. */

struct paramsync_reporter;

struct paramsync_reporter_options {
    struct paramsync_options connection;
    uint32_t rank;
    struct paramsync_new_run run; /* rank 0 creates it (request_id is made if NULL) */
    const char *run_id;           /* other ranks: the id from rank 0's reporter; "" or NULL on rank 0 */
    uint32_t attempt;             /* with run_id */
    double open_timeout_s;        /* how long open waits for the sidecar; 0: 3 */
    double heartbeat_s;           /* 0: 5 */
    double flush_s;               /* step points are sent this often; 0: 0.5 */
    size_t ring_points;           /* 0: 262144 (8 MiB) */
    /* Where step points wait on the disk while the sidecar is away; made if absent. What is left there when
     * the reporter closes, or when its process dies, is delivered by the next one that opens a reporter with
     * the same folder. NULL: they only wait in memory. */
    const char *spool_dir;
    uint64_t spool_bytes; /* at most so many there; 0: 256 MiB */
    bool no_register; /* always send checkpoints, even to a sidecar on this machine that takes them by path */
    /* Outages, recoveries and what was refused, one line each; from the reporter's threads. May be NULL. */
    void (*notice)(void *context, const char *line);
    void *context;
};

struct paramsync_reporter_stats {
    uint64_t points_sent; /* acknowledged as durable */
    uint64_t points_dropped, points_waiting;
    uint64_t points_replayed; /* sent again after an outage */
    uint64_t spool_bytes;     /* on the disk now */
    uint64_t epochs_sent, epochs_waiting, epochs_refused;
    uint64_t checkpoints_sent, checkpoints_waiting, checkpoints_refused;
    uint64_t outages;
    bool connected; /* the last call went through */
};

/* With nobody there it still succeeds: the run is created when the sidecar answers. Fails on what will not
 * get better by itself: bad arguments, unreadable files, a refused token. */
int paramsync_reporter_open(const struct paramsync_reporter_options *options,
                            struct paramsync_reporter **ret_reporter, struct paramsync_error *err);
/* "" and 0 while the sidecar has not answered. */
void paramsync_reporter_run(struct paramsync_reporter *reporter, char ret_id[27], uint32_t *ret_attempt,
                            char *ret_name, size_t name_size);
/* name: [A-Za-z0-9_./-]{1,128}, others are counted as dropped. */
void paramsync_reporter_point(struct paramsync_reporter *reporter, const char *name, uint64_t step,
                              double value, double elapsed_s);
void paramsync_reporter_epoch(struct paramsync_reporter *reporter, const struct paramsync_epoch *epoch);
/* A line for the run's log, cut to 1000 bytes; the sidecar keeps each rank's last some hundreds. */
void paramsync_reporter_log(struct paramsync_reporter *reporter, const char *line);
/* The file is whole and stays until it is sent. put->attempt and progress are ignored. */
void paramsync_reporter_checkpoint(struct paramsync_reporter *reporter, const struct paramsync_put *put);
void paramsync_reporter_stats(struct paramsync_reporter *reporter,
                              struct paramsync_reporter_stats *ret_stats);
/* Sends what is left and (rank 0) finishes the run, for at most timeout_s; then frees. state UNSPECIFIED:
 * leave the run as it is. ret_stats may be NULL. 0, or DEADLINE_EXCEEDED if something was not delivered (or
 * another code if the sidecar refused it). Takes NULL. */
int paramsync_reporter_close(struct paramsync_reporter *reporter, int state, const char *reason,
                             double timeout_s, struct paramsync_reporter_stats *ret_stats,
                             struct paramsync_error *err);

#ifdef __cplusplus
}
#endif

#endif
