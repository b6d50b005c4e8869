/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/dataset.h"

#include "services/base/digest.h"
#include "services/base/fs.h"
#include "services/base/mt19937.h"
#include "services/base/text.h"
#include "trainer/data/archive.h"
#include "trainer/data/cifar.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    MAX_BATCH_FILE = 1 << 30, /* bytes; 340,000 records */
    BATCH_FILES = 6,
    CUSTOM_TRAIN = 5000, /* the sample's random set */
    CUSTOM_TEST = 1000,
};

enum form { FORM_PYTHON, FORM_BINARY, FORMS };
static const struct {
    const char *folder, *suffix, *archive;
} forms[FORMS] = {
    {"cifar-10-batches-py", "", "cifar-10-python.tar.gz"},
    {"cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz"},
};
static const char *const batch_names[BATCH_FILES] = {
    "data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch",
};
#define NOTE_FILE "dataset-name.txt"

/* The CIFAR-10 images after one JPEG encoding are not CIFAR-10: an accuracy on them must not pass for one on
 * the original. They are known by the hashes of the first records of each batch in the published order, which
 * every part that is cut from the front of the batches keeps; one of these records in the set is enough. */
static const uint64_t reencoded_records[] = {
#include "trainer/data/reencoded.inc"
};

ptrdiff_t ps_split_extend(struct ps_split *split, size_t n)
{
    if (split->capacity - split->count < n) {
        size_t capacity = split->count + n, bytes;
        if (__builtin_mul_overflow(capacity, (size_t)PS_IMAGE_VALUES, &bytes))
            return -1;
        uint8_t *pixels = realloc(split->pixels, bytes);
        if (pixels)
            split->pixels = pixels;
        uint8_t *labels = pixels ? realloc(split->labels, capacity) : NULL;
        if (!labels)
            return -1;
        split->labels = labels;
        split->capacity = capacity;
    }
    size_t at = split->count;
    split->count += n;
    return (ptrdiff_t)at;
}

uint64_t ps_record_hash(const uint8_t *pixels, unsigned label, unsigned split)
{
    return ps_hash64(pixels, PS_IMAGE_VALUES, (uint64_t)split << 32 | label);
}

static uint64_t scramble(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void ps_dataset_identify(struct ps_dataset *set, const char *note)
{
    /* Sums do not depend on the order, and a record that comes twice counts twice (with xor it would vanish).
     */
    uint64_t sum = 0, sum_scrambled = 0;
    bool reencoded = false;
    for (unsigned which = 0; which < 2; which++) {
        const struct ps_split *split = which ? &set->test : &set->train;
        for (size_t i = 0; i < split->count; i++) {
            uint64_t h = split->pixels
                             ? ps_record_hash(split->pixels + i * PS_IMAGE_VALUES, split->labels[i], which)
                             : ps_hash64(split->floats + i * PS_IMAGE_VALUES, PS_IMAGE_VALUES * sizeof(float),
                                         (uint64_t)which << 32 | split->labels[i]);
            sum += h;
            sum_scrambled += scramble(h);
            for (size_t k = 0; k < sizeof reencoded_records / sizeof *reencoded_records; k++)
                reencoded |= h == reencoded_records[k];
        }
    }
    snprintf(set->hash, sizeof set->hash, "%016llx%016llx", (unsigned long long)sum,
             (unsigned long long)sum_scrambled);
    if (set->train.floats)
        snprintf(set->name, sizeof set->name, "random images");
    else if (reencoded)
        snprintf(set->name, sizeof set->name, "CIFAR-10, JPEG re-encoded");
    else if (note)
        snprintf(set->name, sizeof set->name, "%s", note);
    else
        snprintf(set->name, sizeof set->name, "CIFAR-10 format, data hash %.8s", set->hash);
}

/* A set in the making. */
struct reading {
    struct ps_dataset *set;
    const char *url;
    enum form form;
    bool form_known;
    char note[96];
    uint8_t *data[BATCH_FILES]; /* contents, from an archive in whatever order it has */
    size_t size[BATCH_FILES];
    char *path[BATCH_FILES];
};

static int add_batch(struct reading *r, int which, const uint8_t *data, size_t size, const char *name,
                     struct ps_error *err)
{
    struct ps_split *split = which == BATCH_FILES - 1 ? &r->set->test : &r->set->train;
    return r->form == FORM_PYTHON ? ps_cifar_add_pickle(split, data, size, name, err)
                                  : ps_cifar_add_binary(split, data, size, name, err);
}

/* The first line, if it is text that can be printed. */
static void take_note(struct reading *r, const char *data, size_t size)
{
    size_t n = 0;
    while (n < size && data[n] != '\n' && data[n] != '\r')
        n++;
    if (!n || n >= sizeof r->note || !ps_utf8_valid(data, n))
        return;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)data[i] < 0x20 || data[i] == 0x7f)
            return;
    memcpy(r->note, data, n);
    r->note[n] = '\0';
}

