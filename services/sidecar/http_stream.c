/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/http_stream.h"

#include "services/base/clock.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    RING = 512,            /* messages kept */
    HUB_CAPACITY = 4096,   /* events that may wait for the pump */
    MESSAGE_MAX = 1 << 20, /* bytes */
    REPLAY_AT_ONCE = 256,  /* events of the store in one message */
    REPLAY_MOST = 10000,   /* further behind: the reader is told to start afresh */
};

struct message {
    unsigned references; /* under the stream's lock */
    uint64_t id;
    size_t size;
    char text[];
};

struct ps_http_reader {
    struct ps_http_stream *stream;
    struct ps_http_reader *next, **link;
    void (*park)(void *context);
    void (*wake)(void *context);
    void *context;
    bool parked; /* under the stream's lock; so is sent_ns */
    int64_t sent_ns;
    bool greeted;
    uint64_t cursor;         /* the last event that was given, or is in current */
    struct message *current; /* being sent */
    size_t offset;
};

struct ps_http_stream {
    struct ps_service *service;
    struct ps_web_api *api;
    int64_t half_ns; /* half the heartbeat: looked at so often, due after so long, so never later than the
                        whole */
    size_t max_readers;
    struct ps_subscription *subscription; /* the pump's */
    pthread_t pump;
    bool pump_started;

    pthread_mutex_t
        signal_lock; /* guards signalled; taken by the hub's wake, so nothing is called under it */
    pthread_cond_t signal;
    bool signalled;

    pthread_mutex_t lock; /* guards all below */
    bool stopping;
    struct message *ring[RING]; /* ring[i % RING] for i in [first, last) */
    uint64_t first, last;
    uint64_t floor;  /* the ring holds every event after this one */
    uint64_t newest; /* id of the newest event known */
    struct ps_http_reader *readers;
    size_t reader_count;
};

/* ---- Messages (under the lock) ---- */

static struct message *message_new(const char *text, size_t size, uint64_t id)
{
    struct message *m = malloc(sizeof *m + size);
    if (m) {
        m->references = 1;
        m->id = id;
        m->size = size;
        memcpy(m->text, text, size);
    }
    return m;
}

static void message_drop(struct message *m)
{
    if (m && --m->references == 0)
        free(m);
}

static void ring_clear(struct ps_http_stream *s)
{
    while (s->first != s->last)
        message_drop(s->ring[s->first++ % RING]);
}

static void ring_push(struct ps_http_stream *s, struct message *m)
{
    if (s->last - s->first == RING) {
        struct message *oldest = s->ring[s->first++ % RING];
        s->floor = oldest->id;
        message_drop(oldest);
    }
    s->ring[s->last++ % RING] = m;
    s->newest = m->id;
}

/* First message after the cursor; the ids in the ring ascend. */
static struct message *ring_after(const struct ps_http_stream *s, uint64_t cursor)
{
    uint64_t low = s->first, high = s->last;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (s->ring[middle % RING]->id > cursor)
            high = middle;
        else
            low = middle + 1;
    }
    return low < s->last ? s->ring[low % RING] : NULL;
}

/* ---- The pump ---- */

static void signal_pump(void *context)
{
    struct ps_http_stream *s = context;
    pthread_mutex_lock(&s->signal_lock);
    s->signalled = true;
    pthread_cond_signal(&s->signal);
    pthread_mutex_unlock(&s->signal_lock);
}

