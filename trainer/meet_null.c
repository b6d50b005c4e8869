/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/meet.h"

int ps_meet_open(const struct ps_meet_config *config, struct ps_meet **ret, struct ps_error *err)
{
    (void)ret;
    return ps_fail(err, PS_UNIMPLEMENTED,
                   "--init_method grpc://%.100s/...: this trainer was built without the services "
                   "(PARAMSYNC_SERVICES=OFF): give tcp://HOST:PORT of rank 0",
                   config->sidecar);
}

int ps_meet_invite(struct ps_meet *meet, char *ret_host, size_t host_size, char ret_secret[PS_MEET_SECRET],
                   struct ps_error *err)
{
    (void)meet, (void)ret_host, (void)host_size, (void)ret_secret;
    return ps_fail(err, PS_UNIMPLEMENTED, "no services in this build");
}

int ps_meet_answer(struct ps_meet *meet, int port, struct ps_error *err)
{
    (void)meet, (void)port;
    return ps_fail(err, PS_UNIMPLEMENTED, "no services in this build");
}

int ps_meet_find(struct ps_meet *meet, char *ret_host, size_t host_size, int *ret_port,
                 char ret_secret[PS_MEET_SECRET], struct ps_error *err)
{
    (void)meet, (void)ret_host, (void)host_size, (void)ret_port, (void)ret_secret;
    return ps_fail(err, PS_UNIMPLEMENTED, "no services in this build");
}

struct ps_meet *ps_meet_close(struct ps_meet *meet)
{
    (void)meet;
    return NULL;
}
