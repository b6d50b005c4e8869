/* SPDX-License-Identifier: Apache-2.0
 * How the sidecar itself fares, for the dashboard's health page. */
#ifndef PARAMSYNC_SIDECAR_WEB_STATUS_H
#define PARAMSYNC_SIDECAR_WEB_STATUS_H

#include "services/sidecar/service.h"

#include <jansson.h>

/* streams: dashboards that listen now. *ret_json is a new reference. Thread-safe. */
int ps_web_status(struct ps_service *service, size_t streams, json_t **ret_json, struct ps_error *err);
/* Resident memory of this process; 0: unknown. */
uint64_t ps_web_resident_bytes(void);

#endif
