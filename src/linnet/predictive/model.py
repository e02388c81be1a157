"""The interface of all fitted models."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.errors import InputError
from linnet.predictive.distribution import Predictive
from linnet.predictive.plots import ModelPlots
from linnet.shown import Shown
from linnet.tangent.batch import Inputs


class PredictiveModel(Shown):
    """A fitted model: ``predict`` gives outputs, ``predictive`` their distribution."""

    @abstractmethod
    def predictive(self, x: Inputs) -> Predictive:
        """The distribution of the outputs, given the data.

        Args:
            x: N examples.

        Returns:
            The distribution.
        """

    def predict(self, x: Inputs) -> Tensor:
        """The mean of the outputs.

        Args:
            x: N examples.

        Returns:
            E[f(x)], (N, C).

        Raises:
            DataError: If x is empty or not finite.
        """
        return self.predictive(x).mean

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Summary of the fit, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """

    def save(self, directory: str | Path) -> Path:
        """Write the model to a folder.

        Args:
            directory: The folder.

        Raises:
            InputError: Models of this kind have no file format.
        """
        name = type(self).__name__
        raise InputError(
            f"save({str(directory)!r}) of a {name}",
            expected="a LinearFit, SoftmaxFit, NestedFit, Laplace, TangentGP or Finetuned",
            remedy=f"keep the data and the network's state_dict, and make the {name} again from them",
        )

    @property
    def plot(self) -> ModelPlots:
        """Plots of its predictions: ``calibration``, ``predicted`` and ``curve``."""
        return ModelPlots(self)

    def _shown(self) -> dict[str, Any]:
        return self.summary()
