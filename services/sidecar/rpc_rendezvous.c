/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/rpc_handlers.h"

#include "paramsync/v1/rendezvous.pb-c.h"
#include "services/sidecar/rendezvous.h"

#include <math.h>
#include <stdlib.h>

PS_HANDLER(ps_handle_rendezvous_set)
{
    struct ps_service *service = context;
    const Paramsync__V1__SetRequest *request = (const void *)message;
    int code = ps_meetings_set(service->meetings, request->run, request->key, request->value.data,
                               request->value.len, request->ttl_s, err);
    Paramsync__V1__SetResponse response = PARAMSYNC__V1__SET_RESPONSE__INIT;
    return code ? code : ps_rpc_send(call, &response.base, err);
}

PS_HANDLER(ps_handle_rendezvous_add)
{
    struct ps_service *service = context;
    const Paramsync__V1__AddRequest *request = (const void *)message;
    Paramsync__V1__AddResponse response = PARAMSYNC__V1__ADD_RESPONSE__INIT;
    int code = ps_meetings_add(service->meetings, request->run, request->key, request->amount, request->ttl_s,
                               &response.sum, err);
    return code ? code : ps_rpc_send(call, &response.base, err);
}

static void wake(void *call)
{
    ps_rpc_wake(call);
}

/* On a thread of its own: it may wait for long. */
PS_HANDLER(ps_handle_rendezvous_get)
{
    struct ps_service *service = context;
    const Paramsync__V1__GetRequest *request = (const void *)message;
    struct ps_meeting_wait *wait;
    void *value = NULL;
    size_t size = 0;
    int code = ps_meetings_wait_begin(service->meetings, request->run, request->key, wake, call, &wait, err);
    if (code)
        return code;
    for (;;) {
        code = ps_meetings_get(service->meetings, request->run, request->key, &value, &size, err);
        if (code != PS_NOT_FOUND || request->no_wait)
            break;
        code = ps_rpc_wait(call, -1, err);
        if (code < 0)
            break;
    }
    ps_meetings_wait_end(service->meetings, wait);
    if (code)
        return code;
    Paramsync__V1__GetResponse response = PARAMSYNC__V1__GET_RESPONSE__INIT;
    response.value.data = value;
    response.value.len = size;
    code = ps_rpc_send(call, &response.base, err);
    free(value);
    return code;
}
