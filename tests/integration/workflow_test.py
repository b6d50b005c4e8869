#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What people already have: scripts run under `paramsync tail`, and scripts that use the Python module."""
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from http_world import Sidecar, free_port, skip

bin_dir, source = pathlib.Path(os.environ["PS_BIN"]), pathlib.Path(os.environ["PS_SOURCE"])
if not (bin_dir / "paramsync").exists():
    skip("paramsync is not built")
failures = []


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}")


class Cli:
    def __init__(self, sidecar, folder):
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PARAMSYNC_")}
        self.environment["PARAMSYNC_SIDECAR"] = f"127.0.0.1:{sidecar.grpc_port}"
        self.folder, self.pb = folder, sidecar.pb

    def start(self, *words, **more):
        return subprocess.Popen([bin_dir / "paramsync", *map(str, words)], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **more)

    def __call__(self, *words, status=0, stdin=b""):
        process = self.start(*words, stdin=subprocess.PIPE)
        out, err = (s.decode() for s in process.communicate(stdin, timeout=100))
        if process.returncode != status:
            check(f"{words}: exit {process.returncode}, wanted {status}\n{out}{err}", False)
        return out, err

    def show(self, run):
        return json.loads(self("export", run)[0])


LINES = "train | epoch: 1 | loss: 1.5000\nval | epoch: 1 | loss: 1.2500 | accuracy: 0.5000 \n\n"


def tail(cli):
    say = f"printf '{LINES}'".replace("\n", "\\n")
    for name, script, status, state, reason in (
            ("good", say, 0, "finished", ""), ("crashed", say + "; exit 3", 3, "failed", "exit status 3"),
            ("shot", say + "; kill -9 $$", 137, "failed", "signal 9"), ("silent", "echo hello", 0, "failed", "without an epoch"),
            # What a child leaves running may hold the pipe: the command's end is what counts.
            ("daemon", say + "; sleep 30 2>/dev/null & exit 0", 0, "finished", "")):
        begun = time.monotonic()
        out, err = cli("tail", "--run", name, "--world-size", "16", "--commit", "c0ffee", "--", "sh", "-c", script, status=status)
        run = cli.show(name)["run"]
        check(f"{name}: {run}", run["state"] == state and reason in run["reason"] and run["world_size"] == 16 and run["commit"] == "c0ffee")
        check(f"{name} passes through: {out!r}", out == (LINES if name != "silent" else "hello\n"))
        check(f"{name} takes no longer than the command", time.monotonic() - begun < 25)
    for words, status, text in ((("--", "/no/such/program"), 1, "/no/such/program"), (("--val-regex", "(", "--", "true"), 2, "--val-regex"),
                                (("--train-regex", "x", "--", "true"), 2, "epoch and loss")):
        _, err = cli("tail", "--run", "never", *words, status=status)
        check(f"{words}: {err!r}", text in err and err.count("\n") == 1)
    check("none of these made a run", "never" not in cli("runs")[0])
    # A pipe: how the script ended can't be known, but that it ended early can.
    cli("tail", "--run", "piped", stdin=LINES.encode())
    cli("tail", "--run", "cut", "--epochs", "3", stdin=LINES.encode())
    check("piped", cli.show("piped")["run"]["state"] == "finished")
    run = cli.show("cut")["run"]
    check(f"cut: {run}", run["state"] == "failed" and "after epoch 1 of 3" in run["reason"])
    # Other scripts' lines.
    other = "Epoch 1/2 trn_loss=2.0 val_loss=1.5 top1=40.0%\nEpoch 2/2 trn_loss=1.0 val_loss=1.25 top1=50.0%\n"
    cli("tail", "--run", "other", "--train-regex", r"Epoch (\d+)/\d+ trn_loss=([0-9.]+)",
        "--val-regex", r"Epoch (?<epoch>\d+)/.*val_loss=(?<loss>[0-9.]+) top1=(?<accuracy>[0-9.]+%)", stdin=other.encode())
    epochs = cli.show("other")["epochs"]
    check(f"other lines: {epochs}", [(e["train_loss"], e["val_loss"], e["accuracy"]) for e in epochs] == [(2.0, 1.5, 0.4), (1.0, 1.25, 0.5)])
    # Lines come at once: through a pipe, from Python, though it would hold them back.
    script = "import sys; print('train | epoch: 1 | loss: 1.0'); sys.stdin.readline(); print('end')"
    process = cli.start("tail", "--run", "at once", "--", sys.executable, "-c", script, stdin=subprocess.PIPE)
    check("the first line comes before the end", process.stdout.readline().startswith(b"train"))
    process.stdin.write(b"go\n")
    process.stdin.close()
    check("at once", process.wait(60) == 0 and process.stdout.read() == b"end\n")
    process.stdout.close(), process.stderr.close()
    # A signal to us goes to the command.
    script = say + "; trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    process = cli.start("tail", "--run", "stopped", "--", "sh", "-c", script)
    while process.stdout.readline().strip() != b"ready":
        pass
    process.send_signal(signal.SIGTERM)
    check(f"status after a signal: {process.wait(60)}", process.returncode == 5)
    process.stdout.close(), process.stderr.close()
    check("stopped", cli.show("stopped")["run"]["state"] == "killed")
    # Nobody listens: the training does not care.
    port = free_port()
    out, err = cli("tail", "--run", "x", "--sidecar", f"127.0.0.1:{port}", "--timeout", "0.2s", "--", "sh", "-c", say + "; exit 4", status=4)
    check(f"no sidecar: {out!r} {err!r}", out == LINES and str(port) in err)


