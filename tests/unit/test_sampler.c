/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/sampler.h"

#include <stdlib.h>
#include <string.h>

/* torch.randperm(n, generator=torch.Generator().manual_seed(seed)), PyTorch 1.13 */
static void test_golden_permutations(void **state)
{
    (void)state;
    uint32_t order[13];
    static const uint32_t ten[] = {4, 1, 7, 5, 3, 9, 0, 8, 6, 2}, seven[] = {5, 3, 4, 6, 0, 2, 1},
                          thirteen[] = {6, 5, 3, 9, 8, 4, 12, 0, 11, 10, 1, 7, 2};
    ps_randperm(0, order, 10);
    assert_memory_equal(order, ten, sizeof ten);
    ps_randperm(3, order, 7);
    assert_memory_equal(order, seven, sizeof seven);
    ps_randperm(7, order, 13);
    assert_memory_equal(order, thirteen, sizeof thirteen);
    ps_randperm(1, order, 1);
    assert_int_equal(order[0], 0);

    uint32_t *full = malloc(50000 * sizeof *full);
    assert_non_null(full);
    static const struct {
        uint32_t begin[8], end[4];
        int end_known;
    } golden[] = {
        {{36044, 49165, 37807, 11341, 6091, 16904, 36293, 28026}, {0}, 0},
        {{45845, 11799, 43880, 43701, 41303, 45348, 14335, 47144}, {28247, 37038, 8785, 8475}, 1},
        {{33848, 37386, 6757, 27616, 21238, 29069, 19836, 23037}, {0}, 0},
    };
    for (uint64_t seed = 0; seed < 3; seed++) {
        ps_randperm(seed, full, 50000);
        assert_memory_equal(full, golden[seed].begin, sizeof golden[seed].begin);
        if (golden[seed].end_known)
            assert_memory_equal(full + 49996, golden[seed].end, sizeof golden[seed].end);
    }
    free(full);
}

/* DistributedSampler(range(n), num_replicas=w, rank=r, seed=5, drop_last=d) after set_epoch(2), PyTorch 1.13
 */
static void test_golden_shards(void **state)
{
    (void)state;
    static const struct {
        size_t count, length;
        int world, rank;
        bool drop;
        uint32_t indices[4];
    } golden[] = {
        {13, 4, 4, 0, false, {6, 8, 11, 2}},
        {13, 4, 4, 1, false, {5, 4, 10, 6}},
        {13, 4, 4, 2, false, {3, 12, 1, 5}},
        {13, 4, 4, 3, false, {9, 0, 7, 3}},
        {13, 3, 4, 0, true, {6, 8, 11}},
        {13, 3, 4, 1, true, {5, 4, 10}},
        {13, 3, 4, 2, true, {3, 12, 1}},
        {13, 3, 4, 3, true, {9, 0, 7}},
        {2, 1, 5, 0, false, {1}},
        {2, 1, 5, 1, false, {0}},
        {2, 1, 5, 2, false, {1}},
        {2, 1, 5, 3, false, {0}},
        {2, 1, 5, 4, false, {1}},
    };
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        struct ps_sampler s = {.count = golden[i].count,
                               .rank = golden[i].rank,
                               .world_size = golden[i].world,
                               .drop_last = golden[i].drop,
                               .shuffle = true,
                               .seed = 5};
        struct ps_error err = {0};
        uint32_t indices[4];
        assert_int_equal(ps_sampler_length(&s), golden[i].length);
        assert_int_equal(ps_sampler_indices(&s, 2, indices, &err), 0);
        assert_memory_equal(indices, golden[i].indices, golden[i].length * sizeof *indices);
    }
}

/* All ranks together see each sample once, but for the fill-up; epochs differ; the same call gives the same.
 */
static void test_properties(void **state)
{
    (void)state;
    static const struct {
        size_t count;
        int world;
    } cases[] = {{1001, 3}, {1000, 4}, {50, 7}, {3, 5}, {1, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int drop = 0; drop < 2; drop++) {
            int seen[1001] = {0};
            size_t total = 0;
            struct ps_error err = {0};
            for (int r = 0; r < cases[c].world; r++) {
                struct ps_sampler s = {.count = cases[c].count,
                                       .rank = r,
                                       .world_size = cases[c].world,
                                       .drop_last = drop,
                                       .shuffle = true,
                                       .seed = 1};
                size_t n = ps_sampler_length(&s);
                uint32_t *a = malloc((n + 1) * sizeof *a), *b = malloc((n + 1) * sizeof *b);
                assert_non_null(a);
                assert_non_null(b);
                assert_int_equal(ps_sampler_indices(&s, 1, a, &err), 0);
                assert_int_equal(ps_sampler_indices(&s, 1, b, &err), 0);
                assert_memory_equal(a, b, n * sizeof *a);
                assert_int_equal(ps_sampler_indices(&s, 2, b, &err), 0);
                if (n >= 7)
                    assert_memory_not_equal(a, b, n * sizeof *a);
                for (size_t i = 0; i < n; i++)
                    seen[a[i]]++;
                total += n;
                free(a);
                free(b);
            }
            size_t once = 0, more = 0;
            for (size_t i = 0; i < cases[c].count; i++) {
                once += seen[i] == 1;
                more += seen[i] > 1;
            }
            assert_int_equal(total % (size_t)cases[c].world, 0);
            if (drop) {
                assert_true(total <= cases[c].count && cases[c].count - total < (size_t)cases[c].world);
                assert_int_equal(once, total);
            } else {
                assert_int_equal(once + more, cases[c].count);
                assert_true(total - cases[c].count < (size_t)cases[c].world);
            }
        }
}

static void test_plain_order_and_bad_samplers(void **state)
{
    (void)state;
    struct ps_error err = {0};
    uint32_t indices[4];
    struct ps_sampler s = {.count = 7, .rank = 1, .world_size = 2};
    assert_int_equal(ps_sampler_indices(&s, 1, indices, &err), 0);
    assert_memory_equal(indices, ((uint32_t[]){1, 3, 5, 0}), sizeof indices);
    s.rank = 2;
    assert_int_equal(ps_sampler_indices(&s, 1, indices, &err), PS_INVALID_ARGUMENT);
    s = (struct ps_sampler){.count = 0, .world_size = 1};
    assert_int_equal(ps_sampler_indices(&s, 1, indices, &err), PS_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_permutations),
        cmocka_unit_test(test_golden_shards),
        cmocka_unit_test(test_properties),
        cmocka_unit_test(test_plain_order_and_bad_samplers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
