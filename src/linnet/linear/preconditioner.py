"""Preconditioners of a linear model by conjugate gradients, (JᵀJ + ρI) δ = Jᵀr or (K + ρI) β = r.

    "nystrom"                        the largest eigenvalues of JᵀJ or K, from its product with random vectors
    "pivoted-cholesky"               some columns of K, chosen by what is left of its diagonal
    "ekfac", "kfac", "diagonal"      (G̃ + τI)⁻¹ with G̃ ≈ JᵀJ the curvature of the frozen network under a
                                     Gaussian likelihood of variance 1, and τ = ρ + tr G̃ / P

JᵀJ has few large eigenvalues and many that are hardly above zero, N·C of them at the most. Nyström takes the
large ones away. The curvatures have full rank: they lift directions in which JᵀJ + ρI is just ρI, which is
why τ is more than ρ and why they are never chosen unasked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.engine import Request, by_structure, layers_of
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.stream import Batch, Batches
from linnet.errors import InputError
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import LinearOperator, SymmetricOperator
from linnet.linalg.random import make_generator
from linnet.linalg.structured import Dense
from linnet.linear.problem import Problem
from linnet.solvers.nystrom import nystrom_preconditioner, pivoted_cholesky
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.jacobian import JacobianOperator

NAMES = ("auto", "none", "nystrom", "ekfac", "kfac", "diagonal")
PRECONDITIONERS = {"function": ("auto", "none", "pivoted-cholesky", "nystrom"), "parameter": NAMES}
RANK = 50  # of Nyström, where none is requested
TRIAL = RANK // 2  # steps without a preconditioner, before one is made that costs as much as RANK steps
FEW = 2 * RANK  # unknowns up to which conjugate gradients end soon anyway


def check_preconditioner(preconditioner: Any) -> None:
    """Raise unless this is a preconditioner."""
    known = preconditioner in NAMES if isinstance(preconditioner, str) else True
    if not known or not isinstance(preconditioner, str | LinearOperator | None):
        raise InputError(
            f"preconditioner={preconditioner!r}",
            expected=", ".join(f'"{name}"' for name in NAMES) + ", Nystrom(rank), an operator or None",
            remedy="leave preconditioner= out to have it chosen",
        )


def preconditioner_bytes(function: Functional, x: Inputs, name: str, rank: int) -> int:
    """Bytes of a preconditioner, those of its making included."""
    p = function.space.dim
    if name == "none":
        return 0
    if name in ("auto", "nystrom"):  # Ω, JᵀJ Ω, its triangular solve, U
        return 4 * (rank or min(RANK, p)) * p * function.dtype.itemsize
    numbers = 2 * p  # eigenvalues, and their inverse
    if name != "diagonal":
        layers = layers_of(function, Batch(0, x, None))
        # factors and their eigenvectors
        numbers += sum(2 * a.groups * (a.matrix[0] ** 2 + a.matrix[1] ** 2) for a in layers if a.factored)
    return numbers * max(4, function.dtype.itemsize)


def precondition(
    name: str, operator: LinearOperator, problem: Problem, ridge: float, rank: int = 0, seed: int = 0
) -> LinearOperator | None:
    """An approximation of (A + ρI)⁻¹, up to a factor."""
    # Source: George et al. 2018 (EKFAC); Frangella, Tropp and Udell 2023 (Nyström); Gardner et al. 2018
    # (pivoted Cholesky).
    if name == "none":
        return None
    rank = rank or min(RANK, *problem.jacobian.shape)
    if name == "nystrom":
        return nystrom_preconditioner(operator, ridge, rank, make_generator(seed))
    if name == "pivoted-cholesky":
        factor = _partial_factor(operator, problem, rank).to(operator.dtype)
        return LowRankMatrix.from_factor(factor, diagonal=ridge, name="pivoted Cholesky + ridge").inverse()
    return CurvatureInverse.of(name, problem.scaled_jacobian, ridge)


class CurvatureInverse(SymmetricOperator):
    """(G̃ + τI)⁻¹ with τ = ρ + tr G̃ / P, for vectors of the network's type."""

    def __init__(self, curvature: Curvature, ridge: float, dtype: torch.dtype) -> None:
        self.curvature, self.dtype = curvature, dtype
        tau = ridge + float(curvature.trace()) / curvature.shape[0]
        self.inverse: LinearOperator = curvature.damped(tau).inverse()
        self.shape, self.device, self.space = curvature.shape, curvature.device, curvature.space

    @classmethod
    def of(cls, name: str, jacobian: JacobianOperator, ridge: float) -> CurvatureInverse:
        """Of the curvature of a network under a Gaussian likelihood of variance 1, which stands for JᵀJ."""
        function = jacobian.function
        return cls(frozen_curvature(name, function, jacobian.x), ridge, function.dtype)

    def at(self, ridge: float) -> CurvatureInverse:
        """At another ρ, the curvature not computed again."""
        return CurvatureInverse(self.curvature, ridge, self.dtype)

    def mm(self, v: Tensor) -> Tensor:
        """The product, in the curvature's own type."""
        return self.inverse.mm(v.to(self.inverse.dtype)).to(self.dtype)


def frozen_curvature(
    name: str,
    function: Functional,
    x: Inputs,
    expectation: Expectation | None = None,
    memory: str | int | None = None,
) -> Curvature:
    """G̃ ≈ JᵀJ of a network in one pass over some inputs: its curvature under a Gaussian likelihood."""
    own = function.check_runs(take(x, slice(0, 1))).shape[1:]
    y = torch.zeros(batch_size(x), *own, dtype=function.dtype, device=function.device)
    return curvature_of(name, function, (x, y), expectation or Expectation(Gaussian(variance=1.0)), memory)


def curvature_of(
    name: str,
    function: Functional,
    data: tuple[Inputs, Tensor],
    expectation: Expectation,
    memory: str | int | None = None,
) -> Curvature:
    """The curvature of a network in one pass over some data, (P x P)."""
    batches, request = Batches(data, function), Request(expectation, memory=memory)
    (curvature,) = by_structure(function, batches, request, [(name, name)])
    return curvature


def _partial_factor(operator: LinearOperator, problem: Problem, rank: int) -> Tensor:
    """L with L Lᵀ ≈ K̃."""
    if isinstance(operator, Dense):
        matrix = operator.matrix
        return pivoted_cholesky(matrix.diagonal().clamp_min(0), lambda i: matrix[i], rank)
    function, x, c = problem.function, problem.x, problem.c
    diagonal = own_kernels(function, x).diagonal(dim1=1, dim2=2).reshape(-1, 1).double()
    diagonal = problem.weighed(problem.weighed(diagonal))[:, 0]
    rows: dict[int, Tensor] = {}

    def row(i: int) -> Tensor:
        example, output = divmod(i, c)
        if example not in rows:
            one = gram(function, take(x, slice(example, example + 1)), x, form="full")[0].reshape(c, -1)
            rows[example] = problem.weighed(problem.weighed(one.T.double()).T, example).T
        return rows[example][:, output]

    return pivoted_cholesky(diagonal.clamp_min(0), row, rank)
