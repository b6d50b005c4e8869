#!/usr/bin/env bash
# The main job on this machine: installs what is missing, builds, starts the sidecar, trains ResNet-18 on CIFAR-10 by one
# process and then by two, compares the runs, lets the gate decide, and leaves the dashboard up until Ctrl-C.
#
#   deploy/demo.sh             as above
#   deploy/demo.sh --exit      stop everything at the end instead
#   deploy/demo.sh --fast      a narrow net and fewer images: about a minute of training, to see the moving parts
#
# Data: $CIFAR10_DIR if it is set (a folder with the CIFAR-10 batches); else a download, checked by its SHA-256; else a generated
# set that can be learned. Everything it writes lies in build/demo/, which it empties first.
set -euo pipefail
cd "$(dirname "$0")/.."

leave=0
fast=0
for arg in "$@"; do
    case "$arg" in
    --exit) leave=1 ;;
    --fast) fast=1 ;;
    -h | --help)
        sed -n '2,11s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *)
        echo "demo.sh: unknown argument $arg (--exit, --fast)" >&2
        exit 2
        ;;
    esac
done
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "1/6 Installing what is missing"
deploy/install-deps.sh

say "2/6 Building"
cmake --preset release >build-demo.log 2>&1 || { cat build-demo.log; rm -f build-demo.log; exit 1; }
rm -f build-demo.log
cmake --build --preset release -j "$(nproc)" | tail -n 1
bin=$PWD/build/release/bin
work=$PWD/build/demo
rm -rf "$work"
mkdir -p "$work"

say "3/6 Data"
url=https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz
sha256=6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce
cache=build/cifar-10-python.tar.gz
if [ -n "${CIFAR10_DIR:-}" ]; then
    data=$CIFAR10_DIR
    echo "CIFAR-10 from $data"
elif { [ -f "$cache" ] || curl -fsSL --connect-timeout 5 --max-time 300 -o "$cache.part" "$url" 2>/dev/null; } &&
    { [ -f "$cache" ] || mv "$cache.part" "$cache"; } && echo "$sha256  $cache" | sha256sum --check --status; then
    data=$PWD/$cache
    echo "CIFAR-10, downloaded and verified: $data"
else
    rm -f "$cache" "$cache.part"
    data=$work/synthetic
    "$bin/paramsync-synth" "$data" --train 10000 --test 2000
    echo "NOTE: no CIFAR-10 here and no download. This demo trains on GENERATED images: the accuracies below say"
    echo "      nothing about CIFAR-10. Set CIFAR10_DIR to a folder with the real batches to train on them."
fi

say "4/6 Starting the sidecar"
pids=()
finish() {
    trap - EXIT INT TERM
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
free_port() { # the wanted port, or any that is free
    python3 - "$1" <<'PY'
import socket, sys
for port in (int(sys.argv[1]), 0):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind(("127.0.0.1", port))
        print(s.getsockname()[1])
        break
    except OSError:
        pass
PY
}
grpc=127.0.0.1:$(free_port 50051)
http=127.0.0.1:$(free_port 8080)
"$bin/paramsyncd" --data-dir "$work/store" --grpc-listen "$grpc" --http-listen "$http" 2>"$work/paramsyncd.log" &
pids+=($!)
for _ in $(seq 100); do
    curl -fs "http://$http/readyz" >/dev/null && break
    kill -0 "${pids[0]}" 2>/dev/null || break
    read -rt 0.1 <> <(:) || true
done
curl -fs "http://$http/readyz" >/dev/null || { cat "$work/paramsyncd.log" >&2; echo "demo.sh: the sidecar did not start" >&2; exit 1; }
echo "gRPC on $grpc, dashboard on http://$http/"

say "5/6 Training: one process with all cores, then two processes that share them"
cores=$(nproc)
export PARAMSYNC_SIDECAR=$grpc
if [ "$fast" = 1 ]; then
    size=(--width 16 --epochs 4 --lr 0.1 --train_images 4000 --test_images 1000 --resolution 16)
else
    size=(--epochs 4 --lr 0.1 --train_images 2500 --test_images 1000 --resolution 16)
fi
common=(--recipe fast --data_url "$data" --sidecar "$grpc" "${size[@]}")
"$bin/paramsync-train" "${common[@]}" --run 1-process --batch 64 --threads "$cores" --output_dir "$work/1-process"
half=$((cores / 2 > 0 ? cores / 2 : 1))
two=(--run 2-processes --batch 32 --threads "$half" --output_dir "$work/2-processes"
    --init_method "tcp://127.0.0.1:$(free_port 29555)" --world_size 2)
"$bin/paramsync-train" "${common[@]}" "${two[@]}" --rank 1 2>"$work/rank-1.log" &
rank1=$!
pids+=("$rank1")
"$bin/paramsync-train" "${common[@]}" "${two[@]}" --rank 0
wait "$rank1"

say "6/6 Results"
"$bin/paramsync" compare 1-process 2-processes sample-1 sample-16 --target 0.25
echo
"$bin/paramsync" pull 2-processes --best -o "$work/best.safetensors"
echo
verdict=0
"$bin/paramsync" gate 2-processes --min-accuracy 0.25 --max-time 10min || verdict=$?
echo "gate: exit status $verdict (0 pass, 1 fail, 2 cannot decide)"

if [ "$leave" = 1 ]; then
    exit 0
fi
say "Dashboard: http://$http/   (Ctrl-C ends the demo)"
wait "${pids[0]}"
