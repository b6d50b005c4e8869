/* SPDX-License-Identifier: Apache-2.0
 * Runs a model on a backend with tensors from files, for tests that compare with PyTorch.
 *
 *   parity_driver BACKEND fp32|fp64 THREADS < JOBS
 *
 * A job is a line of NAME=VALUE words; the answer to each is one line. Files hold raw little-endian float32
 * (labels: int32) in PyTorch's order, without any header. Words (files named _out are written, others read):
 *   net        resnet18:WIDTH:CLASSES (resnet34, resnet50 alike), conv:IN:OUT:KERNEL:STRIDE:PAD, bn:C,
 * bn_relu:C, bn_add_relu:C (relu(bn(x) + x)), relu:C, max_pool:C:KERNEL:STRIDE:PAD, avg_pool:C, dense:IN:OUT
 * list=1     only prints the state's entries, "kind name d0xd1..." separated by commas seed       initial
 * values from this seed instead of params batch, resolution, mode (train, frozen, eval), smoothing,
 * grad_scale params, buffers, images, labels, cotangent optimizer  sgd or adam with lr, momentum, nesterov,
 * weight_decay, beta1, beta2, eps: `steps` updates with the gradients of file step_grads [steps, params]
 * instead of a pass params_out, buffers_out, output_out, grads_out, input_grad_out
 */
#include "trainer/backend/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORDS = 40 };

struct job {
    char *words[MAX_WORDS];
    int count;
};

static const char *find(const struct job *j, const char *name)
{
    size_t n = strlen(name);
    for (int i = 0; i < j->count; i++)
        if (strncmp(j->words[i], name, n) == 0 && j->words[i][n] == '=')
            return j->words[i] + n + 1;
    return NULL;
}

static double number(const struct job *j, const char *name, double fallback)
{
    const char *text = find(j, name);
    return text ? strtod(text, NULL) : fallback;
}

/* Reads a whole file of `count` 4-byte elements into new memory. */
static void *load(const struct job *j, const char *name, size_t count, struct ps_error *err)
{
    const char *path = find(j, name);
    FILE *f = path ? fopen(path, "rbe") : NULL;
    if (!f) {
        ps_fail(err, PS_NOT_FOUND, "%s: no file %s", name, path ? path : "given");
        return NULL;
    }
    void *data = malloc(count * 4 + 1);
    if (data && (fread(data, 4, count, f) != count || fgetc(f) != EOF)) {
        ps_fail(err, PS_INVALID_ARGUMENT, "%s: %s does not hold %zu elements", name, path, count);
        free(data);
        data = NULL;
    }
    fclose(f);
    return data;
}

static int save(const struct job *j, const char *name, const float *data, size_t count, struct ps_error *err)
{
    const char *path = find(j, name);
    FILE *f = fopen(path, "wbe");
    if (!f)
        return ps_fail(err, PS_NOT_FOUND, "%s: cannot write %s", name, path);
    size_t written = fwrite(data, 4, count, f);
    return fclose(f) == 0 && written == count ? 0
                                              : ps_fail(err, PS_DATA_LOSS, "%s: cannot write %s", name, path);
}

static int make_model(const struct job *j, struct ps_model **ret, struct ps_error *err)
{
    const char *spec = find(j, "net");
    char kind[32];
    int a[5] = {0}, used = 0;
    if (!spec || sscanf(spec, "%31[a-z0-9_]%n", kind, &used) != 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "no net");
    for (int i = 0; i < 5 && spec[used] == ':'; i++) {
        char *end;
        a[i] = (int)strtol(spec + used + 1, &end, 10);
        used = (int)(end - spec);
    }
    if (strncmp(kind, "resnet", 6) == 0)
        return ps_model_create(kind, a[0], a[1], ret, err);
    struct ps_model *m = ps_model_new(kind, 1, 1, a[0]);
    int v = m ? PS_INVALID_ARGUMENT : PS_RESOURCE_EXHAUSTED;
    if (!m)
        return ps_fail(err, v, "cannot make net %s", spec);
    if (strcmp(kind, "conv") == 0)
        v = ps_model_conv(m, "c", m->input, a[1], a[2], a[3], a[4]);
    else if (strcmp(kind, "bn") == 0)
        v = ps_model_bn(m, "b", m->input);
    else if (strcmp(kind, "bn_relu") == 0)
        v = ps_model_relu(m, ps_model_bn(m, "b", m->input));
    else if (strcmp(kind, "bn_add_relu") == 0)
        v = ps_model_relu(m, ps_model_add(m, ps_model_bn(m, "b", m->input), m->input));
    else if (strcmp(kind, "relu") == 0)
        v = ps_model_relu(m, m->input);
    else if (strcmp(kind, "max_pool") == 0)
        v = ps_model_max_pool(m, m->input, a[1], a[2], a[3]);
    else if (strcmp(kind, "avg_pool") == 0)
        v = ps_model_avg_pool(m, m->input);
    else if (strcmp(kind, "dense") == 0)
        v = ps_model_dense(m, "d", m->input, a[1]);
    if (v < 0) {
        ps_model_free(m);
        return ps_fail(err, v, "cannot make net %s", spec);
    }
    *ret = m;
    return 0;
}

