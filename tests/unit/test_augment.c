/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/augment.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void test_draw(void **state)
{
    (void)state;
    int dx[9] = {0}, dy[9] = {0}, flips = 0, same = 0;
    for (uint32_t i = 0; i < 9000; i++) {
        struct ps_shift a = ps_augment_draw(1, 3, i), b = ps_augment_draw(1, 3, i),
                        c = ps_augment_draw(1, 4, i);
        assert_true(a.dx == b.dx && a.dy == b.dy && a.flip == b.flip);
        same += a.dx == c.dx && a.dy == c.dy && a.flip == c.flip;
        assert_true(a.dx >= -4 && a.dx <= 4 && a.dy >= -4 && a.dy <= 4);
        dx[a.dx + 4]++;
        dy[a.dy + 4]++;
        flips += a.flip;
    }
    for (int k = 0; k < 9; k++) { /* 1000 expected, standard deviation 30 */
        assert_true(abs(dx[k] - 1000) < 150);
        assert_true(abs(dy[k] - 1000) < 150);
    }
    assert_true(abs(flips - 4500) < 240);
    assert_true(same < 150); /* 9000 / 162 = 56 expected */
}

static void test_apply(void **state)
{
    (void)state;
    static uint8_t in[PS_IMAGE_VALUES], out[PS_IMAGE_VALUES];
    for (int i = 0; i < PS_IMAGE_VALUES; i++)
        in[i] = (uint8_t)(i * 13 + i / 32);
    ps_augment_apply((struct ps_shift){0}, in, out);
    assert_memory_equal(in, out, sizeof in);
    for (int flip = 0; flip < 2; flip++)
        for (int dy = -4; dy <= 4; dy += 4)
            for (int dx = -4; dx <= 4; dx++) {
                ps_augment_apply((struct ps_shift){dx, dy, flip}, in, out);
                for (int c = 0; c < 3; c++)
                    for (int y = 0; y < 32; y++)
                        for (int x = 0; x < 32; x++) {
                            int sx = (flip ? 31 - x : x) + dx, sy = y + dy;
                            sx = sx < 0 ? -sx : sx > 31 ? 62 - sx : sx;
                            sy = sy < 0 ? -sy : sy > 31 ? 62 - sy : sy;
                            assert_int_equal(out[c * 1024 + y * 32 + x], in[c * 1024 + sy * 32 + sx]);
                        }
            }
}

/* torch.nn.functional.interpolate(mode="bilinear", antialias=True), PyTorch 1.13, of rows x -> 7 x^2 mod 251
 */
static void test_resize_golden(void **state)
{
    (void)state;
    static const struct {
        int resolution;
        double row[24];
    } golden[] = {
        {8, {38.25, 97.66, 117.62, 94.91, 29.5, 86.12, 131.44, 125.93}},
        {16,
         {7.0, 49.0, 115.62, 81.38, 134.5, 118.12, 95.0, 96.5, 28.5, 16.5, 60.5, 129.12, 96.88, 152.0, 137.62,
          113.14}},
        {20, {2.86,  29.04, 88.67, 118.22, 71.84, 136.88, 144.26, 60.62,  130.52, 82.2,
              31.88, 12.04, 29.17, 81.3,   145.2, 69.88,  162.26, 151.17, 110.0,  129.0}},
        {24, {2.1,   17.5, 57.91, 124.73, 88.0,  76.73,  151.45, 131.5, 114.18, 59.91,  148.0, 79.0,
              32.64, 12.0, 16.82, 46.82,  100.0, 155.82, 56.82,  161.0, 130.91, 176.73, 69.5,  148.2}},
    };
    static uint8_t in[PS_IMAGE_VALUES], out[PS_IMAGE_VALUES];
    for (int i = 0; i < PS_IMAGE_VALUES; i++)
        in[i] = (uint8_t)((i % 32) * (i % 32) * 7 % 251);
    for (size_t g = 0; g < sizeof golden / sizeof *golden; g++) {
        struct ps_resize resize;
        struct ps_error err = {0};
        int r = golden[g].resolution;
        assert_int_equal(ps_resize_prepare(r, &resize, &err), 0);
        ps_resize_apply(&resize, in, out);
        for (int c = 0; c < 3; c++)
            for (int y = 0; y < r; y++)
                for (int x = 0; x < r; x++)
                    if (fabs(out[(c * r + y) * r + x] - golden[g].row[x]) > 0.55)
                        fail_msg("%d pixels: %d at %d, expected %g", r, out[(c * r + y) * r + x], x,
                                 golden[g].row[x]);
        for (int i = 0; i < PS_IMAGE_VALUES; i++) /* rows and columns are treated alike */
            in[i] = (uint8_t)((i % 1024 / 32) * (i % 1024 / 32) * 7 % 251);
        ps_resize_apply(&resize, in, out);
        for (int y = 0; y < r; y++)
            assert_true(fabs(out[y * r + y % 5] - golden[g].row[y]) <= 0.55);
        for (int i = 0; i < PS_IMAGE_VALUES; i++)
            in[i] = (uint8_t)((i % 32) * (i % 32) * 7 % 251);
    }
}

