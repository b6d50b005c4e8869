#!/bin/bash
# Boot script of a ModelArts training job: one process per card on every node, started and watched by `paramsync launch`.
#
#   Boot command:  bash ${MA_JOB_DIR}/code/run_ddp.sh [flags of paramsync-train]
#
# ModelArts says who this node is: VC_WORKER_HOSTS (all nodes, by commas), VC_TASK_INDEX (this one), MA_NUM_HOSTS (how many),
# MA_NUM_GPUS (cards of this one). The page beside this script, README.md, lists the job's parameters.
set -euo pipefail

code=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH=$code/bin:$PATH # programs that were uploaded with the code come first

nodes=${MA_NUM_HOSTS:-1}
node=${VC_TASK_INDEX:-0}
cards=${MA_NUM_GPUS:-0}
hosts=${VC_WORKER_HOSTS:-localhost}
master=${hosts%%,*}
port=${PARAMSYNC_RDZV_PORT:-6060}
[ "$cards" -gt 0 ] || cards=1 # a job without cards trains on the processor

count=$(tr ',' '\n' <<<"$hosts" | grep -c .)
if [ "$nodes" -gt 1 ] && [ "$count" -ne "$nodes" ]; then
    echo "run_ddp.sh: MA_NUM_HOSTS is $nodes, but VC_WORKER_HOSTS names $count: $hosts" >&2
    exit 2
fi

# What the platform gave the job: --data_url and --train_url (or --output_dir) come as flags of the boot command.
args=()
output=
for arg in "$@"; do
    case $arg in
    --train_url=* | --output_dir=* | --output-dir=*)
        output=${arg#*=}
        args+=("--output_dir=$output")
        ;;
    *) args+=("$arg") ;;
    esac
done
if [ -z "$output" ]; then
    output=${MA_MOUNT_PATH:-/home/ma-user/modelarts}/outputs/paramsync
    args+=("--output_dir=$output")
fi
for arg in "${args[@]}"; do
    case $arg in
    --train_url | --output_dir | --output-dir)
        echo "run_ddp.sh: write ${arg}=DIR, in one word" >&2
        exit 2
        ;;
    esac
done

# All nodes of the job know its name; set PARAMSYNC_JOB_SECRET in the job's environment to keep other jobs out.
export PARAMSYNC_JOB_SECRET=${PARAMSYNC_JOB_SECRET:-${MA_VJ_NAME:-modelarts} at $hosts}
logs=()
[ -z "${MA_LOG_DIR:-}" ] || logs=(--log-dir "$MA_LOG_DIR/ranks-$node")

echo "run_ddp.sh: node $node of $nodes, $cards ranks here, launchers meet at $master:$port, output in $output" >&2
exec paramsync launch --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$cards" --rdzv "$master:$port" \
    --max-restarts "${MAX_RESTARTS:-3}" --sidecar "${PARAMSYNC_SIDECAR:-auto}" --sidecar-dir "$output/sidecar" \
    --run "${PARAMSYNC_RUN:-${MA_VJ_NAME:-modelarts}}" "${logs[@]}" \
    -- paramsync-train --ignore-unknown --resume auto "${args[@]}"
