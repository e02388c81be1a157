"""A factorized Gaussian over the weights of a linear model, by stochastic variational inference.

Maddox et al. 2021, supplement A: the mini-batched bound

    log p(y | X) ≥ N/B Σ_{i ≤ B} E_q[log p(yᵢ | xᵢ, δ)] − KL(N(μ, softplus(v)²) ‖ N(0, λ⁻¹ I)),

begun at μ = 0 and v = −5, with Adam for ten epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.errors import DataError, NumericalError
from linnet.linalg.random import normal
from linnet.linear.label_problem import LabelProblem
from linnet.params import integer, number
from linnet.progress import track
from linnet.solvers.solution import Estimate
from linnet.tangent.batch import take
from linnet.tangent.jacobian import jvp_columns, vjp_columns
from linnet.training import Training, cosine, filled, shuffled, train

START = -5.0  # of v, supplement A
EPOCHS = 10


@dataclass(frozen=True, kw_only=True)
class SVI:
    """Stochastic variational inference: Adam, with the learning rate annealed to zero along a cosine.

    Args:
        training: ``learning_rate``, ``batch_size`` and ``epochs``; by default 1e-3, 128, and the
            number of passes of the function that takes these settings.
        draws: Draws of the weights a step.
        deviation: s at the start, by default softplus(−5) = 0.0067.

    Raises:
        InputError: If a value is not positive.

    Example:
        >>> from linnet.training import Training
        >>> SVI(training=Training(epochs=3)).draws
        1
    """

    training: Training | None = None
    draws: int = 1
    deviation: float | None = None

    def __post_init__(self) -> None:
        integer("draws", self.draws)
        if self.deviation is not None:
            number("deviation", self.deviation, above=0)
        filled(self.training, "SVI", learning_rate=None, batch_size=None, epochs=None)


def maximize_bound(
    how: SVI,
    epochs: int,
    leaves: list[Tensor],
    n: int,
    source: torch.Generator | None,
    gradient: Callable[[Tensor], float],
) -> tuple[float, ...]:
    """Estimates of the bound, epoch by epoch, as Adam climbs it; ``gradient`` gives that of one batch."""
    given = filled(how.training, "SVI", learning_rate=1e-3, batch_size=128, epochs=epochs)
    assert given.learning_rate
    assert given.batch_size
    assert given.epochs
    first, each = given.learning_rate, math.ceil(n / given.batch_size)
    total = given.epochs * each
    optimizer, bounds = torch.optim.Adam(leaves, lr=first), []
    for epoch in track(range(given.epochs), "variational inference"):
        steps = train(
            optimizer,
            shuffled(n, given.batch_size, source),
            gradient,
            lambda step: first * cosine(step, total),
            epoch * each,
        )
        try:
            estimates = [estimate for _, estimate in steps]
        except DataError as error:  # outputs that are NaN
            raise NumericalError(
                f"the bound is not finite with learning_rate={first}: {error.what}",
                expected="a finite bound",
                remedy="lower learning_rate=",
            ) from error
        bounds.append(sum(estimates) / len(estimates))
        if not math.isfinite(bounds[-1]):
            raise NumericalError(
                f"the bound is {bounds[-1]} with learning_rate={first}",
                expected="a finite bound",
                remedy="lower learning_rate=",
            )
    return tuple(bounds)


def divergence(mean: Tensor, deviation: Tensor, precision: float) -> Tensor:
    """KL(N(μ, s²) ‖ N(0, λ⁻¹ I)) in nats."""
    # mean (P,), deviation (P,)
    mean, variance = mean.double(), deviation.double().square()
    # ½ Σ [λ (μ² + s²) − 1 − log λ s²]
    return 0.5 * (precision * (mean.square() + variance) - 1 - (precision * variance).log()).sum()


@dataclass(frozen=True)
class MeanField:
    """A factorized Gaussian."""

    mean: Tensor  # μ, (P,)
    deviation: Tensor  # s, (P,)
    bounds: tuple[float, ...]  # estimates of the bound, epoch by epoch


@torch.no_grad()
def mean_field(
    problem: LabelProblem, precision: float, how: SVI, source: torch.Generator | None
) -> MeanField:
    """Climb the bound."""
    function, likelihood, n = problem.function, problem.likelihood, len(problem.base)
    mean = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
    start = START if how.deviation is None else math.log(math.expm1(how.deviation))
    raw = torch.full_like(mean, start)

    @torch.no_grad()
    def gradient(index: Tensor) -> float:
        index, s = index.to(function.device), F.softplus(raw)
        x, y, scale = take(problem.x, index), problem.y[index], n / len(index)
        noise = normal((len(mean), how.draws), source, mean.dtype, mean.device)
        # f = f₀ + J(μ + s ε), linear in both
        moved = jvp_columns(function, x, mean[:, None] + s[:, None] * noise).movedim(2, 0)
        base = problem.base[index]
        f = base + moved.reshape(how.draws, *base.shape)
        slopes = torch.stack([likelihood.gradient(one, y).flatten(1) for one in f], -1)
        pulled = scale * vjp_columns(function, x, slopes.to(mean.dtype))
        # −∇_μ = N/B Jᵀ∇nll + λ μ, and −∇_s = N/B ε Jᵀ∇nll + λ s − 1/s
        mean.grad = pulled.mean(1) + precision * mean
        raw.grad = ((noise * pulled).mean(1) + precision * s - 1 / s) * raw.sigmoid()
        fitted = sum(float(likelihood.nll(one, y).sum()) for one in f) / how.draws
        return -scale * fitted - float(divergence(mean, s, precision))

    bounds = maximize_bound(how, EPOCHS, [mean, raw], n, source, gradient)
    return MeanField(mean.detach(), F.softplus(raw), bounds)


def bound(
    problem: LabelProblem, found: MeanField, precision: float, samples: int, source: torch.Generator | None
) -> Estimate:
    """The bound on the log evidence over all of the data."""
    fitted = []
    for _ in range(samples):
        noise = normal(found.mean.shape, source, found.mean.dtype, found.mean.device)
        outputs = problem.base + problem.push(found.mean + found.deviation * noise)
        fitted.append(-float(problem.losses(outputs).sum()))
    estimate = Estimate.of(torch.tensor(fitted, dtype=torch.float64))
    return Estimate(
        estimate.mean - float(divergence(found.mean, found.deviation, precision)), estimate.stderr
    )