def need_torch():
    try:
        import torch  # noqa: F401
    except ImportError:
        skip("no python3-torch")


def torch_tail(cli):
    """A PyTorch script as it is: DDP, two processes that both print."""
    need_torch()
    script = source / "tests/integration/torch_sample.py"
    out, _ = cli("tail", "--run", "torch", "--world-size", "2", "--model", "resnet18", "--epochs", "2", "--", sys.executable, script,
                 "--port", free_port(), "--crash", "2", status=1)
    o = cli.show("torch")
    check(f"torch: {o['run']}", o["run"]["state"] == "failed" and o["run"]["reason"] == "exit status 1" and [e["epoch"] for e in o["epochs"]] == [1, 2])
    check("both ranks' lines pass", out.count("train | epoch: 2 |") == 2)
    shown = [float(line.split("accuracy:")[1]) for line in out.splitlines() if line.startswith("val | epoch: 2")]
    check("accuracy as printed", abs(o["epochs"][1]["accuracy"] - shown[0]) < 1e-9)
    cli("gate", "torch", "--min-accuracy", "0.1", status=2)


def torch_module(cli):
    """The same script, which reports through paramsync.py: two ranks, forked DataLoader workers, checkpoints."""
    need_torch()
    import torch
    script = source / "tests/integration/torch_sample.py"
    words = [sys.executable, script, "--port", str(free_port()), "--report", "module", "--checkpoint", cli.folder / "epoch_%d.pth"]
    done = subprocess.run(words, env=cli.environment, capture_output=True, text=True, timeout=200)
    check(f"module: {done.stderr}", done.returncode == 0 and "paramsync" not in done.stderr)
    o = cli.show("module")
    run, epochs = o["run"], o["epochs"]
    check(f"module: {run}", (run["state"], run["world_size"], run["model"], run["config"]["lr"], run["batch_per_rank"]) ==
          ("finished", 2, "resnet18", "0.01", 32) and [e["epoch"] for e in epochs] == [1, 2] and epochs[0]["samples_per_s"] > 0)
    shown = [float(line.split("accuracy:")[1]) for line in done.stdout.splitlines() if line.startswith("val | epoch: 2")]
    check("accuracy as printed", abs(epochs[1]["accuracy"] - shown[0]) < 1e-4)
    steps = json.loads(cli("export", "module", "--series", "loss")[0])["series"]
    check(f"steps: {steps}", [(s["rank"], s["steps"]) for s in steps] == [(0, [1, 2, 3, 4])])
    out = cli.folder / "pulled.pth"
    cli("pull", "module", "--epoch", "1", "-o", out)
    check("the checkpoint", out.read_bytes() == (cli.folder / "epoch_1.pth").read_bytes() and len(torch.load(out)) == 122)


