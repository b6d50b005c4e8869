/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#undef ps_fail
#undef ps_fail_errno

static const struct {
    const char *name;
    int http;
} codes[] = {
    {"OK", 200},
    {"CANCELLED", 499},
    {"UNKNOWN", 500},
    {"INVALID_ARGUMENT", 400},
    {"DEADLINE_EXCEEDED", 504},
    {"NOT_FOUND", 404},
    {"ALREADY_EXISTS", 409},
    {"PERMISSION_DENIED", 403},
    {"RESOURCE_EXHAUSTED", 507},
    {"FAILED_PRECONDITION", 409},
    {"ABORTED", 409},
    {"OUT_OF_RANGE", 416},
    {"UNIMPLEMENTED", 501},
    {"INTERNAL", 500},
    {"UNAVAILABLE", 503},
    {"DATA_LOSS", 500},
    {"UNAUTHENTICATED", 401},
};

static size_t code_index(int code)
{
    size_t count = sizeof codes / sizeof *codes;
    return code <= 0 && (size_t)-code < count ? (size_t)-code : (size_t)-PS_UNKNOWN;
}

int ps_code_to_grpc(int code)
{
    return (int)code_index(code);
}

int ps_code_from_grpc(int status)
{
    return -(int)code_index(-status);
}

int ps_code_to_http(int code)
{
    return codes[code_index(code)].http;
}

int ps_code_to_exit(int code)
{
    return code == PS_OK ? 0 : code == PS_INVALID_ARGUMENT ? 2 : 1;
}

const char *ps_code_name(int code)
{
    return codes[code_index(code)].name;
}

int ps_code_from_errno(int errnum)
{
    switch (errnum) {
    case 0:
        return PS_OK;
    case ENOENT:
    case ENOTDIR:
        return PS_NOT_FOUND;
    case EEXIST:
        return PS_ALREADY_EXISTS;
    case EACCES:
    case EPERM:
    case EROFS:
    case EXDEV: /* openat2: the path leaves its root */
    case ELOOP:
        return PS_PERMISSION_DENIED;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
        return PS_RESOURCE_EXHAUSTED;
    case EINVAL:
    case ENAMETOOLONG:
    case EISDIR:
        return PS_INVALID_ARGUMENT;
    case ETIMEDOUT:
        return PS_DEADLINE_EXCEEDED;
    case EADDRINUSE:
    case EADDRNOTAVAIL:
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case EHOSTUNREACH:
    case ENETUNREACH:
        return PS_UNAVAILABLE;
    case ECANCELED:
        return PS_CANCELLED;
    default:
        return PS_INTERNAL;
    }
}

/* Appends to err->message what fits; a control character in an argument must not break the one line. */
static void append(struct ps_error *err, const char *format, va_list args)
{
    size_t used = strlen(err->message);
    vsnprintf(err->message + used, sizeof err->message - used, format, args);
    for (char *p = err->message + used; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = ' ';
}

int ps_fail(struct ps_error *err, int code, const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        err->code = code;
        err->message[0] = '\0';
        append(err, format, args);
        va_end(args);
    }
    return code;
}

int ps_fail_errno(struct ps_error *err, int errnum, const char *format, ...)
{
    int code = ps_code_from_errno(errnum);
    if (err) {
        va_list args;
        va_start(args, format);
        err->code = code;
        err->message[0] = '\0';
        append(err, format, args);
        va_end(args);
        size_t used = strlen(err->message);
        snprintf(err->message + used, sizeof err->message - used, ": %s", strerror(errnum));
    }
    return code;
}

int ps_error_prefix(struct ps_error *err, const char *format, ...)
{
    if (!err)
        return PS_UNKNOWN;
    char old[sizeof err->message];
    memcpy(old, err->message, sizeof old);
    va_list args;
    va_start(args, format);
    err->message[0] = '\0';
    append(err, format, args);
    va_end(args);
    size_t used = strlen(err->message);
    snprintf(err->message + used, sizeof err->message - used, ": %.*s", (int)(sizeof old - 1), old);
    return err->code;
}
