/* SPDX-License-Identifier: Apache-2.0
 * A growing byte buffer, created with the most it may ever hold. Always NUL-terminated once anything was
 * appended. */
#ifndef PARAMSYNC_BASE_BUF_H
#define PARAMSYNC_BASE_BUF_H

#include "services/base/error.h"

struct ps_buf {
    char *data; /* owned; NULL while empty */
    size_t size;
    size_t capacity;
    size_t max;
    int failed; /* sticky: a ps_code after an append did not fit */
};

#define PS_BUF_INIT(max_bytes)                                                                               \
    {                                                                                                        \
        .max = (max_bytes)                                                                                   \
    }

/* Appends return 0 or PS_RESOURCE_EXHAUSTED (over max, or out of memory); after a failure the buffer keeps
 * what it had and further appends fail too, so that a sequence needs one check at its end. */
int ps_buf_append(struct ps_buf *buf, const void *data, size_t size);
int ps_buf_puts(struct ps_buf *buf, const char *text);
int ps_buf_printf(struct ps_buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Makes room for size more bytes and returns where they go (add to buf->size what was used), or NULL. */
char *ps_buf_reserve(struct ps_buf *buf, size_t size);
void ps_buf_clear(struct ps_buf *buf); /* keeps the memory */
void ps_buf_done(struct ps_buf *buf);
/* Hands the bytes over (free() them); never NULL unless the buffer failed. The buffer is empty again. */
char *ps_buf_take(struct ps_buf *buf, size_t *ret_size);

#endif
