"""A regression or a classification in a table: a header, then one sample per line."""

from __future__ import annotations

import codecs
import csv
import difflib
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from linnet.app.data.task import (
    EMPTY,
    LEFT_OUT,
    TESTED,
    TRAINED,
    Column,
    InMemory,
    SampleSet,
    Table,
    TaskData,
    check_classes,
    split,
)
from linnet.app.data.transforms import Standardize
from linnet.errors import DataError, FileFormatError, InputError
from linnet.files import require_file, require_room
from linnet.params import shown
from linnet.shown import some

Array = np.ndarray[Any, Any]
_DELIMITERS = (",", ";", "\t", "|")
_COMMA = re.compile(r"\s*[+-]?\d+,\d+(?:[eE][+-]?\d+)?\s*")  # such as 0,5
_STATED = re.compile(r"sep=([,;\t|])\s*", re.IGNORECASE)  # a first line of Excel's own, no names
_GROUPED = re.compile(r"\s*[+-]?[1-9]\d{0,2}[.,]\d{3}\s*")  # such as 8,609, with decimals or without
_UNITED = re.compile(r"[+-]?[^\w\s.,]\s?[\d.,']*\d|[+-]?\d[\d.,']*\s?[^\d\s]{1,3}")  # such as $5 or 5 kg
_MARKED = re.compile(r"\s*[+-]?\d{1,3}(?:[., ]\d{3})+(?:[.,]\d+)?\s*")  # such as 1,234.5
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?(?:[ T]\d.*)?|\d\d?[./]\d\d?[./]\d{2,4}")
_LONGEST_LINE = 1 << 25  # characters: a million columns of 32, more than any table of features has
_NAME_BYTES = 64  # of a Python string such as "line 1234567" and its place in a list
_CHECKED = 1 << 16  # lines between two looks at the memory
_FAULTS = 8  # lines named in an error
_NUMBERS = 0.9  # share of numbers in a column of numbers; see survey
_LONGEST_TEXT = 200  # characters of a category; a longer text is no name of a class
_SHOWN = 60  # characters of a column's name in an error
# Different texts of a column in the training lines. Of more, most come once or twice and tell nothing.
MOST_CATEGORIES = 50
FEW_CATEGORIES = 5  # so many may come once each
EMPTY_CELLS = ("", "na", "n/a", "nan", "null", "none")  # among numbers, in any case
INDEX = "index"
NEITHER, NONE = "neither of its two categories", "none of its categories"
_LINES = 10  # in fewer, whole numbers may differ in every line without being names of the lines
_ID = re.compile(r"(?:^|[\W_])(?i:id|key|index|number|no|nr)$|[a-z](?:Id|ID|Key|Index|Number|No|Nr)$")
_NAMES_CASES = re.compile(r"(?:^|[\W_])(?i:id)$|[a-z]I[dD]$")  # an index or a number may be a measurement
_BY_CHANCE = 5.0  # pairs of n numbers drawn from a range that would be equal on average: all differ in 0.7 %


def read_table(path: str | os.PathLike[str], target: str | None = None, seed: int = 0) -> TaskData:
    r"""Read a table: a regression of a column of numbers, or the classes that a column of texts names."""
    # Columns of texts become categories and empty cells are filled (see below); both, and the
    # scale of columns and of a regression's targets, follow from the training lines alone. A target that is 0
    # or 1 throughout is two classes. A column named split with the texts train and test says which lines are
    # which. Samples are named by their line in the file, `line 2` being the first after the header.
    path = require_file(path)
    names, texts, commas = survey(path)
    answer = _target_column(path, names, target)
    assumed = f"{_label(answer)}, the last column, is taken as the target: --target takes another"
    cells = read_cells(path, names, texts, answer, commas, assumed="" if target else assumed)
    column = _split_column(cells, answer)
    features = [name for name in names if name not in (answer, column)]
    if not features:
        raise DataError(
            f"{path} has no columns but the target",
            expected="at least one feature column",
            remedy="separate cells by a comma, a semicolon, a tab or |",
        )
    y, classes, findings = _answers(cells, answer)
    findings += [] if target else [assumed]
    findings += _turned(commas)
    if column is None:
        train, test = split(len(y), None if classes is None else y, seed)
    else:
        learned = _learned(cells, column)
        train, test = np.flatnonzero(learned), np.flatnonzero(~learned)
        findings.append(f"the column {column} says which lines are trained on ({len(train)}) and tested")
    table, x, told = _encoded(cells, features, answer, train)
    table = replace(table, commas=bool(commas))
    if classes is not None:
        findings += check_classes(y[train], classes)
    numbers = x if classes is not None else np.concatenate([x, y], axis=1)
    spreads = np.ptp(numbers[train], axis=0)
    constant = [label for label, s in zip((*table.labels, answer), spreads, strict=False) if s == 0]
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


