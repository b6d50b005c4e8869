#!/usr/bin/env bash
# clang-tidy finds nothing in the sources that this build compiles.
set -euo pipefail
cd "$PS_SOURCE"
command -v clang-tidy >/dev/null || { echo "no clang-tidy"; exit 77; }
[ -f "$PS_BUILD/compile_commands.json" ] || exit 77
python3 - "$PS_BUILD" <<'PY' | xargs -P "$(nproc)" -n 4 clang-tidy -p "$PS_BUILD" --quiet 2>/dev/null
import json, pathlib, sys
build = pathlib.Path(sys.argv[1])
source = pathlib.Path.cwd()
seen = set()
for entry in json.load(open(build / "compile_commands.json")):
    path = pathlib.Path(entry["file"])
    if path.is_relative_to(source) and not path.is_relative_to(build) and path.suffix == ".c" and path not in seen:
        if path.relative_to(source).parts[0] in ("services", "db", "trainer"):
            seen.add(path)
            print(path)
PY
