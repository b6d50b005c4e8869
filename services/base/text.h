/* SPDX-License-Identifier: Apache-2.0
 * Strings from outside: checked at the edge, once. */
#ifndef PARAMSYNC_BASE_TEXT_H
#define PARAMSYNC_BASE_TEXT_H

#include "services/base/error.h"

#include <stdint.h>

/* 1 if the bytes are UTF-8 (RFC 3629: no overlong forms, no surrogates) without NUL. */
int ps_utf8_valid(const char *text, size_t size);

/* Whole-string numbers: no leading space, no trailing text, range checked. Return 0 or -1. */
int ps_parse_int64(const char *text, int64_t min, int64_t max, int64_t *ret_value);
int ps_parse_double(const char *text, double *ret_value); /* "nan" and "inf" are refused */

/* A run's name: 1..200 bytes of UTF-8, no control characters, not blank at either end. field names it in the
 * message. */
int ps_check_run_name(const char *name, const char *field, struct ps_error *err);

/* "HOST:PORT", "[v6]:PORT" or ":PORT"; host may be empty. host_size bounds ret_host. Port 0 is allowed. */
int ps_parse_host_port(const char *text, char *ret_host, size_t host_size, int *ret_port,
                       struct ps_error *err);

/* Random identifier that sorts by creation time: 26 characters of Crockford's base 32 (48 bits of
 * milliseconds, 80 random bits), NUL-terminated. Thread-safe. */
void ps_make_id(char out[27]);

/* A number of bytes: "1000000", "500k", "1.5M", "2G" (powers of 1024). 0, or -1 for another text. */
int ps_parse_bytes(const char *text, double *ret_bytes);

#endif
