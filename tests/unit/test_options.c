/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/options.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings {
    const char *name, *recipe, *token;
    int64_t epochs;
    double lr, wait;
    bool gpu;
};

#define AT(f) .offset = offsetof(struct settings, f)
static const struct ps_option rows[] = {
    {.name = "run", .short_name = "r", .type = PS_TYPE_STRING, AT(name), .value = "NAME", .help = "name"},
    {.name = "recipe",
     .type = PS_TYPE_CHOICE,
     AT(recipe),
     .choices = "sample|fast",
     .fallback = "sample",
     .help = "set"},
    {.name = "epochs",
     .type = PS_TYPE_INT,
     AT(epochs),
     .value = "N",
     .fallback = "100",
     .min = 1,
     .max = 1000,
     .help = "n"},
    {.name = "learning-rate",
     .type = PS_TYPE_DOUBLE,
     AT(lr),
     .value = "X",
     .fallback = "0.01",
     .help = "rate"},
    {.name = "wait",
     .type = PS_TYPE_DURATION,
     AT(wait),
     .value = "TIME",
     .fallback = "10min",
     .help = "time"},
    {.name = "enable-gpu", .type = PS_TYPE_BOOL, AT(gpu), .fallback = "false", .help = "use one"},
    {.name = "token",
     .type = PS_TYPE_STRING,
     AT(token),
     .value = "T",
     .environment = "PS_TEST_TOKEN",
     .secret = true,
     .help = "t"},
};
static unsigned char sources[PS_OPTIONS_COUNT(rows)];
static const struct ps_options table = {.program = "prog",
                                        .usage = "[OPTIONS]",
                                        .example = "prog --run a",
                                        .about = "About.",
                                        .rows = rows,
                                        .count = PS_OPTIONS_COUNT(rows),
                                        .sources = sources};

static int parse(struct settings *s, const char *line, int *positional, struct ps_error *err)
{
    static char copy[512], *argv[32];
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok(copy, " "); w; w = strtok(NULL, " "))
        argv[argc++] = w;
    *s = (struct settings){0};
    assert_int_equal(ps_options_defaults(&table, s, err), 0);
    int code = ps_options_parse(&table, s, argc, argv, positional, false, NULL, err);
    if (!code && *positional)
        assert_non_null(argv[*positional]);
    return code;
}

static void test_values(void **state)
{
    (void)state;
    struct settings s;
    struct ps_error err = {0};
    int n;
    assert_int_equal(
        parse(&s, "one --learning_rate=0.5 -r abc two --enable_gpu --epochs 3 -- --three", &n, &err), 0);
    assert_int_equal(n, 3);
    assert_true(s.lr == 0.5 && s.gpu && s.epochs == 3 && s.wait == 600);
    assert_string_equal(s.name, "abc");
    assert_string_equal(s.recipe, "sample");
    assert_int_equal(parse(&s, "--enable-gpu false x", &n, &err), 0);
    assert_false(s.gpu);
    assert_int_equal(n, 1);
    assert_int_equal(sources[5], PS_FROM_COMMAND_LINE);
    assert_int_equal(sources[0], PS_FROM_DEFAULT);
}

static void test_bad_values_are_named(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"--epochs 0", "--epochs 0"},
        {"--epochs x", "--epochs x"},
        {"--recipe slow", "sample|fast"},
        {"--epoch 1", "--epochs"},
        {"--run", "--run needs a value"},
        {"--learning-rate nan", "must be a number"},
        {"--enable-gpu=maybe", "true or false"},
        {"--wait soon", "duration"},
        {"-x", "unknown flag"},
        {"--zzzzzzzz", "--help"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct settings s;
        struct ps_error err = {0};
        int n;
        assert_int_equal(parse(&s, bad[i][0], &n, &err), PS_INVALID_ARGUMENT);
        assert_non_null(strstr(err.message, bad[i][1]));
    }
}

