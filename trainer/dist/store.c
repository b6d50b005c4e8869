/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/store.h"

#include "services/base/clock.h"
#include "trainer/dist/rendezvous.h"
#include "trainer/dist/wire.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    MAX_LISTENERS = 4,
    MAX_STRANGERS = 64, /* connections that have not proved the secret yet; the oldest makes room */
    MAX_KEYS = 65536,
    MAX_STORED = 64 << 20, /* bytes of all values */
    MAX_OUT = 8 << 20,     /* bytes waiting for a rank that does not read */
};
static const int64_t HELLO_NS = 5 * PS_NS_PER_S;
/* After the job failed: how long the others' connections may take to end before rank 0's own process is told
 * (and ends, taking with it what has not been sent). */
static const int64_t LAST_WORDS_NS = 3 * PS_NS_PER_S / 10;

struct peer {
    int fd;
    int rank; /* -1: a stranger */
    uint32_t pid;
    char host[PS_WIRE_HOST + 1];
    char address[64], local_address[64]; /* the other end and this one */
    int64_t opened, heard;
    unsigned char nonce[PS_WIRE_NONCE];
    struct ps_buf in, out;
    bool left;  /* has said goodbye */
    bool ended; /* to be closed when out is empty */
    bool dead;  /* to be closed now */
};

struct entry {
    char *key, *value;
    size_t size;
};

struct waiter { /* a GET whose key is not there yet */
    struct peer *peer;
    uint32_t id;
    int64_t deadline;
    struct waiter *next;
    char key[PS_RENDEZVOUS_KEY_MAX + 1];
};

/* All but wake, stop and the thread belongs to the thread. */
struct ps_store {
    int world_size;
    char secret[320];
    double join_s, heartbeat_s;
    int listeners[MAX_LISTENERS];
    int listener_count;
    int wake; /* eventfd: stop */
    pthread_t thread;

    struct peer **peers;
    size_t peer_count, peer_room;
    struct peer **ranks; /* by rank; NULL: not joined, or gone */
    int joined;
    bool started;
    int64_t join_deadline, next_ping;
    struct entry *entries;
    size_t entry_count, entry_room, stored;
    struct waiter *waiters;
    size_t waiter_count;

    bool failed, told_rank_0;
    char reason[600];
    int64_t failed_at;
    bool rank_0_leaving;
    uint32_t leave_id;
    int64_t leave_deadline;
};

static int64_t seconds_ns(double s)
{
    return (int64_t)(s * (double)PS_NS_PER_S);
}

/* ---- listening ---- */

