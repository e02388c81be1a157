"""Influence on the loss, to first order: one number for each training and each test example.

    ∇ℓ(x)·(δ − δ₋ᵢ),   ∇ℓ = J(x)ᵀ(f(x) − t)

is what influence functions estimate (Koh and Liang, ICML 2017), with the weight change itself in place of an
approximation. It takes one gradient of each test example instead of C, and one product with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.audit.influence import (
    changes_fit,
    checked_directions,
    every_change,
    label_targets,
    left_out_columns,
    unconstrained,
)
from linnet.audit.predictors import check_fit
from linnet.fitting.arguments import checked_inputs
from linnet.fitting.linear_fit import LinearFit
from linnet.linear.formed_rows import FormedRows
from linnet.linear.kernel_system import KernelSystem
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.capture import capture
from linnet.tangent.functional import Functional
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import require_finite_products

TOGETHER = 64  # test examples differentiated at once


@in_exact_mode
@torch.no_grad()
def loss_influence(
    fit: LinearFit,
    x: Inputs,
    labels: Any,
    directions: Tensor | None = None,
    memory: str | int | None = None,
) -> Tensor:
    """The derivative of each test example's loss along the weight change due to each training example.

    Of a dual fit it takes one product of the T gradients with the N·C rows of J, or with the weight changes
    where they are known or T is larger than N; of a primal fit T right-hand sides, solved together.

    Args:
        fit: A linear fit without constraints.
        x: T examples.
        labels: Their classes (T,) or targets (T, C).
        directions: δ − δ₋ᵢ of all training examples, (N, P), from :func:`linnet.audit.weight_changes`.
        memory: Budget; by default half of what is available.

    Returns:
        (N, T): to first order, ½‖t − f(x)‖² with training example i less without it. Negative where it
        helped.

    Raises:
        DataError: If x is empty or not finite, or labels are out of range.
        InputError: If the fit has constraints or the directions are of another fit.

    Source:
        Koh and Liang, ICML 2017; Achille et al., CVPR 2021, eq. (7).

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(6, 2), torch.arange(6) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> loss_influence(fit, x[:3], y[:3]).shape
        torch.Size([6, 3])
    """
    fit = check_fit(fit)
    unconstrained(fit, "loss_influence")
    x = checked_inputs(fit.module, x)
    function = fit.module.function
    gradients = _gradients(function, x, fit.predict(x) - label_targets(fit, x, labels))
    if directions is not None:
        found = checked_directions(fit, directions) @ gradients.T
    else:
        found = _through_system(fit, gradients, memory)
    require_finite_products(function, x, found.T)
    return found


def _through_system(fit: LinearFit, gradients: Tensor, memory: str | int | None) -> Tensor:
    """The influences on losses with gradients (T, P), by the solved equations."""
    function, system = fit.module.function, fit.system
    dual = system.factorized.dual if isinstance(system.factorized, KernelSystem) else None
    if dual is not None and _through_changes(fit, len(gradients), memory):
        return every_change(fit, memory) @ gradients.T
    if dual is not None:
        formed = FormedRows(function, fit.x, system.c, memory, keep=False)
        cross = torch.cat([gradients @ rows.T for _, rows in formed], 1)  # ∇ℓᵀ Jᵀ, (T, N·C)
        index = torch.arange(fit.n, device=function.device)
        # by the columns M_·i eᵢ of all examples
        return (cross.double() @ left_out_columns(dual, index)).T.to(function.dtype)
    residuals = system.loo_residuals()
    size = max(1, parse_bytes(memory, function.device) // (20 * function.space.dim * function.dtype.itemsize))
    found = []
    for part in gradients.split(size):
        solved = system.solve(part.T.contiguous())
        pieces = [
            torch.einsum(
                "nct,nc->nt",
                (rows.to(solved) @ solved).view(-1, system.c, len(part)),
                residuals[place].to(solved),
            )
            for place, rows in system.own_rows()
        ]
        found.append(torch.cat(pieces))
    return torch.cat(found, 1).to(function.dtype)


def _through_changes(fit: LinearFit, tests: int, memory: str | int | None) -> bool:
    """Whether the weight changes, once formed, take fewer operations than T products with all rows of J."""
    n, rows = fit.n, fit.n * fit.system.c
    # T·(N·C)·P against N·(N·C)·P + T·N·P
    return tests * rows > n * rows + tests * n and changes_fit(fit, memory)


def _gradients(function: Functional, x: Inputs, cotangents: Tensor) -> Tensor:
    """J(x)ᵀu for each example, (T, P)."""
    t = batch_size(x)
    out = torch.empty(t, function.space.dim, dtype=function.dtype, device=function.device)
    start = 0
    for part in split(x, TOGETHER):
        n = batch_size(part)
        captured = capture(function, part, cotangents[None, start : start + n])
        for name, place in function.space.slices.items():
            out[start : start + n, place] = captured.rows(name).reshape(n, -1)
        start += n
    return out
