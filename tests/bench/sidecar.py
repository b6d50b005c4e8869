#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""sidecar.py BUILD_FOLDER [WHAT...]: the sidecar's figures, each beside a peer or a ceiling of the same run. WHAT: rest,
ingest, point, epochs, storage, pull, http, start; without one, all of them. Build first:
    cmake --build BUILD_FOLDER --target bench_sidecar paramsyncd paramsync-cli rpc_noop rpc_noop_server"""
import json
import os
import pathlib
import shutil
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import time

build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/default").resolve()
wanted = sys.argv[2:] or ["rest", "ingest", "point", "epochs", "storage", "pull", "http", "start"]
DRIVER, DAEMON, CLI = build / "tests/bench_sidecar", build / "bin/paramsyncd", build / "bin/paramsync"
# Not on a file system in memory: what is measured includes the disk's syncs.
folder = pathlib.Path(tempfile.mkdtemp(prefix="bench_sidecar_", dir=os.environ.get("PS_BENCH_DIR", build)))


class Daemon:
    def __init__(self, name, *flags):
        self.dir = folder / name
        begun = time.monotonic()
        self.process = subprocess.Popen([DAEMON, "--data-dir", self.dir, "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
                                         *flags], stdout=subprocess.PIPE, text=True)
        words = self.process.stdout.readline().replace(",", "").split()
        self.start_s = time.monotonic() - begun
        self.address, self.http = words[3], words[5]

    def load(self, *words):
        out = subprocess.run([DRIVER, self.address, *map(str, words)], check=True, capture_output=True, text=True).stdout
        found = {}
        for line in out.splitlines():
            key, value = line.split()
            found.setdefault(key, []).append(float(value))
        return {key: statistics.median(values) for key, values in found.items()}

    def usage(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return cpu, int(open(f"/proc/{self.process.pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def file_bytes(self):
        return sum((self.dir / name).stat().st_size for name in ("paramsync.db", "paramsync.db-wal") if (self.dir / name).exists())


def row(what, ours, unit, peer="", peer_value=None, target="", better="higher"):
    ratio = f"  ratio {ours / peer_value:.2f}" if peer_value else ""
    beside = f"  {peer} {peer_value:,.1f} {unit}" if peer_value else f"  {peer}"
    print(f"{what:44} {ours:12,.1f} {unit}{beside}{ratio}{'  target ' + target if target else ''}", flush=True)


def commit_time():
    """Of one small durable SQLite transaction on the same disk: what no durable answer can be faster than."""
    base = sqlite3.connect(folder / "ceiling.db", isolation_level=None)
    base.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE IF NOT EXISTS t (a INTEGER, b BLOB)")
    times = []
    for i in range(200):
        begun = time.monotonic()
        base.execute("INSERT INTO t VALUES (?, ?)", (i, b"x" * 100))
        times.append(time.monotonic() - begun)
    base.close()
    return statistics.median(times)


def raw_rows(seconds=3):
    """Points as plain rows, 16,384 a transaction, one thread: what a store without packing would do."""
    base = sqlite3.connect(folder / "rows.db", isolation_level=None)
    base.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
                       "CREATE TABLE p (series INTEGER, step INTEGER, seq INTEGER, value REAL, elapsed REAL)")
    count, begun = 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        base.execute("BEGIN")
        base.executemany("INSERT INTO p VALUES (?, ?, ?, ?, ?)", [(i % 64, count + i, 1, 0.5 * i, 0.1 * i) for i in range(16384)])
        base.execute("COMMIT")
        count += 16384
    took = time.monotonic() - begun
    base.close()
    return count / took


def rest():
    d = Daemon("rest")
    time.sleep(1)
    cpu, _ = d.usage()
    time.sleep(10)
    after, mib = d.usage()
    row("at rest: share of a core", 100 * (after - cpu) / 10, "%", target="<= 0.5")
    row("at rest: memory", mib, "MiB", target="<= 40")
    d.stop()


def ingest():
    d = Daemon("ingest")
    peer = raw_rows()
    cpu, _ = d.usage()
    got = d.load("ingest", 16, 8, 4)
    after, mib = d.usage()
    row("ingest, 16 ranks, durable", got["points_per_s"], "points/s", "SQLite rows", peer, ">= 200,000")
    row("  sidecar's CPU for a million points", 1e6 * (after - cpu) / got["points"], "s")
    row("  memory afterwards", mib, "MiB")
    d.stop()


def point():
    d = Daemon("point")
    got = d.load("point", 400000)
    row("reporter's call, p99", got["p99_us"], "us", target="<= 20")
    row("  p50, p99.9, longest", got["p50_us"], "us", f"{got['p999_us']:.1f}, {got['max_us']:.1f} us; {got['dropped']:.0f} dropped")
    d.stop()


def epochs():
    ceiling = commit_time()
    server = subprocess.Popen([build / "tests/rpc_noop_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out = subprocess.run([build / "tests/rpc_noop", f"127.0.0.1:{int(server.stdout.readline())}"], check=True, capture_output=True,
                         text=True).stdout
    server.stdin.close()
    server.wait()
    noop = {line.split()[0]: float(line.split()[1]) for line in out.splitlines()}
    for calls in (1, 8, 32, 128):
        d = Daemon(f"epochs{calls}")
        got = d.load("epochs", calls, 4)
        # Whichever comes first: as many as are under way in each commit, or what a C++ server answers without doing anything.
        rate = noop["unary_1"] if calls == 1 else noop["unary_8"]
        peer = f"{calls} / commit of {1e3 * ceiling:.2f} ms" if calls / ceiling < rate else "no-ops of a C++ server"
        row(f"ReportEpoch, {calls} calls at a time", got["calls_per_s"], "calls/s", peer, min(calls / ceiling, rate), ">= 0.8")
        d.stop()


def storage():
    points = float(os.environ.get("PS_BENCH_POINTS", 1e7))
    d = Daemon("storage")
    got = d.load("fill", "large", points, 4)
    row(f"{points / 1e6:.0f} M points written", got["points_per_s"], "points/s")
    latency = d.load("query", "large", 5)
    row("  QuerySeries, p99", latency["p99_us"] / 1e3, "ms", f"p50 {latency['p50_us'] / 1e3:.2f} ms", target="<= 10")
    d.stop()
    row("  on the disk, a point", d.file_bytes() / got["points"], "B", target="<= 12")


def big_file(size=1 << 30):
    path = folder / "big.pth"
    if not path.exists():
        block = os.urandom(1 << 20)
        with open(path, "wb") as file:
            for i in range(size >> 20):
                file.write(struct.pack("<Q", i) + block[8:])
    return path


def pull():
    d = Daemon("pull")
    subprocess.run([DRIVER, d.address, "ingest", "1", "0", "1"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([CLI, "push", "ingest-1", big_file(), "--epoch", "1", "--sidecar", d.address], check=True, stdout=subprocess.DEVNULL)
    ours, theirs = [], []
    for _ in range(3):
        ours.append(d.load("pull", "ingest-1", 1)["mb_per_s"])
        server = subprocess.Popen([build / "tests/rpc_noop_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        port = int(server.stdout.readline())
        out = subprocess.run([build / "tests/rpc_noop", f"127.0.0.1:{port}"], check=True, capture_output=True, text=True).stdout
        theirs += [float(line.split()[1]) for line in out.splitlines() if line.startswith("stream")]
        server.stdin.close()
        server.wait()
    _, mib = d.usage()
    row("pull of 1 GiB by gRPC, digests and all", statistics.median(ours), "MB/s", "C++ server, from memory, no digests",
        statistics.median(theirs) if theirs else None, ">= 1.0")
    row("  memory of the sidecar afterwards", mib, "MiB")
    d.stop()


def http():
    nginx = shutil.which("nginx") or ("/usr/sbin/nginx" if pathlib.Path("/usr/sbin/nginx").exists() else None)
    d = Daemon("pull") if (folder / "pull").exists() else None
    if not d:
        pull()
        d = Daemon("pull")
    listing = json.loads(subprocess.run(["curl", "-s", f"http://{d.http}/api/v1/runs/ingest-1/checkpoints"], check=True, capture_output=True,
                                        text=True).stdout)
    sha = listing["checkpoints"][0]["sha256"]
    get = lambda url: float(subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{speed_download}", url], check=True,
                                           capture_output=True, text=True).stdout) / 1e6
    server = None
    if nginx:
        (folder / "nginx").mkdir(exist_ok=True)
        (folder / "nginx.conf").write_text(f"""daemon off; pid {folder}/nginx/pid; error_log {folder}/nginx/error.log;
