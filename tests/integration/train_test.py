# SPDX-License-Identifier: Apache-2.0
"""paramsync-train from outside, one case per call: train_test.py CASE. Small nets on the generated set, with the
reference backend where nothing else is asked for: its results do not depend on how busy the machine is."""
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

from train_common import *


def case_learns():
    """Loss falls and accuracy is far above chance, on images that were not trained on."""
    data = synth(train=1200, test=200)
    out, err = train("--data_url", data, "--width", "4", "--resolution", "16", "--batch", "32", "--epochs", "4",
                     "--lr", "0.01", "--schedule", "onecycle", "--enable_gpu", "false", "--backend", "ref")
    found = results(out)
    assert [r[0] for r in found] == [1, 2, 3, 4]
    assert found[3][1] < 0.5 * found[0][1], found
    assert found[3][3] > 0.6, found
    assert "generated patterns, CIFAR-10 format" in err and "learning rate 0.01" in err and "global batch 32" in err, err


def case_resume():
    """4 epochs == 2 epochs, SIGKILL in the third, 2 more: bit for bit; also from a moved folder and by path."""
    data = synth()
    args = ["--data_url", data, *TINY, "--epochs", "4", "--schedule", "onecycle", "--augment", "standard",
            "--drop_last", "false"]
    for optimizer in ("adam", "sgd"):
        more = [*args, "--optimizer", optimizer]
        whole, _ = train(*more, "--output_dir", "whole")
        broken = start(*more, "--output_dir", "broken")
        seen = b""
        while b"val | epoch: 2" not in seen:
            line = broken.stdout.readline()
            assert line, broken.stderr.read()
            seen += line
        deadline = time.monotonic() + LIMIT
        while not os.path.exists(path("broken", "epoch_2.safetensors")):
            assert time.monotonic() < deadline
            os.sched_yield()
        broken.kill()
        rest, err = broken.communicate()
        assert broken.returncode == -signal.SIGKILL
        # What a writer leaves that dies between its two files, and in one of them.
        for name in os.listdir(path("broken")):
            if re.match(r"epoch_[34]", name):
                os.unlink(path("broken", name))
        shutil.copy(path("broken", "epoch_2.state"), path("broken", "epoch_3.state"))
        with open(path("broken", "epoch_3.safetensors.Ab12cD.tmp"), "wb") as f:
            f.write(b"half")
        out, err = train(*more, "--output_dir", "broken", "--resume", "auto")
        assert "epoch_3" in err and "resuming from broken/epoch_2.state" in err and "removed 1 half-written" in err, err
        assert "will not be the same" not in err, err
        same_training("whole", "broken", 4)
        assert whole.endswith(out) and len(results(out)) == 2, (whole, out)
        # A second time there is nothing left to do; and by path, into another folder.
        out, err = train(*more, "--output_dir", "broken", "--resume", "auto")
        assert out == b"" and "nothing left to train" in err, (out, err)
        train(*more, "--output_dir", "elsewhere", "--resume", path("whole", "epoch_3.safetensors"))
        same_training("whole", "elsewhere", 4)
        for name in ("whole", "broken", "elsewhere"):
            shutil.rmtree(path(name))
    # Another batch is said, in one line.
    train("--data_url", data, *TINY, "--epochs", "1", "--output_dir", "x")
    _, err = train("--data_url", data, *TINY, "--epochs", "2", "--output_dir", "x", "--resume", "auto", "--batch", "8")
    assert re.search(r"resumed with .*batch 8 instead of 16.*will not be the same bits", err), err


def case_deterministic():
    """Twice the same, on each backend that is there; another seed is another training."""
    data = synth()
    backends = ["ref"]
    if os.path.exists(os.path.join(BUILD, "lib", "paramsync", "libparamsync-cpu.so")):
        backends.append("cpu")
    for backend in backends:
        args = ["--data_url", data, *TINY, "--epochs", "2", "--backend", backend, "--threads", "1", "--deterministic"]
        outs = [train(*args, "--output_dir", name)[0] for name in ("a", "b")]
        assert outs[0] == outs[1], outs
        same_training("a", "b", 2)
        train(*args, "--output_dir", "c", "--seed", "2")
        assert read("a", "epoch_2.safetensors") != read("c", "epoch_2.safetensors")


