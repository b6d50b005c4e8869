/* SPDX-License-Identifier: Apache-2.0
 * The Probe service as a program, for clients in other languages: prints its port, ends when its input does.
 */
#include "tests/unit/test_rpc_probe.h"

int main(int argc, char **argv)
{
    static const char *const loopback[] = {"127.0.0.1:0"};
    static struct probe probe;
    probe_init(&probe);
    struct ps_rpc_server_config config = {
        .listen = argc > 1 ? (const char *const *)argv + 1 : loopback,
        .listen_count = 1,
        .methods = probe_methods,
        .method_count = PROBE_METHODS,
        .context = &probe,
        .descriptor_set = probe_descriptor_set,
        .descriptor_set_size = probe_descriptor_set_size,
    };
    struct ps_error err = {0};
    struct ps_rpc_server *server = NULL;
    if (ps_rpc_server_start(&config, &server, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    printf("%d\n", ps_rpc_server_port(server, 0));
    fflush(stdout);
    for (int byte; (byte = getchar()) != EOF;) /* '+' and '-': the health of the service "switched" */
        if (byte == '+' || byte == '-')
            ps_rpc_server_set_serving(server, "switched", byte == '+');
    ps_rpc_server_stop(server, 2);
    ps_rpc_server_free(server);
    probe_done(&probe);
    return 0;
}
