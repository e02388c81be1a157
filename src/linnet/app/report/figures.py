"""The figures of the report, each a function from numbers to inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from linnet.app.report.records import Comparison, Reliability, RidgeChoice, RidgePath, Spectrum
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
from linnet.app.report.wording import loo_name, number
from linnet.plots import panels
from linnet.plots.style import percent_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FULL, _HALF = 920.0, 450.0
_MANY_BARS = 400  # bars beyond this are thinned


def accuracy_bars(rows: Sequence[Comparison], tested: int | None = None) -> str:
    """Accuracy of each method with its 95 % Wilson interval.

    Args:
        rows: Methods; those without an accuracy are left out; the first row is emphasized.
        tested: Number of test examples; without it no intervals are drawn.

    Returns:
        Inline SVG.

    Example:
        >>> accuracy_bars([Comparison("linear fit", accuracy=0.9)], 100).startswith("<svg")
        True
    """
    rows = [row for row in rows if row.accuracy is not None]
    shares = [row.accuracy or 0.0 for row in rows]
    alt = "Accuracy: " + ", ".join(f"{row.name} {s:.1%}" for row, s in zip(rows, shares, strict=True))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = np.arange(len(rows))[::-1]
        colors = [ACCENT if row is rows[0] else QUIET for row in rows]
        axes.barh(places, shares, height=0.52, color=colors)
        for place, share in zip(places, shares, strict=True):
            end = share
            if tested:
                low, high = wilson_interval(share * tested, tested)
                axes.plot([low, high], [place, place], color=PAPER, linewidth=5.0, alpha=0.9)
                axes.plot([low, high], [place, place], color=INK, linewidth=1.6)
                end = max(high, share)
            axes.annotate(
                f"{100 * share:.1f} %", (end, place), xytext=(8, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(places, [brief(row.name) for row in rows])
        axes.tick_params(axis="y", labelcolor=INK, labelsize=12)
        axes.grid(False, axis="y")
        axes.set_xlim(0, 1.08)
        axes.set_xticks(np.linspace(0, 1, 6), [f"{p} %" for p in range(0, 101, 20)])
        bare(axes, "left", "bottom")

    return draw("accuracy", alt, (_FULL, 46.0 + 42.0 * len(rows)), paint)


def reliability_diagram(methods: Sequence[Reliability]) -> str:
    """Accuracy against confidence, one panel per method, with counts and 95 % intervals.

    Args:
        methods: At most four are drawn side by side; further ones on further rows.

    Returns:
        Inline SVG.

    Example:
        >>> part = Reliability("fit", np.array([0.6, 0.9]), np.array([False, True]))
        >>> "calibration error" in reliability_diagram([part])
        True
    """
    columns = min(len(methods), 4)
    rows = math.ceil(len(methods) / 4)
    binned = [reliability_bins(part.confidence, part.correct) for part in methods]
    errors = [calibration_error(bins) for bins in binned]
    words = [f"{m.method} {e:.1%}" for m, e in zip(methods, errors, strict=True)]
    alt = "Accuracy against confidence; calibration error: " + ", ".join(words)

    def paint(figure: Figure) -> None:
        grid = figure.add_gridspec(2 * rows, columns, height_ratios=[4.0, 1.0] * rows)
        for index, (part, bins) in enumerate(zip(methods, binned, strict=True)):
            row, column = divmod(index, 4)
            top = figure.add_subplot(grid[2 * row, column])
            bottom = figure.add_subplot(grid[2 * row + 1, column], sharex=top)
            color = ACCENT if index == 0 else MUTED
            panels.reliability(top, bins, color)
            top.set_title(f"{brief(part.method)}\n", pad=2)
            top.annotate(
                f"calibration error {100 * errors[index]:.1f} %", (0, 1), xytext=(0, 6), color=MUTED,
                xycoords="axes fraction", textcoords="offset points", fontsize=10.5,
            )  # fmt: skip
            percent_ticks(top, "y", hide=column > 0)
            top.tick_params(labelbottom=False)
            counts, edges = np.histogram(np.clip(part.confidence, 0, 1), bins=10, range=(0, 1))
            bottom.bar(edges[:-1] + 0.05, counts, width=0.088, color=color, alpha=0.55)
            bottom.grid(False)
            bottom.set_yticks([int(counts.max())])
            percent_ticks(bottom, "x")
            bare(bottom, "left")
            if column == 0:
                top.set_ylabel("correct")
                bottom.set_ylabel("count")
            bottom.set_xlabel("confidence")

    width = _FULL if columns > 2 else _HALF * columns
    return draw("reliability", alt, (width, rows * (325.0 if columns > 2 else 380.0)), paint)


def uncertainty_histogram(uncertainty: Array, correct: Array | None = None) -> str:
    """Histogram of the predictions' uncertainty, split into right and wrong ones.

    Args:
        uncertainty: One number per test sample, (N,).
        correct: Whether each prediction is correct, (N,); without it nothing is split.

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
        for panel, (name, chosen, color) in zip(axes, panels, strict=True):
            panel.hist(values[chosen], bins=bins, color=color, alpha=0.85, rwidth=0.9)
            panel.set_title(f"{name} ({int(chosen.sum())})", color=color, pad=3)
            panel.grid(False, axis="x")
            panel.locator_params(axis="y", nbins=4, integer=True)
            bare(panel, "left")
        axes[-1].set_xlabel("uncertainty")

    return draw("uncertainty", alt, (_HALF, 300.0), paint)


