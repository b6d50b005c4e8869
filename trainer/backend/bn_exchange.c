/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/bn_exchange.h"

#include <stdlib.h>
#include <string.h>

size_t ps_bn_message(int channels)
{
    return 1 + 2 * (size_t)channels;
}

int ps_bn_exchange_init(struct ps_bn_exchange *x, const struct ps_bn_sync *sync, int channels)
{
    *x = (struct ps_bn_exchange){.sync = sync};
    if (!sync)
        return 0;
    x->gathered = calloc(ps_bn_message(channels) * (size_t)sync->world_size, sizeof *x->gathered);
    x->merged = calloc(ps_bn_message(channels), sizeof *x->merged);
    return x->gathered && x->merged ? 0 : PS_RESOURCE_EXHAUSTED;
}

void ps_bn_exchange_done(struct ps_bn_exchange *x)
{
    free(x->gathered);
    free(x->merged);
    *x = (struct ps_bn_exchange){0};
}

int ps_bn_share(struct ps_bn_exchange *x, const double *own, int channels, enum ps_bn_merge merge,
                const double **ret_all, struct ps_error *err)
{
    if (!x->sync) {
        *ret_all = own;
        return 0;
    }
    const size_t c = (size_t)channels, length = ps_bn_message(channels);
    int code = x->sync->gather(x->sync->context, own, length * sizeof *own, x->gathered, err);
    if (code < 0)
        return code;
    double *all = x->merged;
    memcpy(all, x->gathered, length * sizeof *all);
    for (int rank = 1; rank < x->sync->world_size; rank++) {
        const double *m = x->gathered + (size_t)rank * length;
        const double before = all[0], part = m[0], total = before + part;
        for (size_t k = 1; k <= c; k++) {
            if (merge == PS_BN_MOMENTS) {
                double delta = m[k] - all[k];
                all[k] += delta * part / total;
                all[c + k] += m[c + k] + delta * delta * before * part / total;
            } else {
                all[k] += m[k];
                all[c + k] += m[c + k];
            }
        }
        all[0] = total;
    }
    *ret_all = all;
    return 0;
}
