"""Symmetric matrices by their eigenvalues in a structured basis, Q diag(λ) Qᵀ."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from torch import Tensor

from linnet.linalg.operator import require_damping, require_factor
from linnet.linalg.space import ParameterSpace
from linnet.linalg.structured import StructuredOperator, require_positive, require_space


class EigenbasisOperator(StructuredOperator):
    """A matrix Q diag(λ) Qᵀ; how Q is kept is left to each class."""

    values: Tensor  # λ, of the shape that the basis has

    def _hold(self, values: Tensor, space: ParameterSpace | None, name: str) -> None:
        """Take checked eigenvalues, and what follows from them."""
        n = values.numel()
        self.values, self.shape, self.dtype, self.device = values, (n, n), values.dtype, values.device
        self.space, self.name = require_space(space, n), name

    @abstractmethod
    def with_values(self, values: Tensor) -> Self:
        """Other eigenvalues in the same basis."""

    @abstractmethod
    def _spectral(self, values: Tensor, v: Tensor) -> Tensor:
        """Q diag(values) Qᵀ v for columns v."""

    def mm(self, v: Tensor) -> Tensor:
        """Q diag(λ) Qᵀ v."""
        return self._spectral(self.values, v)

    def inverse(self) -> Self:
        """Q diag(λ⁻¹) Qᵀ."""
        return self.with_values(1 / require_positive(self.values, self.name))

    def damped(self, tau: float) -> Self:
        """Q diag(λ + τ) Qᵀ."""
        return self.with_values(self.values + require_damping(tau))

    def scaled(self, scalar: float) -> Self:
        """Q diag(c λ) Qᵀ."""
        return self.with_values(require_factor(scalar) * self.values)

    def logdet(self) -> Tensor:
        """Σ log λ."""
        return require_positive(self.values, self.name).log().sum()

    def trace(self) -> Tensor:
        """Σ λ."""
        return self.values.sum()

    def _solve(self, b: Tensor) -> Tensor:
        return self._spectral(1 / require_positive(self.values, self.name), b)

    def _root(self, v: Tensor) -> Tensor:
        return self._spectral(self.values.sqrt(), v)

    def _root_transposed(self, v: Tensor) -> Tensor:
        return self._spectral(self.values.sqrt(), v)
