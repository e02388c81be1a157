"""Small streams of tasks and plain dense arithmetic for tests of the methods against forgetting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linnet.continual import (
    EWC,
    ContinualMethod,
    NonOnlineLaplace,
    OnlineLaplace,
    SynapticIntelligence,
)
from linnet.likelihoods import Categorical
from tests.oracles.dense import ggn_oracle, jacobian_oracle, output_oracle

CLASSES = 3
Maker = Callable[[nn.Module], ContinualMethod]
MAKERS: dict[str, Maker] = {
    "online": lambda net: OnlineLaplace(net, Categorical()),
    "online-diagonal": lambda net: OnlineLaplace(net, Categorical(), structure="diagonal"),
    "online-list": lambda net: OnlineLaplace(net, Categorical(), merge="exact"),
    "non-online": lambda net: NonOnlineLaplace(net, Categorical()),
    "ewc": lambda net: EWC(net, Categorical()),
    "ewc-online-kfac": lambda net: EWC(net, Categorical(), "kfac", variant="online", decay=0.9),
    "si": lambda net: SynapticIntelligence(net, strength=1.0),
}
OFF: dict[str, Maker] = {
    "online": lambda net: OnlineLaplace(net, Categorical(), strength=0.0),
    "non-online": lambda net: NonOnlineLaplace(net, Categorical(), strength=0.0),
    "ewc": lambda net: EWC(net, Categorical(), strength=0.0),
    "si": lambda net: SynapticIntelligence(net, strength=0.0),
}


def small_network() -> nn.Module:
    """4 inputs, 5 hidden units, 3 classes."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def small_task(seed: int, n: int = 24) -> tuple[Tensor, Tensor]:
    """Inputs around a place of their own and labels from a plane."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64) + seed % 3
    y = (x @ torch.randn(4, CLASSES, generator=generator, dtype=torch.float64)).argmax(1)
    return x.to(torch.get_default_dtype()), y


def gauss_newton(model: nn.Module, x: Tensor) -> Tensor:
    """G for classes, by plain autograd loops."""
    p = output_oracle(model, x).softmax(1)
    output_hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return ggn_oracle(jacobian_oracle(model, x), output_hessian)


def flat(model: nn.Module) -> Tensor:
    """All parameters, copied."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def moved_away(model: nn.Module, scale: float = 0.3, seed: int = 7) -> Tensor:
    """Move all parameters at random; returns by how much."""
    generator = torch.Generator().manual_seed(seed)
    before = flat(model)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    return flat(model) - before


def gradient(model: nn.Module, value: Tensor) -> Tensor:
    """∇ of a scalar in all parameters, zeros where there is none."""
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    pairs = zip(found, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def train(
    model: nn.Module,
    method: ContinualMethod | None,
    task: tuple[Tensor, Tensor],
    steps: int = 12,
    **settings: Any,
) -> None:
    """A plain training loop, as a user would write it."""
    x, y = task
    options = {"lr": 0.05, "momentum": 0.9, **settings}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(steps):
        rows = slice(8 * (step % 3), 8 * (step % 3) + 8)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        if method is not None:
            loss = loss + method.penalty(examples=len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if method is not None:
            method.after_step()
