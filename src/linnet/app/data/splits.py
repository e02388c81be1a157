"""Seeded train and test splits, and a few samples of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from linnet.app.data.checks import check_fraction, check_seed
from linnet.errors import DataError, InputError

Indices = np.ndarray[Any, Any]  # sorted positions of samples, int64


def split_at_random(samples: int, test_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Divide samples into a training and a test part."""
    check_fraction(test_fraction)
    if samples < 2:
        raise DataError(
            f"{samples} sample cannot be split", "at least one to train and one to test", "add samples"
        )
    order = _permutation(samples, _generator(seed))
    held = _held_out(samples, test_fraction)
    return np.sort(order[held:]), np.sort(order[:held])


def split_by_class(labels: Indices, test_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Divide samples into a training and a test part, each class in the same proportion."""
    # A class of a single sample is put into the training part.
    check_fraction(test_fraction)
    generator = _generator(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[_permutation(len(members), generator)]
        held = _held_out(len(members), test_fraction)
        train.append(order[held:])
        test.append(order[:held])
    if not sum(map(len, test)):
        raise DataError(
            "no class has two samples, so none is left to test",
            expected="more samples",
            remedy="add samples, or a test part of their own",
        )
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def draw_shots(
    labels: Indices, shots: int, seed: int, classes: Sequence[str], at_most: bool = False
) -> Indices:
    """Draw the same number of samples of each class."""
    # Draws with one seed are nested: those for fewer shots are among those for more.
    if shots < 1:
        raise InputError(
            f"shots is {shots}",
            expected="at least one sample per class",
            remedy="leave shots out to take all",
        )
    counts = np.bincount(labels, minlength=len(classes))
    if counts.min() < shots and not at_most:
        scarce = int(counts.argmin())
        raise DataError(
            f"shots is {shots}, but class {classes[scarce]!r} has {counts[scarce]} training samples",
            expected=f"at least {shots} samples of each class",
            remedy=f"ask for at most {counts[scarce]} shots"
            if counts[scarce]
            else "add samples of this class",
        )
    generator = _generator(seed)
    members = [np.flatnonzero(labels == label) for label in range(len(classes))]
    return np.sort(np.concatenate([m[_permutation(len(m), generator)[:shots]] for m in members]))


def _generator(seed: int) -> torch.Generator:
    """A generator of its own, so that no other randomness is touched."""
    check_seed(seed)
    return torch.Generator().manual_seed(seed)


def _permutation(length: int, generator: torch.Generator) -> Indices:
    """A random order."""
    return torch.randperm(length, generator=generator).numpy()


def _held_out(samples: int, fraction: float) -> int:
    """The number of test samples: the fraction, but never all, and none only of a single one."""
    return min(max(round(samples * fraction), 1), samples - 1)
