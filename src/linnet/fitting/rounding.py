"""Rounding errors of a network's outputs and kernel, assumed or measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from linnet.errors import MemoryBudgetError, ModelError, ProcessGroupError
from linnet.memory import parse_bytes
from linnet.number_types import Precision
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import Functional, tensors_by_name
from linnet.tangent.gram import gram

ASSUMED = 16.0  # units of roundoff of a kernel's entry, several times what networks show
PROBED = 4  # examples that are computed in float64 as well


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of a network."""

    kernel: float  # relative error of an entry of the kernel, root mean square
    outputs: float  # error of an output f₀, root mean square
    dtype: torch.dtype  # type in which it is computed
    base: float  # largest output f₀


def assumed_rounding(function: Functional, base: float) -> Rounding:
    """Rounding errors larger than those of most networks."""
    outputs = Precision().eps(function.dtype, function.device)
    kernel = function.precision.eps(function.dtype, function.device)
    return Rounding(ASSUMED * kernel, ASSUMED * outputs * base, function.dtype, base)


@torch.no_grad()
def measured_rounding(
    function: Functional, x: Inputs, base: float, memory: str | int | None = None, count: int = PROBED
) -> Rounding:
    """Rounding errors of a network on a few examples, by computing them in float64 as well."""
    # Kernels are those of the types of `linnet.precision` that the network has.
    low, types = function.source if function.source is not None else function, function.precision
    if low.dtype == torch.float64 and not types.coarser(low.dtype):
        return assumed_rounding(function, base)
    budget = parse_bytes(memory, low.device)
    copies = 3 * sum(t.nbytes for t in tensors_by_name(low.model).values())  # the network, and in float64
    if copies > budget // 2:
        return assumed_rounding(function, base)
    n = batch_size(x)
    # as many whose kernels and their difference, six matrices in float64, take an eighth of the budget
    fitting = math.isqrt(budget // (8 * 6 * 8)) // low.output_shape(x).numel()
    count = max(1, min(count, fitting))
    few = take(x, torch.arange(min(n, count)) * (n // min(n, count)))
    try:
        high = low.in_float64()
        right = gram(high, few, memory=budget // 2)
        near = gram(low.under(types), few, memory=budget // 2)
        size = right.shape[0] * right.shape[1]
        f = high.flat(high.theta, few).double() - low.flat(low.theta, few).double()
    except ProcessGroupError:  # the other processes have it as well
        raise
    except (ModelError, MemoryBudgetError, RuntimeError, TypeError):
        return assumed_rounding(function, base)
    right, near = right.reshape(size, size).double(), near.reshape(size, size).double()
    root = right.diagonal().clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    relative = ((near - right) / (root[:, None] * root)).square().mean().sqrt()
    eps = torch.finfo(low.dtype).eps
    finer = torch.finfo(function.dtype).eps / eps
    kernel, outputs = max(float(relative), eps / 4), max(float(f.square().mean().sqrt()), eps / 4 * base)
    return Rounding(kernel * finer, outputs * finer, function.dtype, base)
