/* SPDX-License-Identifier: Apache-2.0
 * How many calls and bytes each peer (an IP address, or all local sockets together) may ask for in a second:
 * a token bucket each, which holds one second's worth. The peers heard of longest ago give way when there are
 * many. Thread-safe. */
#ifndef PARAMSYNC_SIDECAR_LIMITS_H
#define PARAMSYNC_SIDECAR_LIMITS_H

#include "services/base/clock.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_limits;

/* 0: no bound. NULL: out of memory. */
struct ps_limits *ps_limits_new(const struct ps_clock *clock, double calls_per_s, double bytes_per_s);
struct ps_limits *ps_limits_free(struct ps_limits *limits); /* takes NULL, returns NULL */

/* Counts a call of the peer ("ipv4:10.0.0.7:1234", "ipv6:[fe80::1]:1234", "unix:...", as gRPC names them; the
 * port does not matter). False: it has had its share; *ret_wait_s is when there is room for the next one. */
bool ps_limits_call(struct ps_limits *limits, const char *peer, double *ret_wait_s);
/* Counts bytes sent to or received from the peer, and tells how many seconds to wait before more of them. */
double ps_limits_bytes(struct ps_limits *limits, const char *peer, size_t bytes);

#endif
