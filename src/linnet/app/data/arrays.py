"""Data in an ``.npz`` archive: x_train, y_train, x_test, y_test and, if there are, class_names."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.data.task import SampleSet, TaskData, as_labels, as_targets, check_classes, check_lengths
from linnet.app.data.transforms import ImageTransform, require_default
from linnet.errors import DataError
from linnet.files import require_file, require_room
from linnet.npz import ArrayHeader, npz_headers, read_npz, require_arrays

Array = np.ndarray[Any, Any]
_NAMES = "class_names"
_NAME_BYTES = 80  # of a Python string such as "train/1234567" and its place in a tuple


@dataclass(frozen=True, eq=False)
class Member:
    """Samples in an archive, unpacked when they are first read."""

    path: Path  # the archive
    name: str  # the array
    header: ArrayHeader  # its shape and type

    @property
    def answers(self) -> str:
        """The array of the answers."""
        return f"y{self.name[1:]}"

    @property
    def ids(self) -> tuple[str, ...]:
        """A name for each sample."""
        part = self.name[2:] or self.name
        return tuple(f"{part}/{row}" for row in range(length(self.header)))

    @property
    def is_images(self) -> bool:
        """Whether the samples are images: bytes in two or three dimensions."""
        return self.header.dtype == np.uint8 and len(self.header.shape) in (3, 4)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample; gray images have one channel."""
        shape = self.header.shape[1:]
        return (*shape, 1) if self.is_images and len(shape) == 2 else shape

    @cached_property
    def _content(self) -> Array:
        """The whole array, in the types that networks take."""
        kind, count = self.header.dtype.kind, math.prod(self.header.shape)
        if not self.is_images and kind != "f":  # held a second time, as float32 or int64
            require_room(self.path, count * (self.header.dtype.itemsize + 8), f"the array {self.name}")
        array = read_npz(self.path, [self.name])[self.name]
        if self.is_images:
            return array.reshape(-1, *self.sample_shape)
        if self.header.dtype.kind == "f":
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        return array.astype(np.float32 if self.header.dtype == np.uint8 else np.int64)

    def read(self, indices: Array) -> Array:
        """The samples at some positions, (K, *sample_shape)."""
        whole = len(indices) == self.header.shape[0] and bool((indices == np.arange(len(indices))).all())
        return self._content if whole else self._content[indices]


def read_arrays(
    path: str | os.PathLike[str],
    transform: ImageTransform | None = None,
    seed: int = 0,
) -> TaskData:
    """Read a classification or a regression from an ``.npz`` archive."""
    # Bytes of shape (N, H, W) or (N, H, W, C) are images; other arrays are features, taken as they are.
    # Integers in y are class labels, real numbers targets; with `class_names` y are always labels. Samples
    # are named by array and row, `train/17`, and unpacked when they are first used.
    path = require_file(path)
    headers = npz_headers(path)
    has_test = "x_test" in headers or "y_test" in headers
    names = ("train", "test") if has_test else ("train",)
    if "x_train" not in headers or headers["x_train"].dtype.kind in "US":
        _refuse_texts(path, headers)
    require_arrays(path, [f"{array}_{name}" for name in names for array in "xy"], headers)
    members = {name: Member(path, f"x_{name}", headers[f"x_{name}"]) for name in names}
    if not members["train"].is_images:
        require_default(transform, f"x_train of {path} is {headers['x_train'].dtype}, no images")
    for name, member in members.items():
        check_lengths(f"x_{name}", length(member.header), f"y_{name}", length(headers[f"y_{name}"]))
        _check_samples(member, members["train"])
    rows = sum(length(header) for header in headers.values())
    require_room(path, rows * _NAME_BYTES, f"the names of {rows} rows")
    answers = read_npz(path, [f"y_{name}" for name in names] + ([_NAMES] if _NAMES in headers else []))
    classes = _class_names(answers, members["train"].ids)
    train = part_of(members["train"], answers["y_train"], classes)
    findings = check_classes(train.y, classes) if classes else _integral(train.y)
    if has_test:
        test = part_of(members["test"], answers["y_test"], classes)
    else:
        train, test = train.split(classes is not None, seed)
    if train.y.shape[1:] != test.y.shape[1:]:
        raise DataError("y_train and y_test have different numbers of columns", expected="the same targets")
    chosen = (transform or ImageTransform()) if members["train"].is_images else None
    return TaskData(train, test, classes, chosen, findings=tuple(findings))


