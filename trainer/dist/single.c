/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/comm.h"

#include <stdlib.h>
#include <string.h>

static int single_all_reduce(struct ps_comm *comm, void *data, size_t count, enum ps_dtype type,
                             struct ps_error *err)
{
    (void)comm;
    (void)data; /* the sum over one rank */
    (void)count;
    (void)type;
    (void)err;
    return 0;
}

static int single_broadcast(struct ps_comm *comm, void *data, size_t bytes, int root, struct ps_error *err)
{
    (void)comm;
    (void)data;
    (void)bytes;
    return root == 0
               ? 0
               : ps_fail(err, PS_INVALID_ARGUMENT, "rank %d is out of range: the world size is 1", root);
}

static int single_all_gather(struct ps_comm *comm, const void *data, size_t bytes, void *out,
                             struct ps_error *err)
{
    (void)comm;
    (void)err;
    if (bytes)
        memmove(out, data, bytes);
    return 0;
}

static int single_barrier(struct ps_comm *comm, struct ps_error *err)
{
    (void)comm;
    (void)err;
    return 0;
}

static void single_abort(struct ps_comm *comm, const char *reason)
{
    (void)comm; /* no call ever waits */
    (void)reason;
}

static void single_destroy(struct ps_comm *comm)
{
    free(comm);
}

static const struct ps_comm_ops single_ops = {.name = "single",
                                              .all_reduce = single_all_reduce,
                                              .broadcast = single_broadcast,
                                              .all_gather = single_all_gather,
                                              .barrier = single_barrier,
                                              .abort = single_abort,
                                              .destroy = single_destroy};

struct ps_comm *ps_comm_single(void)
{
    struct ps_comm *comm = malloc(sizeof *comm);
    if (comm)
        *comm = (struct ps_comm){&single_ops, 0, 1};
    return comm;
}