static void test_resize_flat(void **state)
{
    (void)state;
    static uint8_t in[PS_IMAGE_VALUES], out[PS_IMAGE_VALUES];
    struct ps_error err = {0};
    struct ps_resize resize;
    for (int r = PS_RESOLUTION_MIN; r <= PS_RESOLUTION_MAX; r++) {
        assert_int_equal(ps_resize_prepare(r, &resize, &err), 0);
        for (int v = 0; v < 256; v += 51) {
            memset(in, v, sizeof in);
            ps_resize_apply(&resize, in, out);
            for (int i = 0; i < 3 * r * r; i++)
                assert_int_equal(out[i], v);
        }
    }
    assert_int_equal(ps_resize_prepare(7, &resize, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_resize_prepare(33, &resize, &err), PS_INVALID_ARGUMENT);
}

static void test_schedule(void **state)
{
    (void)state;
    struct ps_resolution_schedule s;
    struct ps_error err = {0};
    assert_int_equal(ps_resolution_parse("16:2,24:2", &s, &err), 0);
    static const int expected[] = {16, 16, 24, 24, 24, 24};
    for (int e = 1; e <= 6; e++)
        assert_int_equal(ps_resolution_at(&s, e), expected[e - 1]);
    assert_int_equal(ps_resolution_largest(&s, 2), 16);
    assert_int_equal(ps_resolution_largest(&s, 3), 24);
    assert_int_equal(ps_resolution_parse("32", &s, &err), 0);
    assert_int_equal(ps_resolution_at(&s, 1), 32);
    assert_int_equal(ps_resolution_at(&s, 1000), 32);
    assert_int_equal(ps_resolution_parse("16:1,32", &s, &err), 0);
    assert_int_equal(ps_resolution_at(&s, 1), 16);
    assert_int_equal(ps_resolution_at(&s, 2), 32);
    static const char *const bad[] = {"",
                                      "x",
                                      "16:",
                                      "16:0",
                                      "7",
                                      "33",
                                      "16,24",
                                      "16:2,",
                                      ",16",
                                      "16:2;24:2",
                                      "16:-1",
                                      "16:2:3",
                                      "9999999999999999999999999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(ps_resolution_parse(bad[i], &s, &err), PS_INVALID_ARGUMENT);
    char many[512] = "";
    for (int i = 0; i < 40; i++)
        strcat(many, "16:1,");
    strcat(many, "16");
    assert_int_equal(ps_resolution_parse(many, &s, &err), PS_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draw),          cmocka_unit_test(test_apply),
        cmocka_unit_test(test_resize_golden), cmocka_unit_test(test_resize_flat),
        cmocka_unit_test(test_schedule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
