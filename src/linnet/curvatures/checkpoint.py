"""Checkpoints of a pass over data, so that it can be resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from linnet.errors import InputError
from linnet.files import load_tensors, remove_partial, save_tensors

INTERVAL = 15.0  # seconds between writes
KIND = "curvature-sums"


class Checkpoint:
    """Sums on disk, with the place in the data that they stand for.

    Args:
        file: The file, ending in ``.safetensors``.
        identity: What the sums belong to: network, settings, data. A file of anything else is refused.
        interval: Seconds between writes.

    Raises:
        InputError: If the file's name does not end in ``.safetensors``.
    """

    def __init__(self, file: str | Path, identity: Mapping[str, Any], interval: float = INTERVAL) -> None:
        self.path, self.identity, self.interval = Path(file), dict(identity), interval
        if self.path.suffix != ".safetensors":
            raise InputError(
                f"file={str(file)!r}", expected="a name that ends in .safetensors", remedy="rename it"
            )
        self._written = time.monotonic()

    def read(self) -> tuple[int, int, dict[str, Tensor]] | None:
        """The pass, the batches done in it and the tensors; ``None`` if there is no file.

        Returns:
            What was last written.

        Raises:
            FileFormatError: If the file is damaged.
            InputError: If it belongs to something else.
        """
        if not self.path.exists():
            return None
        tensors, metadata = load_tensors(self.path, KIND)
        found = metadata.get("identity", {})
        different = [key for key, value in self.identity.items() if found.get(key) != value]
        if different:
            self.refuse(different)
        return int(metadata["pass"]), int(metadata["batches"]), tensors

    def refuse(self, different: Sequence[str]) -> NoReturn:
        """Raise because the file belongs to something else.

        Args:
            different: In what it differs.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"file={str(self.path)!r} holds sums with another {', '.join(different)}",
            expected="the file of this very computation",
            remedy="delete it to start over, or choose another name",
        )

    def note(self, turn: int, batches: int, tensors: Mapping[str, Tensor]) -> None:
        """Write, if the last write is long enough ago.

        Args:
            turn: Which pass over the data.
            batches: Batches done in it.
            tensors: The sums.
        """
        if time.monotonic() - self._written >= self.interval:
            self.write(turn, batches, tensors)

    def write(self, turn: int, batches: int, tensors: Mapping[str, Tensor]) -> None:
        """Write now.

        Args:
            turn: Which pass over the data.
            batches: Batches done in it.
            tensors: The sums.
        """
        place = {"identity": self.identity, "pass": turn, "batches": batches}
        save_tensors(self.path.parent, self.path.stem, tensors, place, KIND)
        self._written = time.monotonic()

    def remove(self) -> None:
        """Delete the file, and what a killed run left of writing it: the result is complete."""
        self.path.unlink(missing_ok=True)
        if self.path.parent.is_dir():
            remove_partial(self.path)
