/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/gloo.h"

#include "services/base/module.h"
#include "trainer/dist/gloo_module.h"
#include "trainer/dist/wire.h"
#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE = 600 };
/* A neighbour's closed connection is seen before rank 0 says who died and why: its word is waited for. */
static const double VERDICT_S = 2.0;

struct gloo_comm {
    struct ps_comm comm;
    const struct ps_gloo_ops *ops;
    struct ps_gloo *gloo;
    struct ps_rendezvous *rendezvous;
    pthread_mutex_t call_lock; /* one collective at a time */
    pthread_mutex_t lock;      /* guards all below */
    int failed_code;
    char reason[MESSAGE];
};

static int store_set(void *context, const char *key, const void *data, size_t size, char *message,
                     size_t message_size)
{
    struct ps_error err = {0};
    int code = ps_rendezvous_set(context, key, data, size, &err);
    if (code < 0)
        snprintf(message, message_size, "%s", err.message);
    return code;
}

static int store_get(void *context, const char *key, double deadline_s, char **ret_data, size_t *ret_size,
                     char *message, size_t message_size)
{
    struct ps_error err = {0};
    int code = ps_rendezvous_get(context, key, deadline_s, ret_data, ret_size, &err);
    if (code < 0)
        snprintf(message, message_size, "%s", err.message);
    return code;
}

/* The first reason stays. Returns its code. */
static int keep_reason(struct gloo_comm *c, int code, const char *reason)
{
    pthread_mutex_lock(&c->lock);
    if (!c->failed_code) {
        c->failed_code = code;
        snprintf(c->reason, sizeof c->reason, "%s", reason);
    }
    code = c->failed_code;
    pthread_mutex_unlock(&c->lock);
    return code;
}

static int report_failure(struct gloo_comm *c, const char *what, int code, const char *message,
                          struct ps_error *err)
{
    char reason[MESSAGE] = "", text[MESSAGE];
    if (code == PS_INVALID_ARGUMENT) /* refused before anything was exchanged */
        return ps_fail(err, code, "%s: %s", what, message);
    pthread_mutex_lock(&c->lock);
    bool known = c->failed_code != 0;
    pthread_mutex_unlock(&c->lock);
    if (!known && ps_rendezvous_failed(c->rendezvous, code == PS_DEADLINE_EXCEEDED ? 0.0 : VERDICT_S, reason,
                                       sizeof reason))
        keep_reason(c, PS_ABORTED, reason);
    else if (!known) {
        snprintf(text, sizeof text, "%s: %.500s", what, message);
        keep_reason(c, code, text);
        ps_rendezvous_fail(c->rendezvous, text); /* nobody else knows: the others should not wait for us */
    }
    pthread_mutex_lock(&c->lock);
    code = ps_fail(err, c->failed_code, "%s", c->reason);
    pthread_mutex_unlock(&c->lock);
    return code;
}

/* Begins a collective: takes the lock unless the communicator has failed. */
static int enter(struct gloo_comm *c, struct ps_error *err)
{
    pthread_mutex_lock(&c->call_lock);
    pthread_mutex_lock(&c->lock);
    int code = c->failed_code;
    if (code)
        ps_fail(err, code, "%s", c->reason);
    pthread_mutex_unlock(&c->lock);
    if (code)
        pthread_mutex_unlock(&c->call_lock);
    return code;
}

static int leave(struct gloo_comm *c, const char *what, int code, const char *message, struct ps_error *err)
{
    if (code < 0)
        code = report_failure(c, what, code, message, err);
    pthread_mutex_unlock(&c->call_lock);
    return code;
}

static int gloo_all_reduce(struct ps_comm *comm, void *data, size_t count, enum ps_dtype type,
                           struct ps_error *err)
{
    struct gloo_comm *c = (struct gloo_comm *)comm;
    char message[MESSAGE] = "";
    int code = enter(c, err);
    return code < 0
               ? code
               : leave(c, "all-reduce",
                       c->ops->all_reduce(c->gloo, data, count, type, message, sizeof message), message, err);
}

static int gloo_broadcast(struct ps_comm *comm, void *data, size_t bytes, int root, struct ps_error *err)
{
    struct gloo_comm *c = (struct gloo_comm *)comm;
    char message[MESSAGE] = "";
    int code = enter(c, err);
    return code < 0
               ? code
               : leave(c, "broadcast", c->ops->broadcast(c->gloo, data, bytes, root, message, sizeof message),
                       message, err);
}

static int gloo_all_gather(struct ps_comm *comm, const void *data, size_t bytes, void *out,
                           struct ps_error *err)
{
    struct gloo_comm *c = (struct gloo_comm *)comm;
    char message[MESSAGE] = "";
    int code = enter(c, err);
    return code < 0
               ? code
               : leave(c, "all-gather",
                       c->ops->all_gather(c->gloo, data, bytes, out, message, sizeof message), message, err);
}

static int gloo_barrier(struct ps_comm *comm, struct ps_error *err)
{
    struct gloo_comm *c = (struct gloo_comm *)comm;
    char message[MESSAGE] = "", here = 1;
    char *all = malloc((size_t)comm->world_size);
    if (!all)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = enter(c, err);
    if (code == 0)
        code = leave(c, "barrier", c->ops->all_gather(c->gloo, &here, 1, all, message, sizeof message),
                     message, err);
    free(all);
    return code;
}

