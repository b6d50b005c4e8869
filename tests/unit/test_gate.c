/* SPDX-License-Identifier: Apache-2.0
 * The gate's truth table. */
#include "services/compare/compare.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* cmocka's own works on float. */
#define assert_close(actual, wanted, slack) close_enough(actual, wanted, slack, __FILE__, __LINE__)
static void close_enough(double actual, double wanted, double slack, const char *file, int line)
{
    if (fabs(actual - wanted) <= slack || actual == wanted)
        return;
    print_error("%.17g != %.17g\n", actual, wanted);
    _fail(file, line);
}

static struct ps_compare_epoch base_epochs[2] = {{1, 1, 600, 1, 1, 0.70, 100, 0, 0, false},
                                                 {1, 2, 1200, 1, 1, 0.80, 100, 0, 0, false}};

static struct ps_compare_run make(const char *name, const struct ps_compare_epoch *epochs, size_t n)
{
    return (struct ps_compare_run){.id = name,
                                   .name = name,
                                   .state = PS_COMPARE_FINISHED,
                                   .world_size = 2,
                                   .model = "resnet18",
                                   .dataset = "CIFAR-10, JPEG re-encoded",
                                   .dataset_hash = "abc",
                                   .epochs = epochs,
                                   .epoch_count = n};
}

/* Evaluates, checks the verdict and that the reason holds a text; returns nothing else. */
static void expect_n(const struct ps_gate_limits *limits, const struct ps_compare_run *runs, size_t n,
                     const struct ps_compare_run *baseline, int verdict, const char *reason)
{
    struct ps_gate_result *result = NULL;
    struct ps_error err = {0};
    int code = ps_gate_evaluate(limits, runs, n, baseline, &result, &err);
    if (code)
        fail_msg("%s", err.message);
    if (result->verdict != verdict || !strstr(result->reason, reason))
        fail_msg("%s: %s", ps_gate_verdict_name(result->verdict), result->reason);
    for (size_t i = 0; i < result->check_count; i++) {
        assert_true(result->checks[i].what[0]);
        assert_true(result->checks[i].actual[0]);
        assert_true(result->checks[i].wanted[0]);
        assert_true(result->checks[i].run[0]);
    }
    assert_null(ps_gate_result_free(result));
}

static void expect(const struct ps_gate_limits *limits, const struct ps_compare_run *run, int verdict,
                   const char *reason)
{
    expect_n(limits, run, 1, NULL, verdict, reason);
}

static void crossing_times(void **state)
{
    (void)state;
    struct ps_compare_epoch e[2];
    struct ps_compare_run run = make("r", e, 2);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    limits.min_accuracy = 0.8;
    limits.max_time_s = 1200;
    memcpy(e, base_epochs, sizeof e);
    expect(&limits, &run, PS_GATE_PASS, "all 4 checks passed, n=1");
    e[1].elapsed_s = 1200.1;
    expect(&limits, &run, PS_GATE_FAIL,
           "time to 80.00 %: 20 min 00.1 s (epoch 2, 80.00 %; before: 10 min, 70.00 %)");
    e[1].elapsed_s = 1000;
    e[1].accuracy = 0.7999;
    expect(&limits, &run, PS_GATE_FAIL, "best accuracy: 79.99 %");
    limits.max_time_s = 0;
    expect(&limits, &run, PS_GATE_FAIL, "best accuracy: 79.99 %");
    e[1].accuracy = 0.79999;
    expect(&limits, &run, PS_GATE_FAIL, "best accuracy: 79.999 %");
}

static void time_to_target_is_not_total_time(void **state)
{
    (void)state;
    struct ps_compare_epoch e[3];
    struct ps_compare_run run = make("r", e, 3);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    memcpy(e, base_epochs, sizeof base_epochs);
    e[2] = e[1];
    e[2].epoch = 3;
    e[2].elapsed_s = 1800;
    limits.min_accuracy = 0.8;
    limits.max_time_s = 1200;
    expect(&limits, &run, PS_GATE_PASS, "passed");
    limits.max_total_time_s = 1500;
    expect(&limits, &run, PS_GATE_FAIL, "total time of the run: 30 min (3 epochs)");
    limits.max_time_s = 0;
    expect(&limits, &run, PS_GATE_FAIL, "total time of the run");
    limits.max_total_time_s = 1800;
    expect(&limits, &run, PS_GATE_PASS, "passed");
    run.total_s = 1800.5; /* what the run says itself, when it is more than the last epoch's end */
    expect(&limits, &run, PS_GATE_FAIL, "total time of the run: 30 min 00.5 s");
}

