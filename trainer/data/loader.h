/* SPDX-License-Identifier: Apache-2.0
 * One data thread that prepares batches ahead of the loop, into two buffers. */
#ifndef PARAMSYNC_DATA_LOADER_H
#define PARAMSYNC_DATA_LOADER_H

#include "services/base/error.h"
#include "trainer/data/dataset.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_loader; /* used by one thread at a time */

/* One pass over samples of a split. */
struct ps_loader_pass {
    const struct ps_split *split; /* stays */
    const uint32_t *indices;      /* [count]; copied */
    size_t count;
    int batch;
    bool drop_last; /* leave a short last batch out */
    bool pad;       /* fill a short last batch up with its last sample: every batch has one shape */
    bool augment;   /* crop and flip by (seed, epoch, index); not for float images */
    uint64_t seed;
    int epoch;
    int resolution; /* 32 for float images */
};

struct ps_loaded {
    const void *images;    /* [rows, 3, resolution, resolution], uint8 or, from float images, float */
    const int32_t *labels; /* [rows] */
    int count;             /* samples that count */
    int rows;              /* with those filled up; equal to count without pad */
    bool floats;
};

int ps_loader_create(int max_batch, bool floats, struct ps_loader **ret, struct ps_error *err);
/* Starts a pass; one that is going on is given up. */
int ps_loader_start(struct ps_loader *loader, const struct ps_loader_pass *pass, struct ps_error *err);
/* The next batch, valid until the next call: waits for the data thread. Returns 1, or 0 at the end of the
 * pass. */
int ps_loader_next(struct ps_loader *loader, struct ps_loaded *ret);
struct ps_loader *ps_loader_free(struct ps_loader *loader); /* takes NULL, returns NULL */

/* Batches of a pass. */
size_t ps_loader_batches(size_t count, int batch, bool drop_last);

#endif
