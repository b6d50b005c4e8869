/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/checkpoint/safetensors.h"

#include "services/base/buf.h"
#include "services/base/fs.h"
#include "services/base/text.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tensors are written as they lie in memory, which must be little-endian"
#endif

enum { ALIGN = 8, METADATA_MAX = 4096 };
static const size_t FILE_MAX = (size_t)16 << 30;

static const struct {
    const char *name;
    size_t size;
} types[PS_TENSOR_TYPES] = {
    [PS_TENSOR_F32] = {"F32", 4},   [PS_TENSOR_F64] = {"F64", 8}, [PS_TENSOR_F16] = {"F16", 2},
    [PS_TENSOR_BF16] = {"BF16", 2}, [PS_TENSOR_I64] = {"I64", 8}, [PS_TENSOR_I32] = {"I32", 4},
    [PS_TENSOR_I16] = {"I16", 2},   [PS_TENSOR_I8] = {"I8", 1},   [PS_TENSOR_U8] = {"U8", 1},
    [PS_TENSOR_BOOL] = {"BOOL", 1},
};

size_t ps_tensor_type_size(enum ps_tensor_type type)
{
    return types[type].size;
}

const char *ps_tensor_type_name(enum ps_tensor_type type)
{
    return types[type].name;
}

void ps_tensor_shape_text(const struct ps_tensor *tensor, char *out, size_t size)
{
    size_t used = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < tensor->ndim && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, i ? ", %zu" : "%zu", tensor->shape[i]);
    if (used < size)
        snprintf(out + used, size - used, "]");
}

/* type size * shape; false if it overflows. */
static bool tensor_bytes(const struct ps_tensor *t, size_t *ret)
{
    size_t bytes = types[t->type].size;
    for (int i = 0; i < t->ndim; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes))
            return false;
    *ret = bytes;
    return true;
}

/* ---- writing ---- */

static void put_string(struct ps_buf *out, const char *text)
{
    ps_buf_append(out, "\"", 1);
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            ps_buf_printf(out, "\\%c", *p);
        else if (*p < 0x20)
            ps_buf_printf(out, "\\u%04x", *p);
        else
            ps_buf_append(out, p, 1);
    }
    ps_buf_append(out, "\"", 1);
}

static int make_header(const struct ps_tensor *tensors, size_t count, const struct ps_tensor_pair *metadata,
                       size_t metadata_count, struct ps_buf *out, struct ps_error *err)
{
    size_t offset = 0;
    bool first = true;
    ps_buf_puts(out, "{");
    if (metadata_count) {
        ps_buf_puts(out, "\"__metadata__\":{");
        for (size_t i = 0; i < metadata_count; i++) {
            if (!ps_utf8_valid(metadata[i].value, strlen(metadata[i].value)))
                return ps_fail(err, PS_INVALID_ARGUMENT, "the value of %s is not UTF-8", metadata[i].key);
            ps_buf_puts(out, i ? "," : "");
            put_string(out, metadata[i].key);
            ps_buf_puts(out, ":");
            put_string(out, metadata[i].value);
        }
        ps_buf_puts(out, "}");
        first = false;
    }
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        if (!tensor_bytes(&tensors[i], &bytes) || bytes != tensors[i].bytes)
            return ps_fail(err, PS_INTERNAL, "tensor %s: %zu bytes do not agree with its shape",
                           tensors[i].name, tensors[i].bytes);
        ps_buf_puts(out, first ? "" : ",");
        first = false;
        put_string(out, tensors[i].name);
        ps_buf_printf(out, ":{\"dtype\":\"%s\",\"shape\":[", types[tensors[i].type].name);
        for (int d = 0; d < tensors[i].ndim; d++)
            ps_buf_printf(out, d ? ",%zu" : "%zu", tensors[i].shape[d]);
        ps_buf_printf(out, "],\"data_offsets\":[%zu,%zu]}", offset, offset + bytes);
        offset += bytes;
    }
    ps_buf_puts(out, "}");
    while (!out->failed && out->size % ALIGN)
        ps_buf_puts(out, " ");
    return out->failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "the header of %zu tensors is too long", count)
                       : 0;
}

