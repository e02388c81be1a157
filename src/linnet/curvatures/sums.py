"""The base of all structures: sums over examples of terms quadratic in the gradients.

Every structure keeps a few tensors that add up over batches and over processes, and turns them into an
operator at the end. Because they add up, one capture of a batch serves all structures, an interrupted pass
can go on, processes can share the data, and old batches can be faded out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer
from linnet.linalg.structured import StructuredOperator
from linnet.tangent.rules import Captured

BLOCK = 128  # rows at once in a product that is symmetric: the half above the diagonal is not computed
NARROW = 32  # the same for long products on a CPU, of which each is worth its call
LONG = 2048  # terms of such a product
ROWS_AT_ONCE = 1 << 22  # numbers in the per-example gradients of a layer that are formed at once


@dataclass(frozen=True, eq=False)
class Gradients:
    """A captured batch with the cotangents of one expectation."""

    captured: Captured  # inputs a and gradients g of every use; the K cotangents satisfy Σ_k u uᵀ = Λ
    # whether these are the first columns of the batch: what depends on the inputs alone is added then, and
    # only then
    fresh: bool = True
    last: bool = True  # whether these are the last columns of the batch
    counts: Tensor | None = None  # which output positions count, (N, T); ``None`` if all do
    tokens: Tensor | None = None  # which positions of the inputs are no padding, (N, T); ``None`` if all are
    columns: int = 1  # columns of the batch in all, of which these are some
    # what several layers compute alike from the same inputs, by what it depends on
    shared: dict[Any, Any] = field(default_factory=dict)


class Sums(ABC):
    """The additive statistics of one structure for one layer."""

    layer: Layer  # the layer
    tensors: dict[str, Tensor]  # what adds up, by name

    @abstractmethod
    def add(self, gradients: Gradients) -> None:
        """Add a batch."""

    @abstractmethod
    def block(self) -> StructuredOperator:
        """The layer's part of the curvature, summed over what was added."""

    @property
    def terms(self) -> float | None:
        """Number of inputs that a factor of the block is the mean of, or None."""
        return None

    def fade(self, decay: float) -> None:
        """Multiply everything by a number, so that older batches count less; counts fade as well."""
        for tensor in self.tensors.values():
            tensor.mul_(decay)


def second_moment(x: Tensor) -> Tensor:
    """X Xᵀ, computing one half of it, (..., d, d)."""
    # x (..., d, M)
    if x.ndim > 2 and x.shape[:-2].numel() == 1:  # a batch of one is multiplied more slowly than a matrix
        return second_moment(x.reshape(x.shape[-2:])).view(*x.shape[:-1], x.shape[-2])
    d, terms = x.shape[-2:]
    block = min(max(d // 8, NARROW), BLOCK) if terms >= LONG and x.device.type == "cpu" else BLOCK
    if d <= block:
        product = x @ x.mT
        return (product + product.mT).mul_(0.5)
    result = x.new_empty(*x.shape[:-1], d)
    for start in range(0, d, block):
        rows = x[..., start : start + block, :]
        stop = start + rows.shape[-2]
        product = rows @ x[..., :stop, :].mT
        own = product[..., start:]
        product[..., start:] = (own + own.mT) / 2
        result[..., start:stop, :stop] = product
        result[..., :start, start:stop] = product[..., :start].mT
    return result


def layer_rows(captured: Captured, layer: Layer) -> Tensor:
    """Per-example gradients of a layer, parameter after parameter, (N, K, size)."""
    parts = [captured.rows(name).reshape(captured.n, captured.k, -1) for name in layer.names]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)
