#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""rpc_noop.py BUILD_FOLDER [ROUNDS]: our RPC server and gRPC's C++ server in turns, the same client (ours) for both;
medians and their ratio, and what each server needs while nothing happens. Build first:
    cmake --build BUILD_FOLDER --target rpc_noop rpc_probe_server rpc_noop_server"""
import os
import statistics
import subprocess
import sys
import time

build = sys.argv[1] if len(sys.argv) > 1 else "build/default"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
servers = {"ours": f"{build}/tests/rpc_probe_server", "C++": f"{build}/tests/rpc_noop_server"}
results = {name: {} for name in servers}


def cpu_s(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def at_rest(pid):
    """Share of a core over three seconds, and MiB resident."""
    before = cpu_s(pid)
    time.sleep(3)
    share = (cpu_s(pid) - before) / 3
    resident = int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"rest_cpu_percent": 100 * share, "rest_mib": resident}


for _ in range(rounds):
    for name, program in servers.items():
        server = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            port = int(server.stdout.readline())
            rest = at_rest(server.pid)
            before = cpu_s(server.pid)
            out = subprocess.run([f"{build}/tests/rpc_noop", f"127.0.0.1:{port}"], check=True, capture_output=True, text=True).stdout
            rest["server_cpu_s"] = cpu_s(server.pid) - before
            for key, value in [*(line.split() for line in out.splitlines()), *rest.items()]:
                results[name].setdefault(key, []).append(float(value))
        finally:
            server.stdin.close()
            server.wait(timeout=20)
for key in results["ours"]:
    ours, other = (statistics.median(results[name][key]) for name in servers)
    print(f"{key:18} ours {ours:10.1f}   C++ {other:10.1f}   ratio {ours / other if other else float('nan'):.2f}")
