"""The numbers of docs/reliability.md are those of the suite."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.hostile.cases import COUNT, EXACT, SLICE
from tests.hostile.public_calls import CALLS, DRAWING, TRAINING

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
ROW = re.compile(r"^\| `(test_\w+)\.py` \|.*\| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def cases(module: ModuleType) -> tuple[int, int]:
    """How many tests of a file run every time, and with ``-m ""``; only parametrize makes several of one."""
    often = every = 0
    for name, function in vars(module).items():
        if not name.startswith("test_") or not callable(function):
            continue
        marks = getattr(function, "pytestmark", [])
        sets = [list(mark.args[1]) for mark in marks if mark.name == "parametrize"]
        every += math.prod(len(values) for values in sets)
        if not any(mark.name == "long" for mark in marks):
            share = next((mark.args[0] for mark in marks if mark.name == "thinned"), 1)
            often += -(-math.prod(sum(not _is_long(value) for value in values) for values in sets) // share)
    return often, every


def _is_long(value: Any) -> bool:
    """Whether a value of a parameter is left out of ordinary runs."""
    return any(mark.name == "long" for mark in getattr(value, "marks", ()))


def test_every_row_counts_its_file() -> None:
    found = {name: (often, every) for name, often, every in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    wanted = {}
    for path in sorted((ROOT / "tests" / "hostile").glob("test_*.py")):
        often, every = cases(importlib.import_module(f"tests.hostile.{path.stem}"))
        wanted[path.stem] = f"{often:,}", f"{every:,}"
    assert found == wanted


def test_the_numbers_in_the_text() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    calls = len({**CALLS, **DRAWING, **TRAINING})
    assert f"{COUNT} networks" in text
    assert f"{SLICE} of them" in text
    assert f"{calls} calls" in text
    assert "10⁻⁸" in text
    assert EXACT == 1e-8
