#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs out to other programs' files and back in: TensorBoard, CSV, JSON lines, PyTorch, ONNX. Damaged files make no run."""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import time

from http_world import Sidecar, crc32c, skip

bin_dir, source, build = (pathlib.Path(os.environ[n]) for n in ("PS_BIN", "PS_SOURCE", "PS_BUILD"))
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
        self.folder, self.sidecar = folder, sidecar

    def __call__(self, *words, status=0):
        done = subprocess.run([bin_dir / "paramsync", *map(str, words)], cwd=self.folder, env=self.environment, capture_output=True,
                              text=True, timeout=100)
        if done.returncode != status:
            check(f"{words}: exit {done.returncode}, wanted {status}\n{done.stdout}{done.stderr}", False)
        if status == 2:
            check(f"{words}: one line: {done.stderr!r}", done.stderr.count("\n") == 1)
        return done.stdout + done.stderr

    def show(self, run, *more):
        return json.loads(self("export", run, *more))


def event_type(folder):
    """TensorBoard's Event as its own .proto files number it."""
    from google.protobuf import descriptor_pool, message_factory, descriptor_pb2
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="tb", syntax="proto3")
    for name, fields in (("Value", (("tag", 1, 9), ("simple_value", 2, 2))), ("Summary", (("value", 1, "Value"),)),
                         ("Event", (("wall_time", 1, 1), ("step", 2, 3), ("file_version", 3, 9), ("summary", 5, "Summary")))):
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            if isinstance(kind, str):
                message.field.add(name=field, number=number, type=11, type_name=f".tb.{kind}", label=3 if field == "value" else 1)
            else:
                message.field.add(name=field, number=number, type=kind, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.MessageFactory(pool).GetPrototype(pool.FindMessageTypeByName("tb.Event"))


def read_events(path, kind):
    data, at = path.read_bytes(), 0
    mask = lambda crc: ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF  # noqa: E731
    while at < len(data):
        length, sum1 = struct.unpack_from("<QI", data, at)
        record = data[at + 12:at + 12 + length]
        sum2, = struct.unpack_from("<I", data, at + 12 + length)
        assert sum1 == mask(crc32c(data[at:at + 8])) and sum2 == mask(crc32c(record)), "a checksum"
        at += 16 + length
        yield kind.FromString(record)


def tables(cli):
    s = cli.sidecar
    run = s.create("origin", 2, model="resnet18", dataset="d", dataset_hash="h")
    for i, accuracy in enumerate((0.5, 0.75, float("nan"))):
        s.epoch(run.id, i + 1, accuracy, loss=1.0 / (i + 1), seconds=10)
    s.steps(run.id, [("loss", n, 1.0 / (n + 1), n * 0.5) for n in range(50)] + [("grad/norm", 3, float("inf"), 1.5)])
    s.steps(run.id, [("loss", 1, 5.0, 0.5)], rank=1)
    s.finish(run.id, elapsed=30)
    cli("export", "origin", "--format", "tensorboard", "-o", "logs/origin")
    files = list((cli.folder / "logs/origin").iterdir())
    check(f"one event file: {files}", len(files) == 1 and files[0].name.startswith("events.out.tfevents."))
    events = list(read_events(files[0], event_type(cli.folder)))
    check("its first record", events[0].file_version == "brain.Event:2")
    got = {}
    for e in events[1:]:
        for v in e.summary.value:
            got.setdefault(v.tag, []).append((e.step, v.simple_value, e.wall_time - events[0].wall_time))
    check(f"tags: {sorted(got)}", {"epoch/accuracy", "epoch/val_loss", "epoch/train_loss", "loss", "loss/rank1", "grad/norm"} <= set(got))
    check("epochs there", [(a, b) for a, b, _ in got["epoch/accuracy"]][:2] == [(1, 0.5), (2, 0.75)] and abs(got["epoch/accuracy"][1][2] - 20) < 1e-5)
    check("steps there", len(got["loss"]) == 50 and got["loss"][3][:2] == (3, 0.25) and got["grad/norm"][0][1] == float("inf"))
    # And back in.
    cli("import", files[0], "--run", "from tensorboard", "--model", "resnet18", "--world-size", "2")
    o = cli.show("from tensorboard", "--series", "loss")
    check(f"back: {o['run']}", (o["run"]["state"], o["run"]["model"], o["run"]["world_size"]) == ("finished", "resnet18", 2))
    check("its epochs", [(e["epoch"], e.get("accuracy")) for e in o["epochs"]] == [(1, 0.5), (2, 0.75), (3, "NaN")])
    check("its elapsed times count from its first event", [e["elapsed_s"] for e in o["epochs"]][1] > 9.9)
    check("its series", o["series"][0]["values"][:2] == [1.0, 0.5] and o["series"][0]["total_points"] == 50)
    # CSV, as exported and as others write it.
    (cli.folder / "e.csv").write_text(cli("export", "origin", "--format", "csv"), newline="")
    (cli.folder / "s.csv").write_text(cli("export", "origin", "--format", "csv", "--series", "loss"), newline="")
    cli("import", "e.csv", "--run", "from csv")
    check("csv", [(e["epoch"], e["accuracy"], e["elapsed_s"]) for e in cli.show("from csv")["epochs"]] == [(1, 0.5, 10.0), (2, 0.75, 20.0), (3, "NaN", 30.0)])
    cli("import", "s.csv", "--run", "series from csv")
    check("csv series", len(cli.show("series from csv", "--series", "loss")["series"][0]["steps"]) >= 50)
    (cli.folder / "other.csv").write_text('epoch,"test ""acc""",loss,note\n2,81.5,0.5,"a, b\nc"\n1,70,0.7,\n')
    cli("import", "other.csv", "--run", "other", "--accuracy", 'test "acc"', "--val-loss", "loss", "--percent")
    check("other names", [(e["epoch"], e["accuracy"], e["val_loss"]) for e in cli.show("other")["epochs"]] == [(1, 0.7, 0.7), (2, 0.815, 0.5)])
    (cli.folder / "h.jsonl").write_text('{"epoch": 1, "accuracy": 0.5, "val_loss": "NaN", "elapsed_s": 5}\n\n{"step": 7, "loss": 0.25, "text": "x", "a b": 1}\r\n')
    cli("import", "h.jsonl", "--run", "lines")
    o = cli.show("lines", "--series", "a_b")
    check(f"json lines: {o}", o["epochs"][0]["val_loss"] == "NaN" and o["series"][0]["steps"] == [7])
    cli("import", "h.jsonl", "--run", "lines")
    check("a taken name", "lines-2" in cli("runs"))
    # What is damaged, hostile or empty makes no run.
    good = files[0].read_bytes()
    bad = {"cut.tfevents": good[:-5], "flip.tfevents": good[:100] + bytes([good[100] ^ 1]) + good[101:], "huge.tfevents": b"\xff" * 100,
           "zero.tfevents": b"", "text.tfevents": b"hello world, this is text",
           "a.csv": b"", "b.csv": b"x,y\n1,2\n", "c.csv": b'epoch,accuracy\n1,"0.5\n', "d.csv": b"epoch,accuracy\n1,0.5,7\n", "e2.csv": b"epoch,accuracy\n1,80\n",
           "f.csv": b"epoch,accuracy\n-1,0.5\n", "g.csv": b"epoch,accuracy\n1.5,0.5\n", "h.csv": b"epoch,accuracy\n1e30,0.5\n", "i.csv": b"epoch\0\n", "j.csv": b"," * 5000 + b"\n",
           "k.csv": b"step,loss\n-1,2\n", "l.csv": b"step,loss\n1,x\n",
           "a.jsonl": b"{\n", "b.jsonl": b"[1]\n", "c.jsonl": b'{"a": 1}\n', "d.jsonl": b"[" * 100000, "e.jsonl": b'{"epoch": 1, "accuracy": 0.5}\n{"epoch', "f.jsonl": b"\xff\xfe\n",
           "g.jsonl": b'{"epoch": 0, "accuracy": 0.5}\n', "h2.jsonl": b'{"step": 1e18, "a": 0.5}\n'}
    before = cli("runs")
    for name, data in bad.items():
        (cli.folder / name).write_bytes(data)
        check(f"{name} is named", name in cli("import", name, "--run", "never", status=2))
    for words, text in ((("no such file",), "no such file"), (("h.jsonl", "--format", "xml"), "--format")):
        check(text, text in cli("import", *words, "--run", "never", status=2))
    check("--run", "--run" in cli("import", "h.jsonl", status=2))
    check("no run was made", cli("runs") == before)
    for words in (("--format", "tensorboard"), ("--format", "onnx"), ("--best",), ("--format", "pth", "-o", "x", "--best", "--epoch", "1")):
        cli("export", "origin", *words, status=2)
    (cli.folder / "junk.safetensors").write_bytes(b"junk")
    for format in ("pth", "onnx"):
        cli("export", "./junk.safetensors", "--format", format, "-o", "never.out", status=1)
        cli("export", "origin", "--format", format, "-o", "never.out", status=1)  # it has no checkpoint
    check("nothing is left", not list(cli.folder.glob("never*")))


def trained(cli):
    out = cli.folder / "out"
    subprocess.run([bin_dir / "paramsync-train", "--custom_data", "--width", "8", "--epochs", "2", "--train-images", "256", "--test-images", "128",
                    "--batch", "64", "--output_dir", out, "--run", "trained", "--sidecar", cli.environment["PARAMSYNC_SIDECAR"]],
                   check=True, capture_output=True, timeout=200)
    return out


def weights(cli):
    """Checkpoints as .pth and ONNX: PyTorch loads one, ONNX Runtime runs the other, and the logits are the same."""
    try:
        import torch
    except ImportError:
        skip("no python3-torch")
    sys.path.insert(0, str(source / "tests/parity"))
    from sample_model import ResNet18
    out = trained(cli)
    cli("export", "trained", "--format", "pth", "-o", "w.pth")
    cli("export", "trained", "--epoch", "1", "--format", "pth", "-o", "w1.pth")
    cli("export", out / "epoch_2.safetensors", "--format", "pth", "-o", "file.pth")
    check("from the sidecar or the file", (cli.folder / "w.pth").read_bytes() == (cli.folder / "file.pth").read_bytes() !=
          (cli.folder / "w1.pth").read_bytes())
    state = torch.load(cli.folder / "w.pth", weights_only=True)
    net = ResNet18(width=8, classes=state["dense_layer.weight"].shape[0])
    net.load_state_dict(state, strict=True)
    net.eval()
    cli("export", "trained", "--format", "onnx", "-o", "w.onnx")
    cli("export", out / "epoch_2.safetensors", "--format", "onnx", "-o", "file.onnx")
    check("nothing is left over", not list(cli.folder.glob("*.tmp*")))
    (cli.folder / "strange.safetensors").write_bytes(struct.pack("<Q", 58) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    ' + bytes(4))
    check("weights of nothing we know", "resnet18" in cli("export", "./strange.safetensors", "--format", "onnx", "-o", "x.onnx", status=2))
    if not shutil.which("node") or not shutil.which("npm"):
        skip("no node with npm to run the ONNX file")
    work = build / "tests/onnx"
    work.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "run.mjs"):
        shutil.copy(source / "tests/onnx" / name, work / name)
    stamp, lock = work / "node_modules/.installed", (work / "package-lock.json").read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        done = subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], cwd=work, capture_output=True, text=True)
        if done.returncode:
            skip("onnxruntime-web cannot be installed: " + done.stderr.strip().split("\n")[0])
        stamp.write_text(lock)
    for side in (32, 24):
        images = torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(side))
        (cli.folder / "images").write_bytes(images.numpy().tobytes())
        done = subprocess.run(["node", "run.mjs", cli.folder / "w.onnx", cli.folder / "images", "3", str(side)], cwd=work, capture_output=True, text=True, timeout=100)
        check(f"ONNX Runtime: {done.stderr}", done.returncode == 0)
        if done.returncode:
            return
        said = json.loads(done.stdout.strip().split("\n")[-1])
        with torch.no_grad():
            wanted = net(images)
        got = torch.tensor(said["logits"]).view(said["dims"])
        error = ((got - wanted).norm() / wanted.norm()).item() if got.shape == wanted.shape else 9
        print(f"{side} pixels: logits differ by {error:.1e} (relative L2)")
        check(f"logits: {said['dims']} {error}", error < 1e-5 and said["inputs"] == ["images"] and said["outputs"] == ["logits"])


parts = {"tables": tables, "weights": weights}
with tempfile.TemporaryDirectory() as name, Sidecar() as sidecar:
    for part in sys.argv[1:] or parts:
        begun = time.monotonic()
        parts[part](Cli(sidecar, pathlib.Path(name)))
        print(f"{part}: {time.monotonic() - begun:.1f} s")
sys.exit(1 if failures else 0)
