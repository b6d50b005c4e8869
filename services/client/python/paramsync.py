# SPDX-License-Identifier: Apache-2.0
"""Records a training at a paramsync sidecar. One file; needs Python 3.8 and grpcio, nothing else.

    import paramsync
    with paramsync.run("nightly", model="resnet18", dataset="CIFAR-10", epochs=10) as r:
        for epoch in range(1, 11):
            ...
            r.step(step, loss=loss)                    # any number of named values
            r.epoch(epoch, train_loss=..., val_loss=..., accuracy=0.81)   # accuracy is 0..1
            r.checkpoint("epoch_%d.pth" % epoch, epoch)

    paramsync.pull("nightly", "best.pth", best=True)

or  python3 paramsync.py push RUN FILE --epoch N,  python3 paramsync.py pull RUN [-o FILE] [--best]

Calls on the run return at once: a thread sends. A sidecar that is away, slow or full never stops or fails the
training: epochs and checkpoints wait, step values too up to a bound (then the oldest are dropped and counted). Leaving
the block waits up to close_timeout seconds for what is left and ends the run: finished, failed (with the exception's
text) or killed (KeyboardInterrupt).

Under torchrun every rank may run the same code: RANK and WORLD_SIZE are read, rank 0 makes the run, the others say
nothing (unless they are given run_id and attempt from rank 0: then their step values are recorded under their rank).
DataLoader workers may be forked after the run was made: gRPC's fork handlers are off, and a forked child is silent.

PARAMSYNC_SIDECAR (HOST:PORT) and PARAMSYNC_TOKEN stand in for sidecar= and token=.
"""
import argparse
import collections
import hashlib
import os
import re
import struct
import subprocess
import sys
import threading
import time
import uuid

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before grpc is loaded: its handlers hang forking programs
import grpc  # noqa: E402

__all__ = ["run", "push", "pull", "get_run", "Client", "Error"]

# ---- The wire: what is used of proto/paramsync/v1. A test compares this with the .proto files. ----
# Field: number name type; s string, y bytes, u unsigned, i signed, d double, b boolean, capitals: a message; * repeated.
MESSAGES = {name: [(int(n), f, t) for n, f, t in (field.split() for field in fields.split(","))] for name, fields in {
    "KeyValue": "1 key s,2 value s",
    "Timestamp": "1 seconds i,2 nanos i",
    "Run": "1 id s,2 name s,3 state u,4 world_size u,5 attempt u,6 model s,7 dataset s,8 dataset_hash s,9 device s,10 epochs_planned u,"
           "11 created_at Timestamp,12 ended_at Timestamp,13 reason s,14 config *KeyValue,15 tags *s,16 notes s,17 last_epoch u,"
           "18 train_loss d,19 val_loss d,20 accuracy d,21 best_accuracy d,22 best_epoch u,23 samples_per_s d,24 elapsed_s d,"
           "25 has_epochs b,26 commit s,27 batch_per_rank u,28 elapsed_with_gaps_s d",
    "CreateRunRequest": "1 name s,2 world_size u,3 resume b,4 model s,5 dataset s,6 dataset_hash s,7 device s,8 epochs_planned u,"
                        "9 config *KeyValue,10 tags *s,11 notes s,12 commit s,13 batch_per_rank u,14 request_id s",
    "CreateRunResponse": "1 run Run,2 resumed b",
    "GetRunRequest": "1 run s",
    "FinishRunRequest": "1 run s,2 state u,3 reason s,4 attempt u,5 elapsed_s d",
    "HeartbeatRequest": "1 run s,2 rank u,3 attempt u,4 elapsed_s d,5 step u,6 points_sent u,7 points_dropped u,8 spool_bytes u",
    "HeartbeatResponse": "1 state u",
    "ReportEpochRequest": "1 run s,2 attempt u,3 epoch u,4 train_loss d,5 val_loss d,6 accuracy d,7 lr d,8 samples_per_s d,9 elapsed_s d,"
                          "10 train_s d,11 eval_s d,12 step u,13 correct u,14 counted u,15 no_eval b,16 confusion *u",
    "ReportEpochResponse": "1 replaced b",
    "Point": "1 name s,2 step u,3 value d,4 elapsed_s d",
    "StepBatch": "1 run s,2 rank u,3 attempt u,4 seq u,5 points *Point",
    "StepAck": "1 rank u,2 attempt u,3 seq u",
    "Checkpoint": "1 run_id s,2 run_name s,3 attempt u,4 epoch u,5 filename s,6 format s,7 size u,8 sha256 s,9 accuracy d,10 has_accuracy b,"
                  "11 created_at Timestamp,12 step u",
    "PutCheckpointHeader": "1 run s,2 attempt u,3 epoch u,4 filename s,5 format s,6 size u,7 sha256 s,8 accuracy d,9 has_accuracy b,10 step u",
    "Chunk": "1 offset u,2 data y,3 crc32c u",
    "PutCheckpointRequest": "1 header PutCheckpointHeader,2 chunk Chunk",
    "CheckpointSelector": "1 latest b,2 best b,3 epoch u,5 sha256 s,4 format s",
    "PullCheckpointRequest": "1 run s,2 selector CheckpointSelector,3 offset u,4 chunk_bytes u",
    "PullCheckpointResponse": "1 checkpoint Checkpoint,2 chunk Chunk",
}.items()}
METHODS = {
    "CreateRun": ("Runs", "CreateRunRequest", "CreateRunResponse"), "GetRun": ("Runs", "GetRunRequest", "Run"),
    "FinishRun": ("Runs", "FinishRunRequest", "Run"), "Heartbeat": ("Runs", "HeartbeatRequest", "HeartbeatResponse"),
    "ReportEpoch": ("Metrics", "ReportEpochRequest", "ReportEpochResponse"), "ReportSteps": ("Metrics", "StepBatch", "StepAck"),
    "PutCheckpoint": ("Checkpoints", "PutCheckpointRequest", "Checkpoint"),
    "PullCheckpoint": ("Checkpoints", "PullCheckpointRequest", "PullCheckpointResponse"),
}
STATES = ("unspecified", "created", "running", "finished", "failed", "killed", "lost")