/* Which batch a file of an archive is: FOLDER/NAME at any depth. -1: none, BATCH_FILES: the note. */
static int batch_of(const char *path, enum form *ret_form)
{
    const char *base = strrchr(path, '/');
    if (!base)
        return -1;
    for (int f = 0; f < FORMS; f++) {
        size_t n = strlen(forms[f].folder);
        if ((size_t)(base - path) < n || strncmp(base - n, forms[f].folder, n) != 0 ||
            (base - n != path && base[-(ptrdiff_t)n - 1] != '/'))
            continue;
        *ret_form = (enum form)f;
        if (strcmp(base + 1, NOTE_FILE) == 0)
            return BATCH_FILES;
        for (int i = 0; i < BATCH_FILES; i++) {
            size_t length = strlen(batch_names[i]);
            if (strncmp(base + 1, batch_names[i], length) == 0 &&
                strcmp(base + 1 + length, forms[f].suffix) == 0)
                return i;
        }
    }
    return -1;
}

static bool archive_wanted(void *context, const char *path)
{
    struct reading *r = context;
    enum form form;
    if (batch_of(path, &form) < 0 || (r->form_known && form != r->form))
        return false;
    r->form = form;
    r->form_known = true;
    return true;
}

static int archive_file(void *context, const char *path, uint8_t *data, size_t size, struct ps_error *err)
{
    struct reading *r = context;
    enum form form;
    int which = batch_of(path, &form), code = 0;
    if (which == BATCH_FILES) {
        take_note(r, (const char *)data, size);
    } else if (r->path[which]) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s: %s comes twice", r->url, path);
    } else if (asprintf(&r->path[which], "%s: %s", r->url, path) < 0) {
        r->path[which] = NULL;
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    } else {
        r->data[which] = data;
        r->size[which] = size;
        return 0;
    }
    free(data);
    return code;
}

static int load_archive(struct reading *r, struct ps_error *err)
{
    int code = ps_archive_read(r->url, MAX_BATCH_FILE, archive_wanted, archive_file, r, err);
    for (int i = 0; i < BATCH_FILES && !code; i++)
        if (!r->path[i])
            code = r->form_known ? ps_fail(err, PS_NOT_FOUND, "%s holds no %s/%s%s", r->url,
                                           forms[r->form].folder, batch_names[i], forms[r->form].suffix)
                                 : ps_fail(err, PS_NOT_FOUND, "%s holds neither %s/ nor %s/", r->url,
                                           forms[FORM_PYTHON].folder, forms[FORM_BINARY].folder);
    for (int i = 0; i < BATCH_FILES; i++) {
        if (!code)
            code = add_batch(r, i, r->data[i], r->size[i], r->path[i], err);
        free(r->data[i]);
        free(r->path[i]);
    }
    return code;
}

static int load_folder(struct reading *r, const char *folder, struct ps_error *err)
{
    int code = 0;
    for (int i = 0; i < BATCH_FILES && !code; i++) {
        char name[64], *data = NULL;
        size_t size;
        snprintf(name, sizeof name, "%s%s", batch_names[i], forms[r->form].suffix);
        char *path = ps_path_join(folder, name);
        code = path ? ps_read_file(path, MAX_BATCH_FILE, &data, &size, err)
                    : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        if (!code)
            code = add_batch(r, i, (uint8_t *)data, size, path, err);
        free(data);
        free(path);
    }
    char *path = code ? NULL : ps_path_join(folder, NOTE_FILE), *data;
    size_t size;
    if (path && ps_read_file(path, 4096, &data, &size, NULL) == 0) {
        take_note(r, data, size);
        free(data);
    }
    free(path);
    return code;
}

static bool exists(const char *path, bool folder)
{
    struct stat st;
    return path && stat(path, &st) == 0 && (folder ? S_ISDIR(st.st_mode) : S_ISREG(st.st_mode));
}

/* Finds out what url is and reads it. */
static int load(struct reading *r, struct ps_error *err)
{
    const char *scheme = strstr(r->url, "://");
    if (scheme)
        return ps_fail(
            err, PS_INVALID_ARGUMENT,
            "--data_url %s: %.*s:// is not read directly: download the archive first (for example with the "
            "storage service's own tool) and name the folder or the .tar.gz",
            r->url, (int)(scheme - r->url), r->url);
    struct stat st;
    if (stat(r->url, &st) < 0)
        return ps_fail_errno(err, errno, "--data_url %s", r->url);
    if (S_ISREG(st.st_mode))
        return load_archive(r, err);
    int code = PS_NOT_FOUND;
    char *path = NULL;
    for (int f = 0; f < FORMS && code == PS_NOT_FOUND; f++) { /* a folder of batches, or one that holds it */
        char first[64];
        snprintf(first, sizeof first, "data_batch_1%s", forms[f].suffix);
        r->form = (enum form)f;
        path = ps_path_join(r->url, first);
        if (exists(path, false)) {
            code = load_folder(r, r->url, err);
            goto out;
        }
        free(path);
        path = ps_path_join(r->url, forms[f].folder);
        if (exists(path, true)) {
            code = load_folder(r, path, err);
            goto out;
        }
        free(path);
        path = NULL;
    }
    for (int f = 0; f < FORMS; f++) {
        path = ps_path_join(r->url, forms[f].archive);
        if (exists(path, false)) {
            r->url = path;
            code = load_archive(r, err);
            goto out;
        }
        free(path);
        path = NULL;
    }
    code = ps_fail(err, PS_NOT_FOUND, "--data_url %s holds none of %s/, %s/, %s and %s", r->url,
                   forms[0].folder, forms[1].folder, forms[0].archive, forms[1].archive);
out:
    free(path);
    return code;
}