static int subscribe(struct ps_http_stream *s, struct ps_error *err)
{
    uint64_t last = 0;
    s->subscription = ps_hub_unsubscribe(s->subscription);
    int rc = ps_hub_subscribe(s->service->hub, NULL, HUB_CAPACITY, signal_pump, s, &s->subscription, err);
    if (rc == 0)
        rc = ps_store_last_event(s->service->store, &last, err);
    if (rc < 0) {
        s->subscription = ps_hub_unsubscribe(s->subscription);
        return rc;
    }
    pthread_mutex_lock(&s->lock);
    ring_clear(s);
    s->floor = s->newest = last;
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static void take(struct ps_http_stream *s, const struct ps_event *event, struct ps_buf *buf)
{
    pthread_mutex_lock(&s->lock);
    bool known = event->id <= s->newest, wanted = s->reader_count > 0;
    pthread_mutex_unlock(&s->lock);
    if (known)
        return;
    struct message *m = NULL;
    ps_buf_clear(buf);
    if (wanted && ps_web_api_event(s->api, event, true, buf, NULL) == 0)
        m = message_new(buf->data, buf->size, event->id);
    pthread_mutex_lock(&s->lock);
    if (m) {
        ring_push(s, m);
    } else { /* nobody listens, or no memory: whoever needs it later reads the store */
        ring_clear(s);
        s->floor = s->newest = event->id;
    }
    pthread_mutex_unlock(&s->lock);
}

static void wake_readers(struct ps_http_stream *s)
{
    int64_t now = ps_monotonic_ns();
    pthread_mutex_lock(&s->lock);
    for (struct ps_http_reader *r = s->readers; r; r = r->next) {
        if (r->parked && (s->stopping || r->cursor < s->newest || now - r->sent_ns >= s->half_ns)) {
            r->parked = false;
            r->wake(r->context);
        }
    }
    pthread_mutex_unlock(&s->lock);
}

static void *pump_main(void *context)
{
    struct ps_http_stream *s = context;
    struct ps_buf buf = PS_BUF_INIT(MESSAGE_MAX);
    for (;;) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        int64_t at = (int64_t)until.tv_sec * PS_NS_PER_S + until.tv_nsec + s->half_ns;
        until.tv_sec = at / PS_NS_PER_S;
        until.tv_nsec = at % PS_NS_PER_S;
        pthread_mutex_lock(&s->signal_lock);
        while (!s->signalled && pthread_cond_timedwait(&s->signal, &s->signal_lock, &until) != ETIMEDOUT)
            ;
        s->signalled = false;
        pthread_mutex_unlock(&s->signal_lock);

        pthread_mutex_lock(&s->lock);
        bool stopping = s->stopping;
        pthread_mutex_unlock(&s->lock);
        if (stopping)
            break;
        const struct ps_event *event;
        int rc = 0;
        while (s->subscription && (rc = ps_hub_next(s->subscription, &event, NULL)) == 1) {
            take(s, event, &buf);
            ps_hub_release(event);
        }
        if (!s->subscription || rc < 0) /* cut off; if this fails too it is tried at the next round */
            subscribe(s, NULL);
        wake_readers(s);
    }
    ps_buf_done(&buf);
    wake_readers(s);
    return NULL;
}

int ps_http_stream_start(struct ps_service *service, struct ps_web_api *api, double heartbeat_s,
                         size_t max_readers, struct ps_http_stream **ret_stream, struct ps_error *err)
{
    struct ps_http_stream *s = calloc(1, sizeof *s);
    if (!s)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    s->service = service;
    s->api = api;
    s->half_ns = (int64_t)(heartbeat_s * 1e9) / 2;
    s->max_readers = max_readers;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->signal, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&s->signal_lock, NULL);
    pthread_mutex_init(&s->lock, NULL);
    int rc = subscribe(s, err);
    if (rc == 0) {
        int failed = pthread_create(&s->pump, NULL, pump_main, s);
        if (failed)
            rc = ps_fail_errno(err, failed, "cannot start a thread");
        s->pump_started = !failed;
    }
    if (rc < 0) {
        ps_http_stream_free(s);
        return rc;
    }
    *ret_stream = s;
    return 0;
}

void ps_http_stream_stop(struct ps_http_stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_mutex_unlock(&s->lock);
    if (s->pump_started) {
        signal_pump(s);
        pthread_join(s->pump, NULL);
        s->pump_started = false;
    }
}

struct ps_http_stream *ps_http_stream_free(struct ps_http_stream *s)
{
    if (!s)
        return NULL;
    ps_http_stream_stop(s);
    ps_hub_unsubscribe(s->subscription);
    ring_clear(s);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->signal_lock);
    pthread_cond_destroy(&s->signal);
    free(s);
    return NULL;
}

size_t ps_http_stream_readers(struct ps_http_stream *s)
{
    pthread_mutex_lock(&s->lock);
    size_t count = s->reader_count;
    pthread_mutex_unlock(&s->lock);
    return count;
}

/* ---- Readers ---- */

int ps_http_reader_open(struct ps_http_stream *s, uint64_t since, void (*park)(void *context),
                        void (*wake)(void *context), void *context, struct ps_http_reader **ret_reader,
                        struct ps_error *err)
{
    struct ps_http_reader *r = calloc(1, sizeof *r);
    if (!r)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    r->stream = s;
    r->park = park;
    r->wake = wake;
    r->context = context;
    pthread_mutex_lock(&s->lock);
    if (s->stopping || s->reader_count >= s->max_readers) {
        bool stopping = s->stopping;
        pthread_mutex_unlock(&s->lock);
        free(r);
        return stopping
                   ? ps_fail(err, PS_UNAVAILABLE, "the sidecar is shutting down")
                   : ps_fail(err, PS_UNAVAILABLE, "too many event streams are open; close some dashboards");
    }
    r->cursor = since == PS_STREAM_NOW ? s->newest : since;
    r->link = &s->readers;
    r->next = s->readers;
    if (r->next)
        r->next->link = &r->next;
    s->readers = r;
    s->reader_count++;
    pthread_mutex_unlock(&s->lock);
    *ret_reader = r;
    return 0;
}

