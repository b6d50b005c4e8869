/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/rendezvous.h"

#include "services/base/clock.h"
#include "trainer/dist/store.h"
#include "trainer/dist/wire.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { REASON_SIZE = 700 };

struct request { /* on the stack of the thread that waits for the answer */
    uint32_t id;
    bool done;
    int code; /* of the answer */
    char *data;
    size_t size;
    char text[200]; /* of an error */
    struct request *next;
};

struct ps_rendezvous {
    int rank, world_size;
    char host[256];
    int port;
    double heartbeat_s;
    void (*on_failure)(void *context, const char *reason);
    void *context;
    int fd;   /* the control connection; its reading end is the watchdog's once that runs */
    int wake; /* eventfd: the watchdog shall end */
    pthread_t thread;
    bool thread_runs;
    struct ps_store *store; /* rank 0 */
    struct ps_buf in;       /* the watchdog's */

    pthread_mutex_t send_lock; /* one frame at a time on fd */

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    bool started, failed, closing, quiet, bye;
    char reason[REASON_SIZE];
    struct request *requests;
    uint32_t next_id;
    struct ps_comm *comm;
    int local_rank, local_size; /* set before started */
    char address[64];
};

static int64_t after(double seconds)
{
    return ps_monotonic_ns() + (int64_t)(seconds * (double)PS_NS_PER_S);
}

/* Waits on r->changed with r->lock held. Returns -1 once deadline has passed. */
static int wait_changed(struct ps_rendezvous *r, int64_t deadline)
{
    struct timespec ts = {.tv_sec = deadline / PS_NS_PER_S, .tv_nsec = deadline % PS_NS_PER_S};
    return pthread_cond_timedwait(&r->changed, &r->lock, &ts) == ETIMEDOUT ? -1 : 0;
}

static int poll_until(int fd, short events, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - ps_monotonic_ns();
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, left <= 0 ? 0 : (int)((left + 999999) / 1000000));
        if (n > 0)
            return 0;
        if (n == 0 && left <= 0)
            return -1;
        if (n < 0 && errno != EINTR)
            return -1;
    }
}

/* The whole buffer or nothing worth having: a connection that takes no more for 5 s is broken. */
static int send_all(int fd, const struct ps_buf *frame)
{
    if (frame->failed)
        return -1;
    int64_t deadline = after(5.0);
    for (size_t done = 0; done < frame->size;) {
        ssize_t n = send(fd, frame->data + done, frame->size - done, MSG_NOSIGNAL);
        if (n > 0)
            done += (size_t)n;
        else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (poll_until(fd, POLLOUT, deadline) < 0)
                return -1;
        } else if (n < 0 && errno != EINTR)
            return -1;
    }
    return 0;
}

static int send_frame(struct ps_rendezvous *r, enum ps_wire_type type, uint32_t id, const void *a,
                      size_t a_size, const void *b, size_t b_size)
{
    struct ps_buf frame = PS_BUF_INIT(PS_WIRE_HEADER + PS_WIRE_BODY_MAX);
    ps_wire_put_frame(&frame, type, id, a, a_size, b, b_size);
    pthread_mutex_lock(&r->send_lock);
    int rc = send_all(r->fd, &frame);
    pthread_mutex_unlock(&r->send_lock);
    ps_buf_done(&frame);
    return rc;
}

/* ---- joining ---- */

/* One frame, before the watchdog runs. Returns its length in r->in (the caller drops it), 0 at the end of the
 * stream or the deadline (*ret_timed_out), -1 if what arrives is not ours. */
