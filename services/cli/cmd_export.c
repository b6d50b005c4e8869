/* SPDX-License-Identifier: Apache-2.0
 * paramsync export. */
#include "services/cli/cli.h"

#include "services/base/fs.h"
#include "services/cli/export_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct export_settings {
    struct cli_common common;
    const char *format, *output, *series, *store;
    int64_t max_points, epoch;
    bool check, best;
};

static const struct ps_option rows[] = {
    {.name = "format",
     .type = PS_TYPE_CHOICE,
     .offset = offsetof(struct export_settings, format),
     .choices = "json|csv|tensorboard|pth|onnx",
     .value = "FORMAT",
     .fallback = "json",
     .help =
         "json: the run, its epochs and the chosen series; csv: one table; tensorboard: an event file with "
         "everything in the folder -o; pth, onnx: a checkpoint for PyTorch, or as a network that ONNX "
         "runtimes execute",
     .group = "Options"},
    {.name = "series",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct export_settings, series),
     .value = "NAME",
     .help = "a step series of every rank too (csv: instead of the epochs)"},
    {.name = "max-points",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct export_settings, max_points),
     .value = "N",
     .fallback = "10000",
     .min = 1,
     .max = 10000,
     .help = "most points of a series; first, last, minimum and maximum stay"},
    {.name = "best",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct export_settings, best),
     .help = "pth, onnx: the checkpoint with the highest accuracy, not the latest"},
    {.name = "epoch",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct export_settings, epoch),
     .value = "N",
     .min = 1,
     .max = 1e9,
     .help = "pth, onnx: that of this epoch"},
    {.name = "output",
     .short_name = "o",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct export_settings, output),
     .value = "FILE",
     .help = "write there instead of standard output"},
    {.name = "store",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct export_settings, store),
     .value = "DIR",
     .help =
         "instead of a run: copy the whole store of this data directory, in use or not, to the new folder -o",
     .group = "Whole stores"},
    {.name = "check",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct export_settings, check),
     .help = "look at everything in the copy (without -o: in the store itself): pages, points, digests"},
    CLI_JSON_ROW(struct export_settings, "of a store: print what was done as JSON"),
    CLI_CONNECTION_ROWS(struct export_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync export",
    .usage = "RUN|FILE.safetensors [--format FORMAT] [--series NAME] [-o FILE]  |  --store DIR -o DIR",
    .example = "paramsync export release-1 -o baselines/release-1.json\n"
               "paramsync export nightly --format tensorboard -o logs/nightly\n"
               "paramsync export nightly --best --format onnx -o nightly.onnx\n"
               "paramsync export --store /var/lib/paramsync -o backup-1 --check",
    .about =
        "Writes a run's epochs (and a series) as JSON or CSV, all of it for TensorBoard, or a checkpoint's "
        "weights for other programs (ONNX: input images [batch, 3, height, width], prepared as in training; "
        "output logits). The JSON is what `paramsync gate "
        "--baseline FILE` "
        "reads: a baseline that can be kept in version control. NaN and infinities are strings in JSON.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

/* A field that a spreadsheet must not take for a formula, quoted as RFC 4180 has it. */
static void csv_text(struct ps_buf *out, const char *text)
{
    ps_buf_puts(out, "\"");
    if (*text && strchr("=+-@\t\r", *text))
        ps_buf_puts(out, "'");
    for (; *text; text++) {
        if (*text == '"')
            ps_buf_puts(out, "\"");
        ps_buf_append(out, text, 1);
    }
    ps_buf_puts(out, "\"");
}

static void csv_epochs(const struct paramsync_run *run, const struct paramsync_metrics *m, struct ps_buf *out)
{
    char started[40];
    cli_format_time(run->created_ns, started, sizeof started);
    ps_buf_puts(
        out, "run,started,attempt,epoch,step,elapsed_s,train_s,eval_s,lr,samples_per_s,train_loss,val_loss,"
             "accuracy,correct,counted\r\n");
    for (size_t i = 0; i < m->epoch_count; i++) {
        const struct paramsync_epoch *e = &m->epochs[i];
        csv_text(out, run->name);
        ps_buf_printf(out, ",%s,%u,%u,%" PRIu64 ",%.17g,%.17g,%.17g,%.17g,%.17g,%.17g", started, e->attempt,
                      e->epoch, e->step, e->elapsed_s, e->train_s, e->eval_s, e->lr, e->samples_per_s,
                      e->train_loss);
        if (e->no_eval)
            ps_buf_puts(out, ",,,,\r\n");
        else
            ps_buf_printf(out, ",%.17g,%.17g,%u,%u\r\n", e->val_loss, e->accuracy, e->correct, e->counted);
    }
}

static void csv_series(const struct paramsync_run *run, const struct paramsync_metrics *m, struct ps_buf *out)
{
    ps_buf_puts(out, "run,series,rank,attempt,step,elapsed_s,value\r\n");
    for (size_t i = 0; i < m->series_count; i++) {
        const struct paramsync_series *s = &m->series[i];
        for (size_t k = 0; k < s->count; k++) {
            csv_text(out, run->name);
            ps_buf_printf(out, ",%s,%u,%u,%" PRIu64 ",%.17g,%.17g\r\n", s->name, s->rank, s->attempts[k],
                          s->steps[k], s->elapsed_s[k], s->values[k]);
        }
    }
}

static int write_out(const struct export_settings *settings, const struct paramsync_run *run,
                     const struct paramsync_metrics *m, struct ps_error *err)
{
    struct ps_buf out = PS_BUF_INIT((size_t)1 << 30);
    if (strcmp(settings->format, "csv") == 0) {
        if (settings->series)
            csv_series(run, m, &out);
        else
            csv_epochs(run, m, &out);
    } else {
        json_t *o = cli_export_json(run, m);
        char *text = o ? json_dumps(o, JSON_INDENT(1)) : NULL;
        json_decref(o);
        if (!text)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        ps_buf_puts(&out, text);
        ps_buf_puts(&out, "\n");
        free(text);
    }
    int code = out.failed         ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "too large, or out of memory")
               : settings->output ? ps_write_file_atomic(settings->output, out.data, out.size, err)
                                  : cli_write(&out, err);
    ps_buf_done(&out);
    return code;
}

