/* SPDX-License-Identifier: Apache-2.0
 * Keys and values in memory by which the ranks of a job find each other, with a time to live. Bounded:
 * 100,000 keys and 64 MiB in all. Thread-safe. */
#ifndef PARAMSYNC_SIDECAR_RENDEZVOUS_H
#define PARAMSYNC_SIDECAR_RENDEZVOUS_H

#include "services/base/clock.h"
#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PS_MEETING_NAME_MAX = 256, PS_MEETING_VALUE_MAX = 64 << 10 };

struct ps_meetings;
struct ps_meeting_wait; /* one who waits for a key */

struct ps_meetings *ps_meetings_new(const struct ps_clock *clock);  /* NULL: out of memory */
struct ps_meetings *ps_meetings_free(struct ps_meetings *meetings); /* takes NULL, returns NULL */

/* run and key: 1..256 bytes; ttl_s 0: 600. PS_INVALID_ARGUMENT names the field, PS_RESOURCE_EXHAUSTED the
 * bound. */
int ps_meetings_set(struct ps_meetings *meetings, const char *run, const char *key, const void *value,
                    size_t size, double ttl_s, struct ps_error *err);
/* PS_FAILED_PRECONDITION if the key holds something that is no counter, PS_OUT_OF_RANGE on overflow. */
int ps_meetings_add(struct ps_meetings *meetings, const char *run, const char *key, int64_t amount,
                    double ttl_s, int64_t *ret_sum, struct ps_error *err);
/* *ret_value is free()d by the caller. PS_NOT_FOUND. */
int ps_meetings_get(struct ps_meetings *meetings, const char *run, const char *key, void **ret_value,
                    size_t *ret_size, struct ps_error *err);

/* wake is called, with a lock held, whenever the key is set or added to: begin, then get, then wait. */
int ps_meetings_wait_begin(struct ps_meetings *meetings, const char *run, const char *key,
                           void (*wake)(void *context), void *context, struct ps_meeting_wait **ret,
                           struct ps_error *err);
void ps_meetings_wait_end(struct ps_meetings *meetings, struct ps_meeting_wait *wait);

#endif
