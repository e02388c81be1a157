"""Kronecker products of two symmetric matrices, by themselves or in groups, and sums of them.

Order: ``Kronecker(left, right)`` is ``torch.kron(left, right)``. It acts on an (n, m) matrix V, flattened
row by row, as (L ⊗ R) vec(V) = vec(L V Rᵀ). For a weight of shape (d_out, d_in), left is the gradient
factor B and right the input factor A.

The weight of a grouped convolution, (R · n, m) with R groups, has a product for each group and nothing
between the groups: factors (R, n, n) and (R, m, m) are ``torch.block_diag(*map(torch.kron, left, right))``,
which acts on an (R, n, m) tensor V, flattened, as vec(L_r V_r R_rᵀ) for every group r. A depthwise
convolution has as many groups as channels, with n = 1: a loop over small blocks would take longer than all
other layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import sqrt

import torch
from torch import Tensor

from linnet.distributed import Share
from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import (
    cholesky,
    eigh,
    nonnegative,
    nonnegative_each,
    require_finite,
    root,
    shared_eigh,
)
from linnet.linalg.operator import ParameterSpace, require_damping, require_factor
from linnet.linalg.structured import (
    EigenbasisOperator,
    StructuredOperator,
    require_space,
    require_symmetric,
)
from linnet.tree import node

NARROW = 8  # columns up to which a matrix is cheaper to multiply side by side with others

Pair = tuple[Tensor, Tensor]  # eigenvalues and eigenvectors


@node("left", "right", "space", "name")
class Kronecker(StructuredOperator):
    """L ⊗ R for symmetric positive semi-definite L (n x n) and R (m x m), or L_r ⊗ R_r of each group."""

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        space: ParameterSpace | None = None,
        name: str = "Kronecker product",
    ) -> None:
        require_symmetric(left, f"left factor of {name}")
        require_symmetric(right, f"right factor of {name}")
        groups = left.shape[:-2]
        alike = left.dtype == right.dtype and left.device == right.device
        if not alike or right.shape[:-2] != groups or groups not in ((), groups[:1]) or 0 in groups:
            raise InputError(
                f"the factors of {name} are {tuple(left.shape)}, {left.dtype} and {tuple(right.shape)}, "
                f"{right.dtype}",
                "(n, n) and (m, m), or (R, n, n) and (R, m, m), of one dtype and device",
                remedy="convert one of the two with .to(dtype) or .to(device), or stack those of the groups",
            )
        self.left, self.right, self.groups = left, right, groups.numel()
        size = self.groups * left.shape[-1] * right.shape[-1]
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
        """``m log det L + n log det R``, summed over the groups."""
        left, right = (2 * _diagonals(factor).log().sum() for factor in self._choleskys)
        return self.right.shape[-1] * left + self.left.shape[-1] * right

    def trace(self) -> Tensor:
        """``tr L tr R``, summed over the groups."""
        return (_diagonals(self.left).sum(-1) * _diagonals(self.right).sum(-1)).sum()

    def diagonal(self) -> Tensor:
        """``diag L ⊗ diag R``."""
        return _products(_diagonals(self.left), _diagonals(self.right)).flatten()

    def _solve(self, b: Tensor) -> Tensor:
        left, right = self._choleskys
        if left.ndim == 3:
            solve_left, solve_right = (partial(_cholesky_solve, factor) for factor in (left, right))
            return _on_both_sides(solve_left, solve_right, b, left.shape[1], right.shape[1])
        matrices = b.T.reshape(-1, left.shape[0], right.shape[0])  # (K, n, m)
        matrices = torch.cholesky_solve(matrices, left)  # L⁻¹ V
        matrices = torch.cholesky_solve(matrices.mT, right).mT  # L⁻¹ V R⁻¹
        return matrices.flatten(1).T

    def _root(self, v: Tensor) -> Tensor:
        return kron_mm(*self._roots, v)

    def _root_transposed(self, v: Tensor) -> Tensor:
        left, right = self._roots
        return kron_mm(left.mT, right.mT, v)


@node("left_vectors", "right_vectors", "values", "space", "name")
class KroneckerEigen(EigenbasisOperator):
    """(Q_L ⊗ Q_R) diag(λ) (Q_L ⊗ Q_R)ᵀ, of one product or of each group; a side without Q has Q = I."""

    # With λ = λ_L λ_Rᵀ + τ it is the exactly damped Kronecker product; with the second moments of gradients
    # in this basis it is the eigenvalue-corrected approximation (EKFAC, George et al. 2018).

    def __init__(
        self,
        left_vectors: Tensor | None,
        right_vectors: Tensor | None,
        values: Tensor,
        space: ParameterSpace | None = None,
        name: str = "Kronecker product",
    ) -> None:
        sides = (left_vectors, right_vectors)
        fit = values.ndim in (2, 3) and all(
            side is None or side.shape == (*values.shape[:-2], size, size)
            for side, size in zip(sides, values.shape[-2:], strict=True)
        )
        if not fit:
            shapes = ", ".join("none" if side is None else str(tuple(side.shape)) for side in sides)
            raise InputError(
                f"{name} has eigenvectors {shapes} and eigenvalues {tuple(values.shape)}",
                expected="(n, n) and (m, m) with (n, m), or as many of each as there are groups",
                remedy="pass one value for each pair of eigenvectors",
            )
        require_finite(values, f"eigenvalues of {name}")
        self.left_vectors, self.right_vectors = left_vectors, right_vectors
        if values.ndim == 2:
            self._hold(nonnegative(values, name), space, name)
        else:
            self._hold(nonnegative_each(values.flatten(1), name).view(values.shape), space, name)

    @classmethod
    def of(cls, product: Kronecker, known: tuple[Pair, Pair] | None = None) -> KroneckerEigen:
        """The eigendecomposition of a Kronecker product."""
        left_name, right_name = product.factor_names
        left, right = known or (eigh(product.left, left_name), eigh(product.right, right_name))
        (left_values, left_vectors), (right_values, right_vectors) = left, right
        values = _products(
            nonnegative_each(left_values, left_name), nonnegative_each(right_values, right_name)
        )
        return cls(left_vectors, right_vectors, values, product.space, product.name)

    @classmethod
    def half_diagonal(cls, left: Tensor, right: Tensor, name: str = "Kronecker product") -> KroneckerEigen:
        """diag(l) ⊗ R or L ⊗ diag(r), for a side that is too wide for a matrix."""
        # left (n,), right (m, m), or left (n, n), right (m,)
        # A factor of n rows has n² numbers and takes n³ operations to decompose: one of 50,000 rows takes
        # 10 GB. With its diagonal instead the product has one eigenbasis for all blocks, and is as large as
        # the weight. Gupta, Koren and Singer 2018 (Shampoo), whose implementations keep such diagonals.
        if (left.ndim == 1) == (right.ndim == 1):
            raise InputError(
                f"the factors of {name} have shapes {tuple(left.shape)} and {tuple(right.shape)}",
                expected="one vector and one matrix",
                remedy="pass the diagonal of the one, and the other whole",
            )
        (left_values, left_vectors), (right_values, right_vectors) = (
            _side(factor, f"{side} factor of {name}") for factor, side in ((left, "left"), (right, "right"))
        )
        return cls(left_vectors, right_vectors, torch.outer(left_values, right_values), name=name)

    @property
    def sides(self) -> tuple[Tensor | None, Tensor | None]:
        """Q_L and Q_R."""
        return self.left_vectors, self.right_vectors

    @property
    def halved(self) -> bool:
        """Whether one of the factors is a diagonal."""
        return any(side is None for side in self.sides)

    def rotate(self, matrices: Tensor) -> Tensor:
        """Matrices in the eigenbasis, Q_Lᵀ V Q_R, (..., n, m)."""
        # matrices (..., n, m)
        left, right = self.left_vectors, self.right_vectors
        turned = matrices if left is None else left_product(left.mT, matrices)
        return turned if right is None else turned @ right

    def with_values(self, values: Tensor) -> KroneckerEigen:
        """Other eigenvalues in the same basis."""
        # values (n, m)
        return KroneckerEigen(self.left_vectors, self.right_vectors, values, self.space, self.name)

    def diagonal(self) -> Tensor:
        """(Q_L ∘ Q_L) λ (Q_R ∘ Q_R)ᵀ."""
        left, right = self.left_vectors, self.right_vectors
        found = self.values if left is None else left**2 @ self.values
        return (found if right is None else found @ (right**2).mT).flatten()

    def _spectral(self, values: Tensor, v: Tensor) -> Tensor:
        """Q diag(values) Qᵀ v for v (n m, K)."""
        left, right = self.left_vectors, self.right_vectors
        if values.ndim == 3 and left is not None and right is not None:
            return kron_mm(left, right, values.reshape(-1, 1) * kron_mm(left.mT, right.mT, v))
        rotated = values * self.rotate(v.T.reshape(-1, *values.shape))  # (K, n, m)
        turned = rotated if left is None else left_product(left, rotated)
        return (turned if right is None else turned @ right.mT).flatten(1).T


def _side(factor: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues and eigenvectors of a factor; of a diagonal its entries."""
    if factor.ndim == 1:
        return nonnegative(factor, name), None
    values, vectors = eigh(factor, name)
    return nonnegative(values, name), vectors.contiguous()  # as it would be read from a file


