#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Training step of ResNet-18 on the CPU: ours, PyTorch and oneDNN's convolutions alone, in turn, medians and ratios.
#     tests/bench/train.sh [--batch 128] [--threads 2] [--rounds 5] [--steps 2] [--resolution 32]
# PS_BUILD names the build folder (build/default), PS_PYTHON a python3 with PyTorch. Exits 77 without PyTorch.
exec "${PS_PYTHON:-python3}" "$(dirname "$0")/torch_speed.py" "$@"
