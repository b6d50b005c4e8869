/* SPDX-License-Identifier: Apache-2.0
 * The dashboard's files, built into the program by web/CMakeLists.txt. */
#ifndef PARAMSYNC_SIDECAR_WEB_ASSETS_H
#define PARAMSYNC_SIDECAR_WEB_ASSETS_H

#include <stddef.h>

struct ps_web_asset {
    const char *path; /* as requested: "/", "/app.js" */
    const char *type;
    const unsigned char *plain, *packed; /* packed: gzip, may be empty */
    const size_t *plain_size, *packed_size;
};
extern const struct ps_web_asset ps_web_assets[];
extern const size_t ps_web_asset_count;

#endif