struct ps_http_reader *ps_http_reader_close(struct ps_http_reader *r)
{
    if (!r)
        return NULL;
    struct ps_http_stream *s = r->stream;
    pthread_mutex_lock(&s->lock);
    *r->link = r->next;
    if (r->next)
        r->next->link = r->link;
    s->reader_count--;
    message_drop(r->current);
    pthread_mutex_unlock(&s->lock);
    free(r);
    return NULL;
}

/* What the ring has no more, from the store; called without the lock. */
static struct message *replay(struct ps_http_stream *s, uint64_t cursor, uint64_t floor, uint64_t *ret_cursor)
{
    struct ps_buf buf = PS_BUF_INIT(4 * MESSAGE_MAX);
    struct ps_event_list list = {0};
    bool fresh = floor - cursor > REPLAY_MOST ||
                 ps_store_list_events(s->service->store, NULL, cursor, REPLAY_AT_ONCE, &list, NULL) < 0;
    /* Not past the floor: the ring has those, or will have them, and they would come twice. */
    uint64_t last = list.count == REPLAY_AT_ONCE ? cursor : floor;
    for (size_t i = 0; i < list.count && list.events[i].id <= floor && !fresh; i++) {
        fresh = ps_web_api_event(s->api, &list.events[i], false, &buf, NULL) < 0;
        if (list.count == REPLAY_AT_ONCE)
            last = list.events[i].id;
    }
    if (last == cursor) /* a full answer that begins past the floor */
        last = floor;
    ps_event_list_done(&list);
    if (fresh) {
        ps_buf_done(&buf);
        last = floor;
        ps_buf_printf(&buf, "id: %llu\nevent: reset\ndata: {}\n\n", (unsigned long long)floor);
    }
    /* Nothing there (the runs were deleted): a comment moves the cursor on. */
    if (!buf.size)
        ps_buf_puts(&buf, ":\n\n");
    struct message *m = buf.size ? message_new(buf.data, buf.size, last) : NULL;
    ps_buf_done(&buf);
    *ret_cursor = last;
    return m;
}

ssize_t ps_http_reader_read(struct ps_http_reader *r, char *data, size_t size)
{
    struct ps_http_stream *s = r->stream;
    pthread_mutex_lock(&s->lock);
    while (!r->current) {
        if (s->stopping) {
            pthread_mutex_unlock(&s->lock);
            return -1;
        }
        int64_t now = ps_monotonic_ns();
        static const char hello[] = "retry: 2000\n\nevent: ping\ndata: {}\n\n";
        static const char beat[] = ": heartbeat\nevent: ping\ndata: {}\n\n";
        if (!r->greeted) {
            r->greeted = true;
            r->current = message_new(hello, sizeof hello - 1, 0);
        } else if (r->cursor > s->newest) { /* events of another store */
            uint64_t newest = s->newest;
            char text[64];
            int length = snprintf(text, sizeof text, "id: %llu\nevent: reset\ndata: {}\n\n",
                                  (unsigned long long)newest);
            r->current = message_new(text, (size_t)length, newest);
            r->cursor = newest;
        } else if (r->cursor < s->floor) {
            uint64_t floor = s->floor, cursor = r->cursor;
            pthread_mutex_unlock(&s->lock);
            struct message *m = replay(s, cursor, floor, &cursor);
            pthread_mutex_lock(&s->lock);
            r->current = m;
            r->cursor = cursor;
        } else if (r->cursor < s->newest && (r->current = ring_after(s, r->cursor))) {
            r->current->references++;
            r->cursor = r->current->id;
        } else if (now - r->sent_ns >= s->half_ns) {
            r->current = message_new(beat, sizeof beat - 1, 0);
        } else {
            r->parked = true;
            r->park(r->context);
            pthread_mutex_unlock(&s->lock);
            return 0;
        }
        if (!r->current) { /* no memory: the client comes again later */
            pthread_mutex_unlock(&s->lock);
            return -1;
        }
        r->offset = 0;
        r->sent_ns = now;
    }
    size_t count = r->current->size - r->offset;
    if (count > size)
        count = size;
    memcpy(data, r->current->text + r->offset, count);
    r->offset += count;
    if (r->offset == r->current->size) {
        message_drop(r->current);
        r->current = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    return (ssize_t)count;
}
