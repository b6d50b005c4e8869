/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/cifar.h"

#include <stdlib.h>
#include <string.h>

static uint8_t records[3][PS_CIFAR_RECORD];

static void fill_records(void)
{
    for (int i = 0; i < 3; i++) {
        memset(records[i], 10 * i + 1, sizeof records[i]);
        records[i][0] = (uint8_t)(9 - i);
        records[i][PS_CIFAR_RECORD - 1] = (uint8_t)(200 + i);
    }
}

static void done(struct ps_split *split)
{
    free(split->pixels);
    free(split->labels);
}

static void test_binary(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_split split = {0};
    fill_records();
    assert_int_equal(ps_cifar_add_binary(&split, records[0], sizeof records[0], "one", &err), 0);
    assert_int_equal(ps_cifar_add_binary(&split, records[1], 2 * sizeof records[0], "two", &err), 0);
    assert_int_equal(split.count, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(split.labels[i], 9 - i);
        assert_memory_equal(split.pixels + i * PS_IMAGE_VALUES, records[i] + 1, PS_IMAGE_VALUES);
    }
    done(&split);
}

static void bad_binary(const void *data, size_t size, const char *const words[])
{
    struct ps_error err = {0};
    struct ps_split split = {0};
    assert_int_equal(ps_cifar_add_binary(&split, data, size, "data_batch_2.bin", &err), PS_INVALID_ARGUMENT);
    assert_int_equal(split.count, 0);
    assert_non_null(strstr(err.message, "data_batch_2.bin"));
    for (int i = 0; words[i]; i++)
        if (!strstr(err.message, words[i]))
            fail_msg("\"%s\" does not say %s", err.message, words[i]);
}

static void test_bad_binary(void **state)
{
    (void)state;
    fill_records();
    bad_binary("", 0, (const char *const[]){"empty", NULL});
    bad_binary(records, 2 * sizeof records[0] - 1,
               (const char *const[]){"record 1", "3072", "truncated", NULL});
    bad_binary(records, 100, (const char *const[]){"record 0", "only 100", NULL});
    records[2][0] = 10;
    bad_binary(records, sizeof records, (const char *const[]){"record 2", "label 10", NULL});
}

/* Builds a python batch; the hooks bend one thing each. */
struct bend {
    int label, labels, columns, rows, drop_data, tuple_labels, text_label;
};

static size_t python_batch(uint8_t *out, struct bend bend)
{
    uint8_t *p = out;
    size_t rows = bend.rows >= 0 ? (size_t)bend.rows : 2,
           columns = bend.columns ? (size_t)bend.columns : PS_IMAGE_VALUES;
#define ADD(literal) (memcpy(p, literal, sizeof(literal) - 1), p += sizeof(literal) - 1)
    ADD("\x80\x02}(U\x06labels");
    ADD("](");
    for (int i = 0; i < bend.labels; i++) {
        if (bend.text_label && i == 1) {
            ADD("U\x01"
                "1");
            continue;
        }
        *p++ = 'K';
        *p++ = (uint8_t)(i == 1 ? bend.label : 7);
    }
    ADD("e");
    if (bend.tuple_labels)
        ADD("0)");
    if (!bend.drop_data) {
        ADD("U\x04"
            "datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01"
            "b\x87R(K\x01K");
        *p++ = (uint8_t)rows;
        *p++ = 'M';
        *p++ = (uint8_t)columns;
        *p++ = (uint8_t)(columns >> 8);
        ADD("\x86"
            "cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89T");
        uint32_t size = (uint32_t)(rows * columns);
        memcpy(p, &size, 4);
        p += 4;
        for (uint32_t i = 0; i < size; i++)
            *p++ = (uint8_t)(i % 253);
        ADD("tb");
    }
    ADD("u.");
    return (size_t)(p - out);
}

static void test_pickle_batch(void **state)
{
    (void)state;
    static uint8_t data[3 * PS_IMAGE_VALUES];
    struct ps_error err = {0};
    struct ps_split split = {0};
    size_t size = python_batch(data, (struct bend){.label = 9, .labels = 2, .rows = -1});
    assert_int_equal(ps_cifar_add_pickle(&split, data, size, "data_batch_1", &err), 0);
    assert_int_equal(split.count, 2);
    assert_int_equal(split.labels[0], 7);
    assert_int_equal(split.labels[1], 9);
    for (size_t i = 0; i < 2 * (size_t)PS_IMAGE_VALUES; i++)
        assert_int_equal(split.pixels[i], i % 253);
    done(&split);
}

static void bad_pickle(struct bend bend, const char *word)
{
    static uint8_t data[3 * PS_IMAGE_VALUES];
    struct ps_error err = {0};
    struct ps_split split = {0};
    size_t size = python_batch(data, bend);
    assert_int_equal(ps_cifar_add_pickle(&split, data, size, "data_batch_1", &err), PS_INVALID_ARGUMENT);
    assert_int_equal(split.count, 0);
    assert_non_null(strstr(err.message, "data_batch_1"));
    if (!strstr(err.message, word))
        fail_msg("\"%s\" does not say %s", err.message, word);
}

static void test_bad_pickle_batch(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_split split = {0};
    bad_pickle((struct bend){.label = 10, .labels = 2, .rows = -1}, "record 1: label 10");
    bad_pickle((struct bend){.label = 1, .labels = 2, .rows = -1, .text_label = 1}, "record 1: the label");
    bad_pickle((struct bend){.label = 1, .labels = 3, .rows = -1}, "3 labels for 2 images");
    bad_pickle((struct bend){.label = 1, .labels = 2, .rows = -1, .columns = 3071}, "3071 bytes");
    bad_pickle((struct bend){.labels = 0, .rows = 0}, "empty");
    bad_pickle((struct bend){.label = 1, .labels = 2, .rows = -1, .drop_data = 1}, "\"data\"");
    bad_pickle((struct bend){.label = 1, .labels = 2, .rows = -1, .tuple_labels = 1}, "not a list");
    assert_int_equal(ps_cifar_add_pickle(&split, (const uint8_t *)"", 0, "b", &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "empty"));
    assert_int_equal(ps_cifar_add_pickle(&split, (const uint8_t *)"\x80\x02N.", 4, "b", &err),
                     PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "not a CIFAR-10 batch"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_binary),
        cmocka_unit_test(test_bad_binary),
        cmocka_unit_test(test_pickle_batch),
        cmocka_unit_test(test_bad_pickle_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
