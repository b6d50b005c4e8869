/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/data/dataset.h"

#include "services/base/fs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[64];

static int set_up(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/ps_test_dataset.XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static void shell(const char *format)
{
    char command[1024];
    snprintf(command, sizeof command, "cd %s && %s", root, format);
    assert_int_equal(system(command), 0);
}

static void write_file(const char *name, const void *data, size_t size)
{
    struct ps_error err = {0};
    char *path = ps_path_join(root, name);
    assert_int_equal(ps_write_file_atomic(path, data, size, &err), 0);
    free(path);
}

/* File number f holds f + 1 records. */
static size_t make_batch(int f, uint8_t *out)
{
    for (int i = 0; i <= f; i++) {
        uint8_t *record = out + i * PS_CIFAR_RECORD;
        record[0] = (uint8_t)((f + i) % 10);
        for (int k = 1; k < PS_CIFAR_RECORD; k++)
            record[k] = (uint8_t)(k * (f + 3) + i * 17);
    }
    return (size_t)(f + 1) * PS_CIFAR_RECORD;
}

static void write_binary_set(const char *folder)
{
    static uint8_t data[6 * PS_CIFAR_RECORD];
    for (int f = 0; f < 6; f++) {
        char name[128];
        size_t size = make_batch(f, data);
        snprintf(name, sizeof name, f < 5 ? "%s/data_batch_%d.bin" : "%s/test_batch.bin", folder, f + 1);
        write_file(name, data, size);
    }
}

static struct ps_dataset *load(const char *name)
{
    struct ps_error err = {0};
    struct ps_dataset *set = NULL;
    char *path = ps_path_join(root, name);
    if (ps_dataset_load(path, &set, &err))
        fail_msg("%s", err.message);
    free(path);
    return set;
}

static void refused(const char *url, const char *word, const char *other)
{
    struct ps_error err = {0};
    struct ps_dataset *set = NULL;
    char *path = strstr(url, "://") ? strdup(url) : ps_path_join(root, url);
    assert_true(ps_dataset_load(path, &set, &err) < 0);
    assert_null(set);
    if (!strstr(err.message, word) || !strstr(err.message, other))
        fail_msg("\"%s\" does not say %s and %s", err.message, word, other);
    free(path);
}

static void check(const struct ps_dataset *set)
{
    static uint8_t data[6 * PS_CIFAR_RECORD];
    size_t at = 0;
    for (int f = 0; f < 6; f++) {
        make_batch(f, data);
        const struct ps_split *split = f < 5 ? &set->train : &set->test;
        at = f < 5 ? at : 0;
        for (int i = 0; i <= f; i++, at++) {
            assert_int_equal(split->labels[at], data[i * PS_CIFAR_RECORD]);
            assert_memory_equal(split->pixels + at * PS_IMAGE_VALUES, data + i * PS_CIFAR_RECORD + 1,
                                PS_IMAGE_VALUES);
        }
    }
    assert_int_equal(set->train.count, 15);
    assert_int_equal(set->test.count, 6);
    assert_int_equal(set->classes, 10);
}

static void test_all_forms(void **state)
{
    (void)state;
    shell("mkdir -p bin/cifar-10-batches-bin packed");
    write_binary_set("bin/cifar-10-batches-bin");
    shell("cd bin && tar -czf ../packed/cifar-10-binary.tar.gz cifar-10-batches-bin/test_batch.bin "
          "cifar-10-batches-bin/data_batch_[54321].bin"); /* whatever the order in the archive */
    shell("tar -C bin -czf packed/any-name.tar.gz ./cifar-10-batches-bin");
    /* the python version, written by Python itself in every protocol there is (skipped without it) */
    static const char convert[] =
        "import pickle, sys, os\n"
        "import numpy as np\n"
        "for protocol in (2, 3, 4, 5):\n"
        "    out = 'py%d/cifar-10-batches-py' % protocol\n"
        "    os.makedirs(out, exist_ok=True)\n"
        "    for n in ['data_batch_%d' % i for i in range(1, 6)] + ['test_batch']:\n"
        "        rows = np.fromfile('bin/cifar-10-batches-bin/' + n + '.bin', np.uint8).reshape(-1, 3073)\n"
        "        key = (lambda t: t.encode()) if protocol == 3 else (lambda t: t)\n"
        "        batch = {key('labels'): [int(v) for v in rows[:, 0]], key('data'): "
        "np.ascontiguousarray(rows[:, 1:]),\n"
        "                 key('batch_label'): 'x', key('filenames'): ['n%d' % i for i in range(len(rows))]}\n"
        "        pickle.dump(batch, open(out + '/' + n, 'wb'), protocol)\n";
    write_file("convert.py", convert, sizeof convert - 1);
    const char *const urls[] = {"bin", "bin/cifar-10-batches-bin", "packed", "packed/any-name.tar.gz",
                                "packed/cifar-10-binary.tar.gz"};
    char hash[33];
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        if (getenv("PS_TEST_NO_ARCHIVES") && strstr(urls[i], "packed"))
            continue;
        struct ps_dataset *set = load(urls[i]);
        check(set);
        if (i == 0)
            memcpy(hash, set->hash, sizeof hash);
        assert_string_equal(set->hash, hash);
        assert_int_equal(strlen(set->hash), 32);
        assert_non_null(strstr(set->name, "CIFAR-10 format, data hash "));
        ps_dataset_free(set);
    }
    char command[256];
    snprintf(command, sizeof command, "cd %s && /usr/bin/python3 -c 'import numpy' 2>/dev/null", root);
    if (system(command)) {
        print_message("python3 with numpy is not here: its own pickles are not tried\n");
        return;
    }
    shell("/usr/bin/python3 convert.py");
    const char *const pickled[] = {"py2", "py3", "py4", "py5/cifar-10-batches-py"};
    for (size_t i = 0; i < sizeof pickled / sizeof *pickled; i++) {
        struct ps_dataset *set = load(pickled[i]);
        check(set);
        assert_string_equal(set->hash, hash);
        ps_dataset_free(set);
    }
}

