# SPDX-License-Identifier: Apache-2.0
"""What the sidecar's script tests share: stubs compiled from proto/ at run time, a paramsyncd to talk to, crc32c."""
import atexit
import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

try:
    import grpc
    from grpc_tools import protoc
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

SOURCE = pathlib.Path(os.environ["PS_SOURCE"])
PROGRAM = pathlib.Path(os.environ["PS_BIN"]) / "paramsyncd"
folder = pathlib.Path(tempfile.mkdtemp(prefix="ps_sidecar_"))
daemons = []


@atexit.register
def clean_up():
    for daemon in daemons:
        daemon.kill()
    shutil.rmtree(folder, ignore_errors=True)


def stubs():
    """The generated modules: runs, metrics, checkpoints, gate (and each one's ..._grpc)."""
    out = folder / "stubs"
    out.mkdir()
    names = ["runs", "metrics", "checkpoints", "gate", "rendezvous"]
    arguments = ["protoc", f"-I{SOURCE / 'proto'}", "-I/usr/include", f"--python_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(arguments + [f"paramsync/v1/{name}.proto" for name in names]):
        sys.exit("protoc failed")
    sys.path.insert(0, str(out))
    modules = []
    for name in names:
        modules += [importlib.import_module(f"paramsync.v1.{name}_pb2"),
                    importlib.import_module(f"paramsync.v1.{name}_pb2_grpc")]
    return modules


runs, runs_grpc, metrics, metrics_grpc, checkpoints, checkpoints_grpc, gate, gate_grpc, rendezvous, rendezvous_grpc = stubs()


class Daemon:
    """A paramsyncd of its own on free ports."""

    def __init__(self, name="data", *flags, environment=None, http=False, port=0):
        self.dir = folder / name
        command = [PROGRAM, "--data-dir", self.dir, "--grpc-listen", f"127.0.0.1:{port}",
                   "--http-listen", "127.0.0.1:0" if http else "none", *flags]
        self.process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **(environment or {})})
        daemons.append(self)
        line = self.process.stdout.readline()
        found = re.match(r"paramsyncd: ready: gRPC 127\.0\.0\.1:(\d+)(?:, HTTP 127\.0\.0\.1:(\d+))?", line)
        if not found:
            sys.exit(f"paramsyncd did not get ready: {line!r}, exit {self.process.poll()}")
        self.port = int(found.group(1))
        self.http_port = int(found.group(2) or 0)
        self.address = f"127.0.0.1:{self.port}"

    def connect(self, credentials=None):
        if credentials:
            channel = grpc.secure_channel(f"localhost:{self.port}", credentials)
        else:
            channel = grpc.insecure_channel(self.address)
        self.runs = runs_grpc.RunsStub(channel)
        self.metrics = metrics_grpc.MetricsStub(channel)
        self.checkpoints = checkpoints_grpc.CheckpointsStub(channel)
        self.rendezvous = rendezvous_grpc.RendezvousStub(channel)
        self.gate = gate_grpc.GateStub(channel)
        self.channel = channel
        return self

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        daemons.remove(self)

    def stop(self):
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        if hasattr(self, "channel"):
            self.channel.close()
        self.process.stdout.close()
        daemons.remove(self)
        return status


failures = []


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}", flush=True)


def same(what, got, wanted):
    check(f"{what}: {got!r}, wanted {wanted!r}", got == wanted)


def fails(what, code, call, text=""):
    """call() must end with the status code and details that hold text."""
    try:
        call()
        got, details = grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        got, details = error.code(), error.details()
    check(f"{what}: {got} {details!r}, wanted {code} with {text!r}", got == code and text in details)


def wait_for(what, condition, seconds=30):
    """Asks until condition() is true; the time limit only ends a test that fails."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    check(f"{what}: not within {seconds} s", False)
    return False


def finish():
    print(f"{len(failures)} failures" if failures else "all good")
    sys.exit(1 if failures else 0)


def _table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ 0x82f63b78 if n & 1 else n >> 1
        table.append(n)
    return table


CRC = _table()


def crc32c(data):
    crc, table = 0xffffffff, CRC
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xffffffff


assert crc32c(b"123456789") == 0xe3069283  # RFC 3720, appendix B.4