def case_output():
    """Bytes of standard output, eval_every, drop_last, accumulation, an output folder that is made."""
    data = synth(train=75, test=33)
    out, err = train("--data_url", data, *TINY, "--epochs", "3", "--eval_every", "2", "--drop_last", "false",
                     "--accumulate", "2", "--output_dir", "a/b/c")
    assert re.fullmatch(rb"train \| epoch: 1 \| loss: \d\.\d{4}\n"
                        rb"train \| epoch: 2 \| loss: \d\.\d{4}\nval \| epoch: 2 \| loss: \d+\.\d{4} \| accuracy: 0\.\d{4} \n\n"
                        rb"train \| epoch: 3 \| loss: \d\.\d{4}\nval \| epoch: 3 \| loss: \d+\.\d{4} \| accuracy: 0\.\d{4} \n\n",
                        out), out
    assert b"\r" not in out and "\r" not in err and "\033" not in err  # no progress bar where there is no terminal
    assert sorted(os.listdir(path("a", "b", "c"))) == sorted(
        [f"epoch_{e}.{kind}" for e in (1, 2, 3) for kind in ("state", "safetensors")] + ["run.jsonl"])
    _, about = tensors(read("a", "b", "c", "epoch_3.state"))
    assert about["step"] == "9" and about["batches"] == "15" and about["optimizer"] == "adam", about
    weights, _ = tensors(read("a", "b", "c", "epoch_3.safetensors"))
    assert len(weights) == 122 and weights["conv1.1.num_batches_tracked"] == ("I64", [], struct.pack("<q", 15))
    # A reader of standard output that goes away does not end the training.
    process = start("--data_url", data, *TINY, "--epochs", "2", "--output_dir", "p")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(LIMIT) == 0, err
    assert os.path.exists(path("p", "epoch_2.safetensors"))


def case_no_room():
    """Standard output that takes nothing is told of once; a checkpoint that finds no room ends the training, whole."""
    data = synth()
    with open("/dev/full", "w") as full:
        process = subprocess.run([TRAIN, "--data_url", data, *TINY, "--epochs", "2"], stdout=full, stderr=subprocess.PIPE,
                                 text=True, cwd=work, env=environment, timeout=LIMIT)
    assert process.returncode == 0 and process.stderr.count("cannot be written to standard output") == 1, process.stderr
    import resource
    process = subprocess.run([TRAIN, "--data_url", data, *TINY, "--epochs", "2", "--output_dir", "small"],
                             capture_output=True, text=True, cwd=work, env=environment, timeout=LIMIT,
                             preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)))
    assert process.returncode == 1, process.stderr
    one_line(process.stderr.splitlines()[-1] + "\n", "cannot write", "epoch_1.state", "too large")
    assert os.listdir(path("small")) == ["run.jsonl"], os.listdir(path("small"))
    assert json.loads(read("small", "run.jsonl").splitlines()[-1])["state"] == "failed"


def case_terminal():
    """On a terminal there is a progress bar, of at most 80 columns, and it is gone when the training is over."""
    import pty
    data = synth()
    main, terminal = pty.openpty()
    process = subprocess.Popen([TRAIN, "--data_url", data, *TINY, "--epochs", "2"], stdout=subprocess.PIPE,
                               stderr=terminal, cwd=work, env=environment)
    started.append(process)
    os.close(terminal)
    text = b""
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        text += piece
    out = process.stdout.read()
    assert process.wait(LIMIT) == 0
    assert results(out)
    bars = re.findall(rb"\r(epoch [^\r\n\x1b]*)\x1b\[K", text)
    assert bars and all(len(b) < 80 for b in bars), text
    assert re.search(rb"epoch 1/2 \[[#.]{20}\] step \d+/10 \d+ img/s ETA ", bars[0]), bars
    assert text.rstrip().splitlines()[-1].count(b"finished in"), text[-300:]


def one_line(err, *words):
    lines = err.splitlines()
    assert len(lines) == 1, err
    for word in words:
        assert word in lines[0], (word, lines[0])


