"""The base of all structures: sums over examples of terms quadratic in the gradients.

Every structure keeps a few tensors that add up over batches and over processes, and turns them into an
operator at the end. Because they add up, one capture of a batch serves all structures, an interrupted pass
can go on, processes can share the data, and old batches can be faded out.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer, as_found, layer_factors
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator
from linnet.number_types import wide_type
from linnet.tangent.rules import Captured, UseFactors, factors, outer_rows

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


# -- block -----------------------------------------------------------------------------------------
#
# Exact blocks of the Gauss-Newton matrix, Σ_n Σ_k (∂ u_nkᵀf / ∂θ)(∂ u_nkᵀf / ∂θ)ᵀ.
#
# The parameters of one layer give a block of the block-diagonal matrix, all parameters the full matrix.


class BlockSums(Sums):
    """Σ of outer products of the per-example gradients of a layer."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self.tensors = {
            "products": torch.zeros(layer.size, layer.size, dtype=wide_type(dtype), device=device)
        }

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        rows = layer_rows(gradients.captured, self.layer).flatten(0, 1)
        self.tensors["products"] += second_moment(rows.mT.to(self.tensors["products"].dtype))

    def block(self) -> Dense:
        """The matrix."""
        return Dense(self.tensors["products"], name=f"curvature of {self.layer.name}")


# -- diagonal --------------------------------------------------------------------------------------
#
# The exact diagonal of the Gauss-Newton matrix, Σ_n Σ_k (∂ u_nkᵀf / ∂θ)².
#
# A weight without sharing has the diagonal (Σ_k g_nk²)(a_n²)ᵀ summed over examples, one matrix product.
# With sharing the gradients Σ_s g_ns a_nsᵀ are formed, few examples at once. An embedding touches the
# rows that were looked up and no others.


class DiagonalSums(Sums):
    """Σ (per-example gradient)² of any layer, parameter after parameter."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self._by_rows = False  # whether the batch in hand has nothing but per-example gradients
        self.tensors = {"squares": torch.zeros(layer.size, dtype=wide_type(dtype), device=device)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        captured, squares = gradients.captured, self.tensors["squares"]
        if gradients.fresh:
            self._by_rows = self.layer.form.kind == "rows" or not as_found(captured, self.layer)
        if self._by_rows:
            squares += layer_rows(captured, self.layer).to(squares.dtype).square().sum((0, 1))
            return
        if self.layer.embedding:
            uses = captured.by_parameter().get(self.layer.names[0], [])
            if uses:
                found = [factors(use, captured.n) for use in uses]
                squares += _embedding_squares(found, self.layer.shapes[0]).flatten()
            return
        parts = layer_factors(captured, self.layer, keep=gradients.columns > captured.k)
        if parts:
            weight = squares[: torch.Size(self.layer.shapes[0]).numel()]
            weight += product_squares(parts, self.layer.shapes[0]).flatten()
            if self.layer.biased:
                # the gradient of a bias is Σ_s g_ns
                total = torch.stack([f.g.sum(3) for f in parts]).sum(0)  # (K, N, R, c)
                squares[len(weight) :] += total.square().sum((0, 1)).flatten()

    def block(self) -> Diagonal:
        """The diagonal."""
        return Diagonal(self.tensors["squares"], name=f"curvature of {self.layer.name}")


def product_squares(parts: list[UseFactors], shape: tuple[int, ...]) -> Tensor:
    """Σ_n Σ_k (Σ_s g_nks a_nsᵀ)² in the parameter's shape."""
    first = parts[0]
    if len(parts) == 1 and first.a.shape[2] == 1:
        # (Σ_k g²)ᵀ a²
        g = first.g[:, :, :, 0].square().sum(0)  # (N, R, c)
        product = torch.einsum("nrc,nrd->rcd", g, first.a[:, :, 0].square())
        return (product.mT if first.transposed else product).reshape(shape)
    total = first.g.new_zeros(shape)
    size = max(1, ROWS_AT_ONCE // max(1, first.g.shape[0] * total.numel()))
    for start in range(0, first.a.shape[0], size):
        total += _summed_rows(parts, slice(start, start + size), shape).flatten(0, 1).square_().sum(0)
    return total


def _summed_rows(parts: list[UseFactors], examples: slice, shape: tuple[int, ...]) -> Tensor:
    """Gradients of some examples over all uses, (n, K, *shape)."""
    rows = [
        outer_rows(UseFactors(f.a[examples], f.g[:, examples], f.transposed), torch.Size(shape))
        for f in parts
    ]
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)


def _embedding_squares(parts: list[UseFactors], shape: tuple[int, ...]) -> Tensor:
    """Σ_n Σ_k (Σ_{s: id_ns = v} g_nks)² for every row v of a table."""
    seen, sums = looked_up(parts, shape[0])
    return sums.new_zeros(shape).index_add_(0, seen % shape[0], sums.square().sum(0))


def looked_up(parts: list[UseFactors], rows: int) -> tuple[Tensor, Tensor]:
    """The gradients of an embedding table, example by example, in the rows that each has looked up."""
    ids = torch.cat([f.a[:, 0] for f in parts], 1)  # (N, S)
    g = torch.cat([f.g[:, :, 0] for f in parts], 2)  # (K, N, S, c)
    places = ids + rows * torch.arange(ids.shape[0], device=ids.device)[:, None]
    seen, which = places.unique(return_inverse=True)
    sums = g.new_zeros(g.shape[0], len(seen), g.shape[-1])
    return seen, sums.index_add_(1, which.flatten(), g.flatten(1, 2))


# -- totals ----------------------------------------------------------------------------------------
# Sums over many batches in float64 beside statistics in float32.


class Totals:
    """Totals of statistics in float64; after every batch the statistics are the totals, rounded once."""

    # A batch adds to empty statistics, so that each of its numbers is rounded as a sum of one batch is, and
    # not as a sum of all batches before it.

    def __init__(self, statistics: Mapping[str, Tensor]) -> None:
        self.statistics = dict(statistics)
        self.state = {
            name: t.double() if t.dtype == torch.float32 else t for name, t in self.statistics.items()
        }

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Statistics and their totals, where these are others."""
        pairs = zip(self.statistics.values(), self.state.values(), strict=True)
        return [(own, total) for own, total in pairs if own is not total]

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A batch is added to the statistics; one that fails changes no total."""
        for own, _ in self._pairs():
            own.zero_()
        try:
            yield
            for own, total in self._pairs():
                total.add_(own)
        finally:
            self.round()

    def round(self) -> None:
        """Make the statistics those of the totals."""
        for own, total in self._pairs():
            own.copy_(total)

    def fade(self, decay: float) -> None:
        """Multiply the totals by a number."""
        for own, total in self._pairs():
            own.copy_(total.mul_(decay))


def total_bytes(statistics: Mapping[str, Tensor]) -> int:
    """Bytes of the totals beside statistics."""
    return sum(2 * t.nbytes for t in statistics.values() if t.dtype == torch.float32)
