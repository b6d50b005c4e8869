/* SPDX-License-Identifier: Apache-2.0
 * The reporter of a build with services: libparamsync does the work, here its notices get to stderr. */
#include "trainer/report.h"

#include "services/base/log.h"
#include "services/base/text.h"
#include "services/client/paramsync.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ps_report {
    struct paramsync_reporter *reporter; /* NULL: no reporting, or not yet */
    bool waits;                          /* for ps_report_join */
    struct ps_report_config config;      /* while it waits */
};

static void notice(void *context, const char *line)
{
    (void)context;
    ps_log_notice("%s", line);
}

/* The log of this process goes to the first report that is opened in it, errors to notices. */
static _Atomic(struct paramsync_reporter *) logs_to;

static void take_line(void *context, enum ps_log_level level, const char *line)
{
    if (level <= PS_LOG_NOTICE)
        paramsync_reporter_log(context, line);
}

static void begin_log(struct paramsync_reporter *reporter)
{
    struct paramsync_reporter *none = NULL;
    if (atomic_compare_exchange_strong(&logs_to, &none, reporter))
        ps_log_set_sink(take_line, reporter);
}

static void end_log(struct paramsync_reporter *reporter)
{
    if (atomic_load(&logs_to) != reporter)
        return;
    ps_log_set_sink(NULL, NULL);
    atomic_store(&logs_to, NULL);
}

static int open_reporter(const struct ps_report_config *config, struct paramsync_reporter **ret_reporter,
                         struct ps_error *err)
{
    struct paramsync_pair *pairs = calloc(config->config_count + 1, sizeof *pairs);
    struct paramsync_error outer = {0};
    if (!pairs)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < config->config_count; i++)
        pairs[i] = (struct paramsync_pair){config->config[i].key, config->config[i].value};
    struct paramsync_reporter_options options = {
        .connection = {.address = config->sidecar,
                       .token_file = config->token_file,
                       .tls_ca = config->tls_ca,
                       .tls_cert = config->tls_cert,
                       .tls_key = config->tls_key},
        .rank = (uint32_t)config->rank,
        .run = {.name = config->run_name,
                .resume = config->resume,
                .world_size = (uint32_t)config->world_size,
                .batch_per_rank = (uint32_t)config->batch_per_rank,
                .epochs_planned = (uint32_t)config->epochs,
                .model = config->model,
                .dataset = config->dataset,
                .dataset_hash = config->dataset_hash,
                .device = config->device,
                .commit = config->commit,
                .config = pairs,
                .config_count = config->config_count},
        .run_id = config->rank == 0 ? NULL : config->run_id,
        .attempt = config->attempt,
        .spool_dir = config->spool_dir,
        .notice = notice,
    };
    int code = paramsync_reporter_open(&options, ret_reporter, &outer);
    free(pairs);
    if (!code)
        begin_log(*ret_reporter);
    return code ? ps_fail(err, code, "%s", outer.message) : 0;
}

int ps_report_open(const struct ps_report_config *config, struct ps_report **ret, struct ps_error *err)
{
    bool reports = config->sidecar && *config->sidecar;
    struct ps_report *report;
    if (config->rank < 0 || config->world_size < 1 || config->batch_per_rank < 0 || config->epochs < 0)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "reporter: rank, world size, batch and epochs must not be negative");
    if (reports && config->rank == 0) {
        int code = ps_check_run_name(config->run_name ? config->run_name : "", "--run", err);
        if (code)
            return code;
    }
    report = calloc(1, sizeof *report);
    if (!report)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (reports && config->rank != 0 && !(config->run_id && *config->run_id)) {
        ps_log_notice("the sidecar at %s had not answered when training began: rank %d's step points are not "
                      "recorded until rank 0 has created the run",
                      config->sidecar, config->rank);
        report->waits = true;
        report->config = *config;
        reports = false;
    }
    if (reports) {
        int code = open_reporter(config, &report->reporter, err);
        if (code) {
            free(report);
            return code;
        }
    }
    *ret = report;
    return 0;
}

