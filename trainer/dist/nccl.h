/* SPDX-License-Identifier: Apache-2.0
 * The communicator between GPUs, one process each: NCCL (module libparamsync-nccl.so). */
#ifndef PARAMSYNC_DIST_NCCL_H
#define PARAMSYNC_DIST_NCCL_H

#include "trainer/dist/comm.h"
#include "trainer/dist/rendezvous.h"

struct ps_nccl_options {
    int device;          /* this rank's GPU: its number on this machine */
    void *stream;        /* the backend's, which outlives the communicator */
    double init_s;       /* until all ranks are connected; 0: 120 s */
    double collective_s; /* for one collective, or one step's sums; 0: 600 s */
};

/* Connects to all ranks; rank 0's unique id goes through the rendezvous. Two ranks on one GPU are refused,
 * with the reason on every rank. Attached to the rendezvous, as Gloo's is. A thread watches NCCL's
 * asynchronous errors and the deadline of queued steps, and tells all ranks; what then still waits for the
 * device is ended by the rendezvous's on_failure. Collectives of host memory go through a pinned stage of 4
 * MiB. */
int ps_comm_nccl(struct ps_rendezvous *rendezvous, int rank, int world_size,
                 const struct ps_nccl_options *options, struct ps_comm **ret, struct ps_error *err);

#endif
