#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A python3-grpcio client goes through every method of the sidecar, good calls and bad ones."""
import hashlib
import math
import os
import queue
import struct
import threading

from sidecar_common import *

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
PRECONDITION, LOSS = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS
d = Daemon().connect()


def create(name, **fields):
    fields.setdefault("world_size", 1)
    return d.runs.CreateRun(runs.CreateRunRequest(name=name, **fields)).run


def bits(value):
    return struct.pack("<d", value)


def test_runs():
    answer = d.runs.CreateRun(runs.CreateRunRequest(
        name="r18/a \"quoted\" 'one'", world_size=16, model="resnet18", dataset="CIFAR-10", dataset_hash="ab",
        device="cpu", epochs_planned=100, config=[runs.KeyValue(key="lr", value="0.01")], tags=["x", "y"],
        notes="n", commit="c", batch_per_rank=128, request_id="q"))
    run = answer.run
    same("resumed", answer.resumed, False)
    same("name", run.name, "r18/a \"quoted\" 'one'")
    same("state", run.state, runs.RUN_STATE_CREATED)
    same("config", [(c.key, c.value) for c in run.config], [("lr", "0.01")])
    same("tags", list(run.tags), ["x", "y"])
    check("created_at", run.created_at.seconds > 1e9 and not run.HasField("ended_at"))
    again = d.runs.CreateRun(runs.CreateRunRequest(name=run.name, world_size=16, request_id="q")).run
    same("a repeated request", again.id, run.id)
    same("a taken name", create(run.name).name, run.name + "-2")
    same("by id", d.runs.GetRun(runs.GetRunRequest(run=run.id)).name, run.name)
    same("by name", d.runs.GetRun(runs.GetRunRequest(run=run.name)).id, run.id)
    resumed = d.runs.CreateRun(runs.CreateRunRequest(name=run.name, world_size=8, resume=True))
    check("a resume", resumed.resumed and resumed.run.attempt == 2 and resumed.run.world_size == 8)

    for what, fields, text in [
            ("10,000 characters", dict(name="x" * 10000), "name"), ("no name", dict(name=""), "name"),
            ("a newline", dict(name="a\nb"), "name"), ("no processes", dict(name="a", world_size=0), "world_size"),
            ("long notes", dict(name="a", world_size=1, notes="n" * 70000), "notes"),
            ("an empty tag", dict(name="a", world_size=1, tags=["ok", ""]), "tags[1]"),
            ("a config without key", dict(name="a", world_size=1, config=[runs.KeyValue(value="v")]), "config[0]"),
            ("a config too large for answers", dict(name="a", world_size=1, config=[
                runs.KeyValue(key=f"k{i}", value="v" * 65000) for i in range(20)]), "config: 13000")]:
        fails(what, INVALID, lambda: create(**fields), text)
    fails("an unknown run", MISSING, lambda: d.runs.GetRun(runs.GetRunRequest(run="no/such")), "no/such")
    fails("a long unknown run", MISSING, lambda: d.runs.GetRun(runs.GetRunRequest(run="y" * 10000)))
    fails("an empty run", INVALID, lambda: d.runs.GetRun(runs.GetRunRequest()), "run")

    request = runs.UpdateRunRequest(run=run.id, notes="new", set_tags=True, tags=["z"])
    updated = d.runs.UpdateRun(request)
    same("notes and tags", (updated.notes, list(updated.tags)), ("new", ["z"]))
    same("notes emptied", d.runs.UpdateRun(runs.UpdateRunRequest(run=run.id, notes="")).notes, "")
    same("tags kept", list(d.runs.UpdateRun(runs.UpdateRunRequest(run=run.id)).tags), ["z"])
    fails("tags without set_tags", INVALID, lambda: d.runs.UpdateRun(runs.UpdateRunRequest(run=run.id, tags=["q"])), "set_tags")

    beat = runs.HeartbeatRequest(run=run.id, rank=3, elapsed_s=1.5, step=7, points_sent=1, points_dropped=2)
    same("a heartbeat", d.runs.Heartbeat(beat).state, runs.RUN_STATE_RUNNING)
    fails("a rank", INVALID, lambda: d.runs.Heartbeat(runs.HeartbeatRequest(run=run.id, rank=70000)), "rank")
    fails("elapsed", INVALID, lambda: d.runs.Heartbeat(runs.HeartbeatRequest(run=run.id, elapsed_s=math.nan)), "elapsed_s")
    fails("an attempt to come", MISSING, lambda: d.runs.Heartbeat(runs.HeartbeatRequest(run=run.id, attempt=9)), "9")

    fails("a live run", PRECONDITION, lambda: d.runs.DeleteRun(runs.DeleteRunRequest(run=run.id)), "alive")
    fails("an odd end", INVALID, lambda: d.runs.FinishRun(runs.FinishRunRequest(run=run.id, state=runs.RUN_STATE_LOST)), "state")
    done = d.runs.FinishRun(runs.FinishRunRequest(run=run.id, state=runs.RUN_STATE_FAILED, reason="why", elapsed_s=9))
    check("an end", done.state == runs.RUN_STATE_FAILED and done.reason == "why" and done.HasField("ended_at"))
    fails("another end", PRECONDITION,
          lambda: d.runs.FinishRun(runs.FinishRunRequest(run=run.id, state=runs.RUN_STATE_FINISHED)), "failed")
    d.runs.DeleteRun(runs.DeleteRunRequest(run=run.id))
    fails("a deleted run", MISSING, lambda: d.runs.GetRun(runs.GetRunRequest(run=run.id)))


