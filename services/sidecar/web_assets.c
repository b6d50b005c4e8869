/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/web_assets.h"

extern const unsigned char ps_web_index_html[], ps_web_index_html_gz[];
extern const size_t ps_web_index_html_size, ps_web_index_html_gz_size;
extern const unsigned char ps_web_app_js[], ps_web_app_js_gz[];
extern const size_t ps_web_app_js_size, ps_web_app_js_gz_size;
extern const unsigned char ps_web_app_css[], ps_web_app_css_gz[];
extern const size_t ps_web_app_css_size, ps_web_app_css_gz_size;
extern const unsigned char ps_web_favicon_svg[], ps_web_favicon_svg_gz[];
extern const size_t ps_web_favicon_svg_size, ps_web_favicon_svg_gz_size;

const struct ps_web_asset ps_web_assets[] = {
    {"/", "text/html; charset=utf-8", ps_web_index_html, ps_web_index_html_gz, &ps_web_index_html_size,
     &ps_web_index_html_gz_size},
    {"/index.html", "text/html; charset=utf-8", ps_web_index_html, ps_web_index_html_gz,
     &ps_web_index_html_size, &ps_web_index_html_gz_size},
    {"/app.js", "text/javascript; charset=utf-8", ps_web_app_js, ps_web_app_js_gz, &ps_web_app_js_size,
     &ps_web_app_js_gz_size},
    {"/app.css", "text/css; charset=utf-8", ps_web_app_css, ps_web_app_css_gz, &ps_web_app_css_size,
     &ps_web_app_css_gz_size},
    {"/favicon.svg", "image/svg+xml", ps_web_favicon_svg, ps_web_favicon_svg_gz, &ps_web_favicon_svg_size,
     &ps_web_favicon_svg_gz_size},
};
const size_t ps_web_asset_count = sizeof ps_web_assets / sizeof *ps_web_assets;
