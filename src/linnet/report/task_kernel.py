"""The report's section on the tangent kernel of a task: its record and its figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from linnet.errors import InputError
from linnet.plots import panels
from linnet.plots.measures import Array
from linnet.report.svg import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TaskKernel:
    """Linearity of a task for a network."""

    eigenvalues: Array  # leading eigenvalues of the kernel's matrix (k,), decreasing
    shares: Array  # share of the labels' squared norm on the first 1, ..., k eigenvectors (k,), in [0, 1]
    rows: int  # size of the matrix
    top: int  # how many leading eigenvectors the text speaks of, at most k
    # the ridge of the fit and its effective degrees of freedom, in units of the eigenvalues
    levels: tuple[float, float]
    verdict: tuple[str, ...]  # the judgment, and the reasons for it, a sentence each
    facts: tuple[tuple[str, str], ...] = ()  # names and values for the table

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
    """Cumulative share of the labels on the leading eigenvectors, beside that of random labels."""
    alt = f"The first {task.top} of {task.rows} directions hold {100 * task.share:.0f} % of the labels"

    def paint(figure: Figure) -> None:
        panels.energy(figure.subplots(), task.shares, task.rows, task.top)

    return draw("energy", alt, (450.0, 320.0), paint)
