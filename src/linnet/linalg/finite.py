"""Checks that tensors are finite, in one pass."""

from __future__ import annotations

from torch import Tensor


def is_finite(t: Tensor) -> bool:
    """Whether all entries are finite."""
    # A sum is finite only if all its terms are, and needs one pass and no memory. One that overflows says
    # nothing: then the terms are looked at.
    if not (t.is_floating_point() or t.is_complex()):
        return True
    t = t.detach()
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())


def lies_within(t: Tensor, low: float, high: float) -> bool:
    """Whether all entries are in [low, high]; NaN is not."""
    if t.numel() == 0:
        return True
    least, largest = t.detach().aminmax()  # NaN if any entry is
    return low <= float(least) and float(largest) <= high
