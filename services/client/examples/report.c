/* SPDX-License-Identifier: Apache-2.0
 * A training loop that reports to a sidecar and hands over its checkpoint, without ever waiting for it.
 *
 *     cc report.c $(pkg-config --cflags --libs paramsync) -lm -o report
 *     paramsyncd --data-dir store &
 *     ./report my-run weights.safetensors
 *     paramsync show my-run */
#include <math.h>
#include <paramsync.h>
#include <stdio.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void print_notice(void *context, const char *line)
{
    (void)context;
    fprintf(stderr, "report: %s\n", line);
}

int main(int argc, char **argv)
{
    struct paramsync_error err = {0};
    struct paramsync_reporter *reporter;
    struct paramsync_pair config[] = {{"lr", "0.01"}, {"optimizer", "sgd"}};
    struct paramsync_reporter_options options = {
        /* .connection.address NULL: PARAMSYNC_SIDECAR, else 127.0.0.1:50051 */
        .run = {.name = argc > 1 ? argv[1] : "example",
                .world_size = 1,
                .epochs_planned = 3,
                .model = "a toy",
                .config = config,
                .config_count = 2},
        .spool_dir = "spool", /* records wait there while the sidecar is away */
        .notice = print_notice,
    };
    if (paramsync_reporter_open(&options, &reporter, &err)) {
        fprintf(stderr, "report: %s\n", err.message);
        return 1;
    }
    double begun = now();
    uint64_t step = 0;
    for (uint32_t epoch = 1; epoch <= 3; epoch++) {
        double loss = 0;
        for (int i = 0; i < 100; i++, step++) {
            loss = 2.3 * exp(-(double)step / 100); /* your training step */
            paramsync_reporter_point(reporter, "loss", step, loss, now() - begun);
        }
        struct paramsync_epoch report = {.epoch = epoch,
                                         .train_loss = loss,
                                         .val_loss = loss * 1.1,
                                         .accuracy = 1 - loss / 2.3,
                                         .elapsed_s = now() - begun,
                                         .step = step,
                                         .correct = (uint32_t)(1000 * (1 - loss / 2.3)),
                                         .counted = 1000};
        paramsync_reporter_epoch(reporter, &report);
        if (epoch == 3 && argc > 2)
            paramsync_reporter_checkpoint(
                reporter, &(struct paramsync_put){.path = argv[2], .epoch = epoch, .step = step});
    }
    if (paramsync_reporter_close(reporter, PARAMSYNC_RUN_FINISHED, "", 30, NULL, &err)) {
        fprintf(stderr, "report: %s\n", err.message);
        return 1;
    }
    return 0;
}
