"""Loaders that are sharded over ``torch.distributed`` processes.

torch's ``DistributedSampler`` fills the parts up with examples that another process has too, so that all
have equally many. Which those are is known: of N examples in some order, rank r of R has those at r, r + R,
r + 2R, ..., and what comes after the N-th is filling. Other libraries' samplers are recognized by the two
numbers that they keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from linnet.errors import DataError

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
