/* SPDX-License-Identifier: Apache-2.0
 * As much of the protobuf encoding (https://protobuf.dev/programming-guides/encoding) as TensorBoard's events
 * and ONNX need, whose descriptions are not ours to compile. */
#ifndef PARAMSYNC_CLI_WIRE_H
#define PARAMSYNC_CLI_WIRE_H

#include "services/base/buf.h"

#include <stdbool.h>
#include <stdint.h>

/* A failure shows in buf->failed. */
void cli_wire_int(struct ps_buf *buf, unsigned field, uint64_t value);
void cli_wire_double(struct ps_buf *buf, unsigned field, double value);
void cli_wire_float(struct ps_buf *buf, unsigned field, float value);
void cli_wire_bytes(struct ps_buf *buf, unsigned field, const void *data, size_t size);
void cli_wire_text(struct ps_buf *buf, unsigned field, const char *text);
/* A message within: appends inner, then clears it. */
void cli_wire_message(struct ps_buf *buf, unsigned field, struct ps_buf *inner);

/* Reading: one field after the other. */
struct cli_wire {
    const unsigned char *at, *end;
    unsigned field;
    unsigned type;         /* 0 varint, 1 eight bytes, 2 bytes, 5 four bytes */
    uint64_t number;       /* of types 0, 1 and 5: the bits */
    struct cli_wire_part { /* of type 2 */
        const unsigned char *data;
        size_t size;
    } part;
};
struct cli_wire cli_wire_reader(const void *data, size_t size);
/* 1: a field; 0: the end; -1: not the encoding. */
int cli_wire_next(struct cli_wire *wire);
double cli_wire_as_double(const struct cli_wire *wire); /* of types 1 and 5 */

#endif
