/* SPDX-License-Identifier: Apache-2.0
 * Digests: crc32c (Castagnoli, RFC 3720 appendix B.4) for chunks, SHA-256 (FIPS 180-4) for content, and a
 * fast 64-bit hash for comparing replicas. SHA-256 is OpenSSL's where services are built, else a small one of
 * our own. */
#ifndef PARAMSYNC_BASE_DIGEST_H
#define PARAMSYNC_BASE_DIGEST_H

#include "services/base/error.h"

#include <stddef.h>
#include <stdint.h>

/* crc of the bytes so far (0 at the start); continues over further bytes. Uses SSE4.2 where the processor has
 * it. */
uint32_t ps_crc32c(uint32_t crc, const void *data, size_t size);

#define PS_SHA256_HEX 65 /* 64 lower-case digits and a NUL */

struct ps_sha256;                      /* one thread at a time */
struct ps_sha256 *ps_sha256_new(void); /* NULL when out of memory */
void ps_sha256_update(struct ps_sha256 *sha, const void *data, size_t size);
void ps_sha256_hex(struct ps_sha256 *sha, char hex[PS_SHA256_HEX]); /* ends it; only free may follow */
struct ps_sha256 *ps_sha256_free(struct ps_sha256 *sha);            /* takes NULL, returns NULL */
/* Of all that a file holds, and how much that is; the file's offset stays where it is. name is for the
 * message. */
int ps_sha256_file(int fd, const char *name, char ret_hex[PS_SHA256_HEX], uint64_t *ret_size,
                   struct ps_error *err);
/* 1 if text is 64 lower-case hexadecimal digits. */
int ps_sha256_hex_valid(const char *text);

/* 64-bit hash, not cryptographic; the same on every little-endian machine. hash(a then b) is not hash(ab):
 * chain by passing the last value as seed. */
uint64_t ps_hash64(const void *data, size_t size, uint64_t seed);

#endif
