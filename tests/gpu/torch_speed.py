# SPDX-License-Identifier: Apache-2.0
"""PyTorch's training speed of the sample's ResNet-18 on this GPU, images already there: channels-last, fp32, TF32 and
bf16 autocast; eager, torch.compile and CUDA graphs. torch_speed.py OUTPUT: one row for each batch size, its best."""
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parity"))
import torch
from torch import nn
from sample_model import ResNet18


def speed(batch, precision, way, seconds=2.0):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    net = ResNet18(64).cuda().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    run = step
    if way == "compile":
        run = torch.compile(step)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            run()
    torch.cuda.synchronize()
    if way == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    done, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        done += 10
    return done * batch / (time.monotonic() - start)


with open(sys.argv[1], "w") as out:
    for precision in ("fp32", "tf32", "bf16"):
        for batch in (128, 512, 1024):
            found = {}
            for way in ("eager", "graph") + (("compile",) if precision == "bf16" else ()):
                try:
                    found[way] = speed(batch, precision, way)
                except Exception as e:  # one way that fails leaves the others
                    print(precision, batch, way, e)
            best = max(found, key=found.get)
            text = ", ".join(f"{w} {v:.0f}" for w, v in found.items())
            print(f"{f'PyTorch, {precision}, batch {batch}':58} {found[best]:.0f} img/s (best: {best}; {text})", file=out, flush=True)
