/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/checkpoint/pth.h"

#include "services/base/fs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Python's own zip reader checks the archive's structure and every CRC, its pickletools the pickle; PyTorch
 * itself is asked in tests/integration/train_checkpoint.py. */
static void test_archive(void **state)
{
    (void)state;
    static const float weights[6] = {1, -2, 3.5f, 0, 1e-30f, -0.0f};
    static const int64_t counter = 7;
    const struct ps_tensor tensors[] = {
        {"conv.weight", PS_TENSOR_F32, 2, {2, 3}, sizeof weights, weights},
        {"bn.num_batches_tracked", PS_TENSOR_I64, 0, {0}, 8, &counter},
    };
    struct ps_error err = {0};
    char root[] = "/tmp/ps_test_pth.XXXXXX", command[512];
    assert_non_null(mkdtemp(root));
    char *path = ps_path_join(root, "x.pth");
    assert_int_equal(ps_pth_write(path, tensors, 2, &err), 0);

    char *data;
    size_t size;
    assert_int_equal(ps_read_file(path, 1 << 20, &data, &size, &err), 0);
    assert_memory_equal(data, "PK\x03\x04", 4);
    const char *found = memmem(data, size, weights, sizeof weights);
    assert_non_null(found);
    assert_int_equal((found - data) % 64, 0); /* storages are mapped: aligned */
    free(data);

    snprintf(
        command, sizeof command,
        "/usr/bin/python3 -c \"import zipfile, pickletools as p, io, sys; z = zipfile.ZipFile('%s'); "
        "assert z.testzip() is None; assert z.read('archive/version') == b'3\\n'; "
        "assert z.namelist() == ['archive/data.pkl', 'archive/data/0', 'archive/data/1', 'archive/version']; "
        "assert len(z.read('archive/data/0')) == 24; p.dis(z.read('archive/data.pkl'), io.StringIO())\"",
        path);
    if (system("/usr/bin/python3 -c 0 2>/dev/null") == 0)
        assert_int_equal(system(command), 0);
    else
        print_message("python3 is not here: the archive is not read back\n");

    struct ps_tensor other = {"x", PS_TENSOR_F64, 1, {1}, 8, &counter};
    assert_int_equal(ps_pth_write(path, &other, 1, &err), PS_UNIMPLEMENTED);
    free(path);
    path = ps_path_join(root, "not/there/x.pth");
    assert_true(ps_pth_write(path, tensors, 2, &err) < 0);
    free(path);
    snprintf(command, sizeof command, "rm -rf %s", root);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_archive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
