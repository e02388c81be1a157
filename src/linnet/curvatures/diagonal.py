"""The exact diagonal of the Gauss-Newton matrix, Σ_n Σ_k (∂ u_nkᵀf / ∂θ)².

A weight without sharing has the diagonal (Σ_k g_nk²)(a_n²)ᵀ summed over examples, one matrix product. With
sharing the gradients Σ_s g_ns a_nsᵀ are formed, few examples at once. An embedding touches the rows that
were looked up and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer, as_found, layer_factors
from linnet.curvatures.sums import ROWS_AT_ONCE, Gradients, Sums, layer_rows, wide
from linnet.linalg.structured import Diagonal
from linnet.tangent.rules import Factors, factors, outer_rows


class DiagonalSums(Sums):
    """Σ (per-example gradient)² of any layer, parameter after parameter."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self._by_rows = False  # whether the batch in hand has nothing but per-example gradients
        self.tensors = {"squares": torch.zeros(layer.size, dtype=wide(dtype), device=device)}

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


def product_squares(parts: list[Factors], shape: tuple[int, ...]) -> Tensor:
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


def _summed_rows(parts: list[Factors], examples: slice, shape: tuple[int, ...]) -> Tensor:
    """Gradients of some examples over all uses, (n, K, *shape)."""
    rows = [
        outer_rows(Factors(f.a[examples], f.g[:, examples], f.transposed), torch.Size(shape)) for f in parts
    ]
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)


def _embedding_squares(parts: list[Factors], shape: tuple[int, ...]) -> Tensor:
    """Σ_n Σ_k (Σ_{s: id_ns = v} g_nks)² for every row v of a table."""
    seen, sums = looked_up(parts, shape[0])
    return sums.new_zeros(shape).index_add_(0, seen % shape[0], sums.square().sum(0))


def looked_up(parts: list[Factors], rows: int) -> tuple[Tensor, Tensor]:
    """The gradients of an embedding table, example by example, in the rows that each has looked up."""
    ids = torch.cat([f.a[:, 0] for f in parts], 1)  # (N, S)
    g = torch.cat([f.g[:, :, 0] for f in parts], 2)  # (K, N, S, c)
    places = ids + rows * torch.arange(ids.shape[0], device=ids.device)[:, None]
    seen, which = places.unique(return_inverse=True)
    sums = g.new_zeros(g.shape[0], len(seen), g.shape[-1])
    return seen, sums.index_add_(1, which.flatten(), g.flatten(1, 2))
