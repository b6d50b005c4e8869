/* SPDX-License-Identifier: Apache-2.0
 * The Range header (RFC 9110, section 14), one range of bytes. */
#ifndef PARAMSYNC_SIDECAR_HTTP_RANGE_H
#define PARAMSYNC_SIDECAR_HTTP_RANGE_H

#include <stdint.h>

enum ps_range {
    PS_RANGE_NONE, /* no header, another unit, several ranges, bad syntax: send everything with 200 */
    PS_RANGE_ONE,  /* 206 with what was asked */
    PS_RANGE_UNSATISFIABLE, /* 416 */
};
/* header may be NULL. For PS_RANGE_ONE *ret_first and *ret_count (at least 1) lie within size. */
enum ps_range ps_http_range(const char *header, uint64_t size, uint64_t *ret_first, uint64_t *ret_count);

#endif
