# SPDX-License-Identifier: Apache-2.0
"""Gradients against PyTorch on the same tensors, by the rules of how close is close:
 - BatchNorm frozen, whole network: every tensor within 1e-5 relative L2;
 - training mode, op by op, with PyTorch's own inputs and cotangents: 1e-5;
 - training mode, whole network: no farther from double precision than twice PyTorch's own spread (NCHW and NHWC).
    parity_gradients.py frozen|full|ops|training
"""
import copy
import sys

from common import (Checks, Driver, backends, flat_buffers, flat_grads, flat_params, off_the_kinks, relative, shake)
import torch
from torch import nn
from sample_model import ResNet18, ResNet34, ResNet50, freeze_bn

checks = Checks()


def batch_of(seed, count, resolution):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 3, resolution, resolution, generator=g),
            torch.randint(0, 10, (count,), generator=g))


def torch_pass(net, x, y, smoothing=0.0):
    net.zero_grad()
    x = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(net(x), y, label_smoothing=smoothing)
    loss.backward()
    return loss.item(), x.grad


def frozen(width, count, resolution, model=ResNet18):
    def make(seed):
        torch.manual_seed(seed)
        return (freeze_bn(shake(model(width).train(), seed)), *batch_of(seed, count, resolution))

    net, x, y, seed = off_the_kinks(make, 5e-6)
    print(f"     width {width}: seed {seed}")
    for smoothing in (0.0, 0.1):
        loss, dx = torch_pass(net, x, y, smoothing)
        for backend, precision in backends():
            if backend == "ref" and width == 64:
                continue  # checked at small width; slow here
            with Driver(backend, precision) as driver:
                read, numbers = driver.run(
                    {"params": flat_params(net), "buffers": flat_buffers(net), "images": x, "labels": y},
                    ["output", "grads", "input_grad", "buffers"], net=f"{model.__name__.lower()}:{width}:10", batch=count,
                    resolution=resolution, mode="frozen", smoothing=smoothing)
            where = f"{model.__name__}, {backend} {precision} width {width}, frozen BN, smoothing {smoothing}"
            worst, name, at = 0, "", 0
            for n, p in net.named_parameters():
                error = relative(read["grads"][at:at + p.numel()], p.grad)
                at += p.numel()
                if error >= worst:
                    worst, name = error, n
            checks.below(worst, 1e-5, f"{where}: worst of {len(list(net.parameters()))} gradients ({name})")
            checks.below(relative(read["input_grad"], dx), 1e-5, f"{where}: gradient of the input")
            checks.below(abs(numbers["loss"] / count - loss) / abs(loss), 1e-5, f"{where}: loss")
            checks.expect(torch.equal(read["buffers"], flat_buffers(net)), f"{where}: statistics stay")


def ops():
    """Every convolution, norm, pooling and dense layer of a training pass, with what PyTorch gave it."""
    torch.manual_seed(8)
    net = shake(ResNet18(16).train(), 9)
    x, y = batch_of(10, 8, 16)
    seen = {}

    def record(module, inputs, output):
        output.retain_grad()
        seen[module] = (inputs[0], output)

    leaves = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d, nn.Linear))]
    hooks = [m.register_forward_hook(record) for m in leaves]
    before = {m: (m.running_mean.clone(), m.running_var.clone()) for m in leaves if isinstance(m, nn.BatchNorm2d)}
    nn.functional.cross_entropy(net(x), y).backward()
    for h in hooks:
        h.remove()
    for backend, precision in backends():
        worst = {}
        with Driver(backend, precision) as driver:
            for m in leaves:
                given, out = seen[m]
                given, cotangent = given.detach(), out.grad.clone()
                kinds = [""]
                if isinstance(m, nn.BatchNorm2d):
                    kinds = ["bn", "bn_relu", "bn_add_relu"]
                elif isinstance(m, nn.Conv2d):
                    kinds = [f"conv:{m.in_channels}:{m.out_channels}:{m.kernel_size[0]}:{m.stride[0]}:{m.padding[0]}"]
                elif isinstance(m, nn.Linear):
                    kinds = [f"dense:{m.in_features}:{m.out_features}"]
                    given = given[:, :, None, None]
                else:
                    kinds = [f"avg_pool:{given.shape[1]}"]
                for kind in kinds:
                    # PyTorch again on this op alone: the same input and cotangent, and fresh statistics.
                    one = copy.deepcopy(m)
                    one.zero_grad()
                    inputs = {}
                    if isinstance(m, nn.BatchNorm2d):
                        one.running_mean.copy_(before[m][0])
                        one.running_var.copy_(before[m][1])
                        inputs["buffers"] = flat_buffers(one)
                        spec = f"{kind}:{m.num_features}"
                    else:
                        spec = kind
                    leaf = given.clone().requires_grad_()
                    value = one(leaf[:, :, 0, 0] if isinstance(m, nn.Linear) else leaf)
                    given_cotangent = cotangent
                    if kind.endswith("relu"):
                        value = value + leaf if kind == "bn_add_relu" else value
                        # Nearer to the kink than float32 rounds, the side is chance: no cotangent there.
                        given_cotangent = cotangent * (value.detach().abs() > 1e-5)
                        value = torch.relu(value)
                    value.backward(given_cotangent)
                    inputs["images"] = given
                    inputs["cotangent"] = given_cotangent
                    outputs = ["output", "input_grad"]
                    if list(one.parameters()):
                        inputs["params"] = flat_params(one)
                        outputs.append("grads")
                    if isinstance(m, nn.BatchNorm2d):
                        outputs.append("buffers")
                    read, _ = driver.run(inputs, outputs, net=spec, batch=given.shape[0], resolution=given.shape[2],
                                         mode="train")
                    pairs = {"output": value, "input_grad": leaf.grad}
                    if "buffers" in outputs:
                        pairs["buffers"] = flat_buffers(one)
                    at = 0
                    for n, p in one.named_parameters():
                        pairs[n] = p.grad
                        read[n] = read["grads"][at:at + p.numel()]
                        at += p.numel()
                    for n, expected in pairs.items():
                        error = relative(read[n], expected)
                        key = (spec.split(":")[0], n)
                        worst[key] = max(worst.get(key, 0), error)
        for (kind, n), error in sorted(worst.items()):
            checks.below(error, 1e-5, f"{backend} {precision}, {kind}, {n}: worst layer")