static void gloo_abort(struct ps_comm *comm, const char *reason)
{
    struct gloo_comm *c = (struct gloo_comm *)comm;
    keep_reason(c, PS_ABORTED, reason);
    c->ops->abort(c->gloo);
}

static void gloo_destroy(struct ps_comm *comm)
{
    struct gloo_comm *c = (struct gloo_comm *)comm;
    if (!c)
        return;
    c->ops->destroy(c->gloo);
    pthread_mutex_destroy(&c->call_lock);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static const struct ps_comm_ops gloo_ops = {.name = "gloo",
                                            .all_reduce = gloo_all_reduce,
                                            .broadcast = gloo_broadcast,
                                            .all_gather = gloo_all_gather,
                                            .barrier = gloo_barrier,
                                            .abort = gloo_abort,
                                            .destroy = gloo_destroy};

/* An interface's numeric address: IPv4 before IPv6, and no link-local one. */
static int interface_address(const char *name, char *out, size_t size, struct ps_error *err)
{
    struct ifaddrs *list, *i;
    char known[300] = "", text[64];
    size_t used = 0;
    if (getifaddrs(&list) < 0)
        return ps_fail(err, PS_UNAVAILABLE, "cannot list the network interfaces");
    out[0] = '\0';
    for (i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6))
            continue;
        ps_address_text(i->ifa_addr, text, sizeof text);
        if (strncmp(text, "fe80", 4) == 0)
            continue;
        if (i->ifa_addr->sa_family == AF_INET && used < sizeof known) {
            int n =
                snprintf(known + used, sizeof known - used, "%s%s (%s)", used ? ", " : "", i->ifa_name, text);
            used += n > 0 ? (size_t)n : 0;
        }
        if (strcmp(i->ifa_name, name) == 0 && (!out[0] || i->ifa_addr->sa_family == AF_INET) &&
            !(out[0] && !strchr(out, ':')))
            snprintf(out, size, "%s", text);
    }
    freeifaddrs(list);
    if (!out[0])
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "--interface %s: no such interface with an address here; there are %s", name, known);
    return 0;
}

int ps_comm_gloo(struct ps_rendezvous *rendezvous, int rank, int world_size,
                 const struct ps_gloo_options *options, struct ps_comm **ret, struct ps_error *err)
{
    void *symbol;
    char address[64], message[MESSAGE] = "";
    int code = ps_module_open("gloo", "ps_gloo_module", &symbol, err);
    if (code < 0)
        return ps_error_prefix(err, "several processes on CPUs need Gloo");
    const struct ps_gloo_ops *(*module)(void);
    memcpy(&module, &symbol, sizeof module); /* an object pointer is not a function pointer in ISO C */
    const struct ps_gloo_ops *ops = module();
    if (ops->abi != PS_GLOO_ABI)
        return ps_fail(err, PS_FAILED_PRECONDITION, "module gloo has version %u, this program needs %d",
                       ops->abi, PS_GLOO_ABI);

    const char *interface = options->interface && options->interface[0] ? options->interface : "auto";
    if (strcmp(interface, "auto") == 0)
        snprintf(address, sizeof address, "%s", ps_rendezvous_address(rendezvous));
    else if (strchr(interface, ':') || strspn(interface, "0123456789.") == strlen(interface))
        snprintf(address, sizeof address, "%s", interface);
    else if ((code = interface_address(interface, address, sizeof address, err)) < 0)
        return code;

    struct gloo_comm *c = calloc(1, sizeof *c);
    if (!c)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    c->comm = (struct ps_comm){&gloo_ops, rank, world_size};
    c->ops = ops;
    c->rendezvous = rendezvous;
    pthread_mutex_init(&c->call_lock, NULL);
    pthread_mutex_init(&c->lock, NULL);
    struct ps_gloo_config config = {.rank = rank,
                                    .world_size = world_size,
                                    .address = address,
                                    .connect_s = options->connect_s > 0 ? options->connect_s : 60.0,
                                    .collective_s = options->collective_s > 0 ? options->collective_s : 600.0,
                                    .store = {store_set, store_get, rendezvous}};
    code = ops->create(&config, &c->gloo, message, sizeof message);
    if (code < 0) {
        char text[MESSAGE], reason[MESSAGE];
        if (ps_rendezvous_failed(rendezvous, code == PS_ABORTED ? 0.0 : VERDICT_S, reason, sizeof reason)) {
            code = ps_fail(err, PS_ABORTED, "%s", reason);
        } else {
            snprintf(text, sizeof text, "Gloo cannot connect from %s: %.400s", address, message);
            ps_rendezvous_fail(rendezvous, text);
            code = ps_fail(err, code, "%s", text);
        }
        gloo_destroy(&c->comm);
        return code;
    }
    ps_rendezvous_attach(rendezvous, &c->comm);
    *ret = &c->comm;
    return 0;
}

int ps_comm_open(struct ps_rendezvous *rendezvous, int rank, int world_size,
                 const struct ps_gloo_options *options, struct ps_comm **ret, struct ps_error *err)
{
    if (world_size > 1)
        return ps_comm_gloo(rendezvous, rank, world_size, options, ret, err);
    struct ps_comm *comm = ps_comm_single();
    if (!comm)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    *ret = comm;
    return 0;
}

void ps_comm_close(struct ps_rendezvous *rendezvous, struct ps_comm *comm)
{
    if (!comm)
        return;
    if (rendezvous)
        ps_rendezvous_attach(rendezvous, NULL);
    comm->ops->destroy(comm);
}
