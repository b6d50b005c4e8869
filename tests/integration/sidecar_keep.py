#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the sidecar keeps and hands out: registered checkpoints, parts of checkpoints, retention, rank logs, roll-up, a
backup of a live store and a look at all of it, pull --follow, a store of an earlier schema."""
import hashlib
import json
import os
import random
import shutil
import sqlite3
import struct
import threading

from sidecar_common import *

CLI = pathlib.Path(os.environ["PS_BIN"]) / "paramsync"


def create(d, name="r", **fields):
    return d.runs.CreateRun(runs.CreateRunRequest(name=name, world_size=2, **fields)).run


def safetensors(tensors):
    """{name: (dtype, shape, bytes)} as a file."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read_safetensors(raw):
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    return {name: (entry["dtype"], entry["shape"], raw[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


def put(d, data, epoch=1, run="r", format="safetensors", **fields):
    def parts():
        yield checkpoints.PutCheckpointRequest(header=checkpoints.PutCheckpointHeader(
            run=run, epoch=epoch, filename=f"epoch_{epoch}.{format}", format=format, size=len(data),
            sha256=hashlib.sha256(data).hexdigest(), **fields))
        for at in range(0, len(data), 1 << 18):
            piece = data[at:at + (1 << 18)]
            yield checkpoints.PutCheckpointRequest(chunk=checkpoints.Chunk(offset=at, data=piece, crc32c=crc32c(piece)))
    return d.checkpoints.PutCheckpoint(parts(), timeout=60)


def pull(d, run="r", offset=0, **fields):
    """(metadata, bytes) of a pull."""
    meta, data = None, b""
    for part in d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(run=run, offset=offset, **fields), timeout=60):
        if part.HasField("checkpoint"):
            meta = part.checkpoint
        else:
            assert part.chunk.offset == offset + len(data) and crc32c(part.chunk.data) == part.chunk.crc32c
            data += part.chunk.data
    return meta, data


def cli(d, *words, status=0, **options):
    result = subprocess.run([CLI, *map(str, words), "--sidecar", d.address] if d else [CLI, *map(str, words)],
                            capture_output=True, text=True, timeout=120, **options)
    check(f"paramsync {words}: {result.returncode} {result.stderr!r}", result.returncode == status)
    return result


def test_register():
    root, outside = folder / "work", folder / "outside"
    (root / "deep").mkdir(parents=True)
    outside.mkdir()
    data = os.urandom(300_000)
    (root / "deep" / "epoch_1.safetensors").write_bytes(data)
    (outside / "secret.safetensors").write_bytes(b"secret")
    (root / "link.safetensors").symlink_to(outside / "secret.safetensors")
    (root / "up").symlink_to("..")
    (root / "within.safetensors").symlink_to("deep/epoch_1.safetensors")
    (root / "empty.safetensors").write_bytes(b"")
    os.mkfifo(root / "fifo.safetensors")
    d = Daemon("off").connect()
    create(d)
    ask = lambda d, path, **more: d.checkpoints.RegisterCheckpoint(
        checkpoints.RegisterCheckpointRequest(run="r", epoch=1, path=str(path), **more), timeout=30)
    fails("without --register-root", grpc.StatusCode.FAILED_PRECONDITION,
          lambda: ask(d, root / "deep" / "epoch_1.safetensors"), "--register-root")
    same("exit status", d.stop(), 0)

    d = Daemon("register", "--register-root", root, http=True).connect()
    create(d)
    bad = grpc.StatusCode.INVALID_ARGUMENT
    for path, code, words in (
            (outside / "secret.safetensors", bad, "does not lie beneath"), ("../outside/secret.safetensors", bad, "leads out"),
            ("link.safetensors", bad, "leads out"), ("up/outside/secret.safetensors", bad, "leads out"),
            (str(root) + "x/y.safetensors", bad, "does not lie beneath"), ("", bad, "path:"), ("deep", bad, "format"),
            ("deep/../../outside/secret.safetensors", bad, "leads out"), ("fifo.safetensors", bad, "no regular file"),
            ("empty.safetensors", bad, "empty"), ("nothing.safetensors", grpc.StatusCode.NOT_FOUND, "there is no"),
            ("x" * 5000 + ".safetensors", bad, "path:"), ("deep/epoch_1.safetensors\0", bad, "")):
        fails(f"register {str(path)[:60]!r}", code, lambda: ask(d, path), words)
    fails("another digest", grpc.StatusCode.DATA_LOSS, lambda: ask(d, "deep/epoch_1.safetensors", sha256="0" * 64), "sha256")
    fails("an unknown run", grpc.StatusCode.NOT_FOUND, lambda: d.checkpoints.RegisterCheckpoint(
        checkpoints.RegisterCheckpointRequest(run="none", epoch=1, path="deep/epoch_1.safetensors"), timeout=30))
    same("nothing was stored", len(d.checkpoints.ListCheckpoints(checkpoints.ListCheckpointsRequest(run="r")).checkpoints), 0)
    got = ask(d, root / "deep" / "epoch_1.safetensors", accuracy=0.5, has_accuracy=True)
    sha = hashlib.sha256(data).hexdigest()
    same("registered", (got.sha256, got.size, got.filename, got.format, got.registered_path, got.accuracy),
         (sha, len(data), "epoch_1.safetensors", "safetensors", "deep/epoch_1.safetensors", 0.5))
    same("by a link that stays within", ask(d, "within.safetensors").sha256, sha)
    check("no copy was made", not list((d.dir / "blobs" / "sha256").rglob("*/*")))
    same("pulled", pull(d)[1], data)
    import urllib.request
    read = lambda: urllib.request.urlopen(f"http://127.0.0.1:{d.http_port}/api/v1/checkpoints/{sha}", timeout=30).read()
    same("over HTTP", read() == data, True)

    spoiled = bytearray(data)
    spoiled[7] ^= 1
    (root / "deep" / "epoch_1.safetensors").write_bytes(spoiled)
    fails("changed since", grpc.StatusCode.DATA_LOSS, lambda: pull(d), "changed")
    try:
        read()
        check("HTTP gives changed bytes", False)
    except urllib.error.HTTPError as error:
        check(f"over HTTP: {error.code}", error.code == 500)
    (root / "deep" / "epoch_1.safetensors").unlink()
    fails("gone since", grpc.StatusCode.DATA_LOSS, lambda: pull(d), "gone")
    put(d, data)  # now the sidecar holds it itself
    same("put after it", pull(d)[1], data)
    (root / "deep" / "epoch_1.safetensors").write_bytes(data)
    freed = d.runs.FinishRun(runs.FinishRunRequest(run="r", state=runs.RUN_STATE_FINISHED))
    d.runs.DeleteRun(runs.DeleteRunRequest(run="r"))
    check("deleting the run leaves the file", (root / "deep" / "epoch_1.safetensors").read_bytes() == data)
    same("exit status", d.stop(), 0)


def test_known_content():
    """What the sidecar has is not sent again, unless its own copy has rotted."""
    d = Daemon("known").connect()
    create(d)
    create(d, "other")
    data = os.urandom(400_000)
    put(d, data)
    header = lambda run: checkpoints.PutCheckpointRequest(header=checkpoints.PutCheckpointHeader(
        run=run, epoch=1, filename="w.safetensors", format="safetensors", size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    again = threading.Event()

    def only_header():
        yield header("other")
        again.wait(60)
    got = d.checkpoints.PutCheckpoint(only_header(), timeout=60)
    again.set()
    same("answered without data", (got.run_name, got.size), ("other", len(data)))
    same("and pulled", pull(d, "other")[1] == data, True)
    file = next((d.dir / "blobs" / "sha256").rglob("*/*"))
    rotten = bytearray(data)
    rotten[99] ^= 1
    file.write_bytes(rotten)
    fails("a rotten copy is not known", grpc.StatusCode.INVALID_ARGUMENT,
          lambda: d.checkpoints.PutCheckpoint(iter([header("other")]), timeout=60), "announced")
    put(d, data, epoch=2, run="other")
    same("and is put right", pull(d)[1] == data, True)
    same("exit status", d.stop(), 0)


def bf16(raw):
    """Round to nearest, ties to even, by Python's integers."""
    out = b""
    for (bits,) in struct.iter_unpack("<I", raw):
        low, high = bits & 0xffff, bits >> 16
        if (bits & 0x7fffffff) > 0x7f800000:
            high |= 0x40
        elif low > 0x8000 or (low == 0x8000 and high & 1):
            high += 1
        out += struct.pack("<H", high & 0xffff)
    return out


def test_parts():
    rng = random.Random(7)
    weights = struct.pack("<5000f", *(rng.gauss(0, 1) for _ in range(5000)))
    count = struct.pack("<q", 12345)
    source = {"conv1.weight": ("F32", [50, 100], weights), "bn1.num_batches_tracked": ("I64", [], count),
              "fc.bias": ("F32", [10], struct.pack("<10f", *range(10)))}
    data = safetensors(source)
    d = Daemon("parts").connect()
    create(d)
    put(d, data)
    put(d, b"not safetensors at all" * 100, epoch=2, run="r", format="pth")
    meta, whole = pull(d)
    same("the file as it is", (whole == data, meta.source_sha256, meta.sha256), (True, "", hashlib.sha256(data).hexdigest()))
    meta, part = pull(d, tensors=["fc.bias", "bn1.num_batches_tracked"])
    same("two tensors", read_safetensors(part), {k: source[k] for k in ("bn1.num_batches_tracked", "fc.bias")})
    same("their digest", (meta.size, meta.sha256, meta.source_sha256),
         (len(part), hashlib.sha256(part).hexdigest(), hashlib.sha256(data).hexdigest()))
    asked = d.checkpoints.GetCheckpoint(checkpoints.GetCheckpointRequest(run="r", tensors=["fc.bias", "bn1.num_batches_tracked"]))
    same("GetCheckpoint tells the same", (asked.size, asked.sha256), (meta.size, meta.sha256))
    meta, half = pull(d, dtype="bf16", chunk_bytes=4096)
    got = read_safetensors(half)
    same("bf16", got, {"conv1.weight": ("BF16", [50, 100], bf16(weights)), "bn1.num_batches_tracked": ("I64", [], count),
                       "fc.bias": ("BF16", [10], bf16(source["fc.bias"][2]))})
    for offset in (1, 7, 200, len(half) - 1, len(half)):
        same(f"from {offset} on", pull(d, offset=offset, dtype="bf16", chunk_bytes=4096)[1] == half[offset:], True)
    fails("past the end", grpc.StatusCode.OUT_OF_RANGE, lambda: pull(d, offset=len(half) + 1, dtype="bf16"), "offset")
    fails("no such tensor", grpc.StatusCode.NOT_FOUND, lambda: pull(d, tensors=["fc.bias", "nope"]), "no tensor nope")
    fails("no such dtype", grpc.StatusCode.INVALID_ARGUMENT, lambda: pull(d, dtype="int8"), "bf16")
    fails("not of a pth", grpc.StatusCode.INVALID_ARGUMENT, lambda: pull(
        d, tensors=["x"], selector=checkpoints.CheckpointSelector(epoch=2, format="pth")), "safetensors")

    out = folder / "small.safetensors"
    cli(d, "pull", "r", "--tensors", "fc.bias", "--dtype", "bf16", "-o", out)
    same("by the command line", read_safetensors(out.read_bytes()), {"fc.bias": got["fc.bias"]})
    out.with_name("cut.safetensors.part").write_bytes(half[:1000])  # an interrupted one goes on
    cli(d, "pull", "r", "--dtype", "bf16", "-o", folder / "cut.safetensors")
    same("resumed", (folder / "cut.safetensors").read_bytes() == half, True)
    begun = time.monotonic()
    cli(d, "pull", "r", "--limit-rate", "10k", "-o", folder / "slow.safetensors")
    took = time.monotonic() - begun
    check(f"{len(data)} bytes at 10 KiB/s took {took:.2f} s", took > 1)
    for words, text in (("--limit-rate x", "--limit-rate"), ("--limit-rate 0", "--limit-rate"), ("--limit-rate 5MB", "--limit-rate"),
                        ("--tensors ,", "--tensors"), ("--follow x --epoch 3", "--follow")):
        check(f"{words} is refused", text in cli(d, "pull", "r", *words.split(), status=2).stderr)
    same("exit status", d.stop(), 0)


def epochs_of(d, run="r", format="safetensors"):
    listing = d.checkpoints.ListCheckpoints(checkpoints.ListCheckpointsRequest(run=run)).checkpoints
    return [c.epoch for c in listing if c.format == format]


def test_retention():
    accuracies = [0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.4, 0.5]
    for flags, wanted in (((), [1, 2, 3, 4, 5, 6, 7, 8]), (("--keep-last", 2), [2, 7, 8]), (("--keep-best", 3), [2, 4, 6, 8]),
                          (("--keep-last", 3, "--keep-best", 2), [2, 4, 6, 7, 8]), (("--keep-last", 1), [2, 8])):
        d = Daemon("keep" + "".join(map(str, flags)).replace("-", ""), *flags).connect()
        create(d)
        for epoch, accuracy in enumerate(accuracies, 1):
            put(d, os.urandom(1000), epoch, accuracy=accuracy, has_accuracy=True)
            put(d, os.urandom(1000), epoch, format="state")
        same(f"{flags}: what stays", epochs_of(d), wanted)
        same(f"{flags}: the newest two states", epochs_of(d, format="state"), [7, 8])
        same("files on the disk", len(list((d.dir / "blobs" / "sha256").rglob("*/*"))), len(wanted) + 2)
        events = [e for e in read_events(d)]
        check(f"{flags}: no event for each: {events}", not any("deleted" in e for e in events))
        same("exit status", d.stop(), 0)

    # One that is being pulled stays until it is.
    d = Daemon("pulling", "--keep-last", 1).connect()
    create(d)
    data = os.urandom(8_000_000)
    put(d, data, 1)
    call = d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(run="r", chunk_bytes=4096, max_bytes_per_s=1 << 20))
    next(call)
    put(d, os.urandom(1000), 2)
    same("while it is pulled", epochs_of(d), [1, 2])
    call.cancel()
    def gone():
        put(d, os.urandom(1000), 3)
        return epochs_of(d) == [3]
    wait_for("it to go afterwards", gone)
    same("exit status", d.stop(), 0)


def read_events(d, run="r"):
    call = d.runs.WatchRun(runs.WatchRunRequest(run=run), timeout=2)
    found = []
    try:
        for event in call:
            found.append(event.detail)
    except grpc.RpcError:
        pass
    return found


def test_paging():
    d = Daemon("pages").connect()
    create(d)
    for epoch in range(1, 8):
        put(d, os.urandom(100 + epoch), epoch)
    ask = lambda **more: d.checkpoints.ListCheckpoints(checkpoints.ListCheckpointsRequest(run="r", **more))
    for size in (1, 3, 6, 7, 8):
        found, token = [], ""
        while True:
            page = ask(page_size=size, page_token=token)
            check("no page is too long", len(page.checkpoints) <= size)
            found += [c.epoch for c in page.checkpoints]
            token = page.next_page_token
            if not token:
                break
        same(f"in pages of {size}", found, list(range(1, 8)))
    fails("too large a page", grpc.StatusCode.INVALID_ARGUMENT, lambda: ask(page_size=5001), "page_size")
    for token in ("x", "1.2", "1.2.3.4", "9" * 100):
        fails(f"page token {token[:9]}", grpc.StatusCode.INVALID_ARGUMENT, lambda: ask(page_token=token), "page_token")
    same("exit status", d.stop(), 0)


def test_logs_and_facts():
    d = Daemon("logs").connect()
    create(d)
    beat = lambda rank, first, lines, **more: d.runs.Heartbeat(runs.HeartbeatRequest(
        run="r", rank=rank, log=lines, first_line=first, wall_s=time.time() + 100, rss_bytes=1 << 20, points_replayed=7, **more))
    beat(0, 1, ["one", "two"])
    beat(0, 2, ["two", "three \u4f60\u597d"])  # one of them a second time
    beat(1, 1, [f"line {i}" for i in range(150)])
    beat(1, 151, [f"line {i}" for i in range(150, 300)])
    ask = lambda rank=-1, **more: [(line.rank, line.seq, line.text)
                                   for line in d.runs.GetLog(runs.GetLogRequest(run="r", rank=rank, **more)).lines]
    same("rank 0", ask(0), [(0, 1, "one"), (0, 2, "two"), (0, 3, "three \u4f60\u597d")])
    same("the last 200 of rank 1", ask(1), [(1, i + 1, f"line {i}") for i in range(100, 300)])
    same("the last 2 of each", ask(lines=2), [(0, 2, "two"), (0, 3, "three \u4f60\u597d"), (1, 299, "line 298"), (1, 300, "line 299")])
    bad = grpc.StatusCode.INVALID_ARGUMENT
    fails("too many lines", bad, lambda: beat(0, 4, ["x"] * 201), "log")
    fails("too long a line", bad, lambda: beat(0, 4, ["x" * 1001]), "log")
    fails("numbered from 0", bad, lambda: beat(0, 0, ["x"]), "first_line")
    fails("a strange rank", bad, lambda: d.runs.GetLog(runs.GetLogRequest(run="r", rank=-2)), "rank")
    fails("too many asked for", bad, lambda: d.runs.GetLog(runs.GetLogRequest(run="r", rank=0, lines=201)), "limit")
    base = sqlite3.connect(f"file:{d.dir}/paramsync.db?mode=ro", uri=True)
    offset_bits, rss, replayed = base.execute("SELECT clock_offset_bits, rss_bytes, points_replayed FROM ranks WHERE rank = 0").fetchone()
    base.close()
    offset = struct.unpack("<d", struct.pack("<q", offset_bits))[0]
    check(f"clock offset {offset}", 80 < offset < 120)
    same("memory and replays", (rss, replayed), (1 << 20, 7))
    same("exit status", d.stop(), 0)


def series_points(d, run):
    got = d.metrics.QuerySeries(metrics.QuerySeriesRequest(run=run, name="loss", rank=0, max_points=10000))
    return got.series[0]


def test_roll_up():
    d = Daemon("roll").connect()
    rng = random.Random(3)
    values = [rng.random() for _ in range(20000)]
    values[1234] = float("nan")
    values[7777] = -5.0
    for name in ("old", "live"):
        create(d, name)
        batches = [metrics.StepBatch(run=name, rank=0, attempt=1, seq=i + 1, points=[
            metrics.Point(name="loss", step=s, value=values[s], elapsed_s=s) for s in range(i * 1000, i * 1000 + 1000)])
            for i in range(20)]
        list(d.metrics.ReportSteps(iter(batches)))
    d.runs.FinishRun(runs.FinishRunRequest(run="old", state=runs.RUN_STATE_FINISHED))
    before = d.runs.GetRun(runs.GetRunRequest(run="old"))
    check(f"the run's size: {before.metric_bytes}", 20000 * 4 < before.metric_bytes < 20000 * 20)
    same("exit status", d.stop(), 0)
    d = Daemon("roll", "--rollup-after", "1ms", "--lost-after", "60s").connect()
    wait_for("the roll-up", lambda: series_points(d, "old").total_points < 2000)
    points = series_points(d, "old")
    got = dict(zip(points.steps, points.values))
    check("first, last, lowest and NaN stay", 0 in got and 19999 in got and got.get(7777) == -5.0 and got[1234] != got[1234])
    check("the highest stays", max(v for v in values if v == v) in got.values())
    same("a live run keeps all", series_points(d, "live").total_points, 20000)
    after = d.runs.GetRun(runs.GetRunRequest(run="old"))
    check(f"it takes less: {after.metric_bytes}", after.metric_bytes < before.metric_bytes / 10)
    same("exit status", d.stop(), 0)


def test_backup():
    d = Daemon("source").connect()
    create(d)
    blobs = [os.urandom(200_000) for _ in range(3)]
    for epoch, data in enumerate(blobs, 1):
        put(d, data, epoch)
    stop = threading.Event()
    sent = [0]

    def feed():
        def batches():
            while not stop.is_set():
                sent[0] += 1
                yield metrics.StepBatch(run="r", rank=0, attempt=1, seq=sent[0], points=[
                    metrics.Point(name="loss", step=sent[0] * 100 + i, value=i) for i in range(100)])
                time.sleep(0.001)
        list(d.metrics.ReportSteps(batches()))
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        wait_for("points", lambda: sent[0] > 20)
        target = folder / "backup"
        result = cli(None, "export", "--store", d.dir, "-o", target, "--check")
        check(f"what it says: {result.stdout}", "1 runs, 3 checkpoints" in result.stdout and "all good" in result.stdout)
        check("a second time", "name a new" in cli(None, "export", "--store", d.dir, "-o", target, status=1).stderr)
        check("nothing half done", not list(folder.glob("backup.part")))
    finally:
        stop.set()
        thread.join()
    same("exit status", d.stop(), 0)
    copy = Daemon("backup").connect()
    same("the copy's checkpoints", [pull(copy, selector=checkpoints.CheckpointSelector(epoch=e))[1] == blobs[e - 1] for e in (1, 2, 3)],
         [True] * 3)
    points = series_points(copy, "r").total_points
    check(f"its points: {points}", points >= 2000 and points % 100 == 0)
    same("exit status", copy.stop(), 0)

    check("good", "all good" in cli(None, "export", "--store", copy.dir, "--check").stdout)
    blob = next((copy.dir / "blobs" / "sha256").rglob("*/*"))
    os.replace(shutil.copy(blob, folder / "c"), blob)  # no longer the source's own file
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    result = cli(None, "export", "--store", copy.dir / "paramsync.db", "--check", status=1)
    check(f"a spoiled checkpoint: {result.stderr}", "has other bytes" in result.stderr and "1 problems" in result.stdout)
    check("the source is untouched", "all good" in cli(None, "export", "--store", d.dir, "--check").stdout)
    base = sqlite3.connect(copy.dir / "paramsync.db")
    base.execute("UPDATE blocks SET count = count + 1 WHERE n = (SELECT min(n) FROM blocks)")
    base.commit()
    base.close()
    result = cli(None, "export", "--store", copy.dir, "--check", "--json", status=1)
    same("and points that are missing", json.loads(result.stdout)["problems"], 2)
    for words, text in ((("--store", folder / "nowhere", "--check"), "nowhere"), (("--store", d.dir), "-o"),
                        (("--check",), "--store"), (("r", "--store", d.dir), "no run"), ((), "name a run")):
        result = subprocess.run([CLI, "export", *map(str, words)], capture_output=True, text=True)
        check(f"export {words}: {result.returncode} {result.stderr}", result.returncode in (1, 2) and text in result.stderr)


def test_follow():
    d = Daemon("follow").connect()
    create(d)
    served = folder / "served"
    process = subprocess.Popen([CLI, "pull", "r", "--follow", served, "--sidecar", d.address], stdout=subprocess.PIPE, text=True)
    first, second, third = (os.urandom(50_000) for _ in range(3))
    current = lambda: (served / "current").read_bytes() if (served / "current").exists() else None
    put(d, first, 1)
    wait_for("the first", lambda: current() == first)
    put(d, second, 2)
    wait_for("the second", lambda: current() == second)
    wait_for("the first to go", lambda: sorted(p.name for p in served.iterdir()) == ["current", "epoch_2.safetensors"])
    port = d.port
    d.kill()
    d = Daemon("follow", port=port).connect()  # the sidecar is restarted, the follower goes on
    put(d, third, 3)
    wait_for("the third", lambda: current() == third)
    d.runs.FinishRun(runs.FinishRunRequest(run="r", state=runs.RUN_STATE_FINISHED))
    same("it ends with the run", process.wait(30), 0)
    same("what it printed", process.stdout.read().count("current -> epoch_"), 3)
    d.metrics.ReportEpoch(metrics.ReportEpochRequest(run="r", epoch=1, accuracy=0.9))
    d.metrics.ReportEpoch(metrics.ReportEpochRequest(run="r", epoch=2, accuracy=0.5))
    best = folder / "best"
    cli(d, "pull", "r", "--follow", best, "--best")
    same("the best of an ended run", (best / "current").read_bytes() == first, True)
    (folder / "taken").mkdir()
    (folder / "taken" / "current").write_text("mine")
    check("a file in the way", "no link" in cli(d, "pull", "r", "--follow", folder / "taken", status=1).stderr)
    same("stays", (folder / "taken" / "current").read_text(), "mine")
    cli(d, "pull", "nobody", "--follow", folder / "x", status=1)
    same("exit status", d.stop(), 0)


def test_earlier_schemas():
    """A store as each earlier schema left it, with rows: opened, migrated with a copy beside it, and complete."""
    for schema in (1, 2):
        data = folder / f"schema{schema}"
        data.mkdir()
        base = sqlite3.connect(data / "paramsync.db")
        for script in sorted((SOURCE / "db" / "schema").glob("*.sql"))[:schema]:
            base.executescript(script.read_text())
        base.execute("PRAGMA application_id = 0x5053594e")
        base.execute(f"PRAGMA user_version = {schema}")
        sha = hashlib.sha256(b"weights").hexdigest()
        now = time.time_ns()
        base.execute("INSERT INTO runs (id, name, state, world_size, attempt, model, dataset, dataset_hash, device, source_commit,"
                     " epochs_planned, batch_per_rank, created_ns, updated_ns) VALUES ('01ARZ3NDEKTSV4RRFFQ69G5FAV', 'old', 3, 2, 1,"
                     " 'resnet18', 'CIFAR-10', '', 'cpu', '', 1, 128, ?, ?)", (now, now))
        base.execute("INSERT INTO attempts (run, attempt, world_size, device, started_ns, last_seen_ns) VALUES (1, 1, 2, 'cpu', ?, ?)",
                     (now, now))
        base.execute("INSERT INTO ranks VALUES (1, 1, 0, 1.5, 10, 20, 0, 0, ?)", (now,))
        base.execute("INSERT INTO blobs VALUES (?, 7, ?)", (sha, now))
        base.execute("INSERT INTO checkpoints (run, attempt, epoch, format, sha256, filename, step, created_ns)"
                     " VALUES (1, 1, 1, 'safetensors', ?, 'epoch_1.safetensors', 5, ?)", (sha, now))
        base.commit()
        base.close()
        (data / "blobs" / "sha256" / sha[:2]).mkdir(parents=True)
        (data / "blobs" / "sha256" / sha[:2] / sha[2:]).write_bytes(b"weights")
        d = Daemon(f"schema{schema}").connect()
        same("the run", d.runs.GetRun(runs.GetRunRequest(run="old")).world_size, 2)
        same("its checkpoint", pull(d, "old")[1], b"weights")
        d.runs.CreateRun(runs.CreateRunRequest(name="old", world_size=2, resume=True))
        d.runs.Heartbeat(runs.HeartbeatRequest(run="old", rank=0, log=["new"], first_line=1))
        same("exit status", d.stop(), 0)
        copies = list(data.glob("paramsync.db.before-*"))
        check(f"a copy of before: {copies}", len(copies) == 1)
        base = sqlite3.connect(copies[0])
        same("of that schema", base.execute("PRAGMA user_version").fetchone()[0], schema)
        same("and whole", base.execute("PRAGMA integrity_check").fetchone()[0], "ok")
        base.close()


def test_many_starts_at_once():
    """Eight at a time on one folder: one serves, seven say who has it."""
    data = folder / "race"
    starts = [subprocess.Popen([PROGRAM, "--data-dir", data, "--grpc-listen", "127.0.0.1:0", "--http-listen", "none"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    losers, winners = [], []
    end = time.monotonic() + 60
    while len(losers) < 7 and time.monotonic() < end:
        losers = [p for p in starts if p.poll() is not None]
        time.sleep(0.02)
    winners = [p for p in starts if p.poll() is None]
    same("one is left", len(winners), 1)
    for p in losers:
        err = p.stderr.read()
        check(f"{p.returncode}: {err}", p.returncode == 1 and "in use by another sidecar" in err and err.count("\n") == 1)
    for p in winners:
        check("it serves", p.stdout.readline().startswith("paramsyncd: ready"))
        p.terminate()
        same("exit status", p.wait(30), 0)


for test in (test_register, test_known_content, test_parts, test_retention, test_paging, test_logs_and_facts, test_roll_up,
             test_backup, test_follow, test_earlier_schemas, test_many_starts_at_once):
    print(test.__name__, flush=True)
    test()
finish()
