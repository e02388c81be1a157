"""Metadata of a fit: size, solver, ridge and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Record:
    """Choices of a fit, their reasons and costs.

    Args:
        solver: ``"dual"``, ``"primal"``, ``"cg"`` or ``"sgd"``.
        criterion: How the ridge was chosen: ``"given"``, ``"loo"``, ``"gcv"`` or ``"evidence"``.
        reasons: One sentence for each choice.
        warnings: What a reader of the numbers must know.
        seconds: Time of each step.
    """

    solver: str
    criterion: str
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
