"""Columns of a table as numbers: categories as zeros and ones, empty cells filled and marked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linnet.app.data.checks import some

Array = np.ndarray[Any, Any]
# Different texts of a column in the training lines. Of more, most come once or twice and tell nothing.
MOST_CATEGORIES = 50
FEW_CATEGORIES = 5  # so many may come once each
LEFT_OUT = "columns left out: "  # how the remark on them begins
EMPTY = ""  # the category of empty cells
_LINES = 10  # in fewer, whole numbers may differ in every line without being names of the lines
_ID = re.compile(r"(?:^|[\W_])(?i:id|key|index|number|no|nr)$|[a-z](?:Id|ID|Key|Index|Number|No|Nr)$")
_BY_CHANCE = 5.0  # pairs of n numbers drawn from a range that would be equal on average: all differ in 0.7 %


@dataclass(frozen=True)
class Column:
    """Encoding of a column."""

    name: str  # its name
    # its texts in the training lines, each of which is a number of zero or one; the second alone where there
    # are two. None for a column of numbers
    categories: tuple[str, ...] | None = None
    fill: float = 0.0  # what an empty cell of numbers stands for, the median of the training lines
    marked: bool = False  # whether a further number is one where the cell is empty

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its numbers."""
        if self.categories is None:
            return (self.name, f"{self.name} is empty") if self.marked else (self.name,)
        shown = self.categories[1:] if len(self.categories) == 2 else self.categories
        return tuple(f"{self.name} = {text}" if text != EMPTY else f"{self.name} is empty" for text in shown)

    def encode(self, values: Array) -> Array:
        """Its numbers, (N, K)."""
        if self.categories is not None:
            hot: Array = (values[:, None] == np.arange(len(self.categories))).astype(np.float64)
            return hot[:, 1:] if len(self.categories) == 2 else hot
        empty = np.isnan(values)
        filled = np.where(empty, self.fill, values)
        return np.stack([filled, empty.astype(np.float64)] if self.marked else [filled], axis=1)


@dataclass(frozen=True)
class Table:
    """Columns of a table."""

    features: tuple[Column, ...]  # columns that become features
    targets: tuple[str, ...] = ()  # names of the columns that are predicted

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Table:
        """The table that a file describes."""
        columns = []
        for one in stored["features"]:
            texts = one["categories"]
            categories = None if texts is None else tuple(map(str, texts))
            columns.append(Column(str(one["name"]), categories, float(one["fill"]), bool(one["marked"])))
        return cls(tuple(columns), tuple(map(str, stored["targets"])))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all features, (D,)."""
        return tuple(label for column in self.features for label in column.labels)

    def encode(self, values: Sequence[Array]) -> Array:
        """Features of lines, (N, D)."""
        return np.concatenate([c.encode(v) for c, v in zip(self.features, values, strict=True)], axis=1)


def fitted(name: str, values: Array, texts: Sequence[str] | None) -> tuple[Column, Array] | str:
    """Encoding of a column, from the training lines."""
    if texts is None:
        known = values[~np.isnan(values)]
        if not len(known):
            return f"{name} (empty in all training lines)"
        return Column(name, None, float(np.median(known)), len(known) < len(values)), np.zeros(0)
    present = sorted({texts[int(code)] for code in np.unique(values[~np.isnan(values)])})
    filled = len(values) - int(np.isnan(values).sum())
    if len(present) > MOST_CATEGORIES or len(present) > max(FEW_CATEGORIES, filled // 2):  # such as names
        return f"{name} ({len(present)} different texts)"
    if np.isnan(values).any():
        present.append(EMPTY)
    order = {text: place for place, text in enumerate(present)}
    return Column(name, tuple(present)), np.array([order.get(text, -1) for text in texts], dtype=np.float64)


def names_lines(name: str, values: Array) -> bool:
    """Whether whole numbers, (N,), identify the lines: all differ, and are in order, dense or called so."""
    n = len(values)
    if n < _LINES or not bool((values % 1 == 0).all()) or len(np.unique(values)) < n:  # NaN % 1 is not 0
        return False
    pairs = n * (n - 1) / 2 / (1 + np.ptp(values))
    return bool((np.diff(values) > 0).all()) or bool(pairs > _BY_CHANCE) or _ID.search(name) is not None


def remarks(table: Table, left_out: Sequence[str], train: Mapping[str, Array]) -> list[str]:
    """Remarks on the columns."""
    found = []
    texts = [f"{c.name} ({len(c.categories)})" for c in table.features if c.categories is not None]
    if texts:
        found.append(f"texts as categories, a number of zero or one each: {some(texts)}")
    filled = [
        f"{c.name} ({int(np.isnan(train[c.name]).sum())} of {len(train[c.name])})"
        for c in table.features
        if c.categories is None and c.marked
    ]
    if filled:
        found.append(f"empty cells filled with the median of the training lines, and marked: {some(filled)}")
    if left_out:
        found.append(f"{LEFT_OUT}{some(left_out)}")
    return found


def filled_unmarked(column: Column, values: Array) -> str | None:
    """A remark on empty cells in a column that had none in the training lines: no model can know of them."""
    empty = int(np.isnan(values).sum())
    if not empty or column.marked or (column.categories is not None and EMPTY in column.categories):
        return None
    if column.categories is None:
        taken = f"{column.fill:.4g}, the median of the training lines"
    else:
        taken = f"{column.categories[0]!r}" if len(column.categories) == 2 else "none of its categories"
    where = f"{column.name} is empty in {empty} of {len(values)} lines and in no training line"
    return f"{where}: taken as {taken}; the uncertainty does not know that it is missing"


def finite(cell: str) -> float | None:
    """The number in a cell, NaN for an empty one, None for a text or an infinite number."""
    if cell.strip().lower() in ("", "na", "n/a", "nan", "null"):
        return math.nan
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
