"""Fingerprints of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from linnet.tangent.batch import Inputs, on_device, split, tensors_in

PIECE = 1 << 24  # bytes that are brought into one place at once


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A SHA-256 of shapes, types and values."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{tuple(t.shape)}{t.dtype}".encode())
        rows = max(1, PIECE // max(1, t[:1].nbytes)) if t.ndim else 1
        for part in t.detach().split(rows) if t.ndim else (t.detach(),):
            plain = part.cpu().contiguous()  # one element of many keeps their stride, though it is contiguous
            digest.update(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_examples(x: Inputs) -> list[str]:
    """A fingerprint of every example."""
    x = on_device(x, torch.device("cpu"))  # in one copy, not one an example
    return [hash_tensors(tensors_in(part)) for part in split(x, 1)]
