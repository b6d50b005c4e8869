#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An answer says that what it is about is on the disk: with syncs held up by a preloaded library, no acknowledgement, no
epoch and no checkpoint is confirmed before they go on. And: many streams at a time, peers with a bound, a log that stays
bounded while somebody always reads."""
import hashlib
import os
import threading

from sidecar_common import *

LIBRARY = pathlib.Path(os.environ["PS_BUILD"]) / "tests" / "libslow_sync.so"


def create(d, name="r", **fields):
    return d.runs.CreateRun(runs.CreateRunRequest(name=name, world_size=2, **fields)).run


def test_sync_before_answer():
    if not LIBRARY.exists() or os.environ.get("PS_SANITIZER"):
        print("left out: a sanitizer wants to be the first library")
        return
    hold, log = folder / "hold", folder / "syncs"
    d = Daemon("durable", environment={"LD_PRELOAD": str(LIBRARY), "PS_HOLD_SYNC": str(hold), "PS_SYNC_LOG": str(log)}).connect()
    create(d)
    syncs = lambda: log.stat().st_size if log.exists() else 0
    data = b"weights" * 1000

    def put():
        head = checkpoints.PutCheckpointHeader(run="r", epoch=1, filename="w.pth", format="pth", size=len(data),
                                               sha256=hashlib.sha256(data).hexdigest())
        return d.checkpoints.PutCheckpoint(iter([
            checkpoints.PutCheckpointRequest(header=head),
            checkpoints.PutCheckpointRequest(chunk=checkpoints.Chunk(offset=0, data=data, crc32c=crc32c(data)))]), timeout=60)
    batch = metrics.StepBatch(run="r", rank=0, attempt=1, seq=1, points=[metrics.Point(name="loss", step=1, value=2.0)])
    for what, call in (
            ("ReportSteps", lambda: list(d.metrics.ReportSteps(iter([batch]), timeout=60))),
            ("ReportEpoch", lambda: d.metrics.ReportEpoch(metrics.ReportEpochRequest(run="r", epoch=1, accuracy=0.5), timeout=60)),
            ("CreateRun", lambda: create(d, "other")),
            ("PutCheckpoint", put),
            ("FinishRun", lambda: d.runs.FinishRun(runs.FinishRunRequest(run="r", state=runs.RUN_STATE_FINISHED), timeout=60))):
        before = syncs()
        hold.write_text("")
        done = threading.Event()
        thread = threading.Thread(target=lambda: (call(), done.set()))
        thread.start()
        check(f"{what}: no answer while the disk has not answered", not done.wait(0.7))
        hold.unlink()
        check(f"{what}: an answer then", done.wait(30))
        thread.join()
        check(f"{what}: after a sync", syncs() > before)
    same("exit status", d.stop(), 0)


def memory(d):
    for line in pathlib.Path(f"/proc/{d.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])


def test_many_streams():
    """A thousand watches that hear nothing, two hundred rank streams that report, and the sidecar answers others."""
    d = Daemon("streams").connect()
    create(d)
    create(d, "quiet")
    channels = [grpc.insecure_channel(d.address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(20)]
    idle = [runs_grpc.RunsStub(channels[i % 20]).WatchRun(runs.WatchRunRequest(run="quiet")) for i in range(1000)]
    for call in idle:
        same("an idle watch hears of the creation", next(call).kind, "created")
    counts = [0] * 200

    def report(rank):
        stub = metrics_grpc.MetricsStub(channels[rank % 20])
        batches = (metrics.StepBatch(run="r", rank=rank, attempt=1, seq=seq, points=[
            metrics.Point(name="loss", step=seq * 10 + i, value=rank) for i in range(10)]) for seq in range(1, 21))
        for ack in stub.ReportSteps(batches, timeout=120):
            counts[rank] = ack.seq
    threads = [threading.Thread(target=report, args=(rank,)) for rank in range(200)]
    for thread in threads:
        thread.start()
    slowest = 0
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        d.runs.GetRun(runs.GetRunRequest(run="r"), timeout=30)
        slowest = max(slowest, time.monotonic() - begun)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    same("every batch was acknowledged", counts, [20] * 200)
    check(f"others were answered meanwhile: {slowest:.2f} s at most", slowest < 20)
    got = d.metrics.QuerySeries(metrics.QuerySeriesRequest(run="r", name="loss", rank=199))
    same("the last rank's points", got.series[0].total_points, 200)
    d.runs.UpdateRun(runs.UpdateRunRequest(run="quiet", notes="heard"))
    for call in idle:
        same("every idle watch still hears", next(call).kind, "updated")
    for call in idle:
        call.cancel()
    for channel in channels:
        channel.close()
    print(f"  {memory(d) / 1024:.0f} MiB with a thousand watches")
    same("exit status", d.stop(), 0)


def test_bounds_for_peers():
    d = Daemon("bounds", "--peer-calls", "20", "--peer-rate", "200k").connect()
    codes = []
    for _ in range(60):
        try:
            d.runs.ListRuns(runs.ListRunsRequest(), timeout=20)
            codes.append("ok")
        except grpc.RpcError as error:
            codes.append(error.code())
            details = error.details()
    check(f"some passed: {codes.count('ok')}", 15 <= codes.count("ok") < 60)
    check(f"others were told: {details}", grpc.StatusCode.RESOURCE_EXHAUSTED in codes and "--peer-calls" in details)
    health = d.channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes)
    same("health is not bounded", [health(b"") for _ in range(50)], [b"\x08\x01"] * 50)
    time.sleep(1.1)  # the share of a second
    create(d)
    data = os.urandom(600_000)
    begun = time.monotonic()
    head = checkpoints.PutCheckpointHeader(run="r", epoch=1, filename="w.pth", format="pth", size=len(data),
                                           sha256=hashlib.sha256(data).hexdigest())
    d.checkpoints.PutCheckpoint(iter(
        [checkpoints.PutCheckpointRequest(header=head)] +
        [checkpoints.PutCheckpointRequest(chunk=checkpoints.Chunk(offset=at, data=data[at:at + 50000], crc32c=crc32c(data[at:at + 50000])))
         for at in range(0, len(data), 50000)]), timeout=60)
    took = time.monotonic() - begun
    check(f"600 kB at 200 KiB/s: {took:.1f} s", took > 1.5)
    begun = time.monotonic()
    got = b"".join(part.chunk.data for part in d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(run="r"), timeout=60))
    took = time.monotonic() - begun
    check(f"and back: {took:.1f} s", got == data and took > 1.5)
    same("exit status", d.stop(), 0)


def test_log_stays_bounded():
    """Readers that overlap without a gap, and a writer: SQLite alone would let the log grow for ever."""
    d = Daemon("log").connect()
    create(d)
    rows = [metrics.Point(name=f"s{i}", step=0, value=i) for i in range(200)]
    stop = threading.Event()

    def read():
        stub = metrics_grpc.MetricsStub(grpc.insecure_channel(d.address, options=[("grpc.use_local_subchannel_pool", 1)]))
        while not stop.is_set():
            stub.QuerySeries(metrics.QuerySeriesRequest(run="r", name="s1", rank=0), timeout=60)
    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    largest = 0
    log = d.dir / "paramsync.db-wal"
    try:
        def batches():
            for seq in range(1, 1201):
                for point in rows:
                    point.step = seq
                yield metrics.StepBatch(run="r", rank=0, attempt=1, seq=seq, points=rows)
        for _ in d.metrics.ReportSteps(batches(), timeout=120):
            largest = max(largest, log.stat().st_size)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    print(f"  the log was {largest / 1e6:.0f} MB at most")
    check(f"the log: {largest} bytes", largest < 80e6)
    same("exit status", d.stop(), 0)


for test in (test_sync_before_answer, test_many_streams, test_bounds_for_peers, test_log_stays_bounded):
    print(test.__name__, flush=True)
    test()
finish()
