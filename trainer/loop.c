/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/loop.h"

#include "services/base/buf.h"
#include "services/base/clock.h"
#include "services/base/log.h"
#include "trainer/data/loader.h"
#include "trainer/data/sampler.h"
#include "trainer/dist/start.h"
#include "trainer/progress.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* CIFAR-10's means and standard deviations by channel, of values in 0..1. */
static const float channel_mean[3] = {0.4914f, 0.4822f, 0.4465f},
                   channel_deviation[3] = {0.2470f, 0.2435f, 0.2616f};

enum { REPORT_STEPS = 16, MAX_PAIRS = 32, PAIR_TEXT = 128, MAX_RANKS = 4096, GRADIENT_PIECE = 1 << 16 };

struct loop {
    const struct ps_loop_config *c;
    const struct ps_train_options *o;
    int rank, world;
    struct ps_loader *loader;
    struct ps_reducer *reducer;
    struct ps_progress progress;
    uint32_t *order;     /* [order_capacity] */
    size_t rank_samples; /* per training epoch */
    size_t batches;      /* per epoch */
    int64_t steps;       /* per epoch */
    int eval_batch;
    float *logits; /* [eval_batch, classes] */
    double
        *confusion; /* evaluation: [classes, classes] counts of label and prediction, then loss and count */
    int *order_of_arrival; /* [param_count] */
    float *buffers;        /* with skip_nan: the running statistics before the step */
    float *piece;          /* with skip_nan: GRADIENT_PIECE floats */
    float scale[3], shift[3];
    bool units;                     /* steps are made as units that the device may repeat; see queued_step */
    double unread_s, unread_wait_s; /* of steps whose losses have not been read */
    int64_t unread;

    int epoch;       /* the last finished one */
    int64_t step;    /* optimizer steps so far */
    int64_t trained; /* training forwards so far */
    double start_s;  /* monotonic, of this attempt */
    double before_s; /* elapsed in earlier attempts */
    int saved_epoch; /* the last checkpoint */
    bool run_unknown;
    bool output_lost; /* standard output takes no more, and this has been said */
    struct ps_loop_result *result;
};

struct epoch_sums {
    double loss, correct, count;
    double seen; /* count and what was skipped */
    double train_s, eval_s;
    double input_wait_s, reduce_wait_s;
    double val_loss, val_correct, val_count;
    double lr;
};

int ps_loop_eval_batch(const struct ps_train_options *o, const struct ps_dataset *data, int world_size)
{
    size_t share = (data->test.count + (size_t)world_size - 1) / (size_t)world_size;
    return share < (size_t)o->batch ? (int)share : (int)o->batch;
}

static struct ps_sampler sampler_of(const struct ps_train_options *o, const struct ps_dataset *data, int rank,
                                    int world)
{
    /* As in the sample, the sampler fills up; drop_last is about the last batch. */
    return (struct ps_sampler){.count = data->train.count,
                               .rank = rank,
                               .world_size = world,
                               .shuffle = true,
                               .seed = (uint64_t)o->seed};
}

size_t ps_loop_batches(const struct ps_train_options *o, const struct ps_dataset *data, int world_size)
{
    struct ps_sampler s = sampler_of(o, data, 0, world_size);
    return ps_loader_batches(ps_sampler_length(&s), (int)o->batch, o->drop_last);
}

void ps_loop_score(const float *logits, const int32_t *labels, int count, int classes, double *loss_sum,
                   double *confusion)
{
    for (int i = 0; i < count; i++) {
        const float *row = logits + (size_t)i * (size_t)classes;
        int best = 0;
        double sum = 0;
        for (int k = 1; k < classes; k++)
            if (row[k] > row[best])
                best = k;
        for (int k = 0; k < classes; k++)
            sum += exp((double)row[k] - row[best]);
        *loss_sum += log(sum) - ((double)row[labels[i]] - row[best]);
        confusion[labels[i] * classes + best]++;
    }
}

static double elapsed(const struct loop *l)
{
    return ps_monotonic_s() - l->start_s;
}

static int stopped(const struct loop *l, struct ps_error *err)
{
    if (!*l->c->stop)
        return 0;
    if (l->saved_epoch)
        return ps_fail(err, PS_CANCELLED,
                       "stopped by signal %d in epoch %d; the last checkpoint is epoch_%d in %s",
                       (int)*l->c->stop, l->epoch + 1, l->saved_epoch, l->o->output_dir);
    return ps_fail(err, PS_CANCELLED, "stopped by signal %d in epoch %d; there is no checkpoint yet",
                   (int)*l->c->stop, l->epoch + 1);
}

int ps_loop_gather(void *ranks, const void *mine, size_t bytes, void *all, struct ps_error *err)
{
    return ps_reducer_gather(((struct ps_loop_ranks *)ranks)->reducer, mine, bytes, all, err);
}

static void trace(const struct loop *l, const char *name, double begin_s, const char *key, int64_t value)
{
    if (l->c->trace)
        ps_trace_span(l->c->trace, PS_TRACE_LOOP, name, begin_s, ps_monotonic_s(), key, (long)value);
}

static int sum_over_ranks(struct loop *l, double *values, size_t count, struct ps_error *err)
{
    return l->world == 1 ? 0 : l->c->comm->ops->all_reduce(l->c->comm, values, count, PS_F64, err);
}

static struct ps_batch batch_of(const struct loop *l, const struct ps_loaded *loaded, int resolution)
{
    struct ps_batch batch = {.pixel = loaded->floats ? PS_PIXEL_F32 : PS_PIXEL_U8,
                             .images = loaded->images,
                             .labels = loaded->labels,
                             .count = loaded->rows,
                             .resolution = resolution};
    memcpy(batch.scale, l->scale, sizeof batch.scale);
    memcpy(batch.shift, l->shift, sizeof batch.shift);
    return batch;
}

/* ---- training ---- */

