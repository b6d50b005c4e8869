/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/table.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

static const struct cli_column columns[] = {
    {"NAME", CLI_LEFT, CLI_CUT}, {"N", CLI_RIGHT, CLI_KEEP}, {"WHY", CLI_LEFT, CLI_WRAP}};

static void expect(size_t width, bool colours, const char *const *cells, size_t count, const char *wanted)
{
    struct cli_table table;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    cli_table_init(&table, columns, 3);
    for (size_t i = 0; i < count; i++)
        cli_table_add(&table, i % 3 == 1 ? CLI_RED : CLI_PLAIN, cells[i]);
    assert_int_equal(cli_table_render(&table, width, colours, &out), 0);
    assert_string_equal(out.data, wanted);
    cli_table_done(&table);
    ps_buf_done(&out);
}

static void columns_line_up(void **state)
{
    (void)state;
    const char *cells[] = {"a", "1", "x", "\xe8\xb7\x91\xe5\x88\x86", "23", ""}; /* two wide characters */
    expect(80, false, cells, 6,
           "NAME   N  WHY\n"
           "a      1  x\n"
           "\xe8\xb7\x91\xe5\x88\x86  23\n");
    expect(80, true, cells, 3,
           "\033[1mNAME\033[0m  \033[1mN\033[0m  \033[1mWHY\033[0m\n"
           "a     \033[31m1\033[0m  x\n");
}

static void too_wide(void **state)
{
    (void)state;
    const char *cells[] = {"a-name-that-is-long", "12345", "because of this and that"};
    /* 8 + 2 + 5 + 2 + 13 = 30: both columns that give end at the same width where they can. */
    expect(32, false, cells, 3,
           "NAME             N  WHY\n"
           "a-name-tha\u2026  12345  because of\n"
           "                    this and\n"
           "                    that\n");
    /* No column goes below 8; a word longer than the column is broken. */
    const char *word[] = {"x", "1", "abcdefghijklmnopqrst"};
    expect(10, false, word, 3,
           "NAME  N  WHY\n"
           "x     1  abcdefgh\n"
           "         ijklmnop\n"
           "         qrst\n");
    /* A wide character never straddles the edge. */
    const char *wide[] = {"\xe8\xb7\x91\xe8\xb7\x91\xe8\xb7\x91\xe8\xb7\x91\xe8\xb7\x91", "1", ""};
    expect(10, false, wide, 3,
           "NAME      N  WHY\n"
           "\xe8\xb7\x91\xe8\xb7\x91\xe8\xb7\x91\u2026   1\n");
}

static void hostile_text(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 10);
    cli_escape(&out, "a\033[31m\n\t\x7f \xc2\x9b \xff \xc0\x80 \xed\xa0\x80 \u202e \u2028 \u00e9\u8dd1");
    assert_string_equal(out.data,
                        "a\\x1B[31m\\x0A\\x09\\x7F \\x9B \\xFF \\xC0\\x80 \\xED\\xA0\\x80 \\u{202E} "
                        "\\u{2028} \u00e9\u8dd1");
    ps_buf_done(&out);
}

static void widths(void **state)
{
    (void)state;
    assert_int_equal(cli_text_width(""), 0);
    assert_int_equal(cli_text_width("abc"), 3);
    assert_int_equal(cli_text_width("\u00e9"), 1);
    assert_int_equal(cli_text_width("e\u0301"), 1);
    assert_int_equal(cli_text_width("\u8dd1"), 2);
    assert_int_equal(cli_text_width("\U00020000"), 2);
    assert_int_equal(cli_text_width("\xff\xff"), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(columns_line_up),
        cmocka_unit_test(too_wide),
        cmocka_unit_test(hostile_text),
        cmocka_unit_test(widths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
