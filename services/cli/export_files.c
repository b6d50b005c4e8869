/* SPDX-License-Identifier: Apache-2.0
 * paramsync export in other programs' formats: TensorBoard's event files, PyTorch's .pth, ONNX. */
#include "services/cli/export_files.h"

#include "services/base/fs.h"
#include "services/cli/events.h"
#include "services/cli/onnx.h"
#include "trainer/checkpoint/pth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put_epochs(const struct paramsync_run *run, const struct paramsync_metrics *m, struct ps_buf *out)
{
    double start = (double)run->created_ns / 1e9;
    for (size_t i = 0; i < m->epoch_count; i++) {
        const struct paramsync_epoch *e = &m->epochs[i];
        double wall = start + e->elapsed_s;
        cli_events_scalar(out, wall, e->epoch, "epoch/train_loss", e->train_loss);
        cli_events_scalar(out, wall, e->epoch, "epoch/lr", e->lr);
        cli_events_scalar(out, wall, e->epoch, "epoch/samples_per_s", e->samples_per_s);
        if (e->no_eval)
            continue;
        cli_events_scalar(out, wall, e->epoch, "epoch/val_loss", e->val_loss);
        cli_events_scalar(out, wall, e->epoch, "epoch/accuracy", e->accuracy);
    }
}

static void put_series(const struct paramsync_run *run, const struct paramsync_metrics *m, struct ps_buf *out)
{
    double start = (double)run->created_ns / 1e9;
    for (size_t i = 0; i < m->series_count; i++) {
        const struct paramsync_series *s = &m->series[i];
        char tag[200];
        if (s->rank)
            snprintf(tag, sizeof tag, "%.150s/rank%u", s->name, s->rank);
        else
            snprintf(tag, sizeof tag, "%.150s", s->name);
        for (size_t k = 0; k < s->count; k++)
            cli_events_scalar(out, start + s->elapsed_s[k], s->steps[k], tag, s->values[k]);
    }
}

int cli_export_events(struct paramsync_client *client, const struct paramsync_run *run,
                      const struct paramsync_metrics *metrics, uint32_t max_points, const char *dir,
                      struct ps_error *err)
{
    struct ps_buf out = PS_BUF_INIT((size_t)1 << 30);
    struct paramsync_error outer = {0};
    char *path = NULL;
    int code = 0;
    cli_events_begin(&out, (double)run->created_ns / 1e9);
    put_epochs(run, metrics, &out);
    for (size_t i = 0; i < metrics->name_count && !code; i++) {
        struct paramsync_metrics *m = NULL;
        if (paramsync_query(client, run->id, metrics->names[i], -1, max_points, &m, &outer))
            code = cli_error(err, &outer);
        else
            put_series(run, m, &out);
        paramsync_metrics_free(m);
    }
    if (!code && out.failed)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "too large, or out of memory");
    if (!code)
        code = ps_make_dirs(dir, 0777, err);
    if (!code && asprintf(&path, "%s/events.out.tfevents.%lld.%s", dir,
                          (long long)(run->created_ns / 1000000000), run->id) < 0) {
        path = NULL;
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    if (!code)
        code = ps_write_file_atomic(path, out.data, out.size, err);
    free(path);
    ps_buf_done(&out);
    return code;
}

static int convert(const char *file, const char *name, const char *format, const char *about,
                   const char *output, struct ps_error *err)
{
    struct ps_safetensors *weights = NULL;
    int code = ps_safetensors_read(file, &weights, err);
    if (code)
        return code;
    if (strcmp(format, "pth") == 0) {
        code = ps_pth_write(output, weights->tensors, weights->count, err);
    } else {
        struct ps_buf out = PS_BUF_INIT((size_t)1 << 30);
        code = cli_onnx_write(weights, name, about, &out, err);
        if (!code)
            code = ps_write_file_atomic(output, out.data, out.size, err);
        ps_buf_done(&out);
    }
    ps_safetensors_free(weights);
    return code;
}

bool cli_is_weights_file(const char *word)
{
    size_t n = strlen(word);
    return n > 12 && strcmp(word + n - 12, ".safetensors") == 0;
}

int cli_export_weights_file(const char *file, const char *format, const char *output, struct ps_error *err)
{
    const char *slash = strrchr(file, '/');
    char about[256];
    snprintf(about, sizeof about, "%.200s", slash ? slash + 1 : file);
    return convert(file, file, format, about, output, err);
}

int cli_export_checkpoint(struct paramsync_client *client, const char *run,
                          const struct paramsync_selector *selector, const char *format, const char *output,
                          struct ps_error *err)
{
    struct paramsync_error outer = {0};
    struct paramsync_checkpoint *checkpoint = NULL;
    struct paramsync_selector want = *selector;
    char *temporary = NULL;
    char about[512];
    if (asprintf(&temporary, "%s.safetensors.%ld.tmp", output, (long)getpid()) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    want.format = "safetensors";
    int code = paramsync_pull(client, run, &want, temporary, NULL, NULL, &checkpoint, &outer);
    if (code) {
        code = cli_error(err, &outer);
    } else {
        snprintf(about, sizeof about, "%.200s, epoch %u, sha256 of the weights' file %.64s",
                 checkpoint->run_name, checkpoint->epoch, checkpoint->sha256);
        code = convert(temporary, checkpoint->filename, format, about, output, err);
    }
    paramsync_checkpoint_free(checkpoint);
    unlink(temporary);
    free(temporary);
    if (asprintf(&temporary, "%s.safetensors.%ld.tmp.part", output, (long)getpid()) >= 0) {
        unlink(temporary); /* of a pull that broke off */
        free(temporary);
    }
    return code;
}