static struct ps_optimizer_step optimizer_step(const struct loop *l, double lr)
{
    const struct ps_train_options *o = l->o;
    return (struct ps_optimizer_step){.kind = o->optimizer_kind,
                                      .step = l->step + 1,
                                      .lr = lr,
                                      .weight_decay = o->weight_decay,
                                      .momentum = o->momentum,
                                      .nesterov = o->momentum > 0,
                                      .beta1 = 0.9,
                                      .beta2 = 0.999,
                                      .eps = 1e-8};
}

/* step: of the epoch, from 0. The place in the schedule goes by epochs, not by l->step: a training that goes
 * on with other batches or ranks has made its steps in another number. */
static double rate_at(const struct loop *l, int epoch, int64_t step)
{
    const double at = (double)(epoch - 1) + (double)step / (double)l->steps, warm = l->c->warmup_epochs,
                 from = l->c->warmup_from;
    const double warmth = at < warm ? from + (1 - from) * (at + 1.0 / (double)l->steps) / warm : 1;
    struct ps_schedule schedule = {.kind = l->o->schedule_kind,
                                   .peak = l->c->lr,
                                   .rise = l->o->schedule_kind == PS_SCHEDULE_COSINE ? 0.05 : 0.25};
    return (warmth < 1 ? warmth : 1) *
           ps_schedule_rate(&schedule, (epoch - 1) * l->steps + step, l->steps * l->o->epochs);
}

static int not_a_number(const struct loop *l, int epoch, int64_t step, const char *what, double value,
                        struct ps_error *err)
{
    char last[64] = "there is no checkpoint yet";
    if (l->saved_epoch)
        snprintf(last, sizeof last, "the last good checkpoint is epoch_%d", l->saved_epoch);
    return ps_fail(err, PS_ABORTED, "%s is %f at step %lld (epoch %d) on rank %d: training stops; %s in %s",
                   what, value, (long long)step, epoch, l->rank, last, l->o->output_dir);
}

/* With --on_nan skip: whether some rank's loss or the average gradient is no number. The same on all ranks: a
 * gradient that is none on one makes the sum none on all, but a loss may be infinite where its gradient is
 * not. ret_rank: the first rank whose loss it was, or -1. */
static int find_nan(struct loop *l, bool mine, bool *ret_found, int *ret_rank, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    unsigned char bad[MAX_RANKS] = {0}, own = mine;
    int code = c->comm->ops->all_gather(c->comm, &own, 1, bad, err);
    *ret_rank = -1;
    for (int r = l->world; r-- > 0;)
        if (bad[r])
            *ret_rank = r;
    *ret_found = *ret_rank >= 0;
    for (size_t at = 0; at < c->model->param_elements && !*ret_found && !code; at += GRADIENT_PIECE) {
        size_t n = c->model->param_elements - at;
        n = n < GRADIENT_PIECE ? n : GRADIENT_PIECE;
        code = c->ops->read(c->backend, PS_STATE_GRADS, at, n, l->piece, err);
        for (size_t i = 0; i < n && !code; i++)
            *ret_found = *ret_found || !isfinite(l->piece[i]);
    }
    return code;
}

/* The step is left out: nothing of it stays in the weights, the moments or the running statistics. */
static int skip_step(struct loop *l, int epoch, int rank, double loss, struct ps_error *err)
{
    char what[64] = "a gradient is no number";
    if (rank >= 0)
        snprintf(what, sizeof what, "the loss is no number on rank %d", rank);
    if (rank == l->rank)
        snprintf(what, sizeof what, "the loss is %f on rank %d", loss, rank);
    l->result->skipped++;
    if (rank == l->rank || l->rank == 0)
        ps_log_warning("%s in the step after step %lld (epoch %d): the step is skipped, %lld so far", what,
                       (long long)l->step, epoch, (long long)l->result->skipped);
    if (l->rank == 0)
        ps_report_point(l->c->report, "skipped_steps", l->step, (double)l->result->skipped, elapsed(l));
    return l->c->ops->write(l->c->backend, PS_STATE_BUFFERS, 0, l->c->model->buffer_elements, l->buffers,
                            err);
}

