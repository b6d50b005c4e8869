/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/options.h"

#include "trainer/checkpoint/checkpoint.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(name) offsetof(struct ps_train_options, name)

/* Flags of the ModelArts sample keep their names and values. */
static const struct ps_option rows[] = {
    {.name = "data-url",
     .type = PS_TYPE_STRING,
     .offset = FIELD(data_url),
     .value = "PATH",
     .fallback = "input_dir",
     .group = "Data",
     .help = "CIFAR-10: a folder that holds cifar-10-batches-py or cifar-10-batches-bin or their .tar.gz, or "
             "one of these"},
    {.name = "custom-data",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(custom_data),
     .fallback = "false",
     .help = "train on random images instead: accuracy 0.4 to 0.6"},
    {.name = "train-images",
     .type = PS_TYPE_INT,
     .offset = FIELD(train_images),
     .value = "N",
     .fallback = "0",
     .min = 0,
     .max = 1e9,
     .help = "train on the first N images only; 0: on all"},
    {.name = "test-images",
     .type = PS_TYPE_INT,
     .offset = FIELD(test_images),
     .value = "N",
     .fallback = "0",
     .min = 0,
     .max = 1e9,
     .help = "test on the first N images only; 0: on all"},
    {.name = "augment",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(augment),
     .fallback = "none",
     .choices = "none|standard",
     .help = "standard: shift by up to 4 pixels and mirror; by recipe"},
    {.name = "normalize",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(normalize),
     .fallback = "false",
     .help = "by channel mean and deviation, not only / 255; by recipe"},
    {.name = "resolution",
     .type = PS_TYPE_STRING,
     .offset = FIELD(resolution),
     .value = "R[:E],...",
     .fallback = "32",
     .help = "pixels by epochs: 16:2,24:2 is 16 for 2 epochs, then 24; by recipe"},

    {.name = "recipe",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(recipe),
     .fallback = "sample",
     .choices = "sample|fast",
     .group = "Training",
     .help = "defaults for what is not given. sample: as the ModelArts sample trains; fast: few epochs of "
             "one-cycle SGD"},
    {.name = "epochs",
     .type = PS_TYPE_INT,
     .offset = FIELD(epochs),
     .value = "N",
     .fallback = "100",
     .min = 1,
     .max = 1000000,
     .help = "passes over the training images; fast: 4"},
    {.name = "lr",
     .type = PS_TYPE_DOUBLE,
     .offset = FIELD(lr),
     .value = "RATE",
     .fallback = "0.01",
     .min = 0,
     .max = 1e6,
     .help = "learning rate before --lr-scale, the peak of a schedule; fast: 0.3"},
    {.name = "lr-scale",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(lr_scale),
     .fallback = "node",
     .choices = "node|none|linear|sqrt",
     .help = "times the cards on this node, nothing, the number of batches in a global batch or its root; by "
             "recipe"},
    {.name = "warmup-epochs",
     .type = PS_TYPE_DOUBLE,
     .offset = FIELD(warmup_epochs),
     .value = "E",
     .min = 0,
     .max = 1000000,
     .help = "raise the rate to its scaled value over E epochs; default: 5 (at most a quarter of all) where "
             "linear or sqrt raises a constant rate, else 0"},
    {.name = "batch",
     .type = PS_TYPE_INT,
     .offset = FIELD(batch),
     .value = "N",
     .fallback = "128",
     .min = 1,
     .max = 65536,
     .help = "images per card and step, with --mode dp of all replicas together; fast: 256"},
    {.name = "accumulate",
     .type = PS_TYPE_INT,
     .offset = FIELD(accumulate),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = 65536,
     .help = "batches per optimizer step"},
    {.name = "optimizer",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(optimizer),
     .fallback = "adam",
     .choices = "adam|sgd",
     .help = "sgd: with Nesterov momentum; by recipe"},
    {.name = "momentum",
     .type = PS_TYPE_DOUBLE,
     .offset = FIELD(momentum),
     .value = "M",
     .fallback = "0.9",
     .min = 0,
     .max = 0.999999,
     .help = "of sgd"},
    {.name = "weight-decay",
     .type = PS_TYPE_DOUBLE,
     .offset = FIELD(weight_decay),
     .value = "D",
     .fallback = "0",
     .min = 0,
     .max = 1,
     .help = "on convolution and dense weights only; fast: 0.0005"},
    {.name = "label-smoothing",
     .type = PS_TYPE_DOUBLE,
     .offset = FIELD(label_smoothing),
     .value = "S",
     .fallback = "0",
     .min = 0,
     .max = 0.999,
     .help = "fast: 0.1"},
    {.name = "schedule",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(schedule),
     .fallback = "constant",
     .choices = "constant|onecycle|cosine",
     .help = "of the learning rate; by recipe"},
    {.name = "drop-last",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(drop_last),
     .fallback = "true",
     .help = "leave a short last batch out; else it weighs what it holds"},
    {.name = "sync-bn",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(sync_bn),
     .fallback = "false",
     .help = "BatchNorm by the statistics of all ranks' images, not each rank's own"},
    {.name = "freeze-bn",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(freeze_bn),
     .fallback = "false",
     .help = "BatchNorm by the running statistics, which stay as they are"},
    {.name = "seed",
     .type = PS_TYPE_INT,
     .offset = FIELD(seed),
     .value = "N",
     .fallback = "1",
     .min = 0,
     .max = 4294967295.0,
     .help = "of initial weights, order and augmentation"},
    {.name = "eval-every",
     .type = PS_TYPE_INT,
     .offset = FIELD(eval_every),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = 1000000,
     .help = "test every N epochs, and after the last"},
    {.name = "on-nan",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(on_nan),
     .fallback = "stop",
     .choices = "stop|skip",
     .help = "when a loss or gradient is no number: stop, or leave this step out on all ranks and count it"},

    {.name = "model",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(model),
     .fallback = "resnet18",
     .choices = "resnet18|resnet34|resnet50",
     .group = "Model and machine",
     .help = "the net"},
    {.name = "width",
     .type = PS_TYPE_INT,
     .offset = FIELD(width),
     .value = "N",
     .fallback = "64",
     .min = 1,
     .max = 1024,
     .help = "channels of its first stage; 64 is the sample's"},
    {.name = "enable-gpu",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(enable_gpu),
     .fallback = "auto",
     .choices = "auto|true|false",
     .help = "auto: a GPU if there is one, else the CPU"},
    {.name = "backend",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(backend),
     .fallback = "auto",
     .choices = "auto|cpu|ref",
     .help = "on the CPU: cpu (oneDNN) or ref (plain C, slow); auto: cpu where it can run"},
    {.name = "precision",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(precision),
     .fallback = "fp32",
     .choices = "auto|fp32|bf16",
     .help = "auto: bf16 where the backend has it; by recipe"},
    {.name = "tf32",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(tf32),
     .fallback = "false",
     .help = "fp32 on a GPU: let tensor cores round factors to 10 bits"},
    {.name = "graph",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(graph),
     .fallback = "auto",
     .choices = "auto|on|off",
     .help = "on a GPU: record a step once and repeat it; losses are then read every 16 steps"},
    {.name = "threads",
     .type = PS_TYPE_INT,
     .offset = FIELD(threads),
     .value = "N",
     .min = 1,
     .max = 4096,
     .environment = "PARAMSYNC_THREADS",
     .help = "of computation; default: cores / processes on this machine"},
    {.name = "deterministic",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(deterministic),
     .fallback = "false",
     .help = "the same bits each time with the same number of threads"},
    {.name = "trace",
     .type = PS_TYPE_STRING,
     .offset = FIELD(trace),
     .value = "FILE",
     .help = "write what each step spent its time on, for Perfetto or chrome://tracing; ranks above 0 write "
             "FILE with .rankN before its extension"},
    {.name = "profile",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(profile),
     .fallback = "false",
     .help = "print after each epoch where rank 0's training time went, by layer"},

    {.name = "init-method",
     .type = PS_TYPE_STRING,
     .offset = FIELD(init_method),
     .value = "URL",
     .fallback = "none",
     .group = "Several processes",
     .help = "tcp://HOST:PORT of rank 0, env://, or grpc://HOST:PORT/RUN: the ranks meet at the sidecar"},
    {.name = "rank",
     .type = PS_TYPE_INT,
     .offset = FIELD(rank),
     .value = "N",
     .fallback = "0",
     .min = 0,
     .max = 4095,
     .help = "this process among all, from 0"},
    {.name = "world-size",
     .type = PS_TYPE_INT,
     .offset = FIELD(world_size),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = 4096,
     .help = "number of processes, one per card"},
    {.name = "mode",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(mode),
     .fallback = "ddp",
     .choices = "ddp|dp",
     .help = "ddp: one process per card; dp: one process, one replica per card or group of cores"},
    {.name = "replicas",
     .type = PS_TYPE_INT,
     .offset = FIELD(replicas),
     .value = "N",
     .min = 1,
     .max = PS_TRAIN_REPLICAS_MAX,
     .help = "of --mode dp; default: the GPUs, or on CPUs as many of the cores / --threads as share --batch "
             "evenly"},
    {.name = "interface",
     .type = PS_TYPE_STRING,
     .offset = FIELD(interface),
     .value = "NAME",
     .fallback = "auto",
     .help = "network interface or address; auto: the one on the way to rank 0"},
    {.name = "collective-timeout",
     .type = PS_TYPE_DURATION,
     .offset = FIELD(collective_timeout),
     .value = "TIME",
     .fallback = "600s",
     .min = 1,
     .max = 86400,
     .help = "for one exchange between the processes"},
    {.name = "heartbeat-timeout",
     .type = PS_TYPE_DURATION,
     .offset = FIELD(heartbeat_timeout),
     .value = "TIME",
     .fallback = "5s",
     .min = 0.2,
     .max = 3600,
     .help = "after which a silent process counts as dead"},

    {.name = "output-dir",
     .type = PS_TYPE_STRING,
     .offset = FIELD(output_dir),
     .value = "DIR",
     .fallback = "output_dir",
     .group = "Results",
     .help = "where checkpoints go"},
    {.name = "ckpt-format",
     .type = PS_TYPE_CHOICE,
     .offset = FIELD(ckpt_format),
     .fallback = "safetensors",
     .choices = "safetensors|pth|both",
     .help = "of the weights; pth is PyTorch's"},
    {.name = "resume",
     .type = PS_TYPE_STRING,
     .offset = FIELD(resume),
     .value = "auto|none|PATH",
     .fallback = "none",
     .help = "auto: from the newest whole checkpoint in --output-dir, or else of --run at the sidecar, if "
             "there is one; "
             "PATH: from this file"},
    {.name = "sidecar",
     .type = PS_TYPE_STRING,
     .offset = FIELD(sidecar),
     .value = "HOST:PORT",
     .environment = "PARAMSYNC_SIDECAR",
     .help = "report to this sidecar"},
    {.name = "run",
     .type = PS_TYPE_STRING,
     .offset = FIELD(run),
     .value = "NAME",
     .environment = "PARAMSYNC_RUN",
     .help = "name of the run there"},
    {.name = "commit",
     .type = PS_TYPE_STRING,
     .offset = FIELD(commit),
     .value = "ID",
     .environment = "PARAMSYNC_COMMIT",
     .help = "of what is trained, for the record; without it that of GITHUB_SHA or CI_COMMIT_SHA"},
    {.name = "token-file",
     .type = PS_TYPE_STRING,
     .offset = FIELD(token_file),
     .value = "FILE",
     .help = "holds the sidecar's token"},
    {.name = "tls-ca",
     .type = PS_TYPE_STRING,
     .offset = FIELD(tls_ca),
     .value = "FILE",
     .help = "trust the sidecar by it"},
    {.name = "tls-cert",
     .type = PS_TYPE_STRING,
     .offset = FIELD(tls_cert),
     .value = "FILE",
     .help = "show this certificate to the sidecar"},
    {.name = "tls-key", .type = PS_TYPE_STRING, .offset = FIELD(tls_key), .value = "FILE", .help = "its key"},

    {.name = "ignore-unknown",
     .type = PS_TYPE_BOOL,
     .offset = FIELD(ignore_unknown),
     .fallback = "false",
     .group = "Other",
     .help = "unknown flags are warned of, not refused"},
    {.name = "help", .short_name = "h", .type = PS_TYPE_BOOL, .offset = FIELD(help), .help = "this text"},
    {.name = "version", .type = PS_TYPE_BOOL, .offset = FIELD(version), .help = "the version"},
};
_Static_assert(PS_OPTIONS_COUNT(rows) <= PS_TRAIN_OPTIONS_MAX, "options.sources is too short");

