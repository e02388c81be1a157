"""The model card of a folder: what the model says of itself, what the files hold, and how it is loaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linnet import params
from linnet.distribution import install_command
from linnet.memory import format_bytes
from linnet.shown import in_line

CARD = "README.md"
_NAMES = 6  # of tensors in a row of the table
_LARGEST = 1 << 20  # bytes of a page that linnet wrote
_SEAL = re.compile(r"<!-- as linnet wrote it; once edited, it stays: sha256 ([0-9a-f]{64}) -->\n\Z")


def check_card(card: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of a card's metadata that somebody gave."""
    remedy = 'pass card={"license": "mit"}, say'
    given = dict(params.instance("card", {} if card is None else card, Mapping, "a dict", remedy))
    for name, value in given.items():
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][\w-]*", name)):
            params.refuse("card", card, "names of letters, digits, - and _", remedy)
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            params.refuse(f'card["{name}"]', value, "texts, numbers, and lists and dicts of them", remedy)
    return given


def card_of(
    content: Mapping[str, Any], about: str, address: str, sizes: Mapping[str, int], entries: Mapping[str, Any]
) -> str:
    """The page of a folder."""
    labels: Mapping[str, Any] = content["files"]
    metadata = {"library_name": "linnet", "tags": ["linnet", content["holds"]], **entries}
    block = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in metadata.items()]
    lines = [
        "---", *block, "---", "",
        f"# {content['class']}", "",
        about.replace("``", "`"), "",
        *_paragraphs(labels, content["linnet"]),
        "```python",
        f"import linnet  # {install_command()}",
        "",
        f"model = linnet.load({json.dumps(address)}, network)",
        "```", "",
        "## What it says of itself", "",
        "| | |", "|---|---|",
        *(f"| {_safe(name)} | {_safe(value)} |" for name, value in _rows(content["summary"])), "",
        "These are figures of its making. No score on other data is among them.", "",
        "## Files", "",
        "| file | size | tensors |", "|---|---:|---|",
        *(f"| {f} | {format_bytes(size)} | {_tensors(labels.get(f))} |" for f, size in sizes.items()),
    ]  # fmt: skip
    text = "\n".join(lines) + "\n\n"
    return f"{text}<!-- as linnet wrote it; once edited, it stays: sha256 {_digest(text)} -->\n"


def is_own_card(path: Path) -> bool:
    """Whether a page may be written anew: there is none, or it is as linnet wrote it."""
    if not path.exists():
        return True
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    text = path.read_bytes().decode("utf-8", "replace")
    seal = _SEAL.search(text)
    return seal is not None and seal[1] == _digest(text[: seal.start()])


def _paragraphs(labels: Mapping[str, Any], version: str) -> list[str]:
    """Who wrote it, what it takes to load it, and what it gives away."""
    names = [name for label in labels.values() for name in label["order"]]
    has_network = any(name.startswith("network/") for name in names)
    has_samples = any(name == "x" or name.startswith("x/") for name in names)
    network = (
        "It holds the weights of its network; loading it takes a network of the same architecture."
        if has_network
        else "It belongs to one network, whose weights are not in this folder: loading it takes that "
        "network, with the same weights, and refuses any other."
    )
    samples = (
        "**The training samples are in it**, inputs and targets as they were given to linnet: whoever has "
        "these files has them."
        if has_samples
        else "No training sample is in it, but its numbers depend on each of them."
    )
    return [f"Saved by linnet {version}. {network}", "", samples, ""]


def _rows(told: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The rows of a summary: mappings entry by entry, lists of records left to ``linnet.json``."""
    for name, value in told.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{before}{name}: ")
        elif isinstance(value, list | tuple):
            texts = [in_line(part) for part in value if not isinstance(part, Mapping)]
            if texts:
                yield f"{before}{name}", "; ".join(texts)
        elif value is not None and value != "":
            yield f"{before}{name}", in_line(value)


def _tensors(label: Mapping[str, Any] | None) -> str:
    """The names of a file's tensors, in a cell."""
    if label is None:
        return "none: everything else"
    names = [_safe(name) for name in label["order"]]
    more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return ", ".join([*names[:_NAMES], *more])


def _safe(text: str) -> str:
    """Text in a line of Markdown, without any markup of its own."""
    line = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def _digest(text: str) -> str:
    """The checksum of a page."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
