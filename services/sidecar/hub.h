/* SPDX-License-Identifier: Apache-2.0
 * The event hub: what the store has made durable goes to whoever watches. Publishing never waits for a
 * subscriber: one that lets its ring fill up is cut off and has to start again from the last event it saw
 * (the store keeps all events with increasing ids). Thread-safe. */
#ifndef PARAMSYNC_SIDECAR_HUB_H
#define PARAMSYNC_SIDECAR_HUB_H

#include "db/store.h"

struct ps_hub;
struct ps_subscription; /* one thread at a time takes from it */

struct ps_hub *ps_hub_new(void);                /* NULL when out of memory */
struct ps_hub *ps_hub_free(struct ps_hub *hub); /* all subscriptions must be gone; takes NULL, returns NULL */

/* Copies the event to every subscription that wants it. Fits ps_store_config.on_event with the hub as
 * context. */
void ps_hub_publish(void *hub, const struct ps_event *event);

/* run_id NULL: of all runs. capacity: events that may wait, 1..65536; 0: 256. wake (may be NULL) is called,
 * with the hub's lock held, whenever an event was put in or the subscription was cut off: it must be quick
 * and must not call the hub. To miss nothing, subscribe first, then read the store, then skip what comes with
 * an id already seen. */
int ps_hub_subscribe(struct ps_hub *hub, const char *run_id, size_t capacity, void (*wake)(void *context),
                     void *context, struct ps_subscription **ret_subscription, struct ps_error *err);
/* 1: *ret_event (release it); 0: none waits; RESOURCE_EXHAUSTED: cut off, events were lost. */
int ps_hub_next(struct ps_subscription *subscription, const struct ps_event **ret_event,
                struct ps_error *err);
void ps_hub_release(const struct ps_event *event);
/* After it returns wake is not called any more. Takes NULL, returns NULL. */
struct ps_subscription *ps_hub_unsubscribe(struct ps_subscription *subscription);

size_t ps_hub_subscribers(struct ps_hub *hub);
uint64_t ps_hub_cut_off(struct ps_hub *hub); /* subscriptions that were too slow, since the start */

#endif
