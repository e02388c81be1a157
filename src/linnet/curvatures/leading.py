"""The leading eigenvectors of a curvature, and gradients in the coordinates that they span.

Every block of a curvature has a basis of eigenvectors: Q_L ⊗ Q_R for a product, unit vectors for a diagonal.
Of all of them, those with the largest eigenvalues are kept, whichever layer they are of: this is the choice
of D coordinates that keeps most of the trace. With H (P, D) the kept vectors, J H is formed from the inputs a
and output gradients g of each use, Q_Lᵀ (Σ_s g_s a_sᵀ) Q_R: factors are turned before they are multiplied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Layer, Part, as_found, in_eigenbases
from linnet.curvatures.sums import layer_rows
from linnet.errors import InputError
from linnet.linalg.factorize import eigh
from linnet.linalg.kronecker import KroneckerEigen
from linnet.linalg.operator import unit_columns
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.rules import Captured, Use, factors, padded
from linnet.tree import node


@dataclass(frozen=True, eq=False)
class LayerBasis(ABC):
    """Orthonormal vectors in the parameters of one layer."""

    layer: Layer  # the layer

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of vectors."""

    @abstractmethod
    def rows(self, captured: Captured) -> Tensor:
        """Gradients of every example and cotangent along the vectors, (N, K, size)."""

    @abstractmethod
    def displacement(self, coordinates: Tensor) -> list[Tensor]:
        """The sum of the vectors with weights (size,): a tensor for each parameter of the layer."""

    @abstractmethod
    def projected(self, parts: Sequence[Tensor]) -> Tensor:
        """The products of the vectors with columns: (*shape, M) for each parameter to (size, M)."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it is made of, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layer"}


@node()
@dataclass(frozen=True, eq=False)
class ProductBasis(LayerBasis):
    """Products of columns of Q_L and Q_R, in the matrix [W b] of each group."""

    left: Tensor  # columns of Q_L, (R, rows, r)
    right: Tensor  # columns of Q_R, (R, columns, s)
    index: Tensor  # the pairs that are kept, positions in (R, r, s)

    @property
    def size(self) -> int:
        """Number of pairs."""
        return len(self.index)

    def projected(self, parts: Sequence[Tensor]) -> Tensor:
        """Q_Lᵀ V Q_R at the kept pairs."""
        each = [part.movedim(-1, 0).to(self.left.dtype) for part in parts]
        whole: Tensor = self.left.mT @ self.layer.join(each) @ self.right
        return whole.flatten(1)[:, self.index].T

    def rows(self, captured: Captured) -> Tensor:
        """Q_Lᵀ (Σ_s g_s a_sᵀ) Q_R at the kept pairs."""
        n, k, layer = captured.n, captured.k, self.layer
        if layer.factored and as_found(captured, layer):
            uses = captured.by_parameter().get(layer.names[0], [])
            if not uses:
                return self.left.new_zeros(n, k, self.size)
            parts = [self._of_use(use, n) for use in uses]
            return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        each = [captured.rows(name).flatten(0, 1).to(self.left.dtype) for name in layer.names]
        matrices = layer.join(each).unflatten(0, (n, k)).transpose(1, 2)  # (N, R, K, rows, columns)
        whole: Tensor = self.left.mT[:, None] @ matrices @ self.right[:, None]
        return whole.transpose(1, 2).reshape(n, k, -1)[:, :, self.index]

    def _of_use(self, use: Use, n: int) -> Tensor:
        """One use's part: its inputs and gradients are turned, and multiplied at the pairs."""
        on_a, on_g = self.layer.ordered(self.left, self.right)
        if use.kind == "conv":
            a, g = self._turned_convolution(use, n, on_a, on_g)
        else:
            f = factors(use, n)
            d = f.a.shape[-1]
            a = f.a.to(on_a.dtype) @ on_a[:, :d]  # (N, R, S, p)
            a = a + on_a[:, d:] if self.layer.biased else a
            g = f.g.to(on_g.dtype) @ on_g  # (K, N, R, S, q)
        k, _, r, s, q = g.shape
        if r == s == 1:
            row, column = self.index // self.right.shape[2], self.index % self.right.shape[2]
            of_a, of_g = self.layer.ordered(row, column)
            return (g[:, :, 0, 0].index_select(2, of_g) * a[:, 0, 0].index_select(1, of_a)).transpose(0, 1)
        lines = g.permute(1, 2, 0, 4, 3).reshape(n * r, k * q, s)
        whole = (lines @ a.reshape(n * r, s, -1)).view(n, r, k, q, -1)
        whole = whole.mT if self.layer.transposed else whole
        return whole.transpose(1, 2).reshape(n, k, -1).index_select(2, self.index)

    def _turned_convolution(self, use: Use, n: int, on_a: Tensor, on_g: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs by a convolution with the basis, so that receptive fields are never formed."""
        assert use.a is not None
        assert use.g is not None
        groups, kernel = len(on_a), use.target.shape[1:]
        weight = on_a[:, : kernel.numel()].mT.reshape(-1, *kernel)  # (R p, c / R, *kernel)
        bias = on_a[:, kernel.numel() :].flatten() if self.layer.biased else None
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 2]
        x, options = padded(use.a, use.options).to(on_a.dtype), use.options
        a = convolve(x, weight, bias, options["stride"], 0, options["dilation"], groups)
        a = a.flatten(2).unflatten(1, (groups, -1))  # (B, R, p, S)
        g = use.g.flatten(3).unflatten(2, (groups, -1))  # (K, B, R, c, S)
        g = on_g.mT @ g.to(on_g.dtype)
        if a.shape[0] != n:  # further axes have been merged with that of the examples
            a = a.unflatten(0, (n, -1)).movedim(1, -2).flatten(-2)
            g = g.unflatten(1, (n, -1)).movedim(2, -2).flatten(-2)
        return a.mT, g.mT

    def displacement(self, coordinates: Tensor) -> list[Tensor]:
        """Q_L E Q_Rᵀ, parameter by parameter."""
        r, s = self.left.shape[2], self.right.shape[2]
        core = coordinates.new_zeros(len(self.left) * r * s).index_add(0, self.index, coordinates)
        matrices = self.left @ core.view(-1, r, s).to(self.left.dtype) @ self.right.mT
        return [part.to(coordinates.dtype) for part in self.layer.part(matrices)]


@node()
@dataclass(frozen=True, eq=False)
class DenseBasis(LayerBasis):
    """Vectors in all parameters of the layer, one after the other."""

    vectors: Tensor  # (P_l, size)

    @property
    def size(self) -> int:
        """Number of vectors."""
        return self.vectors.shape[1]

    def projected(self, parts: Sequence[Tensor]) -> Tensor:
        """Vᵀ times the columns."""
        return self.vectors.T @ _flat(parts).to(self.vectors.dtype)

    def rows(self, captured: Captured) -> Tensor:
        """Gradients times the vectors."""
        return layer_rows(captured, self.layer).to(self.vectors.dtype) @ self.vectors

    def displacement(self, coordinates: Tensor) -> list[Tensor]:
        """Vectors times the coordinates."""
        moved = (self.vectors @ coordinates.to(self.vectors.dtype)).to(coordinates.dtype)
        return self.layer.shaped(moved)


@node()
@dataclass(frozen=True, eq=False)
class EntryBasis(LayerBasis):
    """Single parameters of the layer."""

    index: Tensor  # their positions among all of the layer, increasing

    @property
    def size(self) -> int:
        """Number of parameters."""
        return len(self.index)

    def projected(self, parts: Sequence[Tensor]) -> Tensor:
        """The columns at those parameters."""
        return _flat(parts)[self.index]

    def rows(self, captured: Captured) -> Tensor:
        """Gradients at those parameters; of an embedding, from the rows that are looked up alone."""
        if not (self.layer.embedding and as_found(captured, self.layer)):
            return layer_rows(captured, self.layer)[:, :, self.index]
        return self._looked_up(captured)

    def _looked_up(self, captured: Captured) -> Tensor:
        """Σ over positions of g at the kept entries of the row that is looked up there."""
        n, k, (words, width) = captured.n, captured.k, self.layer.shapes[0]
        out = captured.outputs.new_zeros(k, n, self.size)
        word, entry = self.index // width, self.index % width
        first = torch.searchsorted(word, torch.arange(words + 1, device=word.device))
        for use in captured.by_parameter().get(self.layer.names[0], []):
            f = factors(use, n)
            ids = f.a[:, 0]  # (N, S)
            count = (first[ids + 1] - first[ids]).flatten()
            place = torch.arange(ids.numel(), device=ids.device).repeat_interleave(count)
            within = torch.arange(len(place), device=ids.device) - (count.cumsum(0) - count)[place]
            kept = first[ids].flatten()[place] + within  # which coordinate
            example, position = place // ids.shape[1], place % ids.shape[1]
            values = f.g[:, example, 0, position, entry[kept]]  # (K, pairs)
            out.flatten(1).index_add_(1, example * self.size + kept, values.to(out.dtype))
        return out.transpose(0, 1)

    def displacement(self, coordinates: Tensor) -> list[Tensor]:
        """The coordinates at their places, zero elsewhere."""
        moved = coordinates.new_zeros(self.layer.size).index_add(0, self.index, coordinates)
        return self.layer.shaped(moved)


PIECE = 1 << 20  # eigenvalues that are searched at once
KINDS = {kind.__name__: kind for kind in (ProductBasis, DenseBasis, EntryBasis)}


def restored_basis(kind: str, layer: Layer, tensors: Mapping[str, Tensor]) -> LayerBasis:
    """A basis from what it was made of."""
    made: LayerBasis = KINDS[kind](layer, **tensors)
    return made


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Columns of the parameters of a layer, one parameter after the other, (P_l, M)."""
    return torch.cat([part.flatten(0, -2) for part in parts])


def leading_basis(curvature: Curvature, dim: int) -> tuple[list[LayerBasis], Tensor]:
    """The D eigenvectors of a curvature with the largest eigenvalues, layer by layer."""
    spectra = [_spectrum(part) for part in in_eigenbases(curvature.parts)]
    values = torch.cat([values.flatten() for _, values in spectra])
    # the largest of each piece first: topk takes four times the memory of what it looks at
    few = torch.cat([piece.topk(min(dim, len(piece))).values for piece in values.split(PIECE)])
    least = few.topk(min(dim, len(few))).values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    # equal eigenvalues at the limit: the first ones, so that there are D in all
    above, ties = values > least, (values == least).nonzero()[:, 0]
    above[ties[: min(dim, len(values)) - int(above.count_nonzero())]] = True
    bases, kept, start = [], [], 0
    for part, (vectors, own) in zip(curvature.parts, spectra, strict=True):
        chosen = above[start : start + own.numel()].nonzero()[:, 0]
        start += own.numel()
        if len(chosen):
            bases.append(_chosen(part.layer, vectors, tuple(own.shape), chosen))
            kept.append(own.flatten()[chosen])
    _require_any(bool(kept))
    return bases, torch.cat(kept)


Vectors = tuple[Tensor | None, Tensor | None] | Tensor | None


def _spectrum(part: Part) -> tuple[Vectors, Tensor]:
    """Eigenvectors (a pair for a product, ``None`` for unit vectors) and eigenvalues of one block."""
    block = part.operator
    if isinstance(block, KroneckerEigen):  # a side without vectors is its own basis
        left, right = (t if t is None or t.ndim == 3 else t[None] for t in block.sides)
        return (left, right), block.values.view(-1, *block.values.shape[-2:])
    if isinstance(block, Diagonal):
        return None, block.values
    if isinstance(block, Dense):
        values, vectors = eigh(block.matrix, block.name)
        return vectors.to(block.dtype), values.clamp_min(0).to(block.dtype)
    raise InputError(
        f"the curvature has a block of {part.structure!r} for {part.layer.name}",
        expected="blocks with eigenvectors: kfac, ekfac, block, diagonal or full",
        remedy='make it with structure="ekfac"',
    )


def _chosen(layer: Layer, vectors: Vectors, shape: Sequence[int], chosen: Tensor) -> LayerBasis:
    """The basis of the chosen eigenvectors of a layer; factors keep the columns that are needed."""
    if vectors is None:
        return EntryBasis(layer, chosen)
    if isinstance(vectors, Tensor):
        return DenseBasis(layer, vectors[:, chosen])
    left, right = vectors
    group, row, column = (t for t in torch.unravel_index(chosen, tuple(shape)))
    rows, row = row.unique(return_inverse=True)
    columns, column = column.unique(return_inverse=True)
    index = (group * len(rows) + row) * len(columns) + column
    _, n, m = shape
    return ProductBasis(layer, _columns(left, right, rows, n), _columns(right, left, columns, m), index)


def _columns(vectors: Tensor | None, like: Tensor | None, index: Tensor, n: int) -> Tensor:
    """Some columns of (R, n, n) vectors, of the identity where there are none."""
    if vectors is not None:
        return vectors[:, :, index].contiguous()
    assert like is not None
    return unit_columns(n, index, like)[None]


def random_basis(curvature: Curvature, dim: int, seed: int) -> list[LayerBasis]:
    """Random directions (P, D) with independent entries, E[H Hᵀ] = I: kernels of them are unbiased."""
    # A layer's share of the D directions is about its share of the trace, which makes the sum of the layers'
    # variances the least (Neyman allocation). With factors they are products of two random matrices.
    generator = torch.Generator().manual_seed(seed)
    traces = torch.stack([part.operator.trace().double() for part in curvature.parts]).cpu()
    bases: list[LayerBasis] = []
    for part, share in zip(curvature.parts, _shares(curvature.parts, traces, dim), strict=True):
        layer, block = part.layer, part.operator
        if share == 0:
            continue
        if not layer.factored or share == layer.size or share < layer.groups:
            _require_dense(layer, share, block)
            bases.append(DenseBasis(layer, _normal(generator, block, layer.size, share) / share**0.5))
            continue
        rows, columns = layer.matrix
        # of each group's products of two columns as many as its share, the first ones
        own = torch.arange(share).remainder(layer.groups).bincount(minlength=layer.groups)
        each = int(own.max())
        left = min(rows, math.ceil(max(each**0.5, each / columns)))
        right = math.ceil(each / left)
        index = (torch.arange(left * right) < own[:, None]).flatten().nonzero()[:, 0].to(block.device)
        one = _normal(generator, block, layer.groups, rows, left) / own.to(block.device).sqrt()[:, None, None]
        two = _normal(generator, block, layer.groups, columns, right)
        bases.append(ProductBasis(layer, one, two, index))
    return bases


def _shares(parts: Sequence[Part], traces: Tensor, dim: int) -> list[int]:
    """How many of the D directions each layer takes: one if it has a trace, and of the rest its share."""
    shares = (traces > 0).long()
    most = shares * torch.tensor([part.layer.size for part in parts])
    _require_any(bool(shares.any()))
    if dim < int(shares.sum()):
        raise InputError(
            f"dim={dim} random directions of {int(shares.sum())} layers",
            expected="one of each layer at least, without which the kernel would be biased",
            remedy=f"pass dim={int(shares.sum())} or more, or take eigenvectors, the default",
        )
    while (rest := min(dim, int(most.sum())) - int(shares.sum())) > 0:
        wanting = torch.where(shares < most, traces, 0.0)
        more = torch.minimum((rest * wanting / wanting.sum()).long(), most - shares)
        if not more.any():
            more[wanting.argsort(descending=True, stable=True)[: min(rest, int((wanting > 0).sum()))]] = 1
        shares += more
    return [int(share) for share in shares]


def _require_any(found: bool) -> None:
    """Raise where a curvature is zero."""
    if not found:
        raise InputError(
            "the curvature is zero: no weight moves an output on the examples that it was made of",
            expected="a network whose outputs depend on the weights there",
            remedy="look for layers that are dead (a ReLU that is zero everywhere) or saturated",
        )


def _require_dense(layer: Layer, share: int, block: StructuredOperator) -> None:
    """Raise where the directions of a layer without factors do not fit."""
    size = layer.size * share * (8 + block.dtype.itemsize)  # drawn in float64
    name = f"{share:,} random directions of {layer.name}"
    plan = Plan(name, parse_bytes(None, block.device), (("directions", size),))
    require(plan, ["leave the layer out with linnet.linearize(network, params=...)", "take eigenvectors"])


def _normal(generator: torch.Generator, like: StructuredOperator, *shape: int) -> Tensor:
    """Normal numbers, the same on every device and in every type."""
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return drawn.to(like.device, like.dtype)
