/* SPDX-License-Identifier: Apache-2.0
 * A peer that is gone without a word is noticed on both sides (a relay between them falls silent, as a pulled
 * cable would), and a client that keeps to the published pace of pings is not sent away. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/test_rpc_probe.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

struct relay {
    int listener, client, server; /* sockets */
    int port;                     /* the server's */
    atomic_bool silent, end;
    pthread_t thread;
};

static void pass_on(struct relay *relay, int from, int to)
{
    char buffer[65536];
    ssize_t size = recv(from, buffer, sizeof buffer, MSG_DONTWAIT);
    for (ssize_t done = 0; done < size && !atomic_load(&relay->silent);) {
        ssize_t step = send(to, buffer + done, (size_t)(size - done), MSG_NOSIGNAL);
        if (step <= 0)
            return;
        done += step;
    }
}

static void *run_relay(void *arg)
{
    struct relay *relay = arg;
    while (!atomic_load(&relay->end)) {
        struct pollfd fds[3] = {
            {relay->listener, POLLIN, 0}, {relay->client, POLLIN, 0}, {relay->server, POLLIN, 0}};
        poll(fds, 3, 20);
        if (atomic_load(&relay->silent)) { /* keeps the connections, reads nothing, refuses nobody */
            usleep(20000);
            continue;
        }
        if (fds[0].revents && relay->client < 0) {
            relay->client = accept4(relay->listener, NULL, NULL, SOCK_CLOEXEC);
            relay->server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            struct sockaddr_in to = {.sin_family = AF_INET,
                                     .sin_port = htons((uint16_t)relay->port),
                                     .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
            if (connect(relay->server, (struct sockaddr *)&to, sizeof to))
                return NULL;
        }
        if (fds[1].revents)
            pass_on(relay, relay->client, relay->server);
        if (fds[2].revents)
            pass_on(relay, relay->server, relay->client);
    }
    return NULL;
}

static int start_relay(struct relay *relay, int port)
{
    *relay = (struct relay){.client = -1, .server = -1, .port = port};
    relay->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    assert_int_equal(bind(relay->listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(relay->listener, 4), 0);
    assert_int_equal(getsockname(relay->listener, (struct sockaddr *)&at, &size), 0);
    assert_int_equal(pthread_create(&relay->thread, NULL, run_relay, relay), 0);
    return ntohs(at.sin_port);
}

static void end_relay(struct relay *relay)
{
    atomic_store(&relay->end, true);
    pthread_join(relay->thread, NULL);
    close(relay->listener);
    if (relay->client >= 0)
        close(relay->client);
    if (relay->server >= 0)
        close(relay->server);
}

static const char *const loopback[] = {"127.0.0.1:0"};

static struct ps_rpc_server *start_server(struct probe *probe, double keepalive_s)
{
    probe_init(probe);
    struct ps_rpc_server_config config = {
        .listen = loopback,
        .listen_count = 1,
        .methods = probe_methods,
        .method_count = PROBE_METHODS,
        .context = probe,
        .keepalive_s = keepalive_s,
        .descriptor_set = probe_descriptor_set,
        .descriptor_set_size = probe_descriptor_set_size,
    };
    struct ps_rpc_server *server = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_server_start(&config, &server, &err), 0);
    return server;
}

static struct ps_rpc_channel *connect_to(int port, double keepalive_s)
{
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", port);
    struct ps_rpc_channel_config config = {.target = target, .keepalive_s = keepalive_s};
    struct ps_rpc_channel *channel = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_channel_open(&config, &channel, &err), 0);
    return channel;
}

