"""Colors, labels and ticks of figures. Nothing global of matplotlib changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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


def percent_ticks(axes: Axes, which: str, hide: bool = False) -> None:
    """Ticks at none, half and all, written as percentages."""
    places = [0.0, 0.5, 1.0]
    labels = ["" if hide else f"{100 * place:.0f} %" for place in places]
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
