"""Newton's method in the weights: each system (JᵀΛJ + ρI) d = −(Jᵀg + ρδ) by conjugate gradients.

Each system is solved only as far as the gradient has fallen (Dembo, Eisenstat and Steihaug 1982), and a line
search needs no pass over the data: f is linear along d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.expectation import Expectation
from linnet.linalg.operator import LinearOperator
from linnet.linear.iteration import CGSettings, solve_columns
from linnet.linear.label_problem import LabelProblem
from linnet.linear.newton import FORCING, STEPS, Direction, NewtonMethod
from linnet.linear.preconditioner import FEW, RANK, TRIAL, CurvatureInverse, curvature_of
from linnet.solvers.nystrom import nystrom_preconditioner


class PrimalNewton(NewtonMethod):
    """The most probable δ of a linear model with any convex loss."""

    # start (P,)

    def __init__(
        self,
        problem: LabelProblem,
        ridge: float,
        settings: CGSettings,
        start: Tensor | None = None,
        preconditioner: LinearOperator | None = None,
        limit: int = STEPS,
    ) -> None:
        self.problem, self.ridge, self.settings, self.limit = problem, float(ridge), settings, limit
        self.preconditioner, self._given = preconditioner, preconditioner
        function = problem.function
        self.delta = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
        self.outputs = problem.base.clone()
        if start is not None and bool(start.any()):
            self.delta, self.outputs = start.clone(), problem.base + problem.push(start)
        self.steps = self.products = 0
        penalty = 0.5 * self.ridge * float(self.delta.double().square().sum())
        self.objective = [self._total_loss(self.outputs) + penalty]
        self._gradient = problem.pull(problem.slopes(problem.base))
        self.norm = self.scale = float(self._gradient.double().norm())
        self.stalled = False
        if self.scale > 0:
            _, self.stalled = self.descend(settings.tolerance)

    @property
    def reached(self) -> float:
        """‖∇‖ at the solution over ‖∇‖ at δ = 0."""
        return self.norm / self.scale if self.scale else 0.0

    @property
    def hessian(self) -> LinearOperator:
        """JᵀΛJ + ρI at the present outputs."""
        return self.problem.hessian(self.outputs).damped(self.ridge)

    def _total_loss(self, outputs: Tensor) -> float:
        """Σ ℓ_i at outputs."""
        return self.problem.loss(outputs)

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= self.limit or self.products >= self.settings.max_steps

    def _reached(self) -> float:
        """The norm of the gradient, which is kept for the direction, over that at δ = 0."""
        self._gradient = self.problem.pull(self.problem.slopes(self.outputs)) + self.ridge * self.delta
        self.norm = float(self._gradient.double().norm())
        return self.reached

    def _towards(self, reached: float) -> Direction:
        """Newton's direction by conjugate gradients."""
        d = self._direction(self._gradient, reached)
        wide, along = self.delta.double(), d.double()
        squares = float(wide.square().sum()), float(wide @ along), float(along.square().sum())
        slope = float(self._gradient.double() @ along)
        rounding = 16 * torch.finfo(d.dtype).eps * abs(self.objective[-1])
        return Direction(d, self.problem.push(d), slope, squares, rounding)

    def _move(self, t: float, direction: Direction, value: float) -> None:
        """Go t of the direction."""
        self.delta = self.delta + t * direction.step
        self.outputs = self.outputs + t * direction.change
        self.objective.append(value)

    def _direction(self, gradient: Tensor, reached: float) -> Tensor:
        """The direction, as precise as the gradient deserves; the preconditioner is made at need."""
        settings, hessian = self.settings, self.hessian
        tolerance = max(min(FORCING, reached**0.5), 0.3 * settings.tolerance / reached)
        left = max(1, settings.max_steps - self.products)
        open_choice = settings.preconditioner == "auto" and self.preconditioner is None
        if settings.preconditioner not in ("none", "auto", "given") and self.preconditioner is None:
            self._make(settings.preconditioner)
        trial = min(left, TRIAL) if open_choice and min(self.problem.jacobian.shape) > FEW else left
        found = solve_columns(hessian, -gradient, self.preconditioner, None, tolerance, trial)
        self.products += found.steps
        if found.residual > tolerance and trial < left:
            self._make("nystrom")
            rest = max(1, left - trial)
            found = solve_columns(hessian, -gradient, self.preconditioner, found.value, tolerance, rest)
            self.products += found.steps
        elif found.steps > RANK and self._given is None and settings.preconditioner in ("auto", "nystrom"):
            self.preconditioner = None  # Λ has moved away from where it was made
        return found.value

    def _make(self, name: str) -> None:
        """The preconditioner of a name, at the present Λ (Nyström) or at that of the network (curvatures)."""
        problem = self.problem
        function = problem.function
        if name == "nystrom":
            rank = self.settings.rank or min(RANK, *problem.jacobian.shape)
            matrix = problem.hessian(self.outputs)
            self.preconditioner = nystrom_preconditioner(matrix, self.ridge, rank, 0)
            return
        y = problem.y
        if y.shape == problem.base.shape:
            y = y.to(function.dtype).view(-1, *function.output_shape(problem.x))
        curvature = curvature_of(name, function, (problem.x, y), Expectation(problem.likelihood))
        self.preconditioner = CurvatureInverse(curvature, self.ridge, function.dtype)
