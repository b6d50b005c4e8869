/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/rendezvous.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHAINS = 4096, MAX_KEYS = 100000, MAX_BYTES = 64 << 20, ENTRY_COST = 128 };
static const double default_ttl_s = 600, max_ttl_s = 86400, sweep_every_s = 10;

struct entry {
    struct entry *next;
    char *run, *key;
    void *value; /* NULL: a counter */
    size_t size;
    int64_t sum;
    int64_t ends_ns;
};

struct ps_meeting_wait {
    struct ps_meeting_wait *next, **back;
    const char *run, *key; /* the caller's */
    void (*wake)(void *context);
    void *context;
};

struct ps_meetings {
    pthread_mutex_t lock; /* guards all below */
    const struct ps_clock *clock;
    struct entry *chains[CHAINS];
    struct ps_meeting_wait *waits[CHAINS];
    size_t keys, bytes;
    int64_t swept_ns;
};

static int64_t now(const struct ps_meetings *m)
{
    return m->clock->now_ns(m->clock->context);
}

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/ */
static size_t chain_of(const char *run, const char *key)
{
    uint64_t hash = 14695981039346656037u;
    for (const char *text = run; text; text = text == run ? key : NULL)
        for (const char *p = text;; p++) {
            hash = (hash ^ (unsigned char)*p) * 1099511628211u;
            if (!*p)
                break;
        }
    return (size_t)(hash % CHAINS);
}

static size_t cost(const struct entry *e)
{
    return ENTRY_COST + strlen(e->run) + strlen(e->key) + e->size;
}

static void drop(struct ps_meetings *m, struct entry **at)
{
    struct entry *e = *at;
    *at = e->next;
    m->keys--;
    m->bytes -= cost(e);
    free(e->run);
    free(e->key);
    free(e->value);
    free(e);
}

/* The lock is held. Forgotten ones go when they are met, and all of them now and then. */
static void sweep(struct ps_meetings *m)
{
    int64_t t = now(m);
    if (t - m->swept_ns < (int64_t)(sweep_every_s * 1e9))
        return;
    m->swept_ns = t;
    for (size_t i = 0; i < CHAINS; i++)
        for (struct entry **at = &m->chains[i]; *at;) {
            if ((*at)->ends_ns <= t)
                drop(m, at);
            else
                at = &(*at)->next;
        }
}

static struct entry **find(struct ps_meetings *m, const char *run, const char *key)
{
    struct entry **at = &m->chains[chain_of(run, key)];
    while (*at && (strcmp((*at)->run, run) || strcmp((*at)->key, key)))
        at = &(*at)->next;
    if (*at && (*at)->ends_ns <= now(m)) {
        drop(m, at);
        return NULL;
    }
    return *at ? at : NULL;
}

static int check(const char *run, const char *key, double ttl_s, struct ps_error *err)
{
    const char *const names[] = {"run", "key"}, *const values[] = {run, key};
    for (int i = 0; i < 2; i++)
        if (!*values[i] || strlen(values[i]) > PS_MEETING_NAME_MAX)
            return ps_fail(err, PS_INVALID_ARGUMENT, "%s: must have 1 to %d bytes", names[i],
                           PS_MEETING_NAME_MAX);
    if (!(ttl_s >= 0 && ttl_s <= max_ttl_s))
        return ps_fail(err, PS_INVALID_ARGUMENT, "ttl_s: must be 0 to %.0f", max_ttl_s);
    return 0;
}

/* The lock is held. A new entry under this name, which takes the place of the one there is; owns value. */
static int put(struct ps_meetings *m, const char *run, const char *key, void *value, size_t size, int64_t sum,
               double ttl_s, struct ps_error *err)
{
    struct entry **old = find(m, run, key);
    size_t wanted = ENTRY_COST + strlen(run) + strlen(key) + size, freed = old ? cost(*old) : 0;
    if ((!old && m->keys >= MAX_KEYS) || m->bytes - freed + wanted > MAX_BYTES)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "the rendezvous holds %zu keys and %zu bytes, as many as it may: wait until some are "
                       "forgotten, or give them a shorter ttl_s",
                       m->keys, m->bytes);
    struct entry *e = calloc(1, sizeof *e);
    if (e)
        *e = (struct entry){.run = strdup(run),
                            .key = strdup(key),
                            .value = value,
                            .size = size,
                            .sum = sum,
                            .ends_ns = now(m) + (int64_t)((ttl_s > 0 ? ttl_s : default_ttl_s) * 1e9)};
    if (!e || !e->run || !e->key) {
        if (e) {
            free(e->run);
            free(e->key);
        }
        free(e);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    if (old)
        drop(m, old);
    size_t chain = chain_of(run, key);
    e->next = m->chains[chain];
    m->chains[chain] = e;
    m->keys++;
    m->bytes += wanted;
    for (struct ps_meeting_wait *w = m->waits[chain]; w; w = w->next)
        if (!strcmp(w->run, run) && !strcmp(w->key, key))
            w->wake(w->context);
    return 0;
}

