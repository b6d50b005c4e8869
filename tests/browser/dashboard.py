#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The dashboard in real Chromium: starts a paramsyncd, records runs over gRPC and lets dashboard.mjs look at the pages.
The two talk over pipes: dashboard.mjs writes a line with what should happen to a run, this end answers "done"."""
import contextlib
import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(os.environ["PS_SOURCE"])
BUILD = pathlib.Path(os.environ["PS_BUILD"])
sys.path.insert(0, str(SOURCE / "tests/integration"))
from http_api import step_times  # noqa: E402
from http_world import Sidecar, skip  # noqa: E402
import nginx_world  # noqa: E402

TOKEN = "a-token+with/signs&more="
HOSTILE = '<img src=x onerror="window.hacked=1">'


def node_modules():
    """A copy of the test with its packages in the build folder, so that the source tree stays as it is."""
    work = BUILD / "tests/browser"
    work.mkdir(parents=True, exist_ok=True)
    for name in ["package.json", "package-lock.json", ".npmrc", "chromium.mjs", "dashboard.mjs", "screenshot.mjs"]:
        shutil.copy(SOURCE / "tests/browser" / name, work / name)
    stamp = work / "node_modules/.installed"
    lock = (work / "package-lock.json").read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        result = subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], cwd=work,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            skip("playwright-core cannot be installed: " + result.stderr.strip().split("\n")[0])
        stamp.write_text(lock)
    return work


def curve(sidecar, run, epochs, seconds, rate, seed, top=0.86, speed=3.0):
    noise = random.Random(seed)
    for e in range(1, epochs + 1):
        accuracy = top * (1 - math.exp(-e / speed)) + noise.gauss(0, 0.006)
        sidecar.epoch(run.id, e, accuracy, loss=2.2 * math.exp(-e / 5) + 0.15, val_loss=2.1 * math.exp(-e / 4.5) + 0.42 + noise.gauss(0, 0.02),
                      seconds=seconds, rate=rate * (1 + noise.gauss(0, 0.01)), lr=0.05 * (1 - e / (epochs + 1)))


def main():
    if not shutil.which("node") or not shutil.which("npm"):
        skip("no node with npm")
    if not pathlib.Path(os.environ.get("PS_CHROMIUM", "/usr/bin/chromium")).exists():
        skip("no chromium")
    page = BUILD / "web/dist/index.html"
    if page.exists() and "left out of this build" in page.read_text():
        skip("the dashboard was left out of this build")
    work = node_modules()
    shots = BUILD / "screenshots"
    shots.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack, Sidecar("--lost-after", "10min") as sidecar, Sidecar(token=TOKEN) as guarded:
        guarded.create("behind-the-token", 1)
        job = dict(model="resnet18", dataset="CIFAR-10, generated", dataset_hash="5f1c9e20aa7301bd", device="CPU, 2 threads", epochs_planned=20, batch_per_rank=128)
        options = {"optimizer": "sgd", "schedule": "onecycle", "seed": 1, "precision": "fp32", "augment": "standard"}
        single = sidecar.create("single", 1, config={**options, "lr": 0.01, "world_size": 1}, **job)
        curve(sidecar, single, 20, 40, 1200, 1)
        sidecar.finish(single.id, elapsed=802)
        double = sidecar.create("dp-2", 2, config={**options, "lr": 0.02, "world_size": 2}, **job)
        curve(sidecar, double, 20, 21.5, 2280, 2)
        sidecar.steps(double.id, [("loss", i, math.nan if i == 300 else 2 * math.exp(-i / 700) + 0.2 + 0.1 * math.sin(i), i * 0.1) for i in range(4000)])
        sidecar.put(double.id, 20, b"not really weights" * 1000)
        sidecar.finish(double.id, elapsed=431)
        bad = sidecar.create(HOSTILE, 1, **{**job, "dataset_hash": "other", "dataset": HOSTILE}, notes=HOSTILE, config={"key": HOSTILE})
        sidecar.epoch(bad.id, 1, math.nan, loss=math.nan, val_loss=math.inf)
        sidecar.finish(bad.id, "RUN_STATE_FAILED", reason=HOSTILE)
        live = sidecar.create("live", 2, config={**options, "lr": 0.02, "world_size": 2}, **job)
        curve(sidecar, live, 3, 21, 2300, 3)

        sixteen = sidecar.create("dp-16", 16, config={**options, "lr": 0.16, "world_size": 16, "plan.step_s": 0.108, "plan.efficiency": 0.81}, **job)
        curve(sidecar, sixteen, 20, 3.4, 15200, 4)
        step_times(sidecar, sixteen, 16, late=5)
        sidecar.finish(sixteen.id, elapsed=69)

        nginx = stack.enter_context(nginx_world.Nginx(sidecar.port)) if nginx_world.program() else None
        facts = dict(proxied=nginx.url if nginx else None, guarded=f"http://127.0.0.1:{guarded.port}/", token=TOKEN, grpc=sidecar.grpc_port, url=f"http://127.0.0.1:{sidecar.port}/", shots=str(shots), hostile=HOSTILE,
                     ids=dict(single=single.id, double=double.id, bad=bad.id, live=live.id, sixteen=sixteen.id),
                     compare=sidecar.json(f"/api/v1/compare?runs={single.id},{double.id}")["rows"],
                     runs={r["name"]: r for r in sidecar.json("/api/v1/runs")["runs"]})
        node = subprocess.Popen(["node", "dashboard.mjs", json.dumps(facts)], cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for line in node.stdout:
            words = line.split()
            if not words or words[0] != "do":
                print(line, end="")
                continue
            if words[1] == "epoch":
                sidecar.epoch(live.id, int(words[2]), float(words[3]), loss=0.7, seconds=21, rate=2310)
            elif words[1] == "finish":
                sidecar.finish(live.id)
            elif words[1] == "create":
                sidecar.create(words[2], 1, **job)
            elif words[1] == "train":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paramsync-browser-"))
                training = subprocess.Popen([pathlib.Path(os.environ["PS_BIN"], "paramsync-train"), "--custom_data", "true", "--width", "2", "--epochs", "2", "--enable_gpu", "false", "--batch",
                                             "50", "--train_images", "100", "--test_images", "50", "--output_dir", f"{folder}/out", "--sidecar", f"127.0.0.1:{sidecar.grpc_port}",
                                             "--run", "real-training"], stdout=subprocess.DEVNULL)
            elif words[1] == "trained":
                if training.wait(120):
                    sys.exit(f"paramsync-train ended with {training.returncode}")
            elif words[1] == "create-ended":
                sidecar.finish(sidecar.create(words[2], 1, **job).id)
            elif words[1] == "beat":
                beat = sidecar.pb["runs"].HeartbeatRequest(run=live.id, rank=1, attempt=1, elapsed_s=1, step=9, points_sent=1234, points_dropped=3, points_waiting=7,
                                                           spool_bytes=4096, rss_bytes=1 << 20, wall_s=time.time() + 3600, log=["a line of <b>rank 1</b>"], first_line=1)
                sidecar.runs.Heartbeat(beat, timeout=10)
            elif words[1] == "many":
                many = [sidecar.create(f"many-{i:04d}", 1, **job).id for i in range(int(words[2]))]
            elif words[1] == "unmany":
                for one in many:
                    sidecar.finish(one)
                    sidecar.request("DELETE", f"/api/v1/runs/{one}")
            elif words[1] == "stop":
                sidecar.stop()
            elif words[1] == "start":
                sidecar.start()
            node.stdin.write("done\n")
            node.stdin.flush()
        status = node.wait()
    sys.exit(status)


if __name__ == "__main__":
    main()