/* What a recipe sets where nothing is given; `sample` is what the table says. */
static const struct {
    const char *name, *value;
} fast[] = {
    {"epochs", "4"},         {"batch", "256"},           {"lr", "0.3"},
    {"lr-scale", "none"},    {"optimizer", "sgd"},       {"schedule", "onecycle"},
    {"momentum", "0.9"},     {"weight-decay", "0.0005"}, {"label-smoothing", "0.1"},
    {"augment", "standard"}, {"normalize", "true"},      {"precision", "auto"},
};

struct ps_options ps_train_table(struct ps_train_options *options)
{
    return (struct ps_options){
        .program = "paramsync-train",
        .usage = "[--flag value ...]",
        .example = "paramsync-train --data_url /data/cifar10 --recipe fast --output_dir out\n"
                   "paramsync-train --init_method tcp://node0:6060 --world_size 2 --rank 1",
        .about = "Trains one rank of a data-parallel job: ResNet-18 on CIFAR-10. Rank 0 prints the epochs' "
                 "results on "
                 "standard output; all else goes to standard error. _ and - are the same in a flag.",
        .rows = rows,
        .count = PS_OPTIONS_COUNT(rows),
        .sources = options->sources,
    };
}

static bool given(const struct ps_train_options *o, const char *name)
{
    for (size_t i = 0; i < PS_OPTIONS_COUNT(rows); i++)
        if (strcmp(rows[i].name, name) == 0)
            return o->sources[i] != PS_FROM_DEFAULT;
    return false;
}