static void test_hash(void **state)
{
    (void)state;
    shell("rm -rf h && mkdir -p h");
    write_binary_set("h");
    struct ps_dataset *set = load("h");
    char hash[33];
    memcpy(hash, set->hash, sizeof hash);
    ps_dataset_free(set);
    shell(
        "mv h/data_batch_1.bin h/x && mv h/data_batch_4.bin h/data_batch_1.bin && mv h/x h/data_batch_4.bin");
    set = load("h");
    assert_string_equal(set->hash, hash); /* order of records */
    ps_dataset_free(set);
    shell("cp h/data_batch_1.bin h/x && printf '\\007' | dd of=h/data_batch_1.bin bs=1 conv=notrunc "
          "2>/dev/null");
    set = load("h");
    assert_string_not_equal(set->hash, hash); /* one label */
    ps_dataset_free(set);
    shell("mv h/x h/data_batch_1.bin && printf '\\377' | dd of=h/data_batch_1.bin bs=1 seek=5000 "
          "conv=notrunc 2>/dev/null");
    set = load("h");
    assert_string_not_equal(set->hash, hash); /* one pixel */
    ps_dataset_free(set);
    write_binary_set("h");
    shell("cp h/test_batch.bin h/x && cat h/data_batch_1.bin >> h/test_batch.bin");
    set = load("h");
    assert_string_not_equal(set->hash, hash); /* one more record */
    ps_dataset_free(set);
    shell("mv h/x h/test_batch.bin && printf 'my own images\\nmore\\n' > h/dataset-name.txt");
    set = load("h");
    assert_string_equal(set->name, "my own images");
    ps_dataset_free(set);
    shell("printf 'es\\033[1mc\\n' > h/dataset-name.txt");
    set = load("h");
    assert_non_null(strstr(set->name, "CIFAR-10 format, data hash "));
    ps_dataset_free(set);
}

static void test_refused(void **state)
{
    (void)state;
    refused("obs://bucket/data", "obs://", "download");
    refused("s3://bucket/data", "s3://", "download");
    refused("not-there", "not-there", "No such file");
    shell("rm -rf e && mkdir -p e/cifar-10-batches-bin");
    refused("e", "data_batch_1.bin", "No such file");
    shell("rmdir e/cifar-10-batches-bin");
    refused("e", "cifar-10-batches-py", "none of");
    write_binary_set("e");
    shell("rm e/data_batch_3.bin");
    refused("e", "data_batch_3.bin", "No such file");
    shell(": > e/data_batch_3.bin");
    refused("e", "data_batch_3.bin", "empty");
    shell("head -c 5000 e/data_batch_2.bin > e/data_batch_3.bin");
    refused("e", "data_batch_3.bin", "record 1");
    write_binary_set("e");
    shell("printf '\\012' | dd of=e/test_batch.bin bs=1 seek=6146 conv=notrunc 2>/dev/null");
    refused("e", "test_batch.bin, record 2", "label 10");
    shell("mkdir -p e2/cifar-10-batches-py && for i in data_batch_1 data_batch_2 data_batch_3 data_batch_4 "
          "data_batch_5 "
          "test_batch; do printf 'cposix\\nsystem\\n(S\"id\"\\ntR.' > e2/cifar-10-batches-py/$i; done");
    refused("e2", "data_batch_1", "posix.system");
}

