"""Conjugate gradients as linear models use them: their settings, a run, and when its end is an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.operator import LinearOperator
from linnet.params import integer, number
from linnet.solvers.cg import cg
from linnet.solvers.solution import Solution, Status

FINE = 1e-11  # relative residual where the ridge is so small that float64 is needed
STAGNATED = (
    1e-3  # residual up to which an answer at the limit of its precision is taken; the certificate says it
)


@dataclass(frozen=True)
class CGSettings:
    """Settings of conjugate gradients."""

    tolerance: float = 1e-5  # relative residual to reach
    max_steps: int = 2000  # largest number of steps
    rank: int = 0  # rank of a Nyström or pivoted Cholesky preconditioner; 0 for the usual one
    columns: int = 32  # right-hand sides solved at once in the per-example quantities, at the least
    preconditioner: str = "none"  # its name, or ``"given"`` for an operator

    def __post_init__(self) -> None:
        """Raise on values of the wrong kind; conjugate gradients check their ranges."""
        number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out for 1e-5")
        for name, least in (("max_steps", 1), ("rank", 0)):
            integer(name, getattr(self, name), least)

    def finer(self) -> CGSettings:
        """The same for a ridge so small that only float64 answers it; a given operator is left behind."""
        name = "none" if self.preconditioner == "given" else self.preconditioner
        return replace(self, tolerance=min(self.tolerance, FINE), preconditioner=name)

    def run(
        self, matrix: LinearOperator, b: Tensor, preconditioner: LinearOperator | None, start: Tensor | None
    ) -> Solution[Tensor]:
        """Conjugate gradients; where they fail with a preconditioner, they go on without it."""
        # b (n,)
        found = solve_columns(matrix, b, preconditioner, start, self.tolerance, self.max_steps)
        if preconditioner is None or found.status not in (Status.MAX_STEPS, Status.DIVERGED):
            return found
        at = found.value if found.residual < 1 else start
        plain = solve_columns(matrix, b, None, at, self.tolerance, self.max_steps)
        return replace(plain, steps=found.steps + plain.steps)


@dataclass(frozen=True)
class Effort:
    """Steps and tolerance of block conjugate gradients that need not converge."""

    steps: int  # steps at the most
    tolerance: float | None = None  # relative residual that is enough; ``None`` for that of the settings


def solve_columns(*arguments: Any) -> Solution[Tensor]:
    """Conjugate gradients on tensors."""
    found: Solution[Any] = cg(*arguments)
    return found


def accepted(solution: Solution[Tensor], what: str) -> Tensor:
    """The answer, if it converged or came as far as its precision lets it."""
    if solution.status is Status.STAGNATED and solution.residual <= STAGNATED:
        return solution.value
    try:
        return solution.require(what)
    except NumericalError as error:
        raise NumericalError(
            error.what,
            expected=f"a relative residual of at most {STAGNATED:g}",
            remedy='use solver="dual" (solver="cholesky" for a Gaussian process), a larger ridge, another '
            "preconditioner=, or the network in float64",
        ) from error
