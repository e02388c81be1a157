"""Newton's method in weights by the Hessian as a matrix, for many examples and few weights.

    H = Σᵢ Jᵢᵀ Λᵢ Jᵢ + ρI, (P, P)        A(x, x') = J(x) H⁻¹ J(x')ᵀ

H is summed over the data at every step, in float64, from rows of J that are kept where there is space. At the
optimum its factor answers what ``KernelNewton`` answers by (N·C, N·C) matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from linnet.linalg.factorize import cholesky
from linnet.linear.constraints import Constraints
from linnet.linear.formed_rows import FormedRows, Rows
from linnet.linear.label_problem import LabelProblem
from linnet.linear.newton import ARRIVED, STALLED, STEPS, TOLERANCE, Direction, FactorNewton, InWeights
from linnet.linear.normal_system import add_gram, mirrored, reached
from linnet.linear.problem import Memory
from linnet.linear.system import Solved
from linnet.tangent.batch import all_but

ROWS = 4096  # of J that are taken to float64 at once


def wide_rows(problem: LabelProblem, rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Rows of J in float64, in the weights that equations on outputs leave, few at a time."""
    c = problem.c
    size = max(1, ROWS // c)
    for place, block in rows:
        for first in range(place.start, place.stop, size):
            part = slice(first, min(first + size, place.stop))
            own = slice((part.start - place.start) * c, (part.stop - place.start) * c)
            yield part, problem.confine(block[own].double())


def summed_gram(problem: LabelProblem, rows: Rows) -> Tensor:
    """JᵀJ, (P, P), float64."""
    size = problem.function.space.dim
    total = torch.zeros(size, size, dtype=torch.float64, device=problem.base.device)
    for _, block in wide_rows(problem, rows):
        add_gram(total, block)
    return mirrored(total)


class NormalNewton(InWeights, FactorNewton):
    """The optimal δ by the matrix H."""

    # start (P,)

    def __init__(
        self,
        problem: LabelProblem,
        ridge: float,
        start: Tensor | None = None,
        max_steps: int = STEPS,
        memory: Memory = None,
        rows: Rows | None = None,
    ) -> None:
        self.problem, self.ridge, self.memory = problem, float(ridge), memory
        self.max_steps = max_steps
        self._rows = FormedRows(problem.function, problem.x, problem.c, memory) if rows is None else rows
        size = problem.function.space.dim
        self._delta = torch.zeros(size, dtype=torch.float64, device=problem.base.device)
        self.outputs = problem.base
        self._sums: tuple[Tensor, Tensor] | None = None
        self.first_norm = float(self._pulled(self.gradient).norm())
        if start is not None and bool(start.any()) and self.first_norm > 0:
            self._delta = start.double()
            self.outputs = problem.base + self._moved(self._delta)
        penalty = 0.5 * self.ridge * float(self._delta.square().sum())
        self.steps, self.objective = 0, [self._total_loss(self.outputs) + penalty]
        self.stalled = self.first_norm > 0 and not self._descend(TOLERANCE, ARRIVED)
        self.require(STALLED)

    @property
    def gradient_norm(self) -> float:
        """‖Jᵀg + ρδ‖."""
        return float(self._summed()[1].norm())

    # -- sums over the data ----------------------------------------------------------------------

    paired = Solved.paired  # from rows, which are at hand

    def own_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the training examples, (n·C, P), float64, block by block."""
        return wide_rows(self.problem, self._rows)

    def _moved(self, v: Tensor) -> Tensor:
        """J v, (P,) to (N, C)."""
        return torch.cat([rows @ v for _, rows in self.own_rows()]).view(self.problem.base.shape)

    def _pulled(self, u: Tensor) -> Tensor:
        """Jᵀ u, (N, C) to (P,)."""
        total = torch.zeros_like(self._delta)
        for place, rows in self.own_rows():
            total += rows.T @ u[place].reshape(-1)
        return total

    def _summed(self) -> tuple[Tensor, Tensor]:
        """The Cholesky factor of H and Jᵀg + ρδ at the present point, in one pass."""
        if self._sums is None:
            size = len(self._delta)
            h, slope = self._delta.new_zeros(size, size), self.ridge * self._delta
            gradient, roots = self.gradient, self.roots
            for place, rows in self.own_rows():
                slope += rows.T @ gradient[place].reshape(-1)
                each = roots[place].mT @ rows.view(-1, self.c, size)  # LᵢᵀJᵢ
                add_gram(h, each.flatten(0, 1))
            h.diagonal().add_(self.ridge)
            # the factor is that of the lower triangle
            self._sums = cholesky(h, "ridge + curvature of the likelihood"), slope
        return self._sums

    @cached_property
    def gram(self) -> Tensor:
        """JᵀJ, (P, P), whose eigenvalues are those of the kernel, but for zeros."""
        return summed_gram(self.problem, self._rows)

    # -- Newton's method -------------------------------------------------------------------------

    def _towards(self, reached: float) -> Direction:
        """Newton's direction by a Cholesky factor."""
        factor, slope = self._summed()
        d = -torch.cholesky_solve(slope[:, None], factor)[:, 0]
        return self._along(d, self._moved(d), slope)

    def _left(self) -> None:
        """The sums."""
        self._sums = None

    # -- the Hessian at the optimum --------------------------------------------------------------

    @property
    def kernel_form(self) -> None:
        """None is needed."""
        return

    @property
    def factor(self) -> Tensor:
        """The Cholesky factor of H at the optimum."""
        return self._summed()[0]

    def solve(self, b: Tensor) -> Tensor:
        """H⁻¹ b for columns (P, K), in float64."""
        return torch.cholesky_solve(b.double(), self.factor)

    def next_change(self) -> Tensor:
        """The change of the outputs by one more Newton step, (N, C): their distance to the optimum."""
        return self._moved(self.solve(self._summed()[1][:, None])[:, 0])

    @cached_property
    def _own(self) -> Tensor:
        """A_ii = J_i T (J_i T)ᵀ with H⁻¹ = T Tᵀ, (N, C, C)."""
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        turn = torch.linalg.solve_triangular(self.factor, eye, upper=False).T  # L⁻ᵀ
        parts = []
        for _, rows in self.own_rows():
            half = (rows @ turn).view(-1, self.c, len(turn))
            parts.append(half @ half.mT)
        return torch.cat(parts)

    def reach(self, e: Tensor) -> Tensor:
        """By one pass over the examples."""
        return reached(self, self.gram, e)

    # -- changes ---------------------------------------------------------------------------------

    def at(self, ridge: float) -> NormalNewton:
        """The solution at another ridge, from the present one."""
        if (held := self.constraints) is not None and held.soft:
            return self.given(held.at_ridge(self.ridge, ridge), ridge)
        return self._changed(self.problem, self._rows, ridge)

    def given(self, constraints: Constraints, ridge: float | None = None) -> NormalNewton:
        """The solution in the weights that equations on outputs leave, from the present one."""
        return self._changed(self.problem.given(constraints, False, self.memory), self._rows, ridge)

    def removed(self, index: Tensor) -> NormalNewton:
        """The solution without some examples, from the present one."""
        # index (k,)
        return self._changed(self.problem.without(index), self._rows.without(all_but(self.n, index)))

    def extended(self, more: LabelProblem) -> NormalNewton:
        """The solution with more examples, from the present one."""
        rows = FormedRows(more.function, more.x, more.c, self.memory)
        return self._changed(self.problem.joined(more), self._rows.joined(rows))

    def relabelled(self, y: Tensor) -> NormalNewton:
        """The solution with other labels, from the present one."""
        return self._changed(replace(self.problem, y=y), self._rows)

    def _changed(self, problem: LabelProblem, rows: Rows, ridge: float | None = None) -> NormalNewton:
        """The solution of other data or at another ridge."""
        ridge = self.ridge if ridge is None else ridge
        return NormalNewton(problem, ridge, self.eta, self.max_steps, self.memory, rows)
