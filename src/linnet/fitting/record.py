"""Metadata of a fit: size, solver, ridge and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Record:
    """Choices of a fit, their reasons and costs.

    Args:
        solver: ``"dual"``, ``"primal"``, ``"cg"`` or ``"sgd"``.
        criterion: How the ridge was chosen: ``"given"``, ``"loo"``, ``"gcv"`` or ``"evidence"``.
        reasons: One sentence for each choice.
        warnings: What a reader of the numbers must know.
        seconds: Time of each step.
        classes: Names of the classes in the order of the outputs, where y was text.
        noise_factor: By what σ² was raised since the ridge was chosen by the same data.
    """

    solver: str
    criterion: str
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    noise_factor: float = 1.0

    @classmethod
    def read(cls, told: dict[str, Any]) -> Record:
        """A record as it was written.

        Args:
            told: Its fields, lists for tuples.

        Returns:
            The record.
        """
        listed = {name: tuple(told.get(name, ())) for name in ("warnings", "classes")}
        return cls(**{**told, **listed})
