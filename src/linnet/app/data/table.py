"""A regression or a classification in a ``.csv`` table: a header, then one sample per line."""

from __future__ import annotations

import csv
import difflib
import math
import os
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from linnet.app.data.checks import check_classes, some
from linnet.app.data.columns import (
    EMPTY,
    MOST_CATEGORIES,
    Column,
    Table,
    filled_unmarked,
    finite,
    fitted,
    names_lines,
    remarks,
)
from linnet.app.data.task import InMemory, SampleSet, TaskData, split_at_random, split_by_class
from linnet.app.data.transforms import Standardize
from linnet.errors import DataError, FileFormatError, InputError
from linnet.files import require_file, require_room
from linnet.params import shown

Array = np.ndarray[Any, Any]
_DELIMITERS = (",", ";", "\t")
_LONGEST_LINE = 1 << 25  # characters: a million columns of 32, more than any table of features has
_NAME_BYTES = 64  # of a Python string such as "line 1234567" and its place in a list
_CHECKED = 1 << 16  # lines between two looks at the memory
_FAULTS = 8  # lines named in an error
_NUMBERS = 0.9  # share of numbers in a column of numbers; see survey
_LONGEST_TEXT = 200  # characters of a category; a longer text is no name of a class
_SHOWN = 60  # characters of a column's name in an error


