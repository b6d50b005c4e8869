# SPDX-License-Identifier: Apache-2.0
"""Ranks against one process, from outside: parallel_test.py CASE. A global batch gives the same training however many
ranks share it; the tolerances are the ones that PyTorch keeps against itself (float32, BatchNorm frozen or
synchronised)."""
import array
import json
import math
import os
import re

from train_common import *

NET = ["--width", "8", "--resolution", "8", "--enable_gpu", "false", "--optimizer", "sgd", "--lr", "0.02",
       "--threads", "1", "--drop_last", "false", "--seed", "7"]
BATCH = 48  # of all ranks together: 1, 2, 3, 4 and 16 divide it


def vectors(out, epoch):
    """Every tensor of the weights file as numbers."""
    found, _ = tensors(read(out, f"epoch_{epoch}.safetensors"))
    return {name: array.array("f", body) for name, (kind, _, body) in found.items() if kind == "F32"}


def distance(a, b):
    """Relative L2."""
    over = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))
    return over / (math.sqrt(sum(x * x for x in b)) or 1)


def check_close(a, b, limit, epoch=1, only=""):
    x, y = vectors(a, epoch), vectors(b, epoch)
    assert x.keys() == y.keys()
    worst = max((distance(x[n], y[n]), n) for n in x if only in n)
    print(f"{a} against {b}: at most {worst[0]:.2e} ({worst[1]})")
    assert worst[0] <= limit, (a, b, worst)


