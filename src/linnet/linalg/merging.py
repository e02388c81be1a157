"""One Kronecker product for a sum of several, Σₖ Lₖ ⊗ Rₖ.

A sum of Kronecker products is not one. Four ways to go on: keep the list (``exact``), take the nearest
product in Frobenius norm (``svd``), the nearest Gaussian (``kl``), or average one factor by numbers of
examples (``count``). All give T times the matrix for T equal terms; adding the factors one by one
would give T² times it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import cholesky
from linnet.linalg.kronecker import Kronecker
from linnet.linalg.operator import LinearOperator, Sum

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
