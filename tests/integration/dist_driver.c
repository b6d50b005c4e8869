/* SPDX-License-Identifier: Apache-2.0
 * One rank, for dist_test.py: dist_driver MODE [--init_method M] [--rank N --world_size W] [--heartbeat S]
 * [--collective S] [--width N] [--interface I] [--join S] [--uneven 1] [--micro K] [--dump FILE]. Prints what
 * the script waits for; every failure is one line "FAILED: reason" on stderr and exit status 1. */
#include "services/base/clock.h"
#include "services/base/launch.h"
#include "trainer/backend/backend.h"
#include "trainer/dist/gloo.h"
#include "trainer/dist/reducer.h"
#include "trainer/dist/rendezvous.h"
#include "trainer/dist/start.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct run {
    struct ps_launch launch;
    struct ps_rendezvous *rendezvous;
    struct ps_comm *comm;
    int width;
    int bytes;
    int uneven, micro;
    const char *dump;
};

static void say(const char *text)
{
    printf("%s\n", text);
    fflush(stdout);
}

static int on_listening(void *context, int port, struct ps_error *err)
{
    (void)err;
    (void)context;
    printf("listening %d\n", port);
    fflush(stdout);
    return 0;
}

static void on_failure(void *context, const char *reason)
{
    (void)context;
    fprintf(stderr, "FAILED: watchdog: %s\n", reason);
    _exit(1);
}

static int expect(int ok, const char *what, struct ps_error *err)
{
    return ok ? 0 : ps_fail(err, PS_INTERNAL, "wrong result: %s", what);
}

/* Element i of rank r's vector; sums of these are exact in float. */
static float element(int rank, size_t i)
{
    return (float)((int)((i * 7 + (size_t)rank * 13) % 101) - 50);
}

static int check_collectives(struct run *run, struct ps_error *err)
{
    struct ps_comm *c = run->comm;
    static const size_t sizes[] = {1, 2, 3, 5, 16, 1000, 262144, 1000003};
    int code = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes && code == 0; s++) {
        size_t n = sizes[s];
        float *v = malloc(n * sizeof *v);
        double *d = malloc(n * sizeof *d);
        int64_t *k = malloc(n * sizeof *k);
        float *all = malloc(n * sizeof *all * (size_t)c->world_size);
        for (size_t i = 0; i < n; i++) {
            v[i] = element(c->rank, i);
            d[i] = element(c->rank, i) * 0.5;
            k[i] = (int64_t)(i << 20) + c->rank;
        }
        int good = 1;
        if (code == 0 && (code = c->ops->all_gather(c, v, n * sizeof *v, all, err)) == 0) {
            for (int r = 0; r < c->world_size; r++)
                for (size_t i = 0; i < n; i++)
                    good = good && all[(size_t)r * n + i] == element(r, i);
            code = expect(good, "all-gather", err);
        }
        if (code == 0 && (code = c->ops->all_reduce(c, v, n, PS_F32, err)) == 0 &&
            (code = c->ops->all_reduce(c, d, n, PS_F64, err)) == 0 &&
            (code = c->ops->all_reduce(c, k, n, PS_I64, err)) == 0) {
            for (size_t i = 0; i < n; i++) {
                float sum = 0;
                int64_t whole = 0;
                for (int r = 0; r < c->world_size; r++) {
                    sum += element(r, i);
                    whole += (int64_t)(i << 20) + r;
                }
                good = good && v[i] == sum && d[i] == sum * 0.5 && k[i] == whole;
            }
            code = expect(good, "all-reduce", err);
        }
        for (int root = 0; root < c->world_size && code == 0; root++) {
            for (size_t i = 0; i < n; i++)
                v[i] = element(c->rank, i);
            code = c->ops->broadcast(c, v, n * sizeof *v, root, err);
            for (size_t i = 0; i < n; i++)
                good = good && v[i] == element(root, i);
            if (code == 0)
                code = expect(good, "broadcast", err);
        }
        free(v);
        free(d);
        free(k);
        free(all);
    }
    for (int i = 0; i < 100 && code == 0; i++)
        code = c->ops->barrier(c, err);
    return code;
}

