/* SPDX-License-Identifier: Apache-2.0
 * The reporter of a build without services: it has nobody to report to, and says so if one is named. */
#include "trainer/report.h"

struct ps_report {
    char unused;
};

int ps_report_open(const struct ps_report_config *config, struct ps_report **ret, struct ps_error *err)
{
    static struct ps_report nobody;
    if (config->sidecar)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--sidecar %s: this build has no services (PARAMSYNC_SERVICES=OFF) and cannot report",
                       config->sidecar);
    *ret = &nobody;
    return 0;
}

void ps_report_run(struct ps_report *report, char ret_id[27], uint32_t *ret_attempt, char *ret_name,
                   size_t name_size)
{
    (void)report;
    ret_id[0] = '\0';
    *ret_attempt = 0;
    if (name_size)
        ret_name[0] = '\0';
}

int ps_report_join(struct ps_report *report, const char *run_id, uint32_t attempt, struct ps_error *err)
{
    (void)report;
    (void)run_id;
    (void)attempt;
    (void)err;
    return 0;
}

void ps_report_epoch(struct ps_report *report, const struct ps_report_epoch *epoch)
{
    (void)report;
    (void)epoch;
}

void ps_report_point(struct ps_report *report, const char *name, int64_t step, double value, double elapsed_s)
{
    (void)report;
    (void)name;
    (void)step;
    (void)value;
    (void)elapsed_s;
}

void ps_report_checkpoint(struct ps_report *report, const char *path, const char *format, int epoch,
                          int64_t step, double accuracy, bool has_accuracy)
{
    (void)report;
    (void)path;
    (void)format;
    (void)epoch;
    (void)step;
    (void)accuracy;
    (void)has_accuracy;
}

void ps_report_close(struct ps_report *report, const char *state, const char *reason, double timeout_s)
{
    (void)report;
    (void)state;
    (void)reason;
    (void)timeout_s;
}

int ps_report_fetch(const struct ps_report_config *config, const char *dir, int *ret_epoch,
                    struct ps_error *err)
{
    (void)config;
    (void)dir;
    (void)ret_epoch;
    return ps_fail(err, PS_UNIMPLEMENTED, "this trainer was built without the services");
}

void ps_report_failed(const struct ps_report_config *config, const char *run_id, uint32_t attempt,
                      const char *reason, double timeout_s)
{
    (void)config;
    (void)run_id;
    (void)attempt;
    (void)reason;
    (void)timeout_s;
}
