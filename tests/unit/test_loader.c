/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/loader.h"

#include "trainer/data/augment.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COUNT = 23 };
static uint8_t pixels[COUNT * PS_IMAGE_VALUES], labels[COUNT];
static const struct ps_split split = {.count = COUNT, .pixels = pixels, .labels = labels};

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof pixels; i++)
        pixels[i] = (uint8_t)(i * 7 + i / 3072 * 31);
    for (int i = 0; i < COUNT; i++)
        labels[i] = (uint8_t)(i % 10);
    return 0;
}

static void test_batches(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_loader *loader;
    uint32_t order[COUNT];
    for (uint32_t i = 0; i < COUNT; i++)
        order[i] = COUNT - 1 - i;
    assert_int_equal(ps_loader_create(5, false, &loader, &err), 0);
    for (int drop = 0; drop < 2; drop++) {
        struct ps_loader_pass pass = {.split = &split,
                                      .indices = order,
                                      .count = COUNT,
                                      .batch = 5,
                                      .drop_last = drop,
                                      .resolution = 32,
                                      .epoch = 1};
        assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
        struct ps_loaded batch;
        size_t seen = 0;
        while (ps_loader_next(loader, &batch)) {
            assert_int_equal(batch.count, seen + 5 <= COUNT ? 5 : COUNT - seen);
            assert_int_equal(batch.rows, batch.count);
            for (size_t i = 0; i < (size_t)batch.count; i++) {
                uint32_t index = order[seen + i];
                assert_int_equal(batch.labels[i], labels[index]);
                assert_memory_equal((const uint8_t *)batch.images + i * PS_IMAGE_VALUES,
                                    pixels + index * PS_IMAGE_VALUES, PS_IMAGE_VALUES);
            }
            seen += (size_t)batch.count;
        }
        assert_int_equal(seen, drop ? 20 : COUNT);
        assert_int_equal(ps_loader_next(loader, &batch), 0);
    }
    ps_loader_free(loader);
}

static void test_padded(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_loader *loader;
    uint32_t order[COUNT];
    for (uint32_t i = 0; i < COUNT; i++)
        order[i] = i;
    assert_int_equal(ps_loader_create(8, false, &loader, &err), 0);
    struct ps_loader_pass pass = {
        .split = &split, .indices = order, .count = COUNT, .batch = 8, .pad = true, .resolution = 16};
    assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
    struct ps_loaded batch;
    int counted = 0, batches = 0;
    while (ps_loader_next(loader, &batch)) {
        assert_int_equal(batch.rows, 8);
        counted += batch.count;
        batches++;
        if (batch.count < 8)
            assert_memory_equal((const uint8_t *)batch.images + (size_t)7 * 3 * 256,
                                (const uint8_t *)batch.images + (size_t)(batch.count - 1) * 3 * 256, 3 * 256);
    }
    assert_int_equal(counted, COUNT);
    assert_int_equal(batches, 3);
    ps_loader_free(loader);
}

/* What a sample becomes depends on neither its place in the batch nor on the order. */
static void test_augmented_by_index(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_loader *loader;
    static uint8_t first[COUNT][3 * 24 * 24];
    assert_int_equal(ps_loader_create(7, false, &loader, &err), 0);
    for (int round = 0; round < 2; round++) {
        uint32_t order[COUNT];
        for (uint32_t i = 0; i < COUNT; i++)
            order[i] = round ? (i * 5 + 3) % COUNT : i;
        struct ps_loader_pass pass = {.split = &split,
                                      .indices = order,
                                      .count = COUNT,
                                      .batch = round ? 3 : 7,
                                      .augment = true,
                                      .seed = 4,
                                      .epoch = 9,
                                      .resolution = 24};
        assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
        struct ps_loaded batch;
        size_t seen = 0;
        while (ps_loader_next(loader, &batch))
            for (int i = 0; i < batch.count; i++) {
                const uint8_t *image = (const uint8_t *)batch.images + (size_t)i * sizeof first[0];
                if (round)
                    assert_memory_equal(first[order[seen]], image, sizeof first[0]);
                else
                    memcpy(first[order[seen]], image, sizeof first[0]);
                seen++;
            }
        assert_int_equal(seen, COUNT);
    }
    ps_loader_free(loader);
}

