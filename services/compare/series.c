/* SPDX-License-Identifier: Apache-2.0 */
#include "services/compare/compare.h"

#include <math.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double ps_compare_median(double *values, size_t count)
{
    if (!count)
        return NAN;
    qsort(values, count, sizeof *values, by_value);
    double high = values[count / 2];
    if (count % 2)
        return high;
    double low = values[count / 2 - 1];
    return low == high ? high : low + (high - low) / 2; /* equal first: infinity less infinity is NaN */
}

void ps_compare_smooth(const double *values, size_t count, double weight, double *ret_smoothed)
{
    double average = 0, share = 0; /* share: the weight that the average has seen, 1 - weight^n */
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(values[i])) {
            ret_smoothed[i] = values[i];
            continue;
        }
        average = weight * average + (1 - weight) * values[i];
        share = weight * share + (1 - weight);
        ret_smoothed[i] = share > 0 ? average / share : values[i];
    }
}

size_t ps_compare_downsample(const double *values, size_t count, size_t max_points, size_t *ret_indices)
{
    if (max_points < 4)
        max_points = 4;
    if (count <= max_points) {
        for (size_t i = 0; i < count; i++)
            ret_indices[i] = i;
        return count;
    }
    size_t n = 0, interior = count - 2;
    size_t buckets = (max_points - 2) / 3;
    /* Too few places for three per bucket: one bucket, its minimum and maximum. */
    bool marks = buckets > 0;
    if (!buckets)
        buckets = 1;
    ret_indices[n++] = 0;
    for (size_t b = 0; b < buckets; b++) {
        /* In 128 bits: interior * b may not fit in 64. */
        size_t from = 1 + (size_t)((unsigned __int128)interior * b / buckets);
        size_t to = 1 + (size_t)((unsigned __int128)interior * (b + 1) / buckets);
        size_t low = SIZE_MAX, high = SIZE_MAX, mark = SIZE_MAX;
        for (size_t i = from; i < to; i++) {
            if (!isfinite(values[i])) {
                if (mark == SIZE_MAX)
                    mark = i;
                continue;
            }
            if (low == SIZE_MAX || values[i] < values[low])
                low = i;
            if (high == SIZE_MAX || values[i] > values[high])
                high = i;
        }
        size_t picks[3] = {low, high, marks || low == SIZE_MAX ? mark : SIZE_MAX};
        for (int pass = 0; pass < 3; pass++) {
            size_t next = SIZE_MAX;
            for (int k = 0; k < 3; k++)
                if (picks[k] != SIZE_MAX && picks[k] > ret_indices[n - 1] && picks[k] < next)
                    next = picks[k];
            if (next != SIZE_MAX)
                ret_indices[n++] = next;
        }
    }
    ret_indices[n++] = count - 1;
    return n;
}
