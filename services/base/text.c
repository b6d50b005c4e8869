/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/text.h"

#include "services/base/clock.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

int ps_utf8_valid(const char *text, size_t size)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + size;
    while (p < end) {
        if (*p == 0)
            return 0;
        if (*p < 0x80) {
            p++;
            continue;
        }
        int n = *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : 1;
        if (*p < 0xc2 || *p > 0xf4 || end - p <= n)
            return 0;
        unsigned low = 0x80, high = 0xbf;
        if (*p == 0xe0)
            low = 0xa0;
        if (*p == 0xed)
            high = 0x9f;
        if (*p == 0xf0)
            low = 0x90;
        if (*p == 0xf4)
            high = 0x8f;
        if (p[1] < low || p[1] > high)
            return 0;
        for (int i = 2; i <= n; i++)
            if ((p[i] & 0xc0) != 0x80)
                return 0;
        p += n + 1;
    }
    return 1;
}

int ps_parse_int64(const char *text, int64_t min, int64_t max, int64_t *ret_value)
{
    char *end;
    if (!(*text >= '0' && *text <= '9') && !(*text == '-' && text[1] >= '0' && text[1] <= '9'))
        return -1;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || *end || value < min || value > max)
        return -1;
    *ret_value = value;
    return 0;
}

int ps_parse_double(const char *text, double *ret_value)
{
    char *end;
    if (!*text || strspn(text, "+-.0123456789eE") != strlen(text))
        return -1;
    errno = 0;
    double value = strtod(text, &end);
    if (*end || !isfinite(value))
        return -1;
    *ret_value = value;
    return 0;
}

int ps_check_run_name(const char *name, const char *field, struct ps_error *err)
{
    size_t size = strlen(name);
    if (size == 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s is empty: give the run a name", field);
    if (size > 200)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s is %zu bytes long: at most 200 are allowed", field,
                       size);
    if (!ps_utf8_valid(name, size))
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s is not valid UTF-8", field);
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s holds a control character", field);
    if (name[0] == ' ' || name[size - 1] == ' ')
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s begins or ends with a space", field);
    return 0;
}

int ps_parse_host_port(const char *text, char *ret_host, size_t host_size, int *ret_port,
                       struct ps_error *err)
{
    const char *colon = strrchr(text, ':');
    const char *host = text;
    size_t n = colon ? (size_t)(colon - text) : 0;
    int64_t port;
    if (!colon || ps_parse_int64(colon + 1, 0, 65535, &port))
        return ps_fail(err, PS_INVALID_ARGUMENT, "\"%s\" is not HOST:PORT with a port from 0 to 65535", text);
    if (n >= 2 && host[0] == '[' && host[n - 1] == ']') {
        host++;
        n -= 2;
    } else if (memchr(host, ':', n)) {
        return ps_fail(err, PS_INVALID_ARGUMENT, "\"%s\": write an IPv6 address as [ADDRESS]:PORT", text);
    }
    if (n >= host_size)
        return ps_fail(err, PS_INVALID_ARGUMENT, "\"%.40s...\": the host name is too long", text);
    memcpy(ret_host, host, n);
    ret_host[n] = '\0';
    *ret_port = (int)port;
    return 0;
}

void ps_make_id(char out[27])
{
    static const char digits[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    unsigned char bytes[16];
    uint64_t ms = (uint64_t)(ps_wall_ns() / 1000000);
    for (int i = 0; i < 6; i++)
        bytes[i] = (unsigned char)(ms >> (40 - 8 * i));
    while (getrandom(bytes + 6, 10, 0) != 10)
        ;
    /* 128 bits as 26 digits: two zero bits in front. */
    unsigned acc = 0;
    int bits = 2, at = 0;
    for (int i = 0; i < 16; i++) {
        acc = acc << 8 | bytes[i];
        bits += 8;
        while (bits >= 5) {
            bits -= 5;
            out[at++] = digits[acc >> bits & 31];
        }
    }
    out[26] = '\0';
}

int ps_parse_bytes(const char *text, double *ret_bytes)
{
    char *end = NULL;
    if (!isdigit((unsigned char)*text) || (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')))
        return -1; /* strtod would take signs, hex, inf and nan */
    double value = strtod(text, &end);
    static const char units[] = "kKmMgG";
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (*end && (!unit || end[1]))
        return -1;
    for (int i = 0; unit && i <= (unit - units) / 2; i++)
        value *= 1024;
    if (!isfinite(value) || value > 1e18)
        return -1;
    *ret_bytes = value;
    return 0;
}