int ps_safetensors_write(const char *path, const struct ps_tensor *tensors, size_t count,
                         const struct ps_tensor_pair *metadata, size_t metadata_count,
                         char ret_sha256[PS_SHA256_HEX], struct ps_error *err)
{
    struct ps_buf header = PS_BUF_INIT(PS_TENSOR_HEADER_MAX);
    struct ps_sha256 *sha = NULL;
    struct ps_new_file file = {.fd = -1};
    int code = make_header(tensors, count, metadata, metadata_count, &header, err);
    if (code)
        goto out;
    if (ret_sha256) {
        sha = ps_sha256_new();
        if (!sha) {
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
            goto out;
        }
    }
    if (path)
        code = ps_new_file_open(&file, path, err);
    const uint64_t length = header.size;
    for (size_t i = 0; i < count + 2 && !code; i++) {
        const void *data = i == 0 ? &length : i == 1 ? header.data : tensors[i - 2].data;
        size_t size = i == 0 ? sizeof length : i == 1 ? header.size : tensors[i - 2].bytes;
        if (sha)
            ps_sha256_update(sha, data, size);
        if (path)
            code = ps_write_all(file.fd, data, size, path, err);
    }
    if (path && !code)
        code = ps_new_file_commit(&file, err);
    if (sha && !code)
        ps_sha256_hex(sha, ret_sha256);
out:
    if (path)
        ps_new_file_abandon(&file);
    ps_sha256_free(sha);
    ps_buf_done(&header);
    return code;
}

/* ---- reading: a JSON reader for this header alone ---- */

struct reader {
    char *at, *end; /* strings are unescaped in place */
    const char *name;
    struct ps_error *err;
};

static int bad(struct reader *r, const char *what)
{
    return ps_fail(r->err, PS_DATA_LOSS, "%s: its header is damaged: %s", r->name, what);
}

static void skip_space(struct reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

static bool accept(struct reader *r, char c)
{
    skip_space(r);
    if (r->at == r->end || *r->at != c)
        return false;
    r->at++;
    return true;
}

static int hex4(const char *p)
{
    int n = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        n = n << 4 | digit;
    }
    return n;
}

static char *put_utf8(char *out, unsigned c)
{
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xc0 | c >> 6);
        *out++ = (char)(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
        *out++ = (char)(0xe0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 0x3f));
        *out++ = (char)(0x80 | (c & 0x3f));
    } else {
        *out++ = (char)(0xf0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 0x3f));
        *out++ = (char)(0x80 | (c >> 6 & 0x3f));
        *out++ = (char)(0x80 | (c & 0x3f));
    }
    return out;
}

/* A string, NUL-terminated over its closing quote or before it: an escape is never shorter than what it
 * stands for. */
static int read_string(struct reader *r, char **ret)
{
    if (!accept(r, '"'))
        return bad(r, "a string is missing");
    char *start = r->at, *out = r->at;
    for (;;) {
        if (r->at == r->end)
            return bad(r, "a string without its end");
        unsigned char c = (unsigned char)*r->at++;
        if (c == '"')
            break;
        if (c < 0x20)
            return bad(r, "a control character in a string");
        if (c != '\\') {
            *out++ = (char)c;
            continue;
        }
        if (r->at == r->end)
            return bad(r, "a string without its end");
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        char escape = *r->at++;
        const char *known = escape ? strchr(from, escape) : NULL;
        if (known) {
            *out++ = to[known - from];
            continue;
        }
        int unit = escape == 'u' && r->end - r->at >= 4 ? hex4(r->at) : -1;
        if (unit <= 0)
            return bad(r, "an escape that JSON does not know");
        r->at += 4;
        unsigned code = (unsigned)unit;
        if (unit >= 0xd800 && unit < 0xdc00 && r->end - r->at >= 6 && r->at[0] == '\\' && r->at[1] == 'u') {
            int low = hex4(r->at + 2);
            if (low >= 0xdc00 && low < 0xe000) {
                code = 0x10000 + ((unsigned)(unit - 0xd800) << 10) + (unsigned)(low - 0xdc00);
                r->at += 6;
            }
        }
        if (code >= 0xd800 && code < 0xe000)
            return bad(r, "half a surrogate pair");
        out = put_utf8(out, code);
    }
    if (!ps_utf8_valid(start, (size_t)(out - start)))
        return bad(r, "a string that is not UTF-8");
    *out = '\0'; /* at the latest where the closing quote was */
    *ret = start;
    return 0;
}

static int read_size(struct reader *r, size_t *ret)
{
    skip_space(r);
    size_t n = 0;
    char *start = r->at;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++)
        if (__builtin_mul_overflow(n, (size_t)10, &n) ||
            __builtin_add_overflow(n, (size_t)(*r->at - '0'), &n))
            return bad(r, "a number out of range");
    if (r->at == start || (*start == '0' && r->at - start > 1))
        return bad(r, "a whole number is missing");
    *ret = n;
    return 0;
}

/* "[a, b, ...]" of at most max numbers. */
static int read_sizes(struct reader *r, size_t *out, int max, int *ret_count)
{
    int n = 0;
    if (!accept(r, '['))
        return bad(r, "a list is missing");
    if (!accept(r, ']')) {
        do {
            if (n == max)
                return bad(r, "a list that is too long");
            int code = read_size(r, &out[n++]);
            if (code)
                return code;
        } while (accept(r, ','));
        if (!accept(r, ']'))
            return bad(r, "a list without its end");
    }
    *ret_count = n;
    return 0;
}

