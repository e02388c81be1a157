"""The linear model in weights: (J̃ᵀJ̃ + ρI) δ = J̃ᵀr̃ by conjugate gradients, matrix-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.operator import LinearOperator
from linnet.linear.formed_rows import FormedNormal, FormedRows
from linnet.linear.kernel_system import KernelSystem, kernel_fits
from linnet.linear.preconditioner import FEW, TRIAL, make_preconditioner
from linnet.linear.problem import Memory, Problem, whitened, whitened_inputs
from linnet.linear.system import System
from linnet.memory import parse_bytes
from linnet.params import integer, number
from linnet.progress import track
from linnet.solvers.block_cg import block_cg
from linnet.solvers.cg import cg, relative_residual
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.jacobian import JacobianOperator, NormalOperator


@dataclass(frozen=True)
class CGSettings:
    """Settings of conjugate gradients.

    Args:
        tolerance: Relative residual to reach.
        max_steps: Largest number of steps.
        rank: Rank of the Nyström preconditioner; 0 for the usual one, if it is named.
        columns: Right-hand sides solved at once in the per-example quantities, at the least.
        preconditioner: Its name, or ``"given"`` for an operator; a positive rank names Nyström.
    """

    tolerance: float = 1e-5
    max_steps: int = 2000
    rank: int = 0
    columns: int = 32
    preconditioner: str = "none"

    def __post_init__(self) -> None:
        """Raise on values of the wrong kind; conjugate gradients check their ranges."""
        number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out for 1e-5")
        for name, least in (("max_steps", 1), ("rank", 0)):
            integer(name, getattr(self, name), least)
        if self.rank and self.preconditioner in ("none", "auto"):
            object.__setattr__(self, "preconditioner", "nystrom")

    def finer(self) -> CGSettings:
        """The same for a ridge so small that only float64 answers it; a given operator is left behind."""
        name = "none" if self.preconditioner == "given" else self.preconditioner
        return replace(self, tolerance=min(self.tolerance, FINE), preconditioner=name)

    def run(
        self, matrix: LinearOperator, b: Tensor, preconditioner: LinearOperator | None, start: Tensor | None
    ) -> Solution[Tensor]:
        """Conjugate gradients; where they fail with a preconditioner, they go on without it.

        Args:
            matrix: Symmetric positive definite.
            b: Right-hand side, (n,) or (n, K).
            preconditioner: An approximation of the inverse, or ``None``.
            start: Where to start.

        Returns:
            The solution, with the steps of both.
        """
        found = solve_columns(matrix, b, preconditioner, start, self.tolerance, self.max_steps)
        if preconditioner is None or found.status not in (Status.MAX_STEPS, Status.DIVERGED):
            return found
        at = found.value if found.residual < 1 else start
        plain = solve_columns(matrix, b, None, at, self.tolerance, self.max_steps)
        return replace(plain, steps=found.steps + plain.steps)


@dataclass(frozen=True)
class Effort:
    """Steps and tolerance of block conjugate gradients that need not converge.

    Args:
        steps: Steps at the most.
        tolerance: Relative residual that is enough; ``None`` for that of the settings.
    """

    steps: int
    tolerance: float | None = None


FINE = 1e-11  # relative residual where the ridge is so small that float64 is needed
VECTORS = 10  # of each right-hand side that block conjugate gradients hold
MOST_COLUMNS = 512  # solved at once
STAGNATED = (
    1e-3  # residual up to which an answer at the limit of its precision is taken; the certificate says it
)


def solve_columns(*arguments: Any) -> Solution[Tensor]:
    """Conjugate gradients on tensors."""
    found: Solution[Any] = cg(*arguments)
    return found


def _together(*arguments: Any) -> Solution[Tensor]:
    """Block conjugate gradients on tensors."""
    found: Solution[Any] = block_cg(*arguments)
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
            remedy='use solver="dual", a larger ridge, or the network in float64',
        ) from error


class Primal(System):
    """The solution δ of the regularized least-squares problem, and solves with its matrix.

    Args:
        problem: The data.
        ridge: ρ > 0.
        settings: How to iterate.
        start: Where to start, (P,).
        preconditioner: Any approximation of (J̃ᵀJ̃ + ρI)⁻¹; by default the one that the settings name.
        memory: Budget of blocks of right-hand sides and of formed rows.

    Attributes:
        steps: Steps taken.
        settings: How to iterate, with the preconditioner that was chosen if it was to be.
        jacobian: J̃.
    """

    def __init__(
        self,
        problem: Problem,
        ridge: float,
        settings: CGSettings,
        start: Tensor | None = None,
        preconditioner: LinearOperator | None = None,
        memory: Memory = None,
    ) -> None:
        self.problem, self.ridge, self.memory, self.settings = problem, float(ridge), memory, settings
        self._kernel_form: KernelSystem | None = None
        self._formed: FormedNormal | None = None
        self._preconditioner = preconditioner
        self.jacobian = problem.jacobian
        if problem.weights is not None:
            self.jacobian = JacobianOperator(whitened(problem.function), whitened_inputs(problem), problem.c)
        self.normal = NormalOperator(self.jacobian)
        right = self.jacobian.T.mv(problem.residual.to(problem.function.dtype).reshape(-1))
        solution = self._first(right, start)
        self._delta = accepted(solution, "the linear fit by conjugate gradients")
        self.steps, self.relative_residual = solution.steps, solution.residual
        self.work = {"steps": self.steps}
        # β = (r̃ − J̃δ)/ρ
        fitted = self.jacobian.mv(self._delta).view(self.n, self.c)
        self._beta = (problem.residual.to(fitted.dtype) - fitted) / self.ridge

    @property
    def delta(self) -> Tensor:
        """δ, (P,)."""
        return self._delta

    @property
    def beta(self) -> Tensor:
        """β, (N, C)."""
        return self._beta

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """The relative residual that solves may leave."""
        return self.settings.tolerance

    def _first(self, right: Tensor, start: Tensor | None) -> Solution[Tensor]:
        """δ from a start; a preconditioner is made when it is needed, and chosen if it is to be."""
        settings, steps = self.settings, 0
        if start is not None:
            residual = relative_residual(self.matrix, start[:, None], right[:, None])
            if residual <= settings.tolerance:
                self._choose("none")
                return Solution(start, Status.CONVERGED, 0, residual)
        if settings.preconditioner == "auto" and self._preconditioner is None:
            limit = settings.max_steps if min(self.jacobian.shape) <= FEW else TRIAL
            limit = min(limit, settings.max_steps)
            found = solve_columns(self.matrix, right, None, start, settings.tolerance, limit)
            if found.status is not Status.MAX_STEPS or limit == settings.max_steps:
                self._choose("none")
                return found
            self._choose("nystrom")
            start, steps = found.value, found.steps
        solution = self.settings.run(self.matrix, right, self.preconditioner, start)
        return replace(solution, steps=solution.steps + steps)

    def _choose(self, name: str) -> None:
        """Settle on a preconditioner, if it was left open."""
        if self.settings.preconditioner == "auto":
            self.settings = replace(self.settings, preconditioner=name)

    @property
    def preconditioner(self) -> LinearOperator | None:
        """The approximation of (JᵀJ + ρI)⁻¹ that conjugate gradients use, made when first requested."""
        name = self.settings.preconditioner
        if self._preconditioner is None and name not in ("none", "auto", "given"):
            self._preconditioner = make_preconditioner(
                name, self.normal, self.c, self.ridge, self.settings.rank
            )
        return self._preconditioner

    @property
    def matrix(self) -> LinearOperator:
        """JᵀJ + ρI."""
        return self.normal.damped(self.ridge)

    def solve(self, b: Tensor) -> Tensor:
        """(JᵀJ + ρI)⁻¹ b for columns (P, K).

        As many columns as there are outputs, or more, go together: block conjugate gradients with the rows of
        J formed. Where that ends early, each column goes on by itself.

        Args:
            b: Right-hand sides.

        Returns:
            The solutions.
        """
        settings = self.settings
        if b.shape[1] >= max(self.c, 2):
            matrix = self.formed.damped(self.ridge)
            found = _together(matrix, b, self.preconditioner, settings.tolerance, settings.max_steps)
            if found.converged:
                return found.value
        solution = settings.run(self.matrix, b, self.preconditioner, None)
        return accepted(solution, "a solve by conjugate gradients")

    def approach(self, b: Tensor, effort: Effort) -> Tensor:
        """The same after some block steps, converged or not.

        Args:
            b: Right-hand sides (P, K).
            effort: When to stop.

        Returns:
            Approximate solutions, whose leverages are never too large.
        """
        matrix = self.formed.damped(self.ridge)
        tolerance = self.settings.tolerance if effort.tolerance is None else effort.tolerance
        return _together(matrix, b, self.preconditioner, tolerance, effort.steps).value

    @property
    def formed(self) -> FormedNormal:
        """JᵀJ for many columns at once."""
        if self._formed is None:
            self._formed = FormedNormal(self.jacobian, self.memory)
        return self._formed

    def together(self, memory: Memory = None) -> int:
        """The number of right-hand sides solved at once.

        Args:
            memory: Budget; by default half of what is available.

        Returns:
            A number of columns.
        """
        vector = self.function.space.dim * self.function.dtype.itemsize
        budget = parse_bytes(self.memory if memory is None else memory, self.function.device)
        fitting = budget // (2 * VECTORS * vector)
        return max(self.settings.columns, self.c, min(MOST_COLUMNS, fitting))

    def solved_rows(
        self, x: Inputs, what: str, memory: Memory = None, effort: Effort | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """J(x) and (JᵀJ + ρI)⁻¹ J(x)ᵀ block by block.

        Args:
            x: Examples.
            what: Its name in the progress.
            memory: Budget.
            effort: When to stop; ``None`` to convergence.

        Yields:
            J of the block (n, C, P), and the solutions (P, n, C).
        """
        size = max(1, self.together(memory) // self.c)
        for part in track(list(split(x, size)), what):
            formed = FormedRows(self.function, part, self.c, memory or self.memory, keep=False)
            rows = torch.cat([block for _, block in formed])
            right = rows.T.contiguous()
            solved = self.solve(right) if effort is None else self.approach(right, effort)
            n = batch_size(part)
            yield rows.view(n, self.c, -1), solved.view(-1, n, self.c)

    def own_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """J̃ of the training examples; blocks that fit the budget are kept."""
        return iter(self.formed.rows)

    @property
    def kernel_form(self) -> KernelSystem | None:
        """The same problem by its kernel, ``None`` where that does not fit the budget.

        It takes fewer operations than N·C solves and has M_ii without I − J_i (JᵀJ + ρI)⁻¹ J_iᵀ, in which
        all digits cancel where the ridge is small.
        """
        if self._kernel_form is None and kernel_fits(self.function, self.n * self.c, self.memory):
            self._kernel_form = KernelSystem.solved(self.problem, self.ridge, self.memory)
        return self._kernel_form

    def certificate(self) -> float:
        """Relative residual of the normal equations, checked in float64."""
        return self.relative_residual

    # -- other ridges and other data -------------------------------------------------------------

    def at(self, ridge: float) -> Primal:
        """The solution at another ridge, from the present one; a preconditioner is made again."""
        return Primal(self.problem, ridge, self.settings, self.delta, None, self.memory)

    def removed(self, index: Tensor) -> Primal:
        """The solution without some examples, from the present one."""
        return self._of(self.problem.without(index))

    def extended(self, more: Problem) -> Primal:
        """The solution with more examples, from the present one."""
        return self._of(self.problem.joined(more))

    def with_residual(self, residual: Tensor) -> Primal:
        """The solution for other targets, from the present one."""
        return self._of(replace(self.problem, residual=residual))

    def _of(self, problem: Problem) -> Primal:
        """The solution of another problem of the same network, from the present one."""
        start, preconditioner = self.delta, self._preconditioner
        return Primal(problem, self.ridge, self.settings, start, preconditioner, self.memory)
