/* SPDX-License-Identifier: Apache-2.0
 * What the tests of the stand-ins check with. */
#ifndef PARAMSYNC_FAKEGPU_CHECK_H
#define PARAMSYNC_FAKEGPU_CHECK_H

#include "fake.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(what)                                                                                          \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s does not hold; last report: %s\n", __FILE__, __LINE__, #what,         \
                    ps_fake_last_report());                                                                  \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
/* A report with this text was made; forgets it. */
#define FIRES(text)                                                                                          \
    do {                                                                                                     \
        CHECK(ps_fake_reports() > 0 && strstr(ps_fake_last_report(), text));                                 \
        ps_fake_clear_reports();                                                                             \
    } while (0)

#endif
