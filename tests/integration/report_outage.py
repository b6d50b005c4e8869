#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The trainer's reporter against a real paramsyncd that is killed, frozen, late or never there: the caller never waits,
and what was kept arrives exactly once."""
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from http_world import Sidecar, free_port, skip

driver = pathlib.Path(os.environ["PS_BUILD"]) / "tests" / "report_driver"
if not driver.exists():
    skip("report_driver is not built")
failures = []
# A call only takes a lock and copies; the slack is for a loaded machine. Any network wait would take longer.
QUICK = 1.0


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}")


class Driver:
    def __init__(self, port, run, rank=0, world=1, run_id=None, attempt=1, spool=None):
        words = [driver, f"127.0.0.1:{port}", run, str(rank), str(world)]
        if run_id is not None:
            words += [run_id, str(attempt)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **({"PS_SPOOL": str(spool)} if spool else {})})
        check("the reporter opens", self.process.stdout.readline() == "open\n")

    def say(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def quick(self, line):
        took = float(self.say(line))
        check(f"{line}: the call took {took:.3f} s", took < QUICK)

    def close(self, state="finished", timeout=60):
        answer = self.say(f"close {state} {timeout}")
        errors = self.process.communicate()[1]
        check(f"close: {answer!r} {errors}", answer == "closed" and self.process.returncode == 0)
        return errors


def wait_for(what, condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            check(f"in vain: {what}", False)
            return
        time.sleep(0.05)  # polling another process, not a synchronisation


def kill(sidecar):
    sidecar.process.send_signal(signal.SIGKILL)
    sidecar.process.wait()
    sidecar.channel.close()
    sidecar.log.close()


def freeze(sidecar):
    """SIGSTOP, and until every thread has taken notice."""
    sidecar.process.send_signal(signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{sidecar.process.pid}/task")
    wait_for("the freeze", lambda: all((t / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for t in tasks.iterdir()))


def stored(sidecar, run, rank=0, name="train/loss"):
    pb = sidecar.pb["metrics"]
    response = sidecar.metrics.QuerySeries(pb.QuerySeriesRequest(run=run, name=name, rank=rank, max_points=10000), timeout=20)
    series = [s for s in response.series if s.rank == rank]
    return (series[0] if series else None), response.epochs


def outage(sidecar, folder):
    """kill -9 in the middle; the run goes on, everything is there afterwards."""
    file = folder / "w.pth"
    file.write_bytes(os.urandom(3_000_000))
    d = Driver(sidecar.grpc_port, "outage")
    run_id, attempt, name = d.say("run").split()
    check("the run has its name and attempt", (attempt, name, len(run_id)) == ("1", "outage", 26))
    second = Driver(sidecar.grpc_port, "outage", 1, 2, run_id)
    d.quick("points 3000")
    second.quick("points 100")
    d.quick("epoch 1")
    wait_for("the first epoch", lambda: len(stored(sidecar, run_id)[1]) == 1)
    d.quick("points 1000")  # some of them on their way
    kill(sidecar)
    for _ in range(20):
        d.quick("points 100")
    second.quick("points 100")
    d.quick("epoch 2")
    d.quick(f"checkpoint 2 {file}")
    sidecar.start()
    d.quick("points 100")
    d.quick("epoch 3")
    errors = second.close()
    errors += d.close()
    check(f"the outage is told once per process: {errors}", errors.count("training goes on") <= 2)
    series, epochs = stored(sidecar, run_id)
    check(f"every point once: {series.total_points}", series.total_points == 6100 and
          list(series.steps) == list(range(6100)) and list(series.values) == list(range(6100)))
    check("every point of rank 1 once", list(stored(sidecar, run_id, 1)[0].steps) == list(range(200)))
    check("every epoch", [e.epoch for e in epochs] == [1, 2, 3])
    pb = sidecar.pb["checkpoints"]
    found = sidecar.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest(run=run_id), timeout=20).checkpoints
    check("the checkpoint", [(c.epoch, c.sha256) for c in found] == [(2, hashlib.sha256(file.read_bytes()).hexdigest())])
    runs = sidecar.pb["runs"]
    run = sidecar.runs.GetRun(runs.GetRunRequest(run=run_id), timeout=20)
    check(f"the run has finished: {run.state}", run.state == runs.RUN_STATE_FINISHED and run.elapsed_s >= 300)
    check("one job is one run", len(sidecar.runs.ListRuns(runs.ListRunsRequest(), timeout=20).runs) == 1)


def frozen(sidecar):
    """SIGSTOP: connections stay open, nobody answers."""
    d = Driver(sidecar.grpc_port, "frozen")
    run_id = d.say("run").split()[0]
    freeze(sidecar)
    for _ in range(10):
        d.quick("points 2000")
        d.quick("epoch 1")
    sidecar.process.send_signal(signal.SIGCONT)
    d.close()
    series, epochs = stored(sidecar, run_id)
    check("every point once after the thaw", series.total_points == 20000 and len(epochs) == 1)
    d = Driver(sidecar.grpc_port, "frozen to the end")
    freeze(sidecar)
    d.quick("epoch 1")
    begun = time.monotonic()
    errors = d.close(timeout=1)
    took = time.monotonic() - begun
    sidecar.process.send_signal(signal.SIGCONT)
    check(f"close waits as long as it was told: {took:.1f} s", took < 10)
    check(f"what was not delivered is told: {errors}", "not delivered" in errors and "1 epochs" in errors)


def spooled(sidecar, folder):
    """Outages longer than a process: what waits lies on the disk, and whoever reports from there next delivers it."""
    spool = folder / "spool"
    files = lambda: sorted(spool.glob("*.spool")) if spool.exists() else []
    d = Driver(sidecar.grpc_port, "spooled", spool=spool)
    run_id = d.say("run").split()[0]
    d.quick("points 1000")
    wait_for("the first points", lambda: stored(sidecar, run_id)[0] and stored(sidecar, run_id)[0].total_points == 1000)
    check("nothing on the disk while the sidecar answers", not files())
    kill(sidecar)
    for _ in range(30):
        d.quick("points 1000")
    wait_for("points on the disk", lambda: files() and files()[0].stat().st_size > 100_000)
    sidecar.start()  # the same process goes on: the spool is emptied
    wait_for("the points of the outage", lambda: stored(sidecar, run_id)[0].total_points == 31000)
    wait_for("an empty spool", lambda: not files() or files()[0].stat().st_size == 0)
    kill(sidecar)
    for _ in range(5):
        d.quick("points 1000")
    wait_for("points on the disk again", lambda: files() and files()[0].stat().st_size > 10_000)
    d.process.kill()  # the training dies in the middle of the outage
    d.process.communicate()
    check("they stay there", len(files()) == 1)

    d = Driver(free_port(), "spooled elsewhere", spool=spool)  # cannot deliver them
    d.quick("epoch 1")
    d.close(timeout=0.3)
    check("and are not lost by one who cannot deliver them", len(files()) == 1)

    sidecar.start()
    d = Driver(sidecar.grpc_port, "spooled next", spool=spool)
    wait_for("what was left", lambda: stored(sidecar, run_id)[0].total_points > 31000)
    next_id = d.say("run").split()[0]
    d.quick("points 10")
    d.close()
    pb = sidecar.pb["metrics"]
    steps = []
    for first in range(0, 40000, 8000):  # what reached the disk before the end: all of it, once, from the first on
        part = sidecar.metrics.QuerySeries(pb.QuerySeriesRequest(run=run_id, name="train/loss", rank=0, from_step=first,
                                                                 to_step=first + 7999, max_points=10000), timeout=20)
        steps += list(part.series[0].steps) if part.series else []
    check(f"every point once: {len(steps)}", steps == list(range(len(steps))))
    check("and the new run's own", stored(sidecar, next_id)[0].total_points == 10)
    check(f"nothing is left on the disk: {files()}", not files())

    # A training that ends while the sidecar is away: points, epoch and end wait for the next one.
    d = Driver(sidecar.grpc_port, "ended", spool=spool)
    ended = d.say("run").split()[0]
    kill(sidecar)
    d.quick("points 500")
    d.quick("epoch 1")
    errors = d.close(timeout=1)
    check(f"it says where they are: {errors}", f"kept in {spool}" in errors)
    sidecar.start()
    d = Driver(sidecar.grpc_port, "after it", spool=spool)
    runs = sidecar.pb["runs"]
    wait_for("its end", lambda: sidecar.runs.GetRun(runs.GetRunRequest(run=ended), timeout=20).state == runs.RUN_STATE_FINISHED)
    series, epochs = stored(sidecar, ended)
    check("its points and its epoch", series.total_points == 500 and [e.epoch for e in epochs] == [1])
    d.close()
    check("the folder is empty", not files())


def late(sidecar):
    """Nobody there at the start: the run appears when the sidecar does."""
    sidecar.stop()
    d = Driver(sidecar.grpc_port, "late")
    check("no id yet", d.say("run") == "- 0 -")
    d.quick("points 500")
    d.quick("epoch 1")
    sidecar.start()
    wait_for("the run", lambda: d.say("run") != "- 0 -")
    run_id = d.say("run").split()[0]
    d.close()
    series, epochs = stored(sidecar, run_id)
    check("what was said before the run existed", series.total_points == 500 and len(epochs) == 1)


def late_for_ranks(sidecar, folder):
    """Nobody there when two ranks begin: rank 1, too, is recorded once there is somebody."""
    program = pathlib.Path(os.environ["PS_BIN"])
    if not (program / "paramsync-train").exists() or not list(pathlib.Path(os.environ["PS_BUILD"]).glob("lib/paramsync/*gloo*")):
        return
    subprocess.run([program / "paramsync-synth", folder / "data", "--train", "64", "--test", "16"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sidecar.stop()
    port = free_port()
    ranks = [subprocess.Popen(
        [program / "paramsync-train", "--data_url", folder / "data", "--output_dir", folder / "out", "--width", "2",
         "--resolution", "8", "--batch", "16", "--enable_gpu", "false", "--backend", "ref", "--epochs", "100000",
         "--eval_every", "1000", "--sidecar", f"127.0.0.1:{sidecar.grpc_port}", "--run", "ranks",
         "--init_method", f"tcp://127.0.0.1:{port}", "--world_size", "2", "--rank", str(rank)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        wait_for("the first checkpoint", lambda: (folder / "out" / "epoch_1.safetensors").exists() or ranks[0].poll() is not None)
        sidecar.start()

        def points_of_rank_1():
            try:
                return stored(sidecar, "ranks", 1, "loss")[0].total_points
            except Exception:  # no such run yet
                return 0

        wait_for("points of rank 1", lambda: points_of_rank_1() > 0 or ranks[1].poll() is not None)
        check("rank 1 is recorded", points_of_rank_1() > 0)
    finally:
        for rank in ranks:
            rank.terminate()
        errors = [rank.communicate()[1] for rank in ranks]
    # Rank 1 may hear of rank 0's end before the signal reaches it.
    check(f"both ranks end as told: {errors}", ranks[0].returncode == 143 and ranks[1].returncode in (143, 1))


def never():
    d = Driver(free_port(), "never")
    d.quick("points 500")
    d.quick("epoch 1")
    errors = d.close(timeout=0.5)
    check(f"told at the end: {errors}", "not delivered" in errors and "500 step points" in errors and "training goes on" in errors)
    d = Driver(free_port(), "never")
    d.quick("epoch 1")
    begun = time.monotonic()
    errors = d.close(timeout=60)
    took = time.monotonic() - begun
    check(f"who is not there is given up before the time is over: {took:.1f} s", took < 40 and "1 epochs" in errors)
    d = Driver(free_port(), "never", 1, 2, "")
    d.quick("points 10")
    check("a rank that cannot join says so", "rank 1" in d.close())


with tempfile.TemporaryDirectory() as name:
    with Sidecar() as sidecar:
        outage(sidecar, pathlib.Path(name))
        frozen(sidecar)
        spooled(sidecar, pathlib.Path(name))
        late(sidecar)
        late_for_ranks(sidecar, pathlib.Path(name))
    never()
sys.exit(1 if failures else 0)