struct ps_meetings *ps_meetings_new(const struct ps_clock *clock)
{
    struct ps_meetings *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->clock = clock ? clock : &ps_clock_monotonic;
    pthread_mutex_init(&m->lock, NULL);
    return m;
}

struct ps_meetings *ps_meetings_free(struct ps_meetings *m)
{
    if (!m)
        return NULL;
    for (size_t i = 0; i < CHAINS; i++)
        while (m->chains[i])
            drop(m, &m->chains[i]);
    pthread_mutex_destroy(&m->lock);
    free(m);
    return NULL;
}

int ps_meetings_set(struct ps_meetings *m, const char *run, const char *key, const void *value, size_t size,
                    double ttl_s, struct ps_error *err)
{
    int code = check(run, key, ttl_s, err);
    if (code)
        return code;
    if (size > PS_MEETING_VALUE_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "value: %zu bytes, at most %d", size, PS_MEETING_VALUE_MAX);
    void *copy = malloc(size + 1);
    if (!copy)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (size)
        memcpy(copy, value, size);
    pthread_mutex_lock(&m->lock);
    sweep(m);
    code = put(m, run, key, copy, size, 0, ttl_s, err);
    pthread_mutex_unlock(&m->lock);
    if (code)
        free(copy);
    return code;
}

int ps_meetings_add(struct ps_meetings *m, const char *run, const char *key, int64_t amount, double ttl_s,
                    int64_t *ret_sum, struct ps_error *err)
{
    int code = check(run, key, ttl_s, err);
    if (code)
        return code;
    pthread_mutex_lock(&m->lock);
    sweep(m);
    struct entry **at = find(m, run, key);
    int64_t sum = 0;
    if (at && (*at)->value)
        code = ps_fail(err, PS_FAILED_PRECONDITION, "key: %.100s holds a value and is no counter", key);
    else if (__builtin_add_overflow(at ? (*at)->sum : 0, amount, &sum))
        code = ps_fail(err, PS_OUT_OF_RANGE, "amount: the sum would not fit into 64 bits");
    else
        code = put(m, run, key, NULL, 0, sum, ttl_s, err);
    pthread_mutex_unlock(&m->lock);
    if (!code)
        *ret_sum = sum;
    return code;
}

int ps_meetings_get(struct ps_meetings *m, const char *run, const char *key, void **ret_value,
                    size_t *ret_size, struct ps_error *err)
{
    int code = check(run, key, 0, err);
    if (code)
        return code;
    pthread_mutex_lock(&m->lock);
    struct entry **at = find(m, run, key);
    char digits[24];
    if (!at) {
        code = ps_fail(err, PS_NOT_FOUND, "key: %.100s is not there", key);
    } else {
        const void *value = (*at)->value ? (*at)->value : digits;
        size_t size =
            (*at)->value ? (*at)->size : (size_t)snprintf(digits, sizeof digits, "%" PRId64, (*at)->sum);
        void *copy = malloc(size + 1);
        if (copy) {
            memcpy(copy, value, size);
            *ret_value = copy;
            *ret_size = size;
        } else {
            code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        }
    }
    pthread_mutex_unlock(&m->lock);
    return code;
}

int ps_meetings_wait_begin(struct ps_meetings *m, const char *run, const char *key,
                           void (*wake)(void *context), void *context, struct ps_meeting_wait **ret,
                           struct ps_error *err)
{
    int code = check(run, key, 0, err);
    if (code)
        return code;
    struct ps_meeting_wait *w = calloc(1, sizeof *w);
    if (!w)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    *w = (struct ps_meeting_wait){.run = run, .key = key, .wake = wake, .context = context};
    pthread_mutex_lock(&m->lock);
    struct ps_meeting_wait **head = &m->waits[chain_of(run, key)];
    w->next = *head;
    w->back = head;
    if (w->next)
        w->next->back = &w->next;
    *head = w;
    pthread_mutex_unlock(&m->lock);
    *ret = w;
    return 0;
}

void ps_meetings_wait_end(struct ps_meetings *m, struct ps_meeting_wait *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&m->lock);
    *w->back = w->next;
    if (w->next)
        w->next->back = w->back;
    pthread_mutex_unlock(&m->lock);
    free(w);
}
