/* SPDX-License-Identifier: Apache-2.0
 * From a stored image to the one that is trained on. Integer arithmetic throughout: the result is the same on
 * every machine, and a function of (seed, epoch, sample index) alone, so that neither the number of ranks nor
 * of threads changes what is seen. */
#ifndef PARAMSYNC_DATA_AUGMENT_H
#define PARAMSYNC_DATA_AUGMENT_H

#include "services/base/error.h"
#include "trainer/data/dataset.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    PS_RESOLUTION_MIN = 8,
    PS_RESOLUTION_MAX = PS_IMAGE_SIDE,
    PS_RESIZE_TAPS = 2 * PS_IMAGE_SIDE / PS_RESOLUTION_MIN + 1,
};

/* What happens to one image: shifted by (dx, dy) in -4..4 with the border reflected (reflect-pad by 4, then a
 * random 32 x 32 crop), and mirrored. All zero: nothing. */
struct ps_shift {
    int dx, dy;
    bool flip;
};
struct ps_shift ps_augment_draw(uint64_t seed, int epoch, uint32_t index);
void ps_augment_apply(struct ps_shift shift, const uint8_t *in,
                      uint8_t *out); /* [3, 32, 32] each; in != out */

/* Antialiased bilinear reduction from 32 to resolution pixels: the triangle filter, as wide as the reduction,
 * that torch.nn.functional.interpolate(antialias=True) uses; weights in units of 1 / 4096. */
struct ps_resize {
    int resolution;
    int first[PS_RESOLUTION_MAX];
    int taps[PS_RESOLUTION_MAX];
    uint32_t weight[PS_RESOLUTION_MAX][PS_RESIZE_TAPS];
};
/* PS_INVALID_ARGUMENT out of PS_RESOLUTION_MIN..PS_RESOLUTION_MAX. */
int ps_resize_prepare(int resolution, struct ps_resize *ret, struct ps_error *err);
void ps_resize_apply(const struct ps_resize *resize, const uint8_t *in, uint8_t *out); /* [3, r, r] */

/* "16:2,24:2": 16 pixels for 2 epochs, then 24 for 2; the last one goes on. A part without ":N" goes on too.
 */
enum { PS_RESOLUTION_PARTS = 32 };
struct ps_resolution_schedule {
    int count;
    struct {
        int resolution;
        int until; /* last epoch of this part, counted from 1 */
    } part[PS_RESOLUTION_PARTS];
};
int ps_resolution_parse(const char *text, struct ps_resolution_schedule *ret, struct ps_error *err);
int ps_resolution_at(const struct ps_resolution_schedule *schedule, int epoch); /* epoch from 1 */
int ps_resolution_largest(const struct ps_resolution_schedule *schedule, int epochs);

#endif
