/* SPDX-License-Identifier: Apache-2.0
 * One batch file of CIFAR-10, from memory into a split. name is for messages. On failure the split keeps what
 * it had. */
#ifndef PARAMSYNC_DATA_CIFAR_H
#define PARAMSYNC_DATA_CIFAR_H

#include "trainer/data/dataset.h"

/* Binary version: records of 3073 bytes, label first. */
int ps_cifar_add_binary(struct ps_split *split, const uint8_t *data, size_t size, const char *name,
                        struct ps_error *err);
/* Python version: a pickled dictionary with "labels" (a list of 0..9) and "data" (uint8 [n, 3072]). */
int ps_cifar_add_pickle(struct ps_split *split, const uint8_t *data, size_t size, const char *name,
                        struct ps_error *err);

#endif
