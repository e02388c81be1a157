"""Batches of any structure: one tensor, a tuple for ``model(*x)`` or a dict for ``model(**x)``.

The first axis of every tensor whose length equals the batch size is the example axis; other
tensors (a mask shared by all examples, a scalar) belong to every example and are passed on as
they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from linnet.distributed import check_others, current
from linnet.errors import DataError, InputError
from linnet.linalg.factorize import is_finite
from linnet.params import wrapped
from linnet.tree import hash_tensors, leaves, map_tensors, tensors_in

EMPTY = "check the path and the split that the data come from"

SHARED = "give an input that belongs to all examples another length on its first axis, as in w[None]"

TOKENIZED = (
    'convert it to a tensor first; for texts pass tokenizer(texts, padding=True, return_tensors="pt"), '
    "which pads them alike"
)

TARGETS = ("labels", "label")  # what the targets are called in samples that are dicts

_NO_DATA_SETS = (list, tuple, str, bytes, Mapping, Tensor)  # have items, but no samples

MASK = "attention_mask"  # what encoders of transformers call it
TOKENS = "input_ids"  # and the ids of tokens

ADDED = -100.0  # e^-100 of attention is none: what is added to scores and is below, hides a position

IGNORED = -100  # the label of positions that do not count, as in torch's own cross-entropy

OBSERVED, WHOLE = "linnet: observed", "linnet: inputs"  # keys of a batch with outputs that do not count

# By a part of a batch what it was cut from, and which rows: errors name examples by their place in all.
_CUT: Any = WeakIdKeyDictionary()

Inputs = Any  # Tensor | Sequence[Any] | Mapping[str, Any]


def on_device(x: Inputs, device: torch.device) -> Inputs:
    """A batch where a network lives; what is there already is not copied."""
    # Data stay where the user has them, and every batch comes here on its way into a network.
    # from pinned memory the copy goes on beside the host's own work, and kernels wait for it by themselves
    return map_tensors(lambda t: t.to(device, non_blocking=device.type == "cuda"), x)


def example_shapes(x: Inputs) -> tuple[Any, ...]:
    """Shapes of one example in every tensor of a batch, and names: they tell kinds of passes apart."""
    names = tuple(x) if isinstance(x, Mapping) else ()
    return (*names, *(tuple(t.shape[1:]) for t in tensors_in(x)))


def batch_size(x: Inputs) -> int:
    """The number of examples in ``x``."""
    found = tensors_in(x)
    for tensor in found:
        require_dense(tensor, "x")
    for tensor in found:
        if tensor.ndim > 0:
            return tensor.shape[0]
    remedy = "turn arrays and lists of numbers into tensors with torch.as_tensor"
    if found:
        remedy = "give every input an example axis, as in x[None] for a single example"
    elif isinstance(x, Mapping) and any(isinstance(one, str) for one in leaves(x)):
        remedy = TOKENIZED
    elif (is_data_set(x) and not hasattr(x, "__array__")) or yields(x):
        remedy = (
            "put its inputs side by side, torch.cat([x for x, y in batches]), or call for a batch at a time"
        )
    raise InputError(
        f"x is {type(x).__name__} without a tensor" + (" that has an example axis" if found else ""),
        expected="a tensor (N, ...), a tuple of tensors or a dict of tensors",
        remedy=remedy,
    )


def ambiguity(x: Inputs) -> str:
    """A sentence about inputs that are taken for rows of examples and may be shared by all of them."""
    n, axes = batch_size(x), [t for t in tensors_in(x) if t.ndim > 0]
    own = [t for t in axes[1:] if t.shape[0] == n]
    if not own:
        return ""
    fewest = min(own, key=lambda t: t.ndim)
    rows = f"each of the {n} examples" if n > 1 else "the one example"
    return f"the input of shape {tuple(fewest.shape)} is taken to hold one row for {rows}"


def require_dense(tensor: Tensor, name: str) -> None:
    """Raise unless the examples of a tensor can be taken one by one, and read."""
    if tensor.is_nested:
        found = "a nested tensor, whose examples have shapes of their own"
        remedy = f"pass torch.nested.to_padded_tensor({name}, 0.0), and a mask if the network takes one"
    elif tensor.layout != torch.strided and not tensor.is_mkldnn:
        found, remedy = f"a tensor of layout {tensor.layout}", f"pass {name}.to_dense()"
    elif tensor.device.type == "meta":
        found = 'a tensor on the device "meta", which has shapes and no values'
        remedy = f'make {name} on a device that keeps them, such as "cpu"'
    else:
        return
    raise InputError(f"{name} is {found}", "a dense tensor (N, ...)", remedy)


def take(x: Inputs, index: slice | Tensor | Sequence[int]) -> Inputs:
    """The examples of ``x`` at ``index``; tensors without the example axis stay whole."""
    n = batch_size(x)
    rows = torch.as_tensor(index) if not isinstance(index, slice | Tensor) else index
    places = {device: rows.to(device) if isinstance(rows, Tensor) else rows for device in _devices(x)}

    def part(t: Tensor) -> Tensor:
        if t.ndim == 0 or t.shape[0] != n:
            return t
        made = t[places[t.device]]
        if not torch.compiler.is_compiling():  # a slice is a view, and holds the memory of the whole anyway
            _CUT[made] = (lambda: t) if isinstance(rows, slice) else weakref.ref(t), rows
        return made

    return map_tensors(part, x)


def same_places(part: Tensor, t: Tensor) -> Tensor:
    """A part of every row of a tensor, whose rows are at the same places."""
    if t in _CUT:
        _CUT[part] = _CUT[t]
    return part


def place_of(x: Inputs, i: int) -> int:
    """The place of an example among those that a batch was cut from, as far as that is known."""
    tensor: Tensor | None = next((t for t in tensors_in(x) if t.ndim > 0), None)
    while tensor is not None and tensor in _CUT:
        whole, rows = _CUT[tensor]
        tensor = whole()
        if tensor is not None:
            i = int(torch.arange(len(tensor))[rows.cpu() if isinstance(rows, Tensor) else rows][i])
    return i


def _devices(x: Inputs) -> set[torch.device]:
    """Where the tensors of a batch are."""
    return {t.device for t in tensors_in(x)}


def observe(x: Inputs, mask: Tensor) -> Inputs:
    """A batch whose outputs count in part: elsewhere they are zero, whatever the weights."""
    # mask (N, ...)
    return {WHOLE: x, OBSERVED: mask}


def observed(x: Inputs) -> tuple[Inputs, Tensor | None]:
    """A batch as the network takes it, and which outputs count; ``None`` for all."""
    if isinstance(x, Mapping) and OBSERVED in x:
        return x[WHOLE], x[OBSERVED]
    return x, None


def counted(mask: Tensor) -> Tensor:
    """Which positions a mask (N, T) keeps: those with 1 of 0 and 1, or with 0 where it is added to scores."""
    kept, real = mask > 0, mask.is_floating_point()
    if real:
        kept = torch.where(kept.any(), kept, mask == 0)
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return kept
    known = ((mask == 0) | (mask == 1)).all() | (real & ((mask == 0) | (mask <= ADDED)).all())
    if not bool(known & kept.any(1).all()):
        kinds = "values other than 0 and 1" if not bool(known) else "a row that keeps no position"
        raise InputError(
            f"{MASK} has {kinds}: it reaches from {float(mask.min()):.4g} to {float(mask.max()):.4g}",
            expected="1 at positions that count and 0 at padding, or numbers to add to scores, 0 and -1e4",
            remedy=f"pass {MASK} as tokenizers make it: (~padding).long(); leave out empty examples",
        )
    return kept


def masked_mean(states: Tensor, mask: Tensor) -> Tensor:
    """The mean over the positions that count, (N, D)."""
    # states (N, T, D), mask (N, T)
    counts = counted(mask)[:, None].to(states)
    return (counts @ states)[:, 0] / counts.sum(2)  # a product: no copy of the states


def tokens_counted(x: Inputs) -> Tensor | None:
    """Which positions of sequences are no padding, by the mask in the batch, (N, T)."""
    x, _ = observed(x)
    mask = x.get(MASK) if isinstance(x, Mapping) else None
    kept = counted(mask) if isinstance(mask, Tensor) and mask.ndim == 2 else None
    return None if kept is None or bool(kept.all()) else kept


def concatenate(parts: Sequence[Inputs]) -> Inputs:
    """Join batches of the same structure along the example axis; tensors without it are taken once."""
    sizes = [batch_size(part) for part in parts]
    return _joined(padded(parts), sizes)


def padded(parts: Sequence[Inputs], beside: Sequence[Tensor] = ()) -> Sequence[Any]:
    """Batches of sequences of different lengths, filled up on the right where a mask hides what is added."""
    key = mask_of(parts[0])
    masks = [part[key] for part in parts if mask_of(part) == key] if key is not None else []
    lengths = [mask.shape[1] for mask in masks]
    if len(lengths) < len(parts) or len(set(lengths)) < 2:
        return beside or parts
    if beside:
        return beside if any(y.is_floating_point() for y in beside) else _grown(beside, lengths, IGNORED)
    hidden = [~counted(mask) if key == MASK else mask.bool() == ("padding" in str(key)) for mask in masks]

    def filled(name: str) -> list[Any]:
        tensors = [part[name] for part in parts]
        if "mask" in name:
            least = min(float(t.min()) for t in tensors) if name == key else 0.0
            return _grown(tensors, lengths, least if least < 0 else "padding" in name)
        ids = [isinstance(t, Tensor) and not t.is_floating_point() and t.shape == m.shape
               for t, m in zip(tensors, masks, strict=True)]  # fmt: skip
        there = (
            torch.cat([t[m] for t, m in zip(tensors, hidden, strict=True)]) if all(ids) else torch.empty(0)
        )
        same = len(there) > 0 and bool((there == there[0]).all())
        return _grown(tensors, lengths, int(there[0]) if same else 0)

    names = [name for name in parts[0] if all(name in part for part in parts)]
    columns = {name: filled(name) for name in names}
    return [{**part, **{name: columns[name][i] for name in names}} for i, part in enumerate(parts)]


def padding_token(model: nn.Module) -> int | None:
    """The token that a network's configuration has for positions that do not count."""
    found = (getattr(getattr(module, "config", None), "pad_token_id", None) for module in model.modules())
    return next((token for token in found if isinstance(token, int)), None)


