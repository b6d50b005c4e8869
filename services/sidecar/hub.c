/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/hub.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* One copy for all rings that hold it. */
struct shared_event {
    struct ps_event event; /* first: what ps_hub_next hands out */
    atomic_int users;
    char detail[];
};

struct ps_subscription {
    struct ps_hub *hub;
    struct ps_subscription *next;
    char run_id[PS_RUN_ID_SIZE]; /* empty: all */
    void (*wake)(void *context);
    void *context;
    bool cut_off;
    size_t capacity, first, count;
    struct shared_event *ring[];
};

struct ps_hub {
    pthread_mutex_t lock; /* guards everything here and in the subscriptions */
    struct ps_subscription *subscriptions;
    size_t count;
    uint64_t cut_off;
};

struct ps_hub *ps_hub_new(void)
{
    struct ps_hub *hub = calloc(1, sizeof *hub);
    if (hub)
        pthread_mutex_init(&hub->lock, NULL);
    return hub;
}

struct ps_hub *ps_hub_free(struct ps_hub *hub)
{
    if (!hub)
        return NULL;
    pthread_mutex_destroy(&hub->lock);
    free(hub);
    return NULL;
}

void ps_hub_release(const struct ps_event *event)
{
    struct shared_event *shared = (struct shared_event *)event;
    if (shared && atomic_fetch_sub(&shared->users, 1) == 1)
        free(shared);
}

static void empty_ring(struct ps_subscription *s)
{
    for (; s->count; s->count--) {
        ps_hub_release(&s->ring[s->first]->event);
        s->first = (s->first + 1) % s->capacity;
    }
}

static struct shared_event *copy_event(const struct ps_event *event)
{
    size_t size = strlen(event->detail) + 1;
    struct shared_event *shared = malloc(sizeof *shared + size);
    if (!shared)
        return NULL;
    shared->event = *event;
    memcpy(shared->detail, event->detail, size);
    shared->event.detail = shared->detail;
    atomic_init(&shared->users, 1);
    return shared;
}

void ps_hub_publish(void *context, const struct ps_event *event)
{
    struct ps_hub *hub = context;
    struct shared_event *shared = NULL;
    pthread_mutex_lock(&hub->lock);
    for (struct ps_subscription *s = hub->subscriptions; s; s = s->next) {
        if (s->cut_off || (*s->run_id && strcmp(s->run_id, event->run_id) != 0))
            continue;
        if (!shared)
            shared = copy_event(event);
        if (!shared || s->count == s->capacity) {
            empty_ring(s);
            s->cut_off = true;
            hub->cut_off++;
        } else {
            atomic_fetch_add(&shared->users, 1);
            s->ring[(s->first + s->count++) % s->capacity] = shared;
        }
        if (s->wake)
            s->wake(s->context);
    }
    pthread_mutex_unlock(&hub->lock);
    if (shared)
        ps_hub_release(&shared->event);
}

int ps_hub_subscribe(struct ps_hub *hub, const char *run_id, size_t capacity, void (*wake)(void *context),
                     void *context, struct ps_subscription **ret_subscription, struct ps_error *err)
{
    if (capacity == 0)
        capacity = 256;
    if (capacity > 65536 || (run_id && strlen(run_id) >= PS_RUN_ID_SIZE))
        return ps_fail(err, PS_INVALID_ARGUMENT, "a subscription holds 1 to 65536 events of one run's id");
    struct ps_subscription *s = calloc(1, sizeof *s + capacity * sizeof *s->ring);
    if (!s)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    s->hub = hub;
    s->capacity = capacity;
    s->wake = wake;
    s->context = context;
    if (run_id)
        memcpy(s->run_id, run_id, strlen(run_id) + 1);
    pthread_mutex_lock(&hub->lock);
    s->next = hub->subscriptions;
    hub->subscriptions = s;
    hub->count++;
    pthread_mutex_unlock(&hub->lock);
    *ret_subscription = s;
    return 0;
}

int ps_hub_next(struct ps_subscription *s, const struct ps_event **ret_event, struct ps_error *err)
{
    int code = 0;
    pthread_mutex_lock(&s->hub->lock);
    if (s->cut_off) {
        code = ps_fail(
            err, PS_RESOURCE_EXHAUSTED,
            "the events were not taken fast enough and were cut off: start again after the last one seen");
    } else if (s->count) {
        *ret_event = &s->ring[s->first]->event;
        s->first = (s->first + 1) % s->capacity;
        s->count--;
        code = 1;
    }
    pthread_mutex_unlock(&s->hub->lock);
    return code;
}

struct ps_subscription *ps_hub_unsubscribe(struct ps_subscription *s)
{
    if (!s)
        return NULL;
    struct ps_hub *hub = s->hub;
    pthread_mutex_lock(&hub->lock);
    struct ps_subscription **at = &hub->subscriptions;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    hub->count--;
    empty_ring(s);
    pthread_mutex_unlock(&hub->lock);
    free(s);
    return NULL;
}

size_t ps_hub_subscribers(struct ps_hub *hub)
{
    pthread_mutex_lock(&hub->lock);
    size_t count = hub->count;
    pthread_mutex_unlock(&hub->lock);
    return count;
}

uint64_t ps_hub_cut_off(struct ps_hub *hub)
{
    pthread_mutex_lock(&hub->lock);
    uint64_t count = hub->cut_off;
    pthread_mutex_unlock(&hub->lock);
    return count;
}
