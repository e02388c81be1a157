"""A factorized Gaussian over the weights of a linear model, by stochastic variational inference.

Maddox et al. 2021, supplement A: the mini-batched bound

    log p(y | X) ≥ N/B Σ_{i ≤ B} E_q[log p(yᵢ | xᵢ, δ)] − KL(N(μ, softplus(v)²) ‖ N(0, λ⁻¹ I)),

begun at μ = 0 and v = −5, with Adam for ten epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.errors import DataError, NumericalError
from linnet.fitting.arguments import check_count, check_positive
from linnet.linalg.random import normal
from linnet.posterior.model import LinearModel
from linnet.progress import track
from linnet.solvers.solution import Estimate
from linnet.tangent.batch import take
from linnet.tangent.jacobian import jvp_columns, vjp_columns

START = -5.0  # of v, supplement A


@dataclass(frozen=True)
class Schedule:
    """Settings of the maximization of the bound: Adam, with the step size annealed to zero along a cosine.

    Args:
        epochs: Passes over the data.
        rate: Step size of the first step.
        batch_size: B, examples a step.
        draws: Draws of the weights a step.

    Raises:
        InputError: If a value is not positive.

    Example:
        >>> Schedule().epochs
        10
    """

    epochs: int = 10
    rate: float = 1e-3
    batch_size: int = 128
    draws: int = 1

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        check_count("draws", self.draws)
        check_positive("rate", self.rate, "leave rate= out")

    def climb(
        self, leaves: list[Tensor], n: int, source: torch.Generator | None, step: Callable[[Tensor], float]
    ) -> tuple[float, ...]:
        """Run the schedule.

        Args:
            leaves: What is optimized.
            n: N, number of examples.
            source: Source of randomness, for the order of the examples.
            step: Takes the indices of a mini-batch, writes ``.grad`` of the leaves (of the negative bound),
                and returns its estimate of the bound.

        Returns:
            The average of the estimates in every epoch.

        Raises:
            NumericalError: If the bound stops being finite.
        """
        optimizer = torch.optim.Adam(leaves, lr=self.rate)
        total, done, bounds = self.epochs * -(-n // self.batch_size), 0, []
        for _ in track(range(self.epochs), "variational inference"):
            estimates = []
            for index in _minibatches(n, self.batch_size, source):
                # η_t = η/2 (1 + cos πt/T): Loshchilov and Hutter 2017, eq. (5) without restarts
                optimizer.param_groups[0]["lr"] = self.rate / 2 * (1 + math.cos(math.pi * done / total))
                try:
                    estimates.append(step(index))
                except DataError as error:  # outputs that are NaN
                    raise NumericalError(
                        f"the bound is not finite with rate={self.rate}: {error.what}",
                        "a finite bound",
                        "lower rate=",
                    ) from error
                optimizer.step()
                done += 1
            bounds.append(sum(estimates) / len(estimates))
            if not math.isfinite(bounds[-1]):
                raise NumericalError(
                    f"the bound is {bounds[-1]} with rate={self.rate}",
                    expected="a finite bound",
                    remedy="lower rate=",
                )
        return tuple(bounds)


def _minibatches(n: int, size: int, source: torch.Generator | None) -> Iterator[Tensor]:
    """Every example once, in random order."""
    device = source.device if source else torch.device("cpu")
    yield from torch.randperm(n, generator=source, device=device).cpu().split(min(size, n))


def divergence(mean: Tensor, deviation: Tensor, precision: float) -> Tensor:
    """KL(N(μ, s²) ‖ N(0, λ⁻¹ I)) in nats.

    Args:
        mean: μ, (P,).
        deviation: s, (P,).
        precision: λ.

    Returns:
        (), float64.

    Example:
        >>> float(divergence(torch.zeros(3), torch.ones(3), precision=1.0))
        0.0
    """
    mean, variance = mean.double(), deviation.double().square()
    # ½ Σ [λ (μ² + s²) − 1 − log λ s²]
    return 0.5 * (precision * (mean.square() + variance) - 1 - (precision * variance).log()).sum()


@dataclass(frozen=True)
class MeanField:
    """A factorized Gaussian.

    Args:
        mean: μ, (P,).
        deviation: s, (P,).
        bounds: Estimates of the bound, epoch by epoch.
    """

    mean: Tensor
    deviation: Tensor
    bounds: tuple[float, ...]


@torch.no_grad()
def mean_field(
    model: LinearModel, precision: float, schedule: Schedule, source: torch.Generator | None
) -> MeanField:
    """Climb the bound.

    Args:
        model: The linear model and its data.
        precision: λ.
        schedule: How.
        source: Source of randomness.

    Returns:
        The factorized Gaussian.
    """
    function, likelihood = model.function, model.likelihood
    mean = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
    raw = torch.full_like(mean, START)
    mean.grad, raw.grad = torch.zeros_like(mean), torch.zeros_like(raw)

    def step(index: Tensor) -> float:
        index, s = index.to(function.device), F.softplus(raw)
        x, y, scale = take(model.x, index), model.y[index], model.n / len(index)
        noise = normal((len(mean), schedule.draws), source, mean.dtype, mean.device)
        # f = f₀ + J(μ + s ε), linear in both
        moved = jvp_columns(function, x, mean[:, None] + s[:, None] * noise).movedim(2, 0)
        f = model.f0[index] + moved.reshape(schedule.draws, *model.f0[index].shape)
        slopes = torch.stack([likelihood.gradient(one, y).flatten(1) for one in f], -1)
        pulled = scale * vjp_columns(function, x, slopes.to(mean.dtype))
        # −∇_μ = N/B Jᵀ∇nll + λ μ, and −∇_s = N/B ε Jᵀ∇nll + λ s − 1/s
        mean.grad = pulled.mean(1) + precision * mean
        raw.grad = ((noise * pulled).mean(1) + precision * s - 1 / s) * raw.sigmoid()
        fitted = sum(float(likelihood.nll(one, y).sum()) for one in f) / schedule.draws
        return -scale * fitted - float(divergence(mean, s, precision))

    bounds = schedule.climb([mean, raw], model.n, source, step)
    return MeanField(mean.detach(), F.softplus(raw), bounds)


def bound(
    model: LinearModel, found: MeanField, precision: float, samples: int, source: torch.Generator | None
) -> Estimate:
    """The bound on the log evidence over all of the data.

    Args:
        model: The linear model and its data.
        found: q.
        precision: λ.
        samples: Draws of the weights.
        source: Source of randomness.

    Returns:
        The estimate with its standard error.
    """
    fitted = []
    for _ in range(samples):
        noise = normal(found.mean.shape, source, found.mean.dtype, found.mean.device)
        fitted.append(-model.nll(model.f0 + model.tangent(found.mean + found.deviation * noise)))
    estimate = Estimate.of(torch.stack(fitted))
    return Estimate(
        estimate.mean - float(divergence(found.mean, found.deviation, precision)), estimate.stderr
    )