def eigenbases(products: Sequence[Kronecker], share: Share) -> list[KroneckerEigen]:
    """The eigendecompositions of Kronecker products, their factors divided among the processes."""
    matrices = [factor for product in products for factor in (product.left, product.right)]
    names = [name for product in products for name in product.factor_names]
    pairs = iter(shared_eigh(matrices, names, share))
    return [KroneckerEigen.of(product, (next(pairs), next(pairs))) for product in products]


def kron_mm(left: Tensor, right: Tensor, v: Tensor) -> Tensor:
    """(L ⊗ R) v for several v, alone or by group, without forming the product, (p q, K)."""
    # left (p, n), right (q, m), v (n m, K); or left (R, p, n), right (R, q, m), v (R n m, K)
    if left.ndim == 3:
        return _on_both_sides(left.matmul, right.matmul, v, left.shape[2], right.shape[2])
    matrices = v.T.reshape(-1, left.shape[1], right.shape[1])  # (K, n, m)
    return (left_product(left, matrices) @ right.T).flatten(1).T


def left_product(left: Tensor, matrices: Tensor) -> Tensor:
    """L V for many V; narrow ones side by side, since each by itself would read all of L, (..., p, m)."""
    # left (p, n), matrices (..., n, m)
    m = matrices.shape[-1]
    if m > NARROW or left.ndim == 3:
        return left @ matrices
    rows = matrices.mT.reshape(-1, left.shape[1]) @ left.mT
    return rows.view(*matrices.shape[:-2], m, left.shape[0]).mT


