"""Passes over data: batches of a bounded size, the same data at every pass.

Everything that sums over examples reads its data here. A pass may shuffle, since sums do not mind, but
must hold the same examples: random augmentation and dropped last batches are found by comparing the
passes, because a second pass over other data makes a matrix that belongs to no data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from linnet.errors import DataError, InputError
from linnet.params import integer
from linnet.tangent.batch import (
    EMPTY,
    Inputs,
    batch_size,
    check_finite,
    gather_data,
    map_tensors,
    require_dense,
    split,
    take,
    tensors_in,
)

SAMPLES_A_READ = 256  # examples of a Dataset read at once
DEFAULT_BLOCK = 128  # examples of a batch, where neither the caller nor a loader says


@dataclass(frozen=True)
class Batch:
    """A few examples.

    Args:
        index: Place of the batch in its pass.
        x: Inputs of N examples.
        y: Targets (N, ...), or ``None`` where the data have none.
    """

    index: int
    x: Inputs
    y: Tensor | None

    @property
    def size(self) -> int:
        """N."""
        return batch_size(self.x)

    def part(self, rows: slice, index: int | None = None) -> Batch:
        """Some of the examples.

        Args:
            rows: Which.
            index: Place of the part in the pass; by default that of the batch.

        Returns:
            A batch.
        """
        y = None if self.y is None else self.y[rows]
        return Batch(self.index if index is None else index, take(self.x, rows), y)


@dataclass(frozen=True)
class _Sums:
    """What two passes over the same data have in common, in whatever order."""

    examples: int = 0
    first: float = 0.0
    second: float = 0.0

    def agrees(self, other: _Sums) -> bool:
        """Whether the other pass holds the same, up to the rounding of another order."""
        return self.examples == other.examples and all(
            abs(a - b) <= 1e-6 * (abs(a) + abs(b) + 1e-12)
            for a, b in ((self.first, other.first), (self.second, other.second))
        )


class Batches:
    """Data that can be passed over again and again.

    Args:
        data: An (x, y) pair, inputs alone, a ``Dataset`` or a ``DataLoader``; samples may lack targets.
        device: Where batches are put; ``None`` for where they are.
        block: Largest number of examples in a batch; ``None`` for a loader's own batches and 128 otherwise.
        rank: This process among ``world`` that share the data; it gets every ``world``-th batch.
        world: Number of processes.

    Raises:
        InputError: If ``data`` is none of these kinds.

    Example:
        >>> data = Batches((torch.randn(5, 2), torch.zeros(5)), torch.device("cpu"), block=2)
        >>> [batch.size for batch in data]
        [2, 2, 1]
    """

    def __init__(
        self, data: Any, device: torch.device | None, block: int | None = None, rank: int = 0, world: int = 1
    ) -> None:
        if block is not None:
            block = integer("block", block)
        self.device, self.block, self.rank, self.world = device, block, rank, world
        self._streamed = isinstance(data, DataLoader) or (
            isinstance(data, Dataset) and not isinstance(data, TensorDataset)
        )
        self._data = data if self._streamed else _pair(data)
        self._seen: _Sums | None = None
        self._now = _Sums()

    def __iter__(self) -> Iterator[Batch]:
        """One pass; each batch is checked, and the pass as a whole compared with the first."""
        self._now = now = _Sums()
        index = 0
        for x, y in self._whole():
            for part_x, part_y in self._parts(x, y):
                if index % self.world == self.rank:
                    batch = Batch(index, *_moved(part_x, part_y, self.device))
                    _check(batch)
                    total = _fingerprint(batch)
                    now = _Sums(now.examples + batch.size, now.first + total[0], now.second + total[1])
                    self._now = now
                    yield batch
                index += 1
        if index == 0:
            raise DataError(
                "data is empty: it yields no example", expected="at least one example", remedy=EMPTY
            )
        self._compare(now)

    def first(self) -> Batch:
        """The first batch of a pass, whichever process asks; the pass is not compared."""
        for x, y in self._whole():
            for part_x, part_y in self._parts(x, y):
                batch = Batch(0, *_moved(part_x, part_y, self.device))
                _check(batch)
                return batch
        raise _empty()

    def most(self, first: Batch) -> int:
        """Examples that a batch can have if nobody limits them.

        Args:
            first: The first batch of a pass.

        Returns:
            A loader's own size, else the number of examples that there are.
        """
        if isinstance(self._data, DataLoader):
            return first.size
        return len(self._data) if self._streamed else batch_size(self._data[0])

    def length(self) -> int | None:
        """Number of batches of a pass of this process, where it can be told in advance."""
        if isinstance(self._data, DataLoader) or self._streamed:
            return None
        n = batch_size(self._data[0])
        size = self.block or DEFAULT_BLOCK
        return len(range(self.rank, -(-n // size), self.world))

    def identity(self) -> list[float]:
        """Numbers that change when the data or their order do.

        Returns:
            Sizes and sums of the first batch.

        Raises:
            InputError: If a loader shuffles, so that its batches cannot be found again.
        """
        if isinstance(self._data, DataLoader) and isinstance(self._data.sampler, RandomSampler):
            raise InputError(
                "file= with a DataLoader that shuffles",
                expected="batches in the same order when an interrupted pass goes on",
                remedy="pass shuffle=False, or leave file= out",
            )
        first = self.first()
        return [float(first.size), float(self.block or 0), *_fingerprint(first)]

    def passed(self) -> Tensor:
        """What tells the examples of the pass so far from others: their number and sums over them, (3,)."""
        return torch.tensor([self._now.examples, self._now.first, self._now.second], dtype=torch.float64)

    def has_passed(self, sums: Tensor) -> bool:
        """Whether the pass so far holds the same examples as another one did.

        Args:
            sums: From :meth:`passed`.

        Returns:
            Whether number and sums agree.
        """
        return self._now.agrees(_Sums(int(sums[0]), float(sums[1]), float(sums[2])))

    def expect(self, sums: Tensor) -> None:
        """Compare the passes to come with one that was made before.

        Args:
            sums: From :meth:`passed` at its end.
        """
        self._seen = _Sums(int(sums[0]), float(sums[1]), float(sums[2]))

    def _whole(self) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Batches as the data come."""
        if isinstance(self._data, DataLoader):
            for item in self._data:
                yield _pair(item)
        elif self._streamed:
            n = len(self._data)
            for start in range(0, n, SAMPLES_A_READ):
                yield _read(self._data, range(start, min(start + SAMPLES_A_READ, n)))
        else:
            yield self._data

    def _parts(self, x: Inputs, y: Tensor | None) -> Iterator[tuple[Inputs, Tensor | None]]:
        """A batch in parts of at most ``block`` examples."""
        n = batch_size(x)
        size = self.block or (max(n, 1) if isinstance(self._data, DataLoader) else DEFAULT_BLOCK)
        targets = [None] * n if y is None else split(y, size)
        yield from zip(split(x, size), targets, strict=False)

    def _compare(self, sums: _Sums) -> None:
        """Raise if this pass held other data than the first."""
        if self._seen is None:
            self._seen = sums
            return
        before = self._seen
        if not before.agrees(sums):
            change = (
                f"{before.examples} examples, then {sums.examples}"
                if before.examples != sums.examples
                else "the same number of examples, with other values"
            )
            raise DataError(
                f"data changes between passes: {change}",
                expected="the same examples at every pass, in any order",
                remedy="turn random augmentation and drop_last off, or pass tensors",
            )