static void test_refused_archives(void **state)
{
    (void)state;
    shell("rm -rf a && mkdir -p a/cifar-10-batches-bin a/other");
    shell("echo hello > a/other/file && tar -C a -czf a/none.tar.gz other && head -c 3000 /dev/zero > "
          "a/zero.tar.gz");
    write_binary_set("a/cifar-10-batches-bin");
    shell(
        "tar -C a -czf a/whole.tar.gz cifar-10-batches-bin && head -c $(($(stat -c %s a/whole.tar.gz) / 2)) "
        "a/whole.tar.gz > a/half.tar.gz");
    shell("tar -C a --exclude data_batch_5.bin -czf a/missing.tar.gz cifar-10-batches-bin");
    shell("tar -C a -cf a/twice.tar cifar-10-batches-bin && tar -C a -rf a/twice.tar cifar-10-batches-bin && "
          "gzip a/twice.tar");
    refused("a/none.tar.gz", "none.tar.gz", "neither");
    refused("a/zero.tar.gz", "zero.tar.gz", "");
    refused("a/half.tar.gz", "half.tar.gz", "truncated");
    refused("a/missing.tar.gz", "data_batch_5.bin", "holds no");
    refused("a/twice.tar.gz", ".bin", "twice");
}

static void test_custom(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_dataset *set, *again;
    assert_int_equal(ps_dataset_custom(7, &set, &err), 0);
    assert_int_equal(ps_dataset_custom(7, &again, &err), 0);
    assert_string_equal(set->hash, again->hash);
    ps_dataset_free(again);
    assert_int_equal(ps_dataset_custom(8, &again, &err), 0);
    assert_string_not_equal(set->hash, again->hash);
    ps_dataset_free(again);
    assert_int_equal(set->train.count, 5000);
    assert_int_equal(set->test.count, 1000);
    assert_int_equal(set->classes, 10);
    const struct ps_split *splits[] = {&set->train, &set->test};
    for (int s = 0; s < 2; s++) {
        size_t ones = 0, early = 0;
        for (size_t i = 0; i < splits[s]->count; i++) {
            assert_true(splits[s]->labels[i] < 2);
            ones += splits[s]->labels[i];
            early += i < 100 && splits[s]->labels[i];
        }
        assert_int_equal(ones, splits[s]->count / 2);
        assert_true(early > 20 && early < 80); /* shuffled */
    }
    double sum = 0, squares = 0;
    size_t n = set->train.count * PS_IMAGE_VALUES;
    for (size_t i = 0; i < n; i++) {
        sum += set->train.floats[i];
        squares += (double)set->train.floats[i] * set->train.floats[i];
    }
    assert_true(fabs(sum / (double)n) < 0.002);
    assert_true(fabs(squares / (double)n - 1) < 0.002);
    ps_dataset_free(set);
    ps_dataset_free(NULL);
}

/* The real images, where they are. */
static void test_real(void **state)
{
    (void)state;
    const char *dir = getenv("CIFAR10_DIR");
    if (!dir || !*dir) {
        print_message("CIFAR10_DIR is not set: real images are not tried\n");
        skip();
    }
    struct ps_error err = {0};
    struct ps_dataset *set;
    if (ps_dataset_load(dir, &set, &err))
        fail_msg("%s", err.message);
    assert_true(set->train.count >= 5 && set->test.count >= 1);
    /* The original images are named by their hash, the re-encoded ones never without saying so. */
    assert_true(strcmp(set->name, "CIFAR-10, JPEG re-encoded") == 0 ||
                strncmp(set->name, "CIFAR-10 format, data hash", 26) == 0);
    char hash[33];
    memcpy(hash, set->hash, sizeof hash);
    ps_dataset_free(set);
    char *bin = ps_path_join(dir, "cifar-10-batches-bin");
    if (access(bin, R_OK) == 0) { /* both forms of the same images agree */
        assert_int_equal(ps_dataset_load(bin, &set, &err), 0);
        assert_string_equal(set->hash, hash);
        ps_dataset_free(set);
    }
    free(bin);
}

static void test_limit(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_dataset *set;
    assert_int_equal(ps_dataset_custom(7, &set, &err), 0);
    char whole[33];
    memcpy(whole, set->hash, sizeof whole);
    assert_int_equal(ps_dataset_limit(set, 0, 0, &err), 0);
    assert_string_equal(set->hash, whole);
    assert_string_equal(set->name, "random images");
    assert_int_equal(ps_dataset_limit(set, 5001, 0, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "--train-images 5001"));
    assert_int_equal(ps_dataset_limit(set, 100, 0, &err), 0);
    assert_int_equal(set->train.count, 100);
    assert_int_equal(set->test.count, 1000);
    assert_string_not_equal(set->hash, whole);
    assert_string_equal(set->name, "random images (100 of 5000 + 1000 of 1000 images)");
    ps_dataset_free(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_forms), cmocka_unit_test(test_hash),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_refused_archives),
        cmocka_unit_test(test_custom),    cmocka_unit_test(test_limit),
        cmocka_unit_test(test_real),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