def test_list():
    for i in range(7):
        create(f"list-{i}")
    names, token = [], ""
    while True:
        page = d.runs.ListRuns(runs.ListRunsRequest(page_size=3, page_token=token, name_contains="LIST-"))
        names += [r.name for r in page.runs]
        token = page.next_page_token
        if not token:
            break
    same("pages", names, [f"list-{i}" for i in range(6, -1, -1)])
    d.runs.FinishRun(runs.FinishRunRequest(run="list-3", state=runs.RUN_STATE_KILLED))
    page = d.runs.ListRuns(runs.ListRunsRequest(states=[runs.RUN_STATE_KILLED]))
    same("by state", [r.name for r in page.runs], ["list-3"])
    fails("a token", INVALID, lambda: d.runs.ListRuns(runs.ListRunsRequest(page_token="x")), "page_token")
    fails("a page", INVALID, lambda: d.runs.ListRuns(runs.ListRunsRequest(page_size=5000)), "page_size")


def batch(run, seq, points, rank=0, attempt=0):
    return metrics.StepBatch(run=run, rank=rank, attempt=attempt, seq=seq,
                             points=[metrics.Point(name=n, step=s, value=v, elapsed_s=t) for n, s, v, t in points])


def report(*batches):
    return list(d.metrics.ReportSteps(iter(batches)))


def series(run, name="", **fields):
    fields.setdefault("rank", -1)
    return d.metrics.QuerySeries(metrics.QuerySeriesRequest(run=run, name=name, **fields))


