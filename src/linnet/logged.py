"""Numbers for people's dashboards: one interface, ``log(values, step)``, for everything that tells some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linnet.params import function

Log = Callable[[dict[str, float], int], object]


def check_log(log: Any) -> Log | None:
    """Raise unless numbers can be told to an argument."""
    return None if log is None else function("log", log, "a function of a dict of numbers and a step")


def tell(log: Log, values: dict[str, float], step: int, after: str) -> None:
    """Call a user's log; an error that it raises stays the user's own, such as one that stops a run."""
    try:
        log(values, step)
    except Exception as error:
        error.add_note(
            f"log= raised this at step {step}: {after}. Expected: a function of a dict of numbers and a "
            "step. To fix it: mend the function; to go on without its numbers, catch the error inside it."
        )
        raise
