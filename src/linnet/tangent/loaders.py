"""Loaders: in the order of their data set, or refused where each process has a part of it.

torch's ``DistributedSampler`` fills the parts up with examples that another process has too, so that all
have equally many. Which those are is known: of N examples in some order, rank r of R has those at r, r + R,
r + 2R, ..., and what comes after the N-th is filling. Other libraries' samplers are recognized by the two
numbers that they keep.

Positions in a fit are positions in the data set. A loader that shuffles, and one whose sampler orders or
drops samples, gives an order that nobody can find again, and forgetting, influence and leave-one-out name
positions. A data set has an order of its own: what the sampler draws is read in that order, by the loader's
own workers and collation. Where the sampler leaves samples out or repeats them, positions are those among the
samples drawn, and this is said.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from linnet.errors import DataError
from linnet.tangent.batch import is_data_set
from linnet.tree import tensors_in

# How torch, accelerate and datasets call the number of parts and which of them this is.
_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
_INSIDE = ("sampler", "batch_sampler", "base_dataloader", "dataset", "_distributed", "state")
_DEPTH = 3  # of samplers in samplers: a batch sampler's shard has a batch sampler, which has a sampler


@dataclass(frozen=True)
class Sharded:
    """One of several parts of a data set."""

    by: str  # what makes the parts
    parts: int  # their number
    index: int  # which this is
    total: int | None  # examples of the data set; ``None`` where it cannot tell
    # examples of this part without those that only fill it up; `None` where that is not known
    own: int | None


def sharded(data: Any) -> Sharded | None:
    """The part of the data that a loader gives to this process."""
    if not isinstance(data, DataLoader):
        return None
    found = _sampler(data, _DEPTH)
    if found is None:
        return None
    sampler, parts, index = found
    try:
        total = len(data.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # torch's own word for a dataset that cannot tell
        total = None
    own = None
    if total is not None and _is_plain(sampler, data):
        own = max(0, -(-(total - index) // parts))
    return Sharded(type(sampler).__name__, parts, index, total, own)


def require_whole(data: Any) -> None:
    """Raise if a loader gives each process a part, where every process computes by itself."""
    # Without a group of processes too: nobody there has the other parts.
    part = sharded(data)
    if part is None:
        return
    about = part.own if part.own is not None or part.total is None else part.total // part.parts
    size = "" if part.total is None else f", about {about} of {part.total} examples"
    raise DataError(
        f"data is a DataLoader whose {part.by} gives this process part {part.index} of {part.parts}{size}",
        expected="all the data on every process: each makes the whole result by itself",
        remedy="pass a DataLoader without that sampler, or the tensors",
    )


def _sampler(found: Any, depth: int) -> tuple[Any, int, int] | None:
    """The sampler that makes parts, their number and which this is, looking inside."""
    for parts, index in _NAMES:
        numbers = [_attribute(found, name) for name in (parts, index)]
        if all(isinstance(n, int) and not isinstance(n, bool) for n in numbers) and numbers[0] > 1:
            return found, numbers[0], numbers[1]
    for name in _INSIDE if depth else ():
        inner = _attribute(found, name)
        whole = name == "dataset" and isinstance(inner, Dataset) and not isinstance(inner, IterableDataset)
        if inner is None or whole or isinstance(inner, torch.Tensor | str | dict | list | tuple):
            continue
        if (deeper := _sampler(inner, depth - 1)) is not None:
            return deeper
    return None


def _attribute(found: Any, name: str) -> Any:
    """An attribute, ``None`` where there is none or asking for it fails."""
    try:
        return getattr(found, name, None)
    except Exception:  # properties of other libraries may raise anything
        return None


def _is_plain(sampler: Any, loader: DataLoader[Any]) -> bool:
    """Whether this is torch's sampler, filling up as torch does, of the loader's own data set."""
    batches = loader.batch_sampler
    inner = batches.sampler if type(batches) is BatchSampler else loader.sampler
    return (
        isinstance(sampler, DistributedSampler)
        and type(sampler).__iter__ is DistributedSampler.__iter__
        and not sampler.drop_last
        and inner is sampler
        and len(sampler.dataset) == len(loader.dataset)  # type: ignore[arg-type]
    )


READINGS = 4  # of a sample, to see whether it changes: half of all flips at random are no flip
FIND = "pass the data set itself, or torch.utils.data.Subset(dataset, indices)"


@dataclass
class DataNotes:
    """What is to be said of data."""

    notes: list[str] = field(default_factory=list)  # what was done with them, which changes no result
    warnings: list[str] = field(default_factory=list)  # what a reader of the results must know
    # names of the classes, where y is text: those that there are already, or those that are found
    classes: tuple[str, ...] = ()
    text: bool = True  # whether y may be text
    columns: tuple[str, ...] = ()  # of data frames: those of the data before, or those that are found
    _numbers: dict[str, int] = field(default_factory=dict)
    _kinds: set[str] = field(default_factory=set)  # of y: whether text or numbers

    def of_kind(self, kind: str) -> None:
        """Raise where some of y are text and others numbers, or missing."""
        self._kinds.add(kind)
        if len(self._kinds) > 1:
            raise DataError(
                "y is text in some samples, and a number or missing in others",
                expected="text alone, or numbers alone",
                remedy="drop or repair these samples",
            )

    @classmethod
    def known(cls, classes: Sequence[str]) -> DataNotes:
        """Of data whose y may be text only where the classes have names already."""
        return cls(classes=tuple(classes), text=bool(classes))

    def number(self, words: Sequence[str]) -> Tensor:
        """Numbers of words, in the order in which they come for the first time."""
        return torch.tensor([self._numbers.setdefault(str(word), len(self._numbers)) for word in words])

    def numbered(self, y: Tensor) -> Tensor:
        """Classes for what :meth:`number` gave, in alphabetical order or that of the classes known."""
        if not self._numbers:
            return y
        if not self.classes:
            self.classes = tuple(sorted(self._numbers))
            self.notes.append("classes were numbered in alphabetical order")
        if unknown := sorted(set(self._numbers) - set(self.classes)):
            raise DataError(
                f"y holds the class {unknown[0]!r}",
                expected=f"one of {', '.join(map(repr, self.classes))}, as in the data before",
                remedy="check the spelling, or fit again with examples of all classes",
            )
        return torch.tensor([self.classes.index(word) for word in self._numbers])[y]

    def reasons(self) -> dict[str, str]:
        """The notes, each once, for the record of a fit."""
        return {"data": "; ".join(dict.fromkeys(self.notes))} if self.notes else {}


class Ordered(NamedTuple):
    """A loader in the order of its data set."""

    loader: DataLoader[Any]  # the loader to read
    whole: bool = True  # whether it gives every sample of the data set once, or all that there is to give
    said: str | None = None  # what a reader of positions must know, if anything


@contextlib.contextmanager
def random_kept(*sources: Any) -> Iterator[None]:
    """The random streams of the process, and those of some generators, as they were."""
    own = [g for g in (getattr(source, "generator", None) for source in sources) if g is not None]
    mine = [(g, g.get_state()) for g in own if isinstance(g, torch.Generator)]
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - samplers draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        for generator, state in mine:
            generator.set_state(state)


def ordered_loader(loader: DataLoader[Any]) -> Ordered:
    """The samples that a loader draws, in the order of its data set."""
    data, batches = loader.dataset, loader.batch_sampler
    sampler = loader.sampler if type(batches) is not BatchSampler else batches.sampler
    plain = batches is None or type(batches) is BatchSampler
    if plain and type(sampler) is SequentialSampler and not loader.drop_last:
        return Ordered(loader)
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or sharded(loader) is not None:
        return Ordered(loader)
    name = type(sampler if plain else batches).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        return Ordered(loader, False, f"{type(loader).__name__} has an order of its own, in which "
                       f"positions cannot be found again; {FIND}")  # fmt: skip
    with random_kept(sampler, batches, loader):
        drawn = list(sampler if batches is None else batches)
    flat = drawn if batches is None else [index for batch in drawn for index in batch]
    if not all(isinstance(index, int | np.integer) for index in flat):
        return Ordered(loader, False, f"the keys of {name} have no order: positions are those of one "
                       f"pass over the loader; {FIND}")  # fmt: skip
    n, found = len(data), sorted(int(index) for index in flat)
    size = loader.batch_size or max((len(batch) for batch in drawn), default=1) if batches is not None else 1
    once = len(set(found)) == len(found)
    if once and loader.drop_last and n - len(found) < size:
        found = list(range(n))
    said = None
    if found != list(range(n)):
        twice = "" if once else ", some of them more than once"
        said = (
            f"the loader's {name} draws {len(found)} times from {n} samples{twice}: positions count what was "
            f"drawn, in the order of the data set; {FIND}, for positions in it"
        )
    parts = found if batches is None else [found[i : i + size] for i in range(0, len(found), size)]
    how = {"sampler": parts, "batch_size": None} if batches is None else {"batch_sampler": parts}
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers")  # fmt: skip
    made: DataLoader[Any] = DataLoader(data, **how, **{name: getattr(loader, name) for name in kept})
    return Ordered(made, said is None, said)


def changing(data: Any) -> str | None:
    """Whether a data set gives other values each time that a sample is read, as augmentation does."""
    inner = data
    while isinstance(inner, Subset):
        inner = inner.dataset
    if isinstance(inner, TensorDataset | IterableDataset) or not is_data_set(data) or not len(data):
        return None
    with random_kept():
        for place in sorted({0, len(data) // 2, len(data) - 1}):
            first = data[place]
            if any(not _equal(first, data[place]) for _ in range(READINGS - 1)):
                return (
                    f"the data set gives sample {place} other values each time that it is read, as "
                    "augmentation does: positions are right, values are those of one reading; turn it off"
                )
    return None


def mixing(loader: DataLoader[Any], batch: Any) -> str | None:
    """Whether samples of the first batch of a loader differ from what its collation makes of them alone."""
    indices = loader.batch_sampler
    if loader.collate_fn in (default_collate, default_convert) or not is_data_set(loader.dataset):
        return None
    plain = isinstance(indices, BatchSampler) and type(indices.sampler) is SequentialSampler
    known = indices if plain or isinstance(indices, list) else None
    if known is None or type(loader).__iter__ is not DataLoader.__iter__:
        return None  # an order that no second pass finds again
    with random_kept(loader):
        places: list[int] = list(next(iter(known), []))
        for place in {0, len(places) - 1} if places else ():
            try:
                alone = loader.collate_fn([loader.dataset[places[place]]])
            except Exception:  # the user's own collation may need several samples
                return None
            if not all(
                _same_row(t, one, place, len(places))
                for t, one in zip(tensors_in(batch), tensors_in(alone), strict=False)
            ):
                return (
                    f"the loader's collate_fn gives sample {places[place]} other values in a batch than "
                    "alone, as mixing or permuting samples does: rows are those of one reading, and may be "
                    f"those of no sample; {FIND}"
                )
    return None


def _same_row(batch: Tensor, alone: Tensor, place: int, n: int) -> bool:
    """Whether a row of a batch is what a batch of one has; rows of other shapes are filled up, and count."""
    if not batch.ndim or len(batch) != n or alone.shape != (1, *batch.shape[1:]):
        return True
    return torch.allclose(batch[place].double(), alone[0].double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _equal(a: Any, b: Any) -> bool:
    """Whether two samples are the same."""
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(one, other) for one, other in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if hasattr(a, "__array__"):
        first, second = np.asarray(a), np.asarray(b)
        return first.shape == second.shape and bool(((first == second) | (first != first)).all())
    return bool(a == b) or a != a
