/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/checkpoint/pth.h"

#include "services/base/buf.h"
#include "services/base/fs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64, ENTRY_NAME_MAX = 48, LOCAL_SIZE = 30 };

/* CRC-32 of zip (ISO 3309, reflected 0xEDB88320). */
static uint32_t crc32_of(const unsigned char *p, size_t size)
{
    uint32_t table[256], crc = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? c >> 1 ^ 0xEDB88320u : c >> 1;
        table[i] = c;
    }
    for (; size; p++, size--)
        crc = table[(crc ^ *p) & 0xff] ^ crc >> 8;
    return ~crc;
}

static void put16(struct ps_buf *out, unsigned n)
{
    unsigned char b[2] = {(unsigned char)n, (unsigned char)(n >> 8)};
    ps_buf_append(out, b, 2);
}

static void put32(struct ps_buf *out, uint32_t n)
{
    put16(out, n & 0xffff);
    put16(out, n >> 16);
}

/* ---- the pickle: protocol 2, opcodes as pickletools documents them ---- */

static void put_text(struct ps_buf *out, const char *text) /* BINUNICODE */
{
    ps_buf_puts(out, "X");
    put32(out, (uint32_t)strlen(text));
    ps_buf_puts(out, text);
}

static void put_int(struct ps_buf *out, size_t n)
{
    if (n < 256) {
        unsigned char b[2] = {'K', (unsigned char)n};
        ps_buf_append(out, b, 2);
    } else if (n < INT32_MAX) {
        ps_buf_puts(out, "J");
        put32(out, (uint32_t)n);
    } else { /* LONG1 of 8 bytes */
        ps_buf_append(out, "\x8a\x08", 2);
        put32(out, (uint32_t)n);
        put32(out, (uint32_t)(n >> 32));
    }
}

static void put_tuple(struct ps_buf *out, const size_t *n, int count)
{
    ps_buf_puts(out, "(");
    for (int i = 0; i < count; i++)
        put_int(out, n[i]);
    ps_buf_puts(out, "t");
}

static void make_pickle(const struct ps_tensor *tensors, size_t count, struct ps_buf *out)
{
    static const char dict[] = "ccollections\nOrderedDict\n)R";
    ps_buf_append(out, "\x80\x02", 2);
    ps_buf_puts(out, dict);
    ps_buf_puts(out, "(");
    for (size_t i = 0; i < count; i++) {
        const struct ps_tensor *t = &tensors[i];
        size_t stride[PS_TENSOR_DIMS], elements = 1;
        char key[24];
        for (int d = t->ndim - 1; d >= 0; d--) {
            stride[d] = elements;
            elements *= t->shape[d];
        }
        put_text(out, t->name);
        ps_buf_puts(out, "ctorch._utils\n_rebuild_tensor_v2\n((");
        put_text(out, "storage");
        ps_buf_puts(out, t->type == PS_TENSOR_F32 ? "ctorch\nFloatStorage\n" : "ctorch\nLongStorage\n");
        snprintf(key, sizeof key, "%zu", i);
        put_text(out, key);
        put_text(out, "cpu");
        put_int(out, elements);
        ps_buf_puts(out, "tQ"); /* BINPERSID */
        put_int(out, 0);
        put_tuple(out, t->shape, t->ndim);
        put_tuple(out, stride, t->ndim);
        ps_buf_append(out, "\x89", 1); /* requires no gradient */
        ps_buf_puts(out, dict);
        ps_buf_puts(out, "tR");
    }
    ps_buf_puts(out, "u.");
}

/* ---- the zip ---- */

struct zip {
    struct ps_new_file file;
    const char *path;
    uint64_t offset;
    struct ps_buf central;
    unsigned entries;
};

