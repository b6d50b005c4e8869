/* SPDX-License-Identifier: Apache-2.0
 * What the commands of `paramsync` share. */
#ifndef PARAMSYNC_CLI_CLI_H
#define PARAMSYNC_CLI_CLI_H

#include "services/base/buf.h"
#include "services/base/error.h"
#include "services/base/options.h"
#include "services/cli/table.h"
#include "services/client/paramsync.h"
#include "services/compare/compare.h"

#include <jansson.h>

/* The first member of every command's settings. */
struct cli_common {
    const char *sidecar, *token_file, *tls_ca, *tls_cert, *tls_key;
    bool json, help;
};

#define CLI_CONNECTION_ROWS(settings_)                                                                       \
    {.name = "sidecar",                                                                                      \
     .type = PS_TYPE_STRING,                                                                                 \
     .offset = offsetof(settings_, common.sidecar),                                                          \
     .value = "HOST:PORT",                                                                                   \
     .fallback = "127.0.0.1:50051",                                                                          \
     .environment = "PARAMSYNC_SIDECAR",                                                                     \
     .help = "the sidecar's gRPC address",                                                                   \
     .group = "Connection"},                                                                                 \
        {.name = "token-file",                                                                               \
         .type = PS_TYPE_STRING,                                                                             \
         .offset = offsetof(settings_, common.token_file),                                                   \
         .value = "FILE",                                                                                    \
         .help = "file whose first line is the token; PARAMSYNC_TOKEN stands in"},                           \
        {.name = "tls-ca",                                                                                   \
         .type = PS_TYPE_STRING,                                                                             \
         .offset = offsetof(settings_, common.tls_ca),                                                       \
         .value = "FILE",                                                                                    \
         .help = "CA certificate (PEM); turns TLS on"},                                                      \
        {.name = "tls-cert",                                                                                 \
         .type = PS_TYPE_STRING,                                                                             \
         .offset = offsetof(settings_, common.tls_cert),                                                     \
         .value = "FILE",                                                                                    \
         .help = "client certificate (PEM)"},                                                                \
        {.name = "tls-key",                                                                                  \
         .type = PS_TYPE_STRING,                                                                             \
         .offset = offsetof(settings_, common.tls_key),                                                      \
         .value = "FILE",                                                                                    \
         .help = "client certificate's key (PEM)"},                                                          \
    {                                                                                                        \
        .name = "help", .short_name = "h", .type = PS_TYPE_BOOL, .offset = offsetof(settings_, common.help), \
        .help = "print this"                                                                                 \
    }

#define CLI_STORE_ROW(settings_)                                                                             \
    {                                                                                                        \
        .name = "store", .type = PS_TYPE_STRING, .offset = offsetof(settings_, store), .value = "FILE",      \
        .help = "take runs from this store file (or sidecar's data directory) instead of a sidecar",         \
        .group = "Connection"                                                                                \
    }

#define CLI_JSON_ROW(settings_, text)                                                                        \
    {                                                                                                        \
        .name = "json", .type = PS_TYPE_BOOL, .offset = offsetof(settings_, common.json), .help = (text)     \
    }

