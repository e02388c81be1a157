"""Backward compatibility: negative flips between two fits, and fits constrained to have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import check_fit, class_labels, outputs_of
from linnet.errors import InputError
from linnet.fitting.linear_fit import LinearFit
from linnet.params import integer, number
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.door import tensorize


@dataclass(frozen=True, repr=False)
class Flips(Record):
    """Answers that changed from one predictor to another.

    Args:
        negative: Examples that were right and are wrong now, (k,).
        positive: Examples that were wrong and are right now, (k,).
        accuracy_before: Share of right answers before.
        accuracy_after: Share of right answers after.
        examples: Number of examples.

    Example:
        >>> import linnet
        >>> old, new = torch.eye(3), torch.eye(3)[[0, 2, 2]]
        >>> linnet.audit.flips(old, new, torch.zeros(3, 1), [0, 1, 2]).negative
        tensor([1])
    """

    negative: Tensor
    positive: Tensor
    accuracy_before: float
    accuracy_after: float
    examples: int

    @property
    def negative_rate(self) -> float:
        """Share of all examples that were right and are wrong now."""
        return len(self.negative) / self.examples

    @property
    def positive_rate(self) -> float:
        """Share of all examples that were wrong and are right now."""
        return len(self.positive) / self.examples

    @property
    def relative_negative_rate(self) -> float:
        """The negative rate over that of an independent predictor of the same accuracy; 0 without errors."""
        chance = self.accuracy_before * (1 - self.accuracy_after)
        return self.negative_rate / chance if chance > 0 else 0.0

    def __str__(self) -> str:
        """The figures in one line."""
        return (
            f"accuracy {self.accuracy_before:.1%} -> {self.accuracy_after:.1%}; "
            f"{len(self.negative)} negative flip(s) ({self.negative_rate:.1%}), "
            f"{len(self.positive)} positive ({self.positive_rate:.1%}) of {self.examples}"
        )


def flips(before: Any, after: Any, x: Inputs, y: Any) -> Flips:
    """Count the predictions that an update made wrong, and those that it made right.

    Args:
        before: A fit, a network, a function of x, or outputs (N, C).
        after: Likewise.
        x: N examples.
        y: Their classes, (N,).

    Returns:
        The flips.

    Raises:
        InputError: If a predictor or the labels do not fit the examples.

    Source:
        Yan et al., "Positive-congruent training: towards regression-free model updates", CVPR 2021.

    Example:
        >>> old, new = torch.eye(3), torch.eye(3)[[0, 2, 2]]
        >>> print(flips(old, new, torch.zeros(3, 1), [0, 1, 2]))
        accuracy 100.0% -> 66.7%; 1 negative flip(s) (33.3%), 0 positive (0.0%) of 3
    """
    x = tensorize(x)
    old, new = outputs_of(before, x, "before"), outputs_of(after, x, "after")
    if old.shape != new.shape or old.shape[1] < 2 or not len(old):
        raise InputError(
            f"before gives outputs {tuple(old.shape)}, after {tuple(new.shape)}",
            expected="outputs of the same classes, two at least, for one example or more",
            remedy="compare predictors of one task",
        )
    labels = class_labels(y, len(old), old.shape[1], before, after)
    was = old.argmax(1).cpu() == labels.cpu()
    now = new.argmax(1).cpu() == labels.cpu()
    return Flips(
        (was & ~now).nonzero()[:, 0],
        (~was & now).nonzero()[:, 0],
        float(was.double().mean()),
        float(now.double().mean()),
        len(old),
    )


@dataclass(frozen=True, repr=False)
class Compatible(Record):
    """A fit that loses few of the old right answers, or none.

    Args:
        fit: The fit under its equations.
        before: Flips of the fit as it was.
        after: Flips of the fit under its equations.
        pinned: Examples whose outputs are held at the old ones, (k,).
        rounds: Rounds of pinning.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x, y = torch.randn(8, 2), torch.arange(8) % 2
        >>> fit = linnet.fit(linnet.linearize(net), (x, y))
        >>> found = linnet.audit.compatible(fit.forget([0]), x, fit, y)
        >>> found.after.negative_rate
        0.0
    """

    fit: LinearFit
    before: Flips
    after: Flips
    pinned: Tensor
    rounds: int

    def _shown(self) -> dict[str, Any]:
        held = {"outputs held": len(self.pinned), "rounds": self.rounds}
        return {"examples": self.fit.n, **held, "before": self.before, "after": self.after}


def compatible(
    fit: LinearFit,
    x: Inputs,
    old_outputs: Any,
    y: Any,
    weight: float | None = None,
    *,
    pin: str = "flips",
    rounds: int = 20,
) -> Compatible:
    """Make a new fit keep the right answers of an old one.

    With ``pin="flips"`` only those right answers are held, at the old outputs, that the fit would take
    back; holding them moves other outputs a little, so this is repeated until none is taken back. The
    old outputs should be on the scale of the fit's: those of an earlier fit, or of the network itself.

    Args:
        fit: The new fit.
        x: N examples on which answers must not get worse.
        old_outputs: Old outputs (N, C), or the old predictor.
        y: Their classes, (N,).
        weight: Weight of a penalty instead of an exact hold: fewer changes elsewhere, perhaps some flips.
        pin: ``"flips"``, or ``"correct"`` to hold every old right answer.
        rounds: Most rounds of pinning.

    Returns:
        The fit, what flipped before and after, and what is held.

    Raises:
        InputError: If an argument does not fit the examples, or no hold is possible.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(12, 2), torch.arange(12) % 3
        >>> old = linnet.fit(linnet.linearize(net), (x[:8], y[:8]))
        >>> compatible(old.update((x[8:], y[8:])), x, old, y).after.negative_rate
        0.0
    """
    check_fit(fit)
    if pin not in ("flips", "correct"):
        raise InputError(f"pin={pin!r}", expected='"flips" or "correct"', remedy='leave pin= out for "flips"')
    integer("rounds", rounds)
    if weight is not None:
        number("weight", weight, above=0)
    x = tensorize(x)
    old = outputs_of(old_outputs, x, "old_outputs")
    if old.shape[1] != fit.system.c:
        raise InputError(
            f"old_outputs has {old.shape[1]} outputs but the fit has {fit.system.c}",
            expected=f"outputs ({batch_size(x)}, {fit.system.c}) on the scale of the fit's",
            remedy="give both predictors the same classes in the same order",
        )
    if not old.is_floating_point():
        raise InputError(
            f"old_outputs has type {old.dtype}", expected="outputs, not classes", remedy="pass old.predict(x)"
        )
    before = after = flips(old, fit, x, y)
    labels = class_labels(y, len(old), old.shape[1], fit)
    right = old.argmax(1).cpu() == labels.cpu()
    made, done = fit, 0
    pinned = torch.zeros(len(old), dtype=torch.bool)
    while done < rounds:
        wanted = right if pin == "correct" else pinned | _mask(after.negative, len(old))
        if bool((wanted == pinned).all()):
            break
        pinned, done = wanted, done + 1
        index = pinned.nonzero()[:, 0].to(old.device)
        # from the fit as it was: the equations of an earlier round are among these
        made = fit.constrain(take(x, index), old[index], weight=weight)
        after = flips(old, made, x, y)
    return Compatible(made, before, after, pinned.nonzero()[:, 0], done)


def _mask(index: Tensor, n: int) -> Tensor:
    """Positions as a mask."""
    mask = torch.zeros(n, dtype=torch.bool)
    mask[index] = True
    return mask
