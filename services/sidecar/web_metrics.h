/* SPDX-License-Identifier: Apache-2.0
 * Metrics in Prometheus' text format
 * (https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format). */
#ifndef PARAMSYNC_SIDECAR_WEB_METRICS_H
#define PARAMSYNC_SIDECAR_WEB_METRICS_H

#include "services/base/buf.h"
#include "services/sidecar/service.h"

/* streams: event streams open now. Thread-safe. */
int ps_web_metrics(struct ps_service *service, size_t streams, struct ps_buf *out, struct ps_error *err);

#endif
