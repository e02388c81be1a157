"""The settings of a training run that several functions share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from linnet.errors import InputError
from linnet.params import choice, instance, integer, number

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training run; each function says what it takes for those that are left out.

    Args:
        learning_rate: η at the start.
        weight_decay: λ: ½ λ‖δ‖² is added to the mean loss, of a linear model's δ or a network's weights.
        batch_size: Examples a step; all of them if there are fewer.
        steps: Number of steps, or
        epochs: Passes over the data.
        momentum: Of SGD, or β₁ of Adam.
        schedule: ``"constant"``, or ``"cosine"`` down to zero.
        clip: Largest norm of the whole gradient, after preconditioning.

    Raises:
        InputError: If a value does not work, or both ``steps`` and ``epochs`` are given.

    Example:
        >>> Training(learning_rate=0.01, steps=100).given
        {'learning_rate': 0.01, 'steps': 100}
    """

    learning_rate: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    momentum: float | None = None
    schedule: str | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            found: Any
            if name in ("learning_rate", "clip"):
                found = number(name, value, above=0)
            elif name == "weight_decay":
                found = number(name, value, least=0)
            elif name == "momentum":
                found = number(name, value, least=0, below=1)
            elif name == "schedule":
                found = choice(name, value, SCHEDULES)
            else:
                found = integer(name, value)
            object.__setattr__(self, name, found)
        if self.steps is not None and self.epochs is not None:
            raise InputError(
                f"steps={self.steps} and epochs={self.epochs}",
                expected="the length of a run once, in steps or in passes over the data",
                remedy="leave one of them out",
            )

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not left out, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def filled(training: Training | None, caller: str, **defaults: Any) -> Training:
    """Settings with a function's own values for what is left out."""
    own = Training() if training is None else training
    instance("training", own, Training, "a linnet.Training", "pass training=linnet.Training(steps=100)")
    for name, value in own.given.items():
        if name not in defaults:
            raise InputError(
                f"{name}={value!r} in the training= of {caller}",
                expected=f"settings that it uses: {', '.join(defaults)}",
                remedy=f"leave {name}= out",
            )
    length = {"steps", "epochs"} if own.steps or own.epochs else set()
    return replace(own, **{k: v for k, v in defaults.items() if k not in {*own.given, *length}})