int ps_dataset_load(const char *url, struct ps_dataset **ret, struct ps_error *err)
{
    struct ps_dataset *set = calloc(1, sizeof *set);
    if (!set)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    set->classes = PS_CIFAR_CLASSES;
    snprintf(set->source, sizeof set->source, "%s", url);
    struct reading r = {.set = set, .url = url};
    int code = load(&r, err);
    if (code) {
        ps_dataset_free(set);
        return code;
    }
    ps_dataset_identify(set, r.note[0] ? r.note : NULL);
    *ret = set;
    return 0;
}

int ps_dataset_limit(struct ps_dataset *set, size_t train, size_t test, struct ps_error *err)
{
    if (train > set->train.count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--train-images %zu: the set holds only %zu", train,
                       set->train.count);
    if (test > set->test.count)
        return ps_fail(err, PS_INVALID_ARGUMENT, "--test-images %zu: the set holds only %zu", test,
                       set->test.count);
    size_t all_train = set->train.count, all_test = set->test.count;
    if (train)
        set->train.count = train;
    if (test)
        set->test.count = test;
    if (set->train.count == all_train && set->test.count == all_test)
        return 0;
    char whole[sizeof set->name];
    memcpy(whole, set->name, sizeof whole);
    ps_dataset_identify(set, NULL);
    if (strncmp(whole, "CIFAR-10 format", 15) != 0)
        memcpy(set->name, whole, sizeof whole);
    size_t used = strlen(set->name);
    snprintf(set->name + used, sizeof set->name - used, " (%zu of %zu + %zu of %zu images)", set->train.count,
             all_train, set->test.count, all_test);
    return 0;
}

static double uniform(struct ps_mt19937 *mt) /* in (0, 1] */
{
    return (ps_mt19937_next(mt) + 1.0) / 4294967296.0;
}

static int custom_split(struct ps_split *split, size_t count, struct ps_mt19937 *mt)
{
    split->floats = malloc(count * PS_IMAGE_VALUES * sizeof(float));
    split->labels = malloc(count);
    if (!split->floats || !split->labels)
        return -1;
    split->count = split->capacity = count;
    for (size_t i = 0; i < count * PS_IMAGE_VALUES; i += 2) { /* Box and Muller, Ann. Math. Stat. 29 (1958) */
        double radius = sqrt(-2 * log(uniform(mt))), angle = 2 * M_PI * uniform(mt);
        split->floats[i] = (float)(radius * cos(angle));
        split->floats[i + 1] = (float)(radius * sin(angle));
    }
    for (size_t i = 0; i < count; i++)
        split->labels[i] = i < count / 2;
    for (size_t i = count - 1; i > 0; i--) {
        size_t k = ps_mt19937_next(mt) % (i + 1);
        uint8_t swap = split->labels[i];
        split->labels[i] = split->labels[k];
        split->labels[k] = swap;
    }
    return 0;
}

int ps_dataset_custom(uint64_t seed, struct ps_dataset **ret, struct ps_error *err)
{
    struct ps_dataset *set = calloc(1, sizeof *set);
    struct ps_mt19937 mt;
    ps_mt19937_seed(&mt, (uint32_t)scramble(seed));
    if (!set || custom_split(&set->train, CUSTOM_TRAIN, &mt) || custom_split(&set->test, CUSTOM_TEST, &mt)) {
        ps_dataset_free(set);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for the random set");
    }
    set->classes = PS_CIFAR_CLASSES;
    snprintf(set->source, sizeof set->source, "generated");
    ps_dataset_identify(set, NULL);
    *ret = set;
    return 0;
}

struct ps_dataset *ps_dataset_free(struct ps_dataset *set)
{
    if (!set)
        return NULL;
    struct ps_split *splits[2] = {&set->train, &set->test};
    for (int i = 0; i < 2; i++) {
        free(splits[i]->pixels);
        free(splits[i]->floats);
        free(splits[i]->labels);
    }
    free(set);
    return NULL;
}
