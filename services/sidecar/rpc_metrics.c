/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/rpc_handlers.h"

#include "paramsync/v1/metrics.pb-c.h"

#include <stdlib.h>

PS_HANDLER(ps_handle_report_epoch)
{
    struct ps_service *service = context;
    const Paramsync__V1__ReportEpochRequest *request = (const void *)message;
    struct ps_epoch epoch = {
        .attempt = request->attempt,
        .epoch = request->epoch,
        .train_loss = request->train_loss,
        .val_loss = request->val_loss,
        .accuracy = request->accuracy,
        .lr = request->lr,
        .samples_per_s = request->samples_per_s,
        .elapsed_s = request->elapsed_s,
        .train_s = request->train_s,
        .eval_s = request->eval_s,
        .step = request->step,
        .correct = request->correct,
        .counted = request->counted,
        .no_eval = request->no_eval,
    };
    if (request->n_confusion) {
        while (epoch.classes * epoch.classes < request->n_confusion && epoch.classes <= PS_MAX_CLASSES)
            epoch.classes++;
        if (epoch.classes * epoch.classes != request->n_confusion)
            return ps_fail(err, PS_INVALID_ARGUMENT, "confusion: %zu counts are no square of 1 to %d classes",
                           request->n_confusion, PS_MAX_CLASSES);
        epoch.confusion = request->confusion;
    }
    bool replaced = false;
    int code = ps_service_report_epoch(service, request->run, &epoch, &replaced, err);
    if (code)
        return code;
    Paramsync__V1__ReportEpochResponse response = PARAMSYNC__V1__REPORT_EPOCH_RESPONSE__INIT;
    response.replaced = replaced;
    return ps_rpc_send(call, &response.base, err);
}

static int store_batch(struct ps_service *service, const Paramsync__V1__StepBatch *batch,
                       uint32_t *ret_attempt, struct ps_error *err)
{
    struct ps_point *points = malloc((batch->n_points + 1) * sizeof *points);
    if (!points)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < batch->n_points; i++) {
        const Paramsync__V1__Point *point = batch->points[i];
        points[i] = (struct ps_point){point->name, point->step, point->value, point->elapsed_s};
    }
    int code = ps_service_append_steps(service, batch->run, batch->rank, batch->attempt, batch->seq, points,
                                       batch->n_points, ret_attempt, err);
    free(points);
    return code;
}

PS_HANDLER(ps_handle_report_steps)
{
    (void)message;
    struct ps_service *service = context;
    ProtobufCMessage *received;
    int code;
    while ((code = ps_rpc_recv_or_drain(call, &received, err)) == 1) {
        const Paramsync__V1__StepBatch *batch = (const void *)received;
        Paramsync__V1__StepAck ack = PARAMSYNC__V1__STEP_ACK__INIT;
        ack.rank = batch->rank;
        ack.seq = batch->seq;
        code = store_batch(service, batch, &ack.attempt, err);
        protobuf_c_message_free_unpacked(received, NULL);
        if (!code)
            code = ps_rpc_send(call, &ack.base, err);
        if (code)
            return code;
    }
    return code;
}

/* One allocation for all series and epochs of an answer. */
struct answer {
    Paramsync__V1__Series *series;
    Paramsync__V1__Series **series_pointers;
    Paramsync__V1__EpochPoint *epochs;
    Paramsync__V1__EpochPoint **epoch_pointers;
};

static void answer_done(struct answer *answer)
{
    free(answer->series);
    free(answer->series_pointers);
    free(answer->epochs);
    free(answer->epoch_pointers);
}

