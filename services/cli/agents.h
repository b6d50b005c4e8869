/* SPDX-License-Identifier: Apache-2.0
 * How the launchers of a job's nodes start and end every attempt together.
 *
 * Node 0 listens on the rendezvous address; every other node's launcher keeps one TCP connection to it. Text
 * lines, each ended by a newline, at most 1,023 bytes:
 *
 *   node 0   PARAMSYNC-LAUNCH 1 NONCE
 *   node n   HELLO n NODES RANKS ATTEMPT NONCE MAC     RANKS it will start, ATTEMPT it has seen last (-1:
 * none) node 0   WELCOME MAC, or REFUSED TEXT node 0   START ATTEMPT FIRST_RANK WORLD_SIZE MASTER_PORT
 * SESSION SIDECAR node n   FAILED ATTEMPT AGE_MS RANK STATUS TEXT    its first rank that failed, AGE_MS ago
 *   node n   DONE ATTEMPT                              all its ranks exited with 0
 *   node 0   STOP ATTEMPT                              node n ends its ranks and says
 *   node n   STOPPED ATTEMPT
 *   node n   INTERRUPTED SIGNAL                        the job is to end
 *   node 0   END STATUS TEXT                           the job has ended; so does the launcher
 *   both     PING                                      four times per heartbeat
 *
 * Both ends prove that they know the job's secret: MAC is HMAC-SHA-256 over the role, both nonces and the
 * numbers of HELLO. Whoever does not is dropped. No line carries a command or a secret: SESSION is a random
 * number from which, with the secret, both sides derive the ranks' own. A silent or closed connection is a
 * lost node: node 0 stops the attempt, the cut-off node ends its ranks by itself and comes back when it can.
 */
#ifndef PARAMSYNC_CLI_AGENTS_H
#define PARAMSYNC_CLI_AGENTS_H

#include "services/base/buf.h"
#include "services/base/digest.h"
#include "services/base/error.h"

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>

enum { CLI_LINE_MAX = 1024, CLI_SESSION = 33 };

struct cli_agents_config {
    int node, nodes, ranks;
    const char *host;
    int port;
    const char *secret;
    double heartbeat_s;
};

enum cli_agent_event_type {
    CLI_AGENT_JOINED, /* node 0: node; last attempt. Others: node 0 is there */
    CLI_AGENT_LOST,   /* node; text: why */
    CLI_AGENT_START,  /* others: the fields of START */
    CLI_AGENT_FAILED, /* node 0 */
    CLI_AGENT_DONE,
    CLI_AGENT_STOP,
    CLI_AGENT_STOPPED,
    CLI_AGENT_INTERRUPTED, /* status: the signal */
    CLI_AGENT_END,
    CLI_AGENT_REFUSED, /* others: text; nothing more will come */
};
struct cli_agent_event {
    enum cli_agent_event_type type;
    int node, attempt, ranks;
    int first_rank, world_size, master_port;
    char session[CLI_SESSION], sidecar[300];
    int rank, status;
    double at_s; /* ps_monotonic_s() when the rank ended */
    char text[CLI_LINE_MAX];
};

struct cli_agents;

/* Node 0 listens at once: on all addresses, or on loopback alone if host is one. */
int cli_agents_open(const struct cli_agents_config *config, struct cli_agents **ret, struct ps_error *err);
struct cli_agents *cli_agents_free(struct cli_agents *agents); /* takes NULL, returns NULL */

/* At most nodes + 17. Returns how many. */
size_t cli_agents_pollfds(const struct cli_agents *agents, struct pollfd *fds);
/* Moves bytes, sends pings, finds who is silent, connects again. Call it at least every heartbeat / 8. */
void cli_agents_step(struct cli_agents *agents);
/* 1 and the next event, or 0. */
int cli_agents_next(struct cli_agents *agents, struct cli_agent_event *ret);
/* The line to a node (node 0) or to node 0 (others; node is ignored); nothing happens if it is not there. */
void cli_agents_send(struct cli_agents *agents, int node, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool cli_agents_there(const struct cli_agents *agents, int node);
/* Waits until what was sent has left, at most timeout_s. */
void cli_agents_drain(struct cli_agents *agents, double timeout_s);

/* HMAC (RFC 2104) with SHA-256, the inner digest as hexadecimal text. Returns 0 or -1 (out of memory). */
int cli_mac(const char *secret, const char *text, char ret[PS_SHA256_HEX]);
int cli_nonce(char ret[CLI_SESSION]); /* 32 random hexadecimal digits */

#endif
