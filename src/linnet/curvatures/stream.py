"""Passes over data: batches of bounded size, the same data at every pass.

Everything that sums over examples reads its data here. A pass may shuffle, since sums do not mind, but
must hold the same examples: random augmentation and dropped last batches are found by comparing the
passes, because a second pass over other data makes a matrix that belongs to no data set.

Processes that share the data take every ``world``-th batch of them. That is right only if all read the same
batches in the same order, and nothing divides the data a second time; so at the end of every pass number and
sums of all parts are compared with those of the whole, as every process has read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from linnet.distributed import Share, agree, check_others, current, sum_numbers
from linnet.errors import DataError, InputError
from linnet.linalg.factorize import read
from linnet.params import integer
from linnet.tangent.batch import (
    EMPTY,
    Inputs,
    batch_size,
    check_finite,
    is_data_set,
    require_dense,
    split,
    take,
)
from linnet.tangent.data import (
    Data,
    Sharded,
    as_pair_or_inputs,
    in_batches,
    in_pieces,
    items_of,
    next_tokens,
    ordered_loader,
    owned,
    read_batches,
    require_targets,
    sharded,
)
from linnet.tangent.functional import Functional
from linnet.tangent.inputs import DataNotes, taken, tensorize
from linnet.tree import hash_tensors, map_tensors, tensors_in

SAMPLES_A_READ = 256  # examples of a Dataset read at once
FEW = 16  # examples that are kept, to see what kind of outputs they have
DEFAULT_BLOCK = 128  # examples of a batch, where neither the caller nor a loader says


@dataclass(frozen=True)
class Batch:
    """A few examples."""

    index: int  # place of the batch in its pass
    x: Inputs  # inputs of N examples
    y: Tensor | None  # targets (N, ...), or ``None`` where the data have none

    @property
    def size(self) -> int:
        """N."""
        return batch_size(self.x)

    def part(self, rows: slice, index: int | None = None) -> Batch:
        """Some of the examples."""
        y = None if self.y is None else self.y[rows]
        return Batch(self.index if index is None else index, take(self.x, rows), y)


@dataclass(frozen=True)
class _Sums:
    """Sums over the examples of a pass, independent of their order."""

    examples: int = 0
    first: float = 0.0
    second: float = 0.0

    def agrees(self, other: _Sums) -> bool:
        """Whether the other pass holds the same, up to the rounding of another order."""
        # Σ v of standardized data is a small rest of large terms: √(N Σ v²) says how large
        terms = 1e-9 * (self.examples * max(self.second, other.second)) ** 0.5
        return self.examples == other.examples and all(
            abs(a - b) <= 1e-6 * (abs(a) + abs(b) + 1e-12) + slack
            for a, b, slack in ((self.first, other.first, terms), (self.second, other.second, 0.0))
        )

    def plus(self, examples: int, first: float, second: float) -> _Sums:
        """With a batch added."""
        return _Sums(self.examples + examples, self.first + first, self.second + second)


class Batches:
    """Data that can be passed over again and again."""

    def __init__(
        self,
        data: Any,
        place: Functional | torch.device | None,
        block: int | None = None,
        share: Share | None = None,
        memory: str | int | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._names = names
        if block is not None:
            block = integer("block", block)
        self._part = sharded(data) if share is not None and share.world > 1 else None
        if share is not None and self._part is not None:
            share = replace(share, cut=False)
            _check_part(self._part, share)
        self._network = place if isinstance(place, Functional) else None
        self.device = place.device if isinstance(place, Functional) else place
        self.block, self._share = block, share
        self._before = self.share  # that of the last pass
        data = held(data, memory)
        ordered = ordered_loader(data) if isinstance(data, DataLoader) else None
        self._again_alike = ordered is None or ordered.whole  # whether a pass can be found again
        if ordered is not None and ordered.whole:
            data = ordered.loader
        self.few: Inputs = None
        self._streamed = in_pieces(data)
        self._batched = self._streamed and not is_data_set(data)
        self._data = data if self._streamed else _whole_pair(data, self._network, self._names)
        self._reading: Iterator[Any] | None = None
        self._seen: _Sums | None = None
        self._now, self._whole_sums = _Sums(), _Sums()
        self._known = False  # whether the whole has been summed, and cannot change
        self.examples = 0

    def _looked_at(self, batch: Batch) -> tuple[float, float]:
        """The sums of a batch, or an error; a few examples of the first are kept."""
        found = _checked(batch)
        if self.few is None:
            self.few = map_tensors(torch.clone, take(batch.x, slice(0, FEW)))
        return found

    @property
    def share(self) -> Share:
        """What other processes do."""
        return current() if self._share is None else self._share

    def __iter__(self) -> Iterator[Batch]:
        """One pass; each batch is checked, and the pass as a whole compared with the first."""
        self._now, share = _Sums(), self.share
        if share != self._before:  # another part of the data, which cannot be compared
            self._seen, self._known, self._before = None, False, share
        whole = self._whole_sums if self._known else _Sums()
        left = None if self._part is None else self._part.own  # of this process, fillers apart
        index = 0
        for x, y in self._whole():
            for part_x, part_y in self._parts(x, y):
                mine = not share.cut or index % share.world == share.rank
                if mine and left != 0:
                    place = index if share.cut else index * share.world + share.rank
                    batch = Batch(place, *self._moved(part_x, part_y))
                    if left is not None:
                        batch = batch.part(slice(0, left))
                        left -= batch.size
                    total = self._looked_at(batch)
                    self._now = self._now.plus(batch.size, *total)
                    yield batch
                elif share.cut and not self._known:
                    total = _sums(Batch(index, part_x, part_y))[:2]
                    whole = whole.plus(batch_size(part_x), *total)
                index += 1
                if share.world > 1:
                    check_others()
        if index == 0:
            raise _empty()
        self._settle(whole)
        self._compare(self._now)

    def _settle(self, others: _Sums) -> None:
        """Add the passes of all processes up, and compare the sum with the data; ``others``: left to them."""
        now, share = self._now, self.share
        if share.world == 1:
            self.examples = now.examples
            return
        numbers = sum_numbers([now.examples, now.first, now.second])
        added = _Sums(round(numbers[0]), numbers[1], numbers[2])
        self.examples = added.examples
        if not share.cut:
            total = None if self._part is None else self._part.total
            if total is not None and total != added.examples:
                raise _miscounted(self._part, share, added.examples, total)
            return
        whole = others if self._known else others.plus(now.examples, now.first, now.second)
        self._whole_sums, self._known = whole, not self._streamed
        if not added.agrees(whole):
            counts = (
                f"{added.examples} examples were counted on {share.world} processes, of {whole.examples}"
                if added.examples != whole.examples
                else f"{share.world} processes read other batches, or in another order"
            )
            raise DataError(
                f"data are not the same on all processes: {counts} that rank {share.rank} read",
                expected="the same batches in the same order on every process, which then shares them out",
                remedy="turn shuffling and augmentation off and pass all the data to every process, or pass "
                "each its own with Passes(shard=False)",
            )

    def first(self) -> Batch:
        """The first batch of a pass, whichever process asks; the pass is not compared."""
        for x, y in self._whole():
            for part_x, part_y in self._parts(x, y):
                batch = Batch(0, *self._moved(part_x, part_y))
                self._looked_at(batch)
                if self.share.world > 1:
                    self._require_alike(batch)
                return batch
        raise _empty()

    def _require_alike(self, batch: Batch) -> None:
        """Raise on all processes if their first batches show that their data do not belong together."""
        forms = [f"{t.dtype} {tuple(t.shape[1:])}".removeprefix("torch.") for t in tensors_in(batch.x)]
        targets = None if batch.y is None else f"{batch.y.dtype} {tuple(batch.y.shape[1:])}"
        found: dict[str, Any] = {"the form of x": ", ".join(forms), "the form of y": targets}
        if self.share.cut:
            own = [*tensors_in(batch.x), *([] if batch.y is None else [batch.y])]
            found["the number of the first examples"] = batch.size
            found["the hash of the first examples"] = hash_tensors(own)[:12]
        agree(
            DataError,
            found,
            "turn shuffling and augmentation off and pass all the data to every process, or pass each its "
            "own with Passes(shard=False)",
        )

    def most(self, first: Batch) -> int:
        """Default number of examples of a batch."""
        if self._batched or isinstance(self._data, IterableDataset):
            return first.size
        return len(self._data) if self._streamed else batch_size(self._data[0])

    def count(self) -> int | None:
        """Number of examples of a pass of all processes, where it can be told in advance."""
        if not self._streamed:
            return batch_size(self._data[0])
        data: Any = self._data.dataset if isinstance(self._data, DataLoader) else self._data
        return len(data) if is_data_set(data) and hasattr(data, "__len__") else None

    def length(self) -> int | None:
        """Number of batches of a pass of this process, where it can be told in advance."""
        if self._streamed:
            return None
        n = batch_size(self._data[0])
        size = self.block or DEFAULT_BLOCK
        batches = -(-n // size)
        return len(range(self.share.rank, batches, self.share.world)) if self.share.cut else batches

    def identity(self) -> list[float]:
        """Numbers that change when the data or their order do."""
        if not self._again_alike:
            raise InputError(
                "sums that can be taken up again, over a DataLoader that draws other samples at each pass",
                expected="the same batches when an interrupted pass goes on",
                remedy="leave sampler= out, or file= or linnet.unfinished.resumable",
            )
        first = self.first()
        return [float(first.size), float(self.block or 0), *_sums(first)[:2]]

    def passed(self) -> Tensor:
        """A fingerprint of the examples of the pass so far: their number and sums over them, (3,)."""
        return torch.tensor([self._now.examples, self._now.first, self._now.second], dtype=torch.float64)

    def has_passed(self, sums: Tensor) -> bool:
        """Whether the pass so far holds the same examples as another one did."""
        return self._now.agrees(_Sums(int(sums[0]), float(sums[1]), float(sums[2])))

    def expect(self, sums: Tensor) -> None:
        """Compare the passes to come with one that was made before."""
        self._seen = _Sums(int(sums[0]), float(sums[1]), float(sums[2]))

    def _whole(self) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Batches as the data come."""
        if not self._streamed:
            yield self._data
            return
        said = DataNotes(classes=tuple(self._names))
        for x, y in read_batches(self._again(), not self._batched, said, as_pair_or_inputs, SAMPLES_A_READ):
            if y is not None:
                y = said.numbered(y)
                require_targets(x, y, "a batch of data")
            yield x, y

    def _again(self) -> Iterator[Any]:
        """What the data yield, from the beginning."""
        found = items_of(self._data)
        if found is self._reading:
            raise DataError(
                f"data is {type(self._data).__name__}, whose second pass goes on where the first was left",
                expected="an object whose __iter__ begins anew at every pass",
                remedy="pass iter(data), which is read once and kept",
            )
        if not isinstance(self._data, DataLoader):  # its workers are told to begin anew
            self._reading = found
        return found

    def _parts(self, x: Inputs, y: Tensor | None) -> Iterator[tuple[Inputs, Tensor | None]]:
        """A batch in parts of at most ``block`` examples."""
        n = batch_size(x)
        size = self.block or (max(n, 1) if self._batched else DEFAULT_BLOCK)
        targets = [None] * n if y is None else split(y, size)
        yield from zip(split(x, size), targets, strict=False)

    def _moved(self, x: Inputs, y: Tensor | None) -> tuple[Inputs, Tensor | None]:
        """A batch as the network takes it, on the device, of tensors that autograd may keep."""
        if self._network is not None:
            x = taken(self._network, x)
            y = None if y is None else next_tokens(self._network, x, y, DataNotes())
        for tensor in tensors_in((x, y)):
            require_dense(tensor, "data")
        device = self.device
        return map_tensors(lambda t: usable(t, device), x), None if y is None else usable(y, device)

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