static long read_frame(struct ps_rendezvous *r, int64_t deadline, struct ps_wire_frame *ret,
                       bool *ret_timed_out)
{
    *ret_timed_out = false;
    for (;;) {
        long taken = ps_wire_take(r->in.data ? r->in.data : "", r->in.size, 4096, ret);
        if (taken != 0)
            return taken;
        if (poll_until(r->fd, POLLIN, deadline) < 0) {
            *ret_timed_out = true;
            return 0;
        }
        char *to = ps_buf_reserve(&r->in, 4096);
        if (!to)
            return -1;
        ssize_t n = recv(r->fd, to, 4096, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return 0;
        if (n > 0)
            r->in.size += (size_t)n;
    }
}

static void drop_frame(struct ps_rendezvous *r, long taken)
{
    memmove(r->in.data, r->in.data + taken, r->in.size - (size_t)taken);
    r->in.size -= (size_t)taken;
}

enum { JOIN_AGAIN = 1 };

/* Proves the secret both ways. JOIN_AGAIN: rank 0 was not ready, or had no room. */
static int handshake(struct ps_rendezvous *r, const char *secret, int64_t deadline, struct ps_error *err)
{
    struct ps_wire_frame f;
    bool timed_out;
    int64_t soon = after(10.0);
    if (soon > deadline)
        soon = deadline;
    r->in.size = 0;
    long taken = read_frame(r, soon, &f, &timed_out);
    struct ps_wire_reader in = {f.body, taken > 0 ? f.size : 0, false};
    const unsigned char *magic = taken > 0 ? ps_wire_bytes(&in, 8) : NULL;
    if (taken == 0 && !timed_out)
        return JOIN_AGAIN;
    if (taken == 0)
        return ps_fail(
            err, PS_DEADLINE_EXCEEDED,
            "%s:%d accepts connections but says nothing: is another program (torchrun's own store?) on "
            "that port?",
            r->host, r->port);
    if (taken < 0 || f.type != PS_WIRE_GREETING || !magic || memcmp(magic, PS_WIRE_MAGIC, 8) != 0)
        return ps_fail(err, PS_FAILED_PRECONDITION,
                       "what answers on %s:%d is not rank 0 of paramsync: another program has that port",
                       r->host, r->port);
    uint32_t version = ps_wire_u32(&in);
    const unsigned char *greeting = ps_wire_bytes(&in, PS_WIRE_NONCE);
    if (!greeting || version != PS_WIRE_VERSION)
        return ps_fail(
            err, PS_FAILED_PRECONDITION,
            "rank 0 on %s:%d speaks version %u of the rendezvous, this rank version %d: use one build on "
            "all ranks",
            r->host, r->port, version, PS_WIRE_VERSION);
    unsigned char server_nonce[PS_WIRE_NONCE], nonce[PS_WIRE_NONCE];
    memcpy(server_nonce, greeting, sizeof server_nonce);
    drop_frame(r, taken);

    char mac[PS_WIRE_MAC + 1], proof[PS_WIRE_MAC + 1], host[PS_WIRE_HOST + 1] = {0};
    uint32_t rank = (uint32_t)r->rank, world = (uint32_t)r->world_size;
    if (gethostname(host, PS_WIRE_HOST) < 0 || !host[0])
        snprintf(host, sizeof host, "unknown");
    if (ps_wire_nonce(nonce) < 0 || ps_wire_mac(secret, "rank", server_nonce, nonce, rank, world, mac) < 0 ||
        ps_wire_mac(secret, "rank 0", server_nonce, nonce, rank, world, proof) < 0)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED,
                       "cannot prove the job's secret: out of memory or randomness");
    struct ps_buf hello = PS_BUF_INIT(PS_WIRE_HELLO_SIZE);
    ps_buf_append(&hello, PS_WIRE_MAGIC, 8);
    ps_wire_put_u32(&hello, PS_WIRE_VERSION);
    ps_wire_put_u32(&hello, rank);
    ps_wire_put_u32(&hello, world);
    ps_wire_put_u32(&hello, (uint32_t)getpid());
    ps_buf_append(&hello, nonce, sizeof nonce);
    ps_buf_append(&hello, host, PS_WIRE_HOST);
    ps_buf_append(&hello, mac, PS_WIRE_MAC);
    int rc = hello.failed ? -1 : send_frame(r, PS_WIRE_HELLO, 0, hello.data, hello.size, NULL, 0);
    ps_buf_done(&hello);
    if (rc < 0)
        return JOIN_AGAIN;

    taken = read_frame(r, soon, &f, &timed_out);
    if (taken == 0)
        return timed_out
                   ? ps_fail(err, PS_DEADLINE_EXCEEDED, "rank 0 on %s:%d does not answer", r->host, r->port)
                   : JOIN_AGAIN;
    int code;
    if (taken > 0 && f.type == PS_WIRE_WELCOME && f.size == PS_WIRE_MAC && ps_wire_mac_equal(f.body, proof)) {
        code = 0;
    } else if (taken > 0 && f.type == PS_WIRE_REFUSED) {
        char text[600];
        ps_wire_text(f.body, f.size, text, sizeof text);
        code = ps_fail(err, PS_FAILED_PRECONDITION, "rank %d cannot join: %s", r->rank, text);
    } else {
        code = ps_fail(err, PS_UNAUTHENTICATED, "what answers on %s:%d does not know the job's secret",
                       r->host, r->port);
    }
    if (taken > 0)
        drop_frame(r, taken);
    return code;
}

