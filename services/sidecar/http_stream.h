/* SPDX-License-Identifier: Apache-2.0
 * What event streams share: one subscription to the hub, one ring of ready-made messages, and per reader
 * nothing but a cursor and the message being sent. A slow reader costs no memory: what fell out of the ring
 * is read again from the store. Knows no HTTP. */
#ifndef PARAMSYNC_SIDECAR_HTTP_STREAM_H
#define PARAMSYNC_SIDECAR_HTTP_STREAM_H

#include "services/sidecar/web_api.h"

#include <sys/types.h>

struct ps_http_stream; /* thread-safe */
struct ps_http_reader; /* one thread at a time reads */

/* heartbeat_s: no reader waits longer than this for a sign of life. */
int ps_http_stream_start(struct ps_service *service, struct ps_web_api *api, double heartbeat_s,
                         size_t max_readers, struct ps_http_stream **ret_stream, struct ps_error *err);
/* Every reader gets its end; parked ones are woken for it. */
void ps_http_stream_stop(struct ps_http_stream *stream);
/* After stop, when all readers are closed. Takes NULL, returns NULL. */
struct ps_http_stream *ps_http_stream_free(struct ps_http_stream *stream);
size_t ps_http_stream_readers(struct ps_http_stream *stream);

#define PS_STREAM_NOW UINT64_MAX /* only what comes from now on */

/* park and wake are called with the stream's lock held, in turns: park when there is nothing to read, then
 * wake once there is (from another thread). They must be quick and must not call the stream. since: the last
 * event seen. */
int ps_http_reader_open(struct ps_http_stream *stream, uint64_t since, void (*park)(void *context),
                        void (*wake)(void *context), void *context, struct ps_http_reader **ret_reader,
                        struct ps_error *err);
/* Bytes written to data; 0: parked; -1: the end. */
ssize_t ps_http_reader_read(struct ps_http_reader *reader, char *data, size_t size);
/* Neither callback is called any more. Takes NULL, returns NULL. */
struct ps_http_reader *ps_http_reader_close(struct ps_http_reader *reader);

#endif