static void states(void **state)
{
    (void)state;
    struct ps_compare_run run = make("r", base_epochs, 2);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    limits.min_accuracy = 0.5;
    const int unfinished[] = {PS_COMPARE_UNKNOWN, PS_COMPARE_CREATED, PS_COMPARE_RUNNING,
                              PS_COMPARE_FAILED,  PS_COMPARE_KILLED,  PS_COMPARE_LOST};
    for (size_t i = 0; i < COUNT(unfinished); i++) {
        run.state = unfinished[i];
        expect(&limits, &run, PS_GATE_UNDECIDED, "run has finished");
        limits.min_accuracy = 0.99; /* may not read as a regression either */
        expect(&limits, &run, PS_GATE_UNDECIDED, ps_compare_state_name(unfinished[i]));
        limits.min_accuracy = 0.5;
    }
    run.reason = "no heartbeat for 30 s";
    expect(&limits, &run, PS_GATE_UNDECIDED, "lost: no heartbeat");
    run.state = PS_COMPARE_FINISHED;
    expect(&limits, &run, PS_GATE_PASS, "");
}

static void missing_and_not_finite(void **state)
{
    (void)state;
    struct ps_compare_epoch e[2];
    struct ps_compare_run run = make("r", e, 2);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    limits.min_accuracy = 0.8;
    limits.max_time_s = 9000;
    memcpy(e, base_epochs, sizeof e);
    e[1].accuracy = NAN;
    expect(&limits, &run, PS_GATE_FAIL, "accuracy of epoch 2 is nan");
    e[1].accuracy = 0.9;
    e[0].val_loss = NAN;
    expect(&limits, &run, PS_GATE_FAIL, "val loss of epoch 1 is nan");
    e[0].val_loss = 1;
    e[0].train_loss = INFINITY;
    expect(&limits, &run, PS_GATE_FAIL, "train loss of epoch 1 is inf");
    run.state = PS_COMPARE_FAILED; /* stopped because of it */
    expect(&limits, &run, PS_GATE_FAIL, "train loss of epoch 1 is inf");
    run.state = PS_COMPARE_FINISHED;
    e[0].train_loss = 1;
    e[0].no_eval = e[1].no_eval = true;
    e[0].val_loss = NAN; /* means nothing there */
    expect(&limits, &run, PS_GATE_UNDECIDED, "evaluated: none recorded");
    run.epoch_count = 0;
    expect(&limits, &run, PS_GATE_UNDECIDED, "evaluated: none recorded");
    run.epoch_count = 2;
    e[0].no_eval = e[1].no_eval = false;
    e[0].val_loss = 1;
    e[1].elapsed_s = 0;
    expect(&limits, &run, PS_GATE_UNDECIDED, "no elapsed time recorded");
}

static void several_runs(void **state)
{
    (void)state;
    struct ps_compare_epoch e[3][2];
    struct ps_compare_run runs[3];
    static const char *const names[] = {"a", "b", "c"};
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    struct ps_gate_result *result = NULL;
    limits.min_accuracy = 0.8;
    limits.max_time_s = 1200;
    for (int i = 0; i < 3; i++) {
        memcpy(e[i], base_epochs, sizeof e[i]);
        runs[i] = make(names[i], e[i], 2);
    }
    e[0][1].elapsed_s = 1100;
    e[1][1].elapsed_s = 1190;
    e[2][1].accuracy = 0.79; /* one of three never gets there: infinitely slow, the median holds */
    assert_int_equal(ps_gate_evaluate(&limits, runs, 3, NULL, &result, NULL), 0);
    assert_int_equal(result->verdict, PS_GATE_PASS);
    assert_int_equal(result->n, 3);
    assert_close(result->accuracy.median, 0.80, 0);
    assert_close(result->accuracy.low, 0.79, 0);
    assert_close(result->time.median, 1190, 0);
    assert_true(isinf(result->time.high));
    assert_non_null(strstr(result->reason, "n=3"));
    result = ps_gate_result_free(result);
    e[1][1].accuracy = 0.79;
    expect_n(&limits, runs, 3, NULL, PS_GATE_FAIL, "best accuracy: 79.00 % (79.00 % .. 80.00 %, n=3)");
    e[1][1].accuracy = e[2][1].accuracy = 0.8;
    runs[1].world_size = 4;
    expect_n(&limits, runs, 3, NULL, PS_GATE_UNDECIDED, "b: world size 4, a has 2");
    runs[1].world_size = 2;
    runs[2].dataset_hash = "x";
    expect_n(&limits, runs, 3, NULL, PS_GATE_UNDECIDED, "c: other data");
    runs[2].dataset_hash = "abc";
    runs[2].state = PS_COMPARE_LOST;
    expect_n(&limits, runs, 3, NULL, PS_GATE_UNDECIDED, "run has finished: lost");
    runs[2].state = PS_COMPARE_FINISHED;
    runs[2].id = runs[1].id;
    expect_n(&limits, runs, 3, NULL, PS_GATE_UNDECIDED, "named twice");
}

