"""Numbers that can be drawn, after the Display objects of scikit-learn: ``plot(ax=None)`` gives itself back.

A display holds its numbers as arrays, so that they can be drawn again, on other axes or by other means.
``result.plot`` makes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from linnet.errors import DependencyError
from linnet.params import instance
from linnet.plots import panels
from linnet.plots.measures import Array, calibration_error, interval_coverage, reliability_bins
from linnet.plots.style import ACCENT, QUIET, percent_ticks
from linnet.shown import Record, Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

LEVELS = np.linspace(0.05, 0.95, 19)  # of predictive intervals
Drawn = TypeVar("Drawn", bound="Display")
_Of = TypeVar("_Of")


class Display(Record, ABC):
    """Base class of displays: numbers, and how to draw them.

    Attributes:
        ax_: The axes that were drawn on last.
        figure_: Their figure.
    """

    ax_: Axes
    figure_: Figure | SubFigure

    @abstractmethod
    def _paint(self, axes: Axes) -> None:
        """Draw on axes."""

    def plot(self: Drawn, ax: Axes | None = None) -> Drawn:
        """Draw on matplotlib axes.

        Args:
            ax: The axes; by default those of a new figure of pyplot.

        Returns:
            This object, with ``ax_`` and ``figure_``.

        Raises:
            DependencyError: matplotlib is missing.
            InputError: ``ax`` is something else.
        """
        axes = axes_of(ax)
        self._paint(axes)
        self.ax_, self.figure_ = axes, axes.figure
        return self


def axes_of(ax: Any) -> Axes:
    """The axes that were given, or those of a new figure."""
    try:
        from matplotlib.axes import Axes
    except ImportError as error:
        raise DependencyError(
            "plots need matplotlib, which cannot be imported",
            expected="matplotlib 3.8 or later",
            remedy="pip install matplotlib; every plot's numbers are in what summary(), path() and "
            "predictive() return",
        ) from error
    if ax is None:
        import matplotlib.pyplot as plt

        return plt.subplots(layout="constrained")[1]
    return instance("ax", ax, Axes, "matplotlib axes", "leave ax= out for a new figure")


@dataclass(repr=False, eq=False)
class RidgeDisplay(Display):
    """Scores over the ridge.

    Args:
        ridges: ρ, (R,).
        scores: Scores by name, (R,) each; the first is the one that counts.
        chosen: The ridge that was taken.
        label: What the scores are.

    Example:
        >>> scores = {"leave-one-out": np.array([2.0, 1.0])}
        >>> RidgeDisplay(np.array([0.1, 1.0]), scores, 1.0, "error").plot().ax_.get_xlabel()
        'ridge'
    """

    ridges: Array
    scores: Mapping[str, Array]
    chosen: float
    label: str

    def _shown(self) -> Mapping[str, Any]:
        ends = {"from": float(np.min(self.ridges)), "to": float(np.max(self.ridges))}
        known = {"score": self.label, "ridges": len(self.ridges), **ends}
        return {**known, "chosen": self.chosen, "lines": list(self.scores)}

    def _paint(self, axes: Axes) -> None:
        first = next(iter(self.scores))
        lines = [(name, values, ACCENT if name == first else QUIET) for name, values in self.scores.items()]
        panels.over_ridges(axes, self.ridges, lines, self.chosen)
        axes.set_ylabel(self.label)
        if len(lines) > 1:
            axes.legend()


@dataclass(repr=False, eq=False)
class CalibrationDisplay(Display):
    """Accuracy against confidence.

    Args:
        confidence: Probability of the likeliest class, (N,).
        correct: Whether it is the true one, (N,).
        bins: Number of bins over [0, 1].

    Example:
        >>> display = CalibrationDisplay(np.array([0.6, 0.9]), np.array([False, True]))
        >>> round(display.error, 2), display.plot().ax_.get_ylabel()
        (0.35, 'correct')
    """

    confidence: Array
    correct: Array
    bins: int = 10

    @property
    def error(self) -> float:
        """Expected calibration error, in [0, 1]."""
        return calibration_error(reliability_bins(self.confidence, self.correct, self.bins))

    def _shown(self) -> Mapping[str, Any]:
        known = {"examples": len(self.confidence), "accuracy": float(np.mean(self.correct))}
        return {**known, "mean confidence": float(np.mean(self.confidence)), "calibration error": self.error}

    def _paint(self, axes: Axes) -> None:
        panels.reliability(axes, reliability_bins(self.confidence, self.correct, self.bins))
        percent_ticks(axes, "x")
        percent_ticks(axes, "y")
        axes.set(xlabel="confidence", ylabel="correct")
        axes.set_title(f"calibration error {100 * self.error:.1f} %")


@dataclass(repr=False, eq=False)
class CoverageDisplay(Display):
    """Shares of true values inside predictive intervals of each level.

    Args:
        mean: Predicted values, (N, C).
        std: Standard deviations of a target, noise included, (N, C).
        target: True values, (N, C).

    Example:
        >>> display = CoverageDisplay(np.zeros(3), np.ones(3), np.array([0.1, -1.0, 2.0]))
        >>> len(display.observed), display.plot().ax_.get_ylabel()
        (19, 'true values inside')
    """

    mean: Array
    std: Array
    target: Array

    @property
    def observed(self) -> Array:
        """Shares inside, from 5 % intervals to 95 %."""
        return interval_coverage(self.mean, self.std, self.target, LEVELS)

    def _shown(self) -> Mapping[str, Any]:
        shares = dict(zip(LEVELS.round(2).tolist(), self.observed.tolist(), strict=True))
        return {"values": int(np.size(self.target)), "inside 50 %": shares[0.5], "inside 90 %": shares[0.9]}

    def _paint(self, axes: Axes) -> None:
        panels.coverage(axes, LEVELS, self.observed, int(np.size(self.target)))


@dataclass(repr=False, eq=False)
class PredictionDisplay(Display):
    """Predicted against true values.

    Args:
        mean: Predicted values, (N, C).
        std: Standard deviations of a target, noise included, (N, C).
        target: True values, (N, C).

    Example:
        >>> PredictionDisplay(np.array([1.0, 2.0]), np.ones(2), np.array([1.5, 1.5])).rmse
        0.5
    """

    mean: Array
    std: Array
    target: Array

    @property
    def rmse(self) -> float:
        """Root mean squared error."""
        return float(np.sqrt(np.mean((self.mean - self.target) ** 2)))

    def _shown(self) -> Mapping[str, Any]:
        return {"values": int(np.size(self.target)), "rmse": self.rmse}

    def _paint(self, axes: Axes) -> None:
        panels.against_truth(axes, self.mean, self.target, self.std)


@dataclass(repr=False, eq=False)
class SpectrumDisplay(Display):
    """Eigenvalues of a kernel, with the ridge that bounds what a fit uses of them.

    Args:
        eigenvalues: (M,), in any order.
        ridge: ρ, in their unit, where there is a fit.
        degrees_of_freedom: Effective degrees of freedom, where they are known.

    Example:
        >>> SpectrumDisplay(np.array([4.0, 1.0, 0.1]), 0.5).plot().ax_.get_ylabel()
        'eigenvalue'
    """

    eigenvalues: Array
    ridge: float | None = None
    degrees_of_freedom: float | None = None

    def _shown(self) -> Mapping[str, Any]:
        values = np.asarray(self.eigenvalues)  # all that degrees of freedom are summed over, drawn or not
        known: dict[str, Any] = {"eigenvalues": len(values)}
        if self.ridge is None:
            known["largest"] = float(values.max()) if len(values) else None
        else:
            known |= {"above the ridge": int((values > self.ridge).sum()), "ridge": self.ridge}
        return {**known, "effective degrees of freedom": self.degrees_of_freedom}

    def _paint(self, axes: Axes) -> None:
        effective = self.degrees_of_freedom
        note = None if effective is None else (effective, f"{effective:.3g} effective\ndegrees of freedom")
        ridge = None if self.ridge is None else (self.ridge, f"ridge {self.ridge:.3g}")
        panels.spectrum(axes, self.eigenvalues, ridge, note)


@dataclass(repr=False, eq=False)
class InfluenceDisplay(Display):
    """The training examples that added most to a prediction, and those that took most from it.

    Args:
        examples: Positions of training examples, (K,).
        values: Prediction with each minus without it, (K,), descending.
        output: Which output it is.
        labels: Their classes, (K,), where there are classes.

    Example:
        >>> display = InfluenceDisplay(np.array([4, 0]), np.array([0.3, -0.1]), 1, np.array([1, 0]))
        >>> [text.get_text() for text in display.plot().ax_.get_yticklabels()]
        ['4 (class 1)', '0 (class 0)']
    """

    examples: Array
    values: Array
    output: int
    labels: Array | None = None

    def _shown(self) -> Mapping[str, Any]:
        named = dict(zip(self._names(), (float(value) for value in self.values), strict=True))
        return {"output": self.output, "examples": len(self.examples), "influence": named}

    def _names(self) -> list[str]:
        """The examples by position and class."""
        classes = [""] * len(self.examples) if self.labels is None else [f" (class {y})" for y in self.labels]
        return [f"{at}{of}" for at, of in zip(self.examples, classes, strict=True)]

    def _paint(self, axes: Axes) -> None:
        panels.influences(axes, self._names(), self.values)
        axes.set_title(f"output {self.output}")


@dataclass(repr=False, eq=False)
class CurveDisplay(Display):
    """A function of one variable with two standard deviations on each side.

    Args:
        x: Places, (T,).
        mean: Values there, (T,).
        std: Their standard deviations, (T,).
        noise: Standard deviations of new targets there, (T,); drawn as the outer band.

    Example:
        >>> x = np.linspace(0, 1, 5)
        >>> len(CurveDisplay(x, x**2, 0.1 + x, 0.2 + x).plot().ax_.collections)
        2
    """

    x: Array
    mean: Array
    std: Array
    noise: Array | None = None

    def _shown(self) -> Mapping[str, Any]:
        return {"places": len(self.x), "from": float(np.min(self.x)), "to": float(np.max(self.x))}

    def _paint(self, axes: Axes) -> None:
        if self.noise is not None:
            panels.band(axes, self.x, self.mean, self.noise, QUIET)
        panels.band(axes, self.x, self.mean, self.std)
        axes.set(xlabel="x", ylabel="output")


@dataclass(repr=False, eq=False)
class LinesDisplay(Display):
    """Functions of one variable by name, the first in front.

    Args:
        lines: Places (T,) and values (T,) of each.
        xlabel: What the places are.
        ylabel: What the values are.
        title: Written above.

    Example:
        >>> curve = LinesDisplay({"risk": (np.array([0.5, 1.0]), np.array([0.0, 0.2]))}, "share", "error")
        >>> curve.plot().ax_.get_xlabel(), curve
        ('share', LinesDisplay(of=error, over=share))
    """

    lines: Mapping[str, tuple[Array, Array]]
    xlabel: str
    ylabel: str
    title: str = ""

    def _shown(self) -> Mapping[str, Any]:
        ends = {name: float(y[-1]) for name, (_, y) in self.lines.items() if len(y)}
        return {"of": self.ylabel, "over": self.xlabel, "title": self.title or None, "at the end": ends}

    def _paint(self, axes: Axes) -> None:
        panels.lines(axes, self.lines)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel, title=self.title)
        if all(np.all(x == np.round(x)) for x, _ in self.lines.values()):
            axes.locator_params(axis="x", integer=True)


@dataclass(repr=False, eq=False)
class HistogramDisplay(Display):
    """Distributions of a score, over the same bins.

    Args:
        values: The score of each example, (N,), by the name of the set; at most three sets.
        label: What the score is.
        title: Written above.

    Example:
        >>> display = HistogramDisplay({"inside": np.zeros(3), "outside": np.ones(2)}, "entropy")
        >>> display.plot().ax_.get_xlabel()
        'entropy'
    """

    values: Mapping[str, Array]
    label: str
    title: str = ""

    def _shown(self) -> Mapping[str, Any]:
        means = {f"mean {name}": float(np.mean(each)) for name, each in self.values.items()}
        return {"of": self.label, "title": self.title or None, **means}

    def _paint(self, axes: Axes) -> None:
        panels.histograms(axes, self.values)
        axes.set(xlabel=self.label, title=self.title)


@dataclass(repr=False, eq=False)
class EnergyDisplay(Display):
    """Share of a target on the leading eigenvectors of a kernel, beside that of random ones.

    Args:
        shares: Share of its squared norm on the first 1, ..., k eigenvectors, (k,), in [0, 1].
        rows: Number of all eigenvectors.
        top: At how many of them the share is written, at most k.

    Example:
        >>> display = EnergyDisplay(np.array([0.5, 0.9]), 4, 2)
        >>> display.share, display.plot().ax_.get_ylabel()
        (0.9, 'share of the labels')
    """

    shares: Array
    rows: int
    top: int

    @property
    def share(self) -> float:
        """The share on the first ``top``."""
        return float(self.shares[self.top - 1])

    def _shown(self) -> Mapping[str, Any]:
        return {"directions": self.rows, "top": self.top, "share": self.share}

    def _paint(self, axes: Axes) -> None:
        panels.energy(axes, self.shares, self.rows, self.top)


class Plots(Shown, ABC, Generic[_Of]):
    """Base class of what ``result.plot`` is: each method takes matplotlib axes and returns a display.

    Args:
        of: The result that is drawn.

    Example:
        >>> class Two(Plots):
        ...     def pair(self, ax=None):
        ...         return LinesDisplay({"": (np.arange(2), np.arange(2))}, "x", "y").plot(ax)
        >>> Two("a result")
        Two(of=str)
    """

    def __init__(self, of: _Of) -> None:
        self._of = of

    def _shown(self) -> Mapping[str, Any]:
        drawn = [name for name in dir(self) if not name.startswith("_")]
        return {"of": type(self._of).__name__, "draws": drawn}
