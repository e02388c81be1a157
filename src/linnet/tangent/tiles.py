"""Tiles of the tangent kernel: the order in which they are computed, and one from features of two batches.

Numbers that are kept in bfloat16 are multiplied exactly and summed in float32: the product of two of them
fits into float32. Torch's own product of bfloat16 matrices would be rounded to bfloat16 at its end.

Index letters: n, m examples; k, l outputs; s, t positions; r groups; c, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.distributed import owners
from linnet.number_types import wide_type
from linnet.tangent.features import FactoredWeight, KernelFeatures
from linnet.tangent.rules import Form

Range = tuple[int, int]  # first example, last + 1


@dataclass(frozen=True)
class TileSizes:
    """Numbers of examples taken at once."""

    hold: int  # those whose features stay in memory
    product: int  # those on each side of a matrix product
    capture: int  # those that are differentiated
    columns: int  # cotangents of those that are


@dataclass(frozen=True)
class TileStep:
    """A part of the products of one stationary block of rows; ranges are (first, last + 1) example."""

    rows: Range  # the block that stays from step to step
    own: Range | None  # those of its rows that are multiplied with the block itself, or ``None``
    columns: Range | None  # examples that stream past the block, or ``None``

    @property
    def area(self) -> int:
        """Pairs of examples that are multiplied, about."""
        if self.own is not None:
            return (self.own[1] - self.own[0]) * (self.rows[1] - self.own[0])
        assert self.columns is not None
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    @property
    def region(self) -> tuple[Range, Range]:
        """Rows and columns of the matrix that are computed, their mirror image apart."""
        if self.own is not None:
            return self.own, (self.own[0], self.rows[1])
        assert self.columns is not None
        return self.rows, self.columns

    @property
    def key(self) -> str:
        """A name for the record of finished steps."""
        return f"{self.rows}-{self.own}-{self.columns}"


def tile_steps(n: int, m: int, symmetric: bool, sizes: TileSizes) -> list[TileStep]:
    """The work in order: block after block, first with itself, then with the columns that are left."""
    steps = []
    for rows in ranges(0, n, sizes.hold):
        own = ranges(*rows, sizes.product) if symmetric else []
        columns = ranges(rows[1] if symmetric else 0, m, sizes.capture)
        steps += [TileStep(rows, part, None) for part in own]
        steps += [TileStep(rows, None, part) for part in columns]
    return steps


def dealt(steps: Sequence[TileStep], parts: int) -> list[list[TileStep]]:
    """Steps of one block in parts of about equal work: the largest first, each to the part that has least."""
    found: list[list[TileStep]] = [[] for _ in range(parts)]
    for step, owner in zip(steps, owners([step.area for step in steps], parts), strict=True):
        found[owner].append(step)
    return found


def run_of(steps: Sequence[TileStep], index: int, parts: int) -> list[TileStep]:
    """One of several consecutive runs of steps, with about equal work, so that each has few blocks."""
    total, found, done = sum(step.area for step in steps), [], 0
    for step in steps:  # a step belongs to the run that its middle lies in
        if (2 * done + step.area) * parts // (2 * max(total, 1)) == index:
            found.append(step)
        done += step.area
    return found


def captured_examples(n: int, m: int, symmetric: bool, hold: int) -> int:
    """The number of examples differentiated in these steps, with repetitions."""
    blocks = -(-n // hold)
    return sum(n - i * hold for i in range(blocks)) if symmetric else n + blocks * m


def ranges(start: int, stop: int, size: int) -> list[Range]:
    """[start, stop) in pieces of at most ``size``."""
    return [(i, min(i + size, stop)) for i in range(start, stop, size)]


CHUNK = 4096  # columns summed in the rows' own precision, at least float32, before they are added in another
WIDENING = hasattr(torch.ops.aten.bmm, "dtype")  # products of halves in float32, on NVIDIA's processors alone


def kernel_tile(
    left: KernelFeatures, right: KernelFeatures, form: Form, accumulate: torch.dtype | None = None
) -> Tensor:
    """K between two batches."""
    total = _rows_tile(left.rows, right.rows, form, accumulate)
    for name, layer in left.layers.items():
        _add_layer(total, layer, right.layers[name], form)
    return total


def own_tile(features: KernelFeatures, accumulate: torch.dtype | None = None) -> Tensor:
    """K of every example with itself, (N, K, K)."""
    total = _product(features.rows, features.rows, accumulate)
    for i in range(features.n if features.layers else 0):
        own = features.part(i, i + 1)
        for layer in own.layers.values():
            _add_layer(total[i].view(1, own.k, 1, own.k), layer, layer, "full")
    return total


def own_traces(features: KernelFeatures) -> Tensor:
    """The trace of K of every example with itself, (N,); no K is formed."""
    total = features.rows.to(wide_type(features.rows.dtype)).square().sum((1, 2))
    for i in range(features.n if features.layers else 0):
        own = features.part(i, i + 1)
        for layer in own.layers.values():
            _add_layer(total[i].view(1, 1), layer, layer, "trace")
    return total


def _rows_tile(left: Tensor, right: Tensor, form: Form, accumulate: torch.dtype | None) -> Tensor:
    """Products of gradients that were formed: (N, K, Q) and (M, K, Q)."""
    n, k, q = left.shape
    m = right.shape[0]
    if form == "diagonal":
        product = _product(left.transpose(0, 1), right.transpose(0, 1), accumulate)  # (K, N, M)
        return product.permute(1, 2, 0).contiguous()
    if form == "trace":  # Σ_k J₁[n,k]·J₂[m,k]: outputs join the sum
        return _product(left.reshape(n, k * q), right.reshape(m, k * q), accumulate)
    full = _product(left.reshape(n * k, q), right.reshape(m * k, q), accumulate)
    return full.view(n, m) if form == "sum" else full.view(n, k, m, k)


def _product(left: Tensor, right: Tensor, accumulate: torch.dtype | None) -> Tensor:
    """Left rightᵀ; if asked, in chunks of columns that are added in a wider type."""
    accumulate = accumulate or wide_type(left.dtype)
    if accumulate == left.dtype:
        return left @ right.mT
    total = torch.zeros(*left.shape[:-1], right.shape[-2], dtype=accumulate, device=left.device)
    for start in range(0, left.shape[-1], CHUNK):
        total += _times(left[..., start : start + CHUNK], right[..., start : start + CHUNK])
    return total


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Left rightᵀ of matrices or batches of them, summed in float32 at least."""
    if left.dtype != torch.bfloat16:
        return left @ right.mT
    if WIDENING and left.device.type == "cuda":
        product = torch.ops.aten.bmm if left.ndim == 3 else torch.ops.aten.mm
        found: Tensor = product.dtype(left, right.mT, torch.float32)
        return found
    return left.float() @ right.float().mT


