"""A tangent Gaussian process written out densely, and the ways to solve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fitting.problems import network, real
from tests.oracles.dense import jacobian_oracle

DENSE: dict[str, dict[str, Any]] = {
    "function": {"space": "function", "solver": "cholesky"},
    "parameter": {"space": "parameter", "solver": "cholesky"},
}
ITERATIVE: dict[str, dict[str, Any]] = {
    "function-cg": {"space": "function", "solver": "cg", "tolerance": 1e-12},
    "function-cg-pivoted": {"tolerance": 1e-12, "preconditioner": "pivoted-cholesky", "rank": 60},
    "function-cg-nystrom": {"space": "function", "tolerance": 1e-12, "preconditioner": "nystrom"},
    "parameter-cg": {"space": "parameter", "solver": "cg", "tolerance": 1e-12},
    "parameter-cg-ekfac": {"tolerance": 1e-12, "preconditioner": "ekfac"},
    "parameter-cg-exact": {"space": "parameter", "tolerance": 1e-12, "variance": "exact"},
    "function-cg-exact": {"space": "function", "tolerance": 1e-12, "variance": "exact"},
}
WAYS = {**DENSE, **ITERATIVE}


@dataclass(frozen=True)
class Dense:
    """The posterior by brute force: f ~ N(f₀, J Jᵀ/λ), t = f + N(0, R)."""

    model: nn.Module
    x: Tensor
    y: Tensor
    x_test: Tensor
    noise: Tensor  # R's diagonal, (N, C); inf for a missing target
    precision: float

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (T, C) and joint covariance (T, C, T, C), by Bayesian linear regression on the weights."""
        j, r = self._observed()
        test = jacobian_oracle(self.model, self.x_test)
        shape = test.shape[:2]
        test = test.flatten(0, 1)
        weights = 1 / self.noise[self._there()]
        posterior = torch.linalg.inv(
            j.T @ (weights[:, None] * j) + self.precision * torch.eye(j.shape[1], dtype=j.dtype)
        )
        delta = posterior @ (j.T @ (weights * r))
        mean = self.model(self.x_test).detach() + (test @ delta).view(shape)
        return mean, (test @ posterior @ test.T).view(*shape, *shape)

    def log_evidence(self) -> float:
        """log N(t; f₀, J Jᵀ/λ + R)."""
        j, r = self._observed()
        total = j @ j.T / self.precision + self.noise[self._there()].diag()
        normal = torch.distributions.MultivariateNormal(torch.zeros_like(r), total)
        return float(normal.log_prob(r))

    def _there(self) -> Tensor:
        return ~self.y.isnan()

    def _observed(self) -> tuple[Tensor, Tensor]:
        there = self._there()
        j = jacobian_oracle(self.model, self.x)[there]
        return j, (self.y - self.model(self.x).detach())[there]


def dense(
    n: int = 9, outputs: int = 2, noise: Any = 0.2, precision: float = 0.7, seed: int = 0, hidden: int = 5
) -> Dense:
    """A problem with Gaussian noise of one variance, or one for each output."""
    model = network(3, hidden, outputs, seed)
    x, y, x_test = real(n, 3, seed=seed + 1), real(n, outputs, seed=seed + 2), real(4, 3, seed=seed + 3)
    r = torch.as_tensor(noise, dtype=torch.float64).expand(n, outputs).clone()
    return Dense(model, x, y, x_test, r, precision)
