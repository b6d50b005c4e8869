/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/tensors.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HEADER_MAX = 16 << 20,
    TENSORS_MAX = 100000,
    PIECE = 64 << 10, /* bytes of source converted at a time */
};

struct tensor {
    uint64_t from;     /* in the file */
    uint64_t at, size; /* in the view */
    bool round;        /* from 4-byte to 2-byte elements */
};

struct ps_tensor_view {
    int fd;
    char *header; /* the length and the JSON text */
    size_t header_size;
    struct tensor *tensors; /* by place in the view, without gaps */
    size_t count;
    uint64_t size;
};

static int read_all(int fd, void *buffer, size_t size, uint64_t offset, struct ps_error *err)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(fd, (char *)buffer + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ps_fail_errno(err, errno, "cannot read the checkpoint");
        if (n == 0)
            return ps_fail(err, PS_DATA_LOSS, "the checkpoint's file ends at byte %" PRIu64, offset + done);
        done += (size_t)n;
    }
    return 0;
}

static int damaged(struct ps_error *err, const char *what)
{
    return ps_fail(err, PS_DATA_LOSS, "the checkpoint is no safetensors file: %.200s", what);
}

static int read_header(int fd, uint64_t size, json_t **ret_header, uint64_t *ret_data, struct ps_error *err)
{
    unsigned char raw[8];
    uint64_t length = 0;
    if (size < sizeof raw)
        return damaged(err, "it is too short");
    int code = read_all(fd, raw, sizeof raw, 0, err);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | raw[i];
    if (code)
        return code;
    if (length > size - sizeof raw)
        return damaged(err, "its header is longer than the file");
    if (length > HEADER_MAX)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "the checkpoint's header has %" PRIu64 " bytes, at most %d are read", length,
                       HEADER_MAX);
    char *text = malloc(length + 1);
    if (!text)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    code = read_all(fd, text, length, sizeof raw, err);
    json_error_t why;
    json_t *header = code ? NULL : json_loadb(text, length, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (code)
        return code;
    if (!json_is_object(header)) {
        json_decref(header);
        return damaged(err, header ? "its header is no JSON object" : why.text);
    }
    *ret_header = header;
    *ret_data = sizeof raw + length;
    return 0;
}

/* One entry of the source's header: where its bytes lie and whether they are 32-bit floats. */
static int read_entry(const char *name, const json_t *entry, uint64_t data_bytes, uint64_t *ret_begin,
                      uint64_t *ret_end, bool *ret_f32, struct ps_error *err)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!dtype || !json_is_array(json_object_get(entry, "shape")) || json_array_size(offsets) != 2 ||
        !json_is_integer(first) || !json_is_integer(last))
        return ps_fail(err, PS_DATA_LOSS,
                       "the checkpoint is no safetensors file: tensor %.100s lacks dtype, shape or"
                       " data_offsets",
                       name);
    json_int_t begin = json_integer_value(first), end = json_integer_value(last);
    *ret_f32 = strcmp(dtype, "F32") == 0;
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes || (*ret_f32 && (end - begin) % 4))
        return ps_fail(err, PS_DATA_LOSS,
                       "the checkpoint is no safetensors file: tensor %.100s lies at bytes %lld to"
                       " %lld of %" PRIu64,
                       name, (long long)begin, (long long)end, data_bytes);
    *ret_begin = (uint64_t)begin;
    *ret_end = (uint64_t)end;
    return 0;
}

static bool is_wanted(const struct ps_tensor_choice *choice, const char *name)
{
    for (size_t i = 0; i < choice->count; i++)
        if (!strcmp(choice->names[i], name))
            return true;
    return choice->count == 0;
}

static int missing(const json_t *header, const char *name, struct ps_error *err)
{
    char some[200] = "";
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)header, key, value)
    {
        size_t used = strlen(some);
        if (strcmp(key, "__metadata__") != 0 && used + strlen(key) + 8 < sizeof some)
            snprintf(some + used, sizeof some - used, "%s%s", used ? ", " : "", key);
    }
    return ps_fail(err, PS_NOT_FOUND, "tensors: there is no tensor %.200s; some of those there are: %s", name,
                   some);
}

