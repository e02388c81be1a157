"""The marginal likelihood of a tangent Gaussian process as a function of its hyper-parameters.

With prior precision λ, noise scale s and ρ = λ s, the targets' residuals have the density

    log N(r; 0, J Jᵀ/λ + s diag σ²)
        = −½ [ q(ρ)/s + log det(K̃/ρ + I) + n log 2πs + Σ log σ_i² ],    q(ρ) = r̃ᵀ (K̃/ρ + I)⁻¹ r̃

(Rasmussen and Williams 2006, eq. 2.30). Both terms are sums over the spectrum of K̃: over its eigenvalues, or
over quadrature nodes of the Lanczos process (Ubaru, Chen and Saad 2017), which serve every λ and s alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import Seed, make_generator, signs
from linnet.predictive.noise import golden_section
from linnet.solvers.lanczos import tridiagonalize
from linnet.solvers.solution import Estimate

_CUT = 1e-12  # eigenvalues below this share of the largest carry no mass that can be told from rounding
GRID = 4  # values of ρ a factor of ten


@dataclass(frozen=True)
class Measure:
    """The spectrum of K̃, and how r̃ lies in it."""

    nodes: Tensor  # θ of each sample, (S, m); one sample holds the eigenvalues themselves
    weights: Tensor  # of the nodes in the trace, (S, m); ones for eigenvalues
    residual_nodes: Tensor  # θ, (k,)
    masses: Tensor  # share of ‖r̃‖² at these, (k,)
    outside: float  # share of ‖r̃‖² where K̃ is zero
    count: int  # n, the number of targets
    log_noise: float  # Σ log σ_i²

    @property
    def exact(self) -> bool:
        """Whether the nodes are eigenvalues."""
        return self.nodes.shape[0] == 1

    def quadratic(self, rho: float) -> float:
        """The quadratic form q(ρ)."""
        return float((self.masses * (rho / (self.residual_nodes + rho))).sum()) + self.outside

    def logdet(self, rho: float) -> Tensor:
        """Log det(K̃/ρ + I) of each sample, (S,)."""
        return (self.weights * torch.log1p(self.nodes / rho)).sum(1)

    def evidence(self, rho: float, scale: float) -> Estimate:
        """The log marginal likelihood."""
        rest = self.quadratic(rho) / scale + self.count * math.log(2 * math.pi * scale) + self.log_noise
        values = -0.5 * (self.logdet(rho) + rest)
        return Estimate(float(values[0]), 0.0) if self.exact else Estimate.of(values)

    def best_scale(self, rho: float) -> float:
        """The s of highest evidence at a ρ: q(ρ)/n."""
        return max(self.quadratic(rho) / self.count, torch.finfo(torch.float64).tiny)

    def maximize(self, scale_at: Callable[[float], float], least: float = 0.0) -> float:
        """The ρ of highest evidence, s being a function of it: by a grid, then golden sections."""
        top = float(self.nodes.max()) if self.nodes.numel() else 0.0
        if not top > 0:
            raise NumericalError(
                "the tangent kernel of the data is zero",
                expected="outputs that depend on the parameters",
                remedy="check params=, and check that the model is trained",
            )

        def loss(log_rho: float) -> float:
            rho = math.exp(log_rho)
            return -self.evidence(rho, scale_at(rho)).mean

        steps = 16 * GRID  # sixteen decades around the largest eigenvalue
        low, high = math.log(top) + math.log(1e-12), math.log(top) + math.log(1e4)
        low = max(low, math.log(least)) if least > 0 else low
        high = max(high, low)
        grid = [low + (high - low) * i / steps for i in range(steps + 1)]
        at = min(range(len(grid)), key=lambda i: loss(grid[i]))
        first, last = grid[max(at - 1, 0)], grid[min(at + 1, steps)]
        return math.exp(golden_section(loss, first, last, steps=45))


def at_best_noise(ridge: Tensor, noise: Tensor, count: int, logdet: Tensor) -> Tensor:
    """The log marginal likelihood where the noise is the best one of its ridge, s = q(ρ)/n."""
    # −½ [n (log 2πs/ρ + 1) + log det(K̃ + ρI)], in units of the noise.
    # residuals that vanish leave no noise
    level = 2 * math.pi * noise.clamp_min(1e-300) / ridge
    return -0.5 * (count * (level.log() + 1) + logdet)


def from_eigenvalues(values: Tensor, masses: Tensor, squared: float, count: int, log_noise: float) -> Measure:
    """The measure of a spectrum that is known."""
    values = values.clamp_min(0)
    outside = max(0.0, squared - float(masses.sum()))
    return Measure(values[None], torch.ones_like(values)[None], values, masses, outside, count, log_noise)


def by_primal(values: Tensor, coordinates: Tensor, squared: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues γ of J̃ᵀJ̃ and the coordinates of J̃ᵀr̃ turned into masses of r̃."""
    good = values > _CUT * values.max().clamp_min(torch.finfo(values.dtype).tiny)
    return values[good], (coordinates[good] / values[good]).clamp_max(squared)


def by_matrix(
    operator: LinearOperator, start: Tensor, primal: bool, facts: tuple[float, int, float]
) -> Measure:
    """The measure of a matrix small enough to be formed, from one product with the identity."""
    # start (n,)
    matrix = operator.dense().double()
    values, vectors = eigh((matrix + matrix.T) / 2, "tangent kernel")
    masses, values = (vectors.T @ start.double()) ** 2, values.clamp_min(0)
    if primal:
        values, masses = by_primal(values, masses, facts[0])
    return from_eigenvalues(values, masses, *facts)


def by_quadrature(
    operator: LinearOperator,
    start: Tensor,
    primal: bool,
    facts: tuple[float, int, float],
    samples: int,
    steps: int,
    seed: Seed = None,
) -> Measure:
    """The measure by stochastic Lanczos quadrature, ``steps`` products for all vectors together."""
    # start (n,)
    # Source: Ubaru, Chen and Saad 2017; Dong et al. 2017 for Gaussian processes.
    squared, count, log_noise = facts
    n = operator.shape[0]
    z = signs((n, samples), make_generator(seed), operator.dtype, operator.device)
    b = start.to(z)[:, None]
    own = b if float(b.norm()) > 0 else z[:, :1]
    matrices = tridiagonalize(operator, torch.cat([z, own], 1), steps).matrices().double()
    theta, s = torch.linalg.eigh(matrices)
    theta, weights = theta.clamp_min(0), s[:, 0, :] ** 2
    # breakdown leaves zeros in T, whose nodes have no weight
    weights = torch.where(weights > torch.finfo(z.dtype).eps ** 2, weights, 0.0)
    nodes, masses = theta[-1], weights[-1] * float(b.double().norm()) ** 2
    if primal:
        nodes, masses = by_primal(nodes, masses, squared)
    outside = max(0.0, squared - float(masses.sum())) if primal else 0.0
    return Measure(theta[:-1], n * weights[:-1], nodes, masses, outside, count, log_noise)