/* One attempt at all addresses of the host. Returns a connected socket, or -1. */
static int dial(const struct addrinfo *list, int64_t deadline)
{
    for (const struct addrinfo *a = list; a; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            continue;
        int64_t soon = after(3.0), limit = soon < deadline ? soon : deadline;
        int broken = 0;
        socklen_t length = sizeof broken;
        if (connect(fd, a->ai_addr, a->ai_addrlen) == 0 ||
            (errno == EINPROGRESS && poll_until(fd, POLLOUT, limit) == 0 &&
             getsockopt(fd, SOL_SOCKET, SO_ERROR, &broken, &length) == 0 && broken == 0)) {
            ps_socket_tune(fd);
            return fd;
        }
        close(fd);
    }
    return -1;
}

/* Rank 0 may start later than this rank, and a name may appear later than the process: both are tried again.
 */
static int join_remote(struct ps_rendezvous *r, const char *secret, double join_s, struct ps_error *err)
{
    int64_t deadline = after(join_s), name_deadline = after(join_s < 30.0 ? join_s : 30.0);
    char service[16];
    snprintf(service, sizeof service, "%d", r->port);
    for (int attempt = 0;; attempt++) {
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *list = NULL;
        int rc = getaddrinfo(r->host, service, &hints, &list);
        if (rc == 0) {
            r->fd = dial(list, deadline);
            freeaddrinfo(list);
            if (r->fd >= 0) {
                int code = handshake(r, secret, deadline, err);
                if (code <= 0)
                    return code;
                close(r->fd);
                r->fd = -1;
            }
        } else if (ps_monotonic_ns() > name_deadline) {
            return ps_fail(err, PS_UNAVAILABLE, "cannot resolve rank 0's host %s: %s", r->host,
                           gai_strerror(rc));
        }
        if (ps_monotonic_ns() > deadline)
            return ps_fail(
                err, PS_DEADLINE_EXCEEDED,
                "rank 0 does not answer on %s:%d (tried for %.0f s): is it running, and is that its address?",
                r->host, r->port, join_s);
        poll(NULL, 0, attempt < 10 ? 50 : 250); /* between two attempts */
    }
}

/* ---- the watchdog ---- */

static void set_failed(struct ps_rendezvous *r, const char *reason)
{
    pthread_mutex_lock(&r->lock);
    bool call = false;
    if (!r->failed) {
        r->failed = true;
        snprintf(r->reason, sizeof r->reason, "%s", reason);
        if (r->comm)
            r->comm->ops->abort(r->comm, r->reason);
        call = !r->closing && !r->quiet && r->started;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    if (call && r->on_failure)
        r->on_failure(r->context, reason);
}

/* The address must be one of this machine's: behind address translation rank 0 sees another one. */
static bool address_is_local(const char *text)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_DGRAM}, *list;
    if (getaddrinfo(text, NULL, &hints, &list) != 0)
        return false;
    int fd = socket(list->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool local = fd >= 0 && bind(fd, list->ai_addr, list->ai_addrlen) == 0;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(list);
    return local;
}

