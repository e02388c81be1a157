"""Drawings of one thing on one pair of axes, for the plots of the library and the figures of the report.

Each takes axes and numbers, and changes nothing but the axes. Sizes and fonts are those of the figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.plots.measures import Array, ReliabilityBin, reliability_bins, wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, LINE, PAPER = "#23272f", "#6b7280", "#e3e1dc", "#fdfcfa"
ACCENT, UP, DOWN, QUIET = "#33658a", "#3d8573", "#b9603f", "#a9adb6"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Mid-tones of equal weight, legible on white and on black.
_CLASS_COLORS = (
    "#5b8db8", "#d08a4e", "#6aa06c", "#c4686d", "#8d7bb8",
    "#a07d62", "#cb88ad", "#8a919c", "#a79f4b", "#4fa3a8",
)  # fmt: skip


def class_color(index: int) -> str:
    """The color of a class, the same in every figure and on the page."""
    if index < len(_CLASS_COLORS):
        return _CLASS_COLORS[index]
    import colorsys

    hue = (0.11 + index * 0.381966) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.56, 0.36)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def brief(text: str, longest: int = 28) -> str:
    """A text on one line, shortened in the middle when it is long."""
    text = " ".join(text.split())
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}…{text[-tail:]}"


def bare(axes: Axes, *sides: str) -> None:
    """Remove spines and their ticks from axes."""
    for side in sides:
        axes.spines[side].set_visible(False)
        axes.tick_params(axis="y" if side in ("left", "right") else "x", length=0)


def percent_ticks(axes: Axes, which: str) -> None:
    """Ticks at none, half and all, written as percentages."""
    places = [0.0, 0.5, 1.0]
    labels = [f"{100 * place:.0f} %" for place in places]
    (axes.set_xticks if which == "x" else axes.set_yticks)(places, labels)
    axes.tick_params(axis="x" if which == "x" else "y", length=0, pad=6)


def log_ticks(axes: Axes, which: str) -> None:
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


DASHED = (0, (4, 4))
_MANY_POINTS = 1500  # a scatter beyond this is drawn as pixels


def over_ridges(
    axes: Axes, ridges: Array, scores: Mapping[str, Array], chosen: float | None, label: str = ""
) -> None:
    """Scores over the ridge, the first in front, with the chosen ridge marked on it."""
    order = np.argsort(ridges)
    x = np.asarray(ridges, dtype=float)[order]
    curves = {name: np.asarray(values, dtype=float)[order] for name, values in scores.items()}
    first = next(iter(curves))
    for name, y in curves.items():
        main = name == first
        look: dict[str, Any] = {"color": ACCENT if main else QUIET, "lw": 2.0 if main else 1.4}
        axes.plot(x, y, linestyle="-" if main else (0, (4, 3)), label=name, **look)
    if chosen is not None:
        height = np.interp(math.log(chosen), np.log(x), curves[first])
        axes.axvline(chosen, color=INK, linewidth=0.9, alpha=0.6, linestyle=(0, (1, 2)))
        axes.plot([chosen], [height], marker="o", ms=8, color=ACCENT, mec=PAPER, mew=1.8)
    axes.set_xscale("log")
    log_ticks(axes, "x")
    axes.set(xlabel="ridge", ylabel=label)
    axes.margins(y=0.12)
    if len(curves) > 1:
        axes.legend(loc="best", handlelength=1.6)


def reliability(axes: Axes, bins: Sequence[ReliabilityBin], color: str = ACCENT) -> None:
    """Accuracy against confidence with 95 % intervals, beside the diagonal of perfect calibration."""
    x = [b.confidence for b in bins]
    axes.plot([0, 1], [0, 1], color=QUIET, linewidth=1.0, linestyle=DASHED)
    axes.fill_between(x, [b.low for b in bins], [b.high for b in bins], color=color, alpha=0.16, lw=0)
    axes.plot(x, [b.accuracy for b in bins], color=color, marker="o", markersize=4.5)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))


def calibration(axes: Axes, confidence: Array, correct: Array, bins: int, error: float) -> None:
    """Accuracy against confidence, with the calibration error above."""
    reliability(axes, reliability_bins(confidence, correct, bins))
    percent_ticks(axes, "x")
    percent_ticks(axes, "y")
    axes.set(xlabel="confidence", ylabel="correct")
    axes.set_title(f"calibration error {100 * error:.1f} %")


def coverage(axes: Axes, levels: Array, observed: Array, trials: int) -> None:
    """Shares of true values inside predictive intervals, beside the diagonal."""
    bands = np.array([wilson_interval(share * trials, trials) for share in observed])
    axes.plot([0, 1], [0, 1], color=QUIET, linewidth=1.0, linestyle=DASHED)
    axes.fill_between(levels, bands[:, 0], bands[:, 1], color=ACCENT, alpha=0.16, linewidth=0)
    axes.plot(levels, observed, color=ACCENT, marker="o", markersize=4)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="predictive interval", ylabel="true values inside")
    percent_ticks(axes, "x")
    percent_ticks(axes, "y")


def spectrum(
    axes: Axes,
    eigenvalues: Array,
    ridge: float | None = None,
    degrees_of_freedom: float | None = None,
    notes: tuple[str, str] | None = None,
) -> None:
    """Eigenvalues by rank, both on logarithmic scales; ``notes`` at the ridge and the degrees of freedom."""
    if notes is None:
        freedom = "" if degrees_of_freedom is None else f"{degrees_of_freedom:.3g}"
        notes = ("" if ridge is None else f"ridge {ridge:.3g}", f"{freedom} effective\ndegrees of freedom")
    values = positive(eigenvalues)
    rank = np.arange(1, len(values) + 1)
    axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue")
    axes.plot(rank, values, color=ACCENT, marker="o" if len(values) <= 60 else "", markersize=3)
    if not len(values):
        return
    low = min(values[-1], ridge or values[-1]) / 2
    axes.set_ylim(low, values[0] * 2.5)
    axes.set_xlim(0.9, max(len(values) * 1.1, 2))
    if ridge is not None and ridge > 0:
        axes.axhline(ridge, color=DOWN, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(notes[0], (0.95, ridge), xytext=(2, 5), textcoords="offset points", color=DOWN)
        axes.fill_between(rank, np.maximum(values, ridge), ridge, color=ACCENT, alpha=0.12, linewidth=0)
    if degrees_of_freedom is not None and 0.9 < degrees_of_freedom <= len(values):
        axes.axvline(degrees_of_freedom, color=INK, linewidth=0.9, alpha=0.6, linestyle=(0, (1, 2)))
        axes.annotate(
            notes[1], (degrees_of_freedom, 1), xycoords=("data", "axes fraction"), va="top", ha="right",
            xytext=(-6, -4), textcoords="offset points", color=MUTED, fontsize=10.5,
        )  # fmt: skip
    log_ticks(axes, "x")
    log_ticks(axes, "y")


def energy(axes: Axes, shares: Array, rows: int, top: int) -> None:
    """Cumulative share of a target on the leading eigenvectors, beside that of random ones."""
    count, share = len(shares), float(shares[top - 1])
    rank = np.arange(1, count + 1)
    axes.set(xscale="log", xlabel="leading directions", ylabel="share of the labels", ylim=(0, 1.04))
    axes.plot(rank, rank / rows, color=QUIET, linestyle=DASHED, linewidth=1.2)
    place = (-14, -14) if count > 0.9 * rows else (-4, 7)  # left of the line where it ends at the top
    axes.annotate(
        "random labels", (rank[-1], rank[-1] / rows), xytext=place, textcoords="offset points",
        ha="right", color=MUTED, fontsize=10.5,
    )  # fmt: skip
    axes.plot(rank, shares, color=ACCENT, marker="o" if count <= 60 else "", markersize=3)
    axes.fill_between(rank, shares, np.minimum(rank / rows, shares), color=ACCENT, alpha=0.12, lw=0)
    axes.plot([top], [share], color=DOWN, marker="o", markersize=6)
    is_right = top > count**0.6
    text, side = f"{100 * share:.0f} % on {top}", "right" if is_right else "left"
    axes.annotate(
        text, (top, share), xytext=(-8 if is_right else 8, 9), textcoords="offset points",
        ha=side, color=INK, fontsize=10.5,
    )  # fmt: skip
    axes.set_xlim(0.9, max(count * 1.1, 2))
    axes.set_yticks(np.linspace(0, 1, 6), [f"{p} %" for p in range(0, 101, 20)])
    ticks = [10**power for power in range(6) if 10**power <= count]
    axes.set_xticks(ticks, [f"{tick:,}".replace(",", "\u202f") for tick in ticks])
    axes.minorticks_off()


def lines(
    axes: Axes, lines: Mapping[str, tuple[Array, Array]], xlabel: str, ylabel: str, title: str = ""
) -> None:
    """Functions of one variable, the first in front, with a legend where there are several."""
    for index, (name, (x, y)) in enumerate(lines.items()):
        look: dict[str, Any] = {"marker": "o" if len(x) <= 60 else "", "markersize": 4.0, "label": name}
        color, width = (class_color(index - 1), 1.3) if index else (ACCENT, 2.0)
        axes.plot(x, y, color=color, lw=width, zorder=2 if index else 3, **look)
    if len(lines) > 1:
        axes.legend(ncols=1 + len(lines) // 12)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if all(np.all(x == np.round(x)) for x, _ in lines.values()):
        axes.locator_params(axis="x", integer=True)


def histograms(axes: Axes, values: Mapping[str, Array], label: str, title: str) -> None:
    """Distributions over the same bins, each of area one."""
    edges = np.histogram_bin_edges(np.concatenate(list(values.values())), bins=30)
    for (name, each), color in zip(values.items(), (ACCENT, DOWN, QUIET), strict=False):
        axes.hist(each, edges.tolist(), density=True, color=color, alpha=0.55, label=name)
    axes.set(xlabel=label, ylabel="density", title=title)
    axes.legend()


def positive(eigenvalues: Array) -> Array:
    """Eigenvalues that are told from rounding, the largest first."""
    values = np.sort(np.asarray(eigenvalues, dtype=float))[::-1]
    return values[values > values[0] * np.finfo(np.float32).eps] if values.size else values


def against_truth(axes: Axes, mean: Array, target: Array, std: Array | None = None) -> None:
    """Predicted against true values, with one standard deviation where it is known."""
    x, y = np.asarray(target, dtype=float).reshape(-1), np.asarray(mean, dtype=float).reshape(-1)
    many = len(x) > _MANY_POINTS
    ends = [float(np.nanmin([x, y])), float(np.nanmax([x, y]))] if x.size else [0.0, 1.0]
    axes.plot(ends, ends, color=QUIET, linewidth=1.0, linestyle=DASHED)
    if std is not None and not many:
        half = np.asarray(std, dtype=float).reshape(-1)
        axes.vlines(x, y - half, y + half, color=ACCENT, alpha=0.25, linewidth=1.2)
    size = 4.0 if many else 16.0
    axes.scatter(x, y, s=size, color=ACCENT, alpha=0.25 if many else 0.65, linewidths=0, rasterized=many)
    axes.set(xlabel="true value", ylabel="predicted value")
    axes.locator_params(nbins=6)


def influences(axes: Axes, examples: Array, values: Array, output: int, labels: Array | None = None) -> None:
    """Bars of what each training example adds to a prediction, the first on top."""
    classes = [""] * len(examples) if labels is None else [f" (class {y})" for y in labels]
    places = np.arange(len(examples))[::-1]
    axes.barh(places, values, height=0.7, color=[ACCENT if value >= 0 else DOWN for value in values])
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.set_yticks(places, [f"{at}{of}" for at, of in zip(examples, classes, strict=True)])
    axes.grid(False, axis="y")
    axes.set(xlabel="prediction with the example minus without it", ylabel="training example")
    axes.set_title(f"output {output}")


def band(axes: Axes, x: Array, mean: Array, std: Array, color: str = ACCENT) -> None:
    """A function of one variable with two standard deviations on each side."""
    order = np.argsort(x)
    at, middle, half = (np.asarray(part, dtype=float)[order] for part in (x, mean, 2 * np.asarray(std)))
    axes.fill_between(at, middle - half, middle + half, color=color, alpha=0.16, linewidth=0)
    axes.plot(at, middle, color=color)


def curve(axes: Axes, x: Array, mean: Array, std: Array, noise: Array | None = None) -> None:
    """A function of one variable with its band; the outer one is that of new targets."""
    if noise is not None:
        band(axes, x, mean, noise, QUIET)
    band(axes, x, mean, std)
    axes.set(xlabel="x", ylabel="output")