def test_metrics():
    create("m")
    odd = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 2.2250738585072014e-308, 0.1]
    acks = report(batch("m", 1, [("loss", i, v, i / 4) for i, v in enumerate(odd)]),
                  batch("m", 2, [("loss", 100 + i, float(i), 25 + i) for i in range(5000)]),
                  batch("m", 1, [("loss", 0, 77.0, 0)]))
    same("acks", [(a.rank, a.attempt, a.seq) for a in acks], [(0, 1, 1), (0, 1, 2), (0, 1, 1)])
    got = series("m", "loss", max_points=10000)
    same("names", list(got.names), ["loss"])
    one = got.series[0]
    same("values, bit for bit", [bits(v) for v in one.values[:7]], [bits(v) for v in odd])
    same("all of them once", one.total_points, 5007)
    same("elapsed", list(one.elapsed_s[:3]), [0, 0.25, 0.5])
    few = series("m", "loss", max_points=50).series[0]
    check("few points", len(few.values) <= 50 and few.steps[0] == 0 and few.steps[-1] == 5099 and 4999.0 in few.values)
    same("the window", [len(s.steps) for s in series("m", "loss", from_step=110, to_step=119).series], [10])
    same("only the names", len(series("m").series), 0)
    report(batch("m", 1, [("loss", 1, 1.0, 0)], rank=1))
    same("ranks", [s.rank for s in series("m", "loss").series], [0, 1])
    same("one rank", [s.rank for s in series("m", "loss", rank=1).series], [1])

    for what, bad, text in [("a name", batch("m", 9, [("a b", 1, 1, 0)]), "points[0].name"),
                            ("an empty name", batch("m", 9, [("a", 1, 1, 0), ("", 1, 1, 0)]), "points[1].name"),
                            ("no seq", batch("m", 0, [("a", 1, 1, 0)]), "seq"),
                            ("a step", batch("m", 9, [("a", 1 << 63, 1, 0)]), "points[0].step"),
                            ("elapsed", batch("m", 9, [("a", 1, 1, -1)]), "elapsed_s")]:
        fails(what, INVALID, lambda: report(bad), text)
    fails("no run", MISSING, lambda: report(batch("nobody", 1, [("a", 1, 1, 0)])), "nobody")
    same("nothing was stored of them", list(series("m").names), ["loss"])
    fails("points", INVALID, lambda: series("m", "loss", max_points=99999), "max_points")
    fails("rank", INVALID, lambda: series("m", "loss", rank=-2), "rank")
    fails("window", INVALID, lambda: series("m", "loss", from_step=5, to_step=2), "to_step")

    epoch = metrics.ReportEpochRequest(run="m", epoch=1, train_loss=math.nan, val_loss=2, accuracy=0.5, lr=0.01,
                                       samples_per_s=100, elapsed_s=10, train_s=8, eval_s=2, step=390, correct=5, counted=10)
    same("an epoch", d.metrics.ReportEpoch(epoch).replaced, False)
    same("again", d.metrics.ReportEpoch(epoch).replaced, True)
    point = series("m").epochs[0]
    check("its values", math.isnan(point.train_loss) and point.accuracy == 0.5 and point.correct == 5 and point.attempt == 1)
    run = d.runs.GetRun(runs.GetRunRequest(run="m"))
    check("the run's summary", run.has_epochs and run.best_epoch == 1 and run.best_accuracy == 0.5 and
          run.state == runs.RUN_STATE_RUNNING and math.isnan(run.train_loss))
    for what, change, text in [("epoch 0", dict(epoch=0), "epoch"), ("per cent", dict(epoch=1, accuracy=80), "accuracy"),
                               ("elapsed", dict(epoch=1, elapsed_s=-1), "elapsed_s"),
                               ("correct", dict(epoch=1, correct=3, counted=2), "correct")]:
        fails(what, INVALID, lambda: d.metrics.ReportEpoch(metrics.ReportEpochRequest(run="m", **change)), text)
    # A resume: attempts add up, the newest one wins.
    d.runs.Heartbeat(runs.HeartbeatRequest(run="m", elapsed_s=60))
    create("m", resume=True)
    d.metrics.ReportEpoch(metrics.ReportEpochRequest(run="m", epoch=1, accuracy=0.4, elapsed_s=5))
    got = series("m").epochs
    same("the newest attempt", [(e.attempt, e.accuracy, e.elapsed_s) for e in got], [(2, 0.4, 5024 + 5)])
    same("all attempts", [e.attempt for e in series("m", all_attempts=True).epochs], [1, 2])


def put_parts(run, data, chunk=100000, epoch=1, fmt="safetensors", **header):
    header.setdefault("sha256", hashlib.sha256(data).hexdigest())
    header.setdefault("size", len(data))
    header.setdefault("filename", f"epoch_{epoch}.{fmt}")
    yield checkpoints.PutCheckpointRequest(
        header=checkpoints.PutCheckpointHeader(run=run, epoch=epoch, format=fmt, **header))
    for at in range(0, len(data), chunk):
        piece = data[at:at + chunk]
        yield checkpoints.PutCheckpointRequest(chunk=checkpoints.Chunk(offset=at, data=piece, crc32c=crc32c(piece)))


def put(run, data, **header):
    return d.checkpoints.PutCheckpoint(put_parts(run, data, **header))


