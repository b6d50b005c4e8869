# SPDX-License-Identifier: Apache-2.0
"""Five steps with the same gradients end where torch.optim ends: 1e-6 relative, in every backend."""
from common import Checks, Driver, backends, flat_params, relative
import torch
from sample_model import ResNet18

checks = Checks()
STEPS = 5
cases = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), dict(optimizer="sgd", lr=0.1)),
    "sgd momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), dict(optimizer="sgd", lr=0.1, momentum=0.9)),
    "sgd nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
                     dict(optimizer="sgd", lr=0.1, momentum=0.9, nesterov=1)),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), dict(optimizer="adam", lr=0.01)),
    "adam betas": (lambda p: torch.optim.Adam(p, lr=0.08, betas=(0.8, 0.99), eps=1e-6),
                   dict(optimizer="adam", lr=0.08, beta1=0.8, beta2=0.99, eps=1e-6)),
}
for decay in (0, 5e-4):
    for name, (make, words) in cases.items():
        torch.manual_seed(11)
        net = ResNet18(8)
        start = flat_params(net).clone()
        # As the fast recipe does: matrices decay, BN and biases do not.
        optimizer = make([{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": decay},
                          {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0}])
        grads = torch.randn(STEPS, start.numel()) * 0.1
        for step in range(STEPS):
            at = 0
            for p in net.parameters():
                p.grad = grads[step, at:at + p.numel()].view_as(p).clone()
                at += p.numel()
            optimizer.step()
        for backend, precision in backends():
            with Driver(backend, precision) as driver:
                read, _ = driver.run({"params": start, "step_grads": grads}, ["params"], net="resnet18:8:10", batch=1,
                                     resolution=8, steps=STEPS, weight_decay=decay, **words)
            checks.below(relative(read["params"], flat_params(net)), 1e-6, f"{backend}: {name}, weight decay {decay}")
checks.done()
