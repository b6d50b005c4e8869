/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/synthetic.h"

#include "services/base/fs.h"
#include "services/base/mt19937.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRAIN_FILES = 5 };

static double between(struct ps_mt19937 *mt, double low, double high)
{
    return low + (high - low) * (ps_mt19937_next(mt) / 4294967296.0);
}

unsigned ps_synthetic_image(uint64_t seed, unsigned split, size_t index, uint8_t *pixels)
{
    struct ps_mt19937 mt;
    ps_mt19937_seed(&mt, (uint32_t)(seed * 2654435761u + split * 97u + index * 2u + 1u));
    const unsigned label = (unsigned)(index % PS_CIFAR_CLASSES), pattern = label % 5, tint = label / 5;
    const double wave = 2 * M_PI / between(&mt, 5, 9), px = between(&mt, 0, 9), py = between(&mt, 0, 9);
    const double contrast = between(&mt, 35, 60), light = between(&mt, 100, 155),
                 noise = between(&mt, 20, 40);
    const double weight[2][3] = {{1.0, 0.8, 0.4}, {0.4, 0.8, 1.0}};
    for (int y = 0; y < PS_IMAGE_SIDE; y++)
        for (int x = 0; x < PS_IMAGE_SIDE; x++) {
            double v = 0;
            switch (pattern) {
            case 0:
                v = sin(wave * (y + py));
                break;
            case 1:
                v = sin(wave * (x + px));
                break;
            case 2:
                v = sin(wave * (x + px)) * sin(wave * (y + py)) > 0 ? 1 : -1;
                break;
            case 3:
                v = sin(wave * hypot(x - 12 - px, y - 12 - py));
                break;
            default:
                v = fmax(sin(wave * (x + y + px) * M_SQRT1_2), sin(wave * (x - y + py) * M_SQRT1_2));
            }
            for (int c = 0; c < PS_IMAGE_CHANNELS; c++) {
                double value = light + contrast * weight[tint][c] * v + (tint ? c - 1 : 1 - c) * 12 +
                               noise * (between(&mt, -1, 1) + between(&mt, -1, 1));
                pixels[(c * PS_IMAGE_SIDE + y) * PS_IMAGE_SIDE + x] = (uint8_t)fmin(255, fmax(0, value));
            }
        }
    return label;
}

static int write_batch(const char *folder, const char *name, unsigned split, size_t first, size_t count,
                       uint64_t seed, struct ps_error *err)
{
    char *path = ps_path_join(folder, name);
    struct ps_new_file file;
    int code =
        path ? ps_new_file_open(&file, path, err) : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (code) {
        free(path);
        return code;
    }
    for (size_t i = 0; i < count && !code; i++) {
        uint8_t record[PS_CIFAR_RECORD];
        record[0] = (uint8_t)ps_synthetic_image(seed, split, first + i, record + 1);
        code = ps_write_all(file.fd, record, sizeof record, path, err);
    }
    if (!code)
        code = ps_new_file_commit(&file, err);
    ps_new_file_abandon(&file);
    free(path);
    return code;
}

static int write_text(const char *folder, const char *name, const char *text, struct ps_error *err)
{
    char *path = ps_path_join(folder, name);
    int code = path ? ps_write_file_atomic(path, text, strlen(text), err)
                    : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    free(path);
    return code;
}

int ps_synthetic_write(const char *folder, size_t train, size_t test, uint64_t seed, struct ps_error *err)
{
    if (train < TRAIN_FILES || test < 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "at least %d training images and one test image are needed",
                       TRAIN_FILES);
    char *batches = ps_path_join(folder, "cifar-10-batches-bin");
    int code =
        batches ? ps_make_dirs(batches, 0777, err) : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t f = 0; f < TRAIN_FILES && !code; f++) {
        char name[64];
        size_t first = train * f / TRAIN_FILES;
        snprintf(name, sizeof name, "data_batch_%zu.bin", f + 1);
        code = write_batch(batches, name, 0, first, train * (f + 1) / TRAIN_FILES - first, seed, err);
    }
    if (!code)
        code = write_batch(batches, "test_batch.bin", 1, 0, test, seed, err);
    if (!code)
        code = write_text(
            batches, "batches.meta.txt",
            "stripes\nbars\nchecks\nrings\nhatching\nblue stripes\nblue bars\nblue checks\nblue rings\n"
            "blue hatching\n\n",
            err);
    if (!code)
        code = write_text(batches, "dataset-name.txt", PS_SYNTHETIC_NAME "\n", err);
    free(batches);
    return code;
}
