# SPDX-License-Identifier: Apache-2.0
"""Training speed of our CPU backend, PyTorch's and that of oneDNN's convolutions alone, taken in turns in one run.

    torch_speed.py [--batch 128] [--threads 2] [--rounds 5] [--steps 2] [--resolution 32] [--bench FOLDER]
--bench: where bench_backend and bench_conv lie.
PyTorch runs fp32 in its faster layout (channels last). Exits 77 without PyTorch.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
for name, value in (("batch", 128), ("threads", 2), ("rounds", 5), ("steps", 2), ("resolution", 32)):
    parser.add_argument("--" + name, type=int, default=value)
parser.add_argument("--bench", default=os.path.join(os.environ.get("PS_BUILD", "build/default"), "tests"))
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


def program(name):
    out = subprocess.run(
        [os.path.join(args.bench, name), "--threads", str(args.threads), "--batch", str(args.batch), "--steps",
         str(args.steps), "--resolution", str(args.resolution)], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(out)


def torch_round():
    return args.batch / statistics.median(torch_step() for _ in range(args.steps))


speeds = {"PyTorch": [], "ours": [], "convolutions": []}
torch_step()
for _ in range(args.rounds):
    speeds["PyTorch"].append(torch_round())
    mine = program("bench_backend")
    memory = mine["peak_mib"]
    speeds["ours"].append(mine["img_per_s"])
    speeds["convolutions"].append(program("bench_conv")["img_per_s"])
middle = {name: statistics.median(values) for name, values in speeds.items()}
torch_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"ResNet-18, batch {args.batch}, {args.resolution} pixels, {args.threads} threads, fp32, "
      f"{args.rounds} rounds, PyTorch {torch.__version__}")
for name, values in speeds.items():
    print(f"  {name:14} {middle[name]:7.1f} img/s  {[round(v, 1) for v in values]}")
print(f"  ours / PyTorch            {middle['ours'] / middle['PyTorch']:.2f}")
print(f"  ours / convolutions       {middle['ours'] / middle['convolutions']:.2f}")
print(f"  PyTorch / convolutions    {middle['PyTorch'] / middle['convolutions']:.2f}")
print(f"  peak memory: ours {memory:.0f} MiB, PyTorch {torch_memory:.0f} MiB, ratio {memory / torch_memory:.2f}")
