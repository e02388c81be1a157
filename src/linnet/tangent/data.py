"""Data of any kind: their batches one after the other, or all of them as one :class:`Data`, made at the door.

A tuple is one (x, y) pair, and so is a list of two whose second item can be targets: a tensor, an array or a
list of numbers. Any other list of pairs or dicts holds batches, and so does every object that is looped over
and is neither a container of inputs nor a data set, whose items are single samples. A dict carries the
targets as ``"labels"`` or ``"label"``; what is left of it is x.

Positions in a fit are positions in the data set. A loader that shuffles, and one whose sampler orders or
drops samples, gives an order that nobody can find again, and forgetting, influence and leave-one-out name
positions. So what the sampler draws is read in the order of the data set, by the loader's own workers and
collation. Where the sampler leaves samples out or repeats them, positions are those among the samples drawn,
and this is said. Where each process has a part, rank r of R has the examples at r, r + R, r + 2R, ... of N in
some order; what comes after the N-th fills the parts up with examples that another process has too.

What comes batch by batch is put side by side in memory, or, where that takes too much of it, in temporary
files that are mapped: they are read from the disk when they are looked at, and the system takes the memory
back when it needs it. So a stream is read once, however many passes there are over the data.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from linnet.distributed import require_same_arguments
from linnet.errors import DataError, InputError
from linnet.files import refuse_write
from linnet.memory import available_bytes, parse_bytes
from linnet.params import warn
from linnet.tangent.batch import (
    EMPTY,
    IGNORED,
    MASK,
    SHARED,
    TARGETS,
    TOKENS,
    Inputs,
    batch_size,
    check_examples,
    check_finite,
    concatenate,
    example_shapes,
    is_data_set,
    mask_of,
    padded,
    require_dense,
    require_some,
    take,
    yields,
)
from linnet.tangent.functional import Functional
from linnet.tangent.inputs import (
    DataNotes,
    admit,
    answers,
    are_alike,
    as_batch,
    device_of,
    doubts,
    has_index,
    holds_arrays,
    in_columns,
    in_rows,
    is_image,
    one_image,
    outputs_or_none,
    states_or_none,
    taken,
    tensorize,
)
from linnet.tangent.modes import random_kept
from linnet.tangent.sequences import ALONG
from linnet.tree import leaves, map_tensors, tensors_in

# -- what is given -------------------------------------------------------------------------------------


def in_batches(data: Any) -> bool:
    """Whether data come as (x, y) batches that are no loader's."""
    if isinstance(data, list):
        batches = all(isinstance(one, list | tuple | Mapping) for one in data)
        return batches and (len(data) != 2 or holds_arrays(data[1]))
    return yields(data) and not is_data_set(data) and not isinstance(data, DataLoader)


def in_pieces(data: Any) -> bool:
    """Whether data come batch by batch or sample by sample, rather than as one pair of tensors."""
    if isinstance(data, TensorDataset) and len(data.tensors) < 3:
        return False
    return isinstance(data, DataLoader) or is_data_set(data) or in_batches(data)


def holds_samples(x: Any) -> bool:
    """Whether new inputs come as data do: a data set, a loader, batches or samples."""
    if isinstance(x, list):
        return bool(x) and all(isinstance(one, list | tuple) and len(one) == 2 and _is_number(one[1])
                               and holds_arrays(one[0]) for one in x)  # fmt: skip
    if hasattr(x, "__array__") or hasattr(x, "to_numpy") or isinstance(x, Tensor | Sequence | Mapping):
        return False
    return isinstance(x, DataLoader) or is_data_set(x) or yields(x)


