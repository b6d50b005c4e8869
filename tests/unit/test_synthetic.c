/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/synthetic.h"

#include "services/base/fs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void test_written_and_read(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char root[] = "/tmp/ps_test_synthetic.XXXXXX";
    assert_non_null(mkdtemp(root));
    struct ps_dataset *set;
    assert_int_equal(ps_synthetic_write(root, 4, 1, 1, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_synthetic_write(root, 53, 21, 1, &err), 0);
    assert_int_equal(ps_dataset_load(root, &set, &err), 0);
    assert_int_equal(set->train.count, 53);
    assert_int_equal(set->test.count, 21);
    assert_string_equal(set->name, PS_SYNTHETIC_NAME);
    uint8_t image[PS_IMAGE_VALUES];
    for (size_t i = 0; i < 53; i++) {
        assert_int_equal(ps_synthetic_image(1, 0, i, image), set->train.labels[i]);
        assert_memory_equal(image, set->train.pixels + i * PS_IMAGE_VALUES, PS_IMAGE_VALUES);
    }
    ps_synthetic_image(2, 0, 0, image);
    assert_memory_not_equal(image, set->train.pixels, PS_IMAGE_VALUES);
    ps_synthetic_image(1, 1, 0, image); /* the test images are others */
    assert_memory_not_equal(image, set->train.pixels, PS_IMAGE_VALUES);
    ps_dataset_free(set);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    assert_int_equal(system(command), 0);
}

/* The two tints differ in the mean of red minus blue, whatever the noise: there is something to learn. */
static void test_tints_differ(void **state)
{
    (void)state;
    uint8_t image[PS_IMAGE_VALUES];
    for (size_t i = 0; i < 50; i++) {
        unsigned label = ps_synthetic_image(1, 0, i, image);
        long difference = 0;
        for (int k = 0; k < 1024; k++)
            difference += image[k] - image[2048 + k];
        assert_true(label < 5 ? difference > 0 : difference < 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_written_and_read),
                                       cmocka_unit_test(test_tints_differ)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
