/* SPDX-License-Identifier: Apache-2.0
 * The reader of CIFAR-10's pickled batches: whatever the bytes, no image is taken that was not whole. */
#include "tests/fuzz/fuzz.h"

#include "trainer/data/cifar.h"
#include "trainer/data/pickle.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ps_error err = {0};
    struct ps_split split = {0};
    struct ps_pickle *pickle = NULL;
    if (!ps_pickle_read(data, size, "input", &pickle, &err))
        PS_FUZZ_CHECK(ps_pickle_at(pickle, ps_pickle_root(pickle)) != NULL);
    else
        PS_FUZZ_CHECK(err.message[0]);
    ps_pickle_free(pickle);
    if (!ps_cifar_add_pickle(&split, data, size, "input", &err))
        for (size_t i = 0; i < split.count; i++)
            PS_FUZZ_CHECK(split.labels[i] < PS_CIFAR_CLASSES);
    else
        PS_FUZZ_CHECK(split.count == 0);
    free(split.pixels);
    free(split.labels);
    return 0;
}

static size_t put(uint8_t *out, size_t at, const void *data, size_t size)
{
    memcpy(out + at, data, size);
    return at + size;
}

size_t ps_fuzz_seed(int i, uint8_t *out, size_t max)
{
    static const char small[] = "\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x03K\x07"
                                "eU\x01xq\x04K\x05u.";
    size_t n = 0;
    if (i == 0)
        return put(out, 0, small, sizeof small - 1);
    if (i > 2 || max < 40000)
        return 0;
    /* As numpy and Python 2 wrote the batches: an array by _reconstruct and its state. */
    const unsigned images = i == 1 ? 1 : 3;
    const uint32_t bytes = images * 3072;
    static const char head[] = "\x80\x02}q\x01(U\x04"
                               "dataq\x02"
                               "cnumpy.core.multiarray\n_reconstruct\nq\x03"
                               "cnumpy\nndarray\n"
                               "q\x04K\x00\x85U\x01"
                               "b\x87Rq\x05(K\x01K";
    n = put(out, n, head, sizeof head - 1);
    out[n++] = (uint8_t)images;
    static const char middle[] =
        "M\x00\x0c\x86"
        "cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        "K\x00tb\x89T";
    n = put(out, n, middle, sizeof middle - 1);
    for (int k = 0; k < 4; k++)
        out[n++] = (uint8_t)(bytes >> 8 * k);
    for (uint32_t k = 0; k < bytes; k++)
        out[n++] = (uint8_t)(k * 7);
    static const char tail[] = "tbU\x06labelsq\x07](";
    n = put(out, n, tail, sizeof tail - 1);
    for (unsigned k = 0; k < images; k++) {
        out[n++] = 'K';
        out[n++] = (uint8_t)(k * 3 % 10);
    }
    return put(out, n, "eu.", 3);
}
