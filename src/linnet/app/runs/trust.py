"""Trust: code named by a run folder or a settings file runs only if the user named or trusted it.

A run folder names the Python file that builds its network, and a settings file may. Whoever wrote them could
name any code, so digests of the runs that this user made or trusted, and of factories that were named, are
kept in a folder of this user: ``$LINNET_STATE``, else ``linnet`` in ``$XDG_STATE_HOME`` or in
``~/.local/state``. What is not known there needs ``--trust``, or the factory named on the command line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from linnet.errors import FileFormatError, InputError, ModelError
from linnet.files import read_json, write_json
from linnet.integrations.pretrained import BUILDERS, code_arguments

OWN = "code that you have named or trusted: a Python file can do whatever you can"
Standing = Literal["known", "changed", "unknown"]


def check_run(
    folder: Path, record: Mapping[str, Any], spec: str, arguments: Mapping[str, Any], named: bool
) -> None:
    """Require that opening a run executes no code that its user has neither named nor trusted."""
    standing = _standing(["run", record], spec)
    if standing == "known":
        return
    if asked := code_arguments(arguments):
        raise InputError(
            f"the run {folder} passes {_listed(asked)} to {spec}, which may run code of others",
            expected=OWN,
            remedy="where you trust whoever made the run, pass --trust (in Python: trust=True)",
        )
    file = factory_file(spec)
    if named or file is None:
        return
    if not file.is_file():
        raise ModelError(
            f"the run {folder} was made with {spec}, and there is no such file here",
            expected="the factory that the run was made with",
            remedy="name it with --model FILE:FACTORY (in Python: model=)",
        )
    what = f"opening {folder} would run {spec}, which you have not named"
    if standing == "changed":
        what = f"opening {folder} would run {spec}, which has changed since the run was made or trusted"
    raise InputError(f"{what}{_unwritable()}", expected=OWN, remedy=_remedy(file))


def check_settings(values: Mapping[str, Any], typed: Sequence[str] | None, trust: bool) -> None:
    """Require that settings from a file execute no code that its user has neither named nor trusted."""
    if (model := values.get("model")) is None:
        return
    spec = absolute_spec(model)
    file = factory_file(spec)
    asked = code_arguments(values.get("model_args") or {})
    own = () if typed is None else code_arguments(_typed_arguments(typed))
    if typed is not None and (asked := tuple(name for name in asked if name not in own)):
        raise InputError(
            f"the settings file passes {_listed(asked)} to {model}, which may run code of others",
            expected="such an argument on the command line, not in a file",
            remedy="give it yourself, as JSON after --model-args, or take it out of the file",
        )
    if typed is None or f"--model={model}" in typed or trust:
        _remember(["model", spec], spec)
    elif file is not None and file.is_file() and (known := _standing(["model", spec], spec)) != "known":
        why = "which you have not named" if known == "unknown" else "which has changed since you named it"
        raise InputError(
            f"the settings file would run {spec}, {why}{_unwritable()}", expected=OWN, remedy=_remedy(file)
        )


def remember_run(folder: Path) -> None:
    """Take a run for one that this user made or trusts."""
    record = read_json(folder / "run.json", "run")
    _remember(["run", record], record["origin"]["spec"])


def absolute_spec(spec: str) -> str:
    """A network's name that means the same in every folder."""
    source, colon, name = spec.rpartition(":")
    if colon and spec.partition(":")[0] not in BUILDERS:
        return f"{Path(source).resolve()}:{name}"
    return spec


def factory_file(spec: str) -> Path | None:
    """The Python file that a network's name stands for."""
    source, colon, _ = spec.rpartition(":")
    return Path(source) if colon and spec.partition(":")[0] not in BUILDERS else None


def state_folder() -> Path | None:
    """The folder of this user in which linnet keeps what it must remember; None for a user without a home."""
    if given := os.environ.get("LINNET_STATE"):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, by the XDG specification
        return Path(base) / "linnet"
    try:
        return Path.home() / ".local" / "state" / "linnet"
    except RuntimeError:
        return None


def _remember(subject: object, spec: str) -> None:
    """Keep the digest of a subject with that of its code; without a folder to keep it in, do not."""
    place, file = _place(subject), factory_file(spec)
    if place is None or (file is not None and not file.is_file()):
        return
    with suppress(OSError, InputError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(place, {"spec": spec, "code": _code(spec)}, kind="trust")


def _standing(subject: object, spec: str) -> Standing:
    """Whether a subject is known, and its code the same as then."""
    place = _place(subject)
    if place is None or not place.is_file() or not _is_own(place.parent):
        return "unknown"
    try:
        kept = read_json(place, "trust")
    except FileFormatError:
        return "unknown"
    return "known" if kept == {"spec": spec, "code": _code(spec)} else "changed"


def _place(subject: object) -> Path | None:
    """The file that stands for a subject."""
    folder = state_folder()
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return None if folder is None else folder / "trusted" / f"{name}.json"


def _is_own(folder: Path) -> bool:
    """Whether nobody but this user can write to a folder."""
    if os.name != "posix":
        return True
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _code(spec: str) -> str:
    """SHA-256 of a factory's file; empty for a library's network, or where it cannot be read."""
    file = factory_file(spec)
    with suppress(OSError):
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    return ""


def _unwritable() -> str:
    """Why nothing is known, where this user's folder is the cause."""
    folder = state_folder()
    if folder is None:
        return " (what you trust cannot be remembered: you have no home folder; set LINNET_STATE)"
    trusted = folder / "trusted"
    if trusted.is_dir() and not _is_own(trusted):
        return f" (what you trust is not looked up: others may write to {trusted})"
    above = next(place for place in (trusted, *trusted.absolute().parents) if place.exists())
    if not os.access(above, os.W_OK):
        return f" (what you trust cannot be remembered: {above} cannot be written; set LINNET_STATE)"
    return ""


def _remedy(file: Path) -> str:
    """The remedy that allows the code."""
    return (
        f"read {file}; where you trust it, pass --trust (in Python: trust=True), "
        "or name it yourself with --model FILE:FACTORY"
    )


def _typed_arguments(words: Sequence[str]) -> dict[str, Any]:
    """The factory's arguments that stand on the command line."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        with suppress(ValueError):
            value = json.loads(text)
            if name == "--model_args" and isinstance(value, dict):
                found |= value
            elif name.startswith("--model_args."):
                found[name.removeprefix("--model_args.")] = value
    return found


def _listed(names: tuple[str, ...]) -> str:
    """Names in a sentence."""
    return ", ".join(names)
