# SPDX-License-Identifier: Apache-2.0
"""Training speed of our CPU backend beside PyTorch's, taken in turns in one run: prints img/s and the ratio.

    torch_speed.py [--batch 128] [--threads 2] [--rounds 3] [--steps 2] [--bench PATH/bench_backend]
PyTorch runs fp32 in its faster layout (channels last). Exits 77 without PyTorch.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
for name, value in (("batch", 128), ("threads", 2), ("rounds", 3), ("steps", 2), ("resolution", 32)):
    parser.add_argument("--" + name, type=int, default=value)
parser.add_argument("--bench", default=os.path.join(os.environ.get("PS_BUILD", "build/default"), "tests/bench_backend"))
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(args.threads)
try:
    import torch
except ImportError:
    print("SKIP: no PyTorch for this python3")
    sys.exit(77)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parity"))
from sample_model import ResNet18

torch.set_num_threads(args.threads)
torch.manual_seed(1)
net = ResNet18().to(memory_format=torch.channels_last).train()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
x = torch.randn(args.batch, 3, args.resolution, args.resolution).to(memory_format=torch.channels_last)
y = torch.randint(0, 10, (args.batch,))


def torch_step():
    start = time.monotonic()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
    return time.monotonic() - start


def ours():
    out = subprocess.run(
        [args.bench, "--threads", str(args.threads), "--batch", str(args.batch), "--steps", str(args.steps),
         "--resolution", str(args.resolution)], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(out)["img_per_s"]


theirs_all, ours_all = [], []
torch_step()
for _ in range(args.rounds):
    theirs_all.append(args.batch / statistics.median(torch_step() for _ in range(args.steps)))
    ours_all.append(ours())
theirs, mine = statistics.median(theirs_all), statistics.median(ours_all)
print(f"batch {args.batch}, {args.threads} threads, fp32: PyTorch {torch.__version__} {theirs:.1f} img/s "
      f"{[round(v, 1) for v in theirs_all]}, ours {mine:.1f} img/s {[round(v, 1) for v in ours_all]}, "
      f"ratio {mine / theirs:.2f}")
