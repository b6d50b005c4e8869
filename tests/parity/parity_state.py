# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and order of the state are PyTorch's, and the initial values are bit for bit those of PyTorch's default
initialisation with the same seed."""
from common import Checks, Driver, flat_params
import torch
from sample_model import ResNet18, ResNet34, ResNet50

checks = Checks()
with Driver("ref") as driver:
    for model, width, classes in ((ResNet18, 64, 10), (ResNet18, 16, 7), (ResNet34, 8, 10), (ResNet50, 8, 7)):
        name_of_net = model.__name__.lower()
        net = model(width, classes)
        params = dict(net.named_parameters())
        expected = []
        for name, tensor in net.state_dict().items():
            kind = "counter" if tensor.dtype == torch.int64 else "param" if name in params else "buffer"
            expected.append(f"{kind} {name} {'x'.join(str(d) for d in tensor.shape)}")
        got = driver.line({"net": f"{name_of_net}:{width}:{classes}", "list": 1}).split(",")
        got = [g if g.split()[0] != "counter" else g.rstrip() + " " for g in got]
        checks.expect(got == expected, f"{name_of_net}, width {width}: {len(got)} entries in PyTorch's order")
    for seed in (0, 1, 20261201):
        torch.manual_seed(seed)
        net = ResNet18(16, 10)
        read, _ = driver.run({}, ["params"], net="resnet18:16:10", seed=seed)
        checks.expect(torch.equal(read["params"], flat_params(net)), f"seed {seed}: initial values bit for bit")
total = sum(p.numel() for p in ResNet18().parameters())
checks.expect(total == 11173962 and len(ResNet18().state_dict()) == 122, f"{total} parameters at width 64")
checks.done()