static int zip_add(struct zip *zip, const char *name, const void *data, size_t size, struct ps_error *err)
{
    struct ps_buf head = PS_BUF_INIT(1 << 12);
    uint32_t crc = crc32_of(data, size);
    size_t name_size = strlen(name), used = LOCAL_SIZE + name_size + 4;
    size_t pad =
        (ALIGN - (zip->offset + used) % ALIGN) % ALIGN; /* torch maps storages: aligned by an extra field */
    if (size > UINT32_MAX || zip->offset + size + used + ALIGN > UINT32_MAX)
        return ps_fail(err, PS_OUT_OF_RANGE, "%s: 4 GiB and more do not fit the pth format: use safetensors",
                       zip->path);
    put32(&head, 0x04034b50);
    for (int central = 0; central < 2; central++) {
        struct ps_buf *out = central ? &zip->central : &head;
        if (central) {
            put32(out, 0x02014b50);
            put16(out, 0);
        }
        put16(out, 0);      /* version needed */
        put16(out, 0x0800); /* names are UTF-8 */
        put16(out, 0);      /* stored */
        put16(out, 0);
        put16(out, 0x21); /* 1980-01-01: the same bytes for the same weights */
        put32(out, crc);
        put32(out, (uint32_t)size);
        put32(out, (uint32_t)size);
        put16(out, (unsigned)name_size);
        if (central) {
            put16(out, 0); /* extra, comment, disk, attributes */
            put16(out, 0);
            put16(out, 0);
            put16(out, 0);
            put32(out, 0);
            put32(out, (uint32_t)zip->offset);
        } else {
            put16(out, (unsigned)(4 + pad));
        }
        ps_buf_puts(out, name);
    }
    put16(&head, 0x4246); /* "FB", as PyTorch pads */
    put16(&head, (unsigned)pad);
    for (size_t i = 0; i < pad; i++)
        ps_buf_puts(&head, "Z");
    int code = head.failed || zip->central.failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : 0;
    if (!code)
        code = ps_write_all(zip->file.fd, head.data, head.size, zip->path, err);
    if (!code)
        code = ps_write_all(zip->file.fd, data, size, zip->path, err);
    zip->offset += head.size + size;
    zip->entries++;
    ps_buf_done(&head);
    return code;
}

static int zip_end(struct zip *zip, struct ps_error *err)
{
    uint32_t size = (uint32_t)zip->central.size;
    put32(&zip->central, 0x06054b50);
    put16(&zip->central, 0);
    put16(&zip->central, 0);
    put16(&zip->central, zip->entries);
    put16(&zip->central, zip->entries);
    put32(&zip->central, size);
    put32(&zip->central, (uint32_t)zip->offset);
    put16(&zip->central, 0);
    if (zip->central.failed)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    return ps_write_all(zip->file.fd, zip->central.data, zip->central.size, zip->path, err);
}

int ps_pth_write(const char *path, const struct ps_tensor *tensors, size_t count, struct ps_error *err)
{
    if (count > 60000)
        return ps_fail(err, PS_OUT_OF_RANGE, "%s: %zu tensors are too many for one zip", path, count);
    for (size_t i = 0; i < count; i++)
        if (tensors[i].type != PS_TENSOR_F32 && tensors[i].type != PS_TENSOR_I64)
            return ps_fail(err, PS_UNIMPLEMENTED, "%s: tensor %s is neither F32 nor I64", path,
                           tensors[i].name);
    struct zip zip = {.path = path, .central = PS_BUF_INIT(16 << 20)};
    struct ps_buf pickle = PS_BUF_INIT(16 << 20);
    make_pickle(tensors, count, &pickle);
    int code = pickle.failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : 0;
    if (code)
        goto out;
    code = ps_new_file_open(&zip.file, path, err);
    if (code)
        goto out;
    code = zip_add(&zip, "archive/data.pkl", pickle.data, pickle.size, err);
    for (size_t i = 0; i < count && !code; i++) {
        char name[ENTRY_NAME_MAX];
        snprintf(name, sizeof name, "archive/data/%zu", i);
        code = zip_add(&zip, name, tensors[i].data, tensors[i].bytes, err);
    }
    if (!code)
        code = zip_add(&zip, "archive/version", "3\n", 2, err);
    if (!code)
        code = zip_end(&zip, err);
    if (!code)
        code = ps_new_file_commit(&zip.file, err);
    ps_new_file_abandon(&zip.file);
out:
    ps_buf_done(&pickle);
    ps_buf_done(&zip.central);
    return code;
}
