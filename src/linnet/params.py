"""One check for each kind of parameter: choice, flag, integer, number, seed, tensor, path, and so on.

Each function returns the value it was given, so that a check and an assignment are one line, and raises an
:class:`~linnet.errors.InputError` that names the parameter, shows the value and says what is accepted.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import numbers
import operator
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from linnet.errors import InputError, LinnetError

_Kind = TypeVar("_Kind")
_Rest = ParamSpec("_Rest")
_Check = Callable[Concatenate[str, Any, _Rest], Any]
_SHOWN = 60  # characters of a value in an error: enough to recognize it
_DIGITS = 40  # beyond this many digits an integer is told by its length; Python refuses to print 4,300
_PATH = 4096  # bytes of a path, PATH_MAX on Linux
_NAME = 255  # bytes of one part of it, NAME_MAX on Linux
_WRITTEN = (bool, int, float, complex, str, bytes, list, tuple, dict, type(None))  # shown as in a call
_LARGEST = 2**63 - 1  # what torch's integers hold
# Most that a count of repeated work may be, by the name of its argument. A million draws tell a mean to a
# thousandth of its spread; more would take days, without a word.
_REPEATED = dict.fromkeys(("bins", "draws", "samples", "steps", "epochs", "rounds"), 10**6) | {
    "members": 10**4
}
_SEED = 2**64 - 1  # and its generators
_INSIDE = ("linnet", "torch", "contextlib")  # frames between a warning and the user's own code
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def shown(value: Any) -> str:
    """A value as an error shows it: short, and safe for values whose ``repr`` fails or is long."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        article = "an" if kind.startswith("int") else "a"
        return f"{article} {kind} tensor of shape {tuple(value.shape)}{where}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_DIGITS:
        return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = repr(value)
    except Exception:  # the user's own __repr__ may fail in any way
        return f"an object of type {type(value).__name__}"
    if "\n" in text and not isinstance(value, str | bytes | list | tuple | dict | set):
        return f"an object of type {type(value).__name__}"
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN - 4]}...{text[-1]}"


def warn(message: str) -> None:
    """Warn of something where the user's code calls linnet."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def refuse(name: str, value: Any, expected: str, remedy: str | None = None) -> NoReturn:
    """Raise the error of a parameter."""
    text = shown(value)
    written = name.replace(".", "").isidentifier() and isinstance(value, _WRITTEN) and text == repr(value)
    raise InputError(
        f"{name}={text}" if written else f"{name} is {text}",
        expected,
        remedy or f"leave {name}= out for the default",
    )


ELSEWHERE = {  # what other libraries call a choice
    "kron": "kfac", "kronecker": "kfac", "diag": "diagonal", "lowrank": "low-rank",
    "last_layer": "last-layer", "marglik": "evidence", "gridsearch": "grid",
}  # fmt: skip


def choice(name: str, value: Any, allowed: Collection[str], remedy: str | None = None) -> str:
    """One of several words."""
    if isinstance(value, str) and value in allowed:
        return value
    words = ", ".join(f'"{one}"' for one in allowed)
    if isinstance(value, str) and ELSEWHERE.get(value) in allowed:
        remedy = f'pass {name}="{ELSEWHERE[value]}"'
    elif remedy is None and isinstance(value, str):
        close = difflib.get_close_matches(value, allowed, 1)
        remedy = f'did you mean {name}="{close[0]}"?' if close else None
    refuse(name, value, f"one of {words}", remedy)


def part_of(part: Any) -> tuple[int, int]:
    """Which part of a job, and of how many."""
    if not (isinstance(part, list | tuple) and len(part) == 2):
        raise InputError(
            f"part={part!r}",
            expected="which part, from 0, and the number of parts",
            remedy="pass part=(3, 64) for the fourth of 64",
        )
    of = integer("the number of parts", part[1], 1)
    return integer("part", part[0], 0, of - 1), of


def refuse_first(cases: Iterable[tuple[bool, str, str, str]]) -> None:
    """Raise for the first case that is so, which says what was given, what was expected and what to do."""
    for given, what, expected, remedy in cases:
        if given:
            raise InputError(what, expected, remedy)


def optional(check: _Check[_Rest], name: str, value: Any, *rest: _Rest.args, **more: _Rest.kwargs) -> None:
    """One of the checks below, of a parameter that may be left out as ``None``."""
    if value is not None:
        check(name, value, *rest, **more)


def flag(name: str, value: Any, remedy: str | None = None) -> bool:
    """True or False."""
    if isinstance(value, bool):
        return value
    refuse(name, value, "True or False", remedy)


def no_targets(name: str, value: Any) -> None:
    """Refuse targets in the place of a setting: data are one argument, and two were given."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        refuse(name, value, "inputs and targets as one argument", "pass data=(x, y)")


