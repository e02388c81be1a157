"""Targets of a likelihood: class probabilities and densities of Gaussian outputs, and of sampled networks.

Closed forms for classes, with f ~ N(μ, Σ) and κ(v) = 1/√(1 + π/8 v) (MacKay 1992):

    probit     softmax(κ(Σ_cc) μ_c); σ(κ(Σ) μ) for yes or no
    pairwise   p_c ∝ 1 / Σ_k 1/σ(κ(Σ_cc + Σ_kk − 2 Σ_ck)(μ_c − μ_k)), from the probit of every
               difference of outputs (Lu, Ie and Sha 2020, "Mean-field approximation to
               Gaussian-softmax integral", section 3)
    bridge     the mean of the Dirichlet whose Laplace approximation in the basis of logits is N(μ, Σ)
               (Hobbhahn, Kristiadi and Hennig 2022, "Fast predictive uncertainty for classification with
               Bayesian deep networks", with their correction where variances are large). It moderates
               strongly, and is near the softmax average only where Σ is near that of a Dirichlet
    mc         the average over draws of the outputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.custom import Custom
from linnet.likelihoods.discrete import Bernoulli, Categorical, Poisson
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.random import Seed, make_generator, normal, require_room
from linnet.params import choice, integer
from linnet.predictive.gaussian import GaussianPredictive, Predictive, TargetModel, add_noise, symmetric_root
from linnet.predictive.noise import Noise
from linnet.tangent.modes import in_exact_mode

LINKS = ("probit", "pairwise", "bridge", "mc")
# Of an integral over the output of a count: points, standard deviations on each side, and nats that count.
POINTS, REACH, NEGLIGIBLE = 400, 1000.0, 40.0
SEED = 0  # of the draws behind a density, the same for all hyper-parameters that are compared


@dataclass(frozen=True)
class Link:
    """Approximations of class probabilities."""

    kind: str = "probit"  # "probit", "pairwise", "bridge" or "mc"
    samples: int = 1000  # draws of "mc"
    seed: Seed = None  # source of randomness of "mc"

    def __post_init__(self) -> None:
        choice("link", self.kind, LINKS)
        make_generator(self.seed)
        integer("samples", self.samples)

    @property
    def diagonal(self) -> bool:
        """Whether variances are all that it looks at."""
        return self.kind == "probit"


def positions(likelihood: Likelihood, shape: Sequence[int]) -> Tensor:
    """Where the components of each position are among flattened outputs, (T, C)."""
    each = torch.arange(math.prod(shape)).reshape(tuple(shape) or (1,))
    axis = likelihood.axis - 1 if likelihood.axis > 0 else each.ndim + likelihood.axis
    return each.movedim(axis, -1).reshape(-1, each.shape[axis])


def marginals(mean: Tensor, spread: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of every position as an example of its own, (N·T, C)."""
    # mean (N, K), spread (N, K, K), places (T, C)
    if places.shape[0] == 1 and torch.equal(places[0], torch.arange(places.shape[1])):
        return mean, spread
    own = mean[:, places].flatten(0, 1)
    if spread.ndim == 2:
        return own, spread[:, places].flatten(0, 1)
    return own, spread[:, places[:, :, None], places[:, None]].flatten(0, 1)


def class_probabilities(
    likelihood: Likelihood, mean: Tensor, spread: Tensor, shape: Sequence[int], link: Link
) -> Tensor:
    """Probabilities of classes, for Gaussian outputs, (N, *shape)."""
    # mean (N, K), spread (N, K, K)
    if isinstance(likelihood, Bernoulli):
        return _yes_or_no(mean, spread, link).reshape(len(mean), *shape)
    places = positions(likelihood, shape)
    own, covariance = marginals(mean, spread, places)
    if link.kind == "mc":
        draws = _draws(own, covariance, link.samples, link.seed)
        p = draws.softmax(-1).mean(0)
    elif link.kind == "pairwise":
        p = _pairwise(own, covariance)
    elif link.kind == "bridge":
        p = _bridge(own, covariance)
    else:
        found = likelihood.predictive(own, covariance)
        assert isinstance(found, Tensor), "classes have probabilities"
        p = found
    out = torch.empty_like(mean)
    out[:, places] = p.reshape(len(mean), *places.shape).to(out)
    return out.reshape(len(mean), *shape)


