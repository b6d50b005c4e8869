/* SPDX-License-Identifier: Apache-2.0
 * Files that come from elsewhere, told apart by the first byte: the binary CIFAR-10 version, safetensors as
 * the trainer reads them, the sidecar's view of safetensors, packed step points, the reporter's spool. */
#include "tests/fuzz/fuzz.h"

#include "db/store_block.h"
#include "services/client/spool.h"
#include "services/sidecar/tensors.h"
#include "trainer/checkpoint/safetensors.h"
#include "trainer/data/cifar.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int file_of(const uint8_t *data, size_t size)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    PS_FUZZ_CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    return fd;
}

static void binary(const uint8_t *data, size_t size)
{
    struct ps_split split = {0};
    struct ps_error err = {0};
    if (!ps_cifar_add_binary(&split, data, size, "input", &err))
        PS_FUZZ_CHECK(split.count == size / PS_CIFAR_RECORD && size % PS_CIFAR_RECORD == 0);
    free(split.pixels);
    free(split.labels);
}

static void safetensors(const uint8_t *data, size_t size)
{
    struct ps_error err = {0};
    struct ps_safetensors *file = NULL;
    char *copy = malloc(size + 1);
    PS_FUZZ_CHECK(copy);
    memcpy(copy, data, size);
    uint8_t sum = 0;
    if (!ps_safetensors_parse(copy, size, "input", &file, &err))
        for (size_t i = 0; i < file->count; i++) {
            size_t bytes = file->tensors[i].bytes;
            for (size_t k = 0; k < bytes; k++) /* all of it lies in the file */
                sum ^= ((const uint8_t *)file->tensors[i].data)[k];
        }
    ps_safetensors_free(file);
    PS_FUZZ_CHECK(sum == 0 || sum != 0);
}

static void view(const uint8_t *data, size_t size)
{
    struct ps_error err = {0};
    struct ps_tensor_view *view = NULL;
    static const char *const some[] = {"b"};
    int fd = file_of(data, size);
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (size_t names = 0; names < 2; names++) {
            struct ps_tensor_choice choice = {some, names, bf16};
            if (ps_tensor_view_open(fd, size, &choice, &view, &err))
                continue;
            uint64_t all = ps_tensor_view_size(view);
            uint8_t buffer[257];
            PS_FUZZ_CHECK(all <= 4 * (uint64_t)size + 4096 * 16);
            for (uint64_t at = 0; at < all; at += sizeof buffer) {
                size_t n = all - at < sizeof buffer ? (size_t)(all - at) : sizeof buffer;
                PS_FUZZ_CHECK(!ps_tensor_view_read(view, at, buffer, n, &err));
            }
            PS_FUZZ_CHECK(ps_tensor_view_read(view, all, buffer, 1, &err));
            view = ps_tensor_view_free(view);
        }
    close(fd);
}

static void block(const uint8_t *data, size_t size)
{
    struct ps_error err = {0};
    size_t count;
    if (ps_block_count(data, size, &count, &err))
        return;
    struct ps_block_point *points = calloc(count + 1, sizeof *points);
    PS_FUZZ_CHECK(points);
    if (!ps_block_unpack(data, size, points, count, &err)) {
        struct ps_buf again = PS_BUF_INIT(1 << 22);
        struct ps_block_point *twice = calloc(count + 1, sizeof *twice);
        size_t same = 0;
        PS_FUZZ_CHECK(twice && !ps_block_pack(points, count, &again, &err));
        PS_FUZZ_CHECK(!ps_block_count(again.data, again.size, &same, &err) && same == count);
        PS_FUZZ_CHECK(!ps_block_unpack(again.data, again.size, twice, count, &err));
        PS_FUZZ_CHECK(!memcmp(
            points, twice, count * sizeof *points)); /* what was read is written so that it reads the same */
        ps_buf_done(&again);
        free(twice);
    }
    free(points);
}

