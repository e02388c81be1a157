"""Any kind of data as one pair of inputs and targets.

What comes batch by batch is put side by side in memory, or, where it takes too much of that, in temporary
files that are mapped: they are read from the disk when they are looked at, and the system takes the memory
back when it needs it. So a stream is read once, however many passes there are over the data.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from linnet.disk import refuse_write
from linnet.errors import DataError
from linnet.memory import available_bytes
from linnet.tangent.batch import (
    EMPTY,
    Inputs,
    as_batch,
    as_pair,
    batch_size,
    check_finite,
    concatenate,
    is_data_set,
    map_tensors,
    named_tensor,
    take,
    tensorize,
    tensors_in,
)
from linnet.tangent.sharded import require_whole

IN_MEMORY = 0.25  # share of the memory that a stream may take; putting it side by side takes as much again


def gather_data(
    data: Any, device: torch.device | None = None, missing: bool = False
) -> tuple[Inputs, Tensor]:
    """The whole of ``data`` as one (x, y) pair, in memory or mapped from a temporary file.

    Args:
        data: An (x, y) pair, a ``Dataset`` of such pairs, a ``DataLoader`` over one, an ``IterableDataset``
            of samples, or any other iterator over batches. Loaders and iterators are read once, in their own
            order; where they yield more than a share of the memory, they are written to a temporary file and
            mapped. Dicts are taken for pairs: their ``"labels"`` or ``"label"`` is y, the rest is x.
        device: Where the targets should live; by default where the data are. The inputs stay where they are:
            each batch of them is moved when it is needed, so that a device holds one batch.
        missing: Whether NaN in y is let through, as a target that is missing.

    Returns:
        The inputs (N, ...) and the targets (N, ...).

    Raises:
        DataError: If the data are empty, ragged or not finite, or x and y differ in length.
        InputError: If ``data`` is none of the kinds above.
    """
    x, y = _as_pair(data)
    y = named_tensor(y, "y")
    if y.is_complex():
        raise DataError(f"y has type {y.dtype}", "real targets", "pass y.real, or its parts as two outputs")
    if batch_size(x) == 0:
        raise DataError("data is empty: it holds 0 examples", expected="at least one example", remedy=EMPTY)
    if y.ndim == 0 or y.shape[0] != batch_size(x):
        raise DataError(
            f"data has {batch_size(x)} inputs but targets of shape {tuple(y.shape)}",
            expected="one target for each input",
            remedy="check that x and y come from the same split",
        )
    check_finite(x, "x")
    if not missing:
        check_finite(y, "y")
    return x, y if device is None else y.to(device)


def _as_pair(data: Any) -> tuple[Inputs, Any]:
    """(x, y) from any supported kind of data."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if isinstance(data, DataLoader):
        require_whole(data)
        return _joined(as_pair(batch, "a batch of the DataLoader") for batch in data)
    if isinstance(data, IterableDataset):
        return _joined(_sample(one, f"sample {i} of the stream") for i, one in enumerate(data))
    if isinstance(data, Iterator):
        batches = (as_pair(batch, f"batch {i} of the stream") for i, batch in enumerate(data))
        return _joined((tensorize(x), y) for x, y in batches)
    if is_data_set(data):
        return _joined(_sample(data[i], f"sample {i} of the data set") for i in range(len(data)))
    pair = as_pair(data, "data")
    return tensorize(pair[0]), pair[1]


def _sample(item: Any, name: str) -> tuple[Inputs, Tensor]:
    """A sample as a batch of one."""
    x, y = as_pair(item, name)
    return as_batch(x), named_tensor(y, "y")[None]


def _joined(batches: Iterable[tuple[Any, Any]]) -> tuple[Inputs, Tensor]:
    """Batches side by side."""
    gathered = Gathered()
    for x, y in batches:
        gathered.add(x, named_tensor(y, "y"))
    return gathered.whole()