/* --ignore-unknown counts wherever it stands. */
static bool wants_unknown_ignored(int argc, char **argv)
{
    bool ignore = false;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "--ignore", 8) != 0 || (argv[i][8] != '-' && argv[i][8] != '_') ||
            strncmp(argv[i] + 9, "unknown", 7) != 0)
            continue;
        const char *value = argv[i][16] == '=' ? argv[i] + 17 : i + 1 < argc ? argv[i + 1] : "";
        if (argv[i][16] == '\0' || argv[i][16] == '=')
            ignore = strcmp(value, "false") != 0 && strcmp(value, "False") != 0;
    }
    return ignore;
}

static int apply_recipe(const struct ps_options *table, struct ps_train_options *o, struct ps_error *err)
{
    if (strcmp(o->recipe, "fast") != 0)
        return 0;
    for (size_t i = 0; i < sizeof fast / sizeof *fast; i++) {
        int code = given(o, fast[i].name)
                       ? 0
                       : ps_options_set(table, o, fast[i].name, fast[i].value, PS_FROM_DEFAULT, err);
        if (code)
            return code;
    }
    if (!given(o, "resolution") &&
        !o->custom_data) { /* the first half of the epochs at 16 pixels, the rest at 24 */
        long long half = o->epochs / 2;
        if (half)
            snprintf(o->resolution_text, sizeof o->resolution_text, "16:%lld,24", half);
        o->resolution = half ? o->resolution_text : "24";
    }
    if (o->custom_data && !given(o, "augment"))
        o->augment = "none";
    if (o->custom_data && !given(o, "normalize"))
        o->normalize = false;
    return 0;
}

