/* SPDX-License-Identifier: Apache-2.0
 * A training loop without the training, for tests of the reporter: reads one command a line, answers each on
 * a line of its own with the time that the call took. report_driver SIDECAR RUN RANK WORLD_SIZE [RUN_ID
 * ATTEMPT] */
#include "trainer/report.h"

#include "services/base/clock.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t next_step;

static int obey(struct ps_report *report, char *line)
{
    char path[512], id[27], name[256];
    long number;
    uint32_t attempt;
    if (sscanf(line, "points %ld", &number) == 1) {
        for (long i = 0; i < number; i++, next_step++)
            ps_report_point(report, "train/loss", next_step, (double)next_step, (double)next_step * 0.01);
    } else if (sscanf(line, "epoch %ld", &number) == 1) {
        struct ps_report_epoch epoch = {.epoch = (int)number,
                                        .step = next_step,
                                        .accuracy = (double)number / 10,
                                        .elapsed_s = (double)number * 100};
        ps_report_epoch(report, &epoch);
    } else if (sscanf(line, "checkpoint %ld %511s", &number, path) == 2) {
        ps_report_checkpoint(report, path, "pth", (int)number, next_step, (double)number / 10, true);
    } else if (strcmp(line, "run") == 0) {
        ps_report_run(report, id, &attempt, name, sizeof name);
        printf("%s %u %s\n", *id ? id : "-", attempt, *name ? name : "-");
        return 0;
    } else {
        printf("unknown command %s\n", line);
        return -1;
    }
    return 1;
}

int main(int argc, char **argv)
{
    struct ps_error err = {0};
    struct ps_report *report;
    char line[1024], state[32];
    double timeout;
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc != 5 && argc != 7)
        return 2;
    const struct ps_report_pair config[] = {{"lr", "0.01"}};
    struct ps_report_config settings = {.sidecar = argv[1],
                                        .run_name = argv[2],
                                        .rank = atoi(argv[3]),
                                        .world_size = atoi(argv[4]),
                                        .model = "resnet18",
                                        .dataset = "CIFAR-10",
                                        .dataset_hash = "abc",
                                        .device = "cpu",
                                        .epochs = 3,
                                        .batch_per_rank = 128,
                                        .config = config,
                                        .config_count = 1,
                                        .spool_dir = getenv("PS_SPOOL"),
                                        .run_id = argc == 7 ? argv[5] : NULL,
                                        .attempt = argc == 7 ? (uint32_t)atoi(argv[6]) : 0};
    if (ps_report_open(&settings, &report, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    puts("open");
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        if (sscanf(line, "close %31s %lf", state, &timeout) == 2) {
            ps_report_close(report, state, "the driver was told so", timeout);
            puts("closed");
            return 0;
        }
        double before = ps_monotonic_s();
        int told = obey(report, line);
        if (told > 0)
            printf("%.6f\n", ps_monotonic_s() - before);
        else if (told < 0)
            break;
    }
    ps_report_close(report, "failed", "input ended", 5);
    return 1;
}
