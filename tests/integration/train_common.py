# SPDX-License-Identifier: Apache-2.0
"""What the scripts that run paramsync-train from outside share: a folder of their own, generated data, programs that are
ended with the script, and a reader of the checkpoints' layout that shares no code with ours."""
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

BIN = os.environ["PS_BIN"]
TRAIN = os.path.join(BIN, "paramsync-train")
SYNTH = os.path.join(BIN, "paramsync-synth")
BUILD = os.environ["PS_BUILD"]
LIMIT = 240  # seconds for one program; the machine may be busy
TINY = ["--width", "2", "--resolution", "8", "--batch", "16", "--enable_gpu", "false", "--backend", "ref", "--lr", "0.003"]

started = []
work = tempfile.mkdtemp(prefix="ps_train_test.")
environment = {k: v for k, v in os.environ.items()
               if not re.match(r"(RANK|WORLD_SIZE|MASTER_|LOCAL_|OMPI_|SLURM_|VC_|MA_|PARAMSYNC_)", k)}


def path(*parts):
    return os.path.join(work, *parts)


def synth(name="data", train=160, test=50):
    subprocess.run([SYNTH, path(name), "--train", str(train), "--test", str(test)], check=True)
    return path(name)


def start(*args, env=None):
    process = subprocess.Popen([TRAIN, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=work,
                               env={**environment, **(env or {})})
    started.append(process)
    return process


def train(*args, status=0, env=None):
    process = start(*args, env=env)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == status, f"exit {process.returncode}, expected {status}: {err.decode()}"
    return out, err.decode()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def read(*parts):
    with open(path(*parts), "rb") as f:
        return f.read()


def tensors(data):
    """Bytes of each tensor and the metadata of a file in the safetensors layout, read by other code than ours."""
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    about = header.pop("__metadata__", {})
    body = data[8 + length:]
    return {name: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for name, t in header.items()}, about


def same_training(a, b, epoch):
    """Weights byte for byte, optimizer state and counters as well."""
    assert read(a, f"epoch_{epoch}.safetensors") == read(b, f"epoch_{epoch}.safetensors"), "weights differ"
    (x, about_x), (y, about_y) = tensors(read(a, f"epoch_{epoch}.state")), tensors(read(b, f"epoch_{epoch}.state"))
    assert x == y, "optimizer state differs"
    for own in ("elapsed_s", "training"):  # each training's own
        about_x.pop(own), about_y.pop(own)
    assert about_x == about_y, "counters differ"


LINES = re.compile(rb"(train \| epoch: (\d+) \| loss: (-?\d+\.\d{4})\n"
                   rb"val \| epoch: \2 \| loss: (-?\d+\.\d{4}) \| accuracy: ([01]\.\d{4}) \n\n)+")


def results(out):
    """[(epoch, train loss, val loss, accuracy)]; the whole of standard output must be the sample's lines."""
    assert LINES.fullmatch(out), out
    return [(int(e), float(t), float(v), float(a)) for e, t, v, a in
            re.findall(rb"epoch: (\d+) \| loss: (\S+)\nval \| epoch: \d+ \| loss: (\S+) \| accuracy: (\S+) ", out)]


def pair(data, out, *args, ranks=2, port=None):
    port = port or free_port()
    return [start("--data_url", data, *TINY, "--output_dir", out, "--init_method", f"tcp://127.0.0.1:{port}",
                  "--world_size", str(ranks), "--rank", str(r), *args) for r in range(ranks)]


def run_case(cases):
    """The case that the command line names; 77 means skipped."""
    try:
        status = cases["case_" + sys.argv[1]]()
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(status or 0)