def case_bad_input():
    """Exit status 2 and one line on standard error that names what is wrong; nothing on standard output."""
    data = synth()
    def bad(words, *args, env=None):
        out, err = train(*args, status=2, env=env)
        assert out == b""
        one_line(err, *words)

    quiet = ["--enable_gpu", "false", "--backend", "ref"]
    bad(["--epocs", "--epochs"], "--epocs", "3")
    bad(["--epochs", "0"], "--epochs", "0")
    bad(["--lr"], "--lr", "fast")
    bad(["--recipe"], "--recipe", "slow")
    bad(["--sync_norm"], "--sync_norm")
    bad(["--on-nan"], "--on_nan", "ignore")
    bad(["here"], "here")
    bad(["--enable_gpu true"], "--data_url", data, "--enable_gpu", "true")
    bad(["rank"], "--rank", "2", "--world_size", "2", "--init_method", "tcp://127.0.0.1:1")
    bad(["WORLD_SIZE"], "--data_url", data, env={"RANK": "0"})
    bad(["obs://", "download"], "--data_url", "obs://bucket/x")
    bad([path("nothing")], "--data_url", path("nothing"))
    bad(["input_dir"], *quiet)
    bad(["--batch"], "--data_url", data, "--batch", "1000", *quiet)
    bad(["--resume", "none.state"], "--data_url", data, *quiet, "--width", "2", "--resume", "none.state")

    batch = path("data", "cifar-10-batches-bin", "data_batch_2.bin")
    good = open(batch, "rb").read()
    for words, broken in ((["empty"], b""), (["record 1"], good[:5000]),
                          (["record 3", "label 10"], good[:3 * 3073] + b"\n" + good[3 * 3073 + 1:])):
        with open(batch, "wb") as f:
            f.write(broken)
        bad(["data_batch_2.bin", *words], "--data_url", data)
    with open(batch, "wb") as f:
        f.write(good)
    os.makedirs(path("evil", "cifar-10-batches-py"))
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        with open(path("evil", "cifar-10-batches-py", name), "wb") as f:
            f.write(b"cos\nsystem\n(S'touch %s'\ntR." % path("owned").encode())
    bad(["os.system", "data_batch_1"], "--data_url", path("evil"))
    assert not os.path.exists(path("owned"))

    if os.geteuid() != 0:
        os.makedirs(path("locked"), 0o500)
        bad(["locked"], "--data_url", data, *quiet, "--width", "2", "--output_dir", path("locked"))
    with open(path("file"), "w"):
        pass
    bad(["file"], "--data_url", data, *quiet, "--width", "2", "--output_dir", path("file"))

    train("--data_url", data, *TINY, "--epochs", "1", "--output_dir", "narrow")
    _, err = train("--data_url", data, *TINY, "--epochs", "2", "--output_dir", "narrow", "--optimizer", "sgd",
                   "--resume", "auto", status=2)
    one_line(err, "--optimizer adam")
    _, err = train("--data_url", data, *TINY, "--epochs", "2", "--output_dir", "wide", "--width", "4",
                   "--resume", path("narrow", "epoch_1.state"), status=2)
    one_line(err, "conv1.0.weight", "[2, 3, 3, 3]", "[4, 3, 3, 3]")
    with open(path("narrow", "epoch_1.safetensors"), "r+b") as f:
        f.truncate(3000)
    _, err = train("--data_url", data, *TINY, "--resume", path("narrow", "epoch_1.state"), status=2)
    one_line(err, "epoch_1.safetensors", "SHA-256")

    _, err = train("--data_url", data, *TINY, "--epochs", "1", "--ignore-unknown", "--train_url", "obs://x/y")
    assert "--train_url is ignored" in err, err


