/* SPDX-License-Identifier: Apache-2.0
 * Server reflection, v1 and v1alpha (https://github.com/grpc/grpc/blob/master/doc/server-reflection.md). The
 * two have the same messages under two names. Errors are answers: the stream goes on. */
#include "services/rpc/server.h"

#include "grpc/reflection/v1alpha/reflection.pb-c.h"

#include <stdlib.h>
#include <string.h>

typedef Grpc__Reflection__V1alpha__ServerReflectionRequest Request;
typedef Grpc__Reflection__V1alpha__ServerReflectionResponse Response;
#define ASKED(name) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name
#define ANSWERED(name) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##name

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int ps_rpc_reflection_init(struct ps_rpc_reflection *reflection, const struct ps_rpc_descriptors *descriptors,
                           const struct ps_rpc_registered *methods, size_t count, struct ps_error *err)
{
    reflection->descriptors = descriptors;
    reflection->services = calloc(count, sizeof *reflection->services);
    if (!reflection->services)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    for (size_t i = 0; i < count; i++) {
        const char *service = methods[i].method->path + 1, *slash = strchr(service, '/');
        char *name = strndup(service, slash ? (size_t)(slash - service) : strlen(service));
        if (!name)
            return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        /* What cannot be described is not listed: clients ask for the file of every name they are given. */
        bool listed = ps_rpc_descriptors_symbol(descriptors, name) != NULL;
        for (size_t j = 0; j < reflection->count && listed; j++)
            listed = !reflection->services[j] || strcmp(reflection->services[j], name) != 0;
        if (listed)
            reflection->services[reflection->count++] = name;
        else
            free(name);
    }
    qsort(reflection->services, reflection->count, sizeof *reflection->services, compare_names);
    return 0;
}

void ps_rpc_reflection_done(struct ps_rpc_reflection *reflection)
{
    for (size_t i = 0; i < reflection->count; i++)
        free(reflection->services[i]);
    free(reflection->services);
}

static int answer_error(struct ps_rpc_call *call, Response response, int code, char *text,
                        struct ps_error *err)
{
    Grpc__Reflection__V1alpha__ErrorResponse error = GRPC__REFLECTION__V1ALPHA__ERROR_RESPONSE__INIT;
    error.error_code = ps_code_to_grpc(code);
    error.error_message = text;
    response.message_response_case = ANSWERED(ERROR_RESPONSE);
    response.error_response = &error;
    return ps_rpc_send(call, &response.base, err);
}

/* Puts file and all that it imports into list, each once. */
static void collect(const struct ps_rpc_descriptors *set, const struct ps_rpc_file *file,
                    const struct ps_rpc_file **list, size_t *count)
{
    list[(*count)++] = file;
    for (size_t done = *count - 1; done < *count; done++)
        for (size_t i = 0; i < list[done]->import_count; i++) {
            const struct ps_rpc_file *import = ps_rpc_descriptors_file(set, list[done]->imports[i]);
            bool fresh = import != NULL;
            for (size_t j = 0; j < *count && fresh; j++)
                fresh = list[j] != import;
            if (fresh)
                list[(*count)++] = import;
        }
}

