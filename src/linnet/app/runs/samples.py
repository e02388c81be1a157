"""Samples that a user names, by id or in words, and samples that a run has not seen."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

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
LISTED = 20  # samples named in the terminal; result.json names all
_SHOWN = 4  # readings of a word, or ids of a kind, in an error
_DIGITS = 18  # no number of a sample has more


def answer_in_words(answer: Any, classes: Sequence[str] | None) -> str:
    """A label or target as people know it."""
    if classes is not None:
        return classes[int(answer)]
    return ", ".join(f"{float(value):.4g}" for value in np.reshape(answer, -1))


def find_samples(
    names: Sequence[str],
    ids: Sequence[str],
    answers: Array | None,
    classes: Sequence[str] | None,
    kind: str,
    others: Mapping[str, Collection[str]] | None = None,
) -> list[int]:
    """The positions of samples that a user named."""
    # An id is taken first; else the end of one, such as a file's name, where it is the end of one alone. A
    # bare number is taken where the number in an id and the position do not mean two samples, and a position
    # alone where ids have no numbers.
    if not names:
        raise InputError("ids is empty", f"the ids of one or more {kind}", f"name them, such as {ids[0]}")
    table = _Table(ids, answers, classes, kind, others or {})
    found = [table.find(name) for name in names]
    place, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"ids holds {ids[place]} {'twice' if count == 2 else f'{count} times'}",
            expected="each sample once",
            remedy="leave the others out",
        )
    return found


@dataclass(frozen=True, eq=False)
class _Table:
    """Samples in which ids are looked up."""

    ids: Sequence[str]
    answers: Array | None
    classes: Sequence[str] | None
    kind: str
    others: Mapping[str, Collection[str]]

    @cached_property
    def places(self) -> dict[str, int]:
        """The position of each id."""
        return {name: place for place, name in enumerate(self.ids)}

    @cached_property
    def ends(self) -> dict[str, list[int]]:
        """The positions of the ids that end alike: behind the first folder, behind all, and in a number."""
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.ids):
            for end in {name.partition("/")[2], PurePosixPath(name).name, _plain(_last(name))} - {""}:
                found.setdefault(end, []).append(place)
        return found

    def find(self, name: str) -> int:
        """The position of one sample."""
        if name in self.places:
            return self.places[name]
        number = _plain(name)
        places = [*self.ends.get(name, ()), *self.ends.get(number, ())]
        readings: dict[int, str] = {at: f"{self.ids[at]} (position {at}{self._said(at)})" for at in places}
        if number and int(number) < len(self.ids):
            at = int(number)
            if not readings and _plain(_last(self.ids[at])):  # numbered ids, and the number is none of them
                raise InputError(
                    f"{name} is in no id here; position {at} is {self.ids[at]}{self._said(at)}",
                    expected="the id of one sample",
                    remedy=f"write {self.ids[at]} if that is meant",
                )
            readings.setdefault(at, f"position {at} ({self.ids[at]}{self._said(at)})")
        if len(readings) == 1:
            return next(iter(readings))
        if not readings:
            self._refuse(name)
        written = _some([self.ids[at] for at in readings])
        raise InputError(
            f"{name} could be {_some(list(readings.values()))}", "the id of one sample", f"write {written}"
        )

    def _said(self, at: int) -> str:
        """A sample's answer, for an error."""
        if self.answers is None:
            return ""
        word = "target" if self.classes is None else "label"
        return f", {word} {answer_in_words(self.answers[at], self.classes)}"

    def _refuse(self, name: str) -> NoReturn:
        """Raise the error for a name that means nothing."""
        close = [
            one
            for one in difflib.get_close_matches(name, self.ids, 1)
            if _unnumbered(one) != _unnumbered(name)
        ]
        known = next((kind for kind, ids in self.others.items() if name in ids), None)
        what = f"one of the {known}, and " if known else ""
        raise InputError(
            f"ids holds {name}, which is {what}none of the {len(self.ids)} {self.kind}",
            expected=f"ids as the report and result.json name them: {', '.join(self.ids[:_SHOWN])}, ...",
            remedy=f"did you mean {close[0]}?" if close else "copy one from the report",
        )


def _last(name: str) -> str:
    """The last word of an id, without the suffix of a file."""
    return PurePosixPath(name).stem.rpartition(" ")[2]


def _unnumbered(name: str) -> str:
    """An id less its numbers: one number is no misspelling of another."""
    return "".join(letter for letter in name if not letter.isdecimal())


def _plain(word: str) -> str:
    """A whole number without zeros before it; nothing for other words."""
    return str(int(word)) if word.isdecimal() and word.isascii() and len(word) <= _DIGITS else ""


def _some(words: list[str]) -> str:
    """Alternatives; of many the first and the last, which is the position."""
    shown = words if len(words) <= _SHOWN else [*words[: _SHOWN - 1], words[-1]]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def named(
    ids: Sequence[str], answers: Array | None, classes: Sequence[str] | None, positions: Sequence[int]
) -> list[dict[str, Any]]:
    """Samples as plain values, for the result file."""

    def answer(at: int) -> dict[str, Any]:
        if answers is None:
            return {}
        if classes is not None:
            return {"label": classes[int(answers[at])]}
        values = np.reshape(answers[at], -1).tolist()
        return {"target": values[0] if len(values) == 1 else values}

    return [{"id": ids[at], **answer(at)} for at in positions]


def lines_of(samples: Sequence[dict[str, Any]], where: str = "result.json") -> list[str]:
    """Samples of a result for the terminal, one a line."""
    shown = samples[:LISTED]
    width = max((len(one["id"]) for one in shown), default=0)
    lines = []
    for one in shown:
        known = {key: value for key, value in one.items() if key != "id"}
        told = [
            f"{key} {value if isinstance(value, str) else answer_in_words(value, None)}"
            for key, value in known.items()
        ]
        lines.append("  ".join([f"  {one['id']:<{width}}", *told]).rstrip())
    rest = len(samples) - len(shown)
    return [*lines, *([f"  and {rest} more, named in {where}"] if rest else [])]


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
