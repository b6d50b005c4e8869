/* SPDX-License-Identifier: Apache-2.0
 * The sidecar's HTTP face: the dashboard, a JSON API for reading, checkpoint downloads with ranges,
 * server-sent events, health and metrics. Routes are described in web/openapi.yaml. Only http.c knows
 * libmicrohttpd. */
#ifndef PARAMSYNC_SIDECAR_HTTP_H
#define PARAMSYNC_SIDECAR_HTTP_H

#include "services/sidecar/service.h"

struct ps_http;

struct ps_http_config {
    struct ps_service
        *service; /* outlives the server; its tokens, if any, guard everything but health and the page */
    const char *listen; /* "ADDR:PORT", "[v6]:PORT" or ":PORT" (every address); port 0: any */
    /* Names a browser may call us by, beside loopback names and the bound address: guards against DNS
     * rebinding. */
    const char *const *allowed_hosts;
    size_t allowed_host_count;
    const char *tls_cert, *tls_key; /* PEM text; NULL: plain */
    int grpc_port;                  /* told to the dashboard, which shows commands with it; 0: unknown */
    int threads;                    /* 0: 4 */
    unsigned max_connections;       /* 0: 512 */
    unsigned max_streams;           /* event streams at a time; 0: 256. Above it: 503 */
    double heartbeat_s;             /* between two signs of life on an event stream; 0: 15 */
};

/* Binds and starts. Signals should be blocked in the calling thread: threads are started. The config is
 * copied except for service. */
int ps_http_start(const struct ps_http_config *config, struct ps_http **ret_http, struct ps_error *err);
int ps_http_port(const struct ps_http *http);
/* Another certificate for connections from now on; those that are open stay. FAILED_PRECONDITION for a server
 * without TLS. Not at the same time as itself or ps_http_free. */
int ps_http_reload_tls(struct ps_http *http, const char *tls_cert, const char *tls_key, struct ps_error *err);
/* Ends event streams and what is still being sent, joins every thread. Takes NULL, returns NULL. */
struct ps_http *ps_http_free(struct ps_http *http);

#endif
