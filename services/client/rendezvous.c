/* SPDX-License-Identifier: Apache-2.0
 * Keys and values by which the ranks of a job find each other. */
#include "services/client/internal.h"

#include "paramsync/v1/rendezvous.pb-c.h"

#include <stdlib.h>
#include <string.h>

int paramsync_rendezvous_set(struct paramsync_client *client, const char *run, const char *key,
                             const void *value, size_t size, double ttl_s, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    ProtobufCMessage *answer;
    Paramsync__V1__SetRequest request = PARAMSYNC__V1__SET_REQUEST__INIT;
    request.run = ps_text(run);
    request.key = ps_text(key);
    request.value.data = (uint8_t *)value; /* only packed */
    request.value.len = size;
    request.ttl_s = ttl_s;
    int code = ps_call(client, NULL, "/paramsync.v1.Rendezvous/Set", &request.base,
                       &paramsync__v1__set_response__descriptor, client->timeout_s, &answer, &inner);
    if (!code)
        protobuf_c_message_free_unpacked(answer, NULL);
    return ps_give(err, &inner, code);
}

int paramsync_rendezvous_add(struct paramsync_client *client, const char *run, const char *key,
                             int64_t amount, double ttl_s, int64_t *ret_sum, struct paramsync_error *err)
{
    struct ps_error inner = {0};
    ProtobufCMessage *answer;
    Paramsync__V1__AddRequest request = PARAMSYNC__V1__ADD_REQUEST__INIT;
    request.run = ps_text(run);
    request.key = ps_text(key);
    request.amount = amount;
    request.ttl_s = ttl_s;
    int code = ps_call(client, NULL, "/paramsync.v1.Rendezvous/Add", &request.base,
                       &paramsync__v1__add_response__descriptor, client->timeout_s, &answer, &inner);
    if (!code) {
        *ret_sum = ((const Paramsync__V1__AddResponse *)answer)->sum;
        protobuf_c_message_free_unpacked(answer, NULL);
    }
    return ps_give(err, &inner, code);
}

static int get(struct paramsync_client *client, const char *run, const char *key, double timeout_s,
               void **ret_value, size_t *ret_size, struct ps_error *err)
{
    ProtobufCMessage *answer;
    Paramsync__V1__GetRequest request = PARAMSYNC__V1__GET_REQUEST__INIT;
    request.run = ps_text(run);
    request.key = ps_text(key);
    request.no_wait = timeout_s <= 0;
    int code = ps_call(client, NULL, "/paramsync.v1.Rendezvous/Get", &request.base,
                       &paramsync__v1__get_response__descriptor,
                       timeout_s > 0 ? timeout_s : client->timeout_s, &answer, err);
    if (code)
        return code;
    const ProtobufCBinaryData *value = &((const Paramsync__V1__GetResponse *)answer)->value;
    char *copy = malloc(value->len + 1);
    if (copy) {
        if (value->len)
            memcpy(copy, value->data, value->len);
        copy[value->len] = '\0';
        *ret_value = copy;
        *ret_size = value->len;
    } else {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    protobuf_c_message_free_unpacked(answer, NULL);
    return code;
}

int paramsync_rendezvous_get(struct paramsync_client *client, const char *run, const char *key,
                             double timeout_s, void **ret_value, size_t *ret_size,
                             struct paramsync_error *err)
{
    struct ps_error inner = {0};
    return ps_give(err, &inner, get(client, run, key, timeout_s, ret_value, ret_size, &inner));
}