/* One optimizer step: `batches` batches, of which the last one's backward overlaps with the reduction. */
static int train_step(struct loop *l, int epoch, int64_t number, int resolution, size_t batches,
                      size_t samples, struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    const struct ps_loss_config loss = {.label_smoothing = (float)l->o->label_smoothing,
                                        .grad_scale =
                                            1.0f / (float)samples}; /* the mean over this rank's samples */
    const enum ps_mode mode = l->o->freeze_bn ? PS_TRAIN_FROZEN_BN : PS_TRAIN;
    double input_wait = 0, loss_sum = 0, correct = 0, count = 0, begin = ps_monotonic_s();
    struct ps_reducer_times times = {0};
    if (l->o->skip_nan) {
        int code = c->ops->read(c->backend, PS_STATE_BUFFERS, 0, c->model->buffer_elements, l->buffers, err);
        if (code)
            return code;
    }
    for (size_t k = 0; k < batches; k++) {
        struct ps_loaded loaded;
        double waiting = ps_monotonic_s();
        if (!ps_loader_next(l->loader, &loaded))
            return ps_fail(err, PS_INTERNAL, "the loader ended in the middle of epoch %d", epoch);
        input_wait += ps_monotonic_s() - waiting;
        trace(l, "input wait", waiting, "step", l->step + 1);
        double part = ps_monotonic_s();
        struct ps_batch batch = batch_of(l, &loaded, resolution);
        int code = c->ops->forward(c->backend, &batch, mode, &loss, err);
        struct ps_metrics metrics;
        if (!code)
            code = c->ops->metrics(c->backend, &metrics, err);
        if (code)
            return code;
        trace(l, "forward", part, "step", l->step + 1);
        l->trained++;
        if (!isfinite(metrics.loss_sum) && !l->o->skip_nan)
            return not_a_number(l, epoch, l->step + 1, "the loss", metrics.loss_sum, err);
        loss_sum += metrics.loss_sum;
        correct += (double)metrics.correct;
        count += (double)metrics.count;
        bool last = k + 1 == batches;
        if (last) /* every rank has as many samples: the sampler fills up */
            ps_reducer_begin(l->reducer, 1.0 / l->world);
        part = ps_monotonic_s();
        code = c->ops->backward(c->backend, k > 0, NULL, last ? ps_reducer_ready : NULL,
                                last ? l->reducer : NULL, err);
        trace(l, "backward", part, "step", l->step + 1);
        if (last) { /* also after a failure: the reducer must not be left in a step */
            struct ps_error reduce = {0};
            int reduced = ps_reducer_finish(l->reducer, &times, &reduce);
            if (!code && reduced)
                code = ps_fail(err, reduced, "%s", reduce.message);
        }
        if (code)
            return code;
    }
    sums->seen += count;
    if (l->o->skip_nan) {
        bool found;
        int bad_rank, code = find_nan(l, !isfinite(loss_sum), &found, &bad_rank, err);
        if (!code && found)
            code = skip_step(l, epoch, bad_rank, loss_sum, err);
        if (code || found)
            return code;
    }
    sums->loss += loss_sum;
    sums->correct += correct;
    sums->count += count;
    sums->input_wait_s += input_wait;
    sums->reduce_wait_s += times.wait_s;
    double lr = rate_at(l, epoch, number);
    struct ps_optimizer_step step = optimizer_step(l, lr);
    double updating = ps_monotonic_s();
    int code = c->ops->update(c->backend, &step, err);
    trace(l, "update", updating, "step", step.step);
    if (code)
        return code;
    l->step++;
    sums->lr = lr;
    double now = elapsed(l), all = ps_monotonic_s() - begin;
    ps_report_point(c->report, "loss", l->step, loss_sum / (double)samples, now);
    ps_report_point(c->report, "compute_s", l->step, all - input_wait - times.wait_s, now);
    ps_report_point(c->report, "allreduce_wait_s", l->step, times.wait_s, now);
    ps_report_point(c->report, "input_wait_s", l->step, input_wait, now);
    if (l->rank == 0)
        ps_report_point(c->report, "lr", l->step, lr, now);
    return 0;
}

/* Reads what the steps since the last reading add up to: the one place where the host waits for the device.
 */
static int read_losses(struct loop *l, int epoch, struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    struct ps_metrics m;
    double begin = ps_monotonic_s(), steps = (double)l->unread;
    int code = l->unread ? c->ops->metrics(c->backend, &m, err) : 0;
    if (!code && c->comm->ops->queue_mark) /* after an abort the sums are none, and this says why */
        code = c->comm->ops->queue_mark(c->comm, err);
    if (code || !l->unread)
        return code;
    if (!isfinite(m.loss_sum))
        return not_a_number(l, epoch, l->step, "the sum of the last losses", m.loss_sum, err);
    double now = elapsed(l), spent = l->unread_s + ps_monotonic_s() - begin;
    sums->loss += m.loss_sum;
    sums->correct += (double)m.correct;
    sums->count += (double)m.count;
    ps_report_point(c->report, "loss", l->step, m.loss_sum / (double)m.count, now);
    ps_report_point(c->report, "compute_s", l->step, (spent - l->unread_wait_s) / steps, now);
    ps_report_point(c->report, "input_wait_s", l->step, l->unread_wait_s / steps, now);
    if (l->rank == 0)
        ps_report_point(c->report, "lr", l->step, sums->lr, now);
    l->unread = 0;
    l->unread_s = l->unread_wait_s = 0;
    return 0;
}

/* A step that waits for nothing but images: its work is queued, or repeated, on the device. */
static int queued_step(struct loop *l, int epoch, int64_t number, int resolution, size_t samples,
                       struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    struct {
        struct ps_loss_config loss;
        enum ps_mode mode;
    } key = {{(float)l->o->label_smoothing, 1.0f / (float)samples},
             l->o->freeze_bn ? PS_TRAIN_FROZEN_BN : PS_TRAIN};
    struct ps_loaded loaded;
    const double begin = ps_monotonic_s();
    if (!ps_loader_next(l->loader, &loaded))
        return ps_fail(err, PS_INTERNAL, "the loader ended in the middle of epoch %d", epoch);
    const double waited = ps_monotonic_s() - begin;
    struct ps_batch batch = batch_of(l, &loaded, resolution);
    sums->lr = rate_at(l, epoch, number);
    struct ps_optimizer_step step = optimizer_step(l, sums->lr);
    bool done = false;
    int code = c->ops->step_begin(c->backend, &batch, &step, &key, sizeof key, &done, err);
    if (!code && !done) {
        code = c->ops->forward(c->backend, &batch, key.mode, &key.loss, err);
        if (!code) {
            struct ps_error reduce = {0};
            ps_reducer_begin(l->reducer, 1.0 / l->world);
            code = c->ops->backward(c->backend, false, NULL, ps_reducer_ready, l->reducer, err);
            int reduced = ps_reducer_finish(l->reducer, NULL, &reduce);
            if (!code && reduced)
                code = ps_fail(err, reduced, "%s", reduce.message);
        }
        if (!code)
            code = c->ops->update(c->backend, &step, err);
    }
    if (!code)
        code = c->ops->step_end(c->backend, err);
    if (!code && c->comm->ops->queue_mark)
        code = c->comm->ops->queue_mark(c->comm, err);
    if (code)
        return code;
    l->trained++;
    l->step++;
    l->unread++;
    sums->seen += (double)batch.count;
    sums->input_wait_s += waited;
    l->unread_wait_s += waited;
    l->unread_s += ps_monotonic_s() - begin;
    return l->unread == REPORT_STEPS || number + 1 == l->steps ? read_losses(l, epoch, sums, err) : 0;
}

