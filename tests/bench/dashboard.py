#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What a full sidecar costs its readers: first paint with many runs, the API's p50 and p99, and the CPU that open dashboards
take while a run is live.

PS_SOURCE=. PS_BUILD=build/default PS_BIN=build/default/bin tests/bench/dashboard.py [RUNS [EPOCHS [POINTS [DASHBOARDS]]]]
defaults: 1000 runs of 20 epochs, one run of 1000000 points, 50 dashboards. For the first paint the browser test must have
been run once (it installs playwright-core).
"""
import contextlib
import http.client
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

SOURCE = pathlib.Path(os.environ.get("PS_SOURCE", ".")).resolve()
os.environ["PS_SOURCE"] = str(SOURCE)
BUILD = pathlib.Path(os.environ.get("PS_BUILD", "build/default")).resolve()
os.environ.setdefault("PS_BIN", str(BUILD / "bin"))
sys.path.insert(0, str(SOURCE / "tests/integration"))
from http_world import Sidecar  # noqa: E402

PAINT = """
import { open } from "./chromium.mjs";
const [url, rounds] = [process.argv[2], Number(process.argv[3])];
for (let i = 0; i < rounds; i++) {
  const browser = await open();
  try {
    await browser.page.goto("about:blank");
    await browser.page.goto(url, { waitUntil: "commit" });
    const row = await browser.page.waitForFunction(() => document.querySelector("tr[data-run]") && performance.now());
    const paint = await browser.page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN);
    console.log(JSON.stringify({ paint, rows: await row.jsonValue() }));
  } finally {
    await browser.close();
  }
}
"""


def fill(sidecar, runs, epochs):
    """Many calls under way at a time: they share transactions."""
    pb, calls = sidecar.pb["metrics"], []
    for i in range(runs):
        run = sidecar.create(f"run-{i:05d}", 1 + i % 16, model="resnet18", dataset="generated", dataset_hash="d", epochs_planned=epochs, tags=[f"sweep-{i % 7}"])
        for e in range(1, epochs + 1):
            calls.append(sidecar.metrics.ReportEpoch.future(pb.ReportEpochRequest(
                run=run.id, epoch=e, accuracy=0.86 * (1 - math.exp(-e / 5)), train_loss=2 / e, val_loss=2.1 / e, lr=0.01, samples_per_s=1000 + i,
                elapsed_s=10.0 * e, train_s=9, eval_s=1, step=100 * e, counted=1000), timeout=120))
        if len(calls) > 512:
            for call in calls:
                call.result()
            calls = []
    for call in calls:
        call.result()


def points(sidecar, run, count):
    pb = sidecar.pb["metrics"]

    def batches():
        for seq, first in enumerate(range(0, count, 5000)):
            batch = pb.StepBatch(run=run, rank=0, attempt=1, seq=seq + 1)
            for i in range(first, min(count, first + 5000)):
                batch.points.add(name="loss", step=i, value=1 / (i + 1), elapsed_s=i * 0.01)
            yield batch
    for _ in sidecar.metrics.ReportSteps(batches(), timeout=3600):
        pass


def latencies(sidecar, path, count):
    connection = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=60)
    took = []
    with contextlib.closing(connection):
        for _ in range(count + 5):
            begin = time.perf_counter()
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            took.append((time.perf_counter() - begin) * 1e3)
            if response.status != 200:
                sys.exit(f"{path}: {response.status} {body[:200]}")
    took = sorted(took[5:])
    print(f"{path.split('/api/v1/')[1][:64]:66s} p50 {statistics.median(took):7.2f} ms   p99 {took[int(len(took) * 0.99) - 1]:7.2f} ms   {len(body) / 1024:7.1f} KiB")


def cpu_s(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Reader(threading.Thread):
    """A run's page: an event stream, everything read again after an event, the step series every five seconds."""

    def __init__(self, sidecar, run, end):
        super().__init__(daemon=True)
        self.sidecar, self.run_id, self.end, self.asked = sidecar, run, end, 0

    def get(self, path):
        self.sidecar.get(f"/api/v1/runs/{self.run_id}{path}")
        self.asked += 1

    def run(self):
        stream = http.client.HTTPConnection("127.0.0.1", self.sidecar.port, timeout=30)
        with contextlib.closing(stream):
            stream.request("GET", "/api/v1/events")
            response = stream.getresponse()
            last = 0.0
            while time.monotonic() < self.end:
                line = response.readline()
                if line.startswith(b"event: run"):
                    for path in ["", "/series", "/checkpoints", "/events", "/log?lines=60"]:
                        self.get(path)
                if time.monotonic() - last > 5:
                    last = time.monotonic()
                    self.get("/series?name=loss&rank=-1&max_points=2000")


