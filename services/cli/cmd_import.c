/* SPDX-License-Identifier: Apache-2.0
 * paramsync import: a file of another program as a new run. */
#include "services/cli/cli.h"
#include "services/cli/import_file.h"

#include "services/base/text.h"

#include <stdio.h>

struct import_settings {
    struct cli_common common;
    const char *run, *format, *model, *dataset, *dataset_hash, *device, *commit;
    const char *train_loss, *val_loss, *accuracy;
    int64_t world_size;
    double timeout;
    bool percent;
};

#define IMPORT_TEXT(name_, field_, value_, help_)                                                            \
    {                                                                                                        \
        .name = (name_), .type = PS_TYPE_STRING, .offset = offsetof(struct import_settings, field_),         \
        .value = (value_), .help = (help_)                                                                   \
    }

static const struct ps_option rows[] = {
    {.name = "run",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct import_settings, run),
     .value = "NAME",
     .help = "name of the new run; when it is taken, NAME-2 and so on",
     .group = "Options"},
    {.name = "format",
     .type = PS_TYPE_CHOICE,
     .offset = offsetof(struct import_settings, format),
     .choices = "auto|tensorboard|csv|jsonl",
     .value = "FORMAT",
     .fallback = "auto",
     .help = "auto: by the file's name and first bytes"},
    {.name = "world-size",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct import_settings, world_size),
     .value = "N",
     .fallback = "1",
     .min = 1,
     .max = 100000,
     .help = "processes that trained together"},
    IMPORT_TEXT("model", model, "NAME", "model to record"),
    IMPORT_TEXT("dataset", dataset, "NAME", "data to record"),
    IMPORT_TEXT("dataset-hash", dataset_hash, "TEXT", "what tells these data from others"),
    IMPORT_TEXT("device", device, "NAME", "what it trained on"),
    IMPORT_TEXT("commit", commit, "ID", "commit to record"),
    {.name = "train-loss",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct import_settings, train_loss),
     .value = "NAME",
     .fallback = "train_loss",
     .help = "column, field or tag with an epoch's training loss",
     .group = "Names in the file"},
    {.name = "val-loss",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct import_settings, val_loss),
     .value = "NAME",
     .fallback = "val_loss",
     .help = "that with its test loss"},
    {.name = "accuracy",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct import_settings, accuracy),
     .value = "NAME",
     .fallback = "accuracy",
     .help = "that with its test accuracy, 0..1"},
    {.name = "percent",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct import_settings, percent),
     .help = "accuracies are 0..100"},
    {.name = "timeout",
     .type = PS_TYPE_DURATION,
     .offset = offsetof(struct import_settings, timeout),
     .value = "T",
     .fallback = "5min",
     .min = 0,
     .max = 86400,
     .help = "how long the sidecar may take",
     .group = "Sidecar"},
    CLI_CONNECTION_ROWS(struct import_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync import",
    .usage = "FILE --run NAME [--format FORMAT] [--accuracy NAME]",
    .example = "paramsync import events.out.tfevents.17000.host --run old --accuracy val/acc\n"
               "paramsync import history.csv --run old --model resnet18",
    .about =
        "Records a TensorBoard event file, a CSV table or JSON lines as a new, finished run. A row with an "
        "epoch (from "
        "1) and a figure of it is an epoch; other rows with a step are points of the series that they name. "
        "Of TensorBoard, tags named by the flags (or epoch/accuracy and so on, as paramsync export writes "
        "them) are epochs, their step is the epoch. The file is read whole and checked first: of a damaged "
        "one nothing is recorded.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

static void notice(void *context, const char *line)
{
    struct ps_buf text = PS_BUF_INIT(1 << 14);
    (void)context;
    cli_escape(&text, line);
    fprintf(stderr, "paramsync import: %s\n", text.data ? text.data : "");
    ps_buf_done(&text);
}

static int record(const struct import_settings *settings, const struct cli_import *import,
                  struct ps_error *err)
{
    struct paramsync_error outer = {0};
    struct paramsync_reporter *reporter;
    struct paramsync_client *client;
    int code = cli_connect(&settings->common, &client, err);
    if (code)
        return code;
    struct paramsync_runs *runs = NULL;
    code = paramsync_list_runs(client, NULL, 1, &runs, &outer); /* a reporter would wait for a sidecar */
    paramsync_runs_free(runs);
    paramsync_disconnect(client);
    if (code)
        return cli_error(err, &outer);
    struct paramsync_reporter_options options = {
        .connection = {.address = settings->common.sidecar,
                       .token_file = settings->common.token_file,
                       .tls_ca = settings->common.tls_ca,
                       .tls_cert = settings->common.tls_cert,
                       .tls_key = settings->common.tls_key},
        .run = {.name = settings->run,
                .world_size = (uint32_t)settings->world_size,
                .model = settings->model,
                .dataset = settings->dataset,
                .dataset_hash = settings->dataset_hash,
                .device = settings->device,
                .commit = settings->commit},
        .ring_points = import->point_count + 1,
        .notice = notice,
    };
    if (paramsync_reporter_open(&options, &reporter, &outer))
        return cli_error(err, &outer);
    for (size_t i = 0; i < import->point_count; i++) {
        const struct cli_import_point *p = &import->points[i];
        paramsync_reporter_point(reporter, p->name, p->step, p->value, p->elapsed_s);
    }
    for (size_t i = 0; i < import->epoch_count; i++)
        paramsync_reporter_epoch(reporter, &import->epochs[i]);
    char id[27], name[256] = "";
    uint32_t attempt;
    struct paramsync_reporter_stats stats = {0};
    paramsync_reporter_run(reporter, id, &attempt, name, sizeof name);
    if (paramsync_reporter_close(reporter, PARAMSYNC_RUN_FINISHED, "imported", settings->timeout, &stats,
                                 &outer))
        return cli_error(err, &outer);
    if (stats.points_dropped || stats.epochs_refused)
        return ps_fail(err, PS_DATA_LOSS, "%llu values and %llu epochs were not taken",
                       (unsigned long long)stats.points_dropped, (unsigned long long)stats.epochs_refused);
    struct ps_buf out = PS_BUF_INIT(1 << 14);
    cli_escape(&out, *name ? name : settings->run);
    ps_buf_printf(&out, ": %zu epochs, %zu values\n", import->epoch_count, import->point_count);
    code = cli_write(&out, err);
    ps_buf_done(&out);
    return code;
}

static int import_main(int argc, char **argv, struct ps_error *err)
{
    struct import_settings settings = {0};
    struct cli_import import = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 1, 1, &words, err);
    if (code)
        return code > 0 ? 0 : code;
    if (!settings.run)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--run NAME is missing");
    code = ps_check_run_name(settings.run, "--run", err);
    if (code)
        return code;
    const struct cli_import_names names = {settings.train_loss, settings.val_loss, settings.accuracy,
                                           settings.percent};
    code = cli_import_read(argv[1], settings.format, &names, &import, err);
    if (code) /* whatever is wrong with the file: bad input */
        return err->code = PS_INVALID_ARGUMENT;
    code = record(&settings, &import, err);
    cli_import_done(&import);
    return code;
}

int cli_import(int argc, char **argv)
{
    struct ps_error err = {0};
    return import_main(argc, argv, &err) ? cli_complain("import", &err) : 0;
}
