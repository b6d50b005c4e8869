/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/compare/plan.h"

#include <math.h>
#include <string.h>

static void near(double got, double wanted, const char *what)
{
    if (!(fabs(got - wanted) <= 1e-12 + 1e-9 * fabs(wanted)))
        fail_msg("%s: %.12g, wanted %.12g", what, got, wanted);
}

static double reduce(int cards, int per_node, enum ps_plan_algorithm algorithm, double bytes)
{
    const struct ps_plan_setup setup = {
        .cards = cards, .cards_per_node = per_node, .in = {1e-6, 100e9}, .out = {10e-6, 10e9}};
    double time = -1;
    struct ps_error err = {0};
    if (ps_plan_reduce(&setup, algorithm, bytes, &time, &err))
        fail_msg("%s", err.message);
    return time;
}

static void test_formulas(void **state)
{
    (void)state;
    near(reduce(1, 8, PS_PLAN_RING, 1e9), 0, "one card");
    /* in a node: 14 rounds of 1 us, 7/4 of 1 GB at 100 GB/s */
    near(reduce(8, 8, PS_PLAN_RING, 1e9), 14e-6 + 0.0175, "ring of 8");
    near(reduce(8, 8, PS_PLAN_TREE, 1e9), 6e-6 + 0.02, "tree of 8");
    near(reduce(5, 8, PS_PLAN_TREE, 1e9), 6e-6 + 0.02, "tree of 5: as deep");
    near(reduce(8, 8, PS_PLAN_HIERARCHICAL, 1e9), 14e-6 + 0.0175, "hierarchical in one node is the ring");
    /* two nodes of eight: every round of the ring waits for the link between them */
    near(reduce(16, 8, PS_PLAN_RING, 1e9), 30 * 10e-6 + 2 * 15 / 16.0 * 0.1, "ring of 16");
    near(reduce(16, 8, PS_PLAN_TREE, 1e9), 8 * 10e-6 + 0.2, "tree of 16");
    near(reduce(16, 8, PS_PLAN_HIERARCHICAL, 1e9), 14e-6 + 0.0175 + 2 * 10e-6 + 0.1, "hierarchical of 2 x 8");
    near(reduce(2, 1, PS_PLAN_RING, 1e6), 2 * 10e-6 + 1e-4, "two nodes of one");
    near(reduce(2, 1, PS_PLAN_HIERARCHICAL, 1e6), 2 * 10e-6 + 1e-4, "two nodes of one, hierarchical");
}

/* Two gradients of 1 and 2 MiB; 100 MB/s: 1 MiB over two cards takes 10.48576 ms. */
static const struct ps_plan_gradient gradients[] = {{0.010, 1048576}, {0.030, 2097152}};
static const struct ps_plan_step step = {.input_s = 0.001,
                                         .forward_s = 0.020,
                                         .backward_s = 0.035,
                                         .update_s = 0.004,
                                         .gradients = gradients,
                                         .gradient_count = 2};

static struct ps_plan_result plan(struct ps_plan_setup setup)
{
    struct ps_plan_result r;
    struct ps_error err = {0};
    setup.cards_per_node = setup.cards_per_node ? setup.cards_per_node : 8;
    if (ps_plan(&step, &setup, &r, &err))
        fail_msg("%s", err.message);
    return r;
}