static int export_main(int argc, char **argv, struct ps_error *err)
{
    struct export_settings settings = {0};
    struct paramsync_client *client = NULL;
    struct paramsync_run *run = NULL;
    struct paramsync_metrics *metrics = NULL;
    struct paramsync_error outer = {0};
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 0, 1, &words, err);
    if (code)
        return code > 0 ? 0 : code;
    if (settings.store && words)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--store copies the whole store: name no run");
    if (settings.store)
        return cli_store_export(settings.store, settings.output, settings.check, settings.common.json, err);
    if (!words)
        return ps_fail(err, PS_INVALID_ARGUMENT, "name a run, or --store DIR");
    if (settings.check)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--check goes with --store");
    const bool weights = strcmp(settings.format, "pth") == 0 || strcmp(settings.format, "onnx") == 0;
    const bool events = strcmp(settings.format, "tensorboard") == 0;
    if ((weights || events) && !settings.output)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--format %s needs -o %s", settings.format,
                       weights ? "FILE" : "FOLDER");
    if (!weights && (settings.best || settings.epoch))
        return ps_fail(err, PS_INVALID_ARGUMENT, "--best and --epoch go with --format pth or onnx");
    if (settings.best && settings.epoch)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--best or --epoch: only one of them");
    if (weights && cli_is_weights_file(argv[1]))
        return cli_export_weights_file(argv[1], settings.format, settings.output, err);
    code = cli_connect(&settings.common, &client, err);
    if (!code && weights) {
        struct paramsync_selector selector = {.best = settings.best, .epoch = (uint32_t)settings.epoch};
        code = cli_export_checkpoint(client, argv[1], &selector, settings.format, settings.output, err);
        paramsync_disconnect(client);
        return code;
    }
    if (!code && (paramsync_get_run(client, argv[1], &run, &outer) ||
                  paramsync_query(client, run->id, settings.series, -1, (uint32_t)settings.max_points,
                                  &metrics, &outer)))
        code = cli_error(err, &outer);
    if (!code && run && metrics)
        code = events ? cli_export_events(client, run, metrics, (uint32_t)settings.max_points,
                                          settings.output, err)
                      : write_out(&settings, run, metrics, err);
    paramsync_metrics_free(metrics);
    paramsync_run_free(run);
    paramsync_disconnect(client);
    return code;
}

int cli_export(int argc, char **argv)
{
    struct ps_error err = {0};
    return export_main(argc, argv, &err) ? cli_complain("export", &err) : 0;
}
