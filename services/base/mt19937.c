/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/mt19937.h"

enum { N = 624, M = 397 };

void ps_mt19937_seed(struct ps_mt19937 *mt, uint32_t seed)
{
    mt->state[0] = seed;
    for (uint32_t i = 1; i < N; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ mt->state[i - 1] >> 30) + i;
    mt->next = N;
}

static void refill(struct ps_mt19937 *mt)
{
    uint32_t *s = mt->state;
    for (int i = 0; i < N; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % N] & 0x7fffffffu);
        s[i] = s[(i + M) % N] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    mt->next = 0;
}

uint32_t ps_mt19937_next(struct ps_mt19937 *mt)
{
    if (mt->next >= N)
        refill(mt);
    uint32_t y = mt->state[mt->next++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}
