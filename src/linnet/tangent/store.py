"""A resumable Gram matrix on disk, which one process makes, or several.

The matrix grows in ``NAME.partial`` beside a record of finished steps; when the last step is done
it is renamed to ``NAME``, with a note in ``NAME.made.json`` of what it is. A run with the same weights, data
and settings continues the record, or takes the finished matrix as it is; any other starts again where nothing
is finished, and is refused where a matrix is.

Several processes write to one matrix, each with a record of its own, and whoever finishes the last step
renames it: the processes of a group, or parts that know nothing of each other, such as the tasks of an
array job. A lock keeps them apart while they begin and end. Maps of the file must be coherent between its
writers, as they are on one machine and on Lustre or GPFS; NFS writes whole pages back, and would lose
numbers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from linnet.errors import InputError, LinnetError
from linnet.files import as_path, locked, read_json, refuse_write, remove_partial, reserve, write_json

RECORD_SECONDS = 5.0  # between two records of finished steps: what a killed run may lose
SIZES = ("hold", "product", "capture", "columns")  # of an identity: parts take over those of the first
_WORDS = {
    "form": "form", "gradients": "linnet.precision", "weights": "weights or selected parameters",
    "output": "output", "x1": "examples", "x2": "second examples", "dtype": "number type",
}  # fmt: skip


class _Keyed(Protocol):
    @property
    def key(self) -> str:
        """A name for the record."""


@dataclass(frozen=True)
class Writer:
    """One of the processes that make a matrix."""

    index: int = 0  # which, from 0
    of: int = 1  # their number
    # whether they are parts that begin and end by themselves, and not processes of a group
    array: bool = False


class GramFile:
    """The matrix and the record of finished steps."""

    def __init__(
        self,
        file: str | Path,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        identity: dict[str, Any],
        writer: Writer | None = None,
    ) -> None:
        self.path, self.writer = checked_name(file), writer or Writer()
        self.partial = self.path.with_suffix(".npy.partial")
        of = "" if self.writer.of == 1 else f"-{self.writer.index}-of-{self.writer.of}"
        self.record = self.path.with_suffix(f".npy.steps{of}.json")
        self.made = self.path.with_suffix(".npy.made.json")
        self.identity = {**identity, "shape": list(shape), "dtype": str(dtype)}
        self.done: set[str] = set()
        self.own: set[str] = set()
        with self._by_itself():
            self.complete = self._is_made()
            if self.complete:
                return
            joined = self._resume()
            remove_partial(self.record)
            if not joined:  # the record of another task must not outlive its matrix
                self.record.unlink(missing_ok=True)
            self.map = self._open(shape, torch.empty(0, dtype=dtype).numpy().dtype, joined)
            self.array = torch.from_numpy(self.map)
            self.written = time.monotonic()
            if self.writer.of > 1:
                self.write_record()

    def _by_itself(self) -> AbstractContextManager[None]:
        """The time in which no other writer begins or ends."""
        alone = self.writer.of == 1
        return nullcontext() if alone else locked(self.path.with_suffix(".npy.lock"))

    def _open(self, shape: tuple[int, ...], kind: np.dtype[Any], joined: bool) -> np.memmap[Any, Any]:
        """The mapped matrix, all of whose blocks are reserved: a full disk is an error, and no signal."""
        mode: Any = "r+" if joined else "w+"
        size = math.prod(shape) * kind.itemsize
        try:
            found = np.lib.format.open_memmap(self.partial, mode=mode, dtype=kind, shape=shape)
            reserve(self.partial, found.offset + size)
        except (OSError, InputError) as error:
            if not joined:
                self.partial.unlink(missing_ok=True)
            if isinstance(error, LinnetError):
                raise
            refuse_write(self.partial, error, size)
        return found

    def _resume(self) -> bool:
        """Take over what was finished of the same task; False where nothing was begun."""
        if not self.partial.exists():
            for path in _records(self.path):
                path.unlink(missing_ok=True)
            return False
        found = {path: _read(path) for path in _records(self.path)}
        array = self.writer.array or any(record.get("array") for record in found.values())
        same = [record for record in found.values() if record.get("identity") == self.identity]
        if array and len(same) < len(found):
            self._refuse(next(r for r in found.values() if r not in same))
        for record in same if self.writer.array else ():
            if record.get("array") and record["of"] != self.writer.of:
                self._refuse_parts(record["of"])
        if not same or not self._is_whole(self.partial):
            for path in found:
                path.unlink(missing_ok=True)
            return False
        self.done = {key for record in same for key in record.get("done", ())}
        self.own = set(found.get(self.record, {}).get("done", ()))
        return bool(self.done) or self.writer.of > 1

    def _is_made(self) -> bool:
        """Whether the matrix is there already; that of another run is never written over."""
        if not self.path.exists():
            self.made.unlink(missing_ok=True)  # of a matrix that was taken away
            return False
        note = _read(self.made) if self.made.exists() else {}
        if not note:
            raise InputError(
                f"file={str(self.path)!r} exists, and nothing beside it says of which network and data it is",
                expected="a new file, or a kernel that linnet has written for the same call",
                remedy=f"name another file, or delete {self.path.name}",
            )
        if _fixed(note) != _fixed(self.identity):
            raise InputError(
                f"file={str(self.path)!r} holds the kernel of another run, of {self._differing(note)}",
                expected="a new file, or the kernel of this very network, examples and settings",
                remedy=f"name another file, or delete {self.path.name}",
            )
        return self._is_whole(self.path)  # a damaged one is made again

    def _differing(self, other: dict[str, Any]) -> str:
        """In what another identity differs, in a user's words."""
        names = [name for name, value in self.identity.items() if other.get(name) != value]
        words = [word for name, word in _WORDS.items() if name in names]
        if not words:  # sizes alone, of the matrix or of its steps
            words = ["number of examples or outputs" if "shape" in names else "memory budget"]
        return "other " + ", ".join(words)

    def _refuse(self, other: dict[str, Any]) -> NoReturn:
        """Raise the error of a file that another run is making."""
        differing = self._differing(other.get("identity") or {})
        raise InputError(
            f"file={str(self.path)!r} belongs to another run, of {differing}",
            expected="the same network, examples and settings in all parts of one file",
            remedy=f"name another file, or delete {self.partial.name} and the records beside it",
        )

    def _refuse_parts(self, of: int) -> NoReturn:
        """Raise the error of a part among others than those that have begun the file."""
        raise InputError(
            f"file={str(self.path)!r} is made in {of} parts, and this is one of {self.writer.of}",
            expected="the same number in all parts of one file",
            remedy=f"name it as one of {of}, or compute the rest without parts",
        )

    def _is_whole(self, path: Path) -> bool:
        """Whether a matrix can be opened as what it was begun as."""
        try:
            found = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, OSError):
            return False
        return bool(list(found.shape) == self.identity["shape"])

    def is_done(self, step: _Keyed) -> bool:
        """Whether an earlier run, or another part, had finished this step when the file was opened."""
        return step.key in self.done

    def mark_done(self, step: _Keyed) -> None:
        """Remember a finished step; the record is written every few seconds."""
        self.done.add(step.key)
        self.own.add(step.key)
        if time.monotonic() - self.written >= RECORD_SECONDS:
            self.write_record()

    def write_record(self, ended: bool = False) -> None:
        """Flush the matrix, then record the finished steps: never the other way round."""
        self.map.flush()
        done = sorted(self.done if self.writer.of == 1 else self.own)
        part = {"array": self.writer.array, "of": self.writer.of, "ended": ended}
        write_json(self.record, {"identity": self.identity, **part, "done": done})
        self.written = time.monotonic()

    def finish(self, steps: Collection[_Keyed] | None = None) -> Tensor | None:
        """Rename the matrix to its final name and map it again, if all steps are done."""
        if steps is None:
            self.map.flush()
            return self._renamed()
        with self._by_itself():
            self.write_record(ended=True)
            records = [_read(path) for path in _records(self.path)]
            same = [record for record in records if record.get("identity") == self.identity]
            done = {key for record in same for key in record.get("done", ())}
            return self._renamed() if all(step.key in done for step in steps) else None

    def _renamed(self) -> Tensor:
        """The finished matrix, under its own name."""
        write_json(self.made, self.identity)
        os.replace(self.partial, self.path)
        for path in _records(self.path):
            path.unlink(missing_ok=True)
        remove_partial(self.record)
        return self.finished()

    def finished(self) -> Tensor:
        """The matrix under its own name, which another process may have given it; changes stay in memory."""
        return torch.from_numpy(np.lib.format.open_memmap(self.path, mode="c"))