static int list(const struct ps_model *m)
{
    for (int i = 0; i < m->entry_count; i++) {
        const struct ps_entry *e = &m->entries[i];
        static const char *const kinds[] = {"param", "buffer", "counter"};
        printf("%s%s %s ", i ? "," : "", kinds[e->kind], e->name);
        if (e->kind == PS_ENTRY_PARAM)
            for (int k = 0; k < m->params[e->index].ndim; k++)
                printf("%s%d", k ? "x" : "", m->params[e->index].shape[k]);
        else if (e->kind == PS_ENTRY_BUFFER)
            printf("%zu", m->buffers[e->index].count);
    }
    printf("\n");
    return 0;
}

static int optimize(const struct job *j, const struct ps_backend_ops *ops, struct ps_backend *b,
                    const struct ps_model *m, struct ps_error *err)
{
    int steps = (int)number(j, "steps", 1);
    float *grads = load(j, "step_grads", (size_t)steps * m->param_elements, err);
    int r = grads ? 0 : err->code;
    for (int i = 0; r == 0 && i < steps; i++) {
        struct ps_optimizer_step s = {.kind = strcmp(find(j, "optimizer"), "adam") == 0 ? PS_ADAM : PS_SGD,
                                      .step = i + 1,
                                      .lr = number(j, "lr", 0.1),
                                      .weight_decay = number(j, "weight_decay", 0),
                                      .momentum = number(j, "momentum", 0),
                                      .nesterov = number(j, "nesterov", 0) != 0,
                                      .beta1 = number(j, "beta1", 0.9),
                                      .beta2 = number(j, "beta2", 0.999),
                                      .eps = number(j, "eps", 1e-8)};
        r = ops->write(b, PS_STATE_GRADS, 0, m->param_elements, grads + (size_t)i * m->param_elements, err);
        if (r == 0)
            r = ops->update(b, &s, err);
    }
    free(grads);
    return r;
}

static int pass(const struct job *j, const struct ps_backend_ops *ops, struct ps_backend *b,
                const struct ps_model *m, const int *extents, int batch, int resolution, struct ps_error *err)
{
    const char *mode_name = find(j, "mode");
    enum ps_mode mode = mode_name && strcmp(mode_name, "eval") == 0     ? PS_EVAL
                        : mode_name && strcmp(mode_name, "frozen") == 0 ? PS_TRAIN_FROZEN_BN
                                                                        : PS_TRAIN;
    size_t n = (size_t)batch,
           in = n * (size_t)m->values[m->input].channels * (size_t)(resolution * resolution);
    size_t out =
        n * (size_t)m->values[m->output].channels * (size_t)(extents[m->output] * extents[m->output]);
    float *images = load(j, "images", in, err), *cotangent = NULL,
          *scratch = calloc(in > out ? in : out, sizeof *scratch);
    int32_t *labels = NULL;
    int r = images && scratch ? 0 : err->code ? err->code : PS_RESOURCE_EXHAUSTED;
    if (r == 0 && find(j, "labels") && !(labels = load(j, "labels", n, err)))
        r = err->code;
    if (r == 0 && find(j, "cotangent") && !(cotangent = load(j, "cotangent", out, err)))
        r = err->code;
    struct ps_batch data = {.pixel = PS_PIXEL_F32,
                            .images = images,
                            .labels = labels,
                            .count = batch,
                            .resolution = resolution,
                            .scale = {1, 1, 1}};
    const struct ps_loss_config loss = {(float)number(j, "smoothing", 0),
                                        (float)number(j, "grad_scale", 1.0 / batch)};
    if (r == 0)
        r = ops->forward(b, &data, mode, &loss, err);
    if (r == 0 && mode != PS_EVAL)
        r = ops->backward(b, false, cotangent, NULL, NULL, err);
    if (r == 0 && find(j, "output_out")) {
        r = ops->read_value(b, m->output, false, scratch, err);
        r = r < 0 ? r : save(j, "output_out", scratch, out, err);
    }
    if (r == 0 && find(j, "input_grad_out")) {
        r = ops->read_value(b, m->input, true, scratch, err);
        r = r < 0 ? r : save(j, "input_grad_out", scratch, in, err);
    }
    free(images);
    free(cotangent);
    free(labels);
    free(scratch);
    return r;
}

