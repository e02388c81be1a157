"""The folder of a gradient store: a record, the basis, and rows in shards that are written whole.

Shard s holds the gradients of the examples s·S to (s + 1)·S of the stream, in one checksummed file that is
written completely or not at all. So a process that is killed loses the shard in hand, and any number of
processes can make the shards of one folder without exchanging anything: a shard has one content, whoever
makes it. ``end.json`` says how many examples the stream had, once one of them has seen its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.disk import locked
from linnet.errors import DataError, FileFormatError, InputError
from linnet.files import load_tensors, read_json, remove_partial, save_tensors, write_json
from linnet.params import refuse

RECORD, BASIS, END = "gradient-store", "gradient-store-basis", "gradient-store-end"  # kinds of files
SHARD = "gradient-store-rows"
_OTHER_STREAM = (
    "the same examples in the same order, in every process and after every interruption",
    "turn shuffling and augmentation off, or begin a store in another folder",
)
DTYPES = {str(t).removeprefix("torch."): t
          for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}  # fmt: skip


class StoreFolder:
    """A folder with the gradients of a stream of examples.

    Args:
        path: The folder.
        record: What the store was begun with.
    """

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self.path, self.record = path, dict(record)

    @classmethod
    def opened(cls, path: Path) -> StoreFolder | None:
        """The store in a folder.

        Args:
            path: The folder.

        Returns:
            The store; ``None`` where none was begun.

        Raises:
            FileFormatError: If its record was altered.
        """
        file = path / "store.json"
        return cls(path, read_json(file, RECORD)) if file.is_file() else None

    @classmethod
    def begun(cls, path: Path, record: Mapping[str, Any], basis: Mapping[str, Tensor] | None) -> StoreFolder:
        """A store in a folder that has none, unless another process is first: then that one's.

        Args:
            path: The folder; made if it is missing.
            record: What the store is of.
            basis: The tensors of its directions, if it has some.

        Returns:
            The store.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("directory", str(path), f"a folder that can be made ({error})", "name another folder")
        with locked(path / "store.lock"):
            found = cls.opened(path)
            if found is not None:
                return found
            if basis is not None:
                save_tensors(path, "basis", basis, {}, BASIS)
            write_json(path / "store.json", dict(record), RECORD)
        return cls(path, record)

    def basis(self) -> dict[str, Tensor]:
        """The tensors of the directions."""
        return load_tensors(self.path / "basis.safetensors", BASIS)[0]

    @property
    def size(self) -> int:
        """S, examples of a shard."""
        return int(self.record["shard_size"])

    @property
    def dim(self) -> int:
        """D, numbers of a row."""
        return int(self.record["dim"])

    @property
    def examples(self) -> int | None:
        """N, or ``None`` where no process has come to the end of the stream."""
        file = self.path / "end.json"
        return int(read_json(file, END)["examples"]) if file.is_file() else None

    def missing(self) -> list[int] | None:
        """The shards that are not there, of a stream whose length is known; else ``None``."""
        n = self.examples
        if n is None:
            return None
        return [s for s in range(math.ceil(n / self.size)) if not self.has(s)]

    def file(self, shard: int) -> Path:
        """The file of a shard."""
        return self.path / f"{_name(shard)}.safetensors"

    def has(self, shard: int) -> bool:
        """Whether a shard is there."""
        return self.file(shard).is_file()

    def write(self, shard: int, rows: Tensor, digest: str) -> None:
        """Write a shard, completely or not at all.

        Args:
            shard: Its number.
            rows: Gradients (n, D).
            digest: Of the examples that they are of.
        """
        # of length one, so that no type overflows or comes to nothing
        lengths = rows.double().norm(dim=1)
        unit = rows / lengths.clamp_min(torch.finfo(torch.float64).tiny)[:, None].to(rows.dtype)
        tensors = {"rows": unit.to(DTYPES[self.record["dtype"]]), "lengths": lengths}
        facts = {"shard": shard, "examples": digest, "store": self.record["id"]}
        save_tensors(self.path, _name(shard), tensors, facts, SHARD)

    def read(self, shard: int) -> tuple[Tensor, Tensor, str]:
        """A shard.

        Args:
            shard: Its number.

        Returns:
            Rows of length one as they are stored (n, D), their lengths (n,), and the digest of the examples.

        Raises:
            FileFormatError: If the file was altered, or is that of another store or shard.
        """
        tensors, facts = load_tensors(self.file(shard), SHARD)
        if (facts["store"], facts["shard"]) != (self.record["id"], shard):
            raise FileFormatError(
                f"{self.file(shard)} holds shard {facts['shard']} of a store with the mark {facts['store']}",
                expected=f"shard {shard} with the mark {self.record['id']}, which tells network and settings",
                remedy="remove the file, and call add() again",
            )
        return tensors["rows"], tensors["lengths"], str(facts["examples"])

    def compare(self, shard: int, digest: str) -> None:
        """Raise if a shard that is there is of other examples.

        Args:
            shard: Its number.
            digest: Of the examples that the stream has now.

        Raises:
            DataError: If so.
        """
        if self.read(shard)[2] != digest:
            raise DataError(f"shard {shard} in {self.path} was made of other examples", *_OTHER_STREAM)

    def finish(self, examples: int, digest: str) -> None:
        """Remember where the stream ended.

        Args:
            examples: N.
            digest: Of all examples.

        Raises:
            DataError: If another process, or an earlier one, came to another end.
        """
        file = self.path / "end.json"
        with locked(self.path / "store.lock"):
            if not file.is_file():
                write_json(file, {"examples": examples, "digest": digest}, END)
            found = read_json(file, END)
            remove_partial(file)
        if (found["examples"], found["digest"]) != (examples, digest):
            was = f"{found['examples']} examples, now {examples}"
            detail = was if found["examples"] != examples else "other examples, or another order"
            raise DataError(f"the data in {self.path} had {detail}", *_OTHER_STREAM)

    def blocks(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """All rows, one shard at a time.

        Args:
            dtype: The type to compute in.
            device: Where.

        Yields:
            The place of a shard's examples in the stream, and their gradients (n, D).

        Raises:
            InputError: If shards are missing.
        """
        missing, start = self.missing(), 0
        if missing is None or missing:
            raise InputError(
                f"the store in {self.path} is not complete: "
                + ("no process came to the end of its data" if missing is None else f"{len(missing)} of "
                   f"{math.ceil((self.examples or 0) / self.size)} shards are missing, first {missing[0]}"),
                expected="a store whose data were added to the end, by all of the parts",
                remedy="call add() with the same data again; what is there is not computed anew",
            )  # fmt: skip
        for shard in range(math.ceil((self.examples or 0) / self.size)):
            rows, lengths, _ = self.read(shard)
            place = slice(start, start + len(rows))
            yield place, rows.to(device, dtype) * lengths.to(device, dtype)[:, None]
            start = place.stop


def _name(shard: int) -> str:
    """The name of a shard's file, without its suffix."""
    return f"rows-{shard:07d}"
