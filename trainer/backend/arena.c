/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/arena.h"

#include <stdint.h>
#include <string.h>

size_t ps_arena_take(struct ps_arena *a, size_t size)
{
    if (a->count == PS_ARENA_BLOCKS)
        return SIZE_MAX;
    size = (size + PS_ARENA_ALIGN - 1) / PS_ARENA_ALIGN * PS_ARENA_ALIGN;
    size_t end = 0, best = SIZE_MAX; /* end of the block before the gap; best gap's size */
    int place = a->count;
    for (int i = 0; i < a->count; i++) {
        size_t gap = a->used[i].offset - end;
        if (gap >= size && gap < best) {
            best = gap;
            place = i;
        }
        end = a->used[i].offset + a->used[i].size;
    }
    if (place < a->count)
        end = place ? a->used[place - 1].offset + a->used[place - 1].size : 0;
    memmove(&a->used[place + 1], &a->used[place], (size_t)(a->count - place) * sizeof a->used[0]);
    a->used[place].offset = end;
    a->used[place].size = size;
    a->count++;
    if (end + size > a->peak)
        a->peak = end + size;
    return end;
}

void ps_arena_give(struct ps_arena *a, size_t offset)
{
    for (int i = 0; i < a->count; i++)
        if (a->used[i].offset == offset) {
            a->count--;
            memmove(&a->used[i], &a->used[i + 1], (size_t)(a->count - i) * sizeof a->used[0]);
            return;
        }
}