def _add_layer(total: Tensor, left: FactoredWeight, right: FactoredWeight, form: Form) -> None:
    """Add the products of gradients that stay factored."""
    if left.factors.g.shape[3] == 1 and right.factors.g.shape[3] == 1:
        _add_unshared(total, left, right, form)
    else:
        total += _shared_tile(left, right, form)


def _input_gram(left: FactoredWeight, right: FactoredWeight) -> Tensor:
    """a_ns·a_mt (+ 1 for a bias), (R, N·S, M·T)."""
    a1, a2 = left.factors.a, right.factors.a  # (N, R, S, d)
    if left.factors.is_embedding:
        gram = (a1.flatten()[:, None] == a2.flatten()).to(wide_type(left.factors.g.dtype))[None]
    else:
        gram = _times(_by_group(a1), _by_group(a2))
    return gram.add_(1) if left.bias else gram


def _by_group(a: Tensor) -> Tensor:
    """(N, R, S, d) as (R, N·S, d)."""
    return a.transpose(0, 1).flatten(1, 2)


def _add_unshared(total: Tensor, left: FactoredWeight, right: FactoredWeight, form: Form) -> None:
    """S = 1: K += (A₁A₂ᵀ + 1) ∘ (G₁G₂ᵀ) for each group, in one pass over K."""
    gram = _input_gram(left, right)  # (R, N, M)
    for r in range(gram.shape[0]):
        a, g1, g2 = (
            gram[r].to(total.dtype),
            left.factors.g[:, :, r, 0],
            right.factors.g[:, :, r, 0],
        )  # (K, N, c)
        k, n, m = g1.shape[0], g1.shape[1], g2.shape[1]
        if form == "diagonal":
            total.addcmul_(a[..., None], _times(g1, g2).permute(1, 2, 0).to(total.dtype))
        elif form == "trace":
            g = _times(_outputs_joined(g1), _outputs_joined(g2))  # Σ_k g_nk·g_mk
            total.addcmul_(a, g.to(total.dtype))
        else:
            g = _times(g1.transpose(0, 1).reshape(n * k, -1), g2.transpose(0, 1).reshape(m * k, -1))
            total.view(n, k, m, k).addcmul_(a[:, None, :, None], g.view(n, k, m, k).to(total.dtype))