def survey(
    path: Path, decimal: bool | None = None, used: Collection[str] | None = None
) -> tuple[list[str], set[str], set[str]]:
    """The columns of a table, those with texts, and those of numbers with decimal commas."""
    # Of texts are those more than a tenth of whose cells are no numbers. Fewer such cells among numbers are
    # mistakes, which are named when the table is read. Whether 8,609 has decimals is known of a table like
    # another; else it has none where 855 is in its column, or 8.5 in the table. Beside 0,5, 8.609 has none.
    rows = _rows(path)
    _, header = next(rows, (0, []))
    names = _named(path, header)
    numbers, filled, commas, points, marked, hundreds = ([0] * len(names) for _ in range(6))
    seen: dict[tuple[int, str], str] = {}  # a cell of a column with each mark
    decimals: set[tuple[int, str]] = set()  # those of which a cell has no three digits after the mark
    for _, row in rows:
        if len(row) == len(names):
            for place, cell in enumerate(row):
                is_empty = cell.strip().lower() in EMPTY_CELLS
                filled[place] += not is_empty
                if is_empty:
                    continue
                if (value := number(cell)) is not None:
                    numbers[place] += 1
                    hundreds[place] += abs(value) >= 100
                    if "." not in cell:
                        continue
                    points[place] += 1
                elif _COMMA.fullmatch(cell):
                    commas[place] += 1
                elif "," in cell and _MARKED.fullmatch(cell):  # others may be addresses
                    marked[place] += 1
                else:
                    continue
                found = place, "," if value is None else "."
                seen.setdefault(found, cell.strip())
                if found not in decimals and not _GROUPED.fullmatch(cell):
                    decimals.add(found)
    whole = [a + b + c >= _NUMBERS * d for a, b, c, d in zip(numbers, commas, marked, filled, strict=True)]
    # between cells that commas separate they are thousands' marks as likely
    apart = _delimiter(path) != ","
    # whether some column of numbers has decimals for certain, such as 0,5 and such as 0.5
    clear, pointed = (any(whole[place] and mark == own for place, mark in decimals) for own in ",.")

    def is_doubtful(place: int) -> bool:
        """Whether a column of numbers may have marks between thousands."""
        if marked[place] or (commas[place] and not apart):
            return True
        if points[place] and (place, ".") not in decimals and clear:
            return True
        if not commas[place] or (place, ",") in decimals:
            return False
        return pointed or hundreds[place] > 0 if decimal is None else not decimal

    doubtful = [
        f"{_label(name)} ({seen.get((at, ',')) or seen[at, '.']})"
        for at, name in enumerate(names)
        if whole[at] and (used is None or name in used) and is_doubtful(at)
    ]
    if doubtful:
        raise DataError(
            f"{path} has columns of numbers with marks: {some(doubtful)}",
            expected="a point before the decimals, and no marks between thousands",
            remedy="write 1234.5 instead of 1,234.5, 1.234,5 or 1234,5",
        )
    turned = {name for name, own, all_of_it in zip(names, commas, whole, strict=True) if own and all_of_it}
    texts = {n for n, a, b in zip(names, numbers, filled, strict=True) if a < _NUMBERS * b}
    return names, texts - turned, turned


def _turned(commas: Collection[str]) -> list[str]:
    """A remark on columns of numbers with decimal commas."""
    return [f"decimal commas are read as points: {some(sorted(commas))}"] if commas else []


