"""Kronecker products of a diagonal matrix with a symmetric one, for sides too wide for a matrix.

A factor of n rows has n² numbers and takes n³ operations to decompose: one of 50,000 rows takes 10 GB. With
its diagonal instead the product is block diagonal, with one eigenbasis for all blocks, and as large as the
weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.eigenbasis import EigenbasisOperator
from linnet.linalg.factorize import eigh, nonnegative, require_finite, require_square
from linnet.linalg.kronecker import left_product
from linnet.linalg.space import ParameterSpace
from linnet.params import choice
from linnet.tree import node

SIDES = ("left", "right")


@node("vectors", "values", "side", "space", "name")
class HalfDiagonal(EigenbasisOperator):
    """(I ⊗ Q) diag(λ) (I ⊗ Q)ᵀ, or (Q ⊗ I) diag(λ) (Q ⊗ I)ᵀ: one factor is diagonal."""

    # Source: Gupta, Koren and Singer 2018 (Shampoo), whose implementations keep diagonals of wide sides.

    def __init__(
        self,
        vectors: Tensor,
        values: Tensor,
        side: str = "left",
        space: ParameterSpace | None = None,
        name: str = "Kronecker product",
    ) -> None:
        self.side = choice("side", side, SIDES)
        require_square(vectors, f"eigenvectors of {name}")
        size = vectors.shape[0]
        expected = f"(n, {size})" if side == "left" else f"({size}, m)"
        if vectors.ndim != 2 or values.ndim != 2 or values.shape[1 if side == "left" else 0] != size:
            raise InputError(
                f"values of {name} has shape {tuple(values.shape)}",
                expected=expected,
                remedy="pass one value for each pair of eigenvectors",
            )
        require_finite(vectors, f"eigenvectors of {name}")
        require_finite(values, f"eigenvalues of {name}")
        self.vectors = vectors
        self.left_vectors = None if side == "left" else vectors
        self.right_vectors = vectors if side == "left" else None
        self._hold(nonnegative(values, name), space, name)

    @classmethod
    def of(cls, left: Tensor, right: Tensor, name: str = "Kronecker product") -> HalfDiagonal:
        """diag(l) ⊗ R or L ⊗ diag(r)."""
        # left (n,), right (m, m)
        if (left.ndim == 1) == (right.ndim == 1):
            raise InputError(
                f"the factors of {name} have shapes {tuple(left.shape)} and {tuple(right.shape)}",
                expected="one vector and one matrix",
                remedy="pass the diagonal of the one, and the other whole",
            )
        side = "left" if left.ndim == 1 else "right"
        alone, matrix = (left, right) if side == "left" else (right, left)
        alone = nonnegative(alone, f"{side} factor of {name}")
        other = f"{'right' if side == 'left' else 'left'} factor of {name}"
        values, vectors = eigh(matrix, other)
        values = nonnegative(values, other)
        products = torch.outer(alone, values) if side == "left" else torch.outer(values, alone)
        return cls(vectors.contiguous(), products, side, name=name)  # as it would be read from a file

    def rotate(self, matrices: Tensor) -> Tensor:
        """Matrices in the eigenbasis, V Q or Qᵀ V, (..., n, m)."""
        # matrices (..., n, m)
        if self.side == "left":
            return matrices @ self.vectors
        return left_product(self.vectors.T, matrices)

    def with_values(self, values: Tensor) -> HalfDiagonal:
        """Other eigenvalues in the same basis."""
        # values (n, m)
        return HalfDiagonal(self.vectors, values, self.side, self.space, self.name)

    def diagonal(self) -> Tensor:
        """λ (Q ∘ Q)ᵀ or (Q ∘ Q) λ."""
        squares = self.vectors**2
        return (self.values @ squares.T if self.side == "left" else squares @ self.values).flatten()

    def _spectral(self, values: Tensor, v: Tensor) -> Tensor:
        """Q diag(values) Qᵀ v for v (n m, K)."""
        rotated = values * self.rotate(v.T.reshape(-1, *values.shape))  # (K, n, m)
        if self.side == "left":
            return (rotated @ self.vectors.T).flatten(1).T
        return left_product(self.vectors, rotated).flatten(1).T
