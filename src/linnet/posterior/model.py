"""A linear model of the outputs, f = f₀ + J δ or f = J δ, on data; and its most probable δ.

The negative log posterior Φ(δ) = Σᵢ nll(fᵢ, yᵢ) + ½ λ ‖δ‖² of a likelihood that is canonical in f is convex,
with Hessian Σᵢ Jᵢᵀ Λᵢ Jᵢ + λ I: Gauss-Newton matrix, Fisher information and Hessian are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.likelihoods.likelihood import Likelihood
from linnet.linear.iteration import CGSettings
from linnet.linear.label_problem import LabelProblem
from linnet.linear.primal_newton import PrimalNewton
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import jvp_columns
from linnet.tangent.output_scale import warn_of_scale

BLOCK = 128  # examples at once
CG_STEPS = 500  # for each Newton step that is allowed


class LinearModel:
    """A network's linear model, the data that it is fitted to, and what its outputs mean."""

    def __init__(
        self, function: Functional, x: Inputs, y: Tensor, likelihood: Likelihood, base: bool
    ) -> None:
        self.function, self.x, self.likelihood, self.base = function, x, likelihood, base
        self.n = batch_size(x)
        f0 = torch.cat([function.check_runs(part) for part in split(x, BLOCK)])
        self.y = likelihood.check(f0, y)
        warn_of_scale(function, likelihood, x, f0)
        self.shape = tuple(f0.shape[1:])
        self.f0 = f0.double() if base else torch.zeros_like(f0, dtype=torch.float64)
        self.problem = LabelProblem(function, x, self.f0, likelihood, self.y, keep=True)

    def start(self, x: Inputs) -> Tensor:
        """The outputs at δ = 0 of other examples, (M, C)."""
        f0 = self.function.check_runs(x).flatten(1)
        return f0 if self.base else torch.zeros_like(f0)

    def outputs(self, x: Inputs, delta: Tensor) -> Tensor:
        """The outputs of other examples, (M, C)."""
        # delta (P,)
        delta = delta.to(device=self.function.device, dtype=self.function.dtype)
        with torch.no_grad():
            found = [(self.start(part), jvp_columns(self.function, part, delta)) for part in split(x, BLOCK)]
        f0, moved = (torch.cat(column) for column in zip(*found, strict=True))
        return f0 + (moved if moved.ndim == 2 else moved.movedim(2, 0))


@dataclass(frozen=True)
class Optimum:
    """The most probable δ, with its certificate."""

    # Φ is λ-strongly convex, so that the true optimum is within ‖∇Φ(δ)‖ / λ of δ.

    delta: Tensor  # δ, (P,)
    outputs: Tensor  # the model's outputs there, (N, ...), float64
    gradient_norm: float  # ‖∇Φ(δ)‖
    first_norm: float  # ‖∇Φ(0)‖
    distance: float  # ‖∇Φ(δ)‖ / λ, a bound on the distance to the optimum
    steps: int  # number of Newton steps


def maximize(model: LinearModel, precision: float, tolerance: float, max_steps: int) -> Optimum:
    """The most probable δ."""
    settings = CGSettings(tolerance, CG_STEPS * max_steps)
    point = PrimalNewton(model.problem, precision, settings, limit=max_steps)
    if point.stalled:
        raise NumericalError(
            f"Newton's method ended after {point.steps} steps with the gradient norm {point.norm:.3g}, "
            f"{point.reached:.2g} times that of the start",
            expected=f"{tolerance:.2g} times that of the start",
            remedy="raise tolerance= or max_steps=, use float64, or raise prior_precision=",
        )
    distance = point.norm / precision
    return Optimum(point.delta, point.outputs, point.norm, point.scale, distance, point.steps)
