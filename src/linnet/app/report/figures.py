"""The figures of the report, each a function from numbers to inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from linnet.app.report.measures import (
    Array,
    calibration_error,
    interval_coverage,
    ranking,
    reliability_bins,
    wilson_interval,
)
from linnet.app.report.records import Reliability, RidgeChoice, RidgePath, Spectrum
from linnet.app.report.svg import (
    ACCENT,
    DOWN,
    INK,
    MUTED,
    PAPER,
    QUIET,
    UP,
    bare,
    brief,
    class_color,
    draw,
)
from linnet.app.report.wording import SUPERSCRIPTS, loo_name, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HALF, _PANEL = 450.0, 360.0  # CSS pixels; figures of one panel stay legible on a phone
_MANY_POINTS = 1500  # a scatter beyond this is drawn as pixels
_MANY_BARS = 200  # bars beyond this are thinned


def reliability_diagram(part: Reliability, index: int = 0) -> str:
    """Accuracy against confidence of one method, with counts and 95 % intervals.

    Args:
        part: Confidence and correctness of its predictions.
        index: Place among the methods; the first is emphasized.

    Returns:
        Inline SVG.

    Example:
        >>> part = Reliability("fit", np.array([0.6, 0.9]), np.array([False, True]))
        >>> "calibration error" in reliability_diagram(part)
        True
    """
    bins = reliability_bins(part.confidence, part.correct)
    error = f"calibration error {100 * calibration_error(bins):.1f} %"
    color = MUTED if index else ACCENT

    def paint(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4.0, 1.0]})
        x = [b.confidence for b in bins]
        top.plot([0, 1], [0, 1], color=QUIET, linewidth=1.0, linestyle=(0, (4, 4)))
        top.fill_between(x, [b.low for b in bins], [b.high for b in bins], color=color, alpha=0.16, lw=0)
        top.plot(x, [b.accuracy for b in bins], color=color, marker="o", markersize=4.5)
        top.set_title(f"{brief(part.method)}\n", pad=2)
        top.annotate(
            error, (0, 1), xytext=(0, 6), color=MUTED,
            xycoords="axes fraction", textcoords="offset points", fontsize=10.5,
        )  # fmt: skip
        top.set(xlim=(0, 1), ylim=(0, 1.02))
        _percent_ticks(top, "y")
        top.tick_params(labelbottom=False)
        counts, edges = np.histogram(np.clip(part.confidence, 0, 1), bins=10, range=(0, 1))
        bottom.bar(edges[:-1] + 0.05, counts, width=0.088, color=color, alpha=0.55)
        bottom.grid(False)
        bottom.set_yticks([int(counts.max())])
        _percent_ticks(bottom, "x")
        bare(bottom, "left")
        top.set_ylabel("correct")
        bottom.set_ylabel("count")
        bottom.set_xlabel("confidence")

    alt = f"Accuracy against confidence of the {part.method}; {error}"
    return draw(f"reliability-{index}", alt, (_PANEL, 330.0), paint)


def uncertainty_histogram(uncertainty: Array, correct: Array | None = None, name: str = "uncertainty") -> str:
    """Histogram of the predictions' uncertainty, split into right and wrong ones.

    Args:
        uncertainty: One number per test sample, (N,).
        correct: Whether each prediction is correct, (N,); without it nothing is split.
        name: What the uncertainty is, with its unit.

    Returns:
        Inline SVG.

    Example:
        >>> uncertainty_histogram(np.array([0.1, 0.4]), np.array([True, False])).startswith("<svg")
        True
    """
    values = np.asarray(uncertainty, dtype=float)
    kept = np.isfinite(values)
    bins = np.linspace(values[kept].min(), values[kept].max() + 1e-12, 25) if kept.any() else 2
    alt = "Histogram of the uncertainty of the test predictions"
    alt += "" if correct is None else ", right and wrong ones apart"

    def paint(figure: Figure) -> None:
        if correct is None:
            panels = [("all predictions", kept, ACCENT)]
        else:
            right = np.asarray(correct, dtype=bool)
            panels = [("right", kept & right, UP), ("wrong", kept & ~right, DOWN)]
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (which, chosen, color) in zip(axes, panels, strict=True):
            panel.hist(values[chosen], bins=bins, color=color, alpha=0.85, rwidth=0.9)
            panel.set_title(f"{which} ({int(chosen.sum())})", color=color, pad=3)
            panel.grid(False, axis="x")
            panel.locator_params(axis="y", nbins=4, integer=True)
            bare(panel, "left")
        axes[-1].set_xlabel(name)
        if name.endswith("%"):
            axes[-1].xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")

    return draw("uncertainty", alt, (_HALF, 300.0), paint)


def ridge_curves(path: RidgePath, choice: RidgeChoice | None = None) -> list[str]:
    """Scores over the ridge, with the chosen value marked, a figure for each kind of score that is there.

    Args:
        path: Scores of a range of ridges.
        choice: How the ridge was chosen, where that is known.

    Returns:
        Inline SVG of each.

    Example:
        >>> len(ridge_curves(RidgePath(np.array([0.1, 1.0]), np.array([2.0, 1.0]), 1.0)))
        1
    """
    order = np.argsort(path.ridges)
    ridges = np.asarray(path.ridges, dtype=float)[order]
    panels: list[tuple[str, list[tuple[str, Array, str]]]] = []
    error = [("leave-one-out", path.loo_error, ACCENT)]
    if path.gcv is not None:
        error.append(("generalized cross-validation", path.gcv, QUIET))
    panels.append((loo_name(choice), error))
    accuracy = [("leave-one-out", path.loo_accuracy, ACCENT), ("test", path.test_accuracy, QUIET)]
    known = [(name, values, color) for name, values, color in accuracy if values is not None]
    if known:
        panels.append(("Accuracy", known))
    if path.evidence is not None:
        panels.append(("Log evidence (nats)", [("evidence", path.evidence, ACCENT)]))
    ends = f"for ridges from {number(ridges[0])} to {number(ridges[-1])}"
    ends += "" if path.chosen is None else f"; chosen: {number(path.chosen)}"

    def curve(title: str, lines: list[tuple[str, Array, str]]) -> Callable[[Figure], None]:
        def paint(figure: Figure) -> None:
            from matplotlib.ticker import MaxNLocator

            panel = figure.subplots()
            for name, values, color in lines:
                main = color == ACCENT
                style = "-" if main else (0, (4, 3))
                y = np.asarray(values, dtype=float)[order]
                panel.plot(ridges, y, color=color, linestyle=style, label=name, lw=2.0 if main else 1.4)
            if path.chosen is not None:
                y = np.interp(math.log(path.chosen), np.log(ridges), np.asarray(lines[0][1])[order])
                panel.axvline(path.chosen, color=INK, linewidth=0.9, alpha=0.6, linestyle=(0, (1, 2)))
                panel.plot([path.chosen], [y], marker="o", ms=8, color=ACCENT, mec=PAPER, mew=1.8)
            panel.set_title(title)
            panel.set_xscale("log")
            _log_ticks(panel, "x")
            panel.set_xlabel("ridge")
            panel.margins(y=0.12)
            if title == "Accuracy":
                panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
                panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
            if len(lines) > 1:
                panel.legend(loc="best", handlelength=1.6)

        return paint

    return [
        draw(f"ridge-{index}", f"{title} {ends}", (_PANEL, 290.0), curve(title, lines))
        for index, (title, lines) in enumerate(panels)
    ]


def kernel_spectrum(spectrum: Spectrum, name: str = "spectrum") -> str:
    """Eigenvalues of the kernel by rank, both on logarithmic scales.

    Args:
        spectrum: Eigenvalues and, when known, the ridge and the effective degrees of freedom.
        name: Name of the figure, unique on the page.

    Returns:
        Inline SVG.

    Example:
        >>> kernel_spectrum(Spectrum(np.array([4.0, 1.0, 0.1]), ridge=0.5)).startswith("<svg")
        True
    """
    values = np.sort(np.asarray(spectrum.eigenvalues, dtype=float))[::-1]
    # what lies below the round-off of the largest eigenvalue is zero
    kept = values[values > values[0] * np.finfo(np.float32).eps] if values.size else values
    rank = np.arange(1, len(kept) + 1)
    ridge, effective = spectrum.ridge, spectrum.effective()
    alt = f"{len(kept)} eigenvalues of the kernel by rank"
    alt += "" if effective is None else f"; effective parameters {number(effective)}"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue")
        axes.plot(rank, kept, color=ACCENT, marker="o" if len(kept) <= 60 else "", markersize=3)
        if not len(kept):
            return
        low = min(kept[-1], ridge or kept[-1]) / 2
        axes.set_ylim(low, kept[0] * 2.5)
        axes.set_xlim(0.9, max(len(kept) * 1.1, 2))
        if ridge is not None and ridge > 0:
            axes.axhline(ridge, color=DOWN, linewidth=1.2, linestyle=(0, (4, 3)))
            note = f"ridge {number(ridge, trim=True)}"
            axes.annotate(note, (0.95, ridge), xytext=(2, 5), textcoords="offset points", color=DOWN)
            axes.fill_between(rank, np.maximum(kept, ridge), ridge, color=ACCENT, alpha=0.12, linewidth=0)
        if effective is not None and 0.9 < effective <= len(kept):
            axes.axvline(effective, color=INK, linewidth=0.9, alpha=0.6, linestyle=(0, (1, 2)))
            axes.annotate(
                f"{number(effective)} effective\nparameters", (effective, 1),
                xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
                xytext=(-6, -4), ha="right", color=MUTED, fontsize=10.5,
            )  # fmt: skip
        _log_ticks(axes, "x")
        _log_ticks(axes, "y")

    return draw(name, alt, (_HALF, 320.0), paint)


def informativeness_bars(values: Array, labels: Array | None = None, classes: Sequence[str] = ()) -> str:
    """Bars of how far each training sample moved the fit, from most to least.

    Args:
        values: Informativeness, (N,); beyond 200 samples an evenly spaced selection is drawn.
        labels: Class indices, (N,), for the colors.
        classes: Class names, for the legend.

    Returns:
        Inline SVG.

    Example:
        >>> informativeness_bars(np.array([0.2, 0.1]), np.array([0, 1]), ("a", "b")).startswith("<svg")
        True
    """
    order = ranking(values)
    if len(order) > _MANY_BARS:
        order = order[np.linspace(0, len(order) - 1, _MANY_BARS).round().astype(int)]
    heights = np.nan_to_num(np.asarray(values, dtype=float)[order])
    colored = labels is not None and 0 < len(classes) <= 12
    alt = f"Informativeness of {len(values)} training samples, from most to least informative"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        if colored and labels is not None:
            colors = [class_color(int(label)) for label in np.asarray(labels)[order]]
            for index, name in enumerate(classes):
                axes.bar([0], [0], color=class_color(index), label=brief(name, 18))
            figure.legend(
                loc="outside upper left", ncols=min(len(classes), 5), handlelength=0.8, handleheight=0.8
            )
        else:
            colors = [ACCENT] * len(order)
        axes.bar(np.arange(len(order)), heights, width=0.82 if len(order) < 200 else 1.0, color=colors)
        axes.set_xlim(-0.8, len(order) - 0.2)
        axes.set_xticks([])
        axes.grid(False, axis="x")
        axes.set_xlabel("training samples, from most to least informative")
        axes.set_ylabel("mean squared change of the outputs")
        axes.locator_params(axis="y", nbins=5)
        bare(axes, "left", "bottom")

    return draw("informativeness", alt, (_HALF, 300.0), paint)


def confusion_matrix(labels: Array, predicted: Array, classes: Sequence[str]) -> str:
    """Confusion matrix.

    Args:
        labels: True class indices, (N,).
        predicted: Predicted class indices, (N,).
        classes: Class names.

    Returns:
        Inline SVG.

    Example:
        >>> confusion_matrix(np.array([0, 1]), np.array([0, 0]), ("a", "b")).startswith("<svg")
        True
    """
    size = len(classes)
    counts = np.zeros((size, size), dtype=int)
    np.add.at(counts, (np.asarray(labels, dtype=int), np.asarray(predicted, dtype=int)), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    alt = (
        f"Confusion matrix of {size} classes; {int(np.trace(counts))} of {int(counts.sum())} on the diagonal"
    )

    def paint(figure: Figure) -> None:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        for true, guess in zip(*np.nonzero(counts), strict=True):
            color = ACCENT if true == guess else DOWN
            strength = 0.08 + 0.44 * float(shares[true, guess])
            axes.add_patch(
                Rectangle((guess - 0.48, true - 0.48), 0.96, 0.96, color=color, alpha=strength, lw=0)
            )
            if size <= 20:
                axes.text(guess, true, f"{counts[true, guess]}", ha="center", va="center", fontsize=10)
        axes.set(xlim=(-0.6, size - 0.4), ylim=(size - 0.4, -0.6), aspect="equal")
        names = [brief(name, 16) for name in classes]
        axes.set_xticks(range(size), names, rotation=0 if max(map(len, names)) < 4 else 40, ha="center")
        if max(map(len, names)) >= 4:
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        axes.set_yticks(range(size), names)
        axes.set(xlabel="predicted", ylabel="true")
        axes.grid(False)
        bare(axes, "left", "bottom")

    side = min(90.0 + max(44.0 - size, 26.0) * size, 640.0)
    return draw("confusion", alt, (side + 30, side), paint)


def predicted_against_true(mean: Array, target: Array, std: Array | None = None) -> str:
    """Predicted against true values, with one standard deviation when it is known.

    Args:
        mean: Predicted values, any shape.
        target: True values, the same shape.
        std: Standard deviations, the same shape.

    Returns:
        Inline SVG; more than 1500 points are drawn as pixels.

    Example:
        >>> predicted_against_true(np.array([1.0, 2.0]), np.array([1.1, 1.9])).startswith("<svg")
        True
    """
    x = np.asarray(target, dtype=float).reshape(-1)
    y = np.asarray(mean, dtype=float).reshape(-1)
    many = len(x) > _MANY_POINTS
    alt = f"{len(x)} predicted values against the true ones"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        ends = [float(np.nanmin([x, y])), float(np.nanmax([x, y]))] if x.size else [0.0, 1.0]
        axes.plot(ends, ends, color=QUIET, linewidth=1.0, linestyle=(0, (4, 4)))
        if std is not None and not many:
            half = np.asarray(std, dtype=float).reshape(-1)
            axes.vlines(x, y - half, y + half, color=ACCENT, alpha=0.25, linewidth=1.2)
        size = 4.0 if many else 16.0
        axes.scatter(x, y, s=size, color=ACCENT, alpha=0.25 if many else 0.65, linewidths=0, rasterized=many)
        axes.set(xlabel="true value", ylabel="predicted value")
        axes.locator_params(nbins=6)

    return draw("predicted", alt, (_HALF, 340.0), paint)


def interval_calibration(mean: Array, std: Array, target: Array) -> str:
    """Shares of true values inside the predictive intervals of each level.

    Args:
        mean: Predicted values, any shape.
        std: Standard deviations, noise included, the same shape.
        target: True values, the same shape.

    Returns:
        Inline SVG.

    Example:
        >>> interval_calibration(np.zeros(3), np.ones(3), np.array([0.1, -1.0, 2.0])).startswith("<svg")
        True
    """
    levels = np.linspace(0.05, 0.95, 19)
    observed = interval_coverage(mean, std, target, levels)
    trials = int(np.asarray(target).size)
    bands = np.array([wilson_interval(share * trials, trials) for share in observed])
    alt = f"Observed against nominal coverage; 90 % intervals hold {observed[17]:.0%} of the true values"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=QUIET, linewidth=1.0, linestyle=(0, (4, 4)))
        axes.fill_between(levels, bands[:, 0], bands[:, 1], color=ACCENT, alpha=0.16, linewidth=0)
        axes.plot(levels, observed, color=ACCENT, marker="o", markersize=4)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="predictive interval", ylabel="true values inside")
        _percent_ticks(axes, "x")
        _percent_ticks(axes, "y")

    return draw("coverage", alt, (_HALF, 340.0), paint)


def _percent_ticks(axes: Axes, which: str) -> None:
    """Ticks at the ends and in the middle, written as percentages."""
    places = [0.0, 0.5, 1.0]
    labels = [f"{100 * place:.0f} %" for place in places]
    (axes.set_xticks if which == "x" else axes.set_yticks)(places, labels)
    axes.tick_params(axis="x" if which == "x" else "y", length=0, pad=6)


def _log_ticks(axes: Axes, which: str) -> None:
    """Ticks at powers of ten, written without formulas, and no minor ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if 0 < low < high < 60 * low else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=7))
    axis.set_major_formatter(lambda value, _: _power(value))
    axis.set_minor_locator(NullLocator())


def _power(value: float) -> str:
    """A tick of a logarithmic axis: plain near one, with an exponent far from it."""
    if value <= 0:
        return ""
    if 0.01 <= value < 10_000:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = round(value / 10.0**exponent)
    power = f"10{str(exponent).translate(SUPERSCRIPTS)}"
    return power if mantissa == 1 else f"{mantissa}·{power}"
