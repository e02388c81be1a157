"""The folder of a gradient store: a record, the basis, and rows in shards that are written whole.

Shard s holds the gradients of the examples s·S to (s + 1)·S of the stream, in one checksummed file that is
written completely or not at all. So a process that is killed loses the shard in hand, and any number of
processes can make the shards of one folder without exchanging anything: a shard has one content, whoever
makes it. ``ends.json`` says where each part came to the end of its stream, and ``end.json`` how many examples
there are, once all parts agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.disk import locked
from linnet.errors import DataError, FileFormatError, InputError
from linnet.files import load, read_json, remove_partial, save, write_json
from linnet.params import refuse

RECORD, BASIS, END = "gradient-store", "gradient-store-basis", "gradient-store-end"  # kinds of files
SHARD, WITNESS = "gradient-store-rows", "gradient-store-network"
_OTHER_STREAM = (
    "the same examples in the same order, in every process and after every interruption",
    "turn shuffling and augmentation off, or begin a store in another folder",
)
DTYPES = {str(t).removeprefix("torch."): t
          for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}  # fmt: skip


class StoreFolder:
    """A folder with the gradients of a stream of examples."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self.path, self.record = path, dict(record)

    @classmethod
    def opened(cls, path: Path) -> StoreFolder | None:
        """The store in a folder."""
        file = path / "store.json"
        return cls(path, read_json(file, RECORD)) if file.is_file() else None

    @classmethod
    def begun(cls, path: Path, record: Mapping[str, Any], basis: Mapping[str, Any] | None) -> StoreFolder:
        """A store in a folder that has none, unless another process is first: then that one's."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("directory", str(path), f"a folder that can be made ({error})", "name another folder")
        with locked(path / "store.lock"):
            found = cls.opened(path)
            if found is not None:
                return found
            if basis is not None:
                save(path, "basis", dict(basis), BASIS)
            write_json(path / "store.json", dict(record), RECORD)
        return cls(path, record)

    def basis(self) -> dict[str, Any]:
        """The directions."""
        found: dict[str, Any] = load(self.path / "basis.safetensors", BASIS)
        return found

    def witness(self, made: Callable[[], dict[str, Any] | None] | None = None) -> dict[str, Any] | None:
        """What the network computes on made-up inputs; the first writes it."""
        file = self.path / f"{WITNESS}.safetensors"
        if made is not None:
            with locked(self.path / "store.lock"):
                if not file.is_file():
                    save(self.path, WITNESS, made())
        found: dict[str, Any] | None = load(file, WITNESS) if file.is_file() else None
        return found

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
        """N, or ``None`` where not all parts have come to the same end of the stream."""
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
        """Write a shard, completely or not at all."""
        # rows (n, D)
        # of length one, so that no type overflows or comes to nothing
        lengths = rows.double().norm(dim=1)
        unit = rows / lengths.clamp_min(torch.finfo(torch.float64).tiny)[:, None].to(rows.dtype)
        content = {"rows": unit.to(DTYPES[self.record["dtype"]]), "lengths": lengths}
        facts = {"shard": shard, "examples": digest, "store": self.record["id"]}
        save(self.path, _name(shard), content | facts, SHARD)

    def read(self, shard: int) -> tuple[Tensor, Tensor, str]:
        """A shard."""
        found = load(self.file(shard), SHARD)
        if (found["store"], found["shard"]) != (self.record["id"], shard):
            raise FileFormatError(
                f"{self.file(shard)} holds shard {found['shard']} of a store with the mark {found['store']}",
                expected=f"shard {shard} with the mark {self.record['id']}, which tells network and settings",
                remedy="remove the file, and call add() again",
            )
        return found["rows"], found["lengths"], str(found["examples"])

    def compare(self, shard: int, digest: str) -> None:
        """Raise if a shard that is there is of other examples."""
        if self.read(shard)[2] != digest:
            raise DataError(f"shard {shard} in {self.path} was made of other examples", *_OTHER_STREAM)

    def finish(self, examples: int, digest: str, part: int, parts: int) -> None:
        """Remember where a part came to the end of the stream."""
        file, unfinished, own = self.path / "end.json", self.path / "ends.json", [examples, digest]
        with locked(self.path / "store.lock"):
            if file.is_file():
                settled = read_json(file, END)
                other = [settled["examples"], settled["digest"]]
            else:
                ends = {**self._ends(parts), str(part): own}
                other = next((end for end in ends.values() if end != own), own)
                if other == own and len(ends) == parts:
                    write_json(file, {"examples": examples, "digest": digest}, END)
                    unfinished.unlink(missing_ok=True)
                else:
                    write_json(unfinished, {"parts": parts, "ends": ends}, END)
            remove_partial(file)
            remove_partial(unfinished)
        if other != own:
            detail = "other examples, or another order"
            if other[0] != examples:
                detail = f"{other[0]} examples, now {examples}"
            raise DataError(f"the data in {self.path} had {detail}", *_OTHER_STREAM)

    def _ends(self, parts: int | None = None) -> dict[str, list[Any]]:
        """Where each part came to the end, while not all agree: of a number of parts, or of the last one."""
        file = self.path / "ends.json"
        found = read_json(file, END) if file.is_file() else {"parts": parts, "ends": {}}
        ends: dict[str, list[Any]] = found["ends"]
        return ends if parts in (None, found["parts"]) else {}

    def _lacking(self, missing: list[int] | None) -> str:
        """What an unfinished store lacks."""
        if missing is not None:
            count = math.ceil((self.examples or 0) / self.size)
            return f"{len(missing)} of {count} shards are missing, first {missing[0]}"
        ends = self._ends()
        lengths = sorted({end[0] for end in ends.values()})
        if not ends:
            return "no process came to the end of its data"
        if len({end[1] for end in ends.values()}) == 1:
            return f"only part {', '.join(sorted(ends, key=int))} came to the end of its data"
        return f"its parts had other data, of {' and '.join(map(str, lengths))} examples"

    def blocks(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """All rows, one shard at a time."""
        missing, start = self.missing(), 0
        if missing is None or missing:
            raise InputError(
                f"the store in {self.path} is not complete: {self._lacking(missing)}",
                expected="a store whose data were added to the end, by all of the parts",
                remedy="call add() with the same data again; what is there is not computed anew",
            )
        for shard in range(math.ceil((self.examples or 0) / self.size)):
            rows, lengths, _ = self.read(shard)
            place = slice(start, start + len(rows))
            yield place, rows.to(device, dtype) * lengths.to(device, dtype)[:, None]
            start = place.stop


def _name(shard: int) -> str:
    """The name of a shard's file, without its suffix."""
    return f"rows-{shard:07d}"
