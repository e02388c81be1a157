"""The interface of every predictive distribution."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.frames import frame, outputs
from linnet.linalg.random import Seed
from linnet.shown import Shown

if TYPE_CHECKING:
    from pandas import DataFrame


# -- classes ---------------------------------------------------------------------------------------
# Class probabilities in one layout.

_SURE = 1e-3  # how far the probabilities of an example may sum from one


def exclusive(p: Tensor) -> Tensor:
    """Probabilities of classes that exclude each other, a row per example, (N, C)."""
    if p.ndim == 2 and p.shape[1] == 1:
        p = torch.cat([1 - p, p], 1)
    if p.ndim != 2 or bool(((p.sum(1) - 1).abs() > _SURE).any()):
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
