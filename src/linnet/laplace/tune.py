"""``Laplace.tune``: hyper-parameter search by a chosen criterion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.stream import Batches
from linnet.curvatures.variance import batch_covariance, captured_blocks
from linnet.errors import InputError, NumericalError
from linnet.laplace.outputs import Draws, outputs_under
from linnet.laplace.posterior import Groups, Hyper, Posterior, with_noise
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.params import choice, integer, own, positive_numbers, refuse_first, warn
from linnet.params import seed as checked_seed
from linnet.predictive.sampled import Labels, SampledPredictive, log_density
from linnet.solvers.lbfgs import minimize
from linnet.tangent.rules import Captured

# -- evidence --------------------------------------------------------------------------------------
#
# Prior precisions and noise variance by maximum marginal likelihood.
#
# Where the gradient of the log evidence in log δ_g and log m vanishes,
#
#     δ_g = γ_g / ‖θ*_g − μ_g‖²,   γ_g = n_g − δ_g ∂ log det H / ∂ δ_g   (well-determined parameters)
#     m   = S / (n − Σ_g γ_g)      for Gaussian noise, with S the sum of squared residuals over σ²
#
# which is MacKay's fixed point (1992, "A practical Bayesian framework for backpropagation networks"); the
# derivative of the evidence itself is followed by L-BFGS, which also converges where the fixed point
# cycles.

LOWEST, HIGHEST = math.log(1e-10), math.log(1e14)  # of every hyper-parameter: some optima lie at infinity


@dataclass(frozen=True)
class Tuned:
    """Result of tuning."""

    hyper: Hyper  # the hyper-parameters
    value: float  # the criterion there
    steps: int  # evaluations of the criterion
    converged: bool  # whether the search ended before its limit of steps
    # hyper-parameters that ended at the smallest or largest value of their grid, so that the best may lie
    # beyond, or where the data want no posterior at all
    edges: tuple[str, ...] = ()


def _check_noise(posterior: Posterior) -> None:
    """Raise unless the noise variance is a hyper-parameter of the evidence."""
    if not posterior.fitted.targets:
        raise InputError(
            "noise=True without a Gaussian likelihood",
            expected="a likelihood with a noise variance",
            remedy="leave noise= out",
        )
    if posterior.fitted.squares <= 0:
        raise InputError(
            "noise=True, but the network fits every target exactly",
            expected="residuals that are not all zero",
            remedy="pass noise=False",
        )
    if posterior.curvature.made.expectation == "empirical":
        raise InputError(
            "noise=True with expectation='empirical'",
            expected="a curvature that scales with 1/σ², as that of observed labels does not",
            remedy='use expectation="exact" or "mc", or pass noise=False',
        )


def _fixed_point(posterior: Posterior, groups: Groups, start: Hyper, noise: bool, steps: int) -> Tuned:
    """MacKay's updates until they change nothing."""
    sizes, distances = groups.sums(torch.ones_like(posterior.mean)), posterior.distances(groups)
    fitted, at, converged, count = posterior.fitted, start, False, 0
    while count < steps and not converged:
        count += 1
        prior, level = at.prior.detach().requires_grad_(), at.noise.detach().requires_grad_()
        logdet = posterior.logdet(groups, Hyper(prior, at.scale, level))
        by_prior, by_noise = torch.autograd.grad(logdet, [prior, level])
        determined = (sizes - at.prior * by_prior).clamp_min(0)
        updated = (determined / distances.clamp_min(1e-300)).clamp(math.exp(LOWEST), math.exp(HIGHEST))
        changes = (updated / at.prior).log().abs()
        after = at.noise
        if noise:
            # m = s S / (s n − γ), γ = −m ∂ log det H / ∂ m
            scale = float(at.scale)
            left = scale * fitted.targets + float(at.noise * by_noise)
            after = torch.full_like(at.noise, scale * fitted.squares / max(left, 1e-9 * fitted.targets))
            changes = torch.cat([changes, (after / at.noise).log().abs()[None]])
        at = Hyper(updated, at.scale, after)
        converged = float(changes.max()) < 1e-9
    return Tuned(at, float(posterior.log_evidence(groups, at)), count, converged)


