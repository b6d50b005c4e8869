/* SPDX-License-Identifier: Apache-2.0
 * paramsync-train: one rank of a training job. Puts the parts together; the work is in loop.c. */
#include "paramsync_version.h"
#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/log.h"
#include "trainer/dist/gloo.h"
#include "trainer/dist/local.h"
#include "trainer/dist/nccl.h"
#include "trainer/dist/rendezvous.h"
#include "trainer/dist/start.h"
#include "trainer/loop.h"
#include "trainer/meet.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    EXIT_USAGE = 2,
    CONFIG_PAIRS = PS_TRAIN_OPTIONS_MAX + 16,
    VALUE_SIZE = 256,
    RUN_NAME_SIZE = 256,
};
static const double leave_s = 30;  /* rank 0 waits for the others' goodbye: they may still be testing */
static const double grace_s = 1.2; /* for the main thread to end after another rank's death */
/* The same when all were told to stop: a rank that was a moment further ends its step, then its run. */
static const double stop_grace_s = 10;
/* For the reporter's last records. A sidecar that is not there is given up sooner; one on an overloaded
 * machine, or at the end of a slow line with a checkpoint on its way, is not. */
static const double last_report_s = 60;
static const double failed_report_s = 3;  /* the same when the training has failed or was stopped, ... */
static const double hasty_report_s = 0.5; /* ... and when the ranks of a failed job have to end together */

static volatile sig_atomic_t stop_signal;

static void on_signal(int number)
{
    stop_signal = number; /* a second one ends the process: SA_RESETHAND */
}

/* What the watchdog's thread and the main thread share. */
static struct {
    pthread_mutex_t lock; /* guards ending */
    pthread_cond_t changed;
    /* Rank 0's run, once it has one. */
    struct ps_report_config report;
    char run_id[27];
    uint32_t attempt;
    struct ps_trace *trace; /* written before the process is ended; set before the watchdog may end it */
    bool ending;            /* the main thread is on its way out and will say why */
    int rank;
} exit_gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* What was asked for before this ends the process at once: there is nothing to save, and a wait for the other
 * ranks may be long. */
static void take_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESETHAND | SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static void begin_ending(void)
{
    pthread_mutex_lock(&exit_gate.lock);
    exit_gate.ending = true;
    pthread_cond_broadcast(&exit_gate.changed);
    pthread_mutex_unlock(&exit_gate.lock);
}

/* On the watchdog's thread: another rank has died. The main thread learns it from its next exchange; if it
 * computes for longer than the grace, the process ends here. */
static void on_failure(void *context, const char *reason)
{
    struct timespec until;
    (void)context;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t ns = until.tv_nsec + (int64_t)((stop_signal ? stop_grace_s : grace_s) * 1e9);
    until.tv_sec += ns / PS_NS_PER_S;
    until.tv_nsec = ns % PS_NS_PER_S;
    pthread_mutex_lock(&exit_gate.lock);
    int waited = 0;
    while (!exit_gate.ending && waited == 0)
        waited = pthread_cond_timedwait(&exit_gate.changed, &exit_gate.lock, &until);
    bool ending = exit_gate.ending;
    pthread_mutex_unlock(&exit_gate.lock);
    if (ending)
        return;
    fprintf(stderr, "paramsync-train: rank %d: %s\n", exit_gate.rank, reason);
    pthread_mutex_lock(&exit_gate.lock);
    ps_trace_close(exit_gate.trace, 1, NULL); /* with the lock: the main thread cannot free it meanwhile */
    if (exit_gate.run_id[0])
        ps_report_failed(&exit_gate.report, exit_gate.run_id, exit_gate.attempt, reason, hasty_report_s);
    pthread_mutex_unlock(&exit_gate.lock);
    ps_new_files_abandon_all(); /* the main thread may be in the middle of a checkpoint */
    _exit(1);
}

struct job {
    struct ps_train_options options;
    struct ps_launch launch;
    struct ps_rendezvous *rendezvous;
    struct ps_comm *comm;
    struct ps_dataset *data;
    struct ps_model *model;
    const struct ps_backend_ops *ops;
    struct ps_backend *backend;
    struct ps_checkpoint *resume;
    struct ps_report *report;
    char *spool_dir;          /* for the report; NULL: none */
    struct ps_runlog *runlog; /* rank 0 */
    char training[PS_TRAINING_ID];
    struct ps_trace *trace;
    bool run_unknown; /* as in ps_loop_config */
    enum ps_precision precision;
    char device[128];
    int devices; /* cards on this node, 1 for CPUs */
    int threads, local_rank, replicas;
    double lr, warmup_epochs;
    struct ps_loop_ranks ranks; /* with --sync_bn */
    struct ps_bn_sync bn_sync;
    bool bad_input; /* the failure is a flag's or a file's: exit 2 */
    char values[CONFIG_PAIRS][VALUE_SIZE], names[CONFIG_PAIRS][64];
    struct ps_report_pair pairs[CONFIG_PAIRS];
    size_t pair_count;
};

