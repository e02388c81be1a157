"""What shifts do to a fit: leave-one-out of training examples that are altered, for the price of predictions.

An altered training example is judged by the fit that has not seen the example at all, in closed form. Its
label is known, so that the accuracy under a shift is too, before any such data come and without labels of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet.audit.left_out import EXAMPLES, Reference, check_left_out
from linnet.errors import DataError, InputError
from linnet.fitting.fitted import Fitted
from linnet.params import refuse
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.modes import in_exact_mode

Shifts = Mapping[str, Callable[[Any], Any] | Any]


@dataclass(frozen=True, eq=False, repr=False)
class Stressed(Record):
    """What a fit is worth under a shift; ``stress_test`` makes it."""

    shift: str | None  # None: the examples as they are
    n: int  # training examples that were altered
    accuracy: float | None  # share of right predictions; None for a regression
    rms_error: float | None  # root mean square error of an output; None for classes
    standard_error: float  # of either, by the draw of the training examples
    change: float  # of either by the shift
    change_error: float  # standard error of the change, whose examples are the same before and after


def references(fit: Fitted, known: Reference, shifts: Shifts) -> list[Reference]:
    """What is said under each shift of training examples that were not seen, of at most ``EXAMPLES``."""
    if not isinstance(shifts, Mapping) or not shifts or not all(isinstance(name, str) for name in shifts):
        refuse("shifts", shifts, "a dict of functions or of altered training inputs by name",
               'pass {"noise": lambda x: x + 0.1 * torch.randn_like(x)}')  # fmt: skip
    if known.left is None:
        raise InputError(
            "shifts= of a fit with a cross-fitted head or trained layers",
            expected="a fit with a closed form for each example left out",
            remedy="fit with linnet.fit, or linnet.adapt(..., tune=False) and a head that saw no label",
        )
    at = _some(fit)
    return [known.altered(fit, name, _altered(fit, name, change, at), at) for name, change in shifts.items()]


def _some(fit: Fitted) -> Tensor:
    """Positions of the training examples that are altered."""
    return torch.randperm(fit.n, generator=torch.Generator().manual_seed(0))[:EXAMPLES].sort().values


def _altered(fit: Fitted, name: str, change: Any, at: Tensor) -> Inputs:
    """Training examples at some positions under a shift."""
    given, argument = change(take(fit.x, at)) if callable(change) else change, f"shifts[{name!r}]"
    if not isinstance(given, Tensor | np.ndarray | Mapping | Sequence) or isinstance(given, str):
        refuse(argument, given, "a function of inputs, or inputs", "return altered inputs")
    x, count = fit._examples(given, argument), len(at) if callable(change) else fit.n
    if batch_size(x) != count:
        expected = f"the {count} training examples, altered, in their order"
        remedy = "alter each of them, and leave none out"
        raise DataError(f"{argument} has {batch_size(x)} examples", expected, remedy)
    return x if callable(change) else take(x, at)


@in_exact_mode
@torch.no_grad()
def stress_test(fit: Fitted, shifts: Shifts) -> list[Stressed]:
    """How good a fit is under shifts that its inputs may meet: noise, another camera, typing errors.

    Every training example is altered and judged by the fit that has not seen that example, neither altered
    nor as it is: exact for the squared loss, by one Newton step for the cross-entropy. On examples that come
    altered in the same way the accuracy is the same but for the draw. It is known before they come; which
    batches they are, and what to expect of them, is asked with ``fit.monitor(batches, shifts=shifts)``.

    Args:
        fit: A fit of ``linnet.adapt`` or ``linnet.fit``, of either loss, with one class or target (C,) for
            each example, neither with a cross-fitted head nor with trained layers.
        shifts: By name, a function of a batch of inputs as the network takes them, which keeps their order;
            or the N training inputs, altered, in the form in which the fit takes inputs.

    Returns:
        A record for the examples as they are, whose ``shift`` is ``None``, and one for each shift:
        ``accuracy`` or ``rms_error`` with ``standard_error``, and the paired ``change`` with its
        ``change_error``. Beyond 2,000 training examples, as many of them, drawn at random.

    Raises:
        InputError: If ``shifts`` is no dict of names, or the fit has no closed form for examples left out.
        DataError: If altered examples are not as many as the training examples, or are not finite.

    Example:
        >>> import linnet
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> fit = linnet.adapt(torch.nn.Linear(2, 2), (x, (x[:, 0] > 0).long()))
        >>> calm, turned = stress_test(fit, {"other way round": lambda x: -x})
        >>> calm.accuracy > 0.9, turned.accuracy < 0.2
        (True, True)
    """
    fit = check_left_out(fit, "stress_test()")
    known = Reference.of(fit)
    under = references(fit, known, shifts)
    calm = known.right[_some(fit).to(known.right.device)]
    return [_record(fit, None, calm, calm), *(_record(fit, one.shift, one.right, calm) for one in under)]


def _record(fit: Fitted, shift: str | None, right: Tensor, calm: Tensor) -> Stressed:
    """What is known under a shift, from what is right, or squared errors, under it and without it."""
    n = len(right)

    def spread(values: Tensor) -> float:
        return float(values.std(correction=0) / n**0.5)

    if fit.labels is not None:
        change = right - calm
        return Stressed(
            shift, n, float(right.mean()), None, spread(right), float(change.mean()), spread(change)
        )
    rms, before = (max(float(one.mean()), 1e-300) ** 0.5 for one in (right, calm))
    # d√m = dm / 2√m
    change = right / (2 * rms) - calm / (2 * before)
    return Stressed(shift, n, None, rms, spread(right) / (2 * rms), rms - before, spread(change))
