"""Checks that tensors are finite, in one pass."""

from __future__ import annotations

from torch import Tensor


def is_finite(t: Tensor) -> bool:
    """Whether all entries are finite.

    A sum is finite only if all its terms are, and needs one pass and no memory. One that overflows says
    nothing: then the terms are looked at.

    Args:
        t: Any tensor.

    Returns:
        Whether they are.

    Example:
        >>> import torch
        >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, torch.inf]))
        (True, False)
    """
    if not (t.is_floating_point() or t.is_complex()):
        return True
    t = t.detach()
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())


def lies_within(t: Tensor, low: float, high: float) -> bool:
    """Whether all entries are in [low, high]; NaN is not.

    Args:
        t: A real tensor.
        low: Least value.
        high: Largest value.

    Returns:
        Whether they are.

    Example:
        >>> import torch
        >>> lies_within(torch.tensor([0.0, 1.0]), 0, 1), lies_within(torch.tensor([0.0, torch.nan]), 0, 1)
        (True, False)
    """
    if t.numel() == 0:
        return True
    least, largest = t.detach().aminmax()  # NaN if any entry is
    return low <= float(least) and float(largest) <= high
