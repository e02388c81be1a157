"""The networks of the studies: one output layer for all tasks, or one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """A trunk with one output layer for each task.

    Args:
        trunk: The part that tasks share.
        features: What it returns, for each example.
        classes: Number of classes of every task.
    """

    def __init__(self, trunk: nn.Module, features: int, classes: Sequence[int]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(features, count) for count in classes)
        self.task = 0

    def select(self, task: int) -> Heads:
        """Serve one task from now on."""
        self.task = task
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the head that is selected."""
        out: Tensor = self.heads[self.task](self.trunk(x))
        return out


def multilayer(
    widths: Sequence[int], inputs: int = 784, heads: Sequence[int] = (10,), seed: int = 0
) -> Heads:
    """A multilayer perceptron with rectified linear units."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in zip([inputs, *widths[:-1]], widths, strict=True):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return Heads(nn.Sequential(*layers), widths[-1], heads)


def lenet(heads: Sequence[int], scale: float = 1.0, seed: int = 0) -> Heads:
    """The thesis' network for 3 × 32 × 32 images (section 5.4.3): 20 and 50 filters of 5 × 5, then 500 units.

    Args:
        heads: Number of classes of every task.
        scale: What the widths are multiplied with.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    first, second, hidden = (max(2, round(width * scale)) for width in (20, 50, 500))
    trunk = nn.Sequential(
        nn.Conv2d(3, first, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(second * 25, hidden), nn.ReLU(),
    )  # fmt: skip
    return Heads(trunk, hidden, heads)
