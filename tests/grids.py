"""Grids of many cases: a few of them run always, the others are marked as long."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def grid(cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """The parameters of a grid: all cases but those that run often are marked as long.

    Args:
        cases: Every case, a tuple where it has several parameters.
        often: The cases that each run takes, by themselves or by the first of their parameters.
    """
    cases = list(cases)
    first = [case[0] if isinstance(case, tuple) else case for case in cases]
    unknown = [name for name in often if name not in cases and name not in first]
    assert not unknown, f"no case of the grid: {unknown}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in often or start in often else (pytest.mark.long,),
        )
        for case, start in zip(cases, first, strict=True)
    ]
