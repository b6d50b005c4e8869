/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/loop.h"

#include "trainer/backend/backend.h"
#include "trainer/data/synthetic.h"
#include "trainer/dist/local.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void test_score(void **state)
{
    (void)state;
    const float logits[] = {1, 2, 3, 5, 5, 5, -1000, 0, 1000};
    const int32_t labels[] = {2, 0, 0};
    double loss = 0, confusion[9] = {0};
    ps_loop_score(logits, labels, 3, 3, &loss, confusion);
    /* label by prediction; of equal ones the first counts, as numpy.argmax has it */
    const double want[] = {1, 0, 1, 0, 0, 0, 0, 0, 1};
    assert_memory_equal(confusion, want, sizeof want);
    double expected = -log(exp(3.0) / (exp(1.0) + exp(2.0) + exp(3.0))) + log(3.0) + 2000;
    assert_true(fabs(loss - expected) < 1e-9);
    const float bad[] = {NAN, 0};
    ps_loop_score(bad, (int32_t[]){0}, 1, 2, &loss, confusion);
    assert_true(isnan(loss));
}

static void test_sizes(void **state)
{
    (void)state;
    struct ps_train_options o = {.batch = 128, .drop_last = true, .accumulate = 1};
    struct ps_dataset data = {.train = {.count = 50000}, .test = {.count = 10000}};
    assert_int_equal(ps_loop_batches(&o, &data, 16), 24); /* 3125 images a rank */
    assert_int_equal(ps_loop_eval_batch(&o, &data, 16), 128);
    o.drop_last = false;
    assert_int_equal(ps_loop_batches(&o, &data, 16), 25);
    data = (struct ps_dataset){.train = {.count = 100}, .test = {.count = 100}};
    o.drop_last = true;
    assert_int_equal(ps_loop_batches(&o, &data, 1), 0);
    assert_int_equal(ps_loop_eval_batch(&o, &data, 3), 34);
}

/* A small job in this process: everything that one rank does, on the reference backend. */
struct fixture {
    struct ps_train_options options;
    struct ps_dataset *data;
    struct ps_model *model;
    const struct ps_backend_ops *ops;
    struct ps_backend *backend;
    struct ps_comm *comm;
    struct ps_report *report;
    volatile sig_atomic_t stop;
    double warmup_epochs, warmup_from;
    char root[64], out[96];
};

static void open_fixture(struct fixture *f, size_t train, size_t test, char *const args[], int count)
{
    struct ps_error err = {0};
    char *argv[32] = {"t", "--data_url",   f->root, "--output_dir", f->out, "--width",
                      "4", "--resolution", "8"};
    int argc = 9;
    memset(f, 0, sizeof *f);
    snprintf(f->root, sizeof f->root, "/tmp/ps_test_loop.XXXXXX");
    assert_non_null(mkdtemp(f->root));
    snprintf(f->out, sizeof f->out, "%s/out", f->root);
    for (int i = 0; i < count; i++)
        argv[argc++] = args[i];
    assert_int_equal(ps_train_options_parse(argc, argv, &f->options, NULL, &err), 0);
    assert_int_equal(ps_synthetic_write(f->root, train, test, 1, &err), 0);
    assert_int_equal(ps_dataset_load(f->root, &f->data, &err), 0);
    char command[160];
    snprintf(command, sizeof command, "mkdir %s", f->out);
    assert_int_equal(system(command), 0);
    assert_int_equal(ps_model_create("resnet18", (int)f->options.width, 10, &f->model, &err), 0);
    assert_int_equal(ps_backend_load("ref", &f->ops, &err), 0);
    const struct ps_backend_config config = {.model = f->model,
                                             .threads = 1,
                                             .max_batch = (int)f->options.batch,
                                             .max_eval_batch = ps_loop_eval_batch(&f->options, f->data, 1),
                                             .max_resolution = 8,
                                             .training = true};
    if (f->ops->create(&config, &f->backend, &err))
        fail_msg("%s", err.message);
    f->comm = ps_comm_single();
    const struct ps_report_config none = {.world_size = 1};
    assert_int_equal(ps_report_open(&none, &f->report, &err), 0);
}

static void close_fixture(struct fixture *f)
{
    char command[128];
    f->ops->destroy(f->backend);
    ps_model_free(f->model);
    ps_dataset_free(f->data);
    f->comm->ops->destroy(f->comm);
    snprintf(command, sizeof command, "rm -rf %s", f->root);
    assert_int_equal(system(command), 0);
}