class Error(Exception):
    """What the sidecar refused, or that it is not there. code: a grpc.StatusCode, or None."""

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


def _varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_one(number, kind, value):
    if kind in "uib":
        return _varint(number << 3) + _varint(int(value))
    if kind == "d":
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    data = _encode(kind, value) if kind in MESSAGES else value.encode() if kind == "s" else bytes(value)
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _encode(message, values):
    out = []
    known = set()
    for number, name, kind in MESSAGES[message]:
        known.add(name)
        value = values.get(name)
        if value is None:
            continue
        if kind[0] == "*":
            if kind == "*u" and value:
                data = b"".join(map(_varint, value))
                out.append(_varint(number << 3 | 2) + _varint(len(data)) + data)
            else:
                out.extend(_encode_one(number, kind[1:], item) for item in value)
        elif kind in MESSAGES or struct.pack("<d", value) != bytes(8) if kind == "d" else value not in ("", 0, False, b""):
            out.append(_encode_one(number, kind, value))
    if set(values) - known:
        raise TypeError("%s has no %s" % (message, ", ".join(sorted(set(values) - known))))
    return b"".join(out)


def _read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7
        if shift > 63:
            raise ValueError("varint")


def _decode(message, data):
    fields = {number: (name, kind) for number, name, kind in MESSAGES[message]}
    values = {name: [] if kind[0] == "*" else None if kind in MESSAGES else {"s": "", "y": b"", "d": 0.0, "b": False}.get(kind, 0)
              for _, name, kind in MESSAGES[message]}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        name, kind = fields.get(key >> 3, (None, ""))
        if wire == 0:
            value, at = _read_varint(data, at)
            if kind == "i" and value >> 63:
                value -= 1 << 64
            value = bool(value) if kind == "b" else value
        elif wire == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif wire == 5:
            value, at = None, at + 4
        elif wire == 2:
            size, at = _read_varint(data, at)
            if at + size > len(data):
                raise ValueError("length")
            value, at = data[at:at + size], at + size
            plain = kind.lstrip("*")
            value = _decode(plain, value) if plain in MESSAGES else value.decode() if plain == "s" else value
        else:
            raise ValueError("wire type")
        if name and kind[0] == "*":
            values[name].append(value)
        elif name:
            values[name] = value
    return values