static int check(struct ps_train_options *o, struct ps_error *err)
{
    static const char *const builds[] = {"GITHUB_SHA", "CI_COMMIT_SHA"}; /* GitHub Actions, GitLab CI */
    int code = ps_resolution_parse(o->resolution, &o->resolutions, err);
    if (!code)
        code = ps_schedule_kind_parse(o->schedule, &o->schedule_kind, err);
    if (code)
        return code;
    if (o->lr <= 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--lr %g: must be more than 0", o->lr);
    if (o->custom_data && (strcmp(o->augment, "none") != 0 || o->normalize || o->resolutions.count != 1 ||
                           o->resolutions.part[0].resolution != PS_IMAGE_SIDE))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--custom_data: random images go with --augment none, --normalize false and "
                       "--resolution 32 only");
    if (!o->custom_data && !*o->data_url)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--data_url is empty: name the folder that holds the images");
    if (!*o->output_dir)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--output_dir is empty: name the folder for checkpoints");
    if (o->trace && !*o->trace)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--trace is empty: name a file");
    if (!*o->resume)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--resume is empty: auto, none or the path of a checkpoint");
    for (size_t i = 0; i < sizeof builds / sizeof *builds && !(o->commit && *o->commit); i++)
        o->commit = getenv(builds[i]);
    if (o->sidecar && !*o->sidecar)
        o->sidecar = NULL;
    if (!o->tls_cert != !o->tls_key)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--tls-cert and --tls-key go together");
    o->optimizer_kind = strcmp(o->optimizer, "adam") == 0 ? PS_ADAM : PS_SGD;
    o->formats = strcmp(o->ckpt_format, "pth") == 0    ? PS_CHECKPOINT_PTH
                 : strcmp(o->ckpt_format, "both") == 0 ? PS_CHECKPOINT_PTH | PS_CHECKPOINT_SAFETENSORS
                                                       : PS_CHECKPOINT_SAFETENSORS;
    o->rank_given = given(o, "rank");
    o->world_size_given = given(o, "world-size");
    o->threads_given = given(o, "threads");
    o->replicas_given = given(o, "replicas");
    o->data_parallel = strcmp(o->mode, "dp") == 0;
    o->skip_nan = strcmp(o->on_nan, "skip") == 0;
    if (!given(o, "warmup-epochs"))
        o->warmup_epochs = -1;
    if (o->replicas_given && !o->data_parallel)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--replicas goes with --mode dp");
    if (o->sync_bn && o->freeze_bn)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--sync_bn and --freeze_bn exclude each other: frozen statistics are the same on all "
                       "ranks as they are");
    return 0;
}

