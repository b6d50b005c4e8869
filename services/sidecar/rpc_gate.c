/* SPDX-License-Identifier: Apache-2.0
 * Compare and Evaluate: what services/compare computes, on the runs of the store. */
#include "services/compare/compare.h"
#include "services/sidecar/rpc_handlers.h"

#include "paramsync/v1/gate.pb-c.h"

#include <stdlib.h>
#include <string.h>

enum { RUNS_MAX = 64 };

struct candidate {
    struct ps_run run;
    struct ps_epoch_list list;
    struct ps_compare_epoch *epochs;
    struct ps_compare_pair *config;
};

struct candidates {
    struct candidate loaded[RUNS_MAX + 1];
    struct ps_compare_run runs[RUNS_MAX + 1];
    size_t count;
};

static void candidates_free(struct candidates *all)
{
    if (!all)
        return;
    for (size_t i = 0; i < all->count; i++) {
        free(all->loaded[i].config);
        free(all->loaded[i].epochs);
        ps_epoch_list_done(&all->loaded[i].list);
        ps_run_done(&all->loaded[i].run);
    }
    free(all);
}

static int load_epochs(struct ps_service *service, struct candidate *c, struct ps_error *err)
{
    int code = ps_store_query_epochs(service->store, c->run.id, false, &c->list, err);
    if (code)
        return code;
    c->epochs = calloc(c->list.count + 1, sizeof *c->epochs);
    if (!c->epochs)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < c->list.count; i++) {
        const struct ps_epoch *e = &c->list.epochs[i];
        c->epochs[i] = (struct ps_compare_epoch){
            .attempt = e->attempt,
            .epoch = e->epoch,
            .elapsed_s = e->elapsed_s,
            .train_loss = e->train_loss,
            .val_loss = e->val_loss,
            .accuracy = e->accuracy,
            .samples_per_s = e->samples_per_s,
            .train_s = e->train_s,
            .eval_s = e->eval_s,
            .no_eval = e->no_eval,
        };
    }
    return 0;
}

/* Adds the run, or the published result, of that name. */
static int load(struct ps_service *service, const char *name, struct candidates *all, struct ps_error *err)
{
    size_t at = all->count++; /* counted first: one that was loaded in part is freed as well */
    struct candidate *c = &all->loaded[at];
    const struct ps_compare_run *published = ps_compare_builtin(name);
    if (published) {
        all->runs[at] = *published;
        return 0;
    }
    int code = ps_store_get_run(service->store, name, &c->run, err);
    if (!code)
        code = load_epochs(service, c, err);
    if (code)
        return code;
    const struct ps_run *r = &c->run;
    c->config = calloc(r->config_count + 1, sizeof *c->config);
    if (!c->config)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < r->config_count; i++)
        c->config[i] = (struct ps_compare_pair){r->config[i].key, r->config[i].value};
    all->runs[at] = (struct ps_compare_run){
        .id = r->id,
        .name = r->name,
        .state = r->state,
        .world_size = r->world_size,
        .batch_per_rank = r->batch_per_rank,
        .epochs_planned = r->epochs_planned,
        .model = r->model,
        .dataset = r->dataset,
        .dataset_hash = r->dataset_hash,
        .device = r->device,
        .commit = r->commit,
        .config = c->config,
        .config_count = r->config_count,
        .epochs = c->epochs,
        .epoch_count = ps_compare_sort_epochs(c->epochs, c->list.count),
        .total_s = ps_run_is_live(r->state) ? 0 : r->elapsed_s,
        .reason = r->reason,
    };
    return 0;
}

static int load_runs(struct ps_service *service, char *const *names, size_t count,
                     struct candidates **ret_all, struct ps_error *err)
{
    if (count < 1 || count > RUNS_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "runs: %zu, must be from 1 to %d", count, RUNS_MAX);
    struct candidates *all = calloc(1, sizeof *all);
    int code = all ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; !code && i < count; i++)
        code = *names[i] ? load(service, names[i], all, err)
                         : ps_fail(err, PS_INVALID_ARGUMENT, "runs[%zu]: must be a run's id or name", i);
    if (code) {
        candidates_free(all);
        return code;
    }
    *ret_all = all;
    return 0;
}

static bool is_run(const struct ps_compare_run *run, const char *name)
{
    return strcmp(run->name, name) == 0 || strcmp(run->id, name) == 0;
}

