/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/access.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void test_roles(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_access *access = ps_access_new();
    assert_true(ps_access_is_open(access));
    assert_int_equal(ps_access_role(access, NULL), PS_ROLE_ADMIN);
    assert_int_equal(ps_access_role(access, "anything"), PS_ROLE_ADMIN);
    assert_int_equal(ps_access_session_role(access, NULL), PS_ROLE_ADMIN);
    assert_int_equal(ps_access_load(access,
                                    " s3cret \r\n# people who look\nread looker\n\nwrite trainer\n"
                                    "admin\tchief\n",
                                    "t", &err),
                     0);
    assert_false(ps_access_is_open(access));
    assert_int_equal(ps_access_role(access, "s3cret"), PS_ROLE_ADMIN);
    assert_int_equal(ps_access_role(access, "looker"), PS_ROLE_READ);
    assert_int_equal(ps_access_role(access, "trainer"), PS_ROLE_WRITE);
    assert_int_equal(ps_access_role(access, "chief"), PS_ROLE_ADMIN);
    static const char *const wrong[] = {NULL,          "",     "s3cre", "s3crets", "S3cret", "s3crex",
                                        "read looker", "read", "#"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(ps_access_role(access, wrong[i]), PS_ROLE_NONE);
    ps_access_free(access);
}

static void test_sessions(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_access *access = ps_access_new();
    char session[PS_SHA256_HEX], other[PS_SHA256_HEX];
    assert_int_equal(ps_access_load(access, "chief\nread looker\n", "t", &err), 0);
    assert_false(ps_access_session(access, "nobody", session));
    assert_true(ps_access_session(access, "looker", session));
    assert_true(ps_access_session(access, "chief", other));
    assert_string_not_equal(session, other);
    assert_int_equal(ps_access_session_role(access, session), PS_ROLE_READ);
    assert_int_equal(ps_access_session_role(access, other), PS_ROLE_ADMIN);
    /* A session is no token, a token no session, and neither is a part of one. */
    assert_int_equal(ps_access_role(access, session), PS_ROLE_NONE);
    assert_int_equal(ps_access_session_role(access, "chief"), PS_ROLE_NONE);
    assert_int_equal(ps_access_session_role(access, ""), PS_ROLE_NONE);
    assert_int_equal(ps_access_session_role(access, NULL), PS_ROLE_NONE);
    session[0] = session[0] == '0' ? '1' : '0';
    assert_int_equal(ps_access_session_role(access, session), PS_ROLE_NONE);
    /* A token that is taken away takes its sessions along; one that stays keeps them. */
    assert_int_equal(ps_access_load(access, "newchief\nread looker\n", "t", &err), 0);
    assert_int_equal(ps_access_session_role(access, other), PS_ROLE_NONE);
    assert_int_equal(ps_access_role(access, "chief"), PS_ROLE_NONE);
    assert_true(ps_access_session(access, "looker", session));
    assert_int_equal(ps_access_session_role(access, session), PS_ROLE_READ);
    ps_access_free(access);
}

static void test_bad_files(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"", "the first line, which is the token, is empty"},
        {"\nx\n", "the first line, which is the token, is empty"},
        {"a b\n", "t, line 1: the token may only have printable ASCII characters"},
        {"\xc3\xa9\n", "line 1: the token may only have printable"},
        {"good\nsecond\n", "t, line 2: expected ROLE TOKEN"},
        {"good\nwriter x\n", "line 2: expected ROLE TOKEN"},
        {"good\nread \n", "line 2: expected ROLE TOKEN"},
        {"good\nread a b\n", "line 2: the token may only have printable"},
        {"good\nread good\n", "line 2: this token stands there already"},
    };
    struct ps_access *access = ps_access_new();
    struct ps_error err = {0};
    assert_int_equal(ps_access_load(access, "before", "t", &err), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err = (struct ps_error){0};
        assert_int_equal(ps_access_load(access, cases[i].text, "t", &err), PS_INVALID_ARGUMENT);
        if (!strstr(err.message, cases[i].words))
            fail_msg("\"%s\" is not in \"%s\"", cases[i].words, err.message);
        assert_null(strstr(err.message, "good"));
        assert_int_equal(ps_access_role(access, "before"), PS_ROLE_ADMIN);
    }
    char many[257 * 16], *end = many;
    for (int i = 0; i < 257; i++)
        end += sprintf(end, "read t%d\n", i);
    assert_int_equal(ps_access_load(access, many, "t", &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "line 257: at most 256 tokens"));
    many[strlen(many) - strlen("read t256\n")] = '\0';
    assert_int_equal(ps_access_load(access, many, "t", &err), 0);
    assert_int_equal(ps_access_role(access, "t255"), PS_ROLE_READ);
    ps_access_free(access);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_roles),
        cmocka_unit_test(test_sessions),
        cmocka_unit_test(test_bad_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
