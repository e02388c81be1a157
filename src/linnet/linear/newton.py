"""Newton's method for a convex loss of outputs that are linear in the unknowns, with a line search.

    minimize Σᵢ ℓᵢ(fᵢ) + ½ ρ‖δ‖²,    f linear in δ

What a step changes in the outputs is one product, so that a line search needs no pass of the network. In
which coordinates δ is held, and how a direction is solved for, is left to each solver.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

STEPS = 100  # of Newton's method: from any start a few tens suffice in float64
SHRINK = 0.5  # of the step, when the objective does not fall enough
ENOUGH = 1e-4  # share of the slope by which it must fall (Armijo)
HALVINGS = 60  # until a step is below the rounding of float64
FORCING = 0.1  # the first systems are solved to a tenth, later ones to the root of the gradient left


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction d of descent from the present point."""

    step: Tensor  # d, in the coordinates of the solver
    change: Tensor  # what it changes in the outputs, of their shape
    slope: float  # the derivative of the objective along it
    squares: tuple[float, float, float]  # ‖δ‖², δᵀd and ‖d‖²
    rounding: float  # what two values of the objective may be off


class NewtonMethod(ABC):
    """A point that is moved to the minimum."""

    ridge: float  # ρ
    outputs: Tensor  # f at the point
    steps: int  # newton steps taken
    objective: list[float]  # its value after each step; it never rises, but for rounding

    @abstractmethod
    def _total_loss(self, outputs: Tensor) -> float:
        """Σ ℓ_i at outputs."""

    @abstractmethod
    def _reached(self) -> float:
        """The norm of the gradient in δ at the point, over that at δ = 0."""

    @abstractmethod
    def _towards(self, reached: float) -> Direction:
        """Newton's direction, as precise as the gradient that is left deserves."""

    @abstractmethod
    def _move(self, t: float, direction: Direction, value: float) -> None:
        """Go t of the direction, to where the objective has a value."""

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= STEPS

    def descend(self, tolerance: float, arrived: float = 0.0) -> tuple[float, bool]:
        """Steps until the gradient is small enough, they are spent, or the objective falls no more."""
        while (reached := self._reached()) > tolerance:
            if self._spent():
                return reached, True
            direction = self._towards(reached)
            found = self._search(direction)
            if found is None:
                return reached, True
            self._move(*found)
            self.steps += 1
            if -direction.slope <= arrived * abs(self.objective[-1]):
                return self._reached(), False
        return reached, False

    def _search(self, direction: Direction) -> tuple[float, Direction, float] | None:
        """The first of 1, ½, ¼, … of a direction that lowers the objective enough, up to its rounding."""
        if not direction.slope < 0:
            return None
        own, mixed, square = direction.squares
        before, t = self._total_loss(self.outputs) + 0.5 * self.ridge * own, 1.0
        for _ in range(HALVINGS):
            penalty = 0.5 * self.ridge * (own + 2 * t * mixed + t * t * square)
            value = self._total_loss(self.outputs + t * direction.change) + penalty
            least = before + ENOUGH * t * direction.slope + direction.rounding
            if math.isfinite(value) and value <= least:
                return t, direction, value
            t *= SHRINK
        return None