/* Small all-reduces until something breaks. */
static int reduce_forever(struct run *run, struct ps_error *err)
{
    static float v[4096];
    for (long i = 0;; i++) {
        int code = run->comm->ops->all_reduce(run->comm, v, 4096, PS_F32, err);
        if (code < 0)
            return code;
        if (i == 10)
            say("running");
    }
}

static int check_start(struct run *run, struct ps_error *err)
{
    struct ps_model *model;
    int code = ps_model_create("resnet18", run->width, 10, &model, err);
    if (code < 0)
        return code;
    char lr[16];
    snprintf(lr, sizeof lr, "%d", run->bytes);
    const struct ps_start_pair pairs[] = {{"epochs", "3"}, {"batch", lr}};
    code = ps_start_check(run->comm, model, pairs, 2, err);
    ps_model_free(model);
    return code;
}

/* Where a rank's part of the batch begins. */
static int shard(const struct run *run, int global, int rank)
{
    int world = run->comm->world_size, even = global * rank / world;
    return run->uneven && rank > 0 && rank < world ? even + world - rank : even;
}

/* Ranks begin with different parameters and train on parts of the same batches; what rank 0 then has goes to
 * a file. With --uneven 1 the parts are not equal, with --micro K each part is worked on in K micro-steps. */
static int train(struct run *run, struct ps_error *err)
{
    enum { GLOBAL = 12, RESOLUTION = 16, STEPS = 3 };
    static float images[GLOBAL * 3 * RESOLUTION * RESOLUTION];
    int32_t labels[GLOBAL];
    struct ps_comm *c = run->comm;
    const struct ps_backend_ops *ops = NULL;
    struct ps_backend *backend = NULL;
    struct ps_reducer *reducer = NULL;
    struct ps_model *model = NULL;
    float *params = NULL, *buffers = NULL;
    int first = shard(run, GLOBAL, c->rank), last = shard(run, GLOBAL, c->rank + 1);
    int code = ps_model_create("resnet18", run->width, 10, &model, err);
    if (code == 0)
        code = ps_backend_load("ref", &ops, err);
    struct ps_backend_config config = {.model = model,
                                       .precision = PS_FP32,
                                       .threads = 1,
                                       .max_batch = GLOBAL,
                                       .max_eval_batch = GLOBAL,
                                       .max_resolution = RESOLUTION,
                                       .training = true};
    if (code == 0)
        code = ops->create(&config, &backend, err);
    if (code == 0) {
        params = calloc(model->param_elements, sizeof *params);
        buffers = calloc(model->buffer_elements, sizeof *buffers);
        ps_model_init(model, 1 + (uint64_t)c->rank, params, buffers);
        code = ops->write(backend, PS_STATE_PARAMS, 0, model->param_elements, params, err);
        if (code == 0)
            code = ops->write(backend, PS_STATE_BUFFERS, 0, model->buffer_elements, buffers, err);
    }
    if (code == 0)
        code = ps_start_broadcast(c, ops, backend, model, err);
    struct ps_reducer_config reduce = {.ops = ops,
                                       .backend = backend,
                                       .model = model,
                                       .comm = c,
                                       .first_bucket_bytes = 4096,
                                       .bucket_bytes = 65536};
    if (code == 0)
        code = ps_reducer_create(&reduce, &reducer, err);
    uint32_t random = 1;
    for (int step = 1; step <= STEPS && code == 0; step++) {
        for (size_t i = 0; i < sizeof images / sizeof *images; i++) {
            random = random * 1664525u + 1013904223u;
            images[i] = (float)(random >> 8) / (float)(1 << 24) - 0.5f;
        }
        for (int i = 0; i < GLOBAL; i++)
            labels[i] = (i * 7 + step) % 10;
        ps_reducer_begin(reducer, (double)(last - first) / GLOBAL);
        for (int k = 0; k < run->micro && code == 0; k++) {
            int from = first + (last - first) * k / run->micro,
                to = first + (last - first) * (k + 1) / run->micro;
            struct ps_batch batch = {.pixel = PS_PIXEL_F32,
                                     .images = images + (size_t)from * 3 * RESOLUTION * RESOLUTION,
                                     .labels = labels + from,
                                     .count = to - from,
                                     .resolution = RESOLUTION,
                                     .scale = {1, 1, 1}};
            struct ps_loss_config loss = {.grad_scale = 1.0f / (float)(last - first)};
            bool reduces = k == run->micro - 1;
            code = ops->forward(backend, &batch, PS_TRAIN_FROZEN_BN, &loss, err);
            if (code == 0)
                code = ops->backward(backend, k > 0, NULL, reduces ? ps_reducer_ready : NULL, reducer, err);
        }
        if (code == 0)
            code = ps_reducer_finish(reducer, NULL, err);
        struct ps_optimizer_step update = {
            .kind = PS_SGD, .step = step, .lr = 0.05, .momentum = 0.9, .nesterov = true};
        if (code == 0)
            code = ops->update(backend, &update, err);
    }
    uint64_t hash = 0;
    if (code == 0)
        code = ps_state_hash(ops, backend, model, PS_STATE_PARAMS, 0, &hash, err);
    if (code == 0)
        code = ps_compare_hash(c, "parameters", hash, err);
    if (code == 0)
        code = ops->read(backend, PS_STATE_PARAMS, 0, model->param_elements, params, err);
    if (code == 0 && c->rank == 0 && run->dump) {
        FILE *f = fopen(run->dump, "wb");
        if (!f || fwrite(params, sizeof *params, model->param_elements, f) != model->param_elements ||
            fclose(f) != 0)
            code = ps_fail(err, PS_UNAVAILABLE, "cannot write %s", run->dump);
    }
    ps_reducer_free(reducer);
    if (backend)
        ops->destroy(backend);
    ps_model_free(model);
    free(params);
    free(buffers);
    return code;
}

