"""Symmetric positive semi-definite matrices whose structure gives closed forms.

One matrix M (n x n), one set of questions: M v, M⁻¹ b, log det M, tr M, diag M, samples of N(0, M) and
J M Jᵀ. A precision is turned into the covariance of the same structure by ``inverse()``.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import cholesky, require_finite, require_square, root
from linnet.linalg.operator import (
    LinearOperator,
    ParameterSpace,
    Scaled,
    SymmetricOperator,
    Vector,
    flatten,
    require_damping,
    require_factor,
    require_scalar,
    unflatten,
)
from linnet.linalg.random import Seed, normal
from linnet.params import integer, refuse, tensor
from linnet.tree import node


class StructuredOperator(SymmetricOperator):
    """A symmetric positive semi-definite matrix M with closed forms."""

    # A subclass defines the abstract methods; all others follow from them.

    name: str  # what to call the matrix in errors, for example "G of layer fc1"

    @abstractmethod
    def _solve(self, b: Tensor) -> Tensor:
        """M⁻¹ b for b (n, K)."""

    @abstractmethod
    def _root(self, v: Tensor) -> Tensor:
        """S v for v (n, K), where M = S Sᵀ."""

    @abstractmethod
    def _root_transposed(self, v: Tensor) -> Tensor:
        """Sᵀ v for v (n, K), where M = S Sᵀ."""

    @abstractmethod
    def inverse(self) -> StructuredOperator:
        """M⁻¹, with the same structure."""

    @abstractmethod
    def damped(self, tau: float) -> StructuredOperator:
        """M + τ I, exactly, with a structure that has closed forms too."""

    @abstractmethod
    def scaled(self, scalar: float) -> StructuredOperator:
        """``c M`` for c ≥ 0, with the same structure; also written ``c * M``."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """``log det M``, shape ()."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """``diag M``, shape (n,)."""

    def __mul__(self, scalar: float) -> LinearOperator:
        """``c M``, with the structure kept for c ≥ 0."""
        return self.scaled(scalar) if require_scalar(scalar) >= 0 else Scaled(self, scalar)

    def trace(self) -> Tensor:
        """``tr M``, shape ()."""
        return self.diagonal().sum()

    def solve(self, b: Vector) -> Vector:
        """The solution x of M x = b.

        Args:
            b: (n,), (n, K), or Params when M has a parameter space.

        Returns:
            x, in kind.

        Raises:
            InputError: b does not fit.
            NumericalError: M is singular; the error names it.
        """
        flat = flatten(self, b)
        solution = self._solve(flat.unsqueeze(1)).squeeze(1) if flat.ndim == 1 else self._solve(flat)
        return unflatten(self, solution, b)

    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Samples of the Gaussian N(0, M): M is the covariance (of a precision, take the inverse first).

        Args:
            n: Number of samples.
            seed: Seed or generator; None for torch's global generator.

        Returns:
            (n, P), where M is P x P.
        """
        integer("n", n, remedy="pass n=1 or more")
        noise = normal((self.shape[1], n), seed, self.dtype, self.device)
        return self._root(noise).T

    def quadratic(self, rows: Tensor) -> Tensor:
        """J M Jᵀ, symmetric and positive semi-definite by construction.

        Args:
            rows: J, (..., C, P), or one row (P,).

        Returns:
            (..., C, C), or () for one row.

        Raises:
            InputError: The last dimension is not P.
        """
        expected = f"a dense {self.dtype} tensor (..., C, {self.shape[0]})"
        tensor("rows", rows, expected, convert=False)
        if rows.ndim == 0 or rows.shape[-1] != self.shape[0] or rows.dtype != self.dtype:
            refuse("rows", rows, expected, f"its last axis is that of {self!r}")
        columns = rows.reshape(-1, rows.shape[-1]).T  # (P, ...C)
        half = self._root_transposed(columns).T.reshape(rows.shape)  # J S, (..., C, P)
        return half @ half if rows.ndim == 1 else half @ half.mT


