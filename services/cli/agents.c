/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/agents.h"

#include "services/base/clock.h"
#include "services/base/text.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum { STRANGERS_MAX = 16, OUT_MAX = 1 << 16 };
static const double hello_s = 10; /* a stranger has as long to prove itself */
static const double connect_again_s = 0.5;

struct connection {
    int fd; /* -1: none */
    int node;
    bool connecting, proved, greeted;
    double heard_s, pinged_s, since_s;
    char nonce[CLI_SESSION];      /* ours */
    char expected[PS_SHA256_HEX]; /* others than node 0: what WELCOME must say */
    char in[CLI_LINE_MAX];
    size_t in_size;
    struct ps_buf out;
};

struct queued {
    struct cli_agent_event event;
    struct queued *next;
};

struct cli_agents {
    struct cli_agents_config config;
    char host[256], secret[320];
    int listen_fd;
    struct connection *peers; /* node 0: by node; others: peers[0] is node 0 */
    int peer_count;
    struct connection strangers[STRANGERS_MAX];
    double try_s; /* others: when to connect next */
    int last_attempt;
    bool refused;
    struct queued *first, *last;
};

/* ---- proofs ---- */

int cli_mac(const char *secret, const char *text, char ret[PS_SHA256_HEX])
{
    unsigned char key[64] = {0}, pad[64];
    char hex[PS_SHA256_HEX];
    size_t length = strlen(secret);
    if (length > sizeof key) {
        struct ps_sha256 *sha = ps_sha256_new();
        if (!sha)
            return -1;
        ps_sha256_update(sha, secret, length);
        ps_sha256_hex(sha, hex);
        ps_sha256_free(sha);
        memcpy(key, hex, sizeof key);
    } else {
        for (size_t i = 0; i < length; i++)
            key[i] = (unsigned char)secret[i];
    }
    struct ps_sha256 *inner = ps_sha256_new(), *outer = ps_sha256_new();
    int code = inner && outer ? 0 : -1;
    if (!code) {
        for (size_t i = 0; i < sizeof pad; i++)
            pad[i] = key[i] ^ 0x36;
        ps_sha256_update(inner, pad, sizeof pad);
        ps_sha256_update(inner, text, strlen(text));
        ps_sha256_hex(inner, hex);
        for (size_t i = 0; i < sizeof pad; i++)
            pad[i] = key[i] ^ 0x5c;
        ps_sha256_update(outer, pad, sizeof pad);
        ps_sha256_update(outer, hex, strlen(hex));
        ps_sha256_hex(outer, ret);
    }
    ps_sha256_free(inner);
    ps_sha256_free(outer);
    return code;
}

int cli_nonce(char ret[CLI_SESSION])
{
    unsigned char bytes[(CLI_SESSION - 1) / 2];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
        return -1;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(ret + 2 * i, 3, "%02x", bytes[i]);
    return 0;
}

static bool same_mac(const char *a, const char *b)
{
    unsigned char differs = 0;
    if (strlen(a) != PS_SHA256_HEX - 1)
        return false;
    for (size_t i = 0; i < PS_SHA256_HEX - 1; i++)
        differs |= (unsigned char)(a[i] ^ b[i]);
    return !differs;
}

static int hello_mac(const struct cli_agents *a, int node, int ranks, int attempt, const char *server,
                     const char *client, char ret[PS_SHA256_HEX])
{
    char text[256];
    snprintf(text, sizeof text, "member|%d|%d|%d|%d|%.32s|%.32s", node, a->config.nodes, ranks, attempt,
             server, client);
    return cli_mac(a->secret, text, ret);
}

static int welcome_mac(const struct cli_agents *a, const char *server, const char *client,
                       char ret[PS_SHA256_HEX])
{
    char text[128];
    snprintf(text, sizeof text, "node 0|%.32s|%.32s", server, client);
    return cli_mac(a->secret, text, ret);
}

/* ---- events and connections ---- */

static void tell(struct cli_agents *a, const struct cli_agent_event *event)
{
    struct queued *q = malloc(sizeof *q);
    if (!q)
        return; /* what is lost here ends in a deadline */
    *q = (struct queued){.event = *event};
    if (a->last)
        a->last->next = q;
    else
        a->first = q;
    a->last = q;
}

int cli_agents_next(struct cli_agents *a, struct cli_agent_event *ret)
{
    struct queued *q = a->first;
    if (!q)
        return 0;
    *ret = q->event;
    a->first = q->next;
    if (!a->first)
        a->last = NULL;
    free(q);
    return 1;
}