static void test_restart_and_bad_use(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_loader *loader;
    uint32_t order[COUNT] = {0};
    struct ps_loaded batch;
    assert_int_equal(ps_loader_create(0, false, &loader, &err), PS_RESOURCE_EXHAUSTED);
    assert_int_equal(ps_loader_create(4, false, &loader, &err), 0);
    struct ps_loader_pass pass = {
        .split = &split, .indices = order, .count = COUNT, .batch = 4, .resolution = 32};
    for (int i = 0; i < 50; i++) { /* given up in the middle */
        assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
        for (int k = 0; k < i % 4; k++)
            assert_int_equal(ps_loader_next(loader, &batch), 1);
    }
    pass.batch = 5;
    assert_int_equal(ps_loader_start(loader, &pass, &err), PS_INVALID_ARGUMENT);
    pass.batch = 4;
    pass.resolution = 33;
    assert_int_equal(ps_loader_start(loader, &pass, &err), PS_INVALID_ARGUMENT);
    pass.resolution = 32;
    order[3] = COUNT;
    assert_int_equal(ps_loader_start(loader, &pass, &err), PS_INTERNAL);
    ps_loader_free(loader);
    ps_loader_free(NULL);
}

/* Its only batch is under way when the next pass comes: nothing past its end is read. The pauses differ, so
 * that some passes are given up before their batch, some after it and some in the middle. */
static void test_short_pass_given_up(void **state)
{
    (void)state;
    enum { SHORT = 60 };
    struct ps_error err = {0};
    struct ps_loader *loader;
    uint32_t *order = calloc(SHORT, sizeof *order); /* on the heap, so that a sanitizer sees its end */
    struct ps_loaded batch;
    assert_non_null(order);
    assert_int_equal(ps_loader_create(64, false, &loader, &err), 0);
    const struct ps_loader_pass pass = {
        .split = &split, .indices = order, .count = SHORT, .batch = 64, .augment = true, .resolution = 24};
    for (int i = 0; i < 100; i++) {
        struct timespec pause = {.tv_nsec = i * 10000L};
        assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
        nanosleep(&pause, NULL);
    }
    assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
    assert_int_equal(ps_loader_next(loader, &batch), 1);
    assert_int_equal(batch.count, SHORT);
    assert_int_equal(ps_loader_next(loader, &batch), 0);
    ps_loader_free(loader);
    free(order);
}

static void test_floats(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_dataset *set;
    struct ps_loader *loader;
    assert_int_equal(ps_dataset_custom(3, &set, &err), 0);
    assert_int_equal(ps_loader_create(4, true, &loader, &err), 0);
    uint32_t order[4] = {4999, 0, 17, 3};
    struct ps_loader_pass pass = {
        .split = &set->train, .indices = order, .count = 4, .batch = 4, .resolution = 32};
    assert_int_equal(ps_loader_start(loader, &pass, &err), 0);
    struct ps_loaded batch;
    assert_int_equal(ps_loader_next(loader, &batch), 1);
    assert_true(batch.floats);
    for (size_t i = 0; i < 4; i++)
        assert_memory_equal((const float *)batch.images + i * PS_IMAGE_VALUES,
                            set->train.floats + order[i] * (size_t)PS_IMAGE_VALUES,
                            PS_IMAGE_VALUES * sizeof(float));
    pass.augment = true;
    assert_int_equal(ps_loader_start(loader, &pass, &err), PS_INVALID_ARGUMENT);
    ps_loader_free(loader);
    ps_dataset_free(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_padded),
        cmocka_unit_test(test_augmented_by_index),
        cmocka_unit_test(test_restart_and_bad_use),
        cmocka_unit_test(test_short_pass_given_up),
        cmocka_unit_test(test_floats),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