def _check_part(part: Sharded, share: Share) -> None:
    """Raise unless a loader's part is that of this process."""
    if (part.parts, part.index) != (share.world, share.rank):
        raise DataError(
            f"data is a DataLoader whose {part.by} makes part {part.index} of {part.parts}",
            expected=f"part {share.rank} of {share.world}, for this process",
            remedy="pass a DataLoader without that sampler: the data are shared out anyway",
        )


def _miscounted(part: Sharded | None, share: Share, counted: int, total: int) -> DataError:
    """A sampler that gives examples twice, or not at all."""
    by = "sampler" if part is None else part.by
    return DataError(
        f"data is a DataLoader whose {by} gives {share.world} processes {counted} examples of {total}",
        expected="every example once: neither left out nor added to make all parts equally long",
        remedy="pass a DataLoader without that sampler and without drop_last: the data are shared out anyway",
    )


def _empty() -> DataError:
    """Data without an example."""
    return DataError("data is empty: it yields no example", expected="at least one example", remedy=EMPTY)


def held(data: Any, memory: str | int | None = None, keep: bool = False) -> Any:
    """Data that can be passed over more than once."""
    if isinstance(data, Iterator):
        return Data.of(data, missing=True, memory=memory).pair
    if not keep or not isinstance(data, Tensor | tuple | list | Mapping):
        return data
    if in_batches(data):
        return [held(batch, memory, keep) for batch in data]
    x, y = _whole_pair(data)
    return owned(x, memory) if y is None else (owned(x, memory), y.clone())


