/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/tensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Writes a file of a header and data; an unlinked file's descriptor and its size. */
static int make_file(const char *header, uint64_t said, const void *data, size_t size, uint64_t *ret_size)
{
    char path[] = "/tmp/ps_test_tensors.XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    unlink(path);
    unsigned char length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (unsigned char)(said >> 8 * i);
    assert_int_equal(write(fd, length, 8), 8);
    assert_int_equal(write(fd, header, strlen(header)), strlen(header));
    assert_int_equal(write(fd, data, size), size);
    *ret_size = 8 + strlen(header) + size;
    return fd;
}

static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                             "\"b\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[8,24]},"
                             "\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                             "\"empty\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[24,24]},"
                             "\"c\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[24,36]}}";
static const uint32_t words[9] = {
    0x01020304, 0x05060708, /* a */
    0x3f800000,             /* 1 */
    0x3f808000,             /* half way between 3f80 and 3f81: to the even one */
    0x3f818000,             /* half way: up to 3f82 */
    0x3f808001,             /* just above half way */
    0x7f800001,             /* a NaN whose upper half alone would be an infinity */
    0xff7fffff,             /* the lowest finite float: rounds to -infinity */
    0x80000000,             /* -0 */
};

/* The whole view, read in pieces of the given size. */
static unsigned char *read_view(const struct ps_tensor_view *view, size_t piece)
{
    struct ps_error err = {0};
    uint64_t size = ps_tensor_view_size(view);
    unsigned char *all = malloc(size + 1);
    for (uint64_t at = 0; at < size; at += piece) {
        size_t n = size - at < piece ? (size_t)(size - at) : piece;
        assert_int_equal(ps_tensor_view_read(view, at, all + at, n, &err), 0);
    }
    all[size] = '\0';
    assert_int_not_equal(ps_tensor_view_read(view, size, all, 1, &err), 0);
    assert_int_equal(ps_tensor_view_read(view, size, all, 0, &err), 0);
    return all;
}

static void expect_view(const char *const *names, size_t count, bool bf16, const char *wanted_header,
                        const void *wanted_data, size_t wanted_size)
{
    struct ps_error err = {0};
    uint64_t size;
    int fd = make_file(header, sizeof header - 1, words, sizeof words, &size);
    struct ps_tensor_choice choice = {names, count, bf16};
    struct ps_tensor_view *view = NULL;
    if (ps_tensor_view_open(fd, size, &choice, &view, &err))
        fail_msg("%s", err.message);
    for (size_t piece = 1; piece < 40; piece += 3) {
        unsigned char *all = read_view(view, piece);
        uint64_t length = all[0] | (uint64_t)all[1] << 8;
        assert_int_equal(length % 8, 0);
        assert_memory_equal(all + 8, wanted_header, strlen(wanted_header));
        for (size_t i = strlen(wanted_header); i < length; i++)
            assert_int_equal(all[8 + i], ' ');
        assert_int_equal(ps_tensor_view_size(view), 8 + length + wanted_size);
        assert_memory_equal(all + 8 + length, wanted_data, wanted_size);
        free(all);
    }
    ps_tensor_view_free(view);
    close(fd);
}

static void test_views(void **state)
{
    (void)state;
    static const char *const c_only[] = {"c"}, *const c_and_a[] = {"c", "a"};
    static const uint16_t rounded[7] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x7fc0, 0xff80, 0x8000};
    expect_view(c_only, 1, false,
                "{\"__metadata__\":{\"format\":\"pt\"},"
                "\"c\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}}",
                words + 6, 12);
    expect_view(c_and_a, 2, false,
                "{\"__metadata__\":{\"format\":\"pt\"},"
                "\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                "\"c\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[8,20]}}",
                (const uint32_t[]){words[0], words[1], words[6], words[7], words[8]}, 20);
    unsigned char mixed[8 + sizeof rounded];
    memcpy(mixed, words, 8);
    memcpy(mixed + 8, rounded, sizeof rounded);
    struct ps_error err = {0};
    uint64_t size;
    int fd = make_file(header, sizeof header - 1, words, sizeof words, &size);
    struct ps_tensor_view *view = NULL;
    assert_int_equal(ps_tensor_view_open(fd, size, &(struct ps_tensor_choice){NULL, 0, true}, &view, &err),
                     0);
    for (size_t piece = 1; piece < 40; piece++) {
        unsigned char *all = read_view(view, piece);
        assert_non_null(strstr((char *)all + 8, "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,2]"));
        assert_non_null(strstr((char *)all + 8, "\"a\":{\"dtype\":\"I64\""));
        assert_memory_equal(all + ps_tensor_view_size(view) - sizeof mixed, mixed, sizeof mixed);
        free(all);
    }
    ps_tensor_view_free(view);
    close(fd);
}

