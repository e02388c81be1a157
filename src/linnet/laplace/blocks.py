"""Eigendecomposed blocks of a Laplace posterior, reused for all hyper-parameters.

The precision of a block is H = s/m G + Δ: G its curvature, s the scale of the data, m the noise variance
relative to that which G was computed with, Δ the prior precision. Where Δ = δ I an eigendecomposition of G
gives H for all s, m and δ. A Kronecker product may instead be damped in its factors, which keeps H a product:

    matrix-normal   (√N Ā + √δ I) ⊗ (√N Ḡ/m + √δ I), N = s x number of examples (Botev 2020, eq. 5.14)
    factored        the same with the balance ω of the trace norm (eq. 4.25 to 4.27)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Part
from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import cholesky, eigh, nonnegative, nonnegative_each
from linnet.linalg.kronecker import Kronecker, KroneckerEigen
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.structured import Dense, Diagonal, StructuredOperator

DAMPINGS = ("exact", "matrix-normal", "factored")
Rebuild = Callable[[Tensor], StructuredOperator]


@dataclass(frozen=True, eq=False)
class Point:
    """Hyper-parameters as one block sees them, float64."""

    prior: Tensor  # δ, () or (p,)
    scale: Tensor  # s, ()
    noise: Tensor  # m, ()


class Block(ABC):
    """The precision of one block for any hyper-parameters."""

    name: str  # what to call the block in errors

    @abstractmethod
    def logdet(self, at: Point) -> Tensor:
        """``log det H``, differentiable in the hyper-parameters."""

    @abstractmethod
    def covariance(self, at: Point) -> StructuredOperator:
        """H⁻¹."""

    @abstractmethod
    def slope(self, at: Point, towards: Point) -> StructuredOperator:
        """H⁻¹ Ḣ H⁻¹, minus the derivative of H⁻¹, for a Ḣ that is positive semi-definite."""

    def _positive(self, values: Tensor) -> Tensor:
        """Eigenvalues of H, or an error."""
        smallest = float(values.detach().min()) if values.numel() else 1.0
        if not smallest > 0:
            raise NumericalError(
                f"the posterior precision of {self.name} has the eigenvalue {smallest:.4g}",
                expected="a positive definite precision",
                remedy="raise prior_precision, or use the Gauss-Newton matrix if this is a Hessian",
            )
        return values


class SpectralBlock(Block):
    """H by its eigenvalues, in a basis that does not depend on the hyper-parameters."""

    def __init__(self, name: str, dtype: torch.dtype, rebuild: Rebuild) -> None:
        self.name, self._dtype, self._rebuild = name, dtype, rebuild

    @abstractmethod
    def _precision(self, at: Point) -> Tensor:
        """Eigenvalues of H."""

    def logdet(self, at: Point) -> Tensor:
        """The sum of their logarithms."""
        return self._positive(self._precision(at)).log().sum()

    def covariance(self, at: Point) -> StructuredOperator:
        """The same basis with their inverses."""
        return self._rebuild(self._positive(self._precision(at)).reciprocal().to(self._dtype))

    def slope(self, at: Point, towards: Point) -> StructuredOperator:
        """Ḣ / H² of each eigenvalue."""
        values, change = _derivative(self._precision, at, towards)
        return self._rebuild((change / self._positive(values).square()).to(self._dtype))


class EigenBlock(SpectralBlock):
    """H = Q (s/m λ + δ) Qᵀ, in whichever form Q is kept; for Q = I also with one δ a parameter."""

    def __init__(self, name: str, values: Tensor, rebuild: Rebuild) -> None:
        super().__init__(name, values.dtype, rebuild)
        self.values = values

    def _precision(self, at: Point) -> Tensor:
        """s/m λ + δ."""
        return self.values.double() * (at.scale / at.noise) + at.prior


class ProductBlock(SpectralBlock):
    """H = (a α + a′ I) ⊗ (b β + b′ I): a Kronecker product damped in its factors."""

    # sums (R, n), means (R, m)

    def __init__(
        self, name: str, sums: Tensor, means: Tensor, rebuild: Rebuild, examples: float | None
    ) -> None:
        super().__init__(name, sums.dtype, rebuild)
        self.sums, self.means, self._examples = sums, means, examples

    def logdet(self, at: Point) -> Tensor:
        """Σ_r m log det of the one factor + n log det of the other."""
        left, right = (self._positive(values) for values in self._factors(at))
        return (right.shape[1] * left.log().sum(1) + left.shape[1] * right.log().sum(1)).sum()

    def _precision(self, at: Point) -> Tensor:
        """All eigenvalues of H, (R, n, m)."""
        left, right = self._factors(at)
        return left[:, :, None] * right[:, None]

    def _factors(self, at: Point) -> tuple[Tensor, Tensor]:
        """Eigenvalues of both damped factors."""
        sums, means, root = self.sums.double(), self.means.double(), at.prior.sqrt()
        if self._examples is not None:
            # √N Ḡ + √λ I and √N Ā + √λ I, where Ḡ = Σ/N₀ (Botev 2020, eq. 5.14)
            n = (at.scale * self._examples).sqrt()
            return n / (self._examples * at.noise) * sums + root, n * means + root
        # (L + √τ/ω I) ⊗ (R + ω√τ I), ω = √((tr R / m) / (tr L / n)) (Botev 2020, eq. 4.25 to 4.27)
        left = sums * (at.scale / at.noise)
        one, other = left.mean(1, keepdim=True), means.mean(1, keepdim=True)
        empty = (one <= 0) | (other <= 0)
        ratio = torch.where(empty, 1.0, other) / torch.where(empty, 1.0, one)
        keep, omega = (~empty).double(), ratio.sqrt()
        return keep * left + root / omega, keep * means + omega * root


class DenseBlock(Block):
    """A matrix without structure: eigenvalues for one δ, a Cholesky factorization for one δ a parameter."""

    # matrix (p, p)

    def __init__(self, name: str, matrix: Tensor, definite: bool) -> None:
        self.name, self.matrix, self._definite = name, matrix, definite

    @cached_property
    def _spectral(self) -> EigenBlock:
        """The same with eigenvalues."""
        values, vectors = eigh(self.matrix, self.name)
        values = nonnegative(values, self.name) if self._definite else values
        one = torch.ones(1, 1, dtype=values.dtype, device=values.device)
        return EigenBlock(self.name, values, partial(_with_vectors, vectors, one, self.name))

    def logdet(self, at: Point) -> Tensor:
        """``log det H``."""
        if at.prior.ndim == 0:
            return self._spectral.logdet(at)
        factor, info = torch.linalg.cholesky_ex(self._precision(at))
        if bool(info != 0):
            self._factor(at)  # tries harder, and raises
        total: Tensor = 2 * factor.diagonal().log().sum()
        return total

    def covariance(self, at: Point) -> StructuredOperator:
        """H⁻¹."""
        if at.prior.ndim == 0:
            return self._spectral.covariance(at)
        inverse = torch.cholesky_inverse(self._factor(at)).to(self.matrix)
        return Dense((inverse + inverse.T) / 2, name=f"posterior covariance of {self.name}")

    def slope(self, at: Point, towards: Point) -> StructuredOperator:
        """H⁻¹ Ḣ H⁻¹."""
        if at.prior.ndim == 0:
            return self._spectral.slope(at, towards)
        inverse = torch.cholesky_inverse(self._factor(at))
        _, change = _derivative(self._precision, at, towards)
        matrix = (inverse @ change @ inverse).to(self.matrix)
        return Dense((matrix + matrix.T) / 2, name=self.name)

    def _precision(self, at: Point) -> Tensor:
        """H."""
        return self.matrix.double() * (at.scale / at.noise) + torch.diag_embed(at.prior)

    def _factor(self, at: Point) -> Tensor:
        """Its Cholesky factor."""
        return cholesky(self._precision(at).detach(), f"posterior precision of {self.name}")


class LowRankBlock(Block):
    """R directions with their own curvature and none in all others."""

    def __init__(self, low: LowRankMatrix, name: str) -> None:
        self.low, self.name = low, name

    def logdet(self, at: Point) -> Tensor:
        """Σ log (s/m λ + δ) + (p − R) log δ, or by the matrix determinant lemma for one δ a parameter."""
        basis, strength = self.low.basis, at.scale / at.noise
        values = self.low.values.double() * strength
        if at.prior.ndim == 0:
            outside = basis.shape[0] - basis.shape[1]
            return (values + at.prior).log().sum() + outside * at.prior.log()
        # log det (Δ + U Uᵀ) = log det Δ + log det (I + Uᵀ Δ⁻¹ U), U = W √(s/m λ)
        root = basis.double() * self.low.values.double().sqrt()
        inner = strength * root.T @ (root / at.prior[:, None])
        identity = torch.eye(len(values), dtype=inner.dtype, device=inner.device)
        return at.prior.log().sum() + torch.logdet(identity + inner)

    def covariance(self, at: Point) -> StructuredOperator:
        """H⁻¹, low rank plus diagonal."""
        low, values = self.low, self.low.values.double() * float(at.scale / at.noise)
        if at.prior.ndim == 0:
            inside = (values + at.prior).reciprocal().to(low.values)
            return LowRankMatrix(low.basis, inside, 1 / float(at.prior), name=self.name)
        factor = low.basis * values.sqrt().to(low.basis)
        return LowRankMatrix.from_factor(factor, diagonal=at.prior.to(low.basis), name=self.name).inverse()

    def slope(self, at: Point, towards: Point) -> StructuredOperator:
        """H⁻¹ Ḣ H⁻¹ for one δ."""
        if at.prior.ndim:
            raise InputError(
                "the gradient of a validation likelihood with several prior precisions in a low-rank block",
                expected="one prior precision",
                remedy='use .tune("grid") or .tune("evidence")',
            )
        low = self.low
        inside = low.values.double()
        values, change = _derivative(lambda p: inside * (p.scale / p.noise) + p.prior, at, towards)
        rest = float(towards.prior / at.prior**2)
        return LowRankMatrix(low.basis, (change / values**2).to(low.values), rest, name=self.name)


def _derivative(function: Callable[[Point], Tensor], at: Point, towards: Point) -> tuple[Tensor, Tensor]:
    """A function of the hyper-parameters and its directional derivative."""
    result: tuple[Tensor, Tensor] = torch.func.jvp(
        lambda p, s, m: function(Point(p, s, m)),
        (at.prior, at.scale, at.noise),
        (towards.prior, towards.scale, towards.noise),
    )  # type: ignore[assignment]
    return result


def make_block(part: Part, damping: str, examples: float, definite: bool) -> Block:
    """Decompose one block of the curvature."""
    operator, name = part.operator, part.layer.name
    if isinstance(operator, Kronecker):
        return _product_block(part, operator, damping, examples)
    if isinstance(operator, KroneckerEigen):
        return EigenBlock(name, operator.values, operator.with_values)
    if isinstance(operator, Diagonal):
        return EigenBlock(name, operator.values, partial(Diagonal, name=name))
    if isinstance(operator, LowRankMatrix) and operator.scale is None and operator.rest == 0:
        return LowRankBlock(operator, name)
    return DenseBlock(name, operator.dense(), definite)


# What rebuilds an operator from eigenvalues is a function of this file, so that a posterior can be pickled.


def _with_vectors(vectors: Tensor, one: Tensor, name: str, values: Tensor) -> StructuredOperator:
    """V diag(v) Vᵀ."""
    return KroneckerEigen(vectors, one, values[:, None], name=name)


def _with_products(basis: KroneckerEigen, turned: bool, values: Tensor) -> StructuredOperator:
    """The Kronecker product of two bases with other eigenvalues."""
    ordered = values.mT if turned else values
    return basis.with_values(ordered.reshape(basis.values.shape).contiguous())


def _product_block(
    part: Part, product: Kronecker, damping: str, examples: float
) -> EigenBlock | ProductBlock:
    """A Kronecker product by the eigendecompositions of its factors, one after the other."""
    name = part.layer.name
    (left, left_vectors), (right, right_vectors) = (
        eigh(factor, f"{side} factor of the curvature of {name}")
        for factor, side in ((product.left, "left"), (product.right, "right"))
    )
    left, right = nonnegative_each(left, name), nonnegative_each(right, name)
    values = left[..., :, None] * right[..., None, :]
    basis = KroneckerEigen(left_vectors, right_vectors, values, name=name)
    if damping == "exact":
        return EigenBlock(name, values, basis.with_values)
    turned = part.layer.factored and part.layer.transposed  # the left factor is that of the inputs
    sums, means = (right, left) if turned else (left, right)
    rows = sums.reshape(-1, sums.shape[-1]), means.reshape(-1, means.shape[-1])
    rebuild = partial(_with_products, basis, turned)
    return ProductBlock(name, *rows, rebuild, examples if damping == "matrix-normal" else None)


# -- union -----------------------------------------------------------------------------------------
#
# The curvature of the union of two data sets, as used by ``Laplace.fit(data, add=True)``.
#
# The sums behind a matrix add up, so that the union is exact where a block is made of sums alone:
#
#     full, block, diagonal     G₁ + G₂
#     kfac                      (B₁ + B₂) ⊗ (M₁ A₁ + M₂ A₂) / (M₁ + M₂), as B is a sum and A a mean over the
#                               M inputs that count: examples, or positions of those, that have labels
#     low-rank                  U₁ U₁ᵀ + U₂ U₂ᵀ, of up to twice the rank
#
# Eigenvalue-corrected factors would need both data sets once more, and KFRA's recursion all layers at
# once.


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
    if part.structure == "kfac" and isinstance(one, Kronecker) and isinstance(other, Kronecker):
        return Kronecker(*_product(part, (one.left, one.right), (other.left, other.right), counts), name=name)
    halved = ", one factor of which is a diagonal" if part.structure == "kfac" else ""
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
