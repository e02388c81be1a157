"""The report's section on the tangent kernel of a task: its record and its figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linnet.app.report.svg import draw
from linnet.errors import InputError
from linnet.plots.measures import Array
from linnet.plots.style import ACCENT, DOWN, INK, MUTED, QUIET

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TaskKernel:
    """Linearity of a task for a network.

    Args:
        eigenvalues: Leading eigenvalues of the kernel's matrix (k,), decreasing.
        shares: Share of the labels' squared norm on the first 1, ..., k eigenvectors (k,), in [0, 1].
        rows: Size of the matrix.
        top: How many leading eigenvectors the text speaks of, at most k.
        levels: The ridge of the fit and its effective degrees of freedom, in units of the eigenvalues.
        verdict: The judgment, and the reasons for it, a sentence each.
        facts: Names and values for the table.

    Raises:
        InputError: The pieces are of different lengths.
    """

    eigenvalues: Array
    shares: Array
    rows: int
    top: int
    levels: tuple[float, float]
    verdict: tuple[str, ...]
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.eigenvalues) or not 1 <= self.top <= len(self.shares):
            raise InputError(
                f"TaskKernel has {len(self.eigenvalues)} eigenvalues, {len(self.shares)} shares, "
                f"top {self.top}",
                expected="a share for each eigenvalue, and top among them",
                remedy="pass the cumulative shares of the labels' squared norm",
            )

    @property
    def share(self) -> float:
        """Share of the labels' squared norm on the leading eigenvectors that the text speaks of."""
        return float(self.shares[self.top - 1])


def label_energy(task: TaskKernel) -> str:
    """Cumulative share of the labels on the leading eigenvectors, beside that of random labels.

    Args:
        task: Shares by rank.

    Returns:
        Inline SVG.

    Example:
        >>> task = TaskKernel(np.ones(2), np.array([0.5, 0.9]), 4, 2, (1.0, 1.0), ("It is linear.",))
        >>> label_energy(task).startswith("<svg")
        True
    """
    count = len(task.shares)
    rank = np.arange(1, count + 1)
    alt = f"The first {task.top} of {task.rows} directions hold {100 * task.share:.0f} % of the labels"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(xscale="log", xlabel="leading directions", ylabel="share of the labels", ylim=(0, 1.04))
        axes.plot(rank, rank / task.rows, color=QUIET, linestyle=(0, (4, 4)), linewidth=1.2)
        axes.annotate(
            "random labels", (rank[-1], rank[-1] / task.rows), xytext=(-4, 7), textcoords="offset points",
            ha="right", color=MUTED, fontsize=10.5,
        )  # fmt: skip
        axes.plot(rank, task.shares, color=ACCENT, marker="o" if count <= 60 else "", markersize=3)
        axes.fill_between(
            rank, task.shares, np.minimum(rank / task.rows, task.shares), color=ACCENT, alpha=0.12, lw=0
        )
        axes.plot([task.top], [task.share], color=DOWN, marker="o", markersize=6)
        is_right = task.top > count**0.6
        text, side = f"{100 * task.share:.0f} % on {task.top}", "right" if is_right else "left"
        axes.annotate(
            text, (task.top, task.share), xytext=(-8 if is_right else 8, 9), textcoords="offset points",
            ha=side, color=INK, fontsize=10.5,
        )  # fmt: skip
        axes.set_xlim(0.9, max(count * 1.1, 2))
        axes.set_yticks(np.linspace(0, 1, 6), [f"{p} %" for p in range(0, 101, 20)])
        ticks = [10**power for power in range(6) if 10**power <= count]
        axes.set_xticks(ticks, [f"{tick:,}".replace(",", "\u202f") for tick in ticks])
        axes.minorticks_off()

    return draw("energy", alt, (450.0, 320.0), paint)
