#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""paramsync launch from outside: one node, PyTorch under it, deaths, signals, restarts, and two nodes as two network
namespaces (as root). The case to run is the argument."""
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

from train_common import (BIN, LIMIT, TINY, TRAIN, environment, free_port, path, read, run_case, same_training, started,
                          synth, tensors, train, work)

CLI = os.path.join(BIN, "paramsync")
TINY = [*TINY, "--heartbeat_timeout", "60s"]  # on a busy machine a rank may be silent for seconds, and that is not what is tested


def launch(*args, env=None, prefix=()):
    process = subprocess.Popen([*prefix, CLI, "launch", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=work,
                               env={**environment, **(env or {})}, text=True)
    started.append(process)
    return process


def end(process, status=0):
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == status, f"exit {process.returncode}, expected {status}:\n{out}\n{err}"
    return out, err


def write(name, text):
    with open(path(name), "w") as f:
        f.write(text)
    return path(name)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, what, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def pids(count, folder="pids"):
    """The ranks' processes, which have each left a file with their number."""
    def there():
        names = os.listdir(path(folder)) if os.path.isdir(path(folder)) else []
        return sorted(names) if len(names) >= count else None
    wait_for(there, f"{count} ranks")
    return [int(name) for name in there()]


def case_environment():
    names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
             "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
             "TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS PARAMSYNC_TRAINING PARAMSYNC_JOB_SECRET PARAMSYNC_RUN").split()
    script = "for n in " + " ".join(names) + "; do eval echo $n=\\$$n; done; grep Cpus_allowed_list /proc/self/status; cat"
    out, err = end(launch("--nproc-per-node", "3", "--max-restarts", "2", "--run", "a b", "--", "sh", "-c", script,
                          env={"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1"}))
    ranks = [dict(line.split("] ", 1)[1].split("=", 1) for line in out.splitlines() if line.startswith(f"[{r}] ") and "=" in line)
             for r in range(3)]
    for r, got in enumerate(ranks):
        for name, value in {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0,
                            "GROUP_WORLD_SIZE": 1, "ROLE_RANK": r, "ROLE_WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1",
                            "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 2,
                            "TORCHELASTIC_USE_AGENT_STORE": "False", "PARAMSYNC_RUN": "a b"}.items():
            assert got[name] == str(value), (r, name, got[name], value)
        assert int(got["MASTER_PORT"]) > 1024 and int(got["OMP_NUM_THREADS"]) >= 1
        assert re.fullmatch("[0-9a-f]{32}", got["PARAMSYNC_TRAINING"]) and len(got["PARAMSYNC_JOB_SECRET"]) == 64
    assert len({g["MASTER_PORT"] for g in ranks}) == 1 and len({g["PARAMSYNC_JOB_SECRET"] for g in ranks}) == 1
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 3:
        lists = re.findall(r"Cpus_allowed_list:\s*(\S+)", out)
        assert len(set(lists)) == 3, lists
    out, _ = end(launch("--nproc-per-node", "2", "--bind", "false", "--", "grep", "Cpus_allowed_list", "/proc/self/status"))
    assert len(set(re.findall(r"Cpus_allowed_list:\s*(\S+)", out))) == 1, out
    # A single rank's lines stay as they are, and the trainer needs no flag but these to be told its rank.
    out, _ = end(launch("--", "printf", "a\\r\\nb\\rc\\n\\033x"))
    assert out == "a\nc\n\033x\n", repr(out)
    # On a terminal each rank has its colour; elsewhere, and with NO_COLOR, none.
    for extra, coloured in (({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        main, other = os.openpty()
        process = subprocess.Popen([CLI, "launch", "--nproc-per-node", "2", "--", "sh", "-c", "echo out; echo err >&2"], stdout=other,
                                   stderr=subprocess.PIPE, cwd=work, env={**environment, **extra}, text=True)
        os.close(other)
        err = process.communicate(timeout=LIMIT)[1]
        shown = os.read(main, 65536).decode()
        os.close(main)
        assert shown.count("out") == 2 and ("\033[" in shown) == coloured and "\033[" not in err, (shown, err)
    # What Slurm says, without flags.
    out, _ = end(launch("--", "sh", "-c", "echo $GROUP_RANK $WORLD_SIZE",
                        env={"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS": "1",
                             "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "2"}))
    assert sorted(out.splitlines()) == ["[0] 0 2", "[1] 0 2"], out
    _, err = end(launch("--", "true", env={"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}), 2)
    assert "srun --ntasks-per-node=1" in err
    _, err = end(launch("--nproc-per-node", "x", "--", "true"), 2)
    assert "--nproc-per-node x" in err
    end(launch("--nproc-per-node", "2"), 2)
    _, err = end(launch("--", "/nowhere/x"), 1)
    assert "/nowhere/x cannot be run" in err, err


def case_deaths():
    mark = 'mkdir -p pids; : > pids/$$; '
    # The first that fails decides; its last lines are shown; the others' process groups go too.
    out, err = end(launch("--nproc-per-node", "3", "--grace", "1s", "--log-dir", "logs", "--", "sh", "-c", mark +
                          'trap "" TERM; if [ $RANK = 1 ]; then for i in $(seq 30); do echo line $i; done; echo why >&2; exit 7; fi;'
                          'sleep 300 & : > pids/$!; wait; wait; sleep 300'), 7)
    assert "rank 1 (node 0) exited with status 7" in err, err
    tail = err.split("-- its last lines:\n")[1].split("--\n")[0].splitlines()
    assert tail[-1] in ("why", "line 30") and len(tail) == 12, tail
    for pid in pids(5):
        wait_for(lambda p=pid: not alive(p), f"process {pid} of the group is gone", 10)
    assert "line 30\n" in read("logs", "rank_1.log").decode() and "== attempt 0" in read("logs", "rank_0.log").decode()
    _, err = end(launch("--nproc-per-node", "2", "--", "sh", "-c", "[ $RANK = 1 ] && kill -9 $$; exec sleep 300"), 137)
    assert "was killed by signal 9" in err, err
    # Restarts: all ranks again, with the count; then the status of the last failure.
    out, err = end(launch("--nproc-per-node", "2", "--max-restarts", "2", "--", "sh", "-c",
                          'echo $RANK at $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; '
                          '[ $RANK = 0 ] && exit 3; exec sleep 300'))
    assert sorted(re.findall(r"\d at \d", out)) == [f"{r} at {a}" for r in range(2) for a in range(3)], out
    end(launch("--max-restarts", "1", "--", "sh", "-c", "exit 5"), 5)
    # The launcher itself is killed: no rank survives it.
    shutil.rmtree(path("pids"))
    process = launch("--nproc-per-node", "2", "--", "sh", "-c", mark + "exec sleep 300")
    ranks = pids(2)
    process.kill()
    for pid in ranks:
        wait_for(lambda p=pid: not alive(p), f"rank {pid} has gone with its launcher", 10)


def case_signals():
    mark = 'mkdir -p pids; : > pids/$$; '
    for number, script, status in ((signal.SIGTERM, "exec sleep 300", 143), (signal.SIGINT, "exec sleep 300", 130),
                                   (signal.SIGTERM, "trap '' TERM; sleep 300; sleep 300", 143)):
        shutil.rmtree(path("pids"), ignore_errors=True)
        process = launch("--nproc-per-node", "2", "--grace", "1s", "--max-restarts", "3", "--", "sh", "-c", mark + script)
        ranks = pids(2)
        process.send_signal(number)
        _, err = end(process, status)
        assert "restart" not in err, err
        assert not any(alive(p) for p in ranks)
    shutil.rmtree(path("pids"), ignore_errors=True)
    process = launch("--nproc-per-node", "2", "--", "sh", "-c",
                     "trap 'echo got it; exit 0' USR1; " + mark + "while :; do sleep 0.1; done")
    pids(2)
    process.send_signal(signal.SIGUSR1)
    out, _ = end(process)
    assert out.count("got it") == 2, out
    # A reader that goes away does not stop the training.
    process = launch("--nproc-per-node", "2", "--", "sh", "-c", "for i in $(seq 20000); do echo $i; done; : > done_$RANK")
    process.stdout.readline()
    process.stdout.close()
    process.wait(LIMIT)
    assert process.returncode == 0 and os.path.exists(path("done_0")) and os.path.exists(path("done_1"))


def case_resume():
    """A rank is killed after the second epoch; the restart goes on to the same bits, in a folder that was used before."""
    data = synth()
    flags = ["--data_url", data, *TINY, "--epochs", "4", "--deterministic", "--output_dir"]
    end(launch("--nproc-per-node", "2", "--", TRAIN, *flags, "straight"))
    train("--data_url", data, *TINY, "--epochs", "6", "--seed", "9", "--output_dir", "broken")
    wrapper = write("die.sh", f"""#!/bin/sh
if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && [ "$RANK" = 1 ]; then
    "$@" & child=$!
    while ! grep -q 'epoch: 2 .*accuracy' logs/rank_0.log 2>/dev/null; do kill -0 $child || exit 99; sleep 0.01; done
    kill -STOP $child; kill -KILL $child; kill -KILL $$
fi
exec "$@"
""")
    out, err = end(launch("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "logs", "--", "sh", wrapper, TRAIN, *flags[:-1],
                          "--epochs", "40", "--output_dir", "broken"))
    assert "restart 1 of 1" in err and "started again: resuming from" in err, err
    end(launch("--nproc-per-node", "2", "--", TRAIN, *flags[:-1], "--epochs", "40", "--output_dir", "straight40"))
    same_training("straight40", "broken", 40)


def case_torch():
    try:
        import torch  # noqa: F401
        import torch.distributed
    except ImportError:
        return 77
    script = write("ddp.py", """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert rank == int(os.environ["RANK"]) and world == 2 and int(os.environ["LOCAL_RANK"]) == rank
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(rank)
net = DistributedDataParallel(torch.nn.Linear(4, 2))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    sgd.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    sgd.step()
    if restarts == 0 and rank == 1 and step == 2:
        os._exit(9)
sums = [torch.zeros(1) for _ in range(world)]
dist.all_gather(sums, sum(p.sum() for p in net.parameters()).detach().reshape(1))
print("same" if sums[0].item() == sums[1].item() else "different", restarts)
""")
    out, err = end(launch("--nproc-per-node", "2", "--max-restarts", "1", "--", sys.executable, script))
    assert sorted(out.splitlines()) == ["[0] same 1", "[1] same 1"], out + err
    assert "rank 1 (node 0) exited with status 9" in err, err


def case_sidecar():
    """One of the job's own: the run, its attempts, and it is stopped at the end."""
    data = synth()
    wrapper = write("die.sh", """#!/bin/sh
if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && [ "$RANK" = 0 ]; then
    "$@" & child=$!
    while ! grep -q 'epoch: 2 .*accuracy' logs/rank_0.log 2>/dev/null; do kill -0 $child || exit 99; sleep 0.01; done
    until [ -e out/epoch_2.safetensors ]; do sleep 0.01; done
    kill -KILL $child; kill -KILL $$
fi
exec "$@"
""")
    out, err = end(launch("--nproc-per-node", "2", "--max-restarts", "1", "--sidecar", "auto", "--run", "mine", "--log-dir", "logs", "--",
                          "sh", wrapper, TRAIN, "--data_url", data, *TINY, "--epochs", "60", "--output_dir", "out"))
    assert "was not told" not in err, err
    store = path("out", "sidecar")
    daemon = subprocess.Popen([os.path.join(BIN, "paramsyncd"), "--data-dir", store, "--grpc-listen", "127.0.0.1:0",
                               "--http-listen", "none"], stdout=subprocess.PIPE, text=True)
    started.append(daemon)
    address = re.search(r"gRPC (\S+?),", daemon.stdout.readline()).group(1)
    shown = subprocess.run([CLI, "show", "mine", "--sidecar", address, "--json"], capture_output=True, text=True, check=True).stdout
    daemon.terminate()
    assert daemon.wait(30) == 0
    run = json.loads(shown)
    run = run.get("run", run)
    assert run["state"] == "finished" and run["attempt"] == 2 and run["world_size"] == 2 and run["last_epoch"] == 60, run
    with sqlite3.connect(os.path.join(store, "paramsync.db")) as db:
        events = db.execute("SELECT kind, detail FROM events ORDER BY 1").fetchall()
    assert any("rank 0 (node 0) was killed by signal 9" in str(detail) for _, detail in events), events


def case_attempts():
    """A name that is taken: the job's run is NAME-2, and stays it when an attempt dies before its first checkpoint."""
    data = synth()
    daemon = subprocess.Popen([os.path.join(BIN, "paramsyncd"), "--data-dir", path("store"), "--grpc-listen", "127.0.0.1:0",
                               "--http-listen", "none"], stdout=subprocess.PIPE, text=True)
    started.append(daemon)
    address = re.search(r"gRPC (\S+?),", daemon.stdout.readline()).group(1)
    lines = "train | epoch: 1 | loss: 2.0\nval | epoch: 1 | loss: 1.5 | accuracy: 0.5 \n"
    subprocess.run([CLI, "tail", "--run", "mine", "--sidecar", address], input=lines, text=True, check=True, stdout=subprocess.DEVNULL)
    wrapper = write("die.sh", """#!/bin/sh
if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then
    "$@" & child=$!
    until grep -q 'as run mine-2, attempt 1' logs/rank_0.log 2>/dev/null; do kill -0 $child || exit 99; sleep 0.01; done
    kill -KILL $child; rm -f out/epoch_*; kill -KILL $$
fi
exec "$@"
""")
    _, err = end(launch("--max-restarts", "1", "--sidecar", address, "--run", "mine", "--log-dir", "logs", "--", "sh", wrapper, TRAIN,
                        "--data_url", data, *TINY, "--epochs", "3", "--output_dir", "out"))
    assert "as run mine-2, attempt 2" in err, err
    rows = {line.split()[0]: line.split()[1] for line in subprocess.run([CLI, "runs", "--sidecar", address], capture_output=True,
                                                                        text=True, check=True).stdout.splitlines()[1:]}
    assert rows == {"mine": "finished", "mine-2": "finished"}, rows


class Net:
    """Two namespaces joined by a pair of interfaces: 10.99.0.1 and 10.99.0.2."""

    def __init__(self):
        self.names = [f"ps{os.getpid()}n{i}" for i in range(2)]

    def __enter__(self):
        sh = lambda *a: subprocess.run(a, check=True)
        for name in self.names:
            sh("ip", "netns", "add", name)
        a, b = self.names
        sh("ip", "-n", a, "link", "add", "v0", "type", "veth", "peer", "name", "v0", "netns", b)
        for i, name in enumerate(self.names):
            sh("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "v0")
            sh("ip", "-n", name, "link", "set", "v0", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def link(self, up):
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "v0", "up" if up else "down"], check=True)

    def launch(self, node, *args, env=None, ranks=1, beat="30s"):
        return launch("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks), "--rdzv", "10.99.0.1:29400",
                      "--heartbeat-timeout", beat, "--grace", "3s", "--join-timeout", "120s", *args,
                      prefix=("ip", "netns", "exec", self.names[node]),
                      env={"PARAMSYNC_JOB_SECRET": "apples", "HOSTNAME": f"node{node}", **(env or {})})


def may_have_namespaces():
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"ps{os.getpid()}try"
    if subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=False)
    return True


def case_nodes():
    if not may_have_namespaces():
        return 77
    data = synth()
    flags = ["--data_url", data, *TINY, "--deterministic"]
    with Net() as net:
        # Train: two nodes, three ranks; the other node's failure is this launcher's status too.
        auto = ["--sidecar", "auto", "--sidecar-dir", path("nodes"), "--run", "nodes"]
        one = net.launch(1, *auto, "--", TRAIN, *flags, "--epochs", "2", "--output_dir", "a")
        two = net.launch(0, *auto, "--", TRAIN, *flags, "--epochs", "2", "--output_dir", "a", ranks=2)
        out, err = end(two)
        _, other = end(one)
        # One sidecar on node 0, which the other node's rank reaches with the token that both derive from the secret.
        assert "sidecar: gRPC on 10.99.0.1:" in err and "was not delivered" not in err + other, err + other
        with sqlite3.connect(path("nodes", "paramsync.db")) as db:
            ranks = {row[0] for row in db.execute("SELECT DISTINCT rank FROM series")}
        assert ranks == {0, 1, 2}, ranks
        assert "rank 0 of 3" in err and "val | epoch: 2" in out, out + err
        pair = [net.launch(i, "--", "sh", "-c", "[ $RANK = 1 ] && exit 6; exec sleep 300") for i in range(2)]
        for i, process in enumerate(pair):
            _, err = end(process, 6)
            assert "rank 1 (node 1) exited with status 6" in err, err
        # A stranger, and a wrong secret.
        first = net.launch(0, "--join-timeout", "4s", "--", "true")
        _, err = end(net.launch(1, "--", "true", env={"PARAMSYNC_JOB_SECRET": "pears"}), 1)
        assert "PARAMSYNC_JOB_SECRET" in err, err
        _, err = end(first, 1)
        assert "node 1 has not come" in err, err


def case_cut():
    if not may_have_namespaces():
        return 77
    data = synth()
    flags = ["--data_url", data, *TINY, "--deterministic", "--heartbeat_timeout", "5s", "--resume", "auto", "--epochs", "4000",
             "--output_dir", "cut"]
    with Net() as net:
        def newest():
            names = os.listdir(path("cut")) if os.path.isdir(path("cut")) else []
            return max([int(m.group(1)) for m in map(re.compile(r"epoch_(\d+)\.safetensors").fullmatch, names) if m], default=0)

        def ranks():
            found = subprocess.run(["pgrep", "-f", f"^{TRAIN} .*--output_dir cut"], capture_output=True, text=True).stdout
            return sum(alive(int(pid)) for pid in found.split())

        def goes_on(beyond, what):
            wait_for(lambda: newest() > beyond, what)
            return newest()

        both = [net.launch(i, "--max-restarts", "30", "--", TRAIN, *flags, beat="5s") for i in range(2)]
        at = goes_on(1, "the first epochs")
        wait_for(lambda: ranks() == 2, "both ranks", 60)
        net.link(False)
        wait_for(lambda: ranks() == 0, "both sides see it and end their ranks", 60)
        at = newest()
        net.link(True)
        at = goes_on(at + 1, "epochs after the cut")
        # A node is killed and started anew.
        both[1].kill()
        both[1].wait()
        wait_for(lambda: ranks() == 0, "the others end", 60)
        at = newest()
        both[1] = net.launch(1, "--max-restarts", "30", "--", TRAIN, *flags, beat="5s")
        at = goes_on(at + 1, "epochs with the new node")
        # Node 0 is killed and started anew: the other one finds it again.
        both[0].kill()
        both[0].wait()
        wait_for(lambda: ranks() == 0, "the others end", 60)
        at = newest()
        both[0] = net.launch(0, "--max-restarts", "30", "--", TRAIN, *flags, beat="5s")
        goes_on(at + 1, "epochs with the new node 0")
        both[1].send_signal(signal.SIGTERM)
        for process in both:
            out, err = end(process, 143)
            if os.environ.get("PS_VERBOSE"):
                print(err)
            assert "signal 15" in err, err


run_case(globals())
