/* SPDX-License-Identifier: Apache-2.0
 * Expected figures are worked out by hand in the comments. */
#include "services/compare/compare.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
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

/* One process: epochs of 100 s, 500 samples/s after a slow first; 80 % at epoch 4. */
static const struct ps_compare_epoch one[] = {
    {1, 1, 110, 1.5, 1.4, 0.50, 400, 100, 10, false},  {1, 2, 210, 1.1, 1.0, 0.65, 500, 90, 10, false},
    {1, 3, 310, 0.9, 0.8, 0.7999, 510, 90, 10, false}, {1, 4, 410, 0.7, 0.6, 0.80, 490, 90, 10, false},
    {1, 5, 510, 0.5, 0.7, 0.79, 500, 90, 10, false},
};
/* Two processes: 900 samples/s; 81 % at epoch 5, which is the first at or above 80 %. */
static const struct ps_compare_epoch two[] = {
    {1, 1, 60, 1.6, 1.5, 0.45, 300, 50, 10, false}, {1, 2, 115, 1.2, 1.1, 0.60, 900, 50, 5, false},
    {1, 3, 170, 1.0, 0.9, 0.70, 880, 50, 5, false}, {1, 4, 225, 0.8, 0, 0, 920, 50, 0, true},
    {1, 5, 280, 0.6, 0.5, 0.81, 900, 50, 5, false},
};

static struct ps_compare_run make(const char *name, uint32_t world, const struct ps_compare_epoch *epochs,
                                  size_t n)
{
    return (struct ps_compare_run){.id = name,
                                   .name = name,
                                   .state = PS_COMPARE_FINISHED,
                                   .world_size = world,
                                   .batch_per_rank = 128,
                                   .model = "resnet18",
                                   .dataset = "CIFAR-10",
                                   .dataset_hash = "abc123",
                                   .epochs = epochs,
                                   .epoch_count = n};
}

static void figures_by_hand(void **state)
{
    (void)state;
    struct ps_compare_run runs[] = {make("one", 1, one, COUNT(one)), make("two", 2, two, COUNT(two))};
    struct ps_compare_row rows[2];
    struct ps_error err = {0};
    runs[0].total_s = 520;
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, &err), 0);
    assert_close(rows[0].best_accuracy, 0.80, 0);
    assert_int_equal(rows[0].best_epoch, 4);
    assert_close(rows[0].final_accuracy, 0.79, 0);
    assert_close(rows[0].total_s, 520, 0);
    assert_true(rows[0].has_time_to_target);
    assert_close(rows[0].time_to_target_s, 410, 0);
    assert_int_equal(rows[0].epochs_to_target, 4);
    assert_true(rows[0].has_before);
    assert_close(rows[0].before_s, 310, 0);
    assert_close(rows[0].before_accuracy, 0.7999, 0);
    /* median of 500 510 490 500 */
    assert_close(rows[0].samples_per_s, 500, 1e-12);
    assert_close(rows[0].efficiency, 1, 0);

    assert_string_equal(rows[1].refusal, "");
    assert_close(rows[1].total_s, 280, 0); /* no total recorded: the last epoch's end */
    assert_close(rows[1].time_to_target_s, 280, 0);
    assert_int_equal(rows[1].before_epoch, 3); /* epoch 4 was not evaluated */
    /* median of 900 880 920 900 = 900; 900 / 500 = 1.8; 1.8 * 1 / 2 = 0.9; 410 / 280 */
    assert_close(rows[1].samples_per_s, 900, 1e-12);
    assert_close(rows[1].speedup, 1.8, 1e-12);
    assert_close(rows[1].efficiency, 0.9, 1e-12);
    assert_true(rows[1].has_time_speedup);
    assert_close(rows[1].time_speedup, 410.0 / 280, 1e-12);
    assert_string_equal(rows[1].differs, "");
}

