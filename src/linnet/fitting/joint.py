"""The joint posterior covariance of the outputs of several examples."""

from __future__ import annotations

from torch import Tensor

from linnet.fitting.linear_fit import LinearFit
from linnet.linear.kernel_system import KernelSystem
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size


def joint_covariance(fit: LinearFit, x1: Inputs, x2: Inputs | None = None) -> Tensor:
    """Cov[f(x1), f(x2)] · ρ/σ²: with noise ρ on a new target, everything else is scale-free, (N·C, M·C)."""
    n, m, c = batch_size(x1), batch_size(x1 if x2 is None else x2), fit.system.c
    size = 8 * n * m * c * c
    items = [("covariance", size), ("kernel", size)]
    if isinstance(fit.system, KernelSystem):
        items.append(("kernels to the training data", 3 * 8 * (n + m) * c * fit.n * c))
    budget = parse_bytes(fit.memory, fit.module.function.device)
    plan = Plan(f"joint covariance of {n} and {m} examples", budget, tuple(items))
    require(plan, ["use fewer examples in the pool", "name the examples that count with at="])
    if x2 is not None:
        return fit.system.between(x1, x2).reshape(n * c, m * c)
    found = fit.system.covariance(x1, joint=True).double().reshape(n * c, n * c)
    return (found + found.T) / 2


def own_covariances(fit: LinearFit, x: Inputs) -> Tensor:
    """Cov[f(x_i)] · ρ/σ², (T, C, C), float64."""
    found = fit.system.covariance(x).double()
    return (found + found.mT) / 2