static void test_environment_yields_to_flags(void **state)
{
    (void)state;
    struct settings s;
    struct ps_error err = {0};
    int n;
    setenv("PS_TEST_TOKEN", "hush", 1);
    assert_int_equal(parse(&s, "--token said", &n, &err), 0);
    assert_int_equal(ps_options_environment(&table, &s, &err), 0);
    assert_string_equal(s.token, "said");
    assert_int_equal(parse(&s, "--epochs 3", &n, &err), 0);
    assert_int_equal(ps_options_set(&table, &s, "token", "from a file", PS_FROM_FILE, &err), 0);
    assert_int_equal(ps_options_environment(&table, &s, &err), 0);
    assert_string_equal(s.token, "hush");
    assert_true(s.epochs == 3);
    char shown[64];
    ps_options_format(&rows[6], &s, shown, sizeof shown);
    assert_string_equal(shown, "***");
    assert_int_equal(ps_options_set(&table, &s, "learning_rat", "1", PS_FROM_FILE, &err), PS_NOT_FOUND);
    assert_non_null(strstr(err.message, "did you mean --learning-rate"));
    unsetenv("PS_TEST_TOKEN");
}

static void test_help_fits_80_columns(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    assert_int_equal(ps_options_help(&table, &out), 0);
    for (char *line = strtok(out.data, "\n"); line; line = strtok(NULL, "\n"))
        assert_true(strlen(line) <= 80);
    ps_buf_clear(&out);
    /* Whatever its length, no word is glued to the one before it. */
    for (int n = 1; n < 60; n++) {
        char text[128];
        snprintf(text, sizeof text, "%.*s yy zz", n,
                 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
        struct ps_option row = {.name = "o", .type = PS_TYPE_BOOL, .help = text};
        struct ps_options one = {.program = "prog", .usage = "", .rows = &row, .count = 1};
        ps_buf_clear(&out);
        assert_int_equal(ps_options_help(&one, &out), 0);
        const char *yy = strstr(out.data, "yy"), *zz = strstr(out.data, "zz");
        assert_true((yy[-1] == ' ' || yy[-1] == '\n') && (zz[-1] == ' ' || zz[-1] == '\n'));
    }
    ps_buf_done(&out);
}

static void test_man_and_words(void **state)
{
    (void)state;
    static const struct ps_option few[] = {
        {.name = "log-dir",
         .type = PS_TYPE_STRING,
         .value = "DIR",
         .help = ".hidden \\ text",
         .group = "Out-put"},
        {.name = "mode",
         .short_name = "m",
         .type = PS_TYPE_CHOICE,
         .choices = "a|b-c",
         .fallback = "a",
         .help = "how"},
        {.name = "fast", .type = PS_TYPE_BOOL, .help = "is it", .environment = "FAST_ONE"},
    };
    const struct ps_options one = {.program = "prog sub",
                                   .usage = "--mode M",
                                   .about = "Does a thing: well. More.",
                                   .example = "prog sub --mode a",
                                   .rows = few,
                                   .count = 3};
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    assert_int_equal(ps_options_man(&one, "1.2", &out), 0);
    const char title[] = ".TH PROG\\-SUB 1 \"\" \"paramsync 1.2\"";
    assert_int_equal(strncmp(out.data, title, sizeof title - 1), 0);
    const char *const parts[] = {
        "prog\\-sub \\- Does a thing\n", "\\fBprog sub\\fR \\-\\-mode M",
        ".SS Out\\-put\n.TP\n\\fB\\-\\-log\\-dir\\fR \\fIDIR\\fR\n\\&.hidden \\e text\n",
        "\\fB\\-m\\fR, \\fB\\-\\-mode\\fR \\fIa|b\\-c\\fR\nhow (default: a)\n", "is it [FAST_ONE]\n"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(out.data, parts[i]))
            fail_msg("no %s in %s", parts[i], out.data);
    ps_buf_clear(&out);
    assert_int_equal(ps_options_words(&one, &out), 0);
    assert_string_equal(out.data, "--log-dir\tvalue\tDIR\n--mode\tchoice\ta|b-c\n--fast\n");
    ps_buf_clear(&out);
    setenv("PARAMSYNC_HELP", "words", 1);
    assert_int_equal(ps_options_help(&one, &out), 0);
    unsetenv("PARAMSYNC_HELP");
    assert_int_equal(strncmp(out.data, "--log-dir\t", 10), 0);
    ps_buf_done(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_man_and_words),        cmocka_unit_test(test_values),
        cmocka_unit_test(test_bad_values_are_named), cmocka_unit_test(test_environment_yields_to_flags),
        cmocka_unit_test(test_help_fits_80_columns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