static void fill_row(Paramsync__V1__CompareRow *out, const struct ps_compare_run *run,
                     const struct ps_compare_row *row)
{
    paramsync__v1__compare_row__init(out);
    out->run_id = ps_borrow(run->id);
    out->name = ps_borrow(run->name);
    out->world_size = run->world_size;
    out->epochs = run->threshold_only ? run->published_epochs : row->epochs;
    out->best_accuracy = row->best_accuracy;
    out->final_accuracy = row->final_accuracy;
    out->total_s = row->has_total ? row->total_s : 0;
    out->has_time_to_target = row->has_time_to_target;
    out->time_to_target_s = row->time_to_target_s;
    out->epochs_to_target = row->epochs_to_target;
    out->samples_per_s = row->has_throughput ? row->samples_per_s : 0;
    out->has_speedup = row->has_speedup;
    out->speedup = row->speedup;
    out->efficiency = row->efficiency;
    out->has_time_speedup = row->has_time_speedup;
    out->time_speedup = row->time_speedup;
    out->refusal = ps_borrow(row->refusal);
    out->state = ps_borrow(run->threshold_only ? "published" : ps_compare_state_name(run->state));
    out->dataset = ps_borrow(run->dataset);
    out->threshold_only = run->threshold_only;
}

PS_HANDLER(ps_handle_compare)
{
    struct ps_service *service = context;
    const Paramsync__V1__CompareRequest *request = (const void *)message;
    double target = request->target == 0 ? 0.8 : request->target;
    if (!(target > 0 && target <= 1))
        return ps_fail(err, PS_INVALID_ARGUMENT, "target: %g is not above 0 and at most 1", target);
    struct candidates *all;
    int code = load_runs(service, request->runs, request->n_runs, &all, err);
    if (code)
        return code;
    /* The reference: the baseline, which joins the rows if it is none of the runs; else the first run. */
    size_t reference = 0;
    if (*request->baseline) {
        while (reference < all->count && !is_run(&all->runs[reference], request->baseline))
            reference++;
        if (reference == all->count)
            code = load(service, request->baseline, all, err);
    }
    size_t count = all->count;
    struct ps_compare_row *rows = calloc(count, sizeof *rows);
    Paramsync__V1__CompareRow *messages = calloc(count, sizeof *messages);
    Paramsync__V1__CompareRow **pointers = calloc(count, sizeof *pointers);
    if (!code && (!rows || !messages || !pointers))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (!code)
        code = ps_compare(all->runs, count, reference, target, rows, err);
    if (!code) {
        Paramsync__V1__CompareResponse response = PARAMSYNC__V1__COMPARE_RESPONSE__INIT;
        for (size_t i = 0; i < count; i++) {
            fill_row(&messages[i], &all->runs[i], &rows[i]);
            pointers[i] = &messages[i];
        }
        response.target = target;
        response.reference = ps_borrow(all->runs[reference].name);
        response.rows = pointers;
        response.n_rows = count;
        code = ps_rpc_send(call, &response.base, err);
    }
    free(pointers);
    free(messages);
    free(rows);
    candidates_free(all);
    return code;
}

static int send_verdict(struct ps_rpc_call *call, struct ps_gate_result *result, struct ps_error *err)
{
    Paramsync__V1__EvaluateResponse response = PARAMSYNC__V1__EVALUATE_RESPONSE__INIT;
    Paramsync__V1__GateCheck *messages = calloc(result->check_count + 1, sizeof *messages);
    Paramsync__V1__GateCheck **pointers = calloc(result->check_count + 1, sizeof *pointers);
    int code = 0;
    if (messages && pointers) {
        for (size_t i = 0; i < result->check_count; i++) {
            struct ps_gate_check *check = &result->checks[i];
            Paramsync__V1__GateCheck *out = pointers[i] = &messages[i];
            paramsync__v1__gate_check__init(out);
            out->what = check->what;
            out->actual = check->actual;
            out->wanted = check->wanted;
            out->run = check->run;
            out->verdict = ps_borrow(ps_gate_verdict_name(check->verdict));
        }
        response.verdict = (Paramsync__V1__EvaluateResponse__Verdict)result->verdict;
        response.reason = result->reason;
        response.checks = pointers;
        response.n_checks = result->check_count;
        code = ps_rpc_send(call, &response.base, err);
    } else {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    free(messages);
    free(pointers);
    return code;
}

PS_HANDLER(ps_handle_evaluate)
{
    struct ps_service *service = context;
    const Paramsync__V1__EvaluateRequest *request = (const void *)message;
    struct candidates *all;
    int code = load_runs(service, request->runs, request->n_runs, &all, err);
    if (code)
        return code;
    size_t count = all->count;
    if (*request->baseline)
        code = load(service, request->baseline, all, err);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    limits.min_accuracy = request->min_accuracy;
    limits.max_time_s = request->max_time_s;
    limits.max_total_time_s = request->max_total_time_s;
    struct ps_gate_result *result = NULL;
    if (!code)
        code = ps_gate_evaluate(&limits, all->runs, count, *request->baseline ? &all->runs[count] : NULL,
                                &result, err);
    if (!code)
        code = send_verdict(call, result, err);
    ps_gate_result_free(result);
    candidates_free(all);
    return code;
}
