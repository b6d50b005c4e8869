/* SPDX-License-Identifier: Apache-2.0
 * PEM texts, looked at before a TLS library gets them: those take anything and fail later without a reason.
 * Only in builds with the services. */
#ifndef PARAMSYNC_BASE_PEM_H
#define PARAMSYNC_BASE_PEM_H

#include "services/base/error.h"

/* Each text is parsed, and the private key compared with the certificate; INVALID_ARGUMENT says which one is
 * bad. NULL texts are skipped. cert and ca may hold several certificates. */
int ps_check_pem(const char *cert, const char *key, const char *ca, struct ps_error *err);

#endif