static void published_baseline(void **state)
{
    (void)state;
    struct ps_compare_epoch e[2];
    struct ps_compare_run run = make("r", e, 2);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    struct ps_gate_result *result = NULL;
    const struct ps_compare_run *sample = ps_compare_builtin("sample-16");
    memcpy(e, base_epochs, sizeof e);
    expect_n(&limits, &run, 1, sample, PS_GATE_PASS, "passed");
    run.total_s = 1200.1;
    expect_n(&limits, &run, 1, sample, PS_GATE_FAIL, "at most 20 min (published for 100 epochs on 16 cards)");
    expect_n(&limits, &run, 1, ps_compare_builtin("sample-1"), PS_GATE_PASS, "passed");
    /* Nothing about time to target is asked because nothing about it was published. */
    assert_int_equal(ps_gate_evaluate(&limits, &run, 1, sample, &result, NULL), 0);
    for (size_t i = 0; i < result->check_count; i++)
        assert_null(strstr(result->checks[i].what, "time to"));
    result = ps_gate_result_free(result);
    limits.max_total_time_s = 5000; /* explicit limits win */
    expect_n(&limits, &run, 1, sample, PS_GATE_PASS, "passed");
    limits.min_accuracy = 0.9;
    expect_n(&limits, &run, 1, sample, PS_GATE_FAIL, "best accuracy");
    limits.min_accuracy = 0;
    run.dataset = "custom data";
    expect_n(&limits, &run, 1, sample, PS_GATE_UNDECIDED, "resnet18 on custom data");
    run.dataset = "CIFAR-10";
    run.model = "vgg";
    expect_n(&limits, &run, 1, sample, PS_GATE_UNDECIDED, "vgg on CIFAR-10");
}

static void own_baseline(void **state)
{
    (void)state;
    struct ps_compare_epoch e[2];
    struct ps_compare_run run = make("new", e, 2), baseline = make("old", base_epochs, 2);
    struct ps_gate_limits limits = PS_GATE_LIMITS_INIT;
    limits.min_accuracy = 0.75;
    memcpy(e, base_epochs, sizeof e);
    expect_n(&limits, &run, 1, &baseline, PS_GATE_PASS, "passed");
    e[1].elapsed_s = 1320; /* exactly 10 % slower */
    expect_n(&limits, &run, 1, &baseline, PS_GATE_PASS, "passed");
    e[1].elapsed_s = 1321;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_FAIL, "time to 75.00 % against baseline: 22 min 01.0 s");
    limits.time_tolerance = 0.2;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_PASS, "passed");
    e[1].accuracy = 0.78;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_FAIL, "best accuracy against baseline: 78.00 %");
    limits.accuracy_tolerance = 0.03;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_PASS, "passed");

    baseline.dataset_hash = "other";
    expect_n(&limits, &run, 1, &baseline, PS_GATE_UNDECIDED, "baseline is comparable: new: other data");
    baseline.dataset_hash = NULL;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_UNDECIDED, "old has no data hash recorded");
    baseline.dataset_hash = "abc";
    baseline.model = "vgg";
    expect_n(&limits, &run, 1, &baseline, PS_GATE_UNDECIDED, "other model");
    limits.min_accuracy = 0.9; /* what fails by itself fails whatever the baseline */
    expect_n(&limits, &run, 1, &baseline, PS_GATE_FAIL, "best accuracy");
    limits.min_accuracy = 0.75;
    baseline.model = "resnet18";
    baseline.state = PS_COMPARE_LOST;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_UNDECIDED, "baseline is lost");
    baseline.state = PS_COMPARE_FINISHED;
    baseline.epoch_count = 1; /* 70 % only */
    expect_n(&limits, &run, 1, &baseline, PS_GATE_UNDECIDED, "old did not");
    baseline.epoch_count = 0;
    expect_n(&limits, &run, 1, &baseline, PS_GATE_UNDECIDED, "no evaluation recorded");
}

static void bad_arguments(void **state)
{
    (void)state;
    struct ps_compare_run run = make("r", base_epochs, 2), sample = *ps_compare_builtin("sample-1");
    struct ps_gate_result *result = NULL;
    struct ps_error err = {0};
    const struct ps_gate_limits bad[] = {{.min_accuracy = 0},
                                         {.min_accuracy = -0.1},
                                         {.min_accuracy = 80},
                                         {.min_accuracy = NAN},
                                         {.min_accuracy = 0.8, .max_time_s = -1},
                                         {.min_accuracy = 0.8, .max_time_s = NAN},
                                         {.min_accuracy = 0.8, .max_total_time_s = NAN},
                                         {.min_accuracy = 0.8, .time_tolerance = NAN}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        assert_int_equal(ps_gate_evaluate(&bad[i], &run, 1, NULL, &result, &err), PS_INVALID_ARGUMENT);
        assert_null(result);
    }
    struct ps_gate_limits good = {.min_accuracy = 0.8};
    assert_int_equal(ps_gate_evaluate(&good, &run, 0, NULL, &result, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_gate_evaluate(&good, &sample, 1, NULL, &result, &err), PS_INVALID_ARGUMENT);
    assert_null(result);
    assert_null(ps_gate_result_free(NULL));
    assert_int_equal(ps_gate_verdict_exit(PS_GATE_PASS), 0);
    assert_int_equal(ps_gate_verdict_exit(PS_GATE_FAIL), 1);
    assert_int_equal(ps_gate_verdict_exit(PS_GATE_UNDECIDED), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crossing_times), cmocka_unit_test(time_to_target_is_not_total_time),
        cmocka_unit_test(states),         cmocka_unit_test(missing_and_not_finite),
        cmocka_unit_test(several_runs),   cmocka_unit_test(published_baseline),
        cmocka_unit_test(own_baseline),   cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
