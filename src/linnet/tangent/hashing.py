"""Fingerprints of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A SHA-256 of shapes, types and values."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{tuple(t.shape)}{t.dtype}".encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
