/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *ps_buf_reserve(struct ps_buf *buf, size_t size)
{
    if (buf->failed)
        return NULL;
    if (size > buf->max || buf->size > buf->max - size) {
        buf->failed = PS_RESOURCE_EXHAUSTED;
        return NULL;
    }
    size_t need = buf->size + size + 1;
    if (need > buf->capacity) {
        size_t capacity = buf->capacity ? buf->capacity : 64;
        while (capacity < need)
            capacity *= 2;
        char *data = realloc(buf->data, capacity);
        if (!data) {
            buf->failed = PS_RESOURCE_EXHAUSTED;
            return NULL;
        }
        buf->data = data;
        buf->capacity = capacity;
    }
    return buf->data + buf->size;
}

int ps_buf_append(struct ps_buf *buf, const void *data, size_t size)
{
    char *at = ps_buf_reserve(buf, size);
    if (!at)
        return buf->failed;
    if (size)
        memcpy(at, data, size);
    buf->size += size;
    buf->data[buf->size] = '\0';
    return 0;
}

int ps_buf_puts(struct ps_buf *buf, const char *text)
{
    return ps_buf_append(buf, text, strlen(text));
}

int ps_buf_printf(struct ps_buf *buf, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *at = n < 0 ? NULL : ps_buf_reserve(buf, (size_t)n);
    if (at) {
        vsnprintf(at, (size_t)n + 1, format, again);
        buf->size += (size_t)n;
    } else if (!buf->failed) {
        buf->failed = PS_INTERNAL;
    }
    va_end(again);
    return buf->failed;
}

void ps_buf_clear(struct ps_buf *buf)
{
    buf->size = 0;
    buf->failed = 0;
    if (buf->data)
        buf->data[0] = '\0';
}

void ps_buf_done(struct ps_buf *buf)
{
    free(buf->data);
    *buf = (struct ps_buf){.max = buf->max};
}

char *ps_buf_take(struct ps_buf *buf, size_t *ret_size)
{
    if (!ps_buf_reserve(buf, 0))
        return NULL;
    buf->data[buf->size] = '\0';
    char *data = buf->data;
    if (ret_size)
        *ret_size = buf->size;
    *buf = (struct ps_buf){.max = buf->max};
    return data;
}
