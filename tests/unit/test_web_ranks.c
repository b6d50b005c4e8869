/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { RANKS = 16 };

/* Sixteen ranks that compute 0.1 s; the collective ends for all when the slowest has come, 0.02 s after. */
static void even(struct ps_rank_times *times, const double *extra)
{
    double slowest = 0;
    for (uint32_t i = 0; i < RANKS; i++)
        slowest = extra[i] > slowest ? extra[i] : slowest;
    for (uint32_t i = 0; i < RANKS; i++)
        times[i] = (struct ps_rank_times){
            .rank = i, .steps = 200, .compute_s = 0.1 + extra[i], .wait_s = 0.02 + slowest - extra[i]};
}

static struct ps_rank_verdict judge(const double *extra)
{
    struct ps_rank_times times[RANKS];
    struct ps_rank_verdict verdict;
    even(times, extra);
    ps_rank_judge(times, RANKS, RANKS, &verdict);
    return verdict;
}

static void names_the_late_rank(void **state)
{
    (void)state;
    double extra[RANKS] = {[5] = 0.0301};
    struct ps_rank_verdict v = judge(extra);
    assert_int_equal(v.state, PS_RANKS_CRITICAL);
    assert_int_equal(v.late_count, 1);
    assert_int_equal(v.late[0].rank, 5);
    assert_float_equal(v.step_s, 0.1501, 1e-9);
    assert_float_equal(v.late[0].lateness, 0.0301 / 0.1501, 1e-9);
    assert_float_equal(v.late[0].own, 0.0301 / 0.1501, 1e-9);
    assert_false(v.late[0].input);
}

static void bands(void **state)
{
    (void)state;
    double none[RANKS] = {0}, below[RANKS] = {[3] = 0.0133}, above[RANKS] = {[3] = 0.0134};
    double most[RANKS] = {[3] = 0.0299};
    assert_int_equal(judge(none).state, PS_RANKS_EVEN);
    assert_int_equal(judge(below).state, PS_RANKS_EVEN); /* 0.0133 of 0.1333 s: 9.98 % */
    assert_int_equal(judge(above).state, PS_RANKS_WARN);
    assert_int_equal(judge(most).state, PS_RANKS_WARN); /* 19.9 % */
}

static void two_late_ranks_latest_first(void **state)
{
    (void)state;
    double extra[RANKS] = {[2] = 0.03, [9] = 0.05};
    struct ps_rank_verdict v = judge(extra);
    assert_int_equal(v.state, PS_RANKS_CRITICAL);
    assert_int_equal(v.late_count, 2);
    assert_int_equal(v.late[0].rank, 9);
    assert_int_equal(v.late[1].rank, 2);
}

static void input_is_told_from_compute(void **state)
{
    (void)state;
    struct ps_rank_times times[2] = {
        {.rank = 0, .steps = 50, .compute_s = 0.1, .wait_s = 0.05},
        {.rank = 1, .steps = 50, .compute_s = 0.1, .wait_s = 0, .input_s = 0.05}};
    struct ps_rank_verdict v;
    ps_rank_judge(times, 2, 2, &v);
    assert_int_equal(v.state, PS_RANKS_CRITICAL);
    assert_int_equal(v.late[0].rank, 1);
    assert_true(v.late[0].input);
}

static void abstains(void **state)
{
    (void)state;
    double none[RANKS] = {0};
    struct ps_rank_times times[RANKS];
    struct ps_rank_verdict v;
    even(times, none);
    ps_rank_judge(times, 1, 1, &v);
    assert_string_equal(v.reason, "one_rank");
    ps_rank_judge(times, 0, 4, &v);
    assert_string_equal(v.reason, "few_steps");
    ps_rank_judge(times, 12, RANKS, &v); /* 75 % */
    assert_string_equal(v.reason, "ranks_missing");
    ps_rank_judge(times, 13, RANKS, &v);
    assert_int_equal(v.state, PS_RANKS_EVEN);
    times[4].steps = PS_RANKS_MIN_STEPS - 1;
    ps_rank_judge(times, RANKS, RANKS, &v);
    assert_string_equal(v.reason, "few_steps");
    assert_int_equal(v.state, PS_RANKS_ABSTAIN);
    /* It waits less, but nothing of its own took longer: the network, perhaps. */
    even(times, none);
    for (int i = 0; i < RANKS; i++)
        times[i].wait_s = i == 7 ? 0.01 : 0.05;
    ps_rank_judge(times, RANKS, RANKS, &v);
    assert_int_equal(v.state, PS_RANKS_ABSTAIN);
    assert_string_equal(v.reason, "unclear");
    assert_int_equal(v.late[0].rank, 7);
    /* More than half of them are late: the median is one of theirs. */
    for (int i = 0; i < RANKS; i++) {
        times[i].wait_s = i < 9 ? 0.01 : 0.09;
        times[i].compute_s = i < 9 ? 0.18 : 0.1;
    }
    ps_rank_judge(times, RANKS, RANKS, &v);
    assert_int_equal(v.state, PS_RANKS_ABSTAIN);
    assert_string_equal(v.reason, "many_late");
    struct ps_rank_times pair[3] = {{.rank = 0, .steps = 50, .compute_s = 0.2, .wait_s = 0.0},
                                    {.rank = 1, .steps = 50, .compute_s = 0.2, .wait_s = 0.0},
                                    {.rank = 2, .steps = 50, .compute_s = 0.1, .wait_s = 0.1}};
    ps_rank_judge(pair, 3, 3, &v);
    assert_int_equal(v.state, PS_RANKS_ABSTAIN);
    assert_string_equal(v.reason, "many_late");
    assert_int_equal(v.late_count, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_the_late_rank),
        cmocka_unit_test(bands),
        cmocka_unit_test(two_late_ranks_latest_first),
        cmocka_unit_test(input_is_told_from_compute),
        cmocka_unit_test(abstains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
