"""Sample ids: parsing what users type, and formatting samples for display."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NoReturn

import numpy as np

from linnet.errors import InputError

Array = np.ndarray[Any, Any]
LISTED = 20  # samples named in the terminal; result.json names all
_SHOWN = 4  # readings of a word, or ids of a kind, in an error
_DIGITS = 18  # no number of a sample has more


def answer_in_words(answer: Any, classes: Sequence[str] | None) -> str:
    """A label or target as people know it."""
    if classes is not None:
        return classes[int(answer)]
    return ", ".join(f"{float(value):.4g}" for value in np.reshape(answer, -1))


def find_samples(
    names: Sequence[str],
    ids: Sequence[str],
    answers: Array | None,
    classes: Sequence[str] | None,
    kind: str,
    others: Mapping[str, Collection[str]] | None = None,
) -> list[int]:
    """The positions of samples that a user named."""
    # An id is taken first; else the end of one, such as a file's name, where it is the end of one alone. A
    # bare number is taken where the number in an id and the position do not mean two samples, and a position
    # alone where ids have no numbers.
    if not names:
        raise InputError("ids is empty", f"the ids of one or more {kind}", f"name them, such as {ids[0]}")
    table = _Table(ids, answers, classes, kind, others or {})
    found = [table.find(name) for name in names]
    place, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"ids holds {ids[place]} {'twice' if count == 2 else f'{count} times'}",
            expected="each sample once",
            remedy="leave the others out",
        )
    return found


@dataclass(frozen=True, eq=False)
class _Table:
    """Samples in which ids are looked up."""

    ids: Sequence[str]
    answers: Array | None
    classes: Sequence[str] | None
    kind: str
    others: Mapping[str, Collection[str]]

    @cached_property
    def places(self) -> dict[str, int]:
        """The position of each id."""
        return {name: place for place, name in enumerate(self.ids)}

    @cached_property
    def ends(self) -> dict[str, list[int]]:
        """The positions of the ids that end alike: behind the first folder, behind all, and in a number."""
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.ids):
            for end in {name.partition("/")[2], PurePosixPath(name).name, _plain(_last(name))} - {""}:
                found.setdefault(end, []).append(place)
        return found

    def find(self, name: str) -> int:
        """The position of one sample."""
        if name in self.places:
            return self.places[name]
        number = _plain(name)
        places = [*self.ends.get(name, ()), *self.ends.get(number, ())]
        readings: dict[int, str] = {at: f"{self.ids[at]} (position {at}{self._said(at)})" for at in places}
        if number and int(number) < len(self.ids):
            at = int(number)
            if not readings and _plain(_last(self.ids[at])):  # numbered ids, and the number is none of them
                raise InputError(
                    f"{name} is in no id here; position {at} is {self.ids[at]}{self._said(at)}",
                    expected="the id of one sample",
                    remedy=f"write {self.ids[at]} if that is meant",
                )
            readings.setdefault(at, f"position {at} ({self.ids[at]}{self._said(at)})")
        if len(readings) == 1:
            return next(iter(readings))
        if not readings:
            self._refuse(name)
        written = _some([self.ids[at] for at in readings])
        raise InputError(
            f"{name} could be {_some(list(readings.values()))}", "the id of one sample", f"write {written}"
        )

    def _said(self, at: int) -> str:
        """A sample's answer, for an error."""
        if self.answers is None:
            return ""
        word = "target" if self.classes is None else "label"
        return f", {word} {answer_in_words(self.answers[at], self.classes)}"

    def _refuse(self, name: str) -> NoReturn:
        """Raise the error for a name that means nothing."""
        close = [
            one
            for one in difflib.get_close_matches(name, self.ids, 1)
            if _unnumbered(one) != _unnumbered(name)
        ]
        known = next((kind for kind, ids in self.others.items() if name in ids), None)
        what = f"one of the {known}, and " if known else ""
        raise InputError(
            f"ids holds {name}, which is {what}none of the {len(self.ids)} {self.kind}",
            expected=f"ids as the report and result.json name them: {', '.join(self.ids[:_SHOWN])}, ...",
            remedy=f"did you mean {close[0]}?" if close else "copy one from the report",
        )


def _last(name: str) -> str:
    """The last word of an id, without the suffix of a file."""
    return PurePosixPath(name).stem.rpartition(" ")[2]


def _unnumbered(name: str) -> str:
    """An id less its numbers: one number is no misspelling of another."""
    return "".join(letter for letter in name if not letter.isdecimal())


def _plain(word: str) -> str:
    """A whole number without zeros before it; nothing for other words."""
    return str(int(word)) if word.isdecimal() and word.isascii() and len(word) <= _DIGITS else ""


def _some(words: list[str]) -> str:
    """Alternatives; of many the first and the last, which is the position."""
    shown = words if len(words) <= _SHOWN else [*words[: _SHOWN - 1], words[-1]]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def named(
    ids: Sequence[str], answers: Array | None, classes: Sequence[str] | None, positions: Sequence[int]
) -> list[dict[str, Any]]:
    """Samples as plain values, for the result file."""

    def answer(at: int) -> dict[str, Any]:
        if answers is None:
            return {}
        if classes is not None:
            return {"label": classes[int(answers[at])]}
        values = np.reshape(answers[at], -1).tolist()
        return {"target": values[0] if len(values) == 1 else values}

    return [{"id": ids[at], **answer(at)} for at in positions]


def lines_of(samples: Sequence[dict[str, Any]], where: str = "result.json") -> list[str]:
    """Samples of a result for the terminal, one a line."""
    shown = samples[:LISTED]
    width = max((len(one["id"]) for one in shown), default=0)
    lines = []
    for one in shown:
        known = {key: value for key, value in one.items() if key != "id"}
        told = [
            f"{key} {value if isinstance(value, str) else answer_in_words(value, None)}"
            for key, value in known.items()
        ]
        lines.append("  ".join([f"  {one['id']:<{width}}", *told]).rstrip())
    rest = len(samples) - len(shown)
    return [*lines, *([f"  and {rest} more, named in {where}"] if rest else [])]
