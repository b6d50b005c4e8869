/* SPDX-License-Identifier: Apache-2.0 */
#include "services/rpc/descriptors.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NESTING = 32 };

struct reader {
    const uint8_t *at, *end;
    bool bad;
};

struct field {
    unsigned number;
    uint64_t value;      /* of a varint */
    struct reader bytes; /* of a length-delimited one; else empty */
};

static uint64_t varint(struct reader *in)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && in->at < in->end; shift += 7) {
        uint8_t byte = *in->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return value;
    }
    in->bad = true;
    return 0;
}

/* The next field, or false at the end and when the bytes are bad. */
static bool next_field(struct reader *in, struct field *field)
{
    if (in->bad || in->at == in->end)
        return false;
    *field = (struct field){0};
    uint64_t key = varint(in), size = 0;
    field->number = (unsigned)(key >> 3);
    switch (key & 7) {
    case 0:
        field->value = varint(in);
        return !in->bad;
    case 1:
        size = 8;
        break;
    case 2:
        size = varint(in);
        break;
    case 5:
        size = 4;
        break;
    default:
        in->bad = true;
    }
    if (in->bad || size > (uint64_t)(in->end - in->at)) {
        in->bad = true;
        return false;
    }
    if ((key & 7) == 2)
        field->bytes = (struct reader){.at = in->at, .end = in->at + size};
    in->at += size;
    return true;
}

static char *text(struct reader bytes)
{
    return strndup(bytes.at ? (const char *)bytes.at : "", (size_t)(bytes.end - bytes.at));
}

/* One more element at the end of an array, zeroed; NULL when memory is short. */
static void *grow(void *array, size_t *count, size_t element)
{
    void **pointer = array;
    char *larger = realloc(*pointer, (*count + 1) * element);
    if (!larger)
        return NULL;
    *pointer = larger;
    memset(larger + *count * element, 0, element);
    return larger + (*count)++ * element;
}

struct building {
    struct ps_rpc_descriptors *set;
    size_t file;
    bool failed; /* out of memory */
};

static char *join(const char *scope, const char *separator, const char *name)
{
    char *out;
    return asprintf(&out, "%s%s%s", scope, *scope ? separator : "", name) < 0 ? NULL : out;
}

/* The symbol scope.NAME, where NAME is the element's field 1. The text stays where it is while the table
 * grows. */
static const char *add_symbol(struct building *b, const char *scope, struct reader element)
{
    struct field field;
    char *name = NULL;
    while (next_field(&element, &field))
        if (field.number == 1 && !name)
            name = text(field.bytes);
    struct ps_rpc_symbol *symbol =
        name ? grow(&b->set->symbols, &b->set->symbol_count, sizeof *symbol) : NULL;
    if (symbol) {
        symbol->name = join(scope, ".", name);
        symbol->file = b->file;
    }
    free(name);
    if (!symbol || !symbol->name) {
        b->failed = true;
        return NULL;
    }
    return symbol->name;
}

static bool read_message(struct building *b, const char *scope, struct reader in, int depth)
{
    const char *name = depth < MAX_NESTING ? add_symbol(b, scope, in) : NULL;
    if (!name)
        return false;
    struct field field;
    bool good = true;
    while (good && next_field(&in, &field)) {
        if (field.number == 3)
            good = read_message(b, name, field.bytes, depth + 1);
        else if (field.number == 4 || field.number == 2)
            good = add_symbol(b, name, field.bytes) != NULL;
    }
    return good && !in.bad;
}

static char *type_name(struct reader bytes)
{
    if (bytes.at < bytes.end && *bytes.at == '.')
        bytes.at++;
    return text(bytes);
}

static bool read_method(struct building *b, const char *service, struct reader in)
{
    const char *symbol = add_symbol(b, service, in);
    struct ps_rpc_described_method *method =
        symbol ? grow(&b->set->methods, &b->set->method_count, sizeof *method) : NULL;
    if (!method)
        return false;
    bool client = false, server = false;
    struct field field;
    while (next_field(&in, &field)) {
        if (field.number == 2 && !method->input)
            method->input = type_name(field.bytes);
        else if (field.number == 3 && !method->output)
            method->output = type_name(field.bytes);
        else if (field.number == 5)
            client = field.value != 0;
        else if (field.number == 6)
            server = field.value != 0;
    }
    method->kind = client ? (server ? PS_RPC_BIDI : PS_RPC_CLIENT_STREAM)
                          : (server ? PS_RPC_SERVER_STREAM : PS_RPC_UNARY);
    if (asprintf(&method->path, "/%s/%s", service, symbol + strlen(service) + 1) < 0)
        method->path = NULL;
    return !in.bad && method->path && method->input && method->output;
}