# -- scores ----------------------------------------------------------------------------------------
#
# Predictive likelihoods of a Laplace posterior for many hyper-parameters: held-out or leave-one-out.
#
# The network is differentiated once for each batch, whatever the number of hyper-parameters that are
# compared. Leave-one-out removes an example's own factor from the Gaussian over its outputs N(f, V): with
# Λ and g the Hessian and gradient of its negative log-likelihood at f,
#
#     V₋ = (V⁻¹ − Λ)⁻¹ = V + V R (I − Rᵀ V R)⁻¹ Rᵀ V,  Λ = R Rᵀ,     f₋ = f + V₋ g
#
# exact for a linear model with Gaussian noise at its mode. An approximate V can claim a leverage Rᵀ V R
# of one or more, of which no part may be left: it is scaled down to just below one.

LEVERAGE = 0.999
MOST_GROUPS = 256  # hyper-parameters that the gradient of a validation likelihood is taken in


@dataclass(frozen=True, eq=False)
class Scorer:
    """A posterior, data, and what is asked of the one about the other."""

    posterior: Posterior  # the posterior
    groups: Groups  # groups of the prior
    likelihood: Likelihood  # the likelihood that the curvature was computed with
    data: Any  # held-out data; for leave-one-out those of the fit
    labels: Labels  # how targets are distributed, given the outputs
    left_out: bool = False  # whether each example is taken out of the posterior first
    memory: str | int | None = None  # budget

    def values(self, points: Sequence[Hyper]) -> Tensor:
        """The summed log predictive density at several hyper-parameters."""
        spreads = [self.posterior.covariance(self.groups, at).parts for at in points]
        total = torch.zeros(len(points), dtype=torch.float64)
        for captured, y in self._captured():
            for i, (parts, at) in enumerate(zip(spreads, points, strict=True)):
                total[i] += float(
                    self._density(captured, batch_covariance(parts, captured), y, at).double().sum()
                )
        return total

    def sampled_values(self, points: Sequence[Hyper], samples: int, seed: int) -> Tensor:
        """The same with sampled weights: one set of networks a point, run on all data."""
        # Random numbers are common to all points, so that differences between points are not those of draws.
        total = torch.zeros(len(points), dtype=torch.float64)
        for i, at in enumerate(points):
            covariance = self.posterior.covariance(self.groups, at)
            labels = replace(self.labels, likelihood=with_noise(self.likelihood, float(at.noise)))
            draws = Draws(covariance, samples, seed, self.memory)
            for batch in self._batches():
                outputs = outputs_under(covariance.function, draws, samples, batch.x)
                if not bool(outputs.isfinite().all()):  # weights so far away that they overflow
                    total[i] = -torch.inf
                    break
                total[i] += float(
                    SampledPredictive(outputs, labels).log_density(_labels(batch.y)).double().sum()
                )
        return total

    def gradient(self, at: Hyper, scale: bool, noise: bool) -> tuple[float, Tensor]:
        """The summed log predictive density, and its gradient in the logarithms of the hyper-parameters."""
        parts = self.posterior.covariance(self.groups, at).parts
        slopes = self._slopes(at, scale, noise)
        eta = torch.zeros(len(slopes), dtype=torch.float64, requires_grad=True)
        value, total = 0.0, torch.zeros_like(eta)
        for captured, y in self._captured():
            spread = batch_covariance(parts, captured)
            for one, (sign, changing) in zip(eta.unbind(0), slopes, strict=True):
                # Σ dV/dη η at η = 0: what follows sees the derivative of V, exactly
                spread = spread + sign * batch_covariance(changing, captured) * one.to(spread)
            if noise:
                spread = spread + torch.diag_embed(self._noise(captured, at)) * eta[-1].to(spread)
            # an example that is left out takes with it what the scale of the data multiplies
            moved = replace(at, scale=at.scale * eta[self.groups.count].exp()) if scale else at
            density = self._density(captured, spread, y, moved).double().sum()
            total += torch.autograd.grad(density, eta)[0]
            value += float(density.detach())
        return value, total

    def _slopes(self, at: Hyper, scale: bool, noise: bool) -> list[tuple[float, Any]]:
        """±dM/dη, with positive semi-definite dM, for every hyper-parameter."""
        if self.groups.count > MOST_GROUPS:
            raise InputError(
                f"the gradient of a predictive likelihood in {self.groups.count} prior precisions",
                expected=f"at most {MOST_GROUPS}",
                remedy='use .tune("evidence"), or prior="layer"',
            )
        still = Hyper(torch.zeros_like(at.prior), torch.zeros_like(at.scale), torch.zeros_like(at.noise))
        found: list[tuple[float, Any]] = []
        for g in range(self.groups.count):
            one = torch.zeros_like(at.prior)
            one[g] = at.prior[g]
            towards = replace(still, prior=one)
            found.append((-1.0, self.posterior.slopes(self.groups, at, towards, g)))
        if scale:
            found.append((-1.0, self.posterior.slopes(self.groups, at, replace(still, scale=at.scale), None)))
        if noise:  # H falls as the noise rises
            found.append((1.0, self.posterior.slopes(self.groups, at, replace(still, noise=-at.noise), None)))
        return found

    def _noise(self, captured: Captured, at: Hyper) -> Tensor:
        """σ² of each output, the derivative of the variance of a target in log m, (N, K)."""
        likelihood = with_noise(self.likelihood, float(at.noise))
        if not isinstance(likelihood, Gaussian) or self.left_out:
            raise InputError(
                "the gradient of this likelihood in the noise variance",
                expected="a Gaussian likelihood and held-out data",
                remedy="pass noise=False",
            )
        return likelihood.variance(captured.outputs.reshape(-1, *self.labels.shape)).flatten(1)

    def _batches(self) -> Batches:
        """The data."""
        return Batches(self.data, self.posterior.curvature.function)

    def _captured(self) -> Iterator[tuple[Captured, Tensor]]:
        """The network differentiated on a few examples, with their labels."""
        curvature: Curvature = self.posterior.curvature
        for batch in self._batches():
            y, start = _labels(batch.y), 0
            for captured in captured_blocks(curvature.function, curvature.parts, batch.x, self.memory):
                yield captured, y[start : start + captured.n]
                start += captured.n

    def _density(self, captured: Captured, spread: Tensor, y: Tensor, at: Hyper) -> Tensor:
        """Log predictive density of each label, (N,)."""
        likelihood, mean = with_noise(self.likelihood, float(at.noise)), captured.outputs.to(spread)
        if self.left_out:
            fisher = self.posterior.curvature.made.matrix == "fisher"
            mean, spread = left_out(likelihood, mean, spread, y, self.labels.shape, at.scale, fisher=fisher)
        return log_density(likelihood, mean, spread, y, self.labels.shape, self.labels.link)


