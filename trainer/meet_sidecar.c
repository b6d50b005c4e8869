/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/meet.h"

#include "services/base/clock.h"
#include "services/base/text.h"
#include "services/client/paramsync.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NONCE = 33, KEY = 96, HOST = 256 };
static const double default_join_s = 300, round_s = 2, ttl_s = 3600;

struct ps_meet {
    struct ps_meet_config config;
    struct paramsync_client *client;
    double deadline; /* monotonic */
    char nonce[NONCE];
    char host[HOST], secret[PS_MEET_SECRET];
};

static int fail_as(struct ps_error *err, const struct ps_meet *m, int code, const struct paramsync_error *why)
{
    return ps_fail(err, code, "--init_method grpc://%.100s/%.100s: %s", m->config.sidecar, m->config.run,
                   why->message);
}

static int random_hex(char *out, size_t digits, struct ps_error *err)
{
    unsigned char bytes[32];
    if (getrandom(bytes, digits / 2, 0) != (ssize_t)(digits / 2))
        return ps_fail_errno(err, errno, "no random numbers");
    for (size_t i = 0; i < digits / 2; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    return 0;
}

int ps_meet_open(const struct ps_meet_config *config, struct ps_meet **ret, struct ps_error *err)
{
    const struct paramsync_options options = {.address = config->sidecar,
                                              .token_file = config->token_file,
                                              .tls_ca = config->tls_ca,
                                              .tls_cert = config->tls_cert,
                                              .tls_key = config->tls_key};
    struct paramsync_error why = {0};
    struct ps_meet *m = calloc(1, sizeof *m);
    if (!m)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    m->config = *config;
    m->deadline = ps_monotonic_s() + (config->join_s > 0 ? config->join_s : default_join_s);
    int code = random_hex(m->nonce, sizeof m->nonce - 1, err);
    if (!code && (code = paramsync_connect(&options, &m->client, &why)))
        code = fail_as(err, m, code, &why);
    if (code) {
        free(m);
        return code;
    }
    *ret = m;
    return 0;
}

struct ps_meet *ps_meet_close(struct ps_meet *m)
{
    if (m) {
        paramsync_disconnect(m->client);
        free(m);
    }
    return NULL;
}

/* The address that a packet to the sidecar would carry; none is sent. */
static int own_address(const struct ps_meet *m, char *ret_host, size_t size, struct ps_error *err)
{
    char host[HOST], port_text[16];
    int port, code = ps_parse_host_port(m->config.sidecar, host, sizeof host, &port, err);
    if (code)
        return code;
    snprintf(port_text, sizeof port_text, "%d", port);
    const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM};
    struct addrinfo *found = NULL;
    int rc = getaddrinfo(host, port_text, &hints, &found);
    if (rc)
        return ps_fail(err, PS_UNAVAILABLE, "--init_method grpc://%.100s/%.100s: %s: %s", m->config.sidecar,
                       m->config.run, host, gai_strerror(rc));
    code = ps_fail(err, PS_UNAVAILABLE, "--init_method grpc://%.100s/%.100s: there is no way to %s",
                   m->config.sidecar, m->config.run, host);
    for (struct addrinfo *a = found; a && code; a = a->ai_next) {
        struct sockaddr_storage own;
        socklen_t length = sizeof own;
        int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
            getsockname(fd, (struct sockaddr *)&own, &length) == 0 &&
            getnameinfo((struct sockaddr *)&own, length, ret_host, (socklen_t)size, NULL, 0,
                        NI_NUMERICHOST) == 0)
            code = 0;
        if (fd >= 0)
            close(fd);
    }
    freeaddrinfo(found);
    return code;
}

int ps_meet_invite(struct ps_meet *m, char *ret_host, size_t host_size, char ret_secret[PS_MEET_SECRET],
                   struct ps_error *err)
{
    int code = own_address(m, m->host, sizeof m->host, err);
    if (!code)
        code = random_hex(m->secret, sizeof m->secret - 1, err);
    if (code)
        return code;
    snprintf(ret_host, host_size, "%s", m->host);
    snprintf(ret_secret, PS_MEET_SECRET, "%s", m->secret);
    return 0;
}

static int set(struct ps_meet *m, const char *key, const char *value, struct ps_error *err)
{
    struct paramsync_error why = {0};
    int code = paramsync_rendezvous_set(m->client, m->config.run, key, value, strlen(value), ttl_s, &why);
    return code ? fail_as(err, m, code, &why) : 0;
}

