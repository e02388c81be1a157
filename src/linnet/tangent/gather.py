"""Any kind of data: its batches as (x, y) pairs, one after the other, or all of it as one pair.

A tuple is one (x, y) pair, and so is a list of two whose second item can be targets: a tensor, an array or a
list of numbers. Any other list of pairs or dicts holds batches, and so does every object that is looped over
and is neither a container of inputs nor a data set, whose items are single samples.

What comes batch by batch is put side by side in memory, or, where that takes too much of it, in temporary
files that are mapped: they are read from the disk when they are looked at, and the system takes the memory
back when it needs it. So a stream is read once, however many passes there are over the data.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from linnet.disk import refuse_write
from linnet.errors import DataError
from linnet.memory import available_bytes, parse_bytes
from linnet.params import warn
from linnet.tangent.batch import (
    EMPTY,
    SHARED,
    Inputs,
    as_pair,
    batch_size,
    check_examples,
    check_finite,
    concatenate,
    doubts_of_pixels,
    example_shapes,
    is_data_set,
    mask_of,
    padded,
    require_dense,
    require_some,
    take,
    without_targets,
    yields,
)
from linnet.tangent.door import (
    admit,
    answers,
    are_alike,
    as_batch,
    device_of,
    holds_arrays,
    in_columns,
    in_rows,
    is_image,
    one_image,
    outputs_or_none,
    taken,
    tensorize,
)
from linnet.tangent.functional import Functional
from linnet.tangent.loaders import DataNotes, changing, mixing, ordered_loader, random_kept, require_whole
from linnet.tree import map_tensors, tensors_in

TOGETHER = 32  # samples of a data set that are put side by side
SPLIT = "check that x and y come from the same split"


def in_batches(data: Any) -> bool:
    """Whether data come as (x, y) batches that are no loader's."""
    if isinstance(data, list):
        batches = all(isinstance(one, list | tuple | Mapping) for one in data)
        return batches and (len(data) != 2 or holds_arrays(data[1]))
    return yields(data) and not is_data_set(data) and not isinstance(data, DataLoader)


