"""The figures of a page, each a function from numbers to SVG that lives inside it.

They are drawn without pyplot, so nothing global changes. Colors are written as CSS variables and text as
text, so that a figure takes the page's font and follows its light and dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.plots import panels
from linnet.plots.measures import Array, calibration_error, interval_coverage, ranking, reliability_bins
from linnet.plots.panels import (
    ACCENT,
    DOWN,
    INK,
    LINE,
    MUTED,
    PAPER,
    QUIET,
    UP,
    bare,
    brief,
    class_color,
    percent_ticks,
)
from linnet.report.numbers import number
from linnet.report.records import Comparison, KernelSpectrum, RidgeChoice, RidgeScores, TaskKernel
from linnet.report.verdict import loo_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HALF, _PANEL = 450.0, 360.0  # CSS pixels; figures of one panel stay legible on a phone
_MANY_BARS = 200  # bars beyond this are thinned
# In the SVG each color of the light page becomes the CSS variable of the same name.
_VARIABLES = {
    INK: "ink", MUTED: "muted", LINE: "line", PAPER: "paper",
    ACCENT: "accent", UP: "up", DOWN: "down", QUIET: "quiet",
}  # fmt: skip

_POINTS_PER_INCH = 72  # one unit of the SVG is one point, and is shown as one CSS pixel
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11.0,
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "normal",
    "axes.titlecolor": INK,
    "axes.labelsize": 11.0,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.linewidth": 1.0,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "grid.alpha": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
    "text.color": INK,
    "text.usetex": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def reliability_diagram(row: Comparison, index: int = 0) -> str:
    """Accuracy against confidence of one method, with counts and 95 % intervals."""
    confidence = np.asarray(row.confidence)
    bins = reliability_bins(confidence, row.correct)
    error = f"calibration error {100 * calibration_error(bins):.1f} %"
    color = MUTED if index else ACCENT

    def paint(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4.0, 1.0]})
        panels.reliability(top, bins, color)
        top.set_title(f"{brief(row.name)}\n", pad=2)
        top.annotate(
            error, (0, 1), xytext=(0, 6), color=MUTED,
            xycoords="axes fraction", textcoords="offset points", fontsize=10.5,
        )  # fmt: skip
        percent_ticks(top, "y")
        top.tick_params(labelbottom=False)
        counts, edges = np.histogram(np.clip(confidence, 0, 1), bins=10, range=(0, 1))
        bottom.bar(edges[:-1] + 0.05, counts, width=0.088, color=color, alpha=0.55)
        bottom.grid(False)
        bottom.set_yticks([int(counts.max())])
        percent_ticks(bottom, "x")
        bare(bottom, "left")
        top.set_ylabel("correct")
        bottom.set_ylabel("count")
        bottom.set_xlabel("confidence")

    alt = f"Accuracy against confidence of the {row.name}; {error}"
    return draw(f"reliability-{index}", alt, (_PANEL, 330.0), paint)


def uncertainty_histogram(uncertainty: Array, correct: Array | None = None, name: str = "uncertainty") -> str:
    """Histogram of the predictions' uncertainty, split into right and wrong ones."""
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


def ridge_curves(path: RidgeScores, choice: RidgeChoice | None = None) -> list[str]:
    """Scores over the ridge, with the chosen value marked, a figure for each kind of score that is there."""
    drawn = {loo_name(choice): {"leave-one-out": path.loo_error, "generalized cross-validation": path.gcv}}
    drawn["Accuracy"] = {"leave-one-out": path.loo_accuracy, "test": path.test_accuracy}
    drawn["Log evidence (nats)"] = {"evidence": path.evidence}
    ends = f"for ridges from {number(min(path.ridges))} to {number(max(path.ridges))}"
    ends += "" if path.chosen is None else f"; chosen: {number(path.chosen)}"

    def curve(title: str, scores: Mapping[str, Array]) -> Callable[[Figure], None]:
        def paint(figure: Figure) -> None:
            from matplotlib.ticker import MaxNLocator

            panel = figure.subplots()
            panels.over_ridges(panel, path.ridges, scores, path.chosen)
            panel.set_title(title)
            if title == "Accuracy":
                panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
                panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")

        return paint

    known = {
        title: {name: values for name, values in scores.items() if values is not None}
        for title, scores in drawn.items()
    }
    return [
        draw(f"ridge-{index}", f"{title} {ends}", (_PANEL, 290.0), curve(title, scores))
        for index, (title, scores) in enumerate((t, s) for t, s in known.items() if s)
    ]


