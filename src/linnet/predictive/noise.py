"""Gaussian observation noise, with optional class scores by a tempered softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.likelihood import require_tensor
from linnet.linalg.factorize import cholesky, searched
from linnet.predictive.gaussian import GaussianPredictive, TargetModel, add_noise
from linnet.tangent.batch import check_finite

# -- temperature -----------------------------------------------------------------------------------
# Class probabilities of uncertain outputs, and temperature scaling on held-out outputs.

SCALES = (1.0, 0.3, 0.1, 0.03, 0.01)  # of the variance, in probabilities
NATS = 1.0  # that another scale than one must gain


def probabilities(
    mean: Tensor, variance: Tensor | None, temperature: float, seen: Tensor | None = None
) -> Tensor:
    """Softmax of outputs at temperature T, moderated by their variance."""
    # mean (N, C), variance (N, C)
    if mean.shape[1] == 1:
        # softmax(−f/2, f/2) = (σ(−f), σ(f)), with the variance of f itself
        scaled = mean / temperature
        if variance is not None:
            scaled = scaled / torch.sqrt(1 + math.pi / 8 * variance / temperature**2)
        return torch.cat([-scaled, scaled], 1).sigmoid()
    scaled = mean / temperature
    if variance is not None:
        shared = variance.mean(1, keepdim=True)  # one for all classes: their order is that of the means
        # κ = 1 / √(1 + π/8 v): MacKay, "The evidence framework applied to classification networks", 1992
        scaled = scaled / torch.sqrt(1 + math.pi / 8 * shared / temperature**2)
    if seen is None:
        return scaled.softmax(1)
    return torch.zeros_like(scaled).index_copy(1, seen, scaled[:, seen].softmax(1))


def confidence(mean: Tensor, temperature: float, seen: Tensor | None = None) -> Tensor:
    """The largest of ``probabilities`` of outputs of two classes or more, (N,)."""
    # mean (N, C); without the others, in a third of the time
    scaled = (mean if seen is None else mean[:, seen]) / temperature
    return (scaled - scaled.amax(1, keepdim=True)).exp().sum(1).reciprocal()


def fit_temperature(
    outputs: Tensor, labels: Tensor, variance: Tensor | None = None, weights: Tensor | None = None
) -> float:
    """The temperature that makes held-out outputs most likely, with one more example of no class."""
    # outputs (N, C), labels (N,), variance (N, C), weights (N,): how often each example counts
    # Without that example, N right predictions would ask for T = 0 and claim certainty; with it they claim
    # about what N right predictions can show (the rule of succession).
    outputs, labels, variance, weights = _searched(outputs, labels, variance, weights)
    scale = (float(outputs.double().std()) if outputs.numel() > 1 else 0.0) + 1e-12

    def loss(log_t: float) -> float:
        return -_likelihood(outputs, labels, variance, weights, math.exp(log_t))

    grid = [math.log(scale) + step for step in torch.linspace(-6, 4, 21).tolist()]
    best = min(range(len(grid)), key=lambda i: loss(grid[i]))
    return math.exp(golden_section(loss, grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]))


def fit_moderation(
    outputs: Tensor,
    labels: Tensor,
    variance: Tensor,
    weights: Tensor | None = None,
    temperature: float | None = None,
) -> tuple[float, float]:
    """The temperature, unless given, and the scale of the variance that make held-out outputs likeliest."""
    # outputs (N, C), labels (N,), variance (N, C), weights (N,): how often each example counts
    # The variance comes from Gaussian noise on targets of 0 and α. Where it is large, the outputs of all
    # classes are as uncertain as they differ, and no temperature makes softmax(μ / √(T² + π/8 v)) certain of
    # anything. So s v takes the place of v if one of a few s < 1 gains more than the one nat that a further
    # parameter may cost (Akaike).
    outputs, labels, known, weights = _searched(outputs, labels, variance, weights)
    assert known is not None
    found = []
    for scale in SCALES:
        given = outputs, labels, scale * known, weights
        t = fit_temperature(*given) if temperature is None else temperature
        found.append((_likelihood(*given, t), t, scale))
    whole, best = found[0], max(found)
    _, t, scale = best if best[0] > whole[0] + NATS else whole
    return t, scale


Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # outputs, labels, variances, weights


def _searched(*given: Tensor | None) -> Given:
    """What a search looks at many times, where that is fast."""
    found = iter(searched(*(one for one in given if one is not None)))
    outputs, labels, variance, weights = (None if one is None else next(found) for one in given)
    assert outputs is not None
    assert labels is not None
    return outputs, labels, variance, weights


def _likelihood(
    outputs: Tensor, labels: Tensor, variance: Tensor | None, weights: Tensor | None, temperature: float
) -> float:
    """Log-likelihood of labels, and of one more example that is of no class in particular."""
    spread = None if variance is None else variance.double()
    log_p = probabilities(outputs.double(), spread, temperature).clamp_min(1e-300).log()
    # Σᵢ log p(yᵢ) and the mean over classes and examples of log p, for the one example more
    own = log_p.gather(1, labels[:, None])[:, 0]
    if weights is None:
        return float(own.sum() + log_p.mean())
    w = weights.double()
    return float(w @ own + w @ log_p.mean(1) / w.sum())


def golden_section(f, low: float, high: float, steps: int = 30) -> float:  # type: ignore[no-untyped-def]
    """The minimum of a unimodal function on an interval."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(steps):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = f(b)
    return (low + high) / 2


