"""Hyper-parameters of a tangent Gaussian process by marginal likelihood.

A kernel of full rank interpolates any targets, so that with few of them the evidence may be highest without
noise: they cannot tell. The search then stops at a floor, a share of the mean square of what the process has
to explain, and says so; the maximum is that of the evidence on the values above it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linear.dual import Measure
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.system import System
from linnet.solvers.lbfgs import minimize

STEPS = 75  # evaluations of L-BFGS: variances of a dozen outputs come to rest well before
NEAR = 1.01  # times the floor: at it
LEAST = 1e-4  # the usual floor: a standard deviation of 1 % of what there is to explain


def least_scale(system: System, share: float) -> float:
    """The smallest s that a search may find."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InputError(f"least_noise={share!r}", "a number in [0, 1)", "leave least_noise= out for 1e-4")
    return share * system.problem.squared / max(1, system.problem.count)


def warn_at_floor(found: bool, system: System) -> None:
    """Warn that the evidence is highest below the noise floor."""
    if found:
        warnings.warn(
            f"the evidence of {system.problem.count} targets is highest with less noise than least_noise= "
            "allows, and perhaps with none: they cannot tell noise from signal. The noise stays at that "
            "floor; with few targets pass noise=False and keep the likelihood's variance, or give more data",
            stacklevel=4,
        )


def check_free(prior: Any, noise: Any, system: System) -> None:
    """Raise unless there is something to tune, and data to tune it by."""
    known = isinstance(prior, bool) and (isinstance(noise, bool) or noise == "per-output")
    if not known or not (prior or noise):
        raise InputError(
            f"prior={prior!r}, noise={noise!r}",
            expected='True or False, not both False; noise may be "per-output"',
            remedy="gp.tune() tunes both",
        )
    if noise and not system.problem.squared > 0:
        raise InputError(
            f"noise={noise!r}, but the network fits every target exactly",
            expected="residuals that are not all zero",
            remedy="pass noise=False, or data that the network was not trained on",
        )


def searched(
    measure: Measure, precision: float, scale: float, prior: bool, noise: bool, least: float = 0.0
) -> tuple[float, float]:
    """The λ and s of highest evidence."""
    if prior and noise:

        def best_scale(rho: float) -> float:
            # the best s of each ρ is q(ρ)/n, or, where that is below the floor, the floor
            return max(least, measure.best_scale(rho))

        rho = measure.maximize(best_scale)
        best = best_scale(rho)
        return rho / best, best
    if prior:
        return measure.maximize(lambda rho: scale) / scale, scale
    return precision, measure.maximize(lambda rho: rho / precision, least * precision) / precision


def per_output(
    system: System, likelihood: Likelihood, precision: float, scale: float, prior: bool, least: float = 0.0
) -> tuple[Gaussian, float]:
    """A noise variance for each output, and λ, of highest evidence, by L-BFGS on their logarithms."""
    if not isinstance(system, KernelSystem) or not isinstance(likelihood, Gaussian):
        raise InputError(
            'noise="per-output"',
            expected='a Gaussian likelihood, with space="function" and solver="cholesky"',
            remedy='pass noise=True for one scale, or make the process with space="function"',
        )
    problem, kernel = system.problem, system.dual.kernel
    assert problem.weights is not None
    there = problem.weights.reshape(-1) > 0
    base = likelihood.noise.to(kernel).expand(problem.c)  # σ², which K̃ is in units of
    if base.shape != (problem.c,):
        raise InputError(
            'noise="per-output" with outputs at several positions', "outputs (N, C)", "pass noise=True"
        )
    output = torch.arange(problem.c, device=kernel.device).repeat(problem.n)[there]
    k, r = kernel[there][:, there], problem.residual.reshape(-1)[there]
    above = max(scale - least, least, torch.finfo(torch.float64).tiny)
    start = torch.full((problem.c + 1,), math.log(above), dtype=kernel.dtype, device=kernel.device)
    start[-1] = math.log(precision)
    found = _minimized(k, r, output, start, prior, least)
    scales = least + found[:-1].exp()
    warn_at_floor(least > 0 and bool((scales < NEAR * least).any()), system)
    return Gaussian(base * scales, likelihood.axis, likelihood.masked), float(found[-1].exp())


def _minimized(k: Tensor, r: Tensor, output: Tensor, start: Tensor, prior: bool, least: float) -> Tensor:
    """The log (s_c − floor) and log λ that minimize −log N(r; 0, K̃/λ + diag s_c)."""
    held = torch.ones_like(start)
    held[-1] = float(prior)

    def objective(values: Tensor) -> tuple[float, Tensor]:
        leaf = values.detach().requires_grad_()
        with torch.enable_grad():
            at = start + held * (leaf - start)
            total = k * (-at[-1]).exp() + (least + at[:-1].exp())[output].diag_embed()
            factor = torch.linalg.cholesky(total)
            z = torch.linalg.solve_triangular(factor, r[:, None], upper=False)
            loss: Tensor = 0.5 * (z**2).sum() + factor.diagonal().log().sum()
        (slope,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), slope

    values, *_ = minimize(objective, start, STEPS)
    return start + held * (values - start)
