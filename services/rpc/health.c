/* SPDX-License-Identifier: Apache-2.0
 * grpc.health.v1.Health (https://github.com/grpc/grpc/blob/master/doc/health-checking.md): Check and Watch.
 */
#include "services/rpc/server.h"

#include "grpc/health/v1/health.pb-c.h"

#include <stdlib.h>
#include <string.h>

#define STATUS(name) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##name

/* Later versions of health.proto call 3 SERVICE_UNKNOWN; the one compiled here may be older. Enums are open.
 */
enum { SERVICE_UNKNOWN = 3 };

/* With the lock held. NULL: unknown. */
static struct ps_rpc_health_entry *find(struct ps_rpc_health *health, const char *service)
{
    for (size_t i = 0; i < health->count; i++)
        if (!strcmp(health->entries[i].service, service))
            return &health->entries[i];
    return NULL;
}

/* With the lock held. */
static int add(struct ps_rpc_health *health, const char *service, size_t size, bool serving)
{
    struct ps_rpc_health_entry *entries = realloc(health->entries, (health->count + 1) * sizeof *entries);
    if (!entries)
        return -1;
    health->entries = entries;
    char *copy = strndup(service, size);
    if (!copy)
        return -1;
    entries[health->count++] = (struct ps_rpc_health_entry){copy, serving};
    return 0;
}

int ps_rpc_health_init(struct ps_rpc_health *health, const struct ps_rpc_method *methods, size_t count,
                       struct ps_error *err)
{
    int bad = add(health, "", 0, true);
    for (size_t i = 0; i < count && !bad; i++) {
        const char *service = methods[i].path + 1, *slash = strchr(service, '/');
        size_t size = slash ? (size_t)(slash - service) : strlen(service);
        bool known = false;
        for (size_t j = 0; j < health->count && !known; j++)
            known = strlen(health->entries[j].service) == size &&
                    !memcmp(health->entries[j].service, service, size);
        if (!known)
            bad = add(health, service, size, true);
    }
    return bad ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : 0;
}

static void wake_all(struct ps_rpc_health *health)
{
    for (struct ps_rpc_watch *watch = health->watches; watch; watch = watch->next)
        ps_rpc_wake(watch->call);
}

void ps_rpc_health_set(struct ps_rpc_health *health, const char *service, bool serving)
{
    pthread_mutex_lock(&health->lock);
    struct ps_rpc_health_entry *entry = service ? find(health, service) : NULL;
    if (!service)
        for (size_t i = 0; i < health->count; i++)
            health->entries[i].serving = serving;
    else if (entry)
        entry->serving = serving;
    else
        add(health, service, strlen(service), serving);
    wake_all(health);
    pthread_mutex_unlock(&health->lock);
}

void ps_rpc_health_stop(struct ps_rpc_health *health)
{
    pthread_mutex_lock(&health->lock);
    health->stopped = true;
    wake_all(health);
    pthread_mutex_unlock(&health->lock);
}

void ps_rpc_health_done(struct ps_rpc_health *health)
{
    for (size_t i = 0; i < health->count; i++)
        free(health->entries[i].service);
    free(health->entries);
    pthread_mutex_destroy(&health->lock);
}

static int status_of(struct ps_rpc_health *health, const char *service)
{
    pthread_mutex_lock(&health->lock);
    struct ps_rpc_health_entry *entry = find(health, service);
    int status = !entry                               ? (int)SERVICE_UNKNOWN
                 : entry->serving && !health->stopped ? (int)STATUS(SERVING)
                                                      : (int)STATUS(NOT_SERVING);
    pthread_mutex_unlock(&health->lock);
    return status;
}

static int answer(struct ps_rpc_call *call, int status, struct ps_error *err)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
    return ps_rpc_send(call, &response.base, err);
}

static int check(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                 struct ps_error *err)
{
    const Grpc__Health__V1__HealthCheckRequest *request = (const void *)message;
    int status = status_of(context, request->service);
    if (status == SERVICE_UNKNOWN)
        return ps_fail(err, PS_NOT_FOUND, "no service \"%s\" here", request->service);
    return answer(call, status, err);
}

static int watch(struct ps_rpc_call *call, const ProtobufCMessage *message, void *context,
                 struct ps_error *err)
{
    const Grpc__Health__V1__HealthCheckRequest *request = (const void *)message;
    struct ps_rpc_health *health = context;
    struct ps_rpc_watch self = {.call = call};
    pthread_mutex_lock(&health->lock);
    self.next = health->watches;
    health->watches = &self;
    pthread_mutex_unlock(&health->lock);

    int code, last = -1;
    do {
        int status = status_of(health, request->service);
        code = status != last ? answer(call, status, err) : 0;
        last = status;
        if (code == 0)
            code = ps_rpc_wait(call, -1, err);
    } while (code >= 0);
    /* The drain ends the wait, perhaps before the news has been told. */
    int status = status_of(health, request->service);
    if (ps_rpc_draining(call) && status != last)
        answer(call, status, NULL);

    pthread_mutex_lock(&health->lock);
    struct ps_rpc_watch **link = &health->watches;
    while (*link != &self)
        link = &(*link)->next;
    *link = self.next;
    pthread_mutex_unlock(&health->lock);
    return code;
}

const struct ps_rpc_method ps_rpc_health_methods[2] = {
    {"/grpc.health.v1.Health/Check", PS_RPC_UNARY, &grpc__health__v1__health_check_request__descriptor,
     &grpc__health__v1__health_check_response__descriptor, check, false},
    {"/grpc.health.v1.Health/Watch", PS_RPC_SERVER_STREAM,
     &grpc__health__v1__health_check_request__descriptor,
     &grpc__health__v1__health_check_response__descriptor, watch, false},
};
