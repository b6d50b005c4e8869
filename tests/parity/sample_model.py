# SPDX-License-Identifier: Apache-2.0
"""The sample's network in PyTorch, written anew for the tests: ResNet-18 for small images; ResNet-34 and -50 in the same naming.

    from sample_model import ResNet18, freeze_bn
    net = ResNet18(width=64, classes=10)

Module names give the state_dict() names that checkpoints carry: conv1 (the stem), conv2 .. conv5 (two blocks each, with
residual_function and shortcut), dense_layer.
"""
import torch
from torch import nn


class Block(nn.Module):
    expansion = 1

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.residual_function = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels))
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        return torch.relu(self.residual_function(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        out = channels * self.expansion
        self.residual_function = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.residual_function(x) + self.shortcut(x))


class ResNet18(nn.Module):
    block, blocks = Block, (2, 2, 2, 2)

    def __init__(self, width=64, classes=10):
        super().__init__()
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        channels = width
        for stage in range(4):
            out = width << stage
            blocks = nn.Sequential()
            for i in range(self.blocks[stage]):
                blocks.append(self.block(channels, out, 2 if stage > 0 and i == 0 else 1))
                channels = out * self.block.expansion
            setattr(self, f"conv{stage + 2}", blocks)
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.dense_layer = nn.Linear(channels, classes)

    def forward(self, x):
        for stage in (self.conv1, self.conv2, self.conv3, self.conv4, self.conv5):
            x = stage(x)
        return self.dense_layer(self.avg_pool(x).flatten(1))


class ResNet34(ResNet18):
    blocks = (3, 4, 6, 3)


class ResNet50(ResNet18):
    block, blocks = Bottleneck, (3, 4, 6, 3)


def freeze_bn(net):
    """BatchNorm by its running statistics, which stay; scale and shift still learn."""
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
    return net
