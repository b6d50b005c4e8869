/* SPDX-License-Identifier: Apache-2.0
 * A queue of records on the disk, for what waits while the sidecar is away. One file each,
 * RUN-ATTEMPT-RANK.spool, locked by the process that writes it; a file that nobody has locked was left by a
 * process that ended, and can be taken over.
 *
 * A record is its length and the crc32c of what follows (4 bytes each, little-endian), a byte that says what
 * it is, and its bytes. What a crash left half written at the end is dropped. Where reading has got to is not
 * kept: after a crash all is read again, and whoever takes it has to know what it has already (batches carry
 * numbers). Not thread-safe. */
#ifndef PARAMSYNC_CLIENT_SPOOL_H
#define PARAMSYNC_CLIENT_SPOOL_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ps_spool_kind { PS_SPOOL_STEPS = 1, PS_SPOOL_EPOCH = 2, PS_SPOOL_FINISH = 3 }; /* serialized requests */

struct ps_spool;

/* Makes dir if it is absent. */
int ps_spool_open(const char *dir, const char *run_id, uint32_t attempt, uint32_t rank, uint64_t max_bytes,
                  struct ps_spool **ret_spool, struct ps_error *err);
/* One that an ended process left in dir, locked; PS_NOT_FOUND: there is none. */
int ps_spool_take_over(const char *dir, struct ps_spool **ret_spool, struct ps_error *err);
/* An empty one is removed from the disk. Takes NULL, returns NULL. */
struct ps_spool *ps_spool_close(struct ps_spool *spool);

/* RESOURCE_EXHAUSTED: it would grow over max_bytes, or the disk is full; nothing of the record is kept. */
int ps_spool_append(struct ps_spool *spool, enum ps_spool_kind kind, const void *data, size_t size,
                    struct ps_error *err);
/* The next record, from where reading has got to; PS_NOT_FOUND at the end. *ret_data is free()d by the
 * caller. */
int ps_spool_read(struct ps_spool *spool, enum ps_spool_kind *ret_kind, void **ret_data, size_t *ret_size,
                  struct ps_error *err);
/* Reading begins again at the front. */
void ps_spool_rewind(struct ps_spool *spool);
/* All that was read has arrived: when that is everything, the file is emptied. */
void ps_spool_settle(struct ps_spool *spool);
uint64_t ps_spool_bytes(const struct ps_spool *spool); /* on the disk */
bool ps_spool_unread(const struct ps_spool *spool);
const char *ps_spool_path(const struct ps_spool *spool);

#endif
