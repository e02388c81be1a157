"""What the page asks of a run. Nothing is written: forgetting changes the session alone."""

from __future__ import annotations

import csv
import io
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from linnet.app.data import ImageTransform
from linnet.app.data.folder import UNDAMAGED
from linnet.app.runs.changes import forget
from linnet.app.runs.folder import SavedRun
from linnet.app.runs.queries import predict_new
from linnet.app.runs.samples import SUFFIXES, NewSamples, answer_in_words, read_new
from linnet.errors import DataError, InputError, LinnetError
from linnet.report.reading import explanations
from linnet.report.tiles import thumbnail

Array = np.ndarray[Any, Any]
_BEHIND = 8  # training samples shown on each side of a prediction
_PIXELS = 96
_LISTED = 10  # classes whose probabilities are shown


class Session:
    """One run, the sample at hand, and the training samples that were forgotten since it was opened."""

    # Requests come from several threads; one is answered at a time.

    def __init__(self, run: SavedRun, name: str = "") -> None:
        self.name = name
        self._original = self._run = run
        self._sample: NewSamples | None = None
        self._lock = threading.Lock()

    def about(self) -> dict[str, Any]:
        """What the page shows before anything is asked."""
        run = self._original
        table = run.test.columns if run.test is not None else None
        kind = "image" if isinstance(run.transforms[0], ImageTransform) else "row" if table else "numbers"
        return {
            "name": self.name,
            "kind": kind,
            "classes": run.classes,
            "columns": [] if table is None else [column.name for column in table.features],
            "numbers": int(np.prod(run.fit.x.shape[1:])) if kind == "numbers" else None,
            **self._counts(),
        }

    def predict(self, name: str, content: bytes) -> dict[str, Any]:
        """Predict one sample."""
        with self._lock:
            self._sample = self._read(name, content)
            return self._answer()

    def forget(self, ids: Sequence[str]) -> dict[str, Any]:
        """Forget training samples, in this session alone."""
        with self._lock:
            before = self._run
            self._run = forget(before, list(ids)).after
            return self._answer(before)

    def restore(self) -> dict[str, Any]:
        """Take all forgotten samples back."""
        with self._lock:
            before, self._run = self._run, self._original
            return self._answer(before)

    def _counts(self) -> dict[str, Any]:
        """Training samples now, and those that were forgotten."""
        left = set(self._run.samples.ids)
        return {
            "train": self._run.fit.n,
            "forgotten": [name for name in self._original.samples.ids if name not in left],
        }

    def _answer(self, before: SavedRun | None = None) -> dict[str, Any]:
        """The state of the session."""
        found: dict[str, Any] = self._counts()
        if self._sample is not None:
            found["sample"] = self._predicted(self._run, self._sample)
            if before is not None:
                found["before"] = self._predicted(before, self._sample, behind=False)
        return found

    def _read(self, name: str, content: bytes) -> NewSamples:
        """The first sample of what was sent."""
        if not content.strip():
            raise InputError("nothing was sent", expected="an image file, or a row of values")
        with tempfile.TemporaryDirectory() as folder:
            about = self.about()
            if about["kind"] == "image":
                return self._image(Path(folder), PurePosixPath(name.replace("\\", "/")), content)
            text = _text(content)
            if about["kind"] == "row":
                path = Path(folder) / "row.csv"
                path.write_text(_with_columns(text, about["columns"]), encoding="utf-8")
            else:
                path = Path(folder) / "row.npz"
                np.savez(path, x=_numbers(text, tuple(self._original.fit.x.shape[1:])))
            try:
                return read_new(path, self._original, prefer="test")
            except LinnetError as error:  # it names a file that nobody has seen
                what = error.what.replace(str(path), "the row")
                raise type(error)(what, error.expected, error.remedy) from error

    def _image(self, folder: Path, name: PurePosixPath, content: bytes) -> NewSamples:
        """An image that was sent, by way of a folder that errors do not name."""
        if name.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{name.name} is no image that is read here" if name.name else "the file has no name",
                expected=f"a file whose name ends in {', '.join(SUFFIXES)}",
                remedy="save it as .jpg or .png",
            )
        file = folder / f"sample{name.suffix.lower()}"
        file.write_bytes(content)
        try:
            return read_new(folder, self._original, prefer="test")
        except DataError as error:
            what = error.what.replace(f"1 of 1 images in {folder} ", "the image ")
            what = what.replace(f"{folder}{os.sep}", "").replace(file.name, name.name)
            remedy = "send a file that is whole" if error.remedy == UNDAMAGED else error.remedy
            raise DataError(what, error.expected, remedy) from error

    def _predicted(self, run: SavedRun, new: NewSamples, behind: bool = True) -> dict[str, Any]:
        """The prediction of the sample at hand by a run."""
        found = predict_new(run, new)
        std = None if found.std is None else found.std[0].tolist()
        result: dict[str, Any] = {"findings": [*new.findings, *([found.note] if found.note else [])]}
        if found.probs is not None and run.classes is not None:
            order = np.argsort(-found.probs[0], kind="stable")[:_LISTED].tolist()
            result["classes"] = [
                {"name": run.classes[i], "probability": float(found.probs[0, i])} for i in order
            ]
            result["predicted"] = run.classes[order[0]]
            spread = None if std is None else float(std[order[0]])
            result["output"] = {"value": float(found.mean[0, order[0]]), "std": spread}
        else:
            result["values"] = [
                {"value": float(value), "std": None if std is None else float(std[i])}
                for i, value in enumerate(found.mean[0])
            ]
        if behind:
            (made,) = explanations(run, new.x[:1], [0], found, _BEHIND)
            result |= {"up": [self._trained(run, n) for n in made.up]}
            result |= {"down": [self._trained(run, n) for n in made.down]}
            if run.samples.images is not None:
                result["picture"] = thumbnail(new.x[0], 2 * _PIXELS)
        return result

    @staticmethod
    def _trained(run: SavedRun, neighbor: Any) -> dict[str, Any]:
        """A training sample behind a prediction."""
        samples, at = run.samples, neighbor.sample
        return {
            "id": samples.ids[at],
            "label": answer_in_words(samples.answers[at], run.classes),
            "influence": neighbor.influence,
            "picture": None if samples.images is None else thumbnail(samples.images[at], _PIXELS),
        }


