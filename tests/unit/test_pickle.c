/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/pickle.h"

#include <stdlib.h>
#include <string.h>

struct bytes {
    uint8_t data[4096];
    size_t size;
};

static void put(struct bytes *b, const char *text, size_t n)
{
    assert_true(b->size + n <= sizeof b->data);
    memcpy(b->data + b->size, text, n);
    b->size += n;
}
#define PUT(b, literal) put((b), (literal), sizeof(literal) - 1)

/* What Python 2's cPickle writes for {"labels": [3, 4], "data": uint8 [2, 3]}. */
static void python2(struct bytes *b)
{
    PUT(b, "\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x03K\x04"
           "eU\x04"
           "dataq\x04"
           "cnumpy.core.multiarray\n_reconstruct\nq\x05"
           "cnumpy\nndarray\nq\x06K\x00\x85q\x07U\x01"
           "b\x87Rq\x08(K\x01K\x02K\x03\x86q\x09"
           "cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|"
           "NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
           "U\x06");
    put(b, "\x01\x02\x03\xff\x00\x80", 6);
    PUT(b, "tbu.");
}

static void check(const struct bytes *b)
{
    struct ps_error err = {0};
    struct ps_pickle *p;
    assert_int_equal(ps_pickle_read(b->data, b->size, "batch", &p, &err), 0);
    const struct ps_pickle_value *root = ps_pickle_at(p, ps_pickle_root(p));
    assert_int_equal(root->type, PS_PICKLE_DICT);
    const struct ps_pickle_value *labels = ps_pickle_find(p, root, "labels"),
                                 *data = ps_pickle_find(p, root, "data");
    assert_non_null(labels);
    assert_non_null(data);
    assert_int_equal(labels->count, 2);
    assert_int_equal(ps_pickle_at(p, labels->items[0])->integer, 3);
    assert_int_equal(ps_pickle_at(p, labels->items[1])->integer, 4);
    assert_int_equal(data->type, PS_PICKLE_ARRAY);
    assert_int_equal(data->shape[0], 2);
    assert_int_equal(data->shape[1], 3);
    assert_memory_equal(data->data, "\x01\x02\x03\xff\x00\x80", 6);
    assert_null(ps_pickle_find(p, root, "filenames"));
    ps_pickle_free(p);
}

static void test_python2(void **state)
{
    (void)state;
    struct bytes b = {0};
    python2(&b);
    check(&b);
}

/* Python 3 under protocol 2: text keys, byte strings through _codecs.encode. */
static void test_python3_protocol2(void **state)
{
    (void)state;
    struct bytes b = {0};
    PUT(&b, "\x80\x02}q\x00(X\x06\x00\x00\x00labelsq\x01]q\x02(K\x03K\x04"
            "eX\x04\x00\x00\x00"
            "dataq\x03"
            "cnumpy.core.multiarray\n_reconstruct\nq\x04"
            "cnumpy\nndarray\nq\x05K\x00\x85q\x06"
            "c_codecs\nencode\nq\x07X\x01\x00\x00\x00"
            "bX\x06\x00\x00\x00latin1q\x09\x86q\x0aRq\x0b\x87q\x0cRq\x0d(K\x01K\x02K\x03\x86q\x0e"
            "cnumpy\ndtype\nq\x0fX\x02\x00\x00\x00u1\x89\x88\x87q\x11Rq\x12(K\x03X\x01\x00\x00\x00|"
            "NNNJ\xff\xff\xff\xffJ"
            "\xff\xff\xff\xffK\x00tq\x14"
            "b\x89h\x07X\x08\x00\x00\x00\x01\x02\x03\xc3\xbf\x00\xc2\x80h\x09\x86q\x16Rq\x17tq\x18"
            "bu.");
    check(&b);
}

/* Python 3's default: frames, memoize, stack globals, bytes. */
static void test_protocol4(void **state)
{
    (void)state;
    struct bytes b = {0};
    PUT(&b, "\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x06labels\x94]\x94(K\x03K\x04"
            "e\x8c\x04"
            "data\x94\x8c\x16numpy._core.multiarray\x94\x8c\x0c_"
            "reconstruct\x94\x93\x94\x8c\x05numpy\x94\x8c\x07ndarray\x94"
            "\x93\x94K\x00\x85\x94"
            "C\x01"
            "b\x94\x87\x94R\x94(K\x01K\x02K\x03\x86\x94h\x07\x8c\x05"
            "dtype\x94\x93\x94\x8c\x02u1\x94\x89\x88\x87\x94R\x94(K\x03\x8c\x01|"
            "\x94NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK"
            "\x00t\x94"
            "b\x89"
            "C\x06\x01\x02\x03\xff\x00\x80\x94t\x94"
            "bu.");
    check(&b);
}

/* numpy under protocol 5 hands the bytes over as a buffer. */
static void test_protocol5(void **state)
{
    (void)state;
    struct bytes b = {0};
    PUT(&b, "\x80\x05}(\x8c\x06labels]\x94(K\x03K\x04"
            "e\x8c\x04"
            "data\x8c\x12numpy.core.numeric\x8c\x0b_frombuffer\x93("
            "\x96\x06\x00\x00\x00\x00\x00\x00\x00\x01\x02\x03\xff\x00"
            "\x80\x8c\x05numpy\x8c\x05"
            "dtype\x93\x8c\x02u1\x89\x88\x87R(K\x03\x8c\x01|"
            "NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbK\x02K\x03\x86\x8c"
            "\x01"
            "CtRu.");
    check(&b);
}

