/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/wire.h"

#include "services/base/digest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

static uint64_t get_le(const unsigned char *p, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

static void put_le(unsigned char *p, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        p[i] = (unsigned char)(value >> (8 * i));
}

const unsigned char *ps_wire_bytes(struct ps_wire_reader *r, size_t size)
{
    if (r->bad || r->left < size) {
        r->bad = true;
        return NULL;
    }
    const unsigned char *p = r->at;
    r->at += size;
    r->left -= size;
    return p;
}

uint32_t ps_wire_u32(struct ps_wire_reader *r)
{
    const unsigned char *p = ps_wire_bytes(r, 4);
    return p ? (uint32_t)get_le(p, 4) : 0;
}

uint64_t ps_wire_u64(struct ps_wire_reader *r)
{
    const unsigned char *p = ps_wire_bytes(r, 8);
    return p ? get_le(p, 8) : 0;
}

void ps_wire_put_u32(struct ps_buf *out, uint32_t value)
{
    unsigned char p[4];
    put_le(p, value, 4);
    ps_buf_append(out, p, sizeof p);
}

void ps_wire_put_u64(struct ps_buf *out, uint64_t value)
{
    unsigned char p[8];
    put_le(p, value, 8);
    ps_buf_append(out, p, sizeof p);
}

void ps_wire_put_frame(struct ps_buf *out, enum ps_wire_type type, uint32_t id, const void *a, size_t a_size,
                       const void *b, size_t b_size)
{
    unsigned char header[PS_WIRE_HEADER] = {0};
    put_le(header, a_size + b_size, 4);
    put_le(header + 4, id, 4);
    header[8] = (unsigned char)type;
    ps_buf_append(out, header, sizeof header);
    if (a_size)
        ps_buf_append(out, a, a_size);
    if (b_size)
        ps_buf_append(out, b, b_size);
}

long ps_wire_take(const char *data, size_t size, size_t body_max, struct ps_wire_frame *ret)
{
    if (size < PS_WIRE_HEADER)
        return 0;
    const unsigned char *p = (const unsigned char *)data;
    uint64_t body = get_le(p, 4);
    if (body > body_max || p[8] < PS_WIRE_GREETING || p[8] > PS_WIRE_BYE || p[9] || p[10] || p[11])
        return -1;
    if (size - PS_WIRE_HEADER < body)
        return 0;
    *ret = (struct ps_wire_frame){
        .type = p[8], .id = (uint32_t)get_le(p + 4, 4), .body = p + PS_WIRE_HEADER, .size = body};
    return (long)(PS_WIRE_HEADER + body);
}

int ps_wire_mac(const char *secret, const char *role, const unsigned char *server_nonce,
                const unsigned char *client_nonce, uint32_t rank, uint32_t world_size,
                char ret[PS_WIRE_MAC + 1])
{
    unsigned char key[64] = {0}, pad[64], numbers[8];
    char hex[PS_SHA256_HEX];
    size_t length = strlen(secret);
    if (length > sizeof key) {
        struct ps_sha256 *sha = ps_sha256_new();
        if (!sha)
            return PS_RESOURCE_EXHAUSTED;
        ps_sha256_update(sha, secret, length);
        ps_sha256_hex(sha, hex);
        ps_sha256_free(sha);
        memcpy(key, hex, sizeof key);
    } else {
        for (size_t i = 0; i < length; i++)
            key[i] = (unsigned char)secret[i];
    }
    put_le(numbers, rank, 4);
    put_le(numbers + 4, world_size, 4);

    struct ps_sha256 *inner = ps_sha256_new(), *outer = ps_sha256_new();
    int code = inner && outer ? 0 : PS_RESOURCE_EXHAUSTED;
    if (code == 0) {
        for (size_t i = 0; i < sizeof pad; i++)
            pad[i] = key[i] ^ 0x36;
        ps_sha256_update(inner, pad, sizeof pad);
        ps_sha256_update(inner, role, strlen(role) + 1);
        ps_sha256_update(inner, server_nonce, PS_WIRE_NONCE);
        ps_sha256_update(inner, client_nonce, PS_WIRE_NONCE);
        ps_sha256_update(inner, numbers, sizeof numbers);
        ps_sha256_hex(inner, hex);
        for (size_t i = 0; i < sizeof pad; i++)
            pad[i] = key[i] ^ 0x5c;
        ps_sha256_update(outer, pad, sizeof pad);
        ps_sha256_update(outer, hex, PS_WIRE_MAC);
        ps_sha256_hex(outer, ret);
    }
    ps_sha256_free(inner);
    ps_sha256_free(outer);
    return code;
}

bool ps_wire_mac_equal(const void *a, const void *b)
{
    const unsigned char *x = a, *y = b;
    unsigned char difference = 0;
    for (int i = 0; i < PS_WIRE_MAC; i++)
        difference |= x[i] ^ y[i];
    return difference == 0;
}

int ps_wire_nonce(unsigned char nonce[PS_WIRE_NONCE])
{
    return getrandom(nonce, PS_WIRE_NONCE, 0) == PS_WIRE_NONCE ? 0 : PS_UNAVAILABLE;
}

void ps_wire_text(const unsigned char *data, size_t size, char *out, size_t out_size)
{
    size_t used = 0;
    for (size_t i = 0; i < size && used + 1 < out_size && data[i]; i++)
        out[used++] = data[i] < 0x20 || data[i] == 0x7f ? ' ' : (char)data[i];
    out[used] = '\0';
}

void ps_address_text(const struct sockaddr *address, char *out, size_t size)
{
    out[0] = '\0';
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &v4->sin_addr, out, (socklen_t)size);
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;
        if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr))
            inet_ntop(AF_INET, v6->sin6_addr.s6_addr + 12, out, (socklen_t)size);
        else
            inet_ntop(AF_INET6, &v6->sin6_addr, out, (socklen_t)size);
    } else {
        snprintf(out, size, "this process");
    }
}

bool ps_address_loopback(const char *text)
{
    return strncmp(text, "127.", 4) == 0 || strcmp(text, "::1") == 0;
}

void ps_socket_tune(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}
