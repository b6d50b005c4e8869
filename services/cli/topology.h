/* SPDX-License-Identifier: Apache-2.0
 * Which cores and which card each process of this machine gets. Pure but for reading /sys and /proc once. */
#ifndef PARAMSYNC_CLI_TOPOLOGY_H
#define PARAMSYNC_CLI_TOPOLOGY_H

#include <sched.h>
#include <stdbool.h>

enum { CLI_NODES_MAX = 64, CLI_CARDS_MAX = 64 };

struct cli_topology {
    cpu_set_t allowed;          /* to this process */
    int sibling[CPU_SETSIZE];   /* the first hardware thread of each thread's core */
    int node_count;             /* NUMA nodes that have an allowed core; at least 1 */
    int node_id[CLI_NODES_MAX]; /* as the kernel counts */
    cpu_set_t node_cpus[CLI_NODES_MAX];
    double quota;   /* of cores, by the control group; 0: none */
    int card_count; /* NVIDIA cards, by PCI address, as CUDA_DEVICE_ORDER=PCI_BUS_ID counts them */
    int card_node[CLI_CARDS_MAX]; /* NUMA node id; -1: not known */
};

/* root: "" for this machine, or a folder with sys/ and proc/ in it. visible: the value of
 * CUDA_VISIBLE_DEVICES, or NULL. What cannot be read is one node, without cards. */
void cli_topology_read(const char *root, const cpu_set_t *allowed, const char *visible,
                       struct cli_topology *ret);

struct cli_share {
    cpu_set_t cpus;
    int threads; /* cores of it, not hardware threads; at least 1 */
    int node;    /* NUMA node id; -1: of several */
};
/* The share of local rank `rank` of `count`: near its card if there are as many cards as ranks, else nodes in
 * turn; the ranks of a node divide its cores, and where there are fewer cores than ranks they share all. */
void cli_topology_share(const struct cli_topology *topology, int rank, int count, struct cli_share *ret);

/* "0-3,8" into a set. Returns 0, or -1 if it is none. */
int cli_cpu_list(const char *text, cpu_set_t *ret);

#endif
