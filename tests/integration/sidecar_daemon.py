#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What happens to paramsyncd from outside: kill -9 while points come in, a full disk, a second daemon, ports in use,
silent runs, tokens, TLS, a config file, a restart in the middle of an upload and of a pull."""
import hashlib
import os
import threading

from sidecar_common import *

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def create(d, name="r", **fields):
    return d.runs.CreateRun(runs.CreateRunRequest(name=name, world_size=4, **fields)).run


def batch(seq, rank=0, points=50, run="r"):
    return metrics.StepBatch(run=run, rank=rank, attempt=1, seq=seq, points=[
        metrics.Point(name="loss", step=seq * points + i, value=seq + i / 1000, elapsed_s=seq) for i in range(points)])


def steps_of(d, rank):
    got = d.metrics.QuerySeries(metrics.QuerySeriesRequest(run="r", name="loss", rank=rank, max_points=10000))
    series = got.series[0]
    assert series.total_points == len(series.steps), "the test sends too much to see it all"
    return list(zip(series.steps, series.values))


def run_program(*arguments, environment=None):
    return subprocess.run([str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, timeout=30,
                          env={**os.environ, **(environment or {})})


def refused(what, status, words, *arguments):
    result = run_program(*arguments)
    check(f"{what}: {result.returncode} {result.stderr!r}, wanted {status} with {words!r}",
          result.returncode == status and words in result.stderr and result.stderr.count("\n") == 1)


def test_kill_9_loses_nothing():
    """Four ranks send; the daemon is killed twice. Whatever was acknowledged is there afterwards, and what is sent again
    is there once."""
    d = Daemon("kill").connect()
    create(d)
    total, acked = 60, {rank: 0 for rank in range(4)}

    def send(rank, stub):
        def batches():
            for seq in range(acked[rank] + 1, total + 1):
                yield batch(seq, rank)
        try:
            for ack in stub.ReportSteps(batches()):
                acked[rank] = ack.seq
        except grpc.RpcError:
            pass

    def round_of(limit):
        threads = [threading.Thread(target=send, args=(rank, d.metrics)) for rank in range(4)]
        for thread in threads:
            thread.start()
        if limit:
            wait_for("batches", lambda: sum(acked.values()) >= limit)
            d.kill()
        for thread in threads:
            thread.join()

    for limit in (40, 120):
        round_of(limit)
        before = dict(acked)
        d = Daemon("kill").connect()
        for rank in range(4):
            have = {step for step, _ in steps_of(d, rank)} if before[rank] else set()
            lost = [seq for seq in range(1, before[rank] + 1) if seq * 50 not in have or seq * 50 + 49 not in have]
            same(f"acknowledged and lost, rank {rank}", lost, [])
            acked[rank] = max(0, before[rank] - 3)  # the client is not sure and sends some again
    round_of(0)
    for rank in range(4):
        wanted = [(seq * 50 + i, seq + i / 1000) for seq in range(1, total + 1) for i in range(50)]
        check(f"each point once, rank {rank}", steps_of(d, rank) == wanted)
    same("exit status", d.stop(), 0)


def test_two_daemons_and_ports():
    d = Daemon("two", http=True)
    data = folder / "two"
    refused("a second daemon on one store", 1, "in use by another sidecar", "--data-dir", data,
            "--grpc-listen", "127.0.0.1:0", "--http-listen", "none")
    refused("gRPC port in use", 1, f"127.0.0.1:{d.port}", "--data-dir", folder / "x",
            "--grpc-listen", d.address, "--http-listen", "none")
    refused("HTTP port in use", 1, f"127.0.0.1:{d.http_port}", "--data-dir", folder / "x",
            "--grpc-listen", "127.0.0.1:0", "--http-listen", f"127.0.0.1:{d.http_port}")
    same("exit status", d.stop(), 0)
    d = Daemon("two")  # the lock went with its holder
    d.kill()
    same("after kill -9", Daemon("two").stop(), 0)


def test_bad_options():
    refused("no data directory", 2, "--data-dir")
    refused("an unknown flag", 2, "--data-dir", "--data-dri", "x")
    refused("an argument", 2, "extra", "--data-dir", folder / "x", "extra")
    refused("an address", 2, "nonsense", "--data-dir", folder / "x", "--grpc-listen", "nonsense")
    refused("beyond loopback", 2, "--insecure", "--data-dir", folder / "x", "--grpc-listen", "0.0.0.0:0")
    refused("HTTP beyond loopback", 2, "--insecure", "--data-dir", folder / "x", "--http-listen", ":0")
    refused("half of TLS", 2, "--tls-key", "--data-dir", folder / "x", "--tls-cert", "x")
    refused("no such certificate", 2, "no/such", "--data-dir", folder / "x", "--tls-cert", "no/such", "--tls-key", "b")
    refused("no such token", 2, "no/token", "--data-dir", folder / "x", "--token-file", "no/token")
    empty = folder / "empty"
    empty.write_text("\nsecond line\n")
    refused("an empty token", 2, "empty", "--data-dir", folder / "x", "--token-file", empty)
    (folder / "file").write_text("")
    refused("a file for a directory", 1, "file", "--data-dir", folder / "file" / "x", "--http-listen", "none",
            "--grpc-listen", "127.0.0.1:0")
    result = run_program("--help")
    check("help", result.returncode == 0 and result.stdout.startswith("Example:") and
          all(len(line) <= 80 for line in result.stdout.splitlines()))
    same("version", run_program("--version").stdout.split()[0], "paramsyncd")


def test_config_file():
    config = folder / "sidecar.ini"
    config.write_text(f"# where\n[store]\ndata-dir = {folder / 'wrong'}\n; how\nlost_after = 3s\nlog-level = error\n")
    d = Daemon("configured", "--config", config).connect()
    check("the command line wins", (folder / "configured").exists() and not (folder / "wrong").exists())
    same("exit status", d.stop(), 0)
    config.write_text("data-dir = x\nlost-after = soon\n")
    refused("a bad value", 2, "sidecar.ini, line 2: --lost-after soon", "--config", config)
    config.write_text("data-dri = x\n")
    refused("a bad name", 2, "did you mean --data-dir", "--config", config)
    config.write_text("just words\n")
    refused("no equals sign", 2, "line 1", "--config", config)
    refused("no file", 2, "no.ini", "--config", folder / "no.ini")


def test_token():
    (folder / "token.txt").write_text("s3cret \n")
    for what, d in (("from a file", Daemon("token", "--token-file", folder / "token.txt")),
                    ("from the environment", Daemon("token2", environment={"PARAMSYNC_TOKEN": "s3cret"}))):
        d.connect()
        ask = lambda *metadata: d.runs.ListRuns(runs.ListRunsRequest(), metadata=metadata)
        fails(f"{what}: none", UNAUTHENTICATED, lambda: ask())
        fails(f"{what}: a wrong one", UNAUTHENTICATED, lambda: ask(("authorization", "Bearer s3cre")))
        fails(f"{what}: without Bearer", UNAUTHENTICATED, lambda: ask(("authorization", "s3cret")))
        same(f"{what}: the right one", len(ask(("authorization", "Bearer s3cret")).runs), 0)
        fails(f"{what}: a stream", UNAUTHENTICATED, lambda: list(d.metrics.ReportSteps(iter([batch(1)]))))
        health = d.channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes)
        same(f"{what}: health stays open", health(b""), b"\x08\x01")
        same("exit status", d.stop(), 0)


def test_tls():
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                           "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
                           "-addext", "subjectAltName=DNS:localhost"], capture_output=True)
    check("a certificate", made.returncode == 0)
    d = Daemon("tls", "--tls-cert", cert, "--tls-key", key)
    d.connect(grpc.ssl_channel_credentials(cert.read_bytes()))
    same("over TLS", len(d.runs.ListRuns(runs.ListRunsRequest(), wait_for_ready=True, timeout=30).runs), 0)
    d.connect()
    fails("without TLS", grpc.StatusCode.UNAVAILABLE, lambda: d.runs.ListRuns(runs.ListRunsRequest(), timeout=30))
    same("exit status", d.stop(), 0)
    cert.write_text("rubbish")
    refused("rubbish for a certificate", 1, "", "--data-dir", folder / "tls", "--tls-cert", cert, "--tls-key", key,
            "--grpc-listen", "127.0.0.1:0", "--http-listen", "none")


def test_silent_runs_are_lost():
    d = Daemon("live", "--lost-after", "1s").connect()
    state = lambda name="r": d.runs.GetRun(runs.GetRunRequest(run=name)).state
    create(d)
    create(d, "never started")
    d.runs.Heartbeat(runs.HeartbeatRequest(run="r"))
    wait_for("lost", lambda: state() == runs.RUN_STATE_LOST)
    run = d.runs.GetRun(runs.GetRunRequest(run="r"))
    check(f"the reason: {run.reason}", "not heard of for" in run.reason and run.HasField("ended_at"))
    same("a late heartbeat", d.runs.Heartbeat(runs.HeartbeatRequest(run="r")).state, runs.RUN_STATE_RUNNING)
    d.kill()  # a restart gives the full grace, whatever the time in between
    d = Daemon("live", "--lost-after", "60s").connect()
    same("after a restart", state(), runs.RUN_STATE_RUNNING)
    d.kill()
    d = Daemon("live", "--lost-after", "1s").connect()
    wait_for("lost again", lambda: state() == runs.RUN_STATE_LOST)
    same("not started is not lost yet", state("never started"), runs.RUN_STATE_CREATED)
    kinds = [e.kind for e in read_events(d, 5)]
    same("events", kinds, ["created", "updated", "lost", "recovered", "lost"])
    same("exit status", d.stop(), 0)


def read_events(d, count):
    call = d.runs.WatchRun(runs.WatchRunRequest(run="r"), timeout=30)
    events = [next(call) for _ in range(count)]
    call.cancel()
    return events


def chunks(data, size=65536, start=0):
    for at in range(start, len(data), size):
        yield checkpoints.PutCheckpointRequest(
            chunk=checkpoints.Chunk(offset=at, data=data[at:at + size], crc32c=crc32c(data[at:at + size])))


def header(data, epoch=1):
    return checkpoints.PutCheckpointRequest(header=checkpoints.PutCheckpointHeader(
        run="r", epoch=epoch, filename=f"epoch_{epoch}.safetensors", format="safetensors", size=len(data),
        sha256=hashlib.sha256(data).hexdigest()))


def put(d, data, epoch=1):
    return d.checkpoints.PutCheckpoint(iter([header(data, epoch), *chunks(data)]))


def test_restart_in_uploads_and_pulls():
    d = Daemon("restart").connect()
    create(d)
    data = os.urandom(600000)
    temporary = d.dir / "blobs" / "tmp"
    half = threading.Event()

    def slow():
        yield header(data)
        for number, chunk in enumerate(chunks(data)):
            if number == 5:
                half.set()
                gone.wait(60)
            yield chunk
    gone = threading.Event()
    call = d.checkpoints.PutCheckpoint.future(slow())
    half.wait(60)
    wait_for("the bytes", lambda: any(p.stat().st_size > 0 for p in temporary.iterdir()))
    listed = d.checkpoints.ListCheckpoints(checkpoints.ListCheckpointsRequest(run="r")).checkpoints
    same("half of it is not visible", len(listed), 0)
    d.kill()
    gone.set()
    check("the client hears of it", call.exception() is not None)
    check("something is left", len(list(temporary.iterdir())) == 1)
    d = Daemon("restart").connect()
    same("the leftovers are removed", list(temporary.iterdir()), [])
    same("put again", put(d, data).size, len(data))

    call = d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(run="r", chunk_bytes=4096))
    about, got = next(call).checkpoint, b""
    for _ in range(20):
        got += next(call).chunk.data
    d.kill()
    d = Daemon("restart").connect()
    call = d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(run="r", offset=len(got)))
    check("still the same", next(call).checkpoint.sha256 == about.sha256)
    for part in call:
        got += part.chunk.data
    check("the pulled file", hashlib.sha256(got).hexdigest() == about.sha256 and got == data)
    same("exit status", d.stop(), 0)


def test_blobs_on_the_disk():
    """What has rotted is not handed out as good, also to a client that does not look; what no run has is removed."""
    d = Daemon("rot").connect()
    create(d)
    data = os.urandom(300000)
    sha256 = put(d, data).sha256
    pull = lambda **more: b"".join(p.chunk.data for p in d.checkpoints.PullCheckpoint(checkpoints.PullCheckpointRequest(run="r", **more)))
    same("as it was put", pull(), data)
    same("the rest of it", pull(offset=123456), data[123456:])
    same("nothing is left of it", pull(offset=len(data)), b"")
    blob = d.dir / "blobs" / "sha256" / sha256[:2] / sha256[2:]
    blob.chmod(0o600)
    with open(blob, "r+b") as f:
        f.seek(1000)
        f.write(bytes([data[1000] ^ 1]))
    fails("one bit", grpc.StatusCode.DATA_LOSS, pull, "sha256")
    fails("in what was pulled before", grpc.StatusCode.DATA_LOSS, lambda: pull(offset=200000), "sha256")
    orphan = d.dir / "blobs" / "sha256" / "ab" / ("c" * 62)
    other = d.dir / "blobs" / "sha256" / "ab" / "README"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"left by a crash between the file and its row")
    other.write_bytes(b"not a blob")
    same("exit status", d.stop(), 0)
    d = Daemon("rot").connect()
    check("the orphan is removed", not orphan.exists())
    check("what has a row stays, and what is no blob", blob.exists() and other.exists())
    same("exit status", d.stop(), 0)


def test_store_without_auto_vacuum():
    """A store that was rebuilt by other tools gives no pages back: the writer does not ask for ever."""
    d = Daemon("dumped").connect()
    create(d)
    list(d.metrics.ReportSteps(batch(n, points=2000) for n in range(1, 30)))
    same("exit status", d.stop(), 0)
    import sqlite3
    store = d.dir / "paramsync.db"
    with sqlite3.connect(store) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA auto_vacuum = NONE")
        db.commit()
        db.execute("VACUUM")
        same("it has none", db.execute("PRAGMA auto_vacuum").fetchone()[0], 0)
    db.close()
    d = Daemon("dumped").connect()
    d.runs.FinishRun(runs.FinishRunRequest(run="r", state=runs.RUN_STATE_KILLED))
    d.runs.DeleteRun(runs.DeleteRunRequest(run="r"))

    def used():
        with open(f"/proc/{d.process.pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    time.sleep(1)  # what there is to do after a deletion
    before = used()
    time.sleep(2)
    check(f"at rest afterwards: {used() - before:.2f} s of processor time in 2 s", used() - before < 1)
    same("exit status", d.stop(), 0)


SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def health(d, service=""):
    """The answer's bytes: field 1, the status."""
    check = d.channel.unary_unary("/grpc.health.v1.Health/Check")
    return check(b"\x0a" + bytes([len(service)]) + service.encode(), timeout=10)


