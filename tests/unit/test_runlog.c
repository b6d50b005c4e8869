/* SPDX-License-Identifier: Apache-2.0
 * run.jsonl: attempts, another training in the folder, a torn line, a second writer. */
#include "trainer/runlog.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[64];
static const struct ps_report_pair pairs[] = {{"lr", "0.01"}, {"odd \"key\"", "line\nbreak \xff"}};
static const struct ps_report_config config = {.run_name = "a \"b\"",
                                               .world_size = 2,
                                               .model = "resnet18",
                                               .dataset = "data",
                                               .dataset_hash = "ab12",
                                               .device = "cpu",
                                               .epochs = 3,
                                               .batch_per_rank = 64,
                                               .config = pairs,
                                               .config_count = 2};

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/runlog.XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char path[96];
    snprintf(path, sizeof path, "%s/run.jsonl", dir);
    unlink(path);
    return rmdir(dir);
}

static char *contents(void)
{
    char path[96], *text;
    size_t size;
    snprintf(path, sizeof path, "%s/run.jsonl", dir);
    assert_int_equal(ps_read_file(path, 1 << 20, &text, &size, NULL), 0);
    return text;
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)); p += strlen(what))
        n++;
    return n;
}

static struct ps_runlog *opened(const char *training)
{
    struct ps_runlog *log = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_runlog_open(dir, training, &config, ps_monotonic_s(), &log, &err), 0);
    return log;
}

static void attempts(void **state)
{
    (void)state;
    struct ps_runlog *log = opened("0123");
    struct ps_report_epoch epoch = {.epoch = 1, .train_loss = NAN, .accuracy = 0.5, .val_loss = INFINITY};
    assert_int_equal(ps_runlog_epoch(log, &epoch, NULL), 0);
    assert_int_equal(ps_runlog_close(log, "failed", "no \"room\"", NULL), 0);
    char *text = contents();
    assert_non_null(strstr(text, "\"train_loss\":\"NaN\""));
    assert_non_null(strstr(text, "\"val_loss\":\"Infinity\""));
    assert_non_null(strstr(text, "\"name\":\"a \\\"b\\\"\""));
    assert_non_null(strstr(text, "\"odd \\\"key\\\"\":\"line\\u000abreak ?\""));
    assert_non_null(strstr(text, "\"state\":\"failed\",\"reason\":\"no \\\"room\\\"\""));
    assert_int_equal(count(text, "\n"), 3);
    free(text);
    /* Gone on from: the next attempt, appended. */
    log = opened("0123");
    assert_int_equal(ps_runlog_close(log, "finished", "", NULL), 0);
    text = contents();
    assert_int_equal(count(text, "\n"), 5);
    assert_int_equal(count(text, "{\"record\":\"start\",\"attempt\":2,"), 1);
    free(text);
    /* Another training in the folder. */
    log = opened("4567");
    assert_int_equal(ps_runlog_close(log, "finished", "", NULL), 0);
    text = contents();
    assert_int_equal(count(text, "\n"), 2);
    assert_non_null(strstr(text, "\"attempt\":1,\"training\":\"4567\""));
    free(text);
    assert_int_equal(ps_runlog_epoch(NULL, &epoch, NULL), 0);
    assert_int_equal(ps_runlog_close(NULL, "finished", "", NULL), 0);
}

static void torn(void **state)
{
    (void)state;
    struct ps_runlog *log = opened("0123");
    char path[96];
    snprintf(path, sizeof path, "%s/run.jsonl", dir);
    FILE *f = fopen(path, "a");
    assert_non_null(f);
    fputs("{\"record\":\"epoch\",\"att", f);
    fclose(f);
    /* While one writes, no other does. */
    struct ps_runlog *other;
    struct ps_error err = {0};
    assert_int_equal(ps_runlog_open(dir, "0123", &config, 0, &other, &err), PS_FAILED_PRECONDITION);
    assert_non_null(strstr(err.message, "another training"));
    assert_int_equal(ps_runlog_close(log, "failed", "", NULL), 0);
    f = fopen(path, "a");
    fputs("{\"record\":\"epoch\",\"att", f);
    fclose(f);
    log = opened("0123");
    assert_int_equal(ps_runlog_close(log, "finished", "", NULL), 0);
    char *text = contents();
    assert_null(strstr(text + strlen(text) - 40, "\"att{"));
    assert_int_equal(text[strlen(text) - 1], '\n');
    assert_non_null(strstr(text, "\n{\"record\":\"start\",\"attempt\":2,"));
    free(text);
}

static void no_room(void **state)
{
    (void)state;
    struct ps_runlog *log;
    struct ps_error err = {0};
    assert_true(ps_runlog_open("/nonexistent/folder", "0123", &config, 0, &log, &err) < 0);
    assert_non_null(strstr(err.message, "/nonexistent/folder"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(attempts, setup, teardown),
        cmocka_unit_test_setup_teardown(torn, setup, teardown),
        cmocka_unit_test(no_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