def module(cli):
    """paramsync.py against the .proto files, odd values, an absent sidecar, exceptions, checkpoints."""
    os.environ["PARAMSYNC_SIDECAR"] = cli.environment["PARAMSYNC_SIDECAR"]
    # Not by its name: the generated modules of this test's sidecar are in a package called paramsync.
    spec = importlib.util.spec_from_file_location("paramsync_module", source / "services/client/python/paramsync.py")
    paramsync = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paramsync)
    import http_world
    from google.protobuf import timestamp_pb2
    kinds = {1: "d", 4: "u", 13: "u", 5: "i", 3: "i", 8: "b", 9: "s", 12: "y", 14: "u"}
    known = {"Timestamp": timestamp_pb2.Timestamp.DESCRIPTOR}
    for pb in cli.pb.values():
        known.update(pb.DESCRIPTOR.message_types_by_name)
        for service in pb.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                ours = paramsync.METHODS.get(method.name)
                if ours and ours[0] == service.name:
                    check(f"{method.name}", ours[1:] == (method.input_type.name, method.output_type.name))
    for name, fields in paramsync.MESSAGES.items():
        theirs = [(f.number, f.name, ("*" if f.label == 3 else "") + (f.message_type.name if f.message_type else kinds[f.type]))
                  for f in known[name].fields]
        check(f"{name}: {fields} {theirs}", set(fields) <= set(theirs))
    for size in (0, 1, 2, 3, 1000, 65537):
        data = os.urandom(size)
        check(f"crc32c of {size}", paramsync.crc32c(data) == http_world.crc32c(data))
    nan = float("nan")
    with paramsync.run("odd", config={"a": 1, "b": "ü"}, tags=["t"], notes="n", commit="c0ffee") as r:
        r.step(1, loss=nan, **{"grad/norm": 1e308})
        for i in range(20000):
            r.step(i + 2, loss=float(i))
        r.epoch(1, train_loss=1.0, val_loss=nan, accuracy=0.0)
        r.epoch(2, train_loss=-0.0)
        for bad in (lambda: r.epoch(0), lambda: r.epoch(1, accuracy=80), lambda: r.step(1, **{"a b": 1})):
            try:
                bad()
                check("bad values are refused", False)
            except ValueError:
                pass
        if os.fork() == 0:  # a forked child says nothing, and does not hang
            r.step(99999, loss=1.0)
            r.close("failed", "child")
            os._exit(0)
        os.wait()
    o = json.loads(cli("export", "odd", "--series", "loss")[0])
    check(f"odd: {o['run']}", (o["run"]["state"], o["run"]["commit"], o["run"]["config"], o["run"]["tags"], o["run"]["notes"]) ==
          ("finished", "c0ffee", {"a": "1", "b": "ü"}, ["t"], "n"))
    check("its epochs", [(e["evaluated"], e.get("val_loss")) for e in o["epochs"]] == [(True, "NaN"), (False, None)])
    check("its steps", o["series"][0]["total_points"] == 20001 and o["series"][0]["values"][0] == "NaN")
    for name, error, state, reason in (("raises", ZeroDivisionError("by\nzero"), "failed", "ZeroDivisionError: by zero"),
                                       ("stopped by hand", KeyboardInterrupt(), "killed", "KeyboardInterrupt"), ("leaves", SystemExit(0), "finished", "")):
        try:
            with paramsync.run(name) as r:
                raise error
        except BaseException as e:
            check(f"{name}: the exception goes on", e is error)
        run = paramsync.get_run(name)
        check(f"{name}: {run}", (run["state"], run["reason"]) == (state, reason))
    with paramsync.run("odd") as r:
        pass
    check(f"a taken name: {r.name}", r.name == "odd-2")
    with paramsync.run("odd", resume=True) as r:
        pass
    check(f"resumed: {r.attempt}", (r.name, r.attempt) == ("odd", 2))
    # A rank of another process, by id.
    with paramsync.run("ranks", world_size=2) as r:
        while not r.id:
            time.sleep(0.01)  # polling another thread's work, bounded by the test's timeout
        with paramsync.run("ranks", rank=1, run_id=r.id, attempt=r.attempt) as other:
            other.step(1, loss=2.0)
        r.step(1, loss=1.0)
    series = json.loads(cli("export", "ranks", "--series", "loss")[0])["series"]
    check(f"ranks: {series}", [(s["rank"], s["values"]) for s in series] == [(0, [1.0]), (1, [2.0])])
    # Checkpoints.
    data = os.urandom(700001)
    (cli.folder / "w.pth").write_bytes(data)
    paramsync.push("odd", cli.folder / "w.pth", 1, accuracy=0.5)
    out = str(cli.folder / "got.pth")
    pathlib.Path(out + ".part").write_bytes(data[:300000])  # goes on
    check("pull", paramsync.pull("odd", out) == out and pathlib.Path(out).read_bytes() == data and not os.path.exists(out + ".part"))
    for part in (os.urandom(1000), os.urandom(800000)):  # another file's beginning
        pathlib.Path(out + ".part").write_bytes(part)
        os.unlink(out)
        check("pull afresh", paramsync.pull("odd", out, best=True) == out and pathlib.Path(out).read_bytes() == data)
    script = [sys.executable, source / "services/client/python/paramsync.py"]
    done = subprocess.run([*script, "pull", "nobody"], env=cli.environment, capture_output=True, text=True, timeout=60)
    check(f"one line: {done.stderr}", done.returncode == 1 and done.stderr.count("\n") == 1)
    # Nobody there: the training goes on; when it comes, everything arrives.
    begun = time.monotonic()
    with paramsync.run("alone", sidecar=f"127.0.0.1:{free_port()}", close_timeout=0.5) as r:
        for i in range(1000):
            r.step(i, loss=1.0)
        r.epoch(1, train_loss=1.0, val_loss=1.0, accuracy=0.5)
        check("calls return at once", time.monotonic() - begun < 5)
    check(f"gives up: {time.monotonic() - begun}", time.monotonic() - begun < 15 and r.id == "")


parts = {"tail": tail, "torch_tail": torch_tail, "torch_module": torch_module, "module": module}
with tempfile.TemporaryDirectory() as name, Sidecar() as sidecar:
    for part in sys.argv[1:] or parts:
        begun = time.monotonic()
        parts[part](Cli(sidecar, pathlib.Path(name)))
        print(f"{part}: {time.monotonic() - begun:.1f} s")
sys.exit(1 if failures else 0)