/* 0, or PS_DEADLINE_EXCEEDED after round_s, or another failure. *ret_value is free()d. */
static int get(struct ps_meet *m, const char *key, char **ret_value, struct ps_error *err)
{
    struct paramsync_error why = {0};
    void *value = NULL;
    size_t size;
    int code = paramsync_rendezvous_get(m->client, m->config.run, key, round_s, &value, &size, &why);
    if (code)
        return fail_as(err, m, code, &why);
    *ret_value = value;
    return 0;
}

static int late(const struct ps_meet *m, const char *who, struct ps_error *err)
{
    if (ps_monotonic_s() < m->deadline)
        return 0;
    return ps_fail(err, PS_DEADLINE_EXCEEDED,
                   "--init_method grpc://%.100s/%.100s: %s did not come to the rendezvous in time: start all "
                   "%d ranks with the same RUN",
                   m->config.sidecar, m->config.run, who, m->config.world_size);
}

static bool is_nonce(const char *text)
{
    return strlen(text) == NONCE - 1 && strspn(text, "0123456789abcdef") == NONCE - 1;
}

/* Until rank k has said that it took the answer: what it said first may be an earlier job's. */
static int answer_rank(struct ps_meet *m, int rank, const char *address, struct ps_error *err)
{
    char hello[KEY], key[KEY], who[32];
    snprintf(hello, sizeof hello, "hello/%d", rank);
    snprintf(who, sizeof who, "rank %d", rank);
    for (;;) {
        char *nonce = NULL, *taken = NULL;
        int code = get(m, hello, &nonce, err);
        if (!code && !is_nonce(nonce))
            code = ps_fail(err, PS_INVALID_ARGUMENT, "--init_method grpc://%.100s/%.100s: %s holds no hello",
                           m->config.sidecar, m->config.run, hello);
        if (!code) {
            snprintf(key, sizeof key, "answer/%d/%s", rank, nonce);
            code = set(m, key, address, err);
        }
        if (!code) {
            snprintf(key, sizeof key, "taken/%d/%s/%.16s", rank, nonce, m->nonce);
            code = get(m, key, &taken, err);
        }
        free(nonce);
        free(taken);
        if (code != PS_DEADLINE_EXCEEDED)
            return code;
        code = late(m, who, err);
        if (code)
            return code;
    }
}

int ps_meet_answer(struct ps_meet *m, int port, struct ps_error *err)
{
    char address[HOST + PS_MEET_SECRET + 64];
    snprintf(address, sizeof address, "%d %s %.16s %s", port, m->secret, m->nonce, m->host);
    int code = 0;
    for (int rank = 1; rank < m->config.world_size && !code; rank++)
        code = answer_rank(m, rank, address, err);
    return code;
}

static bool is_loopback(const char *host)
{
    return strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0 || strncmp(host, "127.", 4) == 0;
}

int ps_meet_find(struct ps_meet *m, char *ret_host, size_t host_size, int *ret_port,
                 char ret_secret[PS_MEET_SECRET], struct ps_error *err)
{
    char hello[KEY], key[KEY], port[8], zero[17], host[HOST], sidecar[HOST];
    int64_t number = 0;
    char *answer = NULL;
    int code, sidecar_port;
    snprintf(hello, sizeof hello, "hello/%d", m->config.rank);
    snprintf(key, sizeof key, "answer/%d/%s", m->config.rank, m->nonce);
    do { /* again and again, in case that the sidecar was started anew or an earlier job's word overwrote it
          */
        code = set(m, hello, m->nonce, err);
        if (!code)
            code = get(m, key, &answer, err);
        if (code == PS_DEADLINE_EXCEEDED && late(m, "rank 0", err))
            return PS_DEADLINE_EXCEEDED;
    } while (code == PS_DEADLINE_EXCEEDED);
    if (code)
        return code;
    if (sscanf(answer, "%7[0-9] %64[0-9a-f] %16[0-9a-f] %255s", port, ret_secret, zero, host) != 4 ||
        ps_parse_int64(port, 1, 65535, &number) < 0)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "--init_method grpc://%.100s/%.100s: %s holds no address",
                       m->config.sidecar, m->config.run, key);
    free(answer);
    /* Rank 0 runs beside the sidecar and reaches it by loopback; we do not. */
    if (!code && is_loopback(host) &&
        ps_parse_host_port(m->config.sidecar, sidecar, sizeof sidecar, &sidecar_port, err) == 0 &&
        !is_loopback(sidecar))
        snprintf(host, sizeof host, "%s", sidecar);
    if (!code) {
        snprintf(ret_host, host_size, "%s", host);
        *ret_port = (int)number;
        snprintf(key, sizeof key, "taken/%d/%s/%s", m->config.rank, m->nonce, zero);
        code = set(m, key, "1", err);
    }
    return code;
}
