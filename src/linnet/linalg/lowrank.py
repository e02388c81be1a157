"""Low rank plus diagonal: few directions with their own curvature, all others with a common one."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.factorize import eigh, nonnegative, require_finite
from linnet.linalg.operator import ParameterSpace, require_damping, require_factor
from linnet.linalg.structured import StructuredOperator, require_positive, require_space
from linnet.tree import node


@node("basis", "values", "rest", "scale", "space", "name")
class LowRankMatrix(StructuredOperator):
    """M = D (W diag(λ) Wᵀ + c (I − W Wᵀ)) D with orthonormal columns W."""

    # In this form inverse, root and damping only change the numbers λ and c, and a vector's part outside the
    # span of W is found by projection, not by subtracting two nearly equal vectors as Woodbury's formula
    # does. See `from_factor` for the matrix U Uᵀ + diag(d).

    def __init__(
        self,
        basis: Tensor,
        values: Tensor,
        rest: float = 0.0,
        scale: Tensor | None = None,
        space: ParameterSpace | None = None,
        name: str = "low-rank matrix",
    ) -> None:
        if basis.ndim != 2 or values.shape != basis.shape[1:] or basis.shape[1] > basis.shape[0]:
            raise InputError(
                f"basis is {tuple(basis.shape)}, values {tuple(values.shape)}",
                "(n, R) and (R,)",
                remedy="pass one value for each column of the basis",
            )
        if scale is not None and scale.shape != basis.shape[:1]:
            raise InputError(
                f"scale has shape {tuple(scale.shape)}",
                expected=f"({basis.shape[0]},)",
                remedy="pass one scale for each row of the basis",
            )
        require_finite(basis, f"basis of {name}")
        require_finite(values, f"values of {name}")
        self.basis, self.values = basis, nonnegative(values, name)
        self.rest, self.scale = require_damping(rest), scale
        self.shape = (basis.shape[0], basis.shape[0])
        self.dtype, self.device = basis.dtype, basis.device
        self.space, self.name = require_space(space, basis.shape[0]), name

    @classmethod
    def from_factor(
        cls,
        factor: Tensor,
        weights: Tensor | None = None,
        diagonal: Tensor | float = 0.0,
        space: ParameterSpace | None = None,
        name: str = "low-rank matrix",
    ) -> LowRankMatrix:
        """The matrix U diag(w) Uᵀ + diag(d)."""
        # factor (n, R), weights (R,), diagonal (n,)
        if factor.ndim != 2 or (weights is not None and weights.shape != factor.shape[1:]):
            raise InputError(
                f"factor has shape {tuple(factor.shape)}",
                "(n, R), and one weight a column",
                remedy="pass factor as a matrix, and leave weights= out for ones",
            )
        require_finite(factor, f"factor of {name}")
        if not isinstance(diagonal, Tensor) or diagonal.ndim == 0:
            rest = require_damping(float(diagonal))
            basis, values = _spectrum(factor, weights, name)
            return cls(basis, values + rest, rest, None, space, name)
        # U w Uᵀ + D² = D (V w Vᵀ + I) D with V = D⁻¹ U
        scale = require_positive(diagonal, f"diagonal of {name}").sqrt()
        basis, values = _spectrum(factor / scale[:, None], weights, name)
        return cls(basis, values + 1, 1.0, scale, space, name)

    def mm(self, v: Tensor) -> Tensor:
        """D (W λ Wᵀ + c (I − W Wᵀ)) D v."""
        return self._scaled_by_d(self._spectral(self.values, self.rest, self._scaled_by_d(v)))

    def inverse(self) -> LowRankMatrix:
        """λ⁻¹, c⁻¹ and D⁻¹."""
        values, rest = self._positive()
        scale = None if self.scale is None else 1 / self.scale
        return LowRankMatrix(self.basis, 1 / values, 1 / rest, scale, self.space, f"inverse of {self.name}")

    def damped(self, tau: float) -> LowRankMatrix:
        """λ + τ and c + τ; with D, the sum is decomposed again."""
        tau = require_damping(tau)
        if self.scale is None:
            return LowRankMatrix(self.basis, self.values + tau, self.rest + tau, None, self.space, self.name)
        # M + τ I = (D W) diag(λ − c) (D W)ᵀ + c D² + τ I
        factor, diagonal = self.scale[:, None] * self.basis, self.rest * self.scale**2 + tau
        return LowRankMatrix.from_factor(factor, self.values - self.rest, diagonal, self.space, self.name)

    def scaled(self, scalar: float) -> LowRankMatrix:
        """λ and c times the number."""
        scalar = require_factor(scalar)
        values, rest = scalar * self.values, scalar * self.rest
        return LowRankMatrix(self.basis, values, rest, self.scale, self.space, self.name)

    def logdet(self) -> Tensor:
        """Σ log λ + (n − R) log c + 2 Σ log D."""
        values, rest = self._positive()
        outside = self.basis.shape[0] - self.basis.shape[1]
        inner = values.log().sum() + outside * torch.as_tensor(rest, dtype=torch.float64).log().to(values)
        return inner if self.scale is None else inner + 2 * self.scale.log().sum()

    def diagonal(self) -> Tensor:
        """D² (Σᵣ λᵣ Wᵢᵣ² + c (1 − Σᵣ Wᵢᵣ²))."""
        squared = self.basis**2
        inner = squared @ self.values + self.rest * (1 - squared.sum(1)).clamp(min=0)
        return inner if self.scale is None else inner * self.scale**2

    def _solve(self, b: Tensor) -> Tensor:
        return self.inverse().mm(b)

    def _root(self, v: Tensor) -> Tensor:
        return self._scaled_by_d(self._spectral(self.values.sqrt(), self.rest**0.5, v))

    def _root_transposed(self, v: Tensor) -> Tensor:
        return self._spectral(self.values.sqrt(), self.rest**0.5, self._scaled_by_d(v))

    def _spectral(self, values: Tensor, rest: float, v: Tensor) -> Tensor:
        """(W diag(values) Wᵀ + rest (I − W Wᵀ)) v."""
        inside = self.basis.T @ v  # (R, K)
        product = self.basis @ (values[:, None] * inside)
        if rest == 0.0:
            return product
        outside = v - self.basis @ inside
        outside = outside - self.basis @ (self.basis.T @ outside)  # twice is enough (Parlett 1998, 6.9)
        return product + rest * outside

    def _scaled_by_d(self, v: Tensor) -> Tensor:
        """D v."""
        return v if self.scale is None else self.scale[:, None] * v

    def _positive(self) -> tuple[Tensor, float]:
        """λ and c, if M can be inverted."""
        values = require_positive(self.values, self.name)
        if self.basis.shape[0] == self.basis.shape[1]:
            return values, self.rest or 1.0  # nothing is outside the span
        require_positive(values.new_tensor([self.rest]), self.name)
        return values, self.rest


def _spectrum(factor: Tensor, weights: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """Orthonormal W and λ with W diag(λ) Wᵀ = U diag(w) Uᵀ."""
    basis, triangle = torch.linalg.qr(factor)  # U = Q R
    r = triangle.double()
    core = r @ r.T if weights is None else (r * weights.double()) @ r.T
    values, vectors = eigh((core + core.T) / 2, name)  # R w Rᵀ = E λ Eᵀ, so W = Q E
    if weights is None:
        values = values.clamp(min=0)
    return basis @ vectors.to(basis), values.to(basis)
