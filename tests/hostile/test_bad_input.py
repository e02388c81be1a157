"""Every public callable, with some forty wrong values for each of its parameters: right, or refused.

A wrong value must end in an error of linnet's own that says what was expected, unless the rules of the
parameter's kind allow it; then the numbers that come out are finite.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.errors import LinnetError
from tests.hostile import doors, rules
from tests.hostile.doors import Door
from tests.hostile.wrong_values import wrong_for

NOT_FINITE = "accepted, and the result is not finite"
SHARE = 24  # an ordinary run takes every 24th wrong value of a callable, in one order
COSTLY = ("report", "export")  # that work for a second where a value is taken: every sixtieth of theirs


@cache
def all_doors() -> dict[str, Door]:
    """Every callable by its name."""
    return {door.name: door for name in doors.NAMES for door in doors.doors(name)}


def unusable(result: Any, depth: int = 0) -> bool:
    """Whether a result holds numbers that are not finite, or a tensor without any."""
    if isinstance(result, Tensor):
        plain = result.layout == torch.strided and result.device.type != "meta" and not result.is_complex()
        return not plain or (result.is_floating_point() and not bool(result.isfinite().all()))
    if isinstance(result, float):
        return not math.isfinite(result)
    if isinstance(result, tuple | list):
        return any(unusable(part, depth) for part in result)
    if isinstance(result, dict):
        return any(unusable(part, depth) for part in result.values())
    if hasattr(result, "__dict__") and depth < 2 and not isinstance(result, nn.Module):
        return any(unusable(part, depth + 1) for part in vars(result).values())
    return False


def outcome(door: Door, parameter: str, make: Any) -> str:
    """``refused``, ``accepted``, or what is wrong."""
    called, arguments = door.make()
    value = make()
    try:
        result = called(**{**arguments, parameter: value})
    except LinnetError as error:
        return "refused" if error.expected and error.remedy else f"without what to do: {error}"
    except Exception as error:  # the point of the test
        return f"{type(error).__name__}: {error}"
    return NOT_FINITE if unusable(result) else "accepted"


def usable_when_right(door: Door) -> bool:
    """Whether valid arguments give a result without NaN: a new optimizer, say, holds some."""
    called, arguments = door.make()
    try:
        return not unusable(called(**arguments))
    except LinnetError:
        return True


def wrongs(door: Door) -> Iterator[tuple[str, str, Any]]:
    """Parameter, kind of wrong value, and how to make it."""
    right = door.make()[1]  # only looked at: each call gets arguments of its own
    for parameter, default in {**door.parameters, **door.options}.items():
        valid = right.get(parameter, door.options.get(parameter, default))
        for kind, make in wrong_for(valid).items():
            if kind != "None" or (default is not None and parameter not in door.options):
                yield parameter, kind, make


def failures(door: Door, share: int) -> list[str]:
    """What the callable does wrong."""
    found, every = [], list(wrongs(door))
    share *= 5 if share > 1 and door.name.endswith(COSTLY) else 1
    share = share if len(every) > share else 1
    for parameter, kind, make in every[::share]:
        if f"{door.name}({parameter})" in rules.DIFFERS:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = outcome(door, parameter, make)
        allowed = rules.may_take(door.name, parameter, kind)
        lenient = rules.kind_of(door.name, parameter) in rules.NOT_FINITE
        if got == NOT_FINITE and allowed and (lenient or not usable_when_right(door)):
            continue
        if got != "refused" and not (got == "accepted" and allowed):
            found.append(f"{door.name}({parameter}= {kind}): {got[:200]}")
    return found


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("linnet"), "disabled", True)


@pytest.mark.parametrize("name", doors.NAMES)
@pytest.mark.thinned(2)
def test_valid_arguments_are_taken(name: str) -> None:
    for door in doors.doors(name):
        called, arguments = door.make()
        if door.name in rules.ALWAYS_REFUSED:
            with pytest.raises(LinnetError):
                called(**arguments)
        else:
            called(**arguments)
            if door.options:
                called(**{**door.make()[1], **door.options})


@pytest.mark.parametrize("name", doors.NAMES)
@pytest.mark.parametrize("share", [SHARE, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.thinned(2)
def test_wrong_values_are_refused_or_right(name: str, share: int) -> None:
    assert not [line for door in doors.doors(name) for line in failures(door, share)]


def test_every_public_function_and_class_is_tried() -> None:
    known = doors.FUNCTIONS.keys() | doors.MADE_BY_LINNET | doors.ABSTRACT
    assert set(doors.named()) - set(doors.NAMESPACES) == known


def test_methods_of_every_public_class_are_tried() -> None:
    tried = {type(make()) for make in doors.OBJECTS.values()}
    public = [doors.public(name) for name in doors.named() if name not in doors.ABSTRACT]
    classes = [one for one in public if inspect.isclass(one) and list(doors.methods(one))]
    assert [one.__name__ for one in classes if not any(issubclass(kind, one) for kind in tried)] == []


def test_every_parameter_has_a_kind() -> None:
    missing = {
        f"{door.name}({parameter})"
        for door in all_doors().values()
        for parameter in {**door.parameters, **door.options}
        if rules.kind_of(door.name, parameter) is None
    }
    assert not missing


def test_exceptions_are_of_parameters_that_there_are() -> None:
    known = {f"{d.name}({p})" for d in all_doors().values() for p in {**d.parameters, **d.options}}
    assert known >= set(rules.DIFFERS) | set(rules.OF_CALL)
    assert set(all_doors()) >= rules.ALWAYS_REFUSED


def test_a_function_without_checks_is_found() -> None:
    def careless(ridge: float) -> float:
        return 1.0 / ridge

    door = Door("careless", lambda: (careless, {"ridge": 1.0}), {"ridge": inspect.Parameter.empty}, {})
    found = failures(door, 1)
    assert any("zero): ZeroDivisionError" in line for line in found)
    assert any("nan): accepted" in line for line in found)
