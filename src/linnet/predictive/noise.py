"""Gaussian observation noise, with optional class scores by a tempered softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.distribution import require_tensor
from linnet.linalg.factorize import cholesky
from linnet.predictive.gaussian import GaussianPredictive, TargetModel, add_noise
from linnet.predictive.temperature import probabilities
from linnet.tangent.batch import check_finite


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
                "a regression has no class probabilities",
                expected="a fit with integer classes",
                remedy="use .mean and .variance",
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