static int by_place(const void *a, const void *b)
{
    const struct tensor *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

/* The view's own header, with its tensors in the order of the source's bytes. */
static int make_header(struct ps_tensor_view *view, const json_t *source,
                       const struct ps_tensor_choice *choice, uint64_t data, uint64_t data_bytes,
                       struct ps_error *err)
{
    json_t *header = json_object(), *metadata = json_object_get(source, "__metadata__");
    size_t capacity = json_object_size(source);
    struct row {
        struct tensor tensor; /* first: by_place compares it */
        const char *name;
    } *rows = calloc(capacity + 1, sizeof *rows);
    view->tensors = calloc(capacity + 1, sizeof *view->tensors);
    int code = header && rows && view->tensors ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    const char *key;
    json_t *value;
    if (!code && capacity > TENSORS_MAX)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "the checkpoint has more than %d tensors", TENSORS_MAX);
    if (!code)
        json_object_foreach((json_t *)source, key, value)
        {
            uint64_t begin = 0, end = 0;
            bool f32 = false;
            if (!strcmp(key, "__metadata__") || !is_wanted(choice, key))
                continue;
            code = read_entry(key, value, data_bytes, &begin, &end, &f32, err);
            if (code)
                break;
            bool round = choice->bf16 && f32;
            rows[view->count].tensor = (struct tensor){
                .from = data + begin, .size = (end - begin) / (round ? 2 : 1), .round = round};
            rows[view->count++].name = key;
        }
    for (size_t i = 0; !code && i < choice->count; i++)
        if (!json_object_get(source, choice->names[i]) || !strcmp(choice->names[i], "__metadata__"))
            code = missing(source, choice->names[i], err);
    if (!code)
        qsort(rows, view->count, sizeof *rows, by_place);
    uint64_t at = 0;
    if (!code && metadata)
        json_object_set(header, "__metadata__", metadata);
    for (size_t i = 0; !code && i < view->count; i++) {
        const json_t *entry = json_object_get(source, rows[i].name);
        view->tensors[i] = rows[i].tensor;
        view->tensors[i].at = at;
        at += rows[i].tensor.size;
        json_t *made = json_pack(
            "{s:s, s:O, s:[I,I]}", "dtype",
            rows[i].tensor.round ? "BF16" : json_string_value(json_object_get(entry, "dtype")), "shape",
            json_object_get(entry, "shape"), "data_offsets", (json_int_t)view->tensors[i].at, (json_int_t)at);
        if (!made || json_object_set_new(header, rows[i].name, made))
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    char *text = code ? NULL : json_dumps(header, JSON_COMPACT);
    if (!code && text) {
        size_t length = strlen(text), padded = (length + 7) / 8 * 8;
        view->header_size = 8 + padded;
        view->header = malloc(view->header_size);
        if (view->header) {
            for (int i = 0; i < 8; i++)
                view->header[i] = (char)(padded >> 8 * i & 0xff);
            memcpy(view->header + 8, text, length);
            memset(view->header + 8 + length, ' ', padded - length);
            view->size = view->header_size + at;
        }
    }
    if (!code && !view->header)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    free(text);
    free(rows);
    json_decref(header);
    return code;
}

int ps_tensor_view_open(int fd, uint64_t size, const struct ps_tensor_choice *choice,
                        struct ps_tensor_view **ret_view, struct ps_error *err)
{
    json_t *source = NULL;
    uint64_t data = 0;
    int code = read_header(fd, size, &source, &data, err);
    if (code)
        return code;
    struct ps_tensor_view *view = calloc(1, sizeof *view);
    if (!view)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code) {
        view->fd = fd;
        code = make_header(view, source, choice, data, size - data, err);
    }
    json_decref(source);
    if (code) {
        ps_tensor_view_free(view);
        return code;
    }
    *ret_view = view;
    return 0;
}

struct ps_tensor_view *ps_tensor_view_free(struct ps_tensor_view *view)
{
    if (!view)
        return NULL;
    free(view->header);
    free(view->tensors);
    free(view);
    return NULL;
}

uint64_t ps_tensor_view_size(const struct ps_tensor_view *view)
{
    return view->size;
}

/* IEEE 754 binary32 to bfloat16: its upper half, rounded to nearest with ties to even. */
static uint16_t to_bf16(uint32_t bits)
{
    if ((bits & 0x7fffffff) > 0x7f800000) /* NaN: rounding could make it an infinity */
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* size bytes of a rounded tensor from offset (in the rounded one) on; either end may lie within an element.
 */
static int read_rounded(const struct ps_tensor_view *view, const struct tensor *tensor, uint64_t offset,
                        unsigned char *out, size_t size, struct ps_error *err)
{
    unsigned char source[PIECE] = {0};
    while (size) {
        uint64_t first = offset / 2, elements = (offset + size + 1) / 2 - first;
        if (elements > PIECE / 4)
            elements = PIECE / 4;
        int code = read_all(view->fd, source, (size_t)elements * 4, tensor->from + first * 4, err);
        if (code)
            return code;
        unsigned char rounded[PIECE / 2];
        for (size_t i = 0; i < elements; i++) {
            const unsigned char *b = source + i * 4;
            uint16_t half =
                to_bf16((uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
            rounded[i * 2] = (unsigned char)(half & 0xff);
            rounded[i * 2 + 1] = (unsigned char)(half >> 8);
        }
        size_t skip = (size_t)(offset - first * 2), n = (size_t)elements * 2 - skip;
        if (n > size)
            n = size;
        memcpy(out, rounded + skip, n);
        out += n;
        offset += n;
        size -= n;
    }
    return 0;
}

int ps_tensor_view_read(const struct ps_tensor_view *view, uint64_t offset, void *buffer, size_t size,
                        struct ps_error *err)
{
    unsigned char *out = buffer;
    if (size > view->size || offset > view->size - size)
        return ps_fail(err, PS_OUT_OF_RANGE, "bytes %" PRIu64 " to %" PRIu64 " of %" PRIu64, offset,
                       offset + size, view->size);
    if (offset < view->header_size) {
        size_t n = view->header_size - (size_t)offset < size ? view->header_size - (size_t)offset : size;
        memcpy(out, view->header + offset, n);
        out += n;
        offset += n;
        size -= n;
    }
    offset -= size ? view->header_size : 0;
    size_t low = 0, high = view->count; /* the last tensor that begins at or before offset */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (view->tensors[middle].at <= offset)
            low = middle;
        else
            high = middle;
    }
    for (size_t i = low; size; i++) {
        const struct tensor *tensor = &view->tensors[i];
        uint64_t within = offset - tensor->at;
        size_t n =
            within < tensor->size ? (size_t)(tensor->size - within < size ? tensor->size - within : size) : 0;
        int code = 0;
        if (n && tensor->round)
            code = read_rounded(view, tensor, within, out, n, err);
        else if (n)
            code = read_all(view->fd, out, n, tensor->from + within, err);
        if (code)
            return code;
        out += n;
        offset += n;
        size -= n;
    }
    return 0;
}