_TABLE = []


def crc32c(data):
    """Castagnoli's polynomial, two bytes at a time."""
    if not _TABLE:
        single = []
        for i in range(256):
            for _ in range(8):
                i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
            single.append(i)
        _TABLE.extend(single[single[i & 0xFF] & 0xFF ^ i >> 8] ^ single[i & 0xFF] >> 8 for i in range(65536))
        _TABLE.extend(single)
    crc, table, view = 0xFFFFFFFF, _TABLE, memoryview(data)
    for pair, in struct.iter_unpack("<H", view[:len(view) & ~1]):
        crc = table[(crc ^ pair) & 0xFFFF] ^ crc >> 16
    if len(view) & 1:
        crc = table[65536 + ((crc ^ view[-1]) & 0xFF)] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


class Client:
    """A connection. tls_ca: PEM file that turns TLS on; tls_cert and tls_key: a client certificate."""

    def __init__(self, sidecar=None, token=None, tls_ca=None, tls_cert=None, tls_key=None):
        self.address = sidecar or os.environ.get("PARAMSYNC_SIDECAR") or "127.0.0.1:50051"
        token = token or os.environ.get("PARAMSYNC_TOKEN")
        self._metadata = [("authorization", "Bearer " + token.strip())] if token else None
        if tls_ca:
            read = [open(path, "rb").read() if path else None for path in (tls_ca, tls_key, tls_cert)]
            self._channel = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(*read))
        else:
            self._channel = grpc.insecure_channel(self.address)

    def call(self, method, request, timeout=10, kind="unary_unary"):
        service, ask, answer = METHODS[method]
        multi = getattr(self._channel, kind)("/paramsync.v1.%s/%s" % (service, method), lambda m: _encode(ask, m),
                                             lambda data: _decode(answer, data))
        try:
            if kind.endswith("_stream"):
                return self._each(multi(request, timeout=timeout, metadata=self._metadata))
            return multi(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as e:
            raise self._error(e) from None

    def _error(self, e):
        return Error("%s: %s" % (self.address, e.details() or e.code().name), e.code())

    def _each(self, answers):
        try:
            yield from answers
        except grpc.RpcError as e:
            raise self._error(e) from None

    def close(self):
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def put(self, run, path, epoch, accuracy=None, step=0, attempt=0, filename=None, format=None):
        """Streams a file; returns its record once it is durable there."""
        filename = filename or os.path.basename(path)
        format = format or os.path.splitext(filename)[1].lstrip(".")
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
            size = file.tell()
            file.seek(0)

            def parts():
                header = {"run": run, "attempt": attempt, "epoch": epoch, "filename": filename, "format": format, "size": size,
                          "sha256": digest.hexdigest(), "accuracy": accuracy or 0.0, "has_accuracy": accuracy is not None, "step": step}
                yield {"header": header}
                offset = 0
                for piece in iter(lambda: file.read(1 << 18), b""):
                    yield {"chunk": {"offset": offset, "data": piece, "crc32c": crc32c(piece)}}
                    offset += len(piece)
            return self.call("PutCheckpoint", parts(), None, "stream_unary")

    def pull(self, run, path=None, best=False, epoch=None, format=None):
        """Fetches a checkpoint, by default the latest; path.part is gone on from. Returns (path, record)."""
        selector = {"best": True} if best else {"epoch": epoch} if epoch else {"latest": True}
        if format:
            selector["format"] = format
        for again in (False, True):
            digest, part, record = hashlib.sha256(), None, None
            offset = 0
            if path and not again and os.path.exists(path + ".part"):
                with open(path + ".part", "rb") as file:
                    for piece in iter(lambda: file.read(1 << 20), b""):
                        digest.update(piece)
                        offset += len(piece)
            try:
                request = {"run": run, "selector": selector, "offset": offset}
                for answer in self.call("PullCheckpoint", request, None, "unary_stream"):
                    if answer["checkpoint"]:
                        record = answer["checkpoint"]
                        if not path and not re.fullmatch(r"[^/\0]{1,200}", record["filename"]) or record["filename"].startswith("."):
                            raise Error("the sidecar calls the file %r" % record["filename"])
                        path = path or record["filename"]
                        part = open(path + ".part", "ab" if offset else "wb")
                    elif answer["chunk"]:
                        digest.update(answer["chunk"]["data"])
                        part.write(answer["chunk"]["data"])
            except Error as e:
                if offset and not again and e.code == grpc.StatusCode.OUT_OF_RANGE:
                    continue  # what lies there is longer than this file: it is another's
                raise
            finally:
                if part:
                    part.flush()
                    os.fsync(part.fileno())
                    part.close()
            if record and digest.hexdigest() == record["sha256"]:
                os.replace(path + ".part", path)
                return path, record
            if part:
                os.unlink(path + ".part")
            if not offset:
                break
        raise Error("what arrived of %s is not what was sent: pull it again" % run)


class Silent:
    """What ranks other than 0 get: takes everything, does nothing."""
    id, name, attempt = "", "", 0

    def step(self, step, **values):
        pass

    def epoch(self, epoch, **fields):
        pass

    def checkpoint(self, path, epoch, accuracy=None, step=0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}\Z")
_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED,
          grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OUT_OF_RANGE)


