/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_metrics.h"

#include "services/base/clock.h"
#include "services/sidecar/web_status.h"

#include <inttypes.h>

static void metric(struct ps_buf *out, const char *name, const char *type, const char *help, uint64_t value)
{
    ps_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n%s %" PRIu64 "\n", name, help, name, type, name, value);
}

int ps_web_metrics(struct ps_service *service, size_t streams, struct ps_buf *out, struct ps_error *err)
{
    struct ps_store_stats s;
    int rc = ps_store_get_stats(service->store, &s, err);
    if (rc < 0)
        return rc;
    ps_buf_puts(out, "# HELP paramsync_runs Runs by state.\n# TYPE paramsync_runs gauge\n");
    for (int state = PS_RUN_CREATED; state <= PS_RUN_LOST; state++)
        ps_buf_printf(out, "paramsync_runs{state=\"%s\"} %" PRIu64 "\n", ps_run_state_name(state),
                      s.runs[state]);
    metric(out, "paramsync_epochs", "gauge", "Epoch reports stored.", s.epochs);
    metric(out, "paramsync_series", "gauge", "Step series stored.", s.series);
    metric(out, "paramsync_checkpoints", "gauge", "Checkpoints in the catalogue.", s.checkpoints);
    metric(out, "paramsync_blobs", "gauge", "Checkpoint files, each content once.", s.blobs);
    metric(out, "paramsync_blob_bytes", "gauge", "Bytes of checkpoint files.", s.blob_bytes);
    metric(out, "paramsync_points_stored_total", "counter", "Step points stored since the start.",
           s.points_stored);
    metric(out, "paramsync_batches_replayed_total", "counter",
           "Batches that came again and were not stored twice, since the start.", s.batches_replayed);
    metric(out, "paramsync_store_commits_total", "counter", "Transactions since the start.", s.commits);
    metric(out, "paramsync_store_operations_total", "counter", "Operations in them.", s.operations);
    metric(out, "paramsync_store_failed_operations_total", "counter", "Operations that failed.",
           s.failed_operations);
    metric(out, "paramsync_store_queue_depth", "gauge", "Operations waiting for the writer.", s.queue_depth);
    metric(out, "paramsync_store_bytes", "gauge", "Size of the database file.", s.file_bytes);
    metric(out, "paramsync_store_wal_bytes", "gauge", "Size of the write-ahead log.", s.wal_bytes);
    metric(out, "paramsync_store_wal_held", "gauge",
           "1 while another program's long read keeps the write-ahead log from being started anew.",
           s.log_held);
    metric(out, "paramsync_store_disk_full", "gauge", "1 while writes fail for want of space.", s.disk_full);
    metric(out, "paramsync_watchers", "gauge", "Subscriptions to the event hub.",
           ps_hub_subscribers(service->hub));
    metric(out, "paramsync_watchers_cut_off_total", "counter",
           "Subscriptions that were too slow, since the start.", ps_hub_cut_off(service->hub));
    metric(out, "paramsync_event_streams", "gauge", "Dashboards that listen now.", streams);
    metric(out, "process_resident_memory_bytes", "gauge", "Resident memory.", ps_web_resident_bytes());
    ps_buf_printf(out,
                  "# HELP process_start_time_seconds Start, in seconds since 1970-01-01 UTC.\n"
                  "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %.3f\n",
                  (double)service->started_ns / 1e9);
    rc = ps_buf_printf(out,
                       "# HELP paramsync_uptime_seconds Time since the start.\n"
                       "# TYPE paramsync_uptime_seconds gauge\nparamsync_uptime_seconds %.3f\n",
                       (double)(ps_wall_ns() - service->started_ns) / 1e9);
    return rc < 0 ? ps_fail(err, rc, "metrics do not fit their buffer") : 0;
}
