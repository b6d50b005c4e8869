/* SPDX-License-Identifier: Apache-2.0
 * Who may do what: bearer tokens with a role each, and the browser sessions that stand for them. Tokens can
 * be exchanged while the sidecar runs. Comparisons take the same time wherever texts differ, and all tokens
 * are always compared. Thread-safe. */
#ifndef PARAMSYNC_SIDECAR_ACCESS_H
#define PARAMSYNC_SIDECAR_ACCESS_H

#include "services/base/digest.h"
#include "services/base/error.h"

#include <stdbool.h>

/* Each may do what the one before it may. */
enum ps_role {
    PS_ROLE_NONE,
    PS_ROLE_READ,  /* look, pull, compare */
    PS_ROLE_WRITE, /* and report runs, metrics, checkpoints, tags and notes; rendezvous */
    PS_ROLE_ADMIN, /* and delete runs and checkpoints */
};
const char *ps_role_name(enum ps_role role); /* "read" */

struct ps_access;

/* Open to everyone until ps_access_load. NULL: out of memory. */
struct ps_access *ps_access_new(void);
struct ps_access *ps_access_free(struct ps_access *access); /* takes NULL, returns NULL */

/* Takes the tokens of a text in place of those before: one a line, "ROLE TOKEN" with a role of read, write or
 * admin; a first line without a role is an admin's. Empty lines (but the first) and those that begin with #
 * say nothing. source names the text in messages. INVALID_ARGUMENT, naming the line, leaves what was. text
 * NULL: open to everyone. */
int ps_access_load(struct ps_access *access, const char *text, const char *source, struct ps_error *err);

bool ps_access_is_open(struct ps_access *access);
/* What the caller who shows this token (NULL: none) may do; everything when open. */
enum ps_role ps_access_role(struct ps_access *access, const char *token);

/* The cookie's value for the session of a token that ps_access_role knows; false for another one. It tells
 * nothing about the token, and means something for as long as the token does. */
bool ps_access_session(struct ps_access *access, const char *token, char ret_session[PS_SHA256_HEX]);
/* As ps_access_role, for a cookie's value. */
enum ps_role ps_access_session_role(struct ps_access *access, const char *session);

#endif
