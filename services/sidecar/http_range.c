/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/http_range.h"

#include <string.h>
#include <strings.h>

/* Digits into a number that stops at the largest; returns what follows them. */
static const char *digits(const char *text, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        uint64_t digit = (uint64_t)(*text - '0');
        value = value > (UINT64_MAX - digit) / 10 ? UINT64_MAX : value * 10 + digit;
    }
    *ret_value = value;
    return text;
}

enum ps_range ps_http_range(const char *header, uint64_t size, uint64_t *ret_first, uint64_t *ret_count)
{
    if (!header || strncasecmp(header, "bytes=", 6) != 0)
        return PS_RANGE_NONE;
    const char *at = header + 6 + strspn(header + 6, " \t");
    uint64_t first, last;
    const char *dash = digits(at, &first);
    if (*dash != '-')
        return PS_RANGE_NONE;
    const char *end = digits(dash + 1, &last);
    int has_first = dash > at, has_last = end > dash + 1;
    if (end[strspn(end, " \t")] != '\0' || (!has_first && !has_last))
        return PS_RANGE_NONE;
    if (!has_first) { /* the last so many bytes */
        if (last == 0 || size == 0)
            return PS_RANGE_UNSATISFIABLE;
        *ret_count = last < size ? last : size;
        *ret_first = size - *ret_count;
        return PS_RANGE_ONE;
    }
    if (has_last && last < first)
        return PS_RANGE_NONE;
    if (first >= size)
        return PS_RANGE_UNSATISFIABLE;
    if (!has_last || last >= size)
        last = size - 1;
    *ret_first = first;
    *ret_count = last - first + 1;
    return PS_RANGE_ONE;
}
