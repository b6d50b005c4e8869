/* SPDX-License-Identifier: Apache-2.0
 * The communicator between replicas of one process: each is a thread, and sums go through their memory as it
 * is. What --mode dp runs on.
 *
 * Sums are added in rank order, whatever the count: all ranks get the same bits, and so does every run. */
#ifndef PARAMSYNC_DIST_LOCAL_H
#define PARAMSYNC_DIST_LOCAL_H

#include "trainer/dist/comm.h"

/* ret_comms: world_size communicators, one for each rank's thread, each to be destroyed by its ops; what they
 * share goes with the last of them. collective_s: for one collective, from its call to its end; 0: 600 s. A
 * rank that calls another collective than the others, or with another count, fails all of them, named. */
int ps_comm_local(int world_size, double collective_s, struct ps_comm **ret_comms, struct ps_error *err);

#endif
