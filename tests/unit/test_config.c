/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/fs.h"
#include "services/sidecar/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings {
    const char *name, *path;
    int64_t epochs;
    bool insecure;
};

#define AT(f) .offset = offsetof(struct settings, f)
static const struct ps_option rows[] = {
    {.name = "run-name", .type = PS_TYPE_STRING, AT(name), .help = "n"},
    {.name = "path", .type = PS_TYPE_STRING, AT(path), .help = "p"},
    {.name = "epochs", .type = PS_TYPE_INT, AT(epochs), .fallback = "1", .min = 1, .max = 10, .help = "e"},
    {.name = "insecure", .type = PS_TYPE_BOOL, AT(insecure), .help = "i"},
};
static unsigned char sources[PS_OPTIONS_COUNT(rows)];
static const struct ps_options table = {
    .program = "prog", .usage = "", .rows = rows, .count = PS_OPTIONS_COUNT(rows), .sources = sources};

static int read_text(const char *text, size_t size, struct settings *s, struct ps_config_file **ret,
                     struct ps_error *err)
{
    char path[] = "/tmp/ps_test_config.XXXXXX";
    close(mkstemp(path));
    *s = (struct settings){0};
    assert_int_equal(ps_options_defaults(&table, s, err), 0);
    assert_int_equal(ps_write_file_atomic(path, text, size, err), 0);
    int code = ps_config_read(&table, s, path, ret, err);
    unlink(path);
    return code;
}

static void test_good_files(void **state)
{
    (void)state;
    struct settings s;
    struct ps_error err = {0};
    struct ps_config_file *file;
    static const char text[] =
        "\xef\xbb\xbf# comment\n\n[section]\nrun_name = two words\r\n ; another\nepochs=7\ninsecure = true";
    if (read_text(text, sizeof text - 1, &s, &file, &err))
        fail_msg("%s", err.message);
    assert_string_equal(s.name, "two words");
    assert_true(s.epochs == 7 && s.insecure && !s.path);
    assert_int_equal(sources[2], PS_FROM_FILE);
    ps_config_free(file);
    assert_int_equal(read_text("", 0, &s, &file, &err), 0);
    assert_true(s.epochs == 1);
    ps_config_free(file);
    assert_null(ps_config_free(NULL));

    /* A line that is much longer than inih's own buffer. */
    char *big = malloc(5000);
    int n = snprintf(big, 5000, "epochs = 3\npath = /");
    memset(big + n, 'x', 4000);
    snprintf(big + n + 4000, 900, "\nrun-name = after\n");
    assert_int_equal(read_text(big, strlen(big), &s, &file, &err), 0);
    assert_int_equal(strlen(s.path), 4001);
    assert_string_equal(s.name, "after");
    ps_config_free(file);
    free(big);
}

static void test_bad_files(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } bad[] = {
        {"epochs = 11\n", "line 1: --epochs 11"},
        {"# c\nepochs = 2\nepoch = 3\n", "line 3: unknown flag --epoch: did you mean --epochs"},
        {"run-name = x\nno sign\n", "line 2: expected NAME = VALUE"},
        {"[section\n", "line 1"},
        {"insecure = perhaps\n", "true or false"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct settings s;
        struct ps_error err = {0};
        struct ps_config_file *file;
        assert_int_equal(read_text(bad[i].text, strlen(bad[i].text), &s, &file, &err), PS_INVALID_ARGUMENT);
        if (!strstr(err.message, bad[i].words))
            fail_msg("%s", err.message);
    }
    struct settings s;
    struct ps_error err = {0};
    struct ps_config_file *file;
    assert_int_equal(read_text("epochs = 2\0x\n", 13, &s, &file, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "NUL"));
    assert_int_equal(ps_config_read(&table, &s, "/tmp/ps_no_such_file", &file, &err), PS_NOT_FOUND);
}

static void test_where_it_may_listen(void **state)
{
    (void)state;
    static const char *const local[] = {"127.0.0.1:1",         "127.9.9.9:0",  "[::1]:80",
                                        "localhost:80",        "LocalHost:80", "unix:/tmp/x",
                                        "[::ffff:127.0.0.1]:1"};
    static const char *const open[] = {"0.0.0.0:1",
                                       ":80",
                                       "[::]:80",
                                       "10.0.0.1:1",
                                       "example.org:1",
                                       "127.0.0.1.example.org:1",
                                       "localhost.example.org:1",
                                       "[::ffff:10.0.0.1]:1",
                                       "1.127.0.0:1",
                                       "nonsense"};
    struct ps_error err = {0};
    for (size_t i = 0; i < sizeof local / sizeof *local; i++) {
        assert_true(ps_listen_is_local(local[i]));
        assert_int_equal(ps_check_listen("x", local[i], false, false, &err), 0);
    }
    for (size_t i = 0; i < sizeof open / sizeof *open; i++) {
        assert_false(ps_listen_is_local(open[i]));
        assert_int_equal(ps_check_listen("grpc-listen", open[i], false, false, &err), PS_FAILED_PRECONDITION);
        assert_non_null(strstr(err.message, "--insecure"));
        assert_int_equal(ps_check_listen("x", open[i], true, false, &err), 0);
        assert_int_equal(ps_check_listen("x", open[i], false, true, &err), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_files),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_where_it_may_listen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
