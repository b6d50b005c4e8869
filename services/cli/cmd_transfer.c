/* SPDX-License-Identifier: Apache-2.0
 * paramsync pull, paramsync push. */
#include "services/cli/cli.h"

#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One line on a terminal, redrawn ten times a second. */
struct progress {
    bool shown;
    double started, drawn;
    uint64_t first;
    bool begun;
};

static void draw(void *context, uint64_t done, uint64_t total)
{
    struct progress *p = context;
    double now = ps_monotonic_s();
    char have[32], all[32], rate[32];
    if (!p->shown)
        return;
    if (!p->begun) {
        p->begun = true;
        p->started = now;
        p->first = done;
    }
    if (now - p->drawn < 0.1 && done < total)
        return;
    p->drawn = now;
    cli_format_bytes(done, have, sizeof have);
    cli_format_bytes(total, all, sizeof all);
    cli_format_bytes(now > p->started ? (uint64_t)((double)(done - p->first) / (now - p->started)) : 0, rate,
                     sizeof rate);
    fprintf(stderr, "\r%3.0f %%  %s of %s  %s/s\033[K", total ? (double)done * 100 / (double)total : 100.0,
            have, all, rate);
    if (done == total)
        fputc('\n', stderr);
}

static json_t *checkpoint_json(const struct paramsync_checkpoint *c, const char *path)
{
    json_t *o = json_pack("{s:s, s:s, s:i, s:i, s:s, s:s, s:s, s:I}", "run_id", c->run_id, "run", c->run_name,
                          "attempt", (int)c->attempt, "epoch", (int)c->epoch, "filename", c->filename,
                          "format", c->format, "sha256", c->sha256, "size", (json_int_t)c->size);
    if (o && c->has_accuracy)
        json_object_set_new(o, "accuracy", cli_json_number(c->accuracy));
    if (o && path)
        json_object_set_new(o, "path", json_string(path));
    return o;
}

static int report(const struct cli_common *common, const struct paramsync_checkpoint *c, const char *path,
                  struct ps_error *err)
{
    char size[32], share[48] = "", number[32];
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    if (common->json)
        return cli_write_json(checkpoint_json(c, path), err);
    cli_format_bytes(c->size, size, sizeof size);
    if (c->has_accuracy) {
        ps_compare_format_share(c->accuracy, -1, number, sizeof number);
        snprintf(share, sizeof share, ", accuracy %s", number);
    }
    cli_escape(&out, path ? path : c->filename);
    ps_buf_printf(&out, ": epoch %u%s, %s, sha256 %s\n", c->epoch, share, size, c->sha256);
    int code = cli_write(&out, err);
    ps_buf_done(&out);
    return code;
}

/* ---- pull ---- */

struct pull_settings {
    struct cli_common common;
    bool latest, best;
    int64_t epoch;
    const char *format, *sha256, *output, *follow, *tensors, *dtype, *limit_rate;
};

static const struct ps_option pull_rows[] = {
    {.name = "latest",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct pull_settings, latest),
     .help = "the newest (this is what happens without any of the four)",
     .group = "Which"},
    {.name = "best",
     .type = PS_TYPE_BOOL,
     .offset = offsetof(struct pull_settings, best),
     .help = "the one with the highest test accuracy"},
    {.name = "epoch",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct pull_settings, epoch),
     .value = "N",
     .min = 1,
     .max = 4294967295.0,
     .help = "the one after this epoch"},
    {.name = "sha256",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct pull_settings, sha256),
     .value = "HEX",
     .help = "the one with this content"},
    {.name = "format",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct pull_settings, format),
     .value = "NAME",
     .help = "safetensors, pth or state; without it safetensors, else pth"},
    {.name = "output",
     .short_name = "o",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct pull_settings, output),
     .value = "FILE",
     .help = "file or folder to write to; without it, the checkpoint's own name here",
     .group = "Output"},
    {.name = "follow",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct pull_settings, follow),
     .value = "DIR",
     .help =
         "keep DIR/current at the newest checkpoint (with --best: at the best one) until the run has ended"},
    {.name = "tensors",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct pull_settings, tensors),
     .value = "NAME,...",
     .help = "only these tensors of a safetensors checkpoint, as a file of their own",
     .group = "Parts"},
    {.name = "dtype",
     .type = PS_TYPE_CHOICE,
     .offset = offsetof(struct pull_settings, dtype),
     .choices = "bf16",
     .value = "bf16",
     .help = "round 32-bit floats to bfloat16 on the way: half the bytes"},
    {.name = "limit-rate",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct pull_settings, limit_rate),
     .value = "BYTES",
     .help = "at most so many bytes a second; 10M is 10 MiB"},
    CLI_JSON_ROW(struct pull_settings, "print what was pulled as JSON"),
    CLI_CONNECTION_ROWS(struct pull_settings),
};
static const struct ps_options pull_table = {
    .program = "paramsync pull",
    .usage = "RUN [--latest|--best|--epoch N] [-o FILE | --follow DIR]",
    .example = "paramsync pull single --best -o model.safetensors\n"
               "paramsync pull single --follow served",
    .about = "Fetches a checkpoint. The bytes go to FILE.part; FILE appears only when its sha256 is right. "
             "Interrupted, "
             "the same command goes on where it stopped. Damaged bytes are never kept.",
    .rows = pull_rows,
    .count = PS_OPTIONS_COUNT(pull_rows),
};

