#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`paramsync plan` against the clock: one rank's traced step, then two ranks (Gloo) in two network namespaces whose link
has a set delay and rate (slow_link.c). Needs root. What other work takes of the cores moves these figures.

    PS_BIN=build/default/bin /usr/bin/python3 tests/bench/plan_validate.py [--width 32] [--steps 40] [--rounds 3] [DELAY_MS:MBIT ...]

Each round measures the single step anew, by two independent processes at once, one on each core, so that both sides of the
comparison share caches and memory; then a pair that computes next to nothing, whose all-reduces tell the link's latency and
bandwidth as Gloo gets them (as one would ask nccl-tests); then the pair whose step was predicted.

On a machine that others use too, the cores of one run are not those of the next. So the step is predicted a second time from the
pair's own trace: from how long it computed and when its buckets were full. That leaves what the plan is about: the links and
what of them backward hides."""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

BIN = os.environ["PS_BIN"]
TRAIN, CLI, SYNTH = (os.path.join(BIN, n) for n in ("paramsync-train", "paramsync", "paramsync-synth"))
parser = argparse.ArgumentParser()
parser.add_argument("links", nargs="*", default=["0.5:1000", "2:400", "10:200", "1:100"])
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--resolution", type=int, default=16)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--copy", type=float, default=4, help="GB/s at which this machine copies gradients")
parser.add_argument("--rounds", type=int, default=3)
options = parser.parse_args()
work = tempfile.mkdtemp(prefix="ps_plan.")
names = [f"pl{os.getpid()}n{i}" for i in range(2)]


def sh(*command):
    subprocess.run(command, check=True)


def make_namespaces():
    for name in names:
        sh("ip", "netns", "add", name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
        # A flow that rests between two steps starts at full speed again, as a tuned cluster has it.
        sh("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")


def make_link(delay_ms, mbit):
    """The process that is the link; end it to be rid of it."""
    link = subprocess.Popen([os.path.join(work, "slow_link"), *names, str(delay_ms), str(mbit)], stdout=subprocess.PIPE, text=True)
    if link.stdout.readline() != "ready\n":
        sys.exit("slow_link did not start")
    for i, name in enumerate(names):
        sh("ip", "-n", name, "addr", "add", f"10.98.0.{i + 1}/24", "dev", "v0")
        sh("ip", "-n", name, "link", "set", "v0", "up")
    return link


def run(tag, pair, batch=options.batch, resolution=options.resolution):
    ranks = []
    for i in range(2):
        flags = ["--init_method", "tcp://10.98.0.1:6060", "--world_size", "2", "--rank", str(i)] if pair else []
        ranks.append(subprocess.Popen(
            ["ip", "netns", "exec", names[i], "taskset", "-c", str(i), TRAIN, "--data_url", f"{work}/data", "--width", str(options.width),
             "--batch", str(batch), "--resolution", str(resolution), "--epochs", "1", "--enable_gpu", "false",
             "--threads", "1", "--train_images", str(options.steps * batch * (2 if pair else 1)), "--test_images", "100",
             "--output_dir", f"{work}/{tag}{i}", "--trace", f"{work}/{tag}{i}.json" if not pair else f"{work}/{tag}.json", *flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for rank in ranks:
        err = rank.communicate()[1]
        if rank.returncode:
            sys.exit(err)


def spans(tag):
    with open(f"{work}/{tag}.json") as f:
        return [e for e in json.load(f)["traceEvents"] if e["ph"] == "X"]


def step_times(tag):
    begins = [e["ts"] / 1e6 for e in spans(tag) if e["name"] == "input wait"]
    times = [b - a for a, b in zip(begins, begins[1:])]
    return times[len(times) // 4:]


def reduces(tag):
    """Median seconds of each bucket's all-reduce."""
    by_bucket = {}
    for e in spans(tag):
        if e["name"] == "all-reduce":
            by_bucket.setdefault(e["args"]["bucket"], []).append(e["dur"] / 1e6)
    return [statistics.median(times[len(times) // 4:]) for _, times in sorted(by_bucket.items())]


def plan(alpha_s, rate, tag="one0", copy=options.copy):
    return json.loads(subprocess.run(
        [CLI, "plan", "--trace", f"{work}/{tag}.json", "--cards", "1,2", "--cards-per-node", "1", "--algorithm", "ring", "--json",
         "--copy", str(copy), "--inter", f"{alpha_s * 1e6}us:{rate / 1e9}"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout)["predictions"]


def link_figures(sizes, times):
    """Latency and bandwidth of the line through (bytes, seconds) of two ranks' rings: 2 alpha + n / B."""
    if len(sizes) < 2:
        return 0, sizes[0] / times[0]
    mean_n, mean_t = statistics.fmean(sizes), statistics.fmean(times)
    slope = sum((n - mean_n) * (t - mean_t) for n, t in zip(sizes, times)) / sum((n - mean_n) ** 2 for n in sizes)
    return max((mean_t - slope * mean_n) / 2, 0), 1 / slope


sh("cc", "-O2", "-D_GNU_SOURCE", "-o", f"{work}/slow_link", os.path.join(os.path.dirname(__file__), "slow_link.c"))
make_namespaces()
try:
    sh(SYNTH, f"{work}/data", "--train", str(options.steps * options.batch * 2), "--test", "100")
    print(f"width {options.width}, batch {options.batch}, {options.resolution} pixels, {options.steps} steps; link: delay, rate")
    for link in options.links:
        delay, mbit = (float(x) for x in link.split(":"))
        rows = []
        for _ in range(options.rounds):
            run("one", False)
            sizes = [bucket["bytes"] for bucket in plan(0, 1e9)[1]["buckets"]]
            process = make_link(delay, mbit)
            try:
                run("idle", True, batch=1, resolution=8)  # hardly any computing: the link alone
                run("pair", True)
            finally:
                process.terminate()
                process.wait()
            alpha, rate = link_figures(sizes, reduces("idle"))
            one, two = plan(alpha, rate)
            measured = statistics.median(step_times("pair"))
            error = two["step_s"] / measured - 1
            own = plan(alpha, rate, "pair", 0)[1]["step_s"] / measured - 1
            rows.append((error, own))
            print(f"  alone {one['step_s'] * 1e3:.1f} ms, predicted {two['step_s'] * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms, "
                  f"{100 * error:+.1f} %, from the pair's own computing {100 * own:+.1f} %; all-reduces predicted {two['reduce_s'] * 1e3:.1f} ms, measured {sum(reduces('pair')) * 1e3:.1f} ms; "
                  f"link as measured {alpha * 1e3:.2f} ms, {rate * 8 / 1e6:.0f} Mbit/s", flush=True)
        print(f"{delay:g} ms {mbit:g} Mbit/s: median error {100 * statistics.median(r[0] for r in rows):+.1f} %, from the pair's own "
              f"computing {100 * statistics.median(r[1] for r in rows):+.1f} %", flush=True)
finally:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False)
    shutil.rmtree(work, ignore_errors=True)