static void test_overlap(void **state)
{
    (void)state;
    const struct ps_plan_link link = {0, 100e6};
    struct ps_plan_result r = plan((struct ps_plan_setup){.cards = 1, .overlap = true});
    near(r.step_s, 0.060, "one card alone");
    near(r.efficiency, 1, "efficiency of one");
    r = plan((struct ps_plan_setup){.cards = 2, .in = link, .overlap = true, .algorithm = PS_PLAN_RING});
    assert_int_equal(r.bucket_count, 2);
    near(r.buckets[0].start_s, 0.010, "the first goes at once");
    near(r.buckets[0].end_s, 0.02048576, "the first ends");
    near(r.buckets[1].start_s, 0.030, "the second waits for its gradient");
    near(r.buckets[1].end_s, 0.05097152, "the second ends");
    near(r.exposed_s, 0.01597152, "what backward does not cover");
    near(r.step_s, 0.060 + 0.01597152, "step");
    near(r.speedup, 2 * 0.060 / 0.07597152, "speed-up");
    near(r.reduce_s, 0.03145728, "reductions");
    r = plan((struct ps_plan_setup){.cards = 2, .in = link, .overlap = false, .algorithm = PS_PLAN_RING});
    near(r.step_s, 0.060 + 0.03145728, "without overlap");
    /* A slow link: the second waits for the first. */
    r = plan((struct ps_plan_setup){.cards = 2, .in = {0, 10e6}, .overlap = true, .algorithm = PS_PLAN_RING});
    near(r.buckets[1].start_s, 0.010 + 0.1048576, "queue");
    /* A fast one: all is hidden but for the last bucket's own time after the end of backward. */
    r = plan((struct ps_plan_setup){.cards = 2, .in = {0, 1e12}, .overlap = true, .algorithm = PS_PLAN_RING});
    near(r.exposed_s, 0, "hidden");
    near(r.efficiency, 1, "nothing is lost");
}

static void test_buckets(void **state)
{
    (void)state;
    const struct ps_plan_link link = {0, 1e9};
    struct ps_plan_result r =
        plan((struct ps_plan_setup){.cards = 2, .in = link, .overlap = true, .first_bucket = 4e6});
    assert_int_equal(r.bucket_count, 1); /* both in one that never got full */
    assert_int_equal(r.buckets[0].gradients, 2);
    near(r.buckets[0].ready_s, 0.030, "ready with its last");
    /* The sample's net: 62 gradients in the order of arrival come out as the golden vector B5. */
    static struct ps_plan_gradient many[62];
    double sizes[62];
    int n = 0;
    sizes[n++] = 10, sizes[n++] = 5120; /* dense */
    const int widths[] = {512, 256, 128, 64};
    for (int stage = 0; stage < 4; stage++)
        for (int block = 1; block >= 0; block--) {
            const double w = widths[stage], from = block ? w : stage == 3 ? 64 : widths[stage + 1];
            sizes[n++] = w, sizes[n++] = w, sizes[n++] = 9 * w * w;
            sizes[n++] = w, sizes[n++] = w, sizes[n++] = 9 * w * from;
            if (!block && stage < 3)
                sizes[n++] = w, sizes[n++] = w, sizes[n++] = w * from;
        }
    sizes[n++] = 64, sizes[n++] = 64, sizes[n++] = 9 * 3 * 64;
    assert_int_equal(n, 62);
    double all = 0;
    for (int i = 0; i < 62; i++) {
        many[i] = (struct ps_plan_gradient){i * 1e-3, 4 * sizes[i]};
        all += 4 * sizes[i];
    }
    near(all, 44695848, "parameters");
    const struct ps_plan_step real = {.backward_s = 0.1, .gradients = many, .gradient_count = 62};
    struct ps_error err = {0};
    assert_int_equal(
        ps_plan(&real, &(struct ps_plan_setup){.cards = 2, .cards_per_node = 2, .in = link, .overlap = true},
                &r, &err),
        0);
    assert_int_equal(r.bucket_count, 3);
    near(r.buckets[0].bytes, 9461800, "B5, first");
    assert_int_equal(r.buckets[0].gradients, 5);
    near(r.buckets[0].bytes + r.buckets[1].bytes + r.buckets[2].bytes, 44695848, "all");
}

static void test_choice(void **state)
{
    (void)state;
    /* Small messages want few rounds, large ones the full bandwidth. */
    const struct ps_plan_setup setup = {
        .cards = 64, .cards_per_node = 1, .out = {50e-6, 1e9}, .overlap = true, .first_bucket = 1};
    const struct ps_plan_gradient two[] = {{0.1, 1000}, {0.2, 5e8}};
    const struct ps_plan_step s = {.backward_s = 0.3, .gradients = two, .gradient_count = 2};
    struct ps_plan_result r;
    assert_int_equal(ps_plan(&s, &setup, &r, NULL), 0);
    assert_int_equal(r.buckets[0].algorithm, PS_PLAN_TREE);
    assert_int_equal(r.buckets[1].algorithm, PS_PLAN_RING);
    assert_string_equal(ps_plan_algorithm_name(r.buckets[0].algorithm), "tree");
    r = plan((struct ps_plan_setup){.cards = 16, .in = {4e-6, 450e9}, .out = {5e-6, 50e9}, .overlap = true});
    assert_int_equal(r.buckets[1].algorithm, PS_PLAN_HIERARCHICAL);
    assert_int_equal(r.nodes, 2);
    r = plan((struct ps_plan_setup){.cards = 12, .in = {4e-6, 450e9}, .out = {5e-6, 50e9}, .overlap = true});
    assert_int_not_equal(r.buckets[1].algorithm, PS_PLAN_HIERARCHICAL); /* 8 and 4 */
}

