/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/loader.h"

#include "trainer/data/augment.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 2 };

struct slot {
    void *images;
    int32_t *labels;
    int count, rows;
};

struct ps_loader {
    int max_batch;
    bool floats;
    struct slot slots[SLOTS];
    pthread_t thread;

    /* lock guards all below; slots[i] belong to the thread while `filling`, to the loop from then on until
     * released. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct ps_loader_pass pass; /* not changed while filling */
    uint32_t *indices;
    struct ps_resize resize;
    size_t batches, made, taken, released; /* batches of this pass */
    bool filling, stop;
};

size_t ps_loader_batches(size_t count, int batch, bool drop_last)
{
    size_t n = (size_t)batch;
    return drop_last ? count / n : (count + n - 1) / n;
}

static void fill(const struct ps_loader *l, size_t number, struct slot *slot)
{
    const struct ps_loader_pass *pass = &l->pass;
    const size_t first = number * (size_t)pass->batch;
    const size_t left = pass->count - first;
    const size_t out = (size_t)PS_IMAGE_CHANNELS * (size_t)pass->resolution * (size_t)pass->resolution;
    slot->count = left < (size_t)pass->batch ? (int)left : pass->batch;
    slot->rows = pass->pad ? pass->batch : slot->count;
    for (int i = 0; i < slot->rows; i++) {
        uint32_t index = l->indices[first + (size_t)(i < slot->count ? i : slot->count - 1)];
        slot->labels[i] = pass->split->labels[index];
        if (l->floats) {
            memcpy((float *)slot->images + (size_t)i * PS_IMAGE_VALUES,
                   pass->split->floats + (size_t)index * PS_IMAGE_VALUES, PS_IMAGE_VALUES * sizeof(float));
            continue;
        }
        const uint8_t *image = pass->split->pixels + (size_t)index * PS_IMAGE_VALUES;
        uint8_t shifted[PS_IMAGE_VALUES];
        if (pass->augment) {
            ps_augment_apply(ps_augment_draw(pass->seed, pass->epoch, index), image, shifted);
            image = shifted;
        }
        ps_resize_apply(&l->resize, image, (uint8_t *)slot->images + (size_t)i * out);
    }
}

static void *work(void *context)
{
    struct ps_loader *l = context;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        /* More than the pass has: one that was given up while its batch was being filled. */
        while (!l->stop && (l->made >= l->batches || l->made - l->released >= SLOTS))
            pthread_cond_wait(&l->changed, &l->lock);
        if (l->stop)
            break;
        size_t number = l->made;
        l->filling = true;
        pthread_mutex_unlock(&l->lock);
        fill(l, number, &l->slots[number % SLOTS]);
        pthread_mutex_lock(&l->lock);
        l->filling = false;
        l->made++;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

int ps_loader_create(int max_batch, bool floats, struct ps_loader **ret, struct ps_error *err)
{
    struct ps_loader *l = max_batch > 0 ? calloc(1, sizeof *l) : NULL;
    bool ok = l != NULL;
    for (int i = 0; ok && i < SLOTS; i++) {
        l->slots[i].images = calloc((size_t)max_batch, PS_IMAGE_VALUES * (floats ? sizeof(float) : 1));
        l->slots[i].labels = calloc((size_t)max_batch, sizeof(int32_t));
        ok = l->slots[i].images && l->slots[i].labels;
    }
    if (ok) {
        l->max_batch = max_batch;
        l->floats = floats;
        pthread_mutex_init(&l->lock, NULL);
        pthread_cond_init(&l->changed, NULL);
        sigset_t all, before; /* signals are the main thread's */
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);
        ok = pthread_create(&l->thread, NULL, work, l) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!ok) {
            pthread_cond_destroy(&l->changed);
            pthread_mutex_destroy(&l->lock);
        }
    }
    if (!ok) {
        for (int i = 0; l && i < SLOTS; i++) {
            free(l->slots[i].images);
            free(l->slots[i].labels);
        }
        free(l);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "no memory or thread for batches of %d images", max_batch);
    }
    *ret = l;
    return 0;
}

int ps_loader_start(struct ps_loader *l, const struct ps_loader_pass *pass, struct ps_error *err)
{
    bool floats = pass->split->floats != NULL;
    if (pass->batch < 1 || pass->batch > l->max_batch || floats != l->floats ||
        (floats && (pass->augment || pass->resolution != PS_IMAGE_SIDE)))
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "loader: batches of %d at %d pixels do not fit what it was made for", pass->batch,
                       pass->resolution);
    for (size_t i = 0; i < pass->count; i++)
        if (pass->indices[i] >= pass->split->count)
            return ps_fail(err, PS_INTERNAL, "loader: sample %u of %zu", pass->indices[i],
                           pass->split->count);
    struct ps_resize resize;
    int code = ps_resize_prepare(pass->resolution, &resize, err);
    if (code)
        return code;
    uint32_t *indices = malloc(pass->count * sizeof *indices + 1);
    if (!indices)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for %zu samples", pass->count);
    if (pass->count)
        memcpy(indices, pass->indices, pass->count * sizeof *indices);
    pthread_mutex_lock(&l->lock);
    l->batches = l->made; /* nothing more of the old pass */
    while (l->filling)
        pthread_cond_wait(&l->changed, &l->lock);
    free(l->indices);
    l->indices = indices;
    l->pass = *pass;
    l->pass.indices = indices;
    l->resize = resize;
    l->made = l->taken = l->released = 0;
    l->batches = ps_loader_batches(pass->count, pass->batch, pass->drop_last);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return 0;
}

int ps_loader_next(struct ps_loader *l, struct ps_loaded *ret)
{
    pthread_mutex_lock(&l->lock);
    l->released = l->taken;
    pthread_cond_broadcast(&l->changed);
    while (l->taken < l->batches && l->made == l->taken)
        pthread_cond_wait(&l->changed, &l->lock);
    int more = l->taken < l->batches;
    if (more) {
        const struct slot *slot = &l->slots[l->taken++ % SLOTS];
        *ret = (struct ps_loaded){.images = slot->images,
                                  .labels = slot->labels,
                                  .count = slot->count,
                                  .rows = slot->rows,
                                  .floats = l->floats};
    }
    pthread_mutex_unlock(&l->lock);
    return more;
}

struct ps_loader *ps_loader_free(struct ps_loader *l)
{
    if (!l)
        return NULL;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    for (int i = 0; i < SLOTS; i++) {
        free(l->slots[i].images);
        free(l->slots[i].labels);
    }
    free(l->indices);
    free(l);
    return NULL;
}
