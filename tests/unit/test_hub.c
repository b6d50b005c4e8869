/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/sidecar/hub.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define RUN_A "01AAAAAAAAAAAAAAAAAAAAAAAA"
#define RUN_B "01BBBBBBBBBBBBBBBBBBBBBBBB"

static void publish(struct ps_hub *hub, uint64_t id, const char *run)
{
    char detail[32];
    snprintf(detail, sizeof detail, "detail %llu", (unsigned long long)id);
    struct ps_event event = {.id = id, .detail = detail, .kind = "epoch", .attempt = 1};
    snprintf(event.run_id, sizeof event.run_id, "%s", run);
    ps_hub_publish(hub, &event);
}

static uint64_t take(struct ps_subscription *subscription)
{
    const struct ps_event *event;
    struct ps_error err = {0};
    if (ps_hub_next(subscription, &event, &err) != 1)
        return 0;
    uint64_t id = event->id;
    char detail[32];
    snprintf(detail, sizeof detail, "detail %llu", (unsigned long long)id);
    assert_string_equal(event->detail, detail); /* a copy: the publisher's is gone */
    ps_hub_release(event);
    return id;
}

static void count_wake(void *context)
{
    ++*(int *)context;
}

static void test_delivery(void **state)
{
    (void)state;
    struct ps_hub *hub = ps_hub_new();
    struct ps_subscription *all, *one;
    struct ps_error err = {0};
    int wakes_all = 0, wakes_one = 0;
    publish(hub, 1, RUN_A); /* nobody listens */
    assert_int_equal(ps_hub_subscribe(hub, NULL, 4, count_wake, &wakes_all, &all, &err), 0);
    assert_int_equal(ps_hub_subscribe(hub, RUN_B, 0, count_wake, &wakes_one, &one, &err), 0);
    assert_int_equal(ps_hub_subscribers(hub), 2);
    publish(hub, 2, RUN_A);
    publish(hub, 3, RUN_B);
    assert_int_equal(wakes_all, 2);
    assert_int_equal(wakes_one, 1);
    assert_int_equal(take(all), 2);
    assert_int_equal(take(all), 3);
    assert_int_equal(take(all), 0);
    assert_int_equal(take(one), 3);
    for (uint64_t id = 4; id < 100; id++) { /* round the ring many times */
        publish(hub, id, RUN_A);
        assert_int_equal(take(all), id);
    }
    publish(hub, 100, RUN_A); /* left in the ring: freed with it */
    ps_hub_unsubscribe(all);
    ps_hub_unsubscribe(one);
    assert_null(ps_hub_unsubscribe(NULL));
    assert_int_equal(ps_hub_subscribers(hub), 0);
    assert_int_equal(ps_hub_subscribe(hub, NULL, 65537, NULL, NULL, &all, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_hub_subscribe(hub, RUN_A "longer", 1, NULL, NULL, &all, &err), PS_INVALID_ARGUMENT);
    assert_null(ps_hub_free(hub));
    assert_null(ps_hub_free(NULL));
}

static void test_slow_subscriber_is_cut_off(void **state)
{
    (void)state;
    struct ps_hub *hub = ps_hub_new();
    struct ps_subscription *slow, *fast;
    struct ps_error err = {0};
    int wakes = 0;
    assert_int_equal(ps_hub_subscribe(hub, NULL, 3, count_wake, &wakes, &slow, &err), 0);
    assert_int_equal(ps_hub_subscribe(hub, NULL, 3, NULL, NULL, &fast, &err), 0);
    for (uint64_t id = 1; id <= 10; id++) {
        publish(hub, id, RUN_A);
        assert_int_equal(take(fast), id); /* not held up by the other */
    }
    const struct ps_event *event;
    assert_int_equal(wakes, 4); /* three events and the cut */
    assert_int_equal(ps_hub_next(slow, &event, &err), PS_RESOURCE_EXHAUSTED);
    assert_int_equal(ps_hub_next(slow, &event, &err), PS_RESOURCE_EXHAUSTED); /* for good */
    assert_int_equal(ps_hub_cut_off(hub), 1);
    ps_hub_unsubscribe(slow);
    ps_hub_unsubscribe(fast);
    ps_hub_free(hub);
}

enum { PUBLISHED = 20000 };

static void *publisher(void *hub)
{
    for (uint64_t id = 1; id <= PUBLISHED; id++)
        publish(hub, id, RUN_A);
    return NULL;
}

/* Takes until cut off or through; comes and goes meanwhile. */
static void *subscriber(void *hub)
{
    for (int round = 0; round < 50; round++) {
        struct ps_subscription *subscription;
        struct ps_error err = {0};
        assert_int_equal(ps_hub_subscribe(hub, round % 2 ? RUN_A : NULL, 16, NULL, NULL, &subscription, &err),
                         0);
        uint64_t last = 0, id;
        while ((id = take(subscription))) {
            assert_true(id > last);
            last = id;
        }
        ps_hub_unsubscribe(subscription);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    struct ps_hub *hub = ps_hub_new();
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, i ? subscriber : publisher, hub), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(ps_hub_subscribers(hub), 0);
    ps_hub_free(hub);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_delivery),
        cmocka_unit_test(test_slow_subscriber_is_cut_off),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