static void test_copies(void **state)
{
    (void)state;
    /* 3 MiB in and, with all hidden, 3 MiB back at 1 GiB/s: 5.859375 ms in all. */
    struct ps_plan_result r = plan((struct ps_plan_setup){
        .cards = 2, .in = {0, 1e15}, .overlap = true, .copy_bytes_per_s = 1073741824.0});
    near(r.step_s, 0.060 + 0.005859375, "copies");
    r = plan((struct ps_plan_setup){.cards = 1, .overlap = true, .copy_bytes_per_s = 1});
    near(r.step_s, 0.060, "one card copies nothing");
}

static void test_refusals(void **state)
{
    (void)state;
    struct ps_plan_result r = {.cards = 77};
    struct ps_error err = {0};
    const struct ps_plan_setup good = {.cards = 2, .cards_per_node = 2, .in = {0, 1e9}, .overlap = true};
    struct ps_plan_step bad = step;
    bad.forward_s = NAN;
    assert_int_equal(ps_plan(&bad, &good, &r, &err), PS_INVALID_ARGUMENT);
    bad = step;
    bad.gradient_count = 0;
    assert_int_equal(ps_plan(&bad, &good, &r, &err), PS_INVALID_ARGUMENT);
    const struct ps_plan_gradient order[] = {{0.2, 1}, {0.1, 1}};
    bad = step;
    bad.gradients = order;
    assert_int_equal(ps_plan(&bad, &good, &r, &err), PS_INVALID_ARGUMENT);
    struct ps_plan_setup setup = good;
    setup.cards = 0;
    assert_int_equal(ps_plan(&step, &setup, &r, &err), PS_INVALID_ARGUMENT);
    setup = good;
    setup.in.bytes_per_s = 0;
    assert_int_equal(ps_plan(&step, &setup, &r, &err), PS_INVALID_ARGUMENT);
    setup = good;
    setup.cards = 3;
    setup.algorithm = PS_PLAN_HIERARCHICAL;
    setup.out = setup.in;
    assert_int_equal(ps_plan(&step, &setup, &r, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "same number"));
    static struct ps_plan_gradient many[PS_PLAN_BUCKETS_MAX + 1];
    for (size_t i = 0; i < PS_PLAN_BUCKETS_MAX + 1; i++)
        many[i] = (struct ps_plan_gradient){0.01, 1000};
    bad = step;
    bad.gradients = many;
    bad.gradient_count = PS_PLAN_BUCKETS_MAX + 1;
    setup = good;
    setup.first_bucket = setup.bucket = 1;
    assert_int_equal(ps_plan(&bad, &setup, &r, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(r.cards, 77);
}

static void test_presets(void **state)
{
    (void)state;
    assert_null(ps_plan_preset("carrier-pigeon"));
    near(ps_plan_preset("eth-10g")->link.bytes_per_s, 1.25e9, "10 Gbit/s");
    for (size_t i = 0; ps_plan_preset_at(i); i++) {
        assert_ptr_equal(ps_plan_preset(ps_plan_preset_at(i)->name), ps_plan_preset_at(i));
        assert_true(ps_plan_preset_at(i)->link.alpha_s > 0 && ps_plan_preset_at(i)->link.bytes_per_s > 1e8);
    }
    near(PS_PLAN_SAMPLE_EFFICIENCY, 0.1875, "the sample: 19 %");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formulas), cmocka_unit_test(test_overlap), cmocka_unit_test(test_buckets),
        cmocka_unit_test(test_choice),   cmocka_unit_test(test_copies),  cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_presets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
