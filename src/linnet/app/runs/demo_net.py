"""The small network of the demo, as a factory file."""

from __future__ import annotations

from torch import nn


def digit_net(classes: int = 5, width: int = 24) -> nn.Module:
    """A convolutional network for gray images of 8 × 8 pixels.

    Args:
        classes: Number of outputs.
        width: Channels of the last convolution.

    Returns:
        The network, at random weights.

    Example:
        >>> import torch
        >>> digit_net()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 5])
    """
    return nn.Sequential(
        nn.Conv2d(1, width // 2, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )  # fmt: skip