def ddp(data, out, world, *args, backend="cpu"):
    """A job of processes; returns rank 0's output and messages."""
    if world == 1:
        return train("--data_url", data, "--output_dir", out, "--backend", backend, "--batch", str(BATCH), *NET, *args)
    port = free_port()
    ranks = [start("--data_url", data, "--output_dir", out, "--backend", backend, "--batch", str(BATCH // world), *NET,
                   "--init_method", f"tcp://127.0.0.1:{port}", "--world_size", str(world), "--rank", str(r), *args)
             for r in range(world)]
    answers = [r.communicate(timeout=LIMIT) for r in ranks]
    assert all(r.returncode == 0 for r in ranks), [e.decode() for _, e in answers]
    return answers[0][0], answers[0][1].decode()


def dp(data, out, replicas, *args, backend="cpu", status=0, env=None):
    return train("--data_url", data, "--output_dir", out, "--backend", backend, "--batch", str(BATCH), *NET,
                 "--mode", "dp", "--replicas", str(replicas), *args, status=status, env=env)


def case_frozen():
    """BatchNorm frozen: every world size ends with the same weights, to 1e-6, on both backends."""
    data = synth(train=96, test=50)
    for backend, worlds in (("cpu", (2, 3, 4, 16)), ("ref", (2,))):
        common = ["--freeze_bn", "--epochs", "2"]
        one, _ = ddp(data, f"{backend}1", 1, *common, backend=backend)
        for world in worlds:
            out, err = ddp(data, f"{backend}{world}", world, *common, backend=backend)
            assert f"global batch {BATCH} " in err, err
            check_close(f"{backend}{world}", f"{backend}1", 1e-6, epoch=2)
            for x, y in zip(results(out), results(one)):
                assert abs(x[1] - y[1]) < 2e-4 and x[3] == y[3], (world, x, y)


def case_sync_bn():
    """Synchronised statistics: those of one process, to 1e-6 a layer, and losses over 5 steps to 1e-3."""
    one_step, five = synth("one", train=BATCH, test=20), synth("five", train=5 * BATCH, test=20)
    for backend, worlds in (("cpu", (2, 3, 4, 16)), ("ref", (3,))):
        ddp(one_step, f"s{backend}1", 1, "--epochs", "1", backend=backend)
        alone, _ = ddp(five, f"f{backend}1", 1, "--epochs", "1", "--lr", "0.005", backend=backend)
        for world in worlds:
            ddp(one_step, f"s{backend}{world}", world, "--epochs", "1", "--sync_bn", "true", backend=backend)
            check_close(f"s{backend}{world}", f"s{backend}1", 1e-6, only="running_")
            # Momentum after one step is the gradient.
            x, y = (array.array("f", tensors(read(f"s{backend}{w}", "epoch_1.state"))[0]["moment_1"][2])
                    for w in (world, 1))
            assert distance(x, y) < 5e-6, distance(x, y)
            out, _ = ddp(five, f"f{backend}{world}", world, "--epochs", "1", "--lr", "0.005", "--sync_bn", backend=backend)
            assert abs(results(out)[0][1] - results(alone)[0][1]) < 1e-3, (out, alone)
        # Without it the statistics are each rank's own: the test would see that.
        ddp(one_step, f"l{backend}", worlds[0], "--epochs", "1", backend=backend)
        x, y = vectors(f"l{backend}", 1), vectors(f"s{backend}1", 1)
        assert max(distance(x[n], y[n]) for n in x if "running_" in n) > 1e-4


def case_accumulate():
    """K batches a step are one of K times the size; one set of exchanges a step, and the last step may have fewer."""
    data = synth(train=120, test=50)  # 2.5 global batches
    ddp(data, "whole", 1, "--freeze_bn", "--epochs", "1")
    train("--data_url", data, "--output_dir", "parts", "--backend", "cpu", *NET, "--freeze_bn", "--epochs", "1",
          "--batch", "12", "--accumulate", "4")
    check_close("parts", "whole", 1e-6)
    port = free_port()
    ranks = [start("--data_url", data, "--output_dir", "ranks", "--backend", "cpu", *NET, "--freeze_bn", "--epochs", "1",
                   "--batch", "6", "--accumulate", "4", "--init_method", f"tcp://127.0.0.1:{port}", "--world_size", "2",
                   "--rank", str(r)) for r in range(2)]
    answers = [r.communicate(timeout=LIMIT) for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0], answers
    check_close("ranks", "whole", 1e-6)
    assert tensors(read("ranks", "epoch_1.state"))[1]["step"] == "3"


def case_dp():
    """Replicas in one process: the same training as processes, by the bits for two; failures end all."""
    data = synth(train=2 * BATCH + 10, test=51)  # a short last batch
    for extra in ([], ["--sync_bn"], ["--augment", "standard", "--normalize"]):
        common = ["--epochs", "2", *extra]
        ddp(data, "processes", 2, *common)
        out, err = dp(data, "replicas", 2, *common)
        assert "2 replicas in this process, 24 images each" in err and f"global batch {BATCH} " in err, err
        assert read("processes", "epoch_2.safetensors") == read("replicas", "epoch_2.safetensors")
        shutil.rmtree(path("processes")), shutil.rmtree(path("replicas"))
    even = synth("even", train=2 * BATCH, test=51)
    ddp(even, "one", 1, "--epochs", "1", "--freeze_bn")
    dp(even, "four", 4, "--epochs", "1", "--freeze_bn")
    check_close("four", "one", 1e-6)
    _, err = dp(data, "x", 5, "--epochs", "1", status=2)
    assert "--batch 48 cannot be shared evenly among 5 replicas" in err, err
    _, err = dp(data, "x", 2, "--epochs", "1", status=2, env={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    # Nobody asked for a number: one that divides the batch is taken.
    _, err = train("--data_url", data, "--output_dir", "prime", "--backend", "cpu", *NET, "--mode", "dp", "--batch", "7",
                   "--epochs", "1")
    count = int(re.search(r"--mode dp: (\d+) replica", err)[1])
    assert count in (1, 7) and (count == 7) == (len(os.sched_getaffinity(0)) >= 7), err
    _, err = dp(data, "x", 4, "--epochs", "3", "--lr", "1e6", status=1)
    assert re.search(r"is -?(nan|inf) at step \d+ \(epoch 1\) on rank \d", err), err


def case_evaluation():
    """Each test image counts once, for any number of ranks: the same number of right answers as one process has."""
    data = synth(train=96, test=53)
    ddp(data, "base", 1, "--epochs", "3", "--lr", "0.05")
    counts = set()
    for world in (1, 2, 3, 16):
        shutil.copytree(path("base"), path(f"w{world}"))
        # a rate that moves no weight, and frozen statistics: what is tested is the same net
        out, err = ddp(data, f"w{world}", world, "--epochs", "4", "--lr", "1e-30", "--freeze_bn", "--resume", "auto")
        assert vectors(f"w{world}", 4) == vectors("base", 3)
        accuracy = results_from(out, 4)
        assert abs(accuracy * 53 - round(accuracy * 53)) < 0.01, accuracy
        counts.add(round(accuracy * 53))
    assert len(counts) == 1, counts


def results_from(out, epoch):
    found = re.search(rb"val \| epoch: %d \| loss: \S+ \| accuracy: (\S+) \n" % epoch, out)
    assert found, out
    return float(found[1])


def case_uneven():
    """1001 images over 3 ranks, short last batches kept or not, batches of one image: as many steps on all ranks."""
    data = synth(train=1001, test=50)
    small = ["--width", "2", "--resolution", "8", "--enable_gpu", "false", "--backend", "ref", "--lr", "0.001", "--epochs", "1"]
    # each rank has 334: 4 batches of 83 and one of 2; 333 + 1: the last one is of a single image
    for batch, drop, steps in ((83, "false", 5), (83, "true", 4), (333, "false", 2), (333, "true", 1)):
        out = f"b{batch}{drop}"
        ranks = pair(data, out, *small, "--batch", str(batch), "--drop_last", drop, ranks=3)
        answers = [r.communicate(timeout=LIMIT) for r in ranks]
        assert [r.returncode for r in ranks] == [0, 0, 0], answers
        assert tensors(read(out, "epoch_1.state"))[1]["step"] == str(steps), (batch, drop)
        assert all(math.isfinite(v) for v in results(answers[0][0])[0]), answers[0]
    few = synth("few", train=7, test=2)
    ranks = pair(few, "single", *small, "--batch", "1", "--drop_last", "false", ranks=3)
    answers = [r.communicate(timeout=LIMIT) for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0, 0], answers
    assert tensors(read("single", "epoch_1.state"))[1]["step"] == "3"


def case_resume():
    """Three ranks, whose sums depend on where in a bucket a gradient lies: the bits after a break are those without.
    Four ranks and one go on from the checkpoints of three and of two, and say so."""
    data = synth(train=96, test=30)
    ddp(data, "straight", 3, "--epochs", "4")
    ddp(data, "broken", 3, "--epochs", "2")
    ddp(data, "broken", 3, "--epochs", "4", "--resume", "auto")
    same_training("straight", "broken", 4)
    ddp(data, "two", 2, "--epochs", "4")
    for source, before in (("broken", 3), ("two", 2)):
        for world in (1, 4):
            out = f"{source}{world}"
            shutil.copytree(path(source), path(out))
            _, err = ddp(data, out, world, "--epochs", "5", "--resume", "auto")
            assert f"world_size {world} instead of {before}" in err, err
            assert tensors(read(out, "epoch_5.state"))[1]["step"] == "10"  # two global batches an epoch, as before
            assert read(out, "epoch_4.safetensors") == read(source, "epoch_4.safetensors")


def case_learning():
    """Four ranks learn what one does at the same global batch: means of three seeds within 0.5 %. On the generated set,
    which is easy, so that what seeds do to the last accuracy does not hide a difference; the real images are for
    tests/bench/learning.py."""
    data = synth(train=2880, test=500)
    common = ["--recipe", "fast", "--precision", "fp32", "--resolution", "16", "--epochs", "6", "--augment", "none", "--eval_every", "6",
              "--batch", "96"]
    means = []
    for run in (ddp, dp):
        accuracies = []
        for seed in ("1", "2", "3"):
            args = [data, f"{run.__name__}{seed}", 1 if run is ddp else 4, *common, "--lr", "0.05", "--seed", seed]
            out, _ = run(*args)
            accuracies.append(results_from(out, 6))
        means.append(sum(accuracies) / 3)
        print(run.__name__, accuracies)
    assert means[0] > 0.9 and abs(means[0] - means[1]) <= 0.005, means


def spans_of(name):
    with open(path(name)) as f:
        whole = json.load(f)
    assert whole["otherData"]["dropped"] == 0
    return [e for e in whole["traceEvents"] if e["ph"] == "X"]


def case_trace():
    """What --trace writes: for each rank and step the parts of a step, for each bucket its copies, its all-reduce on the
    communication thread, and the wait for it; reductions run while backward does. Also after a failure."""
    data = synth(train=192, test=20)
    common = ["--width", "32", "--epochs", "1", "--batch", "16", "--trace", "t.json"]
    ddp(data, "out", 2, *common)
    steps = 6
    for rank, name in enumerate(("t.json", "t.rank1.json")):
        spans = spans_of(name)
        assert {e["pid"] for e in spans} == {rank}
        of = {}
        for e in spans:
            assert e["dur"] >= 0 and e["ts"] > 0, e
            of.setdefault(e["name"], []).append(e)
        assert {n: len(of[n]) for n in ("input wait", "forward", "backward", "update", "evaluation")} == {
            "input wait": steps, "forward": steps, "backward": steps, "update": steps, "evaluation": 1}, {n: len(v) for n, v in of.items()}
        assert len(of.get("checkpoint", [])) == (1 if rank == 0 else 0)
        reductions = of["all-reduce"]
        buckets = 1 + max(e["args"]["bucket"] for e in reductions)
        assert buckets >= 2, "the net is too small for this test"
        assert len(reductions) == 1 + (steps - 1) * buckets  # the first step has one bucket
        assert len(of["wait"]) == len(of["copy out"]) == len(reductions)
        assert len(of["copy in"]) == steps * 62
        assert {e["tid"] for e in reductions} == {1} and {e["tid"] for e in of["backward"]} == {0}
        # From the second step on the first bucket leaves before backward has ended.
        early = sum(any(b["ts"] < r["ts"] < b["ts"] + b["dur"] for b in of["backward"])
                    for r in reductions if r["args"]["bucket"] == 0)
        assert early >= steps - 2, (early, steps)
        for w in of["wait"]:  # none waits for less than what the reduction still takes
            r = max((r for r in reductions if r["args"] == w["args"] and r["ts"] <= w["ts"] + w["dur"]), key=lambda e: e["ts"])
            assert r["ts"] + r["dur"] <= w["ts"] + w["dur"] + 1000, (r, w)
    assert not [n for n in os.listdir(work) if n.endswith(".tmp")]
    train("--data_url", data, "--output_dir", "bad", *NET, "--batch", "16", "--epochs", "3", "--lr", "1e6", "--trace", "bad.trace",
          "--backend", "ref", status=1)
    assert any(e["name"] == "forward" for e in spans_of("bad.trace"))
    _, err = train("--data_url", data, "--output_dir", "x", *NET, "--trace", "/nowhere/t.json", status=2)
    assert "--trace: /nowhere/t.json" in err, err
    dp(data, "dp", 2, "--epochs", "1", "--trace", "dp.json")
    assert spans_of("dp.json") and spans_of("dp.rank1.json")


if __name__ == "__main__":
    run_case(globals())