class Gathered:
    """Batches that come one after the other, as one.

    Args:
        limit: Bytes that are held in memory; by default a share of what is there.

    Raises:
        DataError: If examples of two batches differ in shape.
        DiskSpaceError: If the disk is full.
        InputError: If two batches differ in structure.

    Example:
        >>> stream = Gathered(limit=20)
        >>> for start in range(0, 12, 4):
        ...     stream.add(torch.arange(start, start + 4), torch.zeros(4))
        >>> x, y = stream.whole()
        >>> x
        tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = int(IN_MEMORY * available_bytes()) if limit is None else limit
        self._batches: list[tuple[Inputs, Tensor]] = []
        self._held = 0
        self._like: tuple[Inputs, Tensor] | None = None  # one example of what is in files
        self._files: list[
            _Mapped | None
        ] = []  # of every tensor of x, then y; none for what all examples share

    def add(self, x: Inputs, y: Tensor) -> None:
        """Take a batch.

        Args:
            x: Inputs (n, ...).
            y: Targets (n, ...).
        """
        if self._like is not None:
            concatenate([self._like[0], take(x, slice(0, 1))])  # raises where they do not go together
        self._batches.append((x, y))
        self._held += sum(t.nbytes for t in (*tensors_in(x), y))
        if self._held > self._limit:
            self._write()

    def whole(self) -> tuple[Inputs, Tensor]:
        """All batches side by side.

        Returns:
            Inputs (N, ...) and targets (N, ...).

        Raises:
            DataError: If there was no batch.
        """
        if self._like is None:
            if not self._batches:
                raise DataError(
                    "data is empty: it yields no example", expected="at least one example", remedy=EMPTY
                )
            return self._together()
        if self._batches:
            self._write()
        *inputs, targets = [None if file is None else file.tensor() for file in self._files]
        found = iter(inputs)

        def placed(shared: Tensor) -> Tensor:
            own = next(found)
            return shared if own is None else own

        assert targets is not None
        return map_tensors(placed, self._like[0]), targets

    def _together(self) -> tuple[Inputs, Tensor]:
        """What is held, side by side."""
        x, y = concatenate([x for x, _ in self._batches]), concatenate([y for _, y in self._batches])
        self._batches, self._held = [], 0
        return x, y

    def _write(self) -> None:
        """Move what is held to the files."""
        x, y = self._together()
        n, tensors = batch_size(x), (*tensors_in(x), y)
        if self._like is None:
            self._like = map_tensors(torch.clone, take(x, slice(0, 1))), y[:1].clone()
            self._files = [_Mapped(t) if t.ndim > 0 and t.shape[0] == n else None for t in tensors]
        for file, tensor in zip(self._files, tensors, strict=True):
            if file is not None:
                file.append(tensor)


class _Mapped:
    """A tensor that grows along its first axis in a temporary file.

    Args:
        like: Some of its rows.
    """

    def __init__(self, like: Tensor) -> None:
        self.dtype, self.shape, self.n = like.dtype, like.shape[1:], 0
        descriptor, name = tempfile.mkstemp(prefix="linnet-data-")
        self.path = Path(name)
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def append(self, rows: Tensor) -> None:
        """Write some rows."""
        if rows.dtype != self.dtype or rows.shape[1:] != self.shape:
            raise DataError(
                f"data are ragged: a batch has {rows.dtype} of shape {tuple(rows.shape[1:])} where the first "
                f"has {self.dtype} of shape {tuple(self.shape)}",
                expected="examples of one type and shape",
                remedy="convert, resize or pad them",
            )
        try:
            raw = rows.detach().cpu().contiguous().flatten().view(torch.uint8)
            self.file.write(raw.numpy().data)
        except OSError as error:
            refuse_write(self.path, error)
        self.n += len(rows)

    def tensor(self) -> Tensor:
        """All rows, mapped."""
        self.file.close()
        size = self.n * self.shape.numel()
        mapped = torch.from_file(str(self.path), shared=False, size=size, dtype=self.dtype)
        self._remove()  # the bytes stay as long as they are mapped
        return mapped.view(self.n, *self.shape)

    def _remove(self) -> None:
        """Take the file away."""
        self.file.close()
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        """A stream that fails leaves no file behind."""
        self._remove()