class Run:
    """Use run(...). id, name and attempt are empty until the sidecar has answered."""

    def __init__(self, client_options, request, rank, run_id, attempt, close_timeout, flush, max_points):
        self.id, self.name, self.attempt = run_id or "", "", attempt or 0
        self._options, self._rank, self._close_timeout = client_options, rank, close_timeout
        self._request = request
        self._flush, self._max_points = flush, max_points
        self._client = Client(**client_options)
        self._began, self._pid = time.monotonic(), os.getpid()
        self._changed = threading.Condition()  # guards everything below
        self._points = collections.deque()
        self._calls = collections.deque()  # (method, request) in order
        self._end = self._give_up = None
        self._last_step = self._sent = self._dropped = 0
        self._complained = ""
        self._seq, self._batch = 0, None  # the thread's own
        self._thread = threading.Thread(target=self._work, name="paramsync", daemon=True)
        self._thread.start()

    def _elapsed(self):
        return time.monotonic() - self._began

    def step(self, step, **values):
        """Named values at a step, of this rank: r.step(17, loss=0.3, lr=0.01)."""
        if os.getpid() != self._pid:
            return
        now = self._elapsed()
        with self._changed:
            self._last_step = max(self._last_step, int(step))
            for name, value in values.items():
                if not _NAME.match(name):
                    raise ValueError("%r: a series is named with A-Z a-z 0-9 _ . / - only" % name)
                if len(self._points) >= self._max_points:
                    self._points.popleft()
                    self._dropped += 1
                self._points.append({"name": name, "step": int(step), "value": float(value), "elapsed_s": now})

    def epoch(self, epoch, train_loss=0.0, val_loss=None, accuracy=None, lr=0.0, samples_per_s=0.0, train_s=0.0, eval_s=0.0, step=None,
              correct=0, counted=0):
        """The end of an epoch (from 1). Without accuracy: it was not evaluated. accuracy is 0..1."""
        if os.getpid() != self._pid or self._rank != 0:
            return
        if int(epoch) < 1:
            raise ValueError("epochs count from 1")
        if accuracy is not None and float(accuracy) > 1:
            raise ValueError("accuracy %g: must be 0..1" % float(accuracy))
        request = {"epoch": int(epoch), "train_loss": float(train_loss), "lr": float(lr), "samples_per_s": float(samples_per_s),
                   "elapsed_s": self._elapsed(), "train_s": float(train_s), "eval_s": float(eval_s),
                   "step": self._last_step if step is None else int(step), "correct": int(correct), "counted": int(counted),
                   "no_eval": accuracy is None}
        if accuracy is not None:
            request.update(accuracy=float(accuracy), val_loss=float("nan") if val_loss is None else float(val_loss))
        self._put("ReportEpoch", request)

    def checkpoint(self, path, epoch, accuracy=None, step=0):
        """Hands a whole file over; it must stay until it is sent. Another process reads and sends it."""
        if os.getpid() != self._pid or self._rank != 0:
            return
        self._put("push", {"path": os.path.abspath(path), "epoch": int(epoch), "accuracy": accuracy, "step": int(step)})

    def _put(self, method, request):
        with self._changed:
            self._calls.append((method, request))
            self._changed.notify()

    def close(self, state="finished", reason=""):
        """Ends the run; __exit__ calls it."""
        with self._changed:
            if self._end or os.getpid() != self._pid:
                return
            self._end = (state, reason)
            self._give_up = time.monotonic() + self._close_timeout
            self._changed.notify()
        self._thread.join(self._close_timeout + 5)
        with self._changed:
            left = len(self._calls) + len(self._points) + (len(self._batch["points"]) if self._batch else 0)
        if left or self._dropped:
            self._say("not recorded: %d records, %d step values dropped" % (left, self._dropped))
        self._client.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None or (kind is SystemExit and not error.code):
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.close("killed", "KeyboardInterrupt")
        else:
            self.close("failed", ("%s: %s" % (kind.__name__, error)).replace("\n", " ")[:400])

    # ---- the thread ----

    def _say(self, text):
        sys.stderr.write("paramsync: %s\n" % text)

    def _try(self, work):
        """True once it is done or will never be."""
        try:
            work()
        except Error as e:
            if e.code in _FINAL:
                self._say("refused: %s" % e)
                return True
            if not self._complained:
                self._say("%s; what is recorded waits until it is back" % e)
            self._complained = str(e)
            return False
        except (OSError, ValueError, TypeError) as e:
            self._say("not recorded: %s" % e)
            return True
        if self._complained:
            self._say("%s is back" % self._client.address)
        self._complained = ""
        return True

    def _create(self):
        answer = self._client.call("CreateRun", self._request)["run"]
        self.name, self.attempt, self.id = answer["name"], answer["attempt"], answer["id"]

    def _send_points(self):
        if not self._batch:
            with self._changed:
                points = [self._points.popleft() for _ in range(min(len(self._points), 5000))]
            if not points:
                return
            self._seq += 1
            self._batch = {"run": self.id, "rank": self._rank, "attempt": self.attempt, "seq": self._seq, "points": points}
        acks = list(self._client.call("ReportSteps", iter([self._batch]), 30, "stream_stream"))
        if not acks or acks[-1]["seq"] < self._seq:
            raise Error("%s acknowledged nothing" % self._client.address)
        self._sent += len(self._batch["points"])
        self._batch = None

    def _send_call(self, method, request):
        if method == "ReportEpoch":
            self._client.call("ReportEpoch", dict(request, run=self.id, attempt=self.attempt))
            return
        words = [sys.executable, os.path.abspath(__file__), "push", self.id, request["path"], "--epoch", str(request["epoch"]), "--step",
                 str(request["step"])] + (["--accuracy", repr(float(request["accuracy"]))] if request["accuracy"] is not None else [])
        for name, value in self._options.items():
            if value and name != "token":
                words += ["--" + name.replace("_", "-"), value]
        environment = dict(os.environ)
        if self._options.get("token"):
            environment["PARAMSYNC_TOKEN"] = self._options["token"]
        done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip().split("\n")[-1]
            raise Error(text) if done.returncode == 75 else OSError(text)

    def _beat(self):
        self._client.call("Heartbeat", {"run": self.id, "rank": self._rank, "attempt": self.attempt, "elapsed_s": self._elapsed(),
                                        "step": self._last_step, "points_sent": self._sent, "points_dropped": self._dropped})

    def _work(self):
        pause, next_beat = self._flush, 0.0
        while True:
            good = True
            if not self.id and self._request is not None:
                good = self._try(self._create)
                if good and not self.id:
                    return  # refused
            if good and time.monotonic() >= next_beat:
                good = self._try(self._beat)
                next_beat = time.monotonic() + 5
            while good:
                with self._changed:
                    call = self._calls[0] if self._calls else None
                if not call:
                    break
                good = self._try(lambda: self._send_call(*call))
                if good:
                    with self._changed:
                        self._calls.popleft()
            while good and (self._batch or self._points):
                good = self._try(self._send_points)
                if good:
                    self._batch = None
            with self._changed:
                end, empty = self._end, not self._calls and not self._points
                if end and not (good and empty) and time.monotonic() > self._give_up:
                    return
            if end and good and empty:
                if self._rank != 0 or self._request is None:
                    return
                if self._try(lambda: self._client.call("FinishRun", {
                        "run": self.id, "state": STATES.index(end[0]), "reason": end[1], "attempt": self.attempt, "elapsed_s": self._elapsed()})):
                    return
                good = False
            pause = self._flush if good else min(pause * 2, 5.0)
            with self._changed:
                if not (good and self._calls):
                    self._changed.wait(min(pause, 0.25) if self._end else pause)