def case_signal():
    """SIGTERM ends the training cleanly, with the status of a signal; what is saved stays."""
    data = synth()
    process = start("--data_url", data, *TINY, "--epochs", "1000", "--output_dir", "o")
    while not process.stdout.readline().startswith(b"val | epoch: 2"):
        pass
    begin = time.monotonic()
    process.terminate()
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert b"stopped by signal 15" in err and b"epoch_" in err, err
    assert time.monotonic() - begin < 20
    assert not [n for n in os.listdir(path("o")) if n.endswith(".tmp")]
    _, err = train("--data_url", data, *TINY, "--epochs", "2", "--output_dir", "o", "--resume", "auto")
    assert "nothing left to train" in err, err
    # A rank that waits for the others ends at once.
    port = free_port()
    waiting = start("--data_url", data, *TINY, "--output_dir", "w", "--init_method", f"tcp://127.0.0.1:{port}",
                    "--world_size", "2", "--rank", "0")
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert waiting.poll() is None
            time.sleep(0.05)
    begin = time.monotonic()
    waiting.terminate()
    waiting.communicate(timeout=LIMIT)
    assert waiting.returncode != 0 and time.monotonic() - begin < 10, waiting.returncode


def case_processes():
    """Two ranks: only rank 0 prints and saves; the same bits twice and after a break; lines of both ranks' means."""
    data = synth(train=161, test=51)
    outs = []
    for name in ("a", "b"):
        ranks = pair(data, name, "--epochs", "2", "--drop_last", "false")
        out, err = ranks[0].communicate(timeout=LIMIT)
        other, other_err = ranks[1].communicate(timeout=LIMIT)
        assert [r.returncode for r in ranks] == [0, 0], (err, other_err)
        assert other == b"" and other_err == b"", (other, other_err)
        assert results(out)
        assert b"global batch 32" in err, err
        outs.append(out)
    assert outs[0] == outs[1]
    same_training("a", "b", 2)
    accuracy = results(outs[0])[1][3]
    assert abs(accuracy * 51 - round(accuracy * 51)) < 0.01, accuracy  # each of 51 images once, over two ranks
    # 1 + 1 epochs, with the environment that torchrun gives
    for epochs in ("1", "2"):
        port = free_port()
        ranks = [start("--data_url", data, *TINY, "--drop_last", "false", "--epochs", epochs, "--output_dir", "c",
                       "--resume", "auto", env={"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                                "MASTER_PORT": str(port), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"})
                 for r in range(2)]
        errors = [r.communicate(timeout=LIMIT)[1] for r in ranks]
        assert [r.returncode for r in ranks] == [0, 0], errors
    assert read("a", "epoch_2.safetensors") == read("c", "epoch_2.safetensors")
    # A checkpoint of two ranks goes on with one.
    _, err = train("--data_url", data, *TINY, "--epochs", "3", "--output_dir", "c", "--resume", "auto")
    assert "world_size 1 instead of 2" in err, err


def case_failures():
    """Ranks that do not fit together, a rank that dies: all end, each with the reason, and no file is half there."""
    data = synth()
    port = free_port()
    ranks = [start("--data_url", data, *TINY, "--output_dir", "o", "--init_method", f"tcp://127.0.0.1:{port}",
                   "--world_size", "2", "--rank", str(r), "--width", str(2 + 2 * r)) for r in range(2)]
    for r in ranks:
        _, err = r.communicate(timeout=LIMIT)
        assert r.returncode == 1 and b"different models" in err and b"conv1.0.weight" in err, err
    other = synth("other", train=170)
    ranks = [start("--data_url", d, *TINY, "--output_dir", "o", "--init_method", f"tcp://127.0.0.1:{port}",
                   "--world_size", "2", "--rank", str(r)) for r, d in enumerate((data, other))]
    for r in ranks:
        _, err = r.communicate(timeout=LIMIT)
        assert r.returncode == 1 and b"data hash" in err, err
    # One has no data: it says so with status 2, the other one hears of it.
    ranks = [start("--data_url", d, *TINY, "--output_dir", "o", "--init_method", f"tcp://127.0.0.1:{port}",
                   "--world_size", "2", "--rank", str(r)) for r, d in enumerate((data, path("nothing")))]
    errors = [r.communicate(timeout=LIMIT)[1] for r in ranks]
    assert [r.returncode for r in ranks] == [1, 2], errors
    assert b"nothing" in errors[0] and b"rank 1" in errors[0] and b"nothing" in errors[1], errors
    for victim in (1, 0):
        ranks = pair(data, "k", "--epochs", "1000", port=port)
        while not ranks[0].stdout.readline().startswith(b"val | epoch: 1 "):
            pass
        ranks[victim].kill()
        begin = time.monotonic()
        survivor = ranks[1 - victim]
        _, err = survivor.communicate(timeout=LIMIT)
        took = time.monotonic() - begin
        assert survivor.returncode == 1 and b"rank %d" % victim in err, err
        assert took < (2 if not os.environ.get("PS_SANITIZER") else 10), took
        ranks[victim].communicate()
        if victim == 0:  # it may have been writing; the next start removes what is left of that
            train("--data_url", data, *TINY, "--epochs", "1", "--output_dir", "k", "--resume", "auto")
        assert not [n for n in os.listdir(path("k")) if n.endswith(".tmp")], os.listdir(path("k"))


