/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/limits.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PEERS = 1024, NAME = 64 };

struct peer {
    char name[NAME];
    int64_t seen_ns;
    double calls, bytes; /* what is left of the share; bytes may be below 0: a chunk is never cut */
};

struct ps_limits {
    pthread_mutex_t lock; /* guards peers */
    const struct ps_clock *clock;
    double calls_per_s, bytes_per_s;
    struct peer *peers;
    size_t count;
};

struct ps_limits *ps_limits_new(const struct ps_clock *clock, double calls_per_s, double bytes_per_s)
{
    struct ps_limits *limits = calloc(1, sizeof *limits);
    if (!limits)
        return NULL;
    pthread_mutex_init(&limits->lock, NULL);
    limits->clock = clock;
    limits->calls_per_s = calls_per_s;
    limits->bytes_per_s = bytes_per_s;
    limits->peers = calls_per_s > 0 || bytes_per_s > 0 ? calloc(PEERS, sizeof *limits->peers) : NULL;
    if (!limits->peers && (calls_per_s > 0 || bytes_per_s > 0))
        return ps_limits_free(limits);
    return limits;
}

struct ps_limits *ps_limits_free(struct ps_limits *limits)
{
    if (!limits)
        return NULL;
    pthread_mutex_destroy(&limits->lock);
    free(limits->peers);
    free(limits);
    return NULL;
}

/* Without the port, which is another one for every connection. */
static void peer_name(const char *peer, char out[NAME])
{
    size_t n = strlen(peer);
    if (!strncmp(peer, "unix:", 5))
        n = 5;
    else
        while (n && peer[n - 1] >= '0' && peer[n - 1] <= '9')
            n--;
    snprintf(out, NAME, "%.*s", (int)(n < NAME ? n : NAME - 1), peer);
}

/* The peer with its share as of now. The lock is held. */
static struct peer *find(struct ps_limits *limits, const char *name)
{
    int64_t now = limits->clock->now_ns(limits->clock->context);
    struct peer *found = NULL, *oldest = NULL;
    for (size_t i = 0; i < limits->count && !found; i++) {
        struct peer *peer = &limits->peers[i];
        if (!strcmp(peer->name, name))
            found = peer;
        else if (!oldest || peer->seen_ns < oldest->seen_ns)
            oldest = peer;
    }
    if (!found) {
        found = limits->count < PEERS ? &limits->peers[limits->count++] : oldest;
        snprintf(found->name, NAME, "%s", name);
        found->calls = limits->calls_per_s;
        found->bytes = limits->bytes_per_s;
        found->seen_ns = now;
    }
    double passed = (double)(now - found->seen_ns) * 1e-9;
    found->calls += passed * limits->calls_per_s;
    found->bytes += passed * limits->bytes_per_s;
    if (found->calls > limits->calls_per_s)
        found->calls = limits->calls_per_s;
    if (found->bytes > limits->bytes_per_s)
        found->bytes = limits->bytes_per_s;
    found->seen_ns = now;
    return found;
}

bool ps_limits_call(struct ps_limits *limits, const char *peer, double *ret_wait_s)
{
    char name[NAME];
    *ret_wait_s = 0;
    if (!(limits->calls_per_s > 0))
        return true;
    peer_name(peer, name);
    pthread_mutex_lock(&limits->lock);
    struct peer *found = find(limits, name);
    bool room = found->calls >= 1;
    if (room)
        found->calls -= 1;
    else
        *ret_wait_s = (1 - found->calls) / limits->calls_per_s;
    pthread_mutex_unlock(&limits->lock);
    return room;
}

double ps_limits_bytes(struct ps_limits *limits, const char *peer, size_t bytes)
{
    char name[NAME];
    if (!(limits->bytes_per_s > 0))
        return 0;
    peer_name(peer, name);
    pthread_mutex_lock(&limits->lock);
    struct peer *found = find(limits, name);
    found->bytes -= (double)bytes;
    double wait_s = found->bytes < 0 ? -found->bytes / limits->bytes_per_s : 0;
    pthread_mutex_unlock(&limits->lock);
    return wait_s;
}
