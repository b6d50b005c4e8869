/* SPDX-License-Identifier: Apache-2.0
 * A generated set in CIFAR-10's format that a small net learns within an epoch or two: ten classes, five
 * patterns (horizontal and vertical stripes, checks, rings, cross-hatching) in two tints, with random period,
 * place, contrast and noise. Mirroring an image does not change its class. For tests, and for a demo without
 * real data. */
#ifndef PARAMSYNC_DATA_SYNTHETIC_H
#define PARAMSYNC_DATA_SYNTHETIC_H

#include "services/base/error.h"
#include "trainer/data/dataset.h"

#define PS_SYNTHETIC_NAME "generated patterns, CIFAR-10 format"

/* Image number index of a split (0 train, 1 test): a function of the arguments. pixels: PS_IMAGE_VALUES
 * bytes. Returns the label; labels come in turn. */
unsigned ps_synthetic_image(uint64_t seed, unsigned split, size_t index, uint8_t *pixels);

/* Writes folder/cifar-10-batches-bin/, five training files and a test file; train >= 5, test >= 1. Files that
 * are there are replaced. */
int ps_synthetic_write(const char *folder, size_t train, size_t test, uint64_t seed, struct ps_error *err);

#endif
