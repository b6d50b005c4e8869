/* SPDX-License-Identifier: Apache-2.0
 * Checkpoint files by content: DIR/blobs/sha256/ab/cdef..., whole or absent. What is being received lies in
 * DIR/blobs/tmp and is removed at the next start. Thread-safe; a writer is used by one thread at a time. */
#ifndef PARAMSYNC_SIDECAR_BLOBS_H
#define PARAMSYNC_SIDECAR_BLOBS_H

#include "services/base/digest.h"
#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_blobs;
struct ps_blob_writer;

/* Makes the folders and empties tmp. */
int ps_blobs_open(const char *data_dir, struct ps_blobs **ret_blobs, struct ps_error *err);
struct ps_blobs *ps_blobs_free(struct ps_blobs *blobs); /* takes NULL, returns NULL */

/* Receives a file of exactly size bytes with this digest. */
int ps_blob_writer_open(struct ps_blobs *blobs, const char *sha256, uint64_t size,
                        struct ps_blob_writer **ret_writer, struct ps_error *err);
/* INVALID_ARGUMENT when more than size bytes come. */
int ps_blob_writer_write(struct ps_blob_writer *writer, const void *data, size_t size, struct ps_error *err);
/* Checks size (INVALID_ARGUMENT) and digest (DATA_LOSS) and makes the bytes durable, still out of sight. */
int ps_blob_writer_seal(struct ps_blob_writer *writer, struct ps_error *err);
/* After seal: puts the file in its place, durably. Nothing to do when the content is there already. Callers
 * keep this and the catalogue's row under one lock with ps_blobs_remove. */
int ps_blob_writer_place(struct ps_blob_writer *writer, struct ps_error *err);
/* Removes what was not placed. Takes NULL, returns NULL. */
struct ps_blob_writer *ps_blob_writer_free(struct ps_blob_writer *writer);

/* A descriptor for reading (close() it); the file stays readable through it when it is removed meanwhile.
 * NOT_FOUND if there is none; DATA_LOSS if its length is not size (pass 0 to skip that check). */
int ps_blobs_read(struct ps_blobs *blobs, const char *sha256, uint64_t size, int *ret_fd,
                  struct ps_error *err);
/* Calls keep for every blob there is, and removes those for which it says false: what a crash left between a
 * file and its row. Returns how many; their bytes are added to *ret_bytes. */
size_t ps_blobs_sweep(struct ps_blobs *blobs, bool (*keep)(void *context, const char *sha256), void *context,
                      uint64_t *ret_bytes);
int ps_blobs_remove(struct ps_blobs *blobs, const char *sha256,
                    struct ps_error *err); /* 0 if it is not there */

#endif
