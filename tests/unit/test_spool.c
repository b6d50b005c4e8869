/* SPDX-License-Identifier: Apache-2.0 */
#include "services/client/spool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const char id[] = "01ARZ3NDEKTSV4RRFFQ69G5FAV";

struct fixture {
    char dir[64], path[128];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    strcpy(f->dir, "/tmp/ps_test_spool.XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof f->path, "%s/%s-1-0.spool", f->dir, id);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    unlink(f->path);
    rmdir(f->dir);
    free(f);
    return 0;
}

static struct ps_spool *open_spool(struct fixture *f, uint64_t max)
{
    struct ps_error err = {0};
    struct ps_spool *spool = NULL;
    if (ps_spool_open(f->dir, id, 1, 0, max, &spool, &err))
        fail_msg("%s", err.message);
    return spool;
}

static void append(struct ps_spool *spool, enum ps_spool_kind kind, const char *text)
{
    struct ps_error err = {0};
    if (ps_spool_append(spool, kind, text, strlen(text), &err))
        fail_msg("%s", err.message);
}

static void expect(struct ps_spool *spool, enum ps_spool_kind kind, const char *text)
{
    struct ps_error err = {0};
    enum ps_spool_kind got;
    void *data;
    size_t size;
    int code = ps_spool_read(spool, &got, &data, &size, &err);
    if (!text) {
        assert_int_equal(code, PS_NOT_FOUND);
        return;
    }
    assert_int_equal(code, 0);
    assert_int_equal(got, kind);
    assert_int_equal(size, strlen(text));
    assert_memory_equal(data, text, size);
    free(data);
}

static void test_queue(void **state)
{
    struct fixture *f = *state;
    struct ps_spool *spool = open_spool(f, 1000);
    assert_false(ps_spool_unread(spool));
    expect(spool, 0, NULL);
    append(spool, PS_SPOOL_STEPS, "one");
    append(spool, PS_SPOOL_EPOCH, "");
    append(spool, PS_SPOOL_FINISH, "three");
    assert_true(ps_spool_unread(spool));
    expect(spool, PS_SPOOL_STEPS, "one");
    ps_spool_settle(spool); /* not everything was read: all stays */
    ps_spool_rewind(spool);
    expect(spool, PS_SPOOL_STEPS, "one");
    expect(spool, PS_SPOOL_EPOCH, "");
    append(spool, PS_SPOOL_STEPS, "four");
    expect(spool, PS_SPOOL_FINISH, "three");
    expect(spool, PS_SPOOL_STEPS, "four");
    expect(spool, 0, NULL);
    assert_true(ps_spool_bytes(spool) > 0);
    ps_spool_settle(spool);
    assert_int_equal(ps_spool_bytes(spool), 0);
    append(spool, PS_SPOOL_STEPS, "five");
    expect(spool, PS_SPOOL_STEPS, "five");
    ps_spool_settle(spool);
    ps_spool_close(spool);
    assert_int_equal(access(f->path, F_OK), -1); /* an empty one leaves nothing */
}

static void test_bound(void **state)
{
    struct fixture *f = *state;
    struct ps_error err = {0};
    struct ps_spool *spool = open_spool(f, 9 + 5);
    append(spool, PS_SPOOL_STEPS, "12345");
    assert_int_equal(ps_spool_append(spool, PS_SPOOL_STEPS, "", 0, &err), PS_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(err.message, f->path));
    expect(spool, PS_SPOOL_STEPS, "12345");
    ps_spool_settle(spool);
    append(spool, PS_SPOOL_STEPS, "again");
    ps_spool_close(spool);
}

static void test_taking_over(void **state)
{
    struct fixture *f = *state;
    struct ps_error err = {0};
    struct ps_spool *other = NULL, *spool = open_spool(f, 1000);
    append(spool, PS_SPOOL_STEPS, "left");
    assert_int_equal(ps_spool_take_over(f->dir, &other, &err), PS_NOT_FOUND); /* it is in use */
    ps_spool_close(spool);
    assert_int_equal(ps_spool_take_over(f->dir, &other, &err), 0);
    assert_string_equal(ps_spool_path(other), f->path);
    struct ps_spool *third = NULL;
    assert_int_equal(ps_spool_take_over(f->dir, &third, &err), PS_NOT_FOUND);
    expect(other, PS_SPOOL_STEPS, "left");
    expect(other, 0, NULL);
    ps_spool_settle(other);
    ps_spool_close(other);
    assert_int_equal(ps_spool_take_over(f->dir, &other, &err), PS_NOT_FOUND);
    assert_int_equal(ps_spool_take_over("/nonexistent", &other, &err), PS_NOT_FOUND);
}

/* Whatever byte the file ends at or is spoiled at: whole records before it come, nothing else does. */
static void test_torn(void **state)
{
    struct fixture *f = *state;
    const size_t record = 9 + 5;
    for (size_t cut = 0; cut <= 2 * record; cut++)
        for (int spoil = 0; spoil < 2; spoil++) {
            struct ps_error err = {0};
            struct ps_spool *spool = open_spool(f, 1000);
            append(spool, PS_SPOOL_STEPS, "first");
            append(spool, PS_SPOOL_STEPS, "other");
            ps_spool_close(spool);
            if (!spoil) {
                assert_int_equal(truncate(f->path, (off_t)cut), 0);
            } else if (cut < 2 * record) {
                FILE *file = fopen(f->path, "r+");
                fseek(file, (long)cut, SEEK_SET);
                int c = fgetc(file);
                fseek(file, (long)cut, SEEK_SET);
                fputc(c ^ 0x5a, file);
                fclose(file);
            }
            assert_int_equal(ps_spool_take_over(f->dir, &spool, &err), 0);
            size_t whole = cut / record;
            for (size_t i = 0; i < whole; i++)
                expect(spool, PS_SPOOL_STEPS, i ? "other" : "first");
            expect(spool, 0, NULL);
            append(spool, PS_SPOOL_FINISH, "after");
            expect(spool, PS_SPOOL_FINISH, "after");
            ps_spool_settle(spool);
            ps_spool_close(spool);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_queue, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bound, setup, teardown),
        cmocka_unit_test_setup_teardown(test_taking_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_torn, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
