"""Drawing with matplotlib into SVG that lives inside the page.

The figures are drawn without pyplot, so nothing global changes. Colors are written as CSS variables
and text as text, so that a figure takes the page's font and follows its light and dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from linnet.plots.style import ACCENT, DOWN, INK, LINE, MUTED, PAPER, QUIET, UP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
