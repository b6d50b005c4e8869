/* SPDX-License-Identifier: Apache-2.0
 * Training and evaluation speed of a backend on random images: one line of JSON a measurement, medians over
 * steps. bench_backend [--backend cpu] [--threads 2] [--batch 128] [--resolution 32] [--width 64] [--steps 5]
 * [--eval] [--profile]: a table of parts on standard error. */
#include "services/base/clock.h"
#include "trainer/backend/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int fail(const struct ps_error *err)
{
    fprintf(stderr, "bench_backend: %s\n", err->message);
    return err->code == PS_UNAVAILABLE ? 77 : 1;
}

/* Of this program alone: what wait4 tells includes the parent's from before exec. */
static long peak_mib(void)
{
    char line[256];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "VmHWM:", 6) == 0)
            kib = strtol(line + 6, NULL, 10);
    if (f)
        fclose(f);
    return kib / 1024;
}

enum { MAX_ROWS = 512 };

static void print_profile(const struct ps_backend_ops *ops, struct ps_backend *b, int steps, double all)
{
    static struct ps_profile_row rows[MAX_ROWS];
    int count = ops->profile(b, rows, MAX_ROWS);
    double sum = 0, convolutions = 0;
    for (int i = 0; i < count; i++) {
        double s = rows[i].forward_s + rows[i].backward_s;
        sum += s;
        convolutions += strncmp(rows[i].name, "conv ", 5) == 0 ? s : 0;
        fprintf(stderr, "%-32s %9.2f ms %9.2f ms  %5.1f %%  %s\n", rows[i].name,
                1e3 * rows[i].forward_s / steps, 1e3 * rows[i].backward_s / steps, 100 * s / all,
                rows[i].detail);
    }
    fprintf(stderr, "%-32s %9.2f ms              %5.1f %%\n", "convolutions", 1e3 * convolutions / steps,
            100 * convolutions / all);
    fprintf(stderr, "%-32s %9.2f ms              %5.1f %%\n", "step, and what of it is named",
            1e3 * all / steps, 100 * sum / all);
}

