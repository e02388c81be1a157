"""Checks that every data set must pass, whatever file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linnet.errors import DataError, InputError

_SHOWN = 8  # names shown in an error


def check_finite(what: str, values: np.ndarray[Any, Any], ids: Sequence[str]) -> None:
    """Look for NaN and infinities."""
    if not np.issubdtype(values.dtype, np.inexact):
        return
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):  # one pass without memory, enough nearly always
            return
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if finite.all():  # the sum overflowed
        return
    bad = np.flatnonzero(~finite)
    raise DataError(
        f"{what} has NaN or infinite values in {len(bad)} of {len(values)} samples, first in {ids[bad[0]]}",
        expected="finite numbers",
        remedy="drop these samples or fill the gaps",
    )


def check_lengths(x_name: str, samples: int, y_name: str, answers: int) -> None:
    """Require as many answers as samples, and at least one."""
    if samples == 0:
        raise DataError(
            f"{x_name} is empty", expected="at least one sample", remedy="look at how the file was written"
        )
    if samples != answers:
        raise DataError(
            f"{x_name} has {samples} samples but {y_name} has {answers}",
            expected="one answer for each sample",
            remedy="look at how the file was written; rows must correspond",
        )


def as_labels(
    name: str, y: np.ndarray[Any, Any], classes: int | None, ids: Sequence[str]
) -> np.ndarray[Any, Any]:
    """Integer class labels, checked, (N,)."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(
            f"{name} has the shape {y.shape}",
            expected="one integer label for each sample, (N,)",
            remedy="for one-hot labels use argmax(axis=1)",
        )
    if y.dtype.kind not in "biuf":
        raise DataError(
            f"{name} has the type {y.dtype}",
            expected="integer labels from 0",
            remedy="number them: class_names, y = numpy.unique(y, return_inverse=True), and save both",
        )
    check_finite(name, y, ids)
    with np.errstate(invalid="ignore"):
        labels = y.astype(np.int64)
    limit = np.iinfo(np.int64).max if classes is None else classes
    bad = np.flatnonzero((labels != y) | (labels < 0) | (labels >= limit))
    if len(bad):
        upper = "" if classes is None else f" to {classes - 1}"
        raise DataError(
            f"{name} holds {y[bad[0]]} for sample {ids[bad[0]]} ({len(bad)} such labels)",
            expected=f"integers from 0{upper}",
            remedy="number the classes from 0 without gaps",
        )
    return labels


def as_targets(name: str, y: np.ndarray[Any, Any], ids: Sequence[str]) -> np.ndarray[Any, Any]:
    """Regression targets, checked, (N, T)."""
    if y.ndim not in (1, 2) or y.dtype.kind != "f" or y.size == 0:
        raise DataError(
            f"{name} has the shape {y.shape} and the type {y.dtype}",
            expected="real numbers of shape (N,) or (N, T)",
            remedy="save the targets as floating-point numbers",
        )
    check_finite(name, y, ids)
    return y.reshape(len(y), -1).astype(np.float64)


def check_classes(labels: np.ndarray[Any, Any], classes: Sequence[str]) -> list[str]:
    """Require training samples of at least two classes."""
    present = np.unique(labels)
    if len(present) < 2:
        raise DataError(
            f"the training samples are of one class only, {classes[int(present[0])]!r}",
            expected="samples of two classes or more",
            remedy="add samples of another class; for a regression save y as floating-point numbers",
        )
    absent = [name for label, name in enumerate(classes) if label not in set(present.tolist())]
    return [f"no training sample of class {some(absent)}"] if absent else []


def some(names: Sequence[str]) -> str:
    """The first names of a list."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def check_seed(seed: int) -> None:
    """Require a seed that every generator takes."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed is {seed}", expected="a whole number from 0 to 2^63 - 1", remedy="try seed=0")


def check_fraction(test_fraction: float) -> None:
    """Require a share strictly between 0 and 1."""
    if not 0.0 < test_fraction < 1.0:
        raise InputError(
            f"test_fraction is {test_fraction}", expected="a number between 0 and 1", remedy="try 0.2"
        )
