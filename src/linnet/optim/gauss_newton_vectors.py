"""Fused operations on parameter-sized vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_finite(v: Tensor) -> bool:
    """Whether all entries are finite; a finite norm says so in one pass."""
    return bool(v.norm().isfinite()) or bool(v.isfinite().all())


def norm_of(v: Tensor) -> float:
    """‖v‖, in float32 or wider."""
    return float(v.to(torch.promote_types(v.dtype, torch.float32)).norm())


def remember(state: dict[str, Any], key: str, value: Tensor) -> None:
    """Keep a copy where the last one was: large memory is costly to come by."""
    kept = state.get(key)
    if kept is None:
        state[key] = value.clone()
    else:
        kept.copy_(value)


def put(parameters: Sequence[Tensor], values: Sequence[Tensor], add: bool = False) -> None:
    """Change weights, also for a loss that is measured next under the same autocast."""
    for p, value in zip(parameters, values, strict=True):
        p.add_(value) if add else p.copy_(value)
    torch.clear_autocast_cache()  # it holds cast copies of the weights of before
