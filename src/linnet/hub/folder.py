"""A saved model as a folder to share: safetensors, ``linnet.json`` with everything else, and a model card.

The tensors and their labels are those of ``save``; they stand in other files. A folder is written aside, and
``linnet.json``, which has the checksums of the others, moves in last: without it, or with that of another
writing, nothing is loaded. Then go the files that only the old one named.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from linnet import __version__
from linnet.disk import refuse_write
from linnet.errors import FileFormatError, InputError
from linnet.files import (
    LABELS,
    LABELS_KIND,
    as_path,
    folder_aside,
    force_to_disk,
    has_label,
    labels_apart,
    read_labels,
    write_json,
    write_text,
)
from linnet.hub.card import CARD, card_of, check_card, is_own_card


class Kept(Protocol):
    """What can be saved and says what it is."""

    def save(self, directory: str | Path) -> Path:
        """Write safetensors files to a folder."""

    def summary(self) -> dict[str, Any]:
        """What it is, in numbers and text."""


def write_folder(
    directory: str | Path,
    model: Kept,
    card: Mapping[str, Any] | None = None,
    address: str = "path/of/this/folder",
) -> Path:
    """Write a folder to share; what is in it stays as it was until everything is on the disk."""
    # A page that somebody has edited stays.
    place, entries = as_path(directory), check_card(card)
    with _aside(place) as aside:
        with labels_apart() as labels:
            model.save(aside)
        name, told = type(model).__name__, model.summary()
        holds = list(labels.values())[-1]["kind"]  # a part, such as a posterior's curvature, comes before
        content = {"class": name, "holds": holds, "linnet": __version__, "summary": told, "files": labels}
        write_json(aside / LABELS, content, LABELS_KIND)
        sizes = {file: (aside / file).stat().st_size for file in (*labels, LABELS)}
        about = (inspect.getdoc(type(model)) or name).splitlines()[0]
        write_text(aside / CARD, card_of(content, about, address, sizes, entries))
        page, old = [CARD] if is_own_card(place / CARD) else [], named_files(place / LABELS)
        _move([*labels, *page, LABELS], aside, place)
        for file in set(old) - set(labels):
            if not has_label(place / file):  # as a plain save gives it
                with suppress(OSError):  # nothing reads it any more
                    (place / file).unlink()
    return place


def named_files(labels: Path) -> list[str]:
    """The files of tensors that a ``linnet.json`` names."""
    try:
        return list(read_labels(labels)["files"])
    except (FileFormatError, InputError):
        return []


def described(directory: Path, known: tuple[str, ...]) -> Path | None:
    """The main file of a folder to share."""
    labels = directory / LABELS
    if not labels.is_file():
        return None
    content = read_labels(labels)
    holds, files = content.get("holds"), list(content["files"])
    if holds not in known or f"{holds}.safetensors" not in files:
        raise FileFormatError(
            f"{labels} describes a {holds!r} in {', '.join(files) or 'no file'}",
            expected=f"one of {', '.join(known)}, with its file",
            remedy="upgrade linnet, or save the folder again",
        )
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise FileFormatError(
            f"{directory} lacks {', '.join(missing)}, which its {LABELS} names",
            expected="all files of one folder, as they were saved",
            remedy="download or save the whole folder again",
        )
    return directory / f"{holds}.safetensors"


@contextmanager
def _aside(place: Path) -> Iterator[Path]:
    """A folder inside another that nobody reads, gone after the block; so is the other if nothing came in."""
    with ExitStack() as stack:
        try:
            if not place.exists():
                stack.callback(_remove_empty, place)
            elif not place.is_dir():
                raise InputError(f"directory {place} is a file", "a folder", "name a folder")
            aside = stack.enter_context(folder_aside(place / "linnet"))
        except OSError as error:
            refuse_write(place, error)
        yield aside


def _remove_empty(place: Path) -> None:
    """Remove a folder, unless something is in it."""
    with suppress(OSError):
        place.rmdir()


def _move(files: list[str], aside: Path, place: Path) -> None:
    """Move files that are complete into their folder, the last one last."""
    for name in files:
        if (place / name).is_dir():
            raise InputError(f"{place / name} is a folder", "a file to write", "remove or rename it")
    try:
        for name in files:
            os.replace(aside / name, place / name)
        if os.name == "posix":
            force_to_disk(place)
    except OSError as error:
        refuse_write(place, error)
