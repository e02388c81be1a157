"""The joint posterior covariance of the outputs of several examples."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.fitting.constraints import conditioned_gram, conditioned_own
from linnet.fitting.dual import DualSystem
from linnet.fitting.linear_fit import LinearFit
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.jacobian import jacobian

TOGETHER = 8  # examples whose rows of J are formed at once


def joint_covariance(fit: LinearFit, x1: Inputs, x2: Inputs | None = None) -> Tensor:
    """Cov[f(x1), f(x2)] · ρ/σ²: with noise ρ on a new target, everything else is scale-free.

    Args:
        fit: The fit.
        x1: N examples.
        x2: M examples; by default x1.

    Returns:
        (N·C, M·C), float64.

    Raises:
        MemoryBudgetError: If it does not fit the fit's budget.
    """
    other = x1 if x2 is None else x2
    n, m, c = batch_size(x1), batch_size(other), fit.system.c
    function = fit.module.function
    size = 8 * n * m * c * c
    items = [("covariance", size), ("kernel", size)]
    if isinstance(fit.system, DualSystem):
        items.append(("kernels to the training data", 3 * 8 * (n + m) * c * fit.n * c))
    plan = Plan(
        f"joint covariance of {n} and {m} examples", parse_bytes(fit.memory, function.device), tuple(items)
    )
    require(plan, ["use fewer examples in the pool", "name the examples that count with at="])
    if not isinstance(fit.system, DualSystem):
        blocks = []
        for part in split(other, TOGETHER):
            rows = jacobian(function, part).flatten(0, 1)
            solved = fit.system.solve(rows.T)
            blocks.append(
                torch.cat([jacobian(function, p).flatten(0, 1) @ solved for p in split(x1, TOGETHER)])
            )
        return fit.ridge * torch.cat(blocks, 1).double()
    kernel = conditioned_gram(function, fit.constraints, x1, x2, fit.memory).double()
    first = conditioned_gram(function, fit.constraints, x1, fit.x, fit.memory, design_of(fit)).double()
    second = first
    if x2 is not None:
        second = conditioned_gram(function, fit.constraints, x2, fit.x, fit.memory, design_of(fit)).double()
    explained = fit.system.cross(second).reshape(m * c, -1)
    found = kernel.reshape(n * c, m * c) - first.reshape(n * c, -1) @ explained.T
    return (found + found.T) / 2 if x2 is None else found


def own_covariances(fit: LinearFit, x: Inputs) -> Tensor:
    """Cov[f(x_i)] · ρ/σ², (T, C, C), float64."""
    if not isinstance(fit.system, DualSystem):
        return fit.ridge * fit.system.posterior(x).double()
    found = []
    function = fit.module.function
    for part in split(x, 64):
        cross = conditioned_gram(function, fit.constraints, part, fit.x, fit.memory, design_of(fit)).double()
        explained = torch.einsum("tcnd,tend->tce", fit.system.cross(cross), cross)
        found.append(conditioned_own(function, fit.constraints, part, fit.memory).double() - explained)
    every = torch.cat(found)
    return (every + every.mT) / 2


def design_of(fit: LinearFit) -> Tensor | None:
    """G(X) of the fit's equations, if it has any."""
    return None if fit.constraints is None else fit.constraints.design
