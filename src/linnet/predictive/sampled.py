"""Predictive distributions by Monte Carlo: outputs of networks with sampled weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.custom import Custom
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.random import Seed, make_generator, require_room
from linnet.params import integer
from linnet.predictive.distribution import Predictive
from linnet.predictive.gaussian import GaussianPredictive, TargetModel, add_noise
from linnet.predictive.links import Link, class_probabilities, log_density, marginals, positions
from linnet.predictive.noise import Noise
from linnet.tangent.modes import in_exact_mode

# -- labels ----------------------------------------------------------------------------------------
# Targets of a likelihood: class labels, real values with noise, counts and others.


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
        >>> from linnet.predictive.links import Link
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
        """Var[f], (N, C).

        Raises:
            InputError: If there is one sample alone.
        """
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
        """Class probabilities averaged over samples (Botev 2020, eq. 5.9), in the network's own layout.

        Raises:
            InputError: If outputs are no classes.
        """
        return self.sampled_probs.mean(0)

    @property
    @in_exact_mode
    def sampled_probs(self) -> Tensor:
        """Class probabilities of every sample, (S, N, C): what splits entropy in ``linnet.evaluate``.

        Raises:
            InputError: If outputs are no classes.
        """
        likelihood = self.targets.classes()
        return likelihood.mean(self._own).reshape(*self.outputs.shape[:2], *self.targets.shape)

    @in_exact_mode
    def with_noise(self) -> GaussianPredictive:
        """Mean and variance of a new target: E[y] and Var[y] = E[Var[y | f]] + Var[E[y | f]].

        Returns:
            Its moments.

        Raises:
            InputError: If outputs are classes, or there is one sample alone.
        """
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
        """Draw from the samples, with replacement; each draw is one network.

        Args:
            n: Number of draws.
            seed: Seed or generator.

        Returns:
            (n, N, C).

        Raises:
            InputError: If n is not positive.
        """
        integer("n", n, remedy="pass n=1 or more")
        source = make_generator(seed)
        device = source.device if source else torch.device("cpu")
        item = self.outputs.dtype.itemsize
        require_room((n, *self.outputs.shape[1:]), item, self.outputs.device, "draws of outputs")
        chosen = torch.randint(len(self.outputs), (n,), generator=source, device=device)
        return self.outputs[chosen.to(self.outputs.device)]

    @in_exact_mode
    def log_density(self, y: Tensor) -> Tensor:
        """Log 1/S Σ_s p(y | f_s), in nats: all positions and components of an example together.

        Args:
            y: Labels (N, ...), as the likelihood wants them.

        Returns:
            (N,).
        """
        likelihood, n = self.targets.likelihood, self.outputs.shape[1]
        each = [-likelihood.nll(f.reshape(n, *self.targets.shape), y) for f in self.outputs]
        return torch.logsumexp(torch.stack(each), 0) - math.log(len(each))
