/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/http_host.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const char *const names[] = {"train.example.org", "GPU-box:8443"};

static void loopback_and_bound(void **state)
{
    (void)state;
    static const char *const good[] = {
        "localhost", "LOCALHOST:8080", "localhost.",        "127.0.0.1:8080",       "127.3.2.1", "[::1]:8080",
        "[::1]",     "192.168.1.5:80", "train.example.org", "Train.Example.ORG:99", "gpu-box"};
    static const char *const bad[] = {"",
                                      ":8080",
                                      "evil.example",
                                      "localhost.evil.example",
                                      "127.0.0.1.evil.example",
                                      "192.168.1.6",
                                      "8.8.8.8:80",
                                      "[::2]",
                                      "[::1",
                                      "[::1]x",
                                      "train.example.org.evil",
                                      "127.1",
                                      "0x7f.0.0.1",
                                      "example.org",
                                      "[fe80::1]:8080"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_true(ps_http_host_ok(good[i], "192.168.1.5", names, 2));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(ps_http_host_ok(bad[i], "192.168.1.5", names, 2));
    assert_false(ps_http_host_ok(NULL, "127.0.0.1", NULL, 0));
}

static void every_address(void **state)
{
    (void)state;
    static const char *const bounds[] = {"", "0.0.0.0", "::", NULL};
    for (size_t i = 0; i < 4; i++) {
        assert_true(ps_http_host_ok("10.0.0.7:8080", bounds[i], NULL, 0));
        assert_true(ps_http_host_ok("[2001:db8::7]:8080", bounds[i], NULL, 0));
        /* The one thing that must never pass: a name of the attacker's. */
        assert_false(ps_http_host_ok("rebind.example:8080", bounds[i], NULL, 0));
    }
    assert_false(ps_http_host_ok("10.0.0.7", "127.0.0.1", NULL, 0));
    assert_true(ps_http_host_ok("[2001:db8:0::7]:1", "2001:db8::7", NULL, 0));
    assert_true(ps_http_host_ok("::ffff:127.0.0.1", "127.0.0.1", NULL, 0));
    assert_true(ps_http_host_ok("node3:8080", "node3", NULL, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(loopback_and_bound), cmocka_unit_test(every_address)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
