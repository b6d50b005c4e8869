/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/fs.h"
#include "services/base/trace.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[] = "/tmp/ps_test_trace.XXXXXX";

static int make_root(void **state)
{
    (void)state;
    return mkdtemp(root) ? 0 : -1;
}

static int drop_root(void **state)
{
    (void)state;
    return rmdir(root);
}

static char *written(const char *name)
{
    char path[128], *text;
    size_t size;
    struct ps_error err = {0};
    snprintf(path, sizeof path, "%s/%s", root, name);
    assert_int_equal(ps_read_file(path, 1 << 24, &text, &size, &err), 0);
    unlink(path);
    return text;
}

static void test_format(void **state)
{
    (void)state;
    struct ps_trace *t;
    struct ps_error err = {0};
    char path[128];
    snprintf(path, sizeof path, "%s/t.json", root);
    assert_int_equal(ps_trace_open(path, 3, "rank 3", 0, &t, &err), 0);
    ps_trace_span(t, PS_TRACE_LOOP, "forward", 1.5, 1.75, NULL, 0);
    ps_trace_span(t, PS_TRACE_COMM, "all-reduce", 1.5000001, 2, "bucket", 7);
    assert_int_not_equal(access(path, F_OK), 0); /* not before the end */
    assert_int_equal(ps_trace_close(t, 0, &err), 0);
    char *text = written("t.json");
    assert_string_equal(
        text,
        "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped\":0},\"traceEvents\":[\n"
        "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":3,\"tid\":0,\"args\":{\"name\":\"rank 3\"}},\n"
        "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":3,\"tid\":0,\"args\":{\"name\":\"loop\"}},\n"
        "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":3,\"tid\":1,\"args\":{\"name\":\"communication\"}},\n"
        "{\"ph\":\"X\",\"name\":\"forward\",\"pid\":3,\"tid\":0,\"ts\":1500000.000,\"dur\":250000.000},\n"
        "{\"ph\":\"X\",\"name\":\"all-reduce\",\"pid\":3,\"tid\":1,\"ts\":1500000.100,\"dur\":499999.900,"
        "\"args\":{\"bucket\":7}}\n"
        "]}\n");
    free(text);
}

static void *record(void *trace)
{
    for (int i = 0; i < 1000; i++)
        ps_trace_span(trace, PS_TRACE_LOOP, "work", i, i + 1, NULL, 0);
    return NULL;
}

/* Over the bound spans are counted, from several threads; the file stays whole. */
static void test_bound(void **state)
{
    (void)state;
    struct ps_trace *t;
    struct ps_error err = {0};
    pthread_t threads[4];
    char path[128];
    snprintf(path, sizeof path, "%s/t.json", root);
    assert_int_equal(ps_trace_open(path, 0, "rank 0", 1500, &t, &err), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, record, t), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(ps_trace_close(t, 1, &err), 0);
    record(t); /* lost, and harmless */
    assert_int_equal(ps_trace_close(t, 0, &err), 0);
    char *text = written("t.json");
    size_t spans = 0;
    for (const char *p = text; (p = strstr(p, "\"work\"")); p++)
        spans++;
    assert_int_equal(spans, 1500);
    assert_non_null(strstr(text, "\"dropped\":2500"));
    assert_string_equal(text + strlen(text) - 5, "}\n]}\n");
    free(text);
}

static void test_refused(void **state)
{
    (void)state;
    struct ps_trace *t = NULL;
    struct ps_error err = {0};
    assert_int_not_equal(ps_trace_open("/nowhere/t.json", 0, "r", 0, &t, &err), 0);
    assert_non_null(strstr(err.message, "/nowhere"));
    assert_int_equal(ps_trace_open("/tmp/", 0, "r", 0, &t, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_trace_open("", 0, "r", 0, &t, &err), PS_INVALID_ARGUMENT);
    assert_null(t);
    ps_trace_span(NULL, 0, "x", 0, 1, NULL, 0);
    assert_int_equal(ps_trace_close(NULL, 0, &err), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, make_root, drop_root);
}
