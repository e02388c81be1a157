"""What shifts do to a fit: leave-one-out of training examples that are altered.

An altered training example is judged by the fit that has not seen the example at all, in closed form. Its
label is known, so that the accuracy under a shift is too, before any such data come and without labels of
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet.audit.left_out import EXAMPLES, Reference, check_left_out
from linnet.errors import DataError, InputError, LinnetError
from linnet.fitting.fitted import Fitted
from linnet.fitting.remarks import HEAD
from linnet.params import refuse, warn
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.modes import in_exact_mode, random_kept
from linnet.tree import map_tensors

REMEDY = 'pass {"noise": lambda x: x + 0.1 * torch.randn_like(x)}'
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
    if not isinstance(shifts, Mapping) or not all(isinstance(name, str) and name for name in (shifts or [0])):
        refuse("shifts", shifts, "a dict of functions or of altered training inputs by name", REMEDY)
    if isinstance(fit.x, Mapping) and not {*shifts}.isdisjoint(fit.x):
        refuse("shifts", [*shifts], "names of shifts; these are parts of an input", 'pass {"typos": inputs}')
    if fit.held_out is not None:
        raise InputError(
            "shifts= of a fit with a cross-fitted head or trained layers",
            expected="a fit with a closed form for each example left out",
            remedy="fit with linnet.fit, or linnet.adapt(..., tune=False) and a head that saw no label",
        )
    if any(HEAD in remark for remark in fit.record.warnings):
        warn("the head has seen labels of training examples, under shifts too: accuracies are too high")
    at = _judges(fit)
    return [known.altered(fit, name, _altered(fit, name, change, at), at) for name, change in shifts.items()]


def _judges(fit: Fitted) -> Tensor:
    """Positions of the training examples that are altered, whose classes have other examples too."""
    order = torch.randperm(fit.n, generator=torch.Generator().manual_seed(0))
    if fit.labels is not None:
        labels = fit.labels.cpu()
        order = order[labels.bincount()[labels[order]] > 1]
        if not len(order):
            raise InputError(
                "no class has two examples", "classes of which one can be left out", "label more"
            )
    return order[:EXAMPLES].sort().values


def _altered(fit: Fitted, name: str, change: Any, at: Tensor) -> Inputs:
    """Training examples at some positions under a shift."""
    given, argument = change, f"shifts[{name!r}]"
    if callable(change):
        with random_kept(), torch.enable_grad():
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002 - augmentations draw from it
            given = change(take(fit.x, at))
    try:
        x = map_tensors(Tensor.detach, fit._examples(given, argument))
    except LinnetError as error:
        if argument in error.what:
            raise
        raise type(error)(f"{argument}: {error.what}", error.expected, error.remedy) from error
    count = len(at) if callable(change) else fit.n
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
    nor as it is: exact for the squared loss, by one Newton step for the cross-entropy. On new examples that
    come altered in the same way the accuracy is the same but for the draw, as far as leave-one-out is honest:
    where the network itself was trained on these examples it is too high, altered or not. Each example is
    judged with one fewer of its class, which costs where classes have few. It is known before such data come;
    which batches they are, and what to expect of them, says ``fit.monitor(batches, shifts=shifts)``.

    Args:
        fit: A fit of ``linnet.adapt`` or ``linnet.fit``, of either loss, with one class or target (C,) for
            each example, neither with a cross-fitted head nor with trained layers.
        shifts: By name, a function of a batch of inputs as the network takes them, which keeps their order
            and returns them without targets; or the N training inputs, altered, in the form in which the fit
            takes inputs, such as texts that are tokenized again. Functions find the random numbers of torch
            (on the CPU), numpy and Python at the same place in every call.

    Returns:
        A record for the examples as they are, whose ``shift`` is ``None``, and one for each shift:
        ``accuracy`` or ``rms_error`` with ``standard_error``, and the paired ``change`` with its
        ``change_error``. Of examples whose class has others; beyond 2,000 as many of them, drawn at random.

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
    known = Reference.of(fit, spread=False)
    under = references(fit, known, shifts)
    calm = known.right[under[0].at]
    return [_record(fit, None, calm, calm), *(_record(fit, one.shift, one.right, calm) for one in under)]


def _record(fit: Fitted, shift: str | None, right: Tensor, calm: Tensor) -> Stressed:
    """What is known under a shift, from what is right, or squared errors, under it and without it."""
    n = len(right)

    def spread(values: Tensor) -> float:
        return float(values.std(correction=0) / n**0.5)

    if fit.labels is not None:
        change = right - calm
        likely = (float(right.sum()) + 1) / (n + 2)  # by which no error is zero (the rule of succession)
        error = (likely * (1 - likely) / n) ** 0.5
        return Stressed(shift, n, float(right.mean()), None, error, float(change.mean()), spread(change))
    rms, before = (float(one.mean()) ** 0.5 for one in (right, calm))
    slope, old_slope = (1 / (2 * max(one, 1e-150)) for one in (rms, before))  # d√m = dm / 2√m
    error, change_error = spread(right * slope), spread(right * slope - calm * old_slope)
    return Stressed(shift, n, None, rms, error, rms - before, change_error)