/* A folder as output: the checkpoint's own name in it. *ret_path is to be freed. */
static int output_path(struct paramsync_client *client, const char *run, struct paramsync_selector *selector,
                       const char *output, struct paramsync_checkpoint **ret_checkpoint, char **ret_path,
                       struct ps_error *err)
{
    struct paramsync_error outer = {0};
    struct stat st;
    if (!output || stat(output, &st) || !S_ISDIR(st.st_mode)) {
        *ret_path = output ? strdup(output) : NULL;
        return output && !*ret_path ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : 0;
    }
    int code = paramsync_get_checkpoint(client, run, selector, ret_checkpoint, &outer);
    if (code)
        return cli_error(err, &outer);
    const char *name = (*ret_checkpoint)->filename;
    if (!*name || *name == '.' || strchr(name, '/'))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "the checkpoint's file name is not usable here: name an output file");
    /* The same one is pulled, even when a newer one comes meanwhile. */
    *selector =
        (struct paramsync_selector){.sha256 = (*ret_checkpoint)->sha256, .format = (*ret_checkpoint)->format};
    *ret_path = ps_path_join(output, name);
    return *ret_path ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
}

static int parse_rate(const char *text, uint64_t *ret, struct ps_error *err)
{
    double bytes;
    if (ps_parse_bytes(text, &bytes) || bytes < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--limit-rate %.40s: must be bytes a second, such as 10M",
                       text);
    *ret = (uint64_t)bytes;
    return 0;
}

