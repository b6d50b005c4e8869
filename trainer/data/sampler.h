/* SPDX-License-Identifier: Apache-2.0
 * Which samples a rank sees in an epoch: the algorithm of PyTorch's DistributedSampler. The epoch is an
 * argument, so nobody can forget to set it. */
#ifndef PARAMSYNC_DATA_SAMPLER_H
#define PARAMSYNC_DATA_SAMPLER_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ps_sampler {
    size_t count; /* samples of the set; 1..2^32-1 */
    int rank, world_size;
    bool drop_last; /* the tail that does not divide by world_size: left out, else filled up from the
                       beginning */
    bool shuffle;
    uint64_t seed;
};

/* Samples of each rank per epoch; the same on all ranks. 0 only with drop_last and fewer samples than ranks.
 */
size_t ps_sampler_length(const struct ps_sampler *sampler);
/* indices: ps_sampler_length places. Fails on a bad sampler or without memory. */
int ps_sampler_indices(const struct ps_sampler *sampler, int epoch, uint32_t *indices, struct ps_error *err);

/* torch.randperm(n, generator=Generator().manual_seed(seed)) for n < 2^32 / 20. */
void ps_randperm(uint64_t seed, uint32_t *order, size_t n);

#endif
