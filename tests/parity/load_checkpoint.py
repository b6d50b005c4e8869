#!/usr/bin/env python3
"""Loads a checkpoint of ours into the sample's model in PyTorch with strict=True and evaluates it on the test images.

usage: load_checkpoint.py FILE --width N --data DIR --accuracy A [--resolution R]

Exit status 77 when PyTorch is not installed. Prints how far PyTorch's accuracy is from A and fails beyond one image in 500.
"""
import argparse
import json
import pathlib
import struct
import sys

try:
    import numpy as np
    import torch
except ImportError:
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sample_model  # noqa: E402

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
TYPES = {"F32": np.float32, "I64": np.int64}


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__", None)
    state = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(raw[8 + size + begin:8 + size + end], TYPES[entry["dtype"]]).reshape(entry["shape"])
        state[name] = torch.from_numpy(array.copy())
    return state


def test_images(folder):
    folder = pathlib.Path(folder)
    if (folder / "cifar-10-batches-bin").is_dir():
        folder = folder / "cifar-10-batches-bin"
    rows = np.fromfile(folder / "test_batch.bin", np.uint8).reshape(-1, 3073)
    return torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()), torch.from_numpy(rows[:, 0].astype(np.int64))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--data", required=True)
    parser.add_argument("--accuracy", type=float, required=True)
    args = parser.parse_args()
    model = sample_model.ResNet18(width=args.width)
    model.load_state_dict(read_safetensors(args.file), strict=True)
    model.eval()
    images, labels = test_images(args.data)
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    correct = 0
    with torch.no_grad():
        for at in range(0, len(labels), 250):
            logits = model((images[at:at + 250].float() / 255 - mean) / std)
            correct += int((logits.argmax(1) == labels[at:at + 250]).sum())
    accuracy = correct / len(labels)
    print(f"PyTorch: {accuracy:.4f}, the trainer: {args.accuracy:.4f}, on {len(labels)} images")
    if abs(accuracy - args.accuracy) > 1 / 500 + 5e-5:
        sys.exit("the accuracies differ")


if __name__ == "__main__":
    main()
