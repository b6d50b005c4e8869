#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What people already have: scripts run under `paramsync tail`, and scripts that use the Python module."""
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
        self.folder = folder

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


parts = {"tail": tail}
with tempfile.TemporaryDirectory() as name, Sidecar() as sidecar:
    for part in sys.argv[1:] or parts:
        begun = time.monotonic()
        parts[part](Cli(sidecar, pathlib.Path(name)))
        print(f"{part}: {time.monotonic() - begun:.1f} s")
sys.exit(1 if failures else 0)