static int answer_file(struct ps_rpc_call *call, Response response, const struct ps_rpc_descriptors *set,
                       const struct ps_rpc_file *file, struct ps_error *err)
{
    if (!file)
        return answer_error(call, response, PS_NOT_FOUND, "not known here", err);
    const struct ps_rpc_file **list = calloc(set->file_count, sizeof(void *));
    ProtobufCBinaryData *bytes = calloc(set->file_count, sizeof *bytes);
    size_t count = 0;
    int code;
    if (list && bytes) {
        collect(set, file, list, &count);
        for (size_t i = 0; i < count; i++)
            bytes[i] = (ProtobufCBinaryData){.len = list[i]->size, .data = (uint8_t *)list[i]->data};
        Grpc__Reflection__V1alpha__FileDescriptorResponse files =
            GRPC__REFLECTION__V1ALPHA__FILE_DESCRIPTOR_RESPONSE__INIT;
        files.n_file_descriptor_proto = count;
        files.file_descriptor_proto = bytes;
        response.message_response_case = ANSWERED(FILE_DESCRIPTOR_RESPONSE);
        response.file_descriptor_response = &files;
        code = ps_rpc_send(call, &response.base, err);
    } else {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    free(list);
    free(bytes);
    return code;
}

static int answer_services(struct ps_rpc_call *call, Response response,
                           const struct ps_rpc_reflection *reflection, struct ps_error *err)
{
    typedef Grpc__Reflection__V1alpha__ServiceResponse Service;
    Service *services = calloc(reflection->count + 1, sizeof *services);
    Service **pointers = calloc(reflection->count + 1, sizeof(void *));
    int code;
    if (services && pointers) {
        for (size_t i = 0; i < reflection->count; i++) {
            grpc__reflection__v1alpha__service_response__init(&services[i]);
            services[i].name = reflection->services[i];
            pointers[i] = &services[i];
        }
        Grpc__Reflection__V1alpha__ListServiceResponse list =
            GRPC__REFLECTION__V1ALPHA__LIST_SERVICE_RESPONSE__INIT;
        list.n_service = reflection->count;
        list.service = pointers;
        response.message_response_case = ANSWERED(LIST_SERVICES_RESPONSE);
        response.list_services_response = &list;
        code = ps_rpc_send(call, &response.base, err);
    } else {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    free(services);
    free(pointers);
    return code;
}

static int answer(struct ps_rpc_call *call, Request *request, const struct ps_rpc_reflection *reflection,
                  struct ps_error *err)
{
    const struct ps_rpc_descriptors *set = reflection->descriptors;
    Response response = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__INIT;
    response.valid_host = request->host;
    response.original_request = request;
    switch (request->message_request_case) {
    case ASKED(LIST_SERVICES):
        return answer_services(call, response, reflection, err);
    case ASKED(FILE_BY_FILENAME):
        return answer_file(call, response, set, ps_rpc_descriptors_file(set, request->file_by_filename), err);
    case ASKED(FILE_CONTAINING_SYMBOL):
        return answer_file(call, response, set,
                           ps_rpc_descriptors_symbol(set, request->file_containing_symbol), err);
    case ASKED(FILE_CONTAINING_EXTENSION): /* proto3 has none */
        return answer_error(call, response, PS_NOT_FOUND, "no extensions here", err);
    case ASKED(ALL_EXTENSION_NUMBERS_OF_TYPE): {
        const char *name = request->all_extension_numbers_of_type;
        if (!ps_rpc_descriptors_symbol(set, name))
            return answer_error(call, response, PS_NOT_FOUND, "not known here", err);
        Grpc__Reflection__V1alpha__ExtensionNumberResponse none =
            GRPC__REFLECTION__V1ALPHA__EXTENSION_NUMBER_RESPONSE__INIT;
        none.base_type_name = (char *)name;
        response.message_response_case = ANSWERED(ALL_EXTENSION_NUMBERS_RESPONSE);
        response.all_extension_numbers_response = &none;
        return ps_rpc_send(call, &response.base, err);
    }
    default:
        return answer_error(call, response, PS_INVALID_ARGUMENT, "the request asks for nothing", err);
    }
}

static int info(struct ps_rpc_call *call, const ProtobufCMessage *unused, void *context, struct ps_error *err)
{
    (void)unused;
    ProtobufCMessage *message = NULL;
    int code;
    while ((code = ps_rpc_recv_or_drain(call, &message, err)) == 1) {
        code = answer(call, (Request *)message, context, err);
        protobuf_c_message_free_unpacked(message, NULL);
        if (code < 0)
            break;
    }
    return code;
}

#define METHOD(path)                                                                                         \
    {                                                                                                        \
        path, PS_RPC_BIDI, &grpc__reflection__v1alpha__server_reflection_request__descriptor,                \
            &grpc__reflection__v1alpha__server_reflection_response__descriptor, info, false                  \
    }
const struct ps_rpc_method ps_rpc_reflection_methods[2] = {
    METHOD("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    METHOD("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
};
