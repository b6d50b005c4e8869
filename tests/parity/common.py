# SPDX-License-Identifier: Apache-2.0
"""What the parity tests share: the driver as a function, tensors to and from files, relative distances."""
import copy
import os
import shutil
import subprocess
import sys
import tempfile

# Sanitizers slow the driver down and PyTorch uses the same cores: two threads at most.
os.environ.setdefault("OMP_NUM_THREADS", "2")
try:
    import numpy
    import torch
except ImportError:
    print("SKIP: no PyTorch for this python3")
    sys.exit(77)
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

BUILD = os.environ.get("PS_BUILD", "build/default")
DRIVER = os.path.join(BUILD, "tests", "parity_driver")
THREADS = 1 if os.environ.get("PS_SANITIZER") else 2


def backends():
    """(name, precision): the reference always, the oneDNN module where it was built."""
    found = [("ref", "fp32")]
    if os.path.exists(os.path.join(BUILD, "lib", "paramsync", "libparamsync-cpu.so")):
        found.append(("cpu", "fp32"))
    return found


def relative(a, b):
    """|a - b| / |b| in the L2 norm."""
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    norm = b.norm().item()
    return (a - b).norm().item() / norm if norm > 0 else (a - b).norm().item()


class Driver:
    """One process with one backend; run() gives it a job and reads the tensors that it writes."""

    def __init__(self, backend, precision="fp32", threads=THREADS):
        self.dir = tempfile.mkdtemp(prefix="parity.")
        self.process = subprocess.Popen([DRIVER, backend, precision, str(threads)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
        shutil.rmtree(self.dir)

    def line(self, words):
        self.process.stdin.write(" ".join(f"{k}={v}" for k, v in words.items()) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise SystemExit(f"FAIL: driver: {answer or 'it ended'} (job {words})")
        return answer

    def run(self, inputs, outputs, **words):
        """inputs: name -> tensor; outputs: names. Returns ({name: flat tensor}, {loss, correct, count})."""
        for name, tensor in inputs.items():
            words[name] = os.path.join(self.dir, name)
            kind = numpy.int32 if name == "labels" else numpy.float32
            tensor.detach().cpu().contiguous().numpy().astype(kind).tofile(words[name])
        for name in outputs:
            words[name + "_out"] = os.path.join(self.dir, name + "_out")
        answer = self.line(words)
        numbers = dict(w.split("=") for w in answer.split()[1:])
        read = {n: torch.from_numpy(numpy.fromfile(words[n + "_out"], dtype=numpy.float32)) for n in outputs}
        return read, {k: float(v) for k, v in numbers.items()}


def flat_params(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def flat_grads(net):
    return torch.cat([p.grad.detach().flatten() for p in net.parameters()])


def flat_buffers(net):
    return torch.cat([b.detach().flatten().float() for n, b in net.named_buffers() if "num_batches" not in n])


def shake(net, seed):
    """BN scales, shifts and statistics away from their start values, so that a mix-up shows."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                m.weight += torch.empty_like(m.weight).uniform_(-0.3, 0.3, generator=g)
                m.bias.uniform_(-0.3, 0.3, generator=g)
                m.running_mean.uniform_(-0.3, 0.3, generator=g)
                m.running_var.uniform_(0.5, 1.5, generator=g)
    return net


def kink_distance(net, x):
    """The smallest |input| of any ReLU over its tensor's root mean square, in double."""
    net = copy.deepcopy(net).double()
    smallest = [float("inf")]
    kept = torch.relu, torch.nn.functional.relu

    def watched(t, *unused, **also_unused):
        smallest[0] = min(smallest[0], (t.abs().min() / t.pow(2).mean().sqrt()).item())
        return t.clamp(min=0)

    torch.relu = torch.nn.functional.relu = watched
    try:
        with torch.no_grad():
            net(x.double())
    finally:
        torch.relu, torch.nn.functional.relu = kept
    return smallest[0]


def off_the_kinks(make, margin):
    """make(seed) -> (net, x, y), for the first seed that keeps every ReLU's input away from 0. Nearer than float32
    rounds, which side it falls on is chance, and a ReLU that flips changes gradients by 1e-3: no backend is then within
    1e-5 of another, nor PyTorch of itself."""
    for seed in range(1, 400):
        net, x, y = make(seed)
        if kink_distance(net, x) > margin:
            return net, x, y, seed
    raise SystemExit("FAIL: no seed keeps off the kinks")


class Checks:
    """Counts, prints and ends with the exit status."""

    def __init__(self):
        self.failed = self.passed = 0

    def expect(self, ok, text):
        print(("ok   " if ok else "FAIL ") + text)
        self.failed += not ok
        self.passed += bool(ok)

    def below(self, value, limit, text):
        self.expect(value <= limit, f"{text}: {value:.2e} (at most {limit:.2e})")

    def done(self):
        print(f"{self.passed} passed, {self.failed} failed")
        sys.exit(1 if self.failed or not self.passed else 0)
