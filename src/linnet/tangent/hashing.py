"""Fingerprints of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from linnet.tangent.batch import Inputs, on_device, split, tensors_in


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A SHA-256 of shapes, types and values."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{tuple(t.shape)}{t.dtype}".encode())
        # a copy of one element in a tensor of many keeps their stride, unless it is told otherwise
        plain = t.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_examples(x: Inputs) -> list[str]:
    """A fingerprint of every example.

    Args:
        x: N examples.

    Returns:
        N fingerprints, equal for examples of equal values.
    """
    x = on_device(x, torch.device("cpu"))  # in one copy, not one an example
    return [hash_tensors(tensors_in(part)) for part in split(x, 1)]
