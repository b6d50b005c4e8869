#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line against a real paramsyncd: exit statuses, tables to the letter, pull that resumes and never keeps
damaged bytes, the gate's truth table."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
import xml.etree.ElementTree as xml

from http_world import Sidecar, free_port, skip

program = pathlib.Path(os.environ["PS_BIN"]) / "paramsync"
if not program.exists():
    skip("paramsync is not built")
failures = []


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}")


def equal(what, got, wanted):
    if got != wanted:
        failures.append(what)
        print(f"FAILED: {what}\n--- got\n{got}\n--- wanted\n{wanted}")


class Cli:
    def __init__(self, port, folder):
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PARAMSYNC_")}
        self.environment["PARAMSYNC_SIDECAR"] = f"127.0.0.1:{port}"
        self.folder = folder

    def __call__(self, *words, status=0, stdin=None, **environment):
        result = subprocess.run([program, *map(str, words)], input=stdin, capture_output=True, timeout=120, cwd=self.folder,
                                env={**self.environment, **environment})
        out, err = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
        if result.returncode != status:
            check(f"{words}: exit {result.returncode}, wanted {status}\n{out}{err}", False)
        return out, err

    def start(self, *words, **more):
        return subprocess.Popen([program, *map(str, words)], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **more)


def width(line):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in line)


def fits(what, text):
    check(f"{what}: a line is wider than 80 columns:\n{text}", all(width(line) <= 80 for line in text.splitlines()))


def help_and_usage(cli):
    out, _ = cli("--help")
    names = re.findall(r"^  (\w+) +\w", out.split("Commands:")[1], re.M)
    check(f"commands listed: {names}", names[:6] == ["runs", "show", "watch", "pull", "push", "compare"])
    fits("--help", out)
    for name in names:
        text, _ = cli(name, "--help")
        fits(f"{name} --help", text)
        check(f"{name} --help begins with an example", text.startswith("Example:\n  "))
        equal(f"help {name}", cli("help", name)[0], text)
    version, _ = cli("--version")
    check(f"--version: {version!r}", re.fullmatch(r"paramsync \d+\.\d+\.\d+\n", version))
    for words, text in (((), ""), (("frobnicate",), "no such command"), (("runs", "--lmit", "3"), "--limit"),
                        (("show",), "usage"), (("show", "a", "b"), "one word too many"), (("pull", "a", "--epoch", "0"), "--epoch"),
                        (("pull", "a", "--epoch", "x"), "--epoch"), (("pull", "a", "--best", "--epoch", "1"), "one of"),
                        (("compare", "a", "--target", "80"), "--target"), (("gate",), "usage"),
                        (("gate", "a"), "--min-accuracy"), (("gate", "a", "--min-accuracy", "1.5"), "--min-accuracy"),
                        (("gate", "a", "--min-accuracy", "80"), "--min-accuracy"),
                        (("gate", "a", "--min-accuracy", "0.8", "--max-time", "soon"), "--max-time"),
                        (("tail",), "--run"), (("tail", "--run", "x" * 201), "--run"),
                        (("runs", "--sidecar", "nowhere"), "sidecar address")):
        _, err = cli(*words, status=2)
        if words:
            check(f"{words}: one line that names it: {err!r}", err.count("\n") == 1 and text in err)


def nobody_there(cli):
    port = free_port()
    for words, status in ((("runs",), 1), (("show", "x"), 1), (("pull", "x"), 1), (("compare", "x"), 1), (("export", "x"), 1),
                          (("watch", "x"), 1), (("gate", "x", "--min-accuracy", "0.8"), 2)):
        _, err = cli(*words, "--sidecar", f"127.0.0.1:{port}", status=status)
        check(f"{words}: {err!r}", err.count("\n") == 1 and f"127.0.0.1:{port}" in err)
    # tail goes on without a sidecar and says so at the end.
    out, err = cli("tail", "--run", "x", "--sidecar", f"127.0.0.1:{port}", "--timeout", "0.2s", status=1,
                   stdin=b"val | epoch: 1 | loss: 1 | accuracy: 0.5\n")
    check(f"tail passes through: {out!r}", out == "val | epoch: 1 | loss: 1 | accuracy: 0.5\n")
    check(f"tail tells what is lost: {err!r}", "1 epochs" in err)