def run(name, world_size=None, rank=None, resume=False, model="", dataset="", dataset_hash="", device="", commit="", epochs=0,
        batch_per_rank=0, config=None, tags=(), notes="", sidecar=None, token=None, tls_ca=None, tls_cert=None, tls_key=None, run_id=None,
        attempt=None, close_timeout=30.0, flush=0.5, max_points=200000):
    """A run that is recorded while its block lasts; see the top of this file."""
    rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    options = {"sidecar": sidecar, "token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    if rank != 0 and not run_id:
        return Silent()
    commit = commit or os.environ.get("PARAMSYNC_COMMIT") or os.environ.get("GITHUB_SHA") or os.environ.get("CI_COMMIT_SHA") or ""
    request = None if run_id else {
        "name": name, "world_size": world_size, "resume": bool(resume), "model": model, "dataset": dataset, "dataset_hash": dataset_hash,
        "device": device, "commit": commit, "epochs_planned": int(epochs), "batch_per_rank": int(batch_per_rank), "notes": notes,
        "tags": list(tags), "config": [{"key": str(k), "value": str(v)} for k, v in sorted((config or {}).items())],
        "request_id": uuid.uuid4().hex}
    return Run(options, request, rank, run_id, attempt, close_timeout, flush, max_points)


def get_run(name, **options):
    """A run's record as a dictionary; state is a word."""
    with Client(**options) as client:
        answer = client.call("GetRun", {"run": name})
    answer["state"] = STATES[answer["state"]] if answer["state"] < len(STATES) else "unknown"
    return answer


def push(run, path, epoch, accuracy=None, step=0, **options):
    with Client(**options) as client:
        return client.put(run, path, epoch, accuracy, step)


def pull(run, path=None, best=False, epoch=None, format=None, **options):
    """Fetches a checkpoint, verified; returns its path."""
    with Client(**options) as client:
        return client.pull(run, path, best, epoch, format)[0]


def main():
    parser = argparse.ArgumentParser(prog="paramsync.py", description="Checkpoints to and from a paramsync sidecar.",
                                     epilog="example: python3 paramsync.py pull nightly --best -o best.pth")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("push", help="hand a file to the sidecar")
    one.add_argument("run")
    one.add_argument("file")
    one.add_argument("--epoch", type=int, required=True)
    one.add_argument("--step", type=int, default=0)
    one.add_argument("--accuracy", type=float)
    other = commands.add_parser("pull", help="fetch the latest checkpoint, or another")
    other.add_argument("run")
    other.add_argument("--best", action="store_true")
    other.add_argument("--epoch", type=int)
    other.add_argument("--format")
    other.add_argument("-o", "--output")
    for each in (one, other):
        for name in ("sidecar", "tls-ca", "tls-cert", "tls-key"):
            each.add_argument("--" + name)
    words = parser.parse_args()
    options = {"sidecar": words.sidecar, "tls_ca": words.tls_ca, "tls_cert": words.tls_cert, "tls_key": words.tls_key}
    try:
        if words.command == "push":
            print(push(words.run, words.file, words.epoch, words.accuracy, words.step, **options)["sha256"])
        else:
            print(pull(words.run, words.output, words.best, words.epoch, words.format, **options))
    except (Error, OSError) as e:
        sys.stderr.write("paramsync.py: %s\n" % e)
        return 75 if isinstance(e, Error) and e.code not in _FINAL else 1  # 75: try again later
    return 0


if __name__ == "__main__":
    sys.exit(main())
