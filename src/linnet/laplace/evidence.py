"""Prior precisions and noise variance by maximum marginal likelihood.

Where the gradient of the log evidence in log δ_g and log m vanishes,

    δ_g = γ_g / ‖θ*_g − μ_g‖²,   γ_g = n_g − δ_g ∂ log det H / ∂ δ_g   (well-determined parameters)
    m   = S / (n − Σ_g γ_g)      for Gaussian noise, with S the sum of squared residuals over σ²

which is MacKay's fixed point (1992, "A practical Bayesian framework for backpropagation networks"); the
derivative of the evidence itself is followed by L-BFGS, which also converges where the fixed point cycles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.laplace.posterior import Hyper, Posterior
from linnet.laplace.prior import Groups
from linnet.solvers.lbfgs import minimize

LOWEST, HIGHEST = math.log(1e-10), math.log(1e14)  # of every hyper-parameter: some optima lie at infinity


@dataclass(frozen=True)
class Tuned:
    """Result of tuning."""

    hyper: Hyper  # the hyper-parameters
    value: float  # the criterion there
    steps: int  # evaluations of the criterion
    converged: bool  # whether the search ended before its limit of steps
    # hyper-parameters that ended at the smallest or largest value of their grid, so that the best may lie
    # beyond, or where the data want no posterior at all
    edges: tuple[str, ...] = ()


def maximize_evidence(
    posterior: Posterior, groups: Groups, start: Hyper, noise: bool, search: str, steps: int
) -> Tuned:
    """Tune the prior, and the noise of a Gaussian likelihood, by the evidence."""
    fitted = posterior.fitted
    fitted.at(start.noise)  # there must be targets
    if noise:
        _check_noise(posterior)
    if search == "fixed-point":
        return _fixed_point(posterior, groups, start, noise, steps)
    if search != "gradient":
        raise InputError(
            f"search={search!r}", expected='"gradient" or "fixed-point"', remedy="leave search= out"
        )

    def unpacked(eta: Tensor) -> Hyper:
        positive = eta.clamp(LOWEST, HIGHEST).exp()
        return Hyper(positive[: groups.count], start.scale, positive[-1] if noise else start.noise)

    def objective(eta: Tensor) -> tuple[float, Tensor]:
        leaf = eta.detach().requires_grad_()
        value = -posterior.log_evidence(groups, unpacked(leaf))
        (slope,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), slope

    logs = [start.prior.log(), *([start.noise.log()[None]] if noise else [])]
    eta, value, count, converged = minimize(objective, torch.cat(logs), steps)
    return Tuned(unpacked(eta), -value, count, converged)


def _check_noise(posterior: Posterior) -> None:
    """Raise unless the noise variance is a hyper-parameter of the evidence."""
    if not posterior.fitted.targets:
        raise InputError(
            "noise=True without a Gaussian likelihood",
            expected="a likelihood with a noise variance",
            remedy="leave noise= out",
        )
    if posterior.fitted.squares <= 0:
        raise InputError(
            "noise=True, but the network fits every target exactly",
            expected="residuals that are not all zero",
            remedy="pass noise=False",
        )
    if posterior.curvature.made.expectation == "empirical":
        raise InputError(
            "noise=True with expectation='empirical'",
            expected="a curvature that scales with 1/σ², as that of observed labels does not",
            remedy='use expectation="exact" or "mc", or pass noise=False',
        )


def _fixed_point(posterior: Posterior, groups: Groups, start: Hyper, noise: bool, steps: int) -> Tuned:
    """MacKay's updates until they change nothing."""
    sizes, distances = groups.sums(torch.ones_like(posterior.mean)), posterior.distances(groups)
    fitted, at, converged, count = posterior.fitted, start, False, 0
    while count < steps and not converged:
        count += 1
        prior, level = at.prior.detach().requires_grad_(), at.noise.detach().requires_grad_()
        logdet = posterior.logdet(groups, Hyper(prior, at.scale, level))
        by_prior, by_noise = torch.autograd.grad(logdet, [prior, level])
        determined = (sizes - at.prior * by_prior).clamp_min(0)
        updated = (determined / distances.clamp_min(1e-300)).clamp(math.exp(LOWEST), math.exp(HIGHEST))
        changes = (updated / at.prior).log().abs()
        after = at.noise
        if noise:
            # m = s S / (s n − γ), γ = −m ∂ log det H / ∂ m
            scale = float(at.scale)
            left = scale * fitted.targets + float(at.noise * by_noise)
            after = torch.full_like(at.noise, scale * fitted.squares / max(left, 1e-9 * fitted.targets))
            changes = torch.cat([changes, (after / at.noise).log().abs()[None]])
        at = Hyper(updated, at.scale, after)
        converged = float(changes.max()) < 1e-9
    return Tuned(at, float(posterior.log_evidence(groups, at)), count, converged)