def integer(name: str, value: Any, least: int = 1, most: int | None = None, remedy: str | None = None) -> int:
    """A whole number within bounds."""
    limit = _REPEATED.get(name, _LARGEST) if most is None else most
    found: int | None = None
    if not isinstance(value, bool | float) and not (isinstance(value, Tensor) and not _integral(value)):
        try:
            found = operator.index(value)
        except Exception:  # whatever an object's own __index__ raises
            found = None
    if found is not None and found >= least and found <= limit:
        return found
    bounds = {0: "an integer, 0 or greater", 1: "a positive integer"}.get(
        least, f"an integer, {least} or more"
    )
    if most is not None or (found is not None and least <= found and limit < _LARGEST):
        bounds = f"an integer from {least} to {limit}"
    refuse(name, value, bounds, remedy)


def seed(name: str, value: Any) -> int:
    """A seed of random numbers."""
    try:
        return integer(name, value, 0, _SEED)
    except InputError:
        refuse(name, value, "an integer, 0 or greater and below 2**64")


def _integral(value: Tensor) -> bool:
    """Whether a tensor is one integer whose value can be read."""
    plain = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return plain and value.numel() == 1 and value.device.type != "meta"


def number(
    name: str,
    value: Any,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    remedy: str | None = None,
) -> float:
    """A finite real number within bounds."""
    found = _real(value)
    inside = (
        math.isfinite(found)
        and (above is None or found > above)
        and (least is None or found >= least)
        and (below is None or found < below)
        and (most is None or found <= most)
    )
    if inside:
        return found
    limits = {"greater than": above, "at least": least, "less than": below, "at most": most}
    if above == 0 and below is None and most is None:
        expected = "a positive number"
    else:
        bounds = [f"{words} {limit:g}" for words, limit in limits.items() if limit is not None]
        expected = " ".join(["a finite number", " and ".join(bounds)]).strip()
    refuse(name, value, expected, remedy)


def _real(value: Any) -> float:
    """A value as a float, NaN where it is no real number."""
    if isinstance(value, Tensor):
        readable = value.numel() == 1 and value.device.type != "meta"
        if not readable or value.is_complex() or value.dtype == torch.bool:
            return math.nan
        return float(value.detach().item())
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # an integer beyond 1e308, or a broken __float__
        return math.nan


def instance(
    name: str, value: Any, kind: type[_Kind] | tuple[type[Any], ...], expected: str, remedy: str | None = None
) -> _Kind:
    """An object of a class."""
    if isinstance(value, kind):
        return value
    if remedy is None and isinstance(value, type) and issubclass(value, kind):
        remedy = f"pass an object of the class: {value.__name__}(...)"
    if kind is torch.nn.Module:  # what holds a network, such as a pipeline
        inner = (key for key, held in getattr(value, "__dict__", {}).items() if isinstance(held, kind))
        found = next((key for key in inner if not key.startswith("_")), None)
        remedy = remedy if found is None else f"pass the network that it holds: {name}.{found}"
    refuse(name, value, expected, remedy)


def function(name: str, value: Any, expected: str, remedy: str | None = None) -> Callable[..., Any]:
    """Something that can be called."""
    if callable(value) and not isinstance(value, type):
        called: Callable[..., Any] = value
        return called
    refuse(name, value, expected, remedy)


def call(name: str, value: Callable[..., Any], *given: Any, expected: str, remedy: str | None = None) -> Any:
    """Call a function of the user's own, naming it in the error if it fails."""
    try:
        return value(*given)
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, LinnetError | torch.OutOfMemoryError):
            raise
        what = ", ".join(shown(one) for one in given)
        raise InputError(
            f"{name}({what}) failed with {type(error).__name__}: {error}",
            expected,
            remedy or f"call {name} on this yourself, and mend it or what it is given",
        ) from error


def wrapped(value: Any) -> Tensor:
    """A tensor of what holds numbers, in the same memory where that can be; nothing is ever written there."""
    if hasattr(value, "to_numpy"):  # the columns of data frames
        value = value.to_numpy()
    if isinstance(value, np.ma.MaskedArray) and (hidden := int(np.ma.getmaskarray(value).sum())):
        raise ValueError(f"its mask hides {hidden} of its entries: drop or fill them")
    if isinstance(value, np.ndarray):
        value = _plain_array(value)
    locked = isinstance(value, np.ndarray) and not value.flags.writeable
    with warnings.catch_warnings() if locked else contextlib.nullcontext():
        if locked:
            warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        found = torch.as_tensor(value)
    if found.dtype not in _UNSIGNED:
        return found
    signed = found.long()  # torch compares and sums no others
    if found.dtype == torch.uint64 and bool((signed < 0).any()):
        raise ValueError("numbers beyond 2**63 - 1")
    return signed