/* Standard output of the loop goes to a file for the time of the call. */
static int run(struct fixture *f, struct ps_checkpoint *resume, struct ps_loop_result *result, char *ret_text,
               size_t size, struct ps_error *err)
{
    const struct ps_loop_config config = {.options = &f->options,
                                          .data = f->data,
                                          .model = f->model,
                                          .ops = f->ops,
                                          .backend = f->backend,
                                          .comm = f->comm,
                                          .report = f->report,
                                          .resume = resume,
                                          .lr = f->options.lr,
                                          .warmup_epochs = f->warmup_epochs,
                                          .warmup_from = f->warmup_from,
                                          .threads = 1,
                                          .stop = &f->stop};
    char path[160];
    snprintf(path, sizeof path, "%s/stdout", f->root);
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    assert_non_null(freopen(path, "w", stdout));
    int code = ps_loop_run(&config, result, err);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t n = fread(ret_text, 1, size - 1, file);
    ret_text[n] = '\0';
    fclose(file);
    return code;
}

static void test_two_epochs(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048], expected[512], *path;
    char *args[] = {"--epochs",     "2", "--batch", "16",   "--drop_last", "false",
                    "--accumulate", "2", "--lr",    "0.003"};
    open_fixture(&f, 75, 33, args,
                 10); /* 5 batches, the last of 11: 3 steps; tests in 3 batches, the last of 1 */
    if (run(&f, NULL, &result, text, sizeof text, &err))
        fail_msg("%s", err.message);
    assert_int_equal(result.epochs_done, 2);
    assert_int_equal(result.steps, 6);
    double train[2], val[2], accuracy[2];
    int used = 0;
    assert_int_equal(sscanf(text,
                            "train | epoch: 1 | loss: %lf\nval | epoch: 1 | loss: %lf | accuracy: %lf \n\n"
                            "train | epoch: 2 | loss: %lf\nval | epoch: 2 | loss: %lf | accuracy: %lf \n\n%n",
                            &train[0], &val[0], &accuracy[0], &train[1], &val[1], &accuracy[1], &used),
                     6);
    snprintf(expected, sizeof expected,
             "train | epoch: 1 | loss: %.4f\nval | epoch: 1 | loss: %.4f | accuracy: %.4f \n\n"
             "train | epoch: 2 | loss: %.4f\nval | epoch: 2 | loss: %.4f | accuracy: %.4f \n\n",
             train[0], val[0], accuracy[0], train[1], val[1], accuracy[1]);
    assert_string_equal(text, expected); /* byte for byte */
    assert_true(fabs(accuracy[1] - result.accuracy) < 1e-4);
    assert_true(fabs(result.accuracy * 33 - round(result.accuracy * 33)) < 1e-9); /* of 33 images */
    assert_true(train[1] < train[0]);

    struct ps_checkpoint *c;
    assert_int_equal(ps_checkpoint_newest(f.out, &path, NULL, NULL, &err), 0);
    assert_int_equal(ps_checkpoint_load(path, f.model, &c, &err), 0);
    assert_int_equal(c->epoch, 2);
    assert_int_equal(c->step, 6);
    assert_int_equal(c->batches, 10);
    assert_non_null(c->moment_2);
    ps_checkpoint_free(c);
    free(path);
    close_fixture(&f);
}

static void test_signal_stops(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048];
    char *args[] = {"--epochs", "2", "--batch", "16"};
    open_fixture(&f, 48, 16, args, 4);
    f.stop = 15;
    assert_int_equal(run(&f, NULL, &result, text, sizeof text, &err), PS_CANCELLED);
    assert_non_null(strstr(err.message, "signal 15"));
    assert_string_equal(text, "");
    close_fixture(&f);
}

/* From --lr to the scaled rate over the first epochs, then as the schedule has it: one step an epoch, whose
 * change of the weights shows its rate (momentum 0: w0 - w1 = rate * gradient). */
static void test_warm_up(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048], path[160];
    char *args[] = {"--epochs", "4",      "--batch",    "32", "--optimizer", "sgd",
                    "--lr",     "0.0005", "--momentum", "0",  "--freeze_bn", "true"};
    open_fixture(&f, 32, 16, args, 12);
    f.warmup_epochs = 2;
    f.warmup_from = 0.25;
    if (run(&f, NULL, &result, text, sizeof text, &err))
        fail_msg("%s", err.message);
    /* rates at the epochs' single steps: 0.25 + 0.75 / 2, then 1 */
    static const double expected[] = {0.625, 1, 1, 1};
    double change[4] = {0};
    float *before = malloc(f.model->param_elements * sizeof *before),
          *buffers = malloc(f.model->buffer_elements * sizeof *buffers);
    ps_model_init(f.model, (uint64_t)f.options.seed, before, buffers);
    for (int epoch = 1; epoch <= 4; epoch++) {
        struct ps_checkpoint *c;
        snprintf(path, sizeof path, "%s/epoch_%d.state", f.out, epoch);
        assert_int_equal(ps_checkpoint_load(path, f.model, &c, &err), 0);
        for (size_t i = 0; i < f.model->param_elements; i++) {
            double d = (double)c->params[i] - (double)before[i];
            change[epoch - 1] += d * d;
        }
        memcpy(before, c->params, f.model->param_elements * sizeof *before);
        ps_checkpoint_free(c);
    }
    for (int i = 0; i < 4; i++) /* the gradient hardly changes at such rates */
        assert_true(fabs(sqrt(change[i] / change[3]) - expected[i]) < 0.02);
    free(before);
    free(buffers);
    close_fixture(&f);
}

