# SPDX-License-Identifier: Apache-2.0
"""Does a training learn the same on four ranks as on one, at the same global batch? Three seeds each on a part of the real
images; prints each run's last accuracy, both means and their difference beside the spread between seeds.

    PS_BIN=build/default/bin CIFAR10_DIR=... /usr/bin/python3 tests/bench/learning.py [--train 10000] [--epochs 8] [--seeds 3]"""
import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

options = argparse.ArgumentParser()
options.add_argument("--train", default="10000")
options.add_argument("--test", default="10000")
options.add_argument("--epochs", default="8")
options.add_argument("--seeds", type=int, default=3)
options.add_argument("--width", default="8")
options = options.parse_args()
if not os.environ.get("CIFAR10_DIR"):
    sys.exit("learning.py: CIFAR10_DIR is not set")
train = pathlib.Path(os.environ.get("PS_BIN", "build/default/bin")) / "paramsync-train"


def accuracy(seed, world):
    """The last one of a training; ranks are replicas of one process, which do what processes do (parallel_test.py dp)."""
    with tempfile.TemporaryDirectory() as out:
        ranks = ["--mode", "dp", "--replicas", str(world)] if world > 1 else []
        done = subprocess.run([str(train), "--data_url", os.environ["CIFAR10_DIR"], "--train_images", options.train, "--test_images",
                               options.test, "--width", options.width, "--resolution", "16", "--recipe", "fast", "--precision",
                               "fp32", "--epochs", options.epochs, "--lr", "0.05", "--batch", "128", "--seed", str(seed),
                               "--eval_every", options.epochs, "--enable_gpu", "false", "--output_dir", out, *ranks],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(re.findall(r"accuracy: ([\d.]+)", done.stdout)[-1])


found = {1: [], 4: []}
for seed in range(1, options.seeds + 1):
    for world in found:
        found[world].append(accuracy(seed, world))
    print(f"seed {seed}: {found[1][-1]:.4f} on one rank, {found[4][-1]:.4f} on four", flush=True)
one, four = statistics.mean(found[1]), statistics.mean(found[4])
spread = statistics.stdev(found[1]) if options.seeds > 1 else float("nan")
print(f"means {one:.4f} and {four:.4f}: difference {100 * (four - one):+.2f} %, ratio {four / one:.4f}; spread of one rank's seeds "
      f"{100 * spread:.2f} %; on CIFAR-10, JPEG re-encoded where the images are those")