void ps_report_run(struct ps_report *report, char ret_id[27], uint32_t *ret_attempt, char *ret_name,
                   size_t name_size)
{
    if (report->reporter) {
        paramsync_reporter_run(report->reporter, ret_id, ret_attempt, ret_name, name_size);
        return;
    }
    ret_id[0] = '\0';
    if (ret_attempt)
        *ret_attempt = 0;
    if (ret_name && name_size)
        ret_name[0] = '\0';
}

int ps_report_join(struct ps_report *report, const char *run_id, uint32_t attempt, struct ps_error *err)
{
    if (!report->waits)
        return 0;
    report->config.run_id = run_id;
    report->config.attempt = attempt;
    int code = open_reporter(&report->config, &report->reporter, err);
    report->waits = code != 0;
    return code;
}

void ps_report_epoch(struct ps_report *report, const struct ps_report_epoch *epoch)
{
    if (!report->reporter)
        return;
    struct paramsync_epoch copy = {.epoch = (uint32_t)epoch->epoch,
                                   .train_loss = epoch->train_loss,
                                   .val_loss = epoch->val_loss,
                                   .accuracy = epoch->accuracy,
                                   .lr = epoch->lr,
                                   .samples_per_s = epoch->samples_per_s,
                                   .elapsed_s = epoch->elapsed_s,
                                   .train_s = epoch->train_s,
                                   .eval_s = epoch->eval_s,
                                   .step = (uint64_t)epoch->step,
                                   .correct = (uint32_t)epoch->correct,
                                   .counted = (uint32_t)epoch->counted,
                                   .no_eval = epoch->no_eval};
    const size_t cells = epoch->confusion ? (size_t)epoch->classes * (size_t)epoch->classes : 0;
    uint32_t *counts = cells ? malloc(cells * sizeof *counts) : NULL;
    for (size_t i = 0; counts && i < cells; i++)
        counts[i] = (uint32_t)epoch->confusion[i];
    copy.confusion = counts;
    copy.classes = (uint32_t)epoch->classes;
    paramsync_reporter_epoch(report->reporter, &copy);
    free(counts);
}

void ps_report_point(struct ps_report *report, const char *name, int64_t step, double value, double elapsed_s)
{
    if (report->reporter)
        paramsync_reporter_point(report->reporter, name, (uint64_t)step, value, elapsed_s);
}

void ps_report_checkpoint(struct ps_report *report, const char *path, const char *format, int epoch,
                          int64_t step, double accuracy, bool has_accuracy)
{
    if (!report->reporter)
        return;
    struct paramsync_put put = {.path = path,
                                .format = format,
                                .epoch = (uint32_t)epoch,
                                .step = (uint64_t)step,
                                .accuracy = accuracy,
                                .has_accuracy = has_accuracy};
    paramsync_reporter_checkpoint(report->reporter, &put);
}

void ps_report_close(struct ps_report *report, const char *state, const char *reason, double timeout_s)
{
    if (!report)
        return;
    if (report->reporter) {
        struct paramsync_error err = {0};
        struct paramsync_reporter_stats stats;
        int end = strcmp(state, "finished") == 0 ? PARAMSYNC_RUN_FINISHED
                  : strcmp(state, "killed") == 0 ? PARAMSYNC_RUN_KILLED
                                                 : PARAMSYNC_RUN_FAILED;
        end_log(report->reporter);
        if (paramsync_reporter_close(report->reporter, end, reason, timeout_s, &stats, &err))
            ps_log_warning("%s", err.message);
        if (stats.points_dropped || stats.epochs_refused || stats.checkpoints_refused)
            ps_log_warning("not recorded by the sidecar: %llu step points, %llu epochs, %llu checkpoints",
                           (unsigned long long)stats.points_dropped, (unsigned long long)stats.epochs_refused,
                           (unsigned long long)stats.checkpoints_refused);
    }
    free(report);
}

