"""A task: training and test samples, their labels and their stable ids, split and drawn by a seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from linnet.app.data.transforms import ImageTransform, Standardize
from linnet.errors import DataError, InputError
from linnet.memory import Plan, parse_bytes, require
from linnet.params import integer
from linnet.report.records import Samples
from linnet.shown import some

Array = np.ndarray[Any, Any]
PartName = Literal["train", "test"]
LEFT_OUT = "columns left out: "  # how the remark on columns that are no features begins
EMPTY = ""  # the category of empty cells
TRAINED = "train"  # name of a folder, or in a column named split, of what is trained on
TESTED = ("test", "val", "valid", "validation")  # names of a folder, or in a column, of what is held out
HELD_OUT = 0.2  # share of the samples that is kept for testing where the data do not say which


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

    def split(self, by_class: bool, seed: int) -> tuple[SampleSet, SampleSet]:
        """A training and a test part."""
        train, test = split(len(self), self.y if by_class else None, seed)
        return self.take(train), self.take(test)


@dataclass(frozen=True)
class Column:
    """Encoding of a column."""

    name: str  # its name
    # its texts in the training lines, each of which is a number of zero or one; the second alone where there
    # are two. None for a column of numbers
    categories: tuple[str, ...] | None = None
    fill: float = 0.0  # what an empty cell of numbers stands for, the median of the training lines
    marked: bool = False  # whether a further number is one where the cell is empty

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its numbers."""
        if self.categories is None:
            return (self.name, f"{self.name} is empty") if self.marked else (self.name,)
        shown = self.categories[1:] if len(self.categories) == 2 else self.categories
        return tuple(f"{self.name} = {text}" if text != EMPTY else f"{self.name} is empty" for text in shown)

    def placed(self, values: Array, texts: Sequence[str]) -> Array:
        """Cells of texts as positions among its categories, −1 for unknown ones; numbers as they are."""
        if self.categories is None:
            return values
        place = {text: at for at, text in enumerate(self.categories)}
        whole = np.array([place.get(text, -1) for text in (*texts, EMPTY)])
        found: Array = whole[np.where(np.isnan(values), len(texts), values).astype(np.int64)]
        return found

    def encode(self, values: Array) -> Array:
        """Its numbers, (N, K)."""
        if self.categories is not None:
            hot: Array = (values[:, None] == np.arange(len(self.categories))).astype(np.float64)
            between = 0.5 * (values < 0)[:, None]  # an unknown text is neither of two
            return hot[:, 1:] + between if len(self.categories) == 2 else hot
        empty = np.isnan(values)
        filled = np.where(empty, self.fill, values)
        return np.stack([filled, empty.astype(np.float64)] if self.marked else [filled], axis=1)


@dataclass(frozen=True)
class Table:
    """Columns of a table."""

    features: tuple[Column, ...]  # columns that become features
    target: str  # name of the column that is predicted
    # whether it was read with decimal commas, which says what 8,609 is in tables like it
    commas: bool | None = field(default=None, compare=False)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Table:
        """The table that a file describes."""
        columns = []
        for one in stored["features"]:
            texts = one["categories"]
            categories = None if texts is None else tuple(map(str, texts))
            columns.append(Column(str(one["name"]), categories, float(one["fill"]), bool(one["marked"])))
        return cls(tuple(columns), str(stored["target"]), stored.get("commas"))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all features, (D,)."""
        return tuple(label for column in self.features for label in column.labels)

    def encode(self, values: Sequence[Array]) -> Array:
        """Features of lines, (N, D)."""
        return np.concatenate([c.encode(v) for c, v in zip(self.features, values, strict=True)], axis=1)


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
        return self.train if name == "train" else self.test

    def samples(self, name: PartName) -> Samples:
        """One part as people see it."""
        part = self.part(name)
        return Samples(part.x if self.image_mode else None, part.y, part.ids)

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


def split(samples: int, labels: Array | None, seed: int) -> tuple[Array, Array]:
    """Divide samples into a training and a test part, each class in the same proportion."""
    # A class of a single sample is put into the training part.
    generator = torch.Generator().manual_seed(seed)
    kinds = np.zeros(samples) if labels is None else labels
    train, test = [], []
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        order = members[_permutation(len(members), generator)]
        held = min(max(round(len(members) * HELD_OUT), 1), len(members) - 1)
        train.append(order[held:])
        test.append(order[:held])
    if not sum(map(len, test)):
        raise DataError(
            f"{samples} sample cannot be split" if labels is None else "no class has two samples to split",
            expected="at least one sample to train on and one to test",
            remedy="add samples, or a test part of their own",
        )
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def draw_shots(labels: Array, shots: int, seed: int, classes: Sequence[str], at_most: bool = False) -> Array:
    """Draw the same number of samples of each class."""
    # Draws with one seed are nested: those for fewer shots are among those for more.
    integer("shots", shots, remedy="leave shots= out to take all")
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
    generator = torch.Generator().manual_seed(seed)
    members = [np.flatnonzero(labels == label) for label in range(len(classes))]
    return np.sort(np.concatenate([m[_permutation(len(m), generator)[:shots]] for m in members]))


def _permutation(length: int, generator: torch.Generator) -> Array:
    """A random order."""
    return torch.randperm(length, generator=generator).numpy()


# Checks that every data set must pass, whatever file it came from


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
    alike = [name for name, count in Counter(map(_plain, classes)).items() if count > 1]
    same = [repr(name) for name in classes if _plain(name) in alike]
    return [
        *([f"no training sample of class {some(absent)}"] if absent else []),
        *([f"classes whose names differ in case or spaces alone: {some(same)}"] if same else []),
    ]


def _plain(name: str) -> str:
    """A name without case, and with one space where there are several."""
    return " ".join(name.split()).casefold()