def _refuse_texts(path: Path, headers: Mapping[str, ArrayHeader]) -> None:
    """Raise where an archive holds texts in the place of inputs."""
    others = [name for name in headers if not name.startswith("y") and name not in (_NAMES, "classes", "ids")]
    texts = [name for name in others if headers[name].dtype.kind in "US"]
    if texts:
        raise DataError(
            f"{texts[0]} of {path} holds texts, and networks read token ids",
            expected="x_train (N, T) of integers",
            remedy="tokenize them with the network's own tokenizer: ids = transformers.AutoTokenizer."
            'from_pretrained(NAME)(texts, padding=True, truncation=True)["input_ids"]; then '
            "numpy.savez(file, x_train=ids, y_train=y)",
        )


def length(header: ArrayHeader) -> int:
    """The number of rows."""
    return header.shape[0] if header.shape else 0


def check_member(member: Member) -> None:
    """Require samples that a network can take."""
    shape, kind, where = member.sample_shape, member.header.dtype.kind, described(member)
    if kind not in "fiu" or not shape or 0 in shape:
        raise DataError(
            where, "numbers of shape (N, features), or bytes of shape (N, H, W[, C])", "convert the array"
        )
    if member.is_images and shape[-1] not in (1, 3):
        raise DataError(
            where,
            expected="images of one or three channels, the channels last",
            remedy="for channels first use x.transpose(0, 2, 3, 1)",
        )


def described(member: Member) -> str:
    """An array by name, shape and type."""
    header = member.header
    return f"{member.name} of {member.path} has the shape {header.shape} and type {header.dtype}"


def _check_samples(member: Member, train: Member) -> None:
    """Require samples that a network can take, alike in both parts."""
    check_member(member)
    shape, where = member.sample_shape, described(member)
    if shape != train.sample_shape or member.is_images != train.is_images:
        raise DataError(
            where,
            f"samples of shape {train.sample_shape}, as in {train.name}",
            'give both the same form, token ids by tokenizer(texts, padding="max_length", max_length=...)',
        )


def _class_names(answers: dict[str, Array], ids: tuple[str, ...]) -> tuple[str, ...] | None:
    """The classes' names: those given, else the labels themselves; None for a regression."""
    if _NAMES in answers:
        return tuple(str(name) for name in answers[_NAMES].reshape(-1))
    y = answers["y_train"]
    if y.dtype.kind == "f":
        return None
    labels = as_labels("y_train", y, None, ids)
    classes, present = int(labels.max()) + 1, len(np.unique(labels))
    if classes > 2 * present:
        raise DataError(
            f"y_train goes up to {classes - 1}, but has {present} different labels only",
            expected="classes numbered from 0 without gaps",
            remedy="renumber them, numpy.unique(y, return_inverse=True)[1], or save class_names",
        )
    return tuple(map(str, range(classes)))


def part_of(member: Member, y: Array, classes: tuple[str, ...] | None) -> SampleSet:
    """Samples with their answers, checked."""
    name, ids = member.answers, member.ids
    checked = as_labels(name, y, len(classes), ids) if classes else as_targets(name, y, ids)
    return SampleSet(member, np.arange(len(y)), checked, ids)


def _integral(targets: Array) -> list[str]:
    """A finding when real targets look like labels."""
    if (targets == np.rint(targets)).all():
        return ["y_train are whole numbers of a real type: taken as a regression; save integers for classes"]
    return []