/* What is left, if a step costs as its pixels do. */
static double time_left(const struct loop *l, int epoch, int64_t done, double spent_s)
{
    double here = ps_resolution_at(&l->o->resolutions, epoch), steps = (double)(l->steps - done);
    for (int e = epoch + 1; e <= l->o->epochs; e++) {
        double r = ps_resolution_at(&l->o->resolutions, e);
        steps += (double)l->steps * r * r / (here * here);
    }
    return done ? spent_s / (double)done * steps : -1;
}

enum { PROFILE_ROWS = 512 };

static void print_part(const char *name, double forward_s, double backward_s, double all_s,
                       const char *detail)
{
    fprintf(stderr, "%-32s %9.3f s %9.3f s %5.1f %%%s%s\n", name, forward_s, backward_s,
            100 * (forward_s + backward_s) / (all_s > 0 ? all_s : 1), *detail ? "  " : "", detail);
}

/* Restarts the sums; with print_s, the epoch's training time, prints them and what they leave of it. */
static int profile(struct loop *l, const struct epoch_sums *sums, double print_s, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    if (!l->o->profile || l->rank != 0)
        return 0;
    if (!c->ops->profile) {
        ps_log_warning("--profile: backend %s tells nothing about its parts", c->ops->name);
        return 0;
    }
    struct ps_profile_row *rows = calloc(PROFILE_ROWS, sizeof *rows);
    if (!rows)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for the profile");
    int count = c->ops->profile(c->backend, rows, PROFILE_ROWS);
    if (print_s > 0) {
        double left = print_s - sums->input_wait_s - sums->reduce_wait_s;
        ps_progress_clear(&l->progress);
        fprintf(stderr, "%-32s %11s %11s %7s\n", "profile", "forward", "backward", "share");
        for (int i = 0; i < count; i++) {
            print_part(rows[i].name, rows[i].forward_s, rows[i].backward_s, print_s, rows[i].detail);
            left -= rows[i].forward_s + rows[i].backward_s;
        }
        print_part("wait for images", sums->input_wait_s, 0, print_s, "");
        print_part("wait for the other ranks", 0, sums->reduce_wait_s, print_s, "");
        print_part("all else", left, 0, print_s, "");
        print_part("the epoch's training", print_s, 0, print_s, "");
    }
    free(rows);
    return 0;
}

static int train_epoch(struct loop *l, int epoch, struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_train_options *o = l->o;
    const struct ps_sampler sampler = sampler_of(o, l->c->data, l->rank, l->world);
    const int resolution = ps_resolution_at(&o->resolutions, epoch);
    int code = ps_sampler_indices(&sampler, epoch, l->order, err);
    if (code)
        return code;
    const struct ps_loader_pass pass = {.split = &l->c->data->train,
                                        .indices = l->order,
                                        .count = l->rank_samples,
                                        .batch = (int)o->batch,
                                        .drop_last = o->drop_last,
                                        .augment = strcmp(o->augment, "standard") == 0,
                                        .seed = (uint64_t)o->seed,
                                        .epoch = epoch,
                                        .resolution = resolution};
    code = ps_loader_start(l->loader, &pass, err);
    if (!code)
        code = profile(l, sums, 0, err);
    double begin = ps_monotonic_s();
    for (int64_t s = 0; s < l->steps && !code; s++) {
        size_t first = (size_t)s * (size_t)o->accumulate;
        size_t batches =
            l->batches - first < (size_t)o->accumulate ? l->batches - first : (size_t)o->accumulate;
        size_t end = (first + batches) * (size_t)o->batch;
        size_t samples = (end < l->rank_samples ? end : l->rank_samples) - first * (size_t)o->batch;
        code = stopped(l, err);
        if (!code)
            code = l->units ? queued_step(l, epoch, s, resolution, samples, sums, err)
                            : train_step(l, epoch, s, resolution, batches, samples, sums, err);
        if (!code) {
            double spent = ps_monotonic_s() - begin;
            struct ps_progress_state state = {.epoch = epoch,
                                              .epochs = (int)o->epochs,
                                              .step = s + 1,
                                              .steps = l->steps,
                                              .samples_per_s =
                                                  sums->seen * l->world / (spent > 0 ? spent : 1),
                                              .left_s = time_left(l, epoch, s + 1, spent)};
            ps_progress_draw(&l->progress, &state, ps_monotonic_ns());
        }
    }
    sums->train_s = ps_monotonic_s() - begin;
    if (!code)
        code = profile(l, sums, sums->train_s, err);
    double values[4] = {sums->loss, sums->correct, sums->count, sums->seen};
    if (!code)
        code = sum_over_ranks(l, values, 4, err);
    sums->loss = values[0];
    sums->correct = values[1];
    sums->count = values[2];
    sums->seen = values[3];
    if (!code && sums->count == 0) /* the same on all ranks */
        code =
            ps_fail(err, PS_ABORTED,
                    "every step of epoch %d was skipped for a loss or gradient that is no number: training "
                    "stops; a lower --lr may help",
                    epoch);
    return code;
}

/* ---- evaluation: rank r scores test images r, r + W, ...; each once, in batches of one shape ---- */

