"""What the adapters and the tutorial take from BoTorch and GPyTorch, for environments without them.

Only the interfaces: a model base class, posteriors that hold a normal distribution, expected improvement of
one new point, and a search of its best point by gradients. Where the packages are installed, they are used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from linnet.integrations import botorch as adapter

INSTALLED = all(importlib.util.find_spec(name) for name in ("gpytorch", "botorch"))


class Normal:
    """The normal distribution of q points with C outputs, example by example.

    Args:
        mean: (..., q) or (..., q, C).
        covariance: (..., q·C, q·C).
        interleaved: Whether the outputs of an example stand together, the only order there is here.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, interleaved: bool = True) -> None:
        assert interleaved
        assert covariance.shape[-1] == mean.flatten(covariance.ndim - 2).shape[-1]
        self.mean, self.covariance_matrix = mean, covariance

    @property
    def variance(self) -> Tensor:
        """Of the shape of the mean."""
        return self.covariance_matrix.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape)


class Posterior:
    """A posterior around a distribution, its last axis the outputs.

    Args:
        distribution: The distribution.
    """

    def __init__(self, distribution: Normal) -> None:
        self.distribution = distribution
        single = distribution.mean.ndim == distribution.covariance_matrix.ndim - 1
        self.mean, self.variance = (
            t[..., None] if single else t for t in (distribution.mean, distribution.variance)
        )


class LogExpectedImprovement(nn.Module):
    """The logarithm of the expected improvement of one point, as it is for moderate values.

    Args:
        model: The model.
        best_f: The best value so far.
        maximize: Whether larger is better.
    """

    def __init__(self, model: Any, best_f: Any, maximize: bool = True) -> None:
        super().__init__()
        self.model, self.best, self.sign = model, best_f, 1.0 if maximize else -1.0

    def forward(self, X: Tensor) -> Tensor:
        """(B,) at points (B, 1, d)."""
        found = self.model.posterior(X)
        spread = found.variance.clamp_min(1e-12).sqrt()
        u = self.sign * (found.mean - self.best) / spread
        density, share = (-u.square() / 2).exp() / (2 * torch.pi) ** 0.5, torch.special.ndtr(u)
        return (spread * (density + u * share)).clamp_min(1e-30).log()[:, 0, 0]


def optimize_acqf(
    function: Any, bounds: Tensor, q: int, num_restarts: int, raw_samples: int
) -> tuple[Tensor, Tensor]:
    """The best of some random points, and of steps along the gradient from the best of those."""
    assert q == 1
    width = bounds[1] - bounds[0]
    with torch.no_grad():
        raw = bounds[0] + width * torch.rand(raw_samples, 1, bounds.shape[1], dtype=bounds.dtype)
        tried = raw[function(raw).topk(num_restarts).indices]
    points = [tried]
    for _ in range(5):
        leaf = points[-1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf).sum(), leaf)
        step = 0.02 * width * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        points.append((points[-1] + step).clamp(bounds[0], bounds[1]))
    with torch.no_grad():
        values = function(torch.cat(points))
    return torch.cat(points)[values.argmax()], values.max()


PARTS = {
    "botorch.models.model": {"Model": type("Model", (nn.Module,), {})},
    "botorch.posteriors.gpytorch": {"GPyTorchPosterior": Posterior},
    "botorch.acquisition": {"LogExpectedImprovement": LogExpectedImprovement},
    "botorch.optim": {"optimize_acqf": optimize_acqf},
    "linear_operator": {"to_linear_operator": lambda matrix: matrix},
    "gpytorch.distributions": {"MultivariateNormal": Normal, "MultitaskMultivariateNormal": Normal},
}


@contextmanager
def botorch_or_stand_in() -> Iterator[None]:
    """BoTorch itself, or while this lasts the parts above in its place."""
    if INSTALLED:
        yield
        return
    names = {".".join(name.split(".")[:n]) for name in PARTS for n in (1, 2, 3)}
    modules = {name: ModuleType(name) for name in names}
    for name, parts in PARTS.items():
        vars(modules[name]).update(parts)
    sys.modules.update(modules)
    adapter.__getattr__.cache_clear()
    try:
        yield
    finally:
        adapter.__getattr__.cache_clear()
        for name in modules:
            del sys.modules[name]
