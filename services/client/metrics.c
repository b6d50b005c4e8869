/* SPDX-License-Identifier: Apache-2.0
 * Epochs and series. */
#include "services/client/internal.h"

#include <stdlib.h>

void ps_epoch_request(const char *run, const struct paramsync_epoch *epoch,
                      Paramsync__V1__ReportEpochRequest *ret_request)
{
    paramsync__v1__report_epoch_request__init(ret_request);
    ret_request->run = ps_text(run);
    ret_request->attempt = epoch->attempt;
    ret_request->epoch = epoch->epoch;
    ret_request->train_loss = epoch->train_loss;
    ret_request->val_loss = epoch->val_loss;
    ret_request->accuracy = epoch->accuracy;
    ret_request->lr = epoch->lr;
    ret_request->samples_per_s = epoch->samples_per_s;
    ret_request->elapsed_s = epoch->elapsed_s;
    ret_request->train_s = epoch->train_s;
    ret_request->eval_s = epoch->eval_s;
    ret_request->step = epoch->step;
    ret_request->correct = epoch->correct;
    ret_request->counted = epoch->counted;
    ret_request->no_eval = epoch->no_eval;
    if (epoch->confusion) {
        ret_request->n_confusion = (size_t)epoch->classes * epoch->classes;
        ret_request->confusion = (uint32_t *)epoch->confusion; /* only packed */
    }
}

int paramsync_report_epoch(struct paramsync_client *client, const char *run,
                           const struct paramsync_epoch *epoch, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    Paramsync__V1__ReportEpochRequest request;
    ProtobufCMessage *answer;
    ps_epoch_request(run, epoch, &request);
    int code = ps_call(client, NULL, "/paramsync.v1.Metrics/ReportEpoch", &request.base,
                       &paramsync__v1__report_epoch_response__descriptor, client->timeout_s, &answer, &inner);
    if (!code)
        protobuf_c_message_free_unpacked(answer, NULL);
    return ps_give(err, &inner, code);
}

struct metrics_box {
    struct paramsync_metrics metrics; /* first */
    struct paramsync_series *series;
    struct paramsync_epoch *epochs;
    ProtobufCMessage *owner;
};

static void view_series(const Paramsync__V1__Series *m, struct paramsync_series *series)
{
    size_t n = m->n_steps;
    if (m->n_values < n)
        n = m->n_values;
    if (m->n_elapsed_s < n)
        n = m->n_elapsed_s;
    if (m->n_attempts < n)
        n = m->n_attempts;
    *series = (struct paramsync_series){.name = m->name,
                                        .rank = m->rank,
                                        .count = n,
                                        .attempts = m->attempts,
                                        .steps = m->steps,
                                        .values = m->values,
                                        .elapsed_s = m->elapsed_s,
                                        .total_points = m->total_points};
}

/* Takes answer, also when it fails. */
static int wrap(ProtobufCMessage *answer, struct paramsync_metrics **ret_metrics, struct ps_error *err)
{
    const Paramsync__V1__QuerySeriesResponse *m = (const Paramsync__V1__QuerySeriesResponse *)answer;
    struct metrics_box *box = calloc(1, sizeof *box);
    if (box) {
        box->series = calloc(m->n_series + 1, sizeof *box->series);
        box->epochs = calloc(m->n_epochs + 1, sizeof *box->epochs);
    }
    if (!box || !box->series || !box->epochs) {
        if (box) {
            free(box->series);
            free(box->epochs);
        }
        free(box);
        protobuf_c_message_free_unpacked(answer, NULL);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    box->owner = answer;
    for (size_t i = 0; i < m->n_series; i++)
        view_series(m->series[i], &box->series[i]);
    for (size_t i = 0; i < m->n_epochs; i++) {
        const Paramsync__V1__EpochPoint *e = m->epochs[i];
        box->epochs[i] = (struct paramsync_epoch){.attempt = e->attempt,
                                                  .epoch = e->epoch,
                                                  .train_loss = e->train_loss,
                                                  .val_loss = e->val_loss,
                                                  .accuracy = e->accuracy,
                                                  .lr = e->lr,
                                                  .samples_per_s = e->samples_per_s,
                                                  .elapsed_s = e->elapsed_s,
                                                  .train_s = e->train_s,
                                                  .eval_s = e->eval_s,
                                                  .step = e->step,
                                                  .correct = e->correct,
                                                  .counted = e->counted,
                                                  .no_eval = e->no_eval};
    }
    box->metrics = (struct paramsync_metrics){.names = (const char *const *)m->names,
                                              .name_count = m->n_names,
                                              .series = box->series,
                                              .series_count = m->n_series,
                                              .epochs = box->epochs,
                                              .epoch_count = m->n_epochs};
    *ret_metrics = &box->metrics;
    return 0;
}

int paramsync_query(struct paramsync_client *client, const char *run, const char *name, int rank,
                    uint32_t max_points, struct paramsync_metrics **ret_metrics, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    Paramsync__V1__QuerySeriesRequest request = PARAMSYNC__V1__QUERY_SERIES_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.run = ps_text(run);
    request.name = ps_text(name);
    request.rank = rank;
    request.max_points = max_points;
    int code = ps_call(client, NULL, "/paramsync.v1.Metrics/QuerySeries", &request.base,
                       &paramsync__v1__query_series_response__descriptor, client->timeout_s, &answer, &inner);
    if (!code)
        code = wrap(answer, ret_metrics, &inner);
    return ps_give(err, &inner, code);
}

void paramsync_metrics_free(struct paramsync_metrics *metrics)
{
    struct metrics_box *box = (struct metrics_box *)metrics;
    if (!box)
        return;
    protobuf_c_message_free_unpacked(box->owner, NULL);
    free(box->series);
    free(box->epochs);
    free(box);
}