static int evaluate(struct loop *l, int epoch, struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    const int resolution = ps_resolution_at(&l->o->resolutions, epoch), classes = c->model->classes;
    const struct ps_loss_config loss = {.grad_scale = 1};
    const size_t cells = (size_t)classes * (size_t)classes;
    double begin = ps_monotonic_s(), *loss_sum = &l->confusion[cells], *count = &l->confusion[cells + 1];
    size_t mine = 0;
    memset(l->confusion, 0, (cells + 2) * sizeof *l->confusion);
    for (size_t i = (size_t)l->rank; i < c->data->test.count; i += (size_t)l->world)
        l->order[mine++] = (uint32_t)i;
    const struct ps_loader_pass pass = {.split = &c->data->test,
                                        .indices = l->order,
                                        .count = mine,
                                        .batch = l->eval_batch,
                                        .pad = true,
                                        .resolution = resolution};
    int code = ps_loader_start(l->loader, &pass, err);
    struct ps_loaded loaded;
    while (!code && ps_loader_next(l->loader, &loaded)) {
        struct ps_batch batch = batch_of(l, &loaded, resolution);
        code = stopped(l, err);
        if (!code)
            code = c->ops->forward(c->backend, &batch, PS_EVAL, &loss, err);
        /* Scored here rather than by the backend's sums, which would count what fills the batch up. */
        if (!code)
            code = c->ops->read_value(c->backend, c->model->output, false, l->logits, err);
        if (!code)
            ps_loop_score(l->logits, loaded.labels, loaded.count, classes, loss_sum, l->confusion);
        *count += loaded.count;
    }
    struct ps_metrics unused;
    if (!code)
        code = c->ops->metrics(c->backend, &unused, err);
    if (!code)
        code = sum_over_ranks(l, l->confusion, cells + 2, err);
    if (!code && *count != (double)c->data->test.count)
        code = ps_fail(err, PS_INTERNAL, "%.0f of %zu test images were counted", *count, c->data->test.count);
    sums->val_loss = *loss_sum / *count;
    sums->val_count = *count;
    sums->val_correct = 0;
    for (int k = 0; k < classes; k++)
        sums->val_correct += l->confusion[(size_t)k * (size_t)classes + (size_t)k];
    sums->eval_s = ps_monotonic_s() - begin;
    ps_report_point(c->report, "evaluation_s", l->step, sums->eval_s, elapsed(l));
    trace(l, "evaluation", begin, "epoch", epoch);
    return code;
}

/* ---- the end of an epoch ---- */

/* Replicas that have drifted apart must not go on as if they were one. */
static int compare_replicas(struct loop *l, struct ps_error *err)
{
    static const enum ps_state_kind kinds[] = {PS_STATE_PARAMS, PS_STATE_MOMENT_1, PS_STATE_MOMENT_2};
    if (l->world == 1)
        return 0;
    uint64_t hash = 0;
    int code = 0;
    for (size_t i = 0; i < (l->o->optimizer_kind == PS_ADAM ? 3u : 2u) && !code; i++)
        code = ps_state_hash(l->c->ops, l->c->backend, l->c->model, kinds[i], hash, &hash, err);
    return code ? code : ps_compare_hash(l->c->comm, "parameters and optimizer state", hash, err);
}

static int read_state(struct loop *l, enum ps_state_kind what, size_t count, float **ret,
                      struct ps_error *err)
{
    *ret = malloc(count * sizeof **ret + 1);
    if (!*ret)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for a checkpoint");
    return l->c->ops->read(l->c->backend, what, 0, count, *ret, err);
}

struct settings {
    struct ps_tensor_pair pairs[MAX_PAIRS];
    char text[MAX_PAIRS][PAIR_TEXT];
    size_t count;
};