def read_table(
    path: str | os.PathLike[str],
    target: str | Sequence[str] | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
) -> TaskData:
    r"""Read a table: a regression of a column of numbers, or the classes that a column of texts names."""
    # Columns of texts become categories and empty cells are filled (`linnet.app.data.columns`); both, and the
    # scale of columns and of a regression's targets, follow from the training lines alone. A target that is 0
    # or 1 throughout is two classes. A column named split with the texts train and test says which lines are
    # which. Samples are named by their line in the file, `line 2` being the first after the header.
    path = require_file(path)
    names, texts = survey(path)
    answers = _target_columns(path, names, target)
    assumed = (
        f"{_label((names or [''])[-1])}, the last column, is taken as the target: --target takes another"
    )
    cells = read_cells(path, names, texts, answers, assumed="" if target else assumed)
    split = _split_column(cells, answers)
    features = [name for name in names if name not in answers and name != split]
    if not features:
        raise DataError(f"{path} has no columns but the target", expected="at least one feature column")
    y, classes, findings = _answers(path, cells, answers)
    findings += [] if target else [assumed]
    if split is not None:
        marked = np.array([text.strip().lower() == "train" for text in cells.texts[split]])
        learned = marked[cells.values[split].astype(np.int64)]
        train, test = np.flatnonzero(learned), np.flatnonzero(~learned)
        findings.append(f"the column {split} says which lines are trained on ({len(train)}) and tested")
    elif classes is not None:
        train, test = split_by_class(y, test_fraction, seed)
    else:
        train, test = split_at_random(len(y), test_fraction, seed)
    table, x, told = _encoded(cells, features, answers, train)
    if classes is not None:
        findings += check_classes(y[train], classes)
    numbers = x if classes is not None else np.concatenate([x, y], axis=1)
    spreads = np.ptp(numbers[train], axis=0)
    constant = [label for label, s in zip((*table.labels, *answers), spreads, strict=False) if s == 0]
    findings += [*told, *([f"constant in the training lines: {some(constant)}"] if constant else [])]
    whole = SampleSet(InMemory(x), np.arange(len(x)), y, cells.ids)
    scale = None if classes is not None else Standardize.of(y[train])
    parts = whole.take(train), whole.take(test)
    return TaskData(*parts, classes, Standardize.of(x[train]), scale, tuple(findings), table)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a table, by column."""

    # each column's numbers, (N,), NaN where empty; of a column of texts, positions in `texts`
    values: dict[str, Array]
    # the different texts of each column of texts, in the order in which they come
    texts: dict[str, tuple[str, ...]]
    ids: tuple[str, ...]  # the lines' names


def survey(path: Path) -> tuple[list[str], set[str]]:
    """The columns of a table, and those with texts: more than a tenth of whose cells are no numbers."""
    # Fewer cells than that among numbers are mistakes, which are named when the table is read.
    rows = _rows(path)
    _, header = next(rows, (0, []))
    names = [name.strip() for name in header]
    _check_header(path, names)
    numbers, filled = [0] * len(names), [0] * len(names)
    for _, row in rows:
        if len(row) == len(names):
            for place, cell in enumerate(row):
                value = finite(cell)
                empty = value is not None and math.isnan(value)
                filled[place] += not empty
                numbers[place] += not empty and _number(cell) is not None
    return names, {n for n, a, b in zip(names, numbers, filled, strict=True) if a < _NUMBERS * b}


def read_cells(
    path: Path,
    names: Sequence[str],
    texts: Collection[str],
    needed: Collection[str],
    least: int = 2,
    assumed: str = "",
) -> Cells:
    """Read a whole table."""
    rows = _rows(path)
    next(rows, None)
    values, lines, faults, faulty = array("d"), [], [], 0
    codes: dict[str, dict[str, int]] = {name: {} for name in names if name in texts}
    for line, row in rows:
        fault = _fault(row, names, texts, needed)
        if fault:
            faulty += 1
            if faulty <= _FAULTS:
                faults.append(f"line {line}: {fault}")
        else:
            values.extend(_coded(name, cell, codes) for name, cell in zip(names, row, strict=True))
            lines.append(f"line {line}")
        if len(lines) % _CHECKED == _CHECKED - 1:  # twice what is held: lists grow by copying
            held = sum(map(len, codes.values()))
            require_room(path, 8 * len(values) + _NAME_BYTES * (len(lines) + held), "more of its lines")
    if faults:
        raise DataError(
            f"{path} has {faulty} faulty lines: {'; '.join(faults)}",
            expected=f"{len(names)} cells on each line, finite numbers in columns of them, no empty target",
            remedy="; ".join(filter(None, ("correct or remove these lines", assumed))),
        )
    if len(lines) < least:
        raise DataError(
            f"{path} has {len(lines)} lines of samples",
            expected=f"at least {('one', 'two')[least - 1]} below the names of the columns",
            remedy="check that the first line names the columns, and that lines follow it",
        )
    whole = np.frombuffer(values).reshape(len(lines), len(names))
    columns = {name: whole[:, place] for place, name in enumerate(names)}
    return Cells(columns, {name: tuple(found) for name, found in codes.items()}, tuple(lines))


def _coded(name: str, cell: str, codes: dict[str, dict[str, int]]) -> float:
    """A cell as a number: its own, or the position of its text; NaN where it is empty."""
    if name not in codes:
        value = finite(cell)
        return math.nan if value is None else value
    text = cell.strip()
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_SHOWN]}... ({len(text)} characters)"
    return float(codes[name].setdefault(text, len(codes[name]))) if text else math.nan


def _split_column(cells: Cells, answers: Sequence[str]) -> str | None:
    """The column that says which lines are for training and which for testing."""
    for name, texts in cells.texts.items():
        known = {text.lower() for text in texts}
        whole = not np.isnan(cells.values[name]).any()
        if name.lower() == "split" and name not in answers and known == {"train", "test"} and whole:
            return name
    return None


def _answers(
    path: Path, cells: Cells, answers: Sequence[str]
) -> tuple[Array, tuple[str, ...] | None, list[str]]:
    """Labels (N,) with the names of their classes, or targets (N, T); and what to say of them."""
    worded = [name for name in answers if name in cells.texts]
    if worded and len(answers) > 1:
        raise DataError(
            f"{worded[0]} of {path} holds texts, and there are {len(answers)} targets",
            expected="columns of numbers, or one column of classes",
            remedy="predict the classes by themselves",
        )
    values = np.stack([cells.values[name] for name in answers], axis=1)
    if worded:
        texts = cells.texts[worded[0]]
        classes = tuple(sorted(texts))
        order = np.array([classes.index(text) for text in texts])
        return order[values[:, 0].astype(np.int64)], classes, []
    if len(answers) == 1 and set(np.unique(values)) == {0.0, 1.0}:
        note = f"{answers[0]} is 0 or 1 throughout: taken as two classes"
        return values[:, 0].astype(np.int64), ("0", "1"), [note]
    return values, None, _numbered(answers, values)


def _numbered(answers: Sequence[str], values: Array) -> list[str]:
    """A finding when the one target looks like the numbers of classes."""
    kinds = len(np.unique(values))
    if len(answers) > 1 or kinds > min(MOST_CATEGORIES, len(values) // 2) or (values % 1).any():
        return []
    told = f"{answers[0]} is whole numbers, {kinds} different ones: taken as a regression"
    return [f"{told}; for classes write texts, such as class{values.flat[0]:.0f}"]


def _encoded(
    cells: Cells, features: Sequence[str], answers: Sequence[str], train: Array
) -> tuple[Table, Array, list[str]]:
    """The columns as features (N, D), fitted on the training lines, and what to say of them."""
    columns, values, left_out = [], [], []
    every = {name: fitted(name, cells.values[name][train], cells.texts.get(name)) for name in features}
    named = {n for n in features if n not in cells.texts and names_lines(n, cells.values[n])}
    varied = {
        n for n, found in every.items() if not isinstance(found, str) and np.ptp(cells.values[n][train])
    }
    named = named if varied - named else set()  # nothing else could be a feature
    for name, found in every.items():
        if isinstance(found, str) or name in named:
            left_out.append(found if isinstance(found, str) else f"{name} (numbers of the lines)")
            continue
        column, order = found
        columns.append(column)
        values.append(_placed(cells.values[name], column, order))
    if not columns:
        raise DataError(
            f"no column can be a feature: {some(left_out)}",
            expected="columns of numbers, or of texts that repeat",
            remedy="replace texts by numbers or categories",
        )
    table = Table(tuple(columns), tuple(answers))
    known = {name: cells.values[name][train] for name in features}
    told = remarks(table, left_out, known)
    held_out = np.setdiff1d(np.arange(len(cells.ids)), train)
    unmarked = (filled_unmarked(column, cells.values[column.name][held_out]) for column in columns)
    return table, table.encode(values), [*told, *filter(None, unmarked)]


def _placed(values: Array, column: Column, order: Array) -> Array:
    """Cells of texts as positions among a column's categories, −1 for unknown ones."""
    if column.categories is None:
        return values
    empty = column.categories.index(EMPTY) if EMPTY in column.categories else -1
    whole = np.append(order, empty)
    return whole[np.where(np.isnan(values), len(order), values).astype(np.int64)]


