"""Targets of a likelihood: class labels, real values with noise, counts and others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.custom import Custom
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.predictive.gaussian import GaussianPredictive, TargetModel, add_noise
from linnet.predictive.links import Link, class_probabilities, log_density, marginals, positions
from linnet.predictive.noise import Noise


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
