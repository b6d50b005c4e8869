/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_status.h"

#include "paramsync_version.h"
#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/sidecar/web_api.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LIVE_RUNS = 100 }; /* whose ranks are listed */

uint64_t ps_web_resident_bytes(void)
{
    char *text = NULL, *end;
    size_t size;
    if (ps_read_file("/proc/self/statm", 4096, &text, &size, NULL) < 0)
        return 0;
    strtoull(text, &end, 10); /* the whole address space; resident pages come second */
    unsigned long long pages = strtoull(end, NULL, 10);
    free(text);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static double cpu_seconds(void)
{
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage))
        return 0;
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static json_t *whole(uint64_t value)
{
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

/* What the ranks of one live run say of their reporters. */
static json_t *reporters(struct ps_store *store, const struct ps_run *run)
{
    struct ps_rank_list list = {0};
    json_t *ranks = json_array();
    if (ps_store_list_ranks(store, run->id, 0, &list, NULL) < 0)
        return ranks;
    for (size_t i = 0; i < list.count; i++) {
        const struct ps_rank *r = &list.ranks[i];
        char seen[32];
        ps_format_utc(r->last_seen_ns, seen, sizeof seen);
        json_array_append_new(
            ranks,
            json_pack("{s:I,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:s}", "rank", (json_int_t)r->rank, "points_sent",
                      whole(r->points_sent), "points_waiting", whole(r->points_waiting), "points_replayed",
                      whole(r->points_replayed), "points_dropped", whole(r->points_dropped), "spool_bytes",
                      whole(r->spool_bytes), "rss_bytes", whole(r->rss_bytes), "clock_offset_s",
                      r->has_clock_offset ? ps_web_number(r->clock_offset_s) : json_null(), "last_seen_at",
                      seen));
    }
    ps_rank_list_done(&list);
    return ranks;
}

int ps_web_status(struct ps_service *service, size_t streams, json_t **ret_json, struct ps_error *err)
{
    struct ps_store_stats s;
    int rc = ps_store_get_stats(service->store, &s, err);
    if (rc < 0)
        return rc;
    const int live[] = {PS_RUN_RUNNING};
    struct ps_run_query query = {.page_size = LIVE_RUNS, .states = live, .state_count = 1};
    struct ps_run_list list = {0};
    rc = ps_store_list_runs(service->store, &query, &list, err);
    if (rc < 0)
        return rc;
    json_t *o = json_object(), *states = json_object(), *runs = json_array();
    for (int state = PS_RUN_CREATED; state <= PS_RUN_LOST; state++)
        json_object_set_new(states, ps_run_state_name(state), whole(s.runs[state]));
    for (size_t i = 0; i < list.count; i++)
        json_array_append_new(runs,
                              json_pack("{s:s,s:s,s:I,s:o}", "id", list.runs[i].id, "name", list.runs[i].name,
                                        "world_size", (json_int_t)list.runs[i].world_size, "ranks",
                                        reporters(service->store, &list.runs[i])));
    ps_run_list_done(&list);
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {
        {"points_stored", s.points_stored},
        {"batches_replayed", s.batches_replayed},
        {"commits", s.commits},
        {"operations", s.operations},
        {"failed_operations", s.failed_operations},
        {"queue_depth", s.queue_depth},
        {"store_bytes", s.file_bytes},
        {"wal_bytes", s.wal_bytes},
        {"blobs", s.blobs},
        {"blob_bytes", s.blob_bytes},
        {"checkpoints", s.checkpoints},
        {"epochs", s.epochs},
        {"series", s.series},
        {"resident_bytes", ps_web_resident_bytes()},
        {"streams", streams},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        json_object_set_new(o, counts[i].name, whole(counts[i].value));
    json_object_set_new(o, "version", json_string(PARAMSYNC_VERSION));
    json_object_set_new(o, "uptime_s", ps_web_number((double)(ps_wall_ns() - service->started_ns) / 1e9));
    json_object_set_new(o, "cpu_s", ps_web_number(cpu_seconds()));
    json_object_set_new(o, "disk_full", json_boolean(s.disk_full));
    json_t *error = json_string(s.last_error);
    json_object_set_new(o, "last_error", error ? error : json_string("?"));
    json_object_set_new(o, "runs", states);
    json_object_set_new(o, "live", runs);
    *ret_json = o;
    return 0;
}
