"""Networks, optimizers and plain loops that iterative linearization is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from linnet.optim import IterativeLinearization

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def mlp(seed: int = 0, double: bool = True, outputs: int = 3) -> nn.Sequential:
    """A network with one hidden layer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))
    return net.double() if double else net


def convnet(seed: int = 0) -> nn.Sequential:
    """A network with BatchNorm and dropout, in single precision and training mode."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


def batches(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, n: int = 8
) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs and classes."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(3, (n,), generator=generator),
        )
        for _ in range(count)
    ]


def cross_entropy(batch: tuple[Tensor, Tensor]) -> Callable[[nn.Module], Tensor]:
    """A closure."""
    return lambda module: nn.functional.cross_entropy(module(batch[0]), batch[1])


def plain_loop(net: nn.Module, make: Any, data: list[tuple[Tensor, Tensor]]) -> torch.optim.Optimizer:
    """What everybody writes."""
    optimizer: torch.optim.Optimizer = make(net.parameters())
    for batch in data:
        optimizer.zero_grad()
        cross_entropy(batch)(net).backward()
        optimizer.step()
    return optimizer


def run(training: IterativeLinearization, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Step through batches; the losses."""
    return [float(training.step(cross_entropy(batch))) for batch in data]


def values(net: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def same_bits(a: Any, b: Any) -> bool:
    """Equal to the bit, through dicts and lists."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)
