/* SPDX-License-Identifier: Apache-2.0
 * paramsync-synth: writes the generated set. */
#include "paramsync_version.h"
#include "services/base/options.h"
#include "trainer/data/synthetic.h"

#include <stdio.h>
#include <string.h>

struct settings {
    int64_t train, test, seed;
    bool help, version;
};

static const struct ps_option rows[] = {
    {.name = "train",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct settings, train),
     .value = "N",
     .fallback = "5000",
     .min = 5,
     .max = 10000000,
     .help = "training images, over five files"},
    {.name = "test",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct settings, test),
     .value = "N",
     .fallback = "1000",
     .min = 1,
     .max = 10000000,
     .help = "test images"},
    {.name = "seed",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct settings, seed),
     .value = "N",
     .fallback = "1",
     .min = 0,
     .max = 4294967295.0,
     .help = "another seed, other images"},
    {.name = "help", .type = PS_TYPE_BOOL, .offset = offsetof(struct settings, help), .help = "this text"},
    {.name = "version",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct settings, version),
     .help = "the version"},
};

int main(int argc, char **argv)
{
    struct settings settings = {0};
    struct ps_error err = {0};
    const struct ps_options table = {
        .program = "paramsync-synth",
        .usage = "FOLDER [--train N] [--test N]",
        .example = "paramsync-synth /tmp/data --train 2000 --test 500",
        .about = "Writes FOLDER/cifar-10-batches-bin/: a generated set of ten classes that can be learned, "
                 "in CIFAR-10's "
                 "binary format.",
        .rows = rows,
        .count = PS_OPTIONS_COUNT(rows),
    };
    int positional = 0;
    int code = ps_options_defaults(&table, &settings, &err);
    if (!code)
        code = ps_options_parse(&table, &settings, argc, argv, &positional, false, NULL, &err);
    if (!code && settings.help) {
        struct ps_buf text = PS_BUF_INIT(1 << 16);
        ps_options_help(&table, &text);
        fputs(text.data ? text.data : "", stdout);
        ps_buf_done(&text);
        return 0;
    }
    if (!code && settings.version) {
        printf("paramsync-synth %s\n", PARAMSYNC_VERSION);
        return 0;
    }
    if (!code && positional != 1)
        code = ps_fail(&err, PS_INVALID_ARGUMENT, "name one folder to write to (see --help)");
    if (!code)
        code = ps_synthetic_write(argv[1], (size_t)settings.train, (size_t)settings.test,
                                  (uint64_t)settings.seed, &err);
    if (code)
        fprintf(stderr, "paramsync-synth: %s\n", err.message);
    return ps_code_to_exit(code);
}
