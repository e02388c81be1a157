"""Refusals: calls with the class of the error that they end in, and a word that its message must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from linnet.errors import LinnetError

Row = tuple[type[LinnetError], str, Callable[[], object]]


def refused(kind: type[LinnetError], call: Callable[[], object], *words: str) -> LinnetError:
    """The call raises an error of that very class that has the words and says what to do."""
    with pytest.raises(LinnetError) as caught:
        call()
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"
    assert error.expected, f"no expectation in: {error}"
    assert error.remedy, f"no remedy in: {error}"
    return error


def table(rows: Iterable[Row]) -> pytest.MarkDecorator:
    """The rows as cases of a test that takes ``row``."""
    return pytest.mark.parametrize(
        "row", [pytest.param(row, id=f"{row[0].__name__}-{row[1]}") for row in rows]
    )


def holds(row: Row) -> None:
    """A row is true."""
    kind, word, call = row
    refused(kind, call, word)
