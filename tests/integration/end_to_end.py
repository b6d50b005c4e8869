#!/usr/bin/env python3
"""The main job on a small set: one process and two processes train, the sidecar records both, a gRPC client pulls a
checkpoint that PyTorch loads, the runs are compared and gated, and the sidecar's death does not stop a training."""
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

BIN = pathlib.Path(os.environ["PS_BIN"])
SOURCE = pathlib.Path(os.environ["PS_SOURCE"])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


def ready(http):
    try:
        return urllib.request.urlopen(f"http://{http}/readyz", timeout=2).status == 200
    except OSError:
        return False


def start_sidecar(store, grpc, http):
    process = subprocess.Popen([BIN / "paramsyncd", "--data-dir", store, "--grpc-listen", grpc, "--http-listen", http])
    wait_for("the sidecar", lambda: ready(http) or process.poll() is not None)
    assert process.poll() is None, "paramsyncd ended"
    return process


def cli(*args, check=0):
    done = subprocess.run([BIN / "paramsync", *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == check, f"paramsync {args}: exit {done.returncode}, wanted {check}\n{done.stdout}{done.stderr}"
    return done.stdout


def train(*args, **keep):
    return subprocess.Popen([BIN / "paramsync-train", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **keep)


def finish(process, status=0, seconds=300):
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == status, f"exit {process.returncode}, wanted {status}\n{out}\n{err}"
    return out, err


LINES = re.compile(r"(train \| epoch: (\d+) \| loss: \d+\.\d{4}\nval \| epoch: \2 \| loss: \d+\.\d{4} \| accuracy: [01]\.\d{4} \n\n)+")


def main():
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="ps-e2e-"))
    data = scratch / "data"
    subprocess.run([BIN / "paramsync-synth", data, "--train", "1500", "--test", "500"], check=True)
    grpc, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    os.environ["PARAMSYNC_SIDECAR"] = grpc
    sidecar = start_sidecar(scratch / "store", grpc, http)
    common = ["--recipe", "fast", "--width", 8, "--epochs", 3, "--data_url", data, "--sidecar", grpc, "--seed", 7,
              "--resolution", 32]
    try:
        # One process, then two on the same global batch.
        out, _ = finish(train(*common, "--run", "single", "--batch", 50, "--threads", 1, "--output_dir", scratch / "one"))
        assert LINES.fullmatch(out), repr(out)
        two = [*common, "--run", "double", "--batch", 25, "--threads", 1, "--output_dir", scratch / "two", "--world_size", 2,
               "--init_method", f"tcp://127.0.0.1:{free_port()}"]
        ranks = [train(*two, "--rank", r) for r in (0, 1)]
        out, _ = finish(ranks[0])
        assert LINES.fullmatch(out), repr(out)
        silent, _ = finish(ranks[1])
        assert silent == "", "only rank 0 prints the sample's lines"

        # Both are recorded, as one run each, with what was printed.
        runs = {r["name"]: r for r in json.loads(cli("runs", "--json"))}
        assert set(runs) == {"single", "double"}, runs
        assert [runs[n]["world_size"] for n in ("single", "double")] == [1, 2]
        assert all(r["state"] == "finished" for r in runs.values()), runs
        printed = float(re.findall(r"accuracy: ([\d.]+)", out)[-1])
        assert abs(runs["double"]["accuracy"] - printed) < 1e-4
        assert printed > 0.3, f"the generated set was not learned: {printed}"

        # The pulled file is the trainer's file, byte for byte.
        pulled = scratch / "pulled.safetensors"
        cli("pull", "double", "--epoch", 3, "-o", pulled)
        trained = scratch / "two" / "epoch_3.safetensors"
        assert hashlib.sha256(pulled.read_bytes()).digest() == hashlib.sha256(trained.read_bytes()).digest()
        cli("pull", "double", "--best", "-o", scratch / "best.safetensors")
        check = subprocess.run([sys.executable, SOURCE / "tests/parity/load_checkpoint.py", pulled, "--width", "8", "--data", data,
                                "--accuracy", str(printed)], text=True, capture_output=True)
        if check.returncode == 77:
            print("PyTorch is missing: the pulled checkpoint was not loaded into it")
        else:
            assert check.returncode == 0, check.stdout + check.stderr
            print(check.stdout.strip())

        # Which classes were mistaken for which: all test images, and the printed accuracy.
        with urllib.request.urlopen(f"http://{http}/api/v1/runs/double/confusion?epoch=latest") as answer:
            matrix = json.load(answer)
        cells = [sum(row) for row in matrix["counts"]]
        assert matrix["epoch"] == 3 and len(cells) == 10, matrix
        assert abs(sum(matrix["counts"][i][i] for i in range(10)) / sum(cells) - printed) < 1e-4, (matrix, printed)

        # Compare and gate.
        table = cli("compare", "single", "double", "sample-1", "--target", "0.3")
        assert all(word in table for word in ("single", "double", "sample-1")), table
        assert max(map(len, table.splitlines())) <= 80, table
        cli("gate", "double", "--min-accuracy", "0.3", "--max-total-time", "1h")
        cli("gate", "double", "--min-accuracy", "0.9999", check=1)
        cli("gate", "nobody", "--min-accuracy", "0.3", check=2)

        # kill -9 of the sidecar in the middle: the training ends as if nothing had happened; what the sidecar missed
        # arrives once it is back.
        lonely = train(*common, "--epochs", 6, "--run", "orphan", "--batch", 50, "--threads", 1, "--output_dir", scratch / "three")
        wait_for("the first epoch", lambda: (scratch / "three" / "epoch_1.safetensors").exists() or lonely.poll() is not None, 120)
        sidecar.send_signal(signal.SIGKILL)
        sidecar.wait()
        wait_for("the third epoch", lambda: (scratch / "three" / "epoch_3.safetensors").exists() or lonely.poll() is not None, 120)
        sidecar = start_sidecar(scratch / "store", grpc, http)
        out, _ = finish(lonely)
        assert out.count("train |") == 6
        seen = json.loads(cli("show", "orphan", "--json"))
        assert seen["last_epoch"] == 6 and seen["state"] == "finished", seen
        assert [e["epoch"] for e in seen["epochs"]] == [1, 2, 3, 4, 5, 6], seen
        assert {c["epoch"] for c in seen["checkpoints"]} == {1, 2, 3, 4, 5, 6}, seen

        gone = train(*common, "--run", "nobody-there", "--batch", 50, "--output_dir", scratch / "four", "--epochs", 1,
                     "--sidecar", f"127.0.0.1:{free_port()}")
        out, err = finish(gone)
        assert out.count("val |") == 1 and "127.0.0.1" in err
        print("one process, two processes, pull, PyTorch, compare, gate, kill -9: all as promised")
    finally:
        sidecar.kill()
        sidecar.wait()


if __name__ == "__main__":
    main()
