/* SPDX-License-Identifier: Apache-2.0
 * The communicator between CPU processes: Gloo's TCP transport (module libparamsync-gloo.so), host memory. */
#ifndef PARAMSYNC_DIST_GLOO_H
#define PARAMSYNC_DIST_GLOO_H

#include "trainer/dist/comm.h"
#include "trainer/dist/rendezvous.h"

struct ps_gloo_options {
    const char
        *interface; /* "auto" (the address on the way to rank 0), a network interface, or a numeric address */
    double connect_s;    /* to connect all pairs; 0: 60 s */
    double collective_s; /* for one collective from its call to its end; 0: 600 s */
};

/* Connects to all ranks. The communicator is attached to the rendezvous, which must outlive it: a death
 * aborts it, and its errors carry the rendezvous's reason, which names the rank. PS_UNAVAILABLE without the
 * module.
 *
 * Collectives take one lock and so never overlap; their order must still be the same on all ranks. With a
 * reducer on the same communicator, the loop calls collectives only outside of ps_reducer_begin ..
 * ps_reducer_finish. Sums are added in a fixed order along the ring and distributed as bytes: all ranks get
 * the same bits. all_reduce takes PS_F32, PS_F64 and PS_I64. */
int ps_comm_gloo(struct ps_rendezvous *rendezvous, int rank, int world_size,
                 const struct ps_gloo_options *options, struct ps_comm **ret, struct ps_error *err);

/* world_size 1: single; else gloo. What the loop calls. rendezvous may be NULL for 1. */
int ps_comm_open(struct ps_rendezvous *rendezvous, int rank, int world_size,
                 const struct ps_gloo_options *options, struct ps_comm **ret, struct ps_error *err);
/* Detaches and destroys. Takes NULL. */
void ps_comm_close(struct ps_rendezvous *rendezvous, struct ps_comm *comm);

#endif