@node("matrix", "space", "name")
class Dense(StructuredOperator):
    """A matrix without structure, factorized when first needed."""

    def __init__(self, matrix: Tensor, space: ParameterSpace | None = None, name: str = "matrix") -> None:
        require_symmetric(matrix, name)
        if matrix.ndim != 2:
            refuse(name, matrix, "one matrix (n, n)", "pass one matrix")
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device = matrix.dtype, matrix.device
        self.space, self.name = require_space(space, self.shape[0]), name
        self.matrix = matrix

    @cached_property
    def _cholesky(self) -> Tensor:
        """L with M = L Lᵀ, for positive definite M."""
        return cholesky(self.matrix, self.name)

    @cached_property
    def _square_root(self) -> Tensor:
        """S with M = S Sᵀ, also for singular M."""
        return root(self.matrix, self.name)

    def mm(self, v: Tensor) -> Tensor:
        """M v."""
        return self.matrix @ v

    def dense(self) -> Tensor:
        """M itself."""
        return self.matrix

    def inverse(self) -> Dense:
        """M⁻¹ from the Cholesky factor."""
        return Dense(torch.cholesky_inverse(self._cholesky), self.space, f"inverse of {self.name}")

    def damped(self, tau: float) -> Dense:
        """M + τ I."""
        identity = torch.eye(self.shape[0], dtype=self.dtype, device=self.device)
        return Dense(self.matrix + require_damping(tau) * identity, self.space, self.name)

    def scaled(self, scalar: float) -> Dense:
        """``c M``."""
        return Dense(require_factor(scalar) * self.matrix, self.space, self.name)

    def logdet(self) -> Tensor:
        """2 Σ log Lᵢᵢ."""
        return 2 * self._cholesky.diagonal().log().sum()

    def diagonal(self) -> Tensor:
        """Mᵢᵢ."""
        return self.matrix.diagonal()

    def _solve(self, b: Tensor) -> Tensor:
        return torch.cholesky_solve(b, self._cholesky)

    def _root(self, v: Tensor) -> Tensor:
        return self._square_root @ v

    def _root_transposed(self, v: Tensor) -> Tensor:
        return self._square_root.T @ v


@node("values", "space", "name")
class Diagonal(StructuredOperator):
    """A diagonal matrix."""

    def __init__(self, values: Tensor, space: ParameterSpace | None = None, name: str = "diagonal") -> None:
        if values.ndim != 1 or not values.is_floating_point():
            raise InputError(
                f"{name} has shape {tuple(values.shape)} and type {values.dtype}",
                "floats (n,)",
                remedy="pass the diagonal alone, as a vector of floats",
            )
        require_finite(values, name)
        if bool((values < 0).any()):
            raise InputError(
                f"{name} has the negative entry {float(values.min()):.3g}",
                expected="no negative entry",
                remedy="use a positive semi-definite curvature (Gauss-Newton, Fisher), or clamp it at 0",
            )
        self.shape = (values.shape[0], values.shape[0])
        self.dtype, self.device = values.dtype, values.device
        self.space, self.name = require_space(space, self.shape[0]), name
        self.values = values

    def mm(self, v: Tensor) -> Tensor:
        """Mᵢᵢ vᵢ."""
        return self.values[:, None] * v

    def inverse(self) -> Diagonal:
        """1 / Mᵢᵢ."""
        return Diagonal(1 / require_positive(self.values, self.name), self.space, f"inverse of {self.name}")

    def damped(self, tau: float) -> Diagonal:
        """Mᵢᵢ + τ."""
        return Diagonal(self.values + require_damping(tau), self.space, self.name)

    def scaled(self, scalar: float) -> Diagonal:
        """``c Mᵢᵢ``."""
        return Diagonal(require_factor(scalar) * self.values, self.space, self.name)

    def logdet(self) -> Tensor:
        """Σ log Mᵢᵢ."""
        return require_positive(self.values, self.name).log().sum()

    def diagonal(self) -> Tensor:
        """Mᵢᵢ."""
        return self.values

    def _solve(self, b: Tensor) -> Tensor:
        return b / require_positive(self.values, self.name)[:, None]

    def _root(self, v: Tensor) -> Tensor:
        return self.values.sqrt()[:, None] * v

    def _root_transposed(self, v: Tensor) -> Tensor:
        return self._root(v)


def require_space(space: ParameterSpace | None, n: int) -> ParameterSpace | None:
    """A parameter space of dimension n, or None."""
    if space is not None and space.dim != n:
        raise InputError(
            f"space has dimension {space.dim}",
            expected=f"{n}, the size of the matrix",
            remedy="pass the space of the parameters that the matrix is over, or leave space= out",
        )
    return space


def require_symmetric(matrix: Tensor, name: str) -> None:
    """Check that a matrix, or each of a batch, is square, finite and symmetric up to rounding."""
    # matrix (..., n, n)
    require_square(matrix, name)
    require_finite(matrix, name)
    if not matrix.numel():
        return
    largest = functools.partial(torch.linalg.vector_norm, ord=torch.inf, dim=(-2, -1))
    asymmetry = largest(matrix - matrix.mT)
    if bool((asymmetry > 1e3 * torch.finfo(matrix.dtype).eps * largest(matrix)).any()):
        raise InputError(
            f"{name} is not symmetric: two mirrored entries differ by {float(asymmetry.max()):.3g}",
            expected="a symmetric matrix",
            remedy="pass (M + M.mT) / 2 if the difference is rounding",
        )


def require_positive(values: Tensor, name: str) -> Tensor:
    """Eigenvalues that can be divided by."""
    if values.numel() and bool((values <= 0).any()):
        raise NumericalError(
            f"{name} is singular: its smallest eigenvalue is {float(values.min()):.3g}",
            expected="a positive definite matrix",
            remedy="add a damping first, for example with .damped(1e-3)",
        )
    return values


# -- eigenbasis ------------------------------------------------------------------------------------
# Symmetric matrices by their eigenvalues in a structured basis, Q diag(λ) Qᵀ.


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
