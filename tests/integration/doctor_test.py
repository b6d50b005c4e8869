#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""paramsync doctor: what it finds on machines that lack something."""
import json
import os
import re
import socket
import subprocess
import tempfile

BIN = os.environ["PS_BIN"]
environment = {k: v for k, v in os.environ.items() if not k.startswith("PARAMSYNC_")}


def doctor(*args, env=None, status=0):
    done = subprocess.run([os.path.join(BIN, "paramsync"), "doctor", "--json", *args], capture_output=True, text=True,
                          env={**environment, **(env or {})}, timeout=60)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout) if status < 2 else done.stderr


def one(report, check, text, verdict):
    found = [c for c in report["checks"] if c["check"] == check and text in c["found"]]
    assert found and all(c["verdict"] == verdict for c in found), (check, text, verdict, report)
    if verdict != "ok":
        assert all(c["what_to_do"] for c in found), found
    return found


with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    busy = taken.getsockname()[1]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    here = ["--output-dir", folder, "--ports", f"{free},{busy}"]
    report = doctor(*here, "--sidecar", "127.0.0.1:50051")
    one(report, "program", "paramsyncd is there", "ok")
    one(report, "port", f"{free} is free", "ok")
    one(report, "port", f"{busy} is taken", "warn")
    one(report, "output", "written, synced and renamed", "ok")
    assert any(c["check"] == "clock" for c in report["checks"]) and any(c["check"] == "processor" for c in report["checks"])
    assert os.listdir(folder) == []
    # Modules that are not there.
    report = doctor(*here, env={"PARAMSYNC_MODULE_DIR": folder})
    one(report, "library", "oneDNN", "warn")
    one(report, "library", "Gloo", "warn")
    # A sidecar that was named and does not answer; then one that does, and its port is no complaint.
    report = doctor(*here, "--sidecar", f"127.0.0.1:{free}", status=1)
    one(report, "sidecar", str(free), "fail")
    daemon = subprocess.Popen([os.path.join(BIN, "paramsyncd"), "--data-dir", os.path.join(folder, "store"), "--grpc-listen",
                               "127.0.0.1:0", "--http-listen", "none"], stdout=subprocess.PIPE, text=True,
                              env={**environment, "PARAMSYNC_TOKEN": "apples"})
    try:
        port = re.search(r"gRPC 127\.0\.0\.1:(\d+)", daemon.stdout.readline()).group(1)
        report = doctor("--output-dir", folder, "--ports", port, "--sidecar", f"127.0.0.1:{port}", env={"PARAMSYNC_TOKEN": "apples"})
        one(report, "sidecar", "answers", "ok")
        one(report, "port", f"{port} is the sidecar's", "ok")
        report = doctor(*here, "--sidecar", f"127.0.0.1:{port}", env={"PARAMSYNC_TOKEN": "pears"}, status=1)
        assert "token" in one(report, "sidecar", "refuses", "fail")[0]["what_to_do"]
    finally:
        daemon.terminate()
        daemon.wait(30)
    # Folders: one that is to be made, one that is a file, one in memory.
    report = doctor(*here, "--data-dir", os.path.join(folder, "a", "b"))
    one(report, "store", folder + ":", "ok")
    file = os.path.join(folder, "file")
    open(file, "w").close()
    report = doctor(*here, "--data-dir", file, status=1)
    one(report, "store", "not a folder", "fail")
    report = doctor(*here, "--data-dir", "/dev/shm")
    one(report, "store", "tmpfs", "warn") if "tmpfs" in json.dumps(report) else None
    if os.geteuid() != 0:
        os.mkdir(os.path.join(folder, "closed"), 0o500)
        report = doctor("--output-dir", os.path.join(folder, "closed"), "--ports", str(free), status=1)
    assert "--ports x" in doctor("--ports", "x", status=2)
    text = subprocess.run([os.path.join(BIN, "paramsync"), "doctor", *here], capture_output=True, text=True, env=environment).stdout
    assert all(len(line) <= 80 for line in text.splitlines()), text
print("good")