static void on_start(struct ps_rendezvous *r, const struct ps_wire_frame *f)
{
    struct ps_wire_reader in = {f->body, f->size, false};
    uint32_t local_rank = ps_wire_u32(&in), local_size = ps_wire_u32(&in);
    char address[64];
    ps_wire_text(in.at, in.left, address, sizeof address);
    if (!address_is_local(address)) {
        struct sockaddr_storage own;
        socklen_t length = sizeof own;
        if (getsockname(r->fd, (struct sockaddr *)&own, &length) == 0)
            ps_address_text((struct sockaddr *)&own, address, sizeof address);
    }
    pthread_mutex_lock(&r->lock);
    if (!r->started) {
        r->local_rank = (int)local_rank;
        r->local_size = (int)local_size;
        snprintf(r->address, sizeof r->address, "%s", address);
        r->started = true;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
}

static void on_answer(struct ps_rendezvous *r, const struct ps_wire_frame *f)
{
    pthread_mutex_lock(&r->lock);
    for (struct request *q = r->requests; q; q = q->next) {
        if (q->id != f->id || q->done)
            continue;
        if (f->type == PS_WIRE_DONE) {
            q->data = malloc(f->size + 1);
            q->code = q->data ? 0 : PS_RESOURCE_EXHAUSTED;
            if (q->data) {
                if (f->size)
                    memcpy(q->data, f->body, f->size);
                q->data[f->size] = '\0';
                q->size = f->size;
            }
        } else {
            struct ps_wire_reader in = {f->body, f->size, false};
            uint32_t code = ps_wire_u32(&in);
            q->code = code >= 1 && code <= 16 ? -(int)code : PS_UNKNOWN;
            ps_wire_text(in.at, in.left, q->text, sizeof q->text);
        }
        q->done = true;
        pthread_cond_broadcast(&r->changed);
        break;
    }
    pthread_mutex_unlock(&r->lock);
}

/* Returns 1 once the watchdog has nothing left to watch. */
static int on_frame(struct ps_rendezvous *r, const struct ps_wire_frame *f)
{
    char text[REASON_SIZE];
    switch (f->type) {
    case PS_WIRE_PING:
        return 0;
    case PS_WIRE_START:
        on_start(r, f);
        return 0;
    case PS_WIRE_DONE:
    case PS_WIRE_ERROR:
        on_answer(r, f);
        return 0;
    case PS_WIRE_ABORT:
        ps_wire_text(f->body, f->size, text, sizeof text);
        set_failed(r, text);
        return 1;
    case PS_WIRE_BYE:
        pthread_mutex_lock(&r->lock);
        r->bye = true;
        pthread_cond_broadcast(&r->changed);
        pthread_mutex_unlock(&r->lock);
        return 1;
    default:
        set_failed(r, "rank 0 sent a message that rank 0 does not send");
        return 1;
    }
}

/* Takes what is there. Returns 1 once the watchdog has nothing left to watch. */
static int read_server(struct ps_rendezvous *r, int64_t *heard)
{
    for (;;) {
        size_t used = 0;
        for (;;) {
            struct ps_wire_frame f;
            long taken =
                ps_wire_take(r->in.data ? r->in.data + used : "", r->in.size - used, PS_WIRE_BODY_MAX, &f);
            if (taken == 0)
                break;
            if (taken < 0) {
                set_failed(r, "what rank 0 sent cannot be understood");
                return 1;
            }
            used += (size_t)taken;
            if (on_frame(r, &f))
                return 1;
        }
        if (used && r->in.data) {
            memmove(r->in.data, r->in.data + used, r->in.size - used);
            r->in.size -= used;
        }
        char *to = ps_buf_reserve(&r->in, 1 << 16);
        ssize_t n = to ? recv(r->fd, to, 1 << 16, 0) : 0;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n <= 0) {
            set_failed(r, to ? "rank 0 died: its connection closed without goodbye" : "out of memory");
            return 1;
        }
        r->in.size += (size_t)n;
        *heard = ps_monotonic_ns();
    }
}

static void *watchdog(void *context)
{
    struct ps_rendezvous *r = context;
    int64_t silence = (int64_t)(r->heartbeat_s * (double)PS_NS_PER_S);
    int64_t heard = ps_monotonic_ns(), next_ping = heard;
    if (read_server(r, &heard)) /* what came with the welcome */
        return NULL;
    for (;;) {
        int64_t now = ps_monotonic_ns();
        if (now >= next_ping) {
            /* A failure to send shows as the end of the stream when reading. */
            send_frame(r, PS_WIRE_PING, 0, NULL, 0, NULL, 0);
            next_ping = now + silence / 4;
        }
        int64_t next = heard + silence < next_ping ? heard + silence : next_ping;
        int wait_ms = next <= now ? 1 : (int)((next - now) / 1000000) + 1;
        struct pollfd fds[2] = {{.fd = r->wake, .events = POLLIN}, {.fd = r->fd, .events = POLLIN}};
        int n = poll(fds, 2, wait_ms);
        if (n > 0 && fds[0].revents)
            return NULL;
        if (n > 0 && fds[1].revents && read_server(r, &heard))
            return NULL;
        if (ps_monotonic_ns() - heard > silence) {
            char text[128];
            snprintf(text, sizeof text, "rank 0 is silent: no heartbeat for %.1f s",
                     (double)(ps_monotonic_ns() - heard) / (double)PS_NS_PER_S);
            set_failed(r, text);
            return NULL;
        }
    }
}

