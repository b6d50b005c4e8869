/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/digest.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include <string.h>

/* RFC 3720, appendix B.4. */
static void test_crc32c_vectors(void **state)
{
    (void)state;
    unsigned char zeros[32] = {0}, ones[32], up[32];
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++)
        up[i] = (unsigned char)i;
    assert_int_equal(ps_crc32c(0, zeros, 32), 0x8a9136aa);
    assert_int_equal(ps_crc32c(0, ones, 32), 0x62a8ab43);
    assert_int_equal(ps_crc32c(0, up, 32), 0x46dd794e);
    assert_int_equal(ps_crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(ps_crc32c(ps_crc32c(0, up, 13), up + 13, 19), 0x46dd794e);
}

static void sha(const char *text, size_t piece, char hex[PS_SHA256_HEX])
{
    struct ps_sha256 *sha = ps_sha256_new();
    size_t size = strlen(text);
    for (size_t at = 0; at < size; at += piece)
        ps_sha256_update(sha, text + at, size - at < piece ? size - at : piece);
    ps_sha256_hex(sha, hex);
    ps_sha256_free(sha);
}

/* FIPS 180-4 examples. */
static void test_sha256_vectors(void **state)
{
    (void)state;
    char hex[PS_SHA256_HEX];
    sha("", 1, hex);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    sha("abc", 2, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    for (size_t piece = 1; piece < 60; piece += 7) {
        sha(two, piece, hex);
        assert_string_equal(hex, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    }
    assert_true(ps_sha256_hex_valid(hex));
    hex[3] = 'A';
    assert_false(ps_sha256_hex_valid(hex));
    assert_false(ps_sha256_hex_valid("../../etc/passwd"));
}

static void test_hash64_sees_every_bit_and_length(void **state)
{
    (void)state;
    unsigned char data[100] = {0};
    uint64_t base = ps_hash64(data, 100, 0);
    for (int i = 0; i < 800; i++) {
        data[i / 8] ^= (unsigned char)(1 << i % 8);
        assert_true(ps_hash64(data, 100, 0) != base);
        data[i / 8] ^= (unsigned char)(1 << i % 8);
    }
    assert_true(ps_hash64(data, 99, 0) != base);
    assert_true(ps_hash64(data, 100, 1) != base);
    assert_true(ps_hash64(data, 100, 0) == base);
}

static void test_file(void **state)
{
    (void)state;
    char path[] = "/tmp/ps_test_digest.XXXXXX", hex[PS_SHA256_HEX];
    uint64_t size = 9;
    struct ps_error err = {0};
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    unlink(path);
    assert_int_equal(ps_sha256_file(fd, "x", hex, &size, &err), 0);
    assert_int_equal(size, 0); /* FIPS 180-4's digest of nothing */
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    assert_int_equal(write(fd, "abc", 3), 3);
    assert_int_equal(ps_sha256_file(fd, "x", hex, &size, &err), 0);
    assert_int_equal(size, 3);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    close(fd);
    assert_true(ps_sha256_file(-1, "the file", hex, &size, &err) < 0);
    assert_non_null(strstr(err.message, "the file"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_crc32c_vectors),
        cmocka_unit_test(test_sha256_vectors),
        cmocka_unit_test(test_hash64_sees_every_bit_and_length),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
