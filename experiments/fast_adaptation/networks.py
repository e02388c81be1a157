"""Networks of the studies: pre-activation residual networks, LeNet-5, and a regressor of faces."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-activation residual block (He et al. 2016, "Identity mappings in deep residual networks").

    Args:
        inside: Channels that come in.
        outside: Channels that go out.
        stride: Of the first convolution.
    """

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        straight = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if straight else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X + convolutions of what is normalized."""
        h = F.relu(self.bn1(x))
        own = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(h)
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(h)))) + own
        return out


class PreResNet(nn.Module):
    """A pre-activation residual network of 6 n + 2 layers for images of 32 x 32.

    Args:
        depth: 6 n + 2.
        width: Channels of the first of three stages.
        classes: Outputs.
    """

    def __init__(self, depth: int, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        blocks, inside = [], width
        for stage in range(3):
            outside = width * 2**stage
            for k in range((depth - 2) // 6):
                blocks.append(Block(inside, outside, 2 if stage and k == 0 else 1))
                inside = outside
        self.blocks, self.bn = nn.Sequential(*blocks), nn.BatchNorm2d(inside)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C)."""
        out: Tensor = self.fc(F.relu(self.bn(self.blocks(self.conv(x)))).mean((2, 3)))
        return out


def lenet(classes: int = 10) -> nn.Sequential:
    """LeNet-5 for gray images of 32 x 32, with ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


def face_network() -> nn.Sequential:
    """Supplement E.2: 45 x 45 faces to the mean of an angle and what its variance is made of.

    Two pooling layers: the 3200 inputs of the first linear layer, 50 channels of 8 x 8, need both.
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3200, 500), nn.ReLU(), nn.Linear(500, 2),
    )  # fmt: skip


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of examples that are classified correctly."""
    with torch.no_grad():
        found = [
            (model(part).argmax(1) == own).double()
            for part, own in zip(x.split(500), y.split(500), strict=True)
        ]
    return float(torch.cat(found).mean())
