"""Numbers in the tables of docs/results, and of tutorials that have some, are those of the stored cells.

A table is checked against the JSON files of the studies whose commands stand in its section. A number agrees
if it is a value of a cell, a mean over draws with its standard error, or a mean difference of two values of a
cell, in units or per cent. What a table takes from elsewhere is listed with its reason.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: ± \d+(?:\.\d+)?(?:e[-+]?\d+)?)?")
SCALES = ((1, 0), (-1, 0), (100, 0), (-100, 0), (-100, 100), (1000, 0))  # as it is, in per cent, errors, ms
FORMATS = (".0f", ".1f", ".2f", ".3f", ".4f", ".0e", ".1e", ".2e")
DRAWS = ("seed", "draw", "split")
LONGEST = 64  # entries of a list that are looked at: longer ones are curves
FEW = 8  # values of a cell whose differences are formed

# Numbers of a section's tables that are in no cell, and why.
ELSEWHERE: Mapping[str, tuple[int, str]] = {
    "adapt: Beyond one linearization": (6, "differences of two of the columns"),
    "continual: Split MNIST with the exact Fisher matrix": (5, "published numbers"),
    "continual: Disjoint MNIST (figure 5.9)": (15, "means of the two columns on the right"),
    "continual: Five data sets (figures 5.10 to 5.12, table 5.3)": (1, "a mean of the columns"),
    "continual: Synaptic intelligence by the authors' protocol": (4, "published, and one run without file"),
    "continual: What remembering costs": (39, "timings of benchmarks/continual_penalty.py"),
    "fast_adaptation: UCI regression": (8, "published numbers"),
    "fast_adaptation: Sinusoids (figures A.5 and A.6)": (96, "cells not stored, as the page says"),
    "iterative_linearization: Why mini-batches with K = 10 diverged: the edge of stability": (2, "means"),
    "iterative_linearization: More data (figure 4)": (3, "slopes of the columns"),
    "iterative_linearization: Linearizations trained to the end (figure 5)": (2, "published numbers"),
    "kernels: Figures 6 and 7: the kernel turns to what was learned": (11, "ratios of two stored curves"),
    "kernels: Figure 1: anisotropy directions": (1, "a mean over directions"),
    "kernels: Which of linear and plain fine-tuning wins?": (5, "means over tasks, and an area of a curve"),
    "labels: Labels flipped at random": (1, "a precision pooled over seeds"),
    "laplace: Toy regression against Hamiltonian Monte Carlo (figure 5.1)": (
        46, "differences from HMC, and a table whose cells are not stored, as the page says",
    ),
    "laplace: Pretrained networks (table 5.2, figure 5.5)": (10, "published numbers, binomial errors"),
    "lqf: Informative samples (figure 6, right)": (73, "tables whose cells are not stored, as the page says"),
    "lqf: On-line learning (figure 5)": (23, "differences, and a table whose cells are not stored"),
    "lqf: Few shots (figure 4)": (8, "paired differences of two methods"),
    "lqf: Effective learning rates (figure 1, right)": (6, "best rates, and means over tasks"),
    "lqf: Squared loss or cross-entropy for `linnet adapt`": (7, "rows whose cells are not stored"),
    "optimizer: Deep autoencoders (figure 4.1)": (6, "the best of a grid"),
    "optimizer: Fisher and Gauss-Newton where they differ (figure 4.4)": (1, "the best of a grid"),
    "optimizer: What a step costs": (9, "timings"),
    "optimizer: Alignment (figures 4.2 and 4.3)": (8, "means over three times"),
}  # fmt: skip

Cell = Mapping[str, Any]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a cell, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value[:LONGEST]):
            yield from leaves(inner, f"{path}/{i}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def texts(values: Sequence[float]) -> set[str]:
    """The mean, with its standard error where there are several, in all ways that tables print numbers."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return printed(statistics.fmean(values), error)


@cache
def printed(mean: float, error: float | None) -> set[str]:
    """A number, with its error if it has one, in all ways that tables print them."""
    found = set()
    for scale, shift in SCALES:
        value, spread = scale * mean + shift, abs(scale) * (error or 0.0)
        # a number half-way between two may have been rounded either way
        below, above = value * (1 - 1e-12), value * (1 + 1e-12)
        for form in FORMATS:
            written = {format(below, form), format(above, form)}
            found |= written
            if error is not None:
                ends = {form, ".0e"} if form.endswith("e") else {form}
                spreads = {format(spread * (1 + n), end) for end in ends for n in (-1e-12, 1e-12)}
                found |= {f"{text} ± {end}" for text in written for end in spreads}
    return found


