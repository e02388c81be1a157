"""The tables of ``docs/results/papers.md``: what became of each figure and table of the five papers.

The rows are in ``docs/results/papers.toml``. Where they quote numbers of ours, these are fields: ``{row |
column}`` is that of the first table in the section of the row, ``{1: row | column}`` of the second, ``#2``
after a row or a column the second of that name; a row is named by its first columns. ``{=words}`` are words
of that section. ``{name}`` is a mean over stored cells with its standard error, as ``numbers.name`` of the
row describes it: of a number, or of its paired difference from that of other cells, from the lowest of them
where ``best`` says so.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

from experiments import pages
from experiments.tables import with_error

ROWS = pages.RESULTS / "papers.toml"
VERDICTS = ("holds", "holds from", "does not hold here", "undecided", "not run", "not obtainable")
COLUMNS = ("what", "claim", "theirs", "ours", "size", "verdict", "command")
FIELD = re.compile(r"\{([^{}]+)\}")
MINUS = re.compile(r"(?<!\w)-(?=\d)")
HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)

Row = Mapping[str, Any]


@cache
def rows() -> Mapping[str, Sequence[Row]]:
    """The rows of each paper."""
    found: dict[str, Sequence[Row]] = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return found


def anchor(heading: str) -> str:
    """The anchor of a heading, as MyST and GitHub make it."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def section(link: str) -> str:
    """The text under the heading that a link names, to the next one of its kind or above."""
    page, _, name = link.partition("#")
    text = (pages.RESULTS / page).read_text(encoding="utf-8")
    for found in HEADING.finditer(text):
        if anchor(found[1]) == name:
            level = found[0].index(" ")
            end = re.compile(rf"^#{{2,{level}}} ", re.MULTILINE).search(text, found.end())
            return text[found.end() : end.start() if end else len(text)]
    raise LookupError(f"no heading for {link}")


def grid(text: str, index: int) -> list[list[str]]:
    """A table of a section, its header first; an empty first column is that of the row above."""
    lines = text.splitlines()
    _, places = list(pages.blocks(lines))[index]
    cells = [
        [cell.strip().replace("**", "") for cell in lines[i].strip("|").split("|")]
        for i in places
        if not lines[i].startswith("|---")
    ]
    for above, row in pairwise(cells[1:]):
        row[0] = row[0] or above[0]
    return cells


def quoted(text: str, field: str) -> str:
    """A number of a table, or words, of a section."""
    if field.startswith("="):
        assert field[1:] in " ".join(text.split()), f"not on the page: {field[1:]}"
        return field[1:]
    index, _, place = field.rpartition(": ") if re.match(r"\d: ", field) else ("0", "", field)
    (name, _, which), (column, _, place) = (part.partition(" #") for part in place.split(" | "))
    header, *body = grid(text, int(index))
    found = [row for row in body if any(", ".join(row[:k]) == name for k in range(1, len(row)))]
    assert len(found) == 1 or which, f"{len(found)} rows of {name}"
    columns = [i for i, title in enumerate(header) if title == column]
    return found[int(which or 1) - 1][columns[int(place or 1) - 1]]


def averaged(number: Mapping[str, Any]) -> str:
    """A mean over stored cells with its standard error, of a number or of paired differences."""
    # where "of" has several places, of the mean of their numbers
    cells = pages.stored(number["file"])["cells"]

    def values(where: Mapping[str, Any], of: str | list[str]) -> dict[tuple[Any, ...], float]:
        places = [of] if isinstance(of, str) else of
        found: dict[tuple[Any, ...], list[float]] = {}
        for cell in cells:
            if all(cell.get(name) == value for name, value in where.items()):
                one = sum(pages.leaf(cell, place) for place in places) / len(places)
                found.setdefault(tuple(cell[name] for name in number["by"]), []).append(one)
        assert number.get("best") or all(len(listed) == 1 for listed in found.values())
        return {key: min(listed) for key, listed in found.items()}

    found = values(number["cells"], number["of"])
    if "less" in number:
        other = values(number["less"], number.get("less of", number["of"]))
        assert found.keys() == other.keys()
        found = {key: value - other[key] for key, value in found.items()}
    return with_error(found.values(), number.get("digits", 1), number.get("times", 1))


def ours(row: Row) -> str:
    """What a row says of our results, with its numbers."""
    numbers = row.get("numbers", {})
    text = section(row["section"]) if "section" in row else ""
    return FIELD.sub(
        lambda field: MINUS.sub(
            "−", averaged(numbers[field[1]]) if field[1] in numbers else quoted(text, field[1])
        ),
        row["ours"],
    )


def shown(row: Row) -> Iterator[str]:
    """The cells of a row."""
    yield f"[{row['what']}]({row['section']})" if "section" in row else row["what"]
    yield from (row["claim"], row["theirs"], ours(row), row["size"], f"**{row['verdict']}**")
    yield f"`{row['command']}`".replace("|", r"\|") if row["command"] != "–" else "–"


def table(paper: str, _: Sequence[Mapping[str, Any]] = ()) -> str:
    """The table of a paper."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(shown(row)) + " |" for row in rows()[paper]]
    return "\n".join(lines)


def counts() -> str:
    """How many rows have which verdict, in a sentence."""
    verdicts = [row["verdict"] for paper in rows().values() for row in paper]
    hold, later, fail, undecided, missing, closed = (
        sum(verdict == one or (one == "holds from" and verdict.startswith(one)) for verdict in verdicts)
        for one in VERDICTS
    )
    return (
        f"Of {len(verdicts)} rows {hold} hold, {later} hold from some number on, {fail} do not hold here, "
        f"{undecided} are undecided, {missing} were not run and {closed} are not obtainable."
    )


fast_adaptation = partial(table, "fast adaptation")
lqf = partial(table, "lqf")
kernels = partial(table, "kernels")
curvature = partial(table, "curvature")
iterative_linearization = partial(table, "iterative linearization")