/* ---- opening and closing ---- */

static void free_rendezvous(struct ps_rendezvous *r)
{
    if (r->thread_runs) {
        uint64_t one = 1;
        while (write(r->wake, &one, sizeof one) < 0 && errno == EINTR)
            ;
        pthread_join(r->thread, NULL);
    }
    if (r->fd >= 0)
        close(r->fd);
    ps_store_close(r->store);
    if (r->wake >= 0)
        close(r->wake);
    ps_buf_done(&r->in);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->send_lock);
    pthread_cond_destroy(&r->changed);
    free(r);
}

static int check_config(const struct ps_rendezvous_config *c, struct ps_error *err)
{
    if (c->world_size < 1 || c->rank < 0 || c->rank >= c->world_size)
        return ps_fail(err, PS_INVALID_ARGUMENT, "rank %d is out of range: the world size is %d", c->rank,
                       c->world_size);
    if (!c->host || !c->host[0] || strlen(c->host) > 255)
        return ps_fail(err, PS_INVALID_ARGUMENT, "the rendezvous needs rank 0's host");
    if (c->port < 0 || c->port > 65535 || (c->port == 0 && c->rank != 0))
        return ps_fail(err, PS_INVALID_ARGUMENT, "the rendezvous needs rank 0's port, 1 to 65535");
    if (!c->secret || strlen(c->secret) > 319)
        return ps_fail(err, PS_INVALID_ARGUMENT, "the job's secret is longer than 319 bytes");
    if (c->heartbeat_s != 0 && !(c->heartbeat_s >= 0.2 && c->heartbeat_s <= 86400.0))
        return ps_fail(err, PS_INVALID_ARGUMENT, "the heartbeat timeout is between 0.2 s and a day");
    return 0;
}

/* Rank 0 listens and joins itself through a socket pair. */
static int join_local(struct ps_rendezvous *r, const struct ps_rendezvous_config *config, double join_s,
                      struct ps_error *err)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        return ps_fail_errno(err, errno, "cannot make a socket pair");
    struct ps_store_config store = {.world_size = r->world_size,
                                    .host = r->host,
                                    .port = r->port,
                                    .secret = config->secret,
                                    .join_s = join_s,
                                    .heartbeat_s = r->heartbeat_s};
    int code = ps_store_open(&store, pair[1], &r->store, &r->port, err);
    r->fd = pair[0];
    if (code < 0) {
        close(pair[1]);
        return code;
    }
    if (config->on_listening)
        code = config->on_listening(config->context, r->port, err);
    if (code < 0)
        return code;
    code = handshake(r, config->secret, after(join_s), err);
    return code == JOIN_AGAIN ? ps_fail(err, PS_INTERNAL, "rank 0 cannot reach its own store") : code;
}

