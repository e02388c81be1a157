"""Common style of all figures: quiet axes, color-blind safe colors, SVG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's palette, in the order in which lines take them.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def figure(columns: int = 1, rows: int = 1, width: float = 4.2, height: float = 3.0) -> tuple[Any, Any]:
    """A figure with ``rows`` × ``columns`` axes.

    Returns:
        The figure, and its axes: one, or an array of them.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "axes.prop_cycle": matplotlib.cycler(color=COLORS), "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9,
        "legend.frameon": False, "svg.hashsalt": "linnet",
    })  # fmt: skip
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained")


def save(drawn: Any, path: Path) -> Path:
    """Write a figure and close it; the same numbers give the same file."""
    import matplotlib.pyplot as plt

    drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(drawn)
    return path
