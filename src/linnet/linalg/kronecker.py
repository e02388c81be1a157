"""Kronecker products of two symmetric matrices, and sums of them.

Order: ``Kronecker(left, right)`` is ``torch.kron(left, right)``. It acts on an (n, m) matrix V, flattened
row by row, as (L ⊗ R) vec(V) = vec(L V Rᵀ). For a weight of shape (d_out, d_in), left is the gradient
factor B and right the input factor A.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import cholesky, eigh, nonnegative, require_finite, require_square, root
from linnet.linalg.operator import LinearOperator, ParameterSpace, Sum, require_damping, require_factor
from linnet.linalg.structured import (
    EigenbasisOperator,
    StructuredOperator,
    require_space,
    require_symmetric,
)
from linnet.params import choice
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


# -- half diagonal ---------------------------------------------------------------------------------
#
# Kronecker products of a diagonal matrix with a symmetric one, for sides too wide for a matrix.
#
# A factor of n rows has n² numbers and takes n³ operations to decompose: one of 50,000 rows takes 10 GB.
# With its diagonal instead the product is block diagonal, with one eigenbasis for all blocks, and as
# large as the weight.

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


# -- merging ---------------------------------------------------------------------------------------
#
# One Kronecker product for a sum of several, Σₖ Lₖ ⊗ Rₖ.
#
# A sum of Kronecker products is not one. Four ways to go on: keep the list (``exact``), take the nearest
# product in Frobenius norm (``svd``), the nearest Gaussian (``kl``), or average one factor by numbers of
# examples (``count``). All give T times the matrix for T equal terms; adding the factors one by one would
# give T² times it.

_KL_STEPS = 500


def merge(
    terms: Sequence[Kronecker], method: str = "svd", counts: Sequence[float] | None = None
) -> LinearOperator:
    """A sum of Kronecker products, exactly or as one product."""
    _require_terms(terms)
    if (counts is not None) != (method == "count"):
        raise InputError(
            f"counts is {counts!r} with method {method!r}",
            "counts for method 'count' alone",
            remedy="leave counts= out, or pass them with method='count'",
        )
    if counts is not None:
        return merge_count(terms, counts)
    methods = {"exact": Sum, "svd": merge_svd, "kl": merge_kl}
    if method not in methods:
        raise InputError(f"method is {method!r}", "'exact', 'svd', 'kl' or 'count'", "leave method= out")
    return methods[method](terms)


def merge_svd(terms: Sequence[Kronecker]) -> Kronecker:
    """The Kronecker product nearest to the sum in Frobenius norm."""
    # The sum, rearranged, is the matrix Σₖ vec(Lₖ) vec(Rₖ)ᵀ of rank at most T; its best rank-1 approximation
    # gives the factors (Van Loan and Pitsianis 1993), which are symmetric positive semi-definite when the
    # terms are. Costs two thin QR decompositions and an SVD of T x T.
    first = _require_terms(terms)
    lefts, left_triangle = _thin_qr([term.left for term in terms])  # (n², T), (T, T)
    rights, right_triangle = _thin_qr([term.right for term in terms])  # (m², T), (T, T)
    u, s, vh = torch.linalg.svd(left_triangle @ right_triangle.T)
    left = s[0].sqrt() * (lefts @ u[:, 0]).reshape(first.left.shape)
    right = s[0].sqrt() * (rights @ vh[0]).reshape(first.right.shape)
    sign = 1.0 if float(left.trace()) >= 0 else -1.0  # the SVD gives both factors up to one sign
    return _like(first, sign * left, sign * right)


def merge_kl(terms: Sequence[Kronecker], tolerance: float = 1e-8) -> Kronecker:
    """The Kronecker product whose Gaussian is nearest to the sum's."""
    # With precisions S = Σₖ Lₖ ⊗ Rₖ and P = L ⊗ R, minimizes KL(N(0, P⁻¹) ‖ N(0, S⁻¹)), whose stationary
    # point is the fixed point of L = 1/m Σₖ tr(Rₖ R⁻¹) Lₖ and R = 1/n Σₖ tr(Lₖ L⁻¹) Rₖ (the flip-flop
    # algorithm of Dutilleul 1999). Keeps the trace of P⁻¹ S; the sum must be positive definite.
    first = _require_terms(terms)
    lefts = torch.stack([term.left for term in terms]).double()  # (T, n, n)
    rights = torch.stack([term.right for term in terms]).double()  # (T, m, m)
    right = rights.mean(0)
    for _ in range(_KL_STEPS):
        left = _weighted(lefts, rights, right)
        updated = _weighted(rights, lefts, left)
        change = float((updated - right).norm() / updated.norm())
        right = updated
        if change <= tolerance:
            return _like(first, left, right)
    raise NumericalError(
        f"merging {len(terms)} Kronecker products by KL did not converge in {_KL_STEPS} steps",
        expected=f"a relative change of at most {tolerance:.1g}",
        remedy="use method='svd', or damp the terms",
    )


def merge_count(terms: Sequence[Kronecker], counts: Sequence[float]) -> Kronecker:
    """(Σₖ Lₖ) ⊗ (Σₖ Nₖ Rₖ / Σₖ Nₖ): factors averaged as if they were independent."""
    # The left factors are sums over the Nₖ examples of their term, the right ones means. This is one more use
    # of the independence assumption behind each Kronecker factorization. The result again has its examples in
    # the left factor, so terms can be merged one after the other.
    first = _require_terms(terms)
    if len(counts) != len(terms) or min(counts) <= 0:
        raise InputError(
            f"counts is {list(counts)}",
            f"{len(terms)} positive numbers, one a term",
            remedy="pass the number of examples of each term",
        )
    total = sum(counts)
    left = torch.stack([term.left for term in terms]).sum(0)
    right = torch.stack([n / total * term.right for n, term in zip(counts, terms, strict=True)]).sum(0)
    return Kronecker(left, right, first.space, first.name)


def _require_terms(terms: Sequence[Kronecker]) -> Kronecker:
    """The first term, if there is one and all have its factor shapes."""
    if len({(term.left.shape, term.right.shape) for term in terms}) != 1:
        raise InputError(
            f"terms is {list(terms)}",
            "at least one product, all with factors of one shape",
            remedy="merge the products of one layer",
        )
    return terms[0]


def _thin_qr(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Q and R of the matrix whose columns are the flattened factors, in float64."""
    columns = torch.stack([factor.double().flatten() for factor in factors], dim=1)
    q, r = torch.linalg.qr(columns)
    return q, r


def _weighted(factors: Tensor, others: Tensor, other: Tensor) -> Tensor:
    """1/m Σₖ tr(Oₖ O⁻¹) Fₖ for factors (T, n, n), others Oₖ (T, m, m) and O (m, m)."""
    inverse = torch.cholesky_inverse(cholesky(other, "a merged Kronecker factor"))
    weights = torch.einsum("kij,ij->k", others, inverse) / other.shape[0]
    return torch.einsum("k,kij->ij", weights, factors)


def _like(first: Kronecker, left: Tensor, right: Tensor) -> Kronecker:
    """A product like another one, made exactly symmetric and with equally large factors."""
    left, right = (left + left.T) / 2, (right + right.T) / 2
    ratio = float(right.norm() / left.norm()) if float(left.norm()) > 0 else 0.0
    balance = sqrt(ratio) if ratio > 0 else 1.0
    return Kronecker(
        (balance * left).to(first.left), (right / balance).to(first.right), first.space, first.name
    )