static void few_epochs_keep_the_first(void **state)
{
    (void)state;
    struct ps_compare_run run = make("short", 1, one, 2);
    struct ps_compare_row row;
    assert_int_equal(ps_compare(&run, 1, 0, 0.8, &row, NULL), 0);
    assert_close(row.samples_per_s, 450, 1e-12); /* (400 + 500) / 2 */
    assert_false(row.has_time_to_target);
    assert_int_equal(row.epochs_to_target, 0);
    struct ps_compare_run empty = make("empty", 1, NULL, 0);
    assert_int_equal(ps_compare(&empty, 1, 0, 0.8, &row, NULL), 0);
    assert_false(row.has_throughput);
    assert_false(row.has_total);
    assert_false(row.has_accuracy);
    assert_true(isnan(row.best_accuracy));
}

static void refusals(void **state)
{
    (void)state;
    struct ps_compare_run runs[] = {make("one", 1, one, COUNT(one)), make("two", 2, two, COUNT(two))};
    struct ps_compare_row rows[2];
    const struct ps_compare_pair narrow[] = {{"width", "16"}},
                                 wide[] = {{"width", "64"}, {"lr_scale", "node"}},
                                 scaled[] = {{"width", "64"}, {"lr-scale", "linear"}};
    runs[1].dataset_hash = "other";
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, NULL), 0);
    assert_false(rows[1].has_speedup);
    assert_false(rows[1].has_time_speedup);
    assert_non_null(strstr(rows[1].refusal, "other data"));
    assert_true(rows[1].has_time_to_target); /* its own figures stay */

    runs[1].dataset_hash = NULL;
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, NULL), 0);
    assert_string_equal(rows[1].refusal, "two has no data hash recorded");
    runs[0].dataset_hash = "";
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, NULL), 0);
    assert_false(rows[1].has_speedup); /* two unknowns are not the same */
    runs[0].dataset_hash = runs[1].dataset_hash = "abc123";

    runs[1].model = "vgg";
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, NULL), 0);
    assert_non_null(strstr(rows[1].refusal, "other model: vgg"));
    runs[1].model = "resnet18";

    runs[0].config = wide, runs[0].config_count = 2;
    runs[1].config = narrow, runs[1].config_count = 1;
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, NULL), 0);
    assert_string_equal(rows[1].refusal, "other width: 16, one has 64");
    runs[1].config = scaled, runs[1].config_count = 2;
    runs[1].batch_per_rank = 64;
    assert_int_equal(ps_compare(runs, 2, 0, 0.8, rows, NULL), 0);
    assert_string_equal(rows[1].refusal, "");
    assert_string_equal(rows[1].differs, "batch 64 / 128, lr-scale linear / node");
    assert_close(rows[1].efficiency, 0.9, 1e-12);

    assert_int_equal(ps_compare(runs, 2, 0, 0.805, rows, NULL), 0);
    assert_true(rows[1].has_speedup);
    assert_false(rows[1].has_time_speedup);
    assert_string_equal(rows[1].time_refusal, "one has not reached 80.50 %");

    struct ps_error err = {0};
    assert_int_equal(ps_compare(runs, 2, 2, 0.8, rows, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_compare(runs, 2, 0, 80, rows, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_compare(runs, 2, 0, NAN, rows, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_compare(runs, 0, 0, 0.8, rows, &err), PS_INVALID_ARGUMENT);
}

static void published_results_have_no_curve(void **state)
{
    (void)state;
    struct ps_compare_run runs[] = {make("two", 2, two, COUNT(two)), *ps_compare_builtin("sample-1"),
                                    *ps_compare_builtin("sample-16")};
    struct ps_compare_row rows[3];
    for (size_t reference = 0; reference < 3; reference++) {
        assert_int_equal(ps_compare(runs, 3, reference, 0.8, rows, NULL), 0);
        for (size_t i = 0; i < 3; i++) {
            if (i == 0 && reference == 0)
                continue;
            assert_false(rows[i].has_speedup);
            assert_false(rows[i].has_time_speedup);
            assert_true(rows[i].refusal[0]);
        }
        for (size_t i = 1; i < 3; i++) {
            assert_true(rows[i].threshold_only);
            assert_false(rows[i].has_time_to_target);
            assert_false(rows[i].has_throughput);
            assert_int_equal(rows[i].epochs_to_target, 0);
            assert_close(rows[i].best_accuracy, 0.8, 0);
            assert_int_equal(rows[i].epochs, 100);
        }
        assert_close(rows[1].total_s, 3600, 0);
        assert_close(rows[2].total_s, 1200, 0);
    }
    assert_int_equal(runs[2].world_size, 16);
    assert_null(ps_compare_builtin("sample-2"));
    assert_null(ps_compare_builtin(NULL));
}

static void not_finite(void **state)
{
    (void)state;
    struct ps_compare_epoch e[] = {{1, 1, 10, 1, 1, 0.5, NAN, 0, 0, false},
                                   {1, 2, 20, 1, NAN, NAN, 100, 0, 0, false},
                                   {1, 3, NAN, 1, 1, 0.9, INFINITY, 0, 0, false}};
    struct ps_compare_run run = make("nan", 1, e, 3);
    struct ps_compare_row row;
    assert_int_equal(ps_compare(&run, 1, 0, 0.8, &row, NULL), 0);
    assert_true(row.non_finite);
    assert_string_equal(row.non_finite_what, "val loss of epoch 2 is nan");
    assert_int_equal(row.evaluated, 2);
    assert_close(row.best_accuracy, 0.9, 0);
    assert_int_equal(row.epochs_to_target, 3);
    assert_false(row.has_time_to_target); /* reached, but nobody knows when */
    assert_close(row.samples_per_s, 100, 0);
    run.epoch_count = 2;
    assert_int_equal(ps_compare(&run, 1, 0, 0.8, &row, NULL), 0);
    assert_true(isnan(row.final_accuracy));
    assert_close(row.best_accuracy, 0.5, 0);
    e[1].accuracy = 80; /* per cent where a share belongs */
    e[1].val_loss = 1;
    assert_int_equal(ps_compare(&run, 1, 0, 0.8, &row, NULL), 0);
    assert_string_equal(row.non_finite_what, "accuracy of epoch 2 is 80");
    assert_close(row.best_accuracy, 0.5, 0);
}

static void attempts_fold(void **state)
{
    (void)state;
    struct ps_compare_epoch e[] = {{.attempt = 1, .epoch = 3, .accuracy = 0.3},
                                   {.attempt = 1, .epoch = 1},
                                   {.attempt = 2, .epoch = 3, .accuracy = 0.4},
                                   {.attempt = 1, .epoch = 2},
                                   {.attempt = 2, .epoch = 4}};
    assert_int_equal(ps_compare_sort_epochs(e, COUNT(e)), 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e[i].epoch, i + 1);
    assert_int_equal(e[2].attempt, 2);
    assert_close(e[2].accuracy, 0.4, 0);
    assert_int_equal(ps_compare_sort_epochs(NULL, 0), 0);
}

static void texts(void **state)
{
    (void)state;
    char out[64];
    ps_compare_format_share(0.80123, NAN, out, sizeof out);
    assert_string_equal(out, "80.12 %");
    ps_compare_format_share(0.79996, 0.8, out, sizeof out);
    assert_string_equal(out, "79.996 %");
    ps_compare_format_share(0.7999, 0.8, out, sizeof out);
    assert_string_equal(out, "79.99 %");
    ps_compare_format_share(NAN, 0.8, out, sizeof out);
    assert_string_equal(out, "nan");
    ps_compare_format_time(1200.1, 1200, out, sizeof out);
    assert_string_equal(out, "20 min 00.1 s");
    ps_compare_format_time(1200.001, 1200, out, sizeof out);
    assert_string_equal(out, "20 min 00.001 s");
    ps_compare_format_time(59.99, NAN, out, sizeof out);
    assert_string_equal(out, "1 min 00.0 s");
    ps_compare_format_time(3723.4, NAN, out, sizeof out);
    assert_string_equal(out, "1 h 02 min 03.4 s");
    ps_compare_format_time(INFINITY, NAN, out, sizeof out);
    assert_string_equal(out, "never");
    double share = -1;
    assert_int_equal(ps_compare_parse_share("0.8", &share), 0);
    assert_close(share, 0.8, 0);
    assert_int_equal(ps_compare_parse_share("80%", &share), 0);
    assert_close(share, 0.8, 0);
    assert_int_equal(ps_compare_parse_share("79.99 %", &share), 0);
    assert_close(share, 0.7999, 1e-15);
    const char *bad[] = {"", "%", "80", "-0.1", "101%", "nan", "0.8x", "1e999", " 0.8"};
    for (size_t i = 0; i < COUNT(bad); i++)
        assert_int_equal(ps_compare_parse_share(bad[i], &share), -1);
}

static void medians(void **state)
{
    (void)state;
    double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2}, never[] = {INFINITY, 1, INFINITY, INFINITY};
    assert_close(ps_compare_median(odd, 3), 2, 0);
    assert_close(ps_compare_median(even, 4), 2.5, 0);
    assert_true(isinf(ps_compare_median(never, 4)));
    assert_true(isnan(ps_compare_median(NULL, 0)));
}

static void smoothing(void **state)
{
    (void)state;
    double constant[100], out[100], again[100];
    for (int i = 0; i < 100; i++)
        constant[i] = 0.25;
    ps_compare_smooth(constant, 100, 0.99, out);
    for (int i = 0; i < 100; i++)
        assert_close(out[i], 0.25, 1e-15);
    /* weight 0.5: 1 -> 1; (0.5*0.5*1 + 0.5*3) / 0.75 = 7/3; NaN passes; then (0.5*1.75 + 0.5*5) / 0.875 */
    double values[] = {1, 3, NAN, 5};
    ps_compare_smooth(values, 4, 0.5, out);
    assert_close(out[0], 1, 1e-15);
    assert_close(out[1], 7.0 / 3, 1e-15);
    assert_true(isnan(out[2]));
    assert_close(out[3], 3.375 / 0.875, 1e-15);
    ps_compare_smooth(values, 2, 0.5, again); /* later points change nothing */
    assert_memory_equal(out, again, 2 * sizeof *out);
    ps_compare_smooth(values, 4, 0, out);
    assert_close(out[3], 5, 0);
}

static void downsampling_keeps_extremes(void **state)
{
    (void)state;
    enum { n = 100000 };
    double *values = malloc(n * sizeof *values);
    size_t *picked = malloc(n * sizeof *picked), *again = malloc(n * sizeof *again);
    unsigned seed = 7;
    for (int i = 0; i < n; i++) {
        seed = seed * 1103515245u + 12345u;
        values[i] = (seed >> 16) % 1000;
    }
    values[12345] = 5000;
    values[54321] = -5000;
    values[77777] = NAN;
    const size_t limits[] = {0, 4, 5, 10, 333, 2000, n - 1};
    for (size_t k = 0; k < COUNT(limits); k++) {
        size_t max = limits[k] < 4 ? 4 : limits[k];
        size_t got = ps_compare_downsample(values, n, limits[k], picked);
        bool low = false, high = false, mark = false;
        assert_in_range(got, 4, max);
        assert_int_equal(picked[0], 0);
        assert_int_equal(picked[got - 1], n - 1);
        for (size_t i = 0; i < got; i++) {
            low |= picked[i] == 54321;
            high |= picked[i] == 12345;
            mark |= picked[i] == 77777;
            if (i)
                assert_true(picked[i] > picked[i - 1]);
        }
        assert_true(low && high);
        assert_true(mark || max < 5);
        assert_int_equal(ps_compare_downsample(values, n, limits[k], again), got);
        assert_memory_equal(picked, again, got * sizeof *picked);
    }
    assert_int_equal(ps_compare_downsample(values, 3, 2000, picked), 3);
    assert_int_equal(ps_compare_downsample(values, 0, 2000, picked), 0);
    for (int i = 0; i < 20; i++)
        values[i] = NAN;
    assert_in_range(ps_compare_downsample(values, 20, 6, picked), 3, 6);
    free(values);
    free(picked);
    free(again);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(figures_by_hand), cmocka_unit_test(few_epochs_keep_the_first),
        cmocka_unit_test(refusals),        cmocka_unit_test(published_results_have_no_curve),
        cmocka_unit_test(not_finite),      cmocka_unit_test(attempts_fold),
        cmocka_unit_test(texts),           cmocka_unit_test(medians),
        cmocka_unit_test(smoothing),       cmocka_unit_test(downsampling_keeps_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
