# SPDX-License-Identifier: Apache-2.0
"""--resume auto on a machine whose folder is empty: the training goes on from what the sidecar has, to the bit."""
import shutil

import train_common as tc
from sidecar_common import *

data = tc.synth(train=200, test=40)
common = ["--data_url", data, *tc.TINY, "--epochs", "6", "--recipe", "fast", "--batch", "20", "--resolution", "8", "--resume", "auto"]
d = Daemon("store").connect()


def stored(form):
    found = d.checkpoints.ListCheckpoints(checkpoints.ListCheckpointsRequest(run="far")).checkpoints
    return [(c.epoch, c.sha256) for c in found if c.format == form]


def known():
    try:
        return len(stored("state")) > 0 and stored("state")[-1][0] >= 3
    except grpc.RpcError:
        return False


try:
    tc.train(*common, "--output_dir", "straight")
    first = tc.start(*common, "--output_dir", "here", "--sidecar", d.address, "--run", "far")
    wait_for("three epochs at the sidecar", lambda: known() or first.poll() is not None, 120)
    first.kill()
    first.communicate()
    # The machine is lost. What had reached the sidecar is fetched; the rest is trained again.
    kept = stored("state")
    check(f"the newest two states stay: {kept}", 1 <= len(kept) <= 2)
    _, err = tc.train(*common, "--output_dir", "there", "--sidecar", d.address, "--run", "far")
    check(f"says what it does: {err}", "fetched epoch" in err and "from the sidecar" in err and "resuming from" in err)
    tc.same_training("straight", "there", 6)
    run = d.runs.GetRun(runs.GetRunRequest(run="far"))
    same("the same run", (run.name, run.attempt), ("far", 2))
    wait_for("the last epoch", lambda: stored("safetensors")[-1][0] == 6)

    # Weights alone are not a training to go on with.
    for _, sha256 in stored("state"):
        d.checkpoints.DeleteCheckpoint(checkpoints.DeleteCheckpointRequest(run="far", sha256=sha256))
    _, err = tc.train(*common, "--output_dir", "new", "--sidecar", d.address, "--run", "far", "--epochs", "1")
    check(f"weights alone: {err}", "weights but no .state" in err and "begins anew" in err)
    _, err = tc.train(*common, "--output_dir", "other", "--sidecar", d.address, "--run", "unknown", "--epochs", "1")
    check(f"no such run: {err}", "nothing was fetched" in err and "begins anew" in err)

    # With --ckpt_format pth the state holds the weights itself.
    torch = [*common, "--ckpt_format", "pth", "--sidecar", d.address, "--run", "torch"]
    tc.train(*torch, "--epochs", "2", "--schedule", "constant", "--output_dir", "p")
    _, err = tc.train(*torch, "--epochs", "3", "--schedule", "constant", "--output_dir", "q")
    check(f"pth: {err}", "fetched epoch 2" in err and "resuming from" in err)
finally:
    shutil.rmtree(tc.work, ignore_errors=True)
d.stop()
finish()
