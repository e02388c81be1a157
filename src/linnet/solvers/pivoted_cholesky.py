"""The partial Cholesky factor of a kernel, its rows chosen greedily (Harbrecht, Peters, Schneider 2012)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.params import integer


def pivoted_cholesky(
    diagonal: Tensor, row: Callable[[int], Tensor], rank: int, tolerance: float = 0.0
) -> Tensor:
    """L with L Lᵀ ≈ K, from the diagonal of K and ``rank`` of its rows, (n, r)."""
    # diagonal (n,), row (n,)
    # Each step takes the row whose diagonal entry is the least explained.
    #
    # Source: Gardner et al. 2018, section 4.1, use it as the preconditioner (L Lᵀ + σ²I)⁻¹ of a Gaussian
    # process.
    rank = integer("rank", rank)
    if not bool((diagonal >= 0).all()):
        raise InputError("the diagonal has a negative entry", "that of a kernel", "check that K is symmetric")
    left = diagonal.double().clone()
    total = float(left.sum())
    factor = left.new_zeros(len(left), min(rank, len(left)))
    rounding = 100 * torch.finfo(diagonal.dtype).eps * float(left.max()) if len(left) else 0.0
    for k in range(factor.shape[1]):
        pivot = int(left.argmax())
        if float(left[pivot]) <= rounding or float(left.sum()) <= tolerance * total:
            return factor[:, :k]
        # column k of L: what is left of row i, over the root of its pivot
        column = row(pivot).double() - factor[:, :k] @ factor[pivot, :k]
        factor[:, k] = column / left[pivot].sqrt()
        left = (left - factor[:, k] ** 2).clamp_min(0)
        left[pivot] = 0
    return factor
