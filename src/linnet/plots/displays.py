"""Numbers with their drawing, after the Display objects of scikit-learn, and what ``result.plot`` is."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.errors import DependencyError
from linnet.params import instance
from linnet.plots import panels
from linnet.plots.measures import Array, calibration_error, interval_coverage, reliability_bins
from linnet.shown import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

LEVELS = np.linspace(0.05, 0.95, 19)  # of predictive intervals


class Display(Shown):
    """Numbers that can be drawn: each is an attribute, and ``plot(ax=None)`` draws them again.

    Args:
        paint: Draws the numbers, given by name, on axes.
        shown: What a prompt and a notebook show.
        also: Numbers that are not drawn.
        numbers: Arrays, numbers and texts, by name.

    Attributes:
        ax_: The axes that were drawn on last.
        figure_: Their figure.

    Example:
        >>> display = spectrum(np.array([4.0, 1.0, 0.1]), ridge=0.5)
        >>> display.ridge, display.plot().ax_.get_ylabel()
        (0.5, 'eigenvalue')
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(
        self,
        paint: Callable[..., None],
        shown: Mapping[str, Any],
        also: Mapping[str, Any] | None = None,
        **numbers: Any,
    ) -> None:
        self._paint, self._summary, self._drawn = paint, shown, numbers
        vars(self).update(numbers, **(also or {}))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """One of the numbers."""

    def _shown(self) -> Mapping[str, Any]:
        return self._summary

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


def ridge(ridges: Array, scores: Mapping[str, Array], chosen: float, label: str) -> Display:
    """Scores (R,) over ridges (R,); the first is the one that counts."""
    ends = {"from": float(np.min(ridges)), "to": float(np.max(ridges))}
    shown = {"score": label, "ridges": len(ridges), **ends, "chosen": chosen, "lines": list(scores)}
    return Display(panels.over_ridges, shown, ridges=ridges, scores=scores, chosen=chosen, label=label)


def calibration(confidence: Array, correct: Array, bins: int = 10) -> Display:
    """Whether predictions (N,) are right against the probability of the likeliest class, (N,)."""
    error = calibration_error(reliability_bins(confidence, correct, bins))
    shown = {
        "examples": len(confidence), "accuracy": float(np.mean(correct)),
        "mean confidence": float(np.mean(confidence)), "calibration error": error,
    }  # fmt: skip
    return Display(panels.calibration, shown, confidence=confidence, correct=correct, bins=bins, error=error)


def coverage(mean: Array, std: Array, target: Array) -> Display:
    """Shares of true values (N, C) inside predictive intervals of each level; ``std`` has the noise."""
    observed = interval_coverage(mean, std, target, LEVELS)
    shares = dict(zip(LEVELS.round(2).tolist(), observed.tolist(), strict=True))
    count = int(np.size(target))
    shown = {"values": count, "inside 50 %": shares[0.5], "inside 90 %": shares[0.9]}
    return Display(panels.coverage, shown, levels=LEVELS, observed=observed, trials=count)


def prediction(mean: Array, std: Array, target: Array) -> Display:
    """Predicted against true values (N, C), with the standard deviation of a target."""
    rmse = float(np.sqrt(np.mean((mean - target) ** 2)))
    shown = {"values": int(np.size(target)), "rmse": rmse}
    return Display(panels.against_truth, shown, {"rmse": rmse}, mean=mean, std=std, target=target)


def spectrum(
    eigenvalues: Array, ridge: float | None = None, degrees_of_freedom: float | None = None
) -> Display:
    """Eigenvalues of a kernel (M,), with the ridge that bounds what a fit uses of them."""
    values = np.asarray(eigenvalues)  # all that degrees of freedom are summed over, drawn or not
    known: dict[str, Any] = {"eigenvalues": len(values)}
    if ridge is None:
        known["largest"] = float(values.max()) if len(values) else None
    else:
        known |= {"above the ridge": int((values > ridge).sum()), "ridge": ridge}
    known["effective degrees of freedom"] = degrees_of_freedom
    return Display(
        panels.spectrum, known, eigenvalues=values, ridge=ridge, degrees_of_freedom=degrees_of_freedom
    )


def influence(examples: Array, values: Array, output: int, labels: Array | None = None) -> Display:
    """Prediction with each training example minus without it, (K,), descending."""
    classes = [""] * len(examples) if labels is None else [f" (class {y})" for y in labels]
    names = [f"{at}{of}" for at, of in zip(examples, classes, strict=True)]
    named = dict(zip(names, (float(value) for value in values), strict=True))
    shown = {"output": output, "examples": len(examples), "influence": named}
    return Display(
        panels.influences, shown, {"examples": examples}, values=values, names=names, output=output
    )


def curve(x: Array, mean: Array, std: Array, noise: Array | None = None) -> Display:
    """A function at places (T,) with two standard deviations on each side; ``noise`` those of new targets."""
    shown = {"places": len(x), "from": float(np.min(x)), "to": float(np.max(x))}
    return Display(panels.curve, shown, x=x, mean=mean, std=std, noise=noise)


def lines(lines: Mapping[str, tuple[Array, Array]], xlabel: str, ylabel: str, title: str = "") -> Display:
    """Functions of one variable by name, each of places and values (T,), the first in front."""
    ends = {name: float(y[-1]) for name, (_, y) in lines.items() if len(y)}
    shown = {"of": ylabel, "over": xlabel, "title": title or None, "at the end": ends}
    return Display(panels.lines, shown, lines=lines, xlabel=xlabel, ylabel=ylabel, title=title)


def histogram(values: Mapping[str, Array], label: str, title: str = "") -> Display:
    """Distributions of a score (N,) over the same bins, at most three sets by name."""
    means = {f"mean {name}": float(np.mean(each)) for name, each in values.items()}
    shown = {"of": label, "title": title or None, **means}
    return Display(panels.histograms, shown, values=values, label=label, title=title)


def energy(shares: Array, rows: int, top: int) -> Display:
    """Share of a target's squared norm on the first 1, ..., k of all eigenvectors of a kernel, (k,)."""
    share = float(shares[top - 1])
    shown = {"directions": rows, "top": top, "share": share}
    return Display(panels.energy, shown, {"share": share}, shares=shares, rows=rows, top=top)
