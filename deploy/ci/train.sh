#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A short training for continuous integration; no server is needed. Leaves the run's folder, which `paramsync gate` judges.
#
#   DATA=/data/cifar10 deploy/ci/train.sh ci-run --recipe fast --epochs 3
#   deploy/ci/train.sh ci-run --epochs 2 --width 16        without DATA: generated images, to see that training learns at all
#
# $1: the run's folder; the rest goes to paramsync-train. PROCESSES: how many processes train (1). The commit is recorded from
# GITHUB_SHA or CI_COMMIT_SHA.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '3,9s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
'' | -*)
    echo "train.sh: name the run's folder first, for example deploy/ci/train.sh ci-run --epochs 2" >&2
    exit 2
    ;;
esac
run=$1
shift
if [ -z "${DATA:-}" ]; then
    DATA=$run.data
    [ -d "$DATA" ] || paramsync-synth "$DATA" --train 2000 --test 500
fi
mkdir -p "$run"
if [ "${PROCESSES:-1}" -gt 1 ]; then
    exec paramsync launch --nproc-per-node "$PROCESSES" -- paramsync-train --data_url "$DATA" --output_dir "$run" "$@"
fi
exec paramsync-train --data_url "$DATA" --output_dir "$run" "$@"
