#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# libparamsync as others see it: the symbols, the pkg-config file, a C and a C++ program against the header alone.
set -euo pipefail
library=$PS_BUILD/lib/libparamsync.so.0
[ -e "$library" ] || { echo "skipped: libparamsync is not built"; exit 77; }
[ -z "${PS_SANITIZER:-}" ] || { echo "skipped: a sanitized library needs its runtime first"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

strange=$(nm -D --defined-only "$library" | awk '{print $3}' | sed 's/@.*//' | grep -Ev '^(PARAMSYNC_0|paramsync_[a-z][a-z0-9_]*)$' || true)
[ -z "$strange" ] || { echo "exported, and should not be: $strange"; exit 1; }
declared=$(grep -oE '\bparamsync_[a-z_]+\(' "$PS_SOURCE/services/client/paramsync.h" | tr -d '(' | sort -u)
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sed 's/@.*//' | grep '^paramsync_' | sort -u)
missing=$(comm -23 <(echo "$declared") <(echo "$exported"))
[ -z "$missing" ] || { echo "declared, and not exported: $missing"; exit 1; }

cp "$PS_SOURCE/services/client/paramsync.h" .
cat > use.c <<'C'
#include "paramsync.h"
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv)
{
    struct paramsync_error err;
    struct paramsync_options options;
    struct paramsync_client *client;
    struct paramsync_run *run;
    memset(&err, 0, sizeof err);
    memset(&options, 0, sizeof options);
    options.address = argc > 1 ? argv[1] : "127.0.0.1:1";
    if (paramsync_connect(&options, &client, &err))
        return 1;
    int code = paramsync_get_run(client, "x", &run, &err);
    printf("%s\n", paramsync_code_name(code));
    if (!code)
        paramsync_run_free(run);
    paramsync_disconnect(client);
    return 0;
}
C
cc -std=c99 -pedantic -Wall -Wextra -Werror use.c -o use-c "$library" -Wl,-rpath,"$PS_BUILD/lib"
[ "$(./use-c)" = UNAVAILABLE ]
if command -v c++ > /dev/null; then
  cp use.c use.cc
  c++ -std=c++11 -pedantic -Wall -Wextra -Werror use.cc -o use-cc "$library" -Wl,-rpath,"$PS_BUILD/lib"
  [ "$(./use-cc)" = UNAVAILABLE ]
fi
version=$(PKG_CONFIG_PATH=$PS_BUILD/services/client pkg-config --modversion paramsync)
[ "paramsync $version" = "$("$PS_BIN/paramsync" --version)" ]
PKG_CONFIG_PATH=$PS_BUILD/services/client pkg-config --libs paramsync | grep -q -- -lparamsync