def record(sidecar):
    common = {"model": "resnet18", "dataset": "CIFAR-10, JPEG re-encoded", "dataset_hash": "abc123", "epochs_planned": 4}
    ids = {}

    def run(name, world, accuracies, seconds, rate, state="RUN_STATE_FINISHED", **fields):
        r = sidecar.create(name, world, **{**common, "batch_per_rank": 128, "config": {"width": 64, "lr": "0.01"}, **fields})
        for i, accuracy in enumerate(accuracies):
            sidecar.epoch(r.id, i + 1, accuracy, loss=1.0 / (i + 1), seconds=seconds, rate=rate)
        if state:
            sidecar.finish(r.id, state, elapsed=seconds * len(accuracies))
        ids[name] = r.id

    run("single", 1, [0.5, 0.7, 0.7999, 0.8], 300.0, 500.0)
    run("double", 2, [0.45, 0.65, 0.81, 0.82], 170.0, 900.0, config={"width": 64, "lr": "0.02"})
    run("late", 1, [0.7, 0.8], 600.05, 100.0)
    run("short", 1, [0.7, 0.7999], 100.0, 100.0)
    run("other data", 1, [0.9], 10.0, 100.0, dataset_hash="zzz")
    run("nan", 1, [0.9, float("nan")], 10.0, 100.0)
    run("open", 1, [0.9], 10.0, 100.0, state=None)
    run("failed", 1, [0.9], 10.0, 100.0, state="RUN_STATE_FAILED")
    run("empty", 1, [], 10.0, 100.0)
    run("跑步/a \"q\"", 2, [0.9], 10.0, 100.0)
    return ids


def lists(cli, ids):
    out, _ = cli("runs")
    fits("runs", out)
    lines = out.splitlines()
    check(f"runs: header and every run:\n{out}", lines[0].startswith("NAME") and len(lines) == 1 + len(ids))
    at = lines[0].index("STATE")
    for line in lines[1:]:
        prefix = ""
        while width(prefix) < at:
            prefix = line[:len(prefix) + 1]
        check(f"runs: columns line up: {line!r}", re.match(r"(finished|running|failed) ", line[len(prefix):]))
    check("runs: no colours in a pipe", "\x1b" not in out)
    runs = json.loads(cli("runs", "--json", "--limit", "0")[0])
    equal("runs --json", sorted(r["name"] for r in runs), sorted(ids))
    equal("runs --name", [r["name"] for r in json.loads(cli("runs", "--json", "--name", "dou")[0])], ["double"])
    equal("flags before the command's words", cli("show", "--json", "single")[0], cli("show", "single", "--json")[0])
    shown = json.loads(cli("show", ids["single"], "--json")[0])
    equal("show --json", (shown["name"], shown["world_size"], len(shown["epochs"]), shown["config"]),
          ("single", 1, 4, {"width": "64", "lr": "0.01"}))
    out, _ = cli("show", "single")
    fits("show", out)
    check(f"show:\n{out}", "    4      0.2500    0.2750   80.00 %      500.0  20 min 00 s" in out)
    nan = json.loads(cli("show", "nan", "--json")[0])
    equal("NaN travels as a string", nan["epochs"][1]["accuracy"], "NaN")
    _, err = cli("show", "nobody", status=1)
    check(f"an unknown run is named: {err!r}", "nobody" in err and err.count("\n") == 1)
    _, err = cli("show", "a\x1b[31mb\nc", status=1)
    check(f"hostile words are escaped: {err!r}", "\x1b" not in err and err.count("\n") == 1)
    # Somebody closes the pipe: an error, not a death by signal.
    process = cli.start("runs")
    process.stdout.close()
    process.wait(60)
    check("a closed pipe", process.returncode in (0, 1))
    process.stderr.close()