static int blame_input(struct job *job, int code)
{
    job->bad_input = code != 0;
    return code;
}

static void warn_unknown(const char *flag)
{
    ps_log_warning("unknown flag %s is ignored", flag);
}

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* ---- parts ---- */

static int on_listening(void *meet, int port, struct ps_error *err)
{
    return meet ? ps_meet_answer(meet, port, err) : 0;
}

/* Where rank 0 is, if that is to be asked from the sidecar. */
static int meet_ranks(struct job *job, struct ps_meet **ret_meet, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    struct ps_launch *launch = &job->launch;
    char secret[PS_MEET_SECRET];
    if (!launch->meet_sidecar[0])
        return 0;
    const struct ps_meet_config config = {.sidecar = launch->meet_sidecar,
                                          .run = launch->meet_run,
                                          .token_file = o->token_file,
                                          .tls_ca = o->tls_ca,
                                          .tls_cert = o->tls_cert,
                                          .tls_key = o->tls_key,
                                          .rank = launch->rank,
                                          .world_size = launch->world_size};
    int code = ps_meet_open(&config, ret_meet, err);
    if (!code && launch->rank == 0)
        code = ps_meet_invite(*ret_meet, launch->host, sizeof launch->host, secret, err);
    else if (!code)
        code = ps_meet_find(*ret_meet, launch->host, sizeof launch->host, &launch->port, secret, err);
    if (!code)
        snprintf(launch->secret, sizeof launch->secret, "%s", secret);
    return code;
}

static int join(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    const struct ps_launch *launch = &job->launch;
    int local_size = launch->local_size > 0 ? launch->local_size : 1;
    job->local_rank = launch->local_rank > 0 ? launch->local_rank : 0;
    if (launch->world_size > 1) {
        struct ps_meet *meet = NULL;
        int code = meet_ranks(job, &meet, err);
        if (code) {
            ps_meet_close(meet);
            return code;
        }
        const struct ps_rendezvous_config config = {.rank = launch->rank,
                                                    .world_size = launch->world_size,
                                                    .host = launch->host,
                                                    .port = launch->port,
                                                    .secret = launch->secret,
                                                    .heartbeat_s = o->heartbeat_timeout,
                                                    .on_listening = on_listening,
                                                    .on_failure = on_failure,
                                                    .context = meet};
        code = ps_rendezvous_open(&config, &job->rendezvous, err);
        ps_meet_close(meet);
        if (code)
            return code;
        if (launch->local_size <= 0)
            ps_rendezvous_locality(job->rendezvous, &job->local_rank, &local_size);
    }
    job->threads = o->threads_given ? (int)o->threads : cores() / local_size;
    if (job->threads < 1)
        job->threads = 1;
    return 0;
}

/* --mode dp: the replicas take the ranks' place. --batch is what all of them train on together, as in
 * PyTorch's DataParallel. */
static int choose_replicas(struct job *job, struct ps_error *err)
{
    struct ps_train_options *o = &job->options;
    job->replicas = 1;
    if (!o->data_parallel)
        return 0;
    if (job->launch.world_size > 1)
        return blame_input(job, ps_fail(err, PS_INVALID_ARGUMENT,
                                        "--mode dp trains in one process, and there are %d (%s): use --mode "
                                        "ddp, or start one",
                                        job->launch.world_size, job->launch.source));
    const bool cpu = job->devices <= 1;
    int most = job->devices;
    if (cpu) {
        most = o->threads_given ? cores() / (int)o->threads : cores();
        most = o->batch < most ? (int)o->batch : most < 1 ? 1 : most;
    }
    most = most < PS_TRAIN_REPLICAS_MAX ? most : PS_TRAIN_REPLICAS_MAX;
    while (cpu && o->batch % most) /* not asked for: 12 cores share a batch of 128 as 8 replicas do */
        most--;
    job->replicas = o->replicas_given ? (int)o->replicas : most;
    if (!cpu && job->replicas > job->devices)
        return blame_input(job, ps_fail(err, PS_INVALID_ARGUMENT, "--replicas %d: there are %d GPUs",
                                        job->replicas, job->devices));
    if (!cpu && job->replicas > 1)
        return blame_input(job, ps_fail(err, PS_INVALID_ARGUMENT,
                                        "--mode dp takes one GPU: for %d of them start a process each, as "
                                        "paramsync launch does",
                                        job->replicas));
    if (o->batch % job->replicas)
        return blame_input(job, ps_fail(err, PS_INVALID_ARGUMENT,
                                        "--batch %lld cannot be shared evenly among %d replicas: choose a "
                                        "multiple, or another --replicas",
                                        (long long)o->batch, job->replicas));
    o->batch /= job->replicas;
    job->launch.world_size = job->replicas;
    if (!o->threads_given && cpu)
        job->threads = cores() / job->replicas > 0 ? cores() / job->replicas : 1;
    return 0;
}

static int try_backend(struct job *job, const char *name, struct ps_error *err)
{
    const struct ps_backend_ops *ops;
    int devices = 1, code = ps_backend_load(name, &ops, err);
    if (!code)
        code = ops->probe(&devices, job->device, sizeof job->device, err);
    if (!code) {
        job->ops = ops;
        job->devices = devices > 0 ? devices : 1;
    }
    return code;
}