def pull(run, selector=None, offset=0, chunk_bytes=0, limit=None):
    call = d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(
        run=run, selector=selector, offset=offset, chunk_bytes=chunk_bytes))
    first = next(call)
    data = b""
    for part in call:
        check("offset", part.chunk.offset == offset + len(data))
        check("crc", part.chunk.crc32c == crc32c(part.chunk.data))
        data += part.chunk.data
        if limit and len(data) >= limit:
            call.cancel()
            break
    return first.checkpoint, data


def blob(sha):
    return d.dir / "blobs" / "sha256" / sha[:2] / sha[2:]


def leftovers():
    return os.listdir(d.dir / "blobs" / "tmp")


def test_confusion():
    create("c")
    get = lambda **which: d.metrics.GetConfusion(metrics.GetConfusionRequest(run="c", **which))
    put = lambda epoch, counts, **more: d.metrics.ReportEpoch(metrics.ReportEpochRequest(
        run="c", epoch=epoch, confusion=counts, elapsed_s=epoch,
        **{"counted": sum(counts), "correct": counts[0] + counts[-1], "accuracy": (counts[0] + counts[-1]) / max(1, sum(counts)), **more}))
    fails("none yet", grpc.StatusCode.NOT_FOUND, get, "confusion")
    put(1, [5, 5, 6, 4])
    put(2, [9, 1, 2, 8])
    put(3, [7, 3, 3, 7])
    put(4, [8, 2, 3, 7])
    same("the best", (get().epoch, list(get().counts), get().classes), (2, [9, 1, 2, 8], 2))
    same("the newest", (get(latest=True).epoch, list(get(latest=True).counts)), (4, [8, 2, 3, 7]))
    same("by number", list(get(epoch=4).counts), [8, 2, 3, 7])
    fails("given up", grpc.StatusCode.NOT_FOUND, lambda: get(epoch=3), "confusion")
    fails("no square", INVALID, lambda: put(5, [1, 2, 3]), "square")
    fails("too many", INVALID, lambda: put(5, [0] * 101 * 101), "1 to 100")
    fails("another sum", INVALID, lambda: put(5, [1, 0, 0, 1], counted=3), "counted")
    fails("another diagonal", INVALID, lambda: put(5, [1, 0, 0, 1], correct=1), "correct")
    fails("no such run", grpc.StatusCode.NOT_FOUND, lambda: d.metrics.GetConfusion(metrics.GetConfusionRequest(run="zz")), "zz")


def test_rendezvous():
    r = d.rendezvous
    put = lambda key, value, run="job", **more: r.Set(rendezvous.SetRequest(run=run, key=key, value=value, **more))
    get = lambda key, run="job", timeout=20, **more: r.Get(rendezvous.GetRequest(run=run, key=key, **more), timeout=timeout).value
    put("a", b"\0\xff1")
    same("a value", get("a"), b"\0\xff1")
    put("a", b"")
    same("an empty one in its place", get("a"), b"")
    fails("another run's", grpc.StatusCode.NOT_FOUND, lambda: get("a", run="other", no_wait=True), "a is not there")
    fails("not in time", grpc.StatusCode.DEADLINE_EXCEEDED, lambda: get("b", timeout=0.3))
    same("sums", [r.Add(rendezvous.AddRequest(run="job", key="n", amount=k)).sum for k in (1, 41, -2)], [1, 42, 40])
    same("a counter's digits", get("n"), b"40")
    fails("no counter", grpc.StatusCode.FAILED_PRECONDITION, lambda: r.Add(rendezvous.AddRequest(run="job", key="a", amount=1)), "key")
    fails("no key", INVALID, lambda: put("", b"x"), "key")
    fails("no run", INVALID, lambda: put("k", b"x", run=""), "run")
    fails("a long key", INVALID, lambda: put("k" * 257, b"x"), "key")
    fails("a long value", INVALID, lambda: put("k", b"x" * 65537), "value")
    fails("a time", INVALID, lambda: put("k", b"x", ttl_s=-1), "ttl_s")
    fails("a time", INVALID, lambda: put("k", b"x", ttl_s=math.nan), "ttl_s")
    # More wait than there are workers, others are still answered, and all get it.
    waiting = [r.Get.future(rendezvous.GetRequest(run="job", key="late"), timeout=60) for _ in range(200)]
    same("answered meanwhile", d.runs.ListRuns(runs.ListRunsRequest(), timeout=20) is not None, True)
    put("late", b"here")
    same("all of them", {w.result().value for w in waiting}, {b"here"})