static void connection_init(struct connection *c, int fd)
{
    double now = ps_monotonic_s();
    *c = (struct connection){
        .fd = fd, .node = -1, .heard_s = now, .pinged_s = now, .since_s = now, .out = PS_BUF_INIT(OUT_MAX)};
}

static void connection_close(struct connection *c)
{
    if (c->fd >= 0)
        close(c->fd);
    ps_buf_done(&c->out);
    c->fd = -1;
    c->proved = false;
}

static void lose(struct cli_agents *a, struct connection *c, const char *why)
{
    bool known = c->proved;
    int node = c->node;
    connection_close(c);
    if (!known)
        return;
    struct cli_agent_event event = {.type = CLI_AGENT_LOST, .node = node};
    snprintf(event.text, sizeof event.text, "%s", why);
    tell(a, &event);
}

static void put_line(struct connection *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put_line(struct connection *c, const char *format, ...)
{
    char line[CLI_LINE_MAX];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (n < 0)
        return;
    size_t size = (size_t)n < sizeof line - 1 ? (size_t)n : sizeof line - 2;
    for (size_t i = 0; i < size; i++)
        if (line[i] == '\n')
            line[i] = ' ';
    line[size] = '\n';
    ps_buf_append(&c->out, line, size + 1);
}

static void flush(struct cli_agents *a, struct connection *c)
{
    while (c->fd >= 0 && !c->connecting && c->out.size) {
        ssize_t n = send(c->fd, c->out.data, c->out.size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            if (errno != EAGAIN)
                lose(a, c, strerror(errno));
            return;
        }
        memmove(c->out.data, c->out.data + n, c->out.size - (size_t)n);
        c->out.size -= (size_t)n;
    }
}

static struct connection *peer(const struct cli_agents *a, int node)
{
    int at = a->config.node ? 0 : node;
    return at >= 0 && at < a->peer_count && a->peers[at].fd >= 0 && a->peers[at].proved ? &a->peers[at]
                                                                                        : NULL;
}

bool cli_agents_there(const struct cli_agents *a, int node)
{
    return a && peer(a, node);
}

void cli_agents_send(struct cli_agents *a, int node, const char *format, ...)
{
    char line[CLI_LINE_MAX];
    struct connection *c = a ? peer(a, node) : NULL;
    va_list arguments;
    if (!c)
        return;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    put_line(c, "%s", line);
    flush(a, c);
}

/* ---- lines ---- */

/* "NAME 1 2 3 REST" with count numbers; *ret_rest points into line. */
static bool read_line(const char *line, const char *name, int count, int *numbers, const char **ret_rest)
{
    size_t length = strlen(name);
    if (strncmp(line, name, length) != 0)
        return false;
    line += length;
    for (int i = 0; i < count; i++) {
        char word[16];
        int64_t value;
        if (*line++ != ' ')
            return false;
        size_t size = strcspn(line, " ");
        if (!size || size >= sizeof word)
            return false;
        memcpy(word, line, size);
        word[size] = '\0';
        if (ps_parse_int64(word, INT32_MIN, INT32_MAX, &value))
            return false;
        numbers[i] = (int)value;
        line += size;
    }
    *ret_rest = *line == ' ' ? line + 1 : line;
    return *line == ' ' || !*line;
}

/* The next word of *at, hexadecimal digits that fill the size places (with a NUL); moves *at behind it. */
static bool read_hex(const char **at, char *ret, size_t size)
{
    size_t length = strspn(*at, "0123456789abcdef");
    if (length != size - 1 || ((*at)[length] && (*at)[length] != ' '))
        return false;
    memcpy(ret, *at, length);
    ret[length] = '\0';
    *at += length + ((*at)[length] == ' ');
    return true;
}

static void refuse(struct connection *c, const char *why)
{
    put_line(c, "REFUSED %s", why);
    if (c->out.size)
        (void)!send(c->fd, c->out.data, c->out.size, MSG_NOSIGNAL | MSG_DONTWAIT);
    connection_close(c);
}

static void take_hello(struct cli_agents *a, struct connection *c, const char *line)
{
    int numbers[4] = {0};
    const char *rest;
    char nonce[CLI_SESSION], mac[PS_SHA256_HEX], wanted[PS_SHA256_HEX], text[160];
    bool good = read_line(line, "HELLO", 4, numbers, &rest) && read_hex(&rest, nonce, sizeof nonce) &&
                read_hex(&rest, mac, sizeof mac);
    const int node = numbers[0], nodes = numbers[1], ranks = numbers[2], attempt = numbers[3];
    if (!good || hello_mac(a, node, ranks, attempt, c->nonce, nonce, wanted)) {
        connection_close(c);
        return;
    }
    /* The number of nodes is in the proof as we count them: ask it first, so that the reason is the real one.
     */
    if (nodes != a->config.nodes) {
        snprintf(text, sizeof text, "node 0 was started with --nnodes %d, this node with %d", a->config.nodes,
                 nodes);
        refuse(c, text);
        return;
    }
    if (!same_mac(mac, wanted)) {
        refuse(c, "the job's secret is another one here: set PARAMSYNC_JOB_SECRET to the same on all nodes");
        return;
    }
    if (node < 1 || node >= nodes || ranks < 1 || ranks > 4096) {
        refuse(c, "the node rank or the number of its ranks is out of range");
        return;
    }
    struct connection *place = &a->peers[node];
    if (place->fd >= 0) {
        /* A node that was started anew: its former connection has only not been found dead yet. */
        lose(a, place, "another launcher has come in its place");
    }
    char proof[PS_SHA256_HEX];
    if (welcome_mac(a, c->nonce, nonce, proof)) {
        connection_close(c);
        return;
    }
    *place = *c;
    c->fd = -1;
    c->out = (struct ps_buf)PS_BUF_INIT(OUT_MAX);
    place->node = node;
    place->proved = true;
    put_line(place, "WELCOME %s", proof);
    flush(a, place);
    struct cli_agent_event event = {
        .type = CLI_AGENT_JOINED, .node = node, .ranks = ranks, .attempt = attempt};
    tell(a, &event);
}

static void take_greeting(struct cli_agents *a, struct connection *c, const char *line)
{
    char server[CLI_SESSION], mac[PS_SHA256_HEX];
    int version;
    const char *rest;
    if (strncmp(line, "REFUSED ", 8) == 0) {
        struct cli_agent_event event = {.type = CLI_AGENT_REFUSED};
        snprintf(event.text, sizeof event.text, "%s", line + 8);
        a->refused = true;
        connection_close(c);
        tell(a, &event);
    } else if (!c->greeted && read_line(line, "PARAMSYNC-LAUNCH", 1, &version, &rest) && version == 1 &&
               read_hex(&rest, server, sizeof server)) {
        if (hello_mac(a, a->config.node, a->config.ranks, a->last_attempt, server, c->nonce, mac) ||
            welcome_mac(a, server, c->nonce, c->expected)) {
            connection_close(c);
            return;
        }
        c->greeted = true;
        put_line(c, "HELLO %d %d %d %d %s %s", a->config.node, a->config.nodes, a->config.ranks,
                 a->last_attempt, c->nonce, mac);
        flush(a, c);
    } else if (c->greeted && strncmp(line, "WELCOME ", 8) == 0 && same_mac(line + 8, c->expected)) {
        struct cli_agent_event event = {.type = CLI_AGENT_JOINED};
        c->proved = true;
        c->node = 0;
        c->heard_s = ps_monotonic_s();
        tell(a, &event);
    } else {
        connection_close(c);
    }
}

static void take_line(struct cli_agents *a, struct connection *c, const char *line)
{
    struct cli_agent_event e = {.node = c->node};
    int n[4];
    const char *rest = "";
    bool good = false;
    c->heard_s = ps_monotonic_s();
    if (strcmp(line, "PING") == 0)
        return;
    if (a->config.node == 0) {
        good = true;
        if (read_line(line, "FAILED", 4, n, &rest)) {
            e.type = CLI_AGENT_FAILED;
            e.attempt = n[0];
            e.at_s = c->heard_s - (n[1] > 0 ? n[1] / 1e3 : 0);
            e.rank = n[2];
            e.status = n[3] > 0 && n[3] < 256 ? n[3] : 1;
        } else if (read_line(line, "DONE", 1, &e.attempt, &rest)) {
            e.type = CLI_AGENT_DONE;
        } else if (read_line(line, "STOPPED", 1, &e.attempt, &rest)) {
            e.type = CLI_AGENT_STOPPED;
        } else if (read_line(line, "INTERRUPTED", 1, &e.status, &rest)) {
            e.type = CLI_AGENT_INTERRUPTED;
        } else {
            good = false;
        }
    } else if (read_line(line, "START", 4, n, &rest)) {
        good = read_hex(&rest, e.session, sizeof e.session) && strlen(rest) < sizeof e.sidecar;
        e.type = CLI_AGENT_START;
        e.attempt = n[0], e.first_rank = n[1], e.world_size = n[2], e.master_port = n[3];
        snprintf(e.sidecar, sizeof e.sidecar, "%s", good ? rest : "");
        if (good)
            a->last_attempt = e.attempt;
    } else if (read_line(line, "STOP", 1, &e.attempt, &rest)) {
        good = true;
        e.type = CLI_AGENT_STOP;
    } else if (read_line(line, "END", 1, &e.status, &rest)) {
        good = true;
        e.type = CLI_AGENT_END;
    }
    if (!good) {
        lose(a, c, "it speaks another protocol");
        return;
    }
    snprintf(e.text, sizeof e.text, "%s", rest);
    tell(a, &e);
}

static void take_bytes(struct cli_agents *a, struct connection *c)
{
    while (c->fd >= 0) {
        char *newline = memchr(c->in, '\n', c->in_size);
        if (!newline) {
            if (c->in_size == sizeof c->in)
                lose(a, c, "it speaks another protocol");
            return;
        }
        char line[CLI_LINE_MAX];
        size_t length = (size_t)(newline - c->in);
        memcpy(line, c->in, length);
        line[length] = '\0';
        c->in_size -= length + 1;
        memmove(c->in, newline + 1, c->in_size);
        if (c->proved)
            take_line(a, c, line);
        else if (a->config.node)
            take_greeting(a, c, line);
        else
            take_hello(a, c, line); /* after it this is another's place, or closed */
    }
}

static void receive(struct cli_agents *a, struct connection *c)
{
    while (c->fd >= 0 && !c->connecting) {
        ssize_t n = recv(c->fd, c->in + c->in_size, sizeof c->in - c->in_size, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            if (n == 0)
                lose(a, c, "its launcher has ended");
            else
                lose(a, c, strerror(errno));
            connection_close(c);
            return;
        }
        c->in_size += (size_t)n;
        take_bytes(a, c);
    }
}

/* ---- sockets ---- */

static int look_up(const char *host, int port, int flags, struct addrinfo **ret, struct ps_error *err)
{
    char service[16];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags};
    snprintf(service, sizeof service, "%d", port);
    int result = getaddrinfo(host, service, &hints, ret);
    return result ? ps_fail(err, PS_UNAVAILABLE, "%s: %s", host, gai_strerror(result)) : 0;
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return (ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24) == 127;
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static int start_listening(struct cli_agents *a, struct ps_error *err)
{
    struct addrinfo *named = NULL;
    int code = look_up(a->host, a->config.port, 0, &named, err);
    if (code)
        return code;
    /* What the others call this machine may be an address that it does not see itself: all, then. */
    bool loopback = is_loopback(named->ai_addr);
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)a->config.port)};
    struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)a->config.port)};
    const int on = 1, off = 0;
    int fd = socket(loopback ? named->ai_family : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const struct sockaddr *address = loopback ? named->ai_addr : (const struct sockaddr *)&any;
    socklen_t size = loopback ? named->ai_addrlen : sizeof any;
    if (fd < 0 && !loopback) { /* no IPv6 here */
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        address = (const struct sockaddr *)&any4;
        size = sizeof any4;
    }
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (address->sa_family == AF_INET6 && !loopback)
            setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (fd < 0 || bind(fd, address, size) < 0 || listen(fd, 128) < 0)
        code = ps_fail_errno(err, errno, "cannot listen on %s:%d (--rdzv) for the other nodes", a->host,
                             a->config.port);
    freeaddrinfo(named);
    if (code) {
        if (fd >= 0)
            close(fd);
        return code;
    }
    a->listen_fd = fd;
    return 0;
}

