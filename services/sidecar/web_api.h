/* SPDX-License-Identifier: Apache-2.0
 * The JSON API without HTTP: a path and parameters in, a JSON value out. Thread-safe. */
#ifndef PARAMSYNC_SIDECAR_WEB_API_H
#define PARAMSYNC_SIDECAR_WEB_API_H

#include "services/base/buf.h"
#include "services/sidecar/service.h"

#include <jansson.h>

#define PS_WEB_TARGET 0.8 /* accuracy whose time is listed when none is asked for: the sample's */

struct ps_web_api;

/* grpc_port: where the same sidecar answers gRPC; 0: unknown. NULL when out of memory. */
struct ps_web_api *ps_web_api_new(struct ps_service *service, int grpc_port);
struct ps_web_api *ps_web_api_free(struct ps_web_api *api); /* takes NULL, returns NULL */

struct ps_web_request {
    const char *path; /* decoded, after "/api/v1/": "runs", "runs/ID/series" */
    const char *(*parameter)(void *context, const char *name); /* NULL if absent */
    void *context;
    size_t streams; /* dashboards that listen, for /status */
};
/* Answers a GET. *ret_json is a new reference. NOT_FOUND for paths that do not exist. */
int ps_web_api_get(struct ps_web_api *api, const struct ps_web_request *request, json_t **ret_json,
                   struct ps_error *err);

/* Answers a change: PATCH of "runs/ID" with a JSON object of what is to change (notes, tags, baseline), or
 * DELETE of it (body ignored). *ret_json as above; nothing is changed where the answer is an error.
 * UNIMPLEMENTED for other paths and methods. */
int ps_web_api_change(struct ps_web_api *api, const char *method, const char *path, const char *body,
                      size_t size, json_t **ret_json, struct ps_error *err);

/* An event as one server-sent message ("id: ...\nevent: run\ndata: ...\n\n"), with the run as it stands now
 * unless with_run is false. */
int ps_web_api_event(struct ps_web_api *api, const struct ps_event *event, bool with_run, struct ps_buf *out,
                     struct ps_error *err);

/* A number as JSON: not-a-number and infinities as "NaN", "Infinity", "-Infinity". */
json_t *ps_web_number(double value);

#endif