def test_checkpoints():
    create("c")
    select = checkpoints.CheckpointSelector
    data = [os.urandom(700001), os.urandom(5000), os.urandom(123)]
    fails("nothing yet", MISSING, lambda: d.checkpoints.GetCheckpoint(checkpoints.GetCheckpointRequest(run="c")))
    stored = put("c", data[0], accuracy=0.5, has_accuracy=True, step=390)
    same("what was put", (stored.size, stored.epoch, stored.attempt, stored.filename, stored.accuracy),
         (700001, 1, 1, "epoch_1.safetensors", 0.5))
    same("the file", blob(stored.sha256).read_bytes(), data[0])
    put("c", data[0], accuracy=0.5, has_accuracy=True)
    put("c", data[1], epoch=2, accuracy=0.9, has_accuracy=True)
    put("c", data[2], epoch=3, accuracy=0.9, has_accuracy=True)
    put("c", b"state", epoch=3, fmt="state")
    listed = d.checkpoints.ListCheckpoints(checkpoints.ListCheckpointsRequest(run="c")).checkpoints
    same("the list", [(c.epoch, c.format) for c in listed],
         [(1, "safetensors"), (2, "safetensors"), (3, "safetensors"), (3, "state")])

    def get(**which):
        return d.checkpoints.GetCheckpoint(checkpoints.GetCheckpointRequest(run="c", selector=select(**which))).epoch
    same("latest", get(latest=True), 3)
    same("best, the earlier of two", get(best=True), 2)
    same("by epoch", get(epoch=1), 1)
    same("by content", get(sha256=hashlib.sha256(data[1]).hexdigest()), 2)
    same("by format", get(latest=True, format="state"), 3)
    fails("epoch 9", MISSING, lambda: get(epoch=9), "epoch 9")
    fails("epoch 0", INVALID, lambda: get(epoch=0), "epoch")
    fails("a digest", INVALID, lambda: get(sha256="xyz"), "sha256")

    about, content = pull("c", select(epoch=1), chunk_bytes=4096)
    check("pulled", about.sha256 == stored.sha256 and content == data[0])
    _, part = pull("c", select(epoch=1), limit=300000)
    _, rest = pull("c", select(epoch=1), offset=len(part))
    check("stopped and resumed", 300000 <= len(part) < len(data[0]) and part + rest == data[0])
    same("nothing left", pull("c", select(epoch=1), offset=700001)[1], b"")
    fails("past the end", grpc.StatusCode.OUT_OF_RANGE, lambda: pull("c", select(epoch=1), offset=700002), "offset")
    fails("tiny chunks", INVALID, lambda: pull("c", chunk_bytes=100), "chunk_bytes")

    for what, bad, text in [("a path", dict(filename="../x"), "filename"), ("a dot", dict(filename=".."), "filename"),
                            ("a format", dict(fmt="exe"), "format"), ("a digest", dict(sha256="AB"), "sha256"),
                            ("no epoch", dict(epoch=0), "epoch"), ("no bytes", dict(size=0), "size"),
                            ("accuracy", dict(has_accuracy=True, accuracy=2), "accuracy")]:
        fails(what, INVALID, lambda: put("c", b"abc", **bad), text)
    fails("no run", MISSING, lambda: put("nobody", b"abc"), "nobody")
    fails("an attempt to come", MISSING, lambda: put("c", b"abc", attempt=5), "attempt")
    fails("too short", INVALID, lambda: put("c", b"abc", size=4), "size")
    fails("too long", INVALID, lambda: put("c", b"abc", size=2), "2 bytes")
    fails("other content", LOSS, lambda: put("c", b"abc", sha256="0" * 64), "sha256")
    corrupted = list(put_parts("c", os.urandom(1000), chunk=400, epoch=8))
    corrupted[2].chunk.data = b"!" + corrupted[2].chunk.data[1:]
    fails("a corrupted chunk", LOSS, lambda: d.checkpoints.PutCheckpoint(iter(corrupted)), "offset 400")
    parts = list(put_parts("c", os.urandom(1000), chunk=400, epoch=8))
    fails("chunks out of order", INVALID, lambda: d.checkpoints.PutCheckpoint(iter([parts[0], parts[2]])), "offset")
    fails("no header", INVALID, lambda: d.checkpoints.PutCheckpoint(iter(parts[1:])), "header")
    fails("two headers", INVALID, lambda: d.checkpoints.PutCheckpoint(iter([parts[0], parts[0]])), "header")
    fails("nothing at all", INVALID, lambda: d.checkpoints.PutCheckpoint(iter([])), "header")
    fails("none of it is there", MISSING, lambda: get(epoch=8))
    same("no leftovers", leftovers(), [])

    # A file that was cut is not handed out as if it were whole.
    path = blob(hashlib.sha256(data[1]).hexdigest())
    path.write_bytes(data[1][:100])
    fails("a damaged file", LOSS, lambda: pull("c", select(epoch=2)), "bytes")
    put("c", data[1], epoch=2)
    same("put right by putting it again", pull("c", select(epoch=2))[1], data[1])

    create("c2")
    put("c2", data[2])
    sha = hashlib.sha256(data[2]).hexdigest()

    def delete(run):
        return d.checkpoints.DeleteCheckpoint(checkpoints.DeleteCheckpointRequest(run=run, sha256=sha)).bytes_freed
    same("still another run's", delete("c"), 0)
    check("the file stays", blob(sha).exists())
    fails("gone from this run", MISSING, lambda: delete("c"), "sha256")
    same("now it goes", delete("c2"), 123)
    check("the file is gone", not blob(sha).exists())
    d.runs.FinishRun(runs.FinishRunRequest(run="c", state=runs.RUN_STATE_FINISHED))
    freed = d.runs.DeleteRun(runs.DeleteRunRequest(run="c")).bytes_freed
    same("the run's files", freed, 700001 + 5000 + 5)
    check("are gone", not blob(stored.sha256).exists())


