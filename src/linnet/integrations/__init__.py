"""Adapters to optional packages, imported only when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from linnet.distribution import importing, install_command

Bases = Callable[[], tuple[type, ...]]


def classes(module: str, extra: str, expected: str, own: Mapping[str, tuple[type, Bases]]) -> Any:
    """``__getattr__`` of a module whose classes, by name, extend those of an optional package."""

    @cache
    def found(name: str) -> Any:
        """A class, made when it is first asked for."""
        if name not in own:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        cls, bases = own[name]
        with importing(expected, name, expected, install_command(extra)):
            others = bases()
        return type(name, (cls, *others), {"__module__": module, "__doc__": cls.__doc__})

    return found
