/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/dist/wire.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>

static void test_frames_round_trip(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1024);
    ps_wire_put_frame(&out, PS_WIRE_SET, 0x01020304, "ab", 2, "cde", 3);
    ps_wire_put_frame(&out, PS_WIRE_PING, 0, NULL, 0, NULL, 0);
    assert_int_equal(out.size, 2 * PS_WIRE_HEADER + 5);
    struct ps_wire_frame f;
    for (size_t size = 0; size < PS_WIRE_HEADER + 5; size++) /* every prefix: more is needed */
        assert_int_equal(ps_wire_take(out.data, size, 100, &f), 0);
    assert_int_equal(ps_wire_take(out.data, out.size, 5, &f), PS_WIRE_HEADER + 5);
    assert_int_equal(f.type, PS_WIRE_SET);
    assert_int_equal(f.id, 0x01020304);
    assert_memory_equal(f.body, "abcde", 5);
    assert_int_equal(ps_wire_take(out.data, out.size, 4, &f), -1); /* over the limit */
    assert_int_equal(ps_wire_take(out.data + PS_WIRE_HEADER + 5, PS_WIRE_HEADER, 0, &f), PS_WIRE_HEADER);
    assert_int_equal(f.type, PS_WIRE_PING);
    ps_buf_done(&out);
}

static void test_strangers_are_no_frames(void **state)
{
    (void)state;
    struct ps_wire_frame f;
    static const char http[] = "GET / HTTP/1.1\r\n\r\n";
    assert_int_equal(ps_wire_take(http, sizeof http - 1, PS_WIRE_BODY_MAX, &f), -1);
    unsigned char header[PS_WIRE_HEADER] = {0};
    assert_int_equal(ps_wire_take((char *)header, sizeof header, 10, &f), -1); /* type 0 */
    header[8] = PS_WIRE_BYE + 1;
    assert_int_equal(ps_wire_take((char *)header, sizeof header, 10, &f), -1);
    header[8] = PS_WIRE_PING;
    header[11] = 1;
    assert_int_equal(ps_wire_take((char *)header, sizeof header, 10, &f), -1);
    memset(header, 0xff, 4); /* 4 GiB body */
    header[11] = 0;
    assert_int_equal(ps_wire_take((char *)header, sizeof header, PS_WIRE_BODY_MAX, &f), -1);
}

static void test_reader_stops_at_the_end(void **state)
{
    (void)state;
    static const unsigned char data[] = {1, 0, 0, 0, 2};
    struct ps_wire_reader r = {data, sizeof data, false};
    assert_int_equal(ps_wire_u32(&r), 1);
    assert_int_equal(ps_wire_u32(&r), 0);
    assert_true(r.bad);
    assert_null(ps_wire_bytes(&r, 1)); /* once bad, always bad */
}

static void test_mac_depends_on_everything(void **state)
{
    (void)state;
    unsigned char a[PS_WIRE_NONCE] = {1}, b[PS_WIRE_NONCE] = {2};
    char base[PS_WIRE_MAC + 1], other[PS_WIRE_MAC + 1];
    char long_secret[200];
    memset(long_secret, 's', sizeof long_secret);
    long_secret[199] = '\0';
    assert_int_equal(ps_wire_mac("secret", "rank", a, b, 1, 2, base), 0);
    assert_int_equal(ps_wire_mac("secret", "rank", a, b, 1, 2, other), 0);
    assert_true(ps_wire_mac_equal(base, other));
#define DIFFERS(...)                                                                                         \
    do {                                                                                                     \
        assert_int_equal(ps_wire_mac(__VA_ARGS__, other), 0);                                                \
        assert_false(ps_wire_mac_equal(base, other));                                                        \
    } while (0)
    DIFFERS("secres", "rank", a, b, 1, 2);
    DIFFERS(long_secret, "rank", a, b, 1, 2);
    DIFFERS("secret", "rank 0", a, b, 1, 2);
    DIFFERS("secret", "rank", b, a, 1, 2);
    DIFFERS("secret", "rank", a, b, 2, 2);
    DIFFERS("secret", "rank", a, b, 1, 3);
}

static void test_text(void **state)
{
    (void)state;
    char out[8];
    ps_wire_text((const unsigned char *)"a\nb\033cdefghi", 11, out, sizeof out);
    assert_string_equal(out, "a b cde");
    ps_wire_text((const unsigned char *)"", 0, out, sizeof out);
    assert_string_equal(out, "");
}

static void test_addresses(void **state)
{
    (void)state;
    char text[64];
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    assert_int_equal(inet_pton(AF_INET6, "::ffff:10.1.2.3", &v6.sin6_addr), 1);
    ps_address_text((struct sockaddr *)&v6, text, sizeof text);
    assert_string_equal(text, "10.1.2.3");
    assert_int_equal(inet_pton(AF_INET6, "2001:db8::5", &v6.sin6_addr), 1);
    ps_address_text((struct sockaddr *)&v6, text, sizeof text);
    assert_string_equal(text, "2001:db8::5");
    assert_true(ps_address_loopback("127.0.1.1"));
    assert_true(ps_address_loopback("::1"));
    assert_false(ps_address_loopback("10.0.0.1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frames_round_trip),
        cmocka_unit_test(test_strangers_are_no_frames),
        cmocka_unit_test(test_reader_stops_at_the_end),
        cmocka_unit_test(test_mac_depends_on_everything),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