def read_cells(
    path: Path,
    names: Sequence[str],
    texts: Collection[str],
    answer: str | None,
    commas: Collection[str] = (),
    least: int = 2,
    assumed: str = "",
) -> Cells:
    """Read a whole table, in which no cell of the answers is empty."""
    rows = _rows(path)
    next(rows, None)
    turned = [place for place, name in enumerate(names) if name in commas]
    values, lines, faults, faulty, uneven = array("d"), [], [], 0, 0
    codes: dict[str, dict[str, int]] = {name: {} for name in names if name in texts}
    for line, row in rows:
        try:
            if len(row) != len(names):
                uneven += 1
                raise ValueError(f"{len(row)} cells, not {len(names)}")
            for place in turned:
                row[place] = row[place].replace(",", ".")
            values.extend(
                [_coded(n, cell, codes.get(n), n == answer) for n, cell in zip(names, row, strict=True)]
            )
            lines.append(f"line {line}")
        except ValueError as error:
            faulty += 1
            if faulty <= _FAULTS:
                faults.append(f"line {line}: {error}")
        if len(lines) % _CHECKED == _CHECKED - 1:  # twice what is held: lists grow by copying
            held = sum(map(len, codes.values()))
            require_room(path, 8 * len(values) + _NAME_BYTES * (len(lines) + held), "more of its lines")
    if faults:
        raise DataError(
            f"{path} has {faulty} faulty lines: {'; '.join(faults)}",
            expected=f"{len(names)} cells on each line, finite numbers in columns of them, no empty target",
            remedy="; ".join(filter(None, ("correct or remove these lines", assumed)))
            if lines or not uneven
            else "begin the file with the columns' names, with no line above them",
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


def _coded(name: str, cell: str, codes: dict[str, int] | None, needed: bool) -> float:
    """A cell as a number: its own, or the position of its text; NaN where it is empty."""
    value: float | None = math.nan
    if codes is None:
        value = finite(cell)
    elif text := cell.strip():
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_SHOWN]}... ({len(text)} characters)"
            value = None
        if value is not None or not needed:
            value = float(codes.setdefault(text, len(codes)))
    if value is None:
        infinite = number(cell)
        what = shown(cell) if infinite is None else f"{shown(infinite)}, which is not finite"
        raise ValueError(f"{_label(name)} is {what}")
    if needed and math.isnan(value):
        raise ValueError(f"{_label(name)} is empty")
    return value


def _split_column(cells: Cells, answer: str) -> str | None:
    """The column that says which lines are for training and which for testing."""
    for name, texts in cells.texts.items():
        known = {text.lower() for text in texts}
        whole = not np.isnan(cells.values[name]).any() and {TRAINED} < known <= {TRAINED, *TESTED}
        if name.lower() == "split" and name != answer and whole:
            return name
    return None


def _learned(cells: Cells, column: str) -> Array:
    """Whether each line is trained on, as a column says."""
    marked = np.array([text.strip().lower() == TRAINED for text in cells.texts[column]])
    found: Array = marked[cells.values[column].astype(np.int64)]
    return found


