"""The numbers in tables of pages, from the stored cells: ``python -m experiments.pages`` writes them anew.

``docs/results/tables.json`` says where each number of a table comes from, row by row: ``3.1`` is value 1 of
the cells of group 3. A group names what its cells agree in; a value is the mean of one of their numbers (a
path, or the difference of two), times a scale, plus a shift, in a format, with its standard error where ``±``
follows. ``=7.5`` is a number of which no cell is stored, or a label; the table says why. ``"table of"`` names
a study whose function ``table``, or the one after a colon, makes the whole table.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TABLES = RESULTS / "tables.json"
NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?: ± \d+(?:\.\d+)?(?:e[-+]?\d+)?)?")

Table = Mapping[str, Any]


@cache
def stored(file: str) -> Mapping[str, Any]:
    """A study's result."""
    result: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return result


def leaf(tree: Any, path: str) -> float:
    """A number in nested dictionaries and lists; the difference of two for ``a - b``."""
    if " - " in path:
        one, other = path.split(" - ")
        return leaf(tree, one) - leaf(tree, other)
    for step in path.split("/"):
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return float(tree)


def number(table: Table, place: str) -> str:
    """The text of one number: ``group.value``, or ``=text``."""
    if place.startswith("="):
        return place[1:].replace("_", " ")
    group, value = (
        table[kind][int(i)] for kind, i in zip(("groups", "values"), place.split("."), strict=True)
    )
    result = stored(table["files"][group.get("file", 0)])
    where = group.get("cells")
    cells = [result] if where is None else [c for c in result["cells"] if where.items() <= c.items()]
    found = [leaf(cell, value["of"]) for cell in cells]
    times, plus = value.get("times", 1), value.get("plus", 0)
    # a number half-way between two is rounded as the page has it: up where it is nudged
    up, error_up = (1 + 1e-12 * nudge for nudge in value.get("nudged", (0, 0)))
    text = format((times * statistics.fmean(found) + plus) * up, value["as"])
    if "±" in value:
        error = abs(times) * statistics.stdev(found) / len(found) ** 0.5
        text += f" ± {format(error * error_up, value['±'])}"
    return text


def styled(text: str, before: str) -> str:
    """A number in the style of the one whose place it takes: its minus sign, and commas between thousands."""
    whole, _, rest = text.partition(".") if "e" not in text else (text, "", "")
    if "," in before and whole.lstrip("-").isdigit():
        text = f"{int(whole):,}" + (f".{rest}" if rest else "")
    return text.replace("-", "−") if before.startswith("−") else text


def blocks(lines: Sequence[str]) -> Iterator[tuple[str, range]]:
    """Each table of a page, by section and place in it, with its lines."""
    title, count, begin = "", 0, None
    for i, line in enumerate([*lines, ""]):
        if line.startswith("## "):
            title, count = line[3:].rstrip(), 0
        if line.startswith("|"):
            begin = i if begin is None else begin
        elif begin is not None:
            yield f"{title} / {count}", range(begin, i)
            count, begin = count + 1, None


def made(text: str, tables: Mapping[str, Table]) -> str:
    """A page with its tables as the cells give them."""
    lines = text.splitlines(keepends=True)
    for name, place in [*blocks(lines)][::-1]:  # the last first: a table may get more lines
        if name not in tables:
            continue
        table = tables[name]
        if "table of" in table:
            cells = [cell for file in table["files"] for cell in stored(file)["cells"]]
            study, _, function = table["table of"].partition(":")
            make = getattr(import_module(study), function or "table")
            whole = make(cells).splitlines(keepends=True)
            lines[place.start : place.stop] = [*whole[:-1], whole[-1] + "\n"]
            continue
        rows = [i for i in place if not lines[i].startswith("|---")]
        for i, row in zip(rows, table["rows"], strict=True):
            numbers = iter(number(table, one) for one in row.split())
            lines[i] = NUMBER.sub(lambda old, new=numbers: styled(next(new), old[0]), lines[i])  # type: ignore[misc]
            assert next(numbers, None) is None, f"{name}: {lines[i]}"
    return "".join(lines)


def pages() -> dict[Path, dict[str, Table]]:
    """The tables of each page."""
    found = json.loads(TABLES.read_text(encoding="utf-8"))
    return {ROOT / page: tables for page, tables in found.items()}


if __name__ == "__main__":
    for page, tables in pages().items():
        page.write_text(made(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
