#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer's four tools over a few steps of a narrow net on a GPU. tests/gpu/sanitize.sh BUILD_DIR
set -euo pipefail
build=$(cd "${1:?usage: sanitize.sh BUILD_DIR}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$build/bin/paramsync-synth" "$work/data" --train 64 --test 32
for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/bin/paramsync-train" --enable_gpu true --data_url "$work/data" \
        --output_dir "$work/$tool" --width 8 --batch 16 --epochs 1 --precision bf16
done
