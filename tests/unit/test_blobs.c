/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/fs.h"
#include "services/sidecar/blobs.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ABC "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" /* FIPS 180-4's "abc" */

static char dir[64];
static struct ps_blobs *blobs;

static int setup(void **state)
{
    (void)state;
    struct ps_error err = {0};
    snprintf(dir, sizeof dir, "/tmp/ps_test_blobs.XXXXXX");
    assert_non_null(mkdtemp(dir));
    assert_int_equal(ps_blobs_open(dir, &blobs, &err), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    char command[128];
    ps_blobs_free(blobs);
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

static size_t temporaries(void)
{
    char path[96];
    snprintf(path, sizeof path, "%s/blobs/tmp", dir);
    DIR *folder = opendir(path);
    size_t count = 0;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count - 2;
}

static struct ps_blob_writer *begin(const char *sha256, uint64_t size)
{
    struct ps_blob_writer *writer;
    struct ps_error err = {0};
    assert_int_equal(ps_blob_writer_open(blobs, sha256, size, &writer, &err), 0);
    return writer;
}

static void test_round_trip(void **state)
{
    (void)state;
    struct ps_error err = {0};
    int fd;
    assert_int_equal(ps_blobs_read(blobs, ABC, 3, &fd, &err), PS_NOT_FOUND);
    for (int round = 0; round < 2; round++) { /* the second time the content is there already */
        struct ps_blob_writer *writer = begin(ABC, 3);
        assert_int_equal(ps_blob_writer_write(writer, "a", 1, &err), 0);
        assert_int_equal(ps_blob_writer_place(writer, &err), PS_INTERNAL); /* not sealed */
        assert_int_equal(ps_blob_writer_write(writer, "bc", 2, &err), 0);
        assert_int_equal(ps_blob_writer_seal(writer, &err), 0);
        if (!round)
            assert_int_equal(ps_blobs_read(blobs, ABC, 3, &fd, &err), PS_NOT_FOUND); /* not placed yet */
        assert_int_equal(ps_blob_writer_place(writer, &err), 0);
        ps_blob_writer_free(writer);
        assert_int_equal(temporaries(), 0);
    }
    char path[160], *data;
    size_t size;
    snprintf(path, sizeof path, "%s/blobs/sha256/%.2s/%s", dir, ABC, &ABC[2]);
    assert_int_equal(ps_read_file(path, 100, &data, &size, &err), 0);
    assert_true(size == 3 && memcmp(data, "abc", 3) == 0);
    free(data);
    assert_int_equal(ps_blobs_read(blobs, ABC, 3, &fd, &err), 0);
    assert_int_equal(ps_blobs_remove(blobs, ABC, &err), 0);
    char bytes[4];
    assert_int_equal(read(fd, bytes, 4), 3); /* who reads, reads on */
    close(fd);
    assert_int_equal(ps_blobs_read(blobs, ABC, 3, &fd, &err), PS_NOT_FOUND);
    assert_int_equal(ps_blobs_remove(blobs, ABC, &err), 0);
}

static void test_what_is_not_whole_leaves_nothing(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_blob_writer *writer;
    int fd;
    assert_int_equal(ps_blob_writer_open(blobs, "../../etc/passwd", 3, &writer, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_blobs_read(blobs, "..", 0, &fd, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_blobs_remove(blobs, "", &err), PS_INVALID_ARGUMENT);

    writer = begin(ABC, 3); /* too much */
    assert_int_equal(ps_blob_writer_write(writer, "abcd", 4, &err), PS_INVALID_ARGUMENT);
    ps_blob_writer_free(writer);
    writer = begin(ABC, 3); /* too little */
    assert_int_equal(ps_blob_writer_write(writer, "ab", 2, &err), 0);
    assert_int_equal(ps_blob_writer_seal(writer, &err), PS_INVALID_ARGUMENT);
    ps_blob_writer_free(writer);
    writer = begin(ABC, 3); /* something else */
    assert_int_equal(ps_blob_writer_write(writer, "abd", 3, &err), 0);
    assert_int_equal(ps_blob_writer_seal(writer, &err), PS_DATA_LOSS);
    assert_int_equal(ps_blob_writer_place(writer, &err), PS_INTERNAL);
    ps_blob_writer_free(writer);
    assert_null(ps_blob_writer_free(NULL));
    assert_int_equal(temporaries(), 0);
    assert_int_equal(ps_blobs_read(blobs, ABC, 3, &fd, &err), PS_NOT_FOUND);

    /* What a killed process leaves goes at the next start; what is placed stays. */
    writer = begin(ABC, 3);
    assert_int_equal(ps_blob_writer_write(writer, "abc", 3, &err), 0);
    assert_int_equal(ps_blob_writer_seal(writer, &err), 0);
    assert_int_equal(ps_blob_writer_place(writer, &err), 0);
    ps_blob_writer_free(writer);
    writer = begin(ABC, 3);
    assert_int_equal(temporaries(), 1);
    ps_blobs_free(blobs);
    assert_int_equal(ps_blobs_open(dir, &blobs, &err), 0);
    assert_int_equal(temporaries(), 0);
    ps_blob_writer_free(writer);
    assert_int_equal(ps_blobs_read(blobs, ABC, 3, &fd, &err), 0);
    close(fd);
    assert_int_equal(ps_blobs_read(blobs, ABC, 4, &fd, &err), PS_DATA_LOSS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_not_whole_leaves_nothing, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
