"""Class probabilities and label densities from Gaussian outputs, position by position.

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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.random import Seed, make_generator, normal
from linnet.params import choice, integer

LINKS = ("probit", "pairwise", "bridge", "mc")
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


def symmetric_root(covariance: Tensor) -> Tensor:
    """V √λ, also of singular matrices, with rounding errors below zero removed."""
    # covariance (..., C, C)
    values, vectors = torch.linalg.eigh(covariance.to(torch.promote_types(covariance.dtype, torch.float32)))
    root: Tensor = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return root


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
    # Closed forms for classes and for Gaussian noise; for all others the average over `link.samples` draws of
    # the outputs, the same draws at every call unless the link has a generator.
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
    covariance = torch.diag_embed(spread) if spread.ndim == 2 else spread
    generator = make_generator(SEED if link.seed is None else link.seed)
    drawn = _draws(mean, covariance, link.samples, generator)
    each = torch.stack([-likelihood.nll(f.reshape(n, *shape), y) for f in drawn])
    return torch.logsumexp(each, 0) - math.log(link.samples)