void ps_report_failed(const struct ps_report_config *config, const char *run_id, uint32_t attempt,
                      const char *reason, double timeout_s)
{
    const struct paramsync_options options = {.address = config->sidecar,
                                              .token_file = config->token_file,
                                              .tls_ca = config->tls_ca,
                                              .tls_cert = config->tls_cert,
                                              .tls_key = config->tls_key,
                                              .timeout_s = timeout_s};
    struct paramsync_client *client;
    struct paramsync_error unheard = {0};
    if (paramsync_connect(&options, &client, &unheard))
        return;
    (void)paramsync_finish_run(client, run_id, attempt, PARAMSYNC_RUN_FAILED, reason, 0, &unheard);
    paramsync_disconnect(client);
}

/* ---- fetching ---- */

/* Only a plain name of ours becomes a path. */
static bool is_plain(const char *name)
{
    return *name && *name != '.' && !strchr(name, '/') && strlen(name) < 200;
}

static int fetch_file(struct paramsync_client *client, const char *run,
                      const struct paramsync_checkpoint *checkpoint, const char *dir, struct ps_error *err)
{
    struct paramsync_error why = {0};
    struct paramsync_checkpoint *got = NULL;
    const struct paramsync_selector selector = {.sha256 = checkpoint->sha256};
    char *path = NULL;
    if (!is_plain(checkpoint->filename))
        return ps_fail(err, PS_INVALID_ARGUMENT, "the sidecar calls a file %.100s", checkpoint->filename);
    if (asprintf(&path, "%s/%s", dir, checkpoint->filename) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = paramsync_pull(client, run, &selector, path, NULL, NULL, &got, &why);
    if (code)
        code = ps_fail(err, code, "%s", why.message);
    paramsync_checkpoint_free(got);
    free(path);
    return code;
}

/* The newest state, by (attempt, epoch), whose weights are there too; a state made with --ckpt_format pth
 * holds them itself. */
static const struct paramsync_checkpoint *newest_state(const struct paramsync_checkpoints *all,
                                                       const struct paramsync_checkpoint **ret_weights)
{
    const struct paramsync_checkpoint *state = NULL;
    for (size_t i = 0; i < all->count; i++) {
        const struct paramsync_checkpoint *c = &all->checkpoints[i], *weights = NULL;
        bool torch = false;
        if (strcmp(c->format, "state") ||
            (state && (c->attempt != state->attempt ? c->attempt < state->attempt : c->epoch < state->epoch)))
            continue;
        for (size_t k = 0; k < all->count; k++) {
            const struct paramsync_checkpoint *w = &all->checkpoints[k];
            if (w->epoch != c->epoch || w->attempt != c->attempt)
                continue;
            if (!strcmp(w->format, "safetensors"))
                weights = w;
            torch = torch || !strcmp(w->format, "pth");
        }
        if (!weights && !torch)
            continue;
        state = c;
        *ret_weights = weights;
    }
    return state;
}

int ps_report_fetch(const struct ps_report_config *config, const char *dir, int *ret_epoch,
                    struct ps_error *err)
{
    const struct paramsync_options options = {.address = config->sidecar,
                                              .token_file = config->token_file,
                                              .tls_ca = config->tls_ca,
                                              .tls_cert = config->tls_cert,
                                              .tls_key = config->tls_key};
    struct paramsync_error why = {0};
    struct paramsync_client *client;
    struct paramsync_checkpoints *all = NULL;
    const struct paramsync_checkpoint *weights = NULL;
    int code = paramsync_connect(&options, &client, &why);
    if (code)
        return ps_fail(err, code, "%s", why.message);
    code = paramsync_list_checkpoints(client, config->run_name, &all, &why);
    if (code)
        code = ps_fail(err, code, "%s", why.message);
    const struct paramsync_checkpoint *state = code ? NULL : newest_state(all, &weights);
    if (!code && !state)
        code = ps_fail(err, PS_NOT_FOUND, "run %.100s has %s there", config->run_name,
                       all->count ? "weights but no .state to go on from" : "no checkpoint");
    if (!code)
        code = fetch_file(client, config->run_name, state, dir, err);
    if (!code && weights)
        code = fetch_file(client, config->run_name, weights, dir, err);
    if (!code)
        *ret_epoch = (int)state->epoch;
    paramsync_checkpoints_free(all);
    paramsync_disconnect(client);
    return code;
}