/* A command gets the arguments after its name (argv[0] is the name) and returns the exit status. */
struct cli_command {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
};
int cli_runs(int argc, char **argv);
int cli_show(int argc, char **argv);
int cli_watch(int argc, char **argv);
int cli_pull(int argc, char **argv);
int cli_push(int argc, char **argv);
int cli_compare(int argc, char **argv);
int cli_gate(int argc, char **argv);
int cli_baseline(int argc, char **argv);
int cli_import(int argc, char **argv);
int cli_tail(int argc, char **argv);
int cli_export(int argc, char **argv);
int cli_launch(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_doctor(int argc, char **argv);

/* Parses; *ret_positional words then stand in argv[1..]. Returns 0 to go on, 1 when --help was printed, or
 * negative. least and most bound the positional words (most 0 with least 0: none; negative most: any number).
 */
int cli_parse(const struct ps_options *table, struct cli_common *settings, int argc, char **argv, int least,
              int most, int *ret_positional, struct ps_error *err);
int cli_connect(const struct cli_common *settings, struct paramsync_client **ret_client,
                struct ps_error *err);
/* Prints "paramsync COMMAND: message" on stderr (escaped) and returns the exit status of err's code. */
int cli_complain(const char *command, const struct ps_error *err);
/* Copies a libparamsync error. Returns its code. */
int cli_error(struct ps_error *err, const struct paramsync_error *from);

bool cli_colours(int fd); /* a terminal, and NO_COLOR is not set */
size_t cli_columns(void); /* of the terminal on stdout, at least 80; 80 where there is none */
enum cli_colour cli_state_colour(int state);
/* Writes all of it to stdout and flushes. */
int cli_write(const struct ps_buf *text, struct ps_error *err);
/* Writes with a newline and frees value (NULL: out of memory). */
int cli_write_json(json_t *value, struct ps_error *err);
json_t *cli_json_number(double value); /* NaN and infinities as strings */
void cli_format_bytes(uint64_t bytes, char *out, size_t size);
void cli_format_time(int64_t wall_ns, char *out, size_t size); /* "2026-01-31 23:59:59Z"; "-" for 0 */
json_t *cli_run_json(const struct paramsync_run *run, bool with_config);
json_t *cli_epoch_json(const struct paramsync_epoch *epoch);

/* Where runs are looked up: one per command; zero-initialise, set common and store. */
struct cli_source {
    const struct cli_common *common;
    const char *store; /* a store file, or the data directory that holds paramsync.db; NULL: the sidecar */
    struct paramsync_client *client; /* connected on first need */
    struct ps_store *db;             /* opened on first need */
};
void cli_source_done(struct cli_source *source);

/* A run with its epochs in the form that services/compare takes. */
struct cli_run {
    struct ps_compare_run run;
    struct paramsync_run *owner;
    struct paramsync_metrics *metrics;
    struct ps_run *stored; /* owned, with what it points to */
    struct ps_compare_epoch *epochs;
    struct ps_compare_pair *config;
    json_t *file; /* where it was read from a file */
};
/* word: sample-1, sample-16, a path (it begins with / or ., or ends with / or .json) of a file written by
 * `paramsync export` or of a run directory (the trainer's --output_dir), or else a run's id or name in the
 * source. */
int cli_fetch(struct cli_source *source, const char *word, struct cli_run *ret_run, struct ps_error *err);
void cli_run_done(struct cli_run *run);
bool cli_is_path(const char *word);
/* From the object that `paramsync export` writes, which the run then owns a reference to. name is for
 * messages.
 */
int cli_run_from_json(json_t *object, const char *name, struct cli_run *ret_run, struct ps_error *err);
/* The other way round: any run as such an object. */
json_t *cli_run_to_json(const struct ps_compare_run *run);
/* Reads FOLDER/run.jsonl (trainer/runlog.h has the format). */
int cli_run_from_folder(const char *folder, struct cli_run *ret_run, struct ps_error *err);
int cli_state_from_name(const char *name); /* PARAMSYNC_RUN_UNSPECIFIED: there is none */
double
cli_json_to_number(const json_t *value); /* the other way round of cli_json_number; 0 for anything else */

/* ---- baselines.json: pinned baselines, kept in version control ----
 *
 *     {"paramsync_baselines": 1, "baselines": {"NAME": {"pinned_at": "2026-..Z", "free": ["commit"],
 *      "run": {..}, "epochs": [..]}}}
 *
 * run and epochs are those of `paramsync export`. */
#define CLI_BASELINES_FILE "baselines.json"
/* Reads; a missing file is an empty one if may_miss. */
int cli_baselines_read(const char *path, bool may_miss, json_t **ret_file, struct ps_error *err);
int cli_baselines_write(const char *path, const json_t *file, struct ps_error *err);
/* name NULL: the only one that the file holds. */
int cli_baselines_get(const json_t *file, const char *path, const char *name, struct cli_run *ret_run,
                      struct ps_error *err);
int cli_baselines_set(json_t *file, const char *name, const struct ps_compare_run *run, unsigned free_fields,
                      struct ps_error *err);

json_t *cli_export_json(const struct paramsync_run *run, const struct paramsync_metrics *metrics);

/* `paramsync pull --follow`: keeps DIR/current at the checkpoint that selector (latest or best) names until
 * the run has ended. */
int cli_follow(const struct cli_common *common, struct paramsync_client *client, const char *run,
               const char *dir, const struct paramsync_selector *selector,
               const struct paramsync_pull_options *options, struct ps_error *err);
/* `paramsync export --store`: copies the store (a data directory or the database in it) to a new folder
 * (NULL: does not), and with check looks at all of the copy, or of the store itself. */
int cli_store_export(const char *store, const char *to, bool check, bool json, struct ps_error *err);

/* The gate's verdict for people and machines. names: what was judged; baseline may be NULL. */
struct cli_gate_report {
    const struct ps_gate_result *result;
    const char *subject;  /* "fast-2" or "3 runs" */
    const char *baseline; /* or NULL */
    /* What was judged, and a baseline run (not a published result); may be NULL. For the figures of each run
     * and the deltas. */
    const struct ps_compare_run *runs, *base;
};
int cli_gate_text(const struct cli_gate_report *report, size_t width, bool colours, struct ps_buf *out);
int cli_gate_markdown(const struct cli_gate_report *report, struct ps_buf *out);
int cli_gate_junit(const struct cli_gate_report *report, struct ps_buf *out);
json_t *cli_gate_json(const struct cli_gate_report *report);

#endif
