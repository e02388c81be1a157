"""CURVES: images of smooth curves through three random points (Hinton and Salakhutdinov 2006)."""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 28
PEN = 0.7  # standard deviation of the pen, in pixels
SAMPLES = 40  # points that a curve is drawn with


def curves(count: int, seed: int = 0) -> Tensor:
    """Draw curves.

    Each is the parabola c(t), t in [0, 1], that passes through three points drawn uniformly from the middle
    24 x 24 pixels, at t = 0, 1/2 and 1. A Gaussian pen moves along it; its ink, per length, saturates.

    Args:
        count: Number of images.
        seed: Seed of the points.

    Returns:
        Intensities in [0, 1], (count, 784).
    """
    generator = torch.Generator().manual_seed(seed)
    first, middle, last = (2 + 23 * torch.rand(3, count, 2, 1, generator=generator)).unbind()
    t = (torch.arange(SAMPLES) + 0.5) / SAMPLES
    # Lagrange's form, and its derivative, whose size is the speed of the pen
    path = first * (2 * (t - 0.5) * (t - 1)) - middle * (4 * t * (t - 1)) + last * (2 * t * (t - 0.5))
    speed = (first * (4 * t - 3) - middle * (8 * t - 4) + last * (4 * t - 1)).norm(dim=1)  # (count, T)
    pixels = torch.arange(SIDE, dtype=torch.float32)
    near = torch.exp(-((path[..., None] - pixels) ** 2) / (2 * PEN**2))  # (count, 2, T, 28)
    ink = torch.einsum("nt,nty,ntx->nyx", speed / SAMPLES, near[:, 1], near[:, 0])
    return (1 - torch.exp(-2 * ink)).flatten(1)
