"""A regression in a ``.csv`` table: a header, then one sample a line."""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from linnet.data.checks import some
from linnet.data.splits import split_at_random
from linnet.data.task import InMemory, Part, TaskData
from linnet.data.transforms import Standardize
from linnet.errors import DataError, FileFormatError, InputError
from linnet.limits import require_file, require_room
from linnet.params import shown

Array = np.ndarray[Any, Any]
_DELIMITERS = (",", ";", "\t")
_LONGEST_LINE = 1 << 25  # characters: a million columns of 32, more than any table of features has
_NAME_BYTES = 64  # of a Python string such as "line 1234567" and its place in a list
_CHECKED = 1 << 16  # lines between two looks at the memory
_FAULTS = 8  # lines named in an error
_SHOWN = 60  # characters of a column's name in an error


def read_table(
    path: str | os.PathLike[str],
    target: str | Sequence[str] | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
) -> TaskData:
    r"""Read a regression from a table of numbers.

    Columns and targets are standardized by the mean and standard deviation of the training lines alone.
    Samples are named by their line in the file, ``line 2`` being the first after the header.

    Args:
        path: The table, in UTF-8, separated by commas, semicolons or tabs, with the columns' names first.
        target: The column or columns to predict; the last by default.
        seed: Seed of the split into train and test.
        test_fraction: Share of the lines held out.

    Returns:
        The task; ``targets.inverse`` brings predictions back to the table's units.

    Raises:
        InputError: There is no such file, or no such column.
        FileFormatError: The file is no text, or a line of it is endless.
        MemoryBudgetError: Its numbers would take more memory than is free.
        DataError: There is no header or there are too few lines, or cells are missing, not numbers or not
            finite; the lines are named.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "houses.csv"
        ...     _ = file.write_text("rooms,price\n" + "".join(f"{n},{10 * n}\n" for n in range(10)))
        ...     task = read_table(file, target="price")
        >>> len(task.train), task.test.ids
        (8, ('line ...', 'line ...'))
    """
    path = require_file(path)
    names, values, ids = read_numbers(path)
    answer = _target_columns(path, names, target)
    features = [column for column in range(len(names)) if column not in answer]
    if not features:
        raise DataError(f"{path} has no columns but the target", expected="at least one feature column")
    x, y = values[:, features], values[:, answer]
    train, test = split_at_random(len(values), test_fraction, seed)
    whole = Part(InMemory(x), np.arange(len(x)), y, ids)
    spreads = np.ptp(values[train], axis=0)
    constant = [name for name, spread in zip(names, spreads, strict=True) if spread == 0]
    return TaskData(
        whole.take(train),
        whole.take(test),
        None,
        Standardize.of(x[train]),
        Standardize.of(y[train]),
        (f"constant in the training lines: {some(constant)}",) if constant else (),
    )


def read_numbers(path: Path) -> tuple[list[str], Array, tuple[str, ...]]:
    """Read a whole table.

    Args:
        path: The table.

    Returns:
        The columns' names, the numbers (N, columns) and the lines' names.

    Raises:
        FileFormatError: The file is no text.
        DataError: There is no header or there are too few lines, or cells are faulty.
    """
    rows = _rows(path)
    _, header = next(rows, (0, []))
    names = [name.strip() for name in header]
    _check_header(path, names)
    values, lines, faults, faulty = array("d"), [], [], 0
    for line, row in rows:
        fault = _fault(row, names)
        if fault:
            faulty += 1
            if faulty <= _FAULTS:
                faults.append(f"line {line}: {fault}")
        else:
            values.extend(map(float, row))
            lines.append(f"line {line}")
        if len(lines) % _CHECKED == _CHECKED - 1:  # twice what is held: lists grow by copying
            require_room(path, 8 * len(values) + _NAME_BYTES * len(lines), "more of its lines")
    if faults:
        raise DataError(
            f"{path} has {faulty} faulty lines: {'; '.join(faults)}",
            expected=f"{len(names)} finite numbers on each line",
            remedy="correct or remove these lines",
        )
    if len(lines) < 2:
        raise DataError(f"{path} has {len(lines)} lines of numbers", expected="at least two below the header")
    return names, np.frombuffer(values).reshape(len(lines), len(names)), tuple(lines)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, with their line numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(_LONGEST_LINE)
            file.seek(0)
            reader = csv.reader(_lines(path, file), delimiter=max(_DELIMITERS, key=first.count))
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(
            f"{path} is no table of text ({error})",
            expected="a .csv file in UTF-8",
            remedy="save it again as CSV in UTF-8; look for a quotation mark that is not closed",
        ) from error


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    """The lines of a file, none of which is read whole before its length is known."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise FileFormatError(
                f"line {number} of {path} has {_LONGEST_LINE:,} characters or more",
                expected="a table with one sample a line",
                remedy="save data this wide as an .npz archive",
            )
        yield line


def _check_header(path: Path, names: list[str]) -> None:
    """Require names for the columns."""
    if not names:
        raise DataError(f"{path} is empty", expected="a header and one sample a line")
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path} begins with numbers", expected="the columns' names on the first line")
    if len(set(names)) < len(names) or "" in names:
        counts = Counter(names)
        double = [shown(name) for name in sorted(counts) if counts[name] > 1 or not name]
        raise DataError(
            f"{path} has empty or repeated column names: {some(double)}", expected="one name a column"
        )


def _fault(row: list[str], names: list[str]) -> str | None:
    """What is wrong with a row, if anything."""
    if len(row) != len(names):
        return f"{len(row)} cells, not {len(names)}"
    for name, cell in zip(names, row, strict=True):
        number = _number(cell)
        if number is not None and math.isfinite(number):
            continue
        label = name if len(name) <= _SHOWN else shown(name)
        if number is None:
            return f"{label} is {shown(cell)}" if cell.strip() else f"{label} is empty"
        return f"{label} is {shown(number)}, which is not finite"
    return None


def _number(cell: str) -> float | None:
    """The number in a cell, if there is one."""
    try:
        return float(cell)
    except ValueError:
        return None


def _target_columns(path: Path, names: list[str], target: str | Sequence[str] | None) -> list[int]:
    """The positions of the columns to predict."""
    wanted = [names[-1]] if target is None else [target] if isinstance(target, str) else list(target)
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        raise InputError(f"target is {target!r}", expected=f"columns of {path}: {some(names)}")
    return [names.index(name) for name in wanted]
