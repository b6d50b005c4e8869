#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""All-reduce between two processes on this machine, ours and PyTorch's (Gloo) by turns: the best of a run, medians over runs, and their ratio.

PS_BUILD=build/default tests/bench/allreduce.py [ROUNDS]
"""
import os
import re
import statistics
import subprocess
import sys

SIZES = {"ResNet-18's gradients": 44695848, "10 KB": 10000}

TORCH = """
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%s" % sys.argv[3], rank=int(sys.argv[1]), world_size=2)
v, took = torch.zeros(int(sys.argv[2]) // 4), []
for i in range(12 if len(v) >= 100000 else 200):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(v)
    took.append(time.perf_counter() - start)
if sys.argv[1] == "0":
    print("all_reduce best_ms %f" % (min(took[2:]) * 1e3))
"""


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pair(command):
    other = subprocess.Popen(command(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    out = subprocess.run(command(0), capture_output=True, text=True, timeout=300, check=False)
    other.wait(60)
    found = re.search(r"all_reduce .*best_ms ([\d.]+)", out.stdout)
    if not found:
        sys.exit(f"failed: {out.stderr}")
    return float(found.group(1))


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    driver = os.path.join(os.environ.get("PS_BUILD", "build/default"), "tests", "dist_driver")
    for name, size in SIZES.items():
        ours, theirs = [], []
        for _ in range(rounds):
            port = free_port()
            ours.append(pair(lambda r: [driver, "bench", "--bytes", str(size), "--init_method", f"tcp://127.0.0.1:{port}",
                                        "--rank", str(r), "--world_size", "2"]))
            port = free_port()
            theirs.append(pair(lambda r: [sys.executable, "-c", TORCH, str(r), str(size), str(port)]))
        a, b = statistics.median(ours), statistics.median(theirs)
        print(f"{name} ({size} bytes): ours {a:.2f} ms, PyTorch with Gloo {b:.2f} ms, ratio {a / b:.2f} (below 1: ours is faster)")


if __name__ == "__main__":
    main()
