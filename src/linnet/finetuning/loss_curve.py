"""The training loss by epoch, and detection of learning rates that are too large."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

FEWEST = 10  # steps in a mean, however few examples there are
RISE = 0.2  # of the first mean, by which the last exceeds the lowest where it rises
OURS = ("linnet", "torch", "contextlib")  # packages whose lines are not the user's
SURE = 3.0  # standard errors, by which it exceeds it besides: batches differ


@dataclass
class LossCurve:
    """Means of the loss over windows of steps."""

    window: int  # steps in a window, at least two
    means: list[float] = field(default_factory=list)  # of the whole windows so far
    variances: list[float] = field(default_factory=list)  # squares of their standard errors
    losses: list[float] = field(default_factory=list)  # of the window that is not whole yet

    @classmethod
    def of(cls, examples: int, batch_size: int) -> LossCurve:
        """An empty curve whose windows are whole epochs."""
        epochs = math.ceil(FEWEST * batch_size / examples)
        return cls(math.ceil(epochs * examples / batch_size))

    def add(self, loss: float) -> None:
        """Take one step's loss."""
        self.losses.append(loss)
        if len(self.losses) == self.window:
            mean, variance = _mean(self.losses)
            self.means.append(mean)
            self.variances.append(variance)
            self.losses = []

    @property
    def rises(self) -> bool:
        """Whether the last mean is above the lowest by a fifth of the first, and for sure."""
        if len(self.means) < 2:
            return False
        last = self.means[-1]
        if 2 * len(self.losses) >= self.window:  # half a window says enough
            last = _mean(self.losses)[0]
        low = min(self.means)
        # the noise of batches; a loss that grows has a variance of its own, so the lowest window's counts
        error = math.sqrt(2 * self.variances[self.means.index(low)])
        return last - low > max(RISE * abs(self.means[0]), SURE * error)

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return asdict(self)


def warn_of_large_steps(learning_rate: float) -> None:
    """Tell the user, at the line that called this library, that the loss went up again."""
    warnings.warn(
        f"the training loss went up again with learning_rate={learning_rate:g}: the steps are too large for "
        "this problem, and the result is not to be trusted; pass a smaller learning_rate=, or leave it out",
        UserWarning,
        stacklevel=_calls_of_ours() + 1,
    )


def _calls_of_ours() -> int:
    """The number of calls up to the first line outside of this library and torch."""
    frame, calls = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in OURS:
        frame, calls = frame.f_back, calls + 1
    return calls


def _mean(losses: list[float]) -> tuple[float, float]:
    """The mean, and the square of its standard error."""
    n, mean = len(losses), math.fsum(losses) / len(losses)
    return mean, math.fsum((loss - mean) ** 2 for loss in losses) / (n * max(1, n - 1))