static void test_nan_stops(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048];
    char *args[] = {"--epochs", "3", "--batch", "16", "--lr", "1e6", "--optimizer", "sgd"};
    open_fixture(&f, 48, 16, args, 8);
    assert_int_equal(run(&f, NULL, &result, text, sizeof text, &err), PS_ABORTED);
    assert_non_null(strstr(err.message, "at step"));
    assert_non_null(strstr(err.message, "rank 0"));
    assert_non_null(strstr(err.message, "checkpoint"));
    close_fixture(&f);
}

/* What a thread of test_nan_is_skipped does: one rank of a group. */
struct skipping_rank {
    const struct fixture *f;
    struct ps_backend *backend;
    struct ps_comm *comm;
    struct ps_loop_result result;
    struct ps_error err;
    int code;
};

static void *run_skipping(void *context)
{
    struct skipping_rank *r = context;
    const struct ps_loop_config config = {.options = &r->f->options,
                                          .data = r->f->data,
                                          .model = r->f->model,
                                          .ops = r->f->ops,
                                          .backend = r->backend,
                                          .comm = r->comm,
                                          .report = r->f->report,
                                          .lr = r->f->options.lr,
                                          .threads = 1,
                                          .stop = &r->f->stop};
    r->code = ps_loop_run(&config, &r->result, &r->err);
    return NULL;
}

/* One image of 48 is no number: in each epoch one step of three is left out, on both ranks, and the training
 * is the one that would have been without that step. */
static void test_nan_is_skipped(void **state)
{
    (void)state;
    char *args[] = {"--epochs", "2", "--batch", "8", "--on_nan", "skip"};
    struct ps_error err = {0};
    struct fixture f;
    struct skipping_rank ranks[2] = {0};
    struct ps_comm *comms[2];
    pthread_t threads[2];
    open_fixture(&f, 48, 16, args, 6);
    assert_true(f.options.skip_nan);
    const size_t pixels = (size_t)f.data->train.count * 3 * 32 * 32;
    float *images = malloc(pixels * sizeof *images);
    for (size_t i = 0; i < pixels; i++)
        images[i] = (float)f.data->train.pixels[i] / 255;
    images[7 * 3 * 32 * 32 + 5] = NAN;
    struct ps_split split = f.data->train, test = f.data->test;
    float *test_images = malloc((size_t)test.count * 3 * 32 * 32 * sizeof *test_images);
    for (size_t i = 0; i < (size_t)test.count * 3 * 32 * 32; i++)
        test_images[i] = (float)test.pixels[i] / 255;
    f.data->train.floats = images;
    f.data->test.floats = test_images;
    f.options.resolutions.part[0].resolution = 32;
    assert_int_equal(ps_comm_local(2, 600, comms, &err), 0);
    fflush(stdout);
    for (int r = 0; r < 2; r++) {
        const struct ps_backend_config config = {.model = f.model,
                                                 .threads = 1,
                                                 .max_batch = 8,
                                                 .max_eval_batch = 16,
                                                 .max_resolution = 32,
                                                 .training = true};
        assert_int_equal(f.ops->create(&config, &ranks[r].backend, &err), 0);
        ranks[r].f = &f;
        ranks[r].comm = comms[r];
        assert_int_equal(pthread_create(&threads[r], NULL, run_skipping, &ranks[r]), 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        if (ranks[r].code)
            fail_msg("%s", ranks[r].err.message);
        assert_int_equal(ranks[r].result.skipped, 2);
        assert_int_equal(ranks[r].result.steps, 4);
        float buffer[64];
        for (size_t at = 0; at + 64 <= f.model->buffer_elements; at += 64) {
            assert_int_equal(f.ops->read(ranks[r].backend, PS_STATE_BUFFERS, at, 64, buffer, &err), 0);
            for (int i = 0; i < 64; i++)
                assert_true(isfinite(buffer[i]));
        }
    }
    for (int r = 0; r < 2; r++) {
        f.ops->destroy(ranks[r].backend);
        comms[r]->ops->destroy(comms[r]);
    }
    f.data->train = split;
    f.data->test = test;
    free(images);
    free(test_images);
    close_fixture(&f);
}

/* All steps of an epoch are none: that is no training. */
static void test_nan_in_every_step_stops(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048];
    char *args[] = {"--epochs", "9",           "--batch", "16",       "--lr",
                    "1e6",      "--optimizer", "sgd",     "--on_nan", "skip"};
    open_fixture(&f, 48, 16, args, 10);
    f.options.lr = 1e38;
    assert_int_equal(run(&f, NULL, &result, text, sizeof text, &err), PS_ABORTED);
    if (!strstr(err.message, "every step of epoch") && !strstr(err.message, "the test loss"))
        fail_msg("%s", err.message);
    close_fixture(&f);
}