static int save_state(const struct job *j, const char *name, const struct ps_backend_ops *ops,
                      struct ps_backend *b, enum ps_state_kind what, size_t count, struct ps_error *err)
{
    if (!find(j, name))
        return 0;
    float *data = calloc(count + 1, sizeof *data);
    int r = data ? ops->read(b, what, 0, count, data, err) : PS_RESOURCE_EXHAUSTED;
    r = r < 0 ? r : save(j, name, data, count, err);
    free(data);
    return r;
}

static int run(const struct job *j, const struct ps_backend_ops *ops, enum ps_precision precision,
               int threads, struct ps_error *err)
{
    struct ps_model *m = NULL;
    struct ps_backend *b = NULL;
    int r = make_model(j, &m, err);
    if (r < 0)
        return r;
    if (find(j, "list")) {
        list(m);
        ps_model_free(m);
        return 0;
    }
    int batch = (int)number(j, "batch", 1), resolution = (int)number(j, "resolution", 1);
    int *extents = calloc((size_t)m->value_count, sizeof *extents);
    float *params = calloc(m->param_elements + 1, sizeof *params);
    float *buffers = calloc(m->buffer_elements + 1, sizeof *buffers);
    struct ps_backend_config config = {.model = m,
                                       .precision = precision,
                                       .threads = threads,
                                       .max_batch = batch,
                                       .max_eval_batch = batch,
                                       .max_resolution = resolution,
                                       .training = true};
    r = extents && params && buffers ? ps_model_extents(m, resolution, extents, err) : PS_RESOURCE_EXHAUSTED;
    if (r == 0)
        ps_model_init(m, (uint64_t)number(j, "seed", 0), params, buffers);
    if (r == 0 && m->param_elements && !find(j, "seed")) {
        free(params);
        params = load(j, "params", m->param_elements, err);
        r = params ? 0 : err->code;
    }
    if (r == 0 && m->buffer_elements && find(j, "buffers")) {
        free(buffers);
        buffers = load(j, "buffers", m->buffer_elements, err);
        r = buffers ? 0 : err->code;
    }
    if (r == 0)
        r = ops->create(&config, &b, err);
    if (r == 0)
        r = ops->write(b, PS_STATE_PARAMS, 0, m->param_elements, params, err);
    if (r == 0)
        r = ops->write(b, PS_STATE_BUFFERS, 0, m->buffer_elements, buffers, err);
    if (r == 0 && find(j, "optimizer"))
        r = optimize(j, ops, b, m, err);
    else if (r == 0 && find(j, "images"))
        r = pass(j, ops, b, m, extents, batch, resolution, err);
    struct ps_metrics metrics = {0};
    if (r == 0)
        r = ops->metrics(b, &metrics, err);
    if (r == 0)
        r = save_state(j, "params_out", ops, b, PS_STATE_PARAMS, m->param_elements, err);
    if (r == 0)
        r = save_state(j, "buffers_out", ops, b, PS_STATE_BUFFERS, m->buffer_elements, err);
    if (r == 0)
        r = save_state(j, "grads_out", ops, b, PS_STATE_GRADS, m->param_elements, err);
    if (r == 0)
        printf("ok loss=%.17g correct=%lld count=%lld\n", metrics.loss_sum, (long long)metrics.correct,
               (long long)metrics.count);
    if (b)
        ops->destroy(b);
    free(extents);
    free(params);
    free(buffers);
    ps_model_free(m);
    return r;
}

int main(int argc, char **argv)
{
    struct ps_error err = {0};
    const struct ps_backend_ops *ops;
    if (argc != 4) {
        fprintf(stderr, "usage: parity_driver BACKEND fp32|fp64 THREADS < JOBS\n");
        return 2;
    }
    setenv("PARAMSYNC_INPUT_GRAD", "1", 1);
    if (ps_backend_load(argv[1], &ops, &err) < 0) {
        fprintf(stderr, "parity_driver: %s\n", err.message);
        return 77;
    }
    enum ps_precision precision = strcmp(argv[2], "fp64") == 0   ? PS_FP64
                                  : strcmp(argv[2], "bf16") == 0 ? PS_BF16
                                                                 : PS_FP32;
    char *line = NULL;
    size_t size = 0;
    int failures = 0;
    while (getline(&line, &size, stdin) > 0) {
        struct job j = {.count = 0};
        char *save_pointer = NULL;
        for (char *w = strtok_r(line, " \n", &save_pointer); w && j.count < MAX_WORDS;
             w = strtok_r(NULL, " \n", &save_pointer))
            j.words[j.count++] = w;
        if (j.count == 0)
            continue;
        err = (struct ps_error){0};
        if (run(&j, ops, precision, (int)strtol(argv[3], NULL, 10), &err) < 0) {
            printf("error %s\n", err.message);
            failures++;
        }
        fflush(stdout);
    }
    free(line);
    return failures ? 1 : 0;
}