def errors(value: Any) -> Iterator[tuple[float, float]]:
    """Numbers that are stored with an error of their own: [value, error], or a key beside key + "_error"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(value.get(f"{key}_error"), float) and isinstance(inner, float):
                yield inner, value[f"{key}_error"]
            yield from errors(inner)
    elif isinstance(value, list):
        if len(value) == 2 and all(isinstance(part, int | float) for part in value):
            yield float(value[0]), abs(float(value[1]))
        for inner in value[:LONGEST]:
            yield from errors(inner)


def design(cells: Sequence[Cell]) -> list[str]:
    """Keys that say what a cell is, not what was found: their values are the same in every draw."""
    draws: dict[str, list[Cell]] = {}
    for cell in cells:
        draws.setdefault(json.dumps([cell.get(name) for name in DRAWS]), []).append(cell)
    keys = sorted({key for cell in cells for key in cell} - set(DRAWS))
    return [
        key
        for key in keys
        if len({frozenset(json.dumps(cell.get(key)) for cell in group) for group in draws.values()}) == 1
    ]


def groups(cells: Sequence[Cell]) -> Iterator[list[int]]:
    """Cells that are draws of one another, or differ in one more key; by position."""
    keys, seen = design(cells), set()
    for left_out in (None, *keys):
        found: dict[str, list[int]] = {}
        for i, cell in enumerate(cells):
            rest = [cell.get(key) for key in keys if key != left_out]
            found.setdefault(json.dumps(rest), []).append(i)
        for positions in found.values():
            if len(positions) > 1 and tuple(positions) not in seen:
                seen.add(tuple(positions))
                yield positions


def printable(cells: Sequence[Cell]) -> set[str]:
    """Every number that a table of these cells may hold."""
    flat = [dict(leaves(cell)) for cell in cells]
    found = set().union(*(texts([value]) for one in flat for value in one.values()))
    found |= set().union(*(printed(*pair) for cell in cells for pair in errors(dict(cell))))
    for positions in groups(cells):
        common = set.intersection(*(set(flat[i]) for i in positions))
        for key in common:
            found |= texts([flat[i][key] for i in positions])
        top = [key for key in common if key.count("/") == 1 and key != "/seconds"]
        if len(top) <= FEW:
            for a, b in itertools.permutations(top, 2):
                found |= texts([flat[i][a] - flat[i][b] for i in positions])
    return found


def sections(page: Path) -> Iterator[tuple[str, list[Path], list[str]]]:
    """Name, stored studies and table rows of each section that has tables."""
    for block in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if rows:
            studies = sorted(set(re.findall(r"experiments\.([a-z_]+)\.([a-z_]+)", block)))
            files = {file for folder, name in studies for file in (RESULTS / folder).glob(f"{name}*.json")}
            yield f"{page.stem}: {block.splitlines()[0]}", sorted(files), rows


def numbers(rows: Sequence[str]) -> Iterator[str]:
    """The numbers in a table but for its header and its first column."""
    for row, following in zip(rows, [*rows[1:], ""], strict=True):
        if not (row.startswith("|---") or following.startswith("|---")):
            for cell in row.strip("|").split("|")[1:]:
                yield from NUMBER.findall(cell.replace("−", "-").replace(",", "").replace("*", ""))


@cache
def stored(file: Path) -> set[str]:
    """Every number that tables of a file may hold."""
    result = json.loads(file.read_text(encoding="utf-8"))
    found = printable(result.pop("cells", []))
    found |= set().union(*(texts([value]) for _, value in leaves(result)))
    return found | set().union(*(printed(*pair) for pair in errors(result)))


TUTORIALS = [RESULTS.parent / "tutorials" / f"{name}.md" for name in ("bayesian-optimization",)]
ALL = [section for page in (*sorted(RESULTS.glob("*.md")), *TUTORIALS) for section in sections(page)]


def test_there_are_tables() -> None:
    assert len(ALL) > 30
    assert not set(ELSEWHERE) - {name for name, _, _ in ALL}


@pytest.mark.parametrize(("name", "files", "rows"), ALL, ids=[name for name, _, _ in ALL])
def test_tables_agree_with_their_cells(name: str, files: list[Path], rows: list[str]) -> None:
    known: set[str] = set().union(*map(stored, files))
    absent = [number for number in numbers(rows) if number not in known]
    assert len(absent) == ELSEWHERE.get(name, (0, ""))[0], absent


def test_a_changed_number_is_found() -> None:
    cells = [
        {"method": m, "seed": s, "accuracy": 0.5 + 0.03 * s + (m == "b") / 7} for m in "ab" for s in (0, 1)
    ]
    known = printable(cells)
    assert list(numbers(["| method | % |", "|---|---|", "| a | 51.5 ± 1.5 |"])) == ["51.5 ± 1.5"]
    assert {"51.5 ± 1.5", "48.5 ± 1.5", "0.53", "65.8 ± 1.5"} <= known
    assert not {"51.6 ± 1.5", "51.5 ± 1.4", "0.54"} & known
