"""A few random combinations of a network's outputs, whose kernel stands for that of all of them.

With V (C, M) of orthonormal columns and J_m the derivatives of the combination v_mᵀ f,

    K̄(x, x') = 1/M Σ_m J_m(x) J_m(x')ᵀ = 1/M tr Vᵀ K(x, x') V

which for M = C is the mean of the kernel's diagonal blocks, and for fewer its estimate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import MemoryBudgetError
from linnet.linear.features import Heads
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import Functional, OutputAdapter, adapt_outputs
from linnet.tangent.gram import own_kernels

SHOWN = 64  # examples whose own blocks of the kernel are compared with the shared one


def drawn_combinations(outputs: int, count: int, seed: int) -> Tensor:
    """Random orthonormal combinations of outputs, uniform; all outputs where there are as many."""
    if count >= outputs:
        return torch.eye(outputs, dtype=torch.float64)
    draws = torch.randn(outputs, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    combinations: Tensor = torch.linalg.qr(draws).Q
    return combinations


class _Combined:
    """The outputs of a network times V."""

    def __init__(self, output: OutputAdapter, weights: Tensor) -> None:
        self.output, self.weights = output, weights

    def __call__(self, result: object) -> Tensor:
        value = adapt_outputs(result, self.output)
        return value.flatten(1) @ self.weights.to(value)


def combined(function: Functional, weights: Tensor) -> Functional:
    """A network whose outputs are combinations of another's; it shares the weights."""
    # weights (C, M)
    if weights.shape[0] == weights.shape[1]:
        return function
    return function.arranged(_Combined(function.output, weights.to(function.device, function.dtype)))


def averaged(function: Functional, combinations: Tensor) -> Heads:
    """The kernel that all outputs share: the mean of those of M combinations of them."""
    # combinations (C, M)
    return Heads(combined(function, combinations), combinations.shape[1], combinations)


def explain_outputs(function: Functional, x: Inputs, weights: Tensor, memory: str | int | None) -> str:
    """How far the blocks of the kernel are from the shared one, in one sentence."""
    # weights (C, M)
    c, m = weights.shape
    of = f"from all {c}" if m == c else f"from {m} random combination{'s' if m > 1 else ''}"
    said = f"one kernel for {c} output{'s' if c > 1 else ''}, {of}"
    n = batch_size(x)
    few = take(x, (torch.arange(min(n, SHOWN)) * n) // min(n, SHOWN))
    try:
        own = own_kernels(function, few, memory).double()
    except MemoryBudgetError:
        return f"{said}; not compared with the blocks of each output, which exceed the memory"
    v = weights.to(own)
    shared = torch.einsum("ca,ncd,da->n", v, own, v) / m
    eye = torch.eye(c, dtype=own.dtype, device=own.device)
    error = float((own - shared[:, None, None] * eye).norm() / own.norm().clamp_min(1e-300))
    count = f"{len(own)} example{'s' if len(own) > 1 else ''}"
    return f"{said}; the blocks K(x, x) of {count} differ from k(x, x) I by {100 * error:.0f} % of their norm"
