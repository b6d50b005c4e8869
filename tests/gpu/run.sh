#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU path on a machine that has a GPU, nvcc, cuDNN, NCCL and PyTorch, and none of our services' libraries: builds the
# trainer alone, checks it against the reference backend and PyTorch, trains, measures, and prints one table. Ends within
# 8 minutes. tests/gpu/run.sh [OUTPUT_DIR]; CIFAR10_DIR: real data, else generated patterns.
set -uo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
build=$out/build
limit=$((SECONDS + 470))
mkdir -p "$out"
table=$out/table.txt
: >"$table"

left() { local s=$((limit - SECONDS)); echo $((s > 1 ? s : 1)); }
row() { printf '%-58s %s\n' "$1" "$2" | tee -a "$table"; }
step() { # step NAME SECONDS COMMAND...: the command's end as a row; its output in a file
    local name=$1 most=$2 log; shift 2
    log=$out/$(echo "$name" | tr -c 'a-z0-9\n' _).log
    if timeout "$((most < $(left) ? most : $(left)))" "$@" >"$log" 2>&1; then row "$name" ok; else row "$name" "FAILED ($?), see $log"; return 1; fi
}

# Python's nvidia packages hold cuDNN and NCCL where the system has not.
packages=$("$python" -c 'import nvidia, os; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
roots=()
for library in cudnn nccl; do
    [ -n "$packages" ] && [ -d "$packages/$library" ] && roots+=("-D${library^^}_ROOT=$packages/$library")
done
[ -n "$packages" ] && export LD_LIBRARY_PATH="$packages/cudnn/lib:$packages/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

{ nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; nvcc --version | tail -n 2; } 2>&1 | tee "$out/machine.txt"
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
generator=(-G Ninja); command -v ninja >/dev/null || generator=()
step "trainer-only build" 180 bash -c "cmake -S '$source' -B '$build' ${generator[*]} -DCMAKE_BUILD_TYPE=Release -DPARAMSYNC_SERVICES=OFF \
    -DPARAMSYNC_CUDA=ON -DPARAMSYNC_CPU=OFF -DPARAMSYNC_TESTS=OFF -DPARAMSYNC_CUDA_ARCHITECTURES=${arch:-90} ${roots[*]:-} &&
    cmake --build '$build' -j" || exit 1
# The programs that tests drive, without cmocka.
step "drivers" 60 bash -c "
    for d in parity/parity_driver bench/bench_backend; do
        gcc -O2 -std=gnu17 -D_GNU_SOURCE -I'$source' '$source/tests/'\$d.c -o '$build/'\$(basename \$d) \
            \$(find '$build/trainer/backend' -name libps_backend.a) \$(find '$build/trainer/optim' -name libps_optim.a) \
            \$(find '$build/trainer/model' -name libps_model.a) \$(find '$build/services/base' -name libps_base.a) -ldl -lpthread -lm \
            \$(pkg-config --libs libcrypto 2>/dev/null || true) || exit 1
    done
    mkdir -p '$build/tests' && cp '$build/parity_driver' '$build/tests/'" || exit 1
export PARAMSYNC_MODULE_DIR=$build/lib/paramsync PS_BUILD=$build PS_REAL_GPU=1
step "parity with PyTorch: fp32 frozen, bf16" 90 "$python" "$source/tests/parity/parity_cuda.py"

train=$build/bin/paramsync-train
data=${CIFAR10_DIR:-}
if [ -z "$data" ]; then
    step "patterns" 30 "$build/bin/paramsync-synth" "$out/data" --train 50000 --test 10000
    data=$out/data
fi
accuracy() { # accuracy NAME TARGET ARGS...: training seconds to the target
    local name=$1 target=$2; shift 2
    local log; log=$out/$(echo "$name" | tr -c 'a-z0-9\n' _).log
    timeout "$(left)" "$train" --enable_gpu true --data_url "$data" --output_dir "$out/$name" --recipe fast --precision bf16 "$@" >"$log" 2>&1
    row "$name" "$(grep -h 'finished in' "$log" | head -n 1 || true) (target $target; exit and curve in $log)"
}
accuracy "time to 80 %" 0.80 --epochs 4 --batch 512
for precision in fp32 tf32 bf16; do
    for batch in 128 512 1024; do
        flags=(--precision "${precision/tf32/fp32}"); [ $precision = tf32 ] && flags+=(--tf32)
        log=$out/speed_${precision}_$batch.log
        timeout "$(( $(left) < 40 ? $(left) : 40 ))" "$train" --enable_gpu true --data_url "$data" --output_dir "$out/speed" \
            --recipe fast --resolution 32 --augment none --epochs 3 --eval_every 3 --batch "$batch" "${flags[@]}" >"$log" 2>&1
        row "ours, $precision, batch $batch" "$(grep -o '[0-9.]* img/s' "$log" | tail -n 1)"
    done
done
step "PyTorch beside it" 150 "$python" "$source/tests/gpu/torch_speed.py" "$out/torch.txt"
[ -f "$out/torch.txt" ] && tee -a "$table" <"$out/torch.txt"
accuracy "time to 94 %" 0.94 --epochs 24 --batch 512 --resolution 32
echo "--- $(head -n 1 "$out/machine.txt")"
cat "$table"