@dataclass(frozen=True)
class Noise(TargetModel):
    """Gaussian noise about the outputs."""

    variance: float | Tensor  # σ², of a target about f; a number, or (N, C)
    # T of the softmax that turns outputs into class probabilities, `None` for regression
    temperature: float | None = None
    # s, what the variance of outputs is multiplied with before it moderates probabilities
    variance_scale: float = 1.0
    seen: Tensor | None = None  # classes that are possible; ``None`` for all

    def probs(self, outputs: GaussianPredictive) -> Tensor:
        """Class probabilities (N, C): the softmax with uncertain outputs shrunk toward each other."""
        # softmax(μ / (T √(1 + π/8 · s v / T²))) for mean μ and v the mean variance of the example's outputs
        # (MacKay 1992), so that the most probable class is that of the largest mean. T and s are fitted to
        # leave-one-out predictions.
        if self.temperature is None:
            raise InputError(
                "a fit of values, or of classes at positions by squared loss, has no class probabilities",
                expected="a fit with one integer class for each example",
                remedy='use .mean and .variance, or fit positions with loss="cross-entropy"',
            )
        spread = self.variance_scale * outputs.variance
        return probabilities(outputs.mean, spread, self.temperature, self.seen)

    def noise(self, outputs: GaussianPredictive) -> Tensor:
        """σ², (N, C)."""
        mean = outputs.mean
        return torch.as_tensor(self.variance, dtype=mean.dtype, device=mean.device).expand(mean.shape)

    def with_noise(self, outputs: GaussianPredictive) -> GaussianPredictive:
        """Cov[f] + σ² I, jointly where the covariance is joint."""
        return add_noise(outputs, self.noise(outputs), replace(self, variance=0.0))

    def log_density(self, outputs: GaussianPredictive, y: Tensor) -> Tensor:
        """Log p(y) of labels of classes, or log N(y; mean, Cov[f] + σ² I) of values."""
        y, mean = require_tensor(y), outputs.mean
        if self.temperature is not None and not y.is_floating_point():
            return self._of_labels(outputs, y)
        check_finite(y, "y")
        y = y.to(mean.device, torch.promote_types(y.dtype, mean.dtype))
        if y.ndim == 1 and mean.shape[1] == 1:
            y = y[:, None]
        if y.shape != mean.shape:
            raise InputError(
                f"y has shape {tuple(y.shape)}",
                expected=f"{tuple(mean.shape)}, one target for each output",
                remedy="pass the targets of these very examples, a row each",
            )
        noisy = outputs.covariance.double() + self.noise(outputs).double().diag_embed()
        factor = cholesky(noisy, "predictive covariance")
        z = torch.linalg.solve_triangular(factor, (y - mean).double()[..., None], upper=False)[..., 0]
        logdet = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        density: Tensor = -0.5 * ((z**2).sum(1) + logdet + y.shape[1] * math.log(2 * math.pi))
        return density

    def _of_labels(self, outputs: GaussianPredictive, y: Tensor) -> Tensor:
        """The log probability of each label, (N,)."""
        p = outputs.probs
        if y.shape != p.shape[:1] or not len(y) or not 0 <= int(y.min()) <= int(y.max()) < p.shape[1]:
            raise InputError(
                f"y of shape {tuple(y.shape)}"
                + (f" with labels {int(y.min())} to {int(y.max())}" if y.numel() else ""),
                expected=f"({len(p)},) labels from 0 to {p.shape[1] - 1}",
                remedy="pass the class of each of these examples, numbered as those of the fit",
            )
        return p.gather(1, y.long().to(p.device)[:, None])[:, 0].clamp_min(torch.finfo(p.dtype).tiny).log()
