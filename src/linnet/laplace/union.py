"""The curvature of the union of two data sets, as used by ``Laplace.fit(data, add=True)``.

The sums behind a matrix add up, so that the union is exact where a block is made of sums alone:

    full, block, diagonal     G₁ + G₂
    kfac                      (B₁ + B₂) ⊗ (M₁ A₁ + M₂ A₂) / (M₁ + M₂), as B is a sum and A a mean over the
                              M inputs that count: examples, or positions of those, that have labels
    low-rank                  U₁ U₁ᵀ + U₂ U₂ᵀ, of up to twice the rank

Eigenvalue-corrected factors would need both data sets once more, and KFRA's recursion all layers at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.parts import Part
from linnet.errors import InputError
from linnet.linalg.grouped import GroupedKronecker
from linnet.linalg.kronecker import HalfDiagonal, Kronecker
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator


def union(first: Curvature, second: Curvature) -> Curvature:
    """The curvature of two data sets at the same weights."""
    if first.function.fingerprint() != second.function.fingerprint():
        raise InputError(
            "add=True, but the network's weights have changed since the first fit",
            expected="curvatures at the same weights, which alone add up",
            remedy="fit all data again, without add=True",
        )
    counts = first.made.examples, second.made.examples
    parts = tuple(_both(one, other, counts) for one, other in zip(first.parts, second.parts, strict=True))
    return Curvature(parts, first.function, replace(first.made, examples=sum(counts)))


def _both(one: Part, other: Part, examples: tuple[float, float]) -> Part:
    """One block of both."""
    if one.terms is None or other.terms is None:
        return replace(one, operator=_sum(one, one.operator, other.operator, examples))
    terms = one.terms, other.terms
    return replace(one, operator=_sum(one, one.operator, other.operator, terms), terms=sum(terms))


def _sum(
    part: Part, one: StructuredOperator, other: StructuredOperator, counts: tuple[float, float]
) -> StructuredOperator:
    """The matrix of both, where means weigh by counts."""
    name = part.layer.name
    if isinstance(one, Dense) and isinstance(other, Dense):
        return Dense(one.matrix + other.matrix, name=name)
    if isinstance(one, Diagonal) and isinstance(other, Diagonal):
        return Diagonal(one.values + other.values, name=name)
    if isinstance(one, LowRankMatrix) and isinstance(other, LowRankMatrix):
        roots = [low.basis * low.values.sqrt() for low in (one, other)]
        return _low_rank(torch.cat(roots, 1), name)
    if part.structure == "kfac":
        if isinstance(one, Kronecker) and isinstance(other, Kronecker):
            return Kronecker(
                *_product(part, (one.left, one.right), (other.left, other.right), counts), name=name
            )
        if isinstance(one, GroupedKronecker) and isinstance(other, GroupedKronecker):
            return GroupedKronecker(
                *_product(part, (one.left, one.right), (other.left, other.right), counts), name=name
            )
    halved = ", one factor of which is a diagonal" if isinstance(one, HalfDiagonal) else ""
    raise InputError(
        f"add=True with the {part.structure} block of {name}{halved}",
        expected='a structure that adds up: "kfac", "diagonal", "block", "full" or "low-rank"',
        remedy="fit all data at once",
    )


def _low_rank(factor: Tensor, name: str) -> LowRankMatrix:
    """U Uᵀ with at most as many columns as rows."""
    if factor.shape[1] > factor.shape[0]:
        vectors, values, _ = torch.linalg.svd(factor, full_matrices=False)
        return LowRankMatrix(vectors, values**2, name=name)
    return LowRankMatrix.from_factor(factor, name=name)


def _product(
    part: Part, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], counts: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Left and right factors of both: the one a sum, the other a mean."""
    turned = part.layer.factored and part.layer.transposed
    (first_sum, first_mean), (second_sum, second_mean) = (
        pair[::-1] if turned else pair for pair in (one, other)
    )
    weights = counts
    if not part.layer.factored:  # factors of per-example gradients: the right one is divided by tr L
        weights = float(first_sum.trace()), float(second_sum.trace())
    total = sum(weights) or 1.0
    mean = weights[0] / total * first_mean + weights[1] / total * second_mean
    return (mean, first_sum + second_sum) if turned else (first_sum + second_sum, mean)