def left_out(
    likelihood: Likelihood,
    mean: Tensor,
    spread: Tensor,
    y: Tensor,
    shape: Sequence[int],
    scale: Tensor | float = 1.0,
    *,
    fisher: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs of each example from a posterior that has not seen it."""
    # mean (N, K), spread (N, K, K)
    n, f = len(mean), mean.detach().reshape(-1, *shape)
    columns = likelihood.fisher_root(f, y) if fisher else likelihood.root(f, y)
    weight = torch.as_tensor(scale).to(spread)
    root = weight.sqrt() * columns.flatten(2).permute(1, 2, 0)  # R, (N, K, R)
    gradient = weight * likelihood.gradient(f, y).reshape(n, -1, 1)
    across = spread @ root
    leverage = root.mT @ across
    largest = torch.linalg.eigvalsh(leverage).amax(1)
    leverage = leverage * (LEVERAGE / largest.clamp_min(LEVERAGE))[:, None, None]
    identity = torch.eye(leverage.shape[1], dtype=spread.dtype, device=spread.device)
    left: Tensor = spread + across @ torch.linalg.solve(identity - leverage, across.mT)
    return mean + (left @ gradient)[..., 0], (left + left.mT) / 2


def _labels(y: Tensor | None) -> Tensor:
    """Targets, or an error."""
    if y is None:
        raise InputError(
            "data have no targets", expected="(x, y) pairs", remedy="pass data=(x, y) to tune by predictions"
        )
    return y


METHODS = ("evidence", "validation", "grid", "loo")
PRIORS = 10.0 ** torch.linspace(-4, 4, 21, dtype=torch.float64)  # the grid, where none is given
_FLAT = 0.01  # nats of all data together: they are no more likely than 1.01 to 1
VALUES = "a number or a list of numbers, all positive"


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Values to try, and the predictions that they are compared by.

    Args:
        prior_precision: Values, 1e-4 to 1e4 by default; of several precisions, the geometric mean.
        data_scale: Values.
        noise_variance: Values, of a Gaussian likelihood of one variance.
        predict: "glm", or "mc" for held-out data.
        samples: Networks of "mc".
        seed: Seed of "mc".

    Raises:
        InputError: If a setting does not work.

    Example:
        >>> Grid(prior_precision=[0.1, 1.0, 10.0]).predict
        'glm'
    """

    prior_precision: Any = None
    data_scale: Any = None
    noise_variance: Any = None
    predict: str = "glm"
    samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        choice("predict", self.predict, ("glm", "mc"))
        integer("samples", self.samples)
        checked_seed("seed", self.seed)
        for name in ("prior_precision", "data_scale", "noise_variance"):
            value = getattr(self, name)
            if value is None:
                continue
            positive_numbers(name, value, VALUES)
            object.__setattr__(self, name, own(value))


@dataclass(frozen=True)
class Search:
    """Settings of a search."""

    kind: str  # "gradient", "fixed-point" or "grid"
    steps: int  # most evaluations of the gradient or the fixed point
    scale: bool  # whether the scale of the data is searched by gradient, too
    noise: bool  # whether the noise variance is, too
    grid: Grid  # the values to try, and how predictions are made
    noises: Tensor | None  # noise variances to try, over that of the likelihood


def tuned(method: str, scorer: Scorer, at: Hyper, search: Search) -> Tuned:
    """Find hyper-parameters."""
    _require_together(method, search, scorer.left_out)
    if search.kind == "grid":
        return _by_grid(scorer, at, search)
    if method != "evidence":
        return _by_gradient(scorer, at, search)
    posterior, groups = scorer.posterior, scorer.groups
    posterior.fitted.at(at.noise)  # there must be targets
    if search.noise:
        _check_noise(posterior)
    if search.kind == "fixed-point":
        return _fixed_point(posterior, groups, at, search.noise, search.steps)

    def evidence(eta: Tensor, point: Point) -> tuple[float, Tensor]:
        leaf = eta.detach().requires_grad_()
        value = posterior.log_evidence(groups, point(leaf))
        (slope,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), slope

    return _climbed(at, search, evidence)


def _require_together(method: str, search: Search, left_out: bool) -> None:
    """Raise unless method, search and grid go together."""
    grid, by_grid, by_gradient = search.grid, search.kind == "grid", search.kind == "gradient"
    kinds = {"evidence": ("gradient", "fixed-point"), "grid": ("grid",)}.get(method, ("gradient", "grid"))
    values = any(one is not None for one in (grid.prior_precision, grid.data_scale, grid.noise_variance))
    untried = "data_scale" if search.scale else "noise_variance"
    table = (
        (
            method == "evidence" and (search.scale or values),
            "tune('evidence') with a grid, or of the scale of the data",
            "prior precisions and noise alone: duplicated data have an evidence of their own",
            'use method="grid" or method="validation"',
        ),
        (
            search.kind not in kinds,
            f"search={search.kind!r} with method={method!r}",
            " or ".join(f'"{kind}"' for kind in kinds),
            "leave search= out",
        ),
        (
            by_gradient and (values or grid.predict != "glm"),
            f"search='gradient' with a grid, or with predict={grid.predict!r}",
            "a search by gradient of the closed-form predictions",
            'pass search="grid"',
        ),
        (
            by_grid and (search.scale or (search.noise and search.noises is None)),
            f"{'data_scale' if search.scale else 'noise'}=True in a grid, which tries the values it is given",
            "values",
            f"pass {untried}=[...], or search by gradient",
        ),
        (
            by_grid and grid.predict == "mc" and left_out,
            "predict='mc' with method='loo'",
            '"glm", or "mc" for held-out data',
            'pass predict="glm"',
        ),
    )
    refuse_first(table)


Point = Callable[[Tensor], Hyper]  # hyper-parameters by their logarithms


def _climbed(
    start: Hyper, search: Search, criterion: Callable[[Tensor, Point], tuple[float, Tensor]]
) -> Tuned:
    """L-BFGS on the logarithms of the hyper-parameters."""
    g = start.prior.numel()

    def point(eta: Tensor) -> Hyper:
        positive = eta.clamp(LOWEST, HIGHEST).exp()
        at = replace(start, prior=positive[:g])
        at = replace(at, scale=positive[g]) if search.scale else at
        return replace(at, noise=positive[-1]) if search.noise else at

    def objective(eta: Tensor) -> tuple[float, Tensor]:
        value, slope = criterion(eta, point)
        return -value, -slope

    logs = [start.prior.log()]
    logs += [start.scale.log()[None]] if search.scale else []
    logs += [start.noise.log()[None]] if search.noise else []
    eta, value, count, converged = minimize(objective, torch.cat(logs), search.steps)
    return Tuned(point(eta), -value, count, converged)


def _by_gradient(scorer: Scorer, start: Hyper, search: Search) -> Tuned:
    """The gradient of a predictive likelihood; a warning where the network alone predicts as well."""

    def density(eta: Tensor, point: Point) -> tuple[float, Tensor]:
        value, slope = scorer.gradient(point(eta), search.scale, search.noise)
        inside = (eta > LOWEST) & (eta < HIGHEST)
        return value, torch.where(inside, slope.to(eta), 0.0)

    found = _climbed(start, search, density)
    at = found.hyper
    certain = replace(at, prior=torch.full_like(at.prior, math.exp(HIGHEST)))
    if found.value - float(scorer.values([certain])[0]) > _FLAT:
        return found
    warn(
        "the network alone predicts the data of tune() as well as any posterior around it, so the prior "
        f"precision ended at {float(at.prior.max()):.1e}, where variances are near 0. Tune on data that "
        "the network was not trained or chosen on, or set prior_precision= yourself"
    )
    return replace(found, edges=("prior_precision",))


def _by_grid(scorer: Scorer, at: Hyper, search: Search) -> Tuned:
    """The best of all combinations."""
    grid, logs = search.grid, at.prior.log()
    values = {
        "prior_precision": _values(grid.prior_precision, PRIORS),
        "data_scale": _values(grid.data_scale, at.scale[None]),
        "noise_variance": _values(search.noises, at.noise[None]),
    }
    points = [
        Hyper((logs - logs.mean() + prior.log()).exp(), scale, noise)
        for prior, scale, noise in itertools.product(*(one.to(logs) for one in values.values()))
    ]
    if grid.predict == "glm":
        scores = scorer.values(points)
    else:
        scores = scorer.sampled_values(points, grid.samples, grid.seed)
    best = int(scores.nan_to_num(-torch.inf).argmax())
    if not bool(scores.isfinite().any()):
        raise NumericalError(
            f"outputs overflow or are no numbers at all {len(points)} points of the grid",
            expected="one at which they are finite",
            remedy="try larger values of prior_precision",
        )
    edges = _at_edges(values, best)
    return Tuned(points[best], float(scores[best]), len(points), converged=True, edges=edges)


def _at_edges(values: Mapping[str, Tensor], best: int) -> tuple[str, ...]:
    """Which grids have the best combination at an end of theirs."""
    found = []
    places = torch.unravel_index(torch.tensor(best), tuple(map(len, values.values())))
    for (name, grid), place in zip(values.items(), places, strict=True):
        if len(grid) > 1 and float(grid[place]) in (float(grid.min()), float(grid.max())):
            found.append(name)
    return tuple(found)


def _values(given: Any, default: Tensor) -> Tensor:
    """Values to try."""
    return default if given is None else torch.as_tensor(given, dtype=torch.float64).flatten()
