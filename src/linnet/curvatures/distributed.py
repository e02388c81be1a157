"""Sums over the processes that share the data; a process by itself has nothing to add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def world() -> tuple[int, int]:
    """This process among those of ``torch.distributed``.

    Returns:
        Its rank and their number; ``(0, 1)`` where no process group was started.

    Example:
        >>> world()
        (0, 1)
    """
    if not _started():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def all_sum(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, which must all call this with equal shapes.

    Args:
        tensors: What to add up, in place.

    Example:
        >>> counts = torch.ones(2)
        >>> all_sum([counts])
        >>> counts
        tensor([1., 1.])
    """
    if world()[1] == 1:
        return
    for tensor in tensors:
        whole = tensor.contiguous()
        torch.distributed.all_reduce(whole)
        if whole is not tensor:
            tensor.copy_(whole)


def _started() -> bool:
    """Whether a process group exists; some builds of torch have none."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