def _yes_or_no(mean: Tensor, spread: Tensor, link: Link) -> Tensor:
    """σ(f) averaged over f, for each output alone."""
    variance = spread if spread.ndim == 2 else spread.diagonal(dim1=1, dim2=2)
    if link.kind == "mc":
        noise = normal((link.samples, *mean.shape), link.seed, mean.dtype, mean.device)
        return (mean + variance.clamp_min(0).sqrt() * noise).sigmoid().mean(0)
    if link.kind == "bridge":
        raise InputError(
            "link='bridge' with a Bernoulli likelihood",
            expected="a Categorical likelihood, whose probabilities have a Dirichlet distribution",
            remedy='use link="probit"',
        )
    return (mean * (1 + math.pi / 8 * variance).rsqrt()).sigmoid()


def _pairwise(mean: Tensor, covariance: Tensor) -> Tensor:
    """1 / (1 + Σ_k≠c (1/σ(·) − 1)), normalized."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    spread = (variance[:, :, None] + variance[:, None] - 2 * covariance).clamp_min(0)
    differences = (mean[:, :, None] - mean[:, None]) * (1 + math.pi / 8 * spread).rsqrt()
    # Σ_k e^{−d_ck}, in which k = c gives the one
    return torch.softmax(-torch.logsumexp(-differences, 2), 1)


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """α / Σ α for the Dirichlet of the Laplace bridge."""
    c, variance = mean.shape[1], covariance.diagonal(dim1=1, dim2=2)
    # the Gaussian given that its components sum to zero, as the logits of the Dirichlet do
    rows = covariance.sum(2)
    total = rows.sum(1, keepdim=True)
    free = total > 1e-6 * variance.sum(1, keepdim=True)  # otherwise they sum to zero already
    gain = torch.where(free, rows / torch.where(free, total, 1.0), 0.0)
    mean = mean - torch.where(free, gain * mean.sum(1, keepdim=True), mean.mean(1, keepdim=True))
    variance = variance - gain * rows
    # large variances are outside the bridge's domain: both moments are scaled to a mean variance of √(C/2)
    scale = (variance.mean(1, keepdim=True) / math.sqrt(c / 2)).clamp_min(1.0)
    mean, variance = mean / scale.sqrt(), (variance / scale).clamp_min(torch.finfo(mean.dtype).tiny)
    # α_c = (1 − 2/C + e^{μ_c}/C² Σ_k e^{−μ_k}) / Σ_cc
    inner = mean + torch.logsumexp(-mean, 1, keepdim=True) - 2 * math.log(c)
    log_alpha = torch.logaddexp(inner, torch.full_like(inner, 1 - 2 / c).log()) - variance.log()
    return log_alpha.softmax(1)


def _draws(mean: Tensor, covariance: Tensor, n: int, seed: Seed) -> Tensor:
    """Draws of N(mean, covariance), (n, N, C)."""
    z = normal((n, *mean.shape), seed, mean.dtype, mean.device)
    return mean + torch.einsum("nij,snj->sni", symmetric_root(covariance).to(mean), z)


def log_density(
    likelihood: Likelihood,
    mean: Tensor,
    spread: Tensor,
    y: Tensor,
    shape: Sequence[int],
    link: Link,
) -> Tensor:
    """The log predictive density of labels, summed over positions and components, each by its marginal."""
    # mean (N, K), spread (N, K, K)
    # Closed forms for classes and for Gaussian noise, an integral for counts; for all others the average over
    # `link.samples` draws of the outputs, the same draws at every call unless the link has a generator.
    n = len(mean)
    if isinstance(likelihood, Categorical | Bernoulli):
        p = class_probabilities(likelihood, mean, spread, shape, link)
        tiny = torch.finfo(p.dtype).tiny
        if isinstance(likelihood, Bernoulli):
            return -likelihood.nll((p.clamp_min(tiny)).log() - (1 - p).clamp_min(tiny).log(), y)
        return -likelihood.nll(p.clamp_min(tiny).log(), y)  # the softmax of log p is p
    if isinstance(likelihood, Gaussian):
        variance = spread if spread.ndim == 2 else spread.diagonal(dim1=1, dim2=2)
        f = mean.reshape(n, *shape)
        y = likelihood.check(f, y).reshape(f.shape)  # targets of one output may be (N,)
        noise = likelihood.variance(f)
        total = variance.reshape(f.shape) + noise
        counted = likelihood.product(f, torch.ones_like(f), y) * noise
        residual = torch.where(counted > 0.5, y - f, 0.0)
        # log N(y; f, Σ_cc + σ²)
        each = -0.5 * (residual.square() / total + (2 * math.pi * total).log())
        return (counted.round() * each).flatten(1).sum(1)
    if isinstance(likelihood, Poisson) and mean.shape[1] == 1:
        return _integrated(lambda f: -likelihood.nll(f.reshape(n, *shape), y), mean[:, 0], spread.reshape(n))
    covariance = torch.diag_embed(spread) if spread.ndim == 2 else spread
    generator = make_generator(SEED if link.seed is None else link.seed)
    drawn = _draws(mean, covariance, link.samples, generator)
    each = torch.stack([-likelihood.nll(f.reshape(n, *shape), y) for f in drawn])
    return torch.logsumexp(each, 0) - math.log(link.samples)


def _integrated(log_p: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """The logarithm of ∫ p(y | f) N(f; μ, σ²) df, (N,), by the trapezoidal rule where the integrand is."""
    # mean and variance (N,)
    kind, mean, variance = mean.dtype, mean.double(), variance.double()
    std = torch.maximum(variance, torch.finfo(mean.dtype).eps * (1 + mean.abs()).square()).sqrt()
    low, high = mean - REACH * std, mean + REACH * std
    parts = torch.linspace(0, 1, POINTS, dtype=mean.dtype, device=mean.device)[:, None]
    for _ in range(4):  # each time between the neighbors of the points that count
        at = low + (high - low) * parts
        log = torch.stack([log_p(f) for f in at]) - ((at - mean) / std).square() / 2
        counts = (log >= log.amax(0) - NEGLIGIBLE).to(mean)
        first, last = counts.argmax(0), POINTS - 1 - counts.flip(0).argmax(0)
        step = (high - low) / (POINTS - 1)
        low, high = (
            at.gather(0, place[None])[0]
            for place in ((first - 1).clamp_min(0), (last + 1).clamp_max(POINTS - 1))
        )
    return (torch.logsumexp(log, 0) + (step / std).log() - math.log(2 * math.pi) / 2).to(kind)


@dataclass(frozen=True)
class Labels(TargetModel):
    """Targets under a likelihood, one or several positions an example."""

    likelihood: Likelihood  # the likelihood
    shape: tuple[int, ...]  # shape of the outputs of one example; they are flattened elsewhere
    link: Link  # how class probabilities are made

    def probs(self, outputs: GaussianPredictive) -> Tensor:
        """Class probabilities in the network's own layout, by the link."""
        spread = outputs.variance if self.link.diagonal else outputs.covariance
        return class_probabilities(self.classes(), outputs.mean, spread, self.shape, self.link)

    def noise(self, outputs: GaussianPredictive) -> Tensor:
        """The likelihood's variance at the mean outputs, flattened."""
        return self.numbers().variance(outputs.mean.reshape(-1, *self.shape)).flatten(1)

    def with_noise(self, outputs: GaussianPredictive) -> GaussianPredictive:
        """Gaussian noise added to the covariance; mean and variance of a target for other numbers."""
        likelihood, n = self.numbers(), len(outputs.mean)
        if isinstance(likelihood, Gaussian):
            return add_noise(outputs, self.noise(outputs), Noise(0.0))
        own, covariance = marginals(outputs.mean, outputs.covariance, positions(likelihood, self.shape))
        found = likelihood.predictive(own, covariance)
        assert not isinstance(found, Tensor), "numbers have moments"
        mean, variance = (self._placed(values.reshape(len(values), -1), n) for values in found)
        return independent(mean, variance)

    def log_density(self, outputs: GaussianPredictive, y: Tensor) -> Tensor:
        """Log densities of labels, each by its marginal, summed over positions and components."""
        classes = isinstance(self.likelihood, Categorical | Bernoulli)
        diagonal = isinstance(self.likelihood, Gaussian) or (classes and self.link.diagonal)
        spread = outputs.variance if diagonal else outputs.covariance
        return log_density(self.likelihood, outputs.mean, spread, y, self.shape, self.link)

    def classes(self) -> Likelihood:
        """The likelihood, or an error where it is not one of classes."""
        if not isinstance(self.likelihood, Categorical | Bernoulli):
            raise InputError(
                f"probs with {self.likelihood!r}",
                expected="a Categorical or Bernoulli likelihood",
                remedy="use .mean, .variance and .with_noise()",
            )
        return self.likelihood

    def numbers(self) -> Likelihood:
        """The likelihood, or an error where it is one of classes."""
        if isinstance(self.likelihood, Categorical | Bernoulli):
            raise InputError(
                f"with_noise() with {self.likelihood!r}",
                expected="a likelihood of numbers, such as Gaussian",
                remedy="use .probs, which average over labels already",
            )
        return self.likelihood

    @property
    def needs_covariance(self) -> bool:
        """Whether a density or class probabilities look at more than variances."""
        if isinstance(self.likelihood, Categorical):
            return not self.link.diagonal
        return isinstance(self.likelihood, Custom) or not isinstance(self.likelihood, Bernoulli | Gaussian)

    def _placed(self, values: Tensor, n: int) -> Tensor:
        """Values of positions (N·T, D) in the layout of outputs with D components, flattened."""
        places = positions(self.likelihood, self.shape)
        each = values.reshape(n, places.shape[0], -1)
        if each.shape[2] == places.shape[1]:
            out = torch.empty(n, places.numel(), dtype=values.dtype, device=values.device)
            out[:, places] = each
            return out
        axis = self.likelihood.axis
        axis = axis - 1 if axis > 0 else len(self.shape) + axis
        rest = [size for i, size in enumerate(self.shape) if i != axis]
        return each.reshape(n, *rest, each.shape[2]).movedim(-1, axis + 1).flatten(1)


