/* SPDX-License-Identifier: Apache-2.0
 * What a training step would take on more cards than were measured: pure arithmetic, no I/O, no clock.
 *
 * One card's step is measured: how long forward, backward and update take, and when during backward each
 * gradient is there. Gradients fill buckets as in trainer/dist/reducer.h (1 MiB first, then 25 MiB, each
 * closed by the gradient that reaches its limit); buckets are reduced one at a time in that order, each as
 * soon as it is full and the one before is done, while backward goes on:
 *
 *     start_k = max(ready_k, end_{k-1})    end_k = start_k + T(bytes_k)
 *     step    = input + forward + max(backward, end_last) + copies + update
 *
 * T is the alpha-beta model (R. Hockney, Parallel Computing 20, 1994): a message of n bytes takes alpha + n /
 * B. For p cards, on M nodes of g:
 *
 *   ring          2 (p-1) alpha + 2 (p-1)/p n / B     (P. Patarasu, X. Yuan, JPDC 69, 2009); over several
 * nodes every round waits for its slowest link tree          2 ceil(log2 p) alpha + 2 n / B      two
 * pipelined trees, each with half the data (P. Sanders, J. Speck, J. Traeff, Parallel Computing 35, 2009);
 * alpha and B of the slowest link hierarchical  reduce-scatter in the node, a ring of the parts between
 * nodes, all-gather in the node: 2 (g-1) alpha_in + 2 (g-1)/g n / B_in + 2 (M-1) alpha_out + 2 (M-1)/M n /
 * B_out
 *
 * B_in is one card's bandwidth in one direction, B_out one node's (all its network cards together). Not in
 * the model: stragglers, congestion, what communication takes from computing.
 *
 * Times are seconds, sizes bytes. Thread-safe: no state. */
#ifndef PARAMSYNC_COMPARE_PLAN_H
#define PARAMSYNC_COMPARE_PLAN_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>

enum { PS_PLAN_BUCKETS_MAX = 256 };
#define PS_PLAN_FIRST_BUCKET 1048576.0
#define PS_PLAN_BUCKET 26214400.0

struct ps_plan_gradient {
    double ready_s; /* since backward began */
    double bytes;
};

struct ps_plan_step { /* of one card alone, at the batch that every card will have */
    double input_s, forward_s, backward_s, update_s;
    const struct ps_plan_gradient *gradients; /* in the order of arrival */
    size_t gradient_count;
};

struct ps_plan_link {
    double alpha_s, bytes_per_s;
};

enum ps_plan_algorithm { PS_PLAN_AUTO, PS_PLAN_RING, PS_PLAN_TREE, PS_PLAN_HIERARCHICAL };
const char *ps_plan_algorithm_name(int algorithm);

struct ps_plan_setup {
    int cards, cards_per_node;        /* the last node may have fewer; hierarchical wants them even */
    struct ps_plan_link in, out;      /* within a node, between nodes */
    enum ps_plan_algorithm algorithm; /* AUTO: for each bucket the one that takes least */
    double first_bucket, bucket;      /* limits; 0: as above */
    bool overlap;                     /* else all buckets follow backward */
    double copy_bytes_per_s;          /* gradients into buckets and back, each once; 0: costs nothing */
};

struct ps_plan_bucket {
    double bytes, ready_s, start_s, end_s; /* since backward began */
    int gradients;
    enum ps_plan_algorithm algorithm;
};

struct ps_plan_result {
    int cards, nodes;
    double step_s;
    double reduce_s;   /* the sum of all reductions */
    double exposed_s;  /* of it, what backward did not cover */
    double speedup;    /* images per second beside one card's, each card with its batch */
    double efficiency; /* speedup / cards */
    struct ps_plan_bucket buckets[PS_PLAN_BUCKETS_MAX];
    size_t bucket_count;
};

/* Seconds of one all-reduce. PS_INVALID_ARGUMENT for what has no such algorithm (hierarchical on uneven
 * nodes). AUTO is not taken. */
int ps_plan_reduce(const struct ps_plan_setup *setup, enum ps_plan_algorithm algorithm, double bytes,
                   double *ret_s, struct ps_error *err);

/* PS_INVALID_ARGUMENT: a number that is none, gradients out of order, more than PS_PLAN_BUCKETS_MAX buckets.
 */
int ps_plan(const struct ps_plan_step *step, const struct ps_plan_setup *setup, struct ps_plan_result *ret,
            struct ps_error *err);

/* Named links: "nvlink4", "ib-ndr", ... Nominal bandwidth of one direction, latency as usually seen; NULL or
 * the i-th for a list. */
struct ps_plan_preset {
    const char *name, *about;
    struct ps_plan_link link;
};
const struct ps_plan_preset *ps_plan_preset(const char *name);
const struct ps_plan_preset *ps_plan_preset_at(size_t i); /* NULL after the last */

/* The published result of the sample: 60 min on one card, 20 min on 16 cards, 100 epochs each. */
#define PS_PLAN_SAMPLE_CARDS 16
#define PS_PLAN_SAMPLE_SPEEDUP 3.0
#define PS_PLAN_SAMPLE_EFFICIENCY (PS_PLAN_SAMPLE_SPEEDUP / PS_PLAN_SAMPLE_CARDS)

#endif
