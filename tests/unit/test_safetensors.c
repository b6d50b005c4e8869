/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/checkpoint/safetensors.h"

#include "services/base/fs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[64];

static int set_up(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/ps_test_safetensors.XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static const float weights[6] = {1, -2, 3.5f, 0, 1e-30f, -0.0f};
static const int64_t counter = 1234567890123;
static const uint8_t bytes[3] = {1, 2, 3};

static void test_round_trip(void **state)
{
    (void)state;
    const struct ps_tensor tensors[] = {
        {"a.weight", PS_TENSOR_F32, 2, {2, 3}, sizeof weights, weights},
        {"b \"quoted\" \\ name", PS_TENSOR_U8, 1, {3}, 3, bytes},
        {"counter", PS_TENSOR_I64, 0, {0}, 8, &counter},
        {"nothing", PS_TENSOR_F32, 2, {0, 7}, 0, NULL},
    };
    const struct ps_tensor_pair metadata[] = {{"format", "pt"}, {"line", "one\ntwo \"x\" \\ \xc3\xa9"}};
    struct ps_error err = {0};
    char *path = ps_path_join(root, "x.safetensors"), digest[PS_SHA256_HEX], again[PS_SHA256_HEX];
    assert_int_equal(ps_safetensors_write(NULL, tensors, 4, metadata, 2, digest, &err), 0);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(ps_safetensors_write(path, tensors, 4, metadata, 2, again, &err), 0);
    assert_string_equal(digest, again);

    char *data;
    size_t size;
    assert_int_equal(ps_read_file(path, 1 << 20, &data, &size, &err), 0);
    uint64_t length;
    memcpy(&length, data, 8);
    assert_int_equal(length % 8, 0); /* the tensors' bytes begin aligned */
    assert_int_equal(8 + length + 24 + 3 + 8, size);
    free(data);

    struct ps_safetensors *st;
    assert_int_equal(ps_safetensors_read(path, &st, &err), 0);
    assert_int_equal(st->count, 4);
    for (size_t i = 0; i < 4; i++) {
        const struct ps_tensor *t = ps_safetensors_find(st, tensors[i].name);
        assert_non_null(t);
        assert_int_equal(t->type, tensors[i].type);
        assert_int_equal(t->ndim, tensors[i].ndim);
        for (int d = 0; d < t->ndim; d++)
            assert_int_equal(t->shape[d], tensors[i].shape[d]);
        assert_int_equal(t->bytes, tensors[i].bytes);
        if (t->bytes)
            assert_memory_equal(t->data, tensors[i].data, t->bytes);
    }
    assert_null(ps_safetensors_find(st, "other"));
    assert_string_equal(ps_safetensors_metadata(st, "format"), "pt");
    assert_string_equal(ps_safetensors_metadata(st, "line"), metadata[1].value);
    assert_null(ps_safetensors_metadata(st, "none"));
    ps_safetensors_free(st);
    ps_safetensors_free(NULL);
    free(path);

    struct ps_tensor wrong = tensors[0];
    wrong.bytes = 20;
    assert_int_equal(ps_safetensors_write(NULL, &wrong, 1, NULL, 0, NULL, &err), PS_INTERNAL);
    const struct ps_tensor_pair not_text = {"k", "\xff"};
    assert_int_equal(ps_safetensors_write(NULL, tensors, 1, &not_text, 1, NULL, &err), PS_INVALID_ARGUMENT);
}

/* header text and data; length is taken from the text unless given */
static int parse(const char *header, const void *data, size_t data_size, struct ps_safetensors **ret,
                 struct ps_error *err)
{
    uint64_t length = strlen(header);
    size_t size = 8 + strlen(header) + data_size;
    char *file = malloc(size); /* exact: AddressSanitizer sees a read past the end */
    assert_non_null(file);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, strlen(header));
    if (data_size)
        memcpy(file + 8 + strlen(header), data, data_size);
    return ps_safetensors_parse(file, size, "x.safetensors", ret, err);
}

static void refused(const char *header, size_t data_size, const char *word)
{
    static const char zeros[64];
    struct ps_error err = {0};
    struct ps_safetensors *st = NULL;
    assert_true(parse(header, zeros, data_size, &st, &err) < 0);
    assert_null(st);
    if (!strstr(err.message, "x.safetensors") || !strstr(err.message, word))
        fail_msg("\"%s\" does not say %s", err.message, word);
}

