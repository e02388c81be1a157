"""Numbers with their drawing, after the Display objects of scikit-learn, and what ``result.plot`` is."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.errors import DependencyError
from linnet.params import instance
from linnet.plots import panels
from linnet.plots.measures import BINS, Array, calibration_error, interval_coverage, reliability_bins
from linnet.shown import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

LEVELS = np.linspace(0.05, 0.95, 19)  # of predictive intervals


class Display(Shown):
    """Numbers that can be drawn: each is an attribute, and ``plot(ax=None)`` draws them again.

    Args:
        paint: Draws the numbers, given by name, on axes.
        numbers: Arrays, numbers and texts, by name.

    Attributes:
        ax_: The axes that were drawn on last.
        figure_: Their figure.

    Example:
        >>> display = Display(panels.curve, x=np.arange(3), mean=np.ones(3), std=np.ones(3))
        >>> display, display.plot().ax_.get_ylabel()
        (Display(x=[0, 1, 2], mean=[1, 1, 1], std=[1, 1, 1]), 'output')
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(self, paint: Callable[..., None], **numbers: Any) -> None:
        self._paint, self._drawn = paint, numbers
        vars(self).update(numbers)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """One of the numbers."""

    def _shown(self) -> Mapping[str, Any]:
        return self._drawn

    def plot(self, ax: Axes | None = None) -> Display:
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
        self._paint(axes, **self._drawn)
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


class Plots(Shown, ABC):
    """Base class of what ``result.plot`` is: each method takes matplotlib axes and returns a display."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def _shown(self) -> Mapping[str, Any]:
        drawn = [name for name in dir(self) if not name.startswith("_")]
        return {"of": type(self._of).__name__, "draws": drawn}


def array(values: Any) -> Array:
    """A tensor as an array of floats."""
    found: Array = values.detach().double().cpu().numpy()
    return found


def calibration(confidence: Array, correct: Array, bins: int = BINS) -> Display:
    """Whether predictions (N,) are right against the probability of the likeliest class, (N,)."""
    error = calibration_error(reliability_bins(confidence, correct, bins))
    return Display(panels.calibration, confidence=confidence, correct=correct, bins=bins, error=error)


def coverage(mean: Array, std: Array, target: Array) -> Display:
    """Shares of true values (N, C) inside predictive intervals of each level; ``std`` has the noise."""
    observed = interval_coverage(mean, std, target, LEVELS)
    return Display(panels.coverage, levels=LEVELS, observed=observed, trials=int(np.size(target)))
