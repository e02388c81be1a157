"""Report of iterative linearization: its feature updates and their measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linnet.shown import Record


@dataclass(frozen=True, repr=False)
class LinearizationReport(Record):
    """Feature updates and their measurements.

    Args:
        schedule: The schedule in words.
        steps: Optimization steps taken.
        updates: Steps after which the network was linearized again, in order.
        measured: (step, kind, value) of every measurement; kinds are ``"gap"`` (‖f − f_lin‖ / ‖f_lin − f₀‖),
            ``"drift"`` (kernel distance) and ``"gradient"`` (norm).
        notes: What a reader of the numbers must know.

    Example:
        >>> print(LinearizationReport("Every(4)", 9, (4, 8), ((4, "gap", 0.1), (8, "gap", 0.3))))
        Every(4): 9 steps, 2 feature updates, one in 4.0 steps
        gap: 2 measured, mean 0.2, largest 0.3 after step 8
    """

    schedule: str
    steps: int
    updates: Sequence[int]
    measured: tuple[tuple[int, str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def relinearizations(self) -> int:
        """Number of feature updates."""
        return len(self.updates)

    @property
    def gaps(self) -> tuple[tuple[int, float], ...]:
        """(step, linearity gap) of every measurement."""
        return tuple((step, value) for step, kind, value in self.measured if kind == "gap")

    @property
    def drifts(self) -> tuple[tuple[int, float], ...]:
        """(step, kernel distance) of every measurement."""
        return tuple((step, value) for step, kind, value in self.measured if kind == "drift")

    @property
    def mean_period(self) -> float | None:
        """Mean number of steps between updates; ``None`` without one."""
        return self.updates[-1] / len(self.updates) if self.updates else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        return {
            "schedule": self.schedule,
            "steps": self.steps,
            "relinearizations": self.relinearizations,
            "mean_period": self.mean_period,
            "updates": list(self.updates),
            "measured": [list(item) for item in self.measured],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A few lines for people."""
        period = self.mean_period
        often = "" if period is None else f", one in {period:.1f} steps"
        lines = [f"{self.schedule}: {self.steps} steps, {self.relinearizations} feature updates{often}"]
        for kind in dict.fromkeys(kind for _, kind, _ in self.measured):
            found = [(value, step) for step, k, value in self.measured if k == kind]
            mean, (largest, step) = sum(value for value, _ in found) / len(found), max(found)
            lines.append(
                f"{kind}: {len(found)} measured, mean {mean:.3g}, largest {largest:.3g} after step {step}"
            )
        return "\n".join([*lines, *self.notes])
