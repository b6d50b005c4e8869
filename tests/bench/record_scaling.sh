#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Records a training with 16 ranks and its twin with one through a sidecar, as material for the compare page, and prints what
# 16 processes are worth on this machine: with fewer cores than ranks that is little, and it is shown as it is.
#
#   tests/bench/record_scaling.sh DIR [RANKS]
#
# DIR gets the sidecar's store: look at it with  paramsyncd --data-dir DIR/store. Images: $CIFAR10_DIR, else generated ones.
# PS_BIN: the folder of the programs (build/default/bin).
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
bin=${PS_BIN:-$here/build/default/bin}
[ $# -ge 1 ] || { echo "usage: record_scaling.sh DIR [RANKS]" >&2; exit 2; }
dir=$1
ranks=${2:-16}
global=128
((global % ranks == 0)) || { echo "record_scaling.sh: $ranks ranks do not divide a batch of $global" >&2; exit 2; }
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
if [ -n "${CIFAR10_DIR:-}" ]; then
  data=$CIFAR10_DIR
else
  data=$dir/data
  "$bin/paramsync-synth" "$data" --train 5000 --test 1000
fi

coproc sidecar { exec "$bin/paramsyncd" --data-dir "$dir/store" --grpc-listen 127.0.0.1:0 --http-listen none; }
pid=$sidecar_PID
trap 'kill "$pid" 2> /dev/null || true; wait 2> /dev/null || true' EXIT
read -r line <&"${sidecar[0]}" || { echo "record_scaling.sh: the sidecar did not start" >&2; exit 1; }
address=$(sed -n 's/.*gRPC \([^,]*\),.*/\1/p' <<< "$line")
export PARAMSYNC_SIDECAR=$address

train() { # NAME RANKS
  local name=$1 world=$2 status=0 pids=()
  local args=(--data_url "$data" --train_images 5000 --test_images 1000 --width 8 --resolution 16 --recipe fast --epochs 5 --lr 0.05
    --precision fp32 --seed 1 --batch $((global / world)) --run "$name" --output_dir "$dir/$name")
  if ((world > 1)); then
    args+=(--init_method "grpc://$address/$name" --world_size "$world")
  fi
  for ((r = 1; r < world; r++)); do
    "$bin/paramsync-train" "${args[@]}" --rank "$r" > /dev/null &
    pids+=($!)
  done
  if ((world > 1)); then args+=(--rank 0); fi
  "$bin/paramsync-train" "${args[@]}" || status=$?
  for p in "${pids[@]}"; do wait "$p" || status=$?; done
  return "$status"
}

train one-process 1
train "$ranks-processes" "$ranks"
"$bin/paramsync" compare one-process "$ranks-processes" --target 0.3
echo "on $(nproc) cores"
