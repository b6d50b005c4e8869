/* SPDX-License-Identifier: Apache-2.0
 * What a fuzz target is: bytes in, no crash, no leak, no reading past them, and results that keep their
 * promises (PS_FUZZ_CHECK). Built with libFuzzer by the preset "fuzz" (see tests/README.md); otherwise
 * driver.c runs it a fixed number of times under ctest. */
#ifndef PARAMSYNC_FUZZ_H
#define PARAMSYNC_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Good inputs to begin with, made by the target: the i-th into out (at most max bytes); its size, or 0 after
 * the last one. */
size_t ps_fuzz_seed(int i, uint8_t *out, size_t max);

#define PS_FUZZ_CHECK(good)                                                                                  \
    do {                                                                                                     \
        if (!(good)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #good);                                       \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