events {{}}
http {{ access_log off; sendfile on; client_body_temp_path {folder}/nginx; proxy_temp_path {folder}/nginx;
fastcgi_temp_path {folder}/nginx; uwsgi_temp_path {folder}/nginx; scgi_temp_path {folder}/nginx;
server {{ listen 127.0.0.1:18099; root {folder}; }} }}
""")
        os.chmod(folder, 0o755)
        server = subprocess.Popen([nginx, "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL)
        time.sleep(1)
    ours, theirs = [], []
    for _ in range(3):
        ours.append(get(f"http://{d.http}/api/v1/checkpoints/{sha}"))
        if server:
            theirs.append(get("http://127.0.0.1:18099/big.pth"))
    if server:
        server.terminate()
        server.wait()
    row("download of 1 GiB by HTTP", statistics.median(ours), "MB/s", "nginx" if theirs else "no nginx here",
        statistics.median(theirs) if theirs else None, ">= 0.9")
    d.stop()


def start():
    d = Daemon("start")
    d.load("fill", "seed", 2e5, 4)
    d.stop()
    base = sqlite3.connect(folder / "start/paramsync.db")
    base.execute("PRAGMA synchronous = OFF")
    rows = base.execute("SELECT series, first_step, last_step, count, summary, data FROM blocks").fetchall()
    while (folder / "start/paramsync.db").stat().st_size < 1e9:  # the same blocks again and again
        base.executemany("INSERT INTO blocks (series, first_step, last_step, count, summary, data) VALUES (?, ?, ?, ?, ?, ?)", rows * 20)
        base.commit()
        base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    base.close()
    times = []
    for _ in range(5):
        d = Daemon("start")
        times.append(1e3 * d.start_s)
        d.stop()
    empty = []
    for i in range(3):
        e = Daemon(f"empty{i}")
        e.stop()
        e = Daemon(f"empty{i}")
        empty.append(1e3 * e.start_s)
        e.stop()
    row(f"start on {d.file_bytes() / 1e9:.2f} GB", statistics.median(times), "ms", "an empty store", statistics.median(empty), "<= 100 ms")


try:
    for name in wanted:
        globals()[name]()
finally:
    shutil.rmtree(folder, ignore_errors=True)
