"""Predictive distributions by Monte Carlo: outputs of networks with sampled weights."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.random import Seed, make_generator, require_room
from linnet.params import integer
from linnet.predictive.distribution import Predictive
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.labels import Labels, independent
from linnet.predictive.noise import Noise
from linnet.tangent.modes import in_exact_mode


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
