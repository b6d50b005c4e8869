#!/usr/bin/env bash
# Installs what paramsync needs on Debian 12 and nothing that is there already. Safe to run again.
#
#   deploy/install-deps.sh             what building and running need
#   deploy/install-deps.sh --tests     also what the tests need (PyTorch and Chromium among it)
#   deploy/install-deps.sh --list      print the packages that are missing and stop
set -euo pipefail

want_tests=0
list_only=0
for arg in "$@"; do
    case "$arg" in
    --tests) want_tests=1 ;;
    --list) list_only=1 ;;
    -h | --help)
        sed -n '2,7s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *)
        echo "install-deps.sh: unknown argument $arg (--tests, --list)" >&2
        exit 2
        ;;
    esac
done

# Debian 12 freezes versions: a package name is a pinned version there.
packages=(
    build-essential cmake ninja-build pkg-config ca-certificates curl python3
    libgrpc-dev protobuf-compiler protobuf-c-compiler libprotobuf-c-dev libprotobuf-dev grpc-proto
    libsqlite3-dev libmicrohttpd-dev libjansson-dev libssl-dev libarchive-dev libinih-dev
    libdnnl-dev libgloo-dev
)
if [ "$want_tests" = 1 ]; then
    packages+=(
        git libcmocka-dev clang clang-format clang-tidy libclang-rt-14-dev
        libgrpc++-dev protobuf-compiler-grpc python3-numpy python3-torch python3-grpcio python3-grpc-tools python3-pil
        sqlite3 iproute2 procps xz-utils chromium fonts-noto-cjk
        nginx-light prometheus shellcheck strace python3-yaml openssl systemd man-db
    )
fi
# Any node from 18 on will do; Debian's own comes with npm as a package of its own.
node_ok() {
    command -v node >/dev/null && command -v npm >/dev/null &&
        [ "$(node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0)" -ge 18 ]
}
node_ok || packages+=(nodejs npm)

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done

if [ "$list_only" = 1 ]; then
    [ ${#missing[@]} = 0 ] || printf '%s\n' "${missing[@]}"
    exit 0
fi
[ ${#missing[@]} != 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "install-deps.sh: no apt-get here; this script is for Debian 12. Install by hand: ${missing[*]}" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "install-deps.sh: run me as root, or install sudo; missing: ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "Installing ${#missing[@]} packages: ${missing[*]}" >&2
"${as_root[@]}" apt-get update -q >&2
# RUNLEVEL=1: what the tests need of nginx and Prometheus are the programs, not services that listen.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
