"""Numbers for people's dashboards: one interface, ``log(values, step)``, for everything that tells some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from linnet.params import function
from linnet.shown import Shown

Log = Callable[[dict[str, float], int], object]


def check_log(log: Any) -> Log | None:
    """Raise unless numbers can be told to an argument.

    Args:
        log: A function of a dict of numbers and a step, or ``None``.

    Returns:
        The same.

    Raises:
        InputError: It is neither.

    Example:
        >>> check_log(print) is print
        True
    """
    return None if log is None else function("log", log, "a function of a dict of numbers and a step")


def tell(log: Log, values: dict[str, float], step: int, after: str) -> None:
    """Call a user's log; an error that it raises stays the user's own, such as one that stops a run.

    Args:
        log: The function.
        values: Numbers by name.
        step: The step.
        after: What is done already, for a note at its errors.

    Raises:
        Exception: The log's own, with a note that says where it came from and what stands.

    Example:
        >>> tell(print, {"loss": 0.5}, 3, "the step is complete")
        {'loss': 0.5} 3
    """
    try:
        log(values, step)
    except Exception as error:
        error.add_note(
            f"log= raised this at step {step}: {after}. Expected: a function of a dict of numbers and a "
            "step. To fix it: mend the function; to go on without its numbers, catch the error inside it."
        )
        raise


def numbers(told: Any) -> dict[str, float]:
    """The numbers in a report, a fit, a summary or a result, as a flat dict.

    Names inside others are joined by ``"/"``. True is 1. In a list, what has a name is found under it. Texts,
    other lists, large tensors and what is missing are left out.

    Args:
        told: What has numbers.

    Returns:
        Numbers by name.

    Example:
        >>> numbers({"ridge": 1, "why": "so", "time": {"fit": 2}, "scores": [{"name": "probe", "nll": 1.5}]})
        {'ridge': 1.0, 'time/fit': 2.0, 'scores/probe/nll': 1.5}
    """
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