def _on_both_sides(
    left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor], v: Tensor, n: int, m: int
) -> Tensor:
    """Apply a linear map of columns (R, n, ...) and one of columns (R, m, ...) to both sides of every V_r."""
    # columns stay side by side: each map is one product a group, however many vectors v (R n m, K) has
    groups, k = v.shape[0] // (n * m), v.shape[1]
    matrices = left(v.reshape(groups, n, m * k))  # L V, (R, p, m K)
    p = matrices.shape[1]
    matrices = matrices.reshape(groups, p, m, k).transpose(1, 2).reshape(groups, m, p * k)
    matrices = right(matrices)  # R (L V)ᵀ, (R, q, p K)
    q = matrices.shape[1]
    return matrices.reshape(groups, q, p, k).transpose(1, 2).reshape(groups * p * q, k)


def _cholesky_solve(factor: Tensor, columns: Tensor) -> Tensor:
    """M⁻¹ v from the Cholesky factors L of many small M, L⁻ᵀ (L⁻¹ v); batched better than cholesky_solve."""
    inner = torch.linalg.solve_triangular(factor, columns, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(factor.mT, inner, upper=True)
    return solution


def _diagonals(matrices: Tensor) -> Tensor:
    """The diagonal of a matrix, or of each of a batch, (..., n)."""
    return matrices.diagonal(dim1=-2, dim2=-1)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """The products of the entries of two vectors, or of each pair of a batch, (..., n, m)."""
    return left[..., :, None] * right[..., None, :]


def factored_damping(product: Kronecker, tau: float) -> Kronecker:
    """L ⊗ R + τ I, approximated by a Kronecker product again; every group by itself."""
    # (L + √τ/ω I) ⊗ (R + ω√τ I), where ω = √(‖I ⊗ R‖ / ‖L ⊗ I‖) = √((tr R / m) / (tr L / n)) in the trace
    # norm minimizes a bound on the error (Botev 2020, eq. 4.25 to 4.27, A = R, B = L; π of Martens and Grosse
    # 2015, section 6.3). Too large by √τ (ω L ⊗ I + I ⊗ R / ω), and exact when the product is zero.
    tau = require_damping(tau)
    left_mean, right_mean = (_diagonals(f).mean(-1).double() for f in (product.left, product.right))
    is_zero = (left_mean <= 0) | (right_mean <= 0)  # the product is zero, and ω is undefined
    omega = torch.where(is_zero, 1.0, (right_mean / left_mean).sqrt())
    left, right = (
        factor.masked_fill(is_zero[..., None, None], 0.0)
        + shift.to(factor)[..., None, None] * torch.eye(factor.shape[-1]).to(factor)
        for factor, shift in ((product.left, sqrt(tau) / omega), (product.right, sqrt(tau) * omega))
    )
    return Kronecker(left, right, product.space, product.name)


# -- merging ---------------------------------------------------------------------------------------
#
# One Kronecker product for a sum of several, Σₖ Lₖ ⊗ Rₖ.
#
# A sum of Kronecker products is not one. Three ways to one product: the nearest in Frobenius norm (``svd``),
# the nearest Gaussian (``kl``), or one factor averaged by numbers of examples (``count``). All give T times
# the matrix for T equal terms; adding the factors one by one would give T² times it.

_KL_STEPS = 500
_KL_CHANGE = 1e-8  # relative change of a factor at which the fixed point has been reached


def merge(terms: Sequence[Kronecker], method: str, counts: Sequence[float] = ()) -> Kronecker:
    """One product for the sum of several of one layer: "svd", "kl", or "count" by numbers of examples."""
    if method == "count":
        return _by_count(terms, counts)
    return _nearest_product(terms) if method == "svd" else _nearest_gaussian(terms)


def _nearest_product(terms: Sequence[Kronecker]) -> Kronecker:
    """The Kronecker product nearest to the sum in Frobenius norm."""
    # The sum, rearranged, is the matrix Σₖ vec(Lₖ) vec(Rₖ)ᵀ of rank at most T; its best rank-1 approximation
    # gives the factors (Van Loan and Pitsianis 1993), which are symmetric positive semi-definite when the
    # terms are. Costs two thin QR decompositions and an SVD of T x T.
    first = terms[0]
    lefts, left_triangle = _thin_qr([term.left for term in terms])  # (n², T), (T, T)
    rights, right_triangle = _thin_qr([term.right for term in terms])  # (m², T), (T, T)
    u, s, vh = torch.linalg.svd(left_triangle @ right_triangle.T)
    left = s[0].sqrt() * (lefts @ u[:, 0]).reshape(first.left.shape)
    right = s[0].sqrt() * (rights @ vh[0]).reshape(first.right.shape)
    sign = 1.0 if float(left.trace()) >= 0 else -1.0  # the SVD gives both factors up to one sign
    return _like(first, sign * left, sign * right)


def _nearest_gaussian(terms: Sequence[Kronecker]) -> Kronecker:
    """The Kronecker product whose Gaussian is nearest to the sum's."""
    # With precisions S = Σₖ Lₖ ⊗ Rₖ and P = L ⊗ R, minimizes KL(N(0, P⁻¹) ‖ N(0, S⁻¹)), whose stationary
    # point is the fixed point of L = 1/m Σₖ tr(Rₖ R⁻¹) Lₖ and R = 1/n Σₖ tr(Lₖ L⁻¹) Rₖ (the flip-flop
    # algorithm of Dutilleul 1999). Keeps the trace of P⁻¹ S; the sum must be positive definite.
    lefts = torch.stack([term.left for term in terms]).double()  # (T, n, n)
    rights = torch.stack([term.right for term in terms]).double()  # (T, m, m)
    right = rights.mean(0)
    for _ in range(_KL_STEPS):
        left = _weighted(lefts, rights, right)
        updated = _weighted(rights, lefts, left)
        change = float((updated - right).norm() / updated.norm())
        right = updated
        if change <= _KL_CHANGE:
            return _like(terms[0], left, right)
    raise NumericalError(
        f"merging {len(terms)} Kronecker products by KL did not converge in {_KL_STEPS} steps",
        expected=f"a relative change of at most {_KL_CHANGE:.1g}",
        remedy="use method='svd', or damp the terms",
    )


def _by_count(terms: Sequence[Kronecker], counts: Sequence[float]) -> Kronecker:
    """(Σₖ Lₖ) ⊗ (Σₖ Nₖ Rₖ / Σₖ Nₖ): factors averaged as if they were independent."""
    # The left factors are sums over the Nₖ examples of their term, the right ones means. This is one more use
    # of the independence assumption behind each Kronecker factorization. The result again has its examples in
    # the left factor, so terms can be merged one after the other.
    total = sum(counts)
    left = torch.stack([term.left for term in terms]).sum(0)
    right = torch.stack([n / total * term.right for n, term in zip(counts, terms, strict=True)]).sum(0)
    return Kronecker(left, right, terms[0].space, terms[0].name)


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