def training():
    """Distances from double precision, as the root mean square over two nets that keep off the kinks."""
    count, resolution, width, rounds = 6, 16, 16, 2
    seed = 0

    def make(candidate):
        torch.manual_seed(seed + candidate)
        return (shake(ResNet18(width).train(), seed + candidate), *batch_of(seed + candidate, count, resolution))

    sums = {}
    names = ["torch NCHW", "torch NHWC"] + [f"{b} {p}" for b, p in backends()]
    drivers = {f"{b} {p}": Driver(b, p) for b, p in backends()}
    reference = Driver("ref", "fp64")
    spread = 0
    for _ in range(rounds):
        start, x, y, candidate = off_the_kinks(make, 1e-5)
        seed += candidate
        double = copy.deepcopy(start).double()
        torch_pass(double, x.double(), y)
        exact = flat_grads(double)
        inputs = {"params": flat_params(start), "buffers": flat_buffers(start), "images": x, "labels": y}
        words = dict(net=f"resnet18:{width}:10", batch=count, resolution=resolution, mode="train")
        read, _ = reference.run(inputs, ["grads", "buffers"], **words)
        checks.below(relative(read["grads"], exact), 1e-6, f"seed {seed}: our double backend against PyTorch's double")
        checks.below(relative(read["buffers"], flat_buffers(double)), 1e-6, f"seed {seed}: running statistics in double")
        results = {}
        for name in names[:2]:
            net = copy.deepcopy(start)
            images = x
            if name.endswith("NHWC"):
                net, images = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
            torch_pass(net, images, y)
            results[name] = flat_grads(net)
        for name, driver in drivers.items():
            read, _ = driver.run(inputs, ["grads", "buffers", "output"], **words)
            results[name] = read["grads"]
            checks.below(relative(read["buffers"], flat_buffers(double)), 1e-5, f"seed {seed}: {name}: running statistics")
        for name, grads in results.items():
            sums[name] = sums.get(name, 0) + relative(grads, exact) ** 2 / rounds
        spread += relative(results["torch NHWC"], results["torch NCHW"]) ** 2 / rounds
    for d in list(drivers.values()) + [reference]:
        d.__exit__()
    own = max(spread, sums["torch NCHW"], sums["torch NHWC"]) ** 0.5
    print(f"     PyTorch's own spread: {own:.2e}; from double: " +
          ", ".join(f"{n} {sums[n] ** 0.5:.2e}" for n in names))
    for name in names[2:]:
        checks.below(sums[name] ** 0.5, 2 * own, f"{name}: whole network in training mode against double")


part = sys.argv[1]
torch.set_num_threads(2)
if part == "frozen":
    frozen(16, 4, 16)
    frozen(8, 2, 16, ResNet34)
    frozen(8, 2, 16, ResNet50)
elif part == "full":
    frozen(64, 2, 16)
elif part == "ops":
    ops()
elif part == "training":
    training()
checks.done()
