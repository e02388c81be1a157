"""New samples for a run, with or without labels, in the format of its training data."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.data import KINDS, ImageTransform, Standardize
from linnet.app.data.arrays import Member, check_member
from linnet.app.data.checks import as_labels, as_targets, check_finite, check_lengths, some
from linnet.app.data.folder import ImageFiles, files_below
from linnet.app.data.table import Cells, read_like
from linnet.app.runs.folder import SavedRun
from linnet.errors import DataError, InputError
from linnet.files import require_file
from linnet.npz import npz_headers, read_npz

Array = np.ndarray[Any, Any]
ALIKE = "give samples of the form that the run was trained on"
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, eq=False)
class NewSamples:
    """Samples that a run has not seen."""

    x: Array  # images uint8 (N, H, W, C), or features (N, ...)
    y: Array | None  # labels (N,) or targets (N, T) in their own units; None when there are none
    ids: tuple[str, ...]  # A stable name for each sample
    findings: tuple[str, ...] = ()  # what a reader must know of them


def read_new(path: Path, run: SavedRun, prefer: str) -> NewSamples:
    """Read new samples from a folder of images, an ``.npz`` archive or a ``.csv`` table."""
    # A folder may hold images at any depth; one that lies in a folder named for a class has that label. An
    # archive has `x` and perhaps `y`, or the arrays of a data set, of which one part is read. A table has the
    # run's feature columns and perhaps its target.
    images = isinstance(run.transforms[0], ImageTransform)
    if path.suffix.lower() in (".npz", ".csv") and not os.path.exists(path):
        require_file(path, "data")
    if os.path.isdir(path):
        if not images:
            raise InputError(
                f"data {path} is a folder",
                expected="samples of a table, like those of the run",
                remedy=ALIKE,
            )
        return _checked(_from_folder(path, run), run)
    if path.suffix.lower() == ".npz":
        return _checked(_from_archive(path, run, prefer), run)
    if path.suffix.lower() == ".csv":
        return _checked(_from_table(path, run), run)
    what = "has an unknown kind" if os.path.exists(path) else "does not exist"
    raise InputError(f"data {path} {what}", expected=KINDS, remedy="check the path and its ending")


def _from_folder(path: Path, run: SavedRun) -> NewSamples:
    """Images at any depth."""
    transform = run.transforms[0]
    assert isinstance(transform, ImageTransform)
    if (
        run.samples.images is not None and transform.channels is None
    ):  # decoded to what the run was trained on
        transform = replace(transform, channels=run.samples.images.shape[-1])
    found = [file.relative_to(path) for file in files_below(path, path) if file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(
            f"{path} has no images",
            expected=f"files ending in {', '.join(SUFFIXES)}",
            remedy="check the path",
        )
    ids = tuple(file.as_posix() for file in found)
    x = ImageFiles(path, ids, transform).read(np.arange(len(ids)))
    number = {name: label for label, name in enumerate(run.classes or ())}
    labels = [number.get(file.parent.name, -1) for file in found]
    return NewSamples(x, None if -1 in labels else np.array(labels, dtype=np.int64), ids)


def _from_archive(path: Path, run: SavedRun, prefer: str) -> NewSamples:
    """One part of an archive."""
    headers = npz_headers(path)
    other = "train" if prefer == "test" else "test"
    part = next((part for part in ("", f"_{prefer}", f"_{other}") if f"x{part}" in headers), None)
    if part is None:
        raise DataError(
            f"{path} has no samples; it holds: {some(list(headers)) or 'nothing'}",
            expected="an array x, and y where the answers are known",
            remedy="rename its arrays",
        )
    name = f"x{part}"
    member = Member(path, name, headers[name])
    count = headers[name].shape[0] if headers[name].shape else 0
    if member.is_images != isinstance(run.transforms[0], ImageTransform) or len(headers[name].shape) < 2:
        kind = (
            "images, uint8 (N, H, W[, C])"
            if isinstance(run.transforms[0], ImageTransform)
            else "features (N, ...)"
        )
        raise DataError(
            f"{name} of {path} has the shape {headers[name].shape} and type {headers[name].dtype}",
            expected=kind,
            remedy=ALIKE,
        )
    check_member(member)
    ids = tuple(f"{part[1:] or 'x'}/{row}" for row in range(count))
    answers = read_npz(path, [f"y{part}"])[f"y{part}"] if f"y{part}" in headers else None
    check_lengths(name, count, f"y{part}", count if answers is None else len(answers))
    if answers is not None:
        answers = (
            as_labels(f"y{part}", answers, len(run.classes), ids)
            if run.classes
            else as_targets(f"y{part}", answers, ids)
        )
    return NewSamples(member.read(np.arange(count)), answers, ids)


def _from_table(path: Path, run: SavedRun) -> NewSamples:
    """The lines of a table."""
    table = run.test.columns if run.test is not None else None
    if table is None:
        raise InputError(
            f"data {path} is a table",
            expected="image samples, like those of the run",
            remedy=ALIKE,
        )
    x, answers, cells, findings = read_like(path, table)
    y = np.stack(list(answers.values()), axis=1) if answers else None
    if y is not None and run.classes is not None:
        y = _labels(path, table.targets[0], cells, run.classes)
    elif y is not None and y.shape[1] != run.fit.system.c:
        y = None
    return NewSamples(x, y, cells.ids, tuple(findings))


def _labels(path: Path, target: str, cells: Cells, classes: tuple[str, ...]) -> Array:
    """Labels of lines, by the names of their classes."""
    values = cells.values[target]
    texts = cells.texts.get(target)
    names = [f"{value:g}" for value in values] if texts is None else [texts[int(code)] for code in values]
    place = {name: label for label, name in enumerate(classes)}
    unknown = [f"{cells.ids[row]}: {name}" for row, name in enumerate(names) if name not in place]
    if unknown:
        raise DataError(
            f"{target} of {path} names classes that the run has not: {some(unknown)}",
            expected=f"one of {some(list(classes))}",
            remedy="correct these lines, or run adapt again with the new classes",
        )
    return np.array([place[name] for name in names], dtype=np.int64)


def _checked(new: NewSamples, run: SavedRun) -> NewSamples:
    """Samples that the run's network can take."""
    check_finite("x", new.x, new.ids)
    transform = run.transforms[0]
    if isinstance(transform, Standardize) and new.x.shape[1:] != (len(transform.mean),):
        raise DataError(
            f"the new samples have the shape {new.x.shape[1:]}",
            expected=f"{len(transform.mean)} features",
            remedy=ALIKE,
        )
    known = tuple(run.fit.x.shape[1:])
    shape = tuple(run.inputs(new.x[:1]).shape[1:])
    if shape != known:
        raise DataError(
            f"the new samples make inputs of shape {shape}",
            expected=f"{known}, like the samples that the run was trained on",
            remedy="scale them to that size, or adapt with --size and --channels",
        )
    return new


def required_answers(new: NewSamples, path: Path) -> Array:
    """The answers, which must be there, (N,)."""
    if new.y is None:
        raise DataError(
            f"{path} has no answers for its samples",
            expected="an array y, one folder for each class of the run, or the target's column",
            remedy="add them: only labeled samples can be learned from",
        )
    return new.y