def compare(cli):
    out, _ = cli("compare", "single", "double", "sample-16")
    equal("compare", out, """\
RUN        RANKS  EPOCHS    BEST  TOTAL  TO 80%  IMG/S  SPEED  EFF.
*single        1       4  80.00%  20:00   20:00  500.0  1.00x  100%
double         2       4  82.00%  11:20    8:30  900.0  1.80x   90%
sample-16     16     100   >=80%  20:00       -      -      -     -

* reference of speed-up (SPEED, by images/s) and efficiency (EFF.)
single: target reached with epoch 4 (80.00 %); the evaluation before, after 15
min, had 79.99 %
double: target reached with epoch 3 (81.00 %); the evaluation before, after 5
min 40.0 s, had 65.00 %; time to target 2.35x
double: differs from the reference (its value last): lr 0.02 / 0.01
sample-16: published totals of 100 epochs, not a time to target
""")
    o = json.loads(cli("compare", "single", "double", "sample-1", "--json")[0])
    equal("compare --json", [(r["name"], r["time_to_target_s"], r["speedup"], r["efficiency"]) for r in o["rows"]],
          [("single", 1200.0, 1.0, 1.0), ("double", 510.0, 1.8, 0.9), ("sample-1", None, None, None)])
    o = json.loads(cli("compare", "double", "--baseline", "single", "--json", "--target", "0.7")[0])
    equal("compare --baseline", (o["reference"], o["rows"][0]["efficiency"], o["rows"][0]["time_to_target_s"]),
          ("single", 0.9, 510.0))
    o = json.loads(cli("compare", "single", "other data", "--json")[0])
    check("other data is refused", o["rows"][1]["speedup"] is None and "other data" in o["rows"][1]["refusal"])
    fits("compare with long names", cli("compare", "single", "other data", "nan", "open", "跑步/a \"q\"", "sample-1")[0])


def gate(cli, folder):
    at80 = ("--min-accuracy", "80%")
    for words, status, text in (
            (("single", *at80), 0, "verdict: pass"),
            (("single", *at80, "--max-time", "20min"), 0, "verdict: pass"),
            (("single", "--min-accuracy", "0.8", "--max-time", "1199.9s"), 1, "time to 80.00 %"),
            (("late", *at80, "--max-time", "20min"), 1, "20 min 00.1 s"),  # 80 % at 20:00.1
            (("short", *at80, "--max-time", "20min"), 1, "79.99 %"),  # 79.99 % is not 80 %
            (("short", *at80), 1, "79.99 %"),
            (("single", *at80, "--max-total-time", "20min"), 0, "verdict: pass"),
            (("single", *at80, "--max-total-time", "19min"), 1, "total time"),
            (("nan", *at80), 1, "accuracy of epoch 2 is nan"),
            (("open", *at80), 2, "running"),
            (("failed", *at80), 2, "failed"),
            (("empty", *at80), 2, "none recorded"),
            (("nobody", *at80), 2, None),
            (("single", "--baseline", "sample-1"), 0, "verdict: pass"),
            (("late", "--baseline", "sample-16"), 1, "published for 100 epochs on 16 cards"),
            (("double", *at80, "--baseline", "single"), 0, "verdict: pass"),
            (("single", *at80, "--baseline", "double"), 1, "against baseline"),
            (("single", *at80, "--baseline", "other data"), 2, "other data"),
            (("single", *at80, "--baseline", "open"), 2, "baseline is running"),
            (("single", *at80, "--baseline", "nobody"), 2, None),
            (("single", *at80, "--baseline", "./missing.json"), 2, None),
            (("single", "late", *at80, "--max-time", "20min"), 1, "n=2"),
            (("single", "double", *at80), 2, "world size 2"),
            (("single", "single", *at80), 2, "named twice"),
            (("sample-1", *at80), 2, None)):
        out, err = cli("gate", *words, status=status)
        fits(f"gate {words}", out)
        flat = " ".join(out.split())
        check(f"gate {words}: {out}{err}", text in flat if text else (not out and err.count("\n") == 1))
    o = json.loads(cli("gate", "late", *at80, "--max-time", "20min", "--json", "--junit", "junit.xml", "--markdown", "gate.md",
                       status=1)[0])
    check(f"gate --json: {o}", o["verdict"] == "fail" and o["exit"] == 1 and o["n"] == 1 and o["time_to_target_s"]["median"] > 1200)
    suite = xml.parse(folder / "junit.xml").getroot().find("testsuite")
    equal("junit", (suite.get("failures"), suite.get("errors")), ("1", "0"))
    check("markdown", "| fail |" in (folder / "gate.md").read_text())
    cli("gate", "跑步/a \"q\"", *at80, "--junit", "junit.xml")
    check("junit names the run", xml.parse(folder / "junit.xml").getroot().find(".//testcase").get("classname") == "跑步/a \"q\"")
    _, err = cli("gate", "single", *at80, "--junit", "no/such/folder/x.xml", status=2)
    check(f"an unwritable report: {err!r}", "no/such/folder" in err)
    # A baseline kept as a file is pinned: it judges like the run itself where its provenance is met or left free; a
    # broken one cannot.
    cli("export", "double", "-o", "base.json")
    cli("gate", "single", *at80, "--baseline", "base.json", status=2)
    flat = " ".join(cli("gate", "single", *at80, "--baseline", "base.json", "--free", "commit,world-size,device", status=1)[0].split())
    check(f"baseline from a file: {flat}", "against baseline" in flat)
    for text in ("", "{}", "[1]", "nonsense", '{"paramsync_export": 1, "run": {}, "epochs": [{}]}'):
        (folder / "broken.json").write_text(text)
        cli("gate", "single", *at80, "--baseline", "broken.json", status=2)


