#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test.
#
#   tests/run.sh                 everything: all tests, then the unit tests again under the sanitizers
#   tests/run.sh --quick         all tests once, no sanitizers
#   tests/run.sh -R REGEX ...    further arguments go to ctest (and imply --quick)
#
# Tests on real images run when CIFAR10_DIR names a folder with the CIFAR-10 batches; else they are reported as skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=0
ctest_args=()
for arg in "$@"; do
    case "$arg" in
    --quick) quick=1 ;;
    -h | --help)
        sed -n '2,8s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *)
        ctest_args+=("$arg")
        quick=1
        ;;
    esac
done

deploy/install-deps.sh --tests
jobs=$(nproc)
passed=0 failed=0 skipped=0 status=0

# run PRESET [ctest arguments]: builds the preset, runs its tests and adds up what they say.
run() {
    local preset=$1 report
    shift
    echo "== $preset"
    cmake --preset "$preset" >"build-$preset.log" 2>&1 || { cat "build-$preset.log"; rm -f "build-$preset.log"; echo "configuring $preset failed" >&2; exit 1; }
    rm -f "build-$preset.log"
    cmake --build --preset "$preset" -j "$jobs" | tail -n 3
    report=$PWD/build/$preset/tests.xml
    rm -f "$report"
    ctest --test-dir "build/$preset" --output-on-failure -j "$jobs" --output-junit "$report" "$@" || status=1
    local counts
    counts=$(python3 - "$report" <<'PY'
import sys, xml.etree.ElementTree as tree
suite = tree.parse(sys.argv[1]).getroot()
failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0) or 0)
skipped = int(suite.get("skipped", 0)) + int(suite.get("disabled", 0) or 0)
print(int(suite.get("tests", 0)) - failed - skipped, failed, skipped)
for case in suite.iter("testcase"):
    if case.find("skipped") is not None:
        print("skipped:", case.get("name"), file=sys.stderr)
PY
    ) || { status=1; counts="0 1 0"; }
    read -r p f s <<<"$counts"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

export TSAN_OPTIONS=${TSAN_OPTIONS:-ignore_noninstrumented_modules=1}
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=$PWD/tests/lsan.supp:print_suppressions=0}
run default "${ctest_args[@]}"
if [ "$quick" = 0 ]; then
    run asan -L unit
    run tsan -L unit
    run trainer-only -L unit
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$status" = 0 ]
