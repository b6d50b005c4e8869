/* SPDX-License-Identifier: Apache-2.0
 * What paramsync-train is told: one table, then recipes, then what follows from both. */
#ifndef PARAMSYNC_TRAINER_OPTIONS_H
#define PARAMSYNC_TRAINER_OPTIONS_H

#include "services/base/error.h"
#include "services/base/launch.h"
#include "services/base/options.h"
#include "trainer/backend/backend.h"
#include "trainer/data/augment.h"
#include "trainer/optim/schedule.h"

#include <stdbool.h>
#include <stdint.h>

enum { PS_TRAIN_OPTIONS_MAX = 64, PS_TRAIN_REPLICAS_MAX = 256 };

struct ps_train_options {
    /* as given, by the table's rows */
    const char *enable_gpu, *backend;
    double lr;
    int64_t epochs;
    const char *data_url, *output_dir;
    const char *init_method;
    int64_t rank, world_size;
    bool custom_data;
    int64_t train_images, test_images;
    const char *recipe, *model;
    int64_t width, batch, accumulate;
    const char *optimizer, *schedule, *lr_scale, *augment, *resolution, *precision;
    bool drop_last, normalize;
    double weight_decay, momentum, label_smoothing;
    int64_t seed, threads, eval_every;
    bool deterministic, profile;
    const char *ckpt_format, *resume;
    const char *mode, *interface, *on_nan, *trace;
    int64_t replicas; /* of mode dp */
    double warmup_epochs;
    bool sync_bn, freeze_bn;
    double collective_timeout, heartbeat_timeout;
    const char *sidecar, *run, *commit, *token_file, *tls_ca, *tls_cert, *tls_key;
    bool ignore_unknown, help, version;

    /* worked out from them */
    bool rank_given, world_size_given, threads_given, replicas_given;
    bool data_parallel; /* mode dp */
    bool tf32;
    const char *graph;
    bool skip_nan;
    enum ps_optimizer_kind optimizer_kind;
    enum ps_schedule_kind schedule_kind;
    struct ps_resolution_schedule resolutions;
    unsigned formats; /* PS_CHECKPOINT_... */
    unsigned char sources[PS_TRAIN_OPTIONS_MAX];
    char resolution_text[64];
};

/* The table, for parsing, --help, docs and tests; sources point into options. */
struct ps_options ps_train_table(struct ps_train_options *options);

/* Defaults, environment, command line, then the recipe's values for what was not given. Strings point into
 * argv and the environment. Unknown flags: an error, or with --ignore-unknown told to warn (may be NULL).
 * help and version stop before the checks. */
int ps_train_options_parse(int argc, char **argv, struct ps_train_options *ret,
                           void (*unknown)(const char *flag), struct ps_error *err);

/* Epochs over which the rate rises; factor: ps_train_lr_factor's. The first steps are gentle where many cards
 * make the rate large (P. Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2). */
double ps_train_warmup(const struct ps_train_options *options, double factor);

/* The learning rate's factor. devices: cards on this node, 1 for CPUs. */
double ps_train_lr_factor(const struct ps_train_options *options, int devices, int world_size);

#endif