static void start_connecting(struct cli_agents *a)
{
    struct addrinfo *found = NULL;
    struct connection *c = &a->peers[0];
    a->try_s = ps_monotonic_s() + connect_again_s;
    if (look_up(a->host, a->config.port, 0, &found, NULL))
        return; /* its name may not be known before it is up */
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) {
        connection_init(c, fd);
        c->connecting = true;
        if (cli_nonce(c->nonce) ||
            (connect(fd, found->ai_addr, found->ai_addrlen) < 0 && errno != EINPROGRESS))
            connection_close(c);
    }
    freeaddrinfo(found);
}

static void accept_all(struct cli_agents *a)
{
    for (;;) {
        int fd = accept4(a->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK), on = 1;
        if (fd < 0)
            return;
        struct connection *c = NULL;
        for (int i = 0; i < STRANGERS_MAX && !c; i++)
            c = a->strangers[i].fd < 0 ? &a->strangers[i] : NULL;
        if (!c) { /* the oldest has had its time */
            c = &a->strangers[0];
            for (int i = 1; i < STRANGERS_MAX; i++)
                c = a->strangers[i].since_s < c->since_s ? &a->strangers[i] : c;
            connection_close(c);
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        connection_init(c, fd);
        if (cli_nonce(c->nonce)) {
            connection_close(c);
            continue;
        }
        put_line(c, "PARAMSYNC-LAUNCH 1 %s", c->nonce);
        flush(a, c);
    }
}

static void step_peer(struct cli_agents *a, struct connection *c, double now)
{
    int failed = 0;
    socklen_t size = sizeof failed;
    if (c->fd >= 0 && c->connecting) {
        struct pollfd fd = {.fd = c->fd, .events = POLLOUT};
        if (poll(&fd, 1, 0) > 0) {
            getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &failed, &size);
            c->connecting = false;
            if (failed)
                connection_close(c);
        }
    }
    receive(a, c);
    if (c->fd < 0)
        return;
    if (!c->proved) {
        if (now - c->since_s > (a->config.node ? a->config.heartbeat_s : hello_s))
            connection_close(c);
        else
            flush(a, c);
        return;
    }
    if (now - c->heard_s > a->config.heartbeat_s) {
        char text[64];
        snprintf(text, sizeof text, "silent for %.1f s", now - c->heard_s);
        lose(a, c, text);
        return;
    }
    if (now - c->pinged_s > a->config.heartbeat_s / 4) {
        c->pinged_s = now;
        put_line(c, "PING");
    }
    flush(a, c);
}