/* More elements than are converted at a time, from every odd and even place. */
static void test_large(void **state)
{
    (void)state;
    enum { count = 70001 };
    uint32_t *values = malloc(count * sizeof *values);
    for (uint32_t i = 0; i < count; i++)
        values[i] = i % 0x7f80 << 16; /* no NaN */
    struct ps_error err = {0};
    uint64_t size;
    const char text[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[70001],\"data_offsets\":[0,280004]}}";
    int fd = make_file(text, sizeof text - 1, values, count * sizeof *values, &size);
    struct ps_tensor_view *view = NULL;
    assert_int_equal(ps_tensor_view_open(fd, size, &(struct ps_tensor_choice){NULL, 0, true}, &view, &err),
                     0);
    for (size_t piece = 65535; piece < 200001; piece += 44444) {
        unsigned char *all = read_view(view, piece);
        const unsigned char *data = all + ps_tensor_view_size(view) - count * 2;
        for (uint32_t i = 0; i < count; i++)
            if (data[i * 2] != (i % 0x7f80 & 0xff) || data[i * 2 + 1] != i % 0x7f80 >> 8)
                fail_msg("element %u in pieces of %zu", i, piece);
        free(all);
    }
    ps_tensor_view_free(view);
    close(fd);
    free(values);
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *header, *words;
        long long said; /* 0: as it is */
    } cases[] = {
        {"{", "no safetensors", 0},
        {"[]", "no JSON object", 0},
        {"{\"a\":1}", "tensor a lacks", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "tensor a lacks", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", "lies at bytes 0 to 8 of 4", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", "lies at bytes 4 to 0", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", "lies at bytes -4", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]}}", "lies at bytes 0 to 3", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":1}", "no safetensors", 0},
        {"{}", "longer than the file", 1000},
        {"{}", "longer than the file", -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_error err = {0};
        uint64_t size;
        uint64_t said = cases[i].said ? (uint64_t)cases[i].said : strlen(cases[i].header);
        int fd = make_file(cases[i].header, said, words, 4, &size);
        struct ps_tensor_view *view = NULL;
        assert_int_equal(ps_tensor_view_open(fd, size, &(struct ps_tensor_choice){0}, &view, &err),
                         PS_DATA_LOSS);
        if (!strstr(err.message, cases[i].words))
            fail_msg("\"%s\" is not in \"%s\"", cases[i].words, err.message);
        close(fd);
    }
    static const char *const unknown[] = {"a", "layer9.weight"}, *const meta[] = {"__metadata__"};
    struct ps_error err = {0};
    uint64_t size;
    struct ps_tensor_view *view = NULL;
    int fd = make_file(header, sizeof header - 1, words, sizeof words, &size);
    assert_int_equal(
        ps_tensor_view_open(fd, size, &(struct ps_tensor_choice){unknown, 2, false}, &view, &err),
        PS_NOT_FOUND);
    assert_non_null(strstr(err.message, "no tensor layer9.weight"));
    assert_non_null(strstr(err.message, "a"));
    assert_int_equal(ps_tensor_view_open(fd, size, &(struct ps_tensor_choice){meta, 1, false}, &view, &err),
                     PS_NOT_FOUND);
    assert_int_equal(ps_tensor_view_open(fd, 5, &(struct ps_tensor_choice){0}, &view, &err), PS_DATA_LOSS);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
