"""``model.plot``: what a fitted model predicts, drawn. matplotlib axes in, a display out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.params import integer, tensor
from linnet.plots.displays import (
    CalibrationDisplay,
    CoverageDisplay,
    CurveDisplay,
    Plots,
    PredictionDisplay,
    axes_of,
)
from linnet.plots.measures import Array
from linnet.predictive.classes import exclusive
from linnet.predictive.distribution import Predictive
from linnet.tangent.batch import Inputs, check_finite
from linnet.tangent.door import known_answers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Predicting(Protocol):
    """A model with a predictive distribution."""

    def predictive(self, x: Inputs) -> Predictive:
        """The distribution of the outputs."""


class ModelPlots(Plots[Predicting]):
    """Plots of a model's predictions; ``model.plot`` makes it.

    Every method takes matplotlib axes, by default those of a new figure, and returns a display: its ``ax_``
    and ``figure_`` are what was drawn on, its fields the numbers, and ``plot(ax)`` draws them again.

    Args:
        model: A fitted model.

    Example:
        >>> import torch, linnet
        >>> x = torch.linspace(-2, 2, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> process = linnet.TangentGP(net, linnet.likelihoods.Gaussian(variance=0.1)).fit(x, x.sin())
        >>> process.plot.curve(x).ax_.get_xlabel()
        'x'
    """

    def __init__(self, model: Predicting) -> None:
        super().__init__(model)
        self._model = model

    def calibration(
        self, x: Inputs, y: Any, ax: Axes | None = None, *, bins: int = 10
    ) -> CalibrationDisplay | CoverageDisplay:
        """How far probabilities are right, or for numbers how many lie inside predictive intervals.

        Args:
            x: N test examples.
            y: Their classes (N,), or targets (N, C).
            ax: matplotlib axes; by default those of a new figure.
            bins: Number of bins of confidence, for classes.

        Returns:
            The display.

        Raises:
            DataError: If x is empty or not finite, or y is not finite or has labels out of range.
            DependencyError: If matplotlib is missing.
            InputError: If y does not go with the predictions.
        """
        axes, bins = axes_of(ax), integer("bins", bins)
        prediction = self._model.predictive(x)
        p = _probabilities(prediction)
        if p is None:
            return CoverageDisplay(*_values(prediction, y)).plot(axes)
        likeliest = p.max(1)
        names = getattr(self._model, "class_names", None) or ()
        correct = likeliest.indices == _labels(known_answers(y, names), p)
        return CalibrationDisplay(_array(likeliest.values), correct.cpu().numpy(), bins).plot(axes)

    def predicted(self, x: Inputs, y: Any, ax: Axes | None = None) -> PredictionDisplay:
        """Predicted against true values, with the standard deviation of a target; regression alone.

        Args:
            x: N test examples.
            y: Their targets, (N, C), or (N,) for one output.
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DataError: If x is empty or not finite, or y is not finite.
            DependencyError: If matplotlib is missing.
            InputError: If the model predicts classes, or y has another shape than the predictions.
        """
        axes, prediction = axes_of(ax), self._model.predictive(x)
        if _probabilities(prediction) is not None:
            raise InputError(
                "predicted() of a model that predicts classes",
                expected="a model of values",
                remedy="draw .plot.calibration(x, y)",
            )
        return PredictionDisplay(*_values(prediction, y)).plot(axes)

    def curve(self, x: Inputs, ax: Axes | None = None, *, output: int = 0) -> CurveDisplay:
        """An output over inputs of one number each, with two standard deviations; regression alone.

        Args:
            x: T places, (T, 1) or (T,).
            ax: matplotlib axes; by default those of a new figure.
            output: Which output.

        Returns:
            The display; the outer band is that of new targets.

        Raises:
            DataError: If x is empty or not finite.
            DependencyError: If matplotlib is missing.
            InputError: If an example of x is more than one number, or there is no such output.
        """
        axes = axes_of(ax)
        if not isinstance(x, Tensor) or not x.ndim or not len(x) or x[0].numel() != 1:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"x is {shape}",
                expected="a tensor of places on a line, (T, 1)",
                remedy="draw .plot.predicted(x, y) for inputs of several numbers",
            )
        prediction = self._model.predictive(x)
        integer("output", output, 0, prediction.mean.shape[1] - 1)
        noisy = prediction if _probabilities(prediction) is not None else prediction.with_noise()
        deviations = [_array(part.variance[:, output].clamp_min(0).sqrt()) for part in (prediction, noisy)]
        place, mean = _array(x.detach().reshape(-1)), _array(prediction.mean[:, output])
        return CurveDisplay(place, mean, *deviations).plot(axes)


def _array(value: Tensor) -> Array:
    """A tensor as an array of floats."""
    found: Array = value.detach().double().cpu().numpy()
    return found


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
    return _array(noisy.mean), _array(std), _array(target.reshape(shape))
