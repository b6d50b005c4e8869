#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gRPC's interop cases against our RPC runtime: run.py cc | js."""
import os
import pathlib
import shutil
import subprocess
import sys

SOURCE, BUILD = pathlib.Path(os.environ["PS_SOURCE"]), pathlib.Path(os.environ["PS_BUILD"])


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def node_modules():
    work = BUILD / "tests/interop"
    work.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "client.mjs"):
        shutil.copy(SOURCE / "tests/interop" / name, work / name)
    stamp, lock = work / "node_modules/.installed", (work / "package-lock.json").read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        result = subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], cwd=work,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            skip("@grpc/grpc-js cannot be installed: " + result.stderr.strip().split("\n")[0])
        stamp.write_text(lock)
    return work


def main():
    server_program = BUILD / "tests/rpc_probe_server"
    if not server_program.exists():
        skip("rpc_probe_server is not built")
    if sys.argv[1] == "cc":
        client = [BUILD / "tests/interop_client"]
        if not client[0].exists():
            skip("interop_client is not built: no libgrpc++")
    else:
        if not shutil.which("node") or not shutil.which("npm"):
            skip("no node with npm")
        client = ["node", node_modules() / "client.mjs"]
    server = subprocess.Popen([server_program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        extra = [] if sys.argv[1] == "cc" else [SOURCE / "tests/proto", "/usr/share/grpc-proto"]
        status = subprocess.run([*map(str, client), address, *map(str, extra)], timeout=150).returncode
        server.stdin.close()
        if server.wait(30):
            sys.exit("the server ends badly")
        sys.exit(status)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


main()