def collect(call):
    """The stream's messages in a queue; then its status code."""
    q = queue.Queue()

    def read():
        try:
            for message in call:
                q.put(message)
            q.put(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            q.put(error.code())
    threading.Thread(target=read, daemon=True).start()
    return lambda: q.get(timeout=30)


def test_watching():
    create("w")
    call = d.runs.WatchRun(runs.WatchRunRequest(run="w"))
    event = collect(call)
    first = event()
    check("replayed", first.kind == "created" and not first.HasField("run"))
    d.metrics.ReportEpoch(metrics.ReportEpochRequest(run="w", epoch=1, accuracy=0.5))
    second, third = event(), event()
    check("live", (second.kind, third.kind) == ("updated", "epoch") and third.run.last_epoch == 1)
    check("ids increase", first.id < second.id < third.id)
    create("unrelated")
    calls = d.checkpoints.WatchCheckpoints(checkpoints.WatchCheckpointsRequest(run="w"))
    checkpoint = collect(calls)
    put("w", b"one", epoch=1)
    put("w", b"a state", epoch=1, fmt="state")
    put("w", b"two", epoch=2)
    same("new checkpoints", [checkpoint().epoch, checkpoint().epoch], [1, 2])
    other = d.checkpoints.WatchCheckpoints(checkpoints.WatchCheckpointsRequest(run="w"))
    same("first the newest", collect(other)().epoch, 2)
    other.cancel()
    same("their events", [event().kind for _ in range(3)], ["checkpoint"] * 3)
    since = d.runs.WatchRun(runs.WatchRunRequest(run="w", since_id=second.id))
    same("since", collect(since)().id, third.id)
    since.cancel()
    d.runs.FinishRun(runs.FinishRunRequest(run="w", state=runs.RUN_STATE_FINISHED, reason="done"))
    last = event()
    check("the end", last.kind == "finished" and last.detail == "done" and last.run.state == runs.RUN_STATE_FINISHED)
    d.runs.DeleteRun(runs.DeleteRunRequest(run="w"))
    same("deleted", event().kind, "deleted")
    same("and over", event(), grpc.StatusCode.OK)
    same("and over for checkpoints", checkpoint(), grpc.StatusCode.OK)
    fails("no run", MISSING, lambda: next(d.runs.WatchRun(runs.WatchRunRequest(run="nobody"))))
    fails("no run", MISSING, lambda: next(d.checkpoints.WatchCheckpoints(checkpoints.WatchCheckpointsRequest(run="nobody"))))


def test_gate():
    for name, world, speed, accuracy in [("one", 1, 100, 0.85), ("two", 2, 180, 0.82)]:
        create(name, world_size=world, model="resnet18", dataset="CIFAR-10", dataset_hash="h",
               config=[runs.KeyValue(key="width", value="64"), runs.KeyValue(key="resolution", value="32")])
        for epoch in range(1, 5):
            d.metrics.ReportEpoch(metrics.ReportEpochRequest(
                run=name, epoch=epoch, accuracy=accuracy * epoch / 4, samples_per_s=speed, elapsed_s=epoch * 1000 / speed))
        d.runs.FinishRun(runs.FinishRunRequest(run=name, state=runs.RUN_STATE_FINISHED, elapsed_s=4000 / speed))
    got = d.gate.Compare(gate.CompareRequest(runs=["one", "two"]))
    same("reference and target", (got.reference, got.target), ("one", 0.8))
    row = got.rows[1]
    check("speed-up", row.has_speedup and abs(row.speedup - 1.8) < 1e-9 and abs(row.efficiency - 0.9) < 1e-9)
    check("time to target", row.has_time_to_target and row.epochs_to_target == 4)
    got = d.gate.Compare(gate.CompareRequest(runs=["one", "two"], baseline="sample-16"))
    same("a published baseline", (got.reference, [r.threshold_only for r in got.rows]), ("sample-16", [False, False, True]))
    fails("a target", INVALID, lambda: d.gate.Compare(gate.CompareRequest(runs=["one"], target=80)), "target")
    fails("no runs", INVALID, lambda: d.gate.Compare(gate.CompareRequest()), "runs")
    fails("an unknown run", MISSING, lambda: d.gate.Compare(gate.CompareRequest(runs=["one", "nobody"])), "nobody")
    verdict = d.gate.Evaluate(gate.EvaluateRequest(runs=["one"], min_accuracy=0.8))
    same("pass", verdict.verdict, gate.EvaluateResponse.PASS)
    verdict = d.gate.Evaluate(gate.EvaluateRequest(runs=["one"], min_accuracy=0.9))
    check(f"fail: {verdict}", verdict.verdict == gate.EvaluateResponse.FAIL and verdict.reason and "fail" in [c.verdict for c in verdict.checks])
    fails("no accuracy", INVALID, lambda: d.gate.Evaluate(gate.EvaluateRequest(runs=["one"])))


def test_unknown_method():
    call = d.channel.unary_unary("/paramsync.v1.Runs/Nonsense", request_serializer=bytes, response_deserializer=bytes)
    fails("an unknown method", grpc.StatusCode.UNIMPLEMENTED, lambda: call(b""))
    call = d.channel.unary_unary("/paramsync.v1.Runs/GetRun", request_serializer=bytes, response_deserializer=bytes)
    fails("text that is no UTF-8", INVALID, lambda: call(b"\x0a\x02\xff\xfe"), "run")


for test in (test_runs, test_list, test_metrics, test_confusion, test_rendezvous, test_checkpoints, test_watching, test_gate, test_unknown_method):
    print(test.__name__, flush=True)
    test()
# A stop with a stream that is open: its client is told, and the daemon does not wait for it.
stream = collect(d.runs.WatchRun(runs.WatchRunRequest(run="list-3", since_id=1 << 40)))
d.runs.UpdateRun(runs.UpdateRunRequest(run="list-3", notes="one event"))
d.process.send_signal(signal.SIGTERM)
same("the open stream", stream(), grpc.StatusCode.UNAVAILABLE)
same("exit status after SIGTERM", d.stop(), 0)
finish()