def _answers(cells: Cells, answer: str) -> tuple[Array, tuple[str, ...] | None, list[str]]:
    """Labels (N,) with the names of their classes, or targets (N, 1); and what to say of them."""
    values, texts = cells.values[answer], cells.texts.get(answer)
    if texts is not None:
        classes = tuple(sorted(texts))
        findings = []
        if len(classes) > FEW_CATEGORIES and _have_units(classes):
            if 2 * len(classes) > len(values):
                raise DataError(
                    f"{_label(answer)} has numbers with units: {some(classes, 3)}",
                    expected="numbers for a regression, or names of classes that repeat",
                    remedy="write the numbers alone, with a point before the decimals",
                )
            findings = [f"{answer} has numbers with units, {len(classes)} different ones: taken as classes"]
        if len(classes) > FEW_CATEGORIES and len(classes) == len(values):
            raise DataError(
                f"{_label(answer)} has {len(classes)} different texts: {some(classes, 3)}",
                expected="numbers for a regression, or names of classes that repeat",
                remedy="--target takes another column; a date is a number of days for a regression",
            )
        order = np.array([classes.index(text) for text in texts])
        return order[values.astype(np.int64)], classes, findings
    kinds = np.unique(values)
    if set(kinds) == {0.0, 1.0}:
        return values.astype(np.int64), ("0", "1"), [f"{answer} is 0 or 1 throughout: taken as two classes"]
    findings = []
    if len(kinds) <= min(MOST_CATEGORIES, len(values) // 2) and not (values % 1).any():
        told = f"{answer} is whole numbers, {len(kinds)} different ones: taken as a regression"
        findings.append(f"{told}; for classes write texts, such as class{values[0]:.0f}")
    return values[:, None].copy(), None, findings


def _encoded(
    cells: Cells, features: Sequence[str], answer: str, train: Array
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
        columns.append(found)
        values.append(found.placed(cells.values[name], cells.texts.get(name, ())))
    if not columns:
        raise DataError(
            f"no column can be a feature: {some(left_out)}",
            expected="columns of numbers, or of texts that repeat",
            remedy="replace texts by numbers or categories; sentences go through an encoder in Python, "
            "linnet.adapt(encoder, (tokenizer(texts), labels))",
        )
    table = Table(tuple(columns), answer)
    known = {name: cells.values[name][train] for name in features}
    told = remarks(table, left_out, known)
    held_out = np.setdiff1d(np.arange(len(cells.ids)), train)
    unmarked = (filled_unmarked(column, cells.values[column.name][held_out]) for column in columns)
    return table, table.encode(values), [*told, *filter(None, unmarked)]


def read_like(
    path: Path, table: Table, classes: Sequence[str] | None, trained: bool = False
) -> tuple[Array, Array | None, tuple[str, ...], list[str]]:
    """The lines of a table like that of a run, or those to train on: features, answers, names, findings."""
    kinds = {column.name: column.categories is not None for column in table.features}
    names, texts, commas = survey(path, table.commas, {*kinds, table.target})
    missing = [column.name for column in table.features if column.name not in names]
    if missing:
        raise DataError(
            f"{path} lacks the columns {some(missing)}",
            expected=f"the columns {some([column.name for column in table.features])}",
            remedy="name them in the first line",
        )
    worded = {name for name in names if kinds.get(name, name in texts)}
    answer = table.target if table.target in names else None
    if answer is not None and classes is not None:  # names that all look like numbers are names
        worded.add(answer)
    elif answer is not None:
        worded.discard(answer)  # values: a text among them is an error, as in features
    turned = commas - worded
    cells = read_cells(path, names, worded, answer if trained else None, turned, least=1)
    answer = answer if trained else _answered(path, answer, cells, classes)
    values, findings = [], _turned(turned & {*kinds, table.target})
    for column in table.features:
        own, categories = cells.values[column.name], column.categories or ()
        kept = _by_what_is_kept(categories)
        known = [_name_of(text, kept) for text in cells.texts.get(column.name, ())]
        new = [text for text in known if text not in categories]
        if new:
            taken = NEITHER if len(categories) == 2 else NONE
            told = f"{column.name} has texts that the run has not seen: {some(new)}"
            findings.append(f"{told}, taken as {taken}")
        findings += filter(None, [filled_unmarked(column, own)])
        values.append(column.placed(own, known))
    y = None if answer is None else cells.values[answer][:, None]
    if answer is not None and classes is not None:
        y = _labels(path, answer, cells, classes)
    x, ids = table.encode(values), cells.ids
    marked = _split_column(cells, table.target) if trained else None
    if marked is None or marked in kinds:
        return x, y, ids, findings
    learned = np.flatnonzero(_learned(cells, marked))
    findings.append(f"the column {marked} says which lines are trained on ({len(learned)}), and taken here")
    return x[learned], None if y is None else y[learned], tuple(ids[row] for row in learned), findings


def _answered(path: Path, answer: str | None, cells: Cells, classes: Sequence[str] | None) -> str | None:
    """The column of the answers, or None where all of its cells are empty."""
    if answer is None:
        return None
    values, texts = cells.values[answer], cells.texts.get(answer, ())
    blank = [
        at for at, text in enumerate(texts) if text.lower() in EMPTY_CELLS and text not in (classes or ())
    ]
    lines = [cells.ids[row] for row in np.flatnonzero(np.isnan(values) | np.isin(values, blank))]
    if lines and len(lines) < len(values):
        raise DataError(
            f"{_label(answer)} is empty in {len(lines)} of {len(values)} lines of {path}: {some(lines)}",
            expected="an answer in every line, or in none",
            remedy=f"fill them in, or remove the column {_label(answer)}: all lines are predicted then",
        )
    return None if lines else answer


def _labels(path: Path, answer: str, cells: Cells, classes: Sequence[str]) -> Array:
    """Labels of lines, by the names of their classes."""
    place = {name: label for label, name in enumerate(classes)}
    kept = _by_what_is_kept(classes)
    texts = [_name_of(text, kept) for text in cells.texts[answer]]
    names = [texts[int(code)] for code in cells.values[answer]]
    unknown = [f"{cells.ids[row]}: {name}" for row, name in enumerate(names) if name not in place]
    if unknown:
        raise DataError(
            f"{answer} of {path} names classes that the run has not: {some(unknown)}",
            expected=f"one of {some(list(classes))}",
            remedy="correct these lines; linnet update takes new classes that --new-class names",
        )
    return np.array([place[name] for name in names], dtype=np.int64)


def _by_what_is_kept(known: Iterable[str]) -> dict[str | float, list[str]]:
    """Names of classes or categories by what a spreadsheet keeps of them."""
    found: dict[str | float, list[str]] = {}
    for name in known:
        found.setdefault(_kept(name), []).append(name)
    return found


def _name_of(text: str, known: Mapping[str | float, Sequence[str]]) -> str:
    """A class or category as it is known: spreadsheets write 1.0 as 1, and True as TRUE."""
    alike = known.get(_kept(text), ())
    return alike[0] if len(alike) == 1 else text


def _kept(text: str) -> str | float:
    """What a spreadsheet keeps of a text: the value of a number, and a truth in any case."""
    value = number(text)
    if value is None:
        return text.lower() if text.lower() in ("true", "false") else text
    return value


def _delimiter(path: Path) -> str:
    """What separates cells: what the first line and the next have equally many of, and most of these."""
    with path.open(encoding=_encoding(path), newline="") as file:
        few = [line for _ in range(_LINES) if (line := file.readline(_LONGEST_LINE)).strip()][:2]

    if few and (stated := _STATED.fullmatch(few[0])):
        return stated[1]

    def cells(delimiter: str) -> tuple[bool, int]:
        """Whether two lines have equally many cells, and how many the first has."""
        try:
            counts = [len(next(csv.reader([line], delimiter=delimiter), [])) for line in few] or [0]
        except csv.Error:  # a cell as long as a line
            return False, 0
        return counts[0] == counts[-1] > 1, counts[0]

    return max(_DELIMITERS, key=cells)


def _encoding(path: Path) -> str:
    """UTF-16 where the file begins with its mark, as the Unicode text of spreadsheets does, or UTF-8."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, with their line numbers."""
    try:
        delimiter = _delimiter(path)
        with path.open(encoding=_encoding(path), newline="") as file:
            reader = csv.reader(_lines(path, file), delimiter=delimiter)
            for row in reader:
                stated = reader.line_num == 1 and _STATED.fullmatch(delimiter.join(row))
                if any(cell.strip() for cell in row) and not stated:
                    yield reader.line_num, row
    except (UnicodeError, csv.Error) as error:
        raise FileFormatError(
            f"{path} is no table of text ({error})",
            expected="cells as text in UTF-8",
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


def _named(path: Path, header: list[str]) -> list[str]:
    """Names for the columns; the first may have none, as that of the index of a data frame."""
    names = [name.strip() for name in header]
    if len(names) > 1 and not names[0] and INDEX not in names:
        names[0] = INDEX
    if not names:
        raise DataError(f"{path} is empty", expected="a header and one sample per line")
    if all(number(name) is not None for name in names):
        raise DataError(f"{path} begins with numbers", expected="the columns' names on the first line")
    if len(set(names)) < len(names) or "" in names:
        counts = Counter(names)
        double = [shown(name) for name in sorted(counts) if counts[name] > 1 or not name]
        raise DataError(
            f"{path} has empty or repeated column names: {some(double)}",
            expected="one name a column",
            remedy="correct the first line; a table of pandas needs to_csv(index=False)",
        )
    return names


def _label(name: str) -> str:
    """A column's name, shortened where it is long."""
    return name if len(name) <= _SHOWN else shown(name)


def _target_column(path: Path, names: list[str], target: str | None) -> str:
    """The column to predict."""
    if target is None:
        return names[-1]
    if target not in names:
        close = difflib.get_close_matches(target, names, n=1)
        raise InputError(
            f"target is {target!r}, which is no column of {path}",
            expected=f"one of {some(names)}",
            remedy=f"did you mean {close[0]}?" if close else "copy a name from the table's first line",
        )
    return target


# Columns as numbers: categories as zeros and ones, empty cells filled and marked


def fitted(name: str, values: Array, texts: Sequence[str] | None) -> Column | str:
    """Encoding of a column, from the training lines."""
    if texts is None:
        known = values[~np.isnan(values)]
        if not len(known):
            return f"{name} (empty in all training lines)"
        return Column(name, None, float(np.median(known)), len(known) < len(values))
    present = sorted({texts[int(code)] for code in np.unique(values[~np.isnan(values)])})
    filled = len(values) - int(np.isnan(values).sum())
    if len(present) > MOST_CATEGORIES or len(present) > max(FEW_CATEGORIES, filled // 2):  # such as names
        if all(_DATE.fullmatch(text) for text in present):
            return f"{name} (dates: a number of days, or the month as a text, would be a feature)"
        if _have_units(present):
            return f"{name} ({_with_units(present)})"
        return f"{name} ({len(present)} different texts)"
    if np.isnan(values).any():
        present.append(EMPTY)
    return Column(name, tuple(present))


def _have_units(texts: Sequence[str]) -> bool:
    """Whether nearly all of a column's texts are numbers with units."""
    return sum(_UNITED.fullmatch(text) is not None for text in texts) >= _NUMBERS * len(texts)


def _with_units(texts: Sequence[str]) -> str:
    """A remark on such a column."""
    return f"numbers with units, such as {texts[0]}: the numbers alone would be a feature"


def names_lines(name: str, values: Array) -> bool:
    """Whether whole numbers, (N,), identify the lines: all differ, and are in order, dense or called so."""
    n, distinct = len(values), len(np.unique(values))
    if n < _LINES or not bool((values % 1 == 0).all()):  # NaN % 1 is not 0
        return False
    if distinct < n:  # some cases came twice
        return 2 * distinct >= n and _NAMES_CASES.search(name) is not None
    pairs = n * (n - 1) / 2 / (1 + np.ptp(values))
    return bool((np.diff(values) > 0).all()) or bool(pairs > _BY_CHANCE) or _ID.search(name) is not None


def remarks(table: Table, left_out: Sequence[str], train: Mapping[str, Array]) -> list[str]:
    """Remarks on the columns."""
    found = []
    texts = [f"{c.name} ({len(c.categories)})" for c in table.features if c.categories is not None]
    if texts:
        found.append(f"texts as categories, a number of zero or one each: {some(texts)}")
    for column in table.features:
        words = [text for text in column.categories or () if text != EMPTY]
        if words and _have_units(words):
            found.append(f"{column.name} has {_with_units(words)}")
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
        taken = NEITHER if len(column.categories) == 2 else NONE
    where = f"{column.name} is empty in {empty} of {len(values)} lines and in no training line"
    return f"{where}: taken as {taken}; the uncertainty does not know that it is missing"


def finite(cell: str) -> float | None:
    """The number in a cell, NaN for an empty one, None for a text or an infinite number."""
    if cell.strip().lower() in EMPTY_CELLS:
        return math.nan
    value = number(cell)
    return value if value is not None and math.isfinite(value) else None


def number(cell: str) -> float | None:
    """The number in a cell, if there is one; Python reads 1_2 as one, which names something."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
