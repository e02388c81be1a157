"""The batches of any kind of data, as (x, y) pairs, one after the other.

A tuple is one (x, y) pair, and so is a list of two whose second item can be targets: a tensor, an array or a
list of numbers. Any other list of pairs or dicts holds batches, and so does every object that is looped over
and is neither a container of inputs nor a data set, whose items are single samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from linnet.errors import DataError
from linnet.tangent.batch import (
    Inputs,
    as_pair,
    batch_size,
    concatenate,
    example_shapes,
    is_data_set,
    padded,
    without_targets,
    yields,
)
from linnet.tangent.door import answers, as_batch, holds_arrays, in_columns, in_rows, is_image, tensorize
from linnet.tangent.order import Said, changing, in_order, mixing, random_kept
from linnet.tangent.sharded import require_whole

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


def pairs(data: Any, said: Said | None = None, targets: bool = True) -> Iterator[tuple[Inputs, Any]]:
    """The batches of any kind of data, in their order; nothing is gathered."""
    if not targets:
        yield from ((x, torch.zeros(batch_size(x))) for x, _ in _read(data, said or Said(), unlabeled))
    else:
        yield from _read(data, Said(text=False) if said is None else said, as_pair)


def _read(data: Any, said: Said, pair: Callable[[Any, str], tuple[Any, Any]]) -> Iterator[tuple[Inputs, Any]]:
    """The batches, each split in two."""
    if isinstance(data, DataLoader):
        require_whole(data)
        loader, _, warning = in_order(data)
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
    said: Said | None = None,
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
