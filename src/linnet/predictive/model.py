"""The interface of all fitted models, and ``model.plot``: what one predicts, drawn."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.params import integer, tensor
from linnet.plots import displays, panels
from linnet.plots.displays import Display, Plots, array
from linnet.plots.measures import Array
from linnet.predictive.gaussian import Predictive, exclusive
from linnet.shown import Shown
from linnet.tangent.batch import Inputs, check_finite
from linnet.tangent.inputs import in_rows, known_answers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ModelPlots(Plots):
    """``model.plot``: predictions for N test examples x, and their classes (N,) or targets (N, C) as y."""

    def calibration(self, x: Inputs, y: Any, ax: Axes | None = None, *, bins: int = 10) -> Display:
        """How far probabilities are right, or for numbers how many lie inside predictive intervals."""
        bins, y = integer("bins", bins), in_rows(x, y)
        prediction = self._of.predictive(x)
        p = _probabilities(prediction)
        if p is None:
            return displays.coverage(*_values(prediction, y)).plot(ax)
        likeliest = p.max(1)
        names = getattr(self._of, "class_names", None) or ()
        correct = likeliest.indices == _labels(known_answers(y, names), p)
        return displays.calibration(array(likeliest.values), correct.cpu().numpy(), bins).plot(ax)

    def predicted(self, x: Inputs, y: Any, ax: Axes | None = None) -> Display:
        """Predicted against true values, with the standard deviation of a target; regression alone."""
        prediction = self._of.predictive(x)
        if _probabilities(prediction) is not None:
            raise InputError(
                "predicted() of a model that predicts classes",
                expected="a model of values",
                remedy="draw .plot.calibration(x, y)",
            )
        mean, std, target = _values(prediction, in_rows(x, y))
        return Display(panels.against_truth, mean=mean, std=std, target=target).plot(ax)

    def curve(self, x: Inputs, ax: Axes | None = None, *, output: int = 0) -> Display:
        """An output over places (T, 1), with two standard deviations of it and of new targets."""
        if not isinstance(x, Tensor) or not x.ndim or not len(x) or x[0].numel() != 1:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"x is {shape}",
                expected="a tensor of places on a line, (T, 1)",
                remedy="draw .plot.predicted(x, y) for inputs of several numbers",
            )
        prediction = self._of.predictive(x)
        integer("output", output, 0, prediction.mean.shape[1] - 1)
        noisy = prediction if _probabilities(prediction) is not None else prediction.with_noise()
        std, noise = (array(part.variance[:, output].clamp_min(0).sqrt()) for part in (prediction, noisy))
        places, mean = array(x.reshape(-1)), array(prediction.mean[:, output])
        return Display(panels.curve, x=places, mean=mean, std=std, noise=noise).plot(ax)


def _probabilities(prediction: Predictive) -> Tensor | None:
    """Probabilities (N, C) of classes that exclude each other; ``None`` where outputs are values."""
    try:
        p = prediction.probs
    except InputError:
        return None
    return exclusive(p)


def _labels(labels: Tensor, p: Tensor) -> Tensor:
    """Classes (N,), checked."""
    labels = tensor("y", labels, "classes (N,)", "pass one class index for each example").to(p.device)
    given = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if given.shape != p.shape[:1]:
        raise InputError(
            f"y has shape {tuple(labels.shape)}",
            f"({len(p)},), a class for each example",
            "pass y of the same x",
        )
    whole = given.long()
    if not bool(((given == whole) & (whole >= 0) & (whole < p.shape[1])).all()):
        raise DataError(
            f"y holds {given.min().item()} to {given.max().item()}",
            expected=f"classes from 0 to {p.shape[1] - 1}",
            remedy="count classes from 0, as in the data of the fit",
        )
    return whole


def _values(prediction: Predictive, y: Any) -> tuple[Array, Array, Array]:
    """Mean, standard deviation with noise, and targets, (N, C) each."""
    target = tensor("y", y, "targets (N, C)", "pass one target for each output")
    check_finite(target, "y")
    noisy = prediction.with_noise()
    shape = tuple(noisy.mean.shape)
    if tuple(target.shape) != shape and not (shape[1] == 1 and tuple(target.shape) == shape[:1]):
        raise InputError(
            f"y has shape {tuple(target.shape)}", f"{shape}, a target for each output", "pass y of the same x"
        )
    std = noisy.variance.clamp_min(0).sqrt()
    return array(noisy.mean), array(std), array(target.reshape(shape))


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