def _empty() -> DataError:
    """Data without an example."""
    return DataError("data is empty: it yields no example", expected="at least one example", remedy=EMPTY)


def _pair(item: Any) -> tuple[Inputs, Tensor | None]:
    """(x, y) or x alone."""
    if isinstance(item, TensorDataset) and len(item.tensors) == 1:
        return item.tensors[0], None
    if isinstance(item, Tensor | Mapping):
        return item, None
    if isinstance(item, list | tuple) and len(item) == 1:
        return item[0], None
    return gather_data(item, missing=True)


def _read(data: Any, indices: range) -> tuple[Inputs, Tensor | None]:
    """Some samples of a Dataset as one batch."""
    from torch.utils.data import Subset

    first = data[indices[0]]
    if isinstance(first, Tensor | Mapping):
        samples = [first, *(data[i] for i in indices[1:])]
        return torch.utils.data.default_collate(samples), None
    return gather_data(Subset(data, list(indices)), missing=True)


def _moved(x: Inputs, y: Tensor | None, device: torch.device | None) -> tuple[Inputs, Tensor | None]:
    """A batch on the device, of tensors that autograd may keep."""
    for tensor in tensors_in((x, y)):
        require_dense(tensor, "data")
    return map_tensors(lambda t: usable(t, device), x), None if y is None else usable(y, device)


def usable(t: Tensor, device: torch.device | None) -> Tensor:
    """A tensor on the device; a clone where it was made in inference mode, which autograd cannot keep.

    Args:
        t: A tensor.
        device: The device, or ``None`` for where it is.

    Returns:
        The tensor.
    """
    moved = t if device is None else t.to(device)
    return moved.clone() if moved.is_inference() else moved


def _check(batch: Batch) -> None:
    """Raise on empty or non-finite inputs."""
    if batch.size == 0:
        raise DataError("data has an empty batch", expected="at least one example", remedy=EMPTY)
    check_finite(batch.x, "x")


def _fingerprint(batch: Batch) -> tuple[float, float]:
    """Σ v and Σ v² over the inputs and targets of the examples."""
    values = [*tensors_in(batch.x), *([] if batch.y is None else [batch.y])]
    owned = [v.detach().nan_to_num() for v in values if v.ndim and v.shape[0] == batch.size]
    first = sum(float(v.sum(dtype=torch.float64)) for v in owned)
    second = sum(float(v.double().square().sum()) for v in owned if v.numel() <= 1 << 24)
    return first, second
