"""The tree that tensors stand in: mappings, lists, tuples, dataclasses and matrices, walked here alone.

Batches and results are mapped and listed as they are. What is saved, or sent to another process, is taken
apart into named tensors and plain values, which JSON can hold, and put together again::

    {"$Kronecker": {"left": {"$tensor": "left"}, "right": {"$tensor": "right"}, "name": "G of fc1"}}

Only classes that are registered by :func:`node` are put together, from the arguments that they name and of
the types that their constructors declare: no file can call anything else. Floats that JSON lacks, tuples and
dictionaries with other keys than names are marked the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from linnet.errors import FileFormatError, InputError, LinnetError

Class = TypeVar("Class", bound=type)
PIECE = 1 << 24  # bytes that are brought into one place at once to be hashed
_MARK = "$"  # begins the only key of a dictionary that stands for something else
_NODES: dict[str, tuple[Any, tuple[str, ...]]] = {}
_MALFORMED = (LinnetError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def node(*fields: str) -> Callable[[Class], Class]:
    """Register a class to be saved: an enumeration, a dataclass, or one that is made of ``fields``."""

    def registered(cls: Class) -> Class:
        names = fields
        if dataclasses.is_dataclass(cls):
            names = tuple(field.name for field in dataclasses.fields(cls) if field.init)
        assert cls.__name__ not in _NODES, cls
        _NODES[cls.__name__] = cls, names
        return cls

    return registered


def parts(value: Any) -> dict[Any, Any] | None:
    """What a value consists of, by key, place or name; ``None`` for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    known, names = _NODES.get(type(value).__name__, (None, ()))
    if known is type(value) and not isinstance(value, Enum):
        return {name: getattr(value, name) for name in names}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return None


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in a value; a list becomes a tuple, as a network's inputs are."""
    if isinstance(value, Tensor):
        return function(value)
    found = parts(value)
    if found is None:
        return value
    made = {key: map_tensors(function, part) for key, part in found.items()}
    if isinstance(value, Mapping):
        return made
    return tuple(made.values()) if isinstance(value, list | tuple) else type(value)(**made)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def leaves(value: Any) -> list[Any]:
    """What a value consists of in the end, in order."""
    found = None if isinstance(value, Tensor) else parts(value)
    if found is None:
        return [value]
    return [leaf for part in found.values() for leaf in leaves(part)]


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A SHA-256 of shapes, types and values."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{tuple(t.shape)}{t.dtype}".encode())
        rows = max(1, PIECE // max(1, t[:1].nbytes)) if t.ndim else 1
        for part in t.detach().split(rows) if t.ndim else (t.detach(),):
            plain = part.cpu().contiguous()  # one element of many keeps their stride, though it is contiguous
            digest.update(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def flatten(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A value as JSON, and its tensors by their path."""
    tensors: dict[str, Tensor] = {}

    def named(tensor: Tensor, path: str) -> dict[str, str]:
        while path in tensors:  # of a name with a slash in it
            path += "'"
        tensors[path] = tensor
        return {f"{_MARK}tensor": path}

    return to_plain(value, named), tensors


def rebuild(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put together what ``flatten`` took apart."""
    left = dict(tensors)
    value = from_plain(plain, left)
    if left:
        raise _malformed(f"it has unknown tensors {', '.join(sorted(map(repr, left))[:5])}")
    return value


def to_plain(value: Any, leaf: Callable[[Tensor, str], Any] | None = None, path: str = "") -> Any:
    """A value as dictionaries, lists, numbers and text, with its tensors or what a function makes of them."""
    if isinstance(value, Tensor):
        return value if leaf is None else leaf(value, path)
    if isinstance(value, Enum) and _NODES.get(type(value).__name__, (None,))[0] is type(value):
        return {f"{_MARK}{type(value).__name__}": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {f"{_MARK}float": str(float(value))}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy
        return to_plain(value.tolist(), leaf, path)
    found = parts(value)
    name = type(value).__name__
    is_node = _NODES.get(name, (None,))[0] is type(value)
    if found is None or not (is_node or isinstance(value, Mapping | list | tuple)):
        raise InputError(
            f"{value!r:.80} cannot be saved",
            expected=f"tensors, numbers, text, paths, containers of these, or {', '.join(sorted(_NODES))}",
            remedy="convert it, such as with float() or list(); a matrix with Dense(operator.dense())",
        )
    try:
        inner = {key: to_plain(part, leaf, f"{path}/{key}".lstrip("/")) for key, part in found.items()}
    except RecursionError as error:
        raise InputError("a value holds itself", "parts within parts that end", "save a copy") from error
    if is_node:
        return {f"{_MARK}{name}": inner}
    if isinstance(value, list):
        return list(inner.values())
    if isinstance(value, tuple):
        return {f"{_MARK}tuple": list(inner.values())}
    if all(isinstance(key, str) for key in inner) and not _mark_of(inner):
        return inner
    return {f"{_MARK}dict": [[to_plain(key), part] for key, part in inner.items()]}


def from_plain(plain: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """The value of which ``to_plain`` made plain ones; named tensors are taken out of ``tensors``."""
    try:
        return _read(plain, {} if tensors is None else tensors)
    except FileFormatError:
        raise
    except RecursionError as error:
        raise _malformed("it has parts within parts without end") from error
    except _MALFORMED as error:
        raise _malformed(f"{type(error).__name__}: {error}") from error


def _read(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """``from_plain`` without words for what is malformed."""
    if isinstance(plain, list):
        return [_read(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    mark = _mark_of(plain)
    if not mark:
        return {key: _read(part, tensors) for key, part in plain.items()}
    inner = plain[f"{_MARK}{mark}"]
    if mark == "tensor":
        return tensors.pop(inner)
    if mark == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if mark == "tuple" and isinstance(inner, list):
        return tuple(_read(part, tensors) for part in inner)
    if mark == "dict":
        return {_read(key, tensors): _read(part, tensors) for key, part in inner}
    if mark not in _NODES:
        raise _malformed(f"it holds a {mark!r}", f"one of {', '.join(sorted(_NODES))}")
    cls, names = _NODES[mark]
    if issubclass(cls, Enum):
        return cls[inner]
    given = {name: _read(inner[name], tensors) for name in inner}
    hints = get_type_hints(cls.__init__)
    for name, part in given.items():
        if name not in names or not _fits(part, hints[name]):
            raise _malformed(f"{mark} has {name!r} = {part!r:.80}")
    return cls(**given)


def _mark_of(plain: Mapping[Any, Any]) -> str:
    """What a dictionary stands for; empty for itself."""
    key = next(iter(plain)) if len(plain) == 1 else None
    return key.removeprefix(_MARK) if isinstance(key, str) and key.startswith(_MARK) else ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type, and so are its parts."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if origin is None:
        return isinstance(value, hint)
    if not isinstance(value, origin):
        return False
    if isinstance(value, Mapping):
        return all(_fits(key, inner[0]) and _fits(part, inner[1]) for key, part in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(part, inner[0]) for part in value)


def _malformed(what: str, expected: str = "tensors and values as they were saved") -> FileFormatError:
    """The error of plain values that nothing can be made of."""
    return FileFormatError(f"what was saved cannot be put together: {what}", expected, "save it again")