static int bench(struct run *run, struct ps_error *err)
{
    size_t n = (size_t)run->bytes / sizeof(float);
    float *v = calloc(n, sizeof *v);
    double best = 1e9, sum = 0;
    int rounds = n < 100000 ? 200 : 12;
    int code = 0;
    for (int i = 0; i < rounds && code == 0; i++) {
        code = run->comm->ops->barrier(run->comm, err);
        double start = ps_monotonic_s();
        if (code == 0)
            code = run->comm->ops->all_reduce(run->comm, v, n, PS_F32, err);
        double took = ps_monotonic_s() - start;
        if (i >= 2) {
            sum += took;
            best = took < best ? took : best;
        }
    }
    free(v);
    if (code == 0 && run->comm->rank == 0)
        printf("all_reduce bytes %zu best_ms %.3f mean_ms %.3f\n", n * sizeof *v, best * 1e3,
               sum / (rounds - 2) * 1e3);
    return code;
}

static int work(const char *mode, struct run *run, struct ps_error *err)
{
    if (strcmp(mode, "collectives") == 0)
        return check_collectives(run, err);
    if (strcmp(mode, "reduce") == 0 || strcmp(mode, "reduce_quiet") == 0)
        return reduce_forever(run, err);
    if (strcmp(mode, "compute") == 0) {
        say("running");
        for (volatile unsigned long i = 0;; i++) /* a main thread that looks at nothing */
            usleep(1000);
    }
    if (strcmp(mode, "late") == 0) { /* rank 0 is busy for longer than the heartbeat time-out: no alarm */
        if (run->comm->rank == 0)
            usleep(2500000);
        return run->comm->ops->barrier(run->comm, err);
    }
    if (strcmp(mode, "stuck") == 0) { /* rank 1 never calls the collective */
        if (run->comm->rank == 1)
            for (;;)
                usleep(100000);
        return run->comm->ops->barrier(run->comm, err);
    }
    if (strcmp(mode, "gives_up") == 0 && run->comm->rank == 1)
        return ps_fail(err, PS_INTERNAL, "the loss is not a number");
    if (strcmp(mode, "gives_up") == 0)
        return reduce_forever(run, err);
    if (strcmp(mode, "start") == 0)
        return check_start(run, err);
    if (strcmp(mode, "train") == 0)
        return train(run, err);
    if (strcmp(mode, "bench") == 0)
        return bench(run, err);
    return ps_fail(err, PS_INVALID_ARGUMENT, "no mode %s", mode);
}

