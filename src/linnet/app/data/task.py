"""A task: training and test samples, their labels and their stable ids, split and drawn by a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from linnet.app.data.checks import check_finite, check_fraction, check_seed, some
from linnet.app.data.columns import LEFT_OUT, Table
from linnet.app.data.transforms import ImageTransform, Standardize
from linnet.errors import DataError, InputError
from linnet.memory import Plan, parse_bytes, require

Array = np.ndarray[Any, Any]
PartName = Literal["train", "test"]


class Source(Protocol):
    """Source of samples, read when needed."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""

    def read(self, indices: Array) -> Array:
        """The samples at these positions, (len(indices), *sample_shape)."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """Samples that have been read."""

    x: Array  # the samples, (N, ...)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def read(self, indices: Array) -> Array:
        """The samples at some positions, (K, ...)."""
        return self.x[indices]


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Samples with their answers; the samples are read when ``x`` is first used."""

    source: Source  # where the samples lie
    indices: Array  # their positions there, (N,)
    y: Array  # class labels int64 (N,), or regression targets float64 (N, T)
    ids: tuple[str, ...]  # A stable name for each sample: a file's path in its folder, or a row's number

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def x(self) -> Array:
        """The samples: images uint8 (N, H, W, C), or features (N, ...)."""
        x = self.source.read(self.indices)
        check_finite("x", x, self.ids)
        return x

    def take(self, positions: Array) -> SampleSet:
        """Some of the samples."""
        ids = tuple(self.ids[position] for position in positions)
        if "x" in self.__dict__:
            return SampleSet(InMemory(self.x), positions, self.y[positions], ids)
        return SampleSet(self.source, self.indices[positions], self.y[positions], ids)


@dataclass(frozen=True, eq=False)
class TaskData:
    """A classification or a regression, ready for a network."""

    train: SampleSet  # samples to learn from
    test: SampleSet  # samples held out
    classes: tuple[str, ...] | None  # the classes' names in the order of their labels; None for a regression
    # from stored samples to the network's inputs; None takes them as they are
    transform: ImageTransform | Standardize | None = None
    targets: Standardize | None = None  # the scale of regression targets; None takes them as they are
    findings: tuple[str, ...] = ()  # what a reader noticed that is no error but worth telling
    table: Table | None = None  # how the columns of a table become features; None for other data

    @property
    def image_mode(self) -> Literal["RGB", "L"] | None:
        """Pillow's mode of the stored images; None when samples are no images."""
        if not isinstance(self.transform, ImageTransform):
            return None
        return "RGB" if self.train.source.sample_shape[-1] == 3 else "L"

    def layout(self) -> tuple[str, str]:
        """What the network is given, and what it must take, for those whose network takes something else."""
        if self.table is not None:
            names = [f"{column.name} {len(column.labels)}" for column in self.table.features]
            count, columns = len(self.table.labels), f"{len(names)} column{'s' if len(names) > 1 else ''}"
            told = f"the {columns} of the table became {count} numbers: {some(names)}"
            rest = [note for note in self.findings if note.startswith(LEFT_OUT)]
            return "; ".join([told, *rest]), f"a network that takes {count} numbers, or columns for this one"
        if self.image_mode:
            return "images come as (N, C, H, W)", "images as the network takes them"
        shape = ", ".join(map(str, ("N", *self.train.source.sample_shape)))
        return (
            f"an array of shape ({shape}) is taken as it is",
            "images as uint8 (N, H, W[, C]); floats of the network's own shape, such as (N, C, H, W); "
            "whole numbers only for embeddings",
        )

    def part(self, name: PartName) -> SampleSet:
        """One of the two parts."""
        if name not in ("train", "test"):
            raise InputError(f"part is {name!r}", expected="'train' or 'test'")
        return self.train if name == "train" else self.test

    def tensors(self, name: PartName, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """One part as tensors."""
        part = self.part(name)
        if self.transform is not None:
            x = self.transform(part.x, dtype)
        else:
            x = torch.from_numpy(part.x)
            x = x.to(dtype) if x.is_floating_point() else x
        if self.classes is not None:
            return x, torch.from_numpy(part.y)
        return x, self.targets(part.y, dtype) if self.targets else torch.from_numpy(part.y).to(dtype)

    def require_memory(self, memory: str | int | None = None) -> None:
        """Require that the samples fit a memory budget, before they are read."""
        # Of images that keep their own size, the first is decoded to know it.
        samples = len(self.train) + len(self.test)
        transform, ways = self.transform, ["raise memory=", "take fewer samples with shots= and tests="]
        if isinstance(transform, ImageTransform):
            height = width = transform.size or 0
            channels = transform.channels or 3
            if transform.size is None:
                height, width, own = self.train.source.sample_shape
                channels = transform.channels or own
            count = channels * height * width
            what = f"{samples} images of {height} x {width} pixels"
            ways = ["scale them to fewer pixels with size=", "raise memory="]
        else:
            count = math.prod(self.train.source.sample_shape)
            what = f"{samples} samples of shape {self.train.source.sample_shape}"
        size = samples * count * torch.float32.itemsize
        require(Plan(what, parse_bytes(memory), (("inputs of the network", size),)), ways)

    def shots(self, shots: int, seed: int = 0, at_most: bool = False) -> TaskData:
        """The task with a few training samples of each class; the test part stays whole."""
        if self.classes is None:
            raise DataError("a regression has no classes to draw shots of", remedy="use subset instead")
        drawn = draw_shots(self.train.y, shots, seed, self.classes, at_most)
        return replace(self, train=self.train.take(drawn))

    def subset(self, name: PartName, positions: Sequence[int] | Array) -> TaskData:
        """The task with some samples of one part; scales and classes stay as they were."""
        part = self.part(name)
        chosen = np.asarray(positions, dtype=np.int64)
        if chosen.ndim != 1 or not len(chosen) or chosen.min() < 0 or chosen.max() >= len(part):
            raise InputError(
                f"positions are {positions!r}", expected=f"one or more numbers from 0 to {len(part) - 1}"
            )
        smaller = part.take(chosen)
        return replace(self, train=smaller) if name == "train" else replace(self, test=smaller)


# Parts of a data set, as sorted positions


def split_at_random(samples: int, test_fraction: float, seed: int) -> tuple[Array, Array]:
    """Divide samples into a training and a test part."""
    check_fraction(test_fraction)
    if samples < 2:
        raise DataError(
            f"{samples} sample cannot be split", "at least one to train and one to test", "add samples"
        )
    order = _permutation(samples, _generator(seed))
    held = _held_out(samples, test_fraction)
    return np.sort(order[held:]), np.sort(order[:held])


def split_by_class(labels: Array, test_fraction: float, seed: int) -> tuple[Array, Array]:
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


def draw_shots(labels: Array, shots: int, seed: int, classes: Sequence[str], at_most: bool = False) -> Array:
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


def _permutation(length: int, generator: torch.Generator) -> Array:
    """A random order."""
    return torch.randperm(length, generator=generator).numpy()


def _held_out(samples: int, fraction: float) -> int:
    """The number of test samples: the fraction, but never all, and none only of a single one."""
    return min(max(round(samples * fraction), 1), samples - 1)
