# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend against PyTorch on the same tensors. On the stand-ins of tests/fakegpu, which compute on the
host, or with PS_REAL_GPU=1 on the GPU: its sums are then taken in another order, and with TF32 off the same bounds
hold.
 - fp32, BatchNorm frozen: every gradient within 1e-5;
 - bf16, whole network: the cosine with double precision is no lower than PyTorch's own under bf16 autocast on the CPU,
   less 0.02.
"""
import copy
import os
import sys

if not os.environ.get("PS_REAL_GPU"):
    os.environ["PARAMSYNC_MODULE_DIR"] = os.path.join(os.environ["PS_BUILD"], "tests/fakegpu/modules")
    print("     figures of the GPU path are from stand-ins that compute on the host")

from common import Checks, Driver, flat_buffers, flat_grads, flat_params, off_the_kinks, relative, shake
import torch
from torch import nn
from sample_model import ResNet18, freeze_bn

checks = Checks()
WIDTH, COUNT, RESOLUTION = 16, 8, 16


def batch_of(seed):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(COUNT, 3, RESOLUTION, RESOLUTION, generator=g), torch.randint(0, 10, (COUNT,), generator=g))


def cosine(a, b):
    return nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def inputs_of(net, x, y):
    return {"params": flat_params(net), "buffers": flat_buffers(net), "images": x, "labels": y}


words = dict(net=f"resnet18:{WIDTH}:10", batch=COUNT, resolution=RESOLUTION)


def frozen():
    def make(seed):
        torch.manual_seed(seed)
        return (freeze_bn(shake(ResNet18(WIDTH).train(), seed)), *batch_of(seed))

    net, x, y, _ = off_the_kinks(make, 5e-6)
    nn.functional.cross_entropy(net(x), y).backward()
    with Driver("cuda", "fp32") as driver:
        read, _ = driver.run(inputs_of(net, x, y), ["grads"], mode="frozen", **words)
    at = 0
    for name, p in net.named_parameters():
        checks.below(relative(read["grads"][at:at + p.numel()], p.grad), 1e-5, f"fp32, frozen BN, gradient of {name}")
        at += p.numel()


def bf16():
    worst = 1
    for seed in range(2):
        torch.manual_seed(seed)
        start = shake(ResNet18(WIDTH).train(), seed)
        x, y = batch_of(seed + 20)
        double = copy.deepcopy(start).double()
        nn.functional.cross_entropy(double(x.double()), y).backward()
        exact = flat_grads(double)
        theirs = copy.deepcopy(start).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = theirs(x.to(memory_format=torch.channels_last))
        nn.functional.cross_entropy(out.float(), y).backward()
        with Driver("cuda", "bf16") as driver:
            read, _ = driver.run(inputs_of(start, x, y), ["grads", "output"], mode="train", **words)
        own, other = cosine(read["grads"], exact), cosine(flat_grads(theirs), exact)
        print(f"     seed {seed}: cosine with double precision {own:.4f}, PyTorch's {other:.4f}")
        checks.below(other - own, 0.02, f"seed {seed}: bf16, whole network in training mode: behind PyTorch's cosine")
        checks.below(0.9, cosine(read["output"], double(x.double()).detach()), f"seed {seed}: bf16, logits")


torch.set_num_threads(2)
frozen()
bf16()
checks.done()