static int choose_backend(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    char threads[16];
    snprintf(threads, sizeof threads, "%d", job->threads);
    setenv("OMP_NUM_THREADS", threads, 1); /* OpenMP reads it once, when a module brings it in */
    setenv("OMP_DYNAMIC", "false", 1);
    /* On cores that others use too, threads that spin at every barrier for as long as libgomp lets them take
     * the time that the thread they wait for needs. A short spin costs nothing on a quiet machine. */
    if (!getenv("OMP_WAIT_POLICY"))
        setenv("GOMP_SPINCOUNT", "20000", 0);
    if (strcmp(o->enable_gpu, "false") != 0) {
        struct ps_error why = {0};
        if (try_backend(job, "cuda", &why) == 0)
            return 0;
        if (strcmp(o->enable_gpu, "true") == 0)
            return blame_input(job, ps_fail(err, PS_INVALID_ARGUMENT, "--enable_gpu true: %s", why.message));
        ps_log_notice("no GPU can be used (%s): training on the CPU", why.message);
    }
    if (strcmp(o->backend, "ref") != 0) {
        struct ps_error why = {0};
        if (try_backend(job, "cpu", &why) == 0) {
            job->devices = 1;
            return 0;
        }
        if (strcmp(o->backend, "cpu") == 0)
            return blame_input(job, ps_fail(err, PS_INVALID_ARGUMENT, "--backend cpu: %s", why.message));
        ps_log_notice("backend cpu cannot be used (%s): training with ref, which is slow", why.message);
    }
    int code = try_backend(job, "ref", err);
    job->devices = 1;
    job->threads = 1; /* it has no more, and a resumed run compares them */
    return code;
}

static int choose_precision(struct job *job, struct ps_error *err)
{
    const char *wanted = job->options.precision;
    bool bf16 = job->ops->supports(PS_BF16);
    job->precision =
        strcmp(wanted, "fp32") == 0 || (strcmp(wanted, "auto") == 0 && !bf16) ? PS_FP32 : PS_BF16;
    if (job->precision == PS_BF16 && !bf16)
        return blame_input(job,
                           ps_fail(err, PS_INVALID_ARGUMENT,
                                   "--precision bf16: backend %s has none here: use fp32", job->ops->name));
    if (strcmp(wanted, "auto") == 0 && !bf16 && job->launch.rank == 0)
        ps_log_notice("--precision auto: backend %s has no bf16 here, fp32 it is", job->ops->name);
    return 0;
}

static int load_data(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    int code = o->custom_data ? ps_dataset_custom((uint64_t)o->seed, &job->data, err)
                              : ps_dataset_load(o->data_url, &job->data, err);
    if (!code)
        code = ps_dataset_limit(job->data, (size_t)o->train_images, (size_t)o->test_images, err);
    return blame_input(job, code);
}

static int check_batches(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    if (ps_loop_batches(o, job->data, job->launch.world_size) == 0)
        return blame_input(
            job, ps_fail(err, PS_INVALID_ARGUMENT,
                         "--batch %lld is more than each rank's part of %zu images, and --drop_last leaves "
                         "short batches out: nothing would be trained",
                         (long long)o->batch, job->data->train.count));
    return 0;
}

static int make_backend(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    job->bn_sync = (struct ps_bn_sync){job->launch.world_size, ps_loop_gather, &job->ranks};
    const struct ps_backend_config config = {
        .bn_sync = o->sync_bn && job->launch.world_size > 1 ? &job->bn_sync : NULL,
        .model = job->model,
        .precision = job->precision,
        .threads = job->threads,
        .device = job->local_rank,
        .max_batch = (int)o->batch,
        .max_eval_batch = ps_loop_eval_batch(o, job->data, job->launch.world_size),
        .max_resolution = ps_resolution_largest(&o->resolutions, (int)o->epochs),
        .deterministic = o->deterministic,
        .tf32 = o->tf32,
        .training = true,
    };
    return job->ops->create(&config, &job->backend, err);
}

static void skipped_checkpoint(void *context, const char *why)
{
    (void)context;
    ps_log_warning("not resumed from: %s", why);
}

/* --resume auto where the folder holds nothing: the sidecar may have what another machine left. */
static int fetch_resume(struct job *job, char **ret_path, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    const struct ps_report_config config = {.sidecar = o->sidecar,
                                            .token_file = o->token_file,
                                            .tls_ca = o->tls_ca,
                                            .tls_cert = o->tls_cert,
                                            .tls_key = o->tls_key,
                                            .run_name = o->run ? o->run : job->model->name};
    struct ps_error why = {0};
    int epoch = 0;
    if (!o->sidecar)
        return 0;
    if (ps_report_fetch(&config, o->output_dir, &epoch, &why)) {
        ps_log_notice("nothing was fetched from the sidecar to resume from: %s", why.message);
        return 0;
    }
    char *mark = NULL;
    if (asprintf(&mark, "%s/training.id", o->output_dir) > 0)
        unlink(mark); /* of a training that had no checkpoint yet: what was fetched is another's */
    free(mark);
    ps_log_notice("fetched epoch %d of run %s from the sidecar at %s", epoch, config.run_name, o->sidecar);
    return ps_checkpoint_newest(o->output_dir, ret_path, skipped_checkpoint, NULL, err);
}

