"""Safe reading of YAML settings files: size, depth and aliases are checked first.

The events of a YAML text come one at a time, so a file is judged without being built.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

from linnet.errors import InputError
from linnet.files import require_file

_WROTE = re.compile(r"# linnet [^\n]*\n#   linnet ([a-z]+) --config ")  # the head of a run's own settings
_LARGEST = 1 << 18  # bytes; the settings of a run take one kilobyte
_DEEPEST = 50  # lists and mappings in each other; the reader calls itself once for each
_TOO_DEEP = f"has more than {_DEEPEST} lists or mappings inside each other"
_DIGITS = 400  # of a number; those beyond 1e308 are none


def check_settings(command: str, file: str | os.PathLike[str]) -> None:
    """Refuse a file of settings that is no settings but an attack, or a mistake."""
    # What is no YAML passes: its reader says so best.
    path = require_file(file)
    if path.stat().st_size > _LARGEST:
        _refuse(path, f"has {path.stat().st_size:,} bytes", f"at most {_LARGEST:,} bytes of settings")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _refuse(path, "is no text in UTF-8", "a file of settings in YAML")
    wrote = _WROTE.match(text)
    if wrote and wrote[1] != command:
        raise InputError(
            f"--config {path} holds the settings of linnet {wrote[1]}",
            expected=f"settings of linnet {command}",
            remedy=f"run linnet {wrote[1]} --config {path}",
        )
    import yaml

    try:
        _check_events(path, yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # libyaml of PyYAML 6.0.4 ends there by itself
            _refuse(path, _TOO_DEEP, "plain settings")
        _refuse(path, "is no YAML that can be read", "a file of settings")


def _check_events(path: Path, events: Any) -> None:
    """Require values that are written out, not deep, and no number that Python cannot read."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("SequenceStartEvent", "MappingStartEvent")
        depth -= kind in ("SequenceEndEvent", "MappingEndEvent")
        if depth > _DEEPEST:
            _refuse(path, _TOO_DEEP, "plain settings")
        if kind == "AliasEvent":  # a few of them can stand for any number of values
            _refuse(path, f"repeats a value by the alias *{event.anchor}", "settings without aliases")
        digits = getattr(event, "value", "").lstrip("+-").replace("_", "")
        if len(digits) > _DIGITS and digits.isdigit():
            _refuse(path, f"holds a number of {len(digits):,} digits", "numbers below 1e308")


def _refuse(path: Path, what: str, expected: str) -> NoReturn:
    """Raise."""
    raise InputError(
        f"--config {path} {what}", expected, "use the run.yaml of a run, or what --print_config shows"
    )
