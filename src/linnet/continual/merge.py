"""Sums of curvature blocks over tasks, exactly or at constant memory.

Dense matrices and diagonals add plainly. A sum of Kronecker products is no Kronecker product (Botev 2020,
section 5.3.1): it is kept as a list, or merged into one product. Adding the factors one by one instead would
make T equal tasks count T² times and is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.grouped import GroupedKronecker, GroupedKroneckerEigen
from linnet.linalg.kronecker import HalfDiagonal, Kronecker, KroneckerEigen, merge
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator

MERGES = ("svd", "kl", "count", "exact")


def scaled(operator: StructuredOperator, factor: float) -> StructuredOperator:
    """A multiple of a block; of a Kronecker product the left factor alone, so that counts stay counts."""
    if factor == 1.0:
        return operator
    if isinstance(operator, Kronecker):
        return Kronecker(factor * operator.left, operator.right, name=operator.name)
    if isinstance(operator, GroupedKronecker):
        return GroupedKronecker(factor * operator.left, operator.right, name=operator.name)
    return operator.scaled(factor)


def summed(
    first: StructuredOperator,
    second: StructuredOperator,
    method: str,
    counts: tuple[float, float],
    transposed: bool = False,
) -> StructuredOperator | None:
    """One block for the sum of two."""
    if isinstance(first, Dense) and isinstance(second, Dense):
        return Dense(first.matrix + second.matrix, name=second.name)
    if isinstance(first, Diagonal) and isinstance(second, Diagonal):
        return Diagonal(first.values + second.values, name=second.name)
    if method == "exact" or type(first) is not type(second):
        return None
    if isinstance(first, Kronecker) and isinstance(second, Kronecker):
        return _product(first, second, method, counts, transposed)
    if isinstance(first, GroupedKronecker) and isinstance(second, GroupedKronecker):
        groups = [
            _product(Kronecker(*a), Kronecker(*b), method, counts, transposed)
            for a, b in zip(_groups(first), _groups(second), strict=True)
        ]
        left, right = (torch.stack(side) for side in zip(*((g.left, g.right) for g in groups), strict=True))
        return GroupedKronecker(left, right, name=second.name)
    if isinstance(first, HalfDiagonal) and isinstance(second, HalfDiagonal):
        return _half_diagonal(first, second) if first.side == second.side else None
    if isinstance(first, KroneckerEigen | GroupedKroneckerEigen):
        return _corrected(first, cast("KroneckerEigen | GroupedKroneckerEigen", second))
    if isinstance(first, LowRankMatrix) and isinstance(second, LowRankMatrix):
        return _low_rank(first, second)
    return None


def _groups(operator: GroupedKronecker) -> list[tuple[Tensor, Tensor]]:
    """Left and right factor of every group."""
    return list(zip(operator.left, operator.right, strict=True))


def _product(
    first: Kronecker, second: Kronecker, method: str, counts: tuple[float, float], transposed: bool
) -> Kronecker:
    """One Kronecker product for the sum of two."""
    nonzero = [term for term in (first, second) if float(term.trace()) > 0]
    if len(nonzero) < 2:
        return nonzero[0] if nonzero else second
    if method == "kl":
        return _nearest_gaussian(nonzero)
    if method == "count" and transposed:
        swapped = [Kronecker(term.right, term.left, name=term.name) for term in nonzero]
        one = cast(Kronecker, merge(swapped, "count", counts))
        return Kronecker(one.right, one.left, name=one.name)
    return cast(Kronecker, merge(nonzero, method, counts if method == "count" else None))


def _nearest_gaussian(terms: Sequence[Kronecker]) -> Kronecker:
    """The KL merge, inside the span of the factors: dead inputs and outputs have no curvature to compare."""
    lefts = [term.left.double() for term in terms]
    rights = [term.right.double() for term in terms]
    resolution = torch.finfo(terms[0].dtype).eps
    left_basis, right_basis = _span(lefts, resolution), _span(rights, resolution)
    inside = [
        Kronecker(_between(left_basis, left), _between(right_basis, right), name=term.name)
        for left, right, term in zip(lefts, rights, terms, strict=True)
    ]
    one = cast(Kronecker, merge(inside, "kl"))
    left, right = _between(left_basis.T, one.left), _between(right_basis.T, one.right)
    kind = terms[0].dtype
    return Kronecker(left.to(kind), right.to(kind), name=terms[-1].name)


def _span(factors: Sequence[Tensor], resolution: float) -> Tensor:
    """Orthonormal columns that span all factors' images."""
    # Factors weigh alike, whatever their scales: Σ F / tr F
    total = torch.stack([factor / factor.trace() for factor in factors]).sum(0)
    values, vectors = torch.linalg.eigh(total)
    kept: Tensor = vectors[:, values > len(total) * resolution * values[-1]]
    return kept


