#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Judges the run folders that it is given and leaves report/gate.md, gate.xml (JUnit) and gate.json. Its status is the gate's: 0 pass,
# 1 fail, 2 cannot decide; a pipeline that takes 2 for a pass has no gate.
#
#   MIN_ACCURACY=80% MAX_TIME=20min deploy/ci/gate.sh ci-run
#   BASELINES=baselines.json BASELINE=release deploy/ci/gate.sh ci-run-1 ci-run-2 ci-run-3
#
# MIN_ACCURACY, MAX_TIME, MAX_TOTAL_TIME, BASELINES with BASELINE (or BASELINE alone: sample-1, sample-16, a run folder), MIN_RUNS.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '3,9s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
'')
    echo "gate.sh: name a run's folder, for example MIN_ACCURACY=80% deploy/ci/gate.sh ci-run" >&2
    exit 2
    ;;
esac
runs=()
for run in "$@"; do
    case "$run" in
    /* | ./*) runs+=("$run") ;;
    *) runs+=("./$run") ;; # a path, not a name at a sidecar
    esac
done
words=()
[ -z "${MIN_ACCURACY:-}" ] || words+=(--min-accuracy "$MIN_ACCURACY")
[ -z "${MAX_TIME:-}" ] || words+=(--max-time "$MAX_TIME")
[ -z "${MAX_TOTAL_TIME:-}" ] || words+=(--max-total-time "$MAX_TOTAL_TIME")
[ -z "${BASELINES:-}" ] || words+=(--baselines "$BASELINES")
[ -z "${BASELINE:-}" ] || words+=(--baseline "$BASELINE")
[ -z "${MIN_RUNS:-}" ] || words+=(--min-runs "$MIN_RUNS")
mkdir -p report
status=0
paramsync gate "${runs[@]}" "${words[@]}" --markdown report/gate.md --junit report/gate.xml --json >report/gate.json || status=$?
if [ -s report/gate.json ]; then
    cat report/gate.md
else # bad usage, or no run: what was wrong stands on stderr
    printf '## paramsync gate: cannot decide\n\nIt could not be asked: see the log.\n' >report/gate.md
fi
exit "$status"