def read_like(path: Path, table: Table) -> tuple[Array, dict[str, Array], Cells, list[str]]:
    """Read the lines of another table like that of a run."""
    names, texts = survey(path)
    missing = [column.name for column in table.features if column.name not in names]
    if missing:
        raise DataError(
            f"{path} lacks the columns {some(missing)}",
            expected=f"the columns {some([column.name for column in table.features])}",
            remedy="name them in the first line",
        )
    kinds = {column.name: column.categories is not None for column in table.features}
    worded = {name for name in names if kinds.get(name, name in texts)}
    present = [name for name in table.targets if name in names]
    cells = read_cells(path, names, worded, present, least=1)
    values, findings = [], []
    for column in table.features:
        own, order = cells.values[column.name], np.zeros(0)
        if column.categories is not None:
            place = {text: at for at, text in enumerate(column.categories)}
            known = cells.texts[column.name]
            order = np.array([place.get(text, -1) for text in known], dtype=np.float64)
            new = [text for text in known if text not in place]
            if new:
                findings.append(f"{column.name} has texts that the run has not seen: {some(new)}")
        findings += filter(None, [filled_unmarked(column, own)])
        values.append(_placed(own, column, order))
    return table.encode(values), {name: cells.values[name] for name in present}, cells, findings


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
                expected="a table with one sample per line",
                remedy="save data this wide as an .npz archive",
            )
        yield line


def _check_header(path: Path, names: list[str]) -> None:
    """Require names for the columns."""
    if not names:
        raise DataError(f"{path} is empty", expected="a header and one sample per line")
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path} begins with numbers", expected="the columns' names on the first line")
    if len(set(names)) < len(names) or "" in names:
        counts = Counter(names)
        double = [shown(name) for name in sorted(counts) if counts[name] > 1 or not name]
        raise DataError(
            f"{path} has empty or repeated column names: {some(double)}", expected="one name a column"
        )


def _fault(
    row: list[str], names: Sequence[str], texts: Collection[str], needed: Collection[str]
) -> str | None:
    """The fault of a row; None where there is none."""
    if len(row) != len(names):
        return f"{len(row)} cells, not {len(names)}"
    for name, cell in zip(names, row, strict=True):
        value = math.nan if not cell.strip() else 0.0 if name in texts else finite(cell)
        if name in texts and name in needed and len(cell) > _LONGEST_TEXT:
            value = None
        if value is not None and (value == value or name not in needed):
            continue
        label = _label(name)
        if value is None:
            number = _number(cell)
            what = shown(cell) if number is None else f"{shown(number)}, which is not finite"
            return f"{label} is {what}"
        return f"{label} is empty"
    return None


def _label(name: str) -> str:
    """A column's name, shortened where it is long."""
    return name if len(name) <= _SHOWN else shown(name)


def _number(cell: str) -> float | None:
    """The number in a cell, if there is one."""
    try:
        return float(cell)
    except ValueError:
        return None


def _target_columns(path: Path, names: list[str], target: str | Sequence[str] | None) -> list[str]:
    """The columns to predict."""
    wanted = [names[-1]] if target is None else [target] if isinstance(target, str) else list(target)
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        close = difflib.get_close_matches(next(iter(unknown), ""), names, n=1)
        raise InputError(
            f"target is {target!r}, which is no column of {path}",
            expected=f"one of {some(names)}",
            remedy=f"did you mean {close[0]}?" if close else "copy a name from the table's first line",
        )
    return wanted