def with_padding(x: Inputs, token: int | None) -> Inputs:
    """Token ids whose hidden positions hold the network's own token where they were filled with zeros."""
    # some networks find the end of a text by it
    if not token or not isinstance(x, Mapping):
        return x
    ids, mask = x.get(TOKENS), x.get(MASK)
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.shape == mask.shape):
        return x
    if ids.is_floating_point() or mask.is_floating_point():  # added to scores, it is 0 where a token counts
        return x
    return {**x, TOKENS: ids.masked_fill((mask == 0) & (ids == 0), token)}


def _grown(tensors: Sequence[Any], lengths: Sequence[int], fill: float) -> list[Any]:
    """Tensors (N, L, ...) of several L filled up to the longest; others as they are."""
    pairs = list(zip(tensors, lengths, strict=True))
    if not all(isinstance(t, Tensor) and t.ndim > 1 and t.shape[1] == length for t, length in pairs):
        return list(tensors)
    rest = [(t.shape[0], max(lengths) - length, *t.shape[2:]) for t, length in pairs]
    return [torch.cat([t, t.new_full(size, fill)], 1) for t, size in zip(tensors, rest, strict=True)]


def mask_of(part: Inputs) -> str | None:
    """The entry of a batch that says which positions of sequences count."""
    found = (key for key in part if "mask" in str(key)) if isinstance(part, Mapping) else ()
    return next((key for key in found if isinstance(part[key], Tensor) and part[key].ndim == 2), None)


