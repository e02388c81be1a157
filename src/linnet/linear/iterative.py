"""The linear model by conjugate gradients: products with J̃ᵀJ̃ or K̃ alone, no matrix is formed.

    parameter space   (J̃ᵀJ̃ + ρI) δ = J̃ᵀr̃        β = (r̃ − J̃δ)/ρ
    function space    (K̃ + ρI) β = r̃             δ = J̃ᵀβ

``linnet.fit`` solves in parameter space and answers everything else by further solves, or by the kernel where
that fits the memory. ``linnet.TangentGP`` chooses the space, and adds Krylov spaces for variances and the
evidence (``lanczos.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.linalg.operator import LinearOperator
from linnet.linear.evidence import Measure
from linnet.linear.formed_rows import FormedNormal, FormedRows
from linnet.linear.iteration import CGSettings, Effort, accepted, solve_columns
from linnet.linear.kernel_system import KernelSystem, kernel_fits
from linnet.linear.lanczos import SHARE, Iteration, Panel, make_measure, make_panel
from linnet.linear.operators import KernelOperator, fisher, stored_kernel
from linnet.linear.preconditioner import FEW, TRIAL, CurvatureInverse, precondition
from linnet.linear.problem import Memory, Problem
from linnet.linear.system import System
from linnet.memory import parse_bytes
from linnet.progress import track
from linnet.solvers.cg import block_cg, relative_residual
from linnet.solvers.solution import Solution, Status
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.jacobian import JacobianOperator, NormalOperator

VECTORS = 10  # of each right-hand side that block conjugate gradients hold
MOST_COLUMNS = 512  # solved at once: products of more columns are no faster


@dataclass
class Reused:
    """Parts of a solution that do not depend on ρ, or need not."""

    operator: LinearOperator | None = None  # K̃ or J̃ᵀJ̃
    # an approximation of (J̃ᵀJ̃ + ρI)⁻¹ or (K̃ + ρI)⁻¹, for whatever ρ or task it was made
    preconditioner: LinearOperator | None = None
    name: str = ""  # what it is called; empty for the name in the settings
    start: Tensor | None = None  # where to start, (P,) or (N·C,)
    panel: Panel | None = None  # the variance cache
    measure: Measure | None = None  # the spectrum of the evidence
    solution: Solution[Tensor] | None = None  # the solved equations of this very ρ, if they are known


class Iterative(System):
    """The solved equations of one of the two spaces, by products."""

    def __init__(
        self,
        problem: Problem,
        ridge: float,
        settings: CGSettings,
        memory: Memory = None,
        reused: Reused | None = None,
        space: str = "parameter",
        krylov: Iteration | None = None,
    ) -> None:
        self.problem, self.ridge, self.memory = problem, float(ridge), memory
        self.space, self.krylov = space, krylov
        self.reused = Reused() if reused is None else reused
        self._asked = settings
        name = self.reused.name
        self.settings = replace(settings, preconditioner=name) if name else settings
        self._kernel_form: KernelSystem | None = None
        known = self.reused.solution
        self.solution = self._first() if known is None else known
        self._value = accepted(self.solution, "the linear fit by conjugate gradients")
        self.steps = self.solution.steps
        self.work = {"steps": self.steps}

    # -- the equations ---------------------------------------------------------------------------

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """The relative residual that solves may leave."""
        return self.settings.tolerance

    @property
    def jacobian(self) -> JacobianOperator:
        """J̃."""
        return self.problem.scaled_jacobian

    @property
    def operator(self) -> LinearOperator:
        """K̃ or J̃ᵀJ̃."""
        if self.reused.operator is None:
            if self.space == "parameter":
                derivative = "exact" if self.krylov is None else self.krylov.derivative
                self.reused.operator = fisher(self.problem, derivative, self.memory)
            elif self.space == "stored":
                self.reused.operator = stored_kernel(self.problem, self.memory)
            else:
                self.reused.operator = KernelOperator(self.problem)
        return self.reused.operator

    @property
    def matrix(self) -> LinearOperator:
        """J̃ᵀJ̃ + ρI or K̃ + ρI."""
        return self.operator.damped(self.ridge)

    @cached_property
    def right(self) -> Tensor:
        """The right-hand side: J̃ᵀr̃, or r̃ in function space, (n, 1)."""
        residual = self.problem.residual.to(self.function.dtype).reshape(-1, 1)
        return self.problem.pull(residual) if self.space == "parameter" else residual

    @cached_property
    def delta(self) -> Tensor:
        """The solution, or J̃ᵀ of it, (P,)."""
        return (self._value if self.space == "parameter" else self.problem.pull(self._value))[:, 0]

    @cached_property
    def beta(self) -> Tensor:
        """β: (r̃ − J̃δ)/ρ, or the solution in function space, (N, C)."""
        if self.space != "parameter":
            return self._value.view(self.n, self.c)
        fitted = self.problem.push(self._value).view(self.n, self.c)
        return (self.problem.residual.to(fitted) - fitted) / self.ridge

    def certificate(self) -> float:
        """Relative residual of the solved equations, measured in float64."""
        return self.solution.residual

    # -- solves ----------------------------------------------------------------------------------

    def _first(self) -> Solution[Tensor]:
        """The solve for the mean; a preconditioner is made when it is needed, and chosen if it is to be."""
        settings, start, steps = self.settings, self.reused.start, 0
        if start is not None:
            start = start[:, None]
            residual = relative_residual(self.matrix, start, self.right)
            if residual <= settings.tolerance:
                self._choose("none")
                return Solution(start, Status.CONVERGED, 0, residual)
            start = start if residual < 1 else None  # zero is nearer
        if settings.preconditioner == "auto":
            limit = settings.max_steps if min(self.jacobian.shape) <= FEW else TRIAL
            limit = min(limit, settings.max_steps)
            found = solve_columns(self.matrix, self.right, None, start, settings.tolerance, limit)
            if found.status is not Status.MAX_STEPS or limit == settings.max_steps:
                self._choose("none")
                return found
            self._choose(self._affordable())
            start, steps = found.value, found.steps
        solution = self._run(self.right, start)
        return replace(solution, steps=solution.steps + steps)

    def _choose(self, name: str) -> None:
        """Settle on a preconditioner, if it was left open."""
        if self.settings.preconditioner == "auto":
            self.settings = replace(self.settings, preconditioner=name)

    def _affordable(self) -> str:
        """The preconditioner to take where none is requested."""
        if self.space == "stored":
            return "pivoted-cholesky"
        if self.space == "function" or self.krylov is None:  # whether it fits was asked before a fit began
            return "nystrom"
        needed = 4 * self.settings.rank * self.operator.shape[0] * self.operator.dtype.itemsize
        return "nystrom" if needed <= SHARE * parse_bytes(self.memory, self.function.device) else "ekfac"

    @property
    def preconditioner(self) -> LinearOperator | None:
        """The approximate inverse that conjugate gradients use, made when first requested."""
        if self.settings.preconditioner == "auto":
            self._choose(self._affordable())
        name, reused = self.settings.preconditioner, self.reused
        if reused.preconditioner is None and name not in ("none", "given"):
            seed = 0 if self.krylov is None else self.krylov.seed
            # the rank's products at once cost less by formed rows
            wide = self.formed if isinstance(self.operator, NormalOperator) else self.operator
            rank = self.settings.rank
            reused.preconditioner = precondition(name, wide, self.problem, self.ridge, rank, seed)
        return reused.preconditioner

    def _run(self, right: Tensor, start: Tensor | None = None) -> Solution[Tensor]:
        """The equations for columns (n, K), each by itself."""
        return self.settings.run(self.matrix, right, self.preconditioner, start)

    def solve(self, b: Tensor) -> Tensor:
        """(J̃ᵀJ̃ + ρI)⁻¹ b for columns (P, K)."""
        # In parameter space as many columns as there are outputs, or more, go together: block conjugate
        # gradients with the rows of J̃ formed. Where that ends early, each column goes on by itself.
        what = "a solve by conjugate gradients"
        if self.space != "parameter":
            return (b - self.problem.pull(accepted(self._run(self.problem.push(b)), what))) / self.ridge
        differences = self.krylov is not None and self.krylov.derivative != "exact"
        if b.shape[1] >= max(self.c, 2) and not differences:
            found = self._together(b, self.settings.tolerance, self.settings.max_steps)
            if found.converged:
                return found.value
        return accepted(self._run(b), what)

    def approach(self, b: Tensor, effort: Effort) -> Tensor:
        """The same after some block steps, converged or not, in parameter space."""
        # b (P, K)
        tolerance = self.settings.tolerance if effort.tolerance is None else effort.tolerance
        return self._together(b, tolerance, effort.steps).value

    def _together(self, b: Tensor, tolerance: float, steps: int) -> Solution[Tensor]:
        """Block conjugate gradients with formed rows."""
        matrix = self.formed.damped(self.ridge)
        found: Solution[Any] = block_cg(matrix, b, self.preconditioner, tolerance, steps)
        return found

    @cached_property
    def formed(self) -> FormedNormal:
        """J̃ᵀJ̃ for many columns at once."""
        return FormedNormal(self.jacobian, self.memory)

    def together(self, memory: Memory = None) -> int:
        """The number of right-hand sides solved at once."""
        vector = self.function.space.dim * self.function.dtype.itemsize
        budget = parse_bytes(self.memory if memory is None else memory, self.function.device)
        fitting = budget // (2 * VECTORS * vector)
        return max(self.settings.columns, self.c, min(MOST_COLUMNS, fitting))

    def solved_rows(
        self, x: Inputs, what: str, memory: Memory = None, effort: Effort | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """J(x) and (J̃ᵀJ̃ + ρI)⁻¹ J(x)ᵀ block by block."""
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

    # -- what Krylov spaces and the kernel answer ------------------------------------------------

    @property
    def kernel_form(self) -> KernelSystem | None:
        """The same problem by its kernel; ``None`` where Krylov spaces answer, or it exceeds the budget."""
        # It takes fewer operations than N·C solves and has M_ii without I − J̃_i (J̃ᵀJ̃ + ρI)⁻¹ J̃_iᵀ, in
        # which all digits cancel where the ridge is small.
        if self.krylov is not None:
            return None
        if self._kernel_form is None and kernel_fits(self.function, self.n * self.c, self.memory):
            self._kernel_form = KernelSystem.solved(self.problem, self.ridge, self.memory)
        return self._kernel_form

    @property
    def panel(self) -> Panel | None:
        """The variance cache, made when first needed; ``None`` where variances are solved for."""
        if self.krylov is None or self.krylov.variance != "lanczos":
            return None
        if self.reused.panel is None:
            made = make_panel(self.operator, self.problem, self.ridge, self.krylov, self.memory)
            self.reused.panel, self.work["products of the variance cache"] = made
        return self.reused.panel

    @property
    def measure(self) -> Measure:
        """The spectrum of K̃, by the kernel or by Krylov spaces."""
        if self.krylov is None:
            return super().measure
        if self.reused.measure is None:
            made = make_measure(self.operator, self.problem, self.right[:, 0], self.krylov, self.memory)
            self.reused.measure, self.work["products of the evidence"] = made
        return self.reused.measure

    def covariance(self, x: Inputs, joint: bool = False) -> Tensor:
        """The posterior covariance λ Cov[f(x)], (T, C, C) or (T, C, T, C)."""
        if (panel := self.panel) is None:
            return super().covariance(x, joint)
        return panel.covariance(self.problem, x, self.ridge, joint, self.memory)

    def spread(self, v: Tensor) -> Tensor:
        """The posterior covariance of the weights, λ Cov[δ] v for columns v (P, K)."""
        return super().spread(v) if (panel := self.panel) is None else panel.spread(v, self.ridge)

    # -- other ridges and other data -------------------------------------------------------------

    def at(self, ridge: float) -> Iterative:
        """The solution at another ridge, from the present one."""
        # Operator, cache and spectrum are reused, a curvature as preconditioner is damped anew, and one of
        # Nyström's or pivoted Cholesky is made again.
        made = self.reused.preconditioner
        kept = made.at(ridge) if isinstance(made, CurvatureInverse) else None
        reused = replace(self.reused, preconditioner=kept, name="", start=self._value[:, 0], solution=None)
        return self._again(self.problem, ridge, reused)

    def removed(self, index: Tensor) -> Iterative:
        """The solution without some examples, in parameter space from the present one."""
        return self._of(self.problem.without(index), Reused())

    def extended(self, more: Problem) -> Iterative:
        """The solution with more examples, in parameter space from the present one."""
        return self._of(self.problem.joined(more), Reused())

    def with_residual(self, residual: Tensor) -> Iterative:
        """For other targets, from the present solution, with its operator, cache and preconditioner."""
        problem = replace(self.problem, residual=residual)
        reused = Reused(self.reused.operator, panel=self.reused.panel)
        return self._of(problem, reused, alike=True)

    def _of(self, problem: Problem, reused: Reused, alike: bool = False) -> Iterative:
        """The solution of other data of the same network; ``alike`` if its equations have the same matrix."""
        if alike or self.space == "parameter":
            reused.start, reused.preconditioner = self._value[:, 0], self.reused.preconditioner
        return self._again(problem, self.ridge, reused)

    def _again(self, problem: Problem, ridge: float, reused: Reused) -> Iterative:
        """Other equations in the same way; whether to go without a preconditioner is left open again."""
        settings = self._asked if self.settings.preconditioner == "none" else self.settings
        return Iterative(problem, ridge, settings, self.memory, reused, self.space, self.krylov)
