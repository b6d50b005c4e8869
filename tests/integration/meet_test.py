# SPDX-License-Identifier: Apache-2.0
"""--init_method grpc://HOST:PORT/RUN: ranks that meet at the sidecar, also under TLS with a token, and after an earlier
job of the same name that was killed while it met."""
import subprocess
import time

from sidecar_common import *

BIN = PROGRAM.parent
TRAIN, SYNTH = BIN / "paramsync-train", BIN / "paramsync-synth"
data = folder / "data"
subprocess.run([SYNTH, data, "--train", "96", "--test", "20"], check=True)
clean = {k: v for k, v in os.environ.items() if not re.match(r"(RANK|WORLD_SIZE|MASTER_|LOCAL_|OMPI_|SLURM_|VC_|MA_|PARAMSYNC_)", k)}


def rank(n, world, address, *flags, run="job", out="out"):
    return subprocess.Popen(
        [str(c) for c in (TRAIN, "--data_url", data, "--width", 2, "--resolution", 8, "--batch", 16, "--epochs", 1, "--backend", "ref",
                          "--enable_gpu", "false", "--output_dir", folder / out, "--init_method", f"grpc://{address}/{run}",
                          "--world_size", world, "--rank", n, *flags)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean)


def ends(what, ranks, status=0, word=""):
    for n, process in enumerate(ranks):
        out, err = process.communicate(timeout=240)
        check(f"{what}: rank {n} exits {process.returncode}: {err}", process.returncode == status and word in err)
        check(f"{what}: rank {n} prints", bool(out) == (n == 0 and status == 0))


d = Daemon("plain").connect()
ranks = {n: rank(n, 3, d.address) for n in (2, 0, 1)}  # rank 0 is not the first to come
ends("three ranks", [ranks[n] for n in range(3)])

# Ranks of an earlier job say hello and are killed; the next ones of that name must not be answered in their place.
early = [rank(n, 3, d.address) for n in (1, 2)]
wait_for("their hello", lambda: all(d.rendezvous.Get(rendezvous.GetRequest(run="job", key=f"hello/{n}", no_wait=True)).value for n in (1, 2)))
for process in early:
    process.kill()
    process.communicate()
ranks = [rank(0, 3, d.address)]
time.sleep(0.5)  # rank 0 may answer the dead; a test that sleeps less tests less, and passes as well
ends("after a job that was killed", ranks + [rank(n, 3, d.address) for n in (1, 2)])

# Two jobs at one time.
jobs = [[rank(n, 2, d.address, run=name, out=name) for n in (0, 1)] for name in ("left", "right")]
for name, job in zip(("left", "right"), jobs):
    ends(name, job)

# Rank 0 computes for long when rank 1 dies: its watchdog ends it, and the run is not left to be found lost.
slow = ["--width", 64, "--resolution", 32, "--batch", 48, "--sidecar", d.address, "--run", "slow"]
pair = [rank(n, 2, d.address, *slow, run="slow", out="slow") for n in (0, 1)]


def state():
    try:
        return d.runs.GetRun(runs.GetRunRequest(run="slow")).state
    except grpc.RpcError:
        return 0


wait_for("the run", lambda: state() == runs.RUN_STATE_RUNNING, 60)
pair[1].kill()
pair[1].communicate()
_, err = pair[0].communicate(timeout=60)
check(f"rank 0 ends for rank 1: {err}", pair[0].returncode == 1 and "rank 1" in err)
same("the run's state", state(), runs.RUN_STATE_FAILED)
check("the reason", "rank 1" in d.runs.GetRun(runs.GetRunRequest(run="slow")).reason)
d.stop()

ends("no sidecar", [rank(n, 2, d.address) for n in (0, 1)], 1, d.address)

cert, key, token = folder / "cert.pem", folder / "key.pem", folder / "token"
subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
               check=True, capture_output=True)
token.write_text("a-long-enough-secret-token\n")
token.chmod(0o600)
d = Daemon("safe", "--tls-cert", cert, "--tls-key", key, "--token-file", token)
secure = f"localhost:{d.port}"
ends("TLS and a token", [rank(n, 2, secure, "--tls-ca", cert, "--token-file", token) for n in (0, 1)])
ends("no token", [rank(n, 2, secure, "--tls-ca", cert) for n in (0, 1)], 1, "token")
d.stop()
finish()
