"""The networks that the benchmarks measure, in plain PyTorch with the default initialization."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected network with ReLU between the layers."""
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(*layers)


def deep_convolution(channels: int = 256, size: int = 4, classes: int = 10) -> nn.Sequential:
    """Two 3x3 convolutions over small maps with many channels, and a linear head."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * size * size, classes),
    )


def lenet(classes: int = 1, pool: str = "max") -> nn.Sequential:
    """LeNet with 50, 50, 120 and 84 units on (3, 32, 32) images: 5x5 convolutions without padding."""
    pooling = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}[pool]
    return nn.Sequential(
        nn.Conv2d(3, 50, 5),
        nn.ReLU(),
        pooling(2),
        nn.Conv2d(50, 50, 5),
        nn.ReLU(),
        pooling(2),
        nn.Flatten(),
        nn.Linear(1250, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalization beside a shortcut that has no parameters.

    He et al., "Deep residual learning for image recognition" (2016), section 4.2, option A: where the map is
    halved the shortcut takes every second pixel and fills the new channels with zeros.
    """

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.padding = (fan_out - fan_in) // 2
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, fan_in, H, W) to (N, fan_out, H / stride, W / stride)."""
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(inner + x)


class ResNet(nn.Module):
    """Residual network for 32x32 images with 6 n + 2 layers (He et al. 2016, section 4.2)."""

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        fan_in = 16
        for fan_out, stride in ((16, 1), (32, 2), (64, 2)):
            for index in range((depth - 2) // 6):
                blocks.append(Block(fan_in, fan_out, stride if index == 0 else 1))
                fan_in = fan_out
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 32, 32) to (N, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.blocks(x).mean((2, 3)))


def resnet20(classes: int = 10) -> ResNet:
    """ResNet-20 in evaluation mode whose running statistics are those of a batch of noise.

    Without statistics of its own activations an untrained deep network in evaluation mode lets its signal
    shrink or grow from block to block; a pass in training mode gives it the scale of a trained one.
    """
    model = ResNet(20, classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    model.train()
    with torch.no_grad():
        model(torch.randn(64, 3, 32, 32))
    return model.eval()