int ps_rendezvous_open(const struct ps_rendezvous_config *config, struct ps_rendezvous **ret,
                       struct ps_error *err)
{
    int code = check_config(config, err);
    if (code < 0)
        return code;
    struct ps_rendezvous *r = calloc(1, sizeof *r);
    if (!r)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    *r = (struct ps_rendezvous){.rank = config->rank,
                                .world_size = config->world_size,
                                .port = config->port,
                                .heartbeat_s = config->heartbeat_s > 0 ? config->heartbeat_s : 5.0,
                                .on_failure = config->on_failure,
                                .context = config->context,
                                .fd = -1,
                                .wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                                .in = PS_BUF_INIT(2 * (PS_WIRE_BODY_MAX + PS_WIRE_HEADER))};
    snprintf(r->host, sizeof r->host, "%s", config->host);
    pthread_mutex_init(&r->lock, NULL);
    pthread_mutex_init(&r->send_lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&r->changed, &attr);
    pthread_condattr_destroy(&attr);
    double join_s = config->join_s > 0 ? config->join_s : 300.0;
    int64_t deadline = after(join_s + 2.0); /* rank 0 knows better who is missing: it speaks first */
    if (r->wake < 0)
        code = ps_fail_errno(err, errno, "cannot make an event descriptor");
    else
        code =
            r->rank == 0 ? join_local(r, config, join_s, err) : join_remote(r, config->secret, join_s, err);
    if (code == 0) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int rc = pthread_create(&r->thread, NULL, watchdog, r);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (rc)
            code = ps_fail_errno(err, rc, "cannot start the watchdog's thread");
        r->thread_runs = rc == 0;
    }
    if (code == 0) {
        pthread_mutex_lock(&r->lock);
        while (!r->started && !r->failed && wait_changed(r, deadline) == 0)
            ;
        /* Started and failed since: on_failure has it. */
        if (r->failed && !r->started)
            code = ps_fail(err, PS_FAILED_PRECONDITION, "the job does not start: %s", r->reason);
        else if (!r->started)
            code = ps_fail(err, PS_DEADLINE_EXCEEDED, "not all ranks joined within %.0f s", join_s);
        pthread_mutex_unlock(&r->lock);
    }
    if (code < 0) {
        free_rendezvous(r);
        return code;
    }
    *ret = r;
    return 0;
}

void ps_rendezvous_close(struct ps_rendezvous *r, double leave_s)
{
    if (!r)
        return;
    if (!(leave_s >= 0))
        leave_s = 0;
    if (leave_s > 86400.0)
        leave_s = 86400.0;
    pthread_mutex_lock(&r->lock);
    r->closing = true;
    bool failed = r->failed;
    pthread_mutex_unlock(&r->lock);
    if (!failed || r->rank == 0) {
        struct ps_buf body = PS_BUF_INIT(4);
        ps_wire_put_u32(&body, (uint32_t)(leave_s * 1000.0));
        send_frame(r, PS_WIRE_LEAVE, 0, body.data, body.size, NULL, 0);
        ps_buf_done(&body);
    }
    pthread_mutex_lock(&r->lock);
    int64_t deadline = after(r->rank == 0 ? leave_s + 1.0 : 1.0);
    while (!r->bye && !r->failed && wait_changed(r, deadline) == 0)
        ;
    pthread_mutex_unlock(&r->lock);
    free_rendezvous(r);
}

/* ---- the store's client ---- */

static int check_key(const char *key, struct ps_error *err)
{
    size_t size = strlen(key);
    if (size < 1 || size > PS_RENDEZVOUS_KEY_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "a key has 1 to %d bytes", PS_RENDEZVOUS_KEY_MAX);
    return 0;
}

static int ask(struct ps_rendezvous *r, enum ps_wire_type type, const void *a, size_t a_size, const void *b,
               size_t b_size, const char *key, double deadline_s, char **ret_data, size_t *ret_size,
               struct ps_error *err)
{
    struct request q = {0};
    int64_t deadline = after(deadline_s);
    pthread_mutex_lock(&r->lock);
    q.id = ++r->next_id;
    q.next = r->requests;
    r->requests = &q;
    pthread_mutex_unlock(&r->lock);
    int sent = send_frame(r, type, q.id, a, a_size, b, b_size);
    pthread_mutex_lock(&r->lock);
    while (sent == 0 && !q.done && !r->failed && wait_changed(r, deadline) == 0)
        ;
    for (struct request **at = &r->requests; *at; at = &(*at)->next) {
        if (*at == &q) {
            *at = q.next;
            break;
        }
    }
    int code;
    if (q.done && q.code == 0)
        code = 0;
    else if (q.done)
        code = ps_fail(err, q.code, "rendezvous key %s: %s", key, q.text[0] ? q.text : "out of memory");
    else if (r->failed)
        code = ps_fail(err, PS_ABORTED, "%s", r->reason);
    else
        code = ps_fail(err, PS_DEADLINE_EXCEEDED, "rendezvous key %s: rank 0 does not answer", key);
    pthread_mutex_unlock(&r->lock);
    if (code == 0 && ret_data) {
        *ret_data = q.data;
        *ret_size = q.size;
    } else {
        free(q.data);
    }
    return code;
}

