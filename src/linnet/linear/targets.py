"""Regression targets: α-scaled one-hot vectors for classes, values as they are for regression.

A fit of the cross-entropy has probabilities as targets: one-hot vectors with α = 1, or soft labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.memory import Plan, parse_bytes, require
from linnet.params import number, refuse, tensor
from linnet.tangent.batch import IGNORED, require_some
from linnet.tree import node

ALPHA = 15.0  # Achille et al., CVPR 2021, eq. (3)
# what to do with integers where the network has one output
ONE = "pass y.float() for values; for classes give the network one output each with linnet.with_head"
NUMBERED = "torch.unique(y, return_inverse=True)[1] numbers those that occur"
CLASSES, VALUES = "integer y are taken as", "y is of float type"  # how doubts begin
UNSEEN = 1_000  # classes without a sample, beyond which labels are years or names: each costs an output


@dataclass(frozen=True)
class OneHot:
    """Targets made from classes: α for the right one, 0 for the others.

    Args:
        scale: α.

    Raises:
        InputError: If α is no positive number.

    Source:
        Achille et al. 2021, section 3.1 (α = 15).

    Example:
        >>> OneHot(1.0).scale
        1.0
    """

    scale: float = ALPHA

    def __post_init__(self) -> None:
        """Raise on values that cannot be."""
        number("scale", self.scale, above=0, remedy="leave scale= out for α = 15")


@node()
@dataclass(frozen=True)
class Targets:
    """Targets of a fit."""

    values: Tensor  # t, (N, C)
    classes: int | None  # C if the targets are classes, otherwise ``None``
    scale: float  # α of one-hot targets
    # the axis of the outputs that is the classes, where every position has a class of its own
    axis: int | None = None
    weights: Tensor | None = None  # of the examples in the loss, (N,), float64; ``None`` for ones

    @property
    def labels(self) -> Tensor | None:
        """Class indices (N,), or ``None`` for regression; the likeliest where labels are probabilities."""
        if self.classes is None:
            return None
        if self.values.shape[1] == 1 and self.classes == 2:  # one output for two classes
            return (self.values[:, 0] > 0.5).long()
        return self.values.argmax(1)

    def taken(self, rows: Tensor) -> Targets:
        """Those of some of the examples."""
        rows = rows.to(self.values.device)
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, values=self.values[rows], weights=weights)

    def joined(self, more: Targets) -> Targets:
        """These, and more after them."""
        weights = None if self.weights is None else torch.cat([self.weights, more.every_weight])
        return replace(self, values=torch.cat([self.values, more.values.to(self.values)]), weights=weights)

    @property
    def every_weight(self) -> Tensor:
        """Weights of the examples in the loss, (N,)."""
        return (
            torch.ones_like(self.values[:, 0], dtype=torch.float64) if self.weights is None else self.weights
        )

    @property
    def seen(self) -> Tensor | None:
        """The classes that have a sample, in order; ``None`` for all, and for regression."""
        labels = self.labels
        if labels is None:
            return None
        found: Tensor = labels.unique()
        return None if len(found) == self.classes else found


def make_targets(
    y: Tensor, outputs: int, scale: float = ALPHA, varied: bool = True, dtype: torch.dtype | None = None
) -> Targets:
    """Targets for a network with C outputs, (N, C)."""
    # y (N,)
    # Source: Achille et al., CVPR 2021, section 3.1 (α = 15).
    if y.dtype == torch.bool or y.is_complex():
        several = y.dtype == torch.bool and y.shape[1:].numel() > 1
        raise InputError(
            f"y has type {y.dtype}",
            expected="integer classes (N,) or float targets (N, C)",
            remedy="pass y.float(), or y.astype(float) of an array, for outputs that are yes or no under the "
            "squared loss; y.long().argmax(1) for one-hot labels"
            if several
            else "convert classes with y.long(), regression values with y.float()",
        )
    if y.is_floating_point():
        return Targets(_regression(y, outputs), None, scale)
    labels = y.long()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise InputError(
            f"y has shape {tuple(y.shape)}",
            expected="one integer class for each example, (N,)",
            remedy="pass axis= to linnet.fit for a class at every position, axis=-1 for outputs (N, T, C); "
            "y.argmax(1) for one-hot labels, or y.float() for targets (N, C)",
        )
    require_some(labels, "y")
    negative = labels < 0
    if negative.any():
        first = int(negative.nonzero()[0])
        raise DataError(
            f"y holds {int(negative.sum())} negative label(s), first {int(labels[first])} at index {first}",
            expected="classes numbered from 0",
            remedy="number them with torch.unique(y, return_inverse=True)[1]",
        )
    wrong = labels > outputs - 1  # 2⁶³ outputs: beyond int64, 2⁶³ − 1 is not
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"y holds {int(wrong.sum())} label(s) out of range, first {int(labels[first])} at index {first}",
            expected=f"classes 0 to {outputs - 1}, because the network has {outputs} outputs",
            remedy=ONE
            if outputs == 1
            else "give the network a head of the right size, "
            f"linnet.with_head(model, classes={int(labels.max()) + 1}), or number the classes that there are "
            "from 0, torch.unique(y, return_inverse=True)[1]",
        )
    if varied and (labels == labels[0]).all():
        raise DataError(
            f"y holds one class only ({int(labels[0])})",
            expected="examples of at least two classes",
            remedy="add examples of another class, or pass float targets (N, C) for regression",
        )
    dtype = dtype or torch.get_default_dtype()
    _require_room(labels, outputs, dtype)
    one_hot = torch.nn.functional.one_hot(labels, outputs).to(dtype)
    return Targets(scale * one_hot, outputs, scale)


def weighed_targets(targets: Targets, given: Any) -> Targets:
    """Targets of which some count more than others: by a number each, or those of every class as much."""
    # given (N,)
    if given is None:
        return targets
    values, labels = targets.values, targets.labels
    expected = f"{len(values)} positive numbers, one an example" + ', or "balanced"' * (labels is not None)
    remedy = (
        "leave out the examples that are not to count" if labels is None else 'pass "balanced", or numbers'
    )
    if isinstance(given, str):
        if given != "balanced" or labels is None:
            refuse("sample_weight", given, expected, "leave it out for examples that count alike")
        counts = labels.bincount()
        found = len(labels) / (len(labels.unique()) * counts[labels].double())
        return replace(targets, weights=found)
    found = tensor("sample_weight", given, expected, remedy).detach()
    number_like = not (found.is_complex() or found.dtype == torch.bool)
    if not number_like or found.shape != values[:, 0].shape:
        raise InputError(
            f"sample_weight has type {found.dtype} and shape {tuple(found.shape)}",
            expected,
            "pass one number an example",
        )
    found = found.to(values.device, torch.float64)
    wrong = ~((found > 0) & found.isfinite())
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise InputError(f"sample_weight holds {float(found[first]):g} at index {first}", expected, remedy)
    return replace(targets, weights=found)


def task_targets(y: Tensor, dtype: torch.dtype) -> Targets:
    """Targets of a task with as many outputs as it needs."""
    # y (N,)
    if len(y) < 2:
        raise DataError(
            "data hold a single example", expected="two examples or more", remedy="give more examples"
        )
    if y.is_floating_point():
        return make_targets(y, 1 if y.ndim == 1 else y[0].numel(), dtype=dtype)
    classes = int(y.max()) + 1 if y.numel() and not (y.dtype == torch.bool or y.is_complex()) else 1
    if classes > UNSEEN + y.numel():
        raise DataError(
            f"y holds the label {classes - 1}, and {y.unique().numel()} different ones",
            expected="classes numbered from 0 without gaps",
            remedy=f"{NUMBERED}; pass y.float() for values",
        )
    return make_targets(y, max(classes, 2), ALPHA, dtype=dtype)


def check_names(names: tuple[str, ...], outputs: int) -> None:
    """Raise if classes that have names are not the outputs of a network."""
    if names and len(names) != max(outputs, 2):
        raise DataError(
            f"y names {len(names)} classes, {', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}",
            expected=f"{max(outputs, 2)} names, one for each of the network's outputs in alphabetical order",
            remedy="number them as the network's outputs are, or pass a network with a head for them",
        )


def understood(targets: Targets) -> str:
    """What y was taken for."""
    if targets.classes is None:
        return f"{targets.values.shape[1]} value(s)"
    seen = targets.seen
    gaps = "" if seen is None else f", {targets.classes - len(seen)} of them without a sample"
    return f"{targets.classes} classes{gaps}"


def doubts(y: Tensor, targets: Targets, outputs: int | None) -> tuple[str, ...]:
    """Why y is probably something else than what its type says."""
    if targets.classes is not None:
        return _doubted_classes(targets, outputs)
    flat, said = targets.values, "taken as values; pass y.long() for classes"
    if flat.shape[1] > 1:
        hot = bool(((flat == 0) | (flat == 1)).all()) and bool((flat.sum(1) == 1).all())
        return (f"{VALUES}, with a single 1 in each row: {said.replace('long()', 'argmax(1)')}",) * hot
    whole = bool((flat == flat.round()).all()) and bool((flat >= 0).all()) and bool((flat <= 1).any())
    kinds = len(flat.unique()) if whole else 0
    binary = kinds == 2 and bool((flat <= 1).all())
    # a column (N, 1), and a network of one output, are how values are given
    numbers = whole and y.ndim == 1 and outputs != 1 and 2 * kinds <= len(flat)
    if not (binary or numbers):
        return ()
    return (f"{VALUES} and holds {kinds} different whole numbers: {said}",)


def _doubted_classes(targets: Targets, outputs: int | None) -> tuple[str, ...]:
    """Why integers are probably no classes, or not numbered as classes."""
    n, classes, seen = len(targets.values), targets.classes, targets.seen
    assert classes is not None
    said = f"{CLASSES} {classes} classes"
    if outputs == 1 and classes > 2:
        return (f"{said}, and the network has one output: pass y.float() for values",)
    if classes > n:
        return (f"{said} for {n} samples: {NUMBERED}; pass y.float() for values",)
    if seen is not None:
        return (
            f"{said}, {classes - len(seen)} of them without a sample, which are never predicted: {NUMBERED}",
        )
    return ()


def position_targets(
    y: Tensor, own: Sequence[int], axis: int | None, scale: float = ALPHA, some: bool = True
) -> tuple[Tensor, Tensor | None]:
    """One-hot targets for a class at every position, such as a token or a pixel."""
    # y (N, ...)
    if axis is None:
        return y, None
    shape = (len(y), *own)
    place = _place(axis, shape)
    if y.is_floating_point():
        return y, None
    labels = position_labels(y, own, axis, some)
    counted = labels != IGNORED
    one_hot = torch.nn.functional.one_hot(labels.clamp_min(0), shape[place]) * counted[..., None]
    targets = scale * one_hot.to(torch.get_default_dtype()).movedim(-1, place)
    return targets, None if counted.all() else counted.unsqueeze(place).expand(shape)


def _place(axis: int, shape: Sequence[int]) -> int:
    """The axis of outputs of a shape that holds classes, counted from the front."""
    place = axis + len(shape) if axis < 0 else axis
    if not 0 < place < len(shape):
        expected = f"an axis of the outputs {tuple(shape)} that holds classes"
        refuse("axis", axis, expected, "pass axis=1 or axis=-1")
    return place


def position_labels(
    y: Tensor, own: Sequence[int], axis: int, some: bool = True, every: bool = False
) -> Tensor:
    """Classes of positions (N, ...) for outputs of a shape, checked; IGNORED where one does not count."""
    # y (N, ...); every: whether an example needs a position that counts
    shape = (len(y), *own)
    place = _place(axis, shape)
    expected = shape[:place] + shape[place + 1 :]
    if y.dtype == torch.bool or y.is_floating_point() or tuple(y.shape) != expected:
        raise InputError(
            f"y has type {y.dtype} and shape {tuple(y.shape)} with axis={axis} of outputs {shape}",
            expected=f"one integer class at every position, {expected}",
            remedy="check axis, which names the axis of the outputs that is the classes",
        )
    labels, classes = y.long(), shape[place]
    counted = labels != IGNORED
    wrong = counted & ((labels < 0) | (labels >= classes))
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        raise DataError(
            f"y holds {int(wrong.sum())} label(s) out of range, first {int(labels[wrong][0])} at {first}",
            expected=f"classes 0 to {classes - 1}, or {IGNORED} where a position does not count",
            remedy="check axis, which names the axis of the outputs that is the classes, and the labels",
        )
    if some and not counted.any():
        raise DataError(
            f"y holds {IGNORED} alone: no position counts",
            expected="classes at some of the positions",
            remedy="check how the labels were made",
        )
    empty = ~counted.reshape(len(y), -1).any(1)
    if every and empty.any():
        raise DataError(
            f"y holds {IGNORED} alone for {int(empty.sum())} example(s), first {int(empty.nonzero()[0])}",
            expected="a position that counts in each example",
            remedy="leave these examples out, or look whether the text was cut before its answer",
        )
    return labels


def _require_room(labels: Tensor, outputs: int, dtype: torch.dtype) -> None:
    """Raise if one column per class would not fit: one label of 10¹² asks for that many columns."""
    cells = len(labels) * outputs
    items = (
        ("as integers, one column per class", 8 * cells),
        ("as numbers, before and after scaling", 2 * dtype.itemsize * cells),
    )
    name = f"one-hot targets of {outputs} classes for {len(labels)} examples"
    require(
        Plan(name, parse_bytes(None, labels.device), items),
        ["number the classes from 0 without gaps, as y.unique(return_inverse=True)[1] does", "free memory"],
    )


def check_arrangement(y: Tensor, own: Sequence[int], name: str = "y") -> None:
    """Raise if targets are not arranged like the outputs: values in several axes, or classes of positions."""
    if not y.is_floating_point() and y.ndim == 1 and sum(size > 1 for size in own) > 1:
        raise InputError(
            f"{name} has one class for each example, and the network outputs {tuple(own)} for each",
            expected="one output for each class, (N, C)",
            remedy="for texts give linnet.adapt the encoder, as model.base_model of transformers is; axis= "
            "says where the classes are if every position has one; output= takes a part of the outputs",
        )
    given = [size for size in y.shape[1:] if size > 1]
    if y.is_floating_point() and y.ndim > 2 and given != [size for size in own if size > 1]:
        raise InputError(
            f"{name} has shape {tuple(y.shape)} but the network has outputs {tuple(own)} for one example",
            expected=f"(N, {', '.join(map(str, own))}), or (N, {math.prod(own)}) with those axes joined",
            remedy="bring the axes of the targets into the order of the network's outputs",
        )


def _regression(y: Tensor, outputs: int) -> Tensor:
    """Float targets as (N, C)."""
    values = y[:, None] if y.ndim == 1 else y.reshape(y.shape[0], -1)
    if values.shape[1] != outputs:
        raise InputError(
            f"y has shape {tuple(y.shape)} but the network has {outputs} outputs",
            expected=f"float targets (N, {outputs}), or integer classes (N,)",
            remedy="convert class labels to integers with y.long(), or give the network a head of that size",
        )
    require_finite_rows(values, "finite targets")
    return values


def require_finite_rows(values: Tensor, expected: str) -> None:
    """Raise ``DataError`` naming the first example whose targets are not finite."""
    # values (N, C)
    finite = torch.isfinite(values).all(1)
    if not finite.all():
        raise DataError(
            f"y is not finite at index {int((~finite).nonzero()[0])}",
            expected=expected,
            remedy="drop or repair these examples",
        )
