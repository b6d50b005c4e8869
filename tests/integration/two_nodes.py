#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The README's quick start for two nodes, as two network namespaces with addresses of their own: the sidecar on node 1
with TLS and tokens, one rank on each node, a pull from node 2; and what a node without the token, with another
authority or with too small a role gets."""
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

BIN = pathlib.Path(os.environ["PS_BIN"])
failures = []


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}", flush=True)


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


if os.geteuid() != 0 or not shutil.which("ip"):
    skip("network namespaces need root and iproute2")
names = [f"ps{os.getpid()}t{i}" for i in (1, 2)]
if subprocess.run(["ip", "netns", "add", names[0]], stderr=subprocess.DEVNULL).returncode:
    skip("no network namespaces here")
folder = pathlib.Path(tempfile.mkdtemp(prefix="ps_two_nodes_"))
started = []


def sh(*words, cwd=folder):
    result = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True)
    check(f"{words}: {result.stderr}", result.returncode == 0)
    return result.stdout


def on(node, *words, env=None):
    """Starts a program on node 1 or 2."""
    clean = {k: v for k, v in os.environ.items() if not re.match(r"(RANK|WORLD_SIZE|MASTER_|LOCAL_|OMPI_|SLURM_|VC_|MA_|PARAMSYNC_)", k)}
    process = subprocess.Popen(["ip", "netns", "exec", names[node - 1], *map(str, words)], cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env={**clean, **(env or {})})
    started.append(process)
    return process


def ends(what, process, status=0, word=""):
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    check(f"{what}: exit {process.returncode}: {err}", process.returncode == status and word in err + out)
    return out, err


def certificates():
    """An authority, and a certificate of node 1's address by it."""
    sh("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "ca.key",
       "-out", "ca.pem", "-days", "365", "-subj", "/CN=paramsync authority")
    sh("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "server.key",
       "-out", "server.csr", "-subj", "/CN=node1")
    (folder / "san").write_text("subjectAltName=IP:10.98.0.1\n")
    sh("openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", "server.pem",
       "-days", "365", "-extfile", "san")
    sh("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "other.key",
       "-out", "other.pem", "-days", "365", "-subj", "/CN=another authority")


def main():
    subprocess.run(["ip", "netns", "add", names[1]], check=True)
    subprocess.run(["ip", "-n", names[0], "link", "add", "v0", "type", "veth", "peer", "name", "v0", "netns", names[1]], check=True)
    for i, name in enumerate(names):
        for words in (("addr", "add", f"10.98.0.{i + 1}/24", "dev", "v0"), ("link", "set", "v0", "up"), ("link", "set", "lo", "up")):
            subprocess.run(["ip", "-n", name, *words], check=True)
    certificates()
    (folder / "tokens").write_text("admin chief-token\nwrite trainer-token\nread looker-token\n")
    for name, token in (("trainer", "trainer-token"), ("looker", "looker-token"), ("wrong", "wrong-token")):
        (folder / f"{name}.token").write_text(token + "\n")
    sh(BIN / "paramsync-synth", folder / "data", "--train", "96", "--test", "20")

    ends("beyond loopback without TLS", on(1, BIN / "paramsyncd", "--data-dir", "store", "--grpc-listen", "10.98.0.1:50051",
                                           "--http-listen", "none"), 2, "--tls-cert")
    daemon = on(1, BIN / "paramsyncd", "--data-dir", "store", "--grpc-listen", "10.98.0.1:50051", "--http-listen", "10.98.0.1:8080",
                "--tls-cert", "server.pem", "--tls-key", "server.key", "--token-file", "tokens")
    check("the sidecar is ready", daemon.stdout.readline().startswith("paramsyncd: ready"))

    where = ["--sidecar", "10.98.0.1:50051", "--tls-ca", "ca.pem"]
    flags = ["--data_url", "data", "--width", 2, "--resolution", 8, "--batch", 16, "--epochs", 2, "--backend", "ref", "--enable_gpu",
             "false", "--world_size", 2, "--init_method", "grpc://10.98.0.1:50051/two", "--run", "two"]

    def rank(n, *access):
        return on(n + 1, BIN / "paramsync-train", *flags, "--rank", n, "--output_dir", f"node{n + 1}", *where, *access)

    # Rank 1 is there first; its own node knows nothing but the sidecar's address, the authority and a token.
    ranks = [rank(1, "--token-file", "trainer.token"), rank(0, "--token-file", "trainer.token")]
    ends("rank 1", ranks[0])
    out, err = ends("rank 0", ranks[1])
    check(f"rank 0 prints the epochs: {out}", out.count("val | epoch:") == 2)

    ends("a pull from node 2", on(2, BIN / "paramsync", "pull", "two", "--best", "-o", "pulled.safetensors", *where, "--token-file", "looker.token"))
    made = [(folder / "node1" / f"epoch_{e}.safetensors").read_bytes() for e in (1, 2)]
    check("the bytes", (folder / "pulled.safetensors").read_bytes() in made)
    out, _ = ends("both ranks are on record", on(2, BIN / "paramsync", "show", "two", "--json", *where, "--token-file", "looker.token"))
    check("as one run of two ranks that has finished", '"finished"' in out and '"world_size": 2' in out.replace('":2', '": 2'))
    out, _ = ends("rank 1's points", on(2, BIN / "paramsync", "export", "two", "--series", "loss", "--format", "csv", *where, "--token-file", "looker.token"))
    check("of both ranks", ",0,1," in out and ",1,1," in out)

    for what, access, word in (("no token", [], "token"), ("a wrong token", ["--token-file", "wrong.token"], "the token is wrong")):
        ends(what, on(2, BIN / "paramsync", "runs", *where, *access), 1, word)
    ends("a token that may only look", rank(0, "--token-file", "looker.token"), 1, "role write")
    ends("another authority", on(2, BIN / "paramsync", "runs", "--sidecar", "10.98.0.1:50051", "--tls-ca", "other.pem", "--token-file",
                                 "looker.token"), 1, "")
    ends("without TLS", on(2, BIN / "paramsync", "runs", "--sidecar", "10.98.0.1:50051", "--token-file", "looker.token"), 1, "")
    daemon.terminate()
    ends("the sidecar", daemon)


try:
    main()
finally:
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
    for name in names:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
    shutil.rmtree(folder, ignore_errors=True)
print(f"{len(failures)} failures" if failures else "all good")
sys.exit(1 if failures else 0)
