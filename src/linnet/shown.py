"""What a prompt and a notebook show of an object: its kind, its sizes, and the numbers that matter.

A class says what that is once, in ``_shown``; the line of ``repr`` and the table of ``_repr_html_`` follow.
For a :class:`Record` it is the fields. Large tensors are told by shape and range, never printed whole.
Tables for pandas are made here too; pandas is imported when one is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from enum import Enum
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from linnet.errors import DependencyError

if TYPE_CHECKING:
    from pandas import DataFrame

_WHOLE = 6  # entries of a tensor that are shown as they are
_ROWS = 12  # parts of a list or a dict in a cell


class Shown(ABC):
    """An object that tells what it is."""

    @abstractmethod
    def _shown(self) -> Mapping[str, Any]:
        """Names and values: numbers, texts, tensors, records, and lists and dicts of them."""

    def __repr__(self) -> str:
        """The kind and what is told in a line; lists and dicts are for the table."""
        told = {name: value for name, value in self._shown().items() if _short(value)}
        line = ", ".join(f"{name}={in_line(value)}" for name, value in told.items())
        return f"{type(self).__name__}({line})"

    def _repr_html_(self) -> str:
        """A table of everything that is told, for notebooks."""
        return f"<table><caption>{escape(type(self).__name__)}</caption>{_rows(self._shown())}</table>"


class Record(Shown, ABC):
    """A dataclass that tells its fields."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def _shown(self) -> Mapping[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def in_line(value: Any) -> str:
    """A value in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Tensor | np.ndarray):
        return _tensor(torch.as_tensor(value).detach())
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {in_line(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        parts = [in_line(part) for part in value[:_WHOLE]]
        return f"({', '.join(parts)}{', …' if len(value) > _WHOLE else ''})"
    if isinstance(value, int | str | torch.dtype | torch.device) or value is None:
        return str(value)
    return repr(value) if isinstance(value, Record) else type(value).__name__


def in_lines(told: Mapping[str, Any]) -> str:
    """A line for each name with its value; what is missing has none."""
    known = {name: value for name, value in told.items() if value is not None}
    width = max(map(len, known), default=0)
    return "\n".join(f"{name:<{width}}  {in_line(value)}" for name, value in known.items())


def _short(value: Any) -> bool:
    """Whether a value belongs into a line: tuples of numbers do, lists, dicts and what is missing do not."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(part, int | float) for part in value)
    return value is not None and not isinstance(value, dict | list)


def _tensor(value: Tensor) -> str:
    """The entries of a small tensor, shape and range of a large one."""
    if value.numel() <= _WHOLE and value.ndim <= 1:
        entries = value.tolist()
        return in_line(entries) if value.ndim == 0 else f"[{', '.join(map(in_line, entries))}]"
    shape = f"({', '.join(map(str, value.shape))}{',' if value.ndim == 1 else ''})"
    if not value.numel() or value.is_complex():
        return shape
    return f"{shape} from {in_line(value.min().item())} to {in_line(value.max().item())}"


def _rows(told: Mapping[str, Any]) -> str:
    """The rows of a table; what is missing or empty has none."""
    return "".join(
        f"<tr><th style='text-align:left'>{escape(str(name))}</th>"
        f"<td style='text-align:left'>{_cell(value)}</td></tr>"
        for name, value in told.items()
        if not (value is None or (isinstance(value, str | list | tuple | dict) and not value))
    )


def _cell(value: Any) -> str:
    """A value as HTML: records as tables, lists and dicts line by line as far as there is room."""
    if isinstance(value, Record):
        return f"<table>{_rows(value._shown())}</table>"
    if isinstance(value, dict):
        lines = [f"{escape(str(name))}: {_cell(inner)}" for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        lines = [_cell(inner) for inner in value]
    else:
        return escape(in_line(value))
    more = [f"… {len(lines) - _ROWS} more"] if len(lines) > _ROWS else []
    return "<br>".join([*lines[:_ROWS], *more])


def frame(columns: Mapping[str, Tensor | None], index: str = "example") -> DataFrame:
    """A table of columns of one length."""
    # columns (N,)
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise DependencyError(
            "to_frame() needs pandas, which cannot be imported",
            expected="pandas 2 or later",
            remedy="pip install pandas; the same numbers are tensors in this object's fields and methods",
        ) from error
    arrays = {name: _exact(value).cpu().numpy() for name, value in columns.items() if value is not None}
    table = DataFrame(arrays)
    return table.set_index(index) if index in arrays else table.rename_axis(index)


def outputs(name: str, values: Tensor) -> dict[str, Tensor]:
    """Columns of outputs."""
    # values (N, C)
    if values.shape[1] == 1:
        return {name: values[:, 0]}
    return {f"{name} {k}": values[:, k] for k in range(values.shape[1])}


def _exact(value: Tensor) -> Tensor:
    """A tensor in a type that numpy has."""
    value = value.detach()
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or what kind it is where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