static int read_tensor(struct reader *r, struct ps_tensor *t, size_t *ret_begin)
{
    bool have_type = false, have_shape = false, have_offsets = false;
    size_t offsets[2] = {0, 0};
    if (!accept(r, '{'))
        return bad(r, "a tensor's description is missing");
    do {
        char *key, *text;
        int n = 0, code = read_string(r, &key);
        if (!code && !accept(r, ':'))
            code = bad(r, "a colon is missing");
        if (code)
            return code;
        if (strcmp(key, "dtype") == 0 && !have_type) {
            code = read_string(r, &text);
            for (int i = 0; !code && i < PS_TENSOR_TYPES && !have_type; i++)
                if (strcmp(text, types[i].name) == 0) {
                    t->type = (enum ps_tensor_type)i;
                    have_type = true;
                }
            if (!code && !have_type)
                code = ps_fail(r->err, PS_INVALID_ARGUMENT, "%s: tensor %s has an unknown type %.20s",
                               r->name, t->name, text);
        } else if (strcmp(key, "shape") == 0 && !have_shape) {
            code = read_sizes(r, t->shape, PS_TENSOR_DIMS, &t->ndim);
            have_shape = true;
        } else if (strcmp(key, "data_offsets") == 0 && !have_offsets) {
            code = read_sizes(r, offsets, 2, &n);
            if (!code && n != 2)
                code = bad(r, "data_offsets are not two numbers");
            have_offsets = true;
        } else {
            code = bad(r, "an unknown or repeated key in a tensor's description");
        }
        if (code)
            return code;
    } while (accept(r, ','));
    if (!accept(r, '}') || !have_type || !have_shape || !have_offsets)
        return bad(r, "a tensor's description is not whole");
    size_t bytes;
    if (!tensor_bytes(t, &bytes) || offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes) {
        char shape[160];
        ps_tensor_shape_text(t, shape, sizeof shape);
        return ps_fail(r->err, PS_DATA_LOSS,
                       "%s: tensor %s of shape %s has data offsets %zu to %zu, which do not agree", r->name,
                       t->name, shape, offsets[0], offsets[1]);
    }
    t->bytes = bytes;
    *ret_begin = offsets[0];
    return 0;
}

