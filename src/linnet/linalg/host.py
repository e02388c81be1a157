"""Few waits for a device: many numbers read back at once, and small searches done by the processor itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 1 << 18  # numbers that the processor works through in less time than a device takes to be asked


def read(values: Sequence[Tensor]) -> list[float]:
    """Several numbers in one copy from the device, which has to finish what it was given only once."""
    if not values:
        return []
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in values))
    like = values[0].new_empty((), dtype=dtype)
    return [float(v) for v in torch.stack([v.detach().reshape(()).to(like) for v in values]).tolist()]


def searched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors where a search that reads each value is quickest: small ones on the processor."""
    small = sum(t.numel() for t in tensors) <= SMALL
    return tuple(t.cpu() for t in tensors) if small else tensors
