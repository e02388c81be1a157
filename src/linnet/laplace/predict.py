"""What a Laplace posterior predicts: a Gaussian over outputs, or samples of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.arguments import check_count
from linnet.laplace.links import (
    Link,
    class_probabilities,
    log_density,
    marginals,
    positions,
    symmetric_root,
)
from linnet.likelihoods.custom import Custom
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.random import Seed, make_generator, normal, require_room
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True)
class Meaning:
    """What outputs mean.

    Args:
        likelihood: The likelihood; None once its noise is in the distribution.
        shape: Shape of the outputs of one example; they are flattened elsewhere.
        link: How class probabilities are made.
    """

    likelihood: Likelihood | None
    shape: tuple[int, ...]
    link: Link

    def known(self) -> Likelihood:
        """The likelihood, or an error when its noise has been added already."""
        if self.likelihood is None:
            raise InputError(
                "the distribution of a new target was asked for what needs that of the outputs",
                expected="a prediction before .with_noise()",
                remedy="keep the object that predict returned",
            )
        return self.likelihood

    def classes(self) -> Likelihood:
        """A likelihood of classes, or an error."""
        likelihood = self.known()
        if not isinstance(likelihood, Categorical | Bernoulli):
            raise InputError(
                f"probs with {likelihood!r}",
                expected="a Categorical or Bernoulli likelihood",
                remedy="use .mean, .variance and .with_noise()",
            )
        return likelihood

    def noisy(self) -> Likelihood:
        """A likelihood of numbers, or an error."""
        likelihood = self.known()
        if isinstance(likelihood, Categorical | Bernoulli):
            raise InputError(
                f"with_noise() with {likelihood!r}",
                expected="a likelihood of numbers, such as Gaussian",
                remedy="use .probs, which average over labels already",
            )
        return likelihood

    def placed(self, values: Tensor, n: int) -> Tensor:
        """Values of positions (N·T, D) in the layout of outputs with D components, flattened."""
        likelihood = self.known()
        places = positions(likelihood, self.shape)
        each = values.reshape(n, places.shape[0], -1)
        if each.shape[2] == places.shape[1]:
            out = torch.empty(n, places.numel(), dtype=values.dtype, device=values.device)
            out[:, places] = each
            return out
        axis = likelihood.axis - 1 if likelihood.axis > 0 else len(self.shape) + likelihood.axis
        rest = [size for i, size in enumerate(self.shape) if i != axis]
        return each.reshape(n, *rest, each.shape[2]).movedim(-1, axis + 1).flatten(1)


class GaussianPredictive:
    """Outputs f(x) ~ N(mean, covariance), by the linearized network.

    Args:
        mean: f(x) at the posterior mode, (N, C), outputs flattened.
        variance: Var[f], (N, C).
        covariance: Cov[f], (N, C, C); or between examples (N, C, N, C); or a function that computes it.
        meaning: What outputs mean.
        probs: Class probabilities, where they have been computed already.

    Attributes:
        mean: f(x), (N, C).
        variance: Var[f], (N, C).

    Example:
        >>> outputs = Meaning(Gaussian(variance=0.5), (2,), Link())
        >>> prediction = GaussianPredictive(torch.zeros(1, 2), torch.ones(1, 2), torch.eye(2)[None], outputs)
        >>> prediction.with_noise().variance
        tensor([[1.5000, 1.5000]])
    """

    def __init__(
        self,
        mean: Tensor,
        variance: Tensor,
        covariance: Tensor | Callable[[], Tensor],
        meaning: Meaning,
        probs: Tensor | None = None,
    ) -> None:
        self.mean, self.variance = mean, variance
        self._second, self._meaning, self._probs = covariance, meaning, probs

    def __repr__(self) -> str:
        return f"GaussianPredictive({self.mean.shape[0]} examples x {self.mean.shape[1]} outputs)"

    @cached_property
    @in_exact_mode
    def _full(self) -> Tensor:
        """The covariance as it was given."""
        return self._second if isinstance(self._second, Tensor) else self._second()

    @property
    def joint(self) -> bool:
        """Whether covariances between examples are known."""
        return isinstance(self._second, Tensor) and self._second.ndim == 4

    @property
    def covariance(self) -> Tensor:
        """Cov[f] of each example, (N, C, C)."""
        return self._full.diagonal(dim1=0, dim2=2).permute(2, 0, 1) if self.joint else self._full

    @property
    def joint_covariance(self) -> Tensor:
        """Cov[f] between all examples, (N, C, N, C).

        Raises:
            InputError: If it was not asked for.
        """
        if not self.joint:
            raise InputError(
                "joint_covariance of a prediction without it",
                expected="predict(x, joint=True)",
                remedy="predict again with joint=True",
            )
        return self._full

    @cached_property
    @in_exact_mode
    def probs(self) -> Tensor:
        """Class probabilities in the network's own layout, (N, C) for one label an example.

        Raises:
            InputError: If outputs are no classes.
        """
        likelihood, link = self._meaning.classes(), self._meaning.link
        if self._probs is not None:
            return self._probs
        spread = self.variance if link.diagonal else self.covariance
        return class_probabilities(likelihood, self.mean, spread, self._meaning.shape, link)

    @in_exact_mode
    def with_noise(self) -> GaussianPredictive:
        """The distribution of a new target.

        A Gaussian's σ² is added to the covariance. For other likelihoods of numbers these are the mean and
        the variance of a target, as the likelihood's ``predictive`` gives them.

        Returns:
            Its moments, with no noise left to add again.

        Raises:
            InputError: If outputs are classes, or the noise is in already.
        """
        meaning, n = self._meaning, len(self.mean)
        likelihood = meaning.noisy()
        after = Meaning(None, meaning.shape, meaning.link)
        if isinstance(likelihood, Gaussian):
            noise = likelihood.variance(self.mean.reshape(n, *meaning.shape)).flatten(1)
            if self.joint:
                every = torch.diag_embed(noise.flatten()).reshape(self._full.shape)
                return GaussianPredictive(self.mean, self.variance + noise, self._full + every, after)
            spread = self.covariance + torch.diag_embed(noise)
            return GaussianPredictive(self.mean, self.variance + noise, spread, after)
        own, covariance = marginals(self.mean, self.covariance, positions(likelihood, meaning.shape))
        found = likelihood.predictive(own, covariance)
        assert not isinstance(found, Tensor), "numbers have moments"
        mean, variance = (meaning.placed(values.reshape(len(values), -1), n) for values in found)
        return GaussianPredictive(mean, variance, lambda: torch.diag_embed(variance), after)

    @in_exact_mode
    def sample(self, n: int, generator: Seed = None) -> Tensor:
        """Draw outputs; jointly where the joint covariance is known, else independently for each example.

        Args:
            n: Number of draws.
            generator: Generator or seed.

        Returns:
            (n, N, C).

        Raises:
            InputError: If n is not positive.
        """
        check_count("n", n)
        noise = normal((n, *self.mean.shape), generator, self.mean.dtype, self.mean.device)
        if self.joint:
            size = self.mean.numel()
            root = symmetric_root(self._full.reshape(size, size)).to(noise)
            return self.mean + (noise.flatten(1) @ root.T).view_as(noise)
        root = symmetric_root(self.covariance).to(noise)
        return self.mean + torch.einsum("nij,snj->sni", root, noise)

    @in_exact_mode
    def log_density(self, y: Tensor) -> Tensor:
        """The log predictive density of labels, each by its marginal.

        Args:
            y: Labels, as the likelihood wants them.

        Returns:
            (N,), summed over positions and components.
        """
        likelihood = self._meaning.known()
        classes = isinstance(likelihood, Categorical | Bernoulli)
        diagonal = isinstance(likelihood, Gaussian) or (classes and self._meaning.link.diagonal)
        spread = self.variance if diagonal else self.covariance
        return log_density(likelihood, self.mean, spread, y, self._meaning.shape, self._meaning.link)


class SampledPredictive:
    """Outputs of networks with sampled weights: no linearization, Monte Carlo error instead.

    Args:
        outputs: (S, N, C), outputs flattened.
        meaning: What outputs mean.

    Attributes:
        outputs: The samples.

    Example:
        >>> meaning = Meaning(Gaussian(variance=0.5), (1,), Link())
        >>> SampledPredictive(torch.tensor([[[1.0]], [[3.0]]]), meaning).mean
        tensor([[2.]])
    """

    def __init__(self, outputs: Tensor, meaning: Meaning) -> None:
        self.outputs, self._meaning = outputs, meaning

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
        return self.outputs.flatten(0, 1).reshape(-1, *self._meaning.shape)

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
        likelihood = self._meaning.classes()
        return likelihood.mean(self._own).reshape(*self.outputs.shape[:2], *self._meaning.shape)

    @in_exact_mode
    def with_noise(self) -> GaussianPredictive:
        """Mean and variance of a new target: E[y] and Var[y] = E[Var[y | f]] + Var[E[y | f]].

        Returns:
            Its moments.

        Raises:
            InputError: If outputs are classes, or there is one sample alone.
        """
        meaning, (s, n, _) = self._meaning, self._several().shape
        likelihood = meaning.noisy()
        centers = likelihood.mean(self._own).reshape(s, n, -1)
        inside = likelihood.variance(self._own).reshape(s, n, -1).mean(0)
        variance = inside + centers.var(0)
        after = Meaning(None, meaning.shape, meaning.link)
        if isinstance(likelihood, Gaussian):
            return GaussianPredictive(
                centers.mean(0), variance, self.covariance + torch.diag_embed(inside), after
            )
        return GaussianPredictive(centers.mean(0), variance, lambda: torch.diag_embed(variance), after)

    @in_exact_mode
    def sample(self, n: int, generator: Seed = None) -> Tensor:
        """Draw from the samples, with replacement; each draw is one network.

        Args:
            n: Number of draws.
            generator: Generator or seed.

        Returns:
            (n, N, C).

        Raises:
            InputError: If n is not positive.
        """
        check_count("n", n)
        source = make_generator(generator)
        device = source.device if source else torch.device("cpu")
        item = self.outputs.dtype.itemsize
        require_room((n, *self.outputs.shape[1:]), item, self.outputs.device, "draws of outputs")
        chosen = torch.randint(len(self.outputs), (n,), generator=source, device=device)
        return self.outputs[chosen.to(self.outputs.device)]

    @in_exact_mode
    def log_density(self, y: Tensor) -> Tensor:
        """Log 1/S Σ_s p(y | f_s), in nats: all positions and components of an example together.

        Args:
            y: Labels, as the likelihood wants them.

        Returns:
            (N,).
        """
        likelihood, n = self._meaning.known(), self.outputs.shape[1]
        each = [-likelihood.nll(f.reshape(n, *self._meaning.shape), y) for f in self.outputs]
        return torch.logsumexp(torch.stack(each), 0) - math.log(len(each))


def needs_covariance(likelihood: Likelihood, link: Link) -> bool:
    """Whether a density or class probabilities look at more than variances.

    Args:
        likelihood: What the outputs mean.
        link: How class probabilities are made.

    Returns:
        Whether they do.

    Example:
        >>> needs_covariance(Categorical(), Link("bridge")), needs_covariance(Gaussian(), Link("bridge"))
        (True, False)
    """
    if isinstance(likelihood, Categorical):
        return not link.diagonal
    return isinstance(likelihood, Custom) or not isinstance(likelihood, Bernoulli | Gaussian)