static int read_metadata(struct reader *r, struct ps_safetensors *st)
{
    if (!accept(r, '{'))
        return bad(r, "__metadata__ is no object");
    if (accept(r, '}'))
        return 0;
    st->metadata = calloc(METADATA_MAX, sizeof *st->metadata);
    if (!st->metadata)
        return ps_fail(r->err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", r->name);
    do {
        char *key, *value;
        if (st->metadata_count == METADATA_MAX)
            return bad(r, "too much metadata");
        int code = read_string(r, &key);
        if (!code && !accept(r, ':'))
            code = bad(r, "a colon is missing");
        if (!code)
            code = read_string(r, &value);
        if (code)
            return code;
        st->metadata[st->metadata_count++] = (struct ps_tensor_pair){key, value};
    } while (accept(r, ','));
    return accept(r, '}') ? 0 : bad(r, "metadata without its end");
}

struct place {
    size_t begin, index;
    const struct ps_tensor *tensor;
};

static int by_begin(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->tensor->bytes < y->tensor->bytes ? -1
                                               : x->tensor->bytes > y->tensor->bytes; /* empty ones first */
}

static int by_name(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    return strcmp(x->tensor->name, y->tensor->name);
}

/* Offsets without gap or overlap up to the file's end, names without duplicates. */
static int check_places(struct reader *r, struct ps_safetensors *st, const size_t *begins, const char *data,
                        size_t data_size)
{
    struct place *places = malloc((st->count + 1) * sizeof *places);
    if (!places)
        return ps_fail(r->err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", r->name);
    for (size_t i = 0; i < st->count; i++)
        places[i] = (struct place){begins[i], i, &st->tensors[i]};
    qsort(places, st->count, sizeof *places, by_begin);
    size_t expected = 0;
    int code = 0;
    for (size_t i = 0; i < st->count && !code; i++) {
        struct ps_tensor *t = &st->tensors[places[i].index];
        if (places[i].begin != expected) {
            code = ps_fail(r->err, PS_DATA_LOSS,
                           "%s: tensor %s begins at %zu, but the one before it ends at %zu", r->name, t->name,
                           places[i].begin, expected);
        } else if (t->bytes > data_size - expected) {
            code = ps_fail(r->err, PS_DATA_LOSS, "%s is truncated: tensor %s ends at %zu of %zu bytes",
                           r->name, t->name, expected + t->bytes, data_size);
        } else {
            t->data = data + expected;
            expected += t->bytes;
        }
    }
    if (!code && expected != data_size)
        code = ps_fail(r->err, PS_DATA_LOSS, "%s: %zu bytes after the last tensor", r->name,
                       data_size - expected);
    qsort(places, st->count, sizeof *places, by_name);
    for (size_t i = 1; i < st->count && !code; i++)
        if (strcmp(places[i - 1].tensor->name, places[i].tensor->name) == 0)
            code =
                ps_fail(r->err, PS_DATA_LOSS, "%s: tensor %s comes twice", r->name, places[i].tensor->name);
    free(places);
    return code;
}

int ps_safetensors_parse(char *file, size_t size, const char *name, struct ps_safetensors **ret,
                         struct ps_error *err)
{
    struct ps_error local = {0};
    uint64_t length = 0;
    size_t *begins = NULL, capacity = 0;
    struct ps_safetensors *st = calloc(1, sizeof *st);
    struct reader r = {.name = name, .err = err ? err : &local};
    int code;
    if (!st) {
        free(file);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", name);
    }
    st->file = file;
    st->size = size;
    if (size < 8) {
        code = ps_fail(r.err, PS_DATA_LOSS, "%s is truncated: %zu bytes", name, size);
        goto out;
    }
    memcpy(&length, file, 8);
    if (length > PS_TENSOR_HEADER_MAX || length > size - 8) {
        code = ps_fail(
            r.err, PS_DATA_LOSS,
            "%s: a header of %llu bytes in a file of %zu: truncated, or not in the safetensors layout", name,
            (unsigned long long)length, size);
        goto out;
    }
    r.at = file + 8;
    r.end = file + 8 + length;
    if (!accept(&r, '{')) {
        code = bad(&r, "it is no JSON object");
        goto out;
    }
    bool seen_metadata = false, empty = accept(&r, '}');
    while (!empty) {
        char *key;
        code = read_string(&r, &key);
        if (!code && !accept(&r, ':'))
            code = bad(&r, "a colon is missing");
        if (code)
            goto out;
        if (strcmp(key, "__metadata__") == 0) {
            code = seen_metadata ? bad(&r, "__metadata__ comes twice") : read_metadata(&r, st);
            seen_metadata = true;
        } else if (strlen(key) >= PS_TENSOR_NAME_MAX || st->count == PS_TENSORS_MAX) {
            code = bad(&r, "a name that is too long, or too many tensors");
        } else {
            if (st->count == capacity) {
                capacity = capacity ? 2 * capacity : 256;
                struct ps_tensor *tensors = realloc(st->tensors, capacity * sizeof *tensors);
                if (tensors)
                    st->tensors = tensors;
                size_t *more = tensors ? realloc(begins, capacity * sizeof *more) : NULL;
                if (!more) {
                    code = ps_fail(r.err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", name);
                    goto out;
                }
                begins = more;
            }
            struct ps_tensor *t = &st->tensors[st->count];
            memset(t, 0, sizeof *t);
            memcpy(t->name, key, strlen(key) + 1);
            code = read_tensor(&r, t, &begins[st->count]);
            st->count++;
        }
        if (code)
            goto out;
        if (accept(&r, '}'))
            break;
        if (!accept(&r, ',')) {
            code = bad(&r, "a comma is missing");
            goto out;
        }
    }
    skip_space(&r);
    if (r.at != r.end) {
        code = bad(&r, "text after its end");
        goto out;
    }
    code = check_places(&r, st, begins, file + 8 + length, size - 8 - (size_t)length);
out:
    free(begins);
    if (code)
        ps_safetensors_free(st);
    else
        *ret = st;
    return code;
}

int ps_safetensors_read(const char *path, struct ps_safetensors **ret, struct ps_error *err)
{
    char *data;
    size_t size;
    int code = ps_read_file(path, FILE_MAX, &data, &size, err);
    return code ? code : ps_safetensors_parse(data, size, path, ret, err);
}

struct ps_safetensors *ps_safetensors_free(struct ps_safetensors *st)
{
    if (!st)
        return NULL;
    free(st->tensors);
    free(st->metadata);
    free(st->file);
    free(st);
    return NULL;
}

const struct ps_tensor *ps_safetensors_find(const struct ps_safetensors *st, const char *name)
{
    static const char prefix[] = "module.";
    for (size_t i = 0; i < st->count; i++) {
        const char *have = st->tensors[i].name;
        if (strcmp(have, name) == 0 ||
            (strncmp(have, prefix, sizeof prefix - 1) == 0 && strcmp(have + sizeof prefix - 1, name) == 0))
            return &st->tensors[i];
    }
    return NULL;
}

const char *ps_safetensors_metadata(const struct ps_safetensors *st, const char *key)
{
    for (size_t i = 0; i < st->metadata_count; i++)
        if (strcmp(st->metadata[i].key, key) == 0)
            return st->metadata[i].value;
    return NULL;
}
