"""Sums over the processes of torch.distributed; one process by itself is world size 1."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_sum(tensors: Iterable[Tensor]) -> None:
    """Add up tensors over all processes, in place."""
    if world()[1] > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)
