/* SPDX-License-Identifier: Apache-2.0
 * The processes of one attempt on this machine: started together, watched, ended together.
 *
 * Each is the leader of a process group of its own, dies with this process (PR_SET_PDEATHSIG) and has nothing
 * on its standard input. What it prints goes line by line to ours, and its last lines are kept. One thread
 * uses this, the one that started it; it must be the program's first (a death signal follows the thread). */
#ifndef PARAMSYNC_CLI_WORKERS_H
#define PARAMSYNC_CLI_WORKERS_H

#include "services/base/buf.h"
#include "services/base/error.h"
#include "services/cli/topology.h"

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* What is to be written, where a full pipe or a stopped terminal may not block us. */
struct cli_output {
    int fd;
    bool colour; /* a terminal that wants it */
    bool closed; /* the reader went away: what comes is dropped, the training goes on */
    struct ps_buf waiting;
};
/* Writes what goes without waiting (all: waits). */
void cli_output_flush(struct cli_output *output, bool all);

struct cli_pair {
    char name[40];
    const char *value;
};

struct cli_workers_config {
    char **command; /* NULL at its end */
    int count, first_rank, world_size, node;
    const struct cli_pair *environment; /* the same for all; a rank's own are added */
    size_t environment_count;
    const struct cli_topology *topology;
    bool bind;           /* to the rank's cores */
    bool prefix;         /* before each line: [rank] */
    const char *log_dir; /* each rank's output to LOG_DIR/rank_N.log, appended; NULL: not */
    const char *heading; /* first line of an attempt there */
    struct cli_output *out, *err;
};

struct cli_workers;

/* All or none are started. PS_NOT_FOUND, PS_PERMISSION_DENIED: the command cannot be run. */
int cli_workers_start(const struct cli_workers_config *config, struct cli_workers **ret,
                      struct ps_error *err);
/* Kills what is left, at once, and frees. Takes NULL; returns NULL. */
struct cli_workers *cli_workers_free(struct cli_workers *workers);

/* The pipes to wait for; at most 2 * count. Returns how many. */
size_t cli_workers_pollfds(const struct cli_workers *workers, struct pollfd *fds);
/* Takes what is there to be read. */
void cli_workers_read(struct cli_workers *workers);
/* A child of this process has ended and was not waited for yet. If it is one of these: kills what is left of
 * its process group, waits for it and returns 1; else 0. */
int cli_workers_reap(struct cli_workers *workers, pid_t pid);
/* To all that live. ending: how they end from now on is our doing, not their failure. */
void cli_workers_signal(struct cli_workers *workers, int number, bool ending);
/* Empties the pipes, once none lives. */
void cli_workers_sweep(struct cli_workers *workers);
int cli_workers_alive(const struct cli_workers *workers);

struct cli_failure {
    int rank;
    int status; /* 1..255 as a shell has it: 128 + signal */
    int signal; /* 0: it exited */
    double at_s;
};
/* The first that failed (before any signal from us; of those that ended together the one that was killed).
 * Returns 0 if none did. */
int cli_workers_failure(const struct cli_workers *workers, struct cli_failure *ret);
/* The last lines that the rank printed, with newlines; "" if none. Valid until free. */
const char *cli_workers_last_lines(struct cli_workers *workers, int rank);

#endif
