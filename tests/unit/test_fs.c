/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/fs.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[] = "/tmp/ps_test_fs.XXXXXX";

static int count_entries(const char *dir)
{
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.';
    if (d)
        closedir(d);
    return n;
}

static void test_whole_or_absent(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char *dir = ps_path_join(root, "a/b/c");
    assert_int_equal(ps_make_dirs(dir, 0755, &err), 0);
    assert_int_equal(ps_make_dirs(dir, 0755, &err), 0);
    char *path = ps_path_join(dir, "file");
    assert_int_equal(ps_write_file_atomic(path, "hello", 5, &err), 0);
    char *data;
    size_t size;
    assert_int_equal(ps_read_file(path, 5, &data, &size, &err), 0);
    assert_int_equal(size, 5);
    assert_string_equal(data, "hello");
    free(data);
    assert_int_equal(ps_read_file(path, 4, &data, &size, &err), PS_INVALID_ARGUMENT);
    struct ps_new_file file;
    assert_int_equal(ps_new_file_open(&file, path, &err), 0);
    assert_int_equal(ps_write_all(file.fd, "bye", 3, path, &err), 0);
    assert_int_equal(count_entries(dir), 2);
    ps_new_file_abandon(&file);
    ps_new_file_abandon(&file);
    assert_int_equal(count_entries(dir), 1);
    assert_int_equal(ps_read_file(path, 100, &data, &size, &err), 0);
    assert_string_equal(data, "hello");
    free(data);
    free(path);
    free(dir);
}

static void test_errors_name_the_path(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char *data;
    assert_int_equal(ps_read_file("/nowhere/x", 10, &data, NULL, &err), PS_NOT_FOUND);
    assert_non_null(strstr(err.message, "/nowhere/x"));
    char *file = ps_path_join(root, "plain");
    assert_int_equal(ps_write_file_atomic(file, "", 0, &err), 0);
    char *below = ps_path_join(file, "sub");
    assert_true(ps_make_dirs(below, 0755, &err) < 0);
    assert_non_null(strstr(err.message, "plain"));
    assert_int_equal(ps_write_file_atomic("/nowhere/x", "", 0, &err), PS_NOT_FOUND);
    free(below);
    free(file);
}

static void test_an_exit_in_between_leaves_nothing(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char *dir = ps_path_join(root, "exit");
    assert_int_equal(ps_make_dirs(dir, 0755, &err), 0);
    char *path = ps_path_join(dir, "file");
    pid_t child = fork();
    if (child == 0) {
        struct ps_new_file first, second, done;
        char *other = ps_path_join(dir, "other");
        if (ps_new_file_open(&first, path, &err) || ps_new_file_open(&second, other, &err) ||
            ps_new_file_open(&done, path, &err) || ps_new_file_commit(&done, &err))
            _exit(1);
        ps_new_files_abandon_all();
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(count_entries(dir), 1); /* the one that was committed */
    free(path);
    free(dir);
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_or_absent),
        cmocka_unit_test(test_errors_name_the_path),
        cmocka_unit_test(test_an_exit_in_between_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
