"""Accuracy matrix, average accuracy and forgetting of a stream of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from linnet.errors import InputError
from linnet.params import number, refuse, tensor
from linnet.plots import panels
from linnet.plots.displays import Display, Plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class StreamMetrics:
    """Accuracies R[t][i] on task i after training on task t, and their summaries.

    Any score that is better when larger will do. Rows may stop at the tasks seen so far; forward transfer
    needs the tasks to come as well.

    Args:
        accuracy: R, one row for each task learned.
        baseline: Accuracy on each task of the network before any training, for forward transfer.

    Raises:
        InputError: If rows are too short or hold no numbers.

    Source:
        Lopez-Paz and Ranzato, NeurIPS 2017 (average, backward and forward transfer); Chaudhry et al., ECCV
        2018 (forgetting).

    Example:
        >>> metrics = StreamMetrics()
        >>> metrics.record([0.9, 0.1])
        >>> metrics.record([0.7, 0.8])
        >>> round(metrics.average_accuracy(), 3), round(metrics.forgetting(), 3)
        (0.75, 0.2)
    """

    accuracy: list[list[float]] = field(default_factory=list)
    baseline: list[float] | None = None

    def __post_init__(self) -> None:
        rows, self.accuracy = self.accuracy, []
        given: Any = rows
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise InputError(
                f"accuracy is {type(rows).__name__}",
                expected="a list with a list of accuracies for each task learned",
                remedy="leave accuracy= out and call record() after every task",
            )
        for row in rows:
            self.record(row)
        if self.baseline is not None:
            self.baseline = _numbers("baseline", self.baseline)

    def record(self, accuracies: Sequence[float]) -> None:
        """Add the row of the task learned last.

        Args:
            accuracies: Accuracy on every task so far, in order; those on tasks to come may follow.

        Raises:
            InputError: If there are fewer than tasks learned, or one is no number.
        """
        row = _numbers("accuracies", accuracies)
        learned = len(self.accuracy) + 1
        if len(row) < learned:
            raise InputError(
                f"accuracies has {len(row)} entries after {learned} tasks",
                expected="one for each task learned, in order",
                remedy="evaluate all tasks so far after each one",
            )
        self.accuracy.append(row)

    @property
    def plot(self) -> StreamPlots:
        """Plots, which take matplotlib axes: ``metrics.plot.accuracy(ax)``."""
        return StreamPlots(self)

    @property
    def tasks(self) -> int:
        """T, number of tasks learned."""
        return len(self.accuracy)

    def average_accuracy(self) -> float:
        """1/T Σ_i R[T][i], over the tasks learned.

        Returns:
            The mean.

        Raises:
            InputError: If nothing has been recorded.
        """
        t = self._require(1)
        return sum(self.accuracy[-1][:t]) / t

    def averages(self) -> list[float]:
        """The average accuracy after each task, over those learned by then.

        Returns:
            T numbers.
        """
        return [sum(row[: t + 1]) / (t + 1) for t, row in enumerate(self.accuracy)]

    def forgetting(self) -> float:
        """1/(T−1) Σ_{i<T} (max_{i≤t<T} R[t][i] − R[T][i]): the drop from the best so far.

        Returns:
            The mean drop; negative if old tasks have improved.

        Raises:
            InputError: If there are fewer than two tasks.
        """
        t = self._require(2)
        drops = [
            max(self.accuracy[k][i] for k in range(i, t - 1)) - self.accuracy[-1][i] for i in range(t - 1)
        ]
        return sum(drops) / (t - 1)

    def backward_transfer(self) -> float:
        """1/(T−1) Σ_{i<T} (R[T][i] − R[i][i]): what later tasks did to earlier ones.

        Returns:
            The mean; negative means forgetting.

        Raises:
            InputError: If there are fewer than two tasks.
        """
        t = self._require(2)
        return sum(self.accuracy[-1][i] - self.accuracy[i][i] for i in range(t - 1)) / (t - 1)

    def forward_transfer(self) -> float:
        """1/(T−1) Σ_{i>1} (R[i−1][i] − b[i]): what earlier tasks did for later ones before they were trained.

        Returns:
            The mean.

        Raises:
            InputError: If there are fewer than two tasks, no baseline, or rows that stop too early.
        """
        t = self._require(2)
        baseline = self.baseline or []
        if len(baseline) < t or any(len(self.accuracy[i - 1]) <= i for i in range(1, t)):
            raise InputError(
                "forward_transfer() without accuracies on tasks before they were trained",
                expected=f"a baseline of {t} tasks, and rows that reach one task ahead",
                remedy="record all tasks in every row and pass baseline=",
            )
        return sum(self.accuracy[i - 1][i] - baseline[i] for i in range(1, t)) / (t - 1)

    def to_dict(self) -> dict[str, Any]:
        """Everything that can be said, for JSON.

        Returns:
            The matrix and its summaries; those that need more tasks or a baseline are ``None``.
        """
        return {
            "accuracy": [list(row) for row in self.accuracy],
            "baseline": None if self.baseline is None else list(self.baseline),
            "averages": self.averages(),
            "average_accuracy": _known(self.average_accuracy),
            "forgetting": _known(self.forgetting),
            "backward_transfer": _known(self.backward_transfer),
            "forward_transfer": _known(self.forward_transfer),
        }

    def _require(self, tasks: int) -> int:
        """T, if it is large enough."""
        if self.tasks < tasks:
            raise InputError(
                f"{self.tasks} tasks are recorded",
                expected=f"at least {tasks}",
                remedy="call record(accuracies)",
            )
        return self.tasks


def _known(summary: Callable[[], float]) -> float | None:
    """A summary, if there is enough to sum up."""
    try:
        return summary()
    except InputError:
        return None


def _numbers(name: str, values: Sequence[float]) -> list[float]:
    """A list of finite floats."""
    expected = "a list of finite numbers, at least one"
    found = tensor(name, values, expected, "pass the accuracy on every task, such as [0.9, 0.8]")
    if isinstance(values, bytes) or found.ndim != 1 or not found.numel() or found.dtype == torch.bool:
        refuse(name, values, expected, "pass the accuracy on every task, such as [0.9, 0.8]")
    return [number(name, value, remedy="look for NaN in the predictions") for value in found.tolist()]


class StreamPlots(Plots):
    """``metrics.plot`` of a stream of tasks."""

    def accuracy(self, ax: Axes | None = None) -> Display:
        """The accuracy on each task from when it was learned, and the average over those learned."""
        rows = self._of.accuracy
        if not rows:
            raise InputError("0 tasks are recorded", "at least 1", "call record(accuracies) after every task")
        learned = np.arange(1, len(rows) + 1)
        lines = {"average": (learned, np.array(self._of.averages()))}
        for task in range(len(rows)):
            lines[f"task {task + 1}"] = (learned[task:], np.array([row[task] for row in rows[task:]]))
        return Display(panels.lines, lines=lines, xlabel="tasks learned", ylabel="accuracy").plot(ax)
