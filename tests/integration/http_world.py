# SPDX-License-Identifier: Apache-2.0
"""A real paramsyncd for tests of the HTTP face and the dashboard: started on free ports over an empty store, filled
over gRPC with Debian's python3-grpcio, stopped at the end."""
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

SKIP = 77


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIP)


try:
    import grpc
    from grpc_tools import protoc
except ImportError:
    grpc = protoc = None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Sidecar:
    def __init__(self, *flags, token=None):
        if grpc is None:
            skip("no python3-grpcio with grpc_tools")
        self.binary = pathlib.Path(os.environ["PS_BIN"]) / "paramsyncd"
        if not self.binary.exists():
            skip("paramsyncd is not built")
        self.dir = tempfile.mkdtemp(prefix="paramsync-http-")
        self.token = token
        self.flags = list(flags)
        if token:
            path = pathlib.Path(self.dir, "token")
            path.write_text(token + "\n")
            path.chmod(0o600)
            self.flags += ["--token-file", str(path)]
        self.grpc_port, self.port = free_port(), free_port()
        self.process = None
        try:
            self._stubs()
            self.start()
        except BaseException:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.dir, ignore_errors=True)
            raise

    def _stubs(self):
        source = pathlib.Path(os.environ["PS_SOURCE"], "proto")
        out = pathlib.Path(self.dir, "stubs")
        out.mkdir()
        files = [str(p.relative_to(source)) for p in sorted(source.glob("paramsync/v1/*.proto"))]
        status = protoc.main(["protoc", f"-I{source}", "-I/usr/include", f"--python_out={out}", f"--grpc_python_out={out}", *files])
        if status:
            raise RuntimeError("protoc failed")
        sys.path.insert(0, str(out))
        from paramsync.v1 import checkpoints_pb2, checkpoints_pb2_grpc, metrics_pb2, metrics_pb2_grpc, runs_pb2, runs_pb2_grpc
        self.pb = {"runs": runs_pb2, "metrics": metrics_pb2, "checkpoints": checkpoints_pb2}
        self.grpc = {"runs": runs_pb2_grpc, "metrics": metrics_pb2_grpc, "checkpoints": checkpoints_pb2_grpc}

    def start(self):
        self.log = open(pathlib.Path(self.dir, "paramsyncd.log"), "ab")
        self.process = subprocess.Popen(
            [self.binary, "--data-dir", f"{self.dir}/data", "--grpc-listen", f"127.0.0.1:{self.grpc_port}",
             "--http-listen", f"127.0.0.1:{self.port}", *self.flags], stdout=self.log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while True:
            try:
                if self.get("/readyz")[0] == 200:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("paramsyncd does not get ready:\n" + self.log_text())
            time.sleep(0.05)  # polling a foreign process, not a synchronisation
        channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")
        self.channel = channel
        self.runs = self.grpc["runs"].RunsStub(channel)
        self.metrics = self.grpc["metrics"].MetricsStub(channel)
        self.checkpoints = self.grpc["checkpoints"].CheckpointsStub(channel)

    def log_text(self):
        return pathlib.Path(self.dir, "paramsyncd.log").read_text(errors="replace")

    def stop(self):
        """Ends it as an administrator would; its exit status."""
        if self.process is None:
            return 0
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = -9
        self.process = None
        self.log.close()
        return status

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        status = self.stop()
        if kind is not None or status != 0:
            print(self.log_text()[-4000:], file=sys.stderr)
        shutil.rmtree(self.dir, ignore_errors=True)
        if kind is None and status != 0:
            raise AssertionError(f"paramsyncd ended with status {status}")

    # ---- HTTP ----

    def request(self, method, path, headers=None, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=bool(headers and "Host" in headers))
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def get(self, path, **headers):
        return self.request("GET", path, {k.replace("_", "-"): v for k, v in headers.items()})

    def json(self, path, **headers):
        status, _, body = self.get(path, **headers)
        assert status == 200, (path, status, body)
        return json.loads(body, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(f"{name} is not JSON")))

    # ---- Recording ----

    def _metadata(self):
        return [("authorization", f"Bearer {self.token}")] if self.token else None

    def create(self, name, world_size=1, **fields):
        config = fields.pop("config", {})
        request = self.pb["runs"].CreateRunRequest(name=name, world_size=world_size, **fields)
        for key, value in config.items():
            request.config.add(key=key, value=str(value))
        return self.runs.CreateRun(request, timeout=10, metadata=self._metadata()).run

    def epoch(self, run, number, accuracy, loss=1.0, seconds=10.0, rate=100.0, lr=0.01, val_loss=None):
        # Two classes of 500 test images each, mistaken for each other equally often.
        right = round(500 * accuracy) if 0 <= accuracy <= 1 else 0
        confusion, correct, counted = [right, 500 - right, 500 - right, right], 2 * right, 1000
        self.metrics.ReportEpoch(self.pb["metrics"].ReportEpochRequest(
            run=run, epoch=number, accuracy=accuracy, train_loss=loss, val_loss=loss * 1.1 if val_loss is None else val_loss,
            lr=lr, samples_per_s=rate, elapsed_s=seconds * number, train_s=seconds * 0.9, eval_s=seconds * 0.1,
            step=number * 100, correct=correct, counted=counted, confusion=confusion), timeout=10, metadata=self._metadata())

    def steps(self, run, points, rank=0, seq=1):
        batch = self.pb["metrics"].StepBatch(run=run, rank=rank, attempt=1, seq=seq)
        for name, step, value, elapsed in points:
            batch.points.add(name=name, step=step, value=value, elapsed_s=elapsed)
        return list(self.metrics.ReportSteps(iter([batch]), timeout=20, metadata=self._metadata()))

    def finish(self, run, state="RUN_STATE_FINISHED", elapsed=0.0, reason=""):
        runs = self.pb["runs"]
        self.runs.FinishRun(runs.FinishRunRequest(run=run, state=runs.RunState.Value(state), elapsed_s=elapsed, reason=reason),
                            timeout=10, metadata=self._metadata())

    def put(self, run, epoch, data, filename=None):
        pb = self.pb["checkpoints"]
        sha256 = hashlib.sha256(data).hexdigest()
        header = pb.PutCheckpointHeader(run=run, epoch=epoch, filename=filename or f"epoch_{epoch}.safetensors",
                                        format="safetensors", size=len(data), sha256=sha256)

        def parts():
            yield pb.PutCheckpointRequest(header=header)
            for offset in range(0, len(data), 1 << 18):
                piece = data[offset:offset + (1 << 18)]
                yield pb.PutCheckpointRequest(chunk=pb.Chunk(offset=offset, data=piece, crc32c=crc32c(piece)))
        self.checkpoints.PutCheckpoint(parts(), timeout=30, metadata=self._metadata())
        return sha256


_TABLE = []


def crc32c(data):
    if not _TABLE:
        for i in range(256):
            c = i
            for _ in range(8):
                c = (c >> 1) ^ (0x82F63B78 if c & 1 else 0)
            _TABLE.append(c)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