def case_killed_saves():
    """SIGKILL at 100 random instants of a training that does little but save: the next start always finds a whole
    checkpoint, at most the one that was being written is lost, and no half-written file stays."""
    import random
    data = synth(train=32, test=4)
    rng = random.Random(1)
    common = ["--data_url", data, *TINY, "--epochs", "1000000", "--output_dir", "out", "--resume", "auto"]
    done = 0  # the last epoch whose results were printed: its predecessor was saved before
    resumed = torn = 0
    for kill in range(100):
        process = start(*common)
        line = b""
        while not line.startswith(b"val"):  # at least one epoch
            line = process.stdout.readline()
            assert line, process.stderr.read().decode()
        time.sleep(rng.random() * 0.03)
        process.kill()
        out, err = process.communicate()
        found = re.search(r"resuming from \S+epoch_(\d+)\.state", err.decode())
        at = int(found[1]) if found else 0
        assert at >= done - 1, (kill, done, err.decode())
        resumed += at > 0
        first = int(re.search(rb"epoch: (\d+)", line)[1])
        assert first == at + 1, (line, err)
        done = max([first] + [int(e) for e in re.findall(rb"val \| epoch: (\d+)", out)])
        names = os.listdir(path("out"))
        torn += any(n.endswith(".tmp") for n in names) or \
            {n[:-6] for n in names if n.endswith(".state")} != {n[:-12] for n in names if n.endswith(".safetensors")}
        for name in names:  # or the folder would grow to thousands
            epoch = re.match(r"epoch_(\d+)\.", name)
            if epoch and int(epoch[1]) < done - 3:
                os.unlink(path("out", name))
    assert resumed >= 95, resumed
    print(f"{torn} of 100 kills fell into a save, {done} epochs")
    assert torn > 0, "no kill fell into a save: this test shows nothing"
    process = start(*common)
    process.stdout.readline()
    process.kill()
    process.communicate()


def case_used_folder():
    """A new training in a used folder: what is gone on from later is the new one, though the old got further."""
    data = synth()
    common = ["--data_url", data, *TINY, "--output_dir", "out"]
    train(*common, "--epochs", "3")
    _, err = train(*common, "--epochs", "1", "--seed", "2")
    assert "earlier training, up to epoch_3" in err, err
    _, err = train(*common, "--epochs", "2", "--seed", "2", "--resume", "auto")
    assert "epoch_3.state is of an earlier training" in err and "epoch_2.state is of an earlier" in err, err
    assert "resumed after epoch 1" in err, err
    train("--data_url", data, *TINY, "--output_dir", "straight", "--epochs", "2", "--seed", "2")
    same_training("out", "straight", 2)
    # Killed before its first checkpoint: nothing is there to go on from, and the old one is not taken for it.
    assert not os.path.exists(path("straight", "training.id"))  # a folder of one training needs none
    mark = read("out", "training.id")
    process = start(*common, "--epochs", "1", "--seed", "3", "--width", "16", "--resolution", "32", "--batch", "8")
    while read("out", "training.id") == mark and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    _, err = train(*common, "--epochs", "1", "--seed", "3", "--resume", "auto")
    assert "training begins anew" in err, err