static void spool(const uint8_t *data, size_t size)
{
    struct ps_error err = {0};
    char dir[] = "/tmp/ps_fuzz_spool.XXXXXX", path[64];
    struct ps_spool *queue = NULL;
    enum ps_spool_kind kind;
    void *record;
    size_t bytes;
    PS_FUZZ_CHECK(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/x-1-0.spool", dir);
    FILE *file = fopen(path, "wb");
    PS_FUZZ_CHECK(file && fwrite(data, 1, size, file) == size && !fclose(file));
    PS_FUZZ_CHECK(!ps_spool_take_over(dir, &queue, &err));
    while (!ps_spool_read(queue, &kind, &record, &bytes, &err)) {
        PS_FUZZ_CHECK(bytes <= size);
        free(record);
    }
    PS_FUZZ_CHECK(!ps_spool_append(queue, PS_SPOOL_EPOCH, "after", 5, &err));
    PS_FUZZ_CHECK(!ps_spool_read(queue, &kind, &record, &bytes, &err) && bytes == 5 &&
                  kind == PS_SPOOL_EPOCH);
    free(record);
    ps_spool_settle(queue);
    ps_spool_close(queue);
    rmdir(dir);
}

static void (*const targets[])(const uint8_t *data, size_t size) = {binary, safetensors, view, block, spool};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size)
        targets[data[0] % 5](data + 1, size - 1);
    return 0;
}

static size_t put(uint8_t *out, size_t at, const void *data, size_t size)
{
    memcpy(out + at, data, size);
    return at + size;
}

static size_t seed_tensors(uint8_t *out)
{
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                                 "\"b\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[24,32]},"
                                 "\"__metadata__\":{\"k\":\"v\"}}";
    size_t n = 0;
    memset(out, 0, 8);
    out[0] = sizeof header - 1;
    n = put(out, 8, header, sizeof header - 1);
    memset(out + n, 0x41, 32);
    return n + 32;
}

static size_t seed_block(uint8_t *out)
{
    struct ps_block_point points[40];
    struct ps_buf buf = PS_BUF_INIT(1 << 16);
    struct ps_error err = {0};
    for (size_t i = 0; i < 40; i++)
        points[i] = (struct ps_block_point){i * 3, 1 + i / 10, UINT64_C(0x3ff0000000000000) + (i << 40),
                                            (int64_t)i * 1000};
    PS_FUZZ_CHECK(!ps_block_pack(points, 40, &buf, &err));
    size_t n = put(out, 0, buf.data, buf.size);
    ps_buf_done(&buf);
    return n;
}

static size_t seed_spool(uint8_t *out)
{
    struct ps_error err = {0};
    char dir[] = "/tmp/ps_fuzz_seed.XXXXXX";
    struct ps_spool *queue = NULL;
    PS_FUZZ_CHECK(mkdtemp(dir));
    PS_FUZZ_CHECK(!ps_spool_open(dir, "x", 1, 0, 1000, &queue, &err));
    PS_FUZZ_CHECK(!ps_spool_append(queue, PS_SPOOL_STEPS, "one", 3, &err));
    PS_FUZZ_CHECK(!ps_spool_append(queue, PS_SPOOL_FINISH, "another", 7, &err));
    FILE *file = fopen(ps_spool_path(queue), "rb");
    PS_FUZZ_CHECK(file);
    size_t n = fread(out, 1, 1000, file);
    fclose(file);
    unlink(ps_spool_path(queue));
    ps_spool_close(queue);
    rmdir(dir);
    return n;
}

size_t ps_fuzz_seed(int i, uint8_t *out, size_t max)
{
    if (i > 4 || max < 20000)
        return 0;
    out[0] = (uint8_t)i;
    switch (i) {
    case 0:
        for (size_t k = 0; k < 2 * PS_CIFAR_RECORD; k++)
            out[1 + k] = k % PS_CIFAR_RECORD ? (uint8_t)k : 7;
        return 1 + 2 * PS_CIFAR_RECORD;
    case 3:
        return 1 + seed_block(out + 1);
    case 4:
        return 1 + seed_spool(out + 1);
    default:
        return 1 + seed_tensors(out + 1);
    }
}