int ps_train_options_parse(int argc, char **argv, struct ps_train_options *ret,
                           void (*unknown)(const char *flag), struct ps_error *err)
{
    struct ps_train_options *o = ret;
    memset(o, 0, sizeof *o);
    const struct ps_options table = ps_train_table(o);
    int positional = 0;
    int code = ps_options_defaults(&table, o, err);
    if (!code)
        code = ps_options_parse(&table, o, argc, argv, &positional, wants_unknown_ignored(argc, argv),
                                unknown, err);
    if (code || o->help || o->version)
        return code;
    if (positional)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%.100s: not a flag (see --help)", argv[1]);
    code = ps_options_environment(&table, o, err);
    if (!code)
        code = apply_recipe(&table, o, err);
    return code ? code : check(o, err);
}

double ps_train_warmup(const struct ps_train_options *o, double factor)
{
    if (o->warmup_epochs >= 0)
        return o->warmup_epochs;
    bool raised = strcmp(o->lr_scale, "linear") == 0 || strcmp(o->lr_scale, "sqrt") == 0;
    double quarter = (double)o->epochs / 4;
    return !raised || factor <= 1 || o->schedule_kind != PS_SCHEDULE_CONSTANT ? 0 : quarter < 5 ? quarter : 5;
}

double ps_train_lr_factor(const struct ps_train_options *o, int devices, int world_size)
{
    double batches = (double)world_size * (double)o->accumulate;
    if (strcmp(o->lr_scale, "node") == 0)
        return devices;
    if (strcmp(o->lr_scale, "linear") == 0)
        return batches;
    return strcmp(o->lr_scale, "sqrt") == 0 ? sqrt(batches) : 1;
}
