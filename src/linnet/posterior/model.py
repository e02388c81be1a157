"""A linear model of the outputs, f = f₀ + J δ or f = J δ, on data; and its most probable δ.

The negative log posterior Φ(δ) = Σᵢ nll(fᵢ, yᵢ) + ½ λ ‖δ‖² of a likelihood that is canonical in f is convex,
with Hessian Σᵢ Jᵢᵀ Λᵢ Jᵢ + λ I: Gauss-Newton matrix, Fisher information and Hessian are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from linnet.curvatures.ggn import SummedOperator
from linnet.curvatures.products import weighted
from linnet.curvatures.stream import Batch, Batches
from linnet.errors import NumericalError
from linnet.likelihoods.likelihood import Likelihood
from linnet.likelihoods.probabilities import warn_of_probabilities
from linnet.linear.newton import FORCING, Direction, NewtonMethod
from linnet.memory import parse_bytes
from linnet.solvers.cg import cg
from linnet.tangent.batch import Inputs, batch_size, map_tensors, split
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import jacobian, jvp_columns, vjp_columns

BLOCK = 128  # examples at once
SHARE = 0.25  # of the memory budget that J may take: kept, a product costs what it takes to read it
MOST = 4 << 30  # bytes that it may take
CG_STEPS = 500  # of one Newton step, at most


class LinearModel:
    """A network's linear model, the data that it is fitted to, and what its outputs mean.

    Args:
        function: The network at θ₀.
        x: N examples.
        y: Their targets.
        likelihood: What outputs mean.
        base: Whether f₀ is part of the outputs.

    Attributes:
        f0: The outputs at δ = 0, (N, ...), float64: f₀ or zero.

    Raises:
        InputError: If the targets do not fit the outputs.
    """

    def __init__(
        self, function: Functional, x: Inputs, y: Tensor, likelihood: Likelihood, base: bool
    ) -> None:
        self.function, self.x, self.likelihood, self.base = function, x, likelihood, base
        self.n = batch_size(x)
        f0 = torch.cat([function.check_runs(part) for part in split(x, BLOCK)])
        self.y = likelihood.check(f0, y)
        warn_of_probabilities(likelihood, f0, stacklevel=5)
        self.shape = tuple(f0.shape[1:])
        self.f0 = f0.double() if base else torch.zeros_like(f0, dtype=torch.float64)
        self.data = Batches((x, self.y), function.device, BLOCK)

    @cached_property
    def rows(self) -> Tensor | None:
        """J on the data, (N, C, P), where there is space for it; None elsewhere."""
        function = self.function
        size = self.f0.numel() * function.space.dim * function.dtype.itemsize
        room = min(MOST, int(SHARE * parse_bytes(None, function.device)))
        return jacobian(function, self.x) if size <= room else None

    def start(self, x: Inputs) -> Tensor:
        """The outputs at δ = 0 of other examples.

        Args:
            x: M examples.

        Returns:
            (M, C), outputs flattened.
        """
        f0 = self.function.check_runs(x).flatten(1)
        return f0 if self.base else torch.zeros_like(f0)

    def outputs(self, x: Inputs, delta: Tensor) -> Tensor:
        """The outputs of other examples.

        Args:
            x: M examples.
            delta: (P,), or K columns (P, K).

        Returns:
            (M, C), or (K, M, C); outputs flattened.
        """
        x = map_tensors(lambda t: t.to(self.function.device), x)
        delta = delta.to(device=self.function.device, dtype=self.function.dtype)
        with torch.no_grad():
            found = [(self.start(part), jvp_columns(self.function, part, delta)) for part in split(x, BLOCK)]
        f0, moved = (torch.cat(column) for column in zip(*found, strict=True))
        return f0 + (moved if moved.ndim == 2 else moved.movedim(2, 0))

    def tangent(self, delta: Tensor) -> Tensor:
        """J δ on the data, in the network's own shape, (N, ...), float64."""
        if self.rows is not None:
            return (self.rows @ delta).double().reshape(self.f0.shape)
        with torch.no_grad():
            parts = [jvp_columns(self.function, part, delta) for part in split(self.x, BLOCK)]
        return torch.cat(parts).double().reshape(self.f0.shape)

    def nll(self, f: Tensor) -> Tensor:
        """Negative log-likelihood of the data, (), float64."""
        return self.likelihood.nll(f.double(), self.y).sum()

    def gradient(self, f: Tensor) -> Tensor:
        """Σ Jᵀ ∇nll(f, y) over the data, (P,)."""
        slopes = self.likelihood.gradient(f.double(), self.y).to(self.function.dtype).flatten(1)
        if self.rows is not None:
            return self.rows.flatten(0, 1).T @ slopes.reshape(-1)
        total = torch.zeros(self.function.space.dim, dtype=self.function.dtype, device=self.function.device)
        for part, u in zip(split(self.x, BLOCK), slopes.split(BLOCK), strict=True):
            total += vjp_columns(self.function, part, u)
        return total

    def curvature(self, f: Tensor) -> LinearModelCurvature:
        """Σ Jᵀ Λ(f) J over the data, as an operator."""
        return LinearModelCurvature(self, f)