def case_custom_data():
    """The sample's random set: its warning on standard error, accuracy about one half."""
    out, err = train("--custom_data", "true", "--width", "1", "--epochs", "1", "--enable_gpu", "false", "--backend", "ref",
                     "--output_dir", "o")
    assert "warning: you are training on custom random dataset, validation accuracy may range from 0.4 to 0.6.\n" in err
    assert 0.3 < results(out)[0][3] < 0.7, out


def case_checkpoint():
    """PyTorch loads both formats, strict, and finds the accuracy that was printed."""
    try:
        import numpy
        import torch
    except ImportError:
        print("SKIP: no PyTorch for this python3")
        return 77
    sys.path.insert(0, os.path.join(os.environ["PS_SOURCE"], "tests", "parity"))
    from sample_model import ResNet18
    torch.set_num_threads(1)
    data = synth(train=400, test=200)
    out, _ = train("--data_url", data, "--width", "4", "--resolution", "32", "--batch", "16", "--epochs", "1", "--lr",
                   "0.01", "--enable_gpu", "false", "--backend", "ref", "--ckpt_format", "both", "--output_dir", "o")
    _, _, val_loss, accuracy = results(out)[0]
    rows = numpy.fromfile(path("data", "cifar-10-batches-bin", "test_batch.bin"), numpy.uint8).reshape(-1, 3073)
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()).float() / 255
    labels = torch.from_numpy(rows[:, 0].copy()).long()
    types = {"F32": torch.float32, "I64": torch.int64}
    weights, _ = tensors(read("o", "epoch_1.safetensors"))
    from_safetensors = {name: torch.frombuffer(bytearray(body), dtype=types[dtype]).reshape(shape)
                        for name, (dtype, shape, body) in weights.items()}
    from_pth = torch.load(path("o", "epoch_1.pth"), weights_only=True)
    assert list(from_pth) == list(ResNet18(4).state_dict())
    for state in (from_safetensors, from_pth):
        net = ResNet18(4)
        net.load_state_dict(state, strict=True)
        net.eval()
        with torch.no_grad():
            logits = net(images)
        # one image of 200 may lie so close to the border that rounding decides
        assert abs((logits.argmax(1) == labels).double().mean().item() - accuracy) <= 0.0051, accuracy
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        assert abs(loss - val_loss) <= 2e-3 * max(1, val_loss), (loss, val_loss)
    for name, tensor in from_pth.items():
        assert torch.equal(tensor, from_safetensors[name]), name
    # and with pth alone the training goes on from the state file
    args = ["--data_url", data, *TINY, "--ckpt_format", "pth"]
    train(*args, "--epochs", "2", "--output_dir", "w")
    train(*args, "--epochs", "1", "--output_dir", "p")
    train(*args, "--epochs", "2", "--output_dir", "p", "--resume", "auto")
    assert read("w", "epoch_2.pth") == read("p", "epoch_2.pth")
    assert not os.path.exists(path("p", "epoch_2.safetensors"))


def case_real():
    """Some of the real images, where they are: accuracy well above chance, and labelled as what they are."""
    source = os.environ.get("CIFAR10_DIR")
    folder = os.path.join(source or "", "cifar-10-batches-bin")
    if not source or not os.path.isdir(folder):
        print("SKIP: CIFAR10_DIR is not set to a folder with cifar-10-batches-bin")
        return 77
    os.makedirs(path("real", "cifar-10-batches-bin"))
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        with open(os.path.join(folder, name), "rb") as f, open(path("real", "cifar-10-batches-bin", name), "wb") as g:
            g.write(f.read(500 * 3073))
    out, err = train("--data_url", path("real"), "--width", "4", "--resolution", "16", "--batch", "50", "--epochs", "3",
                     "--lr", "0.02", "--schedule", "onecycle", "--enable_gpu", "false", "--backend", "ref")
    found = results(out)
    assert found[2][1] < found[0][1] and found[2][3] > 0.2, found
    assert err.count("CIFAR-10, JPEG re-encoded") == 2, err  # with the data, and with the accuracy
    assert re.search(r"accuracy 0\.\d+, best 0\.\d+ after epoch \d, on CIFAR-10, JPEG re-encoded", err), err


if __name__ == "__main__":
    run_case(globals())