static bool read_service(struct building *b, const char *package, struct reader in)
{
    const char *name = add_symbol(b, package, in);
    bool good = name != NULL;
    struct field field;
    while (good && next_field(&in, &field))
        if (field.number == 2)
            good = read_method(b, name, field.bytes);
    return good && !in.bad;
}

static bool read_file(struct building *b, struct reader in)
{
    struct ps_rpc_file *file = grow(&b->set->files, &b->set->file_count, sizeof *file);
    if (!file)
        return false;
    b->file = b->set->file_count - 1;
    file->data = in.at;
    file->size = (size_t)(in.end - in.at);
    char *package = NULL;
    struct field field;
    bool good = true;
    /* The package may stand behind what it scopes. */
    for (struct reader pass = in; good && next_field(&pass, &field);) {
        if (field.number == 1 && !file->name) {
            good = (file->name = text(field.bytes)) != NULL;
        } else if (field.number == 2 && !package) {
            good = (package = text(field.bytes)) != NULL;
        } else if (field.number == 3) {
            char **import = grow(&file->imports, &file->import_count, sizeof *import);
            good = import && (*import = text(field.bytes));
        }
    }
    const char *scope = package ? package : "";
    while (good && next_field(&in, &field)) {
        if (field.number == 4)
            good = read_message(b, scope, field.bytes, 0);
        else if (field.number == 5 || field.number == 7)
            good = add_symbol(b, scope, field.bytes) != NULL;
        else if (field.number == 6)
            good = read_service(b, scope, field.bytes);
    }
    free(package);
    return good && !in.bad && file->name;
}

int ps_rpc_descriptors_read(const uint8_t *data, size_t size, struct ps_rpc_descriptors **ret,
                            struct ps_error *err)
{
    struct ps_rpc_descriptors *set = calloc(1, sizeof *set);
    if (!set)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    struct building b = {.set = set};
    struct reader in = {.at = data, .end = data + size};
    struct field field;
    bool good = true;
    while (good && next_field(&in, &field))
        if (field.number == 1)
            good = read_file(&b, field.bytes);
    if (!good || in.bad) {
        ps_rpc_descriptors_free(set);
        return ps_fail(err, PS_INVALID_ARGUMENT, "the FileDescriptorSet cannot be read");
    }
    *ret = set;
    return 0;
}

struct ps_rpc_descriptors *ps_rpc_descriptors_free(struct ps_rpc_descriptors *set)
{
    if (!set)
        return NULL;
    for (size_t i = 0; i < set->file_count; i++) {
        for (size_t j = 0; j < set->files[i].import_count; j++)
            free(set->files[i].imports[j]);
        free(set->files[i].imports);
        free(set->files[i].name);
    }
    for (size_t i = 0; i < set->symbol_count; i++)
        free(set->symbols[i].name);
    for (size_t i = 0; i < set->method_count; i++) {
        free(set->methods[i].path);
        free(set->methods[i].input);
        free(set->methods[i].output);
    }
    free(set->files);
    free(set->symbols);
    free(set->methods);
    free(set);
    return NULL;
}

static const char *kind_name(enum ps_rpc_kind kind)
{
    static const char *const names[] = {"unary", "client-streaming", "server-streaming", "bidirectional"};
    return names[kind];
}

int ps_rpc_descriptors_check(const struct ps_rpc_descriptors *set, const struct ps_rpc_method *methods,
                             size_t count, struct ps_error *err)
{
    for (size_t i = 0; i < count; i++) {
        const struct ps_rpc_method *have = &methods[i];
        const struct ps_rpc_described_method *want = NULL;
        for (size_t j = 0; j < set->method_count && !want; j++)
            if (!strcmp(set->methods[j].path, have->path))
                want = &set->methods[j];
        if (!want)
            return ps_fail(err, PS_INVALID_ARGUMENT, "method table: no .proto file declares %s", have->path);
        if (want->kind != have->kind)
            return ps_fail(err, PS_INVALID_ARGUMENT, "method table: %s is %s in the .proto file, not %s",
                           have->path, kind_name(want->kind), kind_name(have->kind));
        if (strcmp(want->input, have->request->name) != 0 || strcmp(want->output, have->response->name) != 0)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "method table: %s takes %s and returns %s in the .proto file, "
                           "not %s and %s",
                           have->path, want->input, want->output, have->request->name, have->response->name);
    }
    return 0;
}

const struct ps_rpc_file *ps_rpc_descriptors_file(const struct ps_rpc_descriptors *set, const char *name)
{
    for (size_t i = 0; i < set->file_count; i++)
        if (!strcmp(set->files[i].name, name))
            return &set->files[i];
    return NULL;
}

const struct ps_rpc_file *ps_rpc_descriptors_symbol(const struct ps_rpc_descriptors *set, const char *name)
{
    for (size_t i = 0; i < set->symbol_count; i++)
        if (!strcmp(set->symbols[i].name, name))
            return &set->files[set->symbols[i].file];
    return NULL;
}