/* PARAMSYNC_TRAINING: the name that a launcher gives to a training, the same whenever it starts it again. */
static const char *launched_training(void)
{
    const char *name = getenv("PARAMSYNC_TRAINING");
    return name && strlen(name) == PS_TRAINING_ID - 1 &&
                   strspn(name, "0123456789abcdef") == PS_TRAINING_ID - 1
               ? name
               : NULL;
}

/* Started again by a launcher: this training's own newest checkpoint goes before what --resume says. What the
 * folder holds of other trainings, perhaps of other models, is none of its business. */
static void find_own(struct job *job)
{
    const char *name = launched_training();
    struct ps_error why = {0};
    char *path = NULL;
    if (!name || ps_checkpoint_newest(job->options.output_dir, &path, NULL, NULL, &why) || !path ||
        ps_checkpoint_load(path, job->model, &job->resume, &why)) {
        free(path);
        return;
    }
    const char *of = ps_checkpoint_pair(job->resume, "training");
    if (of && strcmp(of, name) == 0 && !job->resume->weights_only) {
        ps_log_notice("started again: resuming from %s", path);
    } else {
        ps_checkpoint_free(job->resume);
        job->resume = NULL;
    }
    free(path);
}

/* Rank 0: the output folder, and what is resumed from. */
static int find_resume(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    const bool automatic = strcmp(o->resume, "auto") == 0, none = strcmp(o->resume, "none") == 0;
    char *path = NULL;
    struct stat st;
    int code = ps_make_dirs(o->output_dir, 0777, err);
    if (!code && access(o->output_dir, W_OK | X_OK) < 0)
        code = ps_fail_errno(err, errno, "--output_dir %s cannot be written to", o->output_dir);
    if (code)
        return blame_input(job, code);
    int stale = ps_checkpoint_clean(o->output_dir);
    if (stale)
        ps_log_notice("removed %d half-written file%s from %s", stale, stale == 1 ? "" : "s", o->output_dir);
    find_own(job);
    const bool own = job->resume != NULL;
    if (own) {
        code = 0;
    } else if (none || automatic) {
        code = ps_checkpoint_newest(o->output_dir, &path, automatic ? skipped_checkpoint : NULL, NULL, err);
        if (!code && !path && automatic)
            code = fetch_resume(job, &path, err);
        if (!code && path && none) {
            ps_log_warning("%s holds checkpoints of an earlier training, up to %s: they are replaced one by "
                           "one, and are "
                           "not gone on from any more",
                           o->output_dir, strrchr(path, '/') + 1);
            free(path);
            path = NULL;
        }
    } else if (stat(o->resume, &st) < 0) {
        code = ps_fail_errno(err, errno, "--resume %s", o->resume);
    } else if (S_ISDIR(st.st_mode)) {
        code = ps_checkpoint_newest(o->resume, &path, skipped_checkpoint, NULL, err);
        if (!code && !path)
            code = ps_fail(err, PS_NOT_FOUND, "--resume %s: the folder holds no whole checkpoint", o->resume);
    } else if (!(path = strdup(o->resume))) {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    if (!code && path)
        code = ps_checkpoint_load(path, job->model, &job->resume, err);
    if (!code && job->resume)
        code = ps_loop_check_resume(o, job->resume, err);
    if (!code && job->resume && !own) {
        if (job->resume->weights_only)
            ps_log_notice("%s has no .state beside it: its weights are taken, training begins at epoch 1",
                          path);
        else
            ps_log_notice("resuming from %s", path);
    } else if (!code && automatic) {
        ps_log_notice("--resume auto: no whole checkpoint in %s, training begins anew", o->output_dir);
    }
    free(path);
    const char *before =
        job->resume && !job->resume->weights_only ? ps_checkpoint_pair(job->resume, "training") : NULL;
    if (!code && !automatic && launched_training()) /* auto may go on from an earlier training, as that one */
        snprintf(job->training, sizeof job->training, "%s", launched_training());
    else if (!code && before && strlen(before) < sizeof job->training)
        snprintf(job->training, sizeof job->training, "%s", before);
    else if (!code)
        code = ps_training_new(job->training, err);
    if (!code)
        code = ps_training_mark(o->output_dir, job->training, err);
    return blame_input(job, code);
}

/* ---- what is said about the job ---- */

static void add_pair(struct job *job, const char *name, const char *value)
{
    if (job->pair_count == CONFIG_PAIRS)
        return;
    size_t i = job->pair_count++;
    snprintf(job->names[i], sizeof job->names[i], "%s", name);
    for (char *p = job->names[i]; *p; p++)
        if (*p == '-')
            *p = '_';
    if (value != job->values[i])
        snprintf(job->values[i], VALUE_SIZE, "%s", value);
    job->pairs[i] = (struct ps_report_pair){job->names[i], job->values[i]};
}

static const char *precision_name(enum ps_precision precision)
{
    return precision == PS_BF16 ? "bf16" : "fp32";
}

static long long global_batch(const struct job *job)
{
    return job->options.batch * job->options.accumulate * job->launch.world_size;
}

static void describe(struct job *job)
{
    static const char *const left_out[] = {"help",    "version",   "ignore-unknown", "token-file",
                                           "tls-ca",  "tls-cert",  "tls-key",        "trace",
                                           "threads", "precision", "backend"};
    struct ps_train_options *o = &job->options;
    const struct ps_options table = ps_train_table(o);
    char text[VALUE_SIZE];
    for (size_t i = 0; i < table.count; i++) {
        bool wanted = !table.rows[i].secret;
        for (size_t k = 0; k < sizeof left_out / sizeof *left_out; k++)
            wanted = wanted && strcmp(table.rows[i].name, left_out[k]) != 0;
        if (!wanted)
            continue;
        ps_options_format(&table.rows[i], o, text, sizeof text);
        add_pair(job, table.rows[i].name, text);
    }
    add_pair(job, "precision", precision_name(job->precision));
    add_pair(job, "backend", job->ops->name);
    snprintf(text, sizeof text, "%d", job->threads);
    add_pair(job, "threads", text);
    snprintf(text, sizeof text, "%.10g", job->lr);
    add_pair(job, "effective_lr", text);
    snprintf(text, sizeof text, "%lld", global_batch(job));
    add_pair(job, "global_batch", text);
    if (strstr(job->data->name, "CIFAR-10") && job->data->classes == 10)
        add_pair(job, "class_names", "airplane automobile bird cat deer dog frog horse ship truck");
    add_pair(job, "launched_by", job->launch.source);
    add_pair(job, "version", PARAMSYNC_VERSION);
    if (job->launch.rank != 0)
        return;
    const struct ps_dataset *data = job->data;
    ps_log_notice("rank 0 of %d (%s), backend %s (%s), %s, %d thread%s", job->launch.world_size,
                  job->launch.source, job->ops->name, job->device, precision_name(job->precision),
                  job->threads, job->threads == 1 ? "" : "s");
    ps_log_notice("data: %s, %zu training and %zu test images, hash %s", data->name, data->train.count,
                  data->test.count, data->hash);
    if (o->data_parallel)
        ps_log_notice("--mode dp: %d replica%s in this process, %lld images each of a batch", job->replicas,
                      job->replicas == 1 ? "" : "s", (long long)o->batch);
    if (job->warmup_epochs > 0)
        ps_log_notice("the learning rate rises to its value over the first %g epochs (--warmup_epochs)",
                      job->warmup_epochs);
    ps_log_notice("%s, width %d: %zu parameters; %s, %s schedule, learning rate %.6g (%.6g x %g, --lr_scale "
                  "%s); global "
                  "batch %lld (%lld x %d rank%s x %lld), %zu batches a rank and epoch",
                  job->model->name, job->model->width, job->model->param_elements, o->optimizer, o->schedule,
                  job->lr, o->lr, job->lr / o->lr, o->lr_scale, global_batch(job), (long long)o->batch,
                  job->launch.world_size, job->launch.world_size == 1 ? "" : "s", (long long)o->accumulate,
                  ps_loop_batches(o, data, job->launch.world_size));
}

/* What must be the same on all ranks for the job to be one. */
static int check_agreement(struct job *job, struct ps_error *err)
{
    static const char *const names[] = {
        "sync-bn",    "freeze-bn",  "on-nan",          "warmup-epochs", "epochs",      "batch",
        "accumulate", "lr",         "lr-scale",        "optimizer",     "momentum",    "weight-decay",
        "schedule",   "drop-last",  "label-smoothing", "seed",          "augment",     "normalize",
        "resolution", "eval-every", "recipe",          "custom-data",   "ckpt-format", "tf32",
    };
    enum { COUNT = sizeof names / sizeof *names };
    struct ps_start_pair pairs[COUNT + 3];
    char values[COUNT][VALUE_SIZE];
    const struct ps_options table = ps_train_table(&job->options);
    size_t n = 0;
    for (size_t k = 0; k < COUNT; k++)
        for (size_t i = 0; i < table.count; i++)
            if (strcmp(table.rows[i].name, names[k]) == 0) {
                ps_options_format(&table.rows[i], &job->options, values[k], VALUE_SIZE);
                pairs[n++] = (struct ps_start_pair){names[k], values[k]};
            }
    pairs[n++] = (struct ps_start_pair){"data hash", job->data->hash};
    pairs[n++] = (struct ps_start_pair){"backend", job->ops->name};
    pairs[n++] = (struct ps_start_pair){"precision", precision_name(job->precision)};
    return ps_start_check(job->comm, job->model, pairs, n, err);
}

struct run_facts { /* from rank 0's reporter to the others */
    char id[27];
    uint32_t attempt;
    bool reports;
};

static int open_report(struct job *job, double start_s, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    struct run_facts facts = {0};
    /* Started again by a launcher, which knows what the run is really called: NAME may have been taken, and
     * then it became NAME-2. It goes on, also where no checkpoint was left to go on from. */
    const char *again = launched_training() ? getenv("PARAMSYNC_RUN_AGAIN") : NULL;
    if (again && !*again)
        again = NULL;
    struct ps_report_config config = {.sidecar = o->sidecar,
                                      .token_file = o->token_file,
                                      .tls_ca = o->tls_ca,
                                      .tls_cert = o->tls_cert,
                                      .tls_key = o->tls_key,
                                      .rank = job->launch.rank,
                                      .world_size = job->launch.world_size,
                                      .run_name = again    ? again
                                                  : o->run ? o->run
                                                           : job->model->name,
                                      .resume = again || (job->resume && !job->resume->weights_only),
                                      .model = job->model->name,
                                      .dataset = job->data->name,
                                      .dataset_hash = job->data->hash,
                                      .device = job->device,
                                      .commit = o->commit,
                                      .epochs = (int)o->epochs,
                                      .batch_per_rank = (int)o->batch,
                                      .config = job->pairs,
                                      .config_count = job->pair_count};
    int code = 0;
    if (o->sidecar && asprintf(&job->spool_dir, "%s/spool", o->output_dir) < 0) {
        job->spool_dir = NULL;
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    config.spool_dir = job->spool_dir;
    if (job->launch.rank == 0) {
        code = ps_report_open(&config, &job->report, err);
        if (code)
            return blame_input(job, code);
        struct ps_error why = {0};
        if (ps_runlog_open(o->output_dir, job->training, &config, start_s, &job->runlog, &why))
            ps_log_warning("there will be no record of the training in its folder: %s", why.message);
        char name[RUN_NAME_SIZE] = "";
        ps_report_run(job->report, facts.id, &facts.attempt, name, sizeof name);
        if (o->sidecar && *name)
            ps_log_notice("reporting to %s as run %s, attempt %u", o->sidecar, name, facts.attempt);
        facts.reports = o->sidecar != NULL;
        pthread_mutex_lock(&exit_gate.lock);
        exit_gate.report = config;
        snprintf(exit_gate.run_id, sizeof exit_gate.run_id, "%s", facts.id);
        exit_gate.attempt = facts.attempt;
        pthread_mutex_unlock(&exit_gate.lock);
    }
    if (job->launch.world_size > 1)
        code = job->comm->ops->broadcast(job->comm, &facts, sizeof facts, 0, err);
    job->run_unknown = facts.reports && !facts.id[0];
    if (!code && job->launch.rank != 0) {
        config.run_id = facts.id;
        config.attempt = facts.attempt;
        code = ps_report_open(&config, &job->report, err);
    }
    return code;
}

/* What all ranks of this process share. */
static int set_up(struct job *job, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    int code = join(job, err);
    take_signals();
    if (!code)
        code = load_data(job, err);
    if (!code && !o->data_parallel) /* told before anything is said about backends */
        code = check_batches(job, err);
    if (!code)
        code = choose_backend(job, err);
    if (!code)
        code = choose_replicas(job, err);
    if (!code && o->data_parallel)
        code = check_batches(job, err);
    if (!code)
        code = choose_precision(job, err);
    if (!code)
        code =
            blame_input(job, ps_model_create(o->model, (int)o->width, job->data->classes, &job->model, err));
    return code;
}

/* trace.json, trace.rank1.json, trace.rank2.json, ... */
static int open_trace(struct job *job, struct ps_error *err)
{
    const char *file = job->options.trace, *slash = file ? strrchr(file, '/') : NULL;
    const char *dot = file ? strrchr(slash ? slash : file, '.') : NULL;
    char *path = NULL, name[32];
    int rank = job->launch.rank;
    if (!file)
        return 0;
    if (!dot || dot == file || dot[-1] == '/')
        dot = file + strlen(file);
    int made = rank == 0 ? asprintf(&path, "%s", file)
                         : asprintf(&path, "%.*s.rank%d%s", (int)(dot - file), file, rank, dot);
    if (made < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    snprintf(name, sizeof name, "rank %d", rank);
    struct ps_error why = {0};
    int code = ps_trace_open(path, rank, name, 0, &job->trace, &why);
    free(path);
    if (code)
        return blame_input(job, ps_fail(err, code, "--trace: %s", why.message));
    if (!job->options.data_parallel) {
        pthread_mutex_lock(&exit_gate.lock);
        exit_gate.trace = job->trace;
        pthread_mutex_unlock(&exit_gate.lock);
    }
    return 0;
}

static void close_trace(struct job *job)
{
    struct ps_error err = {0};
    if (!job->options.data_parallel) {
        pthread_mutex_lock(&exit_gate.lock);
        exit_gate.trace = NULL;
        pthread_mutex_unlock(&exit_gate.lock);
    }
    if (ps_trace_close(job->trace, 0, &err))
        ps_log_warning("the trace is not written: %s", err.message);
    job->trace = NULL;
}

/* What each rank has of its own. job->comm is there with replicas. */
static int set_up_rank(struct job *job, double start_s, struct ps_error *err)
{
    const struct ps_train_options *o = &job->options;
    const struct ps_gloo_options gloo = {.interface = o->interface, .collective_s = o->collective_timeout};
    int code = open_trace(job, err);
    if (!code)
        code = make_backend(job, err);
    if (!code && !job->comm && job->launch.world_size > 1 && job->ops->stream) {
        const struct ps_nccl_options nccl = {.device = job->local_rank,
                                             .stream = job->ops->stream(job->backend),
                                             .collective_s = o->collective_timeout};
        code =
            ps_comm_nccl(job->rendezvous, job->launch.rank, job->launch.world_size, &nccl, &job->comm, err);
    }
    if (!code && !job->comm)
        code =
            ps_comm_open(job->rendezvous, job->launch.rank, job->launch.world_size, &gloo, &job->comm, err);
    if (!code)
        code = check_agreement(job, err);
    if (!code && job->launch.rank == 0)
        code = find_resume(job, err);
    const double factor = ps_train_lr_factor(o, job->devices, job->launch.world_size);
    job->lr = o->lr * factor;
    job->warmup_epochs = ps_train_warmup(o, factor);
    if (!code) {
        describe(job);
        code = open_report(job, start_s, err);
    }
    return code;
}

static int train_rank(struct job *job, double start_s, struct ps_loop_result *result, struct ps_error *err)
{
    int code = set_up_rank(job, start_s, err);
    if (code)
        return code;
    const struct ps_loop_config config = {.options = &job->options,
                                          .data = job->data,
                                          .model = job->model,
                                          .ops = job->ops,
                                          .backend = job->backend,
                                          .comm = job->comm,
                                          .report = job->report,
                                          .runlog = job->runlog,
                                          .run_unknown = job->run_unknown,
                                          .training = job->training,
                                          .resume = job->resume,
                                          .lr = job->lr,
                                          .warmup_epochs = job->warmup_epochs,
                                          .warmup_from =
                                              job->lr > job->options.lr ? job->options.lr / job->lr : 0,
                                          .trace = job->trace,
                                          .ranks = &job->ranks,
                                          .threads = job->threads,
                                          .start_s = start_s,
                                          .stop = &stop_signal};
    return ps_loop_run(&config, result, err);
}

static void tear_down(struct job *job, int code, const char *reason)
{
    begin_ending();
    close_trace(job);
    if (code && job->rendezvous)
        ps_rendezvous_fail(job->rendezvous, reason);
    const char *state = code == 0 ? "finished" : code == PS_CANCELLED ? "killed" : "failed";
    struct ps_error unsaid = {0};
    if (ps_runlog_close(job->runlog, state, code ? reason : "", &unsaid))
        ps_log_warning("the end is missing in the folder's record: %s", unsaid.message);
    if (job->report)
        ps_report_close(job->report, state, code ? reason : "",
                        !code                         ? last_report_s
                        : job->launch.world_size == 1 ? failed_report_s
                                                      : hasty_report_s);
    ps_comm_close(job->rendezvous, job->comm);
    ps_rendezvous_close(job->rendezvous, code ? 0 : leave_s);
    /* After a failure a device may wait for ranks that are gone: what is on it ends with the process. */
    if (job->backend && !(code && job->ops->stream && job->launch.world_size > 1))
        job->ops->destroy(job->backend);
    ps_checkpoint_free(job->resume);
    free(job->spool_dir);
}

/* ---- replicas: ranks 1 and up of --mode dp, each on a thread of its own ---- */

struct replica {
    struct job job;
    pthread_t thread;
    bool runs;
    double start_s;
    int code;
    struct ps_error err;
};

/* Told to the other replicas, who would wait for this one. */
static void fail_replicas(struct job *job, int code, const struct ps_error *err)
{
    char reason[sizeof err->message + 32];
    if (!code || job->replicas == 1 || !job->comm)
        return;
    snprintf(reason, sizeof reason, "replica %d: %s", job->launch.rank, err->message);
    job->comm->ops->abort(job->comm, reason);
}

static void *run_replica(void *context)
{
    struct replica *r = context;
    struct ps_loop_result result;
    r->code = train_rank(&r->job, r->start_s, &result, &r->err);
    fail_replicas(&r->job, r->code, &r->err);
    return NULL;
}

static int start_replicas(struct job *job, double start_s, struct replica **ret, struct ps_error *err)
{
    struct ps_comm *comms[PS_TRAIN_REPLICAS_MAX];
    struct replica *all = calloc((size_t)job->replicas, sizeof *all);
    if (!all)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for %d replicas", job->replicas);
    int code = ps_comm_local(job->replicas, job->options.collective_timeout, comms, err);
    if (code) {
        free(all);
        return code;
    }
    job->comm = comms[0];
    *ret = all;
    for (int i = 1; i < job->replicas; i++) {
        all[i].job = *job;
        all[i].job.comm = comms[i];
        all[i].job.launch.rank = all[i].job.local_rank = i;
        all[i].start_s = start_s;
    }
    for (int i = 1; i < job->replicas && !code; i++) {
        sigset_t signals, before; /* the main thread takes them */
        sigfillset(&signals);
        pthread_sigmask(SIG_SETMASK, &signals, &before);
        int rc = pthread_create(&all[i].thread, NULL, run_replica, &all[i]);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        all[i].runs = rc == 0;
        if (rc)
            code = ps_fail_errno(err, rc, "cannot start replica %d's thread", i);
    }
    if (code)
        fail_replicas(job, code, err);
    return code;
}

/* Waits for them. A replica's own failure is told where the main thread only knows that another failed. */
static void end_replicas(struct job *job, struct replica *all, int code)
{
    for (int i = 1; i < job->replicas && all; i++) {
        struct replica *r = &all[i];
        if (r->runs)
            pthread_join(r->thread, NULL);
        close_trace(&r->job);
        if (code)
            ps_report_close(r->job.report, code == PS_CANCELLED ? "killed" : "failed", r->err.message,
                            hasty_report_s);
        else
            ps_report_close(r->job.report, "finished", "", last_report_s);
        if (r->job.comm)
            r->job.comm->ops->destroy(r->job.comm);
        if (r->job.backend)
            r->job.ops->destroy(r->job.backend);
    }
    free(all);
}

static void summarize(const struct job *job, const struct ps_loop_result *result)
{
    char took[64];
    if (job->launch.rank != 0)
        return;
    ps_format_duration(result->elapsed_s, took, sizeof took);
    if (result->accuracy >= 0)
        ps_log_notice("finished in %s: accuracy %.4f, best %.4f after epoch %d, on %s; checkpoints in %s",
                      took, result->accuracy, result->best_accuracy, result->best_epoch, job->data->name,
                      job->options.output_dir);
    else
        ps_log_notice("nothing left to train: epoch %d of %lld is done", result->epochs_done,
                      (long long)job->options.epochs);
}

static int usage(const char *message)
{
    fprintf(stderr, "paramsync-train: %s\n", message);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    static struct job job; /* large */
    struct ps_error err = {0};
    struct ps_loop_result result = {0};
    const double start_s = ps_monotonic_s();
    ps_log_set_plain(1);
    ps_log_threshold = PS_LOG_NOTICE;
    int code = ps_train_options_parse(argc, argv, &job.options, warn_unknown, &err);
    if (code)
        return usage(err.message);
    if (job.options.help) {
        const struct ps_options table = ps_train_table(&job.options);
        struct ps_buf text = PS_BUF_INIT(1 << 16);
        ps_options_help(&table, &text);
        fputs(text.data ? text.data : "", stdout);
        ps_buf_done(&text);
        return 0;
    }
    if (job.options.version) {
        printf("paramsync-train %s\n", PARAMSYNC_VERSION);
        return 0;
    }
    const struct ps_launch_flags flags = {.init_method = job.options.init_method,
                                          .rank_given = job.options.rank_given,
                                          .world_size_given = job.options.world_size_given,
                                          .rank = job.options.rank,
                                          .world_size = job.options.world_size};
    if (ps_launch_resolve(&flags, NULL, NULL, &job.launch, &err))
        return usage(err.message);
    exit_gate.rank = job.launch.rank;
    if (job.launch.world_size > 1) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, "rank %d", job.launch.rank);
        ps_log_set_prefix(prefix);
    }
    if (job.launch.rank != 0)
        ps_log_threshold = PS_LOG_WARNING; /* one rank speaks for all */
    else if (job.options.custom_data)
        ps_log_warning(
            "you are training on custom random dataset, validation accuracy may range from 0.4 to 0.6.");
    signal(SIGPIPE, SIG_IGN); /* a reader of standard output that goes away does not end the training */
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error of writing, as a full disk is */

    struct replica *replicas = NULL;
    code = set_up(&job, &err);
    if (!code && job.replicas > 1)
        code = start_replicas(&job, start_s, &replicas, &err);
    if (!code) {
        code = train_rank(&job, start_s, &result, &err);
        fail_replicas(&job, code, &err);
    }
    end_replicas(&job, replicas, code);
    if (!code)
        summarize(&job, &result);
    if (code && stop_signal && code != PS_CANCELLED) {
        /* the other ranks got the signal too and were faster */
        code = ps_fail(&err, PS_CANCELLED, "stopped by signal %d", (int)stop_signal);
    }
    if (code && job.launch.world_size > 1 && !job.options.data_parallel)
        fprintf(stderr, "paramsync-train: rank %d: %s\n", job.launch.rank, err.message);
    else if (code)
        fprintf(stderr, "paramsync-train: %s\n", err.message);
    bool bad_input = job.bad_input;
    tear_down(&job, code, err.message);
    ps_model_free(job.model);
    ps_dataset_free(job.data);
    if (code == PS_CANCELLED)
        return 128 + (int)stop_signal;
    return code == 0 ? 0 : bad_input ? EXIT_USAGE : 1;
}
