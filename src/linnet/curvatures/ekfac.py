"""Eigenvalue-corrected Kronecker factors (EKFAC).

In the eigenbasis Q_B ⊗ Q_A of the Kronecker factors the eigenvalues are replaced by the exact second
moments of the per-example gradients, Σ_n Σ_k (Q_Bᵀ G_nk Q_A)² with G_nk = Σ_s g_nks â_nsᵀ: the diagonal of
the layer's Gauss-Newton block in that basis, and of all matrices diagonal there the nearest to the block
(George et al. 2018, section 3). It takes a second pass over the data, once the basis is known.

The rotated gradients are formed from rotated inputs and output gradients, or rotated once formed; for each
layer the cheaper is taken by counting multiplications.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.kfac import KroneckerSums, RowMomentSums
from linnet.curvatures.layers import layer_factors
from linnet.curvatures.sums import ROWS_AT_ONCE, Gradients, Sums, layer_rows
from linnet.linalg.grouped import GroupedKroneckerEigen
from linnet.linalg.kronecker import Kronecker, KroneckerEigen
from linnet.tangent.rules import Factors


class EigenvalueSums(Sums):
    """Σ (Q_Bᵀ G Q_A)² of a layer with factors.

    Args:
        kronecker: The layer's finished Kronecker factors.
    """

    def __init__(self, kronecker: KroneckerSums) -> None:
        self.layer = kronecker.layer
        product = kronecker.block()
        self.basis = (
            KroneckerEigen.of(product)
            if isinstance(product, Kronecker)
            else GroupedKroneckerEigen.of(product)
        )
        left, right = self.basis.left_vectors, self.basis.right_vectors
        if self.layer.groups == 1:
            left, right = left[None], right[None]
        self._inputs, self._gradients = (left, right) if self.layer.transposed else (right, left)
        self.tensors = {
            "values": left.new_zeros(self.layer.groups, self._gradients.shape[-1], self._inputs.shape[-1])
        }

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        parts = [_hatted(f, self.layer.biased) for f in layer_factors(gradients.captured, self.layer)]
        if not parts:
            return
        kind = self.tensors["values"].dtype
        parts = [Factors(f.a.to(kind), f.g.to(kind)) for f in parts]
        if len(parts) == 1 and parts[0].a.shape[2] == 1:
            # (Q_Bᵀ g)² ((Q_Aᵀ a)²)ᵀ
            a, g = parts[0].a[:, :, 0], parts[0].g[:, :, :, 0]  # (N, R, d), (K, N, R, c)
            a = torch.einsum("nrd,rde->rne", a, self._inputs).square_()
            g = torch.einsum("knrc,rce->rkne", g, self._gradients).square_().sum(1)
            self.tensors["values"] += g.mT @ a
            return
        k, n, _, _, c = parts[0].g.shape
        d = parts[0].a.shape[-1]
        size = max(1, ROWS_AT_ONCE // max(1, k * self.layer.groups * c * d))
        for start in range(0, n, size):
            rows = self._rotated_rows(parts, slice(start, start + size))
            self.tensors["values"] += rows.square_().sum((0, 2))

    def _rotated_rows(self, parts: list[Factors], examples: slice) -> Tensor:
        """Q_Bᵀ G_nk Q_A of some examples, (n, R, K, c, d)."""
        k, _, r, _, c = parts[0].g.shape
        s, d = sum(f.a.shape[2] for f in parts), parts[0].a.shape[-1]
        first = s * (d * d + k * c * c) < k * (c * c * d + c * d * d)
        total: Tensor | None = None
        for f in parts:
            a, g = f.a[examples], f.g[:, examples].permute(1, 2, 0, 3, 4)  # (n, R, S, d), (n, R, K, S, c)
            if first:
                a, g = a @ self._inputs, g @ self._gradients[:, None]
            n, s_f = a.shape[0], a.shape[2]
            # one product for each example and group: (K·c × S)(S × d)
            rows = g.mT.reshape(n * r, k * c, s_f) @ a.reshape(n * r, s_f, d)
            total = rows if total is None else total + rows
        assert total is not None
        formed = total.view(-1, r, k, c, d)
        return formed if first else self._gradients.mT[:, None] @ (formed @ self._inputs[:, None])

    def block(self) -> KroneckerEigen | GroupedKroneckerEigen:
        """The corrected product."""
        values = self.tensors["values"].mT if self.layer.transposed else self.tensors["values"]
        if isinstance(self.basis, KroneckerEigen):
            return self.basis.with_values(values[0].contiguous())
        return self.basis.with_values(values.contiguous())


class RowEigenvalueSums(Sums):
    """The same for a layer that has per-example gradients only.

    Args:
        moments: The layer's finished Kronecker factors.
    """

    def __init__(self, moments: RowMomentSums) -> None:
        self.layer = moments.layer
        product = moments.block()
        self.basis = KroneckerEigen.of(product)
        self.tensors = {"values": torch.zeros_like(self.basis.values)}

    def add(self, gradients: Gradients) -> None:
        """Add a batch."""
        rows = layer_rows(gradients.captured, self.layer).flatten(0, 1).to(self.basis.dtype)
        rotated = self.basis.rotate(rows.unflatten(1, tuple(self.basis.values.shape)))
        self.tensors["values"] += rotated.square().sum(0)

    def block(self) -> KroneckerEigen:
        """The corrected product."""
        return self.basis.with_values(self.tensors["values"])


def eigenvalue_sums(first: KroneckerSums | RowMomentSums) -> Sums:
    """The second pass that belongs to a first one.

    Args:
        first: Finished Kronecker factors.

    Returns:
        Sums of eigenvalues, to be filled by one more pass.
    """
    return EigenvalueSums(first) if isinstance(first, KroneckerSums) else RowEigenvalueSums(first)


def _hatted(f: Factors, biased: bool) -> Factors:
    """Inputs with a one appended when a bias rides along."""
    return Factors(F.pad(f.a, (0, 1), value=1.0), f.g) if biased else f
