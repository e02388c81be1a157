"""Numbers for people's dashboards: one interface, ``log(values, step)``, for everything that tells some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from linnet.params import function
from linnet.shown import Shown

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


def numbers(told: Any) -> dict[str, float]:
    """The numbers in a report, a fit, a summary or a result, as a flat dict."""
    # Names inside others are joined by `"/"`. True is 1. In a list, what has a name is found under it. Texts,
    # other lists, large tensors and what is missing are left out.
    found: dict[str, float] = {}
    _collect(found, "", told)
    return found


def _collect(found: dict[str, float], name: str, told: Any) -> None:
    """Add the numbers in something that has a name."""
    if isinstance(told, Tensor):
        told = told.item() if told.numel() == 1 and not told.is_complex() else None
    elif isinstance(told, Shown):
        plain = getattr(told, "to_dict", told._shown)
        told = plain()
    elif isinstance(told, tuple) and hasattr(told, "_asdict"):
        told = told._asdict()
    elif isinstance(told, list | tuple):
        told = {one["name"]: one for one in told if isinstance(one, Mapping) and "name" in one}
    if isinstance(told, Mapping):
        for inner, value in told.items():
            _collect(found, f"{name}/{inner}" if name else str(inner), value)
    elif isinstance(told, int | float) and name:
        found[name] = float(told)
