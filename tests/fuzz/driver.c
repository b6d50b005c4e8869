/* SPDX-License-Identifier: Apache-2.0
 * Runs a fuzz target without libFuzzer: its seeds, then so many changed copies of them, always the same ones.
 *     fuzz_NAME [COUNT [FIRST]]    COUNT inputs (20000), from the FIRST-th (0)
 *     fuzz_NAME --seeds DIR        writes the seeds there, for libFuzzer
 *     fuzz_NAME FILE...            runs these inputs */
#include "tests/fuzz/fuzz.h"

#include <string.h>

enum { MOST = 1 << 16, SEEDS = 64 };

static uint64_t state;

static uint64_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static size_t below(size_t n)
{
    return n ? (size_t)(next_random() % n) : 0;
}

/* Some of the changes that find things: bits, bytes, edge values, pieces that move, repeat, vanish or come
 * from another seed. */
static size_t change(uint8_t *data, size_t size, const uint8_t *other, size_t other_size)
{
    static const uint64_t edges[] = {0,          1,         0x7f,       0x80,        0xff,
                                     0x7fff,     0xffff,    0x7fffffff, 0x80000000u, 0xffffffffu,
                                     UINT64_MAX, INT64_MAX, 1u << 20};
    for (size_t rounds = 1 + below(4); rounds; rounds--) {
        size_t at = below(size + 1), n = 1 + below(16);
        switch (below(9)) {
        case 0:
            if (at < size)
                data[at] ^= (uint8_t)(1 << below(8));
            break;
        case 1:
            if (at < size)
                data[at] = (uint8_t)next_random();
            break;
        case 2: {
            uint64_t edge = edges[below(sizeof edges / sizeof *edges)];
            for (size_t i = 0; i < 8 && at + i < size && i < (n > 8 ? 8 : n); i++)
                data[at + i] = (uint8_t)(edge >> 8 * i);
            break;
        }
        case 3: /* cut off */
            size = at;
            break;
        case 4: /* take out */
            if (at + n <= size) {
                memmove(data + at, data + at + n, size - at - n);
                size -= n;
            }
            break;
        case 5: /* say twice */
            if (at + n <= size && size + n <= MOST) {
                memmove(data + at + n, data + at, size - at);
                size += n;
            }
            break;
        case 6: /* put in */
            if (size + n <= MOST) {
                memmove(data + at + n, data + at, size - at);
                for (size_t i = 0; i < n; i++)
                    data[at + i] = (uint8_t)next_random();
                size += n;
            }
            break;
        case 7: /* of another seed */
            if (other_size) {
                size_t from = below(other_size), piece = 1 + below(other_size - from);
                if (at + piece <= MOST) {
                    memcpy(data + at, other + from, piece);
                    size = at + piece > size ? at + piece : size;
                }
            }
            break;
        default: /* a digit, where numbers are text */
            for (size_t i = at; i < size; i++)
                if (data[i] >= '0' && data[i] <= '9') {
                    data[i] = (uint8_t)('0' + below(10));
                    break;
                }
        }
    }
    return size;
}

static int write_seeds(const char *dir)
{
    static uint8_t seed[MOST];
    size_t size;
    for (int i = 0; (size = ps_fuzz_seed(i, seed, MOST)); i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed-%d", dir, i);
        FILE *file = fopen(path, "wb");
        if (!file || fwrite(seed, 1, size, file) != size || fclose(file)) {
            perror(path);
            return 1;
        }
    }
    return 0;
}

static int run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = file ? malloc(MOST) : NULL;
    if (!data) {
        perror(path);
        return 1;
    }
    size_t size = fread(data, 1, MOST, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    static uint8_t seeds[SEEDS][MOST];
    size_t sizes[SEEDS], count = 0;
    if (argc == 3 && !strcmp(argv[1], "--seeds"))
        return write_seeds(argv[2]);
    if (argc > 1 && (argv[1][0] < '0' || argv[1][0] > '9')) {
        for (int i = 1; i < argc; i++)
            if (run_file(argv[i]))
                return 1;
        return 0;
    }
    uint64_t most = argc > 1 ? strtoull(argv[1], NULL, 10) : 20000;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    while (count < SEEDS && (sizes[count] = ps_fuzz_seed((int)count, seeds[count], MOST))) {
        LLVMFuzzerTestOneInput(seeds[count], sizes[count]);
        count++;
    }
    if (!count)
        return 2;
    for (uint64_t i = first; i < first + most; i++) {
        state = (i + 1) * UINT64_C(0x9e3779b97f4a7c15) | 1; /* each input by its number alone */
        for (int k = 0; k < 4; k++)
            next_random();
        size_t which = below(count), other = below(count);
        uint8_t *data = malloc(MOST);
        if (!data)
            return 2;
        memcpy(data, seeds[which], sizes[which]);
        size_t size = change(data, sizes[which], seeds[other], sizes[other]);
        uint8_t *exact = malloc(size ? size : 1); /* so that a sanitizer sees the first byte past the end */
        if (!exact)
            return 2;
        memcpy(exact, data, size);
        free(data);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%zu seeds, %llu inputs\n", count, (unsigned long long)most);
    return 0;
}
