/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/wire.h"

#include <string.h>

static void varint(struct ps_buf *buf, uint64_t value)
{
    unsigned char bytes[10];
    size_t n = 0;
    for (; value > 0x7f; value >>= 7)
        bytes[n++] = (unsigned char)(value | 0x80);
    bytes[n++] = (unsigned char)value;
    ps_buf_append(buf, bytes, n);
}

void cli_wire_int(struct ps_buf *buf, unsigned field, uint64_t value)
{
    varint(buf, (uint64_t)field << 3);
    varint(buf, value);
}

static void little_endian(struct ps_buf *buf, uint64_t bits, size_t size)
{
    unsigned char bytes[8];
    for (size_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(bits >> 8 * i);
    ps_buf_append(buf, bytes, size);
}

void cli_wire_double(struct ps_buf *buf, unsigned field, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    varint(buf, (uint64_t)field << 3 | 1);
    little_endian(buf, bits, 8);
}

void cli_wire_float(struct ps_buf *buf, unsigned field, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    varint(buf, (uint64_t)field << 3 | 5);
    little_endian(buf, bits, 4);
}

void cli_wire_bytes(struct ps_buf *buf, unsigned field, const void *data, size_t size)
{
    varint(buf, (uint64_t)field << 3 | 2);
    varint(buf, size);
    if (size)
        ps_buf_append(buf, data, size);
}

void cli_wire_text(struct ps_buf *buf, unsigned field, const char *text)
{
    cli_wire_bytes(buf, field, text, strlen(text));
}

void cli_wire_message(struct ps_buf *buf, unsigned field, struct ps_buf *inner)
{
    cli_wire_bytes(buf, field, inner->data, inner->size);
    if (inner->failed && !buf->failed)
        buf->failed = inner->failed;
    ps_buf_clear(inner);
}

struct cli_wire cli_wire_reader(const void *data, size_t size)
{
    const unsigned char *at = data;
    return (struct cli_wire){.at = at, .end = size ? at + size : at};
}

static int read_varint(struct cli_wire *w, uint64_t *ret)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && w->at < w->end; shift += 7) {
        unsigned char byte = *w->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *ret = value;
            return 0;
        }
    }
    return -1;
}

int cli_wire_next(struct cli_wire *w)
{
    uint64_t key, size;
    if (w->at == w->end)
        return 0;
    if (read_varint(w, &key) || key >> 3 == 0 || key >> 3 > 0x1fffffff)
        return -1;
    w->field = (unsigned)(key >> 3);
    w->type = key & 7;
    switch (w->type) {
    case 0:
        return read_varint(w, &w->number) ? -1 : 1;
    case 1:
    case 5:
        size = w->type == 1 ? 8 : 4;
        if ((size_t)(w->end - w->at) < size)
            return -1;
        w->number = 0;
        for (size_t i = 0; i < size; i++)
            w->number |= (uint64_t)w->at[i] << 8 * i;
        w->at += size;
        return 1;
    case 2:
        if (read_varint(w, &size) || size > (size_t)(w->end - w->at))
            return -1;
        w->part = (struct cli_wire_part){w->at, (size_t)size};
        w->at += size;
        return 1;
    default:
        return -1;
    }
}

double cli_wire_as_double(const struct cli_wire *w)
{
    double value;
    float single;
    uint32_t bits = (uint32_t)w->number;
    if (w->type == 1) {
        memcpy(&value, &w->number, sizeof value);
        return value;
    }
    memcpy(&single, &bits, sizeof single);
    return (double)single;
}
