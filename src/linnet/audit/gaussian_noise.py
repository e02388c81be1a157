"""Noise calibration of two Gaussian mechanisms to (ε, δ).

(ε, δ) differential privacy: for neighboring data D, D' and every set A of results,
P(result(D) ∈ A) ≤ e^ε P(result(D') ∈ A) + δ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linnet.errors import InputError

STEPS = 200  # of a bisection: until the interval has no number left inside


def privacy_delta(noise: float, sensitivity: float, epsilon: float) -> float:
    """The least δ for which Gaussian noise on a vector of some sensitivity is (ε, δ)-private: exactly."""
    # Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, theorem
    # 8.
    ratio, half = epsilon * noise / sensitivity, sensitivity / (2 * noise)
    first = float(torch.special.ndtr(_number(half - ratio)))
    # in logarithms: e^ε overflows before the product does
    second = math.exp(min(0.0, epsilon + float(torch.special.log_ndtr(_number(-half - ratio)))))
    return max(0.0, first - second)


def gaussian_noise(sensitivity: float, epsilon: float, delta: float) -> float:
    """The least σ for which Gaussian noise on a vector of some sensitivity is (ε, δ)-private."""
    # Source: Balle and Wang, ICML 2018, algorithm 1.
    low, high = 0.0, sensitivity
    while privacy_delta(high, sensitivity, epsilon) > delta:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if privacy_delta(middle, sensitivity, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high


def objective_noise(gradient: float, directions: int, epsilon: float, delta: float) -> float:
    """The σ of a random linear term bᵀδ that makes the optimum of an objective (ε, δ)-private."""
    # The optimum a determines b = −∇F(a; D). For neighbors, b moves by at most L in a subspace of k
    # directions that their examples alone determine, so the logarithm of the ratio of the densities of b is
    # at most (2 L‖Πb‖ + L²)/2σ², and ‖Πb‖ ≤ σ q but with probability δ, q² the quantile of χ²_k. Hence ½u² +
    # q u ≤ ε for u = L/σ. (What the change of variables adds is to be taken off ε before.)
    #
    # Source: Kifer, Smith, Thakurta, "Private convex empirical risk minimization", COLT 2012, whose theorem
    # is the case k = 1; the constants here are those of the argument above.
    from scipy.special import gammainccinv

    q = math.sqrt(2 * float(gammainccinv(directions / 2, delta)))
    # the positive root of ½u² + q u − ε, without cancellation
    u = 2 * epsilon / (q + math.sqrt(q * q + 2 * epsilon))
    return gradient / u


def determinant_cost(jacobian: float, ridge: float, outputs: int) -> float:
    """Privacy cost of the change of variables in objective perturbation: C log(1 + κ²/ρ)."""
    # An example adds to the Hessian at most C eigenvalues of at most κ², so the determinants of neighbors
    # differ by a factor of at most (1 + κ²/ρ)^C.
    return outputs * math.log1p(jacobian**2 / ridge)


def left_for_noise(jacobian: float, ridge: float, outputs: int, epsilon: float) -> float:
    """ε less what the determinants cost, if anything is left."""
    left = epsilon - determinant_cost(jacobian, ridge, outputs)
    if left <= 0:
        least = jacobian**2 / math.expm1(epsilon / outputs)
        raise InputError(
            f'ridge={ridge:g} is too small for mechanism="objective" with epsilon={epsilon:g}',
            expected=f"a ridge above κ²/(e^(ε/C) − 1) = {least:.4g} for κ={jacobian:g} and C={outputs}",
            remedy='fit with a larger ridge, clip the Jacobian lower, or pass mechanism="output"',
        )
    return left


def _number(value: float) -> Tensor:
    """A float64 scalar."""
    return torch.tensor(value, dtype=torch.float64)