def _outputs_joined(g: Tensor) -> Tensor:
    """(K, N, c) as (N, K·c)."""
    return g.transpose(0, 1).flatten(1)


def _shared_tile(left: FactoredWeight, right: FactoredWeight, form: Form) -> Tensor:
    """S > 1: X = Σ_t (a_ns·a_mt) g_mt first, then Σ_sc g_nsc X, one group at a time."""
    gram = _input_gram(left, right)
    total: Tensor | None = None
    for r in range(gram.shape[0]):
        part = _contract_positions(gram[r], left.factors.g[:, :, r], right.factors.g[:, :, r], form)
        total = part if total is None else total + part
    assert total is not None
    return total


def _contract_positions(gram: Tensor, g1: Tensor, g2: Tensor, form: Form) -> Tensor:
    """Σ_st gram[ns,mt] g1[k,n,s,c] g2[l,m,t,c] for one group."""
    k, n, s, c = g1.shape
    _, m, t, _ = g2.shape
    g1, g2 = g1.to(gram.dtype), g2.to(gram.dtype)  # the sums over positions are in float32 at least
    gram = gram.view(n * s, m, t).transpose(0, 1)  # (M, N·S, T)
    weighted = gram @ g2.permute(1, 2, 0, 3).reshape(m, t, k * c)  # X: (M, N·S, K·c)
    weighted = weighted.view(m, n, s, k, c)
    if form == "trace":
        return torch.einsum("knsc,mnskc->nm", g1, weighted)
    if form == "diagonal":
        return torch.einsum("knsc,mnskc->nmk", g1, weighted)
    # one product for each n: (K × S·c)(S·c × M·K)
    second = weighted.permute(1, 2, 4, 0, 3).reshape(n, s * c, m * k)
    full = torch.bmm(g1.transpose(0, 1).reshape(n, k, s * c), second).view(n, k, m, k)
    return full[:, 0, :, 0] if form == "sum" else full


def tile_bytes(features: KernelFeatures, form: Form, n: int, m: int, item: int) -> int:
    """Bytes of the temporaries of one tile between n and m examples."""
    k = features.k
    result = n * m * (k * k if form == "full" else k if form == "diagonal" else 1) * item
    halves = features.rows.dtype == torch.bfloat16  # which are copied to float32
    largest = (n + m) * k * min(features.rows.shape[2], CHUNK) if halves else 0
    for layer in features.layers.values():
        _, _, groups, s, c = layer.factors.g.shape
        gram = groups * n * s * m * s
        copies = (n + m) * layer.factors.a.shape[1:].numel() + (n + m) * k * groups * s * c if halves else 0
        largest = max(largest, copies + (gram if s == 1 else gram + 2 * n * s * m * k * c))
    return 2 * result + largest * item