def export(cli):
    csv, _ = cli("export", "nan", "--format", "csv")
    lines = csv.split("\r\n")
    check(f"csv: {csv}", lines[0].startswith("run,started,attempt,epoch") and len(lines) == 4 and ",nan," in lines[2])
    o = json.loads(cli("export", "single")[0])
    equal("export", [e["accuracy"] for e in o["epochs"]], [0.5, 0.7, 0.7999, 0.8])


def transfer(cli, sidecar, folder):
    data = os.urandom(5_000_000)
    (folder / "epoch_1.safetensors").write_bytes(data)
    (folder / "epoch_2.safetensors").write_bytes(data[:1000])
    out, _ = cli("push", "single", "epoch_1.safetensors", "--epoch", "1", "--accuracy", "0.9")
    check(f"push: {out}", "epoch 1, accuracy 90.00 %, 5.0 MB, sha256 " in out)
    cli("push", "single", "epoch_2.safetensors", "--epoch", "2", "--accuracy", "10%")
    cli("push", "single", "nothing", "--epoch", "1", status=1)
    cli("push", "nobody", "epoch_1.safetensors", "--epoch", "1", status=1)
    for flags, wanted in (((), data[:1000]), (("--latest",), data[:1000]), (("--best",), data), (("--epoch", "1"), data)):
        cli("pull", "single", *flags, "-o", "out")
        equal(f"pull {flags}", (folder / "out").read_bytes() == wanted, True)
    cli("pull", "single", "--epoch", "7", status=1)
    cli("pull", "single", "--format", "pth", status=1)
    (folder / "sub").mkdir()
    out, _ = cli("pull", "single", "--best", "--output", "sub", "--json")
    equal("pull into a folder", (json.loads(out)["path"], (folder / "sub/epoch_1.safetensors").read_bytes() == data),
          ("sub/epoch_1.safetensors", True))
    cli("pull", "single", "--best", "-o", "no/such/folder/x", status=1)

    # Killed half-way: what is there is the beginning, and the next pull goes on from it.
    (folder / "out").unlink()
    big = os.urandom(1 << 20) * 100
    (folder / "big.pth").write_bytes(big)
    cli("push", "double", "big.pth", "--epoch", "1")
    process = cli.start("pull", "double", "-o", "big.out")
    part = folder / "big.out.part"
    while process.poll() is None and not (part.exists() and part.stat().st_size > 1 << 20):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    killed = not (folder / "big.out").exists()
    if killed:  # it may have been faster than us
        before = part.stat().st_size
        check("the part is the file's beginning", part.read_bytes() == big[:before])
    cli("pull", "double", "-o", "big.out")
    equal("pull after kill -9", (folder / "big.out").read_bytes() == big, True)
    check("no part file stays", not part.exists())

    # A byte that rots on the sidecar's disk: DATA_LOSS, and nothing under the name.
    blobs = [p for p in pathlib.Path(sidecar.dir, "data").rglob("*") if p.is_file() and p.stat().st_size == len(data)]
    check("the blob is found", len(blobs) == 1)
    with open(blobs[0], "r+b") as blob:
        blob.seek(1234567)
        byte = blob.read(1)
        blob.seek(1234567)
        blob.write(bytes([byte[0] ^ 1]))
    _, err = cli("pull", "single", "--best", "-o", "spoilt", status=1)
    check(f"a flipped bit: {err!r}", not (folder / "spoilt").exists() and err.count("\n") == 1)