def _text(content: bytes) -> str:
    """What was pasted."""
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError("the row is not text", expected="values in UTF-8", remedy="paste one line") from error


def _with_columns(text: str, columns: Sequence[str]) -> str:
    """A row below the names of its columns."""
    lines = [line for line in text.splitlines() if line.strip()]
    delimiter = max(",;\t", key=lines[-1].count)
    if len(lines) > 1:
        return "\n".join(lines[:2]) + "\n"
    if lines[0].count(delimiter) != len(columns) - 1:
        raise DataError(
            f"the row has {lines[0].count(delimiter) + 1} values",
            expected=f"{len(columns)}, of {', '.join(columns)}; or the names of the columns in a line above",
            remedy="paste a row as it stands in the table, without the answer",
        )
    named = io.StringIO()
    csv.writer(named, delimiter=delimiter, lineterminator="\n").writerow(columns)
    return f"{named.getvalue()}{lines[0]}\n"


def _numbers(text: str, shape: tuple[int, ...]) -> Array:
    """Numbers as one sample."""
    words = text.replace(",", " ").replace(";", " ").split()
    try:
        values = np.array([float(word) for word in words], dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{error}", expected="numbers alone", remedy="separate them by commas") from error
    if len(values) != int(np.prod(shape)):
        wanted = f"{int(np.prod(shape))}, of shape {shape}"
        raise DataError(f"the row has {len(values)} numbers", expected=wanted, remedy="give one sample")
    return values.reshape(1, *shape)
