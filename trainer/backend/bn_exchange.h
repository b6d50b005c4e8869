/* SPDX-License-Identifier: Apache-2.0
 * Synchronised BatchNorm's exchange for backends whose memory is the host's: each rank's message of one BN op
 * becomes the message of all ranks' images. A message is doubles: [count, first[c], second[c]].
 *
 * Ranks' messages are merged in rank order, so all ranks get the same bits. */
#ifndef PARAMSYNC_BACKEND_BN_EXCHANGE_H
#define PARAMSYNC_BACKEND_BN_EXCHANGE_H

#include "trainer/backend/backend.h"

struct ps_bn_exchange {
    const struct ps_bn_sync *sync; /* NULL: a rank's own message is the answer */
    double *gathered;              /* [world_size, message] */
    double *merged;                /* [message] */
};

enum ps_bn_merge {
    PS_BN_MOMENTS, /* means and sums of squared deviations, merged pairwise (T. Chan, G. Golub and R. LeVeque,
                      1979) */
    PS_BN_SUMS,    /* sums */
};

size_t ps_bn_message(int channels); /* doubles of a message */
/* sync may be NULL; channels: of the widest BN op. PS_RESOURCE_EXHAUSTED without a message. */
int ps_bn_exchange_init(struct ps_bn_exchange *exchange, const struct ps_bn_sync *sync, int channels);
void ps_bn_exchange_done(struct ps_bn_exchange *exchange);
/* *ret_all: own, or memory of the exchange that is valid until the next call. */
int ps_bn_share(struct ps_bn_exchange *exchange, const double *own, int channels, enum ps_bn_merge merge,
                const double **ret_all, struct ps_error *err);

#endif