def watch_and_tail(cli, sidecar):
    lines = b"".join(b"train | epoch: %d | loss: %.4f\n" % (e, 1 / e) * 2 + b"val | epoch: %d | loss: 0.5 | accuracy: %.4f \n\n" % (e, a)
                     + b"val | epoch: %d | loss: 0.7 | accuracy: %.4f \n\n" % (e, a + 0.1) for e, a in ((1, 0.4), (2, 0.6)))
    out, err = cli("tail", "--run", "tailed", "--world-size", "2", "--model", "resnet18", stdin=b"hello\n" + lines + b"\xff\x00 end")
    check("tail passes every byte through", subprocess.run([program, "tail", "--run", "bytes"], input=b"a\xff\x00b", env=cli.environment,
                                                           capture_output=True).stdout == b"a\xff\x00b")
    run = json.loads(cli("show", "tailed", "--json")[0])
    equal("tail folds two processes into one", (run["state"], run["world_size"], [(e["epoch"], round(e["accuracy"], 6), round(e["val_loss"], 6),
                                                                               e["train_loss"]) for e in run["epochs"]]),
          ("finished", 2, [(1, 0.45, 0.6, 1.0), (2, 0.65, 0.6, 0.5)]))
    equal("tail without epochs", json.loads(cli("show", "bytes", "--json")[0])["state"], "failed")

    run = sidecar.create("watched", 1, model="resnet18")
    sidecar.epoch(run.id, 1, 0.5)
    process = cli.start("watch", "watched")
    first = process.stdout.readline().decode()
    check(f"watch: {first!r}", first.startswith("epoch   1 ") and "accuracy 50.00 %" in first)
    sidecar.epoch(run.id, 2, 0.6)
    second = process.stdout.readline().decode()
    check(f"watch: {second!r}", second.startswith("epoch   2 "))
    sidecar.finish(run.id, elapsed=20.0)
    rest = process.communicate(timeout=60)[0].decode()
    check(f"watch ends with the run: {rest!r}", process.returncode == 0 and rest.endswith("finished\n"))
    out, _ = cli("watch", "failed", status=1)
    check(f"watch of a failed run: {out!r}", out.endswith("failed\n"))


def tokens(folder):
    with Sidecar(token="s3cret") as sidecar:
        cli = Cli(sidecar.grpc_port, folder)
        (folder / "token").write_text("s3cret\n")
        (folder / "wrong").write_text("wrong\n")
        cli("runs", status=1)
        cli("runs", "--token-file", "wrong", status=1)
        cli("gate", "x", "--min-accuracy", "0.8", "--token-file", "wrong", status=2)
        cli("runs", "--token-file", "token")
        cli("runs", PARAMSYNC_TOKEN="s3cret")
        _, err = cli("tail", "--run", "x", "--token-file", "wrong", status=1, stdin=b"")
        check(f"tail with a wrong token: {err!r}", err.count("\n") >= 1 and "s3cret" not in err)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    with Sidecar() as sidecar:
        cli = Cli(sidecar.grpc_port, folder)
        begun = time.monotonic()
        help_and_usage(cli)
        nobody_there(cli)
        equal("no runs yet", cli("runs")[0], "no runs\n")
        ids = record(sidecar)
        lists(cli, ids)
        compare(cli)
        gate(cli, folder)
        export(cli)
        transfer(cli, sidecar, folder)
        watch_and_tail(cli, sidecar)
    tokens(folder)
    print(f"{time.monotonic() - begun:.1f} s")
sys.exit(1 if failures else 0)
