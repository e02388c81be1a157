"""A resumable Gram matrix on disk.

The matrix grows in ``NAME.partial`` beside a record of finished steps; when the last step is done
it is renamed to ``NAME``. A run with the same weights, data and settings continues the record, any
other starts again.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from linnet.disk import refuse_write, reserve
from linnet.errors import InputError, LinnetError
from linnet.files import as_path, read_json, remove_partial, write_json

RECORD_SECONDS = 5.0  # between two records of finished steps: what a killed run may lose


class _Keyed(Protocol):
    @property
    def key(self) -> str:
        """A name for the record."""


class GramFile:
    """The matrix and the record of finished steps.

    Args:
        file: The ``.npy`` file to end with.
        shape: Shape of the matrix.
        dtype: Its type.
        identity: What the steps depend on; a partial file with another identity is discarded.

    Raises:
        InputError: If the name does not end in ``.npy``, or the folder does not exist or cannot be written.
        DiskSpaceError: If the disk has no space for the matrix.
    """

    def __init__(
        self, file: str | Path, shape: tuple[int, ...], dtype: torch.dtype, identity: dict[str, Any]
    ) -> None:
        self.path = as_path(file, "file")
        if self.path.suffix != ".npy":
            raise InputError(
                f"file={str(file)!r}",
                expected="a name that ends in .npy",
                remedy=f"pass file={str(self.path.with_suffix('.npy'))!r}",
            )
        if not self.path.parent.is_dir():
            raise InputError(
                f"file={str(file)!r}: its folder does not exist",
                expected="an existing folder",
                remedy=f"create {self.path.parent}",
            )
        self.partial = self.path.with_suffix(".npy.partial")
        self.record = self.path.with_suffix(".npy.steps.json")
        self.identity = {**identity, "shape": list(shape), "dtype": str(dtype)}
        self.done = self._resume()
        remove_partial(self.record)
        if not self.done:  # the record of another task must not outlive its matrix
            self.record.unlink(missing_ok=True)
        self.map = self._open(shape, torch.empty(0, dtype=dtype).numpy().dtype)
        self.array = torch.from_numpy(self.map)
        self.written = time.monotonic()

    def _open(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.memmap[Any, Any]:
        """The mapped matrix, all of whose blocks are reserved: a full disk is an error, and no signal."""
        mode: Any = "r+" if self.done else "w+"
        size = math.prod(shape) * kind.itemsize
        try:
            found = np.lib.format.open_memmap(self.partial, mode=mode, dtype=kind, shape=shape)
            reserve(self.partial, found.offset + size)
        except (OSError, InputError) as error:
            if not self.done:
                self.partial.unlink(missing_ok=True)
            if isinstance(error, LinnetError):
                raise
            refuse_write(self.partial, error, size)
        return found

    def _resume(self) -> set[str]:
        """Steps finished by an earlier run of the same task."""
        if not (self.partial.exists() and self.record.exists()):
            return set()
        try:
            record = read_json(self.record)
        except ValueError:
            return set()
        same = isinstance(record, dict) and record.get("identity") == self.identity
        return set(record.get("done", ())) if same and self._is_whole() else set()

    def _is_whole(self) -> bool:
        """Whether the partial matrix can be opened as what it was begun as."""
        try:
            found = np.lib.format.open_memmap(self.partial, mode="r")
        except (ValueError, OSError):
            return False
        return bool(list(found.shape) == self.identity["shape"])

    def is_done(self, step: _Keyed) -> bool:
        """Whether an earlier run finished this step."""
        return step.key in self.done

    def mark_done(self, step: _Keyed) -> None:
        """Remember a finished step; the record is written every few seconds."""
        self.done.add(step.key)
        if time.monotonic() - self.written >= RECORD_SECONDS:
            self.write_record()

    def write_record(self) -> None:
        """Flush the matrix, then record the finished steps: never the other way round."""
        self.map.flush()
        write_json(self.record, {"identity": self.identity, "done": sorted(self.done)})
        self.written = time.monotonic()

    def finish(self) -> Tensor:
        """Rename the matrix to its final name and map it again.

        Returns:
            The matrix, backed by the file.
        """
        self.map.flush()
        os.replace(self.partial, self.path)
        self.record.unlink(missing_ok=True)
        remove_partial(self.record)
        return torch.from_numpy(np.lib.format.open_memmap(self.path, mode="r+"))
