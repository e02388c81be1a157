"""Numbers in tables: means with their standard errors over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean and its standard error s / √n; the error of one value is not a number."""
    listed = list(values)
    if len(listed) < 2:
        return (listed[0] if listed else math.nan), math.nan
    return statistics.fmean(listed), statistics.stdev(listed) / math.sqrt(len(listed))


def with_error(values: Iterable[float], digits: int = 1, scale: float = 1.0) -> str:
    """``mean ± standard error`` of the values times ``scale``."""
    mean, error = mean_and_error(value * scale for value in values)
    if math.isnan(mean):
        return "–"
    return f"{mean:.{digits}f}" if math.isnan(error) else f"{mean:.{digits}f} ± {error:.{digits}f}"


def chosen(cells: Iterable[Mapping[str, Any]], key: str, **where: Any) -> list[Any]:
    """The values of ``key`` in the cells that agree with ``where``."""
    return [cell[key] for cell in cells if all(cell.get(name) == value for name, value in where.items())]


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns after the first are aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(str(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)
