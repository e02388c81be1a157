"""Hamiltonian Monte Carlo for tiny networks in float64, as a reference with convergence diagnostics.

Neal, "MCMC using Hamiltonian dynamics", 2011, section 5.3: momenta r ~ N(0, I), L leapfrog steps of size ε,
and acceptance with probability min(1, exp(H − H')). The step size is set in the warm-up by dual averaging
(Hoffman and Gelman 2014, section 3.2) and jittered by ±20 % afterwards, so that no length resonates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LogDensity = Callable[[Tensor], Tensor]

TARGET = 0.8  # mean acceptance probability that the warm-up aims at


@dataclass(frozen=True)
class Chains:
    """Draws of several chains."""

    draws: Tensor  # (chains, n, P), float64
    acceptance: Tensor  # mean acceptance probability of each chain after the warm-up, (chains,)
    step_size: float  # ε after the warm-up
    # trajectories after the warm-up whose energy error was above 1000, which means that the integrator left
    # the distribution
    divergences: int

    @property
    def flat(self) -> Tensor:
        """All draws, (chains · n, P)."""
        return self.draws.flatten(0, 1)

    def rhat(self, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The potential scale reduction of split chains, near 1 where they agree."""
        # of (S, P)
        chains, n, _ = self.draws.shape
        m = n // 2
        values = self.draws if of is None else of(self.flat).unflatten(0, (chains, n))
        halves = torch.cat([values[:, :m], values[:, m : 2 * m]])
        within = halves.var(1).mean(0)
        between = halves.mean(1).var(0)  # B/m
        return (((m - 1) / m * within + between) / within).sqrt()


def hmc(
    log_density: LogDensity,
    start: Tensor,
    draws: int = 1000,
    warmup: int = 500,
    leapfrog: int = 20,
    step_size: float = 0.1,
    generator: torch.Generator | None = None,
) -> Chains:
    """Run several chains side by side."""
    if start.ndim != 2 or start.dtype != torch.float64:
        raise ValueError(
            f"start is {tuple(start.shape)}, {start.dtype}. Expected: (chains, P), torch.float64."
        )
    if min(draws, warmup, leapfrog) < 1 or step_size <= 0:
        raise ValueError("draws, warmup, leapfrog and step_size must be positive.")
    state = start.detach().clone(), *_slope(log_density, start)
    if not torch.isfinite(state[2]).all():
        raise ValueError("the log density is not finite at start. Expected: a point of positive density.")
    averaging = _DualAveraging(step_size)
    kept, rates, divergences = [], torch.zeros(len(start), dtype=torch.float64), 0
    for i in range(warmup + draws):
        jitter = 0.8 + 0.4 * float(torch.rand((), generator=generator))
        epsilon = averaging.current if i < warmup else averaging.final * jitter
        state, rate, diverged = _transition(log_density, state, epsilon, leapfrog, generator)
        if i < warmup:
            averaging.update(float(rate.mean()))
        else:
            kept.append(state[0])
            rates += rate / draws
            divergences += diverged
    return Chains(torch.stack(kept, 1), rates, averaging.final, divergences)


State = tuple[Tensor, Tensor, Tensor]  # θ (chains, P), the gradient there, and the log density (chains,)


def _slope(log_density: LogDensity, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (chains, P) and the log density (chains,)."""
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        value = log_density(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return gradient, value.detach()


def _transition(
    log_density: LogDensity, state: State, epsilon: float, leapfrog: int, generator: torch.Generator | None
) -> tuple[State, Tensor, int]:
    """One trajectory of every chain: where it ends, how likely it was accepted, and how many diverged."""
    theta, gradient, value = state
    momentum = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
    energy = 0.5 * momentum.square().sum(1) - value
    position, moved, density = theta, gradient, value
    for _ in range(leapfrog):
        momentum = momentum + epsilon / 2 * moved
        position = position + epsilon * momentum
        moved, density = _slope(log_density, position)
        momentum = momentum + epsilon / 2 * moved
    error = 0.5 * momentum.square().sum(1) - density - energy
    error = torch.where(error.isfinite(), error, math.inf)
    rate = (-error).exp().clamp_max(1.0)
    accepted = torch.rand(len(theta), generator=generator, dtype=theta.dtype) < rate
    new = (
        torch.where(accepted[:, None], position, theta),
        torch.where(accepted[:, None], moved, gradient),
        torch.where(accepted, density, value),
    )
    return new, rate, int((error > 1000).sum())


class _DualAveraging:
    """Step sizes that bring the acceptance to its target, Hoffman and Gelman 2014, eq. (6)."""

    def __init__(self, step_size: float) -> None:
        self.center = math.log(10 * step_size)
        self.gap, self.average, self.count = 0.0, math.log(step_size), 0
        self.current = step_size

    @property
    def final(self) -> float:
        """The averaged step size."""
        return math.exp(self.average)

    def update(self, rate: float) -> None:
        """Take the acceptance of one trajectory into account."""
        self.count += 1
        t = self.count
        self.gap += (TARGET - rate - self.gap) / (t + 10)
        log_step = self.center - math.sqrt(t) / 0.05 * self.gap
        weight = t**-0.75
        self.average = weight * log_step + (1 - weight) * self.average
        self.current = math.exp(log_step)


def network_posterior(
    model: nn.Module, x: Tensor, y: Tensor, nll: Callable[[Tensor, Tensor], Tensor], prior_precision: float
) -> tuple[LogDensity, Callable[[Tensor, Tensor], Tensor]]:
    """The log posterior of a tiny network's weights, and its outputs for given weights."""
    # x (N, ...), nll (N,)
    frozen = copy.deepcopy(model).double().eval().requires_grad_(False)
    shapes = {name: p.shape for name, p in frozen.named_parameters()}
    size = sum(shape.numel() for shape in shapes.values())

    def run(theta: Tensor, inputs: Tensor) -> Tensor:
        pieces = theta.split([shape.numel() for shape in shapes.values()])
        params = {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        result: Tensor = torch.func.functional_call(frozen, params, (inputs,))
        return result

    def outputs(draws: Tensor, inputs: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(run, in_dims=(0, None))(draws, inputs)
        return found

    def log_density(theta: Tensor) -> Tensor:
        s = len(theta)
        labels = y.repeat(s, *[1] * (y.ndim - 1))
        fitted = nll(outputs(theta, x).flatten(0, 1), labels).reshape(s, -1).sum(1)
        # log p(y | θ) + log N(θ; 0, λ⁻¹ I)
        constant = 0.5 * size * math.log(prior_precision / (2 * math.pi))
        return constant - 0.5 * prior_precision * theta.square().sum(1) - fitted

    return log_density, outputs
