/* SPDX-License-Identifier: Apache-2.0
 * Which rank am I, of how many, and where is rank 0? A pure function of the flags and the environment.
 *
 * The first family that is there wins: flags (--rank, --world_size, --init_method) > torchrun (RANK,
 * WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE) > Open MPI (OMPI_COMM_WORLD_*) > Slurm
 * (SLURM_*, only in a step) > ModelArts (VC_*, MA_*) > a single process. Half a family is an error, never
 * "rank 0 of 1".
 * --init_method alone only says where; who comes from the next family then.
 *
 * Port: torchrun with TORCHELASTIC_USE_AGENT_STORE=True listens on MASTER_PORT itself, so ours is then the
 * next one, MASTER_PORT + 1 (MASTER_PORT - 1 for 65535). Launchers that give no port: 20000 + job number mod
 * 20000 (Open MPI, Slurm), 6060 on ModelArts; MASTER_PORT wins over these. */
#ifndef PARAMSYNC_BASE_LAUNCH_H
#define PARAMSYNC_BASE_LAUNCH_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stdint.h>

struct ps_launch_flags {
    const char *init_method;           /* NULL, "" or "none" (any case, the sample's default): not given */
    bool rank_given, world_size_given; /* set by the command line, not by a default */
    int64_t rank, world_size;
};

enum { PS_WORLD_MAX = 4096 };

struct ps_launch {
    int rank, world_size;
    int local_rank, local_size; /* -1: not known here; the rendezvous tells (ps_rendezvous_locality) */
    char host[256];             /* of rank 0; "" only if world_size is 1 and nothing was said */
    int port;
    /* With grpc://HOST:PORT/RUN: where the sidecar is and which of its rendezvous; then host, port and secret
     * come from there. Else empty. */
    char meet_sidecar[300], meet_run[257];
    const char *source; /* static: "flags", "torchrun", "Open MPI", "Slurm", "ModelArts", "single process" */
    char secret[320]; /* keeps strangers out of the rendezvous: PARAMSYNC_JOB_SECRET, or derived from the job
                       */
};

typedef const char *(*ps_getenv)(void *context, const char *name); /* NULL if unset; "" counts as unset */

/* get may be NULL: the process's environment. PS_INVALID_ARGUMENT with one line for the user. */
int ps_launch_resolve(const struct ps_launch_flags *flags, ps_getenv get, void *context,
                      struct ps_launch *ret, struct ps_error *err);

/* ---- The same question for a launcher, which counts nodes: one of it runs on each ---- */

struct ps_nodes_flags {
    int64_t count, rank; /* 0 and -1: not given */
    const char *address; /* HOST:PORT of node 0, or NULL */
};

struct ps_nodes {
    int count, rank;
    int cards;      /* accelerators of this node as the scheduler tells them; 0: not told */
    char host[256]; /* of node 0; "" only if count is 1 and nothing was said */
    int port;
    const char *source; /* static: "flags", "Open MPI", "Slurm", "ModelArts", "single node" */
    char secret[320];   /* as in ps_launch */
    bool open_secret;   /* it follows from things that others know too */
};

/* Flags > Open MPI (OMPI_COMM_WORLD_*, one process per node) > Slurm (SLURM_*, in a step of one task per
 * node) > ModelArts (VC_*, MA_*) > a single node. Flags may complete a family: --rdzv with Slurm's counts,
 * for example. */
int ps_nodes_resolve(const struct ps_nodes_flags *flags, ps_getenv get, void *context, struct ps_nodes *ret,
                     struct ps_error *err);

#endif