def in_pieces(data: Any) -> bool:
    """Whether data come batch by batch or sample by sample, rather than as one pair of tensors."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return False
    return isinstance(data, DataLoader) or is_data_set(data) or in_batches(data)


def unlabeled(item: Any, _: str = "") -> tuple[Any, Any]:
    """A batch or sample whose targets are left out, if it has any, as (x, y): 0 for one sample."""
    x, y = item, None
    if isinstance(item, Mapping):
        x, y = without_targets(item)
    elif isinstance(item, list | tuple) and len(item) in (1, 2):
        x, y = item[0], item[1] if len(item) == 2 else None
    pictures = x.values() if isinstance(x, Mapping) else (x,)
    return x, 0 if _is_number(y) or any(map(is_image, pictures)) else None


def holds_samples(x: Any) -> bool:
    """Whether new inputs come as data do: a data set, a loader, batches or samples."""
    if isinstance(x, list):
        return bool(x) and all(isinstance(one, list | tuple) and len(one) == 2 and _is_number(one[1])
                               and holds_arrays(one[0]) for one in x)  # fmt: skip
    if hasattr(x, "__array__") or hasattr(x, "to_numpy") or isinstance(x, Tensor | Sequence | Mapping):
        return False
    return isinstance(x, DataLoader) or is_data_set(x) or yields(x)


def pairs(data: Any, said: DataNotes | None = None, targets: bool = True) -> Iterator[tuple[Inputs, Any]]:
    """The batches of any kind of data, in their order; nothing is gathered."""
    if not targets:
        yield from ((x, torch.zeros(batch_size(x))) for x, _ in _read(data, said or DataNotes(), unlabeled))
    else:
        yield from _read(data, DataNotes(text=False) if said is None else said, as_pair)


def _read(
    data: Any, said: DataNotes, pair: Callable[[Any, str], tuple[Any, Any]]
) -> Iterator[tuple[Inputs, Any]]:
    """The batches, each split in two."""
    if isinstance(data, DataLoader):
        require_whole(data)
        loader, _, warning = ordered_loader(data)
        said.warnings += (told := [*filter(None, (warning, changing(data.dataset)))])
        with random_kept(loader, loader.sampler):
            batches = iter(loader)
        for i, batch in enumerate(batches):
            if i == 0 and not told and pair is as_pair:
                said.warnings += filter(None, (mixing(loader, batch),))
            x, y = pair(batch, "a batch of the DataLoader")
            yield tensorize(x) if pair is unlabeled else x, y
    elif isinstance(data, IterableDataset):
        yield from _together(
            as_sample(one, f"sample {i} of the stream", said, pair) for i, one in enumerate(data)
        )
    elif in_pieces(data) and is_data_set(data):
        said.warnings += filter(None, (changing(data),))
        yield from _together(
            as_sample(data[i], f"sample {i} of the data set", said, pair) for i in range(len(data))
        )
    elif in_batches(data):
        found = (pair(batch, f"batch {i} of data") for i, batch in enumerate(data))
        first = list(islice(found, 1))
        rows = chain(first, found)
        if first and _is_number(first[0][1]):  # single samples
            yield from _together((as_batch(x), answers(y, said)[None]) for x, y in rows)
        else:
            yield from ((tensorize(x), y) for x, y in rows)
    else:
        x, y = data.tensors if isinstance(data, TensorDataset) else pair(data, "data")
        yield tensorize(in_columns(x, said)), in_rows(x, y, said)


def _is_number(y: Any) -> bool:
    """Whether targets are those of one sample: a number or a word."""
    return isinstance(y, int | float | str | np.generic) or (isinstance(y, Tensor) and y.ndim == 0)


def require_targets(x: Inputs, y: Tensor, name: str) -> None:
    """Raise unless there is one real target for each input."""
    if y.is_complex():
        raise DataError(f"y has type {y.dtype}", "real targets", "pass y.real, or its parts as two outputs")
    if y.ndim == 0 or y.shape[0] != batch_size(x):
        raise DataError(
            f"{name} has {batch_size(x)} inputs but targets of shape {tuple(y.shape)}",
            expected="one target for each input",
            remedy=SPLIT if y.ndim else "give batches rather than samples, as DataLoader(samples) does",
        )


def side_by_side(parts: list[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    """Batches as one."""
    inputs = [x for x, _ in parts]
    return concatenate(inputs), concatenate(padded(inputs, [y for _, y in parts]))


def as_sample(
    item: Any,
    name: str,
    said: DataNotes | None = None,
    pair: Callable[[Any, str], tuple[Any, Any]] = as_pair,
) -> tuple[Inputs, Tensor]:
    """A sample as a batch of one, (1, ...)."""
    x, y = pair(item, name)
    return as_batch(x), answers(0 if pair is unlabeled else y, said)[None]


def _together(samples: Iterable[tuple[Inputs, Tensor]]) -> Iterator[tuple[Inputs, Tensor]]:
    """Batches of one side by side, as many as have one shape, and no more than a few."""
    held: list[tuple[Inputs, Tensor]] = []
    for own in samples:
        if held and (len(held) == TOGETHER or example_shapes(held[0]) != example_shapes(own)):
            yield side_by_side(held)
            held = []
        held.append(own)
    if held:
        yield side_by_side(held)


LARGER = 8  # times the memory that bytes take as floats, at most
PIECE = 1 << 24  # bytes that are owned to a file at a time
ALIKE = 1e-2  # of outputs, with and without positions that are hidden: rounding of half types is below
IN_MEMORY = 0.25  # share of the memory that a stream may take while it is put side by side


def gather_data(
    data: Any,
    network: Functional | nn.Module | None = None,
    missing: bool = False,
    memory: str | int | None = None,
    keep: bool = True,
    said: DataNotes | None = None,
    targets: bool = True,
) -> tuple[Inputs, Tensor]:
    """The whole of ``data`` as one (x, y) pair, in memory or mapped from a temporary file."""
    heard = DataNotes(text=False) if said is None else said
    known = network.known if isinstance(network, Functional) else None
    heard.columns = heard.columns if known is None else known.columns
    if in_pieces(data):
        gathered, shortest = Gathered(_limit(memory)), None
        # what is drawn to augment samples is drawn again by the next call
        with random_kept() if is_data_set(data) or isinstance(data, DataLoader) else nullcontext():
            for i, (piece, given) in enumerate(pairs(data, heard, targets)):
                own = answers(given, heard)
                inputs = piece if network is None else admit(network, tensorize(piece), heard)
                require_targets(inputs, own, f"batch {i} of data")
                gathered.add(inputs, own)
                shortest = _shorter(shortest, inputs, len(own))
        x, y = gathered.whole()
        if network is not None and shortest is not None:
            _check_padding(network, *shortest, x)
    else:
        ((x, given),) = pairs(data, heard, targets)
        y = answers(given, heard)
        if are_alike(x) and y.ndim and len(x) == len(y) and (network is None or len(x[0]) != len(y)):
            x = torch.stack(x)  # samples
        x = x if network is None else _admitted(network, x, heard, _limit(memory))
        if keep:
            x, y = owned(x, memory, _read_only(data)), y.detach().clone()
    y = heard.numbered(y)
    require_some(x, "data")
    require_targets(x, y, "data")
    if network is not None and targets:
        heard.warnings += doubts_of_pixels(x, heard.notes) if known is None else known.doubts(x, heard.notes)
    if keep:
        for warning in heard.warnings:
            warnings.warn(warning, stacklevel=3)
    check_finite(x, "x")
    if not missing:
        check_finite(y, "y")
    return x, y if network is None else y.to(device_of(network))


def examples(network: Functional | nn.Module, x: Any, name: str = "x") -> Inputs:
    """New inputs as the network takes them, of any kind of data; targets are left out."""
    known = network.known if isinstance(network, Functional) else None
    said = DataNotes(columns=() if known is None else known.columns)
    if isinstance(x, TensorDataset) and len(x.tensors) < 3:
        x = x.tensors[0]
    if holds_samples(x):
        made, _ = gather_data(x, network, missing=True, keep=False, said=said, targets=False)
    else:
        made = taken(network, one_image(network, in_columns(x, said)), name, said)
        check_examples(made, name)
    for line in (*said.warnings, *([] if known is None else known.doubts(made, said.notes))):
        warn(line)
    return made


def _admitted(network: Functional | nn.Module, x: Inputs, said: DataNotes, limit: int) -> Inputs:
    """A batch as the network takes it, piece by piece where that takes much memory."""
    held = sum(t.nbytes for t in tensors_in(x))
    if LARGER * held <= limit or not isinstance(x, Tensor) or len(x) < 2:
        return admit(network, x, said)
    if admit(network, x[:1]).dtype == x.dtype:
        return admit(network, x, said)
    pieces = Gathered(limit)
    for part in x.split(max(1, PIECE * len(x) // held)):
        made = admit(network, part, said)
        pieces.add(made, torch.zeros(len(part)))
    return pieces.whole()[0]


def _shorter(before: tuple[Inputs, int, int] | None, x: Inputs, n: int) -> tuple[Inputs, int, int] | None:
    """An example of the shortest sequences so far, its place, and the number of examples so far."""
    if (key := mask_of(x)) is None:
        return before
    seen = 0 if before is None else before[2]
    if before is None or x[key].shape[1] < before[0][key].shape[1]:
        return map_tensors(torch.clone, take(x, slice(0, 1))), seen, seen + n
    return before[0], before[1], seen + n


def _check_padding(network: Functional | nn.Module, one: Inputs, place: int, _: int, x: Inputs) -> None:
    """Raise if an example that was filled up has other outputs than before."""
    key, filled = mask_of(one), take(x, slice(place, place + 1))
    if key is None or one[key].shape == filled[key].shape:
        return
    short, long = outputs_or_none(network, one), outputs_or_none(network, filled)
    if short is None or long is None:
        return
    if short.ndim > 1 and short.shape != long.shape:  # an output for each position
        long = long[:, : short.shape[1]]
    scale = float(short.abs().max())
    if short.shape != long.shape or float((short - long).abs().max()) > ALIKE * max(scale, 1e-30):
        raise DataError(
            f"batches of sequences have different lengths, and filling up {tuple(one[key].shape[1:])} to "
            f"{tuple(filled[key].shape[1:])} positions that {key!r} hides changes the network's outputs",
            expected="sequences of one length, or a network that leaves hidden positions out",
            remedy='pad all of them alike, as tokenizer(texts, padding=True) or padding="max_length" does',
        )


def _limit(memory: str | int | None) -> int:
    """Bytes that data may take in memory."""
    return int(IN_MEMORY * (available_bytes() if memory is None else parse_bytes(memory)))


def _read_only(data: Any) -> set[int]:
    """The addresses of the arrays among the data that are maps of a file opened for reading alone."""
    if isinstance(data, Mapping | tuple):
        parts = data.values() if isinstance(data, Mapping) else data
        return {place for part in parts for place in _read_only(part)}
    base = data
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.mode == "r":
            return {data.__array_interface__["data"][0]}
        base = base.base
    return set()


def owned(x: Inputs, memory: str | int | None = None, lasting: Collection[int] = ()) -> Inputs:
    """Examples in memory of their own: what the caller writes into his arrays later does not reach them."""
    limit = _limit(memory)

    def one(t: Tensor) -> Tensor:
        require_dense(t, "x")
        if t.data_ptr() in lasting:
            return t
        if t.nbytes <= limit or t.device.type != "cpu" or not t.ndim:
            return t.detach().clone()
        file = _Mapped(t)
        for rows in t.detach().split(max(1, PIECE * len(t) // t.nbytes)):
            file.append(rows)
        return file.tensor()

    return map_tensors(one, x)


class Gathered:
    """Batches that come one after the other, as one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._batches: list[tuple[Inputs, Tensor]] = []
        self._held = 0
        self._like: Inputs = None  # one example of what is in files
        self._files: list[_Mapped | None] = []  # of every tensor of x, then y; none for what all share

    def add(self, x: Inputs, y: Tensor) -> None:
        """Take a batch."""
        # y (n, ...)
        if self._files:
            self._write(self._flat(x, y))
            return
        # copies: a generator may fill the same tensors again
        self._batches.append((map_tensors(torch.clone, x), y.clone()))
        self._held += sum(t.nbytes for t in (*tensors_in(x), y))
        if 2 * self._held > self._limit:  # side by side they take as much again
            self._begin()

    def whole(self) -> tuple[Inputs, Tensor]:
        """All batches side by side, (N, ...)."""
        if self._files:
            *inputs, targets = [None if file is None else file.tensor() for file in self._files]
            mapped: Iterator[Tensor | None] = iter(inputs)

            def placed(shared: Tensor) -> Tensor:
                own = next(mapped)
                return shared if own is None else own

            assert targets is not None
            return map_tensors(placed, self._like), targets
        batches, self._batches = self._batches, []
        if not batches:
            raise DataError(
                "data is empty: it yields no example", expected="at least one example", remedy=EMPTY
            )
        return batches[0] if len(batches) == 1 else side_by_side(batches)

    def _begin(self) -> None:
        """Move what is held to files, one batch after the other."""
        first = self._like = self._batches[0][0]
        held = [self._flat(x, y) for x, y in self._batches]
        own = [
            all(_has_rows(t, len(flat[-1])) for t, flat in zip(column, held, strict=True))
            for column in zip(*held, strict=True)
        ]
        rows = iter(own)
        self._like = map_tensors(lambda t: (t[:1] if next(rows) else t).clone(), first)
        self._files = [_Mapped(t) if mine else None for t, mine in zip(held[0], own, strict=True)]
        self._batches = []
        for flat in held:
            self._write(flat)

    def _flat(self, x: Inputs, y: Tensor) -> list[Tensor]:
        """The tensors of a batch in the order of the files."""
        concatenate([take(self._like, slice(0, 1)), take(x, slice(0, 1))])  # raises where they do not fit
        return [*tensors_in(_ordered(x, self._like)), y]

    def _write(self, flat: list[Tensor]) -> None:
        """Append the tensors of a batch to the files."""
        n = len(flat[-1])
        for file, tensor in zip(self._files, flat, strict=True):
            if file is not None and not _has_rows(tensor, n):
                raise DataError(
                    f"an input of shape {tuple(tensor.shape)} comes with {n} examples, "
                    "and those before had a row for each",
                    expected="a row for each example in every batch, or in none",
                    remedy=SHARED,
                )
            if file is not None:
                file.append(tensor)


def _has_rows(tensor: Tensor, n: int) -> bool:
    """Whether a tensor of a batch has a row for each of its n examples."""
    return tensor.ndim > 0 and tensor.shape[0] == n


def _ordered(x: Inputs, like: Inputs) -> Inputs:
    """A batch whose dicts have their keys in the order of another's."""
    if isinstance(like, Mapping):
        return {key: _ordered(x[key], value) for key, value in like.items()}
    if isinstance(like, list | tuple):
        return tuple(_ordered(a, b) for a, b in zip(x, like, strict=True))
    return x


class _Mapped:
    """A tensor that grows along its first axis in a temporary file."""

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
