"""Kronecker products of two symmetric matrices, and sums of them.

Order: ``Kronecker(left, right)`` is ``torch.kron(left, right)``. It acts on an (n, m) matrix V, flattened
row by row, as (L ⊗ R) vec(V) = vec(L V Rᵀ). For a weight of shape (d_out, d_in), left is the gradient
factor B and right the input factor A.
"""

from __future__ import annotations

from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.eigenbasis import EigenbasisOperator
from linnet.linalg.factorize import cholesky, eigh, nonnegative, require_finite, root
from linnet.linalg.operator import require_damping, require_factor
from linnet.linalg.space import ParameterSpace
from linnet.linalg.structured import (
    StructuredOperator,
    require_space,
    require_symmetric,
)
from linnet.tree import node

NARROW = 8  # columns up to which a matrix is cheaper to multiply side by side with others


@node("left", "right", "space", "name")
class Kronecker(StructuredOperator):
    """L ⊗ R for symmetric positive semi-definite L (n x n) and R (m x m)."""

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        space: ParameterSpace | None = None,
        name: str = "Kronecker product",
    ) -> None:
        require_symmetric(left, f"left factor of {name}")
        require_symmetric(right, f"right factor of {name}")
        if left.dtype != right.dtype or left.device != right.device:
            raise InputError(
                f"the factors of {name} are {left.dtype} and {right.dtype}",
                "one dtype and device",
                remedy="convert one of the two with .to(dtype) or .to(device)",
            )
        self.left, self.right = left, right
        size = left.shape[0] * right.shape[0]
        self.shape, self.dtype, self.device = (size, size), left.dtype, left.device
        self.space, self.name = require_space(space, size), name

    @property
    def factor_names(self) -> tuple[str, str]:
        """What L and R are called in errors."""
        return f"left factor of {self.name}", f"right factor of {self.name}"

    @cached_property
    def _choleskys(self) -> tuple[Tensor, Tensor]:
        """The Cholesky factors of L and R."""
        left, right = self.factor_names
        return cholesky(self.left, left), cholesky(self.right, right)

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """The square roots of L and R."""
        left, right = self.factor_names
        return root(self.left, left), root(self.right, right)

    def mm(self, v: Tensor) -> Tensor:
        """vec(L V Rᵀ)."""
        return kron_mm(self.left, self.right, v)

    def inverse(self) -> Kronecker:
        """L⁻¹ ⊗ R⁻¹ (Botev 2020, eq. 4.24)."""
        left, right = (torch.cholesky_inverse(factor) for factor in self._choleskys)
        return Kronecker(left, right, self.space, f"inverse of {self.name}")

    def damped(self, tau: float) -> KroneckerEigen:
        """L ⊗ R + τ I, exactly, by the eigendecompositions of L and R."""
        return KroneckerEigen.of(self).damped(tau)

    def scaled(self, scalar: float) -> Kronecker:
        """(√c L) ⊗ (√c R)."""
        c = sqrt(require_factor(scalar))
        return Kronecker(c * self.left, c * self.right, self.space, self.name)

    def logdet(self) -> Tensor:
        """``m log det L + n log det R``."""
        left, right = (2 * factor.diagonal().log().sum() for factor in self._choleskys)
        return self.right.shape[0] * left + self.left.shape[0] * right

    def trace(self) -> Tensor:
        """``tr L tr R``."""
        return self.left.trace() * self.right.trace()

    def diagonal(self) -> Tensor:
        """``diag L ⊗ diag R``."""
        return torch.outer(self.left.diagonal(), self.right.diagonal()).flatten()

    def _solve(self, b: Tensor) -> Tensor:
        left, right = self._choleskys
        matrices = b.T.reshape(-1, left.shape[0], right.shape[0])  # (K, n, m)
        matrices = torch.cholesky_solve(matrices, left)  # L⁻¹ V
        matrices = torch.cholesky_solve(matrices.mT, right).mT  # L⁻¹ V R⁻¹
        return matrices.flatten(1).T

    def _root(self, v: Tensor) -> Tensor:
        return kron_mm(*self._roots, v)

    def _root_transposed(self, v: Tensor) -> Tensor:
        left, right = self._roots
        return kron_mm(left.T, right.T, v)


