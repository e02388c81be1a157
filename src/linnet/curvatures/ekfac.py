"""Eigenvalue-corrected Kronecker factors (EKFAC).

In the eigenbasis Q_B ⊗ Q_A of the Kronecker factors the eigenvalues are replaced by the exact second
moments of the per-example gradients, Σ_n Σ_k (Q_Bᵀ G_nk Q_A)² with G_nk = Σ_s g_nks â_nsᵀ: the diagonal of
the layer's Gauss-Newton block in that basis, and of all matrices diagonal there the nearest to the block
(George et al. 2018, section 3). It takes a second pass over the data, once the basis is known.

The rotated gradients are formed from rotated inputs and output gradients, or rotated once formed; for each
layer the cheaper is taken by counting multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linnet.curvatures.kfac import KroneckerSums, RowMomentSums
from linnet.curvatures.layers import layer_factors, require_as_found
from linnet.curvatures.sums import ROWS_AT_ONCE, Gradients, Sums, layer_rows
from linnet.distributed import Share, all_same
from linnet.linalg.grouped import GroupedKroneckerEigen, eigenbases
from linnet.linalg.kronecker import HalfDiagonal, KroneckerEigen
from linnet.tangent.rules import Factors

Basis = KroneckerEigen | GroupedKroneckerEigen | HalfDiagonal


class EigenvalueSums(Sums):
    """Σ (Q_Bᵀ G Q_A)² of a layer with factors."""

    def __init__(self, kronecker: KroneckerSums, basis: Basis) -> None:
        self.layer = kronecker.layer
        self.basis = basis
        left, right = self.basis.left_vectors, self.basis.right_vectors
        if self.layer.groups == 1:
            left, right = (None if side is None else side[None] for side in (left, right))
        self.input_basis, self.gradient_basis = (left, right) if self.layer.transposed else (right, left)
        self._turned: list[Tensor] = []  # rotated inputs of the batch in hand
        rows, columns = self.layer.matrix
        d, c = (rows, columns) if self.layer.transposed else (columns, rows)
        self.tensors = {"values": self.basis.values.new_zeros(self.layer.groups, c, d)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        if gradients.fresh:
            require_as_found(gradients.captured, self.layer)
        again = gradients.columns > gradients.captured.k
        parts = layer_factors(gradients.captured, self.layer, keep=again)
        if not parts:
            return
        kind = self.tensors["values"].dtype
        if gradients.fresh:
            self._turned = []
        a, turned = self._inputs_of(parts, gradients.columns, kind)
        g = [f.g.to(kind) for f in parts]
        if len(parts) == 1 and a[0].shape[2] == 1:
            # (Q_Bᵀ g)² ((Q_Aᵀ a)²)ᵀ
            if self.gradient_basis is None:
                gs = g[0][:, :, :, 0].square().sum(0).transpose(0, 1)
            else:
                gs = torch.einsum("knrc,rce->rkne", g[0][:, :, :, 0], self.gradient_basis).square_().sum(1)
            self.tensors["values"] += gs.mT @ a[0][:, :, 0].square().transpose(0, 1)
        else:
            self._add_rows(a, g, turned)
        if not again:
            self._turned = []

    def _inputs_of(self, parts: list[Factors], columns: int, kind: torch.dtype) -> tuple[list[Tensor], bool]:
        """â of every use, and whether it has been rotated: kept for the batch's other columns if so."""
        k, (c, d) = columns, self.tensors["values"].shape[1:]
        s = sum(f.a.shape[2] for f in parts)
        on_a = 0 if self.input_basis is None else d * d
        on_g = 0 if self.gradient_basis is None else c * c
        turned = s == 1 or s * (on_a + k * on_g) < k * (on_g * d + c * on_a)
        if turned and self._turned:
            return self._turned, True
        a = [self.layer.homogeneous(f.a.to(kind)) for f in parts]  # (N, R, S, d)
        if turned:
            a = self._turned = a if self.input_basis is None else [one @ self.input_basis for one in a]
        return a, turned

    def _add_rows(self, a: list[Tensor], g: list[Tensor], turned: bool) -> None:
        """Σ (Q_Bᵀ G Q_A)² from gradients that are formed, a few examples at once."""
        k, n, r, _, c = g[0].shape
        d = a[0].shape[-1]
        size = max(1, ROWS_AT_ONCE // max(1, k * r * c * d))
        for start in range(0, n, size):
            examples = slice(start, start + size)
            total: Tensor | None = None
            for own_a, own_g in zip(a, g, strict=True):
                part = own_g[:, examples].permute(1, 2, 0, 3, 4)  # (n, R, K, S, c)
                if turned and self.gradient_basis is not None:
                    part = part @ self.gradient_basis[:, None]
                # one product for each example and group: (K·c × S)(S × d)
                rows = part.mT.flatten(0, 1).flatten(1, 2) @ own_a[examples].flatten(0, 1)
                total = rows if total is None else total + rows
            assert total is not None
            formed = total.view(-1, r, k, c, d)
            if not turned and self.input_basis is not None:
                formed = formed @ self.input_basis[:, None]
            if not turned and self.gradient_basis is not None:
                formed = self.gradient_basis.mT[:, None] @ formed
            self.tensors["values"] += formed.square_().sum((0, 2))

    def block(self) -> Basis:
        """The corrected product."""
        values = _without_rounding(self.tensors["values"])
        values = values.mT if self.layer.transposed else values
        return self.basis.with_values(values.contiguous().view(self.basis.values.shape))


class RowEigenvalueSums(Sums):
    """The same for a layer that has per-example gradients only."""

    def __init__(self, moments: RowMomentSums, basis: Basis) -> None:
        self.layer = moments.layer
        self.basis = basis
        self.tensors = {"values": torch.zeros_like(self.basis.values)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        rows = layer_rows(gradients.captured, self.layer).flatten(0, 1).to(self.basis.dtype)
        rotated = self.basis.rotate(rows.unflatten(1, tuple(self.basis.values.shape)))
        self.tensors["values"] += rotated.square().sum(0)

    def block(self) -> Basis:
        """The corrected product."""
        return self.basis.with_values(_without_rounding(self.tensors["values"]))


def _without_rounding(values: Tensor) -> Tensor:
    """Second moments with what is rounding alone set to zero, so that a singular block is known for one."""
    return torch.where(values <= torch.finfo(values.dtype).eps * values.max(), 0.0, values)


def shared_eigenvalue_sums(
    firsts: Sequence[KroneckerSums | RowMomentSums], share: Share
) -> list[EigenvalueSums | RowEigenvalueSums]:
    """The second pass that belongs to a first one, with bases that all processes have in common."""
    blocks = [first.block() for first in firsts]
    products = [block for block in blocks if not isinstance(block, HalfDiagonal)]
    made: Iterator[Basis] = iter(eigenbases(products, share))
    bases: list[Basis] = [block if isinstance(block, HalfDiagonal) else next(made) for block in blocks]
    halves = [basis.vectors for basis in bases if isinstance(basis, HalfDiagonal)]
    if share.world > 1 and halves:
        all_same(halves)
    return [
        EigenvalueSums(first, basis) if isinstance(first, KroneckerSums) else RowEigenvalueSums(first, basis)
        for first, basis in zip(firsts, bases, strict=True)
    ]
