/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/cifar.h"

#include "trainer/data/pickle.h"

#include <string.h>

static int bad_label(const char *name, size_t record, long long label, struct ps_error *err)
{
    return ps_fail(err, PS_INVALID_ARGUMENT, "%s, record %zu: label %lld, but the classes are 0 to 9", name,
                   record, label);
}

int ps_cifar_add_binary(struct ps_split *split, const uint8_t *data, size_t size, const char *name,
                        struct ps_error *err)
{
    if (size == 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s is empty: a batch holds at least one record of %d bytes",
                       name, PS_CIFAR_RECORD);
    size_t n = size / PS_CIFAR_RECORD;
    if (size % PS_CIFAR_RECORD)
        return ps_fail(
            err, PS_INVALID_ARGUMENT,
            "%s holds %zu bytes, which is no whole number of records of %d bytes (record %zu has only %zu): "
            "truncated, or not CIFAR-10's binary version",
            name, size, PS_CIFAR_RECORD, n, size % PS_CIFAR_RECORD);
    for (size_t i = 0; i < n; i++)
        if (data[i * PS_CIFAR_RECORD] >= PS_CIFAR_CLASSES)
            return bad_label(name, i, data[i * PS_CIFAR_RECORD], err);
    ptrdiff_t at = ps_split_extend(split, n);
    if (at < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", name);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *record = data + i * PS_CIFAR_RECORD;
        split->labels[(size_t)at + i] = record[0];
        memcpy(split->pixels + ((size_t)at + i) * PS_IMAGE_VALUES, record + 1, PS_IMAGE_VALUES);
    }
    return 0;
}

int ps_cifar_add_pickle(struct ps_split *split, const uint8_t *data, size_t size, const char *name,
                        struct ps_error *err)
{
    if (size == 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s is empty: a batch is a pickled dictionary", name);
    struct ps_pickle *pickle;
    int code = ps_pickle_read(data, size, name, &pickle, err);
    if (code)
        return code;
    const struct ps_pickle_value *root = ps_pickle_at(pickle, ps_pickle_root(pickle));
    const struct ps_pickle_value *labels = NULL, *images = NULL;
    if (root->type == PS_PICKLE_DICT) {
        labels = ps_pickle_find(pickle, root, "labels");
        images = ps_pickle_find(pickle, root, "data");
    }
    if (!labels || !images) {
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "%s: no dictionary with \"labels\" and \"data\": not a CIFAR-10 batch", name);
        goto out;
    }
    if (labels->type != PS_PICKLE_LIST) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s: \"labels\" is not a list", name);
        goto out;
    }
    if (images->type != PS_PICKLE_ARRAY || images->ndim != 2) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s: \"data\" is not a two-dimensional uint8 array", name);
        goto out;
    }
    if (images->shape[1] != PS_IMAGE_VALUES) {
        code =
            ps_fail(err, PS_INVALID_ARGUMENT, "%s: a record of \"data\" has %zu bytes, but an image has %d",
                    name, images->shape[1], PS_IMAGE_VALUES);
        goto out;
    }
    size_t n = images->shape[0];
    if (labels->count != n) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s: %zu labels for %zu images", name, labels->count, n);
        goto out;
    }
    if (n == 0) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is empty: it holds no record", name);
        goto out;
    }
    for (size_t i = 0; i < n && !code; i++) {
        const struct ps_pickle_value *label = ps_pickle_at(pickle, labels->items[i]);
        if (label->type != PS_PICKLE_INT)
            code =
                ps_fail(err, PS_INVALID_ARGUMENT, "%s, record %zu: the label is not a whole number", name, i);
        else if (label->integer < 0 || label->integer >= PS_CIFAR_CLASSES)
            code = bad_label(name, i, (long long)label->integer, err);
    }
    if (code)
        goto out;
    ptrdiff_t at = ps_split_extend(split, n);
    if (at < 0) {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", name);
        goto out;
    }
    memcpy(split->pixels + (size_t)at * PS_IMAGE_VALUES, images->data, n * PS_IMAGE_VALUES);
    for (size_t i = 0; i < n; i++)
        split->labels[(size_t)at + i] = (uint8_t)ps_pickle_at(pickle, labels->items[i])->integer;
out:
    ps_pickle_free(pickle);
    return code;
}
