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

# The manual page: without a warning, and only of functions that there are.
if command -v man > /dev/null; then
  page=$(MANWIDTH=90 man -l --warnings "$PS_SOURCE/services/client/libparamsync.3" 2> warnings)
  [ ! -s warnings ] || { cat warnings; exit 1; }
  for name in $(echo "$page" | grep -oE 'paramsync_[a-z_]+ ?\(' | tr -d ' ('); do
    echo "$declared" | grep -qx "$name" || { echo "in the manual page, and not declared: $name"; exit 1; }
  done
fi

# The example against a real sidecar, as its first lines say, installed header and all.
mkdir -p include && cp paramsync.h include/
cc -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror -Iinclude "$PS_SOURCE/services/client/examples/report.c" -o report "$library" -lm \
  -Wl,-rpath,"$PS_BUILD/lib"
"$PS_BIN/paramsyncd" --data-dir store --grpc-listen 127.0.0.1:0 --http-listen none > daemon.out 2> daemon.err &
daemon=$!
trap 'kill $daemon 2> /dev/null || true; rm -rf "$folder"' EXIT
for _ in $(seq 600); do
  grep -q ready daemon.out && break
  sleep 0.05 # polling another process
done
PARAMSYNC_SIDECAR=$(sed -n 's/.*gRPC \([0-9.:]*\),.*/\1/p' daemon.out)
export PARAMSYNC_SIDECAR
head -c 100000 /dev/urandom > weights.safetensors
./report my-run weights.safetensors
"$PS_BIN/paramsync" show my-run --json > shown.json
grep -q '"finished"' shown.json && grep -q '"last_epoch": *3' shown.json
"$PS_BIN/paramsync" pull my-run -o pulled.safetensors > /dev/null
cmp weights.safetensors pulled.safetensors

# A host program that forks: children that exec or _exit do no harm to the parent's reporter.
cat > forks.c <<'C'
#include "paramsync.h"
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void)
{
    struct paramsync_error err = {0};
    struct paramsync_reporter *reporter;
    struct paramsync_reporter_stats stats;
    struct paramsync_reporter_options options = {.run = {.name = "forks", .world_size = 1}};
    if (paramsync_reporter_open(&options, &reporter, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    for (int i = 0; i < 40; i++) {
        for (int k = 0; k < 50; k++)
            paramsync_reporter_point(reporter, "x", (uint64_t)(i * 50 + k), k, i);
        int status;
        pid_t child = fork();
        if (child == 0) {
            if (i % 2)
                execlp("true", "true", (char *)NULL);
            _exit(0);
        }
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            return 2;
    }
    if (paramsync_reporter_close(reporter, PARAMSYNC_RUN_FINISHED, "", 30, &stats, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 3;
    }
    return stats.points_sent == 2000 ? 0 : 4;
}
C
cc -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror forks.c -o forks "$library" -Wl,-rpath,"$PS_BUILD/lib"
timeout 60 ./forks
kill $daemon
wait $daemon