def missing_parts(file: str | Path) -> list[int]:
    """The parts that have not finished their steps of a matrix."""
    path = checked_name(file)
    records = {found: _read(found) for found in _records(path)}
    parts = {name: record for name, record in records.items() if record.get("array")}
    of = max((int(record["of"]) for record in parts.values()), default=0)
    ended = {name.name for name, record in parts.items() if record.get("ended")}
    if of == 1:
        return [] if ended else [0]
    return [i for i in range(of) if f"{path.name}.steps-{i}-of-{of}.json" not in ended]


def checked_name(file: str | Path) -> Path:
    """The name of a matrix's file."""
    path = as_path(file, "file")
    if path.suffix != ".npy":
        named = path.with_suffix(".npy") if path.name.strip(".") else path / "kernel.npy"
        raise InputError(
            f"file={str(file)!r}", expected="a name that ends in .npy", remedy=f"pass file={str(named)!r}"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"file={str(file)!r}: its folder does not exist",
            expected="an existing folder",
            remedy=f"create {path.parent}",
        )
    return path


def discard(file: Path) -> None:
    """Remove a finished matrix and the note of it; maps of it stay what they are."""
    for path in (file, file.with_suffix(".npy.made.json")):
        with suppress(OSError):  # a system on which a mapped file cannot be removed
            path.unlink()


def begun_sizes(file: str | Path, identity: dict[str, Any], free: bool) -> dict[str, int] | None:
    """The sizes of steps with which a matrix was begun, that the memory of another moment must not change."""
    fixed = _fixed(identity)
    for record in map(_read, _records(checked_name(file))):
        theirs = record.get("identity") or {}
        if (free or record.get("array")) and all(theirs.get(name) == value for name, value in fixed.items()):
            return {name: int(theirs[name]) for name in SIZES}
    return None


def _fixed(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity without the sizes of steps."""
    return {name: value for name, value in identity.items() if name not in SIZES}


def _records(path: Path) -> list[Path]:
    """The records beside a matrix that is being made."""
    start, end = f"{path.name}.steps", ".json"
    names = [entry.name for entry in path.parent.iterdir()]
    return sorted(path.with_name(name) for name in names if name.startswith(start) and name.endswith(end))


def _read(path: Path) -> dict[str, Any]:
    """A record; empty where it cannot be read."""
    try:
        record = read_json(path)
    except (ValueError, LinnetError):
        return {}
    return record if isinstance(record, dict) else {}