def open_dashboards(sidecar, run, count, seconds):
    number = [0]

    def measure(readers):
        end = time.monotonic() + seconds
        threads = [Reader(sidecar, run.id, end) for _ in range(readers)]
        for thread in threads:
            thread.start()
        begin, cpu = time.monotonic(), cpu_s(sidecar.process)
        while time.monotonic() < end:
            number[0] += 1
            sidecar.epoch(run.id, number[0], 0.5, seconds=5)
            time.sleep(max(0, min(5, end - time.monotonic())))
        share = (cpu_s(sidecar.process) - cpu) / (time.monotonic() - begin)
        for thread in threads:
            thread.join(40)
        return share, sum(thread.asked for thread in threads)
    idle, _ = measure(0)
    busy, asked = measure(count)
    print(f"{count} dashboards on a live run with an epoch every 5 s: {100 * (busy - idle):.2f} % of a core ({asked} requests in {seconds} s; without them {100 * idle:.2f} %)")


def main():
    runs, epochs, count, dashboards = [int(x) for x in (sys.argv[1:] + ["1000", "20", "1000000", "50"][len(sys.argv) - 1:])]
    with Sidecar("--lost-after", "1h") as sidecar:
        begin = time.monotonic()
        fill(sidecar, runs, epochs)
        long = sidecar.create("long", 1, model="resnet18", dataset="generated", dataset_hash="d")
        points(sidecar, long.id, count)
        print(f"{runs} runs of {epochs} epochs and one of {count} points, stored in {time.monotonic() - begin:.0f} s; load {os.getloadavg()[0]:.1f}")
        first = sidecar.json("/api/v1/runs?sort=created&limit=1")["runs"][0]["id"]
        for path in ["/api/v1/runs?sort=-created&offset=0&limit=100", f"/api/v1/runs?sort=-created&offset={runs // 2}&limit=100", "/api/v1/runs?sort=-accuracy&limit=100",
                     "/api/v1/runs?sort=name&q=run-0001&limit=100", "/api/v1/runs?sort=ttt&limit=100", f"/api/v1/runs/{first}", f"/api/v1/runs/{first}/series",
                     f"/api/v1/runs/{long.id}/series?name=loss&max_points=2000", f"/api/v1/runs/{long.id}/series?name=loss&from=1000&to=3000&smooth=0.9", "/api/v1/status"]:
            latencies(sidecar, path, 200)
        browser = BUILD / "tests/browser"
        if (browser / "node_modules").exists():
            (browser / "paint.mjs").write_text(PAINT)
            out = subprocess.run(["node", "paint.mjs", f"http://127.0.0.1:{sidecar.port}/", "5"], cwd=browser, capture_output=True, text=True, timeout=300, check=True).stdout
            took = [json.loads(line) for line in out.splitlines()]
            print(f"first paint {statistics.median(t['paint'] for t in took):.0f} ms, rows there after {statistics.median(t['rows'] for t in took):.0f} ms (medians of {len(took)}, cold browser)")
        live = sidecar.create("live", 1, model="resnet18", dataset="generated", dataset_hash="d")
        open_dashboards(sidecar, live, dashboards, 30)


if __name__ == "__main__":
    main()
