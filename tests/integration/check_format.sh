#!/usr/bin/env bash
# Every C and C++ source is as clang-format (major 14, Debian 12's) writes it. Skipped where another major is installed.
set -euo pipefail
cd "$PS_SOURCE"
command -v clang-format >/dev/null || { echo "no clang-format"; exit 77; }
clang-format --version | grep -q 'version 14\.' || { echo "clang-format is not version 14"; exit 77; }
find services db trainer tests cmake \( -name '*.c' -o -name '*.h' -o -name '*.cc' -o -name '*.cu' \) -not -path '*/node_modules/*' -print0 |
    xargs -0 clang-format --dry-run -Werror
