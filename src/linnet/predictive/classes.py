"""Class probabilities in one layout."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import InputError

_SURE = 1e-3  # how far the probabilities of an example may sum from one


def exclusive(p: Tensor) -> Tensor:
    """Probabilities of classes that exclude each other, a row per example, (N, C)."""
    if p.ndim == 2 and p.shape[1] == 1:
        p = torch.cat([1 - p, p], 1)
    if p.ndim != 2 or bool(((p.sum(1) - 1).abs() > _SURE).any()):
        raise InputError(
            f"probabilities of shape {tuple(p.shape)}",
            expected="one class for each example: (N, C), each row with the sum one",
            remedy="take the positions of an example as examples, or score them with linnet.evaluate",
        )
    return p