def _joined(parts: Sequence[Inputs], sizes: Sequence[int]) -> Inputs:
    """``concatenate`` for parts of batches of known sizes."""
    masks = [observed(part)[1] for part in parts]
    if any(mask is not None for mask in masks) and any(mask is None for mask in masks):
        known = next(mask for mask in masks if mask is not None)
        whole = [known.new_ones(size, *known.shape[1:]) for size in sizes]
        seen = [own if mask is None else mask for own, mask in zip(whole, masks, strict=True)]
        parts = [observe(observed(part)[0], mask) for part, mask in zip(parts, seen, strict=True)]
    first = parts[0]
    if any(_structure(part) != _structure(first) for part in parts):
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise InputError(
            f"x differs in structure from batch to batch ({kinds})",
            expected="tensors, tuples of one length, or dicts with the same keys",
            remedy="pass all data in the same form",
        )
    if isinstance(first, Tensor):
        return _catenated(parts, sizes)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts], sizes) for key in first}
    if isinstance(first, list) and all(isinstance(one, str) for part in parts for one in part):
        return [text for part in parts for text in part]
    if isinstance(first, list | tuple):
        return tuple(_joined([part[i] for part in parts], sizes) for i in range(len(first)))
    return first


def _structure(x: Inputs) -> Any:
    """The structure that batches to be joined must share."""
    if isinstance(x, Mapping):
        return set(x)
    return len(x) if isinstance(x, list | tuple) else isinstance(x, Tensor)