/* A process that dies takes its connections with it: no need to wait for a ping. */
static void test_cut_connection(void **state)
{
    (void)state;
    struct probe probe;
    struct relay relay;
    struct ps_rpc_server *server = start_server(&probe, 0);
    struct ps_rpc_channel *channel = connect_to(start_relay(&relay, ps_rpc_server_port(server, 0)), 0);
    struct ps_rpc_stream *stream = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_stream_open(channel, PROBE("Sum"), NOTE_TYPE, -1, &stream, &err), 0);
    double until = ps_monotonic_s() + 10;
    while (atomic_load(&probe.running) != 1 && ps_monotonic_s() < until)
        usleep(1000);
    assert_int_equal(atomic_load(&probe.running), 1);
    double begin = ps_monotonic_s();
    end_relay(&relay);
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_UNAVAILABLE);
    assert_non_null(strstr(err.message, "was lost"));
    until = begin + 8;
    while (atomic_load(&probe.running) != 0 && ps_monotonic_s() < until)
        usleep(1000);
    assert_int_equal(atomic_load(&probe.running), 0);
    ps_rpc_stream_free(stream);
    ps_rpc_channel_free(channel);
    ps_rpc_server_free(server);
    probe_done(&probe);
}

static void test_silence_is_noticed_on_both_sides(void **state)
{
    (void)state;
    struct probe probe;
    struct relay relay;
    struct ps_rpc_server *server = start_server(&probe, 1);
    struct ps_rpc_channel *channel = connect_to(start_relay(&relay, ps_rpc_server_port(server, 0)), 1);
    struct ps_rpc_stream *stream = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_rpc_stream_open(channel, PROBE("Sum"), NOTE_TYPE, -1, &stream, &err), 0);
    Note note = NOTE_INIT;
    assert_int_equal(ps_rpc_stream_send(stream, &note.base, &err), 0);
    double until = ps_monotonic_s() + 10;
    while (atomic_load(&probe.running) != 1 && ps_monotonic_s() < until)
        usleep(1000);
    assert_int_equal(atomic_load(&probe.running), 1);
    atomic_store(&relay.silent, true);
    double begin = ps_monotonic_s();
    ProtobufCMessage *message = NULL;
    assert_int_equal(ps_rpc_stream_recv(stream, &message, &err), PS_UNAVAILABLE);
    assert_true(ps_monotonic_s() - begin < 15);
    assert_non_null(strstr(err.message, "was lost"));
    until = begin + 20;
    while (atomic_load(&probe.running) != 0 && ps_monotonic_s() < until)
        usleep(1000);
    assert_int_equal(atomic_load(&probe.running), 0);
    ps_rpc_stream_free(stream);
    ps_rpc_channel_free(channel);
    end_relay(&relay);
    ps_rpc_server_free(server);
    probe_done(&probe);
}

/* Rule 27, both halves of the pair. */
static int idle_for(double client_s, double server_s, double seconds, struct ps_error *err)
{
    struct probe probe;
    struct ps_rpc_server *server = start_server(&probe, server_s);
    struct ps_rpc_channel *channel = connect_to(ps_rpc_server_port(server, 0), client_s);
    struct ps_rpc_stream *stream = NULL;
    assert_int_equal(ps_rpc_stream_open(channel, PROBE("Chat"), NOTE_TYPE, seconds, &stream, err), 0);
    ProtobufCMessage *message = NULL;
    int code = ps_rpc_stream_recv(stream, &message, err);
    ps_rpc_stream_free(stream);
    ps_rpc_channel_free(channel);
    ps_rpc_server_free(server);
    probe_done(&probe);
    return code;
}

static void test_pace_of_pings(void **state)
{
    (void)state;
    struct ps_error err = {0};
    assert_int_equal(idle_for(1, 2, 6, &err), PS_DEADLINE_EXCEEDED); /* in peace until its own deadline */
    assert_int_equal(idle_for(1, 30, 30, &err), PS_UNAVAILABLE);     /* five times faster than allowed */
    assert_non_null(strstr(err.message, "pings"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut_connection),
        cmocka_unit_test(test_silence_is_noticed_on_both_sides),
        cmocka_unit_test(test_pace_of_pings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
