/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/options.h"

#include "trainer/checkpoint/checkpoint.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ARGS = 16 };

static int parse(struct ps_train_options *o, struct ps_error *err, const char *const args[])
{
    char *argv[MAX_ARGS + 2] = {"paramsync-train"};
    int argc = 1;
    for (; args && args[argc - 1] && argc <= MAX_ARGS; argc++)
        argv[argc] = (char *)args[argc - 1];
    return ps_train_options_parse(argc, argv, o, NULL, err);
}
#define ARGS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void accept(struct ps_train_options *o, const char *const args[])
{
    struct ps_error err = {0};
    if (parse(o, &err, args))
        fail_msg("%s", err.message);
}

static void refuse(const char *const args[], const char *word)
{
    struct ps_train_options o;
    struct ps_error err = {0};
    assert_int_equal(parse(&o, &err, args), PS_INVALID_ARGUMENT);
    assert_null(strchr(err.message, '\n'));
    if (!strstr(err.message, word))
        fail_msg("\"%s\" does not say %s", err.message, word);
}

/* The sample's flags, names, values and defaults. */
static void test_sample(void **state)
{
    (void)state;
    struct ps_train_options o;
    unsetenv("PARAMSYNC_SIDECAR");
    accept(&o, NULL);
    assert_string_equal(o.enable_gpu, "auto");
    assert_true(o.lr == 0.01);
    assert_int_equal(o.epochs, 100);
    assert_string_equal(o.data_url, "input_dir");
    assert_string_equal(o.output_dir, "output_dir");
    assert_string_equal(o.init_method, "none");
    assert_false(o.custom_data || o.rank_given || o.world_size_given || o.threads_given);
    assert_int_equal(o.batch, 128);
    assert_int_equal(o.width, 64);
    assert_int_equal(o.seed, 1);
    assert_int_equal(o.optimizer_kind, PS_ADAM);
    assert_int_equal(o.schedule_kind, PS_SCHEDULE_CONSTANT);
    assert_true(o.drop_last);
    assert_false(o.normalize || o.deterministic);
    assert_string_equal(o.augment, "none");
    assert_string_equal(o.precision, "fp32");
    assert_string_equal(o.lr_scale, "node");
    assert_int_equal(ps_resolution_at(&o.resolutions, 1), 32);
    assert_int_equal(o.formats, PS_CHECKPOINT_SAFETENSORS);
    assert_string_equal(o.resume, "none");
    assert_true(o.collective_timeout == 600 && o.heartbeat_timeout == 5);
    assert_null(o.sidecar);
    accept(&o, ARGS("--enable_gpu", "false", "--lr", "0.02", "--epochs", "3", "--init_method", "tcp://h:1",
                    "--rank", "1", "--world_size", "2", "--custom_data", "true"));
    assert_true(o.custom_data && o.rank_given && o.world_size_given);
    assert_int_equal(o.rank, 1);
    assert_int_equal(o.world_size, 2);
    assert_true(o.lr == 0.02);
    accept(&o, ARGS("--output-dir=x", "--ckpt-format=both", "--deterministic"));
    assert_string_equal(o.output_dir, "x");
    assert_true(o.deterministic);
    assert_int_equal(o.formats, PS_CHECKPOINT_SAFETENSORS | PS_CHECKPOINT_PTH);
}

static void test_recipe_fast(void **state)
{
    (void)state;
    struct ps_train_options o;
    accept(&o, ARGS("--recipe", "fast"));
    assert_int_equal(o.epochs, 4);
    assert_int_equal(o.batch, 256);
    assert_int_equal(o.optimizer_kind, PS_SGD);
    assert_int_equal(o.schedule_kind, PS_SCHEDULE_ONECYCLE);
    assert_string_equal(o.augment, "standard");
    assert_true(o.normalize);
    assert_string_equal(o.precision, "auto");
    static const int expected[] = {16, 16, 24, 24};
    for (int e = 1; e <= 4; e++)
        assert_int_equal(ps_resolution_at(&o.resolutions, e), expected[e - 1]);
    /* what is given wins, wherever it stands */
    accept(&o, ARGS("--batch", "64", "--recipe", "fast", "--epochs", "1", "--optimizer", "adam",
                    "--normalize", "false"));
    assert_int_equal(o.batch, 64);
    assert_int_equal(o.epochs, 1);
    assert_int_equal(o.optimizer_kind, PS_ADAM);
    assert_false(o.normalize);
    assert_int_equal(ps_resolution_at(&o.resolutions, 1), 24);
    accept(&o, ARGS("--recipe", "fast", "--resolution", "32"));
    assert_int_equal(ps_resolution_at(&o.resolutions, 1), 32);
    accept(&o, ARGS("--recipe", "fast", "--custom_data"));
    assert_string_equal(o.augment, "none");
    assert_false(o.normalize);
}