def _whole_pair(
    data: Any, network: Functional | None = None, names: Sequence[str] = ()
) -> tuple[Inputs, Tensor | None]:
    """(x, y) or x alone, of data that come in one piece."""
    x, y = as_pair_or_inputs(data.tensors if isinstance(data, TensorDataset) else data, "data")
    if y is None:
        return tensorize(x), None
    several = isinstance(data, tuple) and isinstance(x, list)  # inputs, or samples, as the network says
    return Data.of(data, network if several else None, missing=True, keep=False, classes=names).pair


def usable(t: Tensor, device: torch.device | None) -> Tensor:
    """A tensor on the device; a clone where it was made in inference mode, which autograd cannot keep."""
    moved = t if device is None else t.to(device)
    return moved.clone() if moved.is_inference() else moved


def _checked(batch: Batch) -> tuple[float, float]:
    """Σ v and Σ v² over the inputs and targets of the examples; raises on empty or non-finite inputs."""
    if batch.size == 0:
        raise DataError("data has an empty batch", expected="at least one example", remedy=EMPTY)
    first, second, inputs = _sums(batch)
    if not math.isfinite(inputs):
        check_finite(batch.x, "x")
    return first, second


def _sums(batch: Batch) -> tuple[float, float, float]:
    """Σ v and Σ v² of what is finite in the examples, and Σ x, which is finite only if all inputs are."""
    inputs = tensors_in(batch.x)
    values = [*inputs, *([] if batch.y is None else [batch.y])]
    owned = [v.detach().nan_to_num() for v in values if v.ndim and v.shape[0] == batch.size]
    first = [v.sum(dtype=torch.float64) for v in owned]
    second = [v.double().square().sum() for v in owned if v.numel() <= 1 << 24]
    every = [v.detach().sum(dtype=torch.float64) for v in inputs if v.is_floating_point()]
    found = read([*first, *second, *every])  # in one wait for the device
    n, m = len(first), len(first) + len(second)
    return sum(found[:n]), sum(found[n:m]), sum(found[m:])
