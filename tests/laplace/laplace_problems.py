"""Small posteriors with everything dense about them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.laplace.laplace import Laplace
from tests.curvatures.side_by_side import grouped
from tests.fitting.problems import network, real
from tests.oracles.dense import jacobian_oracle

CATEGORICAL = linnet.likelihoods.Categorical()
DENSE = ("full", "block", "diagonal", "low-rank")
KRONECKER = ("kfac", "ekfac", "kfra")


def classes(n: int = 12, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of three classes, and data."""
    return network(3, 4, 3, seed), real(n, 3, seed=seed + 1), (torch.arange(n) * 2) % 3


def numbers(n: int = 12, outputs: int = 2, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of real targets, and data."""
    return network(3, 4, outputs, seed), real(n, 3, seed=seed + 1), real(n, outputs, seed=seed + 2)


def fitted(structure: Any = "full", **options: Any) -> tuple[Laplace, Tensor, Tensor]:
    """A classifier's posterior, and its data."""
    model, x, y = classes()
    options.setdefault("rank", 64)
    return Laplace(model, CATEGORICAL, **grouped(structure, **options)).fit((x, y)), x, y


def theta_of(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def output_covariance(model: nn.Module, x: Any, dense: Tensor) -> Tensor:
    """J Σ Jᵀ between all examples, (N, C, N, C), from the dense Jacobian."""
    j = jacobian_oracle(model, x)
    return torch.einsum("ncp,pq,mdq->ncmd", j, dense, j)


def evidence_oracle(nll: float, theta: Tensor, curvature: Tensor, prior: Tensor, scale: float = 1.0) -> float:
    """The log evidence from dense matrices, with every constant written out."""
    p = len(theta)
    log_prior = -0.5 * float((prior * theta**2).sum()) + 0.5 * float(prior.log().sum())
    log_prior -= 0.5 * p * math.log(2 * math.pi)
    precision = scale * curvature + torch.diag(prior)
    return -scale * nll + log_prior + 0.5 * p * math.log(2 * math.pi) - 0.5 * float(torch.logdet(precision))


class LinearModel:
    """y = Xw + ε with a Gaussian prior: everything about it is known in closed form."""

    def __init__(self, prior: float = 0.7, noise: float = 0.3, n: int = 15, outputs: int = 1) -> None:
        self.x, self.prior, self.noise = real(n, 3, seed=1), prior, noise
        weights = real(outputs, 3, seed=2)
        self.y = self.x @ weights.T + noise**0.5 * real(n, outputs, seed=3)
        gram = self.x.T @ self.x / noise
        self.precision = gram + prior * torch.eye(3, dtype=torch.float64)
        mode = torch.linalg.solve(self.precision, self.x.T @ self.y / noise)
        self.model = nn.Linear(3, outputs, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(mode.T)

    def marginal(self, prior: float | None = None, noise: float | None = None) -> float:
        """log N(y; 0, X Xᵀ/λ + σ² I), summed over outputs."""
        n = len(self.x)
        spread = self.x @ self.x.T / (prior or self.prior) + (noise or self.noise) * torch.eye(n).double()
        normal = torch.distributions.MultivariateNormal(torch.zeros(n).double(), spread)
        return float(normal.log_prob(self.y.T).sum())

    def left_out(self, i: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of f(x_i) from all other examples, refitted."""
        keep = torch.arange(len(self.x)) != i
        x, y = self.x[keep], self.y[keep]
        precision = x.T @ x / self.noise + self.prior * torch.eye(3).double()
        mode = torch.linalg.solve(precision, x.T @ y / self.noise)
        return self.x[i] @ mode, self.x[i] @ torch.linalg.solve(precision, self.x[i])

    def laplace(self, structure: str = "full", **options: Any) -> Laplace:
        """The posterior at the mode."""
        likelihood = linnet.likelihoods.Gaussian(variance=self.noise)
        return Laplace(
            self.model, likelihood, prior_precision=self.prior, **grouped(structure, **options)
        ).fit((self.x, self.y))