void cli_agents_step(struct cli_agents *a)
{
    if (!a)
        return;
    double now = ps_monotonic_s();
    if (a->listen_fd >= 0)
        accept_all(a);
    for (int i = 0; i < STRANGERS_MAX; i++)
        step_peer(a, &a->strangers[i], now);
    for (int i = 0; i < a->peer_count; i++)
        step_peer(a, &a->peers[i], now);
    if (a->config.node && a->peers[0].fd < 0 && !a->refused && now >= a->try_s)
        start_connecting(a);
}

size_t cli_agents_pollfds(const struct cli_agents *a, struct pollfd *fds)
{
    size_t count = 0;
    if (!a)
        return 0;
    if (a->listen_fd >= 0)
        fds[count++] = (struct pollfd){.fd = a->listen_fd, .events = POLLIN};
    for (int i = 0; i < STRANGERS_MAX + a->peer_count; i++) {
        const struct connection *c = i < STRANGERS_MAX ? &a->strangers[i] : &a->peers[i - STRANGERS_MAX];
        if (c->fd >= 0)
            fds[count++] = (struct pollfd){
                .fd = c->fd,
                .events = (short)(c->connecting ? POLLOUT : POLLIN | (c->out.size ? POLLOUT : 0))};
    }
    return count;
}

