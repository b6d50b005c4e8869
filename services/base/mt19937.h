/* SPDX-License-Identifier: Apache-2.0
 * The Mersenne Twister of M. Matsumoto and T. Nishimura (ACM TOMACS 8, 1998), 32-bit form: the generator
 * behind PyTorch's CPU random numbers, so that permutations and initial values can agree with it. Not for
 * secrets. */
#ifndef PARAMSYNC_BASE_MT19937_H
#define PARAMSYNC_BASE_MT19937_H

#include <stdint.h>

struct ps_mt19937 { /* one thread at a time; copying the struct copies the stream */
    uint32_t state[624];
    int next; /* 624: the state is used up */
};

/* Any seed is good; the same seed gives the same stream on every machine. */
void ps_mt19937_seed(struct ps_mt19937 *mt, uint32_t seed);
/* Uniform in 0..2^32-1. */
uint32_t ps_mt19937_next(struct ps_mt19937 *mt);

#endif
