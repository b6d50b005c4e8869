/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_assets.h"

#define EMBEDDED(symbol)                                                                                     \
    extern const unsigned char symbol[], symbol##_gz[];                                                      \
    extern const size_t symbol##_size, symbol##_gz_size;
EMBEDDED(ps_web_index_html)
EMBEDDED(ps_web_app_js)
EMBEDDED(ps_web_app_css)
EMBEDDED(ps_web_favicon_svg)

#define ROW(path, type, symbol)                                                                              \
    {                                                                                                        \
        path, type, symbol, symbol##_gz, &symbol##_size, &symbol##_gz_size                                   \
    }
const struct ps_web_asset ps_web_assets[] = {
    ROW("/", "text/html; charset=utf-8", ps_web_index_html),
    ROW("/index.html", "text/html; charset=utf-8", ps_web_index_html),
    ROW("/app.js", "text/javascript; charset=utf-8", ps_web_app_js),
    ROW("/app.css", "text/css; charset=utf-8", ps_web_app_css),
    ROW("/favicon.svg", "image/svg+xml", ps_web_favicon_svg),
};
const size_t ps_web_asset_count = sizeof ps_web_assets / sizeof *ps_web_assets;