int cli_agents_open(const struct cli_agents_config *config, struct cli_agents **ret, struct ps_error *err)
{
    struct cli_agents *a = calloc(1, sizeof *a);
    int peers = config->node ? 1 : config->nodes;
    if (a)
        a->peers = calloc((size_t)peers, sizeof *a->peers);
    if (!a || !a->peers) {
        free(a);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    a->config = *config;
    snprintf(a->host, sizeof a->host, "%s", config->host);
    snprintf(a->secret, sizeof a->secret, "%s", config->secret);
    a->listen_fd = -1;
    a->last_attempt = -1;
    a->peer_count = peers;
    for (int i = 0; i < peers; i++)
        a->peers[i].fd = -1;
    for (int i = 0; i < STRANGERS_MAX; i++)
        a->strangers[i].fd = -1;
    int code = config->node ? 0 : start_listening(a, err);
    if (code) {
        cli_agents_free(a);
        return code;
    }
    *ret = a;
    return 0;
}

void cli_agents_drain(struct cli_agents *a, double timeout_s)
{
    double end = ps_monotonic_s() + timeout_s;
    for (int i = 0; a && i < a->peer_count; i++)
        while (a->peers[i].fd >= 0 && a->peers[i].out.size && ps_monotonic_s() < end) {
            struct pollfd fd = {.fd = a->peers[i].fd, .events = POLLOUT};
            poll(&fd, 1, 50);
            flush(a, &a->peers[i]);
        }
}

struct cli_agents *cli_agents_free(struct cli_agents *a)
{
    struct cli_agent_event event;
    if (!a)
        return NULL;
    while (cli_agents_next(a, &event))
        ;
    for (int i = 0; i < a->peer_count; i++)
        connection_close(&a->peers[i]);
    for (int i = 0; i < STRANGERS_MAX; i++)
        connection_close(&a->strangers[i]);
    if (a->listen_fd >= 0)
        close(a->listen_fd);
    free(a->peers);
    free(a);
    return NULL;
}
