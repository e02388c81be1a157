"""The library's errors in the words of the command line: options where it speaks of Python's arguments."""

from __future__ import annotations

import re
from collections.abc import Collection

_LITERALS = {"True": "true", "False": "false"}
_CALL = re.compile(r"([\w.]+\((?:[^()]|\([^()]*\))*\))")
# What can only be done in Python, and what does the same here.
_PHRASES: tuple[tuple[str, str], ...] = (
    (r" \(in Python: [^)]*\)", ""),
    (r"keep it on disk with \S+\(.*?\), or ", ""),
    (r"linnet\.linearize\(\w+, (params=[^)]*)\)", r"\1"),
    (
        r"check x's shape, dtype \(x\.float\(\) for images\) and device",
        "give the network samples of its own shape; for images channels=, size= and mean= make it",
    ),
    (r"pass output=, for example output=lambda[^;]*", "pass output= with the name of a part"),
    (
        r"pass output=lambda r: r where[^;]*",
        "put a layer of your own behind an encoder that ends in an activation",
    ),
    (r"name the layer with linnet\.with_head\(.*?\), such as one of [^;]*; ", ""),
    (
        "pass a list of names to have them taken literally",
        "put a backslash before what is no pattern, as in params='0\\\\.weight'",
    ),
    (r'pass method="lanczos" with a smaller k, or pass form="trace"', "raise memory=, or lower samples="),
    (
        r"keep the fit in linnet(?: for it|, whose predictive\(\) has (?:the variance|it))",
        "take the spread of each prediction from linnet predict",
    ),
)


def in_options(text: str, own: Collection[str], others: Collection[str] = ()) -> str:
    """An error that speaks of Python's arguments, in the words of the command line."""
    for pattern, words in _PHRASES:
        text = re.sub(pattern, words, text)
    pieces = _CALL.split(text)  # calls at odd places: what is in their brackets is theirs
    return "".join(piece if at % 2 else _translated(piece, own, others) for at, piece in enumerate(pieces))


def option(name: str) -> str:
    """The option of a parameter."""
    return "--" + name.replace("_", "-")


def _translated(text: str, own: Collection[str], others: Collection[str]) -> str:
    """A piece of text without calls."""
    names = "|".join(sorted({*own, *others}, key=len, reverse=True)) or "(?!)"
    command = " of linnet adapt" if "adapt with" not in text else ""

    def of(name: str) -> str:
        return "" if name in own else command

    def spell(match: re.Match[str]) -> str:
        name, quoted, bare, other = match[1], match[3], match[4], match[6]
        if bare == "None":
            return f"no {option(name)}{of(name)}"
        value = quoted if bare is None else _LITERALS.get(bare, bare)
        more = f" or {other}" if other else ""
        return f"{option(name)}{' ' * bool(value)}{value or ''}{more}{of(name)}"

    value = r"(?:(['\"])(.*?)\2|(-?\w[\w.+-]*\w|\w|\[[^\]]*\]))?"
    text = re.sub(rf"(?<![\w.-])({names})={value}(?: or (['\"])([\w.-]+)\5)?", spell, text)
    # a subject, a list of what to leave out, and names that are no English words
    mine = "|".join(sorted(own, key=len, reverse=True)) or "(?!)"
    on_rank = r"on rank \d+: "
    text = re.sub(rf"^({on_rank})?({mine})(?= is | holds )", lambda m: f"{m[1] or ''}{option(m[2])}", text)
    left = "|".join(name for name in own if name != "out") or "(?!)"
    several = rf"(?:{left})(?:(?:, | and | or )(?:{left}))*"

    def listed(match: re.Match[str]) -> str:
        return re.sub(rf"\b({left})\b", lambda name: option(name[1]), match[0])

    text = re.sub(rf"\bleave (?:out {several}\b|{several} out\b)", listed, text)
    long = "|".join(name for name in {*own, *others} if "_" in name) or "(?!)"
    return re.sub(rf"(?<![\w.-])({long})\b(?![=\w(])", lambda m: f"{option(m[1])}{of(m[1])}", text)
