"""Training data indexed by position, so that runs can be repeated and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from linnet.errors import DataError, InputError
from linnet.params import wrapped
from linnet.tangent.batch import (
    Inputs,
    as_pair,
    batch_size,
    concatenate,
    hash_tensors,
    is_data_set,
    on_device,
    take,
    tensors_in,
)
from linnet.tangent.door import as_batch, taken
from linnet.tangent.gather import gather_data

EVALUATED = 256  # examples predicted at once


class Examples:
    """Data that are read by position: a pair in memory, or a Dataset that is read as it is needed."""

    def __init__(self, data: Any, device: torch.device, network: nn.Module | None = None) -> None:
        self.device, self._network = device, network
        self._set: Any = None
        self._collate: Callable[[Any], Any] = _collate
        self.index: Tensor | None = None
        loaded = isinstance(data, DataLoader)
        if loaded:
            self._collate = data.collate_fn
            data = data.dataset
        if isinstance(data, IterableDataset):
            raise InputError(
                f"data is a {type(data).__name__}, which can only be read in its own order",
                expected="examples that can be read by position, so that a run can be repeated and resumed",
                remedy="pass a map-style Dataset or an (x, y) pair",
            )
        if (loaded or is_data_set(data)) and not hasattr(data, "tensors"):
            self._set, self.n = data, len(data)
            if self.n == 0:
                raise DataError(
                    "data is empty: it holds 0 examples", "at least one example", "check the path"
                )
        else:
            self._x, self._y = gather_data(data, network, keep=False)
            self._y = self._y.to(device)
            self.n = batch_size(self._x)

    @property
    def in_memory(self) -> bool:
        """Whether the examples are tensors, rather than read as they are needed."""
        return self._set is None

    def part(self, index: Tensor) -> Examples:
        """Some of the examples."""
        own = object.__new__(Examples)
        own.__dict__.update(self.__dict__)
        own.index = index.cpu() if self.index is None else self.index[index.cpu()]
        own.n = len(index)
        return own

    def batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """The examples at some positions."""
        rows = index if self.index is None else self.index[index]
        if self._set is None:
            return on_device(take(self._x, rows), self.device), self._y[rows.to(self.device)]
        x, y = as_pair(self._collate([self._set[i] for i in rows.tolist()]))
        x = x if self._network is None else taken(self._network, x)
        return on_device(x, self.device), wrapped(y).to(self.device)

    def batches(self, size: int = EVALUATED) -> Iterator[tuple[Inputs, Tensor]]:
        """All examples, in order."""
        for rows in torch.arange(self.n).split(size):
            yield self.batch(rows)

    def labels(self) -> Tensor:
        """The targets of all examples."""
        return torch.cat([y for _, y in self.batches()])

    def fingerprint(self) -> str:
        """A hash of the examples; of a Dataset only of its length and first examples."""
        if self._set is None and self.index is None:
            return hash_tensors([*tensors_in(self._x), self._y])
        x, y = self.batch(torch.arange(min(self.n, 4)))
        own = [] if self.index is None else [self.index]
        return hash_tensors([torch.tensor(self.n), y, *tensors_in(x), *own])


def _collate(samples: list[Any]) -> Any:
    """One batch of samples; the lists in dicts are arrays of numbers, which torch's own would take apart."""
    if not isinstance(samples[0], Mapping):
        return default_collate(samples)
    pairs = [as_pair(sample, "a sample") for sample in samples]
    return concatenate([as_batch(x) for x, _ in pairs]), default_collate([y for _, y in pairs])
