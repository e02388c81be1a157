"""Outputs of a network that have targets, with their noise, and data in units of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.distributed import all_rows
from linnet.errors import DataError, InputError
from linnet.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linear.problem import Problem
from linnet.tangent.batch import Inputs, batch_size, own_parts, take
from linnet.tangent.functional import Functional, adapt_outputs

BATCH = 128  # examples evaluated at once


class Observed:
    """The outputs of a network that have targets, and the noise of these."""

    # - `Gaussian(variance)`: all outputs, with σ² the likelihood's, one for all or one for each output.
    # - `HeteroscedasticGaussian`: the network has 2D outputs, means and variances. The process is over the D
    #   means alone, f(x) = μ₀(x) + J_μ(x) δ, and σ²(x) is the variance that the network predicts at θ₀,
    #   for training and for new examples; it is not linearized.

    def __init__(self, base: Functional, likelihood: Likelihood, mean: str = "network") -> None:
        if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
            raise InputError(
                f"likelihood is {likelihood!r}",
                expected="Gaussian(variance=...) or HeteroscedasticGaussian(), which have a closed form",
                remedy="for classes and counts use linnet.Laplace(model, likelihood); for classes as "
                "regression on one-hot targets use linnet.fit",
            )
        self.base, self.likelihood, self.centered = base, likelihood, mean == "network"
        self.function = base
        if isinstance(likelihood, HeteroscedasticGaussian):
            output, known = base.output, likelihood

            def means(result: Any) -> Tensor:
                return known.mean(adapt_outputs(result, output))

            self.function = Functional(base.model, base.names, means)

    def shape_of(self, x: Inputs) -> torch.Size:
        """The shape of targets, (N, ...)."""
        one = self.likelihood.mean(self.base.check_runs(take(x, slice(0, 1))))
        return torch.Size((batch_size(x), *one.shape[1:]))

    @property
    def masked(self) -> bool:
        """Whether targets may be missing."""
        return self.likelihood.masked

    @torch.no_grad()
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """f₀(x) and σ²(x), without the scale s."""
        f = self._outputs(x)
        return self.likelihood.mean(f).flatten(1), self.likelihood.variance(f).flatten(1)

    def _outputs(self, x: Inputs) -> Tensor:
        """All outputs of the network, in its own shape."""
        parts = [self.base.check_runs(part) for _, part in own_parts(x, BATCH)]
        return all_rows(torch.cat(parts or [self.base.check_runs(take(x, slice(0, 1)))[:0]]), batch_size(x))

    def problem(self, x: Inputs, y: Tensor) -> Problem:
        """Data in units of their noise."""
        f = self._outputs(x)
        mean, variance = self.likelihood.mean(f), self.likelihood.variance(f).flatten(1).double()
        if y.numel() == mean.numel() and y.ndim == mean.ndim - 1:
            y = y.reshape(mean.shape)  # one output, and targets (N,)
        y, mean = self.likelihood.check(f, y).flatten(1).double(), mean.flatten(1).double()
        there = ~y.isnan()
        if not bool(there.any()):
            raise DataError("all targets are missing", expected="targets", remedy="check y for NaN")
        if not bool(((variance > 0) & variance.isfinite())[there].all()):
            raise DataError(
                f"the predicted noise variance lies between {float(variance.min())} and "
                f"{float(variance.max())}",
                expected="positive, finite variances",
                remedy="bound the network's variance output from below, as in 1e-5 + softplus",
            )
        weights = torch.where(there, variance.rsqrt(), 0.0)
        residual = torch.where(there, weights * (y - mean if self.centered else y), 0.0)
        return Problem(self.function, x, residual, weights, y)