def _plain_array(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of a type and layout that torch has, the same one where it can be."""
    if value.dtype.kind == "O" and not any(isinstance(one, str) for one in value.flat):
        found = np.array(value.tolist())  # columns of whole numbers, or with gaps
        value = found if found.dtype.kind in "iu" and found.shape == value.shape else value.astype(np.float64)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if value.dtype.kind == "f" and value.dtype.itemsize > 8:
        value = value.astype(np.float64)
    return value.copy() if any(stride < 0 for stride in value.strides) else value


def tensor(name: str, value: Any, expected: str, remedy: str | None = None, convert: bool = True) -> Tensor:
    """A dense tensor of real numbers that can be read."""
    if not convert and not isinstance(value, Tensor):
        refuse(name, value, expected, remedy or f"pass torch.as_tensor({name})")
    try:
        found = wrapped(value)
        if isinstance(value, float | list | tuple) and found.is_floating_point():
            found = torch.as_tensor(value, dtype=torch.float64)  # Python's floats, whole
    except Exception:  # lists of anything, objects whose __array__ fails
        refuse(name, value, expected, remedy)
    dense = found.layout == torch.strided or found.is_mkldnn
    if not dense or found.is_nested or found.is_complex() or found.device.type == "meta":
        refuse(name, value, expected, remedy or f"pass a dense tensor of real numbers as {name}=")
    return found


def positive_numbers(name: str, value: Any, expected: str, remedy: str | None = None) -> Tensor:
    """A dense tensor of positive finite numbers, at least one."""
    found = tensor(name, value, expected, remedy)
    numbers = found.detach().to("cpu", torch.float64)
    if found.dtype == torch.bool or not ((numbers > 0) & numbers.isfinite()).all() or not numbers.numel():
        refuse(name, value, expected, remedy)
    return found


def own(value: Any) -> Any:
    """What a caller gave, in memory that nobody else writes to."""
    if isinstance(value, Mapping):
        return {name: own(part) for name, part in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def device(name: str, value: Any) -> torch.device:
    """A device that tensors can be moved to."""
    found: torch.device | None = None
    if isinstance(value, str | torch.device):
        try:
            found = torch.empty(0, device=value).device
        except Exception:  # torch has an exception of its own for each kind of device that is missing
            found = None
    if found is None or found.type == "meta":
        refuse(name, value, 'a device of this machine, such as "cpu" or "cuda:0"')
    return torch.device(value)


def real_type(name: str, value: Any) -> torch.dtype:
    """A type of real floating-point numbers."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    refuse(name, value, "a floating-point type, such as torch.float32")


def path(name: str, value: Any, remedy: str | None = None) -> Path:
    r"""The place of a file or folder."""
    expected = "a path, as a string or a pathlib.Path"
    remedy = remedy or f'pass {name}=pathlib.Path("runs/first"), or another path'
    if not isinstance(value, str | os.PathLike):
        refuse(name, value, expected, remedy)
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text or len(_encoded(text)) > _PATH:
        refuse(name, value, f"{expected}, of 1 to {_PATH} bytes without a NUL", remedy)
    found = Path(text)
    if any(len(_encoded(part)) > _NAME for part in found.parts):
        refuse(name, value, f"{expected}, whose parts have at most {_NAME} bytes", remedy)
    return found


def _encoded(text: str) -> bytes:
    """A path as the file system has it; what cannot be encoded counts as it is written in source."""
    return text.encode("utf-8", "backslashreplace")


def known(caller: str, options: Collection[str], allowed: Collection[str]) -> None:
    """Refuse keywords that a function does not have."""
    for name in options:
        if name in allowed:
            continue
        close = difflib.get_close_matches(name, allowed, 1)
        raise InputError(
            f"{caller} has no parameter {name}",
            expected=f"one of {', '.join(sorted(allowed))}" if allowed else "no keywords",
            remedy=f"did you mean {close[0]}=?" if close else f"leave {name}= out",
        )


@contextlib.contextmanager
def holding(variable: ContextVar[_Kind], value: _Kind) -> Iterator[None]:
    """Give a context variable a value, and give back the one before, whatever is raised inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