static void test_foreign_header(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_safetensors *st;
    /* white space, other order of keys, escapes, offsets not in the order of the names */
    assert_int_equal(
        parse(
            " { \"module.b\" : { \"shape\":[2] , \"data_offsets\" : [4,6], \"dtype\":\"U8\"},\n"
            "\"\\u0061\\/\\u00e9\\ud83d\\ude00\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}  ",
            "\0\0\x80?xy", 6, &st, &err),
        0);
    assert_int_equal(st->count, 2);
    const struct ps_tensor *b = ps_safetensors_find(st, "b"); /* written by DistributedDataParallel */
    assert_non_null(b);
    assert_memory_equal(b->data, "xy", 2);
    const struct ps_tensor *a = ps_safetensors_find(st, "a/\xc3\xa9\xf0\x9f\x98\x80");
    assert_non_null(a);
    float one;
    memcpy(&one, a->data, 4);
    assert_true(one == 1.0f);
    ps_safetensors_free(st);
    assert_int_equal(parse("{}", NULL, 0, &st, &err), 0);
    assert_int_equal(st->count, 0);
    ps_safetensors_free(st);
}

static void test_refused(void **state)
{
    (void)state;
    refused("", 0, "no JSON object");
    refused("[]", 0, "no JSON object");
    refused("{", 0, "string is missing");
    refused("{\"a", 0, "without its end");
    refused("{\"a\\", 0, "without its end");
    refused("{\"a\\q\":1}", 0, "escape");
    refused("{\"a\\u00g0\":1}", 0, "escape");
    refused("{\"a\\u0000\":1}", 0, "escape");
    refused("{\"a\\ud800\":1}", 0, "surrogate");
    refused("{\"\xff\":1}", 0, "UTF-8");
    refused("{\"a\":1}", 0, "description");
    refused("{\"a\"}", 0, "colon");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "not whole");
    refused("{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "F33");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4,
            "unknown or repeated");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "do not agree");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "do not agree");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "whole number");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4,
            "out of range");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
            "do not agree");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
            "too long");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "truncated");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5, "after the last tensor");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]}}", 5, "begins at 1");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
            6, "begins at 2");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
            2, "comes twice");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}} x", 1, "text after its end");
    refused("{\"__metadata__\":{\"a\":1}}", 0, "string is missing");
    refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice");
    char name[400] = "{\"";
    memset(name + 2, 'n', 300);
    strcpy(name + 302, "\":{}}");
    refused(name, 0, "too long");
}

static void test_refused_lengths(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {UINT64_MAX, (uint64_t)1 << 62, (uint64_t)1 << 31, 9, 3};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct ps_error err = {0};
        struct ps_safetensors *st = NULL;
        char *file = malloc(10);
        assert_non_null(file);
        memcpy(file, &lengths[i], 8);
        memcpy(file + 8, "{}", 2);
        assert_int_equal(ps_safetensors_parse(file, 10, "x", &st, &err), PS_DATA_LOSS);
        assert_null(st);
    }
    for (size_t n = 0; n < 8; n++) {
        struct ps_error err = {0};
        struct ps_safetensors *st = NULL;
        assert_int_equal(ps_safetensors_parse(calloc(1, n + 1), n, "x", &st, &err), PS_DATA_LOSS);
        assert_non_null(strstr(err.message, "truncated"));
    }
}

/* Every cut of a good file is refused; every changed header byte ends in a value or a message. */
static void test_cut_and_changed(void **state)
{
    (void)state;
    const struct ps_tensor tensors[] = {{"a", PS_TENSOR_F32, 2, {2, 3}, sizeof weights, weights},
                                        {"b", PS_TENSOR_I64, 0, {0}, 8, &counter}};
    const struct ps_tensor_pair metadata = {"k", "v\n"};
    struct ps_error err = {0};
    char *path = ps_path_join(root, "cut"), *data;
    size_t size;
    assert_int_equal(ps_safetensors_write(path, tensors, 2, &metadata, 1, NULL, &err), 0);
    assert_int_equal(ps_read_file(path, 1 << 20, &data, &size, &err), 0);
    free(path);
    for (size_t n = 0; n < size; n++) {
        struct ps_safetensors *st = NULL;
        char *copy = malloc(n + 1);
        assert_non_null(copy);
        memcpy(copy, data, n);
        assert_true(ps_safetensors_parse(copy, n, "cut", &st, &err) < 0);
    }
    for (size_t at = 0; at < size - 32; at++)
        for (int value = 0; value < 256; value += 5) {
            struct ps_safetensors *st = NULL;
            char *copy = malloc(size);
            assert_non_null(copy);
            memcpy(copy, data, size);
            copy[at] = (char)value;
            if (ps_safetensors_parse(copy, size, "changed", &st, &err) == 0)
                ps_safetensors_free(st);
            else
                assert_null(st);
        }
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),      cmocka_unit_test(test_foreign_header),
        cmocka_unit_test(test_refused),         cmocka_unit_test(test_refused_lengths),
        cmocka_unit_test(test_cut_and_changed),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
