/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/sampler.h"

#include "services/base/mt19937.h"

#include <stdlib.h>

void ps_randperm(uint64_t seed, uint32_t *order, size_t n)
{
    struct ps_mt19937 mt;
    ps_mt19937_seed(&mt, (uint32_t)seed);
    for (size_t i = 0; i < n; i++)
        order[i] = (uint32_t)i;
    for (size_t i = 0; i + 1 < n; i++) {
        size_t k = i + ps_mt19937_next(&mt) % (n - i);
        uint32_t swap = order[i];
        order[i] = order[k];
        order[k] = swap;
    }
}

size_t ps_sampler_length(const struct ps_sampler *s)
{
    size_t w = (size_t)s->world_size;
    return s->drop_last ? s->count / w : (s->count + w - 1) / w;
}

int ps_sampler_indices(const struct ps_sampler *s, int epoch, uint32_t *indices, struct ps_error *err)
{
    if (s->count < 1 || s->count > UINT32_MAX || s->world_size < 1 || s->rank < 0 ||
        s->rank >= s->world_size || epoch < 0)
        return ps_fail(err, PS_INVALID_ARGUMENT, "sampler: rank %d of %d over %zu samples, epoch %d", s->rank,
                       s->world_size, s->count, epoch);
    uint32_t *order = malloc(s->count * sizeof *order);
    if (!order)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for the order of %zu samples", s->count);
    if (s->shuffle)
        ps_randperm(s->seed + (uint64_t)epoch, order, s->count);
    else
        for (size_t i = 0; i < s->count; i++)
            order[i] = (uint32_t)i;
    size_t length = ps_sampler_length(s);
    for (size_t i = 0; i < length; i++) /* past the end it goes on from the beginning, as often as needed */
        indices[i] = order[(i * (size_t)s->world_size + (size_t)s->rank) % s->count];
    free(order);
    return 0;
}