def kernel_spectrum(spectrum: KernelSpectrum, name: str = "spectrum") -> str:
    """Eigenvalues of the kernel by rank, both on logarithmic scales."""
    ridge, effective = spectrum.ridge, spectrum.effective()
    alt = f"{len(spectrum.eigenvalues)} eigenvalues of the kernel by rank"
    alt += "" if effective is None else f"; effective parameters {number(effective)}"
    notes = (f"ridge {number(ridge, trim=True)}", f"{number(effective)} effective\nparameters")

    def paint(figure: Figure) -> None:
        panels.spectrum(figure.subplots(), spectrum.eigenvalues, ridge, effective, notes)

    return draw(name, alt, (_HALF, 320.0), paint)


def informativeness_bars(values: Array, labels: Array | None = None, classes: Sequence[str] = ()) -> str:
    """Bars of how far each training sample moved the fit, from most to least."""
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
    """Confusion matrix."""
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
    """Predicted against true values, with one standard deviation when it is known."""
    alt = f"{np.size(target)} predicted values against the true ones"

    def paint(figure: Figure) -> None:
        panels.against_truth(figure.subplots(), mean, target, std)

    return draw("predicted", alt, (_HALF, 340.0), paint)


def interval_calibration(mean: Array, std: Array, target: Array) -> str:
    """Shares of true values inside the predictive intervals of each level."""
    levels = np.linspace(0.05, 0.95, 19)
    observed = interval_coverage(mean, std, target, levels)
    trials = int(np.asarray(target).size)
    alt = f"Observed against nominal coverage; 90 % intervals hold {observed[17]:.0%} of the true values"

    def paint(figure: Figure) -> None:
        panels.coverage(figure.subplots(), levels, observed, trials)

    return draw("coverage", alt, (_HALF, 340.0), paint)


def label_energy(task: TaskKernel) -> str:
    """Cumulative share of the labels on the leading eigenvectors, beside that of random labels."""
    alt = f"The first {task.top} of {task.rows} directions hold {100 * task.share:.0f} % of the labels"

    def paint(figure: Figure) -> None:
        panels.energy(figure.subplots(), task.shares, task.rows, task.top)

    return draw("energy", alt, (_HALF, 320.0), paint)


def draw(name: str, alt: str, size: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    """Draw one figure and return it as inline SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    inches = (size[0] / _POINTS_PER_INCH, size[1] / _POINTS_PER_INCH)
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # Text is drawn by the browser, in its own font: whether matplotlib's has the glyph is no matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=inches, dpi=_POINTS_PER_INCH, layout="constrained")
        paint(figure)
        figure.savefig(buffer, format="svg", dpi=2.5 * _POINTS_PER_INCH, metadata={"Date": None})
    return _inline(buffer.getvalue(), name, alt, size)


def _inline(text: str, name: str, alt: str, size: tuple[float, float]) -> str:
    """The drawing as an element of the page: no prolog, no metadata, no namespaces, own ids."""
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # matplotlib's style sheet would apply to the whole page: the page has its own rule for figures.
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "var(--sans)", body)
    body = re.sub(r'style="[^"]*"', _with_variables, body)
    body = re.sub(r"\n\s*", "\n", body).strip()
    width, height = size
    return (
        f'<svg class="figure" viewBox="0 0 {width:g} {height:g}" '
        f'style="--width:{width:g}px;max-width:{width:g}px" '
        f'role="img" aria-label="{escape(alt, quote=True)}">\n{body}\n</svg>'
    )


def _with_variables(style: re.Match[str]) -> str:
    """A style attribute with CSS variables in place of the colors that have one."""
    text = style.group()
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text
