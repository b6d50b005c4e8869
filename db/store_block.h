/* SPDX-License-Identifier: Apache-2.0
 * Packed step points. A block is four columns one after the other, each made for what it usually holds:
 *
 *     varint count
 *     steps:   runs of equal differences: zigzag varint difference, varint how many
 *     seqs:    the same
 *     elapsed: microseconds; zigzag varint of the change of the difference
 *     values:  bit pattern xor the one before: a byte (leading zero bytes << 4 | bytes that follow), then
 * those bytes from the most significant; trailing zero bytes are left out
 *
 * Differences are modulo 2^64, so that any value can be packed. Pure functions, thread-safe. */
#ifndef PARAMSYNC_DB_STORE_BLOCK_H
#define PARAMSYNC_DB_STORE_BLOCK_H

#include "services/base/buf.h"

#include <stdint.h>

struct ps_block_point {
    uint64_t step, seq;
    uint64_t value_bits;
    int64_t elapsed_us;
};

/* Appends the block. */
int ps_block_pack(const struct ps_block_point *points, size_t count, struct ps_buf *out,
                  struct ps_error *err);
/* The number of points, checked against what size bytes can hold. DATA_LOSS for a damaged block. */
int ps_block_count(const void *data, size_t size, size_t *ret_count, struct ps_error *err);
/* Fills points[ps_block_count()]. DATA_LOSS for a damaged block. */
int ps_block_unpack(const void *data, size_t size, struct ps_block_point *points, size_t count,
                    struct ps_error *err);

#endif