def independent(mean: Tensor, variance: Tensor) -> GaussianPredictive:
    """A distribution of targets, their noise included, whose outputs are independent."""
    # mean (N, C), variance (N, C)
    return GaussianPredictive(mean, lambda: torch.diag_embed(variance), Noise(0.0), variance=variance)


class SampledPredictive(Predictive):
    """Outputs of networks with sampled weights: no linearization, Monte Carlo error instead.

    Args:
        outputs: (S, N, C), outputs flattened.
        targets: How targets are distributed, given the outputs.

    Attributes:
        outputs: The samples, (S, N, C).

    Example:
        >>> from linnet.predictive.sampled import Link
        >>> targets = Labels(Gaussian(variance=0.5), (1,), Link())
        >>> SampledPredictive(torch.tensor([[[1.0]], [[3.0]]]), targets).mean
        tensor([[2.]])
    """

    def __init__(self, outputs: Tensor, targets: Labels) -> None:
        self.outputs, self.targets = outputs, targets

    def _shown(self) -> dict[str, Any]:
        known: dict[str, Any] = {"samples": len(self.outputs), **super()._shown()}
        return known if len(self.outputs) < 2 else {**known, "standard deviation": self.variance.sqrt()}

    def __repr__(self) -> str:
        s, n, c = self.outputs.shape
        return f"SampledPredictive({s} samples, {n} examples x {c} outputs)"

    def _several(self) -> Tensor:
        """The samples, if they have a variance."""
        if len(self.outputs) < 2:
            raise InputError(
                "the variance of one sample", expected="two samples or more", remedy="pass samples=100"
            )
        return self.outputs

    @property
    def mean(self) -> Tensor:
        """E[f], the average over samples, (N, C)."""
        return self.outputs.mean(0)

    @property
    def variance(self) -> Tensor:
        """Var[f], (N, C), of two samples or more."""
        return self._several().var(0)

    @property
    @in_exact_mode
    def covariance(self) -> Tensor:
        """Cov[f] of each example, (N, C, C)."""
        centered = self._several() - self.mean
        return torch.einsum("sni,snj->nij", centered, centered) / (len(centered) - 1)

    @property
    @in_exact_mode
    def joint_covariance(self) -> Tensor:
        """Cov[f] between all examples, (N, C, N, C)."""
        centered = self._several() - self.mean
        return torch.einsum("sni,smj->nimj", centered, centered) / (len(centered) - 1)

    @cached_property
    def _own(self) -> Tensor:
        """Outputs in the network's own shape, samples and examples joined."""
        return self.outputs.flatten(0, 1).reshape(-1, *self.targets.shape)

    @cached_property
    @in_exact_mode
    def probs(self) -> Tensor:
        """Class probabilities averaged over samples (Botev 2020, eq. 5.9), in the network's own layout."""
        return self.sampled_probs.mean(0)

    @property
    @in_exact_mode
    def sampled_probs(self) -> Tensor:
        """Class probabilities of every sample, (S, N, C): what splits entropy in ``linnet.evaluate``."""
        likelihood = self.targets.classes()
        return likelihood.mean(self._own).reshape(*self.outputs.shape[:2], *self.targets.shape)

    @in_exact_mode
    def with_noise(self) -> GaussianPredictive:
        """Mean and variance of a new target: E[y] and Var[y] = E[Var[y | f]] + Var[E[y | f]]."""
        (s, n, _), likelihood = self._several().shape, self.targets.numbers()
        centers = likelihood.mean(self._own).reshape(s, n, -1)
        inside = likelihood.variance(self._own).reshape(s, n, -1).mean(0)
        mean, variance = centers.mean(0), inside + centers.var(0)
        if isinstance(likelihood, Gaussian):
            covariance = self.covariance + torch.diag_embed(inside)
            return GaussianPredictive(mean, covariance, Noise(0.0), variance=variance)
        return independent(mean, variance)

    @in_exact_mode
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw from the samples, with replacement; each draw is one network."""
        integer("n", n, remedy="pass n=1 or more")
        source = make_generator(seed)
        device = source.device if source else torch.device("cpu")
        item = self.outputs.dtype.itemsize
        require_room((n, *self.outputs.shape[1:]), item, self.outputs.device, "draws of outputs")
        chosen = torch.randint(len(self.outputs), (n,), generator=source, device=device)
        return self.outputs[chosen.to(self.outputs.device)]

    @in_exact_mode
    def log_density(self, y: Tensor) -> Tensor:
        """Log 1/S Σ_s p(y | f_s), in nats: all positions and components of an example together."""
        likelihood, n = self.targets.likelihood, self.outputs.shape[1]
        each = [-likelihood.nll(f.reshape(n, *self.targets.shape), y) for f in self.outputs]
        return torch.logsumexp(torch.stack(each), 0) - math.log(len(each))
