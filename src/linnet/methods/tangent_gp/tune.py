"""Hyper-parameters of a tangent Gaussian process by marginal likelihood."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.methods.tangent_gp.dense import FunctionDense, System
from linnet.methods.tangent_gp.evidence import Measure

STEPS = 60  # of L-BFGS


def searched(
    measure: Measure, precision: float, scale: float, prior: bool, noise: bool | str
) -> tuple[float, float]:
    """The λ and s of highest evidence.

    Args:
        measure: The spectrum.
        precision: λ now.
        scale: s now.
        prior: Whether λ is free.
        noise: Whether s is free.

    Returns:
        λ and s.

    Raises:
        InputError: If neither is free, or a value is none of those listed.
    """
    if not isinstance(noise, bool) or not isinstance(prior, bool) or not (prior or noise):
        raise InputError(
            f"prior={prior!r}, noise={noise!r}",
            expected='True or False, not both False; noise may be "per-output"',
            remedy="gp.tune() tunes both",
        )
    if prior and noise:
        rho = measure.maximize(measure.best_scale)  # the best s of each ρ is q(ρ)/n
        best = measure.best_scale(rho)
        return rho / best, best
    if prior:
        return measure.maximize(lambda rho: scale) / scale, scale
    return precision, measure.maximize(lambda rho: rho / precision) / precision


def per_output(
    system: System, likelihood: Likelihood, precision: float, scale: float, prior: bool
) -> tuple[Gaussian, float]:
    """A noise variance for each output, and λ, of highest evidence, by L-BFGS on their logarithms.

    Args:
        system: The solved equations.
        likelihood: The likelihood now.
        precision: λ now.
        scale: s now.
        prior: Whether λ is free.

    Returns:
        The likelihood with its variances, and λ.

    Raises:
        InputError: If the likelihood or the space has no such thing.
    """
    if not isinstance(system, FunctionDense) or not isinstance(likelihood, Gaussian):
        raise InputError(
            'noise="per-output"',
            expected='a Gaussian likelihood, with space="function" and solver="cholesky"',
            remedy='pass noise=True for one scale, or make the process with space="function"',
        )
    task, kernel = system.task, system.dual.kernel
    there = task.weights.reshape(-1) > 0
    base = likelihood.noise.to(kernel).expand(task.c)  # σ², which K̃ is in units of
    if base.shape != (task.c,):
        raise InputError(
            'noise="per-output" with outputs at several positions', "outputs (N, C)", "pass noise=True"
        )
    output = torch.arange(task.c, device=kernel.device).repeat(task.n)[there]
    k, r = kernel[there][:, there], task.residual.reshape(-1)[there]
    start = torch.full((task.c + 1,), math.log(scale), dtype=kernel.dtype, device=kernel.device)
    start[-1] = math.log(precision)
    found = _minimized(k, r, output, start, prior)
    return Gaussian(base * found[:-1].exp(), likelihood.axis, likelihood.masked), float(found[-1].exp())


def _minimized(k: Tensor, r: Tensor, output: Tensor, start: Tensor, prior: bool) -> Tensor:
    """The log s_c and log λ that minimize −log N(r; 0, K̃/λ + diag s_c)."""
    values = start.clone().requires_grad_()
    held = torch.ones_like(start)
    held[-1] = float(prior)
    optimizer = torch.optim.LBFGS(
        [values], max_iter=STEPS, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            at = start + held * (values - start)
            total = k * (-at[-1]).exp() + at[:-1].exp()[output].diag_embed()
            factor = torch.linalg.cholesky(total)
            z = torch.linalg.solve_triangular(factor, r[:, None], upper=False)
            loss: Tensor = 0.5 * (z**2).sum() + factor.diagonal().log().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return (start + held * (values.detach() - start)).detach()
