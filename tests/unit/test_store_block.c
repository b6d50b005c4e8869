/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "db/store_block.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct ps_buf pack(const struct ps_block_point *points, size_t count)
{
    struct ps_buf out = PS_BUF_INIT(1 << 24);
    struct ps_error err = {0};
    assert_int_equal(ps_block_pack(points, count, &out, &err), 0);
    return out;
}

static void round_trip(const struct ps_block_point *points, size_t count)
{
    struct ps_buf out = pack(points, count);
    struct ps_error err = {0};
    size_t n = 0;
    assert_int_equal(ps_block_count(out.data, out.size, &n, &err), 0);
    assert_int_equal(n, count);
    struct ps_block_point *back = calloc(count + 1, sizeof *back);
    assert_int_equal(ps_block_unpack(out.data, out.size, back, count, &err), 0);
    assert_memory_equal(back, points, count * sizeof *back);
    free(back);
    ps_buf_done(&out);
}

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void test_round_trips(void **state)
{
    (void)state;
    static struct ps_block_point points[1000];
    uint64_t random = 88172645463325252u;
    round_trip(points, 0);
    round_trip(points, 1);
    round_trip(points, 1000); /* all zero */
    for (size_t i = 0; i < 1000; i++)
        points[i] =
            (struct ps_block_point){next(&random), next(&random), next(&random), (int64_t)next(&random)};
    round_trip(points, 1000); /* nothing fits the scheme, everything comes back */
    static const uint64_t odd[] = {
        0, 1, UINT64_MAX, INT64_MAX, UINT64_C(1) << 63, UINT64_C(0x7ff8000000000001)};
    for (size_t i = 0; i < 1000; i++)
        points[i] =
            (struct ps_block_point){odd[i % 6], odd[i / 6 % 6], odd[i / 36 % 6], (int64_t)odd[(i * 7) % 6]};
    round_trip(points, 1000);
}

static void test_size_of_a_usual_series(void **state)
{
    (void)state;
    static struct ps_block_point points[512];
    for (size_t i = 0; i < 512; i++) {
        /* A loss computed in float, one point a step, ten steps a batch, about 0.25 s a step. */
        double loss = (double)(float)(2.3 * exp(-(double)i / 300) + 0.1 * sin((double)i * 12.9898));
        points[i] = (struct ps_block_point){
            .step = 1000 + i, .seq = 100 + i / 10, .elapsed_us = (int64_t)(250000 * i + i * 7919 % 3000)};
        memcpy(&points[i].value_bits, &loss, 8);
    }
    struct ps_buf out = pack(points, 512);
    assert_true(out.size <= 12 * 512);
    ps_buf_done(&out);
    round_trip(points, 512);
}

static void test_damaged_blocks_are_refused(void **state)
{
    (void)state;
    static struct ps_block_point points[50], back[50];
    uint64_t random = 12345;
    for (size_t i = 0; i < 50; i++)
        points[i] = (struct ps_block_point){i, i / 5, next(&random), (int64_t)i * 1000};
    struct ps_buf out = pack(points, 50);
    struct ps_error err = {0};
    size_t n;
    for (size_t size = 0; size < out.size; size++) { /* every cut */
        char *copy = malloc(size + 1);               /* so that ASan sees a read past the end */
        memcpy(copy, out.data, size);
        if (ps_block_count(copy, size, &n, &err) == 0)
            assert_int_equal(ps_block_unpack(copy, size, back, 50, &err), PS_DATA_LOSS);
        free(copy);
    }
    for (size_t at = 0; at < out.size; at++) /* every byte changed: an answer or a refusal, never a crash */
        for (int flip = 1; flip < 256; flip *= 2) {
            out.data[at] ^= (char)flip;
            if (ps_block_count(out.data, out.size, &n, &err) == 0 && n == 50) {
                int code = ps_block_unpack(out.data, out.size, back, 50, &err);
                assert_true(code == 0 || code == PS_DATA_LOSS);
            }
            out.data[at] ^= (char)flip;
        }
    static const unsigned char huge[] = {0xff, 0xff, 0xff, 0x7f, 0};
    assert_int_equal(ps_block_count(huge, sizeof huge, &n, &err), PS_DATA_LOSS);
    ps_buf_done(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_size_of_a_usual_series),
        cmocka_unit_test(test_damaged_blocks_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