int ps_rendezvous_set(struct ps_rendezvous *r, const char *key, const void *data, size_t size,
                      struct ps_error *err)
{
    int code = check_key(key, err);
    if (code < 0)
        return code;
    if (size > PS_RENDEZVOUS_VALUE_MAX)
        return ps_fail(err, PS_INVALID_ARGUMENT, "a rendezvous value has at most %d bytes",
                       PS_RENDEZVOUS_VALUE_MAX);
    struct ps_buf head = PS_BUF_INIT(4 + PS_RENDEZVOUS_KEY_MAX);
    ps_wire_put_u32(&head, (uint32_t)strlen(key));
    ps_buf_puts(&head, key);
    code = head.failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory")
                       : ask(r, PS_WIRE_SET, head.data, head.size, data, size, key, 60.0, NULL, NULL, err);
    ps_buf_done(&head);
    return code;
}

int ps_rendezvous_get(struct ps_rendezvous *r, const char *key, double deadline_s, char **ret_data,
                      size_t *ret_size, struct ps_error *err)
{
    int code = check_key(key, err);
    if (code < 0)
        return code;
    if (!(deadline_s >= 0))
        deadline_s = 0;
    if (deadline_s > 86400.0)
        deadline_s = 86400.0;
    struct ps_buf head = PS_BUF_INIT(4);
    ps_wire_put_u32(&head, (uint32_t)(deadline_s * 1000.0));
    code = head.failed ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory")
                       : ask(r, PS_WIRE_GET, head.data, head.size, key, strlen(key), key, deadline_s + 5.0,
                             ret_data, ret_size, err);
    ps_buf_done(&head);
    return code;
}

int ps_rendezvous_add(struct ps_rendezvous *r, const char *key, int64_t amount, int64_t *ret_sum,
                      struct ps_error *err)
{
    int code = check_key(key, err);
    if (code < 0)
        return code;
    struct ps_buf head = PS_BUF_INIT(8);
    ps_wire_put_u64(&head, (uint64_t)amount);
    char *data = NULL;
    size_t size = 0;
    code = head.failed
               ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory")
               : ask(r, PS_WIRE_ADD, head.data, head.size, key, strlen(key), key, 60.0, &data, &size, err);
    ps_buf_done(&head);
    if (code == 0) {
        struct ps_wire_reader in = {(const unsigned char *)data, size, false};
        *ret_sum = (int64_t)ps_wire_u64(&in);
        free(data);
    }
    return code;
}

/* ---- the rest ---- */

void ps_rendezvous_locality(const struct ps_rendezvous *r, int *ret_local_rank, int *ret_local_size)
{
    *ret_local_rank = r->local_rank; /* fixed before open returned */
    *ret_local_size = r->local_size;
}

const char *ps_rendezvous_address(const struct ps_rendezvous *r)
{
    return r->address;
}

void ps_rendezvous_fail(struct ps_rendezvous *r, const char *reason)
{
    pthread_mutex_lock(&r->lock);
    bool send = !r->failed && !r->closing && !r->quiet;
    r->quiet = true; /* the news that this rank has failed comes back, and is none here */
    pthread_mutex_unlock(&r->lock);
    if (!send)
        return;
    send_frame(r, PS_WIRE_FAIL, 0, reason, strnlen(reason, 400), NULL, 0);
    /* Rank 0's process takes the store with it when it ends: the others must have been told before. */
    if (r->rank == 0)
        ps_rendezvous_failed(r, 1.0, NULL, 0);
}

int ps_rendezvous_failed(struct ps_rendezvous *r, double wait_s, char *reason, size_t size)
{
    int64_t deadline = after(wait_s);
    pthread_mutex_lock(&r->lock);
    while (!r->failed && wait_s > 0 && wait_changed(r, deadline) == 0)
        ;
    int failed = r->failed;
    if (failed && size)
        snprintf(reason, size, "%s", r->reason);
    pthread_mutex_unlock(&r->lock);
    return failed;
}

void ps_rendezvous_attach(struct ps_rendezvous *r, struct ps_comm *comm)
{
    pthread_mutex_lock(&r->lock);
    r->comm = comm;
    if (comm && r->failed)
        comm->ops->abort(comm, r->reason);
    pthread_mutex_unlock(&r->lock);
}
