"""The small network of the demo, as a factory file."""

from __future__ import annotations

from torch import nn


def digit_net() -> nn.Module:
    """A convolutional network for gray images of 8 × 8 pixels, of five classes."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 5),
    )  # fmt: skip