static void test_refused(void **state)
{
    (void)state;
    refuse(ARGS("--epocs", "3"), "did you mean --epochs");
    refuse(ARGS("--epochs", "0"), "--epochs");
    refuse(ARGS("--epochs", "many"), "--epochs");
    refuse(ARGS("--epochs"), "--epochs");
    refuse(ARGS("--lr", "0"), "--lr");
    refuse(ARGS("--lr", "nan"), "--lr");
    refuse(ARGS("--batch", "-1"), "--batch");
    refuse(ARGS("--recipe", "slow"), "sample|fast");
    refuse(ARGS("--enable_gpu", "yes"), "--enable-gpu");
    refuse(ARGS("--resolution", "64"), "--resolution");
    refuse(ARGS("--custom_data", "maybe"), "maybe");
    refuse(ARGS("--custom_data", "--augment", "standard"), "--custom_data");
    refuse(ARGS("--ckpt_format", "onnx"), "--ckpt-format");
    refuse(ARGS("--tls-cert", "x"), "--tls-key");
    refuse(ARGS("--data_url", ""), "--data_url");
    refuse(ARGS("input_dir"), "input_dir");
    refuse(ARGS("--on_nan", "ignore"), "--on-nan");
    refuse(ARGS("--mode", "pp"), "--mode");
    refuse(ARGS("--sync_norm"), "unknown flag");
}

static int warned;
static void warn(const char *flag)
{
    assert_non_null(strstr(flag, "--train_url"));
    warned++;
}

static void test_ignore_unknown(void **state)
{
    (void)state;
    struct ps_train_options o;
    struct ps_error err = {0};
    char *argv[] = {"t", "--train_url", "obs://x", "--ignore-unknown", "--epochs", "7"};
    assert_int_equal(ps_train_options_parse(6, argv, &o, warn, &err), 0);
    assert_int_equal(warned, 1);
    assert_int_equal(o.epochs, 7);
    refuse(ARGS("--train_url", "x", "--ignore_unknown", "false"), "train_url");
}

static void test_lr_factor(void **state)
{
    (void)state;
    struct ps_train_options o;
    accept(&o, NULL);
    assert_true(ps_train_lr_factor(&o, 8, 16) == 8); /* the sample's 0.08 on a node of eight cards */
    assert_true(ps_train_lr_factor(&o, 1, 2) == 1);
    accept(&o, ARGS("--lr_scale", "linear", "--accumulate", "2"));
    assert_true(ps_train_lr_factor(&o, 8, 16) == 32);
    accept(&o, ARGS("--lr_scale", "sqrt"));
    assert_true(ps_train_lr_factor(&o, 8, 16) == 4);
    accept(&o, ARGS("--lr_scale", "none"));
    assert_true(ps_train_lr_factor(&o, 8, 16) == 1);
}

static void test_warmup(void **state)
{
    (void)state;
    struct ps_train_options o;
    accept(&o, NULL);
    assert_true(ps_train_warmup(&o, 8) == 0); /* the sample has none */
    accept(&o, ARGS("--lr_scale", "linear"));
    assert_true(ps_train_warmup(&o, 16) == 5);
    assert_true(ps_train_warmup(&o, 1) == 0); /* nothing was raised */
    accept(&o, ARGS("--lr_scale", "sqrt", "--epochs", "8"));
    assert_true(ps_train_warmup(&o, 4) == 2);
    accept(&o, ARGS("--lr_scale", "linear", "--schedule", "onecycle")); /* rises by itself */
    assert_true(ps_train_warmup(&o, 16) == 0);
    accept(&o, ARGS("--lr_scale", "linear", "--warmup_epochs", "0"));
    assert_true(ps_train_warmup(&o, 16) == 0);
    accept(&o, ARGS("--warmup_epochs", "1.5"));
    assert_true(ps_train_warmup(&o, 1) == 1.5);
    refuse(ARGS("--replicas", "2"), "--mode dp");
    refuse(ARGS("--sync_bn", "--freeze_bn"), "exclude");
}

static void test_help(void **state)
{
    (void)state;
    struct ps_train_options o;
    accept(&o, ARGS("--help"));
    assert_true(o.help);
    const struct ps_options table = ps_train_table(&o);
    struct ps_buf text = PS_BUF_INIT(1 << 16);
    assert_int_equal(ps_options_help(&table, &text), 0);
    for (size_t i = 0; i < table.count; i++)
        assert_non_null(strstr(text.data, table.rows[i].name));
    for (const char *line = text.data; *line;) {
        size_t n = strcspn(line, "\n");
        assert_true(n <= 80);
        line += n + (line[n] == '\n');
    }
    ps_buf_done(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample),    cmocka_unit_test(test_recipe_fast),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_ignore_unknown),
        cmocka_unit_test(test_lr_factor), cmocka_unit_test(test_help),
        cmocka_unit_test(test_warmup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
