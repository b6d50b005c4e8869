/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/http_host.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

/* "name", "name:80", "[v6]:80" without brackets and port; false if that is not what it is. */
static bool strip(const char *text, char *out, size_t size)
{
    const char *begin = text, *end;
    if (*text == '[') {
        begin = text + 1;
        end = strchr(begin, ']');
        if (!end || (end[1] != '\0' && end[1] != ':'))
            return false;
    } else {
        end = begin + strcspn(begin, ":");
        if (*end == ':' && strchr(end + 1, ':')) /* a bare v6 address, as configuration files have them */
            end = begin + strlen(begin);
    }
    size_t length = (size_t)(end - begin);
    if (length > 0 && begin[length - 1] == '.') /* the root of the name system, spelled out */
        length--;
    if (length == 0 || length >= size)
        return false;
    memcpy(out, begin, length);
    out[length] = '\0';
    return true;
}

static int is_address(const char *name, struct in6_addr *ret)
{
    struct in_addr v4;
    if (inet_pton(AF_INET6, name, ret) == 1)
        return 1;
    if (inet_pton(AF_INET, name, &v4) != 1)
        return 0;
    memset(ret, 0, sizeof *ret);
    ret->s6_addr[10] = ret->s6_addr[11] = 0xff;
    memcpy(ret->s6_addr + 12, &v4, 4);
    return 1;
}

static bool is_loopback(const struct in6_addr *address)
{
    return IN6_IS_ADDR_LOOPBACK(address) || (IN6_IS_ADDR_V4MAPPED(address) && address->s6_addr[12] == 127);
}

bool ps_http_host_ok(const char *host, const char *bound, const char *const *allowed, size_t allowed_count)
{
    char name[256], other[256];
    if (!host || !strip(host, name, sizeof name))
        return false;
    if (!strcasecmp(name, "localhost"))
        return true;
    struct in6_addr address, ours;
    if (is_address(name, &address)) {
        if (is_loopback(&address))
            return true;
        bool every = !bound || !*bound || !strcmp(bound, "*");
        if (!every && strip(bound, other, sizeof other) && is_address(other, &ours)) {
            static const struct in6_addr any = IN6ADDR_ANY_INIT;
            every = !memcmp(&ours, &any, sizeof any) ||
                    (IN6_IS_ADDR_V4MAPPED(&ours) && !memcmp(ours.s6_addr + 12, "\0\0\0", 4));
            if (!every && !memcmp(&ours, &address, sizeof ours))
                return true;
        }
        if (every)
            return true;
    } else if (bound && *bound && strip(bound, other, sizeof other) && !strcasecmp(name, other)) {
        return true; /* bound by name */
    }
    for (size_t i = 0; i < allowed_count; i++)
        if (strip(allowed[i], other, sizeof other) && !strcasecmp(name, other))
            return true;
    return false;
}