static int listen_on(const struct sockaddr *address, socklen_t length, int family, bool both_families)
{
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    int on = 1, v6only = !both_families;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6only, sizeof v6only);
    if (bind(fd, address, length) < 0 || listen(fd, 256) < 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static int bound_port(int fd)
{
    union {
        struct sockaddr_in6 v6;
        struct sockaddr_in v4;
        struct sockaddr any;
    } address = {0};
    socklen_t length = sizeof address;
    if (getsockname(fd, &address.any, &length) < 0)
        return 0;
    return ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
}

static int fail_listen(int errnum, const char *host, int port, struct ps_error *err)
{
    if (errnum == EADDRINUSE)
        return ps_fail(
            err, PS_ALREADY_EXISTS,
            "port %d is in use on this machine, so rank 0 cannot listen on %s:%d: choose another port, or "
            "end the program that has it (ss -ltnp 'sport = :%d' shows it)",
            port, host, port, port);
    return ps_fail_errno(err, errnum, "rank 0 cannot listen on %s:%d", host, port);
}

/* Loopback names and addresses are taken literally; any other name or address only says how others reach this
 * machine (which may itself see it as 127.0.1.1), so rank 0 then listens on all addresses. */
static int open_listeners(struct ps_store *s, const char *host, int port, int *ret_port, struct ps_error *err)
{
    if (ps_address_loopback(host) || strcmp(host, "localhost") == 0) {
        char service[16];
        snprintf(service, sizeof service, "%d", port);
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *list;
        int rc = getaddrinfo(host, service, &hints, &list);
        if (rc)
            return ps_fail(err, PS_INVALID_ARGUMENT, "cannot resolve %s: %s", host, gai_strerror(rc));
        int code = 0, chosen = port, last = EADDRNOTAVAIL;
        for (struct addrinfo *a = list; a && s->listener_count < MAX_LISTENERS; a = a->ai_next) {
            if (a->ai_family == AF_INET6)
                ((struct sockaddr_in6 *)a->ai_addr)->sin6_port = htons((uint16_t)chosen);
            else if (a->ai_family == AF_INET)
                ((struct sockaddr_in *)a->ai_addr)->sin_port = htons((uint16_t)chosen);
            else
                continue;
            int fd = listen_on(a->ai_addr, a->ai_addrlen, a->ai_family, false);
            if (fd < 0) {
                last = errno;
                if (errno == EADDRINUSE && port != 0) {
                    code = fail_listen(errno, host, port, err);
                    break;
                }
                continue; /* ::1 where IPv6 is off */
            }
            s->listeners[s->listener_count++] = fd;
            chosen = bound_port(fd);
        }
        freeaddrinfo(list);
        if (code == 0 && s->listener_count == 0)
            code = fail_listen(last, host, port, err);
        if (code == 0)
            *ret_port = chosen;
        return code;
    }
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    int fd = listen_on((struct sockaddr *)&v6, sizeof v6, AF_INET6, true);
    if (fd < 0 && errno != EADDRINUSE) {
        struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        fd = listen_on((struct sockaddr *)&v4, sizeof v4, AF_INET, false);
    }
    if (fd < 0)
        return fail_listen(errno, host, port, err);
    s->listeners[s->listener_count++] = fd;
    *ret_port = bound_port(fd);
    return 0;
}

/* ---- peers ---- */

static void put_text(struct peer *p, enum ps_wire_type type, uint32_t id, const char *text)
{
    ps_wire_put_frame(&p->out, type, id, text, strlen(text), NULL, 0);
}

static void flush_peer(struct peer *p)
{
    size_t done = 0;
    while (done < p->out.size) {
        ssize_t n = send(p->fd, p->out.data + done, p->out.size - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                p->out.size = done = 0; /* reading tells how it ended */
            break;
        }
        done += (size_t)n;
    }
    if (done) {
        memmove(p->out.data, p->out.data + done, p->out.size - done);
        p->out.size -= done;
    }
}

static struct peer *add_peer(struct ps_store *s, int fd, int64_t now)
{
    if (s->peer_count == s->peer_room) {
        size_t room = s->peer_room ? 2 * s->peer_room : 16;
        struct peer **more = realloc(s->peers, room * sizeof *more);
        if (!more)
            return NULL;
        s->peers = more;
        s->peer_room = room;
    }
    struct peer *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    *p = (struct peer){.fd = fd,
                       .rank = -1,
                       .opened = now,
                       .heard = now,
                       .in = PS_BUF_INIT(2 * (PS_WIRE_BODY_MAX + PS_WIRE_HEADER)),
                       .out = PS_BUF_INIT(MAX_OUT)};
    s->peers[s->peer_count++] = p;
    return p;
}

static void drop_waiter(struct ps_store *s, struct waiter **at)
{
    struct waiter *gone = *at;
    *at = gone->next;
    s->waiter_count--;
    free(gone);
}

static void free_peer(struct ps_store *s, struct peer *p)
{
    for (struct waiter **at = &s->waiters; *at;) {
        if ((*at)->peer == p)
            drop_waiter(s, at);
        else
            at = &(*at)->next;
    }
    if (p->rank >= 0 && s->ranks[p->rank] == p)
        s->ranks[p->rank] = NULL;
    close(p->fd);
    ps_buf_done(&p->in);
    ps_buf_done(&p->out);
    free(p);
}

static void greet(struct peer *p)
{
    struct ps_buf body = PS_BUF_INIT(64);
    if (ps_wire_nonce(p->nonce) < 0) {
        p->dead = true;
        return;
    }
    ps_buf_append(&body, PS_WIRE_MAGIC, 8);
    ps_wire_put_u32(&body, PS_WIRE_VERSION);
    ps_buf_append(&body, p->nonce, PS_WIRE_NONCE);
    ps_wire_put_frame(&p->out, PS_WIRE_GREETING, 0, body.data, body.size, NULL, 0);
    ps_buf_done(&body);
    flush_peer(p);
}

static void accept_peers(struct ps_store *s, int listener, int64_t now)
{
    for (;;) {
        struct sockaddr_storage address;
        socklen_t length = sizeof address;
        int fd = accept4(listener, (struct sockaddr *)&address, &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return; /* EAGAIN, or an error of that connection; out of descriptors: the joiner tries again */
        size_t strangers = 0;
        struct peer *oldest = NULL;
        for (size_t i = 0; i < s->peer_count; i++) {
            struct peer *p = s->peers[i];
            if (p->rank >= 0 || p->dead)
                continue;
            strangers++;
            if (!oldest || p->opened < oldest->opened)
                oldest = p;
        }
        if (strangers >= MAX_STRANGERS)
            oldest->dead = true;
        struct peer *p = add_peer(s, fd, now);
        if (!p) {
            close(fd);
            return;
        }
        ps_socket_tune(fd);
        ps_address_text((struct sockaddr *)&address, p->address, sizeof p->address);
        length = sizeof address;
        if (getsockname(fd, (struct sockaddr *)&address, &length) == 0)
            ps_address_text((struct sockaddr *)&address, p->local_address, sizeof p->local_address);
        greet(p);
    }
}

/* ---- the job's state ---- */

/* Everybody but rank 0 hears it at once; rank 0's turn comes in end_of_failure. */
static void fail_job(struct ps_store *s, int64_t now, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void fail_job(struct ps_store *s, int64_t now, const char *format, ...)
{
    if (s->failed)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(s->reason, sizeof s->reason, format, args);
    va_end(args);
    s->failed = true;
    s->failed_at = now;
    for (int rank = 1; rank < s->world_size; rank++) {
        if (!s->ranks[rank])
            continue;
        put_text(s->ranks[rank], PS_WIRE_ABORT, 0, s->reason);
        flush_peer(s->ranks[rank]);
    }
}

static void end_of_failure(struct ps_store *s, int64_t now)
{
    if (!s->failed || s->told_rank_0)
        return;
    if (now - s->failed_at < LAST_WORDS_NS)
        for (size_t i = 0; i < s->peer_count; i++)
            if (s->peers[i]->rank > 0 || s->peers[i]->ended)
                return;
    s->told_rank_0 = true;
    if (s->ranks[0]) {
        put_text(s->ranks[0], PS_WIRE_ABORT, 0, s->reason);
        if (s->rank_0_leaving)
            put_text(s->ranks[0], PS_WIRE_BYE, s->leave_id, "");
        flush_peer(s->ranks[0]);
    }
}

static const char *describe(const struct peer *p, char *out, size_t size)
{
    snprintf(out, size, "rank %d (pid %u on %s)", p->rank, p->pid, p->host);
    return out;
}

static void start_job(struct ps_store *s)
{
    const char *outside =
        NULL; /* this machine's address towards the others, once somebody is on another one */
    const char *inside = "127.0.0.1";
    for (int rank = 1; rank < s->world_size; rank++) {
        if (!s->ranks[rank])
            return; /* died in the meantime: fail_job has been called or will be */
        inside = s->ranks[rank]->local_address;
        if (!outside && !ps_address_loopback(s->ranks[rank]->address))
            outside = s->ranks[rank]->local_address;
    }
    s->started = true;
    for (int rank = 0; rank < s->world_size; rank++) {
        struct peer *p = s->ranks[rank];
        uint32_t local_rank = 0, local_size = 0;
        for (int other = 0; other < s->world_size; other++) {
            bool same = strcmp(s->ranks[other]->host, p->host) == 0;
            local_size += same;
            local_rank += same && other < rank;
        }
        const char *address = rank == 0                                    ? (outside ? outside : inside)
                              : outside && ps_address_loopback(p->address) ? outside
                                                                           : p->address;
        struct ps_buf body = PS_BUF_INIT(256);
        ps_wire_put_u32(&body, local_rank);
        ps_wire_put_u32(&body, local_size);
        ps_buf_puts(&body, address);
        ps_wire_put_frame(&p->out, PS_WIRE_START, 0, body.data, body.size, NULL, 0);
        ps_buf_done(&body);
        flush_peer(p);
    }
}

static void refuse(struct peer *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void refuse(struct peer *p, const char *format, ...)
{
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    put_text(p, PS_WIRE_REFUSED, 0, text);
    p->ended = true;
}

static void on_hello(struct ps_store *s, struct peer *p, const struct ps_wire_frame *f, int64_t now)
{
    struct ps_wire_reader r = {f->body, f->size, false};
    const unsigned char *magic = ps_wire_bytes(&r, 8);
    uint32_t version = ps_wire_u32(&r), rank = ps_wire_u32(&r), world = ps_wire_u32(&r),
             pid = ps_wire_u32(&r);
    const unsigned char *nonce = ps_wire_bytes(&r, PS_WIRE_NONCE);
    const unsigned char *host = ps_wire_bytes(&r, PS_WIRE_HOST);
    const unsigned char *mac = ps_wire_bytes(&r, PS_WIRE_MAC);
    if (r.bad || r.left || memcmp(magic, PS_WIRE_MAGIC, 8) != 0) {
        p->dead = true;
        return;
    }
    if (version != PS_WIRE_VERSION) {
        refuse(p,
               "rank 0 speaks version %d of the rendezvous, this rank version %u: use one build on all ranks",
               PS_WIRE_VERSION, version);
        return;
    }
    char expected[PS_WIRE_MAC + 1];
    if (ps_wire_mac(s->secret, "rank", p->nonce, nonce, rank, world, expected) < 0 ||
        !ps_wire_mac_equal(expected, mac)) {
        refuse(
            p,
            "rank 0 belongs to another job (the job secrets differ): set PARAMSYNC_JOB_SECRET alike on all "
            "ranks of a job, or choose another port");
        return;
    }
    char name[PS_WIRE_HOST + 1], text[160];
    ps_wire_text(host, PS_WIRE_HOST, name, sizeof name);
    if (world != (uint32_t)s->world_size) {
        char what[600];
        snprintf(what, sizeof what,
                 "the ranks disagree on the world size: rank %u (pid %u on %s) was started with %u, rank 0 "
                 "with %d",
                 rank, pid, name, world, s->world_size);
        refuse(p, "%s", what);
        if (!s->started)
            fail_job(s, now, "%s", what);
        return;
    }
    if (rank >= world) {
        refuse(p, "rank %u is out of range: the world size is %u", rank, world);
        return;
    }
    if (s->failed) {
        refuse(p, "%s", s->reason);
        return;
    }
    if (s->ranks[rank] || s->started) {
        char what[600];
        if (s->ranks[rank])
            snprintf(what, sizeof what,
                     "%s and pid %u on %s both say that they are rank %u: give each process its own rank",
                     describe(s->ranks[rank], text, sizeof text), pid, name, rank);
        else
            snprintf(what, sizeof what, "the job is complete: rank %u has joined and left", rank);
        refuse(p, "%s", what);
        /* A running job is not stopped by a latecomer; one that is still gathering can never be complete. */
        if (!s->started)
            fail_job(s, now, "%s", what);
        return;
    }
    char proof[PS_WIRE_MAC + 1];
    if (ps_wire_mac(s->secret, "rank 0", p->nonce, nonce, rank, world, proof) < 0) {
        p->dead = true;
        return;
    }
    p->rank = (int)rank;
    p->pid = pid;
    snprintf(p->host, sizeof p->host, "%s", name);
    s->ranks[rank] = p;
    s->joined++;
    ps_wire_put_frame(&p->out, PS_WIRE_WELCOME, 0, proof, PS_WIRE_MAC, NULL, 0);
    flush_peer(p);
    if (s->joined == s->world_size)
        start_job(s);
}

/* ---- the store ---- */

static struct entry *find_entry(struct ps_store *s, const char *key)
{
    for (size_t i = 0; i < s->entry_count; i++)
        if (strcmp(s->entries[i].key, key) == 0)
            return &s->entries[i];
    return NULL;
}

static void answer_error(struct peer *p, uint32_t id, int code, const char *text)
{
    struct ps_buf body = PS_BUF_INIT(1024);
    ps_wire_put_u32(&body, (uint32_t)-code);
    ps_buf_puts(&body, text);
    ps_wire_put_frame(&p->out, PS_WIRE_ERROR, id, body.data, body.size, NULL, 0);
    ps_buf_done(&body);
}

static int store_value(struct ps_store *s, const char *key, const void *data, size_t size)
{
    struct entry *e = find_entry(s, key);
    size_t before = e ? e->size : 0;
    if (s->stored - before + size > MAX_STORED || (!e && s->entry_count == MAX_KEYS))
        return PS_RESOURCE_EXHAUSTED;
    char *value = malloc(size + 1);
    if (!value)
        return PS_RESOURCE_EXHAUSTED;
    if (size)
        memcpy(value, data, size);
    value[size] = '\0';
    if (!e) {
        if (s->entry_count == s->entry_room) {
            size_t room = s->entry_room ? 2 * s->entry_room : 64;
            struct entry *more = realloc(s->entries, room * sizeof *more);
            if (!more) {
                free(value);
                return PS_RESOURCE_EXHAUSTED;
            }
            s->entries = more;
            s->entry_room = room;
        }
        char *copy = strdup(key);
        if (!copy) {
            free(value);
            return PS_RESOURCE_EXHAUSTED;
        }
        e = &s->entries[s->entry_count++];
        *e = (struct entry){.key = copy};
    }
    free(e->value);
    e->value = value;
    e->size = size;
    s->stored += size - before;
    for (struct waiter **at = &s->waiters; *at;) {
        if (strcmp((*at)->key, key) == 0) {
            ps_wire_put_frame(&(*at)->peer->out, PS_WIRE_DONE, (*at)->id, value, size, NULL, 0);
            drop_waiter(s, at);
        } else {
            at = &(*at)->next;
        }
    }
    return 0;
}

static void add_waiter(struct ps_store *s, struct peer *p, uint32_t id, const char *key, int64_t deadline)
{
    struct waiter *w = s->waiter_count < MAX_KEYS ? calloc(1, sizeof *w) : NULL;
    if (!w) {
        answer_error(p, id, PS_RESOURCE_EXHAUSTED, "too many ranks wait for keys");
        return;
    }
    *w = (struct waiter){.peer = p, .id = id, .deadline = deadline, .next = s->waiters};
    snprintf(w->key, sizeof w->key, "%s", key);
    s->waiters = w;
    s->waiter_count++;
}

/* Copies a key out of a body. Returns -1 if it is none. */
static int take_key(const unsigned char *data, size_t size, char key[PS_RENDEZVOUS_KEY_MAX + 1])
{
    if (!data || size < 1 || size > PS_RENDEZVOUS_KEY_MAX || memchr(data, 0, size))
        return -1;
    memcpy(key, data, size);
    key[size] = '\0';
    return 0;
}

static void on_request(struct ps_store *s, struct peer *p, const struct ps_wire_frame *f, int64_t now)
{
    struct ps_wire_reader r = {f->body, f->size, false};
    char key[PS_RENDEZVOUS_KEY_MAX + 1], text[64];
    int code = 0;
    if (f->type == PS_WIRE_SET) {
        uint32_t key_size = ps_wire_u32(&r);
        if (take_key(ps_wire_bytes(&r, key_size), key_size, key) < 0 || r.left > PS_RENDEZVOUS_VALUE_MAX)
            code = PS_INVALID_ARGUMENT;
        else
            code = store_value(s, key, r.at, r.left);
        if (code == 0)
            ps_wire_put_frame(&p->out, PS_WIRE_DONE, f->id, NULL, 0, NULL, 0);
    } else if (f->type == PS_WIRE_GET) {
        uint32_t ms = ps_wire_u32(&r);
        if (r.bad || take_key(r.at, r.left, key) < 0) {
            code = PS_INVALID_ARGUMENT;
        } else {
            struct entry *e = find_entry(s, key);
            if (e)
                ps_wire_put_frame(&p->out, PS_WIRE_DONE, f->id, e->value, e->size, NULL, 0);
            else
                add_waiter(s, p, f->id, key, now + (int64_t)ms * (PS_NS_PER_S / 1000));
        }
    } else { /* PS_WIRE_ADD */
        int64_t amount = (int64_t)ps_wire_u64(&r), sum = 0;
        if (r.bad || take_key(r.at, r.left, key) < 0) {
            code = PS_INVALID_ARGUMENT;
        } else {
            struct entry *e = find_entry(s, key);
            if (e)
                sum = strtoll(e->value, NULL, 10);
            if (__builtin_add_overflow(sum, amount, &sum)) {
                code = PS_OUT_OF_RANGE;
            } else {
                int size = snprintf(text, sizeof text, "%lld", (long long)sum);
                code = store_value(s, key, text, (size_t)size);
            }
        }
        if (code == 0) {
            struct ps_buf body = PS_BUF_INIT(8);
            ps_wire_put_u64(&body, (uint64_t)sum);
            ps_wire_put_frame(&p->out, PS_WIRE_DONE, f->id, body.data, body.size, NULL, 0);
            ps_buf_done(&body);
        }
    }
    if (code == PS_RESOURCE_EXHAUSTED)
        answer_error(p, f->id, code, "the rendezvous's store is full");
    else if (code)
        answer_error(p, f->id, code, "the key or value is malformed");
}

static void on_frame(struct ps_store *s, struct peer *p, const struct ps_wire_frame *f, int64_t now)
{
    if (p->rank < 0) {
        if (f->type == PS_WIRE_HELLO)
            on_hello(s, p, f, now);
        else
            p->dead = true;
        return;
    }
    char text[700];
    switch (f->type) {
    case PS_WIRE_PING:
        break;
    case PS_WIRE_SET:
    case PS_WIRE_GET:
    case PS_WIRE_ADD:
        on_request(s, p, f, now);
        break;
    case PS_WIRE_FAIL:
        ps_wire_text(f->body, f->size, text, 400);
        fail_job(s, now, "rank %d failed: %s", p->rank, text);
        break;
    case PS_WIRE_LEAVE: {
        struct ps_wire_reader r = {f->body, f->size, false};
        uint32_t ms = ps_wire_u32(&r);
        p->left = true;
        if (p->rank == 0) {
            s->rank_0_leaving = true;
            s->leave_id = f->id;
            s->leave_deadline = now + (int64_t)ms * (PS_NS_PER_S / 1000);
            if (s->told_rank_0)
                put_text(p, PS_WIRE_BYE, f->id, "");
        } else {
            put_text(p, PS_WIRE_BYE, f->id, "");
        }
        break;
    }
    default:
        p->dead = true; /* what only rank 0 sends, or a second HELLO */
        fail_job(s, now, "rank %d sent a message that no rank sends", p->rank);
        break;
    }
}

static void peer_ended(struct ps_store *s, struct peer *p, int64_t now)
{
    char text[160];
    p->dead = true;
    if (p->rank >= 0 && !p->left)
        fail_job(s, now, "%s died: its connection closed without goodbye", describe(p, text, sizeof text));
}

static void read_peer(struct ps_store *s, struct peer *p, int64_t now)
{
    while (!p->dead) {
        size_t want = p->rank < 0 ? PS_WIRE_HEADER + PS_WIRE_HELLO_SIZE : 1 << 16;
        char *to = ps_buf_reserve(&p->in, want);
        if (!to) {
            p->dead = true;
            return;
        }
        ssize_t n = recv(p->fd, to, want, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            peer_ended(s, p, now);
            return;
        }
        p->in.size += (size_t)n;
        p->heard = now;
        size_t used = 0;
        while (!p->dead && !p->ended) {
            struct ps_wire_frame f;
            long taken = ps_wire_take(p->in.data + used, p->in.size - used,
                                      p->rank < 0 ? PS_WIRE_HELLO_SIZE : PS_WIRE_BODY_MAX, &f);
            if (taken == 0)
                break;
            if (taken < 0) {
                peer_ended(s, p, now);
                return;
            }
            on_frame(s, p, &f, now);
            used += (size_t)taken;
        }
        if (p->ended) {
            p->in.size = 0; /* refused: whatever else it says is thrown away until it closes */
            return;
        }
        memmove(p->in.data, p->in.data + used, p->in.size - used);
        p->in.size -= used;
    }
}

/* ---- the thread ---- */

static void name_absent(const struct ps_store *s, char *out, size_t size)
{
    size_t used = 0;
    int shown = 0;
    out[0] = '\0';
    for (int rank = 0; rank < s->world_size; rank++) {
        if (s->ranks[rank])
            continue;
        if (shown++ == 16) {
            snprintf(out + used, size - used, ", ...");
            return;
        }
        int n = snprintf(out + used, size - used, "%s%d", shown > 1 ? ", " : "", rank);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
}

static void check_time(struct ps_store *s, int64_t now)
{
    char text[160];
    int64_t silence = seconds_ns(s->heartbeat_s);
    bool ping = now >= s->next_ping;
    if (ping)
        s->next_ping = now + silence / 4;
    for (size_t i = 0; i < s->peer_count; i++) {
        struct peer *p = s->peers[i];
        if (p->dead)
            continue;
        if (p->rank < 0) {
            if (now - p->opened > HELLO_NS)
                p->dead = true;
            continue;
        }
        if (!p->left && now - p->heard > silence) {
            fail_job(s, now, "%s is silent: no heartbeat for %.1f s", describe(p, text, sizeof text),
                     (double)(now - p->heard) / (double)PS_NS_PER_S);
            p->dead = true;
            continue;
        }
        if (ping)
            ps_wire_put_frame(&p->out, PS_WIRE_PING, 0, NULL, 0, NULL, 0);
        if (p->out.failed && !p->left) {
            fail_job(s, now, "%s does not read from its control connection", describe(p, text, sizeof text));
            p->dead = true;
        }
    }
    if (!s->started && !s->failed && now > s->join_deadline) {
        char absent[128];
        name_absent(s, absent, sizeof absent);
        fail_job(s, now, "not all ranks joined within %.0f s; still missing: %s of %d", s->join_s, absent,
                 s->world_size);
    }
    for (struct waiter **at = &s->waiters; *at;) {
        if (now > (*at)->deadline) {
            answer_error((*at)->peer, (*at)->id, PS_DEADLINE_EXCEEDED, "no rank has set it in time");
            drop_waiter(s, at);
        } else {
            at = &(*at)->next;
        }
    }
    end_of_failure(s, now);
    if (s->rank_0_leaving && !s->told_rank_0 && s->ranks[0]) {
        bool alone = true;
        for (int rank = 1; rank < s->world_size; rank++)
            alone = alone && (!s->ranks[rank] || s->ranks[rank]->left);
        if (alone) {
            s->told_rank_0 = true;
            put_text(s->ranks[0], PS_WIRE_BYE, s->leave_id, "");
        } else if (now > s->leave_deadline) {
            fail_job(s, now, "rank 0 has ended and this rank has not");
        }
    }
}

static void *store_thread(void *context)
{
    struct ps_store *s = context;
    int tick_ms = (int)(s->heartbeat_s * 100.0);
    tick_ms = tick_ms < 20 ? 20 : tick_ms > 250 ? 250 : tick_ms;
    struct pollfd *fds = NULL;
    size_t room = 0;
    for (;;) {
        size_t need = 1 + MAX_LISTENERS + s->peer_count;
        if (!fds || need > room) {
            struct pollfd *more = realloc(fds, 2 * need * sizeof *fds);
            if (!more)
                break; /* the connections close, which all ranks take for rank 0's death */
            fds = more;
            room = 2 * need;
        }
        size_t n = 0, first_peer;
        fds[n++] = (struct pollfd){.fd = s->wake, .events = POLLIN};
        for (int i = 0; i < s->listener_count; i++)
            fds[n++] = (struct pollfd){.fd = s->listeners[i], .events = POLLIN};
        first_peer = n;
        size_t peers = s->peer_count;
        for (size_t i = 0; i < peers; i++)
            fds[n++] = (struct pollfd){.fd = s->peers[i]->fd,
                                       .events = (short)(POLLIN | (s->peers[i]->out.size ? POLLOUT : 0))};
        int ready = poll(fds, n, s->failed || s->rank_0_leaving ? 20 : tick_ms);
        if (ready > 0 && fds[0].revents)
            break;
        int64_t now = ps_monotonic_ns();
        if (ready > 0) {
            for (size_t i = 0; i < peers; i++)
                if (fds[first_peer + i].revents && !s->peers[i]->dead)
                    read_peer(s, s->peers[i], now);
            for (size_t i = 1; i < first_peer; i++)
                if (fds[i].revents)
                    accept_peers(s, fds[i].fd, now);
        }
        check_time(s, now);
        for (size_t i = 0; i < s->peer_count;) {
            struct peer *p = s->peers[i];
            if (!p->dead)
                flush_peer(p);
            if (p->dead || (p->ended && p->out.size == 0 && now - p->opened > HELLO_NS)) {
                free_peer(s, p);
                s->peers[i] = s->peers[--s->peer_count];
            } else {
                i++;
            }
        }
    }
    free(fds);
    return NULL;
}

static void free_store(struct ps_store *s)
{
    for (size_t i = 0; i < s->peer_count; i++)
        free_peer(s, s->peers[i]);
    for (size_t i = 0; i < s->entry_count; i++) {
        free(s->entries[i].key);
        free(s->entries[i].value);
    }
    while (s->waiters)
        drop_waiter(s, &s->waiters);
    for (int i = 0; i < s->listener_count; i++)
        close(s->listeners[i]);
    if (s->wake >= 0)
        close(s->wake);
    free(s->peers);
    free(s->ranks);
    free(s->entries);
    free(s);
}

int ps_store_open(const struct ps_store_config *config, int local_fd, struct ps_store **ret, int *ret_port,
                  struct ps_error *err)
{
    struct ps_store *s = calloc(1, sizeof *s);
    if (!s)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int64_t now = ps_monotonic_ns();
    s->world_size = config->world_size;
    snprintf(s->secret, sizeof s->secret, "%s", config->secret);
    s->join_s = config->join_s;
    s->heartbeat_s = config->heartbeat_s;
    s->join_deadline = now + seconds_ns(config->join_s);
    s->next_ping = now;
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->ranks = calloc((size_t)config->world_size, sizeof *s->ranks);
    int code = 0;
    struct peer *local = NULL;
    if (s->wake < 0)
        code = ps_fail_errno(err, errno, "cannot make an event descriptor");
    else if (!s->ranks)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    else
        code = open_listeners(s, config->host, config->port, ret_port, err);
    if (code == 0 && !(local = add_peer(s, local_fd, now)))
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (code == 0) {
        snprintf(local->address, sizeof local->address, "127.0.0.1");
        greet(local);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int rc = pthread_create(&s->thread, NULL, store_thread, s);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (rc) {
            s->peer_count = 0; /* local_fd stays the caller's */
            ps_buf_done(&local->in);
            ps_buf_done(&local->out);
            free(local);
            code = ps_fail_errno(err, rc, "cannot start the rendezvous's thread");
        }
    }
    if (code < 0) {
        free_store(s);
        return code;
    }
    *ret = s;
    return 0;
}

void ps_store_close(struct ps_store *s)
{
    if (!s)
        return;
    uint64_t one = 1;
    while (write(s->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_join(s->thread, NULL);
    free_store(s);
}