static void put_setting(struct settings *s, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void put_setting(struct settings *s, const char *name, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(s->text[s->count], PAIR_TEXT, format, args);
    va_end(args);
    s->pairs[s->count] = (struct ps_tensor_pair){name, s->text[s->count]};
    s->count++;
}

/* What decides the bits of a training beside its weights: kept in the state file, compared when it is
 * resumed. */
static void put_settings(const struct loop *l, struct settings *s)
{
    const struct ps_train_options *o = l->o;
    s->count = 0;
    put_setting(s, "seed", "%lld", (long long)o->seed);
    put_setting(s, "schedule", "%s", o->schedule);
    if (o->schedule_kind != PS_SCHEDULE_CONSTANT) /* a constant rate does not ask for the end */
        put_setting(s, "epochs", "%lld", (long long)o->epochs);
    put_setting(s, "lr", "%.17g", l->c->lr);
    if (o->optimizer_kind == PS_SGD)
        put_setting(s, "momentum", "%.17g", o->momentum);
    put_setting(s, "weight_decay", "%.17g", o->weight_decay);
    put_setting(s, "label_smoothing", "%.17g", o->label_smoothing);
    put_setting(s, "batch", "%lld", (long long)o->batch);
    put_setting(s, "accumulate", "%lld", (long long)o->accumulate);
    put_setting(s, "drop_last", "%s", o->drop_last ? "true" : "false");
    put_setting(s, "augment", "%s", o->augment);
    put_setting(s, "normalize", "%s", o->normalize ? "true" : "false");
    put_setting(s, "resolution", "%s", o->resolution);
    put_setting(s, "bn", "%s", o->sync_bn ? "synchronised" : o->freeze_bn ? "frozen" : "local");
    if (l->c->warmup_epochs > 0)
        put_setting(s, "warmup_epochs", "%.17g", l->c->warmup_epochs);
    put_setting(s, "precision", "%s", o->precision);
    put_setting(s, "world_size", "%d", l->world);
    put_setting(s, "threads", "%d", l->c->threads);
    put_setting(s, "backend", "%s", l->c->ops->name);
    put_setting(s, "data_hash", "%s", l->c->data->hash);
}

/* The last step of an epoch is not followed by a loss that would show what it has done. */
static int check_finite(const struct loop *l, int epoch, const char *what, const float *values, size_t count,
                        struct ps_error *err)
{
    for (size_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return not_a_number(l, epoch, l->step, what, values[i], err);
    return 0;
}

/* The buckets' order as text, "61 60 59 ..."; NULL if there is none (or no memory: it only matters to the
 * bits of a resumed training's first step). */
static char *order_text(struct loop *l)
{
    struct ps_buf text = PS_BUF_INIT(1 << 16);
    if (!ps_reducer_order(l->reducer, l->order_of_arrival))
        return NULL;
    for (int i = 0; i < l->c->model->param_count; i++)
        ps_buf_printf(&text, i ? " %d" : "%d", l->order_of_arrival[i]);
    return ps_buf_take(&text, NULL);
}

/* Into order_of_arrival; false if the checkpoint has none for this model. */
static bool read_order(struct loop *l, const struct ps_checkpoint *checkpoint)
{
    const char *text = ps_checkpoint_pair(checkpoint, "bucket_order");
    int n = 0;
    while (text && *text && n < l->c->model->param_count) {
        char *end;
        long value = strtol(text, &end, 10);
        if (end == text || value < 0 || value >= l->c->model->param_count)
            return false;
        l->order_of_arrival[n++] = (int)value;
        text = end;
    }
    return text && n == l->c->model->param_count && !*text;
}

static int save(struct loop *l, int epoch, const struct epoch_sums *sums, bool evaluated,
                struct ps_error *err)
{
    const struct ps_model *m = l->c->model;
    char *path = NULL;
    struct settings settings;
    put_settings(l, &settings);
    put_setting(&settings, "elapsed_s", "%.3f", l->before_s + elapsed(l));
    put_setting(&settings, "best_accuracy", "%.17g", l->result->best_accuracy);
    put_setting(&settings, "best_epoch", "%d", l->result->best_epoch);
    if (l->c->training)
        put_setting(&settings, "training", "%s", l->c->training);
    char *order = order_text(l);
    if (order)
        settings.pairs[settings.count++] = (struct ps_tensor_pair){"bucket_order", order};
    struct ps_checkpoint c = {.epoch = epoch,
                              .step = l->step,
                              .batches = l->trained,
                              .optimizer = l->o->optimizer_kind,
                              .pairs = settings.pairs,
                              .pair_count = settings.count};
    int code = read_state(l, PS_STATE_PARAMS, m->param_elements, &c.params, err);
    if (!code)
        code = read_state(l, PS_STATE_BUFFERS, m->buffer_elements, &c.buffers, err);
    if (!code)
        code = read_state(l, PS_STATE_MOMENT_1, m->param_elements, &c.moment_1, err);
    if (!code && l->o->optimizer_kind == PS_ADAM)
        code = read_state(l, PS_STATE_MOMENT_2, m->param_elements, &c.moment_2, err);
    if (!code)
        code = check_finite(l, epoch, "a weight", c.params, m->param_elements, err);
    if (!code)
        code = check_finite(l, epoch, "a running statistic", c.buffers, m->buffer_elements, err);
    if (!code)
        code = ps_checkpoint_save(l->o->output_dir, m, &c, l->o->formats, &path, err);
    if (!code)
        ps_report_checkpoint(l->c->report, path,
                             l->o->formats & PS_CHECKPOINT_SAFETENSORS ? "safetensors" : "pth", epoch,
                             l->step, evaluated ? sums->val_correct / sums->val_count : 0, evaluated);
    if (!code) { /* so that the training can go on where this folder is not */
        char state[4096];
        if (snprintf(state, sizeof state, "%s/epoch_%d.state", l->o->output_dir, epoch) < (int)sizeof state)
            ps_report_checkpoint(l->c->report, state, "state", epoch, l->step, 0, false);
    }
    free(order);
    free(path);
    free(c.params);
    free(c.buffers);
    free(c.moment_1);
    free(c.moment_2);
    return code;
}

/* A reader that has gone away or a full disk does not end the training, but is not passed over in silence. */
static void flush_results(struct loop *l)
{
    bool failed = fflush(stdout) != 0 || ferror(stdout);
    if (failed && !l->output_lost)
        ps_log_warning("the results cannot be written to standard output: %s; training goes on",
                       strerror(errno));
    l->output_lost = l->output_lost || failed;
    clearerr(stdout);
}

static void print_train(struct loop *l, int epoch, const struct epoch_sums *sums)
{
    ps_progress_clear(&l->progress);
    printf("train | epoch: %d | loss: %.4f\n", epoch, sums->loss / sums->count);
    flush_results(l);
}

static void print_evaluation(struct loop *l, int epoch, const struct epoch_sums *sums)
{
    printf("val | epoch: %d | loss: %.4f | accuracy: %.4f \n\n", epoch, sums->val_loss,
           sums->val_correct / sums->val_count);
    flush_results(l);
}

static int share_run(struct loop *l, struct ps_error *err)
{
    struct {
        char id[27];
        uint32_t attempt;
    } run = {0};
    if (!l->run_unknown || l->world == 1)
        return 0;
    if (l->rank == 0)
        ps_report_run(l->c->report, run.id, &run.attempt, NULL, 0);
    int code = l->c->comm->ops->broadcast(l->c->comm, &run, sizeof run, 0, err);
    if (code || !run.id[0])
        return code;
    l->run_unknown = false;
    struct ps_error why = {0};
    if (l->rank != 0 && ps_report_join(l->c->report, run.id, run.attempt, &why))
        ps_log_warning("rank %d's step points are not recorded: %s", l->rank, why.message);
    return 0;
}

static int run_epoch(struct loop *l, int epoch, struct ps_error *err)
{
    struct epoch_sums sums = {0};
    const bool evaluated = epoch % l->o->eval_every == 0 || epoch == l->o->epochs;
    int code = train_epoch(l, epoch, &sums, err);
    if (code)
        return code;
    if (l->rank == 0)
        print_train(l, epoch, &sums);
    /* Running statistics are each rank's own; all go on, test and save with rank 0's. */
    code = l->world == 1 ? 0
                         : ps_broadcast_state(l->c->comm, l->c->ops, l->c->backend, l->c->model,
                                              PS_STATE_BUFFERS, 0, err);
    if (!code)
        code = compare_replicas(l, err);
    if (!code)
        code = share_run(l, err);
    if (!code && evaluated)
        code = evaluate(l, epoch, &sums, err);
    if (!code && !isfinite(sums.val_loss)) /* the same on all ranks */
        code = not_a_number(l, epoch, l->step, "the test loss", sums.val_loss, err);
    if (code)
        return code;
    if (evaluated) {
        if (l->rank == 0)
            print_evaluation(l, epoch, &sums);
        l->result->accuracy = sums.val_correct / sums.val_count;
        if (l->result->accuracy > l->result->best_accuracy) {
            l->result->best_accuracy = l->result->accuracy;
            l->result->best_epoch = epoch;
        }
    }
    if (l->rank == 0) {
        struct ps_report_epoch report = {.epoch = epoch,
                                         .step = l->step,
                                         .train_loss = sums.loss / sums.count,
                                         .val_loss = sums.val_loss,
                                         .accuracy = evaluated ? sums.val_correct / sums.val_count : 0,
                                         .lr = sums.lr,
                                         .samples_per_s = sums.seen / sums.train_s,
                                         .elapsed_s = elapsed(l),
                                         .train_s = sums.train_s,
                                         .eval_s = sums.eval_s,
                                         .correct = (int64_t)sums.val_correct,
                                         .counted = (int64_t)sums.val_count,
                                         .no_eval = !evaluated};
        if (evaluated) {
            report.confusion = l->confusion;
            report.classes = l->c->model->classes;
        }
        ps_report_epoch(l->c->report, &report);
        struct ps_error why = {0};
        if (ps_runlog_epoch(l->c->runlog, &report, &why)) /* what matters is the checkpoint below */
            ps_log_warning("the epoch is missing in the folder's record: %s", why.message);
        double saving = ps_monotonic_s();
        code = save(l, epoch, &sums, evaluated, err);
        trace(l, "checkpoint", saving, "epoch", epoch);
        if (code)
            return code;
        ps_report_point(l->c->report, "checkpoint_s", l->step, ps_monotonic_s() - saving, elapsed(l));
        ps_log_notice("epoch %d of %lld: %.1f img/s at %d pixels, training %.1f s, test %.1f s", epoch,
                      (long long)l->o->epochs, sums.seen / sums.train_s,
                      ps_resolution_at(&l->o->resolutions, epoch), sums.train_s, sums.eval_s);
    }
    l->saved_epoch = epoch;
    l->epoch = epoch;
    l->result->epochs_done = epoch;
    l->result->steps = l->step;
    return 0;
}

/* ---- start ---- */

static int write_state(struct loop *l, enum ps_state_kind what, const float *data, size_t count,
                       struct ps_error *err)
{
    return l->c->ops->write(l->c->backend, what, 0, count, data, err);
}

/* Says in one line what differs from the run that is resumed. */
static void compare_settings(const struct loop *l, const struct ps_checkpoint *checkpoint)
{
    struct settings s;
    char line[512] = "";
    size_t used = 0;
    put_settings(l, &s);
    for (size_t i = 0; i < s.count; i++) {
        const char *before = ps_checkpoint_pair(checkpoint, s.pairs[i].key);
        if (before && strcmp(before, s.pairs[i].value) != 0 && used < sizeof line)
            used += (size_t)snprintf(line + used, sizeof line - used, "%s%s %.40s instead of %.40s",
                                     used ? ", " : "", s.pairs[i].key, s.pairs[i].value, before);
    }
    if (used)
        ps_log_warning("resumed with %s: the result will not be the same bits as without the break", line);
}

int ps_loop_check_resume(const struct ps_train_options *o, const struct ps_checkpoint *checkpoint,
                         struct ps_error *err)
{
    if (checkpoint->weights_only || checkpoint->optimizer == o->optimizer_kind)
        return 0;
    return ps_fail(err, PS_INVALID_ARGUMENT, "--resume: the checkpoint was made with --optimizer %s",
                   checkpoint->optimizer == PS_ADAM ? "adam" : "sgd");
}

struct start_facts {                       /* from rank 0 */
    int64_t epoch, step, trained, moments; /* moments: 0, 1 or 2 vectors */
    int64_t ordered;                       /* the buckets' order follows */
    double before_s;
};

static int put_start(struct loop *l, struct start_facts *facts, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    const struct ps_model *m = c->model;
    const struct ps_checkpoint *r = c->resume;
    int code;
    if (!r) {
        float *params = malloc(m->param_elements * sizeof *params + 1);
        float *buffers = malloc(m->buffer_elements * sizeof *buffers + 1);
        code = params && buffers ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for %s", m->name);
        if (!code) {
            ps_model_init(m, (uint64_t)l->o->seed, params, buffers);
            code = write_state(l, PS_STATE_PARAMS, params, m->param_elements, err);
        }
        if (!code)
            code = write_state(l, PS_STATE_BUFFERS, buffers, m->buffer_elements, err);
        free(params);
        free(buffers);
        return code;
    }
    code = ps_loop_check_resume(l->o, r, err);
    if (!code)
        code = write_state(l, PS_STATE_PARAMS, r->params, m->param_elements, err);
    if (!code)
        code = write_state(l, PS_STATE_BUFFERS, r->buffers, m->buffer_elements, err);
    if (!code && r->moment_1)
        code = write_state(l, PS_STATE_MOMENT_1, r->moment_1, m->param_elements, err);
    if (!code && r->moment_2)
        code = write_state(l, PS_STATE_MOMENT_2, r->moment_2, m->param_elements, err);
    if (code)
        return code;
    const char *before = ps_checkpoint_pair(r, "elapsed_s");
    *facts = (struct start_facts){.epoch = r->epoch,
                                  .step = r->step,
                                  .trained = r->batches,
                                  .moments = r->moment_2   ? 2
                                             : r->moment_1 ? 1
                                                           : 0,
                                  .before_s = before ? strtod(before, NULL) : 0,
                                  .ordered = read_order(l, r)};
    if (!r->weights_only)
        compare_settings(l, r);
    const char *best = ps_checkpoint_pair(r, "best_accuracy"),
               *best_epoch = ps_checkpoint_pair(r, "best_epoch");
    if (best && best_epoch) {
        l->result->best_accuracy = strtod(best, NULL);
        l->result->best_epoch = (int)strtol(best_epoch, NULL, 10);
    }
    return 0;
}

/* Rank 0's weights, and where it resumes also its moments and counters, to all. */
static int start(struct loop *l, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    struct start_facts facts = {0};
    int code = l->rank == 0 ? put_start(l, &facts, err) : 0;
    if (code)
        return code;
    if (l->world > 1) {
        code = c->comm->ops->broadcast(c->comm, &facts, sizeof facts, 0, err);
        if (!code)
            code = ps_start_broadcast(c->comm, c->ops, c->backend, c->model, err);
        if (!code && facts.moments > 0)
            code = ps_broadcast_state(c->comm, c->ops, c->backend, c->model, PS_STATE_MOMENT_1, 0, err);
        if (!code && facts.moments > 1)
            code = ps_broadcast_state(c->comm, c->ops, c->backend, c->model, PS_STATE_MOMENT_2, 0, err);
        if (!code && facts.ordered)
            code =
                c->comm->ops->broadcast(c->comm, l->order_of_arrival,
                                        (size_t)c->model->param_count * sizeof *l->order_of_arrival, 0, err);
    }
    if (code)
        return code;
    const struct ps_reducer_config reducer = {.ops = c->ops,
                                              .backend = c->backend,
                                              .model = c->model,
                                              .comm = c->comm,
                                              .trace = c->trace,
                                              .order = facts.ordered ? l->order_of_arrival : NULL};
    code = ps_reducer_create(&reducer, &l->reducer, err);
    const char *graph = l->o->graph ? l->o->graph : "auto";
    l->units = c->ops->step_begin && strcmp(graph, "off") != 0 && l->o->accumulate == 1 && !l->o->skip_nan &&
               !(l->o->sync_bn && l->world > 1) && !l->o->profile && !c->trace;
    if (!l->units && strcmp(graph, "on") == 0 && l->rank == 0)
        ps_log_warning("--graph on: steps of this training cannot be recorded (it takes a GPU, and no "
                       "--accumulate, --on_nan skip, --sync_bn, --profile or --trace)");
    if (c->ranks)
        c->ranks->reducer = l->reducer;
    l->epoch = l->saved_epoch = (int)facts.epoch;
    l->step = facts.step;
    l->trained = facts.trained;
    l->before_s = facts.before_s;
    return code;
}

int ps_loop_run(const struct ps_loop_config *config, struct ps_loop_result *result, struct ps_error *err)
{
    const struct ps_train_options *o = config->options;
    const struct ps_dataset *data = config->data;
    struct loop l = {.c = config,
                     .o = o,
                     .rank = config->comm->rank,
                     .world = config->comm->world_size,
                     .result = result,
                     .run_unknown = config->run_unknown,
                     .start_s = config->start_s > 0 ? config->start_s : ps_monotonic_s()};
    const bool floats = data->train.floats != NULL;
    const struct ps_sampler sampler = sampler_of(o, data, l.rank, l.world);
    *result = (struct ps_loop_result){.accuracy = -1, .best_accuracy = -1};
    for (int c = 0; c < 3; c++) {
        l.scale[c] = floats ? 1 : o->normalize ? 1 / (255 * channel_deviation[c]) : 1.0f / 255;
        l.shift[c] = !floats && o->normalize ? -channel_mean[c] / channel_deviation[c] : 0;
    }
    l.rank_samples = ps_sampler_length(&sampler);
    l.batches = ps_loop_batches(o, data, l.world);
    l.steps = (int64_t)((l.batches + (size_t)o->accumulate - 1) / (size_t)o->accumulate);
    l.eval_batch = ps_loop_eval_batch(o, data, l.world);
    const size_t largest = l.rank_samples > data->test.count ? l.rank_samples : data->test.count;
    l.order = malloc((largest + 1) * sizeof *l.order);
    const size_t classes = (size_t)config->model->classes;
    l.logits = malloc((size_t)l.eval_batch * classes * sizeof *l.logits);
    l.confusion = calloc(classes * classes + 2, sizeof *l.confusion);
    l.order_of_arrival = calloc((size_t)config->model->param_count + 1, sizeof *l.order_of_arrival);
    l.buffers = o->skip_nan ? malloc((config->model->buffer_elements + 1) * sizeof *l.buffers) : NULL;
    l.piece = o->skip_nan ? malloc(GRADIENT_PIECE * sizeof *l.piece) : NULL;
    bool room =
        l.order && l.logits && l.confusion && l.order_of_arrival && (!o->skip_nan || (l.buffers && l.piece));
    int code = room ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for the order of samples");
    if (!code)
        code =
            ps_loader_create(l.eval_batch > o->batch ? l.eval_batch : (int)o->batch, floats, &l.loader, err);
    if (!code)
        code = start(&l, err);
    if (!code && l.rank == 0 && l.epoch)
        ps_log_notice("resumed after epoch %d, step %lld", l.epoch, (long long)l.step);
    result->epochs_done = l.epoch;
    result->steps = l.step;
    ps_progress_start(&l.progress, l.rank == 0 && isatty(STDERR_FILENO));
    for (int epoch = l.epoch + 1; epoch <= o->epochs && !code; epoch++)
        code = run_epoch(&l, epoch, err);
    ps_progress_clear(&l.progress);
    result->elapsed_s = elapsed(&l);
    if (config->ranks)
        config->ranks->reducer = NULL;
    if (l.units && !code) { /* before the communicator that they use goes */
        bool done;
        code = config->ops->step_begin(config->backend, NULL, NULL, NULL, 0, &done, err);
    }
    ps_reducer_free(l.reducer);
    ps_loader_free(l.loader);
    free(l.order);
    free(l.logits);
    free(l.confusion);
    free(l.order_of_arrival);
    free(l.buffers);
    free(l.piece);
    return code;
}
