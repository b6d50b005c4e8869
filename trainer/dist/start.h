/* SPDX-License-Identifier: Apache-2.0
 * What ranks do together outside of a step: agree at the start, take over rank 0's state, compare replicas.
 * All are collective: every rank calls them in the same order. */
#ifndef PARAMSYNC_DIST_START_H
#define PARAMSYNC_DIST_START_H

#include "trainer/backend/backend.h"
#include "trainer/dist/comm.h"

struct ps_start_pair {
    const char *name, *value; /* a setting that must be the same on all ranks, such as "epochs", "100" */
};

/* All-gathers names, shapes and settings and compares them before anything is exchanged by size. On a
 * difference every rank returns PS_FAILED_PRECONDITION with the same message: which ranks, and what differs.
 * At most 64 pairs; values are compared by their first 127 bytes. */
int ps_start_check(struct ps_comm *comm, const struct ps_model *model, const struct ps_start_pair *pairs,
                   size_t pair_count, struct ps_error *err);

/* Root's PARAMS, BUFFERS or moments to all ranks, in pieces of 4 Mi elements through host memory. */
int ps_broadcast_state(struct ps_comm *comm, const struct ps_backend_ops *ops, struct ps_backend *backend,
                       const struct ps_model *model, enum ps_state_kind what, int root, struct ps_error *err);
/* Rank 0's parameters and buffers: at the start. (Buffers alone before evaluation and checkpoint.) */
int ps_start_broadcast(struct ps_comm *comm, const struct ps_backend_ops *ops, struct ps_backend *backend,
                       const struct ps_model *model, struct ps_error *err);

/* The 64-bit hash of a state vector, in pieces; the same on all ranks when the bits are. Chain by seed.
 * Local. */
int ps_state_hash(const struct ps_backend_ops *ops, struct ps_backend *backend, const struct ps_model *model,
                  enum ps_state_kind what, uint64_t seed, uint64_t *ret_hash, struct ps_error *err);
/* PS_DATA_LOSS on every rank, naming the ranks that differ from rank 0, unless all hashes are equal. */
int ps_compare_hash(struct ps_comm *comm, const char *what, uint64_t hash, struct ps_error *err);

#endif
