/* SPDX-License-Identifier: Apache-2.0
 * Which Host headers are answered. A page on another site can make a browser call us under a name of its own
 * that resolves to our address (DNS rebinding); it cannot make the browser send one of our names. */
#ifndef PARAMSYNC_SIDECAR_HTTP_HOST_H
#define PARAMSYNC_SIDECAR_HTTP_HOST_H

#include <stdbool.h>
#include <stddef.h>

/* host: the header's value with or without port. bound: the address we listen on; empty, 0.0.0.0 or [::] mean
 * every address, and then any literal IP address is fine (rebinding needs a name). Loopback names always are.
 * allowed names compare without case and without port. */
bool ps_http_host_ok(const char *host, const char *bound, const char *const *allowed, size_t allowed_count);

#endif
