"""The result of an iterative method: solution, status and residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from linnet.distributed import Share, all_same, current, from_first, sum_numbers, with_share
from linnet.errors import NumericalError
from linnet.linalg.operator import LinearOperator, SymmetricOperator
from linnet.params import refuse, tensor
from linnet.shown import Record
from linnet.tree import node

V = TypeVar("V")


@node()
class Status(Enum):
    """Status of an iteration; the value states what it means and what to try.

    Example:
        >>> Status.CONVERGED.value
        'the residual is below the tolerance'
    """

    CONVERGED = "the residual is below the tolerance"
    MAX_STEPS = "the step limit was reached first: allow more steps, use a preconditioner, or damp more"
    STAGNATED = (
        "rounding errors hide further progress: use float64, a larger tolerance, "
        "a preconditioner, or damp more"
    )
    DIVERGED = (
        "the iteration broke down: look for NaN in the operator and the right-hand side, "
        "and check that the operator is symmetric positive definite (damp more if it is nearly not)"
    )


@node()
@dataclass(frozen=True, repr=False)
class Solution(Record, Generic[V]):
    """The result of an iterative method.

    Args:
        value: The answer; the last iterate when the method did not converge.
        status: How it ended.
        steps: Number of iterations.
        residual: Relative residual of the answer itself, computed again; the largest over all right-hand
            sides.

    Example:
        >>> Solution(value=1.0, status=Status.CONVERGED, steps=3, residual=1e-9).converged
        True
    """

    value: V
    status: Status
    steps: int
    residual: float

    @property
    def converged(self) -> bool:
        """Whether the residual is below the tolerance."""
        return self.status is Status.CONVERGED

    def require(self, what: str = "the iteration") -> V:
        """The answer, or an error if the method did not converge.

        Args:
            what: What was being solved, for the error.

        Returns:
            The value.

        Raises:
            NumericalError: The status is not CONVERGED.
        """
        if self.converged:
            return self.value
        outcome = f"{what} ended after {self.steps} steps with the relative residual {self.residual:.2g}"
        raise NumericalError(
            f"{outcome}: {self.status.value}",
            expected="an iteration that reaches its tolerance",
            remedy="raise max_steps= or tolerance=, or compute in float64",
        )


@node()
@dataclass(frozen=True, repr=False)
class Estimate(Record):
    """A random estimate with its own error.

    Args:
        mean: The estimate.
        stderr: Its standard error, estimated from the same samples.

    Example:
        >>> print(Estimate(12.0, 0.25))
        12 ± 0.25
    """

    mean: float
    stderr: float

    @classmethod
    def of(cls, samples: Tensor) -> Estimate:
        """The mean of independent samples and its standard error.

        Args:
            samples: (S,).

        Returns:
            The estimate; the standard error of a single sample is infinite.
        """
        samples = tensor("samples", samples, "numbers (S,), one or more")
        count = samples.numel()
        if not count or samples.ndim != 1:
            refuse("samples", samples, "numbers (S,), one or more", "draw at least one")
        samples = samples if samples.is_floating_point() else samples.double()
        stderr = float(samples.std()) / sqrt(count) if count > 1 else float("inf")
        return cls(float(samples.mean()), stderr)

    def __str__(self) -> str:
        return f"{self.mean:.6g} ± {self.stderr:.2g}"


# -- several processes -----------------------------------------------------------------------------
#
# Iterative solvers on several processes: one process iterates, all share the products.
#
# How often a solver multiplies depends on its residuals, and those on the last bits of small
# decompositions, which another number of threads, or another machine, rounds differently. If all
# processes iterated, one could stop while another goes on. So the first process alone decides, and the
# result is the same on all to the bit.

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class _SharedProducts(SymmetricOperator):
    """The matrix, telling the other processes what is multiplied."""

    def __init__(self, matrix: LinearOperator, share: Share) -> None:
        self.matrix, self.share = matrix, share
        self.shape, self.dtype, self.device, self.space = (
            matrix.shape, matrix.dtype, matrix.device, matrix.space
        )  # fmt: skip

    def mm(self, v: Tensor) -> Tensor:
        """A v, (n, K) to (n, K)."""
        if v.shape[1] == 0:
            return torch.zeros_like(v)
        sum_numbers([v.shape[1]])
        v = v.contiguous()
        all_same([v])
        with with_share(self.share):
            return self.matrix.mm(v)


def solved_by_first(matrix: LinearOperator, solve: Callable[[LinearOperator], R], share: Share) -> R:
    """The solution of a solver, the same on all processes."""
    if share.world == 1:
        return solve(matrix)
    found: R | None = None
    if share.rank == 0:
        with with_share(Share()):  # what the solver does between products it does alone
            found = solve(_SharedProducts(matrix, share))
        sum_numbers([0])  # columns of the next product: there is none
    else:
        while columns := round(sum_numbers([0])[0]):
            v = torch.empty(matrix.shape[0], columns, dtype=matrix.dtype, device=matrix.device)
            all_same([v])
            matrix.mm(v)
    return from_first(found, matrix.device)


def by_first_process(solver: F) -> F:
    """A solver that the first process leads inside ``linnet.distributed.sharing``."""

    @functools.wraps(solver)
    def solved(operator: LinearOperator, *args: Any, **kwargs: Any) -> Any:
        share = current()
        if share.world == 1:
            return solver(operator, *args, **kwargs)
        return solved_by_first(operator, lambda matrix: solver(matrix, *args, **kwargs), share)

    return solved  # type: ignore[return-value]
