"""Samples that a user names, by id or in words, and samples that a run has not seen."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app.data import TABLE, ImageTransform, Standardize, kind_of
from linnet.app.data.arrays import Member, check_member, described, length, part_of
from linnet.app.data.folder import SUFFIXES, ImageFiles, files_below, split_folders
from linnet.app.data.table import read_like
from linnet.app.data.task import TRAINED, check_finite, check_lengths
from linnet.app.runs.folder import SavedRun
from linnet.errors import DataError, InputError
from linnet.fitting.last_layer import PADDING
from linnet.npz import npz_headers, read_npz
from linnet.shown import some

Array = np.ndarray[Any, Any]
LISTED = 20  # samples named in the terminal; result.json names all
_SHOWN = 4  # ids of a kind in an error


def answer_in_words(answer: Any, classes: Sequence[str] | None) -> str:
    """A label or target as people know it."""
    if classes is not None:
        return classes[int(answer)]
    return ", ".join(f"{float(value):.4g}" for value in np.reshape(answer, -1))


Others = Mapping[str, Collection[str]]  # the ids of samples of other kinds


def find_samples(
    names: Sequence[str], ids: Sequence[str], kind: str, others: Callable[[], Others] = dict
) -> list[int]:
    """The positions of samples that a user named: by id, or by its end where one alone ends so."""
    if not names:
        raise InputError("ids is empty", f"the ids of one or more {kind}", f"name them, such as {ids[0]}")
    places = {name: place for place, name in enumerate(ids)}
    rest = {} if all(name in places for name in names) else others()
    found = [_place(name, places, kind, rest) for name in names]
    place, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"ids holds {ids[place]} {'twice' if count == 2 else f'{count} times'}",
            expected="each sample once",
            remedy="leave the others out",
        )
    return found


def _place(name: str, places: Mapping[str, int], kind: str, others: Others) -> int:
    """The position of one sample."""
    if name in places:
        return places[name]
    ends = [one for one in places if name and one.endswith((f"/{name}", f" {name}"))]
    known = next((kind for kind, ids in others.items() if name in ids), None)
    # of a table a bare number may be meant as one of its own columns
    if len(ends) == 1 and not known and not (name.isdecimal() and ends[0].startswith("line ")):
        return places[ends[0]]
    if ends and not known:
        shown = f"{', '.join(ends[:_SHOWN])}{', ...' * (len(ends) > _SHOWN)}"
        raise InputError(f"{name} could be {shown}", "the id of one sample", "write the whole id")
    close = difflib.get_close_matches(name, places, 1)
    is_slip = close and not known and _unnumbered(close[0]) != _unnumbered(name)
    what = f"one of the {known}, and " if known else ""
    first = ", ".join(list(places)[:_SHOWN])
    raise InputError(
        f"ids holds {name}, which is {what}none of the {len(places)} {kind}",
        expected=f"ids as the report and result.json name them: {first}, ...",
        remedy=f"did you mean {close[0]}?" if is_slip else "copy one from the report",
    )


def _unnumbered(name: str) -> str:
    """An id less its numbers: one number is no misspelling of another."""
    return "".join(letter for letter in name if not letter.isdecimal())


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


@dataclass(frozen=True, eq=False)
class NewSamples:
    """Samples that a run has not seen."""

    x: Array  # images uint8 (N, H, W, C), or features (N, ...)
    y: Array | None  # labels (N,) or targets (N, T) in their own units; None when there are none
    ids: tuple[str, ...]  # A stable name for each sample
    findings: tuple[str, ...] = ()  # what a reader must know of them
    unknown: tuple[str, ...] = ()  # folders of theirs that are no classes of the run


def read_new(path: Path, run: SavedRun, prefer: str) -> NewSamples:
    """Read new samples from a folder of images, an ``.npz`` archive or a table."""
    # A folder may hold images at any depth; one that lies in a folder named for a class has that label. An
    # archive has `x` and perhaps `y`, or the arrays of a data set, of which one part is read. A table has the
    # run's feature columns and perhaps its target.
    kind, transform = kind_of(path), run.transforms[0]
    if kind == ".npz":
        return _checked(_from_archive(path, run, prefer), run)
    if kind == TABLE and run.columns is not None:
        x, y, ids, findings = read_like(path, run.columns, run.classes, trained=prefer == TRAINED)
        return _checked(NewSamples(x, y, ids, tuple(findings)), run)
    if kind == "folder" and isinstance(transform, ImageTransform):
        return _checked(_from_folder(path, run, transform, prefer), run)
    raise InputError(
        f"data {path} is a {kind}",
        expected="samples like those of the run, which were "
        + ("images" if isinstance(transform, ImageTransform) else "rows of numbers"),
        remedy=ALIKE,
    )


def _from_folder(path: Path, run: SavedRun, transform: ImageTransform, prefer: str) -> NewSamples:
    """Images at any depth; of a folder that names what to train on, and is to be trained on, these alone."""
    if run.samples.images is not None and transform.channels is None:  # decoded to what was trained on
        transform = replace(transform, channels=run.samples.images.shape[-1])
    part, held = split_folders(path) if prefer == TRAINED else (path, None)
    found = [file.relative_to(path) for file in files_below(part, path) if file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(
            f"{path} has no images",
            expected=f"files ending in {', '.join(SUFFIXES)}",
            remedy="check the path",
        )
    ids = tuple(file.as_posix() for file in found)
    height, width = run.fit.x.shape[2:]
    remedy = f"scale them to {height}x{width}, like the samples that the run was trained on"
    x = ImageFiles(path, ids, transform, remedy).read(np.arange(len(ids)))
    number = {name: label for label, name in enumerate(run.classes or ())}
    labels = [number.get(file.parent.name, -1) for file in found]
    unknown = sorted({file.parent.name for file in found} - {"", *number})
    y = None if -1 in labels else np.array(labels, dtype=np.int64)
    findings = () if held is None else (f"images of {part.name} are taken, those of {held.name} left out",)
    return NewSamples(x, y, ids, findings, unknown=tuple(unknown))


def _from_archive(path: Path, run: SavedRun, prefer: str) -> NewSamples:
    """One part of an archive."""
    headers = npz_headers(path)
    every = (f"x{part}" for part in ("", f"_{prefer}", "_train", "_test"))
    name = next((name for name in every if name in headers), None)
    if name is None:
        raise DataError(
            f"{path} has no samples; it holds: {some(list(headers)) or 'nothing'}",
            expected="an array x, and y where the answers are known",
            remedy="rename its arrays",
        )
    member, images = Member(path, name, headers[name]), isinstance(run.transforms[0], ImageTransform)
    if member.is_images != images or len(member.header.shape) < 2:
        kind = "images, uint8 (N, H, W[, C])" if images else "features (N, ...)"
        raise DataError(described(member), expected=kind, remedy=ALIKE)
    check_member(member)
    x, answers = member.read(np.arange(length(member.header))), headers.get(member.answers)
    check_lengths(name, len(x), member.answers, len(x) if answers is None else length(answers))
    if answers is None:
        return NewSamples(x, None, member.ids)
    y = read_npz(path, [member.answers])[member.answers]
    classes = len(run.classes or ())
    if classes and y.dtype.kind in "iu" and y.size and y.max() >= classes:
        others = [str(label) for label in np.unique(y[y >= classes])]
        raise DataError(
            f"{member.answers} of {path} has the labels {some(others)}",
            expected=f"labels from 0 to {classes - 1}, of the run's classes",
            remedy="name new classes in the order of their numbers: linnet update --new-class NAME",
        )
    return NewSamples(x, part_of(member, y, run.classes).y, member.ids)


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
    tokens = new.x.dtype.kind in "iu" and len(shape) == len(known) == 1
    if tokens and shape < known and (padding := _padding(run)) is not None:
        wider = np.pad(new.x, ((0, 0), (0, known[0] - shape[0])), constant_values=padding)
        new, shape = replace(new, x=wider), known
    if shape != known:
        raise DataError(
            f"the new samples make inputs of shape {shape}",
            expected=f"{known}, like the samples that the run was trained on",
            remedy=f'tokenizer(texts, padding="max_length", truncation=True, max_length={known[0]})'
            if tokens
            else "scale them to that size, or adapt with --size and --channels"
            if isinstance(transform, ImageTransform)
            else ALIKE,
        )
    if new.y is not None and run.classes is None and new.y.shape[1] != run.fit.system.c:
        new = replace(new, y=None)
    return replace(new, findings=(*new.findings, *_beyond(run, new)))


def _beyond(run: SavedRun, new: NewSamples) -> list[str]:
    """Remarks on columns of a table whose values lie far from those of the training."""
    transform, table, known = run.transforms[0], run.columns, run.samples.labels
    if table is None or not isinstance(transform, Standardize) or known is None:
        return []
    named = [(table.labels, new.x, transform.inverse(run.fit.x.double()).cpu().numpy())]
    if run.classes is None and new.y is not None:
        named.append(((table.target,), new.y, known))
    found = []
    for labels, values, own in named:
        ends, width = (own.min(0), own.max(0)), np.ptp(own, 0)
        low, high = (np.where(np.abs(end) < 1e-6 * width, 0, end) for end in ends)  # zero up to rounding
        margin = width + 1e-3 * np.maximum(np.abs(low), np.abs(high))
        far = (values < low - margin) | (values > high + margin)
        for place in np.flatnonzero(far.any(0)):
            rows = np.flatnonzero(far[:, place])
            span = f"{low[place]:.4g} to {high[place]:.4g} of the training"
            first = f"first {values[rows[0], place]:.4g} in {new.ids[rows[0]]}"
            told = f"{len(rows)} of {len(values)} values lie far outside the {span}, {first}"
            found.append(f"{labels[place]}: {told}: another unit?")
    return found


def _padding(run: SavedRun) -> int | None:
    """The token that a run's network takes for padding, and masks."""
    found = (vars(module).get(PADDING) for module in run.fit.module.function.model.modules())
    return next((token for token in found if token is not None), None)


def required_answers(new: NewSamples, path: Path) -> Array:
    """The answers, which must be there, (N,)."""
    if new.y is None and new.unknown:
        raise DataError(
            f"{path} has folders that are no classes of the run: {some(new.unknown)}",
            expected="one folder for each class of the run",
            remedy=f"rename them, or name new classes: --new-class {new.unknown[0]}",
        )
    if new.y is None:
        raise DataError(
            f"{path} has no answers for its samples",
            expected="an array y, one folder for each class of the run, or the target's column",
            remedy="add them: only labeled samples can be learned from",
        )
    return new.y
