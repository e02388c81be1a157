"""``linnet.linear_posterior``: Bayesian classification with the linear model of a network.

With f = f₀ + J δ, the full Taylor expansion, or f = J δ, the finite tangent kernel, and δ ~ N(0, λ⁻¹ I)
(Maddox et al. 2021, eq. A.1), three posteriors over δ:

    map       the most probable δ, with a certificate; outputs are certain
    svi       a factorized Gaussian that maximizes a bound on the evidence; output moments in closed form
    laplace   N(δ*, (F + λ I)⁻¹) with the Fisher information F at the most probable δ*, in draws

Variational inference (supplement A) climbs the mini-batched bound

    log p(y | X) ≥ N/B Σ_{i ≤ B} E_q[log p(yᵢ | xᵢ, δ)] − KL(N(μ, softplus(v)²) ‖ N(0, λ⁻¹ I)),

begun at μ = 0 and v = −5, with Adam for ten epochs. Laplace draws from N(0, A⁻¹) by products with A alone:
A^(−½) z ≈ ‖z‖ Q T^(−½) e₁ (Lanczos; supplements A and B). For a Krylov space of m steps the error is at most
twice that of the best polynomial of degree m − 1 for x^(−½) on the spectrum of A (Saad 1992); with
A = G + λ I and G of rank r, r + 1 steps are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.curvatures.engine import everything
from linnet.curvatures.layers import Part
from linnet.curvatures.variance import batch_covariance, captured_blocks
from linnet.errors import DataError, InputError, NumericalError
from linnet.likelihoods.likelihood import Likelihood, check_likelihood, takes_missing
from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import Seed, make_generator, normal
from linnet.linalg.structured import Diagonal
from linnet.linear.iterative import CGSettings
from linnet.linear.label_problem import LabelProblem, room_for_rows
from linnet.linear.newton import WeightNewton
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, flag, instance, integer, no_targets, number, optional, warn
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.model import PredictiveModel
from linnet.predictive.sampled import Labels, Link, SampledPredictive
from linnet.progress import track
from linnet.solvers.lanczos import tridiagonalize
from linnet.solvers.solution import Estimate
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.data import Data, examples
from linnet.tangent.jacobian import jvp_columns, vjp_columns
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.parts import in_parts
from linnet.tangent.preflight import warn_of_scale
from linnet.training import Training, cosine, filled, shuffled, train

__all__ = ["SVI", "Newton", "linear_posterior"]

BATCH = 128  # examples at once
CG_STEPS = 500  # for each Newton step that is allowed
START = -5.0  # of v, supplement A
EPOCHS = 10
ENOUGH = 2000  # steps of variational inference; the source took 3,900
FIRST = 16  # Lanczos steps that are tried first
MOST = 512  # and at most
ERROR = 1e-2  # of a draw, relative, up to which Lanczos steps are enough
BASIS_BYTES = 512 << 20  # of the bases that are held at once


@dataclass(frozen=True, kw_only=True)
class Newton:
    """Newton's method to the most probable weights, and draws of the Gaussian around them.

    Args:
        tolerance: It stops when the gradient's norm is this much smaller than at δ = 0; by default the square
            root of the rounding error of the weights' type.
        max_steps: Largest number of steps.
        samples: Draws of N(δ*, (F + λ I)⁻¹) for predictions, each a vector of P numbers that is kept; 0 for
            the most probable weights alone.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Newton(samples=5).max_steps
        50
    """

    tolerance: float | None = None
    max_steps: int = 50
    samples: int = 0

    def __post_init__(self) -> None:
        optional(number, "tolerance", self.tolerance, above=0, remedy="leave tolerance= out")
        integer("max_steps", self.max_steps)
        integer("samples", self.samples, 0)


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
        optional(number, "deviation", self.deviation, above=0)
        filled(self.training, "SVI", learning_rate=None, batch_size=None, epochs=None)


NAMED: dict[str, Newton | SVI] = {"map": Newton(), "svi": SVI(), "laplace": Newton(samples=30)}


class LinearPosterior(PredictiveModel):
    """The posterior of a linear model; :func:`linear_posterior` makes it.

    Attributes:
        method: "map", "svi" or "laplace".
        prior_precision: λ.
        mean: E[δ], (P,), in the order of ``lin.parameter_names``.
        optimum: Of "map" and "laplace": the most probable δ, with ``gradient_norm`` and ``distance``, a bound
            on how far it is from the true one; None for "svi".
        bounds: Of "svi": the bound on the log evidence, epoch by epoch; empty otherwise.
    """

    def __init__(
        self,
        problem: LabelProblem,
        centered: bool,
        prior_precision: float,
        found: WeightNewton | MeanField,
        draws: Tensor | None = None,
    ) -> None:
        self._problem, self._centered, self._draws = problem, centered, draws
        self.prior_precision = prior_precision
        if isinstance(found, MeanField):
            self.method, self.mean, self.bounds = "svi", found.mean, found.bounds
        else:
            self.method, self.mean, self.bounds = "map" if draws is None else "laplace", found.delta, ()
        self._factors = found if isinstance(found, MeanField) else None
        self.optimum = None if isinstance(found, MeanField) else found

    @property
    def _formula(self) -> str:
        """The outputs as a formula."""
        return "f₀ + J δ" if self._centered else "J δ"

    def __repr__(self) -> str:
        return f"LinearPosterior({self.method!r}, {self._formula}, P = {len(self.mean)})"

    @property
    def delta(self) -> dict[str, Tensor]:
        """E[δ] by parameter name, as ``lin.delta``."""
        return self._problem.function.space.to_params(self.mean)

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of every δ under "svi", (P,)."""
        if self._factors is None:
            raise InputError(
                f"method={self.method!r} has no factorized Gaussian",
                expected='method="svi"',
                remedy="see .optimum",
            )
        return self._factors.deviation

    @in_exact_mode
    def bound(self, samples: int = 100, seed: Seed = 0) -> Estimate:
        """The bound on log p(y | X) over all of the data, of "svi", in nats, from draws of the weights."""
        integer("samples", samples)
        problem, source, fitted = self._problem, make_generator(seed), []
        deviation = self.deviation
        for _ in range(samples):
            noise = normal(self.mean.shape, source, self.mean.dtype, self.mean.device)
            outputs = problem.base + problem.push(self.mean + deviation * noise)
            fitted.append(-float(problem.losses(outputs).sum()))
        estimate = Estimate.of(torch.tensor(fitted, dtype=torch.float64))
        apart = float(divergence(self.mean, deviation, self.prior_precision))
        return Estimate(estimate.mean - apart, estimate.stderr)

    @in_exact_mode
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw δ, (n, P): new draws, also where predictions use those made when the posterior was."""
        integer("n", n)
        if self.method == "map":
            raise InputError(
                'draws of a posterior made with method="map"',
                expected='method="svi" or "laplace"',
                remedy="use .mean, the most probable δ",
            )
        if self.optimum is not None:
            moved = _laplace_draws(self.optimum, n, seed).T - self.mean
        else:
            moved = self.deviation * normal((n, len(self.mean)), seed, self.mean.dtype, self.mean.device)
        return self.mean + self._problem.function.varying(moved)

    @in_exact_mode
    def predictive(
        self,
        x: Inputs,
        *,
        link: str = "probit",
        samples: int = 1000,
        seed: Seed = None,
        memory: str | int | None = None,
    ) -> GaussianPredictive | SampledPredictive:
        """The distribution of the outputs, and of labels.

        Args:
            x: N examples.
            link: For class probabilities of "map" and "svi": "probit", "pairwise", "bridge" or "mc".
            samples: Draws of outputs of link="mc".
            seed: Their seed or generator.
            memory: Budget for derivatives of "svi"; by default half of what is available.

        Returns:
            ``.mean`` and ``.variance`` (N, C), ``.covariance``, ``.sample(n)``, ``.probs``,
            ``.log_density(y)``. Of "laplace" these are averages over its draws, with ``.sampled_probs``
            (S, N, C); of "map" the variance is zero.

        Raises:
            DataError: If x is empty or not finite.
        """
        function = self._problem.function
        x = examples(function, x)
        parse_bytes(memory)
        labels = Labels(self._problem.likelihood, self._problem.base.shape[1:], Link(link, samples, seed))
        if self._draws is not None:
            return SampledPredictive(self._outputs(x, self._draws), labels)
        mean = self._outputs(x, self.mean)
        if self._factors is None:
            zero = torch.zeros_like(mean)
            return GaussianPredictive(mean, lambda: torch.diag_embed(zero), labels, variance=zero)
        # Cov[f] = J diag(s²) Jᵀ
        spread = Diagonal(self.deviation.square(), space=function.space)
        parts = (Part(everything(function), spread, "diagonal"),)
        blocks = captured_blocks(function, parts, x, memory, kept=batch_size(x) * mean.shape[1] ** 2)
        covariance = torch.cat([batch_covariance(parts, captured) for captured in blocks])
        return GaussianPredictive(mean, covariance, labels)

    @torch.no_grad()
    def _outputs(self, x: Inputs, delta: Tensor) -> Tensor:
        """The outputs (T, C), or (S, T, C) for draws."""
        # delta (P,) or (P, S)
        function = self._problem.function
        delta = delta.to(device=function.device, dtype=function.dtype)
        f0 = in_parts(function.model, lambda part: function.check_runs(part).flatten(1), x, BATCH)
        moved = torch.cat([jvp_columns(function, part, delta) for part in split(x, BATCH)])
        moved = moved if moved.ndim == 2 else moved.movedim(2, 0)
        return f0 + moved if self._centered else moved

    @in_exact_mode
    def predict(self, x: Inputs) -> Tensor:
        """E[f(x)], (N, C); of "laplace" the average over its draws."""
        if self._draws is not None:
            return self.predictive(x).mean
        return self._outputs(examples(self._problem.function, x), self.mean)

    def summary(self) -> dict[str, Any]:
        """The method, the model and the prior, as plain numbers and text."""
        known: dict[str, Any] = {
            "method": self.method,
            "outputs": self._formula,
            "likelihood": self._problem.likelihood.describe(),
            "parameters": len(self.mean),
            "prior_precision": self.prior_precision,
        }
        return known if not self.bounds else {**known, "bound": self.bounds[-1]}


@in_exact_mode
def linear_posterior(
    lin: Linearized,
    data: Any,
    likelihood: Likelihood,
    method: str | Newton | SVI = "map",
    *,
    base: bool = True,
    prior_precision: float = 1.0,
    seed: Seed = 0,
) -> LinearPosterior:
    """The posterior of the weights of a linearized network, for labels of any canonical likelihood.

    The displacement that ``lin`` has is not looked at, and it is left as it is: priors are about θ₀.

    Args:
        lin: A linearized network.
        data: Training data: an (x, y) pair, a Dataset, a DataLoader or batches, which is read once.
        likelihood: What the outputs mean, as ``linnet.likelihoods.Categorical()`` or ``Bernoulli()``.
        method: "map", "svi" or "laplace", or a :class:`Newton` or :class:`SVI` for settings other than
            theirs: ``Newton(samples=5)`` is "laplace" in five draws, ``Newton(tolerance=1e-8)`` a closer
            "map". "svi" makes ten passes over the data.
        base: Whether outputs are f₀ + J δ; otherwise J δ alone, a linear model on tangent features.
        prior_precision: λ of the prior N(0, λ⁻¹ I) of δ.
        seed: Seed or generator of "svi" and "laplace".

    Returns:
        The posterior, with ``.predict(x)`` and ``.predictive(x)``.

    Raises:
        DataError: If the data are empty, not finite, or labels are out of range.
        InputError: If an argument has a value that is not listed, or the likelihood is not canonical.
        NumericalError: If Newton's method or Lanczos' does not converge.

    Source:
        Maddox, Tang, Moreno, Wilson, Damianou, "Fast adaptation with linearized neural networks", AISTATS
        2021, supplement A. They train to the most probable δ by SGD, and use the Fisher information of test
        batches, scaled; here it is that of the training data. For Laplace they write the precision as σ².

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> likelihood = linnet.likelihoods.Categorical()
        >>> posterior = linear_posterior(linnet.linearize(net), (x, y), likelihood, Newton(samples=5))
        >>> prediction = posterior.predictive(x)
        >>> prediction.probs.shape, prediction.sampled_probs.shape
        (torch.Size([30, 3]), torch.Size([5, 30, 3]))
        >>> posterior.optimum.gradient_norm < 1e-2
        True
    """
    instance("lin", lin, Linearized, "a Linearized", "make one with linnet.linearize(model)")
    no_targets("likelihood", likelihood)
    check_likelihood(likelihood)
    if not likelihood.canonical:
        raise InputError(
            f"likelihood={likelihood!r} is not canonical in the outputs",
            expected="one whose negative logarithm is convex in them, such as Categorical() or Bernoulli()",
            remedy="use linnet.Laplace for the network itself",
        )
    flag("base", base)
    make_generator(seed)
    number("prior_precision", prior_precision, above=0, remedy="leave prior_precision= out")
    how = NAMED[choice("method", method, tuple(NAMED))] if isinstance(method, str) else method
    instance("method", how, (Newton, SVI), '"map", "svi", "laplace", a linnet.Newton or a linnet.SVI')
    function = lin.function
    x, y = Data.of(data, function, missing=takes_missing(likelihood)).pair
    f0 = in_parts(function.model, function.check_runs, x, BATCH)
    y = likelihood.check(f0, y)
    warn_of_scale(function, likelihood, x, f0)
    mean = f0 if base else torch.zeros_like(f0)
    problem = LabelProblem(function, x, mean, likelihood, y, room_for_rows(function))
    precision = float(prior_precision)
    if isinstance(how, SVI):
        factors = mean_field(problem, precision, how, make_generator(seed))
        return LinearPosterior(problem, base, precision, factors)
    tolerance = torch.finfo(function.dtype).eps ** 0.5 if how.tolerance is None else how.tolerance
    settings = CGSettings(tolerance, CG_STEPS * how.max_steps)
    optimum = WeightNewton(problem, precision, settings, limit=how.max_steps)
    optimum.require(tolerance)
    draws = _laplace_draws(optimum, how.samples, seed) if how.samples else None
    return LinearPosterior(problem, base, precision, optimum, draws)


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
    if how.training is None and total < ENOUGH:
        warn(
            f"variational inference by default ended after {total} steps, of {first:g} at most, which seldom "
            "reach the best mean: compare bounds[-1] with that of more of them, linnet.SVI(training="
            "linnet.Training(epochs=..., learning_rate=...))"
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


# -- draws -----------------------------------------------------------------------------------------


def _laplace_draws(optimum: WeightNewton, n: int, seed: Seed) -> Tensor:
    """Draws of N(δ*, (F + λ I)⁻¹), (P, n)."""
    delta = optimum.delta
    z = normal((n, len(delta)), seed, delta.dtype, delta.device).T.contiguous()
    return delta[:, None] + inverse_root(optimum.hessian, z, optimum.ridge)


def inverse_root(operator: LinearOperator, z: Tensor, floor: float) -> Tensor:
    """A^(−½) z for each column, by as many Lanczos steps as it takes, (P, K)."""
    # z (P, K)
    # Steps are doubled until the last quarter of them has changed the result by less than the tolerance.
    most, one = min(MOST, operator.shape[0]), z.shape[0] * z.element_size()
    plan = Plan(
        f"{most} Lanczos steps in {z.shape[0]} dimensions",
        parse_bytes(None, z.device),
        (("basis", (most + 1) * one),),
    )
    require(plan, ["raise prior_precision=", "select fewer parameters"])
    return _columns(operator, z, floor, min(FIRST, most), most)


def _columns(operator: LinearOperator, z: Tensor, floor: float, steps: int, most: int) -> Tensor:
    """A^(−½) z, as many columns at once as there is room for, with twice the steps where these fail."""
    at_once = max(1, BASIS_BYTES // ((steps + 1) * z.shape[0] * z.element_size()))
    found = []
    for part in z.split(at_once, 1):
        process = tridiagonalize(operator, part, steps)
        t = process.matrices().double()
        whole, early = _first_column(t, floor), steps - steps // 4
        change = whole - torch.nn.functional.pad(_first_column(t[:, :early, :early], floor), (0, steps // 4))
        error = float((change.norm(dim=1) / whole.norm(dim=1)).max())
        if error <= ERROR or steps == operator.shape[0]:
            found.append(torch.einsum("mpk,km->pk", process.basis, whole.to(z)) * part.norm(dim=0))
        elif steps < most:
            del process
            found.append(_columns(operator, part, floor, min(2 * steps, most), most))
        else:
            raise NumericalError(
                f"{steps} Lanczos steps leave the relative error {error:.2g} in draws from the posterior",
                expected=f"at most {ERROR:.2g}",
                remedy="raise prior_precision=",
            )
    return torch.cat(found, 1)


def _first_column(t: Tensor, floor: float) -> Tensor:
    """T^(−½) e₁ of every process, (K, m); Ritz values are not below the eigenvalues, up to rounding."""
    values, vectors = eigh(t, "the projected operator")
    first: Tensor = torch.einsum("kij,kj,kj->ki", vectors, values.clamp_min(floor).rsqrt(), vectors[:, 0])
    return first