def without_targets(item: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """A dict as x and y: what it calls ``"labels"`` or ``"label"`` is taken out."""
    found = [name for name in TARGETS if name in item]
    if len(found) > 1:
        raise InputError(
            f"data are dicts with {found[0]!r} and {found[1]!r}",
            expected="one entry with the targets",
            remedy="remove one of them, or pass (x, y) pairs",
        )
    rest = {name: value for name, value in item.items() if name not in found}
    return rest, item[found[0]] if found else None


def parted(item: Any, _: str = "") -> tuple[Any, Any]:
    """One batch or sample as (x, y), whose y is ``None`` where it has none."""
    if isinstance(item, Mapping):
        return without_targets(item)
    if isinstance(item, list | tuple) and len(item) in (1, 2):
        return item[0], item[1] if len(item) == 2 else None
    return item, None


def as_pair(item: Any, name: str = "a batch") -> tuple[Any, Any]:
    """One batch or sample as (x, y)."""
    x, y = parted(item)
    if y is not None:
        return x, y
    entries = f" ({', '.join(map(repr, item))})" if isinstance(item, Mapping) else ""
    remedy = "pass data=(x, y)"
    parts = [*item.values()] if isinstance(item, Mapping) else []
    if parts and all((is_data_set(one) and not hasattr(one, "__array__")) or yields(one) for one in parts):
        remedy = f"pass one of the data sets, as data[{next(iter(item))!r}]"
    elif entries:
        remedy = f'{remedy}, or rename the entry that holds the targets to "labels"'
    elif isinstance(item, list | tuple) and len(item) > 2:
        remedy = "let the loader give (x, y) pairs, as with its collate_fn, where it gives more"
    elif hasattr(item, "columns"):
        remedy = 'pass x and y apart: (table.drop(columns="y"), table["y"])'
    raise InputError(
        f"{name} is {type(item).__name__}{_length_of(item)}{entries}, without targets",
        expected="an (x, y) pair or a dict with labels, a Dataset or DataLoader of such, or batches of them",
        remedy=remedy,
    )


def as_pair_or_inputs(item: Any, name: str = "a batch") -> tuple[Any, Any]:
    """The same where targets may be left out: by a tensor, a dict or a tuple of one."""
    alone = isinstance(item, Tensor | Mapping) or (isinstance(item, list | tuple) and len(item) == 1)
    return parted(item) if alone else as_pair(item, name)


def as_new_inputs(item: Any, _: str = "") -> tuple[Any, Any]:
    """The same where targets do not count: y is 0 for one sample, and ``None`` for a batch."""
    x, y = parted(item)
    pictures = x.values() if isinstance(x, Mapping) else (x,)
    return x, 0 if _is_number(y) or any(map(is_image, pictures)) else None


def _length_of(item: Any) -> str:
    """The length of what has one, in words."""
    if isinstance(item, Tensor) and item.ndim == 0:
        return " without an axis"
    sized = hasattr(item, "__len__") and not isinstance(item, type)
    return f" of length {len(item)}" if sized else ""


def _is_number(y: Any) -> bool:
    """Whether targets are those of one sample: a number or a word."""
    return isinstance(y, int | float | str | np.generic) or (isinstance(y, Tensor) and y.ndim == 0)


# -- loaders -------------------------------------------------------------------------------------------

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


class Ordered(NamedTuple):
    """A loader in the order of its data set."""

    loader: DataLoader[Any]  # the loader to read
    whole: bool = True  # whether it gives every sample of the data set once, or all that there is to give
    said: str | None = None  # what a reader of positions must know, if anything


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


def _equal(a: Any, b: Any) -> bool:
    """Whether two samples are the same."""
    first, second = leaves(a), leaves(b)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    """Whether two parts of samples are, numbers that are missing in both among them."""
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if hasattr(a, "__array__"):
        first, second = np.asarray(a), np.asarray(b)
        return first.shape == second.shape and bool(((first == second) | (first != first)).all())
    return bool(a == b) or a != a


# -- reading -------------------------------------------------------------------------------------------

TOGETHER = 32  # samples of a data set that are put side by side
SPLIT = "check that x and y come from the same split"
Parting = Callable[[Any, str], tuple[Any, Any]]  # an item, and its name in errors, as x and y


def items_of(data: Any) -> Iterator[Any]:
    """What data yield, from the beginning; no random stream moves."""
    if is_data_set(data) and not isinstance(data, IterableDataset):
        return (data[i] for i in range(len(data)))
    with random_kept(data):
        return iter(data)


def read_batches(
    items: Iterable[Any], samples: bool, said: DataNotes, parting: Parting = as_pair, size: int = TOGETHER
) -> Iterator[tuple[Inputs, Any]]:
    """Batches or samples as batches (x, y) of tensors; y is ``None`` where there is none."""
    kind = "sample" if samples else "batch"
    found = (parting(item, f"{kind} {i} of data") for i, item in enumerate(items))
    first = next(found, None)
    if first is None:
        return
    samples, rows = samples or _is_number(first[1]), chain([first], found)
    del first
    if samples:
        yield from _together(
            ((as_batch(x), None if y is None else answers(y, said)[None]) for x, y in rows), size
        )
    else:
        for x, y in rows:
            said.indexed = (None, PIECES) if has_index(x) or has_index(y) else said.indexed
            yield _tensors(x, y, said)


def _tensors(x: Any, y: Any, said: DataNotes) -> tuple[Inputs, Any]:
    """A batch as tensors, with the columns of a table and the rows of its targets in order."""
    return tensorize(in_columns(x, said)), None if y is None else answers(in_rows(x, y, said=said), said)


def pairs(data: Any, said: DataNotes, parting: Parting = as_pair) -> Iterator[tuple[Inputs, Any]]:
    """The batches of any kind of data, in the order of their data set; nothing is gathered."""
    if isinstance(data, list) and data and all(map(_is_text_of_tokens, data)):
        data = _Samples(data)
    if not in_pieces(data):
        x, y = parting(data.tensors if isinstance(data, TensorDataset) else data, "data")
        said.indexed = (x, "x") if has_index(x) else (y, "y")
        yield _tensors(x, y, said)
        return
    source, order = data, None
    if isinstance(data, DataLoader):
        require_whole(data)
        source, _, order = ordered_loader(data)
    found = order, changing(source.dataset if isinstance(data, DataLoader) else data)
    said.warnings += filter(None, found)
    yield from read_batches(items_of(source), is_data_set(data), said, parting)


class _Samples(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        """N."""
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        """A sample."""
        return self.samples[index]


def _is_text_of_tokens(one: Any) -> bool:
    """Whether it is a single text as tokenizers return it, no batch of several."""
    ids = one.get("input_ids") if isinstance(one, Mapping) else None
    if isinstance(ids, list | tuple):
        return all(isinstance(token, int) for token in ids)
    return getattr(ids, "ndim", 0) == 1


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


def side_by_side(parts: list[tuple[Inputs, Any]]) -> tuple[Inputs, Any]:
    """Batches as one."""
    inputs, targets = [x for x, _ in parts], [y for _, y in parts]
    return concatenate(inputs), None if targets[0] is None else concatenate(padded(inputs, targets))


def _together(samples: Iterable[tuple[Inputs, Any]], size: int) -> Iterator[tuple[Inputs, Any]]:
    """Batches of one side by side, as many as have one shape, and no more than a few."""
    held: list[tuple[Inputs, Any]] = []
    alike: Any = None  # the shapes of those held
    for x, y in samples:
        shapes = example_shapes(x), None if y is None else y.shape
        if held and shapes != alike:
            yield side_by_side(held)
            held = []
        alike = shapes
        held.append((x, y))
        if len(held) == size:  # before another sample is read
            yield side_by_side(held)
            held = []
    if held:
        yield side_by_side(held)


# -- tokens --------------------------------------------------------------------------------------------

SHIFTED = (
    "labels were those of their own positions, as the loss inside a causal network takes them: each was "
    "moved to the position before"
)
PIECES = "batches"  # tables of which each has an index of its own
ALONE = "labels count at the last position alone, and are not the tokens there: taken as those behind it"
# In the names of classes of Hugging Face whose loss moves labels, unless they encode first.
CAUSAL = ("ForCausalLM", "LMHead", "ForConditionalGeneration")
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING")  # types of adapters of peft
TWICE = 8  # labels that must agree before they are said to have been shifted twice: fewer may by chance


def next_tokens(network: Functional | nn.Module | None, x: Inputs, y: Tensor, said: DataNotes) -> Tensor:
    """Labels of the token after each position; those of the position itself are moved to the one before."""
    # y (N, T)
    model = network.model if isinstance(network, Functional) else network
    causal = _is_causal(model)
    ids = x.get(TOKENS) if isinstance(x, Mapping) else x if causal else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or y.ndim != 2 or y.is_floating_point():
        return y
    prompt = _virtual_tokens(model)
    if prompt and ids.shape == y.shape:
        y = torch.cat([y.new_full((len(y), prompt), IGNORED), y], 1)
    if causal is False or ids.is_floating_point() or y.shape != (len(ids), prompt + ids.shape[1]):
        return y
    y_here, length = y[:, prompt:].to(ids.device), ids.shape[1]
    counted = y_here != IGNORED

    def are(later: int) -> bool:
        """Whether all labels are the tokens that come so many positions later, as far as there are any."""
        inside = length - later
        known = counted[:, :inside]
        return bool(known.any()) and bool((y_here[:, :inside] == ids[:, later:])[known].all())

    here, later = are(0), are(1)
    if not here and not later and int(counted.sum()) >= TWICE and are(2):
        raise DataError(
            "labels are the tokens two positions later: they were shifted twice",
            expected="the next token at each position, or the token itself, which is moved here",
            remedy="pass labels as they are before any shift",
        )
    moves = here
    if here == later:  # labels that say nothing of themselves are read as those of the fit
        known, seen = getattr(network, "known", None), bool(counted[:, :-1].any())
        moves = here or (bool(causal) and seen) if known is None else known.moved
        if causal and bool(counted[:, -1].any()) and not here and not seen and known is None:
            said.notes.append(ALONE)
    if not moves:
        return y
    said.notes.append(SHIFTED)
    return torch.cat([y[:, 1:], torch.full_like(y[:, :1], IGNORED)], 1)


def _virtual_tokens(model: nn.Module | None) -> int:
    """How many positions a prompt that peft trains puts before the tokens of a text."""
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    return int(config.num_virtual_tokens) if config is not None and kind in PROMPTS else 0


def _is_causal(model: nn.Module | None) -> bool | None:
    """Whether a network of Hugging Face moves labels in its loss; ``None`` of any other network."""
    while callable(inner := getattr(model, "get_base_model", None)):  # with an adapter of peft
        model = inner()
    kinds = [kind.__name__ for kind in type(model).__mro__]
    config = getattr(model, "config", None)
    if "PreTrainedModel" in kinds:
        moves = any(name in kind for name in CAUSAL for kind in kinds)
        return moves and not getattr(config, "is_encoder_decoder", False)
    return False if getattr(config, "is_encoder_decoder", False) else None


# -- gathering -----------------------------------------------------------------------------------------

LARGER = 8  # times the memory that bytes take as floats, at most
PIECE = 1 << 24  # bytes that are owned to a file at a time
ALIKE = 1e-2  # of outputs, with and without positions that are hidden: rounding of half types is below
IN_MEMORY = 0.25  # share of the memory that a stream may take while it is put side by side


@dataclass(frozen=True)
class Data:
    """All examples as one (x, y) pair, and what is to be said of them."""

    x: Inputs  # as the network takes it, in memory or mapped from a temporary file
    y: Tensor  # (N, ...), on the network's device
    classes: tuple[str, ...] = ()  # names of the classes, where y was text
    columns: tuple[str, ...] = ()  # of x, where it was a data frame
    warnings: tuple[str, ...] = ()  # what a reader of the results must know
    notes: tuple[str, ...] = ()  # what was done with them, which changes no result
    indexed: tuple[Any, str] = (None, "x")  # a table whose index is that of the rows, and its name
    weights: Any = None  # of the examples, as given, but in the order of their rows

    @classmethod
    def of(
        cls,
        data: Any,
        network: Functional | nn.Module | None = None,
        *,
        missing: bool = False,  # whether y may hold NaN
        memory: str | int | None = None,
        keep: bool = True,  # whether the examples are kept, and so are copied, and warned of
        classes: Sequence[str] = (),  # names that y may hold
        columns: tuple[str, ...] = (),  # that data frames must have
        text: bool = False,  # whether y may name classes that are not known before
    ) -> Data:
        """Data of any kind, checked, and alike on processes that share a call; ``Data`` are returned."""
        if isinstance(data, Data):
            return data
        known = network.known if isinstance(network, Functional) else None
        columns = columns if known is None else known.columns
        said = DataNotes(classes=tuple(classes), text=text, columns=columns)
        x, y = _gathered(data, network, said, memory, keep)
        y = next_tokens(network, x, y, said)
        if network is not None:
            said.warnings += doubts(network, x, said.notes) if known is None else known.doubts(x, said.notes)
            said.warnings += padded_in_front(network, x)
            y = y.to(device_of(network))
        if keep:
            for warning in said.warnings:
                warn(warning)
        check_finite(x, "x")
        if not missing:
            check_finite(y, "y")
        require_same_arguments({"x": x, "y": y})
        told = tuple(said.warnings), tuple(said.notes)
        return cls(x, y, said.classes, said.columns, *told, said.indexed)

    def weighing(self, weights: Any) -> Data:
        """The same with weights of the examples, put in the order of their rows as y is."""
        said, (table, name) = DataNotes([*self.notes]), self.indexed
        if name == PIECES and has_index(weights):
            raise InputError(
                "sample_weight has an index, and data come in batches of their own",
                expected="weights in the order of the examples",
                remedy="pass sample_weight.to_numpy(), or the data as one pair",
            )
        found = in_rows(table, weights, "sample_weight", said, name)
        return replace(self, weights=found, notes=tuple(said.notes))

    @property
    def pair(self) -> tuple[Inputs, Tensor]:
        """The examples."""
        return self.x, self.y

    @property
    def reasons(self) -> dict[str, str]:
        """The notes, each once, for the record of a fit."""
        return {"data": "; ".join(dict.fromkeys(self.notes))} if self.notes else {}


def examples(network: Functional | nn.Module, x: Any, name: str = "x") -> Inputs:
    """New inputs as the network takes them, of any kind of data; targets are left out."""
    known = network.known if isinstance(network, Functional) else None
    said = DataNotes(columns=() if known is None else known.columns)
    if isinstance(x, TensorDataset) and len(x.tensors) < 3:
        x = x.tensors[0]
    if holds_samples(x):
        made, _ = _gathered(x, network, said, None, keep=False, parting=as_new_inputs)
        check_finite(made, name)
    else:
        made = taken(network, one_image(network, in_columns(x, said)), name, said)
        check_examples(made, name)
    more = [] if known is None else known.doubts(made, said.notes)
    for line in (*said.warnings, *more, *padded_in_front(network, made)):
        warn(line)
    return made


def _gathered(
    data: Any,
    network: Functional | nn.Module | None,
    said: DataNotes,
    memory: str | int | None,
    keep: bool,
    parting: Parting = as_pair,
) -> tuple[Inputs, Tensor]:
    """All examples, their number looked at, and not their values."""
    if in_pieces(data):
        gathered, shortest = Gathered(_limit(memory)), None
        # what is drawn to augment samples is drawn again by the next call
        with random_kept() if is_data_set(data) or isinstance(data, DataLoader) else nullcontext():
            for i, (piece, given) in enumerate(pairs(data, said, parting)):
                inputs = piece if network is None else admit(network, piece, said)
                own = torch.zeros(batch_size(inputs)) if given is None else given
                require_targets(inputs, own, f"batch {i} of data")
                gathered.add(inputs, own)
                shortest = _shorter(shortest, inputs, len(own))
        x, y = gathered.whole()
        if network is not None and shortest is not None:
            one, place, _ = shortest
            _require_alike(network, one, take(x, slice(place, place + 1)))
    else:
        ((x, y),) = pairs(data, said, parting)
        if are_alike(x) and y.ndim and len(x) == len(y) and (network is None or len(x[0]) != len(y)):
            x = torch.stack(x)  # samples
        x = x if network is None else _admitted(network, x, said, _limit(memory))
        if keep:
            x, y = owned(x, memory, _read_only(data)), y.detach().clone()
    y = said.numbered(y)
    require_some(x, "data")
    require_targets(x, y, "data")
    return x, y


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


def require_padding(network: Functional | nn.Module, old: Inputs, new: Inputs) -> None:
    """Raise if filling up the shorter of two batches of sequences changes the network's outputs."""
    key = mask_of(old)
    if key is None or mask_of(new) != key or old[key].shape[1] == new[key].shape[1]:
        return
    short, long = (take(x, slice(0, 1)) for x in sorted((old, new), key=lambda x: x[key].shape[1]))
    _require_alike(network, short, padded([short, long])[0])


def _require_alike(network: Functional | nn.Module, one: Inputs, filled: Inputs) -> None:
    """Raise if an example and the same filled up have other outputs."""
    key = mask_of(one)
    if key is None or one[key].shape == filled[key].shape:
        return
    short, long = outputs_or_none(network, one), outputs_or_none(network, filled)
    if short is None or long is None:
        return
    if short.ndim > 1 and short.shape != long.shape:  # an output for each position
        long = long[:, : short.shape[1]]
    if not _agree(short, long):
        raise DataError(
            f"batches of sequences have different lengths, and filling up {tuple(one[key].shape[1:])} to "
            f"{tuple(filled[key].shape[1:])} positions that {key!r} hides changes the network's outputs",
            expected="sequences of one length, or a network that leaves hidden positions out",
            remedy='pad all of them alike, as tokenizer(texts, padding=True) or padding="max_length" does',
        )


def _agree(short: Tensor, long: Tensor) -> bool:
    """Whether outputs without padding and with it are the same, but for rounding."""
    scale = max(float(short.abs().max()), 1e-30)
    return short.shape == long.shape and not float((short - long).abs().max()) > ALIKE * scale


def padded_in_front(network: Functional | nn.Module, x: Inputs) -> list[str]:
    """Whether texts have padding in front that is not as good as none, by the one that has most."""
    mask = x.get(MASK) if isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point() or "position_ids" in x:
        return []
    if not bool(((mask == 0) | (mask == 1)).all() & mask.any(1).all()) or len(mask) != batch_size(x):
        return []
    count = mask.byte().argmax(1)  # positions before the first that counts
    if not bool(count.any()):
        return []
    row, cut = int(count.argmax()), int(count.max())
    one = take(x, slice(row, row + 1))
    assert isinstance(one, Mapping)
    alone = {key: t[:, cut:] if key in ALONG else t for key, t in one.items()}
    model = network.model if isinstance(network, Functional) else network
    # a pooler reads the first position
    if not any(name.rpartition(".")[2] == "pooler" for name, _ in model.named_modules()):
        short, long = states_or_none(network, alone), states_or_none(network, one)
        if short is None or long is None:
            return []
        long = long[:, -short.shape[1] :] if short.ndim > 2 else long
        if _agree(short, long):
            return []
    return [
        f"{int((count > 0).sum())} texts have padding in front, which the network takes for their first "
        'positions: pad behind them (tokenizer.padding_side = "right"), or pass "position_ids" too'
    ]


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
            raise DataError("data is empty: it yields no example", "at least one example", EMPTY)
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
