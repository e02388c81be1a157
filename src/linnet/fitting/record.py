"""Metadata of a fit: size, solver, ridge and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Record:
    """Choices of a fit, their reasons and costs."""

    solver: str  # ``"dual"``, ``"primal"``, ``"cg"`` or ``"sgd"``
    criterion: str  # how the ridge was chosen: ``"given"``, ``"loo"``, ``"gcv"`` or ``"evidence"``
    reasons: dict[str, str] = field(default_factory=dict)  # one sentence for each choice
    warnings: tuple[str, ...] = ()  # what a reader of the numbers must know
    seconds: dict[str, float] = field(default_factory=dict)  # time of each step
    classes: tuple[str, ...] = ()  # names of the classes in the order of the outputs, where y was text
    columns: tuple[str, ...] = ()  # names of the inputs, where x was a data frame
    noise_factor: float = 1.0  # by what σ² was raised since the ridge was chosen by the same data

    @classmethod
    def read(cls, told: dict[str, Any]) -> Record:
        """A record as it was written."""
        listed = {name: tuple(told.get(name, ())) for name in ("warnings", "classes", "columns")}
        return cls(**{**told, **listed})