def ridge_curve(path: RidgePath, choice: RidgeChoice | None = None) -> str:
    """Leave-one-out scores over the ridge, with the chosen value marked.

    Args:
        path: Scores of a range of ridges; a panel is drawn for each kind of score that is there.
        choice: How the ridge was chosen, where that is known.

    Returns:
        Inline SVG.

    Example:
        >>> ridge_curve(RidgePath(np.array([0.1, 1.0]), np.array([2.0, 1.0]), 1.0)).startswith("<svg")
        True
    """
    drawn: list[tuple[str, list[tuple[str, Array, str]]]] = []
    error = [("leave-one-out", path.loo_error, ACCENT)]
    if path.gcv is not None:
        error.append(("generalized cross-validation", path.gcv, QUIET))
    drawn.append((loo_name(choice), error))
    accuracy = [("leave-one-out", path.loo_accuracy, ACCENT), ("test", path.test_accuracy, QUIET)]
    known = [(name, values, color) for name, values, color in accuracy if values is not None]
    if known:
        drawn.append(("Accuracy", known))
    if path.evidence is not None:
        drawn.append(("Log evidence", [("evidence", path.evidence, ACCENT)]))
    alt = f"{loo_name(choice)} for ridges from {min(path.ridges):.3g} to {max(path.ridges):.3g}"
    alt += "" if path.chosen is None else f"; chosen: {path.chosen:.3g}"

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots(1, len(drawn), squeeze=False, gridspec_kw={"wspace": 0.08})[0]
        for panel, (title, lines) in zip(axes, drawn, strict=True):
            panels.over_ridges(panel, path.ridges, lines, path.chosen)
            panel.set_title(title)
            if title == "Accuracy":
                panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
                panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
            if len(lines) > 1:
                panel.legend(loc="best", handlelength=1.6)

    width = _FULL if len(drawn) > 1 else _HALF
    return draw("ridge", alt, (width, 290.0), paint)


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
    ridge, effective = spectrum.ridge, spectrum.effective()
    alt = f"{len(panels.positive(spectrum.eigenvalues))} eigenvalues of the kernel by rank"
    alt += "" if effective is None else f"; effective degrees of freedom {effective:.3g}"
    level = None if ridge is None else (ridge, f"ridge {number(ridge, trim=True)}")
    count = None if effective is None else (effective, f"{number(effective)} effective\ndegrees of freedom")

    def paint(figure: Figure) -> None:
        panels.spectrum(figure.subplots(), spectrum.eigenvalues, level, count)

    return draw(name, alt, (_HALF + 130, 320.0), paint)


def informativeness_bars(values: Array, labels: Array | None = None, classes: Sequence[str] = ()) -> str:
    """Bars of how far each training sample moved the fit, from most to least.

    Args:
        values: Informativeness, (N,); beyond 400 samples an evenly spaced selection is drawn.
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
                loc="outside upper left", ncols=min(len(classes), 8), handlelength=0.8, handleheight=0.8
            )
        else:
            colors = [ACCENT] * len(order)
        axes.bar(np.arange(len(order)), heights, width=0.82 if len(order) < 200 else 1.0, color=colors)
        axes.set_xlim(-0.8, len(order) - 0.2)
        axes.set_xticks([])
        axes.grid(False, axis="x")
        axes.set_xlabel("training samples, from most to least informative")
        axes.set_ylabel("informativeness")
        axes.locator_params(axis="y", nbins=5)
        bare(axes, "left", "bottom")

    return draw("informativeness", alt, (_FULL, 230.0), paint)


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
    alt = f"{np.size(target)} predicted values against the true ones"

    def paint(figure: Figure) -> None:
        panels.against_truth(figure.subplots(), mean, target, std)

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
    alt = f"Observed against nominal coverage; 90 % intervals hold {observed[17]:.0%} of the true values"

    def paint(figure: Figure) -> None:
        panels.coverage(figure.subplots(), levels, observed, trials)

    return draw("coverage", alt, (_HALF, 340.0), paint)