int main(int argc, char **argv)
{
    struct run run = {.width = 8, .bytes = 128, .micro = 1};
    struct ps_launch_flags flags = {.world_size = 1};
    struct ps_rendezvous_config config = {
        .on_listening = on_listening, .on_failure = on_failure, .join_s = 20};
    struct ps_gloo_options gloo = {.connect_s = 20};
    struct ps_error err = {0};
    const char *mode = argc > 1 ? argv[1] : "";
    int any_port = 0;
    for (int i = 2; i + 1 < argc; i += 2) {
        const char *flag = argv[i], *value = argv[i + 1];
        double number = strtod(value, NULL);
        if (strcmp(flag, "--init_method") == 0)
            flags.init_method = value;
        else if (strcmp(flag, "--rank") == 0)
            flags.rank = (int64_t)number, flags.rank_given = true;
        else if (strcmp(flag, "--world_size") == 0)
            flags.world_size = (int64_t)number, flags.world_size_given = true;
        else if (strcmp(flag, "--heartbeat") == 0)
            config.heartbeat_s = number;
        else if (strcmp(flag, "--collective") == 0)
            gloo.collective_s = number;
        else if (strcmp(flag, "--join") == 0)
            config.join_s = number;
        else if (strcmp(flag, "--width") == 0)
            run.width = (int)number;
        else if (strcmp(flag, "--bytes") == 0)
            run.bytes = (int)number;
        else if (strcmp(flag, "--uneven") == 0)
            run.uneven = (int)number;
        else if (strcmp(flag, "--micro") == 0)
            run.micro = (int)number;
        else if (strcmp(flag, "--dump") == 0)
            run.dump = value;
        else if (strcmp(flag, "--any_port") == 0)
            any_port = (int)number;
        else if (strcmp(flag, "--interface") == 0)
            gloo.interface = value;
    }
    if (strcmp(mode, "reduce_quiet") == 0 || strcmp(mode, "stuck") == 0 || strcmp(mode, "gives_up") == 0)
        config.on_failure = NULL; /* the reason comes from the collective */
    int code = ps_launch_resolve(&flags, NULL, NULL, &run.launch, &err);
    if (code == 0) {
        fprintf(stderr, "rank %d of %d (%s)\n", run.launch.rank, run.launch.world_size, run.launch.source);
        config.rank = run.launch.rank;
        config.world_size = run.launch.world_size;
        config.host = run.launch.host;
        config.port = any_port && config.rank == 0 ? 0 : run.launch.port;
        config.secret = any_port ? "dist_test" : run.launch.secret;
        code = ps_rendezvous_open(&config, &run.rendezvous, &err);
    }
    if (code == 0)
        code = ps_comm_open(run.rendezvous, config.rank, config.world_size, &gloo, &run.comm, &err);
    if (code == 0)
        code = work(mode, &run, &err);
    if (code < 0) {
        fprintf(stderr, "FAILED: %s\n", err.message);
        if (run.rendezvous)
            ps_rendezvous_fail(run.rendezvous, err.message);
    }
    ps_comm_close(run.rendezvous, run.comm);
    ps_rendezvous_close(run.rendezvous, 10.0);
    if (code == 0)
        say("ok");
    return code == 0 ? 0 : 1;
}
