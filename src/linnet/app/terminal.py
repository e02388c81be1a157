"""Text for a terminal: lines that fit its width, and characters that its encoding has."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO, cast

_LEAST = 20  # columns; in fewer nothing can be read
_DEEPER = 2  # columns by which the rest of a long line is indented
_KEPT = "\u00a0"  # a space at which no line is broken
_ROW = re.compile(r"\S {2,}\S.*\S {2,}\S")  # of a table: two gaps or more
_ERRORS = "linnet.plain"
_PLAIN = str.maketrans({"−": "-", "×": "x", "±": "+-", "–": "-", "…": "...", "²": "^2", "³": "^3"})


def kept(text: object) -> str:
    """A path or other text that must stay on one line, whatever spaces are in it."""
    return str(text).replace(" ", _KEPT)


def folded(line: str, deeper: int = _DEEPER) -> str:
    """A line in as many as the width of the terminal asks for; 80 columns where the output is none."""
    indent = line[: len(line) - len(line.lstrip(" "))]
    width = max(shutil.get_terminal_size().columns, _LEAST)
    lines = [line]
    if len(line) > width > 2 * len(indent) and not _ROW.search(line):
        lines = textwrap.wrap(
            line.strip(" "), width, initial_indent=indent, subsequent_indent=indent + " " * deeper,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines).replace(_KEPT, " ").replace("\u202f", " ")


class _Folded:
    """A stream that writes lines to another, none wider than the terminal; in all else it is that other."""

    def __init__(self, screen: TextIO) -> None:
        self._screen, self._rest = screen, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        self._screen.write("".join(f"{folded(line)}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._screen.write(self._rest)
        self._screen.flush()
        self._rest = ""


@contextlib.contextmanager
def folding() -> Iterator[None]:
    """Fold what is printed to the width of the terminal."""
    stream = _Folded(sys.stdout)
    with contextlib.redirect_stdout(cast("TextIO", stream)):
        yield
    stream.flush()


def accept_any_character() -> None:
    """Print what the terminal's encoding lacks in plain characters, instead of failing."""
    # Such as `-` for a minus sign where a pipe on Windows takes cp1252; standard error writes escapes anyway.
    codecs.register_error(_ERRORS, _plain)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=_ERRORS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that cannot be encoded: ASCII that looks alike, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_alike, error.object[error.start : error.end])), error.end


def _alike(character: str) -> str:
    """One character in ASCII."""
    text = unicodedata.normalize("NFKD", character.translate(_PLAIN)).translate(_PLAIN)
    return text.encode("ascii", "ignore").decode() or "?"
