/* SPDX-License-Identifier: Apache-2.0
 * Every request of every method the sidecar serves, as the dispatch layer takes it: the check of the bytes,
 * then protobuf-c. What the check lets through must unpack, hold only text in its strings, and pack again. */
#include "tests/fuzz/fuzz.h"

#include "services/rpc/core.h"
#include "services/sidecar/rpc_handlers.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ps_error err = {0};
    if (!size)
        return 0;
    const ProtobufCMessageDescriptor *type = ps_sidecar_methods[data[0] % ps_sidecar_method_count].request;
    if (ps_rpc_check_message(type, data + 1, size - 1, &err)) {
        PS_FUZZ_CHECK(err.message[0]);
        return 0;
    }
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, size - 1, data + 1);
    if (!message)
        return 0;
    size_t packed = protobuf_c_message_get_packed_size(message);
    uint8_t *again = malloc(packed + 1);
    PS_FUZZ_CHECK(again && protobuf_c_message_pack(message, again) == packed);
    PS_FUZZ_CHECK(!ps_rpc_check_message(type, again, packed, &err));
    free(again);
    protobuf_c_message_free_unpacked(message, NULL);
    return 0;
}

/* A value in every field, two levels deep. */
static size_t fill(const ProtobufCMessageDescriptor *type, uint8_t *out, size_t max, int depth)
{
    size_t n = 0;
    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        uint8_t inner[2048];
        size_t inner_size = 0;
        unsigned wire = 0;
        switch (field->type) {
        case PROTOBUF_C_TYPE_STRING:
        case PROTOBUF_C_TYPE_BYTES:
            wire = 2;
            inner_size = (size_t)snprintf((char *)inner, sizeof inner, "text-%u", i);
            break;
        case PROTOBUF_C_TYPE_MESSAGE:
            wire = 2;
            inner_size = depth ? fill(field->descriptor, inner, sizeof inner, depth - 1) : 0;
            break;
        case PROTOBUF_C_TYPE_DOUBLE:
        case PROTOBUF_C_TYPE_FIXED64:
        case PROTOBUF_C_TYPE_SFIXED64:
            wire = 1;
            break;
        case PROTOBUF_C_TYPE_FLOAT:
        case PROTOBUF_C_TYPE_FIXED32:
        case PROTOBUF_C_TYPE_SFIXED32:
            wire = 5;
            break;
        default:
            break;
        }
        if (n + inner_size + 16 > max || inner_size > 16000)
            break;
        unsigned tag = field->id << 3 | wire;
        for (; tag > 127; tag >>= 7)
            out[n++] = (uint8_t)(tag | 0x80);
        out[n++] = (uint8_t)tag;
        if (wire == 2) {
            size_t left = inner_size;
            for (; left > 127; left >>= 7)
                out[n++] = (uint8_t)(left | 0x80);
            out[n++] = (uint8_t)left;
            memcpy(out + n, inner, inner_size);
            n += inner_size;
        } else if (wire == 0) {
            out[n++] = (uint8_t)(i + 1);
        } else {
            memset(out + n, 0x40, wire == 1 ? 8 : 4);
            n += wire == 1 ? 8 : 4;
        }
    }
    return n;
}

size_t ps_fuzz_seed(int i, uint8_t *out, size_t max)
{
    if ((size_t)i >= ps_sidecar_method_count)
        return 0;
    out[0] = (uint8_t)i;
    return 1 + fill(ps_sidecar_methods[i].request, out + 1, max - 1, 2);
}
