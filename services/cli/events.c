/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/events.h"

#include "services/base/digest.h"
#include "services/cli/wire.h"

#include <string.h>

enum { record_max = 64 << 20, tag_max = 512 };
enum { event_wall = 1, event_step = 2, event_version = 3, event_summary = 5 };
enum { summary_value = 1, value_tag = 1, value_simple = 2, value_tensor = 8 };
enum {
    tensor_type = 1,
    tensor_content = 4,
    tensor_float = 5,
    tensor_double = 6,
    type_float = 1,
    type_double = 2
};

static uint32_t masked(const void *data, size_t size)
{
    uint32_t crc = ps_crc32c(0, data, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void put_little(struct ps_buf *out, uint64_t value, size_t size)
{
    unsigned char bytes[8];
    for (size_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(value >> 8 * i);
    ps_buf_append(out, bytes, size);
}

static uint64_t little(const unsigned char *p, size_t size)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++)
        value |= (uint64_t)p[i] << 8 * i;
    return value;
}

static void put_record(struct ps_buf *out, const struct ps_buf *record)
{
    unsigned char length[8];
    for (size_t i = 0; i < 8; i++)
        length[i] = (unsigned char)((uint64_t)record->size >> 8 * i);
    ps_buf_append(out, length, 8);
    put_little(out, masked(length, 8), 4);
    ps_buf_append(out, record->data, record->size);
    put_little(out, masked(record->data, record->size), 4);
    if (record->failed && !out->failed)
        out->failed = record->failed;
}

void cli_events_begin(struct ps_buf *out, double wall_s)
{
    struct ps_buf event = PS_BUF_INIT(1 << 10);
    cli_wire_double(&event, event_wall, wall_s);
    cli_wire_text(&event, event_version, "brain.Event:2");
    put_record(out, &event);
    ps_buf_done(&event);
}

void cli_events_scalar(struct ps_buf *out, double wall_s, uint64_t step, const char *tag, double value)
{
    struct ps_buf event = PS_BUF_INIT(1 << 12), summary = PS_BUF_INIT(1 << 12), item = PS_BUF_INIT(1 << 12);
    cli_wire_text(&item, value_tag, tag);
    cli_wire_float(&item, value_simple, (float)value);
    cli_wire_message(&summary, summary_value, &item);
    cli_wire_double(&event, event_wall, wall_s);
    cli_wire_int(&event, event_step, step);
    cli_wire_message(&event, event_summary, &summary);
    put_record(out, &event);
    ps_buf_done(&item);
    ps_buf_done(&summary);
    ps_buf_done(&event);
}

/* A tensor that is one number. 1, or 0: it is something else; -1: broken. */
static int read_tensor(struct cli_wire_part part, double *ret)
{
    struct cli_wire w = cli_wire_reader(part.data, part.size);
    uint64_t type = 0;
    int got, found = 0;
    while ((got = cli_wire_next(&w)) > 0) {
        if (w.field == tensor_type && w.type == 0) {
            type = w.number;
        } else if ((w.field == tensor_float && w.type == 5) || (w.field == tensor_double && w.type == 1)) {
            *ret = cli_wire_as_double(&w);
            found++;
        } else if (w.type == 2 &&
                   (w.field == tensor_content || w.field == tensor_float || w.field == tensor_double)) {
            size_t size = type == type_double ? 8 : 4;
            if ((type != type_float && type != type_double) || w.part.size != size)
                continue;
            struct cli_wire number = {.type = type == type_double ? 1 : 5,
                                      .number = little(w.part.data, size)};
            *ret = cli_wire_as_double(&number);
            found++;
        }
    }
    return got < 0 ? -1 : found == 1;
}

struct reader {
    int (*on_scalar)(void *context, const struct cli_scalar *scalar);
    void *context;
};

static int read_value(const struct reader *r, struct cli_wire_part part, struct cli_scalar scalar,
                      int *ret_code)
{
    struct cli_wire w = cli_wire_reader(part.data, part.size);
    char tag[tag_max + 1] = "";
    int got, found = 0;
    while ((got = cli_wire_next(&w)) > 0) {
        if (w.field == value_tag && w.type == 2) {
            if (w.part.size > tag_max || memchr(w.part.data, 0, w.part.size))
                return -1;
            memcpy(tag, w.part.data, w.part.size);
            tag[w.part.size] = '\0';
        } else if (w.field == value_simple && w.type == 5) {
            scalar.value = cli_wire_as_double(&w);
            found = 1;
        } else if (w.field == value_tensor && w.type == 2) {
            int number = read_tensor(w.part, &scalar.value);
            if (number < 0)
                return -1;
            found |= number;
        }
    }
    if (got < 0)
        return -1;
    scalar.tag = tag;
    if (found && *tag)
        *ret_code = r->on_scalar(r->context, &scalar);
    return 0;
}

/* -1: it is no event. */
static int read_event(const struct reader *r, const unsigned char *data, size_t size, int *ret_code)
{
    struct cli_wire w = cli_wire_reader(data, size), values;
    struct cli_scalar scalar = {0};
    struct cli_wire_part summary = {0};
    int got;
    while ((got = cli_wire_next(&w)) > 0) {
        if (w.field == event_wall && w.type == 1)
            scalar.wall_s = cli_wire_as_double(&w);
        else if (w.field == event_step && w.type == 0)
            scalar.step = w.number;
        else if (w.field == event_summary && w.type == 2)
            summary = w.part;
    }
    values = cli_wire_reader(summary.data, summary.size);
    while (got == 0 && !*ret_code && (got = cli_wire_next(&values)) > 0) {
        if (values.field == summary_value && values.type == 2 && read_value(r, values.part, scalar, ret_code))
            return -1;
        got = 0;
    }
    return got;
}

int cli_events_read(const void *data, size_t size, const char *name,
                    int (*on_scalar)(void *context, const struct cli_scalar *scalar), void *context,
                    struct ps_error *err)
{
    const struct reader r = {on_scalar, context};
    const unsigned char *start = data, *p = start, *end = start + size;
    int code = 0;
    for (unsigned record = 0; p < end && !code; record++) {
        size_t left = (size_t)(end - p);
        if (left < 12)
            return ps_fail(err, PS_DATA_LOSS, "%s ends within record %u, at byte %zu", name, record, size);
        uint64_t length = little(p, 8);
        if (little(p + 8, 4) != masked(p, 8))
            return record ? ps_fail(err, PS_DATA_LOSS, "%s: record %u, at byte %zu, has a wrong checksum",
                                    name, record, (size_t)(p - start))
                          : ps_fail(err, PS_INVALID_ARGUMENT, "%s is no TensorBoard event file", name);
        if (length > record_max || length + 16 > left)
            return ps_fail(err, PS_DATA_LOSS, "%s ends within record %u, at byte %zu", name, record, size);
        if (little(p + 12 + length, 4) != masked(p + 12, (size_t)length))
            return ps_fail(err, PS_DATA_LOSS, "%s: record %u, at byte %zu, has a wrong checksum", name,
                           record, (size_t)(p - start));
        if (read_event(&r, p + 12, (size_t)length, &code))
            return ps_fail(err, PS_DATA_LOSS, "%s: record %u, at byte %zu, holds no event", name, record,
                           (size_t)(p - start));
        p += 16 + length;
    }
    return code;
}
