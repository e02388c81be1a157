"""Training: one loop for everything that takes steps, the orders of its batches, and its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.params import choice, instance, integer, number

SCHEDULES = ("constant", "cosine")
Batch = TypeVar("Batch")


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


def train(
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    gradient: Callable[[Batch], Any],
    rate: Callable[[int], float] | None = None,
    begin: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Take a step for each batch; after each, its number from ``begin`` and what ``gradient`` returned."""
    # `gradient` is a closure as of `torch.optim`: it leaves in `.grad` what the step takes, and runs with
    # gradients on. Whoever iterates may log, validate or keep the state between two steps, or stop.
    for step, batch in enumerate(batches, begin):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = gradient(batch)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.step()
        yield step, loss


def shuffled(n: int, size: int, source: torch.Generator | None) -> Iterator[Tensor]:
    """One epoch: positions of every example once, in random order, the last batch as short as it comes."""
    device = source.device if source else torch.device("cpu")
    yield from torch.randperm(n, generator=source, device=device).cpu().split(min(size, n))


def stream(n: int, size: int, order: Callable[[int], Tensor], begin: int = 0) -> Iterator[Tensor]:
    """Shuffled epochs one after the other, cut into equal batches, from a batch on; without end."""
    size = min(size, n)
    epoch, offset = divmod(begin * size, n)
    rows = order(epoch)[offset:]
    while True:
        while len(rows) < size:
            epoch += 1
            rows = torch.cat([rows, order(epoch)])
        yield rows[:size]
        rows = rows[size:]


def cosine(step: int, steps: int) -> float:
    """Share of the learning rate at a step of a schedule that ends at zero."""
    # Source: Loshchilov and Hutter 2017, eq. (5) without restarts
    return (1 + math.cos(math.pi * step / steps)) / 2
