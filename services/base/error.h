/* SPDX-License-Identifier: Apache-2.0
 * One error type for every library here. A function that can fail returns 0 or a negative ps_code and
 * fills the caller's ps_error at the lowest layer that knows the reason. Out-parameters (`ret_...`) are
 * written on success only.
 *
 * The codes are the negated gRPC status codes (https://grpc.github.io/grpc/core/md_doc_statuscodes.html),
 * so that gRPC, HTTP and exit statuses are each derived in one place.
 */
#ifndef PARAMSYNC_BASE_ERROR_H
#define PARAMSYNC_BASE_ERROR_H

#include <stddef.h>

enum ps_code {
    PS_OK = 0,
    PS_CANCELLED = -1,
    PS_UNKNOWN = -2,
    PS_INVALID_ARGUMENT = -3,
    PS_DEADLINE_EXCEEDED = -4,
    PS_NOT_FOUND = -5,
    PS_ALREADY_EXISTS = -6,
    PS_PERMISSION_DENIED = -7,
    PS_RESOURCE_EXHAUSTED = -8,
    PS_FAILED_PRECONDITION = -9,
    PS_ABORTED = -10,
    PS_OUT_OF_RANGE = -11,
    PS_UNIMPLEMENTED = -12,
    PS_INTERNAL = -13,
    PS_UNAVAILABLE = -14,
    PS_DATA_LOSS = -15,
    PS_UNAUTHENTICATED = -16,
};

/* Owned by the caller, usually on its stack; zero-initialise. Not thread-safe. */
struct ps_error {
    int code;          /* enum ps_code */
    char message[768]; /* one line, UTF-8, NUL-terminated; what is wrong and how to put it right */
};

/* Fills err (which may be NULL) and returns code. */
int ps_fail(struct ps_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The same for a system call that failed with errnum: the code follows from it (ENOSPC is RESOURCE_EXHAUSTED,
 * ...) and its text is appended. */
int ps_fail_errno(struct ps_error *err, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "text: " before the message that err holds. Returns err's code. */
int ps_error_prefix(struct ps_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

int ps_code_from_errno(int errnum);
int ps_code_to_grpc(int code);      /* 0..16 */
int ps_code_from_grpc(int status);  /* a ps_code; statuses out of range become PS_UNKNOWN */
int ps_code_to_http(int code);      /* 200, 400, 401, ... */
int ps_code_to_exit(int code);      /* 0 ok, 2 usage (INVALID_ARGUMENT), 1 everything else */
const char *ps_code_name(int code); /* "NOT_FOUND"; static */

#ifdef __clang_analyzer__ /* tells it that these never return success */
#define ps_fail(err, code, ...) ((ps_fail)((err), (code), __VA_ARGS__), (code))
#define ps_fail_errno(err, ...) ((ps_fail_errno)((err), __VA_ARGS__), PS_INTERNAL)
#endif

#endif
