/* SPDX-License-Identifier: Apache-2.0
 * Plans one allocation for many tensors whose lifetimes are known beforehand: take and give are played
 * through once, the offsets are kept, and `peak` bytes are allocated. Nothing here touches the memory itself.
 * One thread at a time. */
#ifndef PARAMSYNC_BACKEND_ARENA_H
#define PARAMSYNC_BACKEND_ARENA_H

#include <stddef.h>

enum { PS_ARENA_ALIGN = 256 /* bytes: four cache lines */, PS_ARENA_BLOCKS = 512 };

struct ps_arena { /* zero-initialise */
    struct {
        size_t offset, size;
    } used[PS_ARENA_BLOCKS]; /* by offset */
    int count;
    size_t peak; /* bytes that hold everything so far */
};

/* The smallest gap that holds size bytes (> 0). SIZE_MAX if more than PS_ARENA_BLOCKS are taken at one time.
 */
size_t ps_arena_take(struct ps_arena *arena, size_t size);
/* offset is what take returned and was not given back yet; anything else is ignored. */
void ps_arena_give(struct ps_arena *arena, size_t offset);

#endif