def test_full_disk():
    """A tmpfs that fills up: no crash, RESOURCE_EXHAUSTED, nothing acknowledged is lost, and it recovers by itself."""
    mount = folder / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], capture_output=True).returncode:
        print("skipped: no right to mount a tmpfs")
        return
    try:
        d = Daemon("small", http=True).connect()
        create(d)
        put(d, os.urandom(100000))
        filler = mount / "filler"
        space = os.statvfs(mount)
        with open(filler, "wb") as file:
            file.write(b"x" * (space.f_bavail * space.f_bsize - 400000))
        seq, full = 1, None
        while not full and seq < 500:
            try:
                list(d.metrics.ReportSteps(iter([batch(seq, points=200)])))
                seq += 1
            except grpc.RpcError as error:
                full = error
        check(f"full: {full and full.details()}", full and full.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "full" in full.details())
        fails("a checkpoint", grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: put(d, os.urandom(5000000), 2))
        wait_for("health says so", lambda: health(d) == NOT_SERVING, 10)
        wait_for("of every service", lambda: health(d, "paramsync.v1.Runs") == NOT_SERVING, 10)
        same("no leftovers", list((mount / "blobs" / "tmp").iterdir()), [])
        same("reading goes on", d.runs.GetRun(runs.GetRunRequest(run="r")).name, "r")
        check("alive", d.process.poll() is None)
        filler.unlink()
        wait_for("health is well again, before anything is written", lambda: health(d) == SERVING, 10)
        list(d.metrics.ReportSteps(iter([batch(seq, points=200), batch(seq, points=200)])))
        got = d.metrics.QuerySeries(metrics.QuerySeriesRequest(run="r", name="loss", rank=0, max_points=4)).series[0]
        same("every acknowledged point, once", got.total_points, seq * 200)
        same("checkpoints too", put(d, os.urandom(500000), 2).epoch, 2)
        same("exit status", d.stop(), 0)
    finally:
        for daemon in list(daemons):
            daemon.kill()
        subprocess.run(["umount", mount], check=True)


def test_bad_stores():
    data = folder / "bad"
    data.mkdir()
    (data / "paramsync.db").write_bytes(b"no database, but long enough to be looked at" * 200)
    listen = ("--grpc-listen", "127.0.0.1:0", "--http-listen", "none")
    refused("rubbish for a store", 1, "damaged", "--data-dir", data, *listen)
    import sqlite3
    (data / "paramsync.db").unlink()
    base = sqlite3.connect(data / "paramsync.db")
    base.execute("PRAGMA application_id = 0x5053594e")
    base.execute("PRAGMA user_version = 77")
    base.close()
    refused("a newer store", 1, "schema 77", "--data-dir", data, *listen)


for test in (test_kill_9_loses_nothing, test_two_daemons_and_ports, test_bad_options, test_config_file, test_token, test_tls,
             test_silent_runs_are_lost, test_restart_in_uploads_and_pulls, test_blobs_on_the_disk,
             test_store_without_auto_vacuum, test_full_disk, test_bad_stores):
    print(test.__name__, flush=True)
    test()
finish()