class LinearModelCurvature(SummedOperator):
    """The Fisher information Σ_n J_nᵀ Λ_n J_n of a linear model, Λ at its own outputs and J at θ₀.

    Args:
        model: The linear model.
        outputs: Its outputs on the data, (N, ...).
    """

    description = "product with the Fisher information of the linear model"

    def __init__(self, model: LinearModel, outputs: Tensor) -> None:
        super().__init__(model.function, model.data)
        self.model = model
        self.likelihood, self.outputs = model.likelihood, outputs.to(model.function.dtype)

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """Σ Jᵀ Λ J v over a batch."""
        first, likelihood = batch.index * BLOCK, self.likelihood
        if self.model.rows is not None:
            place = slice(first, first + batch.size)
            rows, own = self.model.rows[place].flatten(0, 1), self.outputs[place]
            moved = (rows @ v).T.reshape(v.shape[1], *own.shape)
            weighed: Tensor = likelihood.product(own, moved, batch.y)
            return rows.T @ weighed.reshape(v.shape[1], -1).T

        def weigh(f: Tensor, t: Tensor, place: slice) -> Tensor:
            own = self.outputs[first + place.start : first + place.stop]
            return likelihood.product(own, t, None if batch.y is None else batch.y[place])

        return weighted(self.function, batch.x, v, weigh)


@dataclass(frozen=True)
class Optimum:
    """The most probable δ, with its certificate.

    Φ is λ-strongly convex, so that the true optimum is within ‖∇Φ(δ)‖ / λ of δ.

    Args:
        delta: δ, (P,).
        outputs: The model's outputs there, (N, ...), float64.
        gradient_norm: ‖∇Φ(δ)‖.
        first_norm: ‖∇Φ(0)‖.
        distance: ‖∇Φ(δ)‖ / λ, a bound on the distance to the optimum.
        steps: Number of Newton steps.
    """

    delta: Tensor
    outputs: Tensor
    gradient_norm: float
    first_norm: float
    distance: float
    steps: int


class MostProbable(NewtonMethod):
    """The minimum of Φ, each of Newton's systems solved by conjugate gradients.

    Args:
        model: The linear model and its data.
        precision: λ.
        max_steps: Largest number of Newton steps.
    """

    def __init__(self, model: LinearModel, precision: float, max_steps: int) -> None:
        function = model.function
        self.model, self.ridge, self.max_steps = model, precision, max_steps
        self.delta = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
        self.outputs, self.steps = model.f0, 0
        self.objective = [self._total_loss(self.outputs)]
        self._gradient = model.gradient(self.outputs)
        self.norm = self.first = float(self._gradient.double().norm())

    def _total_loss(self, outputs: Tensor) -> float:
        """The negative log-likelihood of the data."""
        return float(self.model.nll(outputs))

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= self.max_steps

    def _reached(self) -> float:
        """‖∇Φ‖ over that at δ = 0."""
        if self.steps:
            self._gradient = self.model.gradient(self.outputs) + self.ridge * self.delta
            self.norm = float(self._gradient.double().norm())
        return self.norm / self.first if self.first else 0.0

    def _towards(self, reached: float) -> Direction:
        """Newton's direction; systems are solved so far that it converges superlinearly.

        Args:
            reached: ‖∇Φ‖ over that at δ = 0.

        Returns:
            The direction.

        Source:
            Nocedal and Wright 2006, theorem 7.2: to the relative residual √(‖∇Φ‖/‖∇Φ(0)‖).
        """
        hessian = self.model.curvature(self.outputs).damped(self.ridge)
        forcing = min(FORCING, reached**0.5)
        d = cg(hessian, -self._gradient, tolerance=forcing, max_steps=CG_STEPS).value
        assert isinstance(d, Tensor), "in the kind of the gradient"
        wide, along = self.delta.double(), d.double()
        squares = float(wide.square().sum()), float(wide @ along), float(along.square().sum())
        slope, rounding = float(self._gradient.double() @ along), 1e-13 * abs(self.objective[-1])
        return Direction(d, self.model.tangent(d), slope, squares, rounding)

    def _move(self, t: float, direction: Direction, value: float) -> None:
        """Go t of the direction."""
        self.delta = self.delta + t * direction.step
        self.outputs = self.outputs + t * direction.change
        self.objective.append(value)


def maximize(model: LinearModel, precision: float, tolerance: float, max_steps: int) -> Optimum:
    """The most probable δ.

    Args:
        model: The linear model and its data.
        precision: λ.
        tolerance: Stop when ‖∇Φ‖ ≤ tolerance · ‖∇Φ(0)‖.
        max_steps: Largest number of Newton steps.

    Returns:
        The optimum.

    Raises:
        NumericalError: If the tolerance is not reached.
    """
    point = MostProbable(model, precision, max_steps)
    reached, stalled = point.descend(tolerance)
    if stalled:
        raise NumericalError(
            f"Newton's method ended after {point.steps} steps with the gradient norm {point.norm:.3g}, "
            f"{reached:.2g} times that of the start",
            expected=f"{tolerance:.2g} times that of the start",
            remedy="raise tolerance= or max_steps=, use float64, or raise prior_precision=",
        )
    distance = point.norm / precision
    return Optimum(point.delta, point.outputs, point.norm, point.first, distance, point.steps)
