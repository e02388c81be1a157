"""``metrics.plot``: accuracies of a stream of tasks, drawn. matplotlib axes in, a display out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from linnet.errors import InputError
from linnet.plots.displays import LinesDisplay, Plots, axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Followed(Protocol):
    """A record of a stream."""

    @property
    def accuracy(self) -> Sequence[Sequence[float]]:
        """R, a row for each task learned."""

    def averages(self) -> list[float]:
        """Average accuracy after each task."""


class StreamPlots(Plots[Followed]):
    """Plots of a stream of tasks; ``metrics.plot`` makes it.

    Args:
        of: A :class:`linnet.continual.StreamMetrics`.

    Example:
        >>> import linnet
        >>> metrics = linnet.continual.StreamMetrics([[0.9], [0.7, 0.8]])
        >>> list(metrics.plot.accuracy().lines)
        ['average', 'task 1', 'task 2']
    """

    def accuracy(self, ax: Axes | None = None) -> LinesDisplay:
        """The accuracy on each task from when it was learned, and the average over those learned.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If nothing has been recorded.
        """
        axes, rows = axes_of(ax), self._of.accuracy
        if not rows:
            raise InputError("0 tasks are recorded", "at least 1", "call record(accuracies) after every task")
        learned = np.arange(1, len(rows) + 1)
        lines = {"average": (learned, np.array(self._of.averages()))}
        for task in range(len(rows)):
            lines[f"task {task + 1}"] = (learned[task:], np.array([row[task] for row in rows[task:]]))
        return LinesDisplay(lines, "tasks learned", "accuracy").plot(axes)