@node("left_vectors", "right_vectors", "values", "space", "name")
class KroneckerEigen(EigenbasisOperator):
    """(Q_L ⊗ Q_R) diag(λ) (Q_L ⊗ Q_R)ᵀ: any eigenvalues in a Kronecker product's eigenbasis."""

    # With λ = λ_L λ_Rᵀ + τ it is the exactly damped Kronecker product; with the second moments of gradients
    # in this basis it is the eigenvalue-corrected approximation (EKFAC, George et al. 2018).

    def __init__(
        self,
        left_vectors: Tensor,
        right_vectors: Tensor,
        values: Tensor,
        space: ParameterSpace | None = None,
        name: str = "Kronecker product",
    ) -> None:
        expected = (left_vectors.shape[0], right_vectors.shape[0])
        if values.shape != expected:
            raise InputError(
                f"values of {name} has shape {tuple(values.shape)}",
                expected=f"{expected}",
                remedy="pass one value for each pair of eigenvectors",
            )
        require_finite(values, f"eigenvalues of {name}")
        self.left_vectors, self.right_vectors = left_vectors, right_vectors
        self._hold(nonnegative(values, name), space, name)

    @classmethod
    def of(
        cls, product: Kronecker, known: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    ) -> KroneckerEigen:
        """The eigendecomposition of a Kronecker product."""
        left_name, right_name = product.factor_names
        left, right = known or (eigh(product.left, left_name), eigh(product.right, right_name))
        (left_values, left_vectors), (right_values, right_vectors) = left, right
        values = torch.outer(nonnegative(left_values, left_name), nonnegative(right_values, right_name))
        return cls(left_vectors, right_vectors, values, product.space, product.name)

    def rotate(self, matrices: Tensor) -> Tensor:
        """Matrices in the eigenbasis, Q_Lᵀ V Q_R, (..., n, m)."""
        # matrices (..., n, m)
        return left_product(self.left_vectors.T, matrices) @ self.right_vectors

    def with_values(self, values: Tensor) -> KroneckerEigen:
        """Other eigenvalues in the same basis."""
        # values (n, m)
        return KroneckerEigen(self.left_vectors, self.right_vectors, values, self.space, self.name)

    def diagonal(self) -> Tensor:
        """(Q_L ∘ Q_L) λ (Q_R ∘ Q_R)ᵀ."""
        return (self.left_vectors**2 @ self.values @ (self.right_vectors**2).T).flatten()

    def _spectral(self, values: Tensor, v: Tensor) -> Tensor:
        """Q diag(values) Qᵀ v for v (n m, K)."""
        matrices = v.T.reshape(-1, *values.shape)  # (K, n, m)
        rotated = values * self.rotate(matrices)
        return (left_product(self.left_vectors, rotated) @ self.right_vectors.T).flatten(1).T


def kron_mm(left: Tensor, right: Tensor, v: Tensor) -> Tensor:
    """(L ⊗ R) v for several v, without forming the product, (p q, K)."""
    # left (p, n), right (q, m), v (n m, K)
    matrices = v.T.reshape(-1, left.shape[1], right.shape[1])  # (K, n, m)
    return (left_product(left, matrices) @ right.T).flatten(1).T


def left_product(left: Tensor, matrices: Tensor) -> Tensor:
    """L V for many V; narrow ones side by side, since each by itself would read all of L, (..., p, m)."""
    # left (p, n), matrices (..., n, m)
    m = matrices.shape[-1]
    if m > NARROW:
        return left @ matrices
    rows = matrices.mT.reshape(-1, left.shape[1]) @ left.mT
    return rows.view(*matrices.shape[:-2], m, left.shape[0]).mT


def factored_damping(product: Kronecker, tau: float) -> Kronecker:
    """L ⊗ R + τ I, approximated by a Kronecker product again."""
    # (L + √τ/ω I) ⊗ (R + ω√τ I), where ω = √(‖I ⊗ R‖ / ‖L ⊗ I‖) = √((tr R / m) / (tr L / n)) in the trace
    # norm minimizes a bound on the error (Botev 2020, eq. 4.25 to 4.27, A = R, B = L; π of Martens and Grosse
    # 2015, section 6.3). Too large by √τ (ω L ⊗ I + I ⊗ R / ω), and exact when the product is zero.
    tau = require_damping(tau)
    left, right = product.left, product.right
    left_mean, right_mean = float(left.diagonal().mean()), float(right.diagonal().mean())
    if left_mean <= 0 or right_mean <= 0:  # the product is zero, and ω is undefined
        left, right, left_mean, right_mean = torch.zeros_like(left), torch.zeros_like(right), 1.0, 1.0
    omega = sqrt(right_mean / left_mean)
    damped_left = left + sqrt(tau) / omega * torch.eye(left.shape[0]).to(left)
    damped_right = right + sqrt(tau) * omega * torch.eye(right.shape[0]).to(right)
    return Kronecker(damped_left, damped_right, product.space, product.name)
