/* SPDX-License-Identifier: Apache-2.0
 * Strings of messages, checked on the wire; and the descriptor set's reader. Both get every prefix and many
 * mutations of good bytes: nothing may be read outside of them (which the sanitizers watch). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/rpc/core.h"
#include "services/rpc/descriptors.h"
#include "tests/unit/test_rpc_probe.h"

static void test_field_names(void **state)
{
    (void)state;
    struct ps_error err = {0};
    static const struct {
        const char *bytes;
        size_t size;
        const char *field; /* NULL: good */
    } cases[] = {
        {"", 0, NULL},
        {"\x0a\x03"
         "abc",
         5, NULL},
        {"\x0a\x03"
         "a\0c",
         5, "text"},
        {"\x0a\x02\xc3\xbc", 4, NULL},
        {"\x0a\x01\xc3", 3, "text"},
        {"\x0a\x03\xed\xa0\x80", 5, "text"}, /* a surrogate */
        {"\x1a\x02\x00\xff", 4, NULL},       /* bytes may hold anything */
        {"\x22\x03\x0a\x01\xff", 5, "inner.label"},
        {"\x22\x00\x22\x03\x0a\x01\xff", 7, "inner.label"}, /* twice: they would be merged */
        {"\x2a\x01"
         "a\x2a\x01\xff",
         6, "words"},
        {"\x52\x01\xff", 3, NULL},         /* unknown */
        {"\x0d\xff\xff\xff\xff", 5, NULL}, /* text as a fixed32: left to protobuf-c */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int code = ps_rpc_check_message(NOTE_TYPE, (const uint8_t *)cases[i].bytes, cases[i].size, &err);
        assert_int_equal(code, cases[i].field ? PS_INVALID_ARGUMENT : 0);
        if (cases[i].field)
            assert_memory_equal(err.message, cases[i].field, strlen(cases[i].field));
    }
}

static void test_broken_wire(void **state)
{
    (void)state;
    struct ps_error err = {0};
    static const char *const bad[] = {"\x0a",
                                      "\x0a\x05"
                                      "abcd",
                                      "\x09"
                                      "1234567",
                                      "\x0d"
                                      "123",
                                      "\x80",
                                      "\x0b",
                                      "\x0f",
                                      "\x02\x01"
                                      "x",
                                      /* field 0 */ "\x22\x02\x0a\x05"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(ps_rpc_check_message(NOTE_TYPE, (const uint8_t *)bad[i], strlen(bad[i]), &err),
                         PS_INTERNAL);
}

/* Exact allocations, so that a byte too far is found out. */
static void test_mutations(void **state)
{
    (void)state;
    Paramsync__Test__V1__Inner inner = PARAMSYNC__TEST__V1__INNER__INIT;
    inner.label = "label";
    char *words[] = {"one", "two", "three"};
    Note note = NOTE_INIT;
    note.text = "some text";
    note.number = -1;
    note.inner = &inner;
    note.words = words;
    note.n_words = 3;
    uint8_t good[256];
    size_t size = protobuf_c_message_pack(&note.base, good);
    uint32_t random = 12345;
    for (int i = 0; i < 20000; i++) {
        random = random * 1664525 + 1013904223;
        size_t length = i <= (int)size ? (size_t)i : size;
        uint8_t *copy = malloc(length ? length : 1);
        memcpy(copy, good, length);
        if (i > (int)size)
            copy[(random >> 8) % length] = (uint8_t)(random >> 24);
        if (ps_rpc_check_message(NOTE_TYPE, copy, length, NULL) == 0) {
            /* What passes is text through and through, once unpacked. */
            Note *unpacked = (Note *)protobuf_c_message_unpack(NOTE_TYPE, NULL, length, copy);
            if (unpacked)
                protobuf_c_message_free_unpacked(&unpacked->base, NULL);
        }
        free(copy);
    }
}

static void test_descriptor_reader(void **state)
{
    (void)state;
    struct ps_rpc_descriptors *set = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_descriptors_read(probe_descriptor_set, probe_descriptor_set_size, &set, &err), 0);
    assert_int_equal(ps_rpc_descriptors_check(set, probe_methods, PROBE_METHODS, &err), 0);
    assert_non_null(ps_rpc_descriptors_file(set, "paramsync/test/v1/probe.proto"));
    assert_null(ps_rpc_descriptors_file(set, "probe.proto"));
    static const char *const symbols[] = {"paramsync.test.v1.Probe", "paramsync.test.v1.Probe.Echo",
                                          "paramsync.test.v1.Note",
                                          "grpc.health.v1.HealthCheckResponse.ServingStatus"};
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        assert_non_null(ps_rpc_descriptors_symbol(set, symbols[i]));
    assert_null(ps_rpc_descriptors_symbol(set, "paramsync.test.v1"));
    ps_rpc_descriptors_free(set);

    int refused = 0;
    for (size_t length = 0; length < probe_descriptor_set_size; length += 7) {
        uint8_t *copy = malloc(length ? length : 1);
        memcpy(copy, probe_descriptor_set, length);
        set = NULL;
        int code = ps_rpc_descriptors_read(copy, length, &set, &err);
        refused += code < 0;
        ps_rpc_descriptors_free(set);
        free(copy);
    }
    assert_true(refused > 100); /* whole files, cut at their ends, are readable */
    uint32_t random = 99;
    for (int i = 0; i < 300; i++) {
        uint8_t *copy = malloc(probe_descriptor_set_size);
        memcpy(copy, probe_descriptor_set, probe_descriptor_set_size);
        for (int j = 0; j < 3; j++) {
            random = random * 1664525 + 1013904223;
            copy[(random >> 8) % probe_descriptor_set_size] = (uint8_t)(random >> 24);
        }
        set = NULL;
        ps_rpc_descriptors_read(copy, probe_descriptor_set_size, &set, &err);
        ps_rpc_descriptors_free(set);
        free(copy);
    }
}

/* A message type inside itself, deeper than any of ours. */
static void test_deep_nesting_is_refused(void **state)
{
    (void)state;
    uint8_t bytes[20000];
    size_t size = 0;
    for (int depth = 0; depth < 4000;
         depth++) { /* from the inside out: field 3 of DescriptorProto, again and again */
        uint8_t head[8];
        size_t n = 0, left = size;
        head[n++] = 0x1a;
        do {
            head[n++] = (uint8_t)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
            left >>= 7;
        } while (left);
        memmove(bytes + n, bytes, size);
        memcpy(bytes, head, n);
        size += n;
    }
    uint8_t file[20016] = {0x22};
    size_t n = 1, left = size;
    do {
        file[n++] = (uint8_t)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
        left >>= 7;
    } while (left);
    memcpy(file + n, bytes, size);
    uint8_t set_bytes[20040] = {0x0a};
    size_t m = 1;
    left = n + size;
    do {
        set_bytes[m++] = (uint8_t)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
        left >>= 7;
    } while (left);
    memcpy(set_bytes + m, file, n + size);
    struct ps_rpc_descriptors *set = NULL;
    assert_int_equal(ps_rpc_descriptors_read(set_bytes, m + n + size, &set, NULL), PS_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_field_names),
        cmocka_unit_test(test_broken_wire),
        cmocka_unit_test(test_mutations),
        cmocka_unit_test(test_descriptor_reader),
        cmocka_unit_test(test_deep_nesting_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