/* Splits "a,b" in place; *ret_names is to be freed. */
static int split_names(char *text, const char ***ret_names, size_t *ret_count, struct ps_error *err)
{
    size_t count = 1;
    for (const char *p = text; *p; p++)
        count += *p == ',';
    const char **names = calloc(count, sizeof *names);
    if (!names)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    char *rest = NULL;
    count = 0;
    for (char *name = strtok_r(text, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        names[count++] = name;
    if (!count) {
        free(names);
        return ps_fail(err, PS_INVALID_ARGUMENT, "--tensors: name at least one");
    }
    *ret_names = names;
    *ret_count = count;
    return 0;
}

static int pull_main(int argc, char **argv, struct ps_error *err)
{
    struct pull_settings settings = {0};
    struct paramsync_client *client = NULL;
    struct paramsync_checkpoint *first = NULL, *checkpoint = NULL;
    struct paramsync_error outer = {0};
    struct progress progress = {0};
    struct paramsync_pull_options options = {0};
    const char **names = NULL;
    char *path = NULL, *names_text = NULL;
    int words;
    int code = cli_parse(&pull_table, &settings.common, argc, argv, 1, 1, &words, err);
    if (code)
        return code > 0 ? 0 : code;
    if (settings.latest + settings.best + (settings.epoch != 0) + (settings.sha256 != NULL) > 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "choose one of --latest, --best, --epoch, --sha256");
    struct paramsync_selector selector = {.best = settings.best,
                                          .epoch = (uint32_t)settings.epoch,
                                          .sha256 = settings.sha256,
                                          .format = settings.format};
    if (settings.follow && (settings.epoch || settings.sha256 || settings.output))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--follow goes with --latest or --best, and names the output itself");
    options.dtype = settings.dtype;
    if (settings.limit_rate && (code = parse_rate(settings.limit_rate, &options.max_bytes_per_s, err)))
        return code;
    if (settings.tensors) {
        names_text = strdup(settings.tensors);
        code = names_text ? split_names(names_text, &names, &options.tensor_count, err)
                          : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        options.tensors = names;
    }
    if (!code)
        code = cli_connect(&settings.common, &client, err);
    if (settings.follow) {
        if (!code)
            code = cli_follow(&settings.common, client, argv[1], settings.follow, &selector, &options, err);
        free(names);
        free(names_text);
        paramsync_disconnect(client);
        return code;
    }
    if (!code)
        code = output_path(client, argv[1], &selector, settings.output, &first, &path, err);
    progress.shown = isatty(STDERR_FILENO) && !settings.common.json;
    if (!code &&
        paramsync_pull_with(client, argv[1], &selector, &options, path, draw, &progress, &checkpoint, &outer))
        code = cli_error(err, &outer);
    if (!code)
        code = report(&settings.common, checkpoint, path ? path : checkpoint->filename, err);
    paramsync_checkpoint_free(first);
    paramsync_checkpoint_free(checkpoint);
    free(path);
    free(names);
    free(names_text);
    paramsync_disconnect(client);
    return code;
}

int cli_pull(int argc, char **argv)
{
    struct ps_error err = {0};
    return pull_main(argc, argv, &err) ? cli_complain("pull", &err) : 0;
}

/* ---- push ---- */

struct push_settings {
    struct cli_common common;
    int64_t epoch, step, attempt;
    const char *accuracy, *format, *name;
};

static const struct ps_option push_rows[] = {
    {.name = "epoch",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct push_settings, epoch),
     .value = "N",
     .min = 0,
     .max = 4294967295.0,
     .help = "the epoch it was written after",
     .group = "What it is"},
    {.name = "step",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct push_settings, step),
     .value = "N",
     .min = 0,
     .max = 9e15,
     .help = "the optimizer step it was written after"},
    {.name = "accuracy",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct push_settings, accuracy),
     .value = "A",
     .help = "its test accuracy, 0.8 or 80%"},
    {.name = "format",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct push_settings, format),
     .value = "NAME",
     .help = "safetensors, pth or state; without it, the file's extension"},
    {.name = "name",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct push_settings, name),
     .value = "NAME",
     .help = "file name to record; without it, the file's own"},
    {.name = "attempt",
     .type = PS_TYPE_INT,
     .offset = offsetof(struct push_settings, attempt),
     .value = "N",
     .min = 0,
     .max = 4294967295.0,
     .help = "attempt of the run; 0 is the newest"},
    CLI_JSON_ROW(struct push_settings, "print what was stored as JSON"),
    CLI_CONNECTION_ROWS(struct push_settings),
};
static const struct ps_options push_table = {
    .program = "paramsync push",
    .usage = "RUN FILE --epoch N [--accuracy A]",
    .example = "paramsync push single epoch_3.safetensors --epoch 3 --accuracy 81.2%",
    .about = "Hands a checkpoint file to the sidecar. It is there for others once every byte is on the "
             "sidecar's disk "
             "and its sha256 is right.",
    .rows = push_rows,
    .count = PS_OPTIONS_COUNT(push_rows),
};

static int push_main(int argc, char **argv, struct ps_error *err)
{
    struct push_settings settings = {0};
    struct paramsync_client *client = NULL;
    struct paramsync_checkpoint *checkpoint = NULL;
    struct paramsync_error outer = {0};
    struct progress progress = {0};
    double accuracy = 0;
    int words;
    int code = cli_parse(&push_table, &settings.common, argc, argv, 2, 2, &words, err);
    if (code)
        return code > 0 ? 0 : code;
    if (settings.accuracy && ps_compare_parse_share(settings.accuracy, &accuracy))
        return ps_fail(err, PS_INVALID_ARGUMENT, "--accuracy %.40s: must be an accuracy such as 0.8 or 80%%",
                       settings.accuracy);
    progress.shown = isatty(STDERR_FILENO) && !settings.common.json;
    struct paramsync_put put = {.path = argv[2],
                                .filename = settings.name,
                                .format = settings.format,
                                .attempt = (uint32_t)settings.attempt,
                                .epoch = (uint32_t)settings.epoch,
                                .step = (uint64_t)settings.step,
                                .accuracy = accuracy,
                                .has_accuracy = settings.accuracy != NULL,
                                .progress = draw,
                                .context = &progress};
    code = cli_connect(&settings.common, &client, err);
    if (!code && paramsync_put_checkpoint(client, argv[1], &put, &checkpoint, &outer))
        code = cli_error(err, &outer);
    if (!code)
        code = report(&settings.common, checkpoint, NULL, err);
    paramsync_checkpoint_free(checkpoint);
    paramsync_disconnect(client);
    return code;
}

int cli_push(int argc, char **argv)
{
    struct ps_error err = {0};
    return push_main(argc, argv, &err) ? cli_complain("push", &err) : 0;
}