/* The last step of an epoch spoils the weights: no checkpoint is made of them. */
static void test_nan_is_not_saved(void **state)
{
    (void)state;
    static char *const every[] = {"1", "2"}, *const what[] = {"the test loss", "a weight"};
    for (int i = 0; i < 2; i++) {
        struct fixture f;
        struct ps_loop_result result;
        struct ps_error err = {0};
        char text[2048], path[160];
        char *args[] = {"--epochs", "3", "--batch", "16", "--optimizer", "sgd", "--eval_every", every[i]};
        open_fixture(&f, 16, 16, args, 8);
        f.options.lr = 1e39;
        assert_int_equal(run(&f, NULL, &result, text, sizeof text, &err), PS_ABORTED);
        assert_non_null(strstr(err.message, what[i]));
        assert_non_null(strstr(err.message, "no checkpoint yet"));
        assert_null(strstr(text, "val |"));
        snprintf(path, sizeof path, "%s/epoch_1.state", f.out);
        assert_int_not_equal(access(path, F_OK), 0);
        close_fixture(&f);
    }
}

/* Gone on with after an epoch of many small batches: the schedule is where that epoch ended. */
static void test_schedule_goes_by_epochs(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048], path[160];
    char *small[] = {"--epochs", "2", "--batch", "2", "--optimizer", "sgd", "--schedule", "onecycle"};
    open_fixture(&f, 32, 16, small, 8);
    f.options.epochs = 1;
    assert_int_equal(run(&f, NULL, &result, text, sizeof text, &err), 0);
    assert_int_equal(result.steps, 16);
    struct ps_checkpoint *first, *second;
    snprintf(path, sizeof path, "%s/epoch_1.state", f.out);
    assert_int_equal(ps_checkpoint_load(path, f.model, &first, &err), 0);
    f.options.epochs = 2;
    f.options.accumulate = 8; /* two steps an epoch: 16 are more than there are in all */
    assert_int_equal(run(&f, first, &result, text, sizeof text, &err), 0);
    assert_int_equal(result.steps, 18);
    snprintf(path, sizeof path, "%s/epoch_2.state", f.out);
    assert_int_equal(ps_checkpoint_load(path, f.model, &second, &err), 0);
    assert_memory_not_equal(first->params, second->params, f.model->param_elements * sizeof(float));
    ps_checkpoint_free(first);
    ps_checkpoint_free(second);
    close_fixture(&f);
}

static void test_eval_every(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[2048];
    char *args[] = {"--epochs", "3", "--batch", "16", "--eval_every", "2"};
    open_fixture(&f, 32, 16, args, 6);
    assert_int_equal(run(&f, NULL, &result, text, sizeof text, &err), 0);
    assert_null(strstr(text, "val | epoch: 1"));
    assert_non_null(strstr(text, "val | epoch: 2"));
    assert_non_null(strstr(text, "val | epoch: 3"));
    close_fixture(&f);
}

static void test_resume_of_other_optimizer(void **state)
{
    (void)state;
    struct fixture f;
    struct ps_loop_result result;
    struct ps_error err = {0};
    char text[64];
    char *args[] = {"--epochs", "1", "--batch", "16"};
    open_fixture(&f, 32, 16, args, 4);
    struct ps_checkpoint c = {.epoch = 1, .optimizer = PS_SGD};
    assert_int_equal(run(&f, &c, &result, text, sizeof text, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "--optimizer sgd"));
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_score),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_two_epochs),
        cmocka_unit_test(test_signal_stops),
        cmocka_unit_test(test_warm_up),
        cmocka_unit_test(test_nan_stops),
        cmocka_unit_test(test_nan_is_skipped),
        cmocka_unit_test(test_nan_in_every_step_stops),
        cmocka_unit_test(test_nan_is_not_saved),
        cmocka_unit_test(test_schedule_goes_by_epochs),
        cmocka_unit_test(test_eval_every),
        cmocka_unit_test(test_resume_of_other_optimizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
