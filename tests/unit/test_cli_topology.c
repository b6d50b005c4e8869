/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/fs.h"
#include "services/cli/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[] = "/tmp/ps_topology.XXXXXX";

static void put(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", root, path);
    *strrchr(full, '/') = '\0';
    assert_int_equal(ps_make_dirs(full, 0777, NULL), 0);
    full[strlen(full)] = '/';
    FILE *f = fopen(full, "we");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static cpu_set_t set_of(const char *list)
{
    cpu_set_t set;
    assert_int_equal(cli_cpu_list(list, &set), 0);
    return set;
}

static void is(const struct cli_share *share, const char *cpus, int threads, int node)
{
    cpu_set_t wanted = set_of(cpus);
    if (!CPU_EQUAL(&wanted, &share->cpus) || share->threads != threads || share->node != node)
        fail_msg("wanted %s, %d threads, node %d; got %d cpus, %d threads, node %d", cpus, threads, node,
                 CPU_COUNT(&share->cpus), share->threads, share->node);
}

/* Two nodes of four cores with two threads each, numbered as on real machines; four cards, three of them on
 * node 1. */
static int make_machine(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(root));
    put("sys/devices/system/node/node0/cpulist", "0-3,8-11\n");
    put("sys/devices/system/node/node1/cpulist", "4-7,12-15\n");
    for (int i = 0; i < 16; i++) {
        char path[128], text[32];
        snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", i);
        snprintf(text, sizeof text, "%d,%d\n", i % 8, i % 8 + 8);
        put(path, text);
    }
    static const char *const cards[] = {"0000:1a:00.0", "0000:8b:00.0", "0000:9c:00.0", "0000:ad:00.0"};
    for (int i = 0; i < 4; i++) {
        char path[128];
        snprintf(path, sizeof path, "proc/driver/nvidia/gpus/%s/information", cards[i]);
        put(path, "Model: none\n");
        snprintf(path, sizeof path, "sys/bus/pci/devices/%s/numa_node", cards[i]);
        put(path, i ? "1\n" : "0\n");
    }
    return 0;
}

static int remove_machine(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static void test_lists(void **state)
{
    cpu_set_t set;
    (void)state;
    assert_int_equal(cli_cpu_list("0-2,5\n", &set), 0);
    assert_int_equal(CPU_COUNT(&set), 4);
    assert_true(CPU_ISSET(5, &set));
    assert_int_equal(cli_cpu_list("\n", &set), 0);
    assert_int_equal(CPU_COUNT(&set), 0);
    static const char *const bad[] = {"x", "3-1", "1-", "-1", "0-99999", "1;2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (cli_cpu_list(bad[i], &set) == 0)
            fail_msg("%s is taken", bad[i]);
}

static void test_shares(void **state)
{
    (void)state;
    struct cli_topology t;
    struct cli_share s;
    cpu_set_t all = set_of("0-15");
    cli_topology_read(root, &all, "", &t); /* no card visible */
    assert_int_equal(t.node_count, 2);
    assert_int_equal(t.card_count, 0);
    cli_topology_share(&t, 0, 1, &s);
    is(&s, "0-3,8-11", 4, 0);
    cli_topology_share(&t, 1, 2, &s);
    is(&s, "4-7,12-15", 4, 1);
    cli_topology_share(&t, 1, 4, &s); /* both threads of a core go to one rank */
    is(&s, "2,3,10,11", 2, 0);
    cli_topology_share(&t, 15, 16, &s); /* more ranks than cores: all of the node */
    is(&s, "4-7,12-15", 1, 1);
    cpu_set_t some = set_of("1,2,9");
    cli_topology_read(root, &some, "", &t);
    assert_int_equal(t.node_count, 1);
    cli_topology_share(&t, 0, 2, &s);
    is(&s, "1,9", 1, 0);
}

static void test_cards(void **state)
{
    (void)state;
    struct cli_topology t;
    struct cli_share s;
    cpu_set_t all = set_of("0-15");
    cli_topology_read(root, &all, NULL, &t);
    assert_int_equal(t.card_count, 4);
    cli_topology_share(&t, 0, 4, &s); /* alone on node 0, with card 0 */
    is(&s, "0-3,8-11", 4, 0);
    cli_topology_share(&t, 3, 4, &s); /* the last of three on node 1: cores 4 / 5 / 6 and 7 */
    is(&s, "6,7,14,15", 2, 1);
    cli_topology_read(root, &all, "3,0", &t);
    assert_int_equal(t.card_count, 2);
    assert_int_equal(t.card_node[0], 1);
    assert_int_equal(t.card_node[1], 0);
    cli_topology_read(root, &all, "GPU-aa,GPU-bb", &t);
    assert_int_equal(t.card_count, 2);
    assert_int_equal(t.card_node[0], -1);
    cli_topology_read(root, &all, "-1", &t);
    assert_int_equal(t.card_count, 0);
}

static void test_odd_machines(void **state)
{
    (void)state;
    struct cli_topology t;
    struct cli_share s;
    cpu_set_t all = set_of("0-15"), more = set_of("0-16");
    put("sys/fs/cgroup/cpu.max", "400000 100000\n");
    cli_topology_read(root, &all, "", &t);
    assert_true(t.quota == 4);
    cli_topology_share(&t, 0, 2, &s);
    is(&s, "0-3,8-11", 2, 0); /* two of the four cores' worth of time */
    cli_topology_share(&t, 0, 16, &s);
    assert_int_equal(s.threads, 1);
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    cli_topology_read(root, &more, "", &t); /* a core that no node has: NUMA is not believed */
    assert_true(t.quota == 0);
    assert_int_equal(t.node_count, 1);
    cli_topology_read("/nowhere", &all, "", &t);
    assert_int_equal(t.node_count, 1);
    cli_topology_share(&t, 0, 1, &s);
    is(&s, "0-15", 16, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_cards),
        cmocka_unit_test(test_odd_machines),
    };
    return cmocka_run_group_tests(tests, make_machine, remove_machine);
}
