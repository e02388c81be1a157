"""Block diagonals of equally large Kronecker products, computed in batches.

The weight of a grouped convolution, (R · n, m) with R groups, has a Kronecker product for each group and
nothing between the groups. A depthwise convolution has as many groups as channels, with n = 1: a loop
over a list of small blocks would take longer than all other layers together.

Order: ``GroupedKronecker(left, right)`` with (R, n, n) and (R, m, m) is
``torch.block_diag(*map(torch.kron, left, right))``. It acts on an (R, n, m) tensor V, flattened, as
vec(L_r V_r R_rᵀ) for every group r; see :mod:`linnet.linalg.kronecker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import sqrt

import torch
from torch import Tensor

from linnet.distributed import Share, all_filled, owners
from linnet.errors import InputError
from linnet.linalg.factorize import cholesky, eigh, nonnegative_each, require_finite, require_square, root
from linnet.linalg.kronecker import Kronecker, KroneckerEigen
from linnet.linalg.operator import ParameterSpace, require_damping, require_factor
from linnet.linalg.structured import EigenbasisOperator, StructuredOperator, require_space
from linnet.tree import node


@node("left", "right", "space", "name")
class GroupedKronecker(StructuredOperator):
    """The block diagonal matrix of L_r ⊗ R_r for r = 1 ... R, symmetric positive semi-definite."""

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        space: ParameterSpace | None = None,
        name: str = "grouped Kronecker product",
    ) -> None:
        _require_symmetric(left, f"left factors of {name}")
        _require_symmetric(right, f"right factors of {name}")
        _require_alike(left, right, f"factors of {name}")
        self.left, self.right = left, right
        size = left.shape[0] * left.shape[1] * right.shape[1]
        self.shape, self.dtype, self.device = (size, size), left.dtype, left.device
        self.space, self.name = require_space(space, size), name

    @property
    def factor_names(self) -> tuple[str, str]:
        """What all L_r and all R_r are called in errors."""
        return f"left factors of {self.name}", f"right factors of {self.name}"

    @cached_property
    def _choleskys(self) -> tuple[Tensor, Tensor]:
        """The Cholesky factors of all L_r and R_r."""
        left, right = self.factor_names
        return cholesky(self.left, left), cholesky(self.right, right)

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """The square roots of all L_r and R_r."""
        left, right = self.factor_names
        return root(self.left, left), root(self.right, right)

    def mm(self, v: Tensor) -> Tensor:
        """vec(L_r V_r R_rᵀ)."""
        return grouped_mm(self.left, self.right, v)

    def inverse(self) -> GroupedKronecker:
        """L_r⁻¹ ⊗ R_r⁻¹."""
        left, right = (torch.cholesky_inverse(factor) for factor in self._choleskys)
        return GroupedKronecker(left, right, self.space, f"inverse of {self.name}")

    def damped(self, tau: float) -> GroupedKroneckerEigen:
        """L_r ⊗ R_r + τ I, exactly, by the eigendecompositions of all factors."""
        return GroupedKroneckerEigen.of(self).damped(tau)

    def scaled(self, scalar: float) -> GroupedKronecker:
        """(√c L_r) ⊗ (√c R_r)."""
        c = sqrt(require_factor(scalar))
        return GroupedKronecker(c * self.left, c * self.right, self.space, self.name)

    def logdet(self) -> Tensor:
        """``Σ_r m log det L_r + n log det R_r``."""
        left, right = (2 * _diagonals(factor).log().sum() for factor in self._choleskys)
        return self.right.shape[1] * left + self.left.shape[1] * right

    def trace(self) -> Tensor:
        """``Σ_r tr L_r tr R_r``."""
        return (_diagonals(self.left).sum(1) * _diagonals(self.right).sum(1)).sum()

    def diagonal(self) -> Tensor:
        """``diag L_r ⊗ diag R_r``."""
        return (_diagonals(self.left)[:, :, None] * _diagonals(self.right)[:, None]).flatten()

    def _solve(self, b: Tensor) -> Tensor:
        left, right = (partial(_cholesky_solve, factor) for factor in self._choleskys)
        return _on_both_sides(left, right, b, self.left.shape[1], self.right.shape[1])

    def _root(self, v: Tensor) -> Tensor:
        return grouped_mm(*self._roots, v)

    def _root_transposed(self, v: Tensor) -> Tensor:
        left, right = self._roots
        return grouped_mm(left.mT, right.mT, v)


@node("left_vectors", "right_vectors", "values", "space", "name")
class GroupedKroneckerEigen(EigenbasisOperator):
    """The block diagonal matrix of (Q_Lr ⊗ Q_Rr) diag(λ_r) (Q_Lr ⊗ Q_Rr)ᵀ for r = 1 ... R."""

    # What `linnet.linalg.KroneckerEigen` is for one Kronecker product: the exactly damped product, or the
    # eigenvalue-corrected approximation (EKFAC, George et al. 2018).

    def __init__(
        self,
        left_vectors: Tensor,
        right_vectors: Tensor,
        values: Tensor,
        space: ParameterSpace | None = None,
        name: str = "grouped Kronecker product",
    ) -> None:
        for vectors, side in ((left_vectors, "left"), (right_vectors, "right")):
            _require_matrices(vectors, f"{side} eigenvectors of {name}")
        _require_alike(left_vectors, right_vectors, f"eigenvectors of {name}")
        expected = (*left_vectors.shape[:2], right_vectors.shape[1])
        if values.shape != expected:
            raise InputError(
                f"values of {name} has shape {tuple(values.shape)}",
                expected=f"{expected}",
                remedy="pass one value for each pair of eigenvectors",
            )
        require_finite(values, f"eigenvalues of {name}")
        self.left_vectors, self.right_vectors = left_vectors, right_vectors
        self._hold(nonnegative_each(values.flatten(1), name).view(expected), space, name)

    @classmethod
    def of(
        cls,
        product: GroupedKronecker,
        known: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> GroupedKroneckerEigen:
        """The eigendecomposition of a Kronecker product for each group."""
        left_name, right_name = product.factor_names
        left, right = known or (eigh(product.left, left_name), eigh(product.right, right_name))
        (left_values, left_vectors), (right_values, right_vectors) = left, right
        left_values = nonnegative_each(left_values, left_name)
        right_values = nonnegative_each(right_values, right_name)
        values = left_values[:, :, None] * right_values[:, None]
        return cls(left_vectors, right_vectors, values, product.space, product.name)

    def rotate(self, matrices: Tensor) -> Tensor:
        """Matrices in the eigenbasis, Q_Lrᵀ V_r Q_Rr, (..., R, n, m)."""
        # matrices (..., R, n, m)
        rotated = torch.einsum("rni,...rnm->...rim", self.left_vectors, matrices)
        return torch.einsum("...rim,rmj->...rij", rotated, self.right_vectors)

    def with_values(self, values: Tensor) -> GroupedKroneckerEigen:
        """Other eigenvalues in the same basis."""
        # values (R, n, m)
        return GroupedKroneckerEigen(self.left_vectors, self.right_vectors, values, self.space, self.name)

    def diagonal(self) -> Tensor:
        """(Q_Lr ∘ Q_Lr) λ_r (Q_Rr ∘ Q_Rr)ᵀ."""
        return (self.left_vectors**2 @ self.values @ (self.right_vectors**2).mT).flatten()

    def _spectral(self, values: Tensor, v: Tensor) -> Tensor:
        """Q diag(values) Qᵀ v for v (R n m, K)."""
        rotated = grouped_mm(self.left_vectors.mT, self.right_vectors.mT, v)
        return grouped_mm(self.left_vectors, self.right_vectors, values.reshape(-1, 1) * rotated)


def grouped_mm(left: Tensor, right: Tensor, v: Tensor) -> Tensor:
    """The block diagonal matrix of L_r ⊗ R_r times several v, without forming the products, (R p q, K)."""
    # left (R, p, n), right (R, q, m), v (R n m, K)
    return _on_both_sides(left.matmul, right.matmul, v, left.shape[2], right.shape[2])


def grouped_factored_damping(product: GroupedKronecker, tau: float) -> GroupedKronecker:
    """L_r ⊗ R_r + τ I for every group, approximated by Kronecker products again."""
    # Each group is damped as by `linnet.linalg.factored_damping`, with an ω of its own.
    tau = require_damping(tau)
    left_mean, right_mean = _diagonals(product.left).mean(1), _diagonals(product.right).mean(1)  # (R,)
    is_zero = (left_mean <= 0) | (right_mean <= 0)  # such a product is zero, and ω is undefined
    omega = torch.where(is_zero, 1.0, (right_mean / left_mean).sqrt())[:, None, None]
    left = product.left.masked_fill(is_zero[:, None, None], 0.0)
    right = product.right.masked_fill(is_zero[:, None, None], 0.0)
    # (L + √τ/ω I) ⊗ (R + ω√τ I) (Botev 2020, eq. 4.25 to 4.27)
    damped_left = left + sqrt(tau) / omega * torch.eye(left.shape[1]).to(left)
    damped_right = right + sqrt(tau) * omega * torch.eye(right.shape[1]).to(right)
    return GroupedKronecker(damped_left, damped_right, product.space, product.name)


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
    """The diagonal of each matrix, (R, n)."""
    return matrices.diagonal(dim1=1, dim2=2)


def _require_matrices(matrices: Tensor, name: str) -> None:
    """One finite square matrix a group."""
    require_square(matrices, name)
    if matrices.ndim != 3 or matrices.shape[0] == 0:
        raise InputError(
            f"{name} has shape {tuple(matrices.shape)}",
            "a matrix for each group, (R, n, n)",
            remedy="stack the matrices of the groups, torch.stack(matrices)",
        )
    require_finite(matrices, name)


def _require_symmetric(matrices: Tensor, name: str) -> None:
    """Each matrix is square, finite and symmetric up to rounding."""
    _require_matrices(matrices, name)
    if matrices.numel() == 0:
        return
    tolerance = 1e3 * torch.finfo(matrices.dtype).eps * matrices.abs().amax((1, 2))
    asymmetry = (matrices - matrices.mT).abs().amax((1, 2))
    if bool((asymmetry > tolerance).any()):
        worst = int((asymmetry - tolerance).argmax())
        raise InputError(
            f"matrix {worst} of {name} is not symmetric: two mirrored entries differ by "
            f"{float(asymmetry[worst]):.3g}",
            expected="symmetric matrices",
            remedy="pass (M + M.mT) / 2 if the difference is rounding",
        )


def _require_alike(left: Tensor, right: Tensor, name: str) -> None:
    """As many matrices on the left as on the right, of one type on one device."""
    if left.shape[0] != right.shape[0]:
        raise InputError(
            f"the {name} are {left.shape[0]} and {right.shape[0]}",
            "one pair for each group",
            remedy="pass as many left as right factors",
        )
    if left.dtype != right.dtype or left.device != right.device:
        raise InputError(
            f"the {name} are {left.dtype} and {right.dtype}",
            "one dtype and device",
            remedy="convert one of the two with .to(dtype) or .to(device)",
        )


# -- dealt -----------------------------------------------------------------------------------------
#
# Eigendecompositions of several matrices, each made by one of the processes that share the work.
#
# A decomposition costs some ten times n³ operations, and its copy n² numbers, so that each has one owner
# and the others take what it found. All then have one basis to the bit, also where eigenvalues coincide
# and another machine would find another.

Pair = tuple[Tensor, Tensor]  # eigenvalues and eigenvectors


def dealt_eigh(matrices: Sequence[Tensor], names: Sequence[str], share: Share) -> list[Pair]:
    """Eigenvalues and eigenvectors of symmetric matrices, or batches of them, on all processes, (..., n)."""
    # matrices (..., n, n)
    ranks = owners([float(matrix.numel() * matrix.shape[-1]) for matrix in matrices], share.world)
    found = [
        eigh(matrix, name)
        if owner == share.rank
        else (matrix.new_empty(matrix.shape[:-1]), torch.empty_like(matrix))
        for matrix, name, owner in zip(matrices, names, ranks, strict=True)
    ]
    if share.world > 1:
        pairs = list(zip(found, ranks, strict=True))
        all_filled([[t for pair, own in pairs if own == rank for t in pair] for rank in range(share.world)])
    return found


def eigenbases(
    products: Sequence[Kronecker | GroupedKronecker], share: Share
) -> list[KroneckerEigen | GroupedKroneckerEigen]:
    """The eigendecompositions of Kronecker products, their factors dealt out."""
    matrices = [factor for product in products for factor in (product.left, product.right)]
    names = [name for product in products for name in product.factor_names]
    pairs = dealt_eigh(matrices, names, share)
    found: list[KroneckerEigen | GroupedKroneckerEigen] = []
    for i, product in enumerate(products):
        left, right = pairs[2 * i : 2 * i + 2]
        if isinstance(product, Kronecker):
            found.append(KroneckerEigen.of(product, (left, right)))
        else:
            found.append(GroupedKroneckerEigen.of(product, (left, right)))
    return found
