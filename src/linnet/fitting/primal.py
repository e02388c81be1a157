"""The linear fit in the primal: (JᵀJ + ρI) δ = Jᵀr by conjugate gradients, matrix-free.

The dual coordinates follow from the residual, β = (r − Jδ)/ρ, and so does everything that the
dual offers: K(x,X) M = J(x) (JᵀJ + ρI)⁻¹ Jᵀ, and M_ii = (I − J_i (JᵀJ + ρI)⁻¹ J_iᵀ)/ρ, one solve
with C columns for each example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.fitting.dual import DualSystem
from linnet.fitting.fit_preconditioner import FEW, TRIAL, make_preconditioner
from linnet.fitting.formed_rows import FormedNormal, FormedRows
from linnet.linalg.operator import LinearOperator
from linnet.memory import parse_bytes
from linnet.params import integer, number
from linnet.progress import track
from linnet.solvers.block_cg import block_cg
from linnet.solvers.cg import cg, relative_residual
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs, batch_size, concatenate, observed, split, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram
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
    """How far block conjugate gradients go where they need not converge.

    Args:
        steps: Steps at the most.
        tolerance: Relative residual that is enough; ``None`` for that of the settings.
    """

    steps: int
    tolerance: float | None = None


FINE = 1e-11  # relative residual where the ridge is so small that float64 is needed
VECTORS = 10  # of each right-hand side that block conjugate gradients hold
DIGITS = 100.0  # times its error that 1 − leverage must be at the least
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


def kernel_fits(function: Functional, size: int, memory: str | int | None) -> bool:
    """Whether a kernel of so many rows can be formed and solved with.

    Args:
        function: The network.
        size: N·C.
        memory: Budget.

    Returns:
        Whether it takes at most half of the budget.
    """
    # the kernel in its own type and in float64, K + ρI, its factor and its inverse
    return 5 * 8 * size**2 <= 0.5 * parse_bytes(memory, function.device)


def require_digits(rest: Tensor, tolerance: float, ridge: float) -> None:
    """Raise where I − H, found by iterations, is no larger than their error.

    Args:
        rest: I − H_i of each example, (N, C, C).
        tolerance: Relative residual of the solves.
        ridge: ρ.

    Raises:
        NumericalError: If fewer than two digits are left of one of them.
    """
    error = tolerance + 16 * torch.finfo(rest.dtype).eps
    least = float(torch.linalg.eigvalsh((rest + rest.mT).double() / 2).min())
    if least < DIGITS * error:
        # 1 − h grows as ρ where it is small
        enough = ridge * DIGITS * error / max(least, error)
        raise NumericalError(
            f"leave-one-out at ridge={ridge:g} by conjugate gradients: 1 − leverage is {least:.1e} for an "
            f"example and known to {error:.0e}",
            expected=f"a ridge of about {enough:.1g} or more, or a smaller tolerance",
            remedy='use solver="dual", raise memory= so that the kernel fits, or the network in float64',
        )


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


class Primal:
    """The solution δ of the regularized least-squares problem, and solves with its matrix.

    Args:
        function: The network.
        x: N training examples.
        residual: r = t − f₀, (N, C).
        ridge: ρ > 0.
        settings: How to iterate.
        start: Where to start, (P,).
        preconditioner: Any approximation of (JᵀJ + ρI)⁻¹; by default the one that the settings name.

    Attributes:
        delta: δ, (P,).
        beta: β, (N, C).
        steps: Steps taken.
        settings: How to iterate, with the preconditioner that was chosen if it was to be.
        memory: Budget of blocks of right-hand sides and of formed rows.
    """

    def __init__(
        self,
        function: Functional,
        x: Inputs,
        residual: Tensor,
        ridge: float,
        settings: CGSettings,
        start: Tensor | None = None,
        preconditioner: LinearOperator | None = None,
    ) -> None:
        self.function, self.x, self.residual, self.ridge = function, x, residual, float(ridge)
        self.settings = settings
        self.n, self.c = residual.shape
        self._blocks: Tensor | None = None
        self._dual: DualSystem | None = None
        self._formed: FormedNormal | None = None
        self.memory: str | int | None = None
        self._preconditioner = preconditioner
        self.jacobian = JacobianOperator(function, x, self.c)
        self.normal = NormalOperator(self.jacobian)
        right = self.jacobian.T.mv(residual.to(function.dtype).reshape(-1))
        solution = self._first(right, start)
        self.delta = accepted(solution, "the linear fit by conjugate gradients")
        self.steps, self.relative_residual = solution.steps, solution.residual
        # β = (r − Jδ)/ρ
        fitted = self.jacobian.mv(self.delta).view(self.n, self.c)
        self.beta = (residual.to(fitted.dtype) - fitted) / self.ridge

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

    def together(self, memory: str | int | None = None) -> int:
        """How many right-hand sides are solved at once.

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
        self, x: Inputs, what: str, effort: Effort | None = None, memory: str | int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """J(x) and (JᵀJ + ρI)⁻¹ J(x)ᵀ block by block.

        Args:
            x: Examples.
            what: Its name in the progress.
            effort: When to stop; ``None`` to convergence.
            memory: Budget.

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

    @property
    def dual(self) -> DualSystem | None:
        """The same problem by its kernel, ``None`` where that does not fit the budget.

        It takes fewer operations than N·C solves and has M_ii without I − J_i (JᵀJ + ρI)⁻¹ J_iᵀ, in which
        all digits cancel where the ridge is small.
        """
        size = self.n * self.c
        if self._dual is None and kernel_fits(self.function, size, self.memory):
            kernel = gram(self.function, self.x, form="full", memory=self.memory).reshape(size, size)
            self._dual = DualSystem(kernel.double(), self.residual.double(), self.ridge)
        return self._dual

    def inverse_blocks(self) -> Tensor:
        """M_ii, (N, C, C): by the kernel, or as (I − J_i (JᵀJ + ρI)⁻¹ J_iᵀ)/ρ by N·C solves, done once."""
        if self.dual is not None:
            return self.dual.inverse_blocks()
        if self._blocks is None:
            eye = torch.eye(self.c, dtype=self.function.dtype, device=self.function.device)
            rest = eye - self._quadratic(self.x, "leave-one-out")
            require_digits(rest, self.settings.tolerance, self.ridge)
            self._blocks = rest / self.ridge
        return self._blocks

    def _quadratic(self, x: Inputs, what: str) -> Tensor:
        """J(x_i) (JᵀJ + ρI)⁻¹ J(x_i)ᵀ, (N, C, C)."""
        solved = self.solved_rows(x, what)
        return torch.cat([torch.einsum("ncp,pnd->ncd", rows, columns) for rows, columns in solved])

    def posterior(self, x: Inputs) -> Tensor:
        """Cov[f(x)] / σ² = J(x) (JᵀJ + ρI)⁻¹ J(x)ᵀ, (T, C, C)."""
        return self._quadratic(x, "predictive covariance")

    def cross(self, x: Inputs) -> Tensor:
        """K(x,X) M = J(x) (JᵀJ + ρI)⁻¹ Jᵀ, (T, C, N, C)."""
        parts = []
        if self.dual is not None:
            return self.dual.cross(gram(self.function, x, self.x, form="full", memory=self.memory))
        for _, solved in self.solved_rows(x, "influence"):
            columns = solved.flatten(1)
            parts.append(torch.cat([block @ columns for _, block in self.formed.rows]))  # (N·C, t·C)
        return torch.cat(parts, 1).T.reshape(batch_size(x), self.c, self.n, self.c)

    def loo_residuals(self) -> Tensor:
        """e_i = (M_ii)⁻¹ β_i, (N, C)."""
        if self.dual is not None:
            return self.dual.loo_residuals()
        residuals: Tensor = torch.linalg.solve(self.inverse_blocks(), self.beta)
        return residuals

    def loo_variances(self) -> Tensor:
        """Cov[f(x_i)] / σ² without example i, (N, C, C)."""
        if self.dual is not None:
            return self.dual.loo_variances()
        eye = torch.eye(self.c, dtype=self.function.dtype, device=self.function.device)
        blocks: Tensor = torch.linalg.inv(self.inverse_blocks()) / self.ridge - eye
        return blocks

    def certificate(self) -> float:
        """Relative residual of the normal equations, checked in float64."""
        return self.relative_residual

    def noise(self) -> float:
        """σ² of highest evidence: ρ rᵀβ / (N·C)."""
        mask = observed(self.x)[1]
        count = self.residual.numel() if mask is None else int(mask.sum())
        return float(self.ridge * (self.residual.double() * self.beta.double()).sum() / count)

    def removed(self, index: Tensor) -> Primal:
        """The solution without some examples, from the present one."""
        keep = torch.ones(self.n, dtype=torch.bool, device=index.device)
        keep[index] = False
        rest = take(self.x, keep.nonzero()[:, 0])
        return self._with(rest, self.residual[keep])

    def extended(self, x: Inputs, residual: Tensor) -> Primal:
        """The solution with more examples, from the present one."""
        joined = torch.cat([self.residual, residual])
        every = concatenate([self.x, x])
        return self._with(every, joined)

    def _with(self, x: Inputs, residual: Tensor) -> Primal:
        """The solution on other examples, from the present one."""
        found = Primal(
            self.function, x, residual, self.ridge, self.settings, self.delta, self._preconditioner
        )
        found.memory = self.memory
        return found
