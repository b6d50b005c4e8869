/* SPDX-License-Identifier: Apache-2.0
 * --init_method grpc://HOST:PORT/RUN: the ranks of a job find rank 0 through the sidecar's Rendezvous
 * service. Only rank 0's address and the job's secret go that way; the ranks' own connections are those of
 * dist/rendezvous.h. meet_sidecar.c speaks through libparamsync; meet_null.c is what a trainer-only build
 * has.
 *
 * Nothing that an earlier job of the same name left there can mislead: rank k says hello with a number of
 * its own making, rank 0 answers to that number with its address, and goes on once rank k has taken it. */
#ifndef PARAMSYNC_TRAINER_MEET_H
#define PARAMSYNC_TRAINER_MEET_H

#include "services/base/error.h"

struct ps_meet;

struct ps_meet_config {
    const char *sidecar; /* HOST:PORT */
    const char *run;
    const char *token_file, *tls_ca, *tls_cert, *tls_key;
    int rank, world_size;
    double join_s; /* until all must have met; 0: 300 */
};

enum { PS_MEET_SECRET = 65 };

/* What is named outlives the meeting. PS_UNIMPLEMENTED in a trainer-only build. */
int ps_meet_open(const struct ps_meet_config *config, struct ps_meet **ret, struct ps_error *err);
/* Rank 0: this machine's address on the way to the sidecar, and a new secret. */
int ps_meet_invite(struct ps_meet *meet, char *ret_host, size_t host_size, char ret_secret[PS_MEET_SECRET],
                   struct ps_error *err);
/* Rank 0, once it listens on port: answers every rank. Returns when all have the address. */
int ps_meet_answer(struct ps_meet *meet, int port, struct ps_error *err);
/* The others: rank 0's address and secret. */
int ps_meet_find(struct ps_meet *meet, char *ret_host, size_t host_size, int *ret_port,
                 char ret_secret[PS_MEET_SECRET], struct ps_error *err);
struct ps_meet *ps_meet_close(struct ps_meet *meet); /* takes NULL, returns NULL */

#endif
