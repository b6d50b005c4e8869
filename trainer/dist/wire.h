/* SPDX-License-Identifier: Apache-2.0
 * The rendezvous's protocol: frames of little-endian fields over a stream.
 *
 *     u32 size of the body | u32 id of the request | u8 type | 3 zero bytes | body
 *
 * Before a peer has proved the secret, nothing but a HELLO of its exact size is taken from it. */
#ifndef PARAMSYNC_DIST_WIRE_H
#define PARAMSYNC_DIST_WIRE_H

#include "services/base/buf.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

enum {
    PS_WIRE_VERSION = 1,
    PS_WIRE_HEADER = 12,
    PS_WIRE_NONCE = 16,
    PS_WIRE_MAC = 64, /* hexadecimal digits of HMAC-SHA-256 */
    PS_WIRE_HOST = 64,
    PS_WIRE_BODY_MAX = (1 << 20) + 512, /* a value and its key */
    PS_WIRE_HELLO_SIZE = 8 + 4 + 4 + 4 + 4 + PS_WIRE_NONCE + PS_WIRE_HOST + PS_WIRE_MAC,
};
#define PS_WIRE_MAGIC "PSRENDZV"

enum ps_wire_type {
    PS_WIRE_GREETING = 1, /* rank 0: magic[8], u32 version, nonce */
    PS_WIRE_HELLO,        /* magic[8], u32 version, u32 rank, u32 world size, u32 pid, nonce, host, mac */
    PS_WIRE_WELCOME,      /* rank 0: mac */
    PS_WIRE_REFUSED,      /* rank 0: text; the connection ends */
    PS_WIRE_START,        /* rank 0: u32 local rank, u32 local size, text address. All have joined */
    PS_WIRE_PING,         /* both ways */
    PS_WIRE_SET,          /* u32 key size, key, value */
    PS_WIRE_GET,          /* u32 milliseconds, key */
    PS_WIRE_ADD,          /* u64 amount, key */
    PS_WIRE_DONE,         /* rank 0: to SET, nothing; to GET, the value; to ADD, u64 */
    PS_WIRE_ERROR,        /* rank 0: u32 -ps_code, text */
    PS_WIRE_FAIL,         /* text: this rank fails */
    PS_WIRE_ABORT,        /* rank 0: text: the job has failed */
    PS_WIRE_LEAVE,        /* u32 milliseconds that rank 0 waits for the others */
    PS_WIRE_BYE,          /* rank 0: go */
};

struct ps_wire_frame {
    enum ps_wire_type type;
    uint32_t id;
    const unsigned char *body;
    size_t size;
};

/* A reader over a body: after the first field that does not fit, bad is set and all reads give zeros. */
struct ps_wire_reader {
    const unsigned char *at;
    size_t left;
    bool bad;
};
uint32_t ps_wire_u32(struct ps_wire_reader *r);
uint64_t ps_wire_u64(struct ps_wire_reader *r);
const unsigned char *ps_wire_bytes(struct ps_wire_reader *r, size_t size); /* NULL if they are not there */

void ps_wire_put_u32(struct ps_buf *out, uint32_t value);
void ps_wire_put_u64(struct ps_buf *out, uint64_t value);
/* Appends a frame whose body is the concatenation of a and b. */
void ps_wire_put_frame(struct ps_buf *out, enum ps_wire_type type, uint32_t id, const void *a, size_t a_size,
                       const void *b, size_t b_size);

/* Takes the frame at the start of the size bytes at data. Returns its whole length, 0 if more bytes are
 * needed, -1 if this is no frame of ours or its body exceeds body_max. */
long ps_wire_take(const char *data, size_t size, size_t body_max, struct ps_wire_frame *ret);

/* HMAC (RFC 2104) with SHA-256, inner and outer digest as hexadecimal text. */
int ps_wire_mac(const char *secret, const char *role, const unsigned char *server_nonce,
                const unsigned char *client_nonce, uint32_t rank, uint32_t world_size,
                char ret[PS_WIRE_MAC + 1]);
bool ps_wire_mac_equal(const void *a, const void *b); /* in constant time */
int ps_wire_nonce(unsigned char nonce[PS_WIRE_NONCE]);

/* Text from the network as one printable line. */
void ps_wire_text(const unsigned char *data, size_t size, char *out, size_t out_size);

/* "10.0.0.1", "fe80::1"; IPv4-mapped addresses as IPv4. */
void ps_address_text(const struct sockaddr *address, char *out, size_t size);
bool ps_address_loopback(const char *text);
/* A TCP socket that answers at once and is not inherited. */
void ps_socket_tune(int fd);

#endif
