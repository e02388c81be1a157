"""Searches for the dampings τ and ζ: greedy during training, on a grid at the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from linnet.errors import NumericalError
from linnet.optim.gauss_newton_inverse import Inverse, Undamped
from linnet.optim.gauss_newton_model import Quadratic
from linnet.optim.gauss_newton_settings import Damping

Along = Callable[[Inverse], tuple[list[Tensor], Quadratic]]
Reached = Callable[[Sequence[Tensor], Tensor], float]

GRID = tuple(10.0**k for k in range(2, -7, -1))  # first dampings, in mean eigenvalues of the curvature
LOWEST = 1e-2  # of the grid, where the curvature is approximate: lower ones win one step and lose the next
THRESHOLD = 0.75  # ρ above which the quadratic model is trusted more, and below which less


@dataclass(frozen=True)
class Search:
    """A search among dampings of one undamped curvature."""

    damping: Damping  # how the dampings move
    undamped: Undamped  # G̃
    decays: Mapping[str, float]  # λ of every parameter by name
    along: Along  # from an inverse to the directions of a step and the quadratic model along them

    def nearby(self, tau: float, zeta: float) -> tuple[float, Inverse, tuple[list[Tensor], Quadratic]]:
        """The ζ among ωζ, ζ, ζ/ω whose direction has the lowest q at its best step size."""
        omega, found = self.damping.decay, []
        for candidate in (omega * zeta, zeta, zeta / omega):
            inverse = self.undamped.inverse(candidate, self.decays)
            directions, model = self.along(inverse)
            found.append((model.change(model.best(tau), tau), candidate, inverse, (directions, model)))
        _, best, inverse, along = min(found, key=lambda one: one[0])
        return best, inverse, along

    def first(self, mean: float, reached: Reached) -> tuple[float, float, Inverse]:
        """Dampings to start with: those of a grid whose step lowers the objective itself the most."""
        if not (math.isfinite(mean) and mean > 0):
            raise NumericalError(
                f"the mean eigenvalue of the curvature is {mean}",
                expected="a positive number to take the first damping from",
                remedy="check whether any target counts and outputs depend on parameters, or pass damping=",
            )
        found = []
        exact = all(part.structure in ("full", "block") for part in self.undamped.parts)
        for factor in GRID if exact else [one for one in GRID if one >= LOWEST]:
            tau = factor * mean if self.damping.tau is None else self.damping.tau
            zeta = factor * mean if self.damping.zeta is None else self.damping.zeta
            inverse = self.undamped.inverse(zeta, self.decays)
            directions, model = self.along(inverse)
            value = reached(directions, model.best(tau))
            found.append((value if math.isfinite(value) else math.inf, tau, zeta, inverse))
        value, tau, zeta, inverse = min(found, key=lambda one: one[0])
        if not math.isfinite(value):
            raise NumericalError(
                "no step at any damping leads to a finite loss",
                expected="a loss that is finite around the first weights",
                remedy="check the network's scale, or pass damping=",
            )
        return tau, zeta, inverse


def adapted(tau: float, rho: float, decay: float) -> float:
    """The Levenberg-Marquardt rule: ω τ if ρ > ¾, τ / ω if ρ < ¾."""
    # Source: Botev 2020, section 4.4.1, where the print has ρ on both sides.
    if rho > THRESHOLD:
        return tau * decay
    return tau / decay if rho < THRESHOLD else tau


def hopeless(value: float) -> tuple[str, str, str]:
    """The error's advice where there are no weights to go back to."""
    return (
        f"the loss is {value:.6g}, or its gradient not finite, and there are no better weights to go back to",
        "a finite loss and a finite gradient",
        "check the weights, the scale of x and the targets",
    )
