/* SPDX-License-Identifier: Apache-2.0 */
#include "db/store_block.h"

enum { MAX_POINTS = 1 << 20 };

static void put_varint(struct ps_buf *out, uint64_t value)
{
    unsigned char bytes[10];
    size_t n = 0;
    while (value >= 0x80) {
        bytes[n++] = (unsigned char)(value | 0x80);
        value >>= 7;
    }
    bytes[n++] = (unsigned char)value;
    ps_buf_append(out, bytes, n);
}

static uint64_t zigzag(uint64_t difference)
{
    return (difference << 1) ^ (difference >> 63 ? UINT64_MAX : 0);
}

static uint64_t unzigzag(uint64_t value)
{
    return (value >> 1) ^ (value & 1 ? UINT64_MAX : 0);
}

static uint64_t column(const struct ps_block_point *point, int which)
{
    return which ? point->seq : point->step;
}

static void pack_runs(const struct ps_block_point *points, size_t count, int which, struct ps_buf *out)
{
    uint64_t last = 0;
    for (size_t i = 0; i < count;) {
        uint64_t difference = column(&points[i], which) - last;
        size_t n = 0;
        while (i + n < count && column(&points[i + n], which) - last == difference) {
            last += difference;
            n++;
        }
        put_varint(out, zigzag(difference));
        put_varint(out, n);
        i += n;
    }
}

int ps_block_pack(const struct ps_block_point *points, size_t count, struct ps_buf *out, struct ps_error *err)
{
    if (count > MAX_POINTS)
        return ps_fail(err, PS_INTERNAL, "a block of %zu points is too large", count);
    put_varint(out, count);
    pack_runs(points, count, 0, out);
    pack_runs(points, count, 1, out);
    uint64_t last = 0, last_difference = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t difference = (uint64_t)points[i].elapsed_us - last;
        put_varint(out, zigzag(difference - last_difference));
        last = (uint64_t)points[i].elapsed_us;
        last_difference = difference;
    }
    uint64_t before = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = points[i].value_bits ^ before;
        before = points[i].value_bits;
        unsigned leading = bits ? (unsigned)__builtin_clzll(bits) / 8 : 8;
        unsigned trailing = bits ? (unsigned)__builtin_ctzll(bits) / 8 : 0;
        unsigned n = 8 - leading - trailing;
        unsigned char bytes[9] = {(unsigned char)(leading << 4 | n)};
        for (unsigned k = 0; k < n; k++)
            bytes[1 + k] = (unsigned char)(bits >> (56 - 8 * (leading + k)));
        ps_buf_append(out, bytes, 1 + n);
    }
    if (out->failed)
        return ps_fail(err, out->failed, "a block of %zu points does not fit into memory", count);
    return 0;
}

struct reader {
    const unsigned char *at, *end;
    int bad;
};

static uint64_t get_varint(struct reader *in)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && in->at < in->end; shift += 7) {
        unsigned char byte = *in->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return value;
    }
    in->bad = 1;
    return 0;
}

static int damaged(struct ps_error *err)
{
    return ps_fail(err, PS_DATA_LOSS, "a packed block of step points is damaged");
}

int ps_block_count(const void *data, size_t size, size_t *ret_count, struct ps_error *err)
{
    struct reader in = {data, (const unsigned char *)data + size, 0};
    uint64_t count = get_varint(&in);
    /* Every point takes two bytes at least, one of its elapsed time and one of its value. */
    if (in.bad || count > MAX_POINTS || count * 2 > size)
        return damaged(err);
    *ret_count = (size_t)count;
    return 0;
}

static void unpack_runs(struct reader *in, struct ps_block_point *points, size_t count, int which)
{
    uint64_t last = 0;
    for (size_t i = 0; i < count && !in->bad;) {
        uint64_t difference = unzigzag(get_varint(in));
        uint64_t n = get_varint(in);
        if (n == 0 || n > count - i) {
            in->bad = 1;
            return;
        }
        for (uint64_t k = 0; k < n; k++, i++) {
            last += difference;
            if (which)
                points[i].seq = last;
            else
                points[i].step = last;
        }
    }
}

int ps_block_unpack(const void *data, size_t size, struct ps_block_point *points, size_t count,
                    struct ps_error *err)
{
    struct reader in = {data, (const unsigned char *)data + size, 0};
    if (get_varint(&in) != count || in.bad)
        return damaged(err);
    unpack_runs(&in, points, count, 0);
    unpack_runs(&in, points, count, 1);
    uint64_t last = 0, difference = 0;
    for (size_t i = 0; i < count && !in.bad; i++) {
        difference += unzigzag(get_varint(&in));
        last += difference;
        points[i].elapsed_us = (int64_t)last;
    }
    uint64_t before = 0;
    for (size_t i = 0; i < count && !in.bad; i++) {
        if (in.at == in.end)
            return damaged(err);
        unsigned leading = *in.at >> 4, n = *in.at & 15;
        in.at++;
        if (leading + n > 8 || (size_t)(in.end - in.at) < n)
            return damaged(err);
        uint64_t bits = 0;
        for (unsigned k = 0; k < n; k++)
            bits |= (uint64_t)*in.at++ << (56 - 8 * (leading + k));
        before ^= bits;
        points[i].value_bits = before;
    }
    return in.bad || in.at != in.end ? damaged(err) : 0;
}