int main(int argc, char **argv)
{
    const char *name = "cpu";
    int threads = 2, batch = 128, resolution = 32, width = 64, steps = 5, evaluate = 0, profile = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        int *place = strcmp(argv[i], "--threads") == 0      ? &threads
                     : strcmp(argv[i], "--batch") == 0      ? &batch
                     : strcmp(argv[i], "--resolution") == 0 ? &resolution
                     : strcmp(argv[i], "--width") == 0      ? &width
                     : strcmp(argv[i], "--steps") == 0      ? &steps
                                                            : NULL;
        if (place) {
            *place = (int)strtol(value, NULL, 10);
            i++;
        } else if (strcmp(argv[i], "--backend") == 0) {
            name = value;
            i++;
        } else if (strcmp(argv[i], "--eval") == 0) {
            evaluate = 1;
        } else if (strcmp(argv[i], "--profile") == 0) {
            profile = 1;
        } else {
            fprintf(stderr, "bench_backend: unknown flag %s\n", argv[i]);
            return 2;
        }
    }
    if (threads < 1 || batch < 1 || steps < 1) {
        fprintf(stderr, "bench_backend: threads, batch and steps must be at least 1\n");
        return 2;
    }
    struct ps_error err = {0};
    const struct ps_backend_ops *ops;
    struct ps_model *m;
    struct ps_backend *b;
    if (ps_backend_load(name, &ops, &err) < 0 || ps_model_create("resnet18", width, 10, &m, &err) < 0)
        return fail(&err);
    struct ps_backend_config config = {.model = m,
                                       .precision = PS_FP32,
                                       .threads = threads,
                                       .max_batch = batch,
                                       .max_eval_batch = evaluate ? batch : 0,
                                       .max_resolution = resolution,
                                       .training = true};
    if (ops->create(&config, &b, &err) < 0)
        return fail(&err);
    size_t elements = (size_t)batch * 3 * (size_t)resolution * (size_t)resolution;
    float *params = calloc(m->param_elements, sizeof *params),
          *buffers = calloc(m->buffer_elements, sizeof *buffers);
    uint8_t *images = malloc(elements);
    int32_t *labels = calloc((size_t)batch, sizeof *labels);
    double *seconds = calloc((size_t)steps * 4, sizeof *seconds);
    if (!params || !buffers || !images || !labels || !seconds)
        exit(1);
    ps_model_init(m, 1, params, buffers);
    srand(1);
    for (size_t i = 0; i < elements; i++)
        images[i] = (uint8_t)rand();
    for (int i = 0; i < batch; i++)
        labels[i] = rand() % 10;
    if (ops->write(b, PS_STATE_PARAMS, 0, m->param_elements, params, &err) < 0 ||
        ops->write(b, PS_STATE_BUFFERS, 0, m->buffer_elements, buffers, &err) < 0)
        return fail(&err);
    struct ps_batch data = {.pixel = PS_PIXEL_U8,
                            .images = images,
                            .labels = labels,
                            .count = batch,
                            .resolution = resolution,
                            .scale = {1 / 64.0f, 1 / 64.0f, 1 / 64.0f},
                            .shift = {-2, -2, -2}};
    const struct ps_loss_config loss = {0, 1.0f / (float)batch};
    for (int i = -1; i < steps; i++) { /* the first is not counted */
        struct ps_optimizer_step step = {.kind = PS_SGD,
                                         .step = i + 2,
                                         .lr = 0.01,
                                         .weight_decay = 5e-4,
                                         .momentum = 0.9,
                                         .nesterov = true};
        double t[4];
        if (i == 0 && profile && ops->profile)
            (void)ops->profile(b, NULL, 0); /* starts the clock */
        t[0] = ps_monotonic_s();
        if (ops->forward(b, &data, evaluate ? PS_EVAL : PS_TRAIN, &loss, &err) < 0)
            return fail(&err);
        t[1] = ps_monotonic_s();
        if (!evaluate && ops->backward(b, false, NULL, NULL, NULL, &err) < 0)
            return fail(&err);
        t[2] = ps_monotonic_s();
        if (!evaluate && ops->update(b, &step, &err) < 0)
            return fail(&err);
        struct ps_metrics metrics;
        if (ops->metrics(b, &metrics, &err) < 0)
            return fail(&err);
        t[3] = ps_monotonic_s();
        for (int k = 0; k < 3 && i >= 0; k++)
            seconds[k * steps + i] = t[k + 1] - t[k];
        if (i >= 0)
            seconds[3 * steps + i] = t[3] - t[0];
    }
    for (int k = 0; k < 4; k++)
        qsort(seconds + k * steps, (size_t)steps, sizeof *seconds, by_value);
    double all = 0;
    for (int i = 0; i < steps; i++)
        all += seconds[3 * steps + i];
    if (profile && ops->profile)
        print_profile(ops, b, steps, all);
    size_t activations, state, workspace;
    ops->memory(b, &activations, &state, &workspace);
    printf("{\"backend\": \"%s\", \"mode\": \"%s\", \"threads\": %d, \"batch\": %d, \"resolution\": %d, "
           "\"width\": %d, "
           "\"img_per_s\": %.2f, \"forward_s\": %.4f, \"backward_s\": %.4f, \"update_s\": %.4f, "
           "\"activations_mib\": %zu, "
           "\"params_mib\": %zu, \"workspace_mib\": %zu, \"peak_mib\": %ld}\n",
           name, evaluate ? "eval" : "train", threads, batch, resolution, width,
           batch / seconds[3 * steps + steps / 2], seconds[steps / 2], seconds[steps + steps / 2],
           seconds[2 * steps + steps / 2], activations >> 20, state >> 20, workspace >> 20, peak_mib());
    ops->destroy(b);
    ps_model_free(m);
    free(params);
    free(buffers);
    free(images);
    free(labels);
    free(seconds);
    return 0;
}