static void refused(const char *data, size_t size, const char *word)
{
    struct ps_error err = {0};
    struct ps_pickle *p = NULL;
    uint8_t *copy = malloc(size + 1); /* exact, so that reading past the end is seen by AddressSanitizer */
    assert_non_null(copy);
    memcpy(copy, data, size);
    assert_true(ps_pickle_read(copy, size, "evil_batch", &p, &err) < 0);
    assert_null(p);
    assert_non_null(strstr(err.message, "evil_batch"));
    if (!strstr(err.message, word))
        fail_msg("\"%s\" does not say %s", err.message, word);
    free(copy);
}
#define REFUSED(literal, word) refused((literal), sizeof(literal) - 1, (word))

static void test_hostile(void **state)
{
    (void)state;
    REFUSED("\x80\x02"
            "cos\nsystem\nU\x02idq\x00\x85R.",
            "os.system");
    REFUSED("\x80\x04\x8c\x08"
            "builtins\x8c\x04"
            "eval\x93\x8c\x01"
            "1\x85R.",
            "builtins.eval");
    REFUSED("\x80\x02"
            "cnumpy.core.multiarray\nscalar\n.",
            "numpy.core.multiarray.scalar");
    REFUSED("\x80\x02"
            "c\x1b[31m\nx\n.",
            "?[31m.x");                                /* no escape sequences in messages */
    REFUSED("\x80\x02(ios\nsystem\n.", "opcode 0x69"); /* INST */
    REFUSED("\x80\x02}\x81.", "opcode 0x81");          /* NEWOBJ */
    REFUSED("\x80\x02Pid\n.", "opcode 0x50");          /* PERSID */
    REFUSED("\x80\x02"
            "cnumpy\nndarray\n)R.",
            "numpy.ndarray");
    REFUSED("\x80\x02K\x01)R.", "no permitted name");
}

static void test_malformed(void **state)
{
    (void)state;
    REFUSED("", "truncated");
    REFUSED("\x80", "truncated");
    REFUSED("\x80\x09.", "protocol 9");
    REFUSED("\x80\x00.", "protocol 0");
    REFUSED("\x80\x02.", "missing on the stack");
    REFUSED("\x80\x02K\x01K\x02.", "left over");
    REFUSED("\x80\x02K\x01(.", "missing on the stack");
    REFUSED("\x80\x02U\xff"
            "abc",
            "truncated");
    REFUSED("\x80\x02T\xff\xff\xff\xff"
            "abc",
            "truncated");
    REFUSED("\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\xff"
            "abc",
            "truncated");
    REFUSED("\x80\x02h\x05.", "never remembered");
    REFUSED("\x80\x02Nr\xff\xff\xff\xff.", "out of range");
    REFUSED("\x80\x02q\x01.", "nothing to remember");
    REFUSED("\x80\x02"
            "e.",
            "mark");
    REFUSED("\x80\x02(K\x01"
            "e.",
            "container");
    REFUSED("\x80\x02K\x01(K\x01"
            "e.",
            "not a list");
    REFUSED("\x80\x02}(K\x01"
            "u.",
            "not a list or dictionary");
    REFUSED("\x80\x02]("
            "a.",
            "without its list");
    REFUSED("\x80\x02"
            "a.",
            "without its list");
    REFUSED("\x80\x02K\x01\x87.", "tuple");
    REFUSED("\x80\x02"
            "cos",
            "name without its end");
    REFUSED("\x80\x02\x8a\x09"
            "123456789.",
            "64 bits");
    REFUSED("\x80\x02N}"
            "b.",
            "no array");
    /* an array that claims more than it brings, and one whose size overflows */
    REFUSED("\x80\x05"
            "cnumpy.core.numeric\n_frombuffer\n(C\x02"
            "abcnumpy\ndtype\nU\x02u1\x85RK\x02K\x02\x86U\x01"
            "CtR.",
            "2 x 2 bytes comes with 2");
    REFUSED("\x80\x05"
            "cnumpy.core.numeric\n_frombuffer\n(C\x02"
            "abcnumpy\ndtype\nU\x02u1\x85R\x8a\x05\xff\xff\xff\xff\x7f\x8a\x05\xff\xff\xff\xff\x7f\x86U\x01"
            "CtR.",
            "out of range");
    REFUSED("\x80\x02"
            "cnumpy\ndtype\nU\x02"
            "f4\x85R.",
            "not uint8");
}

/* Every cut and every changed byte of a good pickle ends in a value or a message. */
static void test_cut_and_changed(void **state)
{
    (void)state;
    struct bytes b = {0};
    python2(&b);
    for (size_t n = 0; n < b.size; n++) {
        uint8_t *copy = malloc(n + 1);
        assert_non_null(copy);
        memcpy(copy, b.data, n);
        struct ps_error err = {0};
        struct ps_pickle *p = NULL;
        assert_true(ps_pickle_read(copy, n, "cut", &p, &err) < 0);
        assert_true(err.message[0]);
        free(copy);
    }
    for (size_t at = 0; at < b.size; at++)
        for (int value = 0; value < 256; value++) {
            struct bytes changed = b;
            changed.data[at] = (uint8_t)value;
            struct ps_error err = {0};
            struct ps_pickle *p = NULL;
            int code = ps_pickle_read(changed.data, changed.size, "changed", &p, &err);
            assert_true(code == 0 ? p != NULL : err.message[0] != 0);
            ps_pickle_free(p);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_python2),         cmocka_unit_test(test_python3_protocol2),
        cmocka_unit_test(test_protocol4),       cmocka_unit_test(test_protocol5),
        cmocka_unit_test(test_hostile),         cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_cut_and_changed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
