/* SPDX-License-Identifier: Apache-2.0
 * The ceiling: oneDNN's convolutions of a model alone, each forward, backward data and backward weights in
 * blocked layouts that nothing has to convert. One line of JSON, the median over steps of the sum over
 * layers. bench_conv [--model resnet18] [--threads 2] [--batch 128] [--resolution 32] [--width 64] [--steps
 * 5] [--layers]: with --layers each layer's rate on standard error. */
#include "services/base/clock.h"
#include "trainer/backend/cpu/dnnl_api.h"
#include "trainer/model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { MAX_CONVS = 128, MAX_STEPS = 100, DIRECTIONS = 3 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int fail(const struct ps_error *err)
{
    fprintf(stderr, "bench_conv: %s\n", err->message);
    return 1;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

int main(int argc, char **argv)
{
    const char *name = "resnet18";
    int threads = 2, batch = 128, resolution = 32, width = 64, steps = 5, layers = 0;
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
        } else if (strcmp(argv[i], "--model") == 0) {
            name = value;
            i++;
        } else if (strcmp(argv[i], "--layers") == 0) {
            layers = 1;
        } else {
            fprintf(stderr, "bench_conv: unknown flag %s\n", argv[i]);
            return 2;
        }
    }
    if (threads < 1 || batch < 1 || steps < 1 || steps > MAX_STEPS) {
        fprintf(stderr, "bench_conv: threads and batch must be at least 1, steps 1 to %d\n", MAX_STEPS);
        return 2;
    }
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
    struct ps_error err = {0};
    struct ps_model *m;
    struct ps_dnnl dnnl;
    if (ps_model_create(name, width, 10, &m, &err) < 0 || ps_dnnl_open(&dnnl, &err) < 0)
        return fail(&err);
    int *extents = calloc((size_t)m->value_count, sizeof *extents);
    if (!extents || ps_model_extents(m, resolution, extents, &err) < 0)
        return fail(&err);
    int block = ps_dnnl_preferred_block(&dnnl), count = 0;
    static struct ps_dnnl_call calls[MAX_CONVS][DIRECTIONS];
    static struct ps_dnnl_conv shapes[MAX_CONVS];
    size_t source_bytes = 0, weight_bytes = 0, destination_bytes = 0, scratchpad_bytes = 64;
    for (int i = 0; i < m->op_count && count < MAX_CONVS; i++) {
        const struct ps_op *op = &m->ops[i];
        if (op->kind != PS_OP_CONV)
            continue;
        bool first = op->in[0] == m->input;
        const struct ps_dnnl_conv shape = {.batch = batch,
                                           .in = m->values[op->in[0]].channels,
                                           .in_extent = extents[op->in[0]],
                                           .out = m->values[op->out].channels,
                                           .out_extent = extents[op->out],
                                           .kernel = op->kernel,
                                           .stride = op->stride,
                                           .pad = op->pad};
        struct ps_dnnl_layout x = ps_dnnl_activations(batch, shape.in, shape.in_extent, first ? 1 : block),
                              y = ps_dnnl_activations(batch, shape.out, shape.out_extent, block),
                              any = ps_dnnl_any_weights(shape.out, shape.in, shape.kernel);
        for (int d = 0; d < DIRECTIONS; d++) {
            if (first && d == PS_DNNL_BACKWARD_DATA)
                continue;
            struct ps_dnnl_call *c = &calls[count][d];
            if (ps_dnnl_conv_create(&dnnl, (enum ps_dnnl_direction)d, &shape, &x, &any, &y, c, &err) < 0)
                return fail(&err);
            source_bytes = larger(source_bytes, ps_dnnl_bytes(&c->layout[0]));
            weight_bytes = larger(weight_bytes, ps_dnnl_bytes(&c->layout[1]));
            destination_bytes = larger(destination_bytes, ps_dnnl_bytes(&c->layout[2]));
            scratchpad_bytes = larger(scratchpad_bytes, c->scratchpad);
        }
        shapes[count++] = shape;
    }
    void *source = calloc(1, source_bytes), *weights = calloc(1, weight_bytes),
         *destination = calloc(1, destination_bytes), *scratchpad = calloc(1, scratchpad_bytes);
    if (!source || !weights || !destination || !scratchpad)
        return 1;
    for (int i = 0; i < count; i++)
        for (int d = 0; d < DIRECTIONS; d++)
            if (calls[i][d].primitive &&
                ps_dnnl_bind(&dnnl, &calls[i][d], source, weights, destination, scratchpad, &err) < 0)
                return fail(&err);
    static double totals[MAX_STEPS], spent[MAX_CONVS][DIRECTIONS];
    for (int s = -1; s < steps; s++) { /* the first is not counted */
        double begin = ps_monotonic_s();
        for (int i = 0; i < count; i++)
            for (int d = 0; d < DIRECTIONS; d++) {
                double since = ps_monotonic_s();
                if (calls[i][d].primitive && ps_dnnl_run(&dnnl, &calls[i][d], &err) < 0)
                    return fail(&err);
                if (s >= 0)
                    spent[i][d] += ps_monotonic_s() - since;
            }
        if (s >= 0)
            totals[s] = ps_monotonic_s() - begin;
    }
    for (int i = 0; layers && i < count; i++) {
        const struct ps_dnnl_conv *c = &shapes[i];
        double flops = 2.0 * batch * c->in * c->out * c->kernel * c->kernel * c->out_extent * c->out_extent;
        fprintf(stderr, "%4d>%-4d %dx%d/%d at %2d:", c->in, c->out, c->kernel, c->kernel, c->stride,
                c->in_extent);
        for (int d = 0; d < DIRECTIONS; d++)
            if (calls[i][d].primitive)
                fprintf(stderr, "  %7.2f ms %5.1f GFLOP/s (%s)", 1e3 * spent[i][d] / steps,
                        flops * steps / spent[i][d] / 1e9, ps_dnnl_call_name(&calls[i][d]));
        fprintf(stderr, "\n");
    }
    qsort(totals, (size_t)steps, sizeof *totals, by_value);
    printf("{\"model\": \"%s\", \"threads\": %d, \"batch\": %d, \"resolution\": %d, \"block\": %d, "
           "\"step_s\": %.4f, "
           "\"img_per_s\": %.2f}\n",
           name, threads, batch, resolution, block, totals[steps / 2], batch / totals[steps / 2]);
    for (int i = 0; i < count; i++)
        for (int d = 0; d < DIRECTIONS; d++)
            ps_dnnl_call_done(&calls[i][d]);
    ps_dnnl_close(&dnnl);
    ps_model_free(m);
    free(extents);
    free(source);
    free(weights);
    free(destination);
    free(scratchpad);
    return 0;
}
