/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/clock.h"
#include "services/cli/agents.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, size), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    close(fd);
    return ntohs(address.sin_port);
}

static struct cli_agents *open_agent(int node, int nodes, int port, const char *secret)
{
    struct cli_agents_config config = {.node = node,
                                       .nodes = nodes,
                                       .ranks = 2 + node,
                                       .host = "127.0.0.1",
                                       .port = port,
                                       .secret = secret,
                                       .heartbeat_s = 2};
    struct cli_agents *agents = NULL;
    struct ps_error err = {0};
    if (cli_agents_open(&config, &agents, &err))
        fail_msg("%s", err.message);
    return agents;
}

/* Steps all of them until one of `of` has an event. */
static struct cli_agent_event next(struct cli_agents **all, int count, struct cli_agents *of)
{
    struct cli_agent_event event = {0};
    double end = ps_monotonic_s() + 20;
    while (!cli_agents_next(of, &event)) {
        struct pollfd fds[64];
        size_t used = 0;
        if (ps_monotonic_s() > end)
            fail_msg("no event within 20 s");
        for (int i = 0; i < count; i++) {
            cli_agents_step(all[i]);
            used += cli_agents_pollfds(all[i], fds + used);
        }
        poll(fds, used, 20);
    }
    return event;
}

static void test_attempt(void **state)
{
    (void)state;
    int port = free_port();
    struct cli_agents *late = open_agent(1, 2, port, "apples"); /* before node 0 is there */
    struct cli_agents *all[] = {late, NULL};
    cli_agents_step(late);
    all[1] = open_agent(0, 2, port, "apples");
    struct cli_agents *hub = all[1];
    struct cli_agent_event e = next(all, 2, hub);
    assert_int_equal(e.type, CLI_AGENT_JOINED);
    assert_int_equal(e.node, 1);
    assert_int_equal(e.ranks, 3);
    assert_int_equal(e.attempt, -1);
    assert_int_equal(next(all, 2, late).type, CLI_AGENT_JOINED);
    assert_true(cli_agents_there(hub, 1));
    assert_false(cli_agents_there(hub, 0));
    char session[CLI_SESSION];
    assert_int_equal(cli_nonce(session), 0);
    cli_agents_send(hub, 1, "START 4 2 5 29500 %s host:1", session);
    e = next(all, 2, late);
    assert_int_equal(e.type, CLI_AGENT_START);
    assert_int_equal(e.attempt, 4);
    assert_int_equal(e.first_rank, 2);
    assert_int_equal(e.world_size, 5);
    assert_int_equal(e.master_port, 29500);
    assert_string_equal(e.session, session);
    assert_string_equal(e.sidecar, "host:1");
    cli_agents_send(late, 0, "FAILED 4 500 3 137 killed\nby %s",
                    "somebody"); /* a newline ends no line early */
    e = next(all, 2, hub);
    assert_int_equal(e.type, CLI_AGENT_FAILED);
    assert_int_equal(e.rank, 3);
    assert_int_equal(e.status, 137);
    assert_string_equal(e.text, "killed by somebody");
    assert_true(ps_monotonic_s() - e.at_s >= 0.5);
    cli_agents_send(hub, 1, "STOP 4");
    assert_int_equal(next(all, 2, late).type, CLI_AGENT_STOP);
    cli_agents_send(late, 0, "STOPPED 4");
    assert_int_equal(next(all, 2, hub).type, CLI_AGENT_STOPPED);
    /* Node 0 goes and comes again: the other one finds it, and tells the attempt that it has seen. */
    cli_agents_free(hub);
    all[1] = late;
    assert_int_equal(next(all, 1, late).type, CLI_AGENT_LOST);
    all[1] = hub = open_agent(0, 2, port, "apples");
    e = next(all, 2, hub);
    assert_int_equal(e.type, CLI_AGENT_JOINED);
    assert_int_equal(e.attempt, 4);
    cli_agents_send(hub, 1, "END 9 why not");
    while ((e = next(all, 2, late)).type == CLI_AGENT_JOINED)
        ;
    assert_int_equal(e.type, CLI_AGENT_END);
    assert_int_equal(e.status, 9);
    assert_string_equal(e.text, "why not");
    cli_agents_free(late);
    assert_int_equal(next(&hub, 1, hub).type, CLI_AGENT_LOST);
    cli_agents_free(hub);
}

static void test_refusals(void **state)
{
    (void)state;
    int port = free_port();
    struct cli_agents *hub = open_agent(0, 2, port, "apples"), *wrong = open_agent(1, 2, port, "pears");
    struct cli_agents *all[] = {hub, wrong};
    struct cli_agent_event e = next(all, 2, wrong);
    assert_int_equal(e.type, CLI_AGENT_REFUSED);
    assert_non_null(strstr(e.text, "PARAMSYNC_JOB_SECRET"));
    cli_agents_free(wrong);
    all[1] = wrong = open_agent(1, 3, port, "apples");
    e = next(all, 2, wrong);
    assert_int_equal(e.type, CLI_AGENT_REFUSED);
    assert_non_null(strstr(e.text, "--nnodes 2"));
    cli_agents_free(wrong);
    assert_false(cli_agents_there(hub, 1));
    cli_agents_free(hub);
}

/* Whatever a stranger says, it is dropped, and a node that comes then is taken. */
static void test_strangers(void **state)
{
    (void)state;
    int port = free_port();
    struct cli_agents *hub = open_agent(0, 2, port, "apples");
    char big[3000];
    memset(big, 'x', sizeof big);
    big[sizeof big - 1] = '\0';
    const char unproved[] = "HELLO 1 2 3 -1 0123456789abcdef0123456789abcdef "
                            "0000000000000000000000000000000000000000000000000000000000000000\n";
    const char *const words[] = {"GET / HTTP/1.1\r\n\r\n",
                                 "HELLO 1 2 1\n",
                                 "\n\n\n",
                                 "START 0 0 1 1 aa -\n",
                                 unproved,
                                 "HELLO 999999999999 2 3 -1 x y\n",
                                 big};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        struct sockaddr_in address = {.sin_family = AF_INET,
                                      .sin_port = htons((uint16_t)port),
                                      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
        assert_true(send(fd, words[i], strlen(words[i]), MSG_NOSIGNAL) > 0);
        char answer[4096];
        ssize_t n;
        double end = ps_monotonic_s() + 20;
        do {
            cli_agents_step(hub);
            n = recv(fd, answer, sizeof answer, MSG_DONTWAIT);
            if (n < 0)
                poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 20);
        } while (n != 0 && ps_monotonic_s() < end);
        assert_true(n <= 0);
        close(fd);
    }
    struct cli_agent_event event;
    assert_int_equal(cli_agents_next(hub, &event), 0);
    struct cli_agents *node = open_agent(1, 2, port, "apples"), *all[] = {hub, node};
    assert_int_equal(next(all, 2, hub).type, CLI_AGENT_JOINED);
    cli_agents_free(node);
    cli_agents_free(hub);
}

static void test_mac(void **state)
{
    char a[PS_SHA256_HEX], b[PS_SHA256_HEX], big[200];
    (void)state;
    memset(big, 's', sizeof big);
    big[sizeof big - 1] = '\0';
    assert_int_equal(cli_mac("k", "text", a), 0);
    assert_int_equal(cli_mac("k", "texu", b), 0);
    assert_string_not_equal(a, b);
    assert_int_equal(cli_mac("l", "text", b), 0);
    assert_string_not_equal(a, b);
    assert_int_equal(cli_mac(big, "text", b), 0);
    assert_string_not_equal(a, b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mac),
        cmocka_unit_test(test_attempt),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_strangers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
