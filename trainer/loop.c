/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/loop.h"

#include "services/base/clock.h"
#include "services/base/log.h"
#include "trainer/data/loader.h"
#include "trainer/data/sampler.h"
#include "trainer/dist/reducer.h"
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

enum { MAX_PAIRS = 24, PAIR_TEXT = 128 };

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
    float scale[3], shift[3];

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
    double train_s, eval_s;
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
                   int64_t *correct)
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
        *correct += best == labels[i];
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
    struct ps_schedule schedule = {.kind = l->o->schedule_kind,
                                   .peak = l->c->lr,
                                   .rise = l->o->schedule_kind == PS_SCHEDULE_COSINE ? 0.05 : 0.25};
    return ps_schedule_rate(&schedule, (epoch - 1) * l->steps + step, l->steps * l->o->epochs);
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

/* One optimizer step: `batches` batches, of which the last one's backward overlaps with the reduction. */
static int train_step(struct loop *l, int epoch, int64_t number, int resolution, size_t batches,
                      size_t samples, struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    const struct ps_loss_config loss = {.label_smoothing = (float)l->o->label_smoothing,
                                        .grad_scale =
                                            1.0f / (float)samples}; /* the mean over this rank's samples */
    double input_wait = 0, loss_sum = 0, begin = ps_monotonic_s();
    struct ps_reducer_times times = {0};
    for (size_t k = 0; k < batches; k++) {
        struct ps_loaded loaded;
        double waiting = ps_monotonic_s();
        if (!ps_loader_next(l->loader, &loaded))
            return ps_fail(err, PS_INTERNAL, "the loader ended in the middle of epoch %d", epoch);
        input_wait += ps_monotonic_s() - waiting;
        struct ps_batch batch = batch_of(l, &loaded, resolution);
        int code = c->ops->forward(c->backend, &batch, PS_TRAIN, &loss, err);
        struct ps_metrics metrics;
        if (!code)
            code = c->ops->metrics(c->backend, &metrics, err);
        if (code)
            return code;
        l->trained++;
        if (!isfinite(metrics.loss_sum))
            return not_a_number(l, epoch, l->step + 1, "the loss", metrics.loss_sum, err);
        loss_sum += metrics.loss_sum;
        sums->correct += (double)metrics.correct;
        sums->count += (double)metrics.count;
        bool last = k + 1 == batches;
        if (last) /* every rank has as many samples: the sampler fills up */
            ps_reducer_begin(l->reducer, 1.0 / l->world);
        code = c->ops->backward(c->backend, k > 0, NULL, last ? ps_reducer_ready : NULL,
                                last ? l->reducer : NULL, err);
        if (last) { /* also after a failure: the reducer must not be left in a step */
            struct ps_error reduce = {0};
            int reduced = ps_reducer_finish(l->reducer, &times, &reduce);
            if (!code && reduced)
                code = ps_fail(err, reduced, "%s", reduce.message);
        }
        if (code)
            return code;
    }
    sums->loss += loss_sum;
    double lr = rate_at(l, epoch, number);
    struct ps_optimizer_step step = optimizer_step(l, lr);
    int code = c->ops->update(c->backend, &step, err);
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
    double begin = ps_monotonic_s();
    for (int64_t s = 0; s < l->steps && !code; s++) {
        size_t first = (size_t)s * (size_t)o->accumulate;
        size_t batches =
            l->batches - first < (size_t)o->accumulate ? l->batches - first : (size_t)o->accumulate;
        size_t end = (first + batches) * (size_t)o->batch;
        size_t samples = (end < l->rank_samples ? end : l->rank_samples) - first * (size_t)o->batch;
        code = stopped(l, err);
        if (!code)
            code = train_step(l, epoch, s, resolution, batches, samples, sums, err);
        if (!code) {
            double spent = ps_monotonic_s() - begin;
            struct ps_progress_state state = {.epoch = epoch,
                                              .epochs = (int)o->epochs,
                                              .step = s + 1,
                                              .steps = l->steps,
                                              .samples_per_s =
                                                  sums->count * l->world / (spent > 0 ? spent : 1),
                                              .left_s = time_left(l, epoch, s + 1, spent)};
            ps_progress_draw(&l->progress, &state, ps_monotonic_ns());
        }
    }
    sums->train_s = ps_monotonic_s() - begin;
    double values[3] = {sums->loss, sums->correct, sums->count};
    if (!code)
        code = sum_over_ranks(l, values, 3, err);
    sums->loss = values[0];
    sums->correct = values[1];
    sums->count = values[2];
    return code;
}

/* ---- evaluation: rank r scores test images r, r + W, ...; each once, in batches of one shape ---- */

static int evaluate(struct loop *l, int epoch, struct epoch_sums *sums, struct ps_error *err)
{
    const struct ps_loop_config *c = l->c;
    const int resolution = ps_resolution_at(&l->o->resolutions, epoch), classes = c->model->classes;
    const struct ps_loss_config loss = {.grad_scale = 1};
    double loss_sum = 0, begin = ps_monotonic_s();
    int64_t correct = 0, count = 0;
    size_t mine = 0;
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
            ps_loop_score(l->logits, loaded.labels, loaded.count, classes, &loss_sum, &correct);
        count += loaded.count;
    }
    struct ps_metrics unused;
    if (!code)
        code = c->ops->metrics(c->backend, &unused, err);
    double values[3] = {loss_sum, (double)correct, (double)count};
    if (!code)
        code = sum_over_ranks(l, values, 3, err);
    if (!code && values[2] != (double)c->data->test.count)
        code =
            ps_fail(err, PS_INTERNAL, "%.0f of %zu test images were counted", values[2], c->data->test.count);
    sums->val_loss = values[0] / values[2];
    sums->val_correct = values[1];
    sums->val_count = values[2];
    sums->eval_s = ps_monotonic_s() - begin;
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
                                         .samples_per_s = sums.count / sums.train_s,
                                         .elapsed_s = elapsed(l),
                                         .train_s = sums.train_s,
                                         .eval_s = sums.eval_s,
                                         .correct = (int64_t)sums.val_correct,
                                         .counted = (int64_t)sums.val_count,
                                         .no_eval = !evaluated};
        ps_report_epoch(l->c->report, &report);
        code = save(l, epoch, &sums, evaluated, err);
        if (code)
            return code;
        ps_log_notice("epoch %d of %lld: %.1f img/s at %d pixels, training %.1f s, test %.1f s", epoch,
                      (long long)l->o->epochs, sums.count / sums.train_s,
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
                                  .before_s = before ? strtod(before, NULL) : 0};
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
    }
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
    l.logits = malloc((size_t)l.eval_batch * (size_t)config->model->classes * sizeof *l.logits);
    int code = l.order && l.logits
                   ? 0
                   : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for the order of samples");
    if (!code)
        code =
            ps_loader_create(l.eval_batch > o->batch ? l.eval_batch : (int)o->batch, floats, &l.loader, err);
    const struct ps_reducer_config reducer = {
        .ops = config->ops, .backend = config->backend, .model = config->model, .comm = config->comm};
    if (!code)
        code = ps_reducer_create(&reducer, &l.reducer, err);
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
    ps_reducer_free(l.reducer);
    ps_loader_free(l.loader);
    free(l.order);
    free(l.logits);
    return code;
}
