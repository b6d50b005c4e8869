#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ncu over the kernels of one training step on a GPU: bytes moved and how near each is to the memory's and the arithmetic's
# limits. tests/gpu/profile.sh BUILD_DIR [BATCH]
set -euo pipefail
build=$(cd "${1:?usage: profile.sh BUILD_DIR [BATCH]}" && pwd)
batch=${2:-512}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$build/bin/paramsync-synth" "$work/data" --train $((batch * 4)) --test 32
ncu --launch-skip 600 --launch-count 300 --section SpeedOfLight --section MemoryWorkloadAnalysis --csv \
    "$build/bin/paramsync-train" --enable_gpu true --data_url "$work/data" --output_dir "$work/out" --batch "$batch" --epochs 2 \
    --precision bf16 >"$PWD/ncu_$batch.csv"
echo "ncu_$batch.csv"
