"""Fused operations on parameter-sized vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_finite(v: Tensor) -> bool:
    """Whether all entries are finite; a finite norm says so in one pass.

    Args:
        v: A vector.

    Returns:
        Whether they are.

    Example:
        >>> is_finite(torch.tensor([1.0, 3e38, 3e38])), is_finite(torch.tensor([1.0, torch.nan]))
        (True, False)
    """
    return bool(v.norm().isfinite()) or bool(v.isfinite().all())


def norm_of(v: Tensor) -> float:
    """‖v‖, in float32 or wider.

    Args:
        v: A vector.

    Returns:
        The norm.

    Example:
        >>> norm_of(torch.tensor([3.0, 4.0]))
        5.0
    """
    return float(v.to(torch.promote_types(v.dtype, torch.float32)).norm())


def remember(state: dict[str, Any], key: str, value: Tensor) -> None:
    """Keep a copy where the last one was: large memory is costly to come by.

    Args:
        state: What is kept with a parameter.
        key: Under which name.
        value: What is copied.

    Example:
        >>> state = {}
        >>> remember(state, "before", torch.ones(2))
        >>> state
        {'before': tensor([1., 1.])}
    """
    kept = state.get(key)
    if kept is None:
        state[key] = value.clone()
    else:
        kept.copy_(value)


def put(parameters: Sequence[Tensor], values: Sequence[Tensor], add: bool = False) -> None:
    """Change weights, also for a loss that is measured next under the same autocast.

    Args:
        parameters: The weights.
        values: What they become.
        add: Whether the values are added to them.

    Example:
        >>> weight = torch.ones(2)
        >>> put([weight], [torch.full((2,), 3.0)], add=True)
        >>> weight
        tensor([4., 4.])
    """
    for p, value in zip(parameters, values, strict=True):
        p.add_(value) if add else p.copy_(value)
    torch.clear_autocast_cache()  # it holds cast copies of the weights of before
