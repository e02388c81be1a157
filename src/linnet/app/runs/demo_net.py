"""The small network of the demo, as a factory file."""

from __future__ import annotations

from torch import nn


def digit_net(classes: int = 5, width: int = 24) -> nn.Module:
    """A convolutional network for gray images of 8 × 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, width // 2, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )  # fmt: skip