def _between(basis: Tensor, matrix: Tensor) -> Tensor:
    """Uᵀ M U, exactly symmetric."""
    product = basis.T @ matrix @ basis
    return (product + product.T) / 2


Corrected = KroneckerEigen | GroupedKroneckerEigen


def _corrected(first: Corrected, second: Corrected) -> StructuredOperator:
    """Eigenvalue-corrected products: a common eigenbasis, and the eigenvalues nearest in Frobenius norm."""
    # The basis is that of the sum's partial traces, Σₖ Q_Lk diag(λₖ 1) Q_Lkᵀ on the left; the eigenvalues are
    # the diagonal of the sum in this basis, Σₖ (Q_Lᵀ Q_Lk)² λₖ ((Q_Rᵀ Q_Rk)²)ᵀ.
    pair = (first, second)
    make: Callable[[Tensor, Tensor, Tensor], StructuredOperator]
    make = GroupedKroneckerEigen if isinstance(first, GroupedKroneckerEigen) else KroneckerEigen
    same = torch.equal(first.left_vectors, second.left_vectors) and torch.equal(
        first.right_vectors, second.right_vectors
    )
    if same:
        return make(first.left_vectors, first.right_vectors, first.values + second.values)
    left_sum = sum(_spectral(m.left_vectors.double(), m.values.double().sum(-1)) for m in pair)
    right_sum = sum(_spectral(m.right_vectors.double(), m.values.double().sum(-2)) for m in pair)
    left, right = torch.linalg.eigh(left_sum)[1], torch.linalg.eigh(right_sum)[1]
    values = torch.stack(
        [
            (left.mT @ m.left_vectors.double()).square()
            @ m.values.double()
            @ (right.mT @ m.right_vectors.double()).square().mT
            for m in pair
        ]
    ).sum(0)
    return make(left.to(first.dtype), right.to(first.dtype), values.to(first.dtype))


def _half_diagonal(first: HalfDiagonal, second: HalfDiagonal) -> HalfDiagonal:
    """The same where one side is a diagonal in both: the basis of the other side alone is turned."""
    pair = [(m.vectors.double(), m.values.double()) for m in (first, second)]
    if first.side == "right":
        pair = [(vectors, values.mT) for vectors, values in pair]
    if torch.equal(first.vectors, second.vectors):
        return first.with_values(first.values + second.values)
    basis = torch.linalg.eigh(sum(_spectral(vectors, values.sum(0)) for vectors, values in pair))[1]
    total = torch.stack([v @ (basis.mT @ q).square().mT for q, v in pair]).sum(0)
    total = total.mT.contiguous() if first.side == "right" else total
    return HalfDiagonal(basis.to(first.dtype), total.to(first.dtype), first.side, name=second.name)


def _spectral(vectors: Tensor, values: Tensor) -> Tensor:
    """Q diag(v) Qᵀ, for one or many."""
    return (vectors * values[..., None, :]) @ vectors.mT


def _low_rank(first: LowRankMatrix, second: LowRankMatrix) -> LowRankMatrix | None:
    """The leading eigenpairs of the sum, as many as the larger of the two has."""
    if first.rest or second.rest or first.scale is not None or second.scale is not None:
        return None
    rank = max(first.values.numel(), second.values.numel())
    factor = torch.cat([m.basis.double() * m.values.double().sqrt() for m in (first, second)], 1)
    u, s, _ = torch.linalg.svd(factor, full_matrices=False)
    return LowRankMatrix(u[:, :rank].to(first.dtype), s[:rank].square().to(first.dtype), name=second.name)


def check_merge(merge_: str) -> None:
    """Raise unless a way of merging is one of those known."""
    if merge_ not in MERGES:
        added = merge_ in ("add", "sum", "additive")
        raise InputError(
            f"merge={merge_!r}" + (": adding factors counts T equal tasks T² times" if added else ""),
            expected=", ".join(f'"{one}"' for one in MERGES),
            remedy='use merge="svd" at constant memory, or merge="exact" for a list',
        )
