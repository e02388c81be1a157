"""The interface of every predictive distribution, and the Gaussian ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.random import Seed, normal, require_room
from linnet.number_types import wide_type
from linnet.params import integer
from linnet.shown import Shown, frame, outputs
from linnet.tangent.modes import in_exact_mode

if TYPE_CHECKING:
    from pandas import DataFrame

SURE = 1e-3  # how far the probabilities of an example may sum from one


def exclusive(p: Tensor) -> Tensor:
    """Probabilities of classes that exclude each other, a row per example, (N, C)."""
    if p.ndim == 2 and p.shape[1] == 1:
        p = torch.cat([1 - p, p], 1)
    if p.ndim != 2 or bool(((p.sum(1) - 1).abs() > SURE).any()):
        raise InputError(
            f"probabilities of shape {tuple(p.shape)}",
            expected="one class for each example: (N, C), each row with the sum one",
            remedy="take the positions of an example as examples, or score them with linnet.evaluate",
        )
    return p


class Predictive(Shown):
    """The distribution of the outputs f(x) of N examples, given the data.

    Every ``predictive`` of linnet returns one: a
    :class:`~linnet.predictive.gaussian.GaussianPredictive` where the network is linearized, a
    :class:`~linnet.predictive.sampled.SampledPredictive` where weights are sampled.

    Example:
        >>> import torch
        >>> import linnet
        >>> net, x = torch.nn.Linear(2, 1), torch.randn(6, 2)
        >>> prediction = linnet.fit(linnet.linearize(net), (x, x[:, :1]), ridge=1.0).predictive(x)
        >>> isinstance(prediction, Predictive), prediction.log_density(x[:, :1]).shape
        (True, torch.Size([6]))
    """

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[f], (N, C), the network's own output included."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Var[f], (N, C)."""

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """Cov[f] of each example, (N, C, C)."""

    @property
    @abstractmethod
    def joint_covariance(self) -> Tensor:
        """Cov[f] between all examples, (N, C, N, C).

        Raises:
            InputError: If it was not requested of ``predictive``.
        """

    @property
    @abstractmethod
    def probs(self) -> Tensor:
        """Class probabilities, (N, C) for one label per example.

        Raises:
            InputError: If outputs are no classes.
        """

    @abstractmethod
    def with_noise(self) -> Predictive:
        """The distribution of a new target: its noise added.

        Returns:
            A distribution with no noise left to add again.

        Raises:
            InputError: If targets are labels of classes.
        """

    @abstractmethod
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw outputs.

        Args:
            n: Number of draws.
            seed: Seed or generator.

        Returns:
            (n, N, C).

        Raises:
            InputError: If n is not positive.
            MemoryBudgetError: If the draws would take more than half of the memory that is free.
        """

    @abstractmethod
    def log_density(self, y: Tensor) -> Tensor:
        """The log density of new targets, in nats, each example by its marginal.

        Fits and Gaussian processes take an example's outputs together. A Laplace posterior takes each output
        by itself; where its likelihood has several outputs and no closed form, it is an average over draws.

        Args:
            y: N targets: labels, or values (N, C), or (N,) for one output.

        Returns:
            (N,).
        """

    def to_frame(self) -> DataFrame:
        """A pandas table, one row per example.

        Returns:
            For classes the likeliest, its probability and that of every class; for values their means and
            standard deviations, the noise of targets not counted.

        Raises:
            DependencyError: If pandas is missing.
        """
        try:
            p = exclusive(self.probs)
        except InputError:
            deviation = self.variance.clamp_min(0).sqrt()
            return frame(outputs("mean", self.mean) | outputs("standard deviation", deviation))
        likeliest = p.max(1)
        known = {"predicted": likeliest.indices, "probability": likeliest.values}
        return frame(known | outputs("class", p))

    def _shown(self) -> dict[str, Any]:
        """The mean alone: nothing is computed to be shown."""
        return {"examples": self.mean.shape[0], "outputs": self.mean.shape[1], "mean": self.mean}

    def __repr__(self) -> str:
        """The kind of the distribution and its number of examples."""
        return f"{type(self).__name__}({self.mean.shape[0]} examples x {self.mean.shape[1]} outputs)"


class TargetModel(ABC):
    """Distribution of targets given the outputs."""

    @abstractmethod
    def probs(self, outputs: GaussianPredictive) -> Tensor:
        """Class probabilities, the outputs averaged over."""

    @abstractmethod
    def noise(self, outputs: GaussianPredictive) -> Tensor:
        """The variance of a target about its outputs, (N, C)."""

    @abstractmethod
    def with_noise(self, outputs: GaussianPredictive) -> GaussianPredictive:
        """The moments of a new target."""

    @abstractmethod
    def log_density(self, outputs: GaussianPredictive, y: Tensor) -> Tensor:
        """The log density of targets, (N,), the outputs averaged over."""


class GaussianPredictive(Predictive):
    """Outputs f(x) ~ N(mean, covariance), those of a linearized network.

    A covariance that is given as a function is computed when it is first requested, so that means alone are
    cheap.

    Args:
        mean: E[f], (N, C), outputs flattened.
        covariance: Cov[f], (N, C, C), or between examples (N, C, N, C); or a function that computes it.
        targets: Distribution of targets given the outputs.
        variance: Var[f], (N, C), where it is known without the covariance.
        joint: Whether the covariance is that between examples.
        probs: Class probabilities (N, C), where they have been computed already.

    Attributes:
        joint: Whether covariances between examples are known.

    Example:
        >>> from linnet.predictive.noise import Noise
        >>> prediction = GaussianPredictive(torch.zeros(1, 2), torch.eye(2)[None], Noise(0.5))
        >>> prediction.with_noise().variance
        tensor([[1.5000, 1.5000]])
    """

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | Callable[[], Tensor],
        targets: TargetModel,
        *,
        variance: Tensor | None = None,
        joint: bool = False,
        probs: Tensor | None = None,
    ) -> None:
        self._mean, self._second, self._variance, self._probs = mean, covariance, variance, probs
        self.targets, self.joint = targets, joint

    def _shown(self) -> dict[str, Any]:
        known: dict[str, Any] = super()._shown()
        if self._variance is not None or isinstance(self._second, Tensor) or "full" in self.__dict__:
            known["standard deviation"] = self.variance.clamp_min(0).sqrt()
        if self._probs is not None or "probs" in self.__dict__:
            known["probability of the likeliest class"] = self.probs.max(-1).values
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with the covariance computed."""
        return {**self.__dict__, "_second": self.full}

    @property
    def mean(self) -> Tensor:
        """E[f], (N, C), the network's own output included."""
        return self._mean

    @cached_property
    @in_exact_mode
    def full(self) -> Tensor:
        """The covariance as it is known: (N, C, N, C) where it is joint, else (N, C, C)."""
        return self._second if isinstance(self._second, Tensor) else self._second()

    @property
    def covariance(self) -> Tensor:
        """Cov[f] of each example, (N, C, C)."""
        return self.full.diagonal(dim1=0, dim2=2).permute(2, 0, 1) if self.joint else self.full

    @property
    def joint_covariance(self) -> Tensor:
        """Cov[f] between all examples, (N, C, N, C); for ``predictive(x, joint=True)``."""
        if not self.joint:
            raise InputError(
                "joint_covariance of a prediction without it",
                expected="predictive(x, joint=True)",
                remedy="predict again with joint=True; a fit of the cross-entropy has none",
            )
        return self.full

    @property
    def variance(self) -> Tensor:
        """Var[f], (N, C)."""
        return self.covariance.diagonal(dim1=1, dim2=2) if self._variance is None else self._variance

    @property
    def noise(self) -> Tensor:
        """The variance of a target about its outputs, (N, C); classes have none."""
        return self.targets.noise(self)

    @cached_property
    @in_exact_mode
    def probs(self) -> Tensor:
        """Class probabilities in the network's own layout, (N, C) for one label per example."""
        return self.targets.probs(self) if self._probs is None else self._probs

    @in_exact_mode
    def with_noise(self) -> GaussianPredictive:
        """The distribution of a new target: its noise added."""
        # For Gaussian noise σ² is added to the covariance. For other likelihoods of numbers these are the
        # mean and the variance of a target, as the likelihood's ``predictive`` gives them.
        return self.targets.with_noise(self)

    @in_exact_mode
    def sample(self, n: int, seed: Seed = None) -> Tensor:
        """Draw outputs; jointly where the joint covariance is known, else independently for each example."""
        integer("n", n, remedy="pass n=1 or more")
        shape = (n, *self.mean.shape)
        require_room(shape, 2 * self.mean.dtype.itemsize, self.mean.device, "draws of outputs")
        z = normal(shape, seed, self.mean.dtype, self.mean.device)
        if self.joint:
            size = self.mean.numel()
            root = symmetric_root(self.full.reshape(size, size)).to(z)
            return self.mean + (z.flatten(1) @ root.T).view_as(z)
        return self.mean + torch.einsum("nij,snj->sni", symmetric_root(self.covariance).to(z), z)

    @in_exact_mode
    def log_density(self, y: Tensor) -> Tensor:
        """The log density of new targets, their noise included: each example by its marginal."""
        # Of Gaussian noise of a fit or a Gaussian process, an example's outputs are taken together with the
        # covariance between them; of a likelihood, position by position.
        return self.targets.log_density(self, y)


def symmetric_root(covariance: Tensor) -> Tensor:
    """V √λ, also of singular matrices, with rounding errors below zero removed."""
    # covariance (..., C, C)
    values, vectors = torch.linalg.eigh(covariance.to(wide_type(covariance.dtype)))
    root: Tensor = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return root


def add_noise(outputs: GaussianPredictive, noise: Tensor, targets: TargetModel) -> GaussianPredictive:
    """The distribution with independent noise added to every output."""
    # noise (N, C)

    def covariance() -> Tensor:
        full = outputs.full
        added = noise.to(full)
        if outputs.joint:
            return full + torch.diag_embed(added.flatten()).reshape(full.shape)
        return full + added.diag_embed()

    known = outputs._variance
    variance = None if known is None else known + noise.to(known)
    return GaussianPredictive(outputs.mean, covariance, targets, variance=variance, joint=outputs.joint)
