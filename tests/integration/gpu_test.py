# SPDX-License-Identifier: Apache-2.0
"""The trainer's GPU path: gpu_test.py CASE. It runs on the stand-ins of tests/fakegpu, which compute on the host and
check what the real libraries check; every report of theirs (a race, a leak, another order of collectives) fails the
test. Nothing here says anything about a GPU's speed."""
import os
import signal
import time

from train_common import *
from parallel_test import check_close

print("on stand-ins for the CUDA libraries: not a GPU")
REPORTS = path("reports.log")
FAKE = {"PARAMSYNC_MODULE_DIR": os.path.join(BUILD, "tests/fakegpu/modules"), "PS_FAKE_GPU_COUNT": "4",
        "PS_FAKE_GPU_LOG": REPORTS, "PS_FAKE_GPU_STRICT": "1", "PS_FAKE_GPU_SEED": "1"}
NET = ["--enable_gpu", "true", "--width", "8", "--resolution", "8", "--optimizer", "sgd", "--lr", "0.02", "--seed", "7",
       "--drop_last", "false", "--threads", "1", "--lr_scale", "none"]
# After a failure what is on the device ends with the process: leaks are not counted then.
FAILS = {"PS_FAKE_GPU_STRICT": "0"}
BATCH = 32


def no_reports():
    text = open(REPORTS).read() if os.path.exists(REPORTS) else ""
    assert not text, text


def ranks_of(data, out, world, *args, env=None):
    port = free_port()
    several = ["--init_method", f"tcp://127.0.0.1:{port}"] if world > 1 else []
    return [start("--data_url", data, "--output_dir", out, *NET, "--batch", str(BATCH // world), *several,
                  "--world_size", str(world), "--rank", str(r), *args, env={**FAKE, **(env or {})})
            for r in range(world)]


def gpus(data, out, world, *args, env=None):
    """Rank 0's output and messages."""
    ranks = ranks_of(data, out, world, *args, env=env)
    answers = [r.communicate(timeout=LIMIT) for r in ranks]
    assert all(r.returncode == 0 for r in ranks), [e.decode() for _, e in answers]
    no_reports()
    return answers[0][0], answers[0][1].decode()


def case_ranks():
    """BatchNorm frozen: one, two and four ranks end with the same weights."""
    data = synth(train=64, test=20)
    _, err = gpus(data, "one", 1, "--freeze_bn", "--epochs", "2")
    assert "backend cuda (Stand-in GPU" in err, err
    for world in (2, 4):
        gpus(data, f"w{world}", world, "--freeze_bn", "--epochs", "2")
        check_close(f"w{world}", "one", 1e-6, epoch=2)
    # And as on the CPU.
    train("--data_url", data, "--output_dir", "ref", *NET, "--enable_gpu", "false", "--backend", "ref", "--batch",
          str(BATCH), "--freeze_bn", "--epochs", "2")
    check_close("one", "ref", 1e-5, epoch=2)


def case_sync_bn():
    data = synth(train=32, test=20)
    gpus(data, "one", 1, "--epochs", "1")
    gpus(data, "two", 2, "--epochs", "1", "--sync_bn", "true")
    check_close("two", "one", 1e-6, only="running_")


def case_resume():
    """Two epochs, and two more from their checkpoint, are four straight ones: bit for bit."""
    data = synth(train=64, test=20)
    common = ["--deterministic", "--precision", "bf16"]
    gpus(data, "straight", 2, "--epochs", "4", *common)
    gpus(data, "parts", 2, "--epochs", "2", *common)
    gpus(data, "parts", 2, "--epochs", "4", "--resume", "auto", *common)
    same_training("straight", "parts", 4)


def case_graph():
    """Steps that the device repeats by itself give the bits of steps queued call by call; a short last batch and another
    resolution are shapes of their own."""
    data = synth(train=88, test=20)
    common = ["--epochs", "3", "--schedule", "onecycle", "--resolution", "8:1,12:2", "--precision", "bf16"]
    for world in (1, 2):
        outs = [gpus(data, f"{graph}{world}", world, "--graph", graph, *common)[0] for graph in ("off", "on")]
        assert outs[0] == outs[1], outs
        for name in ("epoch_3.safetensors",):
            assert read(f"off{world}", name) == read(f"on{world}", name), (world, name)
    assert "cannot be recorded" in gpus(data, "no", 1, "--graph", "on", "--epochs", "1", "--accumulate", "2")[1]


def ends_soon(ranks, since, limit, word):
    for r in ranks:
        _, err = r.communicate(timeout=60)
        took = time.monotonic() - since
        assert r.returncode == 1, (r.returncode, err.decode())
        assert word in err.decode(), err.decode()
        assert took < limit, took


def case_failures():
    """A killed rank, an asynchronous error of NCCL and a rank that hangs end all ranks, with the reason."""
    data = synth(train=64, test=20)
    ranks = ranks_of(data, "killed", 2, "--epochs", "500", env=FAILS)
    for _ in range(600):
        if os.path.exists(path("killed", "epoch_1.state")):
            break
        time.sleep(0.1)
    assert all(r.poll() is None for r in ranks), [r.communicate()[1].decode() for r in ranks]
    ranks[1].kill()
    since = time.monotonic()
    ends_soon(ranks[:1], since, 10, "rank 1")

    ranks = ranks_of(data, "error", 2, "--epochs", "500", env={**FAILS, "PS_FAKE_NCCL_ERROR": "1:20"})
    for r in ranks:
        _, err = r.communicate(timeout=LIMIT)
        assert r.returncode == 1 and "NCCL" in err.decode() or "all-reduce" in err.decode(), err.decode()

    ranks = ranks_of(data, "hang", 2, "--epochs", "500", "--collective_timeout", "3s",
                     env={**FAILS, "PS_FAKE_NCCL_HANG": "1:20"})
    for r in ranks:
        _, err = r.communicate(timeout=LIMIT)
        assert r.returncode == 1 and "--collective_timeout" in err.decode(), (r.returncode, err.decode())


def case_one_gpu():
    """More processes than GPUs, and two ranks that were given the same one, are told so."""
    data = synth(train=64, test=20)
    for env, word in (({"PS_FAKE_GPU_COUNT": "1"}, "start at most 1 here"),
                      ({"PS_FAKE_GPU_SHARED": "1"}, "share one GPU")):
        ranks = ranks_of(data, "one", 2, "--epochs", "1", env={**FAILS, **env})
        answers = [r.communicate(timeout=LIMIT)[1].decode() for r in ranks]
        assert all(r.returncode in (1, 2) for r in ranks), answers
        assert all(word in a for a in answers), answers


if __name__ == "__main__":
    run_case(globals())
