/* SPDX-License-Identifier: Apache-2.0
 * Strings of received messages, checked on the wire format
 * (https://protobuf.dev/programming-guides/encoding/). */
#include "services/base/text.h"
#include "services/rpc/core.h"

#include <stdio.h>
#include <string.h>

enum { MAX_DEPTH = 32 }; /* our messages nest three deep; a recursive type must not eat the stack */

struct reader {
    const uint8_t *at, *end;
};

static int read_varint(struct reader *in, uint64_t *ret)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (in->at == in->end)
            return -1;
        uint8_t byte = *in->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret = value;
            return 0;
        }
    }
    return -1;
}

/* Where we are, from the outermost message inwards, for the name in the error. */
struct place {
    const struct place *parent;
    const char *name;
};

static void print_place(const struct place *place, char *out, size_t size)
{
    if (place->parent) {
        print_place(place->parent, out, size);
        strncat(out, ".", size - strlen(out) - 1);
    }
    strncat(out, place->name, size - strlen(out) - 1);
}

static int broken(const ProtobufCMessageDescriptor *type, struct ps_error *err)
{
    return ps_fail(err, PS_INTERNAL, "the bytes are no %s message", type->name);
}

static int check(const ProtobufCMessageDescriptor *type, struct reader in, const struct place *parent,
                 int depth, struct ps_error *err)
{
    if (depth > MAX_DEPTH)
        return ps_fail(err, PS_INTERNAL, "%s messages are nested too deeply", type->name);
    while (in.at < in.end) {
        uint64_t key, size;
        if (read_varint(&in, &key) || key >> 3 == 0 || key >> 32)
            return broken(type, err);
        switch (key & 7) {
        case 0:
            if (read_varint(&in, &size))
                return broken(type, err);
            continue;
        case 1:
            size = 8;
            break;
        case 2:
            if (read_varint(&in, &size))
                return broken(type, err);
            break;
        case 5:
            size = 4;
            break;
        default: /* groups are long gone, and protobuf-c does not read them */
            return broken(type, err);
        }
        if (size > (uint64_t)(in.end - in.at))
            return broken(type, err);
        const uint8_t *data = in.at;
        in.at += size;
        if ((key & 7) != 2)
            continue;
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field(type, (unsigned)(key >> 3));
        if (!field)
            continue;
        struct place place = {.parent = parent, .name = field->name};
        if (field->type == PROTOBUF_C_TYPE_STRING && !ps_utf8_valid((const char *)data, size)) {
            char name[256] = "";
            print_place(&place, name, sizeof name);
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s is not text: it must be UTF-8 without NUL", name);
        }
        if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
            struct reader inner = {data, data + size};
            int code = check(field->descriptor, inner, &place, depth + 1, err);
            if (code < 0)
                return code;
        }
    }
    return 0;
}

int ps_rpc_check_message(const ProtobufCMessageDescriptor *type, const uint8_t *data, size_t size,
                         struct ps_error *err)
{
    return check(type, (struct reader){data, data + size}, NULL, 0, err);
}
