/* SPDX-License-Identifier: Apache-2.0
 * TensorBoard's event files: TFRecord framing (length, masked crc32c of the length, data, masked crc32c of
 * the data, https://www.tensorflow.org/tutorials/load_data/tfrecord) around Event messages
 * (tensorflow/core/util/event.proto).
 */
#ifndef PARAMSYNC_CLI_EVENTS_H
#define PARAMSYNC_CLI_EVENTS_H

#include "services/base/buf.h"

#include <stdint.h>

/* The first record of a file. Failures show in out->failed. */
void cli_events_begin(struct ps_buf *out, double wall_s);
void cli_events_scalar(struct ps_buf *out, double wall_s, uint64_t step, const char *tag, double value);

struct cli_scalar {
    const char *tag; /* of the reader's; valid during the call */
    uint64_t step;
    double wall_s, value;
};
/* Calls on_scalar for each scalar (simple_value, or a tensor of one number) until it returns non-zero, which
 * is then returned. PS_DATA_LOSS: a checksum or length is wrong, or the file ends within a record;
 * PS_INVALID_ARGUMENT: it is no event file. name is for messages. */
int cli_events_read(const void *data, size_t size, const char *name,
                    int (*on_scalar)(void *context, const struct cli_scalar *scalar), void *context,
                    struct ps_error *err);

#endif