static int answer_fill(struct answer *answer, const struct ps_series_list *series,
                       const struct ps_epoch_list *epochs, struct ps_error *err)
{
    *answer = (struct answer){
        .series = calloc(series->count + 1, sizeof *answer->series),
        .series_pointers = calloc(series->count + 1, sizeof *answer->series_pointers),
        .epochs = calloc(epochs->count + 1, sizeof *answer->epochs),
        .epoch_pointers = calloc(epochs->count + 1, sizeof *answer->epoch_pointers),
    };
    if (!answer->series || !answer->series_pointers || !answer->epochs || !answer->epoch_pointers)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < series->count; i++) {
        const struct ps_series *from = &series->series[i];
        Paramsync__V1__Series *to = answer->series_pointers[i] = &answer->series[i];
        paramsync__v1__series__init(to);
        to->name = ps_borrow(from->name);
        to->rank = from->rank;
        to->attempts = (uint32_t *)from->attempts;
        to->steps = (uint64_t *)from->steps;
        to->values = (double *)from->values;
        to->elapsed_s = (double *)from->elapsed_s;
        to->n_attempts = to->n_steps = to->n_values = to->n_elapsed_s = from->count;
        to->total_points = from->total_points;
    }
    for (size_t i = 0; i < epochs->count; i++) {
        const struct ps_epoch *from = &epochs->epochs[i];
        Paramsync__V1__EpochPoint *to = answer->epoch_pointers[i] = &answer->epochs[i];
        paramsync__v1__epoch_point__init(to);
        to->attempt = from->attempt;
        to->epoch = from->epoch;
        to->train_loss = from->train_loss;
        to->val_loss = from->val_loss;
        to->accuracy = from->accuracy;
        to->lr = from->lr;
        to->samples_per_s = from->samples_per_s;
        to->elapsed_s = from->elapsed_s;
        to->train_s = from->train_s;
        to->eval_s = from->eval_s;
        to->step = from->step;
        to->correct = from->correct;
        to->counted = from->counted;
        to->no_eval = from->no_eval;
    }
    return 0;
}

PS_HANDLER(ps_handle_query_series)
{
    enum { answer_max = 4 << 20 }; /* what clients receive unless they ask for more */
    struct ps_service *service = context;
    const Paramsync__V1__QuerySeriesRequest *request = (const void *)message;
    if (request->rank < -1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "rank: %d, must be -1 (every rank) or a rank",
                       request->rank);
    if (request->to_step && request->to_step < request->from_step)
        return ps_fail(err, PS_INVALID_ARGUMENT, "to_step: %llu is before from_step",
                       (unsigned long long)request->to_step);
    struct ps_series_query query = {
        .name = request->name,
        .rank = request->rank,
        .from_step = request->from_step,
        .to_step = request->to_step,
        .max_points = request->max_points,
        .all_attempts = request->all_attempts,
    };
    struct ps_series_list series = {0};
    struct ps_epoch_list epochs = {0};
    struct answer answer = {0};
    int code = ps_need_run(request->run, err);
    if (!code)
        code = ps_store_query_series(service->store, request->run, &query, !*request->name, &series, err);
    if (!code)
        code = ps_store_query_epochs(service->store, request->run, request->all_attempts, &epochs, err);
    if (!code)
        code = answer_fill(&answer, &series, &epochs, err);
    if (!code) {
        Paramsync__V1__QuerySeriesResponse response = PARAMSYNC__V1__QUERY_SERIES_RESPONSE__INIT;
        response.names = (char **)series.names;
        response.n_names = series.name_count;
        response.series = answer.series_pointers;
        response.n_series = series.count;
        response.epochs = answer.epoch_pointers;
        response.n_epochs = epochs.count;
        size_t size = protobuf_c_message_get_packed_size(&response.base);
        if (size > answer_max)
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED,
                           "the answer has %zu bytes, more than %d: lower max_points or ask for one rank",
                           size, answer_max);
        else
            code = ps_rpc_send(call, &response.base, err);
    }
    answer_done(&answer);
    ps_series_list_done(&series);
    ps_epoch_list_done(&epochs);
    return code;
}

PS_HANDLER(ps_handle_get_confusion)
{
    struct ps_service *service = context;
    const Paramsync__V1__GetConfusionRequest *request = (const void *)message;
    struct ps_confusion *found = malloc(sizeof *found);
    if (!found)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code =
        ps_store_get_confusion(service->store, request->run, request->epoch, request->latest, found, err);
    if (!code) {
        Paramsync__V1__Confusion response = PARAMSYNC__V1__CONFUSION__INIT;
        response.epoch = found->epoch;
        response.attempt = found->attempt;
        response.classes = found->classes;
        response.n_counts = (size_t)found->classes * found->classes;
        response.counts = found->counts;
        code = ps_rpc_send(call, &response.base, err);
    }
    free(found);
    return code;
}
