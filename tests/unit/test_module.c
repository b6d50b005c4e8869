/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/module.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void test_absent_names_the_folder(void **state)
{
    (void)state;
    struct ps_error err = {0};
    void *symbol = &err;
    assert_int_equal(setenv("PARAMSYNC_MODULE_DIR", "/nowhere", 1), 0);
    assert_int_equal(ps_module_open("absent", "x", &symbol, &err), PS_UNAVAILABLE);
    assert_ptr_equal(symbol, &err); /* untouched */
    assert_non_null(strstr(err.message, "libparamsync-absent.so in /nowhere"));
    unsetenv("PARAMSYNC_MODULE_DIR");
    assert_int_equal(ps_module_open("absent", "x", &symbol, &err), PS_UNAVAILABLE);
    assert_non_null(strstr(err.message, "/../lib/paramsync"));
}

static void test_names_are_closed(void **state)
{
    (void)state;
    static const char *const bad[] = {"", "../x", "a/b", "A", "0123456789012345678901234567890123"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct ps_error err = {0};
        void *symbol;
        assert_int_equal(ps_module_open(bad[i], "x", &symbol, &err), PS_INVALID_ARGUMENT);
    }
}

static void test_broken_file_says_why(void **state)
{
    (void)state;
    char dir[] = "/tmp/paramsync-module-XXXXXX", path[128];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/libparamsync-broken.so", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("not a library", f);
    fclose(f);
    setenv("PARAMSYNC_MODULE_DIR", dir, 1);
    struct ps_error err = {0};
    void *symbol;
    assert_int_equal(ps_module_open("broken", "x", &symbol, &err), PS_UNAVAILABLE);
    assert_non_null(strstr(err.message, "broken"));
    unsetenv("PARAMSYNC_MODULE_DIR");
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_absent_names_the_folder),
        cmocka_unit_test(test_names_are_closed),
        cmocka_unit_test(test_broken_file_says_why),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
