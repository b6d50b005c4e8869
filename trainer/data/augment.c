/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/augment.h"

#include "services/base/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAD = 4, SIDE = PS_IMAGE_SIDE, PLANE = PS_IMAGE_SIDE * PS_IMAGE_SIDE, ONE = 4096 };

/* splitmix64's step (Steele, Lea and Flood, OOPSLA 2014): each input bit reaches every output bit. */
static uint64_t scramble(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

struct ps_shift ps_augment_draw(uint64_t seed, int epoch, uint32_t index)
{
    uint64_t r = scramble(scramble(scramble(seed) ^ (uint64_t)epoch) ^ index);
    return (struct ps_shift){
        .dx = (int)((r & 0xffffff) % (2 * PAD + 1)) - PAD,
        .dy = (int)((r >> 24 & 0xffffff) % (2 * PAD + 1)) - PAD,
        .flip = r >> 63,
    };
}

static int reflect(int i)
{
    if (i < 0)
        return -i;
    return i < SIDE ? i : 2 * (SIDE - 1) - i;
}

void ps_augment_apply(struct ps_shift shift, const uint8_t *in, uint8_t *out)
{
    int column[SIDE];
    for (int x = 0; x < SIDE; x++)
        column[x] = reflect((shift.flip ? SIDE - 1 - x : x) + shift.dx);
    for (int c = 0; c < PS_IMAGE_CHANNELS; c++)
        for (int y = 0; y < SIDE; y++) {
            const uint8_t *row = in + c * PLANE + reflect(y + shift.dy) * SIDE;
            uint8_t *to = out + c * PLANE + y * SIDE;
            for (int x = 0; x < SIDE; x++)
                to[x] = row[column[x]];
        }
}

int ps_resize_prepare(int resolution, struct ps_resize *ret, struct ps_error *err)
{
    if (resolution < PS_RESOLUTION_MIN || resolution > PS_RESOLUTION_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "resolution %d: must be from %d to %d", resolution,
                       PS_RESOLUTION_MIN, PS_RESOLUTION_MAX);
    memset(ret, 0, sizeof *ret);
    ret->resolution = resolution;
    double scale = (double)SIDE / resolution;
    for (int i = 0; i < resolution; i++) {
        double centre = (i + 0.5) * scale, exact[PS_RESIZE_TAPS + 2], total = 0;
        int first = (int)floor(centre - scale + 0.5), last = (int)floor(centre + scale + 0.5);
        first = first < 0 ? 0 : first;
        last = last > SIDE ? SIDE : last;
        int taps = 0, begin = first;
        for (int k = first; k < last; k++) {
            double w = 1 - fabs((k + 0.5 - centre) / scale);
            if (w <= 0 && taps == 0) {
                begin = k + 1;
                continue;
            }
            if (w <= 0)
                break;
            exact[taps++] = w;
            total += w;
        }
        /* Rounded so that they add up to one exactly: a flat image stays what it is. */
        uint32_t sum = 0;
        int heaviest = 0;
        for (int t = 0; t < taps; t++) {
            ret->weight[i][t] = (uint32_t)lround(exact[t] / total * ONE);
            sum += ret->weight[i][t];
            if (ret->weight[i][t] > ret->weight[i][heaviest])
                heaviest = t;
        }
        ret->weight[i][heaviest] += ONE - sum;
        ret->first[i] = begin;
        ret->taps[i] = taps;
    }
    return 0;
}

void ps_resize_apply(const struct ps_resize *resize, const uint8_t *in, uint8_t *out)
{
    const int r = resize->resolution;
    if (r == SIDE) {
        memcpy(out, in, PS_IMAGE_VALUES);
        return;
    }
    uint32_t wide[SIDE][SIDE]; /* rows of the input, columns of the output, in 1 / 4096 */
    for (int c = 0; c < PS_IMAGE_CHANNELS; c++) {
        for (int y = 0; y < SIDE; y++) {
            const uint8_t *row = in + c * PLANE + y * SIDE;
            for (int x = 0; x < r; x++) {
                uint32_t sum = 0;
                for (int t = 0; t < resize->taps[x]; t++)
                    sum += resize->weight[x][t] * row[resize->first[x] + t];
                wide[y][x] = sum;
            }
        }
        for (int y = 0; y < r; y++) {
            uint32_t sum[SIDE];
            for (int x = 0; x < r; x++)
                sum[x] = ONE * ONE / 2; /* 255 * 2^24 + 2^23 still fits */
            for (int t = 0; t < resize->taps[y]; t++)
                for (int x = 0; x < r; x++)
                    sum[x] += resize->weight[y][t] * wide[resize->first[y] + t][x];
            for (int x = 0; x < r; x++)
                out[(c * r + y) * r + x] = (uint8_t)(sum[x] >> 24);
        }
    }
}

int ps_resolution_parse(const char *text, struct ps_resolution_schedule *ret, struct ps_error *err)
{
    struct ps_resolution_schedule schedule = {0};
    int64_t until = 0;
    const char *p = text;
    for (;;) {
        char part[32];
        size_t n = strcspn(p, ",");
        int64_t resolution, epochs = INT32_MAX;
        if (n == 0 || n >= sizeof part)
            break;
        memcpy(part, p, n);
        part[n] = '\0';
        char *colon = strchr(part, ':');
        if (colon)
            *colon++ = '\0';
        if (ps_parse_int64(part, PS_RESOLUTION_MIN, PS_RESOLUTION_MAX, &resolution) ||
            (colon && ps_parse_int64(colon, 1, 1000000, &epochs)) || (!colon && p[n]) ||
            schedule.count == PS_RESOLUTION_PARTS)
            break;
        until = until + epochs > INT32_MAX ? INT32_MAX : until + epochs;
        schedule.part[schedule.count].resolution = (int)resolution;
        schedule.part[schedule.count++].until = (int)until;
        if (!p[n]) {
            *ret = schedule;
            return 0;
        }
        p += n + 1;
    }
    return ps_fail(
        err, PS_INVALID_ARGUMENT,
        "--resolution %.60s: must be PIXELS or PIXELS:EPOCHS,... with %d to %d pixels, such as 16:2,24:2",
        text, PS_RESOLUTION_MIN, PS_RESOLUTION_MAX);
}

int ps_resolution_at(const struct ps_resolution_schedule *schedule, int epoch)
{
    for (int i = 0; i + 1 < schedule->count; i++)
        if (epoch <= schedule->part[i].until)
            return schedule->part[i].resolution;
    return schedule->part[schedule->count - 1].resolution;
}

int ps_resolution_largest(const struct ps_resolution_schedule *schedule, int epochs)
{
    int largest = 0;
    for (int i = 0; i < schedule->count; i++) {
        if (schedule->part[i].resolution > largest)
            largest = schedule->part[i].resolution;
        if (schedule->part[i].until >= epochs)
            break;
    }
    return largest;
}
