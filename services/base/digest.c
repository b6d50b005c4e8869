/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/digest.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef PARAMSYNC_HAVE_OPENSSL
#include <openssl/evp.h>
#endif

static uint32_t crc_table[8][256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;
static int crc_hardware;

static void crc_prepare(void)
{
    for (unsigned i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
        crc_table[0][i] = c;
    }
    for (unsigned i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            crc_table[t][i] = crc_table[0][crc_table[t - 1][i] & 0xff] ^ crc_table[t - 1][i] >> 8;
#ifdef __x86_64__
    crc_hardware = __builtin_cpu_supports("sse4.2");
#endif
}

static uint32_t crc_portable(uint32_t crc, const unsigned char *p, size_t size)
{
    for (; size >= 8; p += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= crc_table[7 - i][word >> (8 * i) & 0xff];
    }
    for (; size; p++, size--)
        crc = crc_table[0][(crc ^ *p) & 0xff] ^ crc >> 8;
    return crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static uint32_t crc_sse42(uint32_t crc, const unsigned char *p, size_t size)
{
    uint64_t c = crc;
    for (; size >= 8; p += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; size; p++, size--)
        c = __builtin_ia32_crc32qi((uint32_t)c, *p);
    return (uint32_t)c;
}
#endif

uint32_t ps_crc32c(uint32_t crc, const void *data, size_t size)
{
    pthread_once(&crc_once, crc_prepare);
    crc = ~crc;
#ifdef __x86_64__
    if (crc_hardware)
        return ~crc_sse42(crc, data, size);
#endif
    return ~crc_portable(crc, data, size);
}

static void to_hex(const unsigned char *bytes, size_t count, char *hex)
{
    for (size_t i = 0; i < count; i++) {
        hex[2 * i] = "0123456789abcdef"[bytes[i] >> 4];
        hex[2 * i + 1] = "0123456789abcdef"[bytes[i] & 15];
    }
    hex[2 * count] = '\0';
}

#ifdef PARAMSYNC_HAVE_OPENSSL

struct ps_sha256 {
    EVP_MD_CTX *context;
};

struct ps_sha256 *ps_sha256_new(void)
{
    struct ps_sha256 *sha = calloc(1, sizeof *sha);
    if (!sha)
        return NULL;
    sha->context = EVP_MD_CTX_new();
    if (!sha->context || !EVP_DigestInit_ex(sha->context, EVP_sha256(), NULL))
        return ps_sha256_free(sha);
    return sha;
}

void ps_sha256_update(struct ps_sha256 *sha, const void *data, size_t size)
{
    EVP_DigestUpdate(sha->context, data, size);
}

void ps_sha256_hex(struct ps_sha256 *sha, char hex[PS_SHA256_HEX])
{
    unsigned char bytes[EVP_MAX_MD_SIZE] = {0};
    EVP_DigestFinal_ex(sha->context, bytes, NULL);
    to_hex(bytes, 32, hex);
}

struct ps_sha256 *ps_sha256_free(struct ps_sha256 *sha)
{
    if (sha)
        EVP_MD_CTX_free(sha->context);
    free(sha);
    return NULL;
}

#else

struct ps_sha256 {
    uint32_t state[8];
    uint64_t total;
    unsigned char block[64];
};

static uint32_t rotr(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

/* FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t sha_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static void sha_block(struct ps_sha256 *sha, const unsigned char *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 |
               p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(s, sha->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e1 = rotr(s[4], 6) ^ rotr(s[4], 11) ^ rotr(s[4], 25);
        uint32_t t1 = s[7] + e1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + sha_k[i] + w[i];
        uint32_t e0 = rotr(s[0], 2) ^ rotr(s[0], 13) ^ rotr(s[0], 22);
        uint32_t t2 = e0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        sha->state[i] += s[i];
}

struct ps_sha256 *ps_sha256_new(void)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    struct ps_sha256 *sha = calloc(1, sizeof *sha);
    if (sha)
        memcpy(sha->state, start, sizeof start);
    return sha;
}

void ps_sha256_update(struct ps_sha256 *sha, const void *data, size_t size)
{
    const unsigned char *p = data;
    size_t used = sha->total % 64;
    sha->total += size;
    while (size) {
        if (used == 0 && size >= 64) {
            sha_block(sha, p);
            p += 64;
            size -= 64;
            continue;
        }
        size_t n = 64 - used < size ? 64 - used : size;
        memcpy(sha->block + used, p, n);
        used += n;
        p += n;
        size -= n;
        if (used == 64) {
            sha_block(sha, sha->block);
            used = 0;
        }
    }
}

void ps_sha256_hex(struct ps_sha256 *sha, char hex[PS_SHA256_HEX])
{
    uint64_t bits = sha->total * 8;
    unsigned char tail[72] = {0x80}, digest[32];
    size_t pad = (119 - sha->total % 64) % 64 + 1;
    for (int i = 0; i < 8; i++)
        tail[pad + (size_t)i] = (unsigned char)(bits >> (56 - 8 * i));
    ps_sha256_update(sha, tail, pad + 8);
    for (int i = 0; i < 32; i++)
        digest[i] = (unsigned char)(sha->state[i / 4] >> (24 - 8 * (i % 4)));
    to_hex(digest, 32, hex);
}

struct ps_sha256 *ps_sha256_free(struct ps_sha256 *sha)
{
    free(sha);
    return NULL;
}

#endif

int ps_sha256_file(int fd, const char *name, char ret_hex[PS_SHA256_HEX], uint64_t *ret_size,
                   struct ps_error *err)
{
    enum { piece = 1 << 20 };
    struct ps_sha256 *sha = ps_sha256_new();
    unsigned char *buffer = malloc(piece);
    int code = sha && buffer ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    uint64_t at = 0;
    while (!code) {
        ssize_t n = pread(fd, buffer, piece, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            code = ps_fail_errno(err, errno, "cannot read %s", name);
        if (n <= 0)
            break;
        ps_sha256_update(sha, buffer, (size_t)n);
        at += (uint64_t)n;
    }
    if (!code) {
        ps_sha256_hex(sha, ret_hex);
        *ret_size = at;
    }
    ps_sha256_free(sha);
    free(buffer);
    return code;
}

int ps_sha256_hex_valid(const char *text)
{
    size_t n = strspn(text, "0123456789abcdef");
    return n == 64 && text[n] == '\0';
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

uint64_t ps_hash64(const void *data, size_t size, uint64_t seed)
{
    const unsigned char *p = data;
    uint64_t lane[4];
    for (int i = 0; i < 4; i++)
        lane[i] = mix(seed + 0x9e3779b97f4a7c15u * (uint64_t)(i + 1));
    size_t left = size;
    for (; left >= 32; p += 32, left -= 32) {
        uint64_t word[4];
        memcpy(word, p, 32);
        for (int i = 0; i < 4; i++) {
            lane[i] = (lane[i] ^ word[i]) * 0x9fb21c651e98df25u;
            lane[i] ^= lane[i] >> 29;
        }
    }
    unsigned char tail[32] = {0};
    memcpy(tail, p, left);
    uint64_t hash = mix(size);
    for (int i = 0; i < 4; i++) {
        uint64_t word;
        memcpy(&word, tail + 8 * i, 8);
        hash = mix(hash ^ mix(lane[i] ^ word));
    }
    return hash;
}