def _catenated(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Tensors along the example axis, or the first of them if they belong to all examples."""
    if any(t.ndim == 0 or t.shape[0] != n for t, n in zip(tensors, sizes, strict=True)):
        return tensors[0]
    shapes = list(dict.fromkeys(tuple(t.shape[1:]) for t in tensors))
    if len(shapes) > 1:
        raise DataError(
            f"data are ragged: examples have the shapes {shapes[0]} and {shapes[1]}",
            expected="examples of one shape",
            remedy="resize or pad them; sequences are filled up here if each batch is a mapping with a mask, "
            'such as "attention_mask"',
        )
    return torch.cat([t.to(tensors[0].device) for t in tensors])


def split(x: Inputs, size: int) -> Iterator[Inputs]:
    """Consecutive batches of at most ``size`` examples; the last may be smaller."""
    n = batch_size(x)
    for start in range(0, n, size):
        yield x if size >= n else take(x, slice(start, min(start + size, n)))


def all_but(n: int, index: Tensor) -> Tensor:
    """Which of n examples are not among some, (n,)."""
    keep = torch.ones(n, dtype=torch.bool, device=index.device)
    keep[index] = False
    return keep


def own_parts(x: Inputs, size: int) -> Iterator[tuple[slice, Inputs]]:
    """Consecutive batches of the examples that this process has a share in."""
    share = current()
    own = share.part(batch_size(x))
    start = own.start
    for part in split(take(x, own), size) if share.world > 1 else split(x, size):
        check_others()
        stop = start + batch_size(part)
        yield slice(start, stop), part
        start = stop


def require_some(x: Inputs, name: str = "x") -> None:
    """Raise ``DataError`` if there is no example."""
    if batch_size(x) == 0:
        raise DataError(
            f"{name} is empty: it holds 0 examples", expected="at least one example", remedy=EMPTY
        )


def check_examples(x: Inputs, name: str = "x") -> None:
    """Raise ``DataError`` if there is no example, or one is not finite."""
    require_some(x, name)
    check_finite(x, name)


def is_data_set(data: Any) -> bool:
    """Whether it is an object that gives samples by position; a class of such objects is none."""
    if hasattr(data, "nnz") and hasattr(data, "toarray"):  # of scipy
        raise InputError(
            f"inputs are a sparse {type(data).__name__}", "a dense array or tensor", "pass x.toarray()"
        )
    given = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "to_numpy")
    return isinstance(data, Dataset) or (given and not isinstance(data, (*_NO_DATA_SETS, type)))


def yields(data: Any) -> bool:
    """Whether it is looped over, and neither a container of inputs, a tensor, an array nor text."""
    if isinstance(data, _NO_DATA_SETS) or hasattr(data, "__array__"):
        return False
    return isinstance(data, Iterable) and not isinstance(data, type)


def named_tensor(value: Any, name: str) -> Tensor:
    """A tensor from numbers of any kind, or an error that names the argument."""
    try:
        tensor = wrapped(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):
            raise InputError(
                f"{name} has times ({value.dtype})",
                expected="numbers",
                remedy='count from the first one: (t - t.min()) / numpy.timedelta64(1, "D") are days',
            ) from error
        raise InputError(
            f"{name} is {type(value).__name__} and cannot be made a tensor ({error})",
            expected="a tensor, or an array or rectangular list of numbers",
            remedy=f"convert {name} to a tensor first" if name == "y" else TOKENIZED,
        ) from error
    require_dense(tensor, name)
    return tensor


def check_finite(x: Inputs, name: str) -> None:
    """Raise ``DataError`` naming the first example in which a float tensor is not finite."""
    for tensor in tensors_in(x):
        if not tensor.is_floating_point():
            continue
        require_dense(tensor, name)
        if is_finite(tensor):
            continue
        bad = ~torch.isfinite(
            tensor.reshape(tensor.shape[0], -1) if tensor.ndim else tensor.reshape(1, 1)
        ).all(1)
        first = int(bad.nonzero()[0])
        raise DataError(
            f"{name} holds NaN or infinite values in {int(bad.sum())} example(s), first at index {first}",
            expected="finite numbers",
            remedy="drop or repair these examples",
        )


def hash_examples(x: Inputs) -> list[str]:
    """A fingerprint of every example."""
    x = on_device(x, torch.device("cpu"))  # in one copy, not one an example
    return [hash_tensors(tensors_in(part)) for part in split(x, 1)]


def made_up(x: Inputs) -> Inputs:
    """One example with the shapes, types and ranges of a batch, from which no example can be read."""
    generator = torch.Generator().manual_seed(0)

    def drawn(t: Tensor) -> Tensor:
        if t.is_floating_point() or t.is_complex():
            return torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device)
        largest = int(t.max()) if t.numel() else 0
        least = min(0, int(t.min())) if t.numel() else 0
        return torch.randint(least, largest + 1, t.shape, generator=generator).to(t)

    made = map_tensors(drawn, take(x, slice(0, 1)))
    if isinstance(made, dict) and isinstance(mask := x.get(MASK), Tensor):  # which keeps all positions
        made[MASK] = torch.full_like(made[MASK], bool((mask > 0).any()))
    return made
